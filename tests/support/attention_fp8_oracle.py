"""FP8 attention in float64 numpy without any rounding inside, and how far rounding may take a result from it."""

import jax
import jax.numpy as jnp
import numpy as np
from arrays import on_device

from te_jax.ops.attention.fp8 import BackwardScales, ForwardScales

E4M3, E5M2 = jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.float8_e5m2)


def on_gpu() -> bool:
    return jax.default_backend() == "gpu"


def half_step(x, dtype):
    """How far the nearest number of `dtype` may be from x: relative, or half of the smallest subnormal."""
    info = jnp.finfo(dtype)
    return np.maximum(np.abs(x) * float(info.eps) / 2, float(info.smallest_subnormal) / 2)


def sum_error(terms: int) -> float:
    """How far a sum of FP8 products may be off, relative to `terms` times its largest. Hopper's tensor cores align
    products and sum to the largest and keep 13 bits behind it; elsewhere the sums are f32."""
    return terms * (2.0**-13 if on_gpu() else 2.0**-23)


def fp8_array(rng, shape, dtype=E4M3, largest=4.0):
    """-> data, the scale that it was multiplied with. A normal distribution, cut at `largest`, over the whole type."""
    scale = np.float32(float(jnp.finfo(dtype).max) / largest)
    x = np.clip(rng.standard_normal(shape), -largest, largest)
    return on_device(x * scale, dtype), scale


def _wide(*arrays):
    return (np.asarray(x, np.float64) for x in arrays)


def _heads(x, r):
    """[b, t, g, d] -> [b, h, t, d]."""
    return np.repeat(np.swapaxes(x, 1, 2), r, axis=1)


def _logits(q, k, scale, causal):
    logits = scale * q @ np.swapaxes(k, -1, -2)
    return np.where(np.tri(*logits.shape[-2:], dtype=bool), logits, -np.inf) if causal else logits


def _product_error(x, y):
    """Of the products of all rows of x [..., s, d] and y [..., t, d]."""
    largest = np.max(np.abs(x), axis=(0, 1, 2)) * np.max(np.abs(y), axis=(0, 1, 2))
    return sum_error(x.shape[-1]) * largest.max()


def forward(q, k, v, scales, *, causal, scale):
    """{name: (value, what it may be off)} of o and lse; o as it is before it is scaled and stored, [b, s, h, d]."""
    by, r = ForwardScales(*np.asarray(scales, np.float64)), q.shape[2] // k.shape[2]
    q, k, v = _wide(q, k, v)
    q, k, v = np.swapaxes(q, 1, 2) * by.q_inv, _heads(k * by.k_inv, r), _heads(v * by.v_inv, r)
    logits, off = _logits(q, k, scale, causal), scale * _product_error(q, k)
    top = logits.max(-1, keepdims=True)
    weights = np.exp(logits - top)
    total = weights.sum(-1, keepdims=True)
    probs = weights / total
    rounding = half_step(weights * by.s, E4M3) / by.s / total * (probs > 0)
    largest = probs.max(-1, keepdims=True) * np.abs(v).max()
    o_off = (rounding + np.expm1(2 * off) * probs) @ np.abs(v) + sum_error(v.shape[-2]) * largest
    lse = (top + np.log(total))[..., 0]
    return dict(o=(np.swapaxes(probs @ v, 1, 2), np.swapaxes(o_off, 1, 2)), lse=(lse, off + 1e-5))


def backward(dout, q, k, v, out, lse, scales, *, causal, scale):
    """{name: (value, what it may be off)} of dq, dk, dv as they are before they are stored, and of dp [b, h, s, t]."""
    by, dtype, g = BackwardScales(*np.asarray(scales, np.float64)), dout.dtype, k.shape[2]
    r = q.shape[2] // g
    dout, q, k, v, out, lse = _wide(dout, q, k, v, out, lse)
    q, dout, out = (np.swapaxes(x, 1, 2) * inv for x, inv in ((q, by.q_inv), (dout, by.dout_inv), (out, by.out_inv)))
    k, v = _heads(k * by.k_inv, r), _heads(v * by.v_inv, r)
    off, dprobs_off = scale * _product_error(q, k), _product_error(dout, v)
    probs = np.exp(_logits(q, k, scale, causal) - lse[..., None])
    dprobs = dout @ np.swapaxes(v, -1, -2) - (dout * out).sum(-1, keepdims=True)
    dp = scale * probs * dprobs
    probs_off = np.expm1(off) * probs
    dp_off = scale * (probs * dprobs_off + probs_off * (np.abs(dprobs) + dprobs_off))
    probs_off = probs_off + half_step(probs * by.s, E4M3) / by.s * (probs > 0)
    dp8_off = dp_off + half_step((np.abs(dp) + dp_off) * by.dp, dtype) / by.dp * (probs > 0)
    product = lambda x, x_off, y: (
        x @ y,
        x_off @ np.abs(y) + sum_error(y.shape[-2]) * np.abs(x).max() * np.abs(y).max(),
    )
    t = lambda x: np.swapaxes(x, -1, -2)
    of_group = lambda pair: tuple(np.swapaxes(x.reshape(len(x), g, r, *x.shape[2:]).sum(2), 1, 2) for x in pair)
    return dict(
        dq=tuple(np.swapaxes(x, 1, 2) for x in product(dp, dp8_off, k)),
        dk=of_group(product(t(dp), t(dp8_off), q)),
        dv=of_group(product(t(probs), t(probs_off), dout)),
        dp=(dp, dp_off),
    )


def stored_close(got, value, off, scale, dtype):
    """`got` is value * scale, rounded once to `dtype`, where value may be off by `off`."""
    largest = float(jnp.finfo(dtype).max)
    want, off = np.clip(value * scale, -largest, largest), off * scale * 1.001 + 1e-6
    excess = np.abs(np.asarray(got, np.float64) - want) - off - half_step(np.abs(want) + off, dtype)
    assert got.dtype == dtype and not np.isnan(excess).any()
    assert excess.max() <= 0, f"off by {excess.max()} too much at {np.unravel_index(excess.argmax(), excess.shape)}"


def amax_close(got, value, off):
    """`got` is the largest |value|, of which each may be off by `off`."""
    assert abs(float(got) - np.abs(value).max()) <= np.max(off) * 1.001 + 1e-6 * np.abs(value).max()
