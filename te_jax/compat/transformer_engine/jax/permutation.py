"""`transformer_engine.jax.permutation`: tokens in the order of their experts and back, over `te_jax.ops.permute`."""

import jax
import jax.numpy as jnp

from te_jax.compat._absent import GetAttr, absent
from te_jax.ops.permute import ALIGNMENT, Groups, combine, group, permute

__getattr__: GetAttr = absent("transformer_engine.jax.permutation")


def token_dispatch(
    inp: jax.Array,
    routing_map: jax.Array,
    num_out_tokens: int,
    probs: jax.Array | None = None,
    align_size: int | None = None,
) -> tuple[jax.Array, jax.Array | None, Groups, jax.Array | None, jax.Array]:
    """The tokens of each expert, one expert behind the other.

    inp:            floating [..., H], T tokens. routing_map: [..., E], not 0 where a token goes to an expert.
    num_out_tokens: M, the rows of the result without padding. A token may have up to ceil(M / T) experts; one that has
                    more becomes NaN. The rows past M are left out.
    probs:          floating [..., E], permuted too.
    align_size:     None, or a divisor of 128: then the tokens of each expert begin at a multiple of 128, with zeros
                    between them.

    Returns the rows [M, H], or [R, H] with align_size, R of `te_jax.ops.permute.buffer_rows`; their probs or None; the
    Groups, which `token_combine` takes as its row_id_map; with align_size, how many rows of padding each expert has in
    front of it; and the rows of each expert, the padding among them.
    Raises ValueError for another num_out_tokens or align_size, and what `group` raises.
    """
    experts_of = routing_map.reshape(-1, routing_map.shape[-1]) != 0
    tokens, num_experts = experts_of.shape
    if num_out_tokens < 1:
        raise ValueError(f"token_dispatch: num_out_tokens is {num_out_tokens}; pass the rows of the result.")
    if align_size is not None and (align_size < 1 or ALIGNMENT % align_size):
        raise ValueError(f"token_dispatch: align_size is {align_size}; pass a divisor of {ALIGNMENT}.")
    most = min(num_experts, -(-num_out_tokens // max(tokens, 1)))
    order = jnp.argsort(~experts_of, axis=-1, stable=True)[:, :most]
    experts = jnp.where(jnp.take_along_axis(experts_of, order, -1), order, -1)
    groups = group(experts, num_experts)
    is_served = jnp.sum(experts_of, -1, keepdims=True) <= most
    rows = permute(jnp.where(is_served, inp.reshape(tokens, inp.shape[-1]), jnp.nan).astype(inp.dtype), groups)
    rows = _without_tail(rows, groups)
    if probs is not None:
        pairs = jnp.take_along_axis(probs.reshape(experts_of.shape), order, -1).reshape(-1)
        probs = jnp.where(groups.slots < 0, 0, pairs[jnp.maximum(groups.slots, 0)])
    if align_size is not None:
        return rows, probs, groups, groups.offsets[:-1] - _tight_offsets(groups), jnp.diff(groups.offsets)
    at = _places(groups)[:num_out_tokens]
    at = jnp.pad(at, (0, num_out_tokens - at.size), constant_values=rows.shape[0])  # more rows than pairs: zeros
    take = lambda x: jnp.pad(x, [(0, 1)] + [(0, 0)] * (x.ndim - 1))[at]
    return take(rows), None if probs is None else take(probs), groups, None, groups.counts


def token_combine(
    inp: jax.Array,
    row_id_map: Groups,
    merging_probs: jax.Array | None = None,
    pad_offsets: jax.Array | None = None,
) -> jax.Array:
    """Each token's sum of its rows, times `merging_probs` [..., E] where they are given: [T, H].

    inp, row_id_map, pad_offsets: as `token_dispatch` returns them, the first after the experts.
    """
    groups = row_id_map
    if pad_offsets is None:
        at = _places(groups)[: inp.shape[0]]
        inp = jnp.zeros((groups.slots.shape[0], inp.shape[-1]), inp.dtype).at[at].set(inp[: at.size], mode="drop")
    inp = _without_tail(inp, groups)
    if merging_probs is None:
        return combine(inp, groups, jnp.ones(groups.rows.shape, jnp.float32))
    expert = jnp.searchsorted(groups.offsets, groups.rows, side="right") - 1
    expert = jnp.clip(expert, 0, groups.counts.shape[0] - 1)
    probs = merging_probs.reshape(groups.rows.shape[0], merging_probs.shape[-1])
    return combine(inp, groups, jnp.take_along_axis(probs, expert, -1))


def _without_tail(rows: jax.Array, groups: Groups) -> jax.Array:
    """`rows` [R, H] with zeros behind the last group, and the same of their gradient: kernels leave memory as it is."""
    return jnp.where((jnp.arange(rows.shape[0]) < groups.offsets[-1])[:, None], rows, 0)


def _tight_offsets(groups: Groups) -> jax.Array:
    """i32[E]: the first row of each expert if none were padding."""
    return jnp.cumsum(groups.counts) - groups.counts


def _places(groups: Groups) -> jax.Array:
    """i32[T k]: the rows of all pairs in ascending order; past the last pair, what is no row."""
    rows = groups.rows.reshape(-1)
    return jnp.sort(jnp.where(rows < 0, groups.slots.shape[0], rows))
