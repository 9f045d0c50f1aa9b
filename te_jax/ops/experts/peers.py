"""Rows in the memory of other devices, read where they are: NVLink's peer access, within one process.

A device tells the others where its array is; the gathering of these addresses is also the word that the array is
written. It keeps the array until all others have read: until a later gathering is over. On other platforms what would
be read is gathered instead.

All runs inside `jax.shard_map`, whose axes `axes` are the devices.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from te_jax.core.op import Op
from te_jax.ops.experts.permute import PERMUTE_FP8, Groups, combine_op
from te_jax.ops.formats import TENSOR
from te_jax.ops.source import Source

Axes = tuple[str, ...]


def combine_of_peers(
    rows: jax.Array, positions: jax.Array, weights: jax.Array | None, axes: Axes, kept: Sequence[jax.Array] = ()
) -> tuple[jax.Array, jax.Array]:
    """y [*B, h]: for each token the sum of rows [R, h] of all devices, times weights f32[*B, k], in f32, in the order
    of k. And rows, for those who read them later: XLA copies an array that is given away and read again.

    positions: i32[*B, k]: i R + j is row j of device i; below 0 there is none. kept: arrays that other devices read
    before they write their rows: they are not freed before all devices are here.
    """

    def read(rows, positions, weights, *kept):
        rows, addresses = _tell(rows, axes)
        (y,) = combine_op(rows, positions, weights, addresses)
        for a in kept:
            y = keep_op(y, a, addresses)[0]
        y, done = _tell(y, axes)
        return keep_op(y, rows, done)[0], rows

    def gather(rows, positions, weights, *kept):
        return combine_op(lax.all_gather(rows, axes, axis=0, tiled=True), positions, weights, None)[0], rows

    return lax.platform_dependent(rows, positions, weights, *kept, cuda=read, default=gather)


def permute_of_peers(
    x: jax.Array, groups: Groups, layouts: Sequence[str], axes: Axes
) -> tuple[dict[str, jax.Array], jax.Array]:
    """The layouts of the rows of x E4M3 [T, h] of all devices, by name, and x, to be `kept`.

    groups: of the tokens of all, one device after the other.
    """
    attrs, one = dict(topk=groups.rows.shape[-1]), jnp.ones((), jnp.float32)

    def run(x, groups, addresses):
        source = Source(PERMUTE_FP8, attrs, (x, None, groups.slots, groups.offsets, None, addresses), 1)
        got = source.run(layouts, x.dtype, TENSOR, one)
        return {name: got[name] for name in layouts}

    def read(x, groups):
        x, addresses = _tell(x, axes)
        return run(x, groups, addresses), x

    def gather(x, groups):
        as_bytes = lax.all_gather(lax.bitcast_convert_type(x, jnp.uint8), axes, axis=0, tiled=True)
        return run(lax.bitcast_convert_type(as_bytes, x.dtype), groups, None), x

    return lax.platform_dependent(x, groups, cuda=read, default=gather)


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
"""a of any type [*m] -> the same array, and u32[2]: its address, the low word first. On a CPU the address is 0."""

keep_op: Op = Op(
    "te_keep",
    "y: m..., kept: n..., after: d c -> same: m...",
    replicated="m... n... d c",
    dtypes=lambda y, *_, **__: (y,),
    reference=lambda y, kept, after: (y,),
    cuda=lambda call, *operands: call(*operands, in_place={"y": "same"}),
)
"""y [*m], once `after` u32[d, c] is there: the memory of `kept` is not taken for another array before."""
