"""Quantize to FP8: one reading of the source writes both layouts that FP8 GEMMs want, its amax, and its column sums."""

from math import prod

import jax.numpy as jnp

from te_jax._amax import amax
from te_jax._check import Kind, array_of, check, is_dtype
from te_jax._op import Op

FLOATS = (jnp.float32, jnp.bfloat16, jnp.float16)
FLOAT = array_of(*FLOATS, text="an array of float32, bfloat16 or float16")
FP8_TYPE = Kind(
    "float8_e4m3fn or float8_e5m2", is_dtype, lambda value: jnp.dtype(value) in (jnp.float8_e4m3fn, jnp.float8_e5m2)
)
_TILE_ROWS, _TILE_COLUMNS = 256, 64  # csrc/tile.cuh


def fp8_type(op: str, dtype):
    """`dtype`, the FP8 type that the op `op` is to write. Raises TypeError or ValueError for another."""
    check(op, "dtype", dtype, FP8_TYPE)
    return dtype


def saturate(x, dtype):
    """f32 -> FP8, clipped to the finite range; NaN stays NaN.

    E4M3 has no inf, and a cast without the clip gives NaN from 464 on (https://arxiv.org/abs/2209.05433, section 3.1).
    """
    fp8_max = float(jnp.finfo(dtype).max)
    return jnp.clip(x, -fp8_max, fp8_max).astype(dtype)


def parts(size, of):
    """How many parts of `of` elements, of which the last may be cut, `size` makes; int, or symbolic in `jax.export`.
    In this form jax knows that they are enough, and one at least."""
    return -(-size // of)


def fill(x, axis, multiple):
    """x with zeros behind it along `axis`, up to a multiple of `multiple`."""
    more = parts(x.shape[axis], multiple) * multiple - x.shape[axis]
    return jnp.pad(x, [(0, more if i == axis else 0) for i in range(x.ndim)]) if more else x


def transpose(x, split):
    """[*m, *n] -> [*n, *m], with `split` axes in m."""
    return jnp.transpose(x, (*range(split, x.ndim), *range(split)))


def _reference(x, scale, *, split, dtype):
    x = x.astype(jnp.float32)
    data = None if scale is None else saturate(x * scale, dtype)
    data_t = None if scale is None else transpose(data, split)
    return data, data_t, amax(x), jnp.sum(x, tuple(range(split)))


def tiles(m, n):
    """Rows and columns of tiles: one partial amax for each, one partial column sum for each row of them."""
    return parts(m, _TILE_ROWS), parts(n, _TILE_COLUMNS)


def _tiles(x, *args, split, **attrs):
    return tiles(prod(x[:split]), prod(x[split:]))


quantize = Op(
    "te_quantize",
    "x: m... n..., scale?: -> data?: m... n..., data_t?: n... m..., amax?:, dbias?: n...",
    combine={"amax": "max", "dbias": "sum"},
    ranks={"m...": "split"},
    dtypes=lambda x, scale, *, split, dtype: (fp8_type("te_quantize", dtype), dtype, jnp.float32, jnp.float32),
    partials={"amax": _tiles, "dbias": lambda *args, **attrs: _tiles(*args, **attrs)[:1]},
    reference=_reference,
)
"""x f32|bf16|f16 [*m, *n], scale f32[] (with FP8 results) -> results in this order, as chosen by `outputs`:

data   FP8 [*m, *n]: saturate(x * scale), from f32 math (via bf16 3 % of the values would round twice)
data_t FP8 [*n, *m]: its transpose
amax   f32 []: max |x|; NaN or inf where x has one
dbias  f32 [*n]: the sum of x over m, for the bias gradient

split: number of axes in m. dtype: the FP8 type, a jnp.dtype.
"""
