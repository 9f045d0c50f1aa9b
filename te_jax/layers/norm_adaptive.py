"""Adaptive layer norm (adaLN) of diffusion transformers, whose shift and scale belong to a row of the batch, and the
gate of a residual connection (Peebles & Xie 2022, https://arxiv.org/abs/2212.09748)."""

from functools import partial

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from te_jax.core.arrays import as_jax
from te_jax.core.check import FLOATS_ARRAY, check, number, one_of
from te_jax.ops.quantize.norm import KINDS, rstd_of

_KIND = one_of(*KINDS)


def adaptive_layernorm(
    x: ArrayLike,
    shift: ArrayLike,
    scale: ArrayLike,
    *,
    norm: str = "layernorm",
    epsilon: float = 1e-6,
    name: str = "te_jax.layers.adaptive_layernorm",
) -> jax.Array:
    """norm(x) (1 + scale) + shift over the last axis of x, the norm without parameters.

    x:            [b, ..., h], floating
    shift, scale: [b, h], each for a row of the batch, or of x's shape; floating
    norm:         "layernorm" or "rmsnorm". epsilon: above 0, added to the variance or the mean square. name: what
                  errors call this layer.

    It is plain JAX, which XLA compiles: statistics are in f32, the result is rounded once to x's type, and the backward
    pass keeps x, shift and scale. So `dense` behind it quantizes an array that was written in x's type, unlike
    `layernorm_dense`, whose norm writes FP8.

    Returns an array of x's shape and type. Raises ValueError for an unknown norm or shapes that do not match, TypeError
    for operands that are not floating.
    """
    x, shift, scale = as_jax(x, shift, scale)
    _check_rows(name, x, shift=shift, scale=scale)
    check(name, "norm", norm, _KIND)
    check(name, "epsilon", epsilon, number(above=0))
    return _modulated(x, shift, scale, norm, float(epsilon))


def gated_residual(
    x: ArrayLike, y: ArrayLike, gate: ArrayLike, *, name: str = "te_jax.layers.gated_residual"
) -> jax.Array:
    """x + gate y, computed in f32 and rounded once to x's type.

    x, y [b, ..., h]; gate [b, h] or of x's shape; all floating, each of a type of its own. name: what errors call it.

    Returns an array of x's shape and type, plain JAX as `adaptive_layernorm`. Raises ValueError for shapes that do not
    match, TypeError for operands that are not floating.
    """
    x, y, gate = as_jax(x, y, gate)
    _check_rows(name, x, gate=gate)
    check(name, "y", y, FLOATS_ARRAY)
    if y.shape != x.shape:
        raise ValueError(f"{name}: y has shape {y.shape}, but x {x.shape}; pass both of one shape.")
    return _gated_sum(x, y, gate)


def _check_rows(name, x, **of_rows):
    check(name, "x", x, FLOATS_ARRAY)
    if x.ndim < 2:
        raise ValueError(f"{name}: x has shape {x.shape}; pass [b, ..., h].")
    rows = (x.shape[0], x.shape[-1])
    for what, a in of_rows.items():
        check(name, what, a, FLOATS_ARRAY)
        if a.shape not in (rows, x.shape):
            raise ValueError(f"{name}: {what} has shape {a.shape}, but x {x.shape}; pass {rows} or {x.shape}.")


def _wide(x, *of_rows):
    """x and arrays of its shape or of its rows, as f32 arrays of as many axes."""
    wide, between = jnp.promote_types(x.dtype, jnp.float32), tuple(range(1, x.ndim - 1))
    spread = lambda a: a if a.ndim == x.ndim else jnp.expand_dims(a, between)
    return (x.astype(wide), *(spread(a).astype(wide) for a in of_rows))


@partial(jax.checkpoint, prevent_cse=False, static_argnums=(3, 4))  # Keeps its operands, and nothing in f32.
def _modulated(x, shift, scale, norm, epsilon):
    wide, shift, scale = _wide(x, shift, scale)
    centered = wide if norm == "rmsnorm" else wide - jnp.mean(wide, -1, keepdims=True)
    return (centered * rstd_of(centered, epsilon)[..., None] * (1.0 + scale) + shift).astype(x.dtype)


@partial(jax.checkpoint, prevent_cse=False)
def _gated_sum(x, y, gate):
    wide, y, gate = _wide(x, y, gate)
    return (wide + gate * y).astype(x.dtype)
