"""Attention of one query per row, as in decoding, in the shape that keeps a GPU busy."""

from collections.abc import Callable
from math import prod
from typing import Any

import jax
import jax.numpy as jnp

from te_jax.ops.attention.reference import largest, merge_keys

_BUSY = 128  # CTAs: about a wave of the GPUs of today; the kernel has one for each row and head of keys
_LEAST = 512  # keys of a piece: below, what a piece costs besides is no longer small


def pieces_of_row(rows: int, t: int) -> int:
    """In how many pieces to cut the t keys, for `rows` rows times heads of keys: a power of two."""
    pieces = 1
    while rows * pieces < _BUSY and t % (2 * pieces) == 0 and t // (2 * pieces) >= _LEAST:
        pieces *= 2
    return pieces


def is_one_query(queries: int, segments: int, *, sees_all: bool, adds: bool) -> bool:
    """Whether `one_query` serves rows of `queries` queries and at most `segments` segments.

    sees_all: no band hides a key of the segment. adds: there is a bias, dropout, or an array in sequence-major order.
    """
    return queries == 1 and segments <= 1 and sees_all and not adds


def one_query(
    run: Callable[..., Any], q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """`attention_fwd` of q [b..., 1, (g r), d] without mask, bias and dropout -> out, lse, and top, or None.

    segments: i32[b..., 1, 4] or None. run(q, k, v, segments): the same for several queries, with one batch axis.

    The r query heads of a group become r queries of one head, so that its keys are read once; and the keys are cut into
    pieces, each a row of its own, whose results are averaged by their sums of exponentials (Flash-Decoding,
    https://crfm.stanford.edu/2023/10/12/flashdecoding.html). A single query becomes two: for a single one of given
    length cuDNN 9.19 gives a wrong lse.
    """
    (*batch, _, h, d), (t, g, e) = q.shape, v.shape[-3:]
    b, r = prod(batch), h // g
    pieces, queries = pieces_of_row(b * g, t), max(r, 2)
    each = jnp.swapaxes(q.reshape(b, g, r, d), 1, 2)[:, None]
    each = jnp.broadcast_to(each, (b, pieces, queries, g, d)).reshape(b * pieces, queries, g, d)
    keys, values = (x.reshape(b * pieces, t // pieces, g, x.shape[-1]) for x in (k, v))
    if segments is not None:
        segments = _of_pieces(segments.reshape(b, 4), queries, pieces, t // pieces)
    out, lse, top = run(each, keys, values, segments)
    if top is not None:
        top = largest(top[:, :, :r].reshape(b, pieces, h), [1]).reshape(*batch, h, 1)
    out, lse = out[:, :r].reshape(b, pieces, r, g, e), lse[:, :, :r].reshape(b, pieces, g, r)
    out, lse = merge_keys([(out[:, piece], lse[:, piece]) for piece in range(pieces)])
    return jnp.swapaxes(out, 1, 2).reshape(q.shape[:-1] + (e,)), lse.reshape(*batch, h, 1), top


def _of_pieces(segments, queries: int, pieces: int, width: int):
    """i32[b, 4] of one query and its keys -> i32[b * pieces, 1, 4] of `queries` and the keys that lie in each piece."""
    first_query, count, first, keys = (x[:, None] for x in segments.T)
    at = width * jnp.arange(pieces, dtype=segments.dtype)[None]
    begin, end = (jnp.clip(x - at, 0, width) for x in (first, first + keys))
    there = (first_query >= 0) & (count > 0)
    each = jnp.stack(jnp.broadcast_arrays(0, jnp.where(there, queries, 0), begin, end - begin), -1)
    return each.reshape(-1, 1, 4).astype(segments.dtype)
