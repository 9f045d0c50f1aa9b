"""Grouped products and activations in float64, by loops over experts, each with a bound of its error in f32.

A pair (values, bounds): how far a result in f32 may be from the values, whatever the order of its sums. A sum of n
products is off by n u of the sum of their absolute values at most, u = 2**-24 (Higham, Accuracy and Stability of
Numerical Algorithms, section 3.1); SPARE more roundings are of scales, bias and the like.
"""

import jax.numpy as jnp
import numpy as np

from te_jax.ops.formats import ROWS_32, ROWS_128, SQUARES_128, TENSOR

U = 2.0**-24
SPARE = 8


def groups_of(counts):
    """i32[E + 1]: the first row of each group, and the end of the last."""
    ends = [0]
    for count in counts:
        ends.append(ends[-1] + -(-int(count) // 128) * 128)
    return np.array(ends, np.int32)


def tokens_of(offsets, counts, e):
    """The rows of expert e that are tokens'."""
    return slice(int(offsets[e]), int(offsets[e]) + int(counts[e]))


def is_token(rows, offsets, counts):
    found = np.zeros(rows, bool)
    for e in range(len(counts)):
        found[tokens_of(offsets, counts, e)] = True
    return found


def blocks(values, axis, size):
    """The entry of each block of 128 along `axis`, for each of its elements."""
    return np.take(np.repeat(values, 128, axis), np.arange(size), axis)


@np.errstate(invalid="ignore")
def products(lhs, rhs, offsets, counts, bias=None):
    """lhs [R, K], rhs [E, N, K], bias [E, N], all with their scales -> [R, N]."""
    out, bound = np.zeros((2, lhs.shape[0], rhs.shape[1]))
    for e in range(len(counts)):
        rows = tokens_of(offsets, counts, e)
        out[rows] = lhs[rows] @ rhs[e].T
        bound[rows] = (lhs.shape[1] + SPARE) * U * (np.abs(lhs[rows]) @ np.abs(rhs[e]).T)
        if bias is not None:
            out[rows] += bias[e]
            bound[rows] += SPARE * U * np.abs(bias[e])
    return out, bound


@np.errstate(invalid="ignore")
def wgrads(lhs, rhs, offsets, counts, c=None):
    """lhs [N, R], rhs [K, R], c [E, N, K] -> [E, N, K]."""
    out, bound = np.zeros((2, len(counts), lhs.shape[0], rhs.shape[0]))
    for e in range(len(counts)):
        rows = tokens_of(offsets, counts, e)
        out[e] = lhs[:, rows] @ rhs[:, rows].T
        bound[e] = (counts[e] + SPARE) * U * (np.abs(lhs[:, rows]) @ np.abs(rhs[:, rows]).T)
    if c is not None:
        out, bound = out + c, bound + SPARE * U * np.abs(c)
    return out, bound


def _silu(x):
    s = 1 / (1 + np.exp(-x))
    return x * s, s + x * s * (1 - s), np.abs(x)


def _gelu(x):
    c = np.sqrt(2 / np.pi)
    u, du = c * (x + 0.044715 * x**3), c * (1 + 3 * 0.044715 * x**2)
    t = np.tanh(u)
    return x * (1 + t) / 2, (1 + t) / 2 + x * (1 - t * t) / 2 * du, 2 * np.abs(u)


def _relu(x):
    return np.maximum(x, 0), (x > 0) * 1.0, np.zeros_like(x)


# x -> its activation, the derivative, and the argument of the exponential: that is off by U of itself in f32, the
# exponential by as much relative to its value.
_CURVES = {"silu": _silu, "gelu": _gelu, "relu": _relu}


def _activated(x, names):
    """x [T, A, F] -> y [T, F], the derivative by x [T, A, F], the relative error of both.

    The terms of a derivative have one sign or are as large as x: (1 + |x|) times the relative error bounds theirs. It
    bounds what the rounding of x + bias adds, too: the first and second derivatives are 1.2 at most.
    """
    value, slope, argument = _CURVES[names[0]](x[:, 0])
    error = (3 * SPARE + 4 * argument) * U
    if len(names) == 1:
        return value, slope[:, None], error * (1 + np.abs(x[:, 0])), error[:, None] * (1 + np.abs(x))
    linear = x[:, 1]
    slopes = np.stack([slope * linear, value], 1)
    wide = (1 + np.abs(x[:, :1])) * np.stack([np.abs(linear), np.ones_like(linear)], 1)
    return value * linear, slopes, error * (1 + np.abs(x[:, 0])) * np.abs(linear), error[:, None] * wide


@np.errstate(invalid="ignore", over="ignore")
def activations(x, offsets, counts, names, bias=None, dy=None):
    """x [R, A, F], bias [E, A, F] -> y [R, F]; with dy [R, F] -> dx [R, A, F]. Zeros in rows that are no tokens'."""
    shape = (x.shape[0], x.shape[2]) if dy is None else x.shape
    out, bound = np.zeros((2, *shape))
    for e in range(len(counts)):
        rows = tokens_of(offsets, counts, e)
        biased = x[rows] if bias is None else x[rows] + bias[e]
        y, slope, y_error, slope_error = _activated(biased, names)
        if dy is None:
            out[rows], bound[rows] = y, y_error
        else:
            out[rows] = dy[rows][:, None] * slope
            bound[rows] = np.abs(dy[rows][:, None]) * (slope_error + SPARE * U * np.abs(slope))
    return out, bound


def of_experts(values, bounds, offsets, counts):
    """values [R, ...] -> the amax [E] of each expert and its bound, the sum over the rows of each and its bound."""
    amax, amax_bound = np.zeros((2, len(counts)))
    sums, sums_bound = np.zeros((2, len(counts), *values.shape[1:]))
    for e in range(len(counts)):
        rows = tokens_of(offsets, counts, e)
        if counts[e]:
            amax[e], amax_bound[e] = np.max(np.abs(values[rows])), np.max(bounds[rows])
        sums[e] = np.sum(values[rows], 0)
        sums_bound[e] = np.sum(bounds[rows], 0) + counts[e] * U * np.sum(np.abs(values[rows]), 0)
    return (amax, amax_bound), (sums, sums_bound)


# -- cases ----------------------------------------------------------------------------------------------------


def loads(rng, experts, tokens):
    """Ways to spread `tokens` tokens, or fewer, over experts: {name: counts i32[E]}."""
    of = lambda chance: rng.multinomial(tokens, chance / chance.sum()).astype(np.int32)
    one = np.eye(experts, dtype=np.int32)
    some = rng.permutation(experts)[: max(1, experts // 2)]
    found = {
        "no tokens": 0 * one[0],
        "one token": one[rng.integers(experts)],
        "the first has all": tokens * one[0],
        "the last has all": tokens * one[-1],
        "even": of(np.ones(experts)),
        "zipf": of(1.0 / (1 + rng.permutation(experts))),
        "half are empty": of(one[some].sum(0).astype(float)),
        "whole tiles": 128 * of(one[some[:1]].sum(0).astype(float)) // tokens * (tokens // 128),
        "fewer": of(np.ones(experts)) // 2,
    }
    return found | {f"random {i}": of(rng.uniform(size=experts) ** 3) for i in range(3)}


def poisoned(x, rows, axis=0):
    """x with NaN in the rows that `rows`, a mask, names."""
    x = np.array(x, np.float32)
    np.moveaxis(x, axis, 0)[rows] = np.nan
    return x


def spoiled(x, rng, tokens):
    """x [R, ...] with NaN or inf in one element of some rows of `tokens`, the numbers of rows."""
    x = np.array(x)
    for row, bad in zip(rng.permutation(tokens)[:3], (np.nan, np.inf, -np.inf)):
        x[row].flat[rng.integers(x[row].size)] = bad
    return x


def scales_of(rng, form, experts, blocks):
    """The inverse scales of both operands. blocks: the shapes of those of blocks."""
    shapes = {"one": ((), ()), "experts": ((experts,),) * 2, "mixed": ((), (experts,)), "blocks": blocks}
    if not form:
        return None, None
    return tuple(rng.uniform(0.5, 2, shape).astype(np.float32) for shape in shapes[form])


@np.errstate(over="ignore")
def formats_of(form, contracted=False):
    """The formats of the factors of a product, of two buffers of rows if `contracted`."""
    blocks = ROWS_128, ROWS_128 if contracted else SQUARES_128
    return {"blocks": blocks, "mx": (ROWS_32, ROWS_32)}.get(form, (TENSOR, TENSOR))


def near(got, want, bound, dtype, about=""):
    """`got`, rounded once to `dtype`, is within `bound` of `want`; NaN and inf are where they should be."""
    info = jnp.finfo(dtype)
    got, finite = np.asarray(got, np.float64), np.isfinite(want)
    np.testing.assert_array_equal(got[~finite], want[~finite], about)
    got, want = got[finite], want[finite]
    bound = np.nan_to_num(bound[finite], nan=0)  # the derivative of relu is 0 at NaN
    room = bound + float(info.eps) / 2 * (np.abs(want) + bound) + float(info.smallest_subnormal) / 2
    far = ~(np.abs(got - want) <= room)
    off = np.max(np.abs(got - want) / room, initial=0)
    assert not far.any(), f"{about}: {far.sum()} of {far.size}, {got[far][:3]} for {want[far][:3]}, {off} of the room"
