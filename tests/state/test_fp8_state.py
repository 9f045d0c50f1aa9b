"""FP8 state that no module reads: it is told, and what was learned stays. What a training state refuses."""

import contextlib
import warnings
from functools import partial

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import te_jax as te
import te_jax.flax as te_flax
from te_jax.recipe import DelayedScaling

L = 4
RECIPE = DelayedScaling(amax_history_len=L)
X = jnp.ones((4, 16))


class Two(nn.Module):
    @nn.compact
    def __call__(self, x, both=True):
        y = te_flax.DenseGeneral(16, name="first")(x)
        return te_flax.DenseGeneral(16, name="second")(y) if both else y


def learned(model=None, **options):
    """(params, FP8 state that has learned: scales of 4.9e6)."""
    with te.autocast(recipe=RECIPE):
        variables = (model or Two()).init(jax.random.key(0), X, **options)
    fill = lambda path, a: jnp.full_like(a, 4.9e6) if path[-1].key.endswith("scale") else a.at[1:].set(448 / 4.9e6)
    fp8 = jax.tree_util.tree_map_with_path(fill, {"fp8_metas": variables.pop("fp8_metas")})
    return variables["params"], fp8


def loss(params, fp8, **options):
    return jnp.sum(Two().apply({"params": params, **fp8}, X, **options))


def told(call, *args, **kwargs) -> tuple:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        out = call(*args, **kwargs)
    return out, [str(w.message) for w in caught if issubclass(w.category, UserWarning)]


def assert_same(got, want):
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_autocast_is_absent_where_the_call_is_traced():
    """`with` only around `jax.jit`: nothing is traced within."""
    params, fp8 = learned()
    with te.autocast(recipe=RECIPE):
        step = jax.jit(jax.grad(loss, argnums=1))
    new, (text,) = told(step, params, fp8)
    assert "DenseGeneral `first`: there is FP8 state" in text and "te_jax.autocast(True, recipe)" in text
    assert_same(jax.jit(te.update_fp8_metas)(new, previous=fp8), fp8)
    assert_same(te.update_fp8_metas(new, fp8), fp8)  # as one argument after the other
    _, (text,) = told(te.update_fp8_metas, new)
    assert "state of first/grad and 5 more is 0" in text and "previous=" in text
    with te.autocast(False):
        assert told(jax.jit(loss), params, fp8)[1] == []
    with te.autocast(recipe=DelayedScaling(amax_history_len=L, exclude=("first", "second"))):
        assert told(jax.jit(loss), params, fp8)[1] == []


@pytest.mark.parametrize("block", [contextlib.nullcontext, partial(te.autocast, False)])
def test_a_jitted_step_that_would_lose_the_state_says_so(block):
    """Tracers show no zeros. A loop under one autocast hears nothing."""
    params, fp8 = learned()

    def step(params, fp8, **before):
        with te.autocast(False):
            return te.update_fp8_metas(jax.grad(loss, argnums=1)(params, fp8), **before)

    def told_of(step, *args, **kwargs):
        return told(jax.eval_shape, step, *args, **kwargs)[1]

    with block():
        texts = told_of(te.update_fp8_metas, fp8) + told_of(step, params, fp8)
        assert len(texts) == 2 and all("no recipe is in force" in text and "pass previous=" in text for text in texts)
        assert told_of(step, params, fp8, previous=fp8) == told_of(te.update_fp8_metas, fp8, fp8) == []
        assert told_of(te.update_fp8_metas, {"cache": X}) == told_of(te.update_fp8_metas, {"fp8_metas": {}}) == []
    with te.autocast(recipe=RECIPE):
        assert told_of(lambda *args: te.update_fp8_metas(jax.grad(loss, argnums=1)(*args)), params, fp8) == []


def test_part_of_the_modules_is_not_called():
    params, fp8 = learned()
    with te.autocast(recipe=RECIPE):
        new = jax.jit(jax.grad(partial(loss, both=False), argnums=1))(params, fp8)
        kept = te.update_fp8_metas(new, previous=fp8)
        assert_same(kept["fp8_metas"]["second"], fp8["fp8_metas"]["second"])
        assert_same(kept["fp8_metas"]["first"], new["fp8_metas"]["first"])
        assert float(kept["fp8_metas"]["first"]["x_amax_history"][-1]) == 1
        _, (text,) = told(te.update_fp8_metas, new)
        assert "second/grad and 2 more" in text
        of_te, texts = told(te.value_and_grad(partial(loss, both=False), argnums=1), params, fp8)
    assert_same(of_te[1], kept)
    assert len(texts) == 1 and "no module reads the FP8 state fp8_metas/second/grad and 2 more" in texts[0]


