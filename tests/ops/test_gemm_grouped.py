"""Grouped products against a float64 oracle by loops over experts, many loads of the experts in one compilation."""

import re
from functools import partial

import grouped_oracle as oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from te_jax.layers import grouped_dense
from te_jax.ops.gemm_grouped import gemm_grouped, gemm_grouped_wgrad
from te_jax.ops.permute import buffer_rows

f32, bf16, f16, E4M3, E5M2 = jnp.float32, jnp.bfloat16, jnp.float16, jnp.float8_e4m3fn, jnp.float8_e5m2
K, N = 37, 19  # of blocks 150, 140: two blocks, the last of them cut

# E, tokens, types of both operands and of the result, scales: none, one, of each expert, of blocks; bias or c
ROWS = [
    (1, 129, f32, f32, f32, "", True),
    (3, 301, bf16, bf16, bf16, "", False),
    (3, 301, f16, f16, f32, "", True),
    (3, 301, E4M3, E4M3, bf16, "one", True),
    (3, 301, E5M2, E4M3, f32, "experts", False),
    (8, 301, E4M3, E5M2, f16, "mixed", True),
    (8, 301, bf16, bf16, f32, "", True),
    (8, 301, E4M3, E4M3, f32, "blocks", True),
    (1, 129, E4M3, E5M2, bf16, "blocks", False),
    (128, 19, E4M3, E4M3, bf16, "experts", True),
    (128, 19, f32, f32, f32, "", False),
]
WGRADS = [
    (1, 129, f32, f32, f32, "", False),
    (3, 301, bf16, bf16, f32, "", True),
    (3, 301, f16, f16, f16, "", False),
    (8, 301, E4M3, E5M2, f32, "one", True),
    (8, 301, E5M2, E4M3, bf16, "experts", True),
    (3, 301, E4M3, E4M3, f32, "blocks", False),
    (8, 301, E4M3, E5M2, bf16, "blocks", True),
    (128, 19, E4M3, E5M2, f32, "mixed", False),
    (128, 19, bf16, bf16, bf16, "", True),
]
wide = partial(np.asarray, dtype=np.float64)


def times(values, scale):
    """Operand [E, ...] with a scale for each expert, or one."""
    return values if scale is None else values * scale.reshape(-1, *[1] * (values.ndim - 1))


