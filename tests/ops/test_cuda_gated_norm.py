"""On the GPU: the kernels of the gated RMSNorm against float64, all results that layers ask for, and rows of ends."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gated_norm_oracle import EPS, ROUNDINGS, UNIT, drawn, gradients_in_f64, in_f64

from te_jax.ops.norm import gated_norm_block_fwd, gated_norm_bwd, gated_norm_fwd
from te_jax.ops.quantize import quantize_block

pytestmark = pytest.mark.gpu
bf16, f16, f32 = jnp.bfloat16, jnp.float16, jnp.float32
E4M3, E5M2 = jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.float8_e5m2)
TYPES = (bf16, f32, f16)
ALL = ("y", "data", "data_t", "rstd", "amax", "scale_inv")
# What layers ask for, and each path of the kernels: rows or tiles, one amax and nothing else.
CHOSEN = [
    ("y", "rstd"),
    ("data", "data_t", "rstd", "amax"),
    ("data", "rstd", "amax"),
    ("data_t",),
    ("y", "data"),
    ("amax",),
    ("rstd", "amax"),
    ("y", "data_t", "amax", "scale_inv"),
]
GROUPS, CHANNELS, ROWS = (1, 3, 8), (8, 24, 128, 200, 1024), (0, 1, 5, 130, 300)
SIZES = [(rows, g, c) for rows in ROWS for g in GROUPS for c in CHANNELS]
# No multiples of 8; groups of which a tile has many, or no channels; more channels than fit in registers.
ODD = [(5, 2, 1), (130, 3, 65), (7, 70, 3), (3, 2, 0), (2, 2, 16384), (2, 1, 16392), (1, 3, 16385)]
LARGE = [(8192, 8, 1024), (8192, 1, 8192), (4099, 1, 16384)]


def rounding(dtype):
    """Half of the last bit of a type of 16 bits, relative to a number; f32 is in ROUNDINGS."""
    return float(jnp.finfo(dtype).eps) / 2 * (dtype != f32)


def error_of_gate(z):
    """In units of 2**-24 of a gate: t = z log2(e), to one and a half roundings of z, is the exponent of the sigmoid's
    exponential, which is good to 2 ulp, as the reciprocal is."""
    return 1.5 * float(np.max(np.abs(np.asarray(z, np.float64)), initial=0)) + 8


def between(got, want, error, rounded):
    """Each of `got` is what the function `rounded`, which keeps order, makes of a number within error of `want`."""
    low, high = rounded(want - np.abs(want) * error), rounded(want + np.abs(want) * error)
    got = np.asarray(got, np.float64)
    assert ((got >= low) & (got <= high)).all()


def to_fp8(dtype):
    top = float(jnp.finfo(dtype).max)
    return lambda a: np.asarray(np.clip(a, -top, top).astype(np.float32).astype(dtype), np.float64)


def check(names, results, operands, scale, dtype, before, rstd=None):
    x, z, gamma = operands
    got = dict(zip(names, results, strict=True))
    want, of_rows = in_f64(x, z, gamma, before)
    if rstd is not None:
        want = want / np.maximum(of_rows, 1e-300)[..., None] * np.asarray(rstd, np.float64)[..., None]
    # The sum of c squares, in any order, is off by c of it, and its root by half as much.
    sums = 0 if rstd is not None else x.shape[-1] / 2
    error = (ROUNDINGS + 2 * error_of_gate(z) + sums) * UNIT
    if "y" in got:
        assert got["y"].dtype == x.dtype
        between(got["y"], want, error, lambda a: np.asarray(a.astype(np.float32).astype(x.dtype), np.float64))
    if "rstd" in got:
        np.testing.assert_allclose(got["rstd"], of_rows if x.shape[-1] else np.full_like(of_rows, np.nan), rtol=error)
    if "amax" in got:
        np.testing.assert_allclose(got["amax"], np.max(np.abs(want), initial=0), rtol=error)
    if "scale_inv" in got:
        assert got["scale_inv"] == 1 / np.float32(scale)
    if "data" in got:
        between(got["data"], want * float(scale), error, to_fp8(dtype))
    if "data_t" in got:
        turned = np.moveaxis(np.asarray(got["data_t"], np.float64), (0, 1), (-2, -1))
        between(turned, want * float(scale), error, to_fp8(dtype))
        if "data" in got:
            np.testing.assert_array_equal(turned, np.asarray(got["data"], np.float64))


def forward(operands, scale, names, dtype, before, rstd=None):
    attrs = dict(eps=EPS, norm_before_gate=before, dtype=dtype)
    fp8 = {"data", "data_t", "scale_inv"} & {*names}
    run = lambda x, z, gamma, rstd, scale: gated_norm_fwd(x, z, gamma, rstd, scale, outputs=names, **attrs)
    return jax.jit(run)(*operands, rstd, scale if fp8 else None)


@pytest.mark.parametrize("rows, g, c", SIZES + ODD + LARGE, ids=str)
def test_all_results(rng, rows, g, c):
    """Types, orders and FP8 types in turn."""
    turn = rows + g + c // 8
    of_x, before, dtype = TYPES[turn % 3], bool(turn % 2), (E4M3, E5M2)[turn // 2 % 2]
    *operands, _ = drawn(rng, (rows,), g, c, of_x, TYPES[turn // 3 % 3])
    scale = jnp.float32(37.0)
    check(ALL, forward(operands, scale, ALL, dtype, before), operands, scale, dtype, before)


@pytest.mark.parametrize("names", CHOSEN, ids="-".join)
@pytest.mark.parametrize("before", [False, True], ids=["gate_first", "norm_first"])
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=lambda d: d.name)
@pytest.mark.parametrize("of_x", TYPES, ids=lambda d: d.__name__)
def test_chosen_results(rng, names, before, dtype, of_x):
    """With rstd computed and known, in groups of one tile, of parts of tiles, and of an odd number of columns."""
    for rows, g, c, known in [
        ((2, 37), 3, 200, False),
        ((37,), 2, 256, True),
        ((5,), 3, 67, False),
        ((5,), 3, 67, True),
    ]:
        *operands, _ = drawn(rng, rows, g, c, of_x)
        scale, rstd, asked = jnp.float32(11.0), None, names
        if known:  # some other numbers, so that it shows who reads them
            rstd = jnp.asarray(in_f64(*operands, before)[1] * 1.5, f32)
            asked = tuple(name for name in names if name != "rstd")
        check(asked, forward(operands, scale, asked, dtype, before, rstd), operands, scale, dtype, before, rstd)


def ends(rng, of_x):
    """x and z [12, 2, 136], of which both groups of a row are alike in kind; gamma; which are numbers in f64."""
    x, z, gamma, dy = drawn(rng, (12,), 2, 136, of_x)
    huge = 1e4 if of_x == f16 else 1e25
    x = x.at[0].set(0).at[1].multiply(huge).at[2].multiply(1 / huge)
    z = z.at[3].set(0).at[4].set(1e4).at[5].set(-1e4)
    x, z = x.at[6].multiply(1 / huge), z.at[6].set(huge)  # x silu(z) is a number of moderate size
    x = x.at[7, 0, 3].set(jnp.inf).at[8, 1, 130].set(jnp.nan)
    z = z.at[9, 0, 3].set(-jnp.inf).at[10, 1, 130].set(jnp.nan).at[11, 0, 0].set(jnp.inf)
    return x, z, gamma, dy


@pytest.mark.parametrize("names", [("y", "rstd", "amax"), ("y", "data", "data_t", "rstd", "amax")], ids="-".join)
@pytest.mark.parametrize("before", [False, True], ids=["gate_first", "norm_first"])
@pytest.mark.parametrize("of_x", TYPES, ids=lambda d: d.__name__)
def test_rows_of_ends(rng, names, before, of_x):
    """Zeros, squares that have no f32, gates of 0 and huge ones; inf and NaN spoil their own group of their own row."""
    *operands, _ = ends(rng, of_x)
    with np.errstate(invalid="ignore"):
        want, rstd = in_f64(*operands, before)
    results = dict(zip(names, forward(operands, jnp.float32(3.0), names, E4M3, before)))
    error = (ROUNDINGS + 2 * error_of_gate(operands[1][:3]) + 136 / 2) * UNIT + rounding(of_x)
    y, kind = np.asarray(results["y"], np.float64), lambda a: (np.isnan(a), np.isposinf(a), np.isneginf(a))
    # Beyond the type's largest number y is inf.
    with np.errstate(over="ignore", invalid="ignore"):
        narrow = np.asarray(want.astype(np.float32).astype(of_x), np.float64)
    for mine, theirs in zip(kind(y), kind(narrow)):
        np.testing.assert_array_equal(mine, theirs)
    finite = np.isfinite(narrow)
    np.testing.assert_allclose(y[finite], want[finite], rtol=error, atol=float(jnp.finfo(of_x).smallest_normal))
    assert np.isnan(results["amax"])
    whole = np.isfinite(rstd)
    np.testing.assert_allclose(np.asarray(results["rstd"])[whole], rstd[whole], rtol=error)
    if "data" in results:
        q, turned = (np.asarray(results[name], np.float64) for name in ("data", "data_t"))
        np.testing.assert_array_equal(q, np.moveaxis(turned, (0, 1), (-2, -1)))
        np.testing.assert_array_equal(np.isnan(q), np.isnan(want))


BLOCK_SIZES = [((2, 130), 3, 200), ((300,), 8, 128), ((3, 0), 2, 8), ((5,), 3, 67), ((257,), 1, 1024), ((2, 3), 2, 0)]


@pytest.mark.parametrize("rows, g, c", BLOCK_SIZES, ids=str)
@pytest.mark.parametrize("before", [False, True], ids=["gate_first", "norm_first"])
@pytest.mark.parametrize("of_x", TYPES, ids=lambda d: d.__name__)
def test_blocks(rng, rows, g, c, before, of_x):
    """Bit for bit what te_gated_norm_fwd, by its kernel with data_t, and the quantizing kernel make in turn; so are the
    results of each layout."""
    *operands, _ = drawn(rng, rows, g, c, of_x, f16)
    if len(rows) == 1:
        operands[0] = operands[0].at[:3].set(0).at[3:4, :, :1].set(jnp.inf).at[4:5, :, -1:].set(jnp.nan)
    dtype, law = (E4M3, E5M2)[before], dict(power_2=before, epsilon=0.0 if before else 0.5)
    attrs = dict(eps=EPS, norm_before_gate=before, dtype=dtype)
    both = ("data", "data_t", "scale_inv", "scale_inv_t")

    def in_turn(*operands):
        y, _, rstd = gated_norm_fwd(*operands, None, jnp.ones(()), outputs=("y", "data_t", "rstd"), **attrs)
        return *quantize_block(y, outputs=both, lead=len(rows) - 1, dtype=dtype, square=False, **law), rstd

    run = lambda names: jax.jit(lambda *a: gated_norm_block_fwd(*a, outputs=names, **attrs, **law))(*operands)
    want = dict(zip((*both, "rstd"), jax.jit(in_turn)(*operands)))
    for names in ((*both, "rstd"), ("data", "scale_inv", "rstd"), ("data_t", "scale_inv_t", "rstd")):
        for name, got in zip(names, run(names), strict=True):
            np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(want[name], np.float32), name)


def backward(dy, x, z, rstd, gamma, before):
    return jax.jit(lambda *a: gated_norm_bwd(*a, norm_before_gate=before))(dy, x, z, rstd, gamma)


def check_gradients(got, operands, dy, before):
    """But for those that are beyond the type's largest number, or near it."""
    x, z, gamma = operands
    # Each has the roundings of xhat twice and of a mean of c products; dgamma is a sum over all rows.
    count = 3 * (ROUNDINGS + x.shape[-1] + 2 * error_of_gate(z)) + np.prod(x.shape[:-2])
    wants, sizes = gradients_in_f64(x, z, gamma, dy, before)
    for i, (mine, want, size) in enumerate(zip(got, wants, sizes, strict=True)):
        assert mine.dtype == (x, z, gamma)[i].dtype and mine.shape == want.shape
        bound = count * UNIT * size + rounding(mine.dtype) * (np.abs(want) + count * UNIT * size)
        off = np.abs(np.asarray(mine, np.float64) - want) - bound
        info = jnp.finfo(mine.dtype)
        assert (off[np.abs(want) < float(info.max) / 2] <= float(info.smallest_normal)).all()


