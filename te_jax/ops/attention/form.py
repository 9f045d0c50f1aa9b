"""A call of `dot_product_attention` in the terms of the attention ops."""

from math import frexp
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from te_jax.ops.attention.decode import is_one_query
from te_jax.ops.attention.mask import Band
from te_jax.ops.attention.options import AttentionOptions
from te_jax.ops.attention.reference import HIDDEN, wide


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

    def forward(self) -> dict[str, Any]:
        """The attributes of the forward op."""
        others = ("deterministic", "has_dbias")
        return {name: value for name, value in self._asdict().items() if name not in others}

    def backward(self) -> dict[str, Any]:
        """The attributes of the backward op."""
        return self.forward() | dict(deterministic=self.deterministic)


class Form(NamedTuple):
    """The operands beside q, k, v, the sink and the key, and the attributes."""

    bias: jax.Array | None  # [b... or 1, h or 1, s, t]
    segments: jax.Array | None  # i32[b..., n, 4]; also of full rows where cuDNN wants lengths
    attrs: Attrs


def form_of(options: AttentionOptions, q: Any, k: Any) -> Form:
    """What the ops are asked for. A mask, and what cuDNN cannot combine, becomes a bias, with a number for "hidden"."""
    s, t = q.shape[-3], k.shape[-3]
    band, described, rest = _mask_of(options, s, t)
    bias = options.total_bias(s, t)
    if options.pre_scale:  # in f32, unless a power of two is exact in any type
        bias = options.scale * (bias if frexp(options.scale)[0] in (0.5, -0.5) else bias.astype(wide(bias)))
    bias = _bias(bias, rest.hides(s, t), q)
    segments = None if described is None else described.segments()
    if described is None and _wants_lengths(band, s, t, bias is not None):
        segments = jnp.broadcast_to(jnp.array([0, s, 0, t], jnp.int32), (*q.shape[:-3], 1, 4))
    left, right = (-1 if size is None else size for size in band[:2])
    attrs = Attrs(
        left, right, band.bottom_right, options.seq_major and segments is None, options.scale,
        options.dropout_rate, options.deterministic, options.has_bias, options.interleaved,
    )  # fmt: skip
    return Form(bias, segments, attrs)


def only_band(options: AttentionOptions, q: Any, k: Any) -> bool:
    """Whether attributes alone say which keys are hidden: `form_of` gives neither bias nor segments."""
    s, t = q.shape[-3], k.shape[-3]
    band, described, rest = _mask_of(options, s, t)
    return not options.has_bias and described is None and rest.is_open and not _wants_lengths(band, s, t, False)


def decodes(options: AttentionOptions, q: Any, k: Any) -> bool:
    """Whether what `form_of` asks for is lowered as `decode.one_query`."""
    s, t = q.shape[-3], k.shape[-3]
    band, described, rest = _mask_of(options, s, t)
    number = 0 if described is None else jax.eval_shape(described.segments).shape[-2]
    adds = options.has_bias or not rest.is_open or options.dropout_rate > 0 or (options.seq_major and not number)
    return is_one_query(s, number, sees_all=band.is_open, adds=adds)


def _mask_of(options: AttentionOptions, s: int, t: int):
    return options.mask.split(s, t, has_bias=options.has_bias, drops=options.dropout_rate > 0)


def _wants_lengths(band: Band, s: int, t: int, has_bias: bool) -> bool:
    """Whether cuDNN needs to be told that rows are full.

    For queries that see no key. And beside a bias, where t is no multiple of 128: the gradients of 9.19 take the rest
    of the last tile for keys with logit 0, and give NaN for queries whose lse is below -88
    (https://github.com/pytorch/pytorch/issues/196678).
    """
    return (s > t and (band.left is not None or band.bottom_right)) or (has_bias and t % 128 != 0)


def _bias(bias, hidden, q) -> jax.Array | None:
    """Both as one [b... or 1, h or 1, s, t] of a type that cuDNN takes; "hidden" and -inf as a large negative one."""
    if bias is None and hidden is None:
        return None
    if bias is None:
        bias = jnp.zeros((), q.dtype)
    bias = bias.astype(jnp.bfloat16 if bias.dtype == q.dtype == jnp.bfloat16 else jnp.float32)  # f16 has no such number
    bias = jnp.maximum(bias, jnp.asarray(HIDDEN, bias.dtype))
    return bias if hidden is None else jnp.where(hidden, jnp.asarray(HIDDEN, bias.dtype), bias)
