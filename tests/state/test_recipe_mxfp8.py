"""MXFP8: its law, quantize and GEMM against numpy, what the CUDA lowering asks of XLA. More is in
test_recipe_layers.py (layers, meshes) and test_op.py (ops)."""

import block_oracle as oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from recipe_cases import uneven

from te_jax.core import extension
from te_jax.layers import dense
from te_jax.ops.formats import ROWS_32
from te_jax.ops.gemm import gemm, gemm_mx_op
from te_jax.ops.quantize import quantize_mx
from te_jax.recipe import MXFP8BlockScaling
from te_jax.recipe.mxfp8 import scale_inv_of_amax

RECIPE = MXFP8BlockScaling()
E4M3, E5M2 = jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.float8_e5m2)
f32, bf16 = jnp.float32, jnp.bfloat16


# -- the law -------------------------------------------------------------------------------------------------


def code(scale_inv):
    """The byte of a power of 2 in E8M0: its exponent, from -127 on; 0xff is NaN."""
    return 0xFF if np.isnan(scale_inv) else int(np.log2(scale_inv)) + 127


@pytest.mark.parametrize("top", [448.0, 57344.0])
def test_law(top, rng):
    """Of every power of 2 and of `top` times one, with the floats next to them, and of any bits."""
    edges = [np.exp2(np.arange(-149, 128.0)), np.clip(top * np.exp2(np.arange(-149, 120.0)), 0, 3.4e38)]
    edges = np.concatenate(edges).astype(np.float32)
    beside = [np.nextafter(edges, np.float32(side)) for side in (0, np.inf)]
    any_bits = rng.integers(0, 0x7F800000, 2000, np.uint32).view(np.float32)
    amaxes = np.concatenate([edges, *beside, any_bits, np.float32([0, np.inf, np.nan])])
    got = np.asarray(jax.jit(scale_inv_of_amax, static_argnums=1)(amaxes, top)).view(np.uint8)
    np.testing.assert_array_equal(got, [code(oracle.mx_scale_inv(amax, top)) for amax in amaxes])
    assert got[-1] == 0xFF and (got[:-1] < 0xFF).all() and (got > 0).all()
    finite = amaxes[:-2].astype(np.float64) / np.exp2(got[:-2] - 127.0)
    assert (finite <= top).all() and (finite[got[:-2] > 1] > top / 2).all()  # nothing saturates, no power is wasted


# -- quantize ------------------------------------------------------------------------------------------------

SHAPES = {(1, 1): 1, (5, 70): 1, (64, 32): 1, (2, 33, 3, 34): 2, (0, 8): 1, (8, 0): 1}


def quantize_both(x, split, dtype):
    """data, data_t and for every element of x its scale_inv in both, all in x's order; dbias."""
    run = jax.jit(lambda x: quantize_mx(x, lead=split - 1, dtype=dtype))
    got = run(x)
    assert [a.dtype for a in got] == [dtype, dtype, jnp.float8_e8m0fnu, jnp.float8_e8m0fnu, f32]
    data, data_t, inv, inv_t, dbias = (np.asarray(a.astype(f32)) for a in got)
    turn = lambda a: np.transpose(a, (*range(x.ndim - split, a.ndim), *range(x.ndim - split)))
    repeat = lambda a, axis: np.repeat(a, 32, axis).take(np.arange(x.shape[axis]), axis)
    return data, turn(data_t), repeat(turn(inv), x.ndim - 1), repeat(inv_t, split - 1), dbias


@pytest.mark.parametrize("shape,fp8", [*((shape, E4M3) for shape in SHAPES), ((2, 33, 3, 34), E5M2)], ids=str)
def test_quantize(shape, fp8, rng):
    """Bit for bit: each block by its own amax, in both layouts."""
    x, split = jnp.asarray(uneven(rng, *shape), bf16), SHAPES[shape]
    data, data_t, inv, inv_t, dbias = quantize_both(x, split, fp8)
    for got, got_inv, (tall, wide) in ((data, inv, (1, 32)), (data_t, inv_t, (32, 1))):
        want, scale = oracle.quantized(x, (split - 1, tall), (x.ndim - 1, wide), str(fp8), mx=True)
        np.testing.assert_array_equal(got, want)
        np.testing.assert_array_equal(got_inv, scale)
    oracle.check_row_sums(dbias, x, split)


