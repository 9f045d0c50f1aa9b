"""What tests of functional layers share: states, data, and a dense layer in plain JAX whose operands go through FP8."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from arrays import on_device
from conftest import fp8_sum_error

from te_jax.state import fp8

TENSORS = ("x", "kernel", "grad")


def fresh_state(length=4):
    return {t: (jnp.ones(1), jnp.zeros(length)) for t in TENSORS}


def observed(state, recipe):
    return fp8.DenseMetas(*(fp8.observe(*state[t], recipe, "bwd" if t == "grad" else "fwd") for t in TENSORS))


def qdq(x, scale, dtype):
    """What FP8 makes of x."""
    top = float(jnp.finfo(dtype).max)
    narrow = jnp.clip(x.astype(jnp.float32) * scale, -top, top).astype(dtype)
    return jax.lax.optimization_barrier(narrow).astype(jnp.float32) / scale  # XLA might drop both casts


@partial(jax.jit, static_argnames=("recipe", "contract"))
def emulated(x, w, dy, scales, recipe, contract=1):
    """y, dx, dw of one dense layer in f32, on operands that went through FP8 where the recipe says so."""
    fwd, bwd = recipe.fp8_format.dtype("fwd"), recipe.fp8_format.dtype("bwd")
    q = dict(x=qdq(x, scales["x"], fwd), kernel=qdq(w, scales["kernel"], fwd), grad=qdq(dy, scales["grad"], bwd))
    wide = dict(x=x.astype(jnp.float32), kernel=w.astype(jnp.float32), grad=dy.astype(jnp.float32))
    fprop, dgrad, wgrad = (wide if high else q for high in recipe.override_linear_precision)
    lead, features = x.ndim - contract, w.ndim - contract
    y = jnp.tensordot(fprop["x"], fprop["kernel"], contract)
    axes = tuple(range(dy.ndim - features, dy.ndim)), tuple(range(contract, w.ndim))
    dx = jnp.tensordot(dgrad["grad"], dgrad["kernel"], axes)
    dw = jnp.tensordot(wgrad["x"], wgrad["grad"], (tuple(range(lead)),) * 2)
    return y, dx, dw


def close(got, want, dtype=jnp.float32):
    """f32: sums in another order, or of FP8 products on tensor cores. bf16: one rounding, 2**-8."""
    got, want = np.asarray(got, np.float32), np.asarray(want, np.float32)
    tolerance = fp8_sum_error() if dtype == jnp.float32 else 2.0**-8
    np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance * np.abs(want).max(initial=1e-6))


def data(rng, *shapes, dtype=jnp.float32):
    return [on_device(rng.standard_normal(s), dtype) for s in shapes]


def with_gradients(fn, *args, dy):
    """fn(*args) and its gradients by all of them, of one program; dy of f's results."""

    @jax.jit
    def run(args, dy):
        y, vjp = jax.vjp(fn, *args)
        return y, vjp(dy)

    return run(args, dy)


def reference_norm(x, gamma, beta, norm, zero_centered, eps=1e-6):
    mean = 0.0 if norm == "rmsnorm" else x.mean(-1, keepdims=True)
    y = (x - mean) / jnp.sqrt(((x - mean) ** 2).mean(-1, keepdims=True) + eps) * (gamma + zero_centered)
    return y if beta is None else y + beta
