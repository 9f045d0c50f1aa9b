"""Activations against float64 numpy, their parameters, slots, gradients and errors."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import on_device
from conftest import optimized

from te_jax.ops.quantize.activation import (
    _FROM_JAX_NN,
    activation,
    activation_bwd,
    activation_fwd,
    attributes,
    is_fused,
    slots,
)


def _sigmoid(x):
    return 1 / (1 + np.exp(-x))


def _gelu(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


REFERENCE = {
    "gelu": _gelu,
    "silu": lambda x: x * _sigmoid(x),
    "relu": lambda x: np.maximum(x, 0),
    "quick_gelu": lambda x: x * _sigmoid(1.702 * x),
    "squared_relu": lambda x: np.maximum(x, 0) ** 2,
}


def _data(rng, *shape, dtype=np.float32):
    return on_device(rng.normal(size=shape) * 4, dtype)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("name", REFERENCE)
def test_single_and_gated(rng, name, dtype):
    x = _data(rng, 3, 5, 2, 17, dtype=dtype)
    f64 = np.asarray(x, np.float64)
    # One rounding to the result's type, and a few float32 roundings inside; 1 + tanh loses half an ulp of 1
    # times x / 2 and the other factor, both at most 16 here.
    bound = dict(rtol=float(jnp.finfo(dtype).eps) * 0.51 + 1e-6, atol=2**-24 * 8 * 16)
    both = jax.jit(lambda x: (activation(x[..., :1, :], (name,)), activation(x, (name.upper(), "linear"))))
    one, gated = both(x)
    assert one.shape == (3, 5, 17) and one.dtype == dtype
    np.testing.assert_allclose(np.asarray(one, np.float64), REFERENCE[name](f64[..., 0, :]), **bound)
    np.testing.assert_allclose(np.asarray(gated, np.float64), REFERENCE[name](f64[..., 0, :]) * f64[..., 1, :], **bound)


@pytest.mark.parametrize("params", [None, {"limit": 2.0}, {"limit": 1.5, "alpha": 1.0, "glu_linear_offset": 0.25}])
def test_clamped_swiglu(rng, params):
    x = _data(rng, 4, 2, 33)
    p = {"limit": 7.0, "alpha": 1.702, "glu_linear_offset": 1.0, **(params or {})}
    u, y = np.asarray(x, np.float64)[:, 0], np.asarray(x, np.float64)[:, 1]
    u = np.minimum(u, p["limit"])
    expected = u * _sigmoid(p["alpha"] * u) * (np.clip(y, -p["limit"], p["limit"]) + p["glu_linear_offset"])
    got = activation(x, ("clamped_silu", "clamped_linear"), params)
    np.testing.assert_allclose(got, expected, rtol=2e-6, atol=2e-6)


def test_slots_are_reversed_behind_linear(rng):
    assert slots(("linear", "silu")) == slots(("SiLU", "Linear")) == ("silu", "linear")
    assert slots(("clamped_linear", "clamped_silu")) == ("clamped_silu", "clamped_linear")
    assert slots(("silu", "relu", "tanh")) == ("silu", "relu", "tanh")
    x = _data(rng, 3, 2, 8)
    np.testing.assert_array_equal(activation(x, ("linear", "silu")), activation(x, ("silu", "linear")))


def test_other_names_and_functions(rng):
    x = _data(rng, 3, 3, 8)
    f64 = np.asarray(x, np.float64)
    got = jax.jit(lambda x: activation(x, ("tanh", "sigmoid", lambda y: y + 1)))(x)
    np.testing.assert_allclose(got, np.tanh(f64[:, 0]) * _sigmoid(f64[:, 1]) * (f64[:, 2] + 1), rtol=3e-6, atol=1e-6)
    for name, y in jax.jit(lambda x: {n: activation(x, (n,)) for n in _FROM_JAX_NN})(x[:, :1]).items():
        assert y.shape == (3, 8), name


def test_gradient_is_autodiffs_and_keeps_x_alone(rng):
    x = _data(rng, 6, 2, 8, dtype=jnp.bfloat16)

    def plain(x):
        f32 = x.astype(jnp.float32)
        u = np.sqrt(8 / np.pi) * (f32[:, 0] + 0.044715 * f32[:, 0] ** 3)  # of 1 + tanh(u / 2) only noise is left at -5
        return (f32[:, 0] * jax.nn.sigmoid(u) * f32[:, 1]).astype(x.dtype)

    _, vjp = jax.vjp(lambda x: activation(x, ("gelu", "linear")), x)
    _, plain_vjp = jax.vjp(plain, x)
    cotangent = jnp.ones((6, 8), jnp.bfloat16)
    np.testing.assert_allclose(
        *(np.asarray(f(cotangent)[0], np.float32) for f in (vjp, plain_vjp)), rtol=2**-7, atol=1e-6
    )
    kept = [leaf for leaf in jax.tree.leaves(vjp) if leaf.size > 1]
    assert {leaf.dtype for leaf in kept} == {jnp.dtype(jnp.bfloat16)}, "float32 copies are kept for the backward pass"


@pytest.mark.parametrize(
    ("names", "params", "shape", "error", "text"),
    [
        (("gelluh",), None, (4, 1, 8), ValueError, "'gelluh' is not known"),
        ((3,), None, (4, 1, 8), TypeError, "neither a name nor a function"),
        ("gelu", None, (4, 1, 8), ValueError, "pass a tuple"),
        ((), None, (4, 1, 8), ValueError, "pass a tuple"),
        (("gelu",), None, (4, 2, 8), ValueError, "axis A .* is 2 .* 1 activations"),
        (("gelu",), {"limit": 1.0}, (4, 1, 8), ValueError, "'limit'"),
        (("clamped_silu", "clamped_linear"), {"limits": 1.0}, (4, 2, 8), ValueError, "'limits'"),
        (("clamped_silu", "clamped_linear"), {"limit": "7"}, (4, 2, 8), ValueError, "finite number"),
    ],
)
def test_errors(names, params, shape, error, text):
    with pytest.raises(error, match=text):
        activation(jnp.ones(shape), names, params)


def test_integers_are_refused():
    with pytest.raises(TypeError, match="int32"):
        activation(jnp.ones((4, 1, 8), jnp.int32), ("gelu",))


SINGLE = [(name,) for name in REFERENCE]
FUSED = [*SINGLE, *((name, "linear") for name in REFERENCE), ("clamped_silu", "clamped_linear")]
E4M3, E5M2 = jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.float8_e5m2)


@pytest.mark.parametrize("names", FUSED, ids="-".join)
def test_fused_ops_mean_activation_and_its_gradient(rng, names):
    """y and dx are those of `activation`; data, data_t, amax and dbias come from them before they are rounded."""
    x, dy = _data(rng, 3, 5, len(names), 17), _data(rng, 3, 5, 17)
    attrs, scale = attributes(names), jnp.float32(3.0)

    @optimized
    def fused(x, dy):
        return activation_fwd(x, scale, dtype=E4M3, **attrs), activation_bwd(dy, x, scale, dtype=E5M2, **attrs)

    @jax.jit
    def wanted(x, dy):
        y, vjp = jax.vjp(lambda x: activation(x, names), x)
        return y, *vjp(dy)

    (y, data, data_t, amax, scale_inv), backward = jax.tree.map(np.asarray, fused(x, dy))
    want, want_dx = wanted(x, dy)
    # 1 + tanh(u) keeps half an ulp of 1, times x0 and x1 of some 16 here; compiled as a whole it rounds elsewhere.
    np.testing.assert_allclose(y, want, rtol=1e-6, atol=16 * 16 * 2.0**-22)
    np.testing.assert_array_equal(data, np.clip(y * 3, -448, 448).astype(E4M3))
    np.testing.assert_array_equal(data_t, np.moveaxis(data, -1, 0))
    assert amax == np.max(np.abs(y))
    dx, data, data_t, amax, dbias, scale_inv_of_dx = backward
    assert scale_inv == scale_inv_of_dx == np.float32(1) / np.float32(3)
    # The same for 1 - tanh(u)**2, times x0 * u' * x1 * dy.
    np.testing.assert_allclose(dx, want_dx, rtol=1e-5, atol=16 * 100 * 2.0**-21)
    np.testing.assert_array_equal(data, np.clip(dx * 3, -57344, 57344).astype(E5M2))
    np.testing.assert_array_equal(data_t, np.transpose(data, (2, 3, 0, 1)))
    assert amax == np.max(np.abs(dx))
    np.testing.assert_allclose(dbias, dx.sum((0, 1)), rtol=1e-5, atol=1e-5)


def test_fp8_is_not_rounded_twice(rng):
    x = _data(rng, 64, 1, 64, dtype=jnp.bfloat16)
    fused = partial(activation_fwd, outputs=("data", "amax"), dtype=E4M3, **attributes(("gelu",)))
    data = optimized(fused)(x, jnp.float32(16.0))[0]
    f32 = optimized(lambda x: jax.nn.gelu(x[:, 0].astype(jnp.float32), approximate=True) * 16)(x)
    np.testing.assert_array_equal(data, f32.clip(-448, 448).astype(E4M3))
    assert (np.asarray(f32.astype(jnp.bfloat16).clip(-448, 448).astype(E4M3)) != np.asarray(data)).any()


def test_what_is_fused():
    assert all(is_fused(names) for names in FUSED) and is_fused(("Linear", "SiLU"))
    for names in (("tanh",), ("linear",), ("silu", "relu"), ("clamped_silu",), ("clamped_silu", "linear"), (abs,)):
        assert not is_fused(names)
        with pytest.raises(ValueError, match="is not fused"):
            attributes(names)
    params = attributes(("clamped_linear", "clamped_silu"), {"limit": 2})
    assert params == dict(names=FUSED[-1], limit=2.0, alpha=1.702, glu_linear_offset=1.0)
    with pytest.raises(ValueError, match="'limit'"):
        attributes(("gelu",), {"limit": 2.0})
    with pytest.raises(ValueError, match=r"axis `a` of x\[m\.\.\. a f\] is 1, but 2 activations"):
        activation_fwd(jnp.ones((4, 1, 8)), None, outputs=("y",), dtype=E4M3, **attributes(("silu", "linear")))
    with pytest.raises(TypeError, match="dy is bfloat16, x is float32"):
        wide = jnp.ones((4, 1, 8))
        activation_bwd(wide[:, 0].astype("bfloat16"), wide, None, outputs=("dx",), dtype=E5M2, **attributes(("silu",)))
