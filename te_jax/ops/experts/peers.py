"""Rows in the memory of other devices, read where they are: NVLink's peer access, within one process.

A device tells the others where its array is; the gathering of these addresses is also the word that the array is
written. It keeps the array until all others have read: until a later gathering is over, which every result of a reading
waits for, so that whoever drops the results of one (`jax.checkpoint` does) drops the reading, too. On other platforms,
and under `jax.vmap`, where an array is a part of one, what would be read is gathered instead.

All runs inside `jax.shard_map`, whose axes `axes` are the devices.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap

from te_jax.core.op import Op
from te_jax.ops.experts.permute import PERMUTE_FP8, Groups, combine_op
from te_jax.ops.formats import TENSOR
from te_jax.ops.source import Source

Axes = tuple[str, ...]


def tell_peers(rows: jax.Array, axes: Axes) -> tuple[jax.Array, jax.Array]:
    """rows, and where they are on all devices. Who reads them later reads the result: XLA copies an array that is given
    away and read again."""
    nowhere = lambda rows: (rows, lax.all_gather(jnp.zeros_like(rows, shape=2).astype(jnp.uint32), axes))
    return _where_possible(partial(_tell, axes=axes), nowhere, rows)


def combine_of_peers(
    rows: jax.Array, addresses: jax.Array, positions: jax.Array, weights: jax.Array | None, axes: Axes
) -> jax.Array:
    """[*B, h]: for each token the sum of rows [R, h] of all devices, times weights f32[*B, k], in f32, in the order of
    k.

    rows, addresses: of `tell_peers`. positions: i32[*B, k]: i R + j is row j of device i; below 0 there is none.
    """

    def read(rows, addresses, positions, weights):
        y, done = _tell(combine_op(rows, positions, weights, addresses)[0], axes)
        return keep_op(y, rows, done)[0]

    def gather(rows, addresses, positions, weights):
        return combine_op(lax.all_gather(rows, axes, axis=0, tiled=True), positions, weights, None)[0]

    return _where_possible(read, gather, rows, addresses, positions, weights)


def permute_of_peers(x: jax.Array, groups: Groups, layouts: Sequence[str], axes: Axes) -> dict[str, jax.Array]:
    """The layouts of the rows of x E4M3 [T, h] of all devices, by name.

    groups: of the tokens of all, one device after the other.
    """
    attrs = dict(topk=groups.rows.shape[-1])

    def run(x, groups, addresses):
        source = Source(PERMUTE_FP8, attrs, (x, None, groups.slots, groups.offsets, None, addresses), 1)
        got = source.run(layouts, x.dtype, TENSOR, jnp.ones((), jnp.float32))
        return {name: got[name] for name in layouts}

    def read(x, groups):
        x, addresses = _tell(x, axes)
        got = run(x, groups, addresses)
        first, done = _tell(got[layouts[0]], axes)
        return {name: keep_op(a, x, done)[0] for name, a in (got | {layouts[0]: first}).items()}

    def gather(x, groups):
        as_bytes = lax.all_gather(lax.bitcast_convert_type(x, jnp.uint8), axes, axis=0, tiled=True)
        return run(lax.bitcast_convert_type(as_bytes, x.dtype), groups, None)

    return _where_possible(read, gather, x, groups)


def _where_possible(read: Callable[..., Any], gather: Callable[..., Any], *args: Any) -> Any:
    run = custom_vmap(lambda *args: lax.platform_dependent(*args, cuda=read, default=gather))

    @run.def_vmap
    def rule(size, batched, *args):
        out = jax.vmap(gather, jax.tree.map(lambda b: 0 if b else None, tuple(batched)))(*args)
        return out, jax.tree.map(lambda _: True, out)

    return run(*args)


def _tell(a: jax.Array, axes: Axes) -> tuple[jax.Array, jax.Array]:
    """a, and u32[devices, 2]: where it is on each device, once it is written on all."""
    a, address = address_op(a)
    return a, lax.all_gather(address, axes)


address_op: Op = Op(
    "te_address",
    "a: m... -> same: m..., address?: c",
    replicated="m... c",
    sizes={"c": lambda **_: 2},
    dtypes=lambda a, **_: (a, jnp.uint32),
    reference=lambda a: (a, jnp.zeros(2, jnp.uint32)),
    cuda=lambda call, a: call(a, in_place={"a": "same"}),
)
"""a of any type [*m] -> the same array, and u32[2]: its address, the low word first. On a CPU the address is 0. A
mapped call has addresses of copies."""

keep_op: Op = Op(
    "te_keep",
    "y: m..., kept: n..., after: d c -> same: m...",
    replicated="m... n... d c",
    dtypes=lambda y, *_, **__: (y,),
    reference=lambda y, kept, after: (y,),
    cuda=lambda call, *operands: call(*operands, in_place={"y": "same"}),
)
"""y [*m], once `after` u32[d, c] is there: the memory of `kept` is not taken for another array before."""