def test_of_stacked_layers_each_is_kept():
    scale, history = jnp.asarray([[2.0], [3.0]]), jnp.asarray([[0.0, 1, 1, 1], [0, 2, 2, 2]])
    old = {"fp8_metas": {"x_scale": scale, "x_amax_history": history}}
    new = {"fp8_metas": {"x_scale": scale.at[0].set(0), "x_amax_history": history.at[0].set(0)}}
    assert_same(te.update_fp8_metas(new, previous=old), old)
    assert_same(te.update_fp8_metas(flax.core.freeze(new), previous=old), flax.core.freeze(old))


def test_value_and_grad_outside_of_autocast_keeps_the_state():
    params, fp8 = learned()
    for block in (te.autocast(False), te.autocast(recipe=te.recipe.Float8CurrentScaling())):
        with block:
            (_, new), texts = told(te.value_and_grad(loss, argnums=1), params, fp8)
        assert_same(new, fp8)
        assert texts == []


def test_training_state_keeps_it():
    params, fp8 = learned()
    state = te_flax.TrainState.create(apply_fn=None, params=params, tx=optax.sgd(0.1), collections=fp8)

    @jax.jit
    def step(state):
        with te.autocast(False):
            return state.apply_gradients(grads=jax.grad(loss, argnums=(0, 1))(state.params, state.fp8))

    assert_same(step(state).fp8, fp8)


def test_a_lawful_step_that_looks_like_a_sum_is_one():
    """Histories of 2, amaxes 4, 1, 2: scale and history are then twice what they were before."""
    recipe = DelayedScaling(amax_history_len=2)
    fresh = {"fp8_metas": {f"x{end}": jnp.asarray(leaf) for end, leaf in recipe.fresh_state().items()}}
    fields = dict(apply_fn=None, params={"w": jnp.ones(1)}, tx=optax.sgd(0.0))
    state = te_flax.TrainState.create(**fields, collections=fresh)
    law = jax.jit(partial(recipe.new_state, fp8_max=448.0))

    @jax.jit
    def step(state, scale, history):
        fp8 = {"fp8_metas": {"x_scale": scale, "x_amax_history": history}}
        return state.apply_gradients(grads=({"w": jnp.zeros(1)}, fp8))

    pair = recipe.fresh_state().values()
    with te.autocast(recipe=recipe):
        for amax in np.float32([4, 1, 2, 4, 8, 1, 2]):
            pair = law(*pair, amax)
            state = step(state, *pair)
            assert_same(tuple(state.fp8["fp8_metas"][f"x{end}"] for end in recipe.fresh_state()), tuple(pair))


def test_parameters_hold_no_fp8_state():
    with te.autocast(recipe=RECIPE):
        variables = Two().init(jax.random.key(0), X)
    for params in (variables, {"model": flax.core.freeze(variables)}):
        with pytest.raises(ValueError, match=r"params holds FP8 state \((model/)?fp8_metas\).*collections="):
            te_flax.TrainState.create(apply_fn=None, params=params, tx=optax.sgd(0.1))


def test_floats_are_traced_and_what_compiles_often_is_told():
    traced = []

    def scaled(x, factor, power=2):
        traced.append(factor)
        return jnp.sum(x**power) * factor

    grad = te.value_and_grad(scaled)
    values = [float(grad(jnp.ones(2), factor)[0]) for factor in (0.5, 2.0, -0.0, 0.0, float("inf"))]
    assert values == [1, 4, 0, 0, np.inf] and np.signbit(values[2]) and not np.signbit(values[3]) and len(traced) == 1
    assert grad(jnp.ones(2, jnp.bfloat16), 0.5)[0].dtype == jnp.bfloat16  # a float's type gives way, as under jax.jit
    compiled = lambda: [grad(jnp.ones(2), 1.0, power=power) for power in range(3, 12)]
    _, (text,) = told(compiled)
    assert "scaled was compiled for 8 values of its static arguments, the last 9" in text and "jnp.asarray" in text
    with pytest.raises(TypeError, match="an argument of scaled is .*; pass an array"):
        grad(jnp.ones(2), {1, 2})


def test_a_missing_leaf_is_mended_beside_previous():
    """Which lacks it too."""
    state = {"fp8_metas": {"x_amax_history": jnp.asarray([0.0, 2.0])}}
    with pytest.warns(UserWarning, match="fp8_metas has no x_scale; it is restored"):
        new = te.update_fp8_metas(state, previous=state)["fp8_metas"]
    assert new["x_scale"] == 448 / 2
