"""Activations of the MLP straight to FP8 with a scale for each block of 128, in both layouts, forward and backward."""

from functools import partial
from math import prod

import jax.numpy as jnp

from te_jax._op import Op
from te_jax.ops import activation as act
from te_jax.ops.quantize import fp8_type, parts
from te_jax.ops.quantize_block import BLOCK, check_gpu, rows_reference


def _fwd_reference(x, *, dtype, power_2, epsilon, **attrs):
    y, *_ = act.activation_fwd.reference(x, None, dtype=dtype, **attrs)
    return rows_reference(y, y.ndim - 2, dtype, power_2, epsilon)[:4]


def _bwd_reference(dy, x, *, dtype, power_2, epsilon, **attrs):
    dx, *_ = act.activation_bwd.reference(dy, x, None, dtype=dtype, **attrs)
    return rows_reference(dx, dx.ndim - 3, dtype, power_2, epsilon)


def _fwd_dtypes(x, *, dtype, **_):
    return fp8_type("te_activation_block_fwd", dtype), dtype, jnp.float32, jnp.float32


def _bwd_dtypes(dy, x, *, dtype, **_):
    act.check_same_dtype("te_activation_block_bwd", dy, x)
    return fp8_type("te_activation_block_bwd", dtype), dtype, *(jnp.float32,) * 3


def _cuda(op, call, *operands, names, **attrs):
    check_gpu(op)
    return call(*operands, kind=act.kind_of(operands[-1], names), **attrs)


activation_block_fwd = Op(
    "te_activation_block_fwd",
    "x: m... m a f -> data?: m... m f, data_t?: f m... m, scale_inv?: f/128 m... m, scale_inv_t?: m... m/128 f",
    replicated="a",
    dtypes=_fwd_dtypes,
    reference=_fwd_reference,
    cuda=partial(_cuda, "te_activation_block_fwd"),
)
"""te_quantize_block, in blocks of 1 x 128, of what te_activation_fwd makes of x f32|bf16|f16 [*m, m, a, f] in x's type,
which is not written: data, data_t, scale_inv and scale_inv_t of y [*m, m, f], as chosen by `outputs`.

Attributes as `te_jax.ops.activation.attributes` makes them; dtype, power_2, epsilon and RuntimeError of
te_quantize_block.
"""

activation_block_bwd = Op(
    "te_activation_block_bwd",
    "dy: m... m f, x: m... m a f -> data?: m... m a f, data_t?: a f m... m, scale_inv?: a f/128 m... m, "
    "scale_inv_t?: m... m/128 a f, dbias?: a f",
    replicated="a",
    combine={"dbias": "sum"},
    dtypes=_bwd_dtypes,
    partials={"dbias": lambda dy, x, **attrs: (prod(x[:-3]) * parts(x[-3], BLOCK),)},
    reference=_bwd_reference,
    cuda=partial(_cuda, "te_activation_block_bwd"),
)
"""The same of dx [*m, m, a, f], which te_activation_bwd makes of dy [*m, m, f] of x's type and x; and

dbias  f32[a, f]: the sum over *m and m of dx in x's type, for the bias gradient
"""
