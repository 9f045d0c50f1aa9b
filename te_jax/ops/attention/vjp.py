"""The attention ops under one vjp: the bias's shape, what joins the softmax, names for checkpoint policies."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from te_jax.core.arrays import as_rank
from te_jax.core.derivatives import custom_vjp
from te_jax.core.policies import ATTENTION, with_names
from te_jax.core.types import like
from te_jax.ops.attention.form import Attrs, Form
from te_jax.ops.attention.op import attention_bwd, attention_fwd, operand_types
from te_jax.ops.attention.reference import HIDES, sum_to, sum_type


@custom_vjp(5, 6)
def attention(
    operands: Sequence[jax.Array],
    bias: jax.Array | None,
    sink: jax.Array | None,
    segments: jax.Array | None,
    rng: jax.Array | None,
    attrs: Attrs,
    name: str | None,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """-> out, lse and, if attrs has it, top of the forward op, in the terms of `Form`; only out is differentiable.

    operands: (q, k, v), (q, kv) or (qkv,).

    sink: f32[h] or [1], a logit of each head that joins the softmax, and lse; or None.
    rng: u32[b..., h, 4], or None without dropout. name: of out, lse and drawn for checkpoint policies.
    """
    return _attention_fwd(operands, bias, sink, segments, rng, attrs, name)[0]


def _attention_fwd(operands, bias, sink, segments, rng, attrs, name):
    outputs = ("out", "lse", *("drawn",) * (rng is not None), *("top",) * attrs.has_top)
    arrays = *_by_name(operands), _whole(bias, operands), segments, rng
    results = dict(zip(outputs, attention_fwd(*arrays, outputs=outputs, **attrs.forward()), strict=True))
    out, lse, top = results["out"], results["lse"], results.get("top")
    if bias is not None:  # queries that see no key
        blind = lse < HIDES
        out, lse = jnp.where(_of_rows(blind), 0, out), jnp.where(blind, -jnp.inf, lse)
        top = None if top is None else jnp.where(blind, -jnp.inf, top)
    # A policy that saves one of these names saves all that the backward pass needs of the forward kernel.
    out, lse, drawn = with_names((*with_sink(out, lse, sink), results.get("drawn")), ATTENTION, name)
    return (out, lse, top), (operands, bias, sink, segments, out, lse, drawn)


def _attention_bwd(attrs, name, residuals, cotangents):
    operands, bias, sink, segments, out, lse, drawn = residuals
    dout, *_ = cotangents
    outputs = (*(f"d{name}" for name in _OPERANDS[len(operands)]), *("dbias",) * attrs.has_dbias)
    arrays, whole = _by_name(operands), _whole(bias, operands)
    # exp(low - 0) is 0: no gradient comes of queries that see no key.
    seen = lse if bias is None else jnp.where(lse == -jnp.inf, 0, lse)
    grads = attention_bwd(dout, *arrays, whole, segments, out, seen, drawn, outputs=outputs, **attrs.backward())
    doperands = tuple(like(grad, x) for grad, x in zip(grads, operands))
    dbias = None
    if attrs.has_dbias:
        full = as_rank(bias, whole.ndim)
        dbias = like(sum_to(grads[-1], full.shape).reshape(bias.shape), bias)
    return doperands, dbias, gradient_of_sink(sink, out, lse, dout), None, None


attention.defvjp(_attention_fwd, _attention_bwd)


def attention_fwd_of(operands: Sequence[jax.Array], form: Form) -> tuple[jax.Array, jax.Array]:
    """-> out, lse of `attention`, without a derivative."""
    bias, segments = form.extras(*operands[:2])
    return _attention_fwd(operands, bias, None, segments, None, form.attrs, None)[0][:2]


def attention_bwd_of(operands: Sequence[jax.Array], form: Form, dout: jax.Array, out: jax.Array, lse: jax.Array) -> Any:
    """-> the gradients of operands (q, k, v). out, lse: of all keys that the queries see, also of others than k."""
    bias, segments = form.extras(*operands[:2])
    residuals = (operands, bias, None, segments, out, lse, None)
    return _attention_bwd(form.attrs, None, residuals, (dout, None))[0]


def with_sink(out: jax.Array, lse: jax.Array, sink: jax.Array | None) -> tuple[jax.Array, jax.Array]:
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


def gradient_of_sink(sink: jax.Array | None, out: jax.Array, lse: jax.Array, dout: jax.Array) -> jax.Array | None:
    """The probability of the sink, times what the output would lose to it; None without one."""
    if sink is None:
        return None
    dtype = sum_type(out)
    delta = jnp.swapaxes(jnp.sum(dout.astype(dtype) * out.astype(dtype), -1), -1, -2)  # [b..., h, s]
    by_head = -jnp.sum(jnp.exp(as_rank(sink[:, None], lse.ndim) - lse) * delta, (*range(lse.ndim - 2), -1))
    return like(by_head if sink.size == by_head.size else jnp.sum(by_head, keepdims=True), sink)


_OPERANDS = {3: ("q", "k", "v"), 2: ("q", "kv"), 1: ("qkv",)}


def _by_name(operands):
    """(q, k, v), (q, kv) or (qkv,) -> q, k, v, kv, qkv, None where absent."""
    given = dict(zip(_OPERANDS[len(operands)], operands))
    return [given.get(name) for name in ("q", "k", "v", "kv", "qkv")]


def _whole(bias, operands):
    """The bias [b... or 1, h or 1, s, t]."""
    if bias is None:
        return None
    q, k, _ = operand_types(*operands)
    bias = as_rank(bias, len(q.shape))
    return jnp.broadcast_to(bias, (*bias.shape[:-2], q.shape[-3], k.shape[-3]))
