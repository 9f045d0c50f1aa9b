"""The fields `context_parallel_*` of the modules: which mesh axis cuts the sequence, and where its tokens lie."""

from math import prod
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax.sharding import AxisType

from te_jax.flax._fields import STRATEGIES
from te_jax.flax._state import describe
from te_jax.ops.attention import SequenceDescriptor
from te_jax.ops.attention.mesh import Cut
from te_jax.sharding import (
    BATCH_AXES,
    HEAD_AXES,
    current_mesh_resource,
    logical_axis_map,
    reorder_causal_load_balancing,
)
from te_jax.sharding.resource import check_cuts_sequence_alone, check_in_mesh, is_manual


def _named_axis(module: nn.Module) -> str | None:
    field, resource = module.context_parallel_axis, current_mesh_resource()
    return field or (resource.cp_resource if field == "" and resource is not None else None)


def cutting_axis(module: nn.Module, needed: bool = False) -> str | None:
    """The mesh axis of several devices that cuts the sequence, by the field context_parallel_axis of `module` and the
    MeshResource in force. Without a mesh that is every axis where there is one device, and all that counts while
    `module` is initializing are shapes. needed: there must be a mesh that has the axis of the MeshResource.

    Raises ValueError for an axis that the mesh lacks, or that shards something else.
    """
    axis, field, mesh = _named_axis(module), module.context_parallel_axis, jax.sharding.get_abstract_mesh()
    if axis is None or (not mesh.axis_names and not field and not needed):
        return None
    given = f"context_parallel_axis is {axis!r}" if field else f"cp_resource of the MeshResource is {axis!r}"
    given = f"{describe(module)}: {given}"
    if not mesh.axis_names and (module.is_initializing() or jax.device_count() == 1):
        return None
    check_in_mesh(given, axis)
    if mesh.shape[axis] == 1:
        return None
    check_cuts_sequence_alone(given, axis, current_mesh_resource())
    return axis


def tokens_of_device(rows: jax.Array, axis: str, length: int) -> jax.Array:
    """The `length` tokens of this device, of rows [..., s] of all: inside a `jax.shard_map` over `axis`."""
    return jax.lax.dynamic_slice_in_dim(rows, jax.lax.axis_index(axis) * length, length, rows.ndim - 1)


class Context(NamedTuple):
    """Attention over a sequence that mesh axis `axis`, of `size` devices, cuts."""

    axis: str
    size: int
    load_balanced: bool
    strategy: str

    @classmethod
    def of(cls, module: nn.Module) -> "Context | None":
        """The context that the fields of `module` and the MeshResource in force ask for; None: the sequence is not cut,
        or it is cut along an axis of one device.

        Raises what `cutting_axis` raises, and ValueError for a balanced order of a sequence that no axis cuts.
        """
        balanced = module.context_parallel_causal_load_balanced
        if balanced and _named_axis(module) is None:
            raise ValueError(
                f"{describe(module)}: context_parallel_causal_load_balanced is True, but no axis cuts the "
                "sequence; set context_parallel_axis, or MeshResource(cp_resource=...)."
            )
        axis = cutting_axis(module, needed=balanced)
        if axis is None:
            return None
        size = jax.sharding.get_abstract_mesh().shape[axis]
        return cls(axis, size, balanced, STRATEGIES[module.context_parallel_strategy.upper()])

    def cut(self, module: nn.Module, q, k) -> Cut:
        """The cut of q [b, s, h, d] and k [b, t, g, d]; the MeshResource in force says the mesh axes of batch and heads
        that no type shows."""
        resource, mesh = current_mesh_resource(), jax.sharding.get_abstract_mesh()
        logical = {} if resource is None else logical_axis_map(resource)
        types = dict(zip(mesh.axis_names, mesh.axis_types))
        named = {}
        for argument, name, size in (("batch_axis", BATCH_AXES, q.shape[0]), ("head_axis", HEAD_AXES, k.shape[-2])):
            axes = logical.get(name) or ()
            axes = (axes,) if isinstance(axes, str) else axes
            axes = tuple(axis for axis in axes if types.get(axis) == AxisType.Auto and mesh.shape[axis] > 1)
            if axes and size % prod(mesh.shape[axis] for axis in axes) == 0:
                named[argument] = axes
        return Cut.of(describe(module), self.axis, self.strategy, self.load_balanced, **named)

    def whole(self, length: int) -> int:
        """The tokens of a row, of which the module has `length`."""
        return length * self.size if is_manual(self.axis) else length

    def own(self, rows: jax.Array, length: int) -> jax.Array:
        """What belongs to the `length` tokens that the module has, of rows [..., tokens] in the order of the
        sequence."""
        rows = reorder_causal_load_balancing(rows, self.size, rows.ndim - 1) if self.load_balanced else rows
        return tokens_of_device(rows, self.axis, length) if is_manual(self.axis) else rows

    def positions(self, length: int, side: int, descriptor: SequenceDescriptor | None) -> jax.Array | None:
        """The positions, for RoPE, of the `length` tokens that the module has: [length], or [b, length] by the
        descriptor; None: 0, 1, 2, ...

        side: 0 for queries, 1 for keys.
        """
        whole = self.whole(length)
        if descriptor is not None:
            return self.own(descriptor.tokens(whole, whole)[side][1], length)
        if self.load_balanced or whole != length:
            return jnp.asarray(self.own(np.arange(whole, dtype=np.int32), length))
        return None
