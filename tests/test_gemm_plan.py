"""The GEMM beyond its op case: the operand c."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from te_jax.ops.gemm import gemm

E4M3 = jnp.dtype(jnp.float8_e4m3fn)
f32, bf16 = jnp.float32, jnp.bfloat16


def normal(rng, shape, dtype=f32):
    return jnp.asarray(rng.standard_normal(shape), f32).astype(dtype)


def test_c_is_added_in_f32_before_the_one_rounding(rng):
    lhs, rhs = normal(rng, (32, 64), E4M3), normal(rng, (48, 64), E4M3)
    product = np.asarray(lhs, np.float32) @ np.asarray(rhs, np.float32).T
    c = jnp.asarray(-product * (1 + 2.0**-7)).astype(bf16)  # cancels all but what a rounded product would lose
    got = gemm(lhs, rhs, jnp.float32(1), jnp.float32(1), c=c)
    np.testing.assert_array_equal(got, jnp.asarray(product + np.asarray(c, np.float32)).astype(bf16))


def test_c_has_a_gradient(rng):
    lhs, rhs, c, bias = (normal(rng, s, bf16) for s in ((3, 4, 8), (6, 8), (3, 4, 6), (6,)))
    weight = normal(rng, (3, 4, 6))
    ours = lambda lhs, rhs, bias, c: jnp.sum(weight * gemm(lhs, rhs, bias=bias, c=c))
    plain = lambda lhs, rhs, bias, c: jnp.sum(weight * (lhs.astype(f32) @ rhs.astype(f32).T + bias + c))
    for got, want in zip(*(jax.grad(f, (0, 1, 2, 3))(lhs, rhs, bias, c) for f in (ours, plain))):
        assert got.dtype == bf16
        np.testing.assert_allclose(got.astype(f32), want.astype(f32), rtol=2e-2, atol=2e-2)


def test_c_of_another_type_is_an_error():
    x = jnp.ones((16, 16), bf16)
    with pytest.raises(TypeError, match="te_gemm: c is float32, but out is bfloat16; pass c in the type of out"):
        gemm(x, x, c=jnp.ones((16, 16)))
    with pytest.raises(ValueError, match="te_gemm"):
        gemm(x, x, c=jnp.ones((16, 8), bf16))
