"""The kernel of grouped products on the CPU: its scheduler, and whole calls with threads, copies and products that come
in any order that the kernel allows (host_cuda/cluster.h)."""

import subprocess
from functools import partial

import grouped_oracle as oracle
import jax.numpy as jnp
import numpy as np
import pytest
from host_cuda import program

pytestmark = pytest.mark.sources
f32, bf16, f16, E4M3, E5M2 = jnp.float32, jnp.bfloat16, jnp.float16, jnp.float8_e4m3fn, jnp.float8_e5m2
wide = lambda x: np.asarray(x, np.float64)
FACTORS = {(E4M3, E4M3): 0, (E4M3, E5M2): 1, (E5M2, E4M3): 2, (bf16, bf16): 3, (f16, f16): 4}
RESULTS = {f16: 10, f32: 11, bf16: 16}  # the numbers of csrc/base/tensor.h
# sums (csrc/gemm/gemm_grouped.h), left, right, result, bias or c, CTAs of a cluster
FAST, SPLIT, SQUARES, ROWS = range(4)
ALONG, RIGHT_ACROSS, BOTH_ACROSS = range(3)  # k, of csrc/gemm/gemm_grouped.h, too
PRODUCTS = [
    (FAST, E4M3, E4M3, bf16, True, 2),
    (FAST, E4M3, E4M3, f32, False, 1),
    (FAST, bf16, bf16, f16, False, 2),
    (FAST, f16, f16, f32, True, 2),
    (SPLIT, E5M2, E4M3, bf16, True, 2),
    (SQUARES, E4M3, E4M3, bf16, False, 2),
    (SQUARES, E4M3, E4M3, f32, True, 1),
]
WGRADS = [
    (FAST, E4M3, E4M3, f32, True, 2),
    (FAST, f16, f16, f16, False, 1),
    (SPLIT, E5M2, E4M3, f32, False, 2),
    (SPLIT, E5M2, E4M3, bf16, True, 2),
    (ROWS, E4M3, E5M2, f32, True, 2),
    (ROWS, E4M3, E5M2, bf16, False, 1),
]


@pytest.fixture(scope="module")
def scheduler(tmp_path_factory):
    return program.compiled(tmp_path_factory.mktemp("scheduler"), "scheduler")


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    return program.compiled(tmp_path_factory.mktemp("kernel"), "grouped")


def test_gathered_tiles_come_once_and_by_pieces(tmp_path, rng):
    """Of x that L2 does not hold: all chunks of some strips, then of the next; of other x, and of rows read once, chunk
    by chunk."""
    random = [[rng.integers(1, 2**16), 128, rng.integers(1, 40), rng.integers(1, 70), 8] for _ in range(100)]
    cases = [*random, [8192, 128, 9, 64, 2], [2**20, 256, 5, 7, 8], [0, 128, 3, 5, 8], [8192, 128, 9, 64, 1]]
    text = "\n".join(" ".join(map(str, case)) for case in cases)
    order = program.compiled(tmp_path, "order")
    lines = subprocess.run([order], input=text, capture_output=True, text=True, check=True).stdout.splitlines()
    tiles = [np.array(line.split(), int) for line in lines]
    for (_, _, chunks, strips, _), each in zip(cases, tiles, strict=True):
        np.testing.assert_array_equal(np.sort(each), np.arange(chunks * strips))
    whole = np.arange(9 * 64).reshape(9, 64)
    in_l2 = 8  # strips of 8192 x 128 bytes in 8 MB
    pieces = [whole[:, first : first + in_l2].ravel() for first in range(0, 64, in_l2)]
    np.testing.assert_array_equal(tiles[100], np.concatenate(pieces))
    pairs = [np.arange(35).reshape(5, 7)[:, first : first + 2].ravel() for first in range(0, 7, 2)]
    np.testing.assert_array_equal(tiles[101], np.concatenate(pairs))
    for case in (102, 103):
        np.testing.assert_array_equal(tiles[case], np.arange(tiles[case].size))