@pytest.mark.parametrize("case", ROWS, ids=str)
def test_rows(case, rng, plain_jax):
    """Rows that pad a group and the tail hold NaN; some tokens NaN or inf, which stay in their rows."""
    experts, tokens, left, right, out, form, has_bias = case
    k, n = (150, 140) if form == "blocks" else (K, N)
    options = dict(formats=oracle.formats_of(form), out_dtype=out)
    rows, run = buffer_rows(tokens, experts), jax.jit(partial(gemm_grouped, **options))
    for name, counts in oracle.loads(rng, experts, tokens).items():
        offsets = oracle.groups_of(counts)
        real = oracle.is_token(rows, offsets, counts)
        lhs = oracle.spoiled(rng.standard_normal((rows, k)), rng, np.flatnonzero(real))
        lhs = oracle.poisoned(lhs, ~real).astype(left)
        rhs = rng.standard_normal((experts, n, k)).astype(np.float32).astype(right)
        bias = rng.standard_normal((experts, n)).astype(np.float32).astype(out) if has_bias else None
        blocks = (-(-k // 128), rows), (experts, -(-n // 128), -(-k // 128))
        scales = oracle.scales_of(rng, form, experts, blocks)
        if form == "blocks":
            scales = oracle.poisoned(scales[0], ~real, 1), scales[1]
            l64 = wide(lhs) * oracle.blocks(scales[0], 0, k).T
            r64 = wide(rhs) * oracle.blocks(oracle.blocks(scales[1], 1, n), 2, k)
        else:
            both = np.broadcast_to(np.float64(1 if not form else scales[0] * scales[1]), experts)
            l64, r64 = wide(lhs), times(wide(rhs), both)
        want, bound = oracle.products(l64, r64, offsets, counts, None if bias is None else wide(bias))
        oracle.near(run(lhs, rhs, offsets, counts, *scales, bias), want, bound, out, name)


@pytest.mark.parametrize("case", WGRADS, ids=str)
def test_wgrads(case, rng, plain_jax):
    """The tail holds NaN, the rows that pad a group zeros; an expert without tokens has zeros, or the sum so far."""
    experts, tokens, left, right, out, form, has_c = case
    n, k, rows, run = (
        N,
        K,
        buffer_rows(tokens, experts),
        jax.jit(partial(gemm_grouped_wgrad, formats=oracle.formats_of(form, True), out_dtype=out, in_place=has_c)),
    )
    for name, counts in oracle.loads(rng, experts, tokens).items():
        offsets = oracle.groups_of(counts)
        real, tail = oracle.is_token(rows, offsets, counts), np.arange(rows) >= offsets[-1]
        operands, of_rows = [], oracle.spoiled(rng.standard_normal((rows, n)), rng, np.flatnonzero(real)).T
        for x, dtype in ((of_rows, left), (rng.standard_normal((k, rows)), right)):
            operands.append(oracle.poisoned(np.where(real, x, 0), tail, 1).astype(dtype))
        c = rng.standard_normal((experts, n, k)).astype(np.float32).astype(out) if has_c else None
        scales = oracle.scales_of(rng, form, experts, ((rows // 128, n), (rows // 128, k)))
        values, each = [*map(wide, operands)], 1
        if form == "blocks":
            values = [a * oracle.blocks(s, 0, rows).T for a, s in zip(values, scales)]
        elif form:
            each = scales[0] * scales[1]
        want, bound = oracle.wgrads(*values, offsets, counts)
        want, bound = (times(a, np.broadcast_to(np.float64(each), experts)) for a in (want, bound))
        if has_c:
            want, bound = want + wide(c), bound + oracle.SPARE * oracle.U * np.abs(wide(c))
        oracle.near(run(*operands, offsets, counts, *scales, c), want, bound, out, name)


@pytest.mark.parametrize("form", ["each", "blocks", "mx"])
def test_wgrad_of_a_slot(form, rng):
    """One of several buffers side by side is what it is by itself."""
    counts = np.array([100, 3], np.int32)
    offsets, rows, features = oracle.groups_of(counts), 384, (N, 3, 5)
    lhs, rhs = (rng.standard_normal((*shape, rows)).astype(E4M3) for shape in (features[:1], (2, *features[1:])))
    if form == "each":
        scales = [rng.uniform(0.5, 2, 2).astype(np.float32) for _ in range(2)]
    elif form == "blocks":
        scales = [rng.uniform(0.5, 2, shape).astype(np.float32) for shape in ((3, N), (3, 2, 3, 5))]
    else:
        draw = lambda *shape: (2.0 ** rng.integers(-3, 3, shape)).astype(jnp.float8_e8m0fnu)
        scales = [draw(12, N), draw(12, 2, 3, 5)]
    wgrad = partial(gemm_grouped_wgrad, formats=oracle.formats_of(form, True), out_dtype=jnp.float32)
    singly = [(rhs[slot], scales[1] if form == "each" else scales[1][:, slot]) for slot in range(2)]

    @jax.jit
    def run(lhs, rhs, scales, singly):
        of_slots = [wgrad(lhs, rhs, offsets, counts, *scales, slot=slot) for slot in range(2)]
        return of_slots, [wgrad(lhs, one, offsets, counts, scales[0], scale) for one, scale in singly]

    for got, want in zip(*run(lhs, rhs, scales, singly), strict=True):
        np.testing.assert_array_equal(got, want)
    with pytest.raises(ValueError, match=r"slot is 2, but rhs has the shape \(2, 3, 5, 384\)"):
        wgrad(lhs, rhs, offsets, counts, *scales, slot=2)


def test_several_axes(rng):
    """Axes of n and k by themselves are those of one axis each."""
    counts = np.array([100, 3], np.int32)
    offsets = oracle.groups_of(counts)
    shapes = (384, 2, 6), (2, 3, 5, 2, 6), (2, 3, 5)
    lhs, rhs, bias = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    x, weight = wide(lhs).reshape(384, 12), wide(rhs).reshape(2, 15, 12)
    got = jax.jit(partial(gemm_grouped, contract=2))(lhs, rhs, offsets, counts, bias=bias)
    want = oracle.products(x, weight, offsets, counts, wide(bias).reshape(2, 15))
    oracle.near(np.reshape(got, (384, 15)), *want, f32)
    of_rows = np.moveaxis(np.asarray(got), 0, -1)
    got = jax.jit(gemm_grouped_wgrad)(of_rows, np.moveaxis(lhs, 0, -1), offsets, counts)
    want = oracle.wgrads(wide(of_rows).reshape(15, 384), x.T, offsets, counts)
    assert got.shape == (2, 3, 5, 2, 6)
    oracle.near(np.reshape(got, (2, 15, 12)), *want, f32)


def dense_reference(x, kernel, counts, bias):
    """Every product of every group, of which each row has one."""
    ends = jnp.cumsum(counts)
    mine = (
        jnp.searchsorted(ends, jnp.arange(x.shape[0]), side="right")[:, None, None]
        == jnp.arange(counts.shape[0])[:, None]
    )
    every = jnp.einsum("tk,ekn->ten", x, kernel, precision=lax.Precision.HIGHEST) + bias
    return jnp.sum(jnp.where(mine, every, 0), 1)


def test_grouped_dense(rng):
    """Values and gradients of rows, kernels and biases, and of rows behind the last group."""

    def both(fn):
        loss = lambda x, kernel, bias, counts: jnp.sum(jnp.sin(fn(x, kernel, counts, bias)))
        return jax.jit(jax.value_and_grad(loss, (0, 1, 2)))

    got, want = both(grouped_dense), both(dense_reference)
    for name, counts in oracle.loads(rng, 3, 140).items():
        args = [rng.standard_normal(shape).astype(np.float32) for shape in ((141, 7), (3, 7, 5), (3, 5))]
        for a, b in zip(jax.tree.leaves(got(*args, counts)), jax.tree.leaves(want(*args, counts)), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=141 * 5 * 8 * oracle.U, err_msg=name)  # sums of 705 terms


def test_gradients_do_not_mix_experts(rng):
    """A NaN among the tokens of one expert reaches only the gradient of its weight."""
    counts = np.array([5, 6], np.int32)
    x, kernel = rng.standard_normal((11, 4)).astype(np.float32), rng.standard_normal((2, 4, 3)).astype(np.float32)
    x[0, 0] = np.nan
    grad = jax.jit(jax.grad(lambda kernel: jnp.sum(grouped_dense(x, kernel, counts))))(kernel)
    assert np.isnan(grad[0]).any() and np.isfinite(grad[1]).all()


f8 = lambda *shape, dtype=E4M3: np.ones(shape, dtype)
f = lambda *shape: np.ones(shape, np.float32)
GROUPS = np.array([0, 128, 128, 256], np.int32), np.array([7, 0, 128], np.int32)
X, WEIGHT, X_T, DY_T, ONE, COUNTS = f(256, 8), f(3, 5, 8), f(8, 256), f(5, 256), np.float32(1), GROUPS[1]
FP8 = f8(256, 8), f8(3, 5, 8), *GROUPS
BLOCKS = oracle.formats_of("blocks")
rows, wgrad, of_rows = gemm_grouped, gemm_grouped_wgrad, (X, WEIGHT, *GROUPS)
BAD = {  # function, operands, keywords, error, words
    "another E": (rows, (X, f(4, 5, 8), *GROUPS), {}, ValueError, "axis `e` is 3"),
    "E of the bias": (rows, (*of_rows, None, None, f(2, 5)), {}, ValueError, "axis `e` is 2 in bias"),
    "another K": (rows, (X, f(3, 5, 9), *GROUPS), {}, ValueError, "axis `k` is 9"),
    "rows": (rows, (f(250, 8), WEIGHT, *GROUPS), {}, ValueError, "lhs has 250 rows"),
    "offsets": (rows, (X, WEIGHT, COUNTS, COUNTS), {}, ValueError, r"offsets has the shape \(3,\), counts \(3,\)"),
    "floating counts": (rows, (X, WEIGHT, GROUPS[0], f(3)), {}, TypeError, "counts is float32"),
    "int16 counts": (rows, (X, WEIGHT, GROUPS[0], COUNTS.astype(np.int16)), {}, TypeError, "counts is int16"),
    "two types": (rows, (f(256, 8).astype(f16), WEIGHT, *GROUPS), {}, TypeError, "lhs is float16"),
    "two E5M2": (
        rows, (f8(256, 8, dtype=E5M2), f8(3, 5, 8, dtype=E5M2), *GROUPS, ONE, ONE), {}, TypeError, "both float8_e5m2",
    ),
    "no scale": (rows, (*FP8, ONE), {}, TypeError, "both of them"),
    "blocks of one": (rows, (*FP8, f(1, 256), None), dict(formats=BLOCKS), TypeError, "both of them"),
    "formats": (rows, (*FP8, ONE, ONE), dict(formats=BLOCKS[::-1]), ValueError, "there are tensor by tensor, rows"),
    "scale of another E": (rows, (*FP8, ONE, f(4)), {}, ValueError, "in rhs_scale_inv"),
    "contract": (rows, of_rows, dict(contract=0), ValueError, "contract is 0"),
    "out_dtype": (rows, of_rows, dict(out_dtype=E4M3), ValueError, "out_dtype is"),
    "fast_accum": (rows, of_rows, dict(fast_accum=1), TypeError, "fast_accum is 1"),
    "one axis": (rows, (f(256), WEIGHT, *GROUPS), {}, ValueError, "lhs has the shape"),
    "not an array": (rows, ([1.0], WEIGHT, *GROUPS), {}, TypeError, "lhs is"),
    "wgrad rows": (wgrad, (X_T, f(5, 384), *GROUPS), {}, ValueError, "axis `r` is 384"),
    "wgrad sum": (wgrad, (X_T, DY_T, *GROUPS, None, None, f(4, 8, 5)), {}, ValueError, "axis `e` is 4 in c"),
    "wgrad sum's type": (
        wgrad, (X_T, DY_T, *GROUPS, None, None, f(3, 8, 5).astype(bf16)), {}, TypeError, "c is bfloat16",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name):
    """Refused while it is traced, with the op, the value and a way out."""
    fn, args, attrs, error, words = BAD[name]
    with pytest.raises(error, match=words) as raised:
        jax.eval_shape(lambda: fn(*args, **attrs))
    assert re.match(r"te_gemm_grouped", str(raised.value))
