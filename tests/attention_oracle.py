"""Attention in float64 numpy, row by row, written apart from te_jax, and what the attention tests share."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

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


def operands(shape, dtype=jnp.float32, seed=0):
    """q, k, v, dout."""
    b, s, t, h, g, d, e = shape
    rng = np.random.default_rng(seed)
    sizes = (b, s, h, d), (b, t, g, d), (b, t, g, e), (b, s, h, e)
    return [jnp.asarray(rng.standard_normal(size), jnp.float32).astype(dtype) for size in sizes]


def one_hot_values(k, e):
    """Values [b, t, g, e], as many as it takes, whose outs, side by side, are the probabilities."""
    b, t, g, _ = k.shape
    columns = np.eye(t, -(-t // e) * e, dtype=np.float32).reshape(t, -1, e)
    return [jnp.broadcast_to(jnp.asarray(columns[:, None, i], k.dtype), (b, t, g, e)) for i in range(columns.shape[1])]


def error(got, want):
    """Relative Frobenius error; absolute where the wanted value is zero."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape and np.all(np.isfinite(got))
    return np.linalg.norm(got - want) / (np.linalg.norm(want) or 1.0)


def run(q, k, v, dout, *, bias=None, softmax_offset=None, **kwargs):
    """out and the gradients of q, k, v, and of bias and softmax_offset where given."""
    extra = {name: x for name, x in (("bias", bias), ("softmax_offset", softmax_offset)) if x is not None}
    arrays = {name: kwargs.pop(name) for name in ARRAYS if name in kwargs}
    return _run(q, k, v, dout, extra, arrays, tuple(kwargs.items()))


ARRAYS = ("mask", "dropout_rng", "sequence_descriptor")


@partial(jax.jit, static_argnums=6)
def _run(q, k, v, dout, extra, arrays, kwargs):
    call = lambda q, k, v, extra: dot_product_attention(q, k, v, **extra, **arrays, **dict(kwargs))
    out, vjp = jax.vjp(call, q, k, v, extra)
    dq, dk, dv, dextra = vjp(dout)
    return dict(out=out, dq=dq, dk=dk, dv=dv, **{f"d{name}": grad for name, grad in dextra.items()})


def check(got, want, dtype=jnp.float32):
    fwd, bwd = BOUND[dtype]
    for name, value in got.items():
        assert error(value, want[name]) <= (fwd if name == "out" else bwd), (name, error(value, want[name]))


def sees(i, j, s, t, *, causal=False, bottom_right=False, window=(-1, -1)):
    """Whether query i of s sees key j of t."""
    at = i + (t - s) if bottom_right else i
    left, right = window
    if causal and j > at:
        return False
    if left >= 0 and j < at - left:
        return False
    return not (right >= 0 and j > at + right)


def visible(s, t, **kwargs):
    """bool[s, t]."""
    return np.array([[sees(i, j, s, t, **kwargs) for j in range(t)] for i in range(s)], bool).reshape(s, t)


def attend(q, k, v, *, seen, scale, bias=None, pre_scale=False, joins=None, factor=None, dout=None):
    """q [b, s, h, d], k [b, t, g, d], v [b, t, g, e] -> dict of out, lse [b, h, s] and the gradients.

    seen: bool [b, h, s, t]. bias: [b, h, s, t]. joins: logit per head [h] that joins the denominator.
    factor: [b, h, s, t], by which dropout multiplies the probabilities.
    """
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    b, s, h, d = q.shape
    t, g = k.shape[1:3]
    bias = np.zeros((b, h, s, t)) if bias is None else np.broadcast_to(np.asarray(bias, np.float64), (b, h, s, t))
    factor = np.ones((b, h, s, t)) if factor is None else factor
    dout = np.zeros((b, s, h, v.shape[-1])) if dout is None else np.asarray(dout, np.float64)
    seen = np.broadcast_to(seen, (b, h, s, t))
    got = dict(out=np.zeros((b, s, h, v.shape[-1])), lse=np.full((b, h, s), -np.inf), dq=np.zeros_like(q))
    got |= dict(dk=np.zeros_like(k), dv=np.zeros_like(v), dbias=np.zeros((b, h, s, t)), djoins=np.zeros(h))
    for n, head, i in np.ndindex(b, h, s):
        keys, group = np.nonzero(seen[n, head, i])[0], head // (h // g)
        if keys.size == 0:
            continue
        row_k, row_v, row_bias = k[n, keys, group], v[n, keys, group], bias[n, head, i, keys]
        dots = row_k @ q[n, i, head]
        logits = scale * (dots + row_bias) if pre_scale else scale * dots + row_bias
        extra = -np.inf if joins is None else float(joins[head])
        top = max(logits.max(), extra)
        total = np.exp(logits - top).sum() + np.exp(extra - top)
        probs, dropped = np.exp(logits - top) / total, factor[n, head, i, keys]
        row_dout = dout[n, i, head]
        got["out"][n, i, head] = (probs * dropped) @ row_v
        got["lse"][n, head, i] = top + np.log(total)
        dprobs = (row_v @ row_dout) * dropped
        mean = probs @ dprobs
        dlogits = probs * (dprobs - mean)
        got["djoins"][head] -= np.exp(extra - top) / total * mean
        got["dbias"][n, head, i, keys] = dlogits * (scale if pre_scale else 1)
        got["dq"][n, i, head] = scale * dlogits @ row_k
        got["dk"][n, keys, group] += scale * np.outer(dlogits, q[n, i, head])
        got["dv"][n, keys, group] += np.outer(probs * dropped, row_dout)
    return got


def attend_dense(q, k, v, dout, *, causal, scale, factor=None):
    """out, lse, dq, dk, dv as `attend`, vectorised over one head at a time, for large arrays."""
    q, k, v, dout = (np.asarray(x, np.float64) for x in (q, k, v, dout))
    h, ratio = q.shape[2], q.shape[2] // k.shape[2]
    out, lse = np.zeros(dout.shape), np.zeros((q.shape[0], h, q.shape[1]))
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    for n, head in np.ndindex(q.shape[0], h):
        g = head // ratio
        logits = scale * q[n, :, head] @ k[n, :, g].T
        if causal:
            logits[np.triu(np.ones(logits.shape, bool), 1)] = -np.inf
        top = logits.max(-1, keepdims=True)
        weights = np.exp(logits - top)
        total = weights.sum(-1, keepdims=True)
        probs = weights / total
        dropped = np.ones_like(probs) if factor is None else factor[n, head]
        out[n, :, head] = (probs * dropped) @ v[n, :, g]
        lse[n, head] = (top + np.log(total))[:, 0]
        dprobs = dropped * (dout[n, :, head] @ v[n, :, g].T)
        dlogits = probs * (dprobs - (probs * dprobs).sum(-1, keepdims=True))
        dq[n, :, head] = scale * dlogits @ k[n, :, g]
        dk[n, :, g] += scale * dlogits.T @ q[n, :, head]
        dv[n, :, g] += (probs * dropped).T @ dout[n, :, head]
    return out, lse, dq, dk, dv