@pytest.mark.parametrize("fp8", [E4M3, E5M2], ids=str)
def test_quantize_not_finite(fp8, rng):
    """A NaN makes its blocks NaN, an inf is inf again by its scale, with a block of zeros; no other block changes."""
    x = uneven(rng, 70, 70)
    want = quantize_both(jnp.asarray(x), 1, fp8)
    for bad in (np.nan, -np.inf):
        y = x.copy()
        y[40, 35] = bad
        got = quantize_both(jnp.asarray(y), 1, fp8)
        row, column = (40, slice(32, 64)), (slice(32, 64), 35)
        oracle.check_same_but_for(row, column, got, want)
        for q, inv, block in ((got[0], got[2], row), (got[1], got[3], column)):
            with np.errstate(over="ignore"):
                again = q[block] * inv[block]
            if np.isnan(bad):
                assert np.isnan(inv[block]).all() and np.isnan(q[block]).all()
            else:
                assert again.min() == -np.inf and np.count_nonzero(again) == 1


# -- GEMM ----------------------------------------------------------------------------------------------------

GEMMS = {  # m, n, k
    "small": ((1,), (1,), (1,)),
    "whole": ((16,), (48,), (64,)),
    "odd": ((3, 5), (2, 50), (70,)),
    "groups": ((2,), (7,), (3, 34)),
    "empty": ((2,), (3,), (0,)),
    "no rows": ((0,), (3,), (5,)),
}
MX = (ROWS_32, ROWS_32)
gemm_cases = pytest.mark.parametrize("sizes", GEMMS.values(), ids=GEMMS)


@gemm_cases
def test_gemm(sizes, rng):
    types, out = ((E4M3, E4M3), f32) if len(sizes[2]) > 1 else ((E5M2, E4M3), bf16)
    operands, want, size = oracle.gemm_case(sizes, False, types, out, rng, block=32)
    got = jax.jit(lambda *a: gemm(*a, formats=MX, contract=len(sizes[2]), out_dtype=out))(*operands)
    oracle.check_gemm(got, want, size, np.prod(sizes[2]), out)


def as_documented(lhs, rhs, lhs_scales, rhs_scales, preferred_element_type):
    """`jax.nn.scaled_matmul` of 3-d operands, with what cuDNN wants for MXFP8."""
    assert lhs_scales.dtype == rhs_scales.dtype == jnp.float8_e8m0fnu and lhs.dtype.itemsize == rhs.dtype.itemsize == 1
    assert lhs.shape[-1] == rhs.shape[-1] == 32 * lhs_scales.shape[-1] == 32 * rhs_scales.shape[-1]
    assert lhs.shape[:2] == lhs_scales.shape[:2] and rhs.shape[:2] == rhs_scales.shape[:2]
    assert len(lhs) == len(rhs) == 1 and lhs.shape[1] % 16 == rhs.shape[1] % 16 == 0
    wide = lambda a, scales: a.astype(f32) * jnp.repeat(scales.astype(f32), 32, -1)
    left, right = wide(lhs, lhs_scales), wide(rhs, rhs_scales)
    return jnp.einsum("bmk,bnk->bmn", left, right, precision="highest").astype(preferred_element_type)


