"""softmax(scale * q k^T) v in FP8, with a delayed scale for every tensor that is stored."""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import ShapedArray

from te_jax.core.arrays import as_jax
from te_jax.core.check import NONE, Kind, check, one_of, warn_once
from te_jax.core.derivatives import custom_vjp
from te_jax.core.policies import ATTENTION, QUANTIZED, STATISTICS, with_names
from te_jax.core.products import ATTENTION as OF_ATTENTION
from te_jax.core.products import note, product
from te_jax.core.types import align, like
from te_jax.ops.attention.api import dot_product_attention, run_attention
from te_jax.ops.attention.form import form_of
from te_jax.ops.attention.fp8 import (
    LARGEST_SCALE,
    attention_fp8_bwd,
    attention_fp8_fwd,
    backward_scales,
    cudnn_refuses_fp8,
    forward_scales,
    fp8_refuses,
)
from te_jax.ops.attention.mask import Band
from te_jax.ops.attention.mesh import undivided_groups
from te_jax.ops.attention.options import AttentionOptions, check_options
from te_jax.ops.attention.plan import attention_plan
from te_jax.ops.attention.reference import split_joined
from te_jax.ops.attention.vjp import attention_bwd_of
from te_jax.ops.quantize.array import quantize
from te_jax.recipe import DelayedScaling, Recipe
from te_jax.sharding.resource import stage_axes
from te_jax.state.fp8 import AttentionMetas, TensorMeta, cotangent, observation, reduced_axes

_NAME = "te_jax.layers.attention_fp8"
_MOST_HEADS = 48  # of a part of causal gradients, as csrc/attention/attention_fp8.cc has it (a test compares)
_ATTENTION_METAS = Kind("fp8.AttentionMetas", lambda metas: isinstance(metas, AttentionMetas))
_BACKWARD = NONE | one_of("fp8", "bf16")


class _Config(NamedTuple):
    """The static argument of `_attention`."""

    recipe: DelayedScaling
    options: AttentionOptions  # without arrays; the mask is open, or causal from the top left
    fp8_backward: bool
    types: tuple[ShapedArray, ...]  # the types of q, k, v, and of their gradients
    stage_axes: frozenset[str]  # as in `config.Config`

    @property
    def attrs(self) -> dict:
        """The attributes of the FP8 ops."""
        return dict(causal=self.options.mask.band.right is not None, scale=self.options.scale)


class _Saved(NamedTuple):
    """The residuals of the backward pass."""

    operands: tuple[jax.Array, ...]  # the bits of q, k, v in FP8, u8
    out: jax.Array  # if gradients are in FP8, its bits, u8; else in q's type
    lse: jax.Array  # f32[b..., h, s]
    amaxes: tuple[jax.Array, ...]  # amaxes of q, k, v and the output, as `fp8.cotangent` takes them
    metas: AttentionMetas


@product(OF_ATTENTION)
def attend_by_recipe(
    operands: Sequence[jax.Array], options: AttentionOptions, recipe: Recipe | None, metas: AttentionMetas | None
) -> Any:
    """Attention of (q, k, v), (q, kv) or (qkv,), by the plan of `attention_plan`: in FP8 where the caller has FP8
    state and FP8 attention serves the call. Another call of such a caller warns, once for each reason.

    recipe, metas: as in `attention_fp8`; metas None: never in FP8.

    Returns and raises as `dot_product_attention`, or as `context_parallel_attention`.
    """
    made = attention_plan(operands, options, recipe=None if metas is None else recipe)
    if made.choice.implementation == "fp8":
        return _attend_fp8(*split_joined(*operands), options, recipe, metas)
    out = run_attention(made, operands)
    if metas is None:
        if recipe is not None:
            note("the recipe's fp8_dpa is False")
        return out
    note(made.choice.refused["fp8"])
    warn_once(options.name, f"not in FP8, though the recipe has fp8_dpa=True: {made.choice.refused['fp8']}.")
    return jax.tree.map(lambda x: _keep_state(x, metas), out)


