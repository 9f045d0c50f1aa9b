"""Quantize to FP8: one reading of the source writes both layouts that FP8 GEMMs want, and its column sums.

te_quantize has one scale for the tensor, te_quantize_block one for each block of 128, te_quantize_mx one for each block
of 32; `array_source` offers all of them, to be chosen by a recipe's granularity.
"""

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from te_jax.core import extension
from te_jax.core.amax import amax
from te_jax.core.check import Kind, array_of, check, is_dtype
from te_jax.core.op import Op
from te_jax.ops.source import Source
from te_jax.recipe._base import scale_of_amax
from te_jax.recipe.mxfp8 import scale_inv_of_amax

BLOCK, MX_BLOCK = 128, 32
HOPPER, _BLACKWELL = "9.0", 10  # the compute capability of products with scales of BLOCK; the least major of MX_BLOCK
FLOATS = (jnp.float32, jnp.bfloat16, jnp.float16)
FLOAT = array_of(*FLOATS, text="an array of float32, bfloat16 or float16")
FP8_TYPE = Kind(
    "float8_e4m3fn or float8_e5m2", is_dtype, lambda value: jnp.dtype(value) in (jnp.float8_e4m3fn, jnp.float8_e5m2)
)
_TILE_ROWS, _TILE_COLUMNS = 256, 64  # csrc/quantize/tile.cuh


def fp8_type(op: str, dtype: DTypeLike) -> Any:
    """`dtype`, the FP8 type that the op `op` is to write. Raises TypeError or ValueError for another."""
    check(op, "dtype", dtype, FP8_TYPE)
    return dtype


