"""A call of `dot_product_attention` in the terms of the attention ops."""

from math import frexp
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from te_jax.ops.attention.decode import is_one_query
from te_jax.ops.attention.mask import Band, Mask, SequenceDescriptor
from te_jax.ops.attention.options import AttentionOptions
from te_jax.ops.attention.reference import HIDDEN, sum_type


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
    has_top: bool = False  # whether the forward op has this result

    def forward(self) -> dict[str, Any]:
        """The attributes of the forward op."""
        others = ("deterministic", "has_dbias", "has_top")
        return {name: value for name, value in self._asdict().items() if name not in others}

    def backward(self) -> dict[str, Any]:
        """The attributes of the backward op."""
        return self.forward() | dict(deterministic=self.deterministic)


class Form(NamedTuple):
    """What a call asks of the attention ops. The types of its arrays decide it; `extras` reads the arrays."""

    options: AttentionOptions
    attrs: Attrs
    described: SequenceDescriptor | None  # whose segments are an operand
    says_full: bool  # without a descriptor the operand says that rows are full, for cuDNN wants lengths
    hidden: Mask  # what becomes a bias: a mask, and what cuDNN cannot combine

    @property
    def has_bias(self) -> bool:
        """Whether the ops get a bias."""
        return self.options.has_bias or not self.hidden.is_open

    @property
    def only_band(self) -> bool:
        """Whether only attributes say which keys are hidden: the ops get neither a bias nor segments."""
        return not self.has_bias and self.described is None and not self.says_full

    def decodes(self, s: int) -> bool:
        """Whether the ops for s queries are lowered as `decode.one_query`."""
        number = 0 if self.described is None else self.described.most_segments
        adds = self.has_bias or self.attrs.dropout_rate > 0 or self.attrs.seq_major
        return is_one_query(s, number, sees_all=self.attrs.left == self.attrs.right == -1, adds=adds)

    def extras(self, q: jax.Array, k: jax.Array) -> tuple[jax.Array | None, jax.Array | None]:
        """-> the bias [b... or 1, h or 1, s, t] of a type that cuDNN takes, with a large negative number for -inf and
        "hidden"; the segments i32[b..., n, 4]."""
        (s, t), options = (q.shape[-3], k.shape[-3]), self.options
        bias = options.total_bias(s, t)
        if options.pre_scale:  # in f32, unless a power of two is exact in any type
            bias = options.scale * (bias if frexp(options.scale)[0] in (0.5, -0.5) else bias.astype(sum_type(bias)))
        hidden = self.hidden.hides(s, t)
        if self.has_bias:
            bias = jnp.zeros((), q.dtype) if bias is None else bias
            # f16 has no such number
            bias = bias.astype(jnp.bfloat16 if bias.dtype == q.dtype == jnp.bfloat16 else jnp.float32)
            bias = jnp.maximum(bias, jnp.asarray(HIDDEN, bias.dtype))
            bias = bias if hidden is None else jnp.where(hidden, jnp.asarray(HIDDEN, bias.dtype), bias)
        segments = None if self.described is None else self.described.segments()
        if self.says_full:
            segments = jnp.broadcast_to(jnp.array([0, s, 0, t], jnp.int32), (*q.shape[:-3], 1, 4))
        return bias, segments


def form_of(options: AttentionOptions, q: Any, k: Any) -> Form:
    """The form of a call of q and k (arrays, or their types)."""
    s, t = q.shape[-3], k.shape[-3]
    band, described, hidden = options.mask.split(s, t, has_bias=options.has_bias, drops=options.dropout_rate > 0)
    says_full = described is None and _wants_lengths(band, s, t, options.has_bias or not hidden.is_open)
    left, right = (-1 if size is None else size for size in band[:2])
    attrs = Attrs(
        left, right, band.bottom_right, options.seq_major and described is None and not says_full, options.scale,
        options.dropout_rate, options.deterministic, options.has_bias, options.interleaved, options.return_max_logit,
    )  # fmt: skip
    return Form(options, attrs, described, says_full, hidden)


def _wants_lengths(band: Band, s: int, t: int, has_bias: bool) -> bool:
    """Whether cuDNN needs to be told that rows are full.

    For queries that see no key. And with a bias, where t is not a multiple of 128: the gradients of 9.19 take the rest
    of the last tile for keys with logit 0, and give NaN for queries whose lse is below -88
    (https://github.com/pytorch/pytorch/issues/196678).
    """
    return (s > t and (band.left is not None or band.bottom_right)) or (has_bias and t % 128 != 0)
