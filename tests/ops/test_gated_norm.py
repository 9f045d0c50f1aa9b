"""The gated RMSNorm against float64: both orders, groups, formats, types, gradients; rows of ends; errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gated_norm_oracle import EPS, ROUNDINGS, UNIT, drawn, gradients_in_f64, in_f64

from te_jax.layers import gated_rmsnorm
from te_jax.ops.formats import ROWS_32, ROWS_128, TENSOR
from te_jax.ops.norm import gated_norm, gated_norm_fwd
from te_jax.ops.quantize.gated_norm import GATED_NORM, GatedNorm

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2


@pytest.mark.parametrize("before", [False, True], ids=["gate_first", "norm_first"])
@pytest.mark.parametrize(
    ("rows", "g", "c", "dtype", "gamma_type"),
    [
        ((3, 5), 1, 24, jnp.float32, jnp.float32),
        ((7,), 3, 200, jnp.bfloat16, jnp.float32),
        ((1, 2, 3), 8, 1, jnp.float16, jnp.bfloat16),
        ((0, 4), 2, 8, jnp.float32, jnp.float16),
        ((4,), 2, 0, jnp.bfloat16, jnp.bfloat16),
    ],
    ids=str,
)
def test_values_and_gradients(rng, rows, g, c, dtype, gamma_type, before):
    """y and its gradients."""
    x, z, gamma, dy = drawn(rng, rows, g, c, dtype, gamma_type)
    run = lambda *args: gated_norm(*args, eps=EPS, norm_before_gate=before)

    @jax.jit
    def ours(x, z, gamma, dy):
        y, pull = jax.vjp(run, x, z, gamma)
        return y, pull(dy)

    y, grads = ours(x, z, gamma, dy)
    assert y.dtype == dtype and [a.dtype for a in grads] == [dtype, dtype, gamma_type]
    want, _ = in_f64(x, z, gamma, before)
    few_bits = lambda t: float(jnp.finfo(t).eps) / 2 * (t != jnp.float32)
    least = lambda t: float(jnp.finfo(t).smallest_subnormal) / 2  # half a step
    in_wide = lambda a: np.asarray(a, np.float64)
    bound = (ROUNDINGS + c / 2) * UNIT + few_bits(dtype)
    np.testing.assert_allclose(in_wide(y), want, rtol=bound, atol=least(dtype))
    # A gradient has the roundings of xhat twice, of a mean of c products, and of a sum of all rows.
    count = 3 * (ROUNDINGS + c) + np.prod(rows)
    for got, want, size in zip(grads, *gradients_in_f64(x, z, gamma, dy, before), strict=True):
        off = np.abs(in_wide(got) - want) - count * UNIT * size - few_bits(got.dtype) * np.abs(want)
        assert (off <= least(got.dtype)).all(), off.max()


@pytest.mark.parametrize("form", [TENSOR, ROWS_128, ROWS_32], ids=lambda form: form.name)
@pytest.mark.parametrize("before", [False, True], ids=["gate_first", "norm_first"])
def test_formats(rng, form, before):
    """What each format holds, in both layouts, is y to half a step of FP8 in each block; rstd comes with it."""
    rows, g, c = (3, 130), 3, 200
    x, z, gamma, _ = drawn(rng, rows, g, c, jnp.bfloat16)
    names = ("data", "data_t", "rstd", *(("amax", "scale_inv") if form == TENSOR else ()))
    source = GatedNorm(EPS, before).source(x, z, gamma)
    law = dict(power_2=True, epsilon=0.0) if form == ROWS_128 else {}
    want, rstd = in_f64(x, z, gamma, before)
    scale = jnp.float32(448 / np.abs(want).max()) if form == TENSOR else None
    got = jax.jit(lambda: source.run(names, E4M3, form, scale, law=law))()
    np.testing.assert_allclose(got["rstd"], rstd, rtol=(ROUNDINGS + c / 2) * UNIT)
    split, columns = len(rows), 2
    values = form.read(got["data"], got["scale_inv"], columns)
    transposed = form.read(got["data_t"], got.get("scale_inv_t", got["scale_inv"]), split)
    for read in (values, np.transpose(transposed, (2, 3, 0, 1))):
        # E4M3 has 3 bits behind the point: half a step is at most 2**-4 of a number, and 2**-10 of those below 2**-6,
        # where the largest number is between 224 and 448. MXFP8 clips numbers between 448 and 512 to 448, by an eighth.
        # Blocks are of numbers that were rounded to bf16.
        near = 2.0**-4 + 2.0**-8 + (0.125 if form == ROWS_32 else 0)
        np.testing.assert_allclose(read, want, rtol=near, atol=np.abs(want).max() / 224 * 2.0**-10)
    if form == TENSOR:
        # The tensor is quantized from f32, before y is rounded.
        np.testing.assert_allclose(got["amax"], np.abs(want).max(), rtol=(ROUNDINGS + c / 2) * UNIT)
        y = source.exact(E4M3)
        np.testing.assert_array_equal(
            np.asarray(got["data"], np.float32), np.asarray(jnp.clip(y * scale, -448, 448).astype(E4M3), np.float32)
        )


def test_a_known_rstd_is_read(rng):
    x, z, gamma, _ = drawn(rng, (5,), 2, 24, jnp.float32)
    source = GatedNorm(EPS, False).source(x, z, gamma)
    first = source.run(("rstd", "amax"), E5M2)
    again = source.run(("data", "amax"), E5M2, scale=jnp.float32(2), known=dict(rstd=first["rstd"]))
    whole = source.run(("data", "amax"), E5M2, scale=jnp.float32(2))
    for name in ("data", "amax"):
        np.testing.assert_array_equal(*(np.asarray(a[name], np.float32) for a in (again, whole)))
    doubled = source.run(("amax",), E5M2, known=dict(rstd=2 * first["rstd"]))
    np.testing.assert_array_equal(doubled["amax"], 2 * whole["amax"])


def test_rows_without_numbers_and_with_inf(rng):
    """A row of zeros is 0, an inf or NaN spoils its own group only, and squares that have no f32 are counted."""
    x, z, gamma, _ = drawn(rng, (5,), 2, 24, jnp.float32)
    x = x.at[0].set(0).at[1, 0, 3].set(jnp.inf).at[2, 1, 4].set(jnp.nan).at[3].multiply(1e25)
    y, rstd = gated_norm_fwd(
        x, z, gamma, None, None, outputs=("y", "rstd"), eps=EPS, norm_before_gate=False, dtype=jnp.dtype(E4M3)
    )
    y, want = np.asarray(y), in_f64(x, z, gamma, False)[0]
    assert not y[0].any() and np.isnan(y[1, 0]).any() and np.isnan(y[2, 1]).all()
    kept = np.ones((5, 2), bool)
    kept[1, 0] = kept[2, 1] = False
    np.testing.assert_allclose(y[kept], want[kept], rtol=(ROUNDINGS + 12) * UNIT)
    assert (np.asarray(rstd)[3] < 1e-20).all()


def test_the_layer_uses_the_op_in_whole_groups(rng):
    """`gated_rmsnorm` is the op of [..., g, c], f64 and two types are plain JAX of the same numbers."""
    x, z, gamma, _ = drawn(rng, (3,), 4, 6, jnp.float32)
    gamma, count = gamma.reshape(-1), lambda *args: str(jax.make_jaxpr(norm)(*args)).count("te_gated_norm_fwd[")
    norm = lambda *args: gated_rmsnorm(*args, groups=2, epsilon=EPS)
    assert count(x, z, gamma) == 1 and count(x, z.astype(jnp.bfloat16), gamma) == 0
    want = in_f64(*(a.reshape(3, 2, 12) for a in (x, z)), gamma.reshape(2, 12), False)[0].reshape(3, 4, 6)
    np.testing.assert_allclose(norm(x, z, gamma), want, rtol=(ROUNDINGS + 6) * UNIT)
    plain = norm(x, z.astype(jnp.bfloat16).astype(jnp.float32), gamma)
    np.testing.assert_allclose(norm(x, z.astype(jnp.bfloat16), gamma), plain, rtol=2 * (ROUNDINGS + 6) * UNIT)


def test_wrong_arguments(rng):
    x, z, gamma, _ = drawn(rng, (3,), 2, 8, jnp.float32)
    with pytest.raises(TypeError, match="te_gated_norm_fwd: x is float32, but z bfloat16; cast one"):
        gated_norm(x, z.astype(jnp.bfloat16), gamma)
    with pytest.raises(ValueError, match="te_gated_norm_fwd: eps is 0.0; pass a number above 0"):
        gated_norm(x, z, gamma, eps=0.0)
    with pytest.raises(ValueError, match="te_gated_norm_fwd"):
        gated_norm(x, z, gamma[:1])
    assert GATED_NORM.op_of(TENSOR).name == "te_gated_norm_fwd"
