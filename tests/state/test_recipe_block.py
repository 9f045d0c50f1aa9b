"""Block scaling: quantize and GEMM against numpy, layers against float64. More is in test_recipe_layers.py (layers,
meshes that cut blocks) and test_op.py (meshes that split whole blocks)."""

import functools

import block_oracle as oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from layer_cases import data
from recipe_cases import near, results, uneven

from te_jax.core import extension
from te_jax.layers import Projection, dense, layernorm, layernorm_dense
from te_jax.ops.formats import ROWS_128, SQUARES_128
from te_jax.ops.gemm import gemm, gemm_block_op
from te_jax.ops.quantize import quantize_block
from te_jax.recipe import Float8BlockScaling, Float8CurrentScaling, Format

RECIPE = Float8BlockScaling()
E4M3, E5M2 = jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.float8_e5m2)
f32, bf16 = jnp.float32, jnp.bfloat16


# -- quantize ------------------------------------------------------------------------------------------------


SHAPES = {
    (1, 1): 1,
    (5, 300): 1,
    (256, 128): 1,
    (130, 257): 1,
    (2, 129, 3, 130): 2,
    (3, 2, 140): 1,
    (0, 8): 1,
    (8, 0): 1,
}


def quantize_both(x, split, dtype, square, **law):
    """data, data_t and for every element of x its inverse scale in both, all in x's order; dbias."""
    kind = "block_inv" if square else "scale_inv"
    outputs = "data", "data_t", kind, f"{kind}_t", "dbias"
    attrs = dict(lead=split - 1, dtype=dtype, square=square, **law)
    data, data_t, inv, inv_t, dbias = jax.jit(lambda x: quantize_block(x, outputs=outputs, **attrs))(x)
    turn = lambda a, axes: np.transpose(np.asarray(a, np.float32), (*range(axes, a.ndim), *range(axes)))
    repeat = lambda a, axis: np.repeat(a, 128, axis).take(np.arange(x.shape[axis]), axis)
    rows, columns = split - 1, x.ndim - 1
    if square:
        inv, inv_t = (repeat(repeat(a, rows), columns) for a in (inv, turn(inv_t, x.ndim - split)))
    else:
        inv, inv_t = repeat(turn(inv, x.ndim - split), columns), repeat(np.asarray(inv_t), rows)
    return np.asarray(data, np.float32), turn(data_t, x.ndim - split), inv, inv_t, dbias


@pytest.mark.parametrize("square", [False, True], ids=["1x128", "128x128"])
@pytest.mark.parametrize(
    "fp8,law", [(E4M3, dict(power_2=True, epsilon=0.0)), (E5M2, dict(power_2=False, epsilon=0.25))]
)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_quantize(shape, fp8, law, square, rng):
    """Bit for bit: each block by its own amax, in both layouts."""
    x, split = jnp.asarray(uneven(rng, *shape), bf16), SHAPES[shape]
    data, data_t, inv, inv_t, dbias = quantize_both(x, split, fp8, square, **law)
    for got, got_inv, (tall, wide) in ((data, inv, (1, 128)), (data_t, inv_t, (128, 1))):
        blocks = (split - 1, 128 if square else tall), (x.ndim - 1, 128 if square else wide)
        want, want_inv = oracle.quantized(x, *blocks, str(fp8), **law)
        np.testing.assert_array_equal(got, want)
        np.testing.assert_array_equal(got_inv, want_inv)
    oracle.check_row_sums(dbias, x, split)


def test_quantize_not_finite(rng):
    """A NaN or an inf leaves its blocks a scale of 1, and no others; an inf becomes the largest number."""
    x = uneven(rng, 260, 260)
    want = quantize_both(jnp.asarray(x), 1, E4M3, False, power_2=False, epsilon=0.0)
    for bad, becomes in ((np.nan, np.nan), (-np.inf, -448.0)):
        y = x.copy()
        y[200, 130] = bad
        got = quantize_both(jnp.asarray(y), 1, E4M3, False, power_2=False, epsilon=0.0)
        row, column = (200, slice(128, 256)), (slice(128, 256), 130)
        oracle.check_same_but_for(row, column, got, want)
        assert (got[2][row] == 1).all() and (got[3][column] == 1).all()
        np.testing.assert_array_equal(got[0][200, 130], becomes)
        np.testing.assert_array_equal(got[1][200, 130], becomes)


# -- GEMM ----------------------------------------------------------------------------------------------------

GEMMS = {  # m, n, k
    "small": ((1,), (1,), (1,)),
    "whole": ((4,), (256,), (256,)),
    "odd": ((3, 5), (2, 150), (200,)),
    "groups": ((2,), (7,), (3, 130)),
    "empty": ((2,), (3,), (0,)),
}


