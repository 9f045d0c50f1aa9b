"""Quantize to FP8 with a scale for each block: one reading of the source writes both layouts, each with its scales."""

from math import prod

import jax.numpy as jnp
from jax import lax

from te_jax import _lib
from te_jax._amax import amax
from te_jax._op import Op
from te_jax.ops.quantize import fill, fp8_type, parts, saturate, transpose
from te_jax.recipe._base import scale_of_amax

BLOCK = 128
CAPABILITY = "9.0"


def unusable(capability: str) -> str:
    """Why scales of blocks of 128 are of no use on a GPU of this compute capability, "" if they are."""
    if capability == CAPABILITY:
        return ""
    return (
        f"cuBLASLt multiplies with scales of 128-element blocks on compute capability {CAPABILITY} (Hopper) alone, "
        f"this GPU has {capability}: use recipe.Float8CurrentScaling or recipe.DelayedScaling"
    )


def check_gpu(op: str):
    """Raises RuntimeError, naming `op`, where the GPU has no products of its blocks: csrc/*_block.cu need not be
    compiled for it."""
    _lib.check_gpu(op, unusable)


def on_hopper(op: str):
    """The `cuda` of an Op of this name that is one custom call."""

    def run(call, *operands, **attrs):
        check_gpu(op)
        return call(*operands, **attrs)

    return run


def spread(values, axis, size, block=BLOCK):
    """The value of each block along `axis` for each of its elements, `size` in all."""
    shape = list(values.shape)
    shape[axis : axis + 1] = [shape[axis], block]
    wide = jnp.broadcast_to(jnp.expand_dims(values, axis + 1), shape)
    return lax.slice_in_dim(wide.reshape(*shape[:axis], shape[axis] * block, *shape[axis + 2 :]), 0, size, axis=axis)


def _amaxes(x, axis, block=BLOCK):
    """The largest |x| of each block along `axis`; NaN where there is one."""
    blocks = parts(x.shape[axis], block)
    x = fill(x, axis, block)
    return amax(x.reshape(*x.shape[:axis], blocks, block, *x.shape[axis + 1 :]), (axis + 1,))


def in_rows(x, lead, dtype, block, law):
    """data, data_t, scale_inv and scale_inv_t of x f32 [*m, m, *n, n] in blocks of 1 x `block`.

    law: the amaxes of blocks -> their scales, and the inverses as they are stored.
    """
    rows, columns, split = lead, x.ndim - 1, lead + 1

    def quantized(axis):
        scale, inverse = law(_amaxes(x, axis, block))
        return saturate(x * spread(scale, axis, x.shape[axis], block), dtype), inverse

    (data, inverse), (data_t, inverse_t) = quantized(columns), quantized(rows)
    return data, transpose(data_t, split), transpose(inverse, split), inverse_t


def _reference(x, *, lead, dtype, square, power_2, epsilon):
    x = x.astype(jnp.float32)
    rows, columns, split = lead, x.ndim - 1, lead + 1
    law = lambda amax: scale_of_amax(amax, float(jnp.finfo(dtype).max), epsilon, power_2)
    dbias = jnp.sum(x, tuple(range(split)))
    if square:
        scale = law(_amaxes(_amaxes(x, rows), columns))
        each = spread(spread(scale, rows, x.shape[rows]), columns, x.shape[columns])
        data, inverse = saturate(x * each, dtype), 1.0 / scale
        return data, transpose(data, split), None, None, inverse, transpose(inverse, split), dbias

    def with_inverse(amax):
        scale = law(amax)
        return scale, 1.0 / scale

    return *in_rows(x, lead, dtype, BLOCK, with_inverse), None, None, dbias


def rows_reference(x, lead, dtype, power_2, epsilon):
    """data, data_t, scale_inv, scale_inv_t and dbias, in blocks of 1 x 128."""
    results = _reference(x, lead=lead, dtype=dtype, square=False, power_2=power_2, epsilon=epsilon)
    return *results[:4], results[-1]


def _row_tiles(x, *, lead, **attrs):
    """One partial column sum for each row of tiles."""
    return (prod(x[:lead]) * parts(x[lead], BLOCK),)


quantize_block = Op(
    "te_quantize_block",
    "x: m... m n... n -> data?: m... m n... n, data_t?: n... n m... m, scale_inv?: n... n/128 m... m, "
    "scale_inv_t?: m... m/128 n... n, block_inv?: m... m/128 n... n/128, block_inv_t?: n... n/128 m... m/128, "
    "dbias?: n... n",
    combine={"dbias": "sum"},
    ranks={"m...": "lead"},
    dtypes=lambda x, *, dtype, **_: (fp8_type("te_quantize_block", dtype), dtype, *(jnp.float32,) * 5),
    partials={"dbias": _row_tiles},
    reference=_reference,
    cuda=on_hopper("te_quantize_block"),
)
"""x f32|bf16|f16 [*m, m, *n, n] -> results in this order, as chosen by `outputs`:

data        FP8 [*m, m, *n, n]: saturate(x * scale of the element's block), from f32 math
data_t      FP8 [*n, n, *m, m]: the same with the blocks of this layout
scale_inv   f32 [*n, ceil(n / 128), *m, m]: 1 / scale of each block of 128 of data along n, of which the last may be cut
scale_inv_t f32 [*m, ceil(m / 128), *n, n]: of data_t along m
block_inv   f32 [*m, ceil(m / 128), *n, ceil(n / 128)]: of blocks of 128 x 128, in the order of data's axes
block_inv_t f32 [*n, ceil(n / 128), *m, ceil(m / 128)]: its transpose
dbias       f32 [*n, n]: the sum of x over *m and m, for the bias gradient

lead: number of axes in *m. dtype: the FP8 type, a jnp.dtype. square: blocks of 128 x 128, with `block_inv` and
`block_inv_t`; else of 1 x 128 with `scale_inv` and `scale_inv_t`. power_2, epsilon: see `scale_of_amax`.

On CUDA, RuntimeError while it is lowered for a GPU that is not of compute capability 9.0.

A scale is fp8_max / max(amax of the block, epsilon). The contracted axis comes first in those of 1 x 128, and last in
those of 128 x 128: so cuBLASLt reads them.
"""
