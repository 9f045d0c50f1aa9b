"""Where batch, parameters and optimizer state lie on several devices: `--mesh dp=2,fsdp=2,tp=2 --cp 2`.

dp:   data parallel: the batch is divided, parameters are on every device.
fsdp: fully sharded data parallel: the batch is divided, and so are parameters and the optimizer's moments.
ep:   expert parallel: the batch is divided, and the experts of each layer; tokens are sent to their experts.
cp:   context parallel: the sequence is divided. Only attention and Mamba-2 need more of it than a device has; te_jax's
      do that.
tp:   tensor parallel: heads and the MLP's width are divided; with --sequence-parallel, outside of the GEMMs, the
      sequence too (each part of it, with cp).
"""

import contextlib
import math
from collections.abc import Iterator

import flax.linen as nn
import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import te_jax as te
from te_jax.sharding import extend_logical_axis_rules, global_shard_guard, reorder_causal_load_balancing

from .config import MESH_AXES

ROWS = ("dp", "fsdp", "ep")  # what divides the batch


def make(args) -> Mesh | None:
    """The mesh of --mesh over all devices of all processes, axes that it leaves out of size 1 (cp, ep: not there); None
    without --mesh.

    Raises ValueError if it does not take all devices, or several processes run without it.
    """
    found, processes = jax.device_count(), jax.process_count()
    if args.mesh is None:
        if processes > 1:
            raise ValueError(f"{processes} processes, but no --mesh: give one over all {found} devices: fsdp={found}")
        return None
    axes = tuple(axis for axis in MESH_AXES if axis not in ("cp", "ep") or args.mesh.get(axis, 1) > 1)
    sizes = tuple(args.mesh.get(axis, 1) for axis in axes)
    if math.prod(sizes) != found:
        raise ValueError(
            f"--mesh {described(args.mesh)} takes {math.prod(sizes)} devices, but {processes} process(es) have {found} "
            f"{jax.default_backend()} devices: change the sizes, or on a CPU give --devices {math.prod(sizes)}"
        )
    # Auto axes: what the logical axis names ask for are constraints, which Flax's boxes of parameters refuse under
    # Explicit axes. There the model would have to say in types what it leaves to the compiler here: where embeddings,
    # logits and the loss lie, and the sequence before the first layer.
    return jax.make_mesh(sizes, axes, axis_types=(AxisType.Auto,) * len(sizes))


def described(sizes: dict[str, int]) -> str:
    return ",".join(f"{axis}={size}" for axis, size in sizes.items())


def check(args) -> None:
    """ValueError where batch, sequence or model do not divide by the sizes of --mesh."""
    if args.mesh is None:
        return
    model = args.model
    keys = (model.gqa_groups or model.heads) * model.hidden // model.heads
    fsdp, tp, ep = (args.mesh.get(axis, 1) for axis in ("fsdp", "tp", "ep"))
    rows, cp = args.mesh.get("dp", 1) * fsdp * ep, args.cp
    of_sequence = ("cp x " if cp > 1 else "") + "tp with --sequence-parallel"
    attends, by_cp = model.layers_with_attention > 0, ("cp", cp) if model.ssm else ("2 x cp", 2 * cp)  # see `Feed`
    for what, size, by, parts in (
        ("--batch-size is", args.batch_size, "dp x fsdp" + (" x ep" if ep > 1 else ""), rows),
        ("--moe is", model.experts.count if model.experts else ep, "ep", ep),
        (f"preset {args.preset} has a hidden size of", model.hidden, "fsdp", fsdp),
        (f"preset {args.preset} has attention heads:", model.heads, "tp", tp if attends else 1),
        # Heads of keys that tp does not divide are copied.
        (f"preset {args.preset} has keys of a width of", keys, "tp", tp if attends else 1),
        (f"--mixer {args.mixer} has heads:", model.ssm_heads if model.ssm else tp, "tp", tp),
        (f"preset {args.preset} has an MLP width of", model.ffn, "tp", tp),
        ("--seq-len is", args.seq_len, by_cp[0], by_cp[1] if cp > 1 else 1),
        ("--seq-len is", args.seq_len, of_sequence, cp * tp if args.sequence_parallel else 1),
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
    tensor = "tpsp_resource" if sequence_parallel else "tp_resource"
    cp, ep = (axis if axis in mesh.axis_names else None for axis in ("cp", "ep"))
    of_batch = dict(dp_resource="dp", fsdp_resource="fsdp", ep_resource=ep)
    resource = te.MeshResource(**of_batch, cp_resource=cp, **{tensor: "tp"})
    with jax.set_mesh(mesh), global_shard_guard(resource):
        with nn.logical_axis_rules(extend_logical_axis_rules(())):
            yield


def shardings(boxed, mesh: Mesh):
    """NamedShardings of a tree: of what is in the boxes of parameters by their logical axis names, of all else on every
    device."""
    return nn.logical_to_mesh_sharding(nn.get_partition_spec(boxed), mesh)


class Feed:
    """Batches of this process -> batches of all. `rows`: the rows of a global batch that this process reads.

    Where a mesh axis cp divides the sequence, a batch is no array of windows, but tokens and targets; with `balanced`
    in an order that gives each device an early and a late part of a sequence: causal attention then has as much to do
    on each.
    """

    def __init__(self, mesh: Mesh | None, batch_size: int, balanced: bool = True):
        self.mesh, self.cp, self.balanced = mesh, 1 if mesh is None else mesh.shape.get("cp", 1), balanced
        self.by = () if mesh is None else tuple(axis for axis in ROWS if axis in mesh.axis_names)
        self.batch_size, self.rows = batch_size, np.arange(batch_size)
        if mesh is not None:
            mine = NamedSharding(mesh, PartitionSpec(self.by)).addressable_devices_indices_map((batch_size,)).values()
            self.rows = np.unique(np.concatenate([self.rows[index] for index in mine]))

    def __call__(self, windows: np.ndarray):
        """u8[len(rows), s + 1] -> the global u8[batch_size, s + 1]; with cp (tokens, targets) u8[batch_size, s]."""
        if self.mesh is None:
            return windows
        if self.cp == 1:
            return self._placed(windows, PartitionSpec(self.by))
        pair = windows[:, :-1], windows[:, 1:]
        in_order = lambda x: reorder_causal_load_balancing(x, self.cp) if self.balanced else x
        return tuple(self._placed(in_order(x), PartitionSpec(self.by, "cp")) for x in pair)

    def _placed(self, rows: np.ndarray, spec: PartitionSpec) -> jax.Array:
        shape = (self.batch_size, *rows.shape[1:])  # of whole sequences: each device takes its part of them
        return jax.make_array_from_process_local_data(NamedSharding(self.mesh, spec), rows, shape)
