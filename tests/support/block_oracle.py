"""Block scaling in numpy, block by block, in float64 but where the law says f32."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
from arrays import on_device

from te_jax.recipe import MXFP8BlockScaling

TOP = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}
MANTISSA, LOWEST = {"float8_e4m3fn": 3, "float8_e5m2": 2}, {"float8_e4m3fn": -6, "float8_e5m2": -14}  # bits, exponent


def scale_of(amax, top, power_2=False, epsilon=0.0, mx=False):
    """The law, of one block; f32. mx: that of MXFP8, else that of blocks of 128."""
    if mx:
        return np.float32(1 / mx_scale_inv(amax, top))
    if not np.isfinite(amax) or amax == 0:
        return np.float32(1)
    with np.errstate(over="ignore"):
        scale = min(np.float32(top) / np.float32(max(amax, epsilon)), np.finfo(np.float32).max)
    return np.float32(2.0 ** (np.frexp(scale)[1] - 1)) if power_2 else np.float32(scale)


def mx_scale_inv(amax, top):
    """The least power of 2 that is not below amax / top, from 2**-126 on; an inf counts as 2**128."""
    if np.isnan(amax):
        return np.nan
    amax = 2.0**128 if np.isinf(amax) else float(amax)
    mantissa, exponent = np.frexp(amax / top)  # of 53 bits: it shows on which side of a power of 2 the quotient is
    return 2.0 ** max(exponent - (mantissa == 0.5), -126) if amax else 2.0**-126


def rounded(x, dtype):
    """f32 x as the nearest number of an FP8 type, ties to even, beyond the largest that; NaN stays."""
    x = np.clip(np.asarray(x, np.float64), -TOP[dtype], TOP[dtype])
    exponent = np.maximum(np.frexp(x)[1] - 1, LOWEST[dtype])
    step = 2.0 ** (exponent - MANTISSA[dtype])
    return np.rint(x / step) * step


def quantized(x, rows, columns, dtype, **law):
    """x [..., m, ..., n] in blocks of rows x columns along the axes `rows[0]` and `columns[0]`, of the sizes `rows[1]`
    and `columns[1]` -> the FP8 numbers, and for every element the inverse scale of its block."""
    x = np.asarray(x, np.float32)
    q, inverse = np.empty(x.shape), np.empty(x.shape, np.float32)
    (r, tall), (c, wide) = rows, columns
    others = [range(size) if axis not in (r, c) else range(1) for axis, size in enumerate(x.shape)]
    for at in itertools.product(*others):
        for i, j in itertools.product(range(0, x.shape[r], tall), range(0, x.shape[c], wide)):
            block = [slice(a, a + 1) for a in at]
            block[r], block[c] = slice(i, i + tall), slice(j, j + wide)
            part = x[tuple(block)]
            scale = scale_of(np.abs(part).max(), TOP[dtype], **law)
            q[tuple(block)] = rounded(part * scale, dtype)
            inverse[tuple(block)] = np.float32(1) / scale
    return q, inverse


def dequantized(x, split, dtype, *, transposed=False, square=False, block=128, **law):
    """What FP8 makes of x [*m, *n] with `split` axes in m, in the layout `data` or `data_t`; float64, in x's order."""
    tall, wide = (block, block) if square else (block, 1) if transposed else (1, block)
    q, inverse = quantized(x, (split - 1, tall), (x.ndim - 1, wide), str(jnp.dtype(dtype)), **law)
    return q * inverse


