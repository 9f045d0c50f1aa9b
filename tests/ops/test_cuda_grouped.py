"""On the GPU: grouped products against float64, whatever lies in the rows that no token has."""

from functools import partial

import grouped_oracle as oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from te_jax.ops.gemm_grouped import gemm_grouped, gemm_grouped_wgrad, gemm_grouped_wide_wgrad
from te_jax.ops.permute import buffer_rows

pytestmark = pytest.mark.gpu
f32, bf16, f16, E4M3, E5M2 = jnp.float32, jnp.bfloat16, jnp.float16, jnp.float8_e4m3fn, jnp.float8_e5m2
FP8 = (E4M3, E5M2)
wide = partial(np.asarray, dtype=np.float64)

# E, tokens, N, K, types of both operands and of the result, scales, fast accumulation; bias or c
ROWS = [
    (1, 700, 512, 1024, E4M3, E4M3, bf16, "one", True, False),
    (3, 1300, 520, 400, E4M3, E5M2, f32, "experts", False, True),
    (3, 900, 264, 144, E5M2, E4M3, f16, "mixed", True, True),
    (8, 3000, 1544, 272, E4M3, E4M3, bf16, "experts", False, False),
    (128, 2000, 256, 128, E4M3, E4M3, f32, "mixed", True, False),
    (8, 1500, 776, 640, E4M3, E4M3, bf16, "blocks", False, True),
    (3, 700, 512, 384, E5M2, E4M3, f32, "blocks", False, False),
    (1, 300, 136, 200, E4M3, E5M2, f16, "blocks", True, True),
    (8, 1500, 520, 200, bf16, bf16, bf16, "", False, True),
    (3, 700, 256, 72, f16, f16, f32, "", False, False),
    (3, 300, 250, 137, E4M3, E4M3, bf16, "one", False, True),  # what XLA fills up
    (3, 300, 37, 19, bf16, bf16, f32, "", False, True),
    (3, 301, 24, 40, f32, f32, f32, "", False, True),  # XLA's
    (1025, 40, 16, 32, E4M3, E4M3, bf16, "one", True, False),
    (1024, 400, 16, 32, E4M3, E4M3, bf16, "experts", True, False),
]
WGRADS = [
    (1, 700, 512, 1024, E4M3, E4M3, f32, "one", False, True),
    (3, 1300, 520, 400, E4M3, E5M2, f32, "experts", False, False),
    (8, 3000, 1000, 264, E5M2, E4M3, bf16, "mixed", True, True),
    (8, 1500, 776, 640, E4M3, E4M3, f32, "blocks", False, True),
    (3, 900, 130, 520, E5M2, E4M3, bf16, "blocks", False, False),
    (3, 900, 300, 264, E4M3, E5M2, f16, "blocks", True, True),
    (8, 1500, 520, 264, bf16, bf16, f32, "", False, True),
    (3, 700, 256, 72, f16, f16, f16, "", False, False),
    (128, 2000, 256, 256, E4M3, E4M3, bf16, "experts", False, True),
    (3, 300, 250, 137, E4M3, E4M3, f32, "one", False, True),  # what XLA fills up
    (3, 301, 24, 40, f32, f32, f32, "", False, True),  # XLA's
]
# E, tokens, K, N, type of the operands and of the result; bias or c
WIDE = [
    (1, 700, 512, 1024, bf16, bf16, True),
    (3, 1300, 520, 400, bf16, f32, False),
    (8, 3000, 264, 1544, f16, f32, True),
    (8, 1500, 72, 776, f16, f16, False),
    (128, 2000, 256, 128, bf16, f32, True),
    (3, 300, 37, 19, bf16, f32, True),  # what XLA fills up
    (3, 301, 24, 40, f32, f32, True),  # XLA's
    (1024, 400, 16, 32, bf16, bf16, True),
]


