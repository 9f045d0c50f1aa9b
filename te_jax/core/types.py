"""What a value's type shows of devices, and what autodiff and manual meshes want of it."""

from typing import Any

import jax
from jax import lax
from jax.core import ShapedArray
from jax.sharding import AxisType, PartitionSpec


def align(*args: Any) -> Any:
    """Makes all operands vary over the same manual mesh axes, so that cotangents are summed over them.

    Call it before a `custom_vjp`: the transpose of `pcast` is the psum that replicated parameters need. An operand may
    be None, or a tree.
    """
    union = frozenset().union(*map(varying_axes, jax.tree.leaves(args)))
    if not union:
        return list(args)

    def cast(a):
        lacks = tuple(sorted(union - varying_axes(a)))
        return lax.pcast(a, lacks, to="varying") if lacks else a

    return jax.tree.map(cast, list(args))


def like(cotangent: Any, primal: Any) -> Any:
    """`cotangent` as autodiff wants it for `primal` (an array or its type): in its dtype, and on an Explicit mesh in
    its sharding."""
    primal = primal if isinstance(primal, ShapedArray) else jax.typeof(primal)
    cotangent = cotangent.astype(primal.dtype)
    return jax.sharding.reshard(cotangent, primal.sharding.spec) if on_explicit_mesh(primal) else cotangent


def on_explicit_mesh(aval: Any) -> bool:
    """Whether the type `aval` shows shardings, which its users must then match."""
    return AxisType.Explicit in aval.sharding.mesh.axis_types


def splittable_axes(mesh: Any) -> frozenset[str]:
    """The Explicit axes of `mesh` that `jax.shard_map` can split here: not those that a `jax.vmap` around maps over."""
    explicit = frozenset(n for n, t in zip(mesh.axis_names, mesh.axis_types) if t == AxisType.Explicit)
    if not explicit:
        return explicit
    free = []  # what is manual where no axis is named: all but the mapped ones, which nothing else shows

    def look():
        free.extend(jax.sharding.get_abstract_mesh().manual_axes)

    jax.eval_shape(jax.shard_map(look, in_specs=(), out_specs=PartitionSpec()))
    return explicit & set(free)


def varying_axes(x: Any) -> frozenset[str]:
    """The manual mesh axes over which `x`, an array or the type of one, varies inside `shard_map`."""
    return (x if isinstance(x, ShapedArray) else jax.typeof(x)).manual_axis_type.varying