@pytest.mark.parametrize("rows, g, c", [*SIZES, *ODD, (40, 200, 16), *LARGE], ids=str)
def test_backward(rng, rows, g, c):
    """Types and orders in turn."""
    turn = rows + g + c // 8
    of_x, before = TYPES[turn % 3], bool(turn // 2 % 2)
    *operands, dy = drawn(rng, (rows,), g, c, of_x, TYPES[turn // 3 % 3])
    rstd = jnp.asarray(in_f64(*operands, before)[1], f32)
    check_gradients(backward(dy, *operands[:2], rstd, operands[2], before), operands, dy, before)


@pytest.mark.parametrize("before", [False, True], ids=["gate_first", "norm_first"])
@pytest.mark.parametrize("of_x", TYPES, ids=lambda d: d.__name__)
@pytest.mark.parametrize("c", [136, 131])
def test_gradients_of_ends(rng, before, of_x, c):
    x, z, gamma, dy = (a[..., :c] for a in ends(rng, of_x))
    with np.errstate(invalid="ignore"):
        rstd = in_f64(x, z, gamma, before)[1]
        got = backward(dy, x, z, jnp.asarray(rstd, f32), gamma, before)
        wants = gradients_in_f64(x, z, gamma, dy, before)[0]
    for mine, want in zip(got[:2], wants):  # a group of a row that has no inf and no NaN has gradients
        small = np.abs(want) < float(jnp.finfo(of_x).max) / 2
        small[[7, 8, 9, 10, 11], [0, 1, 0, 1, 0]] = False
        assert small.sum() > 14 * c and np.isfinite(np.asarray(mine, np.float32)[small]).all()
    keep = lambda a: a[:4]
    some = backward(*(keep(a) for a in (dy, x, z, jnp.asarray(rstd, f32))), gamma, before)
    for mine, of_all in zip(some[:2], got[:2]):  # rows do not know of each other
        np.testing.assert_array_equal(np.asarray(mine, np.float32), np.asarray(keep(of_all), np.float32))
    with np.errstate(invalid="ignore"):  # inf less inf
        check_gradients(some, (keep(x), keep(z), gamma), keep(dy), before)


def test_same_bits_in_every_run(rng):
    *operands, dy = drawn(rng, (300,), 3, 200, bf16)
    rstd = jnp.asarray(in_f64(*operands, False)[1], f32)
    first, second = (backward(dy, *operands[:2], rstd, operands[2], False) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, first, second)
