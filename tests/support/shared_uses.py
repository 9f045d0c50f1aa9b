"""Modules and losses that use one FP8 state several times."""

import jax.numpy as jnp
from flax import linen as nn
from jax import lax

import te_jax.flax as te_flax

L, N = 4, 3  # length of a history, uses of a state


class Dense(nn.Module):
    @nn.compact
    def __call__(self, x):
        return te_flax.DenseGeneral(16, name="dense")(x)


class RematTwice(nn.Module):
    """One instance, several calls, each a checkpoint of its own."""

    @nn.compact
    def __call__(self, xs):
        layer = nn.remat(Dense)(name="shared")
        return sum((i + 1.0) * layer(x) for i, x in enumerate(xs))


class JitTwice(nn.Module):
    @nn.compact
    def __call__(self, xs):
        layer = nn.jit(Dense)(name="shared")
        return sum((i + 1.0) * layer(x) for i, x in enumerate(xs))


class ScanShared(nn.Module):
    """All steps of a scan with the same weights and state."""

    @nn.compact
    def __call__(self, xs):
        body = lambda module, carry, x: (carry + x[1] * module(x[0]), None)
        scan = nn.scan(body, variable_broadcast=("params", "fp8_metas"), split_rngs={"params": False})
        return scan(Dense(name="shared"), jnp.zeros(xs.shape[1:]), (xs, jnp.arange(1.0, N + 1)))[0]


class Once(nn.Module):
    @nn.compact
    def __call__(self, x):
        return Dense(name="shared")(x)


def one_apply(module):
    return lambda variables, xs: jnp.sum(module.apply(variables, xs))


def several_applies(variables, xs):
    return sum((i + 1.0) * jnp.sum(Once().apply(variables, x)) for i, x in enumerate(xs))


def microbatches(variables, xs):
    """Gradient accumulation: a scan whose body is differentiated with the rest."""

    def body(total, x):
        return total + x[1] * jnp.sum(Once().apply(variables, x[0])), None

    return lax.scan(body, 0.0, (xs, jnp.arange(1.0, N + 1)))[0]


CASES = {
    "remat": (RematTwice(), one_apply(RematTwice())),
    "jit": (JitTwice(), one_apply(JitTwice())),
    "scan": (ScanShared(), one_apply(ScanShared())),
    "applies": (Once(), several_applies),
    "microbatches": (Once(), microbatches),
}
