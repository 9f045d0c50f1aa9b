"""What an NNX module says of FP8 state that nobody moves, and of what its gradient cannot pass through."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import te_jax as te
import te_jax.nnx as te_nnx
from te_jax.recipe import DelayedScaling

RECIPE = DelayedScaling(amax_history_len=4)
X = jnp.ones((4, 16))


def loss_of(model, x):
    return jnp.sum(model(x))


@pytest.fixture(scope="module")
def model():
    with te.autocast(recipe=RECIPE):
        return te_nnx.DenseGeneral(16, 16, rngs=nnx.Rngs(0))


def told(call) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(w.message) for w in caught if issubclass(w.category, UserWarning)]


def test_gradients_that_leave_fp8_state_as_it_is(model):
    def within(f, *args):
        with te.autocast(recipe=RECIPE):
            return f(*args)

    (text,) = told(lambda: within(nnx.value_and_grad(loss_of), model, X))
    assert "DenseGeneral" in text and "te_jax.nnx.value_and_grad" in text
    assert told(lambda: within(te_nnx.value_and_grad(loss_of), model, X)) == []
    assert told(lambda: within(loss_of, model, X)) == []  # no gradient
    assert told(lambda: within(jax.grad(lambda x: loss_of(model, x)), X)) == []  # of the inputs only


def test_an_optimizer_that_takes_fp8_state_for_parameters(model):
    of_all = lambda: nnx.value_and_grad(loss_of, argnums=nnx.DiffState(0, nnx.Variable))(model, X)
    with te.autocast(recipe=RECIPE):
        (text,) = told(of_all)
    assert "DenseGeneral: gradients of the FP8 state" in text and "nnx.Optimizer(wrt=nnx.Param)" in text


def test_state_without_autocast(model):
    (text,) = told(lambda: model(X))
    assert "DenseGeneral: there is FP8 state" in text and "te_jax.autocast(False)" in text
    with te.autocast(False):
        assert told(lambda: model(X)) == []


def test_slices_of_state(model):
    """They need `te_jax.value_and_grad`, which traces the function first."""

    def loss(model, x):
        graph, state = nnx.split(model)
        both = jax.tree.map(lambda a: jnp.stack([a, a]), state)
        return loss_of(nnx.merge(graph, jax.tree.map(lambda a: a[0], both)), x)

    with te.autocast(recipe=RECIPE), pytest.raises(TypeError, match="te_jax.nnx.value_and_grad: FP8 state is"):
        te_nnx.value_and_grad(loss)(model, X)


class Scaled(te_nnx.DenseGeneral):
    """A user's module, with a parameter of its own."""

    def __init__(self, *args, rngs, **fields):
        super().__init__(*args, rngs=rngs, **fields)
        self.gain = nnx.Param(jnp.full(8, 2.0))

    def __call__(self, inputs):
        return super().__call__(inputs) * self.gain[...]


def test_parameters_of_a_subclass_are_not_the_linen_modules(recwarn, monkeypatch):
    monkeypatch.setattr("te_jax.core.check.told", set())
    layer, x = Scaled(4, features=8, rngs=nnx.Rngs(0)), jnp.ones((2, 4))
    want = te_nnx.DenseGeneral(4, features=8, rngs=nnx.Rngs(0))(x)
    np.testing.assert_array_equal(layer(x), 2 * want)
    gradient = nnx.grad(lambda layer: layer(x).sum())(layer)
    np.testing.assert_array_equal(gradient.gain[...], want.sum(0))
    assert not recwarn
