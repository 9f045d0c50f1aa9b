"""Attention in float64 numpy, head by head, written apart from te_jax, and what the attention tests share."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from arrays import on_device

from te_jax.ops.attention import dot_product_attention

# Relative Frobenius bounds. Operands count as exact; u is the unit roundoff.
# f32 (u = 2^-24): logits of about unit size carry the errors of d = 16 products, the softmax passes them on
# with factor 1: 16 u for the output; gradients subtract two sums of like size: twice that.
# bf16 (u = 2^-9), f16 (2^-12): the probabilities, or their gradients, are rounded once before the second
# product, and the result once: 2 u; gradients subtract what a rounded `out` gives from a term of like size: 4 u.
BOUND = {
    jnp.float32: (16 * 2**-24, 32 * 2**-24),
    jnp.bfloat16: (2 * 2**-9, 4 * 2**-9),
    jnp.float16: (2 * 2**-12, 4 * 2**-12),
}

# The attributes of the ops for queries that see all keys, and no dropout; `scale` is to be added.
OPEN = dict(left=-1, right=-1, bottom_right=False, seq_major=False, interleaved=False, dropout_rate=0.0)


def operands(shape, dtype=jnp.float32, seed=0):
    """q, k, v, dout."""
    b, s, t, h, g, d, e = shape
    rng = np.random.default_rng(seed)
    sizes = (b, s, h, d), (b, t, g, d), (b, t, g, e), (b, s, h, e)
    return [on_device(rng.standard_normal(size), dtype) for size in sizes]


def one_hot_values(k, e):
    """Values [b, t, g, e], as many as it takes, whose outs, side by side, are the probabilities."""
    b, t, g, _ = k.shape
    columns = np.eye(t, -(-t // e) * e, dtype=np.float32).reshape(t, -1, e)
    return [on_device(np.broadcast_to(columns[:, None, i], (b, t, g, e)), k.dtype) for i in range(columns.shape[1])]


def error(got, want):
    """Relative Frobenius error; absolute where the wanted value is zero."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape and np.all(np.isfinite(got))
    return np.linalg.norm(got - want) / (np.linalg.norm(want) or 1.0)


def run(q, k, v, dout, *, bias=None, softmax_offset=None, **kwargs):
    """out and the gradients of q, k, v, and of bias and softmax_offset where given."""
    extra = {name: x for name, x in (("bias", bias), ("softmax_offset", softmax_offset)) if x is not None}
    arrays = {name: kwargs.pop(name) for name in ARRAYS if name in kwargs}
    return traced_run(q, k, v, dout, extra, arrays, tuple(kwargs.items()))


ARRAYS = ("mask", "dropout_rng", "sequence_descriptor")


@partial(jax.jit, static_argnums=6)
def traced_run(q, k, v, dout, extra, arrays, kwargs):
    call = lambda q, k, v, extra: dot_product_attention(q, k, v, **extra, **arrays, **dict(kwargs))
    out, vjp = jax.vjp(call, q, k, v, extra)
    dq, dk, dv, dextra = vjp(dout)
    return dict(out=out, dq=dq, dk=dk, dv=dv, **{f"d{name}": grad for name, grad in dextra.items()})


def check(got, want, dtype=jnp.float32):
    fwd, bwd = BOUND[dtype]
    for name, value in got.items():
        assert error(value, want[name]) <= (fwd if name == "out" else bwd), (name, error(value, want[name]))


def visible(s, t, *, causal=False, bottom_right=False, window=(-1, -1)):
    """bool[s, t]: whether query i of s sees key j of t."""
    i, j = np.ogrid[:s, :t]
    at, (left, right) = i + (t - s if bottom_right else 0), window
    seen = (j <= at) | (not causal)
    return seen & ((j >= at - left) | (left < 0)) & ((j <= at + right) | (right < 0))


def attend(q, k, v, *, seen, scale, bias=None, pre_scale=False, joins=None, factor=None, dout=None):
    """q [b, s, h, d], k [b, t, g, d], v [b, t, g, e] -> dict of out, lse [b, h, s] and the gradients.

    seen: bool [b, h, s, t]. bias: [b, h, s, t]. joins: logit per head [h] that joins the denominator.
    factor: [b, h, s, t], by which dropout multiplies the probabilities.
    """
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    (b, s, h, _), (t, g, e) = q.shape, v.shape[1:]
    spread = lambda x: np.broadcast_to(x, (b, h, s, t))
    bias, factor, seen = spread(0.0 if bias is None else bias), spread(1.0 if factor is None else factor), spread(seen)
    dout = np.zeros((b, s, h, e)) if dout is None else np.asarray(dout, np.float64)
    got = dict(out=np.zeros((b, s, h, e)), lse=np.zeros((b, h, s)), dq=np.zeros_like(q))
    got |= dict(dk=np.zeros_like(k), dv=np.zeros_like(v), dbias=np.zeros((b, h, s, t)), djoins=np.zeros(h))
    for n, head in np.ndindex(b, h):
        at, group = (n, slice(None), head), (n, slice(None), head // (h // g))
        dots, extra = q[at] @ k[group].T, -np.inf if joins is None else float(joins[head])
        logits = scale * (dots + bias[n, head]) if pre_scale else scale * dots + bias[n, head]
        logits = np.where(seen[n, head], logits, -np.inf)
        top = np.maximum(logits.max(-1, keepdims=True), extra)
        top = np.where(top == -np.inf, 0, top)
        weights, joined = np.exp(logits - top), np.exp(extra - top)
        total = weights.sum(-1, keepdims=True) + joined
        blind = total == 0  # a query that sees nothing: its probabilities are 0
        total = np.where(blind, 1, total)
        probs = weights / total
        dropped = probs * factor[n, head]
        got["out"][at] = dropped @ v[group]
        got["lse"][n, head] = np.where(blind, -np.inf, top + np.log(total))[:, 0]
        dprobs = dout[at] @ v[group].T * factor[n, head]
        mean = (probs * dprobs).sum(-1, keepdims=True)
        dlogits = probs * (dprobs - mean)
        got["djoins"][head] -= (joined / total * mean).sum()
        got["dbias"][n, head] = dlogits * (scale if pre_scale else 1)
        got["dq"][at] = scale * dlogits @ k[group]
        got["dk"][group] += scale * dlogits.T @ q[at]
        got["dv"][group] += dropped.T @ dout[at]
    return got


def attend_dense(q, k, v, dout, *, causal, scale, factor=None):
    """out, lse, dq, dk, dv of full or causal attention."""
    seen = visible(q.shape[1], k.shape[1], causal=causal)
    got = attend(q, k, v, seen=seen, scale=scale, factor=factor, dout=dout)
    return tuple(got[name] for name in ("out", "lse", "dq", "dk", "dv"))
