"""Where batch, parameters and optimizer state lie on several devices: `--mesh dp=2,fsdp=2,tp=2`.

dp:   data parallel: the batch is divided, parameters are on every device.
fsdp: fully sharded data parallel: the batch is divided, and so are parameters and the optimizer's moments.
tp:   tensor parallel: heads and the MLP's width are divided; with --sequence-parallel, outside of the GEMMs, the
      sequence too.
"""

import contextlib
import math
from collections.abc import Iterator

import flax.linen as nn
import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import te_jax as te
from te_jax.sharding import extend_logical_axis_rules, global_shard_guard

from .config import MESH_AXES

ROWS = ("dp", "fsdp")  # what divides the batch


def make(args) -> Mesh | None:
    """The mesh of --mesh over all devices of all processes, axes that it leaves out of size 1; None without --mesh.

    Raises ValueError if it does not take all devices, or several processes run without it.
    """
    found, processes = jax.device_count(), jax.process_count()
    if args.mesh is None:
        if processes > 1:
            raise ValueError(f"{processes} processes, but no --mesh: give one over all {found} devices: fsdp={found}")
        return None
    sizes = tuple(args.mesh.get(axis, 1) for axis in MESH_AXES)
    if math.prod(sizes) != found:
        raise ValueError(
            f"--mesh {described(args.mesh)} takes {math.prod(sizes)} devices, but {processes} process(es) have {found} "
            f"{jax.default_backend()} devices: change the sizes, or on a CPU give --devices {math.prod(sizes)}"
        )
    # Auto axes: what the logical axis names ask for are constraints. Under Explicit axes Flax's boxes of parameters
    # refuse them, and te_jax's modules drop them, so that --sequence-parallel would not divide the sequence.
    return jax.make_mesh(sizes, MESH_AXES, axis_types=(AxisType.Auto,) * len(sizes))


def described(sizes: dict[str, int]) -> str:
    return ",".join(f"{axis}={size}" for axis, size in sizes.items())


def check(args) -> None:
    """ValueError where batch or model do not divide by the sizes of --mesh."""
    if args.mesh is None:
        return
    model, groups = args.model, args.model.gqa_groups or args.model.heads
    fsdp, tp = args.mesh.get("fsdp", 1), args.mesh.get("tp", 1)
    rows = args.mesh.get("dp", 1) * fsdp
    for what, size, by, parts in (
        ("--batch-size is", args.batch_size, "dp x fsdp", rows),
        (f"preset {args.preset} has a hidden size of", model.hidden, "fsdp", fsdp),
        (f"preset {args.preset} has attention heads:", model.heads, "tp", tp),
        (f"preset {args.preset} has groups of attention heads:", groups, "tp", tp),
        (f"preset {args.preset} has an MLP width of", model.ffn, "tp", tp),
        ("--seq-len is", args.seq_len, "tp with --sequence-parallel", tp if args.sequence_parallel else 1),
    ):
        if size % parts:
            raise ValueError(
                f"{what} {size}, which does not divide by {parts} ({by} of --mesh {described(args.mesh)}): change one"
            )
    if args.sequence_parallel and tp == 1:
        raise ValueError(
            f"--sequence-parallel divides the sequence by tp, which is 1 in --mesh {described(args.mesh)}: "
            "give tp=2 or more, or leave it out"
        )


@contextlib.contextmanager
def scope(mesh: Mesh | None, sequence_parallel: bool = False) -> Iterator[None]:
    """Within it te_jax's modules and parameters follow `mesh` by their logical axis names; None changes nothing."""
    if mesh is None:
        yield
        return
    # tpsp is tp with the sequence divided outside of the GEMMs.
    resource = te.MeshResource(
        dp_resource="dp", fsdp_resource="fsdp", **{"tpsp_resource" if sequence_parallel else "tp_resource": "tp"}
    )
    with jax.set_mesh(mesh), global_shard_guard(resource):
        with nn.logical_axis_rules(extend_logical_axis_rules(())):
            yield


def parameter_shardings(boxed, mesh: Mesh):
    """NamedShardings of parameters that are still in the boxes that hold their logical axis names."""
    return nn.logical_to_mesh_sharding(nn.get_partition_spec(boxed), mesh)


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


class Feed:
    """Batches of this process -> batches of all. `rows`: the rows of a global batch that this process reads."""

    def __init__(self, mesh: Mesh | None, batch_size: int):
        self.sharding = None if mesh is None else NamedSharding(mesh, PartitionSpec(ROWS))
        self.batch_size, self.rows = batch_size, np.arange(batch_size)
        if mesh is not None:
            mine = self.sharding.addressable_devices_indices_map((batch_size,)).values()
            self.rows = np.unique(np.concatenate([self.rows[index] for index in mine]))

    def __call__(self, windows: np.ndarray):
        """u8[len(rows), s + 1] -> the global u8[batch_size, s + 1]."""
        if self.sharding is None:
            return windows
        shape = (self.batch_size, *windows.shape[1:])
        return jax.make_array_from_process_local_data(self.sharding, windows, shape)