def test_every_tile_once(scheduler, rng):
    random = [[rng.integers(0, 40), rng.integers(1, 70), 2, 8, rng.integers(1, 70)] for _ in range(300)]
    cases = [*random, [0, 5, 2, 8, 3], [1, 1, 2, 8, 66], [7, 9, 1, 8, 132], [3, 17, 2, 4, 66], [2**14, 3, 2, 8, 66]]
    text = "\n".join(" ".join(map(str, case)) for case in cases)
    lines = subprocess.run([scheduler], input=text, capture_output=True, text=True, check=True).stdout.splitlines()
    for case, line in zip(cases, lines, strict=True):
        rows, columns, span, _, workers = case
        tiles, *shares = (np.array(part.split(), int) for part in line.split("share"))
        tiles = tiles.reshape(-1, 2)
        assert (tiles[:, 0] < rows).all(), case
        inside = tiles[tiles[:, 1] < columns]
        assert len(inside) == rows * columns == len(np.unique(inside, axis=0)), case
        # A tile beyond the columns is in a row that no pair of rows has, at the end of its last band.
        assert len(tiles) - len(inside) <= (rows % span) * (span - 1), case
        assert len(shares) == 2
        for share in shares:
            np.testing.assert_array_equal(np.sort(share), np.arange(len(tiles) // span), str(case))


# Type of the factors, of the result, bias or c, CTAs of a cluster
WIDE = [(bf16, bf16, True, 2), (f16, f32, False, 2), (bf16, f32, True, 1), (f16, bf16, False, 1)]


def call(
    kernel, case, wgrad, sizes, left, right, offsets, counts, scales, extra, in_place=False, layout=ALONG, line=0,
    counted=True, slots=(1, 1), onto=False,
):  # fmt: skip
    """The result of one call. extra: bias, or c of a wgrad, or None. line: of a factor in both layouts. counted:
    clusters count items. slots: of columns and of k. onto: extra is c."""
    sums, left_type, right_type, out, _, ctas = case
    rows, columns, k = sizes
    one_scale, blocks = (scales, (None, None)) if sums in (FAST, SPLIT) else ((None, None), scales)
    each = [scale is not None and scale.size > 1 for scale in one_scale]
    numbers = [
        sums,
        FACTORS[left_type, right_type],
        wgrad,
        1 if counts is None else len(counts),
        *sizes,
        RESULTS[out],
        *each,
        ctas,
        in_place,
        layout,
        line,
        counted,
        *slots,
    ]
    result = np.full((len(counts), rows, columns) if wgrad else (rows, columns), np.nan, out)
    bias, c = (None, extra) if wgrad or onto else (extra, None)
    if in_place:
        result, c = c, None
    arrays = [left, right, offsets, counts, *one_scale, *blocks, bias, c, result]
    return np.frombuffer(program.call(kernel, numbers, arrays), out).reshape(result.shape)


def groups(rng):
    """Some experts, of which some have no tokens, and a tail."""
    counts = (rng.integers(1, 400, rng.integers(1, 5)) * (rng.random() < 0.8)).astype(np.int32)
    counts[rng.integers(len(counts))] = 0
    counts = np.append(counts, np.int32(rng.integers(1, 300)))
    offsets = oracle.groups_of(counts)
    rows = int(offsets[-1]) + 128
    return counts, offsets, rows, oracle.is_token(rows, offsets, counts)


def scales_of(rng, sums, experts, blocks, has_scale):
    shapes = ((1,), (experts,)) if sums in (FAST, SPLIT) else blocks
    return [rng.uniform(0.5, 2, shape).astype(np.float32) for shape in shapes] if has_scale else [None, None]


def factors(rng, case, real, experts, k):
    """lhs [R, k] with NaN where no token is, rhs [E, n, k] of some n, bias [E, n] or None."""
    _, left, right, out, has_bias, _ = case
    n = 8 * int(rng.integers(1, 70))
    lhs = oracle.poisoned(rng.standard_normal((len(real), k)), ~real).astype(left)
    rhs = rng.standard_normal((experts, n, k)).astype(np.float32).astype(right)
    bias = rng.standard_normal((experts, n)).astype(np.float32).astype(out) if has_bias else None
    return lhs, rhs, bias


@pytest.mark.parametrize("case", PRODUCTS, ids=str)
def test_products(kernel, case, rng):
    sums, left, _, out, *_ = case
    counts, offsets, rows, real = groups(rng)
    k = 16 * int(rng.integers(1, 22))
    lhs, rhs, bias = factors(rng, case, real, len(counts), k)
    experts, n, _ = rhs.shape
    blocks = (-(-k // 128), rows), (experts, -(-n // 128), -(-k // 128))
    scales = scales_of(rng, sums, experts, blocks, left not in (bf16, f16))
    l64, r64 = np.where(real[:, None], wide(lhs), 0), wide(rhs)
    if sums == SQUARES:
        l64, r64 = l64 * oracle.blocks(scales[0], 0, k).T, r64 * oracle.blocks(oracle.blocks(scales[1], 1, n), 2, k)
    elif scales[0] is not None:
        r64 = r64 * (wide(scales[0]) * wide(scales[1]))[:, None, None]
    want, bound = oracle.products(l64, r64, offsets, counts, None if bias is None else wide(bias))
    got = call(kernel, case, False, (rows, n, k), lhs, rhs, offsets, counts, scales, bias)
    end = offsets[-1]
    oracle.near(got[:end], want[:end], bound[:end], out, str((counts, n, k)))
    assert np.isnan(wide(got[end:])).all()  # the tail is as it was


def in_slots(scales, axis, slots, size):
    """The scales of blocks that begin anew in each of `slots` slots, for each of the `size` elements along an axis."""
    each = np.split(scales, slots, axis)
    return np.concatenate([oracle.blocks(part, axis, size // slots) for part in each], axis)


def filled(a, axis, slots):
    """`a` with zeros behind each of `slots` slots along an axis, up to whole blocks."""
    each = [np.pad(part, [(0, -part.shape[axis] % 128 if i == axis else 0) for i in range(a.ndim)])
            for part in np.split(a, slots, axis)]  # fmt: skip
    return np.concatenate(each, axis)


# Slots of columns and of k, their sizes, CTAs of a cluster, type of the result
SLOTS = [
    ((2, 1), (64, 144), 2, bf16),  # a slot ends in the middle of a tile's half
    ((2, 1), (320, 208), 2, f32),
    ((3, 1), (136, 16), 1, bf16),
    ((1, 2), (264, 80), 2, bf16),
    ((1, 3), (8, 272), 1, f32),
    ((2, 2), (192, 192), 2, f16),
    ((2, 2), (128, 128), 2, bf16),
]


@pytest.mark.parametrize("case", SLOTS, ids=str)
@pytest.mark.parametrize("grouped", [True, False], ids=["groups", "all rows"])
def test_products_of_slots(kernel, case, grouped, rng):
    """The weights of a gated activation where 128 does not divide their sizes: blocks begin anew in each. Without
    groups all rows, of any number, are tokens', and there is a sum to add to."""
    slots, each, ctas, out = case
    n, k = (size * count for size, count in zip(each, slots))
    counts, offsets, rows, real = groups(rng)
    if not grouped:
        rows = int(rng.integers(1, 300))
        counts, offsets, real = np.array([rows], np.int32), np.array([0, rows], np.int32), np.ones(rows, bool)
    form = SQUARES, E4M3, E4M3, out, True, ctas
    lhs = oracle.poisoned(rng.standard_normal((rows, k)), ~real).astype(E4M3)
    rhs = rng.standard_normal((len(counts), n, k)).astype(np.float32).astype(E4M3)
    extra = rng.standard_normal((len(counts), n) if grouped else (rows, n)).astype(np.float32).astype(out)
    blocks = [-(-size // 128) * count for size, count in zip(each, slots)]
    scales = [rng.uniform(0.5, 2, s).astype(np.float32) for s in ((blocks[1], rows), (len(counts), *blocks))]
    l64 = np.where(real[:, None], wide(lhs) * in_slots(scales[0], 0, slots[1], k).T, 0)
    r64 = wide(rhs) * in_slots(in_slots(scales[1], 1, slots[0], n), 2, slots[1], k)
    want, bound = oracle.products(l64, r64, offsets, counts, wide(extra) if grouped else None)
    if not grouped:
        want, bound = want + wide(extra), bound + oracle.SPARE * oracle.U * np.abs(wide(extra))
    of_groups = (offsets, counts) if grouped else (None, None)
    got = call(kernel, form, False, (rows, n, k), lhs, rhs, *of_groups, scales, extra, slots=slots, onto=not grouped)
    end = offsets[-1]
    oracle.near(got[:end], want[:end], bound[:end], out, str((counts, n, k)))
    assert np.isnan(wide(got[end:])).all()  # the tail is as it was
    if grouped:  # bit for bit the columns of factors that are filled up
        lhs, rhs = filled(lhs, 1, slots[1]), filled(filled(rhs, 1, slots[0]), 2, slots[1])
        sizes, bias = (rows, rhs.shape[1], rhs.shape[2]), filled(extra, 1, slots[0])
        again = call(kernel, form, False, sizes, lhs, rhs, offsets, counts, scales, bias)
        parts = [part[:end, : each[0]] for part in np.split(again, slots[0], 1)]
        assert np.concatenate(parts, 1).tobytes() == got[:end].tobytes()


@pytest.mark.parametrize("case", WGRADS, ids=str)
def test_wgrads(kernel, case, rng):
    sums, left, right, out, has_c, _ = case
    counts, offsets, rows, real = groups(rng)
    experts, n, k = len(counts), int(rng.integers(1, 400)), 8 * int(rng.integers(1, 70))
    tail = np.arange(rows) >= offsets[-1]
    operands = [
        oracle.poisoned(np.where(real, rng.standard_normal((size, rows)), 0), tail, 1).astype(dtype)
        for size, dtype in ((n, left), (k, right))
    ]
    c = rng.standard_normal((experts, n, k)).astype(np.float32).astype(out) if has_c else None
    scales = scales_of(rng, sums, experts, ((rows // 128, n), (rows // 128, k)), left not in (bf16, f16))
    values, each = [np.where(real, wide(a), 0) for a in operands], 1.0
    if sums == ROWS:
        values = [a * oracle.blocks(scale, 0, rows).T for a, scale in zip(values, scales)]
    elif scales[0] is not None:
        each = (wide(scales[0]) * wide(scales[1]))[:, None, None]
    want, bound = (a * each for a in oracle.wgrads(*values, offsets, counts))
    if has_c:
        want, bound = want + wide(c), bound + oracle.SPARE * oracle.U * np.abs(wide(c))
    sizes = n, k, rows
    got = call(kernel, case, True, sizes, *operands, offsets, counts, scales, c)
    oracle.near(got, want, bound, out, str((counts, n, k)))
    if has_c:
        again = call(kernel, case, True, sizes, *operands, offsets, counts, scales, c, in_place=True, counted=False)
        assert again.tobytes() == got.tobytes()


def paired(data):
    """FP8 [R, k] in both layouts in one array, as bytes [R, 2 k] (te_jax/ops/experts/paired.py)."""
    rows, k = data.shape
    squares = data.view(np.uint8).reshape(rows // 128, 128, k // 128, 128)
    return np.stack([squares, squares.swapaxes(1, 3)], 3).reshape(rows, 2 * k)


@pytest.mark.parametrize("case", [PRODUCTS[0], PRODUCTS[1], PRODUCTS[4]], ids=str)
def test_products_of_a_pair(kernel, case, rng):
    """Bit for bit those of the left factor in an array of its own."""
    counts, offsets, rows, real = groups(rng)
    k = 128 * int(rng.integers(1, 4))
    lhs, rhs, bias = factors(rng, case, real, len(counts), k)
    experts, n, _ = rhs.shape
    others = offsets, counts, scales_of(rng, case[0], experts, None, True), bias
    want = call(kernel, case, False, (rows, n, k), lhs, rhs, *others, counted=False)
    got = call(kernel, case, False, (rows, n, k), paired(lhs), rhs, *others, line=2 * k)
    assert got.tobytes() == want.tobytes()


@pytest.mark.parametrize("case", [WGRADS[0], WGRADS[2]], ids=str)
def test_wgrads_of_a_pair(kernel, case, rng):
    """Bit for bit those of the right factor in an array of its own."""
    _, left, right, out, has_c, _ = case
    counts, offsets, rows, real = groups(rng)
    experts, n, k = len(counts), int(rng.integers(1, 400)), 128 * int(rng.integers(1, 4))
    tail = np.arange(rows) >= offsets[-1]
    lhs, rhs = (
        oracle.poisoned(np.where(real, rng.standard_normal((size, rows)), 0), tail, 1).astype(dtype)
        for size, dtype in ((n, left), (k, right))
    )
    c = rng.standard_normal((experts, n, k)).astype(np.float32).astype(out) if has_c else None
    others = offsets, counts, scales_of(rng, case[0], experts, None, True), c
    want = call(kernel, case, True, (n, k, rows), lhs, rhs, *others)
    got = call(kernel, case, True, (n, k, rows), lhs, paired(np.ascontiguousarray(rhs.T)), *others, line=2 * k)
    assert got.tobytes() == want.tobytes()


@pytest.mark.parametrize("case", WIDE, ids=str)
def test_products_across(kernel, case, rng):
    """Weights [E, k, n]. NaN lies behind each group's tokens."""
    dtype, out, has_bias, ctas = case
    counts, offsets, rows, real = groups(rng)
    experts, n, k = len(counts), 8 * int(rng.integers(1, 70)), 8 * int(rng.integers(1, 40))
    lhs = oracle.poisoned(rng.standard_normal((rows, k)), ~real).astype(dtype)
    rhs = rng.standard_normal((experts, k, n)).astype(np.float32).astype(dtype)
    bias = rng.standard_normal((experts, n)).astype(np.float32).astype(out) if has_bias else None
    l64, r64 = np.where(real[:, None], wide(lhs), 0), wide(rhs).swapaxes(1, 2)
    want, bound = oracle.products(l64, r64, offsets, counts, None if bias is None else wide(bias))
    form, sizes = (FAST, dtype, dtype, out, has_bias, ctas), (rows, n, k)
    got = call(kernel, form, False, sizes, lhs, rhs, offsets, counts, (None, None), bias, layout=RIGHT_ACROSS)
    end = offsets[-1]
    oracle.near(got[:end], want[:end], bound[:end], out, str((counts, n, k)))
    assert np.isnan(wide(got[end:])).all()  # the tail is as it was


@pytest.mark.parametrize("draw", range(2))
@pytest.mark.parametrize("case", WIDE, ids=str)
def test_wgrads_across(kernel, case, draw, rng):
    """Of rows as they lie. NaN, as any of it would show, lies where no token is, in stages that tokens end in, and in
    stages without any. With `draw` groups end at stages' ends, too."""
    dtype, out, has_c, ctas = case
    rng = np.random.default_rng(rng.integers(2**32) + draw)
    counts, offsets, rows, real = groups(rng)
    if draw:
        counts = counts // 64 * 64 + (np.arange(len(counts)) % 3 == 1)
        offsets = oracle.groups_of(counts)
        rows = int(offsets[-1]) + 128
        real = oracle.is_token(rows, offsets, counts)
    experts, k, n = len(counts), 8 * int(rng.integers(1, 50)), 8 * int(rng.integers(1, 70))
    both = [oracle.poisoned(rng.standard_normal((rows, size)), ~real).astype(dtype) for size in (k, n)]
    c = rng.standard_normal((experts, k, n)).astype(np.float32).astype(out) if has_c else None
    want, bound = oracle.wgrads(*(np.where(real, wide(a).T, 0) for a in both), offsets, counts)
    if has_c:
        want, bound = want + wide(c), bound + oracle.SPARE * oracle.U * np.abs(wide(c))
    form, sizes = (FAST, dtype, dtype, out, has_c, ctas), (k, n, rows)
    run = partial(call, kernel, form, True, sizes, *both, offsets, counts, (None, None), c, layout=BOTH_ACROSS)
    got = run()
    oracle.near(got, want, bound, out, str((counts, k, n)))
    if has_c:
        assert run(in_place=True, counted=False).tobytes() == got.tobytes()


def test_many_short_items(kernel, rng):
    """Of less than a stage: the thread that copies takes some before the first is multiplied."""
    counts = np.array([40, 0, 3], np.int32)
    offsets, rows, k, n = oracle.groups_of(counts), 384, 384, 520
    both = [rng.standard_normal((rows, size)).astype(bf16) for size in (k, n)]
    values = [np.where(oracle.is_token(rows, offsets, counts), wide(a).T, 0) for a in both]
    form, others = (FAST, bf16, bf16, bf16, False, 2), (offsets, counts, (None, None), None)
    got = call(kernel, form, True, (k, n, rows), *both, *others, layout=BOTH_ACROSS)
    oracle.near(got, *oracle.wgrads(*values, offsets, counts), bf16, str(counts))
