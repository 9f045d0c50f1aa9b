"""Shardings of arrays: what types show, and constraints."""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec

from te_jax.core.check import ARRAY, NONE, Kind, check, warn
from te_jax.core.placement import mesh_axes
from te_jax.core.types import on_explicit_mesh
from te_jax.sharding.logical_axes import head_axes, resolve_logical_axes
from te_jax.sharding.resource import auto_mesh, mesh_sizes

_SPEC = NONE | Kind("a PartitionSpec", lambda spec: isinstance(spec, PartitionSpec))


def entries(aval: Any) -> tuple[tuple[str, ...], ...]:
    """The mesh axes that split each axis of an array of type `aval`."""
    spec = (*aval.sharding.spec, *[None] * (aval.ndim - len(aval.sharding.spec)))
    return tuple(map(mesh_axes, spec))


def spec_of(axes: Sequence[tuple[str, ...]]) -> PartitionSpec:
    """The PartitionSpec whose `entries` are `axes`."""
    return PartitionSpec(*(names[0] if len(names) == 1 else names or None for names in axes))


def check_spec(name: str, argument: str, spec: Any, ndim: int, free: bool = True) -> None:
    """Raises TypeError, naming the argument, for what is neither None nor a PartitionSpec, ValueError for one of more
    than `ndim` entries, for a mesh axis that the mesh in force lacks, and, unless `free`, for an axis that is left to
    the partitioner."""
    check(name, argument, spec, _SPEC)
    if spec is None:
        return
    if len(spec) > ndim:
        raise ValueError(f"{name}: {argument} is {spec}, but it is for {ndim} axes; pass at most {ndim} entries.")
    if not free and PartitionSpec.UNCONSTRAINED in tuple(spec):
        raise ValueError(f"{name}: {argument} is {spec}, which leaves an axis open; name mesh axes, or None.")
    sizes = mesh_sizes()
    named = [axis for entry in spec for axis in mesh_axes(entry)]
    for axis in (axis for axis in named if sizes and axis not in sizes):
        raise ValueError(
            f"{name}: {argument} names the mesh axis {axis!r}, but the mesh in force has {tuple(sizes)}; name one that "
            "is there, or None."
        )


def explicit_spec(aval: Any) -> PartitionSpec | None:
    """The sharding that the type `aval` shows; None off Explicit meshes."""
    return spec_of(entries(aval)) if on_explicit_mesh(aval) else None


def place_axis(x: jax.Array, axis: int, names: tuple[str, ...]) -> jax.Array:
    """x with one axis split over the mesh axes `names` (() makes it whole) and the others as they were.

    On a mesh of Auto axes an axis is made whole only where heads are split (`head_axes`). Without a mesh x is returned
    as it is.
    """
    if not on_explicit_mesh(jax.typeof(x)) and not names and not head_axes():
        return x
    return split_axis(x, axis % x.ndim, names)


def split_axis(x: jax.Array, at: int, names: tuple[str, ...]) -> jax.Array:
    """x on the mesh in force with axis `at` split over the mesh axes `names` (() makes it whole) and the others as they
    were."""
    if on_explicit_mesh(jax.typeof(x)):
        split = entries(jax.typeof(x))
        return jax.sharding.reshard(x, spec_of((*split[:at], names, *split[at + 1 :])))
    spec = [PartitionSpec.UNCONSTRAINED] * x.ndim
    spec[at] = names or None
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*spec))


def gather_over(x: jax.Array, name: str) -> jax.Array:
    """x whole along the mesh axis `name` of the mesh in force, and split over others as it was."""
    split, mesh = entries(jax.typeof(x)), jax.sharding.get_abstract_mesh()
    if dict(zip(mesh.axis_names, mesh.axis_types))[name] == AxisType.Explicit:
        left = spec_of([tuple(n for n in names if n != name) for names in split])
        return jax.sharding.reshard(x, left)
    # A constraint of one Auto axis, which leaves the others to the partitioner: no PartitionSpec says so by itself.
    return jax.sharding.explicit_axes(lambda x: x, axes=name, in_sharding=spec_of(split))(x)


