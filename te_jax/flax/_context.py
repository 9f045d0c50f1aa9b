"""The fields `context_parallel_*` of the modules: which mesh axis cuts the sequence, and where its tokens lie."""

from math import prod
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.sharding import AxisType

from te_jax.flax._fields import STRATEGIES
from te_jax.flax._state import describe
from te_jax.ops.attention import SequenceDescriptor
from te_jax.ops.attention.mesh import Cut
from te_jax.sharding import (
    BATCH_AXES,
    HEAD_AXES,
    causal_load_balanced_positions,
    current_mesh_resource,
    logical_axis_map,
    reorder_causal_load_balancing,
)
from te_jax.sharding.resource import check_cuts_sequence_alone


class Context(NamedTuple):
    """Attention over a sequence that mesh axis `axis`, of `size` devices, cuts."""

    axis: str
    size: int
    load_balanced: bool
    strategy: str

    @classmethod
    def of(cls, module: nn.Module) -> "Context | None":
        """The context that the fields of `module` and the MeshResource in force ask for; None: the sequence is not cut,
        or it is cut along an axis of one device. Without a mesh that is every axis where there is one device, and all
        that counts while `module` is initializing are shapes.

        Raises ValueError for an axis that the mesh lacks, or that shards something else.
        """
        strategy = module.context_parallel_strategy
        field, resource = module.context_parallel_axis, current_mesh_resource()
        balanced, mesh = module.context_parallel_causal_load_balanced, jax.sharding.get_abstract_mesh()
        axis = field or (resource.cp_resource if field == "" and resource is not None else None)
        if axis is None or (not mesh.axis_names and not field and not balanced):
            if balanced:
                raise ValueError(
                    f"{describe(module)}: context_parallel_causal_load_balanced is True, but no axis cuts the "
                    "sequence; set context_parallel_axis, or MeshResource(cp_resource=...)."
                )
            return None
        given = f"context_parallel_axis is {axis!r}" if field else f"cp_resource of the MeshResource is {axis!r}"
        if not mesh.axis_names and (module.is_initializing() or jax.device_count() == 1):
            return None
        if axis not in mesh.axis_names:
            has = f"has the axes {mesh.axis_names}" if mesh.axis_names else "is none; enter jax.set_mesh(mesh)"
            raise ValueError(f"{describe(module)}: {given}, but the mesh in force {has}.")
        if mesh.shape[axis] == 1:
            return None
        check_cuts_sequence_alone(f"{describe(module)}: {given}", axis, resource)
        return cls(axis, mesh.shape[axis], balanced, STRATEGIES[strategy.upper()])

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

    def positions(self, length: int, side: int, descriptor: SequenceDescriptor | None) -> jax.Array | None:
        """The positions, for RoPE, of the `length` tokens that the module has: [length], or [b, length] by the
        descriptor; None: 0, 1, 2, ...

        side: 0 for queries, 1 for keys.
        """
        mesh = jax.sharding.get_abstract_mesh()
        inside = dict(zip(mesh.axis_names, mesh.axis_types))[self.axis] == AxisType.Manual
        whole = length * self.size if inside else length
        if descriptor is not None:
            at = descriptor.tokens(whole, whole)[side][1]
            at = reorder_causal_load_balancing(at, self.size, at.ndim - 1) if self.load_balanced else at
        elif self.load_balanced:
            at = jnp.asarray(causal_load_balanced_positions(whole, self.size))
        elif inside:
            at = jnp.arange(whole)
        else:
            return None
        if not inside:
            return at
        return jax.lax.dynamic_slice_in_dim(at, jax.lax.axis_index(self.axis) * length, length, at.ndim - 1)
