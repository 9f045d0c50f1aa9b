"""Attention on FP8 operands: cuDNN on CUDA, plain JAX that emulates it elsewhere."""

from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from te_jax.core import extension
from te_jax.core.amax import amax
from te_jax.core.op import Op
from te_jax.ops.attention.mask import Band, Mask
from te_jax.ops.attention.op import flatten_batch
from te_jax.ops.attention.options import AttentionOptions
from te_jax.ops.attention.reference import finite_top, group_heads, mix, scores
from te_jax.ops.formats import saturate

E4M3, E5M2 = jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.float8_e5m2)
S_SCALE = 256.0
"""The scale of probabilities before E4M3. They are 1 at most, before and after their sum divides them, so they need no
state. A power of two below 448 multiplies exactly and leaves room."""

LARGEST_SCALE = 2.0**60
"""The largest scale that cuDNN is given. It takes the amax of a product with the scale and divides the amax by the
scale again: with a scale of 0 the quotient is NaN, and where the product overflows it is inf. Neither moves a delayed
scale, which would then stay. Numbers up to 2**68 are safe under this bound."""


class ForwardScales(NamedTuple):
    """Scales of the forward pass, f32[] each: x is stored as data = x * scale, and read as data * inv.

    All scales are positive; the scale of a result lies between 1 / LARGEST_SCALE and LARGEST_SCALE.
    """

    q_inv: jax.Array
    k_inv: jax.Array
    v_inv: jax.Array
    s: jax.Array  # scales the probabilities
    s_inv: jax.Array
    out: jax.Array


class BackwardScales(NamedTuple):
    """Scales of the backward pass; the first five are the scales of the forward pass."""

    q_inv: jax.Array
    k_inv: jax.Array
    v_inv: jax.Array
    s: jax.Array
    s_inv: jax.Array
    out_inv: jax.Array
    dout_inv: jax.Array
    dp: jax.Array  # scales the gradient of q k^T, within the bounds of a result
    dp_inv: jax.Array
    dq: jax.Array
    dk: jax.Array
    dv: jax.Array


def forward_scales(q: jax.Array, k: jax.Array, v: jax.Array, out: jax.Array) -> jax.Array:
    """f32[6], the operand `scales` of `attention_fp8_fwd`, from the scale of each tensor."""
    return _pack(ForwardScales(1 / q, 1 / k, 1 / v, S_SCALE, 1 / S_SCALE, out))


def backward_scales(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    out: jax.Array,
    dout: jax.Array,
    dp: jax.Array,
    dq: jax.Array,
    dk: jax.Array,
    dv: jax.Array,
) -> jax.Array:
    """f32[12], the operand `scales` of `attention_fp8_bwd`, from the scale of each tensor."""
    inverse = (1 / q, 1 / k, 1 / v, S_SCALE, 1 / S_SCALE, 1 / out, 1 / dout)
    return _pack(BackwardScales(*inverse, dp, 1 / dp, dq, dk, dv))


def _pack(scales) -> jax.Array:
    return jnp.stack([jnp.asarray(scale, jnp.float32) for scale in scales])


# ---- the meaning, in plain JAX -------------------------------------------------------------------


def _in_f32(*arrays):
    return tuple(x.astype(jnp.float32) for x in arrays)


def _scaled_logits(q, k, factor, causal):
    """The logits f32[b..., h, s, t] of f32 operands."""
    logits = factor * scores(q, k)
    hidden = Mask(Band(right=0)).hides(*logits.shape[-2:]) if causal else None
    return logits if hidden is None else jnp.where(hidden, -jnp.inf, logits)


def _round(x, scale, dtype):
    """x * scale as it is stored, in f32. The barrier keeps the rounding: on a GPU, XLA drops a cast and its inverse."""
    return lax.optimization_barrier(saturate(x * scale, dtype)).astype(jnp.float32)


def _fwd_reference(q, k, v, scales, *, causal, scale):
    by, dtype = ForwardScales(*scales), q.dtype
    q, k, v = _in_f32(q, k, v)
    logits = _scaled_logits(q, k, scale * by.q_inv * by.k_inv, causal)
    top = finite_top(jnp.max(logits, -1, keepdims=True, initial=-jnp.inf))
    weights = jnp.exp(logits - top)  # cuDNN rounds the weights, and divides by the sum of the unrounded ones
    total = jnp.sum(weights, -1, keepdims=True)
    out = mix(_round(weights, by.s, dtype), v) * (by.s_inv * by.v_inv)
    out = out / jnp.swapaxes(jnp.where(total == 0, 1, total), -2, -3)
    return saturate(out * by.out, dtype), (top + jnp.log(total))[..., 0], amax(out)