def attention_fp8(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    recipe: DelayedScaling,
    metas: AttentionMetas,
    backward: str | None = None,
    **kwargs: Any,
) -> jax.Array:
    """`dot_product_attention` of operands that are quantized with delayed scales, full or causal.

    q [b..., s, h, d], k, v [b..., t, g, d], bf16 or f16; d is a multiple of 16 up to 128, s and t are at least 2.

    metas:    the FP8 state, whose cotangents are the amaxes of this step. With bf16 gradients, the state of gradients
              stays as it is.
    backward: "fp8": gradients in FP8, for d = 128 and multiples of 128 for s and t; "bf16": gradients in q's dtype;
              None: "fp8" where cuDNN has them and they took less time on an H200, which is from 1024 tokens (of q and
              of k) on, of causal attention from 2048 on and with at most 48 query heads for a key head; else "bf16".
    kwargs:   keywords of `dot_product_attention`. context_checkpoint_name names what the backward pass needs of the
              kernel.

    Returns [b..., s, h, d] of q's dtype. Raises ValueError or TypeError for what FP8 attention does not serve.
    """
    q, k, v = as_jax(q, k, v)
    options = check_options(dot_product_attention, q, k, v, kwargs, op=_NAME)
    if reason := fp8_refuses(q, k, v, options):
        raise ValueError(f"{_NAME}: {reason}; use te_jax.ops.attention.dot_product_attention.")
    if not isinstance(recipe, DelayedScaling):
        raise ValueError(f"{_NAME}: recipe is {recipe}; only delayed scales are in this version: use DelayedScaling.")
    check(_NAME, "metas", metas, _ATTENTION_METAS)
    check(_NAME, "backward", backward, _BACKWARD)
    if backward == "fp8" and (reason := cudnn_refuses_fp8(q, k, backward=True)):
        raise ValueError(f"{_NAME}: backward is 'fp8', but {reason}; pass None or 'bf16'.")
    return _attend_fp8(q, k, v, options, recipe, metas, backward)


def _attend_fp8(q, k, v, options: AttentionOptions, recipe, metas, backward: str | None = None):
    """`attention_fp8` of a call that `fp8_refuses` does not refuse."""
    causal = options.mask.band.trimmed(q.shape[-3], k.shape[-3]).right is not None
    fp8_backward = _fp8_backward(q, k, causal) if backward is None else backward == "fp8"
    q, restore = undivided_groups(q, k.shape[-2])
    types, static = tuple(map(jax.typeof, (q, k, v))), options.static(Band(right=0 if causal else None))
    config = _Config(recipe, static, fp8_backward, types, stage_axes())
    return restore(_attention(*align(q, k, v), metas, config))


def _fp8_backward(q, k, causal: bool) -> bool:
    """Whether cuDNN's FP8 gradients take less time than its bf16 ones; False for sizes that are symbolic.

    By times on an H200 with cuDNN 9.19 (results/log.md, "Causal gradients in FP8"). Causal ones are computed in parts
    with few heads, which cannot be less than those of a key head.
    """
    (s, heads, _), (t, groups, _) = q.shape[-3:], k.shape[-3:]
    if not (isinstance(s, int) and isinstance(t, int)) or cudnn_refuses_fp8(q, k, backward=True):
        return False
    return min(s, t) >= 2048 and heads // groups <= _MOST_HEADS if causal else min(s, t) >= 1024


def _scales(metas: AttentionMetas) -> AttentionMetas:
    """The scale f32[] of each tensor, within the range that cuDNN takes."""
    return AttentionMetas(*(jnp.clip(meta.scale, 1 / LARGEST_SCALE, LARGEST_SCALE) for meta in metas))


def _store(x, meta: TensorMeta, scale, dtype, config: _Config) -> tuple[jax.Array, jax.Array]:
    """-> x [b..., s, h, d] in FP8, and its amax as `fp8.cotangent` takes it."""
    data, amax = quantize(x, scale, outputs=("data", "amax"), split=x.ndim - 2, dtype=dtype)
    across = reduced_axes(amax, config.recipe, config.stage_axes)
    return data, observation(meta, amax, scale, lambda: x, dtype, across=across)


def _dequantize(data, scale, dtype) -> jax.Array:
    return (data.astype(jnp.float32) * (1 / scale)).astype(dtype)


@custom_vjp(4, in_fp8=lambda config: _NAME)
def _attention(q, k, v, metas, config):
    return _attention_fp8_fwd(q, k, v, metas, config)[0]


