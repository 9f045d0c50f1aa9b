"""A chunk of the gated delta rule in plain JAX, by the WY form (Yang et al. 2024, https://arxiv.org/abs/2406.06484):
what the tokens write solves one triangular system, so that all else is products.

No sum of logarithms is a difference of two others, and what a token does not see is masked before exp. So all exps are
of sums of the gates between two tokens, at most 1 where no gate is above 0, and right where a gate forgets all.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from te_jax.core.arrays import as_rank
from te_jax.ops.ssm.chunks import Runs, Sight, dot, sums_between

CHUNK = 64
"""Tokens."""
_PAIRED = 16  # tokens whose decays by channels are multiplied pair by pair
L2_EPSILON = 1e-6
"""Added to the sum of squares, as public models have it."""


class Chunk(NamedTuple):
    """The tokens of a chunk. Those that fill up the last one are 0, which moves no state."""

    q: jax.Array  # [b, l, g, d]
    k: jax.Array
    v: jax.Array  # [b, l, h, e], h a multiple of g
    beta: jax.Array  # [b, l, h]
    gate: jax.Array  # [b, l, h, 1 or d]


def of_chunk(
    state: jax.Array, chunk: Chunk, runs: Runs | None, *, scale: float, normalize: bool
) -> tuple[jax.Array, jax.Array]:
    """state f32[b, h, d, e] before the chunk -> y f32[b, l, h, e], the state after it."""
    by_heads = lambda a: jnp.swapaxes(a.astype(state.dtype), 1, 2)
    q, k, v, beta, logs = map(by_heads, (*chunk[:3], chunk.beta[..., None], chunk.gate))
    q, k = (jnp.repeat(_unit(a) if normalize else a, v.shape[1] // a.shape[1], 1) for a in (q, k))
    sight = Sight.of(v.shape[2], runs)
    at_state, at_end = (None if at is None else at[:, None, :, None] for at in sight[1:])
    since = _decay(jnp.cumsum(logs, 2), at_state)
    left = _decay(lax.cumsum(_behind(logs), 2, reverse=True), at_end)

    read = lambda a: dot("bhld,bhde->bhle", a * since, state)  # what the state says of keys or queries
    q = q * scale
    of_queries, of_keys = _seen_products(jnp.stack([q, k]), k, logs, sight.seen)
    behind = jnp.tril(jnp.ones(of_keys.shape[-2:], bool), -1)
    solve = inverse(jnp.where(behind, beta * of_keys, 0))
    written = dot("bhij,bhje->bhie", solve, beta * (v - read(k)))
    y = read(q) + dot("bhij,bhje->bhie", of_queries, written)
    old = state * jnp.swapaxes(since[:, :, -1:], 2, 3)
    return jnp.swapaxes(y, 1, 2), old + dot("bhld,bhle->bhde", k * left, written)


def _unit(a):
    return a * lax.rsqrt(jnp.sum(a * a, -1, keepdims=True) + L2_EPSILON)


def _behind(logs):
    """logs [..., l, c], of each token those of the next one, and 0 of the last."""
    return jnp.concatenate([logs[..., 1:, :], jnp.zeros_like(logs[..., :1, :])], -2)


def _decay(logs, where):
    return jnp.exp(logs if where is None else jnp.where(as_rank(where, logs.ndim), logs, -jnp.inf))


def _seen_products(a, k, logs, seen):
    """a [n, b, h, l, d], k [b, h, l, d] -> [n, b, h, l, l]: of the products of a token of a and a token of k that it
    sees what the gates between them leave."""
    if logs.shape[-1] == 1:
        within = _decay(sums_between(logs[..., 0]), seen)
        return dot("nbhid,bhjd->nbhij", a, k) * within[None]
    return jnp.where(seen[None], _products_by_channels(a, k, logs), 0)


def _products_by_channels(a, k, logs):
    """`_seen_products` where each channel decays by itself, 0 where j is behind i.

    exp of the sum from j to i has a channel of its own for each pair of tokens. Between blocks it is split where i's
    block begins, so that a factor of each token is left, at most 1 both: where one of them is 0 in f32 their product
    is. Within a block of 16 tokens it is computed for each pair.
    """
    length = a.shape[-2]
    pad = lambda x: jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, -length % _PAIRED), (0, 0)])
    split = lambda x: x.reshape(*x.shape[:-2], x.shape[-2] // _PAIRED, _PAIRED, x.shape[-1])
    a, k, logs = (split(pad(x)) for x in (a, k, logs))
    count, columns = logs.shape[-3], lambda x: jnp.swapaxes(x, -1, -2)
    at = jnp.arange(_PAIRED)
    pairs = _decay(sums_between(columns(logs)), at[:, None] >= at[None])
    within = dot("nbhqid,bhqdij->nbhqij", a, columns(k)[..., None, :] * pairs)
    since = a * jnp.exp(jnp.cumsum(logs, -2))[None]
    blocks = sums_between(columns(jnp.sum(logs, -2)))  # [b, h, d, n, n], of those behind J up to I
    blocks = jnp.moveaxis(jnp.pad(blocks, [(0, 0)] * 3 + [(1, 0), (0, 0)])[..., :-1, :], 2, -1)
    at = jnp.arange(count)
    earlier = (at[:, None] > at[None])[..., None]
    until = jnp.exp(lax.cumsum(_behind(logs), logs.ndim - 2, reverse=True))
    keys = (k * until)[:, :, None] * _decay(blocks, earlier)[..., None, :]
    between = dot("nbhqid,bhqpjd->nbhqipj", since, keys)
    own = (at[:, None] == at[None])[:, None, :, None]
    scores = jnp.where(as_rank(own, 7), within[..., None, :], between)
    return scores.reshape(*scores.shape[:3], count * _PAIRED, count * _PAIRED)[..., :length, :length]


@jax.custom_jvp
def inverse(a: jax.Array) -> jax.Array:
    """(1 + a)^-1 of a [..., l, l] that is 0 but below its diagonal.

    By blocks of 2, 4, .., in products of inverses that are known: as stable as substitution, which powers of a are not.
    """
    at, size, out = jnp.arange(a.shape[-1]), 1, jnp.broadcast_to(jnp.eye(a.shape[-1], dtype=a.dtype), a.shape)
    while size < a.shape[-1]:
        same = lambda size: at[:, None] // size == at[None] // size
        below = jnp.where(same(2 * size) & ~same(size), a, 0)
        out = out - (below if size == 1 else _matmul(_matmul(out, below), out))
        size *= 2
    return out


@inverse.defjvp
def _inverse_jvp(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    out = inverse(*primals)
    return out, -_matmul(_matmul(out, *tangents), out)


def _matmul(a, b):
    return dot("...ij,...jk->...ik", a, b)
