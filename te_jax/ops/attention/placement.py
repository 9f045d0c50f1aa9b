"""What meshes ask of attention's operands: whole groups of heads, whole rows, a dropout key for each device."""

from math import prod

import jax
from jax import lax
from jax.sharding import PartitionSpec

from te_jax._types import on_explicit_mesh, varying


def own_key(key: jax.Array, *arrays: jax.Array) -> jax.Array:
    """`key`, made another one on every device of the manual mesh axes over which the arrays vary and it does not."""
    for name in sorted(frozenset().union(*map(varying, arrays)) - varying(key)):
        key = jax.random.fold_in(key, lax.axis_index(name))
    return key


def undivided_groups(q, g: int):
    """-> q, its heads gathered if an Explicit mesh cuts through groups, and what shards out as q was."""
    spec, mesh = jax.typeof(q).sharding.spec, jax.typeof(q).sharding.mesh
    names = spec[-2] if isinstance(spec[-2], tuple) else (spec[-2],)
    if g % prod(mesh.shape[name] for name in names if name is not None) == 0:
        return q, lambda out: out
    gathered = jax.sharding.reshard(q, PartitionSpec(*spec[:-2], None, spec[-1]))
    return gathered, lambda out: jax.sharding.reshard(out, PartitionSpec(*spec[:-1], None))


def whole_rows(x):
    """-> x [b..., tokens, heads, d], on an Explicit mesh with the tokens on every device, for types would split logits
    and sums by them; and what shards out as x was."""
    spec = jax.typeof(x).sharding.spec
    if not on_explicit_mesh(jax.typeof(x)) or spec[-3] is None:
        return x, lambda out: out
    shard = lambda a, names: jax.sharding.reshard(
        a, PartitionSpec(*jax.typeof(a).sharding.spec[:-3], names, *spec[-2:])
    )
    return shard(x, None), lambda out: shard(out, spec[-3])
