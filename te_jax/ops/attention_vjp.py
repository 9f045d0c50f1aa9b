"""The attention ops under one vjp: the bias in their slots, what joins the softmax, names for checkpoint policies."""

from functools import partial

import jax
import jax.numpy as jnp

from te_jax._arrays import as_rank
from te_jax._types import like
from te_jax.checkpoint_policies import ATTENTION, named
from te_jax.ops.attention.form import Attrs, Form
from te_jax.ops.attention_op import BACKWARD, FORWARD, parts_of
from te_jax.ops.attention_reference import BIAS_FORMS, HIDES


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