def sum_error(dtype, k: int, fast: bool) -> float:
    """How far a sum over k may be off, relative to that of its terms' magnitudes.

    Hopper aligns the 32 FP8 products of an instruction, and the sum so far, to the largest of them and keeps 13 bits
    behind it: where terms are alike, as normal numbers are, 32 times the largest is some 6 times the sum of magnitudes,
    which makes 2**-13 * 8 of it, and once 2**-13 more for each instruction that adds to the same sum. Of wider types
    such sums keep 22 bits and more, and f32 ones that XLA makes 2**-24 for each term."""
    if dtype not in FP8:
        return 2.0**-18
    return 2.0**-13 * (8 + (k / 32 if fast else 4))


def each_expert(scales, form, experts):
    """f64[E]: what the products of each expert are multiplied by."""
    one = 1.0 if form in ("", "blocks") else wide(scales[0]) * wide(scales[1])
    return np.broadcast_to(one, experts)


def same_bits(a, b):
    return np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.mark.parametrize("case", ROWS, ids=str)
def test_rows(case, rng):
    """NaN in the rows that pad a group and in the tail; the result has zeros in the former."""
    experts, tokens, n, k, left, right, out, form, fast, has_bias = case
    rows = buffer_rows(tokens, experts)
    run = jax.jit(partial(gemm_grouped, formats=oracle.formats_of(form), out_dtype=out, fast_accum=fast))
    for name, counts in oracle.loads(rng, experts, tokens).items():
        offsets = oracle.groups_of(counts)
        real = oracle.is_token(rows, offsets, counts)
        lhs = oracle.poisoned(rng.standard_normal((rows, k)), ~real).astype(left)
        rhs = rng.standard_normal((experts, n, k)).astype(np.float32).astype(right)
        bias = rng.standard_normal((experts, n)).astype(np.float32).astype(out) if has_bias else None
        scales = oracle.scales_of(rng, form, experts, ((-(-k // 128), rows), (experts, -(-n // 128), -(-k // 128))))
        if form == "blocks":
            l64 = wide(lhs) * oracle.blocks(scales[0], 0, k).T
            r64 = wide(rhs) * oracle.blocks(oracle.blocks(scales[1], 1, n), 2, k)
            scales = oracle.poisoned(scales[0], ~real, 1), scales[1]
        else:
            l64, r64 = wide(lhs), wide(rhs) * each_expert(scales, form, experts)[:, None, None]
        l64 = np.where(real[:, None], l64, 0)
        want, _ = oracle.products(l64, r64, offsets, counts, None if bias is None else wide(bias))
        size, _ = oracle.products(np.abs(l64), np.abs(r64), offsets, counts)
        got = run(lhs, rhs, offsets, counts, *scales, bias)
        end = offsets[-1]
        oracle.near(got[:end], want[:end], (size * sum_error(left, k, fast) + 1e-6)[:end], out, name)
        assert not np.asarray(got[:end])[~real[:end]].any(), name
        assert same_bits(got[:end], run(lhs, rhs, offsets, counts, *scales, bias)[:end]), name


# Axes of n and of k: blocks are cut at the end of each.
SLOTS = [((2, 2880), (2880,)), ((2880,), (2, 2880)), ((2, 1360), (720,)), ((3, 72), (2, 80)), ((2, 50), (3, 37))]


@pytest.mark.parametrize("n,k", SLOTS, ids=str)
def test_rows_of_several_axes_of_blocks(n, k, rng):
    """Blocks begin anew in each entry of the axes in front. NaN in the rows that pad a group and in the tail."""
    experts, tokens = 3, 700
    rows, blocks = buffer_rows(tokens, experts), lambda axes: (*axes[:-1], -(-axes[-1] // 128))
    run = jax.jit(partial(gemm_grouped, contract=len(k), formats=oracle.formats_of("blocks"), out_dtype=bf16))
    counts = oracle.loads(rng, experts, tokens)["zipf"]
    offsets = oracle.groups_of(counts)
    real = oracle.is_token(rows, offsets, counts)
    lhs = oracle.poisoned(rng.standard_normal((rows, *k)), ~real).astype(E4M3)
    rhs = rng.standard_normal((experts, *n, *k)).astype(np.float32).astype(E4M3)
    shapes = (*blocks(k), rows), (experts, *blocks(n), *blocks(k))
    scales = [rng.uniform(0.5, 2, shape).astype(np.float32) for shape in shapes]
    got = run(lhs, rhs, offsets, counts, *scales)
    l64 = np.where(real[:, None], (wide(lhs) * np.moveaxis(oracle.blocks(scales[0], len(k) - 1, k[-1]), -1, 0))
                   .reshape(rows, -1), 0)  # fmt: skip
    r64 = wide(rhs) * oracle.blocks(oracle.blocks(scales[1], len(n), n[-1]), len(n) + len(k), k[-1])
    r64 = r64.reshape(experts, -1, l64.shape[1])
    want, _ = oracle.products(l64, r64, offsets, counts)
    size, _ = oracle.products(np.abs(l64), np.abs(r64), offsets, counts)
    end, flat = offsets[-1], np.asarray(got).reshape(rows, -1)
    oracle.near(flat[:end], want[:end], (size * sum_error(E4M3, k[-1], False) + 1e-6)[:end], bf16, "zipf")
    assert not flat[:end][~real[:end]].any()


@pytest.mark.parametrize("case", WGRADS, ids=str)
def test_wgrads(case, rng):
    """NaN in the tail; an expert without tokens has zeros, or the sum so far, also where it is added to in place."""
    experts, tokens, n, k, left, right, out, form, fast, has_c = case
    rows = buffer_rows(tokens, experts)
    options = dict(formats=oracle.formats_of(form, True), out_dtype=out, fast_accum=fast)
    run = jax.jit(partial(gemm_grouped_wgrad, **options), static_argnames="slot")
    onto = jax.jit(partial(gemm_grouped_wgrad, **options, in_place=True), donate_argnums=6)
    for name, counts in oracle.loads(rng, experts, tokens).items():
        offsets = oracle.groups_of(counts)
        real, tail = oracle.is_token(rows, offsets, counts), np.arange(rows) >= offsets[-1]
        operands = [
            oracle.poisoned(np.where(real, rng.standard_normal((size, rows)), 0), tail, 1).astype(dtype)
            for size, dtype in ((n, left), (k, right))
        ]
        c = rng.standard_normal((experts, n, k)).astype(np.float32).astype(out) if has_c else None
        scales = oracle.scales_of(rng, form, experts, ((rows // 128, n), (rows // 128, k)))
        values = [np.where(real, wide(a), 0) for a in operands]
        if form == "blocks":
            values = [a * oracle.blocks(s, 0, rows).T for a, s in zip(values, scales)]
        each = each_expert(scales, form, experts)[:, None, None]
        want, size = (oracle.wgrads(*v, offsets, counts)[0] * each for v in (values, [*map(np.abs, values)]))
        bound = size * sum_error(left, rows, fast) + 1e-6
        if has_c:
            want, bound = want + wide(c), bound + 2.0**-22 * np.abs(wide(c))
        got = run(*operands, offsets, counts, *scales, c)
        oracle.near(got, want, bound, out, name)
        assert same_bits(got, run(*operands, offsets, counts, *scales, c)), name
        if has_c:
            assert same_bits(got, onto(*operands, offsets, counts, *scales, jnp.array(c))), name
        beside = np.stack([np.full_like(operands[1], 1), operands[1]])  # another buffer in front
        scales = [s if form != "blocks" or not i else np.stack([s, s], 1) for i, s in enumerate(scales)]
        assert same_bits(got, run(operands[0], beside, offsets, counts, *scales, c, slot=1)), name


@pytest.mark.parametrize("case", WIDE, ids=str)
def test_rows_of_weights_as_they_lie(case, rng):
    """NaN in the rows that pad a group and in the tail; the result has zeros in the former."""
    experts, tokens, k, n, dtype, out, has_bias = case
    rows = buffer_rows(tokens, experts)
    run = jax.jit(partial(gemm_grouped, k_first=True, out_dtype=out))
    for name, counts in oracle.loads(rng, experts, tokens).items():
        offsets = oracle.groups_of(counts)
        real, end = oracle.is_token(rows, offsets, counts), offsets[-1]
        lhs = oracle.poisoned(rng.standard_normal((rows, k)), ~real).astype(dtype)
        rhs = rng.standard_normal((experts, k, n)).astype(np.float32).astype(dtype)
        bias = rng.standard_normal((experts, n)).astype(np.float32).astype(out) if has_bias else None
        l64, r64 = np.where(real[:, None], wide(lhs), 0), wide(rhs).swapaxes(1, 2)
        want, _ = oracle.products(l64, r64, offsets, counts, None if bias is None else wide(bias))
        size, _ = oracle.products(np.abs(l64), np.abs(r64), offsets, counts)
        got = run(lhs, rhs, offsets, counts, bias=bias)
        oracle.near(got[:end], want[:end], (size * sum_error(dtype, k, False) + 1e-6)[:end], out, name)
        assert not np.asarray(got[:end])[~real[:end]].any(), name
        assert same_bits(got[:end], run(lhs, rhs, offsets, counts, bias=bias)[:end]), name


@pytest.mark.parametrize("case", WIDE, ids=str)
def test_wgrads_of_rows_as_they_lie(case, rng):
    """NaN in both buffers where no token is."""
    experts, tokens, k, n, dtype, out, has_c = case
    rows = buffer_rows(tokens, experts)
    run = jax.jit(partial(gemm_grouped_wide_wgrad, out_dtype=out))
    onto = jax.jit(partial(gemm_grouped_wide_wgrad, out_dtype=out, in_place=True), donate_argnums=4)
    for name, counts in oracle.loads(rng, experts, tokens).items():
        offsets = oracle.groups_of(counts)
        real = oracle.is_token(rows, offsets, counts)
        both = [oracle.poisoned(rng.standard_normal((rows, size)), ~real).astype(dtype) for size in (k, n)]
        c = rng.standard_normal((experts, k, n)).astype(np.float32).astype(out) if has_c else None
        values = [np.where(real, wide(a).T, 0) for a in both]
        want, size = (oracle.wgrads(*v, offsets, counts)[0] for v in (values, [*map(np.abs, values)]))
        bound = size * sum_error(dtype, rows, False) + 1e-6
        if has_c:
            want, bound = want + wide(c), bound + 2.0**-22 * np.abs(wide(c))
        got = run(*both, offsets, counts, c)
        oracle.near(got, want, bound, out, name)
        assert same_bits(got, run(*both, offsets, counts, c)), name
        if has_c:
            assert same_bits(got, onto(*both, offsets, counts, jnp.array(c))), name


def test_in_a_cuda_graph(rng):
    """Captured once, with other groups each time: nothing of them is kept on the host."""
    experts, tokens, n, k = 3, 500, 256, 256
    rows = buffer_rows(tokens, experts)

    def net(x, weights, offsets, counts):
        for weight in weights:
            x = gemm_grouped(x, weight, offsets, counts) * 2
        return x

    graph = jax.jit(net, compiler_options={"xla_gpu_graph_min_graph_size": 1})
    weights = [jnp.asarray(rng.standard_normal((experts, n, k)) / 32, bf16) for _ in range(3)]
    for counts in oracle.loads(rng, experts, tokens).values():
        offsets = oracle.groups_of(counts)
        real = oracle.is_token(rows, offsets, counts)
        x = jnp.asarray(np.where(real[:, None], rng.standard_normal((rows, k)), 0), bf16)
        with jax.disable_jit():
            want = net(x, weights, offsets, counts)
        end = offsets[-1]
        np.testing.assert_array_equal(graph(x, weights, offsets, counts)[:end], want[:end])
