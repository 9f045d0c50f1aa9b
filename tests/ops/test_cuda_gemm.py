"""On the GPU: products of FP8 and of wider types against float64, at odd and large sizes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cuda_cases import rel

from te_jax.ops.gemm import gemm, gemm_op, gemm_sum

pytestmark = pytest.mark.gpu
E4M3, E5M2 = jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.float8_e5m2)
f32, bf16, f16 = jnp.float32, jnp.bfloat16, jnp.float16


def fp8_operand(rng, shape, dtype):
    return jnp.asarray(rng.standard_normal(shape), f32).astype(dtype)


OWN = 999, 4080, 400  # tiles of 128 x 256 fill the GPU: te_jax's own kernel, k of 256, 128, 16
MNK = [
    (16, 16, 16),
    (1, 16, 32),
    (199, 1001, 333),
    (512, 256, 1024),
    (8192, 4096, 4096),
    OWN,
    (1000, 50257, 128),
    (17, 48, 16),
]


@pytest.mark.parametrize("mnk", MNK, ids=str)
@pytest.mark.parametrize("types", [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)], ids=str)
@pytest.mark.parametrize("out", [f32, bf16, f16], ids=lambda d: d.__name__)
@pytest.mark.parametrize("fast", [False, True], ids=["split", "fast"])
def test_gemm_fp8(mnk, types, out, fast, rng):
    m, n, k = mnk
    lhs, rhs = fp8_operand(rng, (m, k), types[0]), fp8_operand(rng, (n, k), types[1])
    scales = jnp.float32(0.25 / k**0.5), jnp.float32(1.7)
    bias = jnp.asarray(rng.standard_normal(n), f32)
    got = jax.jit(lambda *a: gemm(*a, out_dtype=out, fast_accum=fast))(lhs, rhs, *scales, bias)
    want = np.asarray(lhs, np.float32) @ np.asarray(rhs, np.float32).T * np.float32(scales[0] * scales[1])
    want = want + np.asarray(bias.astype(out), np.float32)
    # bf16 rounds by 2**-9 at most, 1.1e-3 in the root mean square; Hopper adds FP8 products with 14 bits at least.
    assert rel(got, want) < 2e-3


@pytest.mark.parametrize("dtype,bound", [(f32, 1e-5), (bf16, 2e-3), (f16, 5e-4)], ids=["f32", "bf16", "f16"])
@pytest.mark.parametrize("mnk", [(199, 1001, 333), (512, 256, 1024)], ids=str)
def test_gemm_wide(dtype, bound, mnk, rng):
    m, n, k = mnk
    lhs, rhs = (jnp.asarray(rng.standard_normal(s), f32).astype(dtype) for s in ((m, k), (n, k)))
    bias = jnp.asarray(rng.standard_normal(n), dtype)
    got = jax.jit(lambda *a: gemm(a[0], a[1], bias=a[2]))(lhs, rhs, bias)
    want = np.asarray(lhs, np.float64) @ np.asarray(rhs, np.float64).T + np.asarray(bias, np.float64)
    assert rel(got, want) < bound


@pytest.mark.parametrize("mnk", [(199, 1001, 333), OWN, (512, 256, 1024), (17, 48, 16)], ids=str)
@pytest.mark.parametrize("operands", [E4M3, bf16, f32], ids=["e4m3", "bf16", "f32"])
@pytest.mark.parametrize("out", [f32, bf16, f16], ids=lambda d: d.__name__)
@pytest.mark.parametrize("with_bias", [False, True], ids=["", "bias"])
def test_gemm_adds_c_before_it_rounds(mnk, operands, out, with_bias, rng):
    m, n, k = mnk
    # Whole numbers up to 8, whose sums Hopper's FP8 products have exactly: below 2**13 their 14 bits cut nothing off.
    whole = lambda shape: jnp.asarray(rng.integers(-8, 9, shape), f32).astype(operands)
    draw = whole if operands == E4M3 else lambda shape: fp8_operand(rng, shape, operands)
    lhs, rhs = draw((m, k)), draw((n, k))
    scales = (jnp.float32(0.25), jnp.float32(1.7)) if operands == E4M3 else (None, None)
    bias = jnp.asarray(rng.standard_normal(n), f32).astype(out) if with_bias else None
    exact = np.asarray(lhs, np.float64) @ np.asarray(rhs, np.float64).T
    exact = exact * (float(scales[0]) * float(scales[1]) if operands == E4M3 else 1.0)
    # c cancels the product: what is left is what a product rounded before the sum would lose.
    c = jnp.asarray(-exact + rng.standard_normal((m, n)), f32).astype(out)
    got = jax.jit(lambda *a: gemm(*a, out_dtype=out))(lhs, rhs, *scales, bias, c)
    want = exact + np.asarray(c, np.float64) + (np.asarray(bias, np.float64) if with_bias else 0)
    # Of the largest terms f32 keeps 2**-24 per addition; then out rounds.
    size = np.abs(np.asarray(lhs, np.float64)) @ np.abs(np.asarray(rhs, np.float64)).T
    size = size * (float(scales[0]) * float(scales[1]) if operands == E4M3 else 1.0)
    step = float(jnp.finfo(out).eps) / 2
    error = np.abs(np.asarray(got, np.float64) - want)
    assert got.dtype == out
    assert (error <= size * 2.0**-20 + 1.01 * step * np.abs(want) + 1e-6).all()


@pytest.mark.parametrize("operands", [E4M3, bf16, f32], ids=["e4m3", "bf16", "f32"])
@pytest.mark.parametrize("out", [f32, bf16], ids=lambda d: d.__name__)
def test_gemm_sum(operands, out, rng):
    """Three products of different k and a c, as the gradient of what queries, keys and values are made of."""
    m, n = 199, 256
    terms = [[fp8_operand(rng, (size, *k), operands) for size in (m, n)] for k in [(64,), (2, 48), (33,)]]
    scales = (jnp.float32(0.25), jnp.float32(1.7)) if operands == E4M3 else (None, None)
    factor = float(scales[0] * scales[1]) if operands == E4M3 else 1.0
    flat = [[np.asarray(a, np.float64).reshape(a.shape[0], -1) for a in term] for term in terms]
    c = jnp.asarray(rng.standard_normal((m, n)), f32).astype(out)
    run = lambda terms, c: gemm_sum([(*term, *scales) for term in terms], c, lead=1, out_dtype=out)
    got = jax.jit(run)(terms, c)
    want = sum((lhs @ rhs.T * factor for lhs, rhs in flat), np.asarray(c, np.float64))
    # A rounding after each of three products: of bf16 2**-9, of f32 next to nothing: FP8's products have 14 bits.
    size = sum((abs(lhs) @ abs(rhs).T * factor for lhs, rhs in flat), abs(np.asarray(c, np.float64)))
    step = float(jnp.finfo(out).eps) / 2
    error = np.abs(np.asarray(got, np.float64) - want)
    assert got.dtype == out
    assert (error <= size * (2.0 ** (-13 if operands == E4M3 else -20) + 4 * step) + 1e-6).all()


def test_gemm_c_of_an_empty_sum(rng):
    c = jnp.asarray(rng.standard_normal((3, 5)), bf16)
    np.testing.assert_array_equal(gemm(jnp.zeros((3, 0), bf16), jnp.zeros((5, 0), bf16), c=c), c)


def test_gemm_many_axes(rng):
    lhs, rhs = fp8_operand(rng, (3, 8, 5, 16), E4M3), fp8_operand(rng, (2, 24, 5, 16), E4M3)
    one = jnp.float32(1.0)
    attrs = dict(contract=2, out_dtype=jnp.dtype(f32), fast_accum=False, tune=True)
    got = jax.jit(lambda *a: gemm_op(*a, None, None, **attrs))(lhs, rhs, one, one)[0]
    assert rel(got, gemm_op.reference(lhs, rhs, one, one, None, None, **attrs)[0]) < 1e-3
