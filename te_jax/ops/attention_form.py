"""A call of `dot_product_attention` in the terms of the attention ops, and its gradients."""

from functools import partial
from math import frexp
from typing import NamedTuple

import jax
import jax.numpy as jnp

from te_jax._arrays import as_rank
from te_jax._types import like
from te_jax.checkpoint_policies import ATTENTION, named
from te_jax.ops.attention_check import Options
from te_jax.ops.attention_mask import Band
from te_jax.ops.attention_op import BACKWARD, FORWARD, parts_of
from te_jax.ops.attention_reference import BIAS_FORMS, wide


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

    def forward(self, joined: int) -> dict:
        """The attributes of the forward op for which `joined` of q, k, v lie in one array."""
        others = ("deterministic", "has_dbias", *(("interleaved",) if joined == 1 else ()))
        return {name: value for name, value in self._asdict().items() if name not in others}

    def backward(self, joined: int) -> dict:
        """The attributes of the backward op."""
        return self.forward(joined) | dict(deterministic=self.deterministic)


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
    bias = jnp.maximum(bias, jnp.asarray(_LOW, bias.dtype))
    return bias if hidden is None else jnp.where(hidden, jnp.asarray(_LOW, bias.dtype), bias)


# A bias that hides a key: far below all logits, and so far from -inf that its product with log2(e) is finite.
_LOW = -(2.0**100)
HIDES = _LOW / 2  # where logits are taken for hidden


def _slots(bias, q_shape, t) -> tuple[jax.Array | None, ...]:
    """The bias in the ops' four operands, by the axes that it has: bh, b, h or none."""
    slots = dict.fromkeys(BIAS_FORMS)
    if bias is None:
        return tuple(slots.values())
    *batch, s, h, _ = q_shape
    bias = bias.reshape((1,) * (len(q_shape) - bias.ndim) + bias.shape)
    has_batch, has_heads = any(size > 1 for size in bias.shape[:-3]), bias.shape[-3] > 1
    form = "b" * has_batch + "h" * has_heads
    shape = (*(batch if has_batch else ()), *((h,) if has_heads else ()), s, t)
    lead = bias.shape[:-3] if has_batch else ()
    bias = bias.reshape(*lead, *bias.shape[-3 + (not has_heads) :])
    return tuple((slots | {form: jnp.broadcast_to(bias, shape)}).values())


# ---- the ops under one vjp -----------------------------------------------------------------------


@partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def attention(operands, bias, sink, segments, rng, attrs: Attrs, name: str | None):
    """-> out, lse (not differentiable) of the forward ops, in the terms of `Form`.

    operands: (q, k, v), (q, kv) or (qkv,).

    sink: f32[h] or [1], a logit of each head that joins the softmax, and lse; or None.
    rng: u32[b..., h, 4], or None without dropout. name: of out, lse and drawn for checkpoint policies.
    """
    return _attention_fwd(operands, bias, sink, segments, rng, attrs, name)[0]


def _attention_fwd(operands, bias, sink, segments, rng, attrs, name):
    joined = 4 - len(operands)
    outputs = ("out", "lse") if rng is None else ("out", "lse", "drawn")
    q, k, _ = parts_of(*operands)
    slots = _slots(bias, q.shape, k.shape[-3])
    out, lse, *drawn = FORWARD[joined](*operands, *slots, segments, rng, outputs=outputs, **attrs.forward(joined))
    if bias is not None:  # queries that see no key
        blind = lse < HIDES
        out, lse = jnp.where(_of_rows(blind), 0, out), jnp.where(blind, -jnp.inf, lse)
    # A policy that saves one of these names saves all that the backward pass needs of the forward kernel.
    out, lse, *drawn = named([*with_sink(out, lse, sink), *drawn], ATTENTION, name)
    return (out, lse), (operands, bias, sink, segments, out, lse, drawn[0] if drawn else None)


def _attention_bwd(attrs, name, residuals, cotangents):
    operands, bias, sink, segments, out, lse, drawn = residuals
    dout, _ = cotangents
    joined, (q, k, _) = 4 - len(operands), parts_of(*operands)
    slots = _slots(bias, q.shape, k.shape[-3])
    outputs = {1: ("dq", "dk", "dv"), 2: ("dq", "dkv"), 3: ("dqkv",)}[joined]
    if attrs.has_dbias:
        (form,) = (f for f, slot in zip(BIAS_FORMS, slots) if slot is not None)
        outputs += (f"dbias_{form}" if form else "dbias",)
    # exp(low - 0) is 0: no gradient comes of queries that see no key.
    seen = lse if bias is None else jnp.where(lse == -jnp.inf, 0, lse)
    grads = BACKWARD[joined](
        dout, *operands, *slots, segments, out, seen, drawn, outputs=outputs, **attrs.backward(joined)
    )
    doperands = tuple(like(grad, x) for grad, x in zip(grads, operands))
    dbias = _of_slot(grads[len(operands)], bias, len(q.shape)) if attrs.has_dbias else None
    return doperands, dbias, gradient_of_sink(sink, out, lse, dout), None, None


attention.defvjp(_attention_fwd, _attention_bwd)


def attention_fwd_of(operands, form: Form):
    """-> out, lse of `attention`, without a derivative."""
    return _attention_fwd(operands, form.bias, None, form.segments, None, form.attrs, None)[0]


def attention_bwd_of(operands, form: Form, dout, out, lse):
    """-> the gradients of operands (q, k, v). out, lse: of all keys that the queries see, also of others than k."""
    residuals = (operands, form.bias, None, form.segments, out, lse, None)
    return _attention_bwd(form.attrs, None, residuals, (dout, None))[0]


def with_sink(out, lse, sink):
    """out and lse where a logit of each head, `sink`, joins the softmax."""
    if sink is None:
        return out, lse
    # All keys lose to it what their sum of exponentials lacks.
    total = jnp.logaddexp(lse, as_rank(sink[:, None], lse.ndim))
    share = jnp.where(lse == -jnp.inf, 0, jnp.exp(lse - total))
    return (out * _of_rows(share)).astype(out.dtype), total


def _of_rows(x):
    """[b..., h, s] -> [b..., s, h, 1]."""
    return jnp.swapaxes(x, -1, -2)[..., None]


def _of_slot(grad, bias, ndim):
    """The gradient of the slot of `bias`, as that of `bias`: summed where it was broadcast."""
    full = (1,) * (ndim - bias.ndim) + bias.shape
    has_batch, has_heads = any(size > 1 for size in full[:-3]), full[-3] > 1
    grad = grad if has_heads else jnp.expand_dims(grad, -3)
    grad = grad if has_batch else grad.reshape((1,) * (ndim - 3) + grad.shape)
    summed = tuple(i for i, (got, want) in enumerate(zip(grad.shape, full)) if got != want)
    return like(jnp.sum(grad, summed, keepdims=True).reshape(bias.shape), bias)


def gradient_of_sink(sink, out, lse, dout):
    """The probability of the sink, times what the output would lose to it; None without one."""
    if sink is None:
        return None
    wide = jnp.promote_types(out.dtype, jnp.float32)
    delta = jnp.swapaxes(jnp.sum(dout.astype(wide) * out.astype(wide), -1), -1, -2)  # [b..., h, s]
    by_head = -jnp.sum(jnp.exp(as_rank(sink[:, None], lse.ndim) - lse) * delta, (*range(lse.ndim - 2), -1))
    return like(by_head if sink.size == by_head.size else jnp.sum(by_head, keepdims=True), sink)