@gemm_cases
def test_gemm_on_cuda(sizes, rng, monkeypatch):
    """What surrounds XLA's product: its sizes, and the same result. And that it is XLA's that is lowered to."""
    operands, want, size = oracle.gemm_case(sizes, False, (E4M3, E4M3), bf16, rng, block=32)
    if len(sizes[2]) > 1 or sizes[2] == (64,):  # nothing is added
        *operands, bias, c = operands
        want = want - np.asarray(bias, np.float64) - np.asarray(c, np.float64)
        operands += [None, None]
    monkeypatch.setattr(extension, "has_cuda_device", lambda: False)  # a GPU here may be too old
    run = jax.jit(lambda *operands: gemm(*operands, formats=MX, contract=len(sizes[2])))
    text = run.trace(*operands).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @__op$block_scaled_dot") == (0 not in sum(sizes, ()))
    monkeypatch.setattr(jax.nn, "scaled_matmul", as_documented)
    attrs = dict(outer=len(sizes[2]) - 1, out_dtype=jnp.dtype(bf16))
    (got,) = jax.jit(lambda *operands: gemm_mx_op.cuda(None, *operands, **attrs))(*operands)
    oracle.check_gemm(got, want, size, np.prod(sizes[2]), bf16)


def test_gemm_refuses(monkeypatch):
    x, scales = jnp.ones((4, 40), E4M3), jnp.ones((2, 4), jnp.float8_e8m0fnu)
    with pytest.raises(ValueError, match=r"te_gemm_mx: axis `k` is 40: 2 blocks of 32, but rhs_scale_inv.* has 1"):
        gemm(x, x, scales, scales[:1], formats=MX)
    with pytest.raises(TypeError, match="te_gemm_mx: rhs_scale_inv is float32; pass float8_e8m0fnu"):
        gemm(x, x, scales, jnp.ones((2, 4)), formats=MX)
    with pytest.raises(TypeError, match="te_gemm_mx: lhs is float8_e5m2, rhs is float8_e5m2; pass float8_e4m3fn"):
        gemm(x.astype(E5M2), x.astype(E5M2), scales, scales, formats=MX)
    with pytest.raises(TypeError, match="te_gemm_mx: c is float32, but out is bfloat16"):
        gemm(x, x, scales, scales, c=jnp.ones((4, 4)), formats=MX)
    with pytest.raises(ValueError, match="te_gemm_mx: contract is 0"):
        gemm(x, x, scales, scales, contract=0, formats=MX)


@pytest.mark.parametrize("capability", ["8.9", "9.0", "10.0", "12.0"])
def test_gpus_before_blackwell_are_refused(capability, monkeypatch):
    """While a layer is lowered, with the way out."""
    device = type("Device", (), dict(compute_capability=capability))
    devices = jax.devices
    monkeypatch.setattr(extension, "has_cuda_device", lambda: True)
    monkeypatch.setattr(extension, "require_for_lowering", lambda: None)
    monkeypatch.setattr(jax, "devices", lambda *args: [device] if args == ("cuda",) else devices(*args))
    x, w = jnp.ones((4, 40)), jnp.ones((40, 8))
    lower = lambda: jax.jit(lambda *a: dense(*a, recipe=RECIPE)).trace(x, w).lower(lowering_platforms=("cuda",))
    if capability in ("10.0", "12.0"):
        assert "block_scaled_dot" in lower().as_text()
        return
    text = rf"te_gemm_mx: MXFP8 needs .* 10\.0 \(Blackwell\).*this GPU has {capability}: use recipe\.Float8BlockScaling"
    with pytest.raises(RuntimeError, match=text + r".*Float8CurrentScaling or recipe\.DelayedScaling"):
        lower()


def test_each_shard_lowers_to_xlas_product(monkeypatch):
    """2 devices share the contracted axis, 4 the rows."""
    monkeypatch.setattr(extension, "has_cuda_device", lambda: False)
    mesh = jax.make_mesh((4, 2), ("dp", "tp"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        x, w = jnp.ones((128, 128), out_sharding=P("dp", "tp")), jnp.ones((128, 48), out_sharding=P("tp"))
        run = jax.jit(lambda x, w: dense(x, w, recipe=RECIPE))
        text = run.trace(x, w).lower(lowering_platforms=("cuda",)).as_text()
    (call,) = [line for line in text.splitlines() if "custom_call @__op$block_scaled_dot" in line]
    operands = "tensor<1x32x64xf8E4M3FN>, tensor<1x48x64xf8E4M3FN>, tensor<1x32x2xf8E8M0FNU>, tensor<1x48x2xf8E8M0FNU>"
    assert f"({operands}) -> tensor<1x32x48xf32>" in call
