"""What tests of training states share: a small network, its states, its loss and its training step."""

from functools import cache, partial

import flax
import jax
import jax.numpy as jnp
import numpy as np
from arrays import on_device
from flax import linen as nn

import te_jax as te
import te_jax.flax as te_flax
from te_jax.recipe import DelayedScaling

L, K = 4, 3  # length of a history, microbatches
RECIPE = DelayedScaling(amax_history_len=L)


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        return te_flax.DenseGeneral(4, name="second")(nn.gelu(te_flax.DenseGeneral(16, name="first")(x)))


def data(*shape, seed=0):
    return on_device(np.random.default_rng(seed).normal(size=shape), jnp.float32)


NET = Net()  # one, for states of which jax asks whether they have the same structure
initial = cache(lambda module: jax.jit(module.init))


def create(tx, recipe=RECIPE, module=NET, width=16):
    with te.autocast(recipe is not None, recipe):
        others, params = flax.core.pop(nn.meta.unbox(initial(module)(jax.random.key(0), data(8, width))), "params")
        return te_flax.TrainState.create(apply_fn=module.apply, params=params, tx=tx, collections=others)


def loss_fn(params, fp8, x):
    return jnp.mean(NET.apply({"params": params, **fp8}, x) ** 2)


def make_step(recipe=RECIPE, value_and_grad=te.value_and_grad, loss_fn=loss_fn, **options):
    @partial(jax.jit, **options)
    def step(state, x):
        with te.autocast(recipe is not None, recipe):
            loss, grads = value_and_grad(loss_fn, argnums=(0, 1))(state.params, state.fp8, x)
            return state.apply_gradients(grads=grads), loss

    return step


def close(got, want, rtol=1e-5, atol=1e-6):
    jax.tree.map(partial(np.testing.assert_allclose, rtol=rtol, atol=atol), got, want)


def newest(fp8, tensor="x", layer="first"):
    return float(fp8["fp8_metas"][layer][f"{tensor}_amax_history"][-1])