def _onto_keys(x, y, g):
    """x^T y per head, summed over the heads of a group: [b..., (g r), s, t], [b..., s, (g r), d] -> [b..., t, g, d]."""
    y = y.reshape(*y.shape[:-2], g, y.shape[-2] // g, y.shape[-1])
    return jnp.einsum("...grst,...sgrd->...tgd", group_heads(x, g), y, precision=lax.Precision.HIGHEST)


def _bwd_reference(dout, q, k, v, out, lse, scales, *, causal, scale):
    by, dtype, forward, g = BackwardScales(*scales), dout.dtype, q.dtype, k.shape[-2]
    dout, q, k, v, out = _in_f32(dout, q, k, v, out)
    probs = jnp.exp(_scaled_logits(q, k, scale * by.q_inv * by.k_inv, causal) - finite_top(lse)[..., None])
    delta = jnp.sum(dout * out, -1) * (by.dout_inv * by.out_inv)  # [b..., s, h]: the sum of probs * dprobs over t
    dprobs = scores(dout, v) * (by.dout_inv * by.v_inv)
    dp = scale * probs * (dprobs - jnp.swapaxes(delta, -1, -2)[..., None])
    dp8 = _round(dp, by.dp, dtype)
    dq = mix(dp8, k) * (by.dp_inv * by.k_inv)
    dk = _onto_keys(dp8, q, g) * (by.dp_inv * by.q_inv)
    dv = _onto_keys(_round(probs, by.s, forward), dout, g) * (by.s_inv * by.dout_inv)
    stored = [saturate(x * factor, dtype) for x, factor in ((dq, by.dq), (dk, by.dk), (dv, by.dv))]
    return (*stored, *map(amax, (dq, dk, dv, dp)))


# ---- the ops -------------------------------------------------------------------------------------


def cudnn_refuses_fp8(q: Any, k: Any, backward: bool = False) -> str:
    """Why cuDNN has no FP8 attention for these operands, on a GPU that has some; "" if it has."""
    (s, _, d), t = q.shape[-3:], k.shape[-3]
    if 0 in (*q.shape, *k.shape):
        return f"an operand is empty: q{list(q.shape)}, k{list(k.shape)}"
    if backward and d != 128:  # on Hopper: cudnn_frontend 1.18, node/sdpa_fp8_bwd.h
        return f"the head dim is {d}; cuDNN's FP8 gradients are for 128"
    if d % 16 or d > 128:
        return f"the head dim is {d}; cuDNN's FP8 attention takes multiples of 16 up to 128"
    if s < 2 or t < 2:
        return f"q has {s} and k has {t} positions; cuDNN takes 2 and more"
    if backward and (s % 128 or t % 128):  # cuDNN 9.19 has plans for other lengths, but their last rows are wrong
        return f"q has {s} and k has {t} positions; cuDNN's FP8 gradients are right for multiples of 128"
    return ""


@cache
def gpu_refuses_fp8() -> str:
    """Why this process's GPU has no FP8 attention; "" if it has, or if there is no GPU."""
    capability = extension.compute_capability()
    if capability is None or capability.split(".")[0] in ("9", "10"):
        return ""
    return f"the GPU has compute capability {capability}; cuDNN's FP8 attention needs 9.0 (Hopper) or 10.x (Blackwell)"


def fp8_refuses(q: Any, k: Any, v: Any, options: AttentionOptions) -> str:
    """Why FP8 attention does not serve this call; "" if it does."""
    s, t = q.shape[-3], k.shape[-3]
    mask = options.mask
    left, right, _ = mask.band.trimmed(s, t)
    served = left is None and (right is None or right == mask.band.shift(s, t) == 0)
    for is_asked, what in (
        (options.cut is not None, options.cut and options.cut.text),
        (options.has_bias, "a bias is given"),
        (mask.array is not None, "a mask is given"),
        (mask.segments is not None, "a sequence_descriptor (or a cache) is given"),
        (options.dropout_rate > 0, f"dropout_rate is {options.dropout_rate}"),
        (options.softmax_type != "vanilla", f"softmax_type is {options.softmax_type!r}"),
        (options.return_max_logit or options.return_lse, "return_max_logit or return_lse is set"),
        (options.scale <= 0, f"scale is {options.scale}"),
        (options.logit_softcap, f"logit_softcap is {options.logit_softcap}"),
        (options.deterministic, "deterministic is set"),
        (options.implementation is not None, f"implementation is {options.implementation!r}"),
        (not served, f"{mask.label} on {s} queries and {t} keys is neither full nor causal from the top left"),
        (q.dtype not in (jnp.bfloat16, jnp.float16), f"q is {q.dtype}, not bfloat16 or float16"),
        (v.shape[-1] != q.shape[-1], f"the head dim of v is {v.shape[-1]}, of q {q.shape[-1]}"),
    ):
        if is_asked:
            return what
    return cudnn_refuses_fp8(q, k) or gpu_refuses_fp8()


def _workspace(kind, q, k, dtype, *, outputs, causal, scale) -> int:
    """The bytes of scratch memory, by cuDNN's plan where there is a GPU; else (cross-lowering) an upper bound."""
    del outputs  # the kernel always has all of them
    (b, s, h, d), (t, g) = q.shape, k.shape[1:3]
    module = extension.require_for_lowering()
    if module:
        return module.attention_fp8_workspace(kind, dtype == E5M2, b, s, t, h, g, d, causal, scale)
    slack = 16 << 20
    if kind == "fwd":
        return slack + 8 * b * h * s
    # The bound counts dq, dk, dv of every query head in f32, row sums, and all six operands once more, transposed.
    return slack + b * h * (4 * (s * (d + 2) + 2 * t * d) + (3 * s + 3 * t) * d)


def _fwd_cuda(call, q, k, v, scales, **attrs):
    if cudnn_refuses_fp8(q, k) or gpu_refuses_fp8():  # plain JAX serves every size
        return _fwd_reference(q, k, v, scales, **attrs)
    out, lse, amax = call(*(flatten_batch(x, 3) for x in (q, k, v)), scales, **attrs)
    return [*(x.reshape(*q.shape[:-3], *x.shape[1:]) for x in (out, lse)), amax]


def _bwd_cuda(call, dout, q, k, v, out, lse, scales, **attrs):
    if cudnn_refuses_fp8(q, k, backward=True) or gpu_refuses_fp8():
        return _bwd_reference(dout, q, k, v, out, lse, scales, **attrs)
    results = call(*(flatten_batch(x, 3) for x in (dout, q, k, v, out)), flatten_batch(lse, 2), scales, **attrs)
    return [*(grad.reshape(x.shape) for grad, x in zip(results, (q, k, v))), *results[3:]]


attention_fp8_fwd: Op = Op(
    "te_attention_fp8_fwd",
    "q: b... s (g r) d, k: b... t g d, v: b... t g d, scales: n -> out: b... s (g r) d, lse: b... (g r) s, amax:",
    replicated="s t d r n",
    combine={"amax": "max"},
    fenced="out lse",
    dtypes=lambda q, *_, **attrs: (q, jnp.float32, jnp.float32),
    reference=_fwd_reference,
    workspace=lambda q, k, *_, **attrs: _workspace("fwd", q, k, None, **attrs),
    cuda=_fwd_cuda,
)
"""softmax(scale * q k^T) v per head on E4M3 operands; query head i reads key head i // r.

scales: f32[6], the `ForwardScales`. causal: query i sees keys 0 .. i. scale: float, multiplies the logits.
out: E4M3, saturate(o * scales.out). lse: f32, natural log of the sum of exp(logits) over the keys seen.
amax: f32 [], max |o| before o is scaled and rounded; cuDNN's amax leaves out a NaN in o.

The probabilities that meet v are E4M3 too. They are rounded relative to the largest one of a row (in cuDNN, the largest
one up to that block of keys), and divided by the sum of the unrounded ones.
"""

attention_fp8_bwd: Op = Op(
    "te_attention_fp8_bwd",
    "dout: b... s (g r) d, q: b... s (g r) d, k: b... t g d, v: b... t g d, out: b... s (g r) d, lse: b... (g r) s, "
    "scales: n -> dq: b... s (g r) d, dk: b... t g d, dv: b... t g d, dq_amax:, dk_amax:, dv_amax:, dp_amax:",
    replicated="s t d r n",
    combine=dict.fromkeys(("dq_amax", "dk_amax", "dv_amax", "dp_amax"), "max"),
    dtypes=lambda dout, *_, **attrs: (dout, dout, dout, *(jnp.float32,) * 4),
    reference=_bwd_reference,
    workspace=lambda dout, q, k, *_, **attrs: _workspace("bwd", q, k, dout.dtype, **attrs),
    cuda=_bwd_cuda,
)
"""The gradients of `attention_fp8_fwd`, from its operands and results and the gradient dout, E4M3 or E5M2.

scales: f32[12], the `BackwardScales`. dq, dk, dv: saturate(gradient * its scale), in dout's type.
*_amax: f32 [], max |gradient| before the gradient is scaled and rounded. dp, the gradient of q k^T, is
scale * probs * (dprobs - delta); it meets k and q multiplied by scales.dp, in dout's type.
"""
