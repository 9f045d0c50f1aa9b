"""The tokens of a call: which are padding, and where each stands in its text."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from te_jax.core.check import INTEGERS, check
from te_jax.core.types import on_explicit_mesh, splittable_axes
from te_jax.flax._context import Context
from te_jax.ops.attention import SequenceDescriptor
from te_jax.sharding.constraints import entries, explicit_spec, split_axis


def mask_of_lengths(lengths: Any) -> SequenceDescriptor | None:
    """The mask of rows of which `lengths` i32[b] tokens are no padding; a SequenceDescriptor as it is."""
    if lengths is None or isinstance(lengths, SequenceDescriptor):
        return lengths
    return SequenceDescriptor.from_seqlens(lengths)


class TokenRows(NamedTuple):
    """The tokens of a call. What stands in padding is not read: a number that is no token is NaN, and so is 0 times it
    in attention."""

    tokens: jax.Array  # int[b, s], 0 in padding
    is_token: jax.Array | None = None  # bool[b, s]; None: there is no padding
    positions: jax.Array | None = None  # int[b, s] or [s], within their texts; None: 0, 1, ...
    whole: int = 0  # the tokens of a row on all devices; 0: texts share rows

    def of_tokens(self, values: jax.Array) -> jax.Array:
        """int[b, s], 0 in padding."""
        return values if self.is_token is None else jnp.where(self.is_token, values, 0)


def token_rows(model: nn.Module, tokens: jax.Array, lengths: Any, *, counts: bool, decode: bool) -> TokenRows:
    """The tokens int[b, s] that a model gets, whose `lengths` are as `mask_of_lengths` takes them.

    counts: whether the model has learned positions. decode: the sequence is not cut then. Raises TypeError for tokens
    that are no integers, ValueError for another rank and for lengths of other rows.
    """
    name = type(model).__name__
    check(name, "tokens", tokens, INTEGERS)
    if tokens.ndim != 2:
        raise ValueError(f"{name}: tokens has the shape {tokens.shape}; pass [b, s].")
    described, s = mask_of_lengths(lengths), tokens.shape[1]
    if described is None and not counts:
        return TokenRows(tokens)
    context = None if decode else Context.of(model)
    whole = s if context is None else context.whole(s)
    positions = None if context is None else context.positions(s, 0, described)
    if described is None:
        return TokenRows(tokens, None, positions, whole)
    described.check(name, tokens.shape[:1], whole, whole)
    (ids, within), _ = described.tokens(whole, whole)
    is_token = _placed_as(tokens, (ids if context is None else context.own(ids, s)) != 0)
    if context is None and not described.starts_at_zero:
        positions = within
    ends = whole if described.starts_at_zero else 0  # segments of packed rows are shorter
    return TokenRows(jnp.where(is_token, tokens, 0), is_token, positions, ends)


def _placed_as(tokens: jax.Array, is_token: jax.Array) -> jax.Array:
    """is_token, on Explicit axes placed as the tokens are."""
    spec = explicit_spec(jax.typeof(tokens))
    return is_token if spec is None else jax.sharding.reshard(is_token, spec)


def cut_by_context(model: nn.Module, x: jax.Array) -> jax.Array:
    """x [b, s, H], on Explicit axes with the tokens cut along the axis of context parallelism, as attention gives them:
    a loop over layers has one type."""
    aval = jax.typeof(x)
    context = Context.of(model) if on_explicit_mesh(aval) else None
    if context is None or x.shape[1] % context.size or context.axis not in splittable_axes(aval.sharding.mesh):
        return x
    names = entries(aval)[1]
    return x if context.axis in names else split_axis(x, 1, (*names, context.axis))
