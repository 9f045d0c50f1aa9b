"""On the GPU: every CUDA op against its plain-JAX reference or a float64 meaning, at odd and large sizes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cuda_cases import activation_case, bits_equal, odd_values, rel

from te_jax.ops import scale_update as scaling
from te_jax.ops.activation import activation_bwd, activation_fwd, attributes
from te_jax.ops.norm import norm_bwd, norm_fwd
from te_jax.ops.quantize import quantize

pytestmark = pytest.mark.gpu
E4M3, E5M2 = jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.float8_e5m2)
f32, bf16, f16 = jnp.float32, jnp.bfloat16, jnp.float16
OUT = ("data", "data_t", "amax", "dbias", "scale_inv")


SHAPES = [(1, 1), (1, 1001), (1001, 1), (16, 16), (64, 64), (65, 63), (199, 1001), (1000, 72), (8192, 4096), (7, 65536),
          (65536, 40), (4096, 12288)]  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [bf16, f16, f32], ids=lambda d: d.__name__)
@pytest.mark.parametrize("fp8", [E4M3, E5M2], ids=str)
def test_quantize(shape, dtype, fp8, rng):
    x, scale = odd_values(rng, shape, dtype), jnp.float32(rng.uniform(0.1, 300))
    got = jax.jit(lambda *a: quantize(*a, outputs=OUT, split=1, dtype=fp8))(x, scale)
    data, data_t, amax, *_ = quantize.reference(x, scale, split=1, dtype=fp8)
    bits_equal(got[0], data)
    bits_equal(got[1], data_t)
    assert float(got[2]) == float(amax)
    assert np.float32(got[4]) == inverse_of(scale)
    bound = np.abs(np.asarray(x, np.float64)).sum(0) * shape[0] * 2.0**-24  # f32 sums in another order
    exact = np.asarray(x, np.float64).sum(0)
    assert (np.abs(np.asarray(got[3], np.float64) - exact) <= bound + 1e-30).all()


def inverse_of(scale) -> np.float32:
    return np.float32(1) / np.float32(scale)


@pytest.mark.parametrize(
    "outputs", [("data",), ("data_t", "amax"), OUT[:2], OUT[:3], ("amax",), ("data", "scale_inv")], ids="-".join
)
@pytest.mark.parametrize("shape", [(199, 1001), (512, 1024)], ids=str)
def test_quantize_chosen_layouts(outputs, shape, rng):
    x, scale = odd_values(rng, shape, bf16), None if outputs == ("amax",) else jnp.float32(3.0)
    got = jax.jit(lambda *a: quantize(*a, outputs=outputs, split=1, dtype=E4M3))(x, scale)
    want = dict(zip(OUT, quantize.reference(x, scale, split=1, dtype=E4M3)))
    for name, g in zip(outputs, got):
        bits_equal(g, want[name]) if name != "amax" else np.testing.assert_equal(float(g), float(want[name]))


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_quantize_not_finite(bad, rng):
    x = np.array(odd_values(rng, (130, 200), f32))
    x[77, 133] = bad
    x = jnp.asarray(x, bf16)
    data, data_t, amax = jax.jit(lambda x: quantize(x, jnp.float32(2.0), outputs=OUT[:3], split=1, dtype=E4M3))(x)
    want = quantize.reference(x, jnp.float32(2.0), split=1, dtype=E4M3)
    bits_equal(data, want[0])
    bits_equal(data_t, want[1])
    assert not np.isfinite(float(amax))


def test_quantize_empty():
    for shape in ((0, 64), (64, 0)):
        out = jax.jit(lambda x: quantize(x, jnp.float32(4), outputs=OUT, split=1, dtype=E4M3))(jnp.ones(shape, bf16))
        assert float(out[4]) == 0.25
        assert float(out[2]) == 0.0 and out[0].shape == shape and not np.asarray(out[3]).any()


def _sigmoid(x):
    with np.errstate(over="ignore"):
        return 1 / (1 + np.exp(-x))


C = 2 * np.sqrt(2 / np.pi)  # (1 + tanh(u)) / 2 = sigmoid(2 u)
# x * sigmoid(p(x)) in slot 0: p and its derivative
SWISH = {
    "gelu": (lambda x: C * (x + 0.044715 * x**3), lambda x: C * (1 + 3 * 0.044715 * x**2)),
    "silu": (lambda x: x, np.ones_like),
    "quick_gelu": (lambda x: 1.702 * x, lambda x: np.full_like(x, 1.702)),
    "clamped_silu": (lambda x: 1.702 * x, lambda x: np.full_like(x, 1.702)),
}
EXACT = ("relu", "squared_relu")  # only products: equal to the reference bit for bit
ACTIVATIONS = [(n,) for n in ("gelu", "silu", "quick_gelu", *EXACT)]
ACTIVATIONS += [*((*n, "linear") for n in ACTIVATIONS), ("clamped_silu", "clamped_linear")]
ACTIVATION_SHAPES = [(1, 1), (1, 1001), (300, 1), (199, 1001), (257, 72), (512, 128)]
LIMIT, OFFSET = 7.0, 1.0


def swish64(dy, x, names):
    """y, dx and how far the kernel may be off, in float64. ex2 is right to 2 ulp and rcp to 1, so that the sigmoid is
    off by 2**-22 at most, and where it is 1 or 0 in f32 by what is lost there; each product adds half an ulp."""
    x, dy = np.asarray(x, np.float64), np.asarray(dy, np.float64)
    clamped, (p, dp) = names[0] == "clamped_silu", SWISH[names[0]]
    x0 = np.minimum(x[:, 0], LIMIT) if clamped else x[:, 0]
    x1 = 1.0 if len(names) == 1 else np.clip(x[:, 1], -LIMIT, LIMIT) + OFFSET if clamped else x[:, 1]
    s = _sigmoid(p(x0))
    slope = x0 * dp(x0)
    d, d_error = s + slope * s * (1 - s), 2.0**-22 + np.abs(slope) * np.minimum(2.0**-22, 4 * np.exp(-np.abs(p(x0))))
    meets = lambda x: np.where(x < LIMIT, 1.0, np.where(x == LIMIT, 0.5, 0.0))
    mask0 = meets(x[:, 0]) if clamped else 1.0
    y, y_error = x0 * s * x1, np.abs(x0 * x1) * 2.0**-22
    dx, dx_error = [dy * x1 * d * mask0], [np.abs(dy * x1) * d_error * mask0]
    if len(names) == 2:
        mask1 = meets(x[:, 1]) * meets(-x[:, 1]) if clamped else 1.0
        dx.append(dy * x0 * s * mask1)
        dx_error.append(np.abs(dy * x0) * 2.0**-22 * mask1)
    dx, dx_error = np.stack(dx, 1), np.stack(dx_error, 1)
    return (y, y_error + np.abs(y) * 2.0**-22), (dx, dx_error + np.abs(dx) * 2.0**-21)


def fp8_close(got, want, error, scale, dtype):
    """Within half a step of the exact value times scale, and what the value may be off."""
    info = jnp.finfo(dtype)
    want, error = np.clip(want * scale, -float(info.max), float(info.max)), error * scale
    step = np.exp2(np.floor(np.log2(np.maximum(np.abs(want) + error, float(info.smallest_normal))))) * float(info.eps)
    worst = np.abs(np.asarray(got, np.float64) - want) - (0.5 * step + error + np.abs(want) * 2.0**-24)
    assert worst.max() <= 0, f"off by {worst.max()} too much at {np.unravel_index(worst.argmax(), worst.shape)}"


def wide_close(got, want, error, dtype):
    info = jnp.finfo(dtype)
    half = np.maximum(np.abs(want) * float(info.eps) / 2, float(info.smallest_subnormal))
    assert (np.abs(np.asarray(got, np.float64) - want) <= (half + error) * 1.001).all()


def values_equal(got, want):
    """Equal, with NaN like NaN and -0 like 0: autodiff adds the zeros of the other slot to a gradient."""
    for g, w in zip(got, want, strict=True):
        assert g.dtype == w.dtype
        np.testing.assert_array_equal(np.asarray(g, np.float32), np.asarray(w, np.float32))


@pytest.mark.parametrize("dtype", [bf16, f16, f32], ids=lambda d: d.__name__)
@pytest.mark.parametrize("names", ACTIVATIONS, ids="-".join)
def test_activation(names, dtype, rng):
    """All shapes in one program: six take several times as long to compile."""
    cases = [activation_case(names, shape, dtype, rng) for shape in ACTIVATION_SHAPES]
    attrs = attributes(names)
    run = lambda dy, *a: (activation_fwd(*a, dtype=E4M3, **attrs), activation_bwd(dy, *a, dtype=E5M2, **attrs))
    every = jax.jit(lambda cases: [run(*operands) for operands in cases])(cases)
    for operands, results in zip(cases, every, strict=True):
        check_activation(names, *operands, *results)


def check_activation(names, dy, x, scale, fwd, bwd):
    attrs, dtype, shape = attributes(names), x.dtype, dy.shape
    if names[0] in EXACT:
        want_fwd = activation_fwd.reference(x, scale, dtype=E4M3, **attrs)
        want_bwd = activation_bwd.reference(dy, x, scale, dtype=E5M2, **attrs)
        values_equal((*fwd, *bwd[:4], bwd[5]), (*want_fwd, *want_bwd[:4], want_bwd[5]))
        dx = np.asarray(activation_bwd.reference(dy.astype(f32), x.astype(f32), None, dtype=E5M2, **attrs)[0])
        dx, dx_error = dx.astype(np.float64), np.zeros(dx.shape)
    else:
        (y, y_error), (dx, dx_error) = swish64(dy, x, names)
        for got, fp8, (wide, error) in ((fwd, E4M3, (y, y_error)), (bwd, E5M2, (dx, dx_error))):
            wide_close(got[0], wide, error, dtype)
            fp8_close(got[1], wide, error, float(scale), fp8)
            assert abs(float(got[3]) - np.abs(wide).max()) <= error.max()
            assert np.float32(got[-1]) == inverse_of(scale)
        bits_equal(fwd[2], np.asarray(fwd[1]).T)
        bits_equal(bwd[2], np.asarray(bwd[1]).transpose(1, 2, 0))
    bound = (np.abs(dx) * shape[0] * 2.0**-24 + dx_error).sum(0)  # f32 sums in another order
    assert (np.abs(np.asarray(bwd[4], np.float64) - dx.sum(0)) <= bound + 1e-30).all()


@pytest.mark.parametrize(
    "outputs", [("y",), ("amax",), ("data", "amax"), ("data_t", "amax"), ("y", "data", "data_t")], ids="-".join
)
@pytest.mark.parametrize("shape", [(199, 1001), (512, 128)], ids=str)
def test_activation_chosen_results(outputs, shape, rng):
    names = ("squared_relu", "linear")
    dy, x, scale = activation_case(names, shape, bf16, rng)
    scale, attrs = None if len(outputs) == 1 else scale, dict(attributes(names), dtype=E4M3)
    got = jax.jit(lambda *a: activation_fwd(*a, outputs=outputs, **attrs))(x, scale)
    want = dict(zip(("y", "data", "data_t", "amax"), activation_fwd.reference(x, scale, **attrs)))
    values_equal(got, [want[name] for name in outputs])
    outputs = tuple("dx" if name == "y" else name for name in outputs)
    got = jax.jit(lambda *a: activation_bwd(*a, outputs=outputs, **attrs))(dy, x, scale)
    want = dict(zip(("dx", "data", "data_t", "amax"), activation_bwd.reference(dy, x, scale, **attrs)))
    values_equal(got, [want[name] for name in outputs])


@pytest.mark.parametrize("shape", [(1, 1), (199, 1001), (512, 200)], ids=str)
@pytest.mark.parametrize("dtype", [bf16, f32], ids=lambda d: d.__name__)
@pytest.mark.parametrize("names", [(), *ACTIVATIONS], ids=lambda names: "-".join(names) or "quantize")
def test_amax_alone(names, dtype, shape, rng):
    """A kernel of its own: the amax that is there next to data, wherever the largest number or a NaN is."""
    dy, x, scale = activation_case(names or ("relu",), shape, dtype, rng)
    attrs = dict(attributes(names), dtype=E5M2) if names else dict(split=1, dtype=E4M3)

    def run(outputs, scale, dy, x):
        if not names:
            return [quantize(x[:, 0], scale, outputs=outputs, **attrs)[-1]]
        fwd = activation_fwd(x, scale, outputs=outputs, **attrs)
        return fwd[-1], activation_bwd(dy, x, scale, outputs=outputs, **attrs)[-1]

    @jax.jit
    def both(scale, dy, x):
        return run(("amax",), None, dy, x), run(("data", "amax"), scale, dy, x)

    for row, column in ((0, 0), (-1, -1), (rng.integers(shape[0]), rng.integers(shape[1]))):
        for value in (1000.0, np.nan):
            operands = dy.at[row, column].set(3.0), x.at[row, :, column].set(value)
            alone, beside = both(scale, *operands)
            np.testing.assert_array_equal(np.asarray(alone), np.asarray(beside))  # a NaN equals a NaN
            assert names or np.isnan(value) or float(alone[0]) == value
            assert not np.isnan(value) or np.isnan(alone[0])


@pytest.mark.parametrize("names", ACTIVATIONS, ids="-".join)
def test_activation_not_finite(names, rng):
    """NaN, inf and numbers whose cube is not finite give what the reference gives."""
    bad = np.array([np.inf, -np.inf, np.nan, 1e30, -1e30, 3e38, -3e38, 0.0, -0.0, LIMIT, -LIMIT, 1.5], np.float32)
    pairs = np.stack(np.meshgrid(bad, bad), -1).reshape(-1, 2)  # [144, 2]: every two of them
    x = jnp.tile(jnp.asarray(pairs.T[: len(names)])[None], (3, 1, 1)).astype(bf16)
    attrs, scale = attributes(names), jnp.float32(2.0)
    got = jax.jit(lambda *a: activation_fwd(*a, dtype=E4M3, **attrs))(x, scale)
    want = activation_fwd.reference(x, scale, dtype=E4M3, **attrs)
    same_specials(got[:2], want[:2])
    assert np.isnan(float(got[3])) and np.isnan(float(want[3]))
    dy = jnp.asarray([1.0, 0.0, np.nan], bf16)[:, None] * jnp.ones((3, x.shape[-1]), bf16)
    got = jax.jit(lambda *a: activation_bwd(*a, dtype=E5M2, **attrs))(dy, x, scale)
    same_specials(got[:2], activation_bwd.reference(dy, x, scale, dtype=E5M2, **attrs)[:2])


def same_specials(got, want):
    for g, w in zip(got, want):
        g, w = np.asarray(g, np.float32), np.asarray(w, np.float32)
        np.testing.assert_array_equal(np.isnan(g), np.isnan(w))
        np.testing.assert_allclose(g, w, rtol=2.0**-2, atol=2.0**-16)  # one step of E5M2


@pytest.mark.parametrize("names", [("gelu",), ("silu", "linear"), ("squared_relu",)], ids="-".join)
def test_activation_large(names, rng):
    """Compared on the device: FP8 differs from the reference only where f32 noise crosses a rounding boundary.
    Small numbers are left out: in the tail of gelu's derivative, a small difference of two terms, noise is more."""
    m, f = 8192, 4096
    x = jax.random.normal(jax.random.key(0), (2, m // 2, len(names), f), bf16) * 2
    dy, scale, attrs = jax.random.normal(jax.random.key(1), (2, m // 2, f), bf16), jnp.float32(20.0), attributes(names)

    # Each in a program of its own: within one, XLA leaves out a rounding to FP8 that is undone at once.
    run = lambda fwd, bwd: jax.jit(
        lambda dy, x: (fwd(x, scale, dtype=E4M3, **attrs), bwd(dy, x, scale, dtype=E5M2, **attrs))
    )(dy, x)
    got, want = run(activation_fwd, activation_bwd), run(activation_fwd.reference, activation_bwd.reference)
    differ = jax.jit(lambda g, w: jnp.mean((g.astype(f32) != w.astype(f32)) & (jnp.abs(w.astype(f32)) > 2.0**-4)))
    for g, w in zip(got, want):
        assert float(differ(g[1], w[1])) <= (0 if names[0] in EXACT else 1e-4)
        assert float(differ(g[2], w[2])) <= (0 if names[0] in EXACT else 1e-4)
        assert float(g[3]) == pytest.approx(float(w[3]), rel=1e-6)
    assert rel(got[1][4], want[1][4]) < 1e-5


def test_activation_empty():
    attrs = attributes(("silu", "linear"))
    for shape in ((0, 2, 64), (64, 2, 0)):
        x, dy = jnp.ones(shape, bf16), jnp.ones((shape[0], shape[2]), bf16)
        fwd = jax.jit(lambda x: activation_fwd(x, jnp.float32(4), dtype=E4M3, **attrs))(x)
        bwd = jax.jit(lambda dy, x: activation_bwd(dy, x, jnp.float32(4), dtype=E5M2, **attrs))(dy, x)
        assert float(fwd[4]) == float(bwd[5]) == 0.25
        assert float(fwd[3]) == float(bwd[3]) == 0.0 and bwd[0].shape == shape and not np.asarray(bwd[4]).any()


NORM_SHAPES = [(1, 1), (3, 7), (199, 1001), (1024, 4096), (33, 8192), (5, 65536), (2, 65535), (257, 768), (4097, 128),
               (70, 1032), (40, 12288), (19, 16384), (3, 20000)]  # fmt: skip


def norm_case(shape, dtype, rms, rng):
    x = jnp.asarray(rng.standard_normal(shape) * 3 + 5 * rng.standard_normal((shape[0], 1)), f32).astype(dtype)
    gamma, beta = (jnp.asarray(rng.standard_normal(shape[1]), f32) for _ in range(2))
    return x, gamma, None if rms else beta


def norm64(x, gamma, beta, rms, zero_centered, eps):
    x, g = np.asarray(x, np.float64), np.asarray(gamma, np.float64) + zero_centered
    mean = 0 * x[:, :1] if rms else x.mean(1, keepdims=True)
    rstd = 1 / np.sqrt(((x - mean) ** 2).mean(1, keepdims=True) + eps)
    xhat = (x - mean) * rstd
    size = (np.abs(x) + np.abs(mean)) * rstd  # of what is subtracted for xhat: f32 keeps 24 bits of that
    return xhat, size, rstd, g, xhat * g + (0 if rms else np.asarray(beta, np.float64))


def within_ulp(got, want, scale, dtype, ulps):
    """|got - want| in ulps of `dtype` at the size of the largest term that was added."""
    info = jnp.finfo(dtype)
    ulp = np.exp2(np.floor(np.log2(np.maximum(np.abs(scale), 1e-30)))) * float(info.eps)
    ulp = np.maximum(ulp, float(info.smallest_subnormal))
    worst = np.max(np.abs(np.asarray(got, np.float64) - want) / ulp, initial=0)
    assert worst <= ulps, f"{worst:.2f} ulp"


@pytest.mark.parametrize("shape", NORM_SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [bf16, f16, f32], ids=lambda d: d.__name__)
@pytest.mark.parametrize("rms", [False, True], ids=["layernorm", "rmsnorm"])
@pytest.mark.parametrize("zero_centered", [False, True])
def test_norm_fwd(shape, dtype, rms, zero_centered, rng):
    x, gamma, beta = norm_case(shape, dtype, rms, rng)
    outputs = ("y", "data", "data_t", *(() if rms else ("mean",)), "rstd", "amax")
    attrs = dict(eps=1e-5, rms=rms, zero_centered=zero_centered, dtype=E4M3)
    scale, weighted = jnp.float32(40.0), (x, gamma, beta, None, None)
    got = dict(zip(outputs, jax.jit(lambda *a: norm_fwd(*a, outputs=outputs, **attrs))(*weighted, scale)))
    xhat, size, rstd, g, y = norm64(x, gamma, beta, rms, zero_centered, 1e-5)
    terms = np.abs(size * g) + (0 if rms else np.abs(np.asarray(beta, np.float64)))
    terms = terms if dtype == f32 else np.abs(xhat * g) + (0 if rms else np.abs(np.asarray(beta, np.float64)))
    # One rounding to the output type. In f32 also: mean and sum (log2(h) partial sums), rsqrt (2 ulp), two products.
    within_ulp(got["y"], y, terms, dtype, 1.0 if dtype != f32 else 12.0)
    np.testing.assert_allclose(got["rstd"], rstd[:, 0], rtol=2e-6)
    assert float(got["amax"]) == pytest.approx(np.abs(y).max(), rel=2e-6)
    q = np.asarray(got["data"], np.float64)
    step = np.maximum(np.abs(q) * 2.0**-3, 2.0**-9)  # a half step of E4M3, and f32 noise around the boundary
    assert (np.abs(q - np.clip(y * 40.0, -448, 448)) <= 0.51 * step + 1e-4 * terms * 40).all()
    bits_equal(got["data_t"], np.asarray(got["data"]).T)
    unseen = jax.jit(lambda *a: norm_fwd(*a, outputs=("data", "data_t", "rstd"), **attrs))(*weighted, scale)
    bits_equal(unseen[0], got["data"])
    bits_equal(unseen[1], got["data_t"])
    alone = jax.jit(lambda *a: norm_fwd(*a, outputs=("rstd", "amax"), **attrs))(*weighted, None)
    assert float(alone[1]) == pytest.approx(np.abs(y).max(), rel=2e-6)
    plain = jax.jit(lambda *a: norm_fwd(*a, outputs=("y", "rstd"), **attrs))(*weighted, None)
    within_ulp(plain[0], y, terms, dtype, 1.0 if dtype != f32 else 12.0)


@pytest.mark.parametrize("shape", NORM_SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [bf16, f16, f32], ids=lambda d: d.__name__)
@pytest.mark.parametrize("rms", [False, True], ids=["layernorm", "rmsnorm"])
def test_norm_of_known_statistics(shape, dtype, rms, rng):
    """Not those of x, so that a kernel which computes its own is seen; both kernels, with data_t and without it."""
    x, gamma, beta = norm_case(shape, dtype, rms, rng)
    mean = None if rms else jnp.asarray(rng.standard_normal(shape[0]), f32)
    rstd, scale = jnp.asarray(rng.uniform(0.2, 3.0, shape[0]), f32), jnp.float32(40.0)
    attrs = dict(eps=1e-5, rms=rms, zero_centered=False, dtype=E4M3)
    terms = lambda a: np.asarray(a, np.float64)
    sizes = np.abs(terms(x)) + (0 if rms else np.abs(terms(mean))[:, None])
    y = (terms(x) - (0 if rms else terms(mean)[:, None])) * terms(rstd)[:, None] * terms(gamma)
    sizes = sizes * terms(rstd)[:, None] * np.abs(terms(gamma)) + (0 if rms else np.abs(terms(beta)))
    y = y + (0 if rms else terms(beta))
    for outputs in (("y", "data", "data_t", "amax"), ("y", "data"), ("amax",)):
        run = jax.jit(lambda *a: norm_fwd(*a, outputs=outputs, **attrs))  # noqa: B023
        got = dict(zip(outputs, run(x, gamma, beta, mean, rstd, scale if "data" in outputs else None)))
        if "y" in got:  # of f32: one rounding of a difference, two of products, one of a sum
            within_ulp(got["y"], y, sizes, dtype, 1.0 if dtype != f32 else 4.0)
            q = np.asarray(got["data"], np.float64)
            step = np.maximum(np.abs(q) * 2.0**-3, 2.0**-9)
            assert (np.abs(q - np.clip(y * 40.0, -448, 448)) <= 0.51 * step + 1e-4 * sizes * 40).all()
        if "data_t" in got:
            bits_equal(got["data_t"], np.asarray(got["data"]).T)
        if "amax" in got:
            assert float(got["amax"]) == pytest.approx(np.abs(y).max(), rel=2e-6)


@pytest.mark.parametrize("shape", NORM_SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [bf16, f32], ids=lambda d: d.__name__)
@pytest.mark.parametrize("rms", [False, True], ids=["layernorm", "rmsnorm"])
@pytest.mark.parametrize("residual", [False, True], ids=["", "residual"])
def test_norm_bwd(shape, dtype, rms, residual, rng):
    x, gamma, beta = norm_case(shape, dtype, rms, rng)
    dy, dres = (jnp.asarray(rng.standard_normal(shape), f32).astype(dtype) for _ in range(2))
    xhat, size, rstd, g, _ = norm64(x, gamma, beta, rms, 1.0, 1e-5)
    mean = None if rms else jnp.asarray(np.asarray(x, np.float64).mean(1), f32)
    outputs = ("dx", "dgamma") if rms else ("dx", "dgamma", "dbeta")
    run = jax.jit(lambda *a: norm_bwd(*a, outputs=outputs, rms=rms, zero_centered=True))
    got = run(dy, x, mean, jnp.asarray(rstd[:, 0], f32), gamma, dres if residual else None)
    dy64 = np.asarray(dy, np.float64)
    dxhat = dy64 * g
    means = (dxhat * xhat).mean(1, keepdims=True) * xhat + (0 if rms else dxhat.mean(1, keepdims=True))
    size = size if dtype == f32 else np.abs(xhat)
    terms = rstd * (np.abs(dxhat) + size * np.abs(dxhat * size).mean(1, keepdims=True) + np.abs(dxhat).mean())
    dres = np.asarray(dres, np.float64) * residual
    terms = terms + np.abs(dres)
    within_ulp(got[0], rstd * (dxhat - means) + dres, terms, dtype, 1.0 if dtype != f32 else 16.0)
    for out, each in zip(got[1:], (dy64 * xhat, dy64)):
        bound = (np.abs(each) + np.abs(dy64 * size)).sum(0) * 2.0**-20  # f32 sums of up to 2**12 rows
        assert (np.abs(np.asarray(out, np.float64) - each.sum(0)) <= bound + 1e-6).all()


@pytest.mark.parametrize("dtype", [bf16, f16], ids=lambda d: d.__name__)
@pytest.mark.parametrize("shape", [(64, 4096), (37, 1001), (2, 65536)], ids=str)
def test_norm_weights_of_16_bits(shape, dtype, rng):
    """gamma and beta give the same bits in their own type and in f32."""
    x, *weights = norm_case(shape, bf16, False, rng)
    dy, weights = x[::-1], [w.astype(dtype) for w in weights]
    attrs = dict(eps=1e-5, rms=False, zero_centered=True, dtype=E4M3)
    fwd = jax.jit(lambda *w: norm_fwd(x, *w, None, None, jnp.float32(9.0), **attrs))
    bwd = jax.jit(lambda stats, g: norm_bwd(dy, x, *stats, g, None, rms=False, zero_centered=True)[0])
    for got, want in zip(fwd(*weights), fwd(*(w.astype(f32) for w in weights))):
        bits_equal(got, want)
    stats = fwd(*weights)[3:5]
    bits_equal(bwd(stats, weights[0]), bwd(stats, weights[0].astype(f32)))


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("h", [256, 1001, 8192])
def test_norm_not_finite(bad, h, rng):
    """A row with an inf or a NaN is NaN, and so is amax; other rows are as without it."""
    x, gamma, beta = norm_case((40, h), f32, False, rng)
    attrs = dict(eps=1e-5, rms=False, zero_centered=False, dtype=E4M3)
    run = jax.jit(lambda x: norm_fwd(x, gamma, beta, None, None, jnp.float32(9.0), **attrs))
    good, got = run(x), run(x.at[17, h // 2].set(bad))
    others = np.arange(40) != 17
    assert np.isnan(np.asarray(got[0])[17]).all() and np.isnan(got[5]) and np.float32(got[6]) == inverse_of(9)
    bits_equal(np.asarray(got[0])[others], np.asarray(good[0])[others])
    bits_equal(np.asarray(got[1])[others], np.asarray(good[1])[others])
    bits_equal(got[2], np.asarray(got[1]).T)


def test_norm_empty():
    for shape in ((0, 64), (64, 0)):
        x, weights = jnp.ones(shape, bf16), (jnp.ones(shape[1]), jnp.ones(shape[1]))
        attrs = dict(eps=1e-5, rms=False, zero_centered=False)
        y, data, data_t, mean, rstd, amax, scale_inv = jax.jit(
            lambda x: norm_fwd(x, *weights, None, None, jnp.float32(4), dtype=E4M3, **attrs)  # noqa: B023
        )(x)
        assert y.shape == data.shape == shape and float(amax) == 0.0 and np.isnan(rstd).all()
        assert float(scale_inv) == 0.25
        kind = dict(rms=False, zero_centered=False)
        grads = jax.jit(lambda x: norm_bwd(x, x, mean, rstd, weights[0], None, **kind))(x)  # noqa: B023
        assert grads[0].shape == shape and not np.asarray(grads[1]).any()


def test_rows_without_variance():
    """A constant row has xhat 0, also where its mean is large: no cancellation."""
    x = jnp.full((64, 4096), 1000.0, f32)
    operands, attrs = (jnp.ones(4096), jnp.zeros(4096), *[None] * 3), dict(eps=1e-6, rms=False, zero_centered=False)
    y = jax.jit(lambda x: norm_fwd(x, *operands, outputs=("y", "rstd"), dtype=E4M3, **attrs))(x)[0]
    np.testing.assert_array_equal(y, 0.0)  # 4096 * 1000 is exact in f32, and so is the mean


@pytest.mark.parametrize("interval,newest", [(1, False), (1, True), (3, False)])
@pytest.mark.parametrize("length", [1, 2, 5, 1024])
@pytest.mark.parametrize("margin,ulps,tensors", [(1.0, 0, 3), (1.5, 1, 32)])
def test_scale_update(length, interval, newest, margin, ulps, tensors, rng):
    """Comparisons and two divisions: bit for bit, but that XLA multiplies by the inverse of a constant, here 2**1.5.
    The reference on the CPU: on a GPU, XLA's division of f32 is off by up to 2 ulp."""
    amaxes = np.float32([0.0, 1e-37, 1e-30, 0.37, 3.0, 1e30, np.inf, np.nan])
    shape = tensors, len(amaxes)
    histories = np.abs(rng.standard_normal((*shape, length))).astype(np.float32)
    histories[..., 0] = -rng.integers(0, interval, shape)
    scales, fp8_max = np.float32(rng.uniform(1, 9, shape)), np.float32(rng.choice([448, 57344], tensors))
    state = *map(jnp.asarray, (scales, histories, np.tile(amaxes, (tensors, 1)))), jnp.asarray(fp8_max)
    attrs = dict(interval=interval, margin=margin, newest=newest)
    update = jax.jit(lambda *a: scaling.scale_update(*a, outputs=scaling.results_of(tensors), **attrs))
    got = update(*state)
    state = jax.device_put(state, jax.devices("cpu")[0])
    want = jax.jit(lambda *a: scaling._reference(*a, **attrs)[: 2 * tensors])(*state)
    for at in range(0, 2 * tensors, 2):
        np.testing.assert_array_max_ulp(got[at], want[at], ulps)
        np.testing.assert_array_equal(got[at + 1], want[at + 1])
    for at, kept in enumerate(jax.jit(update)(*state[:2], None, None)):
        np.testing.assert_array_equal(kept, (scales, histories)[at % 2][at // 2])
