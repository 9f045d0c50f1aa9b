"""Rotary positions against complex rotation in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from te_jax.ops.rope import rope


def reference(x, positions, windows, method):
    x = np.asarray(x, np.float64)
    d = x.shape[-1]
    angle = np.asarray(positions, np.float64)[..., None] / (
        windows[0] * (windows[1] / windows[0]) ** (2 * np.arange(d // 2) / d)
    )
    turn = np.exp(1j * angle)[..., None, :]
    first, second = (x[..., ::2], x[..., 1::2]) if method == "consecutive" else (x[..., : d // 2], x[..., d // 2 :])
    z = (first + 1j * second) * turn
    out = np.empty_like(x)
    if method == "consecutive":
        out[..., ::2], out[..., 1::2] = z.real, z.imag
    else:
        out[..., : d // 2], out[..., d // 2 :] = z.real, z.imag
    return out


@pytest.mark.parametrize("method", ["consecutive", "alternate"])
@pytest.mark.parametrize("windows", [(1, 10000), (2, 500.0)])
@pytest.mark.parametrize("positions", [None, "row", "batch"])
def test_rope(rng, method, windows, positions):
    x = jnp.asarray(rng.normal(size=(2, 33, 3, 10)), jnp.float32)
    at = {None: np.arange(33), "row": np.arange(33) + 7, "batch": rng.integers(0, 99, (2, 33))}[positions]
    got = rope(x, None if positions is None else jnp.asarray(at), windows=windows, group_method=method)
    # float32 angles up to 99: half an ulp of 99 is 4e-6.
    np.testing.assert_allclose(got, reference(x, at, windows, method), atol=2e-5)


def test_type_and_length_are_kept(rng):
    x = jnp.asarray(rng.normal(size=(2, 199, 1, 4)), jnp.bfloat16)
    got = rope(x)
    assert got.dtype == jnp.bfloat16 and got.shape == x.shape
    want = reference(x, np.arange(199), (1, 10000), "consecutive")
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=2**-8, atol=1e-4)
    norms = jnp.linalg.norm(rope(x.astype(jnp.float32)), axis=-1)
    np.testing.assert_allclose(norms, jnp.linalg.norm(x.astype(jnp.float32), axis=-1), rtol=1e-5)


def test_gradient_is_the_inverse_rotation(rng):
    x = jnp.asarray(rng.normal(size=(1, 9, 2, 6)), jnp.float32)
    _, vjp = jax.vjp(rope, x)
    np.testing.assert_allclose(vjp(rope(x))[0], x, atol=1e-5)


@pytest.mark.parametrize(
    ("shape", "kwargs", "error", "text"),
    [
        ((2, 4, 3, 5), {}, ValueError, "even d"),
        ((2, 4, 6), {}, ValueError, "b, s, h, d"),
        ((2, 4, 3, 6), {"group_method": "pairs"}, ValueError, "'pairs'"),
        ((2, 4, 3, 6), {"windows": (10, 1)}, ValueError, "0 < w0 < w1"),
        ((2, 4, 3, 6), {"positions": jnp.arange(5)}, ValueError, r"positions has shape \(5,\)"),
    ],
)
def test_errors(shape, kwargs, error, text):
    with pytest.raises(error, match=text):
        rope(jnp.ones(shape), **kwargs)
    with pytest.raises(TypeError, match="int32"):
        rope(jnp.ones((2, 4, 3, 6), jnp.int32))


def test_slots_of_a_joined_projection(rng):
    """The first slots are turned as by themselves, the others are as they were; and their gradients."""
    x, dy = (jnp.asarray(rng.normal(size=(2, 9, 3, 4, 6)), jnp.float32) for _ in range(2))
    at = jnp.asarray(rng.integers(0, 99, (2, 9)))
    y, vjp = jax.vjp(lambda x: rope(x, at, turned=2), x)
    (dx,) = vjp(dy)
    for slot in range(2):
        want, want_vjp = jax.vjp(lambda x: rope(x, at), x[:, :, slot])
        np.testing.assert_array_equal(y[:, :, slot], want)
        np.testing.assert_array_equal(dx[:, :, slot], want_vjp(dy[:, :, slot])[0])
    np.testing.assert_array_equal(y[:, :, 2], x[:, :, 2])
    np.testing.assert_array_equal(dx[:, :, 2], dy[:, :, 2])
    with pytest.raises(ValueError, match="turned is 4"):
        rope(x, turned=4)
