"""The mesh in force, and the part that a MeshResource gives each of its axes."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, fields

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType
from jax.typing import DTypeLike

from te_jax.core.check import BOOL, NONE, STRING, Kind, KnownFields, check, integer, is_dtype
from te_jax.core.scope import Scope

_SUMMED_IN = NONE | Kind("jnp.bfloat16", is_dtype, lambda dtype: jnp.dtype(dtype) == jnp.bfloat16)
_AXIS = Kind("the name of a mesh axis, or None", (NONE | STRING).is_type, lambda axis: axis != "")


@dataclass(frozen=True)
class MeshResource(KnownFields):
    """Which mesh axis serves each kind of parallelism; None where none does.

    dp_resource:   Data parallelism: splits the batch.
    tp_resource:   Tensor parallelism: splits heads and the hidden width.
    tpsp_resource: Tensor and sequence parallelism: splits what tp splits, and the sequence outside the GEMMs (next to
                   cp, if both are there). Only one of tp and tpsp may have more than one device.
    fsdp_resource: Fully sharded data parallelism: splits the batch (next to dp, if both are there) and the weights.
    pp_resource, cp_resource: Pipeline and context parallelism (the sequence in attention).
    ep_resource:   Expert parallelism: divides the experts of MoEBlock, and splits the batch. It may be the axis of dp
                   or fsdp.
    gradient_dtype: The type in which devices add up the gradients of f32 weights of dense layers under a recipe:
                   jnp.bfloat16, for half the bytes, or None for f32, which the gradient is in any case. Each device
                   rounds its sum once, also where nothing is to be added. Weights of experts, the collection wgrads,
                   the head's loss and what is inside a `jax.shard_map`, whose sums are its own, are as without it.
    tpsp_pieces:   Under sequence parallelism dense layers under a recipe multiply tokens in this many pieces: one
                   travels while the next is multiplied. Numbers are as without it where a GEMM adds up in one order
                   for any number of rows. 1: all at once, as in layers whose tokens on a device these do not divide
                   (said once), products out of FP8, projections behind no norm of their own, sequences that cp_resource
                   divides, too, and inside a `jax.shard_map`. The rows of the batch that a device has are the number
                   that copies least.
    keep_gathered_weights: Whether dense layers under a recipe keep what fprop gathers of a weight over fsdp_resource
                   until dgrad reads it: one all-gather of FP8 instead of two. From a layer's forward pass to its
                   backward pass each device holds a byte of each number of its weights, instead of a byte of each
                   number of its part. `jax.checkpoint` gathers again, unless its policy saves
                   GEMM and KERNEL of `te_jax.checkpoint_policies`. It changes nothing for weights in MXFP8, whose
                   layouts have scales of their own (said once), products out of FP8, weights of experts, the head's
                   loss, and a layer inside a `jax.shard_map` over fsdp_resource.

    Raises TypeError for a field of another type, ValueError for an axis that two other fields name, for another dtype,
    for pieces below 1, for several without tpsp_resource, and for keep_gathered_weights without fsdp_resource.
    """

    dp_resource: str | None = None
    tp_resource: str | None = None
    tpsp_resource: str | None = None
    fsdp_resource: str | None = None
    pp_resource: str | None = None
    cp_resource: str | None = None
    ep_resource: str | None = None
    gradient_dtype: DTypeLike | None = None
    tpsp_pieces: int = 1
    keep_gathered_weights: bool = False

    def __post_init__(self) -> None:
        check("MeshResource", "gradient_dtype", self.gradient_dtype, _SUMMED_IN)
        check("MeshResource", "tpsp_pieces", self.tpsp_pieces, integer(1))
        if self.tpsp_pieces > 1 and self.tpsp_resource is None:
            raise ValueError(
                f"MeshResource: tpsp_pieces is {self.tpsp_pieces}, but tpsp_resource None: no tokens cross; name the "
                "mesh axis of sequence parallelism, or leave tpsp_pieces out."
            )
        check("MeshResource", "keep_gathered_weights", self.keep_gathered_weights, BOOL)
        if self.keep_gathered_weights and self.fsdp_resource is None:
            raise ValueError(
                "MeshResource: keep_gathered_weights is True, but fsdp_resource None: no weights are gathered; name "
                "the mesh axis of fully sharded data parallelism, or leave keep_gathered_weights out."
            )
        if self.gradient_dtype is not None:  # One value, and one hash, for each of a dtype's names.
            object.__setattr__(self, "gradient_dtype", jnp.dtype(self.gradient_dtype))
        for name, axis in self.axes.items():
            check("MeshResource", name, axis, _AXIS)
        self._check_roles()

    @property
    def axes(self) -> dict[str, str | None]:
        """The mesh axis of each field that names one."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name.endswith("_resource")}

    def _check_roles(self):
        roles = {}
        for name, axis in self.axes.items():
            if name == "ep_resource" and axis in (None, self.dp_resource, self.fsdp_resource):
                continue
            if axis is not None and roles.setdefault(axis, name) != name:
                raise ValueError(
                    f"MeshResource: {roles[axis]} and {name} are both {axis!r}; give each an axis of its own, "
                    "or leave one None (fsdp shards the batch as well, tpsp is tensor parallelism too)."
                )


