"""`transformer_engine.jax.permutation`: tokens in the order of their experts and back, over `te_jax.ops.permute`."""

import jax
import jax.numpy as jnp

from te_jax.compat._absent import GetAttr, absent
from te_jax.core.arrays import as_jax
from te_jax.ops.experts.permute import ALIGNMENT, Groups, combine, group, permute

__getattr__: GetAttr = absent("transformer_engine.jax.permutation")


def token_dispatch(
    inp: jax.Array,
    routing_map: jax.Array,
    num_out_tokens: int,
    probs: jax.Array | None = None,
    align_size: int | None = None,
) -> tuple[jax.Array, jax.Array | None, Groups, jax.Array | None, jax.Array]:
    """The tokens of each expert, one expert behind the other.

    inp:            floating [..., H], T tokens. routing_map: [..., E], not 0 where a token goes to an expert. Tokens
                    may have different numbers of experts, or none, as a capacity leaves them.
    num_out_tokens: M, the rows of the result without padding: as many as routing_map has entries that are not 0, or
                    more. Rows past these are zeros. Where it has more than M, the last of them get no row, and
                    the tokens that they belong to become NaN.
    probs:          floating [..., E], permuted too.
    align_size:     None, or a divisor of 128: then the tokens of each expert begin at a multiple of 128, with zeros
                    between them.

    Returns the rows [M, H], or [R, H] with align_size, R being `te_jax.ops.permute.buffer_rows(M, E)`; their probs or
    None; the Groups of T tokens and E choices each, which `token_combine` takes as its row_id_map; with align_size, how
    many rows of padding each expert has in front of it; and the rows of each expert, the padding among them.
    Differentiable by inp and probs.
    Raises ValueError for another num_out_tokens or align_size, 2**31 entries of routing_map or more, and what `group`
    raises.
    """
    inp, routing_map, probs = as_jax(inp, routing_map, probs)
    is_pair = routing_map.reshape(-1, routing_map.shape[-1]) != 0
    tokens, num_experts = is_pair.shape
    if num_out_tokens < 1:
        raise ValueError(f"token_dispatch: num_out_tokens is {num_out_tokens}; pass the rows of the result.")
    if align_size is not None and (align_size < 1 or ALIGNMENT % align_size):
        raise ValueError(f"token_dispatch: align_size is {align_size}; pass a divisor of {ALIGNMENT}.")
    if is_pair.size >= 2**31:
        raise ValueError(f"token_dispatch: routing_map has shape {routing_map.shape}; pass less than 2**31 entries.")
    groups = _groups_of_map(is_pair, num_out_tokens)
    has_rows = jnp.all(is_pair == (groups.rows >= 0), -1, keepdims=True)
    rows = permute(jnp.where(has_rows, inp.reshape(tokens, inp.shape[-1]), jnp.nan).astype(inp.dtype), groups)
    rows = _without_tail(rows, groups)
    if probs is not None and is_pair.size == 0:
        probs = jnp.zeros(groups.slots.shape, probs.dtype)
    elif probs is not None:
        probs = jnp.where(groups.slots < 0, 0, probs.reshape(-1)[jnp.maximum(groups.slots, 0)])
    if align_size is not None:
        tight = jnp.cumsum(groups.counts) - groups.counts  # the first row of each expert if none were padding
        return rows, probs, groups, groups.offsets[:-1] - tight, jnp.diff(groups.offsets)
    at = _rows_of_all_pairs(groups, num_out_tokens)
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

    Each token's sum looks at E choices, since tokens may have different numbers of experts;
    `te_jax.ops.permute.combine` of the Groups that `te_jax.ops.permute.group` makes looks at k only.
    """
    groups = row_id_map
    if pad_offsets is None:
        at = _rows_of_all_pairs(groups, inp.shape[0])
        inp = jnp.zeros((groups.slots.shape[0], inp.shape[-1]), inp.dtype).at[at].set(inp, mode="drop")
    if merging_probs is None:
        merging_probs = jnp.ones(groups.rows.shape, jnp.float32)
    return combine(_without_tail(inp, groups), groups, merging_probs.reshape(groups.rows.shape))


def _groups_of_map(is_pair: jax.Array, most: int) -> Groups:
    """The Groups of T tokens, each with E choices, of which is_pair bool[T, E] says the ones that are made: choice j is
    expert j. The pairs are sorted as a list of `most`, so that the buffer has no rows for choices that are not made."""
    tokens, num_experts = is_pair.shape
    one_at_least = is_pair.T if tokens else jnp.zeros((num_experts, 1), bool)  # `nonzero` of no element fills with 0
    experts, of_tokens = jnp.nonzero(one_at_least, size=most, fill_value=(num_experts, 0))
    listed = group(experts[:, None], num_experts)
    pairs = (of_tokens * num_experts + experts).astype(jnp.int32)
    at = jnp.where(experts < num_experts, pairs, is_pair.size)
    rows = jnp.full(is_pair.size, -1, jnp.int32).at[at].set(listed.rows[:, 0], mode="drop")
    slots = jnp.where(listed.slots < 0, -1, pairs[jnp.maximum(listed.slots, 0)])
    return listed._replace(rows=rows.reshape(is_pair.shape), slots=slots)


def _without_tail(rows: jax.Array, groups: Groups) -> jax.Array:
    """`rows` [R, H] with zeros behind the last group, and so their gradient: kernels leave memory as it is."""
    return jnp.where((jnp.arange(rows.shape[0]) < groups.offsets[-1])[:, None], rows, 0)


def _rows_of_all_pairs(groups: Groups, count: int) -> jax.Array:
    """[count]: the rows of all pairs in ascending order; past the last pair R, which is no row."""
    return jnp.nonzero(groups.slots >= 0, size=count, fill_value=groups.slots.shape[0])[0]
