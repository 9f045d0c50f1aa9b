"""What tests of CUDA kernels share: operands with odd values, and equality bit for bit."""

import jax
import numpy as np


def bits_equal(got, want):
    """Bit for bit; a NaN equals any NaN."""
    got, want = np.asarray(got), np.asarray(want)
    nan = np.isnan(want.astype(np.float32))
    assert (np.isnan(got.astype(np.float32)) == nan).all()
    raw = f"u{want.itemsize}"
    differ = (got.view(raw) != want.view(raw)) & ~nan
    assert not differ.any(), f"{differ.sum()} of {differ.size} differ, first at {np.argwhere(differ)[:3].tolist()}"


def odd_values(rng, shape, dtype):
    """Normal data over many binades, with zeros, an inf and a NaN where there is room."""
    x = rng.standard_normal(shape) * np.exp2(rng.integers(-12, 12, shape))
    x[rng.random(shape) < 0.05] = 0.0
    return jax.device_put(x.astype(np.float32).astype(dtype))


def activation_case(names, shape, dtype, rng):
    x = (rng.standard_normal((shape[0], len(names), shape[1])) * 4).astype(np.float32).astype(dtype)
    x[: shape[0] // 3, :, : shape[1] // 3] *= np.array(8, dtype)  # saturated
    x[shape[0] // 2] = 0
    dy = rng.standard_normal(shape).astype(np.float32).astype(dtype)
    return jax.device_put(dy), jax.device_put(x), np.float32(rng.uniform(1, 30))


def rel(got, want):
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return np.linalg.norm(got - want) / np.linalg.norm(want)