def _attention_fp8_fwd(q, k, v, metas, config):
    by, dtype = _scales(metas), config.recipe.fp8_format.dtype("fwd")
    operands, amaxes = zip(*map(partial(_store, dtype=dtype, config=config), (q, k, v), metas, by))
    # jax rounds what a policy keeps and the forward pass reads, by which E4M3 above 240 becomes NaN. So bits have the
    # names.
    bits = with_names(tuple(lax.bitcast_convert_type(x, jnp.uint8) for x in operands), QUANTIZED)
    operands = (_from_bits(x, config) for x in bits)
    data, lse, amax = attention_fp8_fwd(*operands, forward_scales(by.q, by.k, by.v, by.o), **config.attrs)
    # cuDNN's amax drops a NaN of the output; the operands' amaxes do not.
    amax = jnp.where(jnp.isnan(sum(each.reshape(-1)[0] for each in amaxes)), jnp.nan, amax)
    data = lax.bitcast_convert_type(data, jnp.uint8) if config.fp8_backward else _dequantize(data, by.o, q.dtype)
    # A policy that saves one of these names runs the kernel once.
    name = config.options.context_checkpoint_name
    saved = with_names((*with_names((data, lse), ATTENTION), with_names((*amaxes, amax), STATISTICS)), name)
    out = _dequantize(_from_bits(saved[0], config), by.o, q.dtype) if config.fp8_backward else saved[0]
    return out, _Saved(bits, *saved, metas)


def _from_bits(bits: jax.Array, config: _Config) -> jax.Array:
    return lax.bitcast_convert_type(bits, config.recipe.fp8_format.dtype("fwd"))


def _attention_fp8_bwd(config, saved: _Saved, dout):
    grads, amaxes = (_fp8_grads if config.fp8_backward else _unquantized_grads)(config, saved, dout)
    every = zip(saved.metas, (*saved.amaxes, *amaxes))
    dmetas = (cotangent(meta, amax, config.recipe, config.stage_axes) for meta, amax in every)
    return *(like(grad, x) for grad, x in zip(grads, config.types)), AttentionMetas(*dmetas)


_attention.defvjp(_attention_fp8_fwd, _attention_fp8_bwd)


def _fp8_grads(config, saved: _Saved, dout):
    """-> (dq, dk, dv), and the amaxes of (do, dq, dk, dv, dp)."""
    by, dtype = _scales(saved.metas), config.recipe.fp8_format.dtype("bwd")
    data, do_amax = _store(dout, saved.metas.do, by.do, dtype, config)
    scales = backward_scales(by.q, by.k, by.v, by.o, by.do, by.dp, by.dq, by.dk, by.dv)
    *operands, out = (_from_bits(x, config) for x in (*saved.operands, saved.out))
    *grads, dq, dk, dv, dp = attention_fp8_bwd(data, *operands, out, saved.lse, scales, **config.attrs)
    grads = (_dequantize(grad, scale, dout.dtype) for grad, scale in zip(grads, (by.dq, by.dk, by.dv)))
    return grads, (do_amax, dq, dk, dv, dp)


@product("attention in 16 bits")
def _unquantized_grads(config, saved: _Saved, dout):
    """-> (dq, dk, dv) in q's type, and no amaxes: no gradient is quantized.

    They are gradients by the operands that the forward kernel read. By others, exp(logits - lse) would not add up to 1;
    where a scale has become too large, which clips the operands, it would not even stay finite.
    """
    by = _scales(saved.metas)
    operands = tuple(_dequantize(_from_bits(x, config), scale, dout.dtype) for x, scale in zip(saved.operands, by))
    form = form_of(config.options, *operands[:2])
    return attention_bwd_of(operands, form, dout, saved.out, saved.lse), (None,) * 5


@custom_vjp(in_fp8=lambda: _NAME)
def _keep_state(out: jax.Array, metas: AttentionMetas) -> jax.Array:
    """out, of an attention that quantized nothing: the new state is the old one. (Metas that no result depends on would
    get a new state of zeros.)"""
    return out


_keep_state.defvjp(lambda out, metas: (out, metas), lambda metas, dout: (dout, jax.tree.map(jnp.zeros_like, metas)))