def saturate(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """f32 -> FP8, clipped to the finite range; NaN stays NaN.

    E4M3 has no inf, and a cast without the clip gives NaN from 464 on (https://arxiv.org/abs/2209.05433, section 3.1).
    """
    fp8_max = float(jnp.finfo(dtype).max)
    return jnp.clip(x, -fp8_max, fp8_max).astype(dtype)


def parts(size: Any, of: int) -> Any:
    """How many parts of `of` elements, of which the last may be cut, `size` makes; int, or symbolic in `jax.export`.
    In this form jax knows that they are enough, and one at least."""
    return -(-size // of)


def fill(x: jax.Array, axis: int, multiple: int) -> jax.Array:
    """x with zeros behind it along `axis`, up to a multiple of `multiple`."""
    more = parts(x.shape[axis], multiple) * multiple - x.shape[axis]
    return jnp.pad(x, [(0, more if i == axis else 0) for i in range(x.ndim)]) if more else x


def transpose(x: jax.Array, split: int) -> jax.Array:
    """[*m, *n] -> [*n, *m], with `split` axes in m."""
    return jnp.transpose(x, (*range(split, x.ndim), *range(split)))


def _reference(x, scale, *, split, dtype):
    x = x.astype(jnp.float32)
    data = None if scale is None else saturate(x * scale, dtype)
    data_t = None if scale is None else transpose(data, split)
    return data, data_t, amax(x), jnp.sum(x, tuple(range(split))), None if scale is None else invert(scale)


def invert(scale: jax.Array) -> jax.Array:
    """What FP8 of this scale is multiplied by."""
    return 1.0 / scale


INVERSE = {"scale_inv": ("scale", invert)}  # `Op.aside` of ops with one scale


def tiles(m: Any, n: Any) -> tuple[Any, Any]:
    """Rows and columns of tiles: one partial amax for each, one partial column sum for each row of them."""
    return parts(m, _TILE_ROWS), parts(n, _TILE_COLUMNS)


def _tiles(x, *args, split, **attrs):
    return tiles(prod(x[:split]), prod(x[split:]))


quantize: Op = Op(
    "te_quantize",
    "x: m... n..., scale?: -> data?: m... n..., data_t?: n... m..., amax?:, dbias?: n..., scale_inv?:",
    combine={"amax": "max", "dbias": "sum"},
    ranks={"m...": "split"},
    fenced="scale_inv",
    dtypes=lambda x, scale, *, split, dtype: (fp8_type("te_quantize", dtype), dtype, *(jnp.float32,) * 3),
    partials={"amax": _tiles, "dbias": lambda *args, **attrs: _tiles(*args, **attrs)[:1]},
    aside=INVERSE,
    reference=_reference,
)
"""x f32|bf16|f16 [*m, *n], scale f32[] (with FP8 results) -> results in this order, as chosen by `outputs`:

data   FP8 [*m, *n]: saturate(x * scale), from f32 math (via bf16 3 % of the values would round twice)
data_t FP8 [*n, *m]: its transpose
amax   f32 []: max |x|; NaN or inf where x has one
dbias  f32 [*n]: the sum of x over m, for the bias gradient
scale_inv f32 []: 1 / scale, which products take

split: number of axes in m. dtype: the FP8 type, a jnp.dtype.
"""

# -- a scale for each block -----------------------------------------------------------------------------------


def unusable(block: int, capability: str) -> str:
    """Why scales of blocks of this size are of no use on a GPU of this compute capability, "" if they are."""
    if block == BLOCK and capability != HOPPER:
        return (
            f"cuBLASLt multiplies with scales of 128-element blocks on compute capability {HOPPER} (Hopper) alone, "
            f"this GPU has {capability}: use recipe.Float8CurrentScaling or recipe.DelayedScaling"
        )
    if block == MX_BLOCK and int(capability.partition(".")[0]) < _BLACKWELL:
        return (
            f"MXFP8 needs compute capability {_BLACKWELL}.0 (Blackwell) or newer, this GPU has {capability}: use "
            "recipe.Float8BlockScaling (on 9.0 alone), recipe.Float8CurrentScaling or recipe.DelayedScaling"
        )
    return ""


def check_block_gpu(op: str, block: int = BLOCK) -> None:
    """Raises RuntimeError, naming `op`, where the GPU has no products of such blocks: csrc/*/*_block.cu need not be
    compiled for it."""
    extension.check_gpu(op, partial(unusable, block))


def on_hopper(op: str) -> Callable[..., Any]:
    """The `cuda` of an Op of this name that is one custom call."""

    def run(call, *operands, **attrs):
        check_block_gpu(op)
        return call(*operands, **attrs)

    return run


def spread(values: jax.Array, axis: int, size: int, block: int = BLOCK) -> jax.Array:
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


def quantize_rows(
    x: jax.Array, lead: int, dtype: DTypeLike, block: int, law: Callable[[jax.Array], tuple[jax.Array, jax.Array]]
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """data, data_t, scale_inv and scale_inv_t of x f32 [*m, m, *n, n] in blocks of 1 x `block`.

    law: the amaxes of blocks -> their scales, and the inverses as they are stored.
    """
    rows, columns, split = lead, x.ndim - 1, lead + 1

    def quantized(axis):
        scale, inverse = law(_amaxes(x, axis, block))
        return saturate(x * spread(scale, axis, x.shape[axis], block), dtype), inverse

    (data, inverse), (data_t, inverse_t) = quantized(columns), quantized(rows)
    return data, transpose(data_t, split), transpose(inverse, split), inverse_t


def _block_reference(x, *, lead, dtype, square, power_2, epsilon):
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

    return *quantize_rows(x, lead, dtype, BLOCK, with_inverse), None, None, dbias


def rows_reference(x: jax.Array, lead: int, dtype: DTypeLike, power_2: bool, epsilon: float) -> tuple[Any, ...]:
    """data, data_t, scale_inv, scale_inv_t and dbias, in blocks of 1 x 128."""
    results = _block_reference(x, lead=lead, dtype=dtype, square=False, power_2=power_2, epsilon=epsilon)
    return *results[:4], results[-1]


def _row_tiles(x, *, lead, **attrs):
    """One partial column sum for each row of tiles."""
    return (prod(x[:lead]) * parts(x[lead], BLOCK),)


quantize_block: Op = Op(
    "te_quantize_block",
    "x: m... m n... n -> data?: m... m n... n, data_t?: n... n m... m, scale_inv?: n... n/128 m... m, "
    "scale_inv_t?: m... m/128 n... n, block_inv?: m... m/128 n... n/128, block_inv_t?: n... n/128 m... m/128, "
    "dbias?: n... n",
    combine={"dbias": "sum"},
    ranks={"m...": "lead"},
    dtypes=lambda x, *, dtype, **_: (fp8_type("te_quantize_block", dtype), dtype, *(jnp.float32,) * 5),
    partials={"dbias": _row_tiles},
    reference=_block_reference,
    cuda=on_hopper("te_quantize_block"),
)
"""x f32|bf16|f16 [*m, m, *n, n] -> results in this order, as chosen by `outputs`:

data        FP8 [*m, m, *n, n]: saturate(x * scale of the element's block), from f32 math
data_t      FP8 [*n, n, *m, m]: the transpose, quantized with the blocks of this layout
scale_inv   f32 [*n, ceil(n / 128), *m, m]: 1 / scale of each block of 128 of data along n, of which the last may be cut
scale_inv_t f32 [*m, ceil(m / 128), *n, n]: 1 / scale of each block of 128 of data_t along m
block_inv   f32 [*m, ceil(m / 128), *n, ceil(n / 128)]: of blocks of 128 x 128, in the order of data's axes
block_inv_t f32 [*n, ceil(n / 128), *m, ceil(m / 128)]: its transpose
dbias       f32 [*n, n]: the sum of x over *m and m, for the bias gradient

lead: number of axes in *m. dtype: the FP8 type, a jnp.dtype. square: blocks of 128 x 128, with `block_inv` and
`block_inv_t`; else of 1 x 128 with `scale_inv` and `scale_inv_t`. power_2, epsilon: see `scale_of_amax`.

On CUDA, RuntimeError while it is lowered for a GPU that is not of compute capability 9.0.

A scale is fp8_max / max(amax of the block, epsilon). The contracted axis comes first in the scales of 1 x 128, and last
in the scales of 128 x 128, which is how cuBLASLt reads them.
"""


def _mx_reference(x, *, lead, dtype):
    def law(amax):
        scale_inv = scale_inv_of_amax(amax, float(jnp.finfo(dtype).max))
        return 1.0 / scale_inv.astype(jnp.float32), scale_inv

    x = x.astype(jnp.float32)
    return *quantize_rows(x, lead, dtype, MX_BLOCK, law), jnp.sum(x, tuple(range(lead + 1)))


quantize_mx: Op = Op(
    "te_quantize_mx",
    "x: m... m n... n -> data?: m... m n... n, data_t?: n... n m... m, scale_inv?: n... n/32 m... m, "
    "scale_inv_t?: m... m/32 n... n, dbias?: n... n",
    combine={"dbias": "sum"},
    ranks={"m...": "lead"},
    dtypes=lambda x, *, dtype, **_: (fp8_type("te_quantize_mx", dtype), dtype, *(jnp.float8_e8m0fnu,) * 2, jnp.float32),
    reference=_mx_reference,
    composed=True,
)
"""x f32|bf16|f16 [*m, m, *n, n] -> results in this order, as chosen by `outputs`:

data, data_t, dbias: as of `te_quantize_block`, with blocks of 1 x 32
scale_inv           float8_e8m0fnu [*n, ceil(n / 32), *m, m]: what each block of 32 of data along n is multiplied by
scale_inv_t         float8_e8m0fnu [*m, ceil(m / 32), *n, n]: of data_t along m

lead: number of axes in *m. dtype: the FP8 type, a jnp.dtype. Scales follow the law of `recipe.MXFP8BlockScaling`.
"""


# -- by a recipe's granularity --------------------------------------------------------------------------------


def array_source(x: jax.Array, split: int, square: bool = False) -> Source:
    """x [*m, *n], which is there, with `split` axes in m; square: its blocks of 128 are 128 x 128."""
    blocks = dict(lead=split - 1)
    ops = {0: (quantize, dict(split=split)), BLOCK: (quantize_block, blocks | dict(square=square))}
    return Source(ops | {MX_BLOCK: (quantize_mx, blocks)}, (x,), split)


def block_of_weight(scale_inv: jax.Array, stack: int = 0) -> int:
    """`Granularity.block` of a weight with these inverse scales. stack: the axes in front of it, as of experts."""
    return MX_BLOCK if scale_inv.dtype == jnp.float8_e8m0fnu else BLOCK if scale_inv.ndim > stack else 0


def transpose_weight(data: jax.Array, scale_inv: jax.Array, split: int) -> tuple[jax.Array, jax.Array]:
    """A weight [*m, *n] in FP8 and its inverse scales -> the same in the layout [*n, *m]. split: axes in m.

    Raises ValueError for MXFP8, whose blocks differ between the layouts.
    """
    if block_of_weight(scale_inv) == MX_BLOCK:
        raise ValueError(
            "te_jax.layers: an MXFP8 kernel holds one layout, and its blocks of 1 x 32 are not those of the other, "
            "which a backward pass reads; quantize it with gradients=True, or take dgrad out of FP8: "
            "override_linear_precision=(False, True, False)."
        )
    return transpose(data, split), transpose(scale_inv, split) if scale_inv.ndim else scale_inv


def dequantize_weight(data: jax.Array, scale_inv: jax.Array, split: int) -> jax.Array:
    """The values, f32, of a weight [*m, *n] in FP8. split: axes in m.

    scale_inv: one, one for each block of 128 x 128, or MXFP8's for each block of 1 x 32.
    """
    block = block_of_weight(scale_inv)
    if block == MX_BLOCK:
        return dequantize_rows(data, scale_inv, data.ndim - split, MX_BLOCK)
    for axis in (split - 1, data.ndim - 1) if block else ():
        scale_inv = spread(scale_inv, axis, data.shape[axis])
    return data.astype(jnp.float32) * scale_inv


def dequantize_rows(a: jax.Array, scale_inv: jax.Array, contract: int, block: int) -> jax.Array:
    """f32: a [*rows, *k] times scale_inv [*k', *rows] of its blocks of 1 x `block`. contract: axes in k."""
    of_rows = transpose(scale_inv.astype(jnp.float32), contract)
    return a.astype(jnp.float32) * spread(of_rows, a.ndim - 1, a.shape[-1], block)