ShardingResource = MeshResource  # The name in older code, which knows the first two fields.

# The value is part of the jit cache key: a function traced under another MeshResource is traced again.
_mesh_resource = Scope("te_jax.sharding.global_shard_guard")


def current_mesh_resource() -> MeshResource | None:
    """The MeshResource in force, None if there is none.

    Raises RuntimeError where another task or thread entered it.
    """
    return _mesh_resource.value


@contextlib.contextmanager
def global_shard_guard(resource: MeshResource | None) -> Iterator[None]:
    """Puts `resource` in force within a `with` block; None leaves the outer one in force.

    The block belongs to the task and the thread that enter it, as a block of `te_jax.autocast` does.

    Raises TypeError for another value, ValueError if a mesh is in force and lacks one of the axes.
    """
    if resource is None:
        yield
        return
    if not isinstance(resource, MeshResource):
        raise TypeError(f"global_shard_guard: resource is {resource!r}; pass a te_jax.MeshResource.")
    check_mesh_resource(resource)
    with _mesh_resource(resource):
        yield


def stage_axes() -> frozenset[str]:
    """The mesh axis whose devices hold different layers (pp_resource), unless it has one device: the devices along it
    share no statistics of tensors."""
    resource = current_mesh_resource()
    axis = None if resource is None else resource.pp_resource
    return frozenset(() if axis is None or mesh_sizes().get(axis) == 1 else (axis,))


def mesh_sizes() -> dict[str, int]:
    """The axes of the mesh in force, and how many devices each has; {} without a mesh."""
    return dict(jax.sharding.get_abstract_mesh().shape)


def auto_mesh() -> AbstractMesh | None:
    """The mesh in force, if all its axes are Auto: constraints act only there. Else None."""
    mesh = jax.sharding.get_abstract_mesh()
    return mesh if set(mesh.axis_types) == {AxisType.Auto} else None


def check_mesh_resource(resource: MeshResource) -> None:
    """Raises ValueError if the mesh in force lacks an axis of `resource`, or tp and tpsp both have several devices."""
    sizes = mesh_sizes()
    if not sizes:
        return
    for name, axis in resource.axes.items():
        if axis is not None and axis not in sizes:
            raise ValueError(
                f"MeshResource: {name} is {axis!r}, but the mesh in force has the axes {tuple(sizes)}; "
                "name one of them, or None."
            )
    tp, tpsp = resource.tp_resource, resource.tpsp_resource
    if sizes.get(tp, 1) > 1 and sizes.get(tpsp, 1) > 1:
        raise ValueError(
            f"MeshResource: tp_resource {tp!r} has {sizes[tp]} devices and tpsp_resource {tpsp!r} has "
            f"{sizes[tpsp]}; only one of the two may have more than one."
        )


def is_manual(axis: str) -> bool:
    """Whether a `jax.shard_map` around has cut arrays along mesh axis `axis`."""
    return axis in jax.sharding.get_abstract_mesh().manual_axes


def check_in_mesh(given: str, axis: str) -> None:
    """Raises ValueError, which begins with `given`, if the mesh in force lacks `axis`, or there is none."""
    sizes = mesh_sizes()
    if axis not in sizes:
        has = f"has the axes {tuple(sizes)}" if sizes else "is none; enter jax.set_mesh(mesh)"
        raise ValueError(f"{given}, but the mesh in force {has}.")


def check_cuts_sequence_alone(given: str, axis: str, resource: MeshResource | None) -> None:
    """Raises ValueError, which begins with `given`, if `axis` splits the sequence in attention and another axis too."""
    if resource is None or mesh_sizes().get(axis, 1) == 1:
        return
    for name in ("dp_resource", "fsdp_resource", "tp_resource", "tpsp_resource", "pp_resource"):
        if getattr(resource, name) == axis:
            raise ValueError(f"{given}, and {name} is the same mesh axis; an axis cuts one of them: name another.")


def check_current_mesh_resource() -> None:
    """Checks the MeshResource in force (`check_mesh_resource`), since its mesh may have been set after it."""
    if (resource := current_mesh_resource()) is not None:
        check_mesh_resource(resource)
