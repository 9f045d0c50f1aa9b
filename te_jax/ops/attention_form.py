"""A call of `dot_product_attention` in the terms of the attention ops."""

from math import frexp
from typing import NamedTuple

import jax
import jax.numpy as jnp

from te_jax.ops.attention_check import Options
from te_jax.ops.attention_mask import Band
from te_jax.ops.attention_reference import HIDDEN, wide


class Attrs(NamedTuple):
    """The attributes of the ops, and whether the bias has a gradient."""

    left: int
    right: int
    bottom_right: bool
    seq_major: bool
    scale: float
    dropout_rate: float
    deterministic: bool  # of the backward pass
    has_dbias: bool
    interleaved: bool = False  # of arrays that hold several of q, k, v

    def forward(self) -> dict:
        """The attributes of the forward op."""
        others = ("deterministic", "has_dbias")
        return {name: value for name, value in self._asdict().items() if name not in others}

    def backward(self) -> dict:
        """The attributes of the backward op."""
        return self.forward() | dict(deterministic=self.deterministic)


class Form(NamedTuple):
    """The operands beside q, k, v, the sink and the key, and the attributes."""

    bias: jax.Array | None  # [b... or 1, h or 1, s, t]
    segments: jax.Array | None  # i32[b..., n, 4]; also of full rows where cuDNN wants lengths
    attrs: Attrs


def form_of(options: Options, q, k) -> Form:
    """What the ops are asked for. A mask, and what cuDNN cannot combine, becomes a bias, with a number for "hidden"."""
    s, t, described = q.shape[-3], k.shape[-3], options.sequence_descriptor
    bias = options.total_bias(s, t)
    if options.pre_scale:  # in f32, unless a power of two is exact in any type
        bias = options.scale * (bias if frexp(options.scale)[0] in (0.5, -0.5) else bias.astype(wide(bias)))
    hidden = options.masked()
    band, by_lengths = _band(options, s, t), False
    if described is not None:
        by_lengths = hidden is None and described.segment_ids is None and (bias is None or described.starts_at_zero)
    served = _served(band, options, s, t) if described is None or by_lengths else None
    if served is None:
        hidden, served, by_lengths = options.hidden(s, t), Band(None, None, False), False
    bias = _bias(bias, hidden, q)
    segments = described.segments() if by_lengths else None
    if not by_lengths and _wants_lengths(served, bias, s, t):
        segments = jnp.broadcast_to(jnp.array([0, s, 0, t], jnp.int32), (*q.shape[:-3], 1, 4))
    left, right = (-1 if size is None else size for size in served[:2])
    attrs = Attrs(
        left, right, served.bottom_right, options.seq_major and segments is None, options.scale,
        options.dropout_rate, options.deterministic, options.has_bias,
    )  # fmt: skip
    return Form(bias, segments, attrs)


def only_band(options: Options, q, k) -> bool:
    """Whether attributes alone say which keys are hidden: `form_of` gives neither bias nor segments."""
    s, t = q.shape[-3], k.shape[-3]
    if options.mask is not None or options.sequence_descriptor is not None or options.has_bias:
        return False
    served = _served(_band(options, s, t), options, s, t)
    return served is not None and not _wants_lengths(served, None, s, t)


def _band(options: Options, s: int, t: int) -> Band:
    """The band, without what cuts nothing."""
    band = options.band
    if options.sequence_descriptor is None:
        band = band.trimmed(s, t)
        band = band._replace(bottom_right=band.bottom_right and s != t)
    elif band.bottom_right and s == 1 and options.sequence_descriptor.segment_ids is None:
        band = band._replace(right=None)  # the one query is at the last key
    return band._replace(bottom_right=band.bottom_right and band[:2] != (None, None))


def _served(band: Band, options: Options, s: int, t: int) -> Band | None:
    """The band as cuDNN takes it beside what else the call has; None if it does not."""
    if s == 1 and band[:2] != (None, None):
        return None  # with a causal mask cuDNN is wrong for one query and grouped heads (release notes of 9.18)
    plain = not options.has_bias and options.dropout_rate == 0  # its bottom-right bands are for these
    if options.sequence_descriptor is not None:
        return band if plain or not band.bottom_right else None
    if plain and options.mask is None:
        return band
    band = band.top_left(s, t)
    return None if band is None or (band.left is not None and options.has_bias and s > t) else band


def _wants_lengths(band: Band, bias, s: int, t: int) -> bool:
    """Whether cuDNN needs to be told that rows are full.

    For queries that see no key. And beside a bias, where t is no multiple of 128: the gradients of 9.19 take the rest
    of the last tile for keys with logit 0, and give NaN for queries whose lse is below -88
    (https://github.com/pytorch/pytorch/issues/196678).
    """
    return (s > t and (band.left is not None or band.bottom_right)) or (bias is not None and t % 128 != 0)


def _bias(bias, hidden, q) -> jax.Array | None:
    """Both as one [b... or 1, h or 1, s, t] of a type that cuDNN takes; "hidden" and -inf as a large negative one."""
    if bias is None and hidden is None:
        return None
    if bias is None:
        bias = jnp.zeros((), q.dtype)
    bias = bias.astype(jnp.bfloat16 if bias.dtype == q.dtype == jnp.bfloat16 else jnp.float32)  # f16 has no such number
    bias = jnp.maximum(bias, jnp.asarray(HIDDEN, bias.dtype))
    return bias if hidden is None else jnp.where(hidden, jnp.asarray(HIDDEN, bias.dtype), bias)