def formats_of(square):
    return ROWS_128, SQUARES_128 if square else ROWS_128


gemm_cases = pytest.mark.parametrize("sizes", GEMMS.values(), ids=GEMMS)
squares = pytest.mark.parametrize("square", [False, True], ids=["1x128", "128x128"])


@gemm_cases
@squares
@pytest.mark.parametrize("types,out", [((E4M3, E4M3), f32), ((E5M2, E4M3), bf16)], ids=["e4m3-f32", "e5m2-bf16"])
def test_gemm(sizes, square, types, out, rng):
    operands, want, size = oracle.gemm_case(sizes, square, types, out, rng)
    options = dict(formats=formats_of(square), contract=len(sizes[2]), out_dtype=out)
    got = jax.jit(lambda *a: gemm(*a, **options))(*operands)
    oracle.check_gemm(got, want, size, np.prod(sizes[2]), out)


@gemm_cases
@squares
@pytest.mark.parametrize("hopper", [True, False], ids=["own kernel", "none"])
def test_gemm_fills_up(sizes, square, hopper, rng, monkeypatch):
    """What surrounds the CUDA call: sizes as cuBLASLt wants them, or axes as they are for the kernel that takes cut
    blocks of 128 x 128, where it is built; and the same product."""
    operands, want, size = oracle.gemm_case(sizes, square, (E4M3, E4M3), bf16, rng)
    lhs, rhs, lhs_inv, rhs_inv, bias, c = operands
    monkeypatch.setattr(extension, "is_built_for", lambda arch: hopper)
    _, n_axes, k_axes = sizes
    is_cut = k_axes[-1] % 128 > 0 or n_axes[-1] % 128 > 0

    def call(lhs, rhs, lhs_inv, rows, squares, bias, c, **attrs):
        if square and hopper and is_cut:
            n, k = bias.shape, lhs.shape[-len(k_axes) :]
            assert (n[:-1], k[:-1]) == (n_axes[:-1] or (1,), k_axes[:-1]) and attrs["outer"] == len(k_axes) - 1
            assert all(-(-a[-1] // 16) * 16 == b[-1] for a, b in ((n_axes, n), (k_axes, k)))
            return gemm_block_op.reference(lhs, rhs, lhs_inv, rows, squares, bias, c, **attrs)
        (m, k), n = lhs.shape, rhs.shape[0]
        assert m % 4 == n % 16 == k % 128 == 0 and rhs.shape == (n, k) and c.shape == (m, n) and bias.shape == (n,)
        assert lhs_inv.shape == (k // 128, m) and (rows is None or rows.shape == (k // 128, n))
        assert squares is None or squares.shape == (-(-n // 128), -(-k // 512) * 4)
        squares = None if squares is None else squares[:, : k // 128]
        return gemm_block_op.reference(lhs, rhs, lhs_inv, rows, squares, bias, c, **attrs)

    scales = (None, rhs_inv) if square else (rhs_inv, None)
    attrs = dict(outer=len(sizes[2]) - 1, out_dtype=jnp.dtype(bf16), tune=False)
    (got,) = jax.jit(functools.partial(gemm_block_op.cuda, call, **attrs))(lhs, rhs, lhs_inv, *scales, bias, c)
    oracle.check_gemm(got, want, size, np.prod(sizes[2]), bf16)
    run = jax.jit(lambda *operands: gemm(*operands, formats=formats_of(square), contract=len(sizes[2]), tune=False))
    text = run.trace(*operands).lower(lowering_platforms=("cuda",)).as_text()
    calls = [line for line in text.splitlines() if "custom_call @te_gemm_block" in line]
    rows, blocks = -(-np.prod(sizes[1]) // 128), -(-np.prod(sizes[2]) // 512) * 4
    if 0 not in sizes[2] and square and not (hopper and is_cut) and len(sizes[1]) == len(sizes[2]) == 1:
        assert f"tensor<{rows}x{blocks}xf32>" in calls[0]
    assert len(calls) == (0 not in sizes[2])


def test_gemm_refuses(monkeypatch):
    x, one = jnp.ones((4, 200), E4M3), jnp.ones((2, 4))
    with pytest.raises(ValueError, match=r"te_gemm_block: axis `k` is 200: 2 blocks of 128, but rhs_scale_inv.* has 1"):
        gemm(x, x, one, one[:1], formats=formats_of(False))
    with pytest.raises(TypeError, match="lhs is bfloat16.*pass float8_e4m3fn, or float8_e5m2 for one of them"):
        gemm(x.astype(bf16), x, one, one, formats=formats_of(False))
    with pytest.raises(TypeError, match="te_gemm_block: c is float32, but out is bfloat16"):
        gemm(x, x, one, one, c=jnp.ones((4, 4)), formats=formats_of(False))
    with pytest.raises(ValueError, match="te_gemm_block: contract is 0"):
        gemm(x, x, one, one, formats=formats_of(False), contract=0)
    blackwell = type("Device", (), dict(compute_capability="10.0"))
    monkeypatch.setattr(extension, "has_cuda_device", lambda: True)
    monkeypatch.setattr(jax, "devices", lambda *args: [blackwell])
    operands = x, x, one, one, None, None, None
    with pytest.raises(
        RuntimeError,
        match=r"te_gemm_block: .*only on .*9\.0 \(Hopper\), this GPU has 10\.0: use recipe\.Fl",
    ):
        gemm_block_op.cuda(None, *operands, outer=0, out_dtype=jnp.dtype(bf16))


# -- layers --------------------------------------------------------------------------------------------------


def error_of(x, axis, top, mantissa, lowest):
    """How far FP8 may be off x: half a step of normal numbers, or of the subnormal ones at the scale of its block,
    whose amax becomes `top` or half of it."""
    amax = np.abs(x).max(axis, keepdims=True)
    return np.maximum(np.abs(x) * 2.0 ** -(mantissa + 1), 2 * amax / top * 2.0 ** (lowest - mantissa - 1))


def test_dense_is_near_f32(rng):
    """Within what the roundings of both operands of each product allow."""
    x, w, dy = (np.asarray(a) for a in data(rng, (256, 128), (128, 128), (256, 128)))
    y, vjp = jax.vjp(lambda x, w: dense(x, w, recipe=RECIPE), x, w)
    off = functools.partial(error_of, top=448.0, mantissa=3, lowest=-6)
    of_w = off(w, (0, 1))
    halves = lambda a: np.concatenate([off(half, 0) for half in np.split(a, 2)])  # blocks of 128 rows
    products = [(x, off(x, 1), w, of_w), (dy, off(dy, 1), w.T, of_w.T), (x.T, halves(x).T, dy, halves(dy))]
    for got, (a, ea, b, eb) in zip((y, *vjp(dy)), products, strict=True):
        bound = ea @ np.abs(b) + np.abs(a) @ eb + ea @ eb + np.abs(a) @ np.abs(b) * 2.0**-16
        assert (np.abs(got - a @ b) <= bound).all()


def test_layernorm_dense_is_its_parts(rng):
    """Two projections and the residual; under block scaling the norm's output is quantized from x's type."""
    x, gamma, w, w2, bias = data(rng, (3, 50, 140), (140,), (140, 20), (140, 2, 6), (20,), dtype=bf16)
    beta = gamma * 0.5
    flat = lambda y, y2, ln_out: jnp.concatenate([y, y2.reshape(3, 50, -1), ln_out], -1)

    def whole(x, gamma, w, w2, bias):
        also = [Projection(w2, None, None)]
        options = dict(return_layernorm_output=True, also=also, recipe=RECIPE)
        (y, y2), ln_out = layernorm_dense(x, w, gamma, beta, bias, **options)
        return flat(y, y2, ln_out)

    def parts(x, gamma, w, w2, bias):
        normed = layernorm(x, gamma, beta)
        return flat(dense(normed, w, bias, recipe=RECIPE), dense(normed, w2, recipe=RECIPE), normed)

    run = lambda layer: results(layer, x, gamma, w, w2, bias)
    jax.tree.map(near, run(whole), run(parts))


def test_an_outlier_costs_its_block_alone(rng):
    """One number 2**20 times the others: with one scale for the tensor they all vanish below E4M3's least number."""
    x, w = data(rng, (8, 256), (256, 20))
    x = x.at[0, 7].set(2.0**20)
    exact, rest = np.asarray(x @ w), slice(1, None)
    error = lambda recipe: np.linalg.norm(dense(x, w, recipe=recipe)[rest] - exact[rest]) / np.linalg.norm(exact[rest])
    assert error(Float8CurrentScaling(Format.E4M3)) > 0.9
    assert error(RECIPE) < 2.0**-4  # half a step of E4M3


def test_layers_need_an_axis_of_rows():
    x, w = jnp.ones((16,)), jnp.ones((16, 8))
    with pytest.raises(ValueError, match=r"dense: x has only axes that are contracted.*; pass x\[None\]"):
        dense(x, w, recipe=RECIPE)
    with pytest.raises(ValueError, match=r"dense: kernel has only .*contracted.*; pass kernel\[..., None\]"):
        dense(jnp.ones((4, 16)), x, recipe=RECIPE)