def split_over(x: jax.Array, axis: int) -> tuple[tuple[str, ...], int]:
    """The mesh axes that split the heads, which lie on `axis` of x, and the number of their devices."""
    aval = jax.typeof(x)
    if on_explicit_mesh(aval):
        names, mesh = entries(aval)[axis], aval.sharding.mesh
    else:
        names, mesh = head_axes(), jax.sharding.get_abstract_mesh()
    return names, math.prod(mesh.shape[name] for name in names)


def repeat_groups(
    heads: jax.Array, *groups: jax.Array, over: tuple[tuple[str, ...], int] | None = None
) -> tuple[jax.Array, ...]:
    """heads [..., h, d] and groups [..., g, e] that they share, each group repeated for the devices that share it where
    those that split the heads do not divide g. A device then has the one group of its heads, as in Megatron.

    over: `split_over` of the heads, where it was asked outside of a `jax.shard_map` around.
    """
    if not groups:
        return (heads,)
    names, devices = over or split_over(heads, -2)
    g = groups[0].shape[-2]
    copies = math.lcm(g, devices) // g
    if copies == 1 or heads.shape[-2] % devices:
        return heads, *groups
    repeat = lambda x: jnp.broadcast_to(x[..., None, :], (*x.shape[:-1], copies, x.shape[-1]))
    each = lambda x: place_axis(repeat(x).reshape(*x.shape[:-2], x.shape[-2] * copies, x.shape[-1]), -2, names)
    return heads, *map(each, groups)


def place_output(y: jax.Array, sharding: Any) -> jax.Array:
    """y sharded as an argument `out_sharding` says, a PartitionSpec or NamedSharding, on a mesh of any axis types."""
    place = jax.sharding.reshard if on_explicit_mesh(jax.typeof(y)) else jax.lax.with_sharding_constraint
    return place(y, sharding)


def with_sharding_constraint_by_logical_axes(x: jax.Array, axes: Sequence[str | None] | None) -> jax.Array:
    """x, constrained to what Flax's logical axis rules in force make of `axes`, one name or None per dimension.

    Returns x as it is where there is nothing to constrain: for axes None, without rules, without a mesh, and under
    Explicit or Manual mesh axes, where the array's type says how it is sharded.
    An axis that the devices of its mesh axes do not divide is split over fewer of these, or stays whole; a warning says
    so, once, unless its size is 1.

    Raises TypeError for an x that is no array and for axes that are no tuple, ValueError if `axes` has another length
    than x or a name that begins with "nvte_" and is none of te_jax's, or a rule names an axis that the mesh lacks.
    """
    check("with_sharding_constraint", "x", x, ARRAY)
    return constrain_to_spec(x, resolve_logical_axes(axes, x.shape))


def constrain_to_spec(x: jax.Array, spec: PartitionSpec | None) -> jax.Array:
    """x, constrained to `spec`, of as many entries as x has dimensions; x as it is for None, and without a mesh of Auto
    axes.

    An axis that the devices of its mesh axes do not divide is treated as `with_sharding_constraint_by_logical_axes`
    says.
    """
    mesh = auto_mesh()
    if spec is None or mesh is None:
        return x
    return jax.lax.with_sharding_constraint(x, _divide(spec, x.shape, mesh))


def _divide(spec, shape: tuple[int, ...], mesh) -> PartitionSpec:
    """`spec` without the inner mesh axes whose devices do not divide the array's axes: each kernel would gather shards
    of different sizes for itself."""
    kept = []
    for axis, (entry, size) in enumerate(zip(spec, shape)):
        names = mesh_axes(entry)
        fitting = names
        while size % math.prod(mesh.shape[name] for name in fitting):
            fitting = fitting[:-1]
        if fitting != names and size > 1:
            _warn_undivided(axis, size, names, math.prod(mesh.shape[name] for name in names))
        kept.append(entry if fitting == names else fitting or None)
    return PartitionSpec(*kept)


@functools.cache
def _warn_undivided(axis: int, size: int, names: tuple[str, ...], devices: int):
    warn(
        f"with_sharding_constraint: axis {axis} of an activation is {size}, which the {devices} devices of mesh axes "
        f"{names} do not divide; it is split over fewer of them, or over none. Pad it to a multiple of {devices}.",
    )