def dense(x, w, dy, contract, recipe, of=np.array):
    """y, dx, dw of a dense layer under scales of blocks; float64. of=np.abs: sums of the sizes of what is added."""
    if mx := isinstance(recipe, MXFP8BlockScaling):
        law = dict(block=32, mx=True)
    else:
        law = dict(power_2=not recipe.use_f32_scales, epsilon=recipe.amax_epsilon)
    fwd, bwd = recipe.fp8_format.dtype("fwd"), recipe.fp8_format.dtype("bwd")
    lead, features = x.ndim - contract, w.ndim - contract
    kernel, kernel_t = (of(dequantized(w, contract, fwd, transposed=t, square=not mx, **law)) for t in (False, True))
    y = np.tensordot(of(dequantized(x, lead, fwd, **law)), kernel_t, contract)
    axes = tuple(range(dy.ndim - features, dy.ndim)), tuple(range(contract, w.ndim))
    dx = np.tensordot(of(dequantized(dy, lead, bwd, **law)), kernel, axes)
    turned = [of(dequantized(a, lead, t, transposed=True, **law)) for a, t in ((x, fwd), (dy, bwd))]
    return y, dx, np.tensordot(*turned, (tuple(range(lead)),) * 2)


def gemm_case(sizes, square, types, out, rng, rows=None, block=128):
    """Operands of gemm_block, or of gemm_mx (blocks of 32); the product in float64 and the sum of the sizes of what is
    added, of the first `rows`."""
    m, n, k = sizes
    inverse = jnp.float8_e8m0fnu if block == 32 else jnp.float32
    narrow = lambda shape, dtype: on_device(rng.standard_normal(shape), dtype)
    blocks = lambda axes: (*axes[:-1], -(-axes[-1] // block))
    scales = lambda shape: jnp.asarray(np.exp2(rng.uniform(-9, 9, shape)), jnp.float32).astype(inverse)
    lhs, rhs = narrow((*m, *k), types[0]), narrow((*n, *k), types[1])
    lhs_inv, rhs_inv = scales((*blocks(k), *m)), scales((*blocks(n), *blocks(k)) if square else (*blocks(k), *n))
    bias, c = (on_device(rng.standard_normal(shape) * 100, out) for shape in (n, (*m, *n)))

    def wide(a, inv, free, is_square):
        inv = np.asarray(inv.astype(jnp.float32), np.float64)
        inv = inv if is_square else np.transpose(inv, (*range(len(k), inv.ndim), *range(len(k))))
        inv = np.repeat(inv, block, -1)[..., : k[-1]]
        inv = np.repeat(inv, 128, free - 1).take(np.arange(a.shape[free - 1]), free - 1) if is_square else inv
        return (np.asarray(a, np.float64) * inv).reshape(*a.shape[:free], np.prod(k))

    left, right = wide(lhs, lhs_inv, len(m), False)[:rows], wide(rhs, rhs_inv, len(n), square)
    added = np.asarray(bias, np.float64), np.asarray(c, np.float64)[:rows]
    of = lambda f: np.tensordot(f(left), f(right), (-1, -1)) + f(added[0]) + f(added[1])
    return (lhs, rhs, lhs_inv, rhs_inv, bias, c), of(np.array), of(np.abs)


def check_row_sums(got, x, split):
    """f32 sums of x [rows..., columns...] over its rows, the first `split` axes, in any order."""
    wide, rows = np.asarray(x, np.float64), tuple(range(split))
    assert (np.abs(got - wide.sum(rows)) <= np.abs(wide).sum(rows) * x.size * 2.0**-24).all()


def check_same_but_for(row, column, got, want):
    """Of (data, data_t, inverse scales of both): all of data but for the block `row`, of data_t but for `column`."""
    for i, block in enumerate((row, column, row, column)):
        others = np.ones_like(want[i], bool)
        others[block] = False
        np.testing.assert_array_equal(got[i][others], want[i][others])


def check_gemm(got, want, size, terms, out):
    """Sums of f32 in any order, or of blocks on tensor cores, then one rounding. A block is four sums of 32 products
    there, each of which is cut 13 bits below its largest term."""
    of_blocks = 4 * 2.0**-13 if jax.default_backend() == "gpu" else 0.0
    error = size * max((terms + 8) * 2.0**-24, of_blocks) + np.abs(want) * float(jnp.finfo(out).eps) / 2
    assert got.dtype == out and got.shape == want.shape
    assert (np.abs(np.asarray(got, np.float64) - want) <= error * 1.01).all()
