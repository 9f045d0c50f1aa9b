"""softmax(scale * q k^T) v in FP8, with a delayed scale for every tensor that is stored."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.core import ShapedArray

from te_jax._arrays import as_jax
from te_jax._check import NONE, Kind, check, one_of
from te_jax._types import align, like
from te_jax.checkpoint_policies import ATTENTION, QUANTIZED, STATISTICS, named
from te_jax.fp8 import AttentionMetas, TensorMeta, cotangent, observation
from te_jax.ops.attention import undivided_groups
from te_jax.ops.attention_check import Options, check_options
from te_jax.ops.attention_fp8 import (
    LARGEST_SCALE,
    attention_fp8_bwd,
    attention_fp8_fwd,
    backward_scales,
    cudnn_refuses_fp8,
    forward_scales,
    gpu_refuses_fp8,
)
from te_jax.ops.attention_op import attention_bwd
from te_jax.ops.quantize import quantize
from te_jax.recipe import DelayedScaling
from te_jax.sharding import stage_axes

_NAME = "te_jax.layers.attention_fp8"
_METAS = Kind("fp8.AttentionMetas", lambda metas: isinstance(metas, AttentionMetas))
_BACKWARD = NONE | one_of("fp8", "bf16")


class _Config(NamedTuple):
    """What is static."""

    recipe: DelayedScaling
    causal: bool
    scale: float
    fp8_backward: bool
    checkpoint: str | None
    types: tuple[ShapedArray, ...]  # of q, k, v: their gradients have the same
    stage_axes: frozenset[str]  # as in `_fp8.Config`


class _Saved(NamedTuple):
    """What the backward pass reads."""

    operands: tuple[jax.Array, ...]  # q, k, v in FP8
    out: jax.Array  # in FP8 for FP8 gradients, else in q's type
    lse: jax.Array  # f32[b..., h, s]
    amaxes: tuple[jax.Array, ...]  # as `fp8.cotangent` takes them, of q, k, v and the output
    metas: AttentionMetas


def attention_fp8_refuses(q, k, v, **kwargs) -> str:
    """Why `attention_fp8` does not serve a call with these keywords of `dot_product_attention`; "" if it does."""
    return _why_not(q, k, v, check_options(_NAME, q, k, v, needs_rng=False, **kwargs))


def _why_not(q, k, v, options: Options) -> str:
    s, t = q.shape[-3], k.shape[-3]
    left, right, _ = options.band.trimmed(s, t)
    served = left is None and (right is None or right == options.band.shift(s, t) == 0)
    mask = f"attn_mask_type {options.attn_mask_type!r} with window_size {options.window_size}"
    for is_asked, what in (
        (options.has_bias, "a bias is given"),
        (options.mask is not None, "a mask is given"),
        (options.sequence_descriptor is not None, "a sequence_descriptor (or a cache) is given"),
        (options.dropout_rate > 0, f"dropout_rate is {options.dropout_rate}"),
        (options.softmax_type != "vanilla", f"softmax_type is {options.softmax_type!r}"),
        (options.return_max_logit or options.return_lse, "return_max_logit or return_lse is set"),
        (options.scale <= 0, f"scale is {options.scale}"),
        (options.deterministic, "deterministic is set"),
        (not served, f"{mask} on {s} queries and {t} keys is neither full nor causal from the top left"),
        (q.dtype not in (jnp.bfloat16, jnp.float16), f"q is {q.dtype}, not bfloat16 or float16"),
        (v.shape[-1] != q.shape[-1], f"the head dim of v is {v.shape[-1]}, of q {q.shape[-1]}"),
    ):
        if is_asked:
            return what
    return cudnn_refuses_fp8(q, k) or gpu_refuses_fp8()


def attention_fp8(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    recipe: DelayedScaling,
    metas: AttentionMetas,
    backward: str | None = None,
    **kwargs,
) -> jax.Array:
    """`dot_product_attention` of operands that are quantized with delayed scales, full or causal.

    q [b..., s, h, d], k, v [b..., t, g, d] of bf16 or f16; d a multiple of 16 up to 128; s and t at least 2.
    metas:    their cotangents are the amaxes of this step; bf16 gradients leave those of gradients as they are.
    backward: "fp8": gradients in FP8, through cuDNN of d = 128 and multiples of 128 for s and t; "bf16": in q's type;
              None: the faster one.
    kwargs:   of `dot_product_attention`. context_checkpoint_name names what the backward pass needs of the kernel.

    Returns [b..., s, h, d] of q's type. Raises ValueError or TypeError for what FP8 attention does not serve.
    """
    q, k, v = as_jax(q, k, v)
    options = check_options(_NAME, q, k, v, **kwargs)
    if reason := _why_not(q, k, v, options):
        raise ValueError(f"{_NAME}: {reason}; use te_jax.ops.attention.dot_product_attention.")
    if not isinstance(recipe, DelayedScaling):
        raise ValueError(f"{_NAME}: recipe is {recipe}; only delayed scales are in this version: use DelayedScaling.")
    check(_NAME, "metas", metas, _METAS)
    check(_NAME, "backward", backward, _BACKWARD)
    s, t = q.shape[-3], k.shape[-3]
    causal = options.band.trimmed(s, t).right is not None
    fp8_backward = _fp8_backward(q, k, causal) if backward is None else backward == "fp8"
    if fp8_backward and (reason := cudnn_refuses_fp8(q, k, backward=True)):
        raise ValueError(f"{_NAME}: backward is 'fp8', but {reason}; pass None or 'bf16'.")
    q, restore = undivided_groups(q, k.shape[-2])
    name, types = kwargs.get("context_checkpoint_name"), tuple(map(jax.typeof, (q, k, v)))
    config = _Config(recipe, causal, options.scale, fp8_backward, name, types, stage_axes())
    return restore(_attention(*align(q, k, v), metas, config))


def _fp8_backward(q, k, causal: bool) -> bool:
    """Whether cuDNN's FP8 gradients take less time than its bf16 ones.

    On an H200 with cuDNN 9.19, 64/8 heads of d = 128, ms FP8 / bf16 (2026-11-21, docs/performance.md): full attention
    1.57 / 1.61 at b8 s1024, 8.84 / 10.14 at b1 s8192; causal 2.62 / 1.75 at b4 s2048, 7.69 / 5.48 at b1 s8192.
    """
    return not causal and min(q.shape[-3], k.shape[-3]) >= 1024 and not cudnn_refuses_fp8(q, k, backward=True)


def _scales(metas: AttentionMetas) -> AttentionMetas:
    """The scale of each tensor, f32[], within the range that cuDNN takes."""
    return AttentionMetas(*(jnp.clip(meta.scale, 1 / LARGEST_SCALE, LARGEST_SCALE) for meta in metas))


def _stored(x, meta: TensorMeta, scale, dtype) -> tuple[jax.Array, jax.Array]:
    """x [b..., s, h, d] in FP8, and what was seen of it."""
    data, amax = quantize(x, scale, outputs=("data", "amax"), split=x.ndim - 2, dtype=dtype)
    return data, observation(meta, amax, scale, lambda: x, dtype)


def _dequantized(data, scale, dtype) -> jax.Array:
    return (data.astype(jnp.float32) * (1 / scale)).astype(dtype)


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attention(q, k, v, metas, config):
    return _attention_fwd(q, k, v, metas, config)[0]


def _attention_fwd(q, k, v, metas, config):
    by, dtype = _scales(metas), config.recipe.fp8_format.dtype("fwd")
    operands, amaxes = zip(*map(partial(_stored, dtype=dtype), (q, k, v), metas, by))
    operands, attrs = named(operands, QUANTIZED), dict(causal=config.causal, scale=config.scale)
    data, lse, amax = attention_fp8_fwd(*operands, forward_scales(by.q, by.k, by.v, by.o), **attrs)
    # cuDNN's amax drops a NaN of the output, which the operands' tell.
    amax = jnp.where(jnp.isnan(sum(each.reshape(-1)[0] for each in amaxes)), jnp.nan, amax)
    data = data if config.fp8_backward else _dequantized(data, by.o, q.dtype)
    # A policy that saves one of these names runs the kernel once.
    saved = named((*named((data, lse), ATTENTION), named((*amaxes, amax), STATISTICS)), config.checkpoint)
    out = _dequantized(saved[0], by.o, q.dtype) if config.fp8_backward else saved[0]
    return out, _Saved(operands, *saved, metas)


def _attention_bwd(config, saved: _Saved, dout):
    grads, amaxes = (_fp8_grads if config.fp8_backward else _wide_grads)(config, saved, dout)
    every = zip(saved.metas, (*saved.amaxes, *amaxes))
    dmetas = (cotangent(meta, amax, config.recipe, config.stage_axes) for meta, amax in every)
    return *(like(grad, x) for grad, x in zip(grads, config.types)), AttentionMetas(*dmetas)


_attention.defvjp(_attention_fwd, _attention_bwd)


def _fp8_grads(config, saved: _Saved, dout):
    """dq, dk, dv; the amaxes of do, dq, dk, dv, dp."""
    by, dtype = _scales(saved.metas), config.recipe.fp8_format.dtype("bwd")
    data, do_amax = _stored(dout, saved.metas.do, by.do, dtype)
    scales = backward_scales(by.q, by.k, by.v, by.o, by.do, by.dp, by.dq, by.dk, by.dv)
    attrs = dict(causal=config.causal, scale=config.scale)
    *grads, dq, dk, dv, dp = attention_fp8_bwd(data, *saved.operands, saved.out, saved.lse, scales, **attrs)
    wide = (_dequantized(grad, scale, dout.dtype) for grad, scale in zip(grads, (by.dq, by.dk, by.dv)))
    return wide, (do_amax, dq, dk, dv, dp)


def _wide_grads(config, saved: _Saved, dout):
    """The same in q's type: no gradient is quantized.

    Of the operands that the forward kernel read: with others, exp(logits - lse) would not add up to 1, and with a scale
    that has become too large, which clips them, not even stay finite.
    """
    by = _scales(saved.metas)
    wide = (_dequantized(x, scale, dout.dtype) for x, scale in zip(saved.operands, by))
    band = dict(left=-1, right=0 if config.causal else -1, bottom_right=False)
    attrs = dict(band, seq_major=False, scale=config.scale, dropout_rate=0.0, deterministic=False)
    absent = (None,) * 5  # biases, segments
    operands = (dout, *wide, *absent, saved.out, saved.lse, None)
    return attention_bwd(*operands, outputs=("dq", "dk", "dv"), **attrs), (None,) * 5


@jax.custom_vjp
def untouched(out: jax.Array, metas: AttentionMetas) -> jax.Array:
    """out, of an attention that quantized nothing: the new state is the old one. (That of metas which no result
    depends on would be 0.)"""
    return out


untouched.defvjp(lambda out, metas: (out, metas), lambda metas, dout: (dout, jax.tree.map(jnp.zeros_like, metas)))
