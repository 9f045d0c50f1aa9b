"""`te_jax.value_and_grad`: the uses of one FP8 state combine by max wherever autodiff adds up their cotangents."""

from functools import cache, partial

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import on_device
from flax import linen as nn
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from quick_init import quick_init
from shared_uses import CASES, L, N, Once, several_applies
from states import state_of

import te_jax as te
import te_jax.flax as te_flax
from te_jax.recipe import DelayedScaling

RECIPE = DelayedScaling(amax_history_len=L)
FACTORS = jnp.asarray([2.0, 7.0, 3.0])  # the second use has the largest amax


def inputs(seed=0):
    return on_device(np.random.default_rng(seed).normal(size=(N, 8, 16)), jnp.float32) * FACTORS[:, None, None]


def start(module, xs):
    """Variables of `module`, with a state of some history so that a sum would show in every slot."""
    variables = nn.meta.unbox(quick_init(module.init)(jax.random.key(0), xs[0] if isinstance(module, Once) else xs))
    older = jnp.asarray([0.0, 1.0, 0.5, 2.0])
    fill = lambda path, leaf: older if path[-1].key.endswith("_history") else leaf
    variables["fp8_metas"] = jax.tree_util.tree_map_with_path(fill, variables["fp8_metas"])
    return flax.core.pop(variables, "fp8_metas")


def expected(amax, fp8_max):
    return {"scale": [fp8_max / max(amax, 2.0)], "amax_history": [0.0, 0.5, 2.0, amax]}


def assert_state(metas, tensor, amax, fp8_max):
    for leaf, want in expected(amax, fp8_max).items():
        np.testing.assert_allclose(metas["shared"]["dense"][f"{tensor}_{leaf}"], want, rtol=1e-6, err_msg=tensor)


def check(metas, params, xs):
    assert_state(metas, "x", float(jnp.abs(xs).max()), 448)
    assert_state(metas, "kernel", float(jnp.abs(params["params"]["shared"]["dense"]["kernel"]).max()), 448)
    assert_state(metas, "grad", float(N), 57344)


def objective(case):
    return lambda params, metas, xs: CASES[case][1]({**params, "fp8_metas": metas["fp8_metas"]}, xs)


@cache
def by_plain_autodiff(case):
    """(parameters and state, the loss and its gradients by both) of a case."""
    with te.autocast(True, RECIPE):
        params, metas = start(CASES[case][0], inputs())
        plain = jax.jit(jax.value_and_grad(objective(case), (0, 1)))
        return (params, metas), plain(params, {"fp8_metas": metas}, inputs())


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("case", CASES)
def test_all_uses_combine_by_max(case, jit):
    xs = inputs()
    (params, metas), (want_value, (want_params, summed)) = by_plain_autodiff(case)
    with te.autocast(True, RECIPE):
        grad = te.value_and_grad(objective(case), argnums=(0, 1))
        value, (dparams, new) = (jax.jit(grad) if jit else grad)(params, {"fp8_metas": metas}, xs)
    check(new["fp8_metas"], params, xs)
    np.testing.assert_allclose(value, want_value, rtol=1e-6)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-4), dparams, want_params)
    # And plain autodiff does add up here: the test would see it.
    assert float(summed["fp8_metas"]["shared"]["dense"]["x_amax_history"][-2]) == N * 2.0


def test_equals_plain_autodiff_where_nothing_is_used_twice():
    """Layers stacked by nn.scan, remat inside, three steps: the same bits by both ways."""

    class Stack(nn.Module):
        @nn.compact
        def __call__(self, x):
            body = nn.remat(lambda module, carry, _: (module(carry)[0], None))
            axes = {"params": 0, "fp8_metas": 0}
            scan = nn.scan(body, variable_axes=axes, split_rngs={"params": True}, length=2,
                           metadata_params={nn.PARTITION_NAME: "layers"})  # fmt: skip
            return scan(te_flax.LayerNormMLP(24, name="mlp"), x, None)[0]

    x = inputs()[0]
    states = []
    for value_and_grad in (jax.value_and_grad, te.value_and_grad):
        with te.autocast(True, RECIPE):
            state, params = flax.core.pop(nn.meta.unbox(quick_init(Stack().init)(jax.random.key(0), x)), "params")
            step = value_and_grad(lambda p, s, x: jnp.sum(Stack().apply({"params": p, **s}, x) ** 2), (0, 1))
            for i in range(3):
                value, (grads, state) = jax.jit(step)(params, state, (i + 1) * x)
        states.append((value, grads, state))
    jax.tree.map(np.testing.assert_array_equal, *states)
    assert float(states[1][2]["fp8_metas"]["mlp"]["grad_1_amax_history"][0, -1]) > 0


def test_unused_and_not_finite_states_are_kept():
    with te.autocast(True, RECIPE):
        params, metas = start(Once(), inputs())
        other = jax.tree.map(lambda a: a, metas)
        both = {"fp8_metas": {**metas, "unused": other["shared"]}}

        def loss(params, state, xs):
            return several_applies({**params, **state}, xs)

        grad = te.value_and_grad(loss, (0, 1))
        _, (_, new) = jax.jit(grad)(params, both, inputs().at[1, 0, 0].set(jnp.nan))
    jax.tree.map(np.testing.assert_array_equal, new["fp8_metas"]["unused"], other["shared"])
    dense = new["fp8_metas"]["shared"]["dense"]
    np.testing.assert_array_equal(dense["x_amax_history"], [0, 1, 0.5, 2])  # one bad use spoils the step, not the state
    np.testing.assert_array_equal(dense["x_scale"], 1)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_sharded_batch(kind):
    """One state on eight devices: as on one, and by shard_map as without it."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))
    xs = inputs()
    with te.autocast(True, RECIPE):
        params, metas = start(Once(), xs)
        objective = lambda params, metas, xs: several_applies({**params, "fp8_metas": metas["fp8_metas"]}, xs)
        with jax.set_mesh(mesh):
            sharded = jax.device_put(xs, jax.NamedSharding(mesh, P(None, "data")))
            _, (_, new) = jax.jit(te.value_and_grad(objective, (0, 1)))(params, {"fp8_metas": metas}, sharded)
            check(new["fp8_metas"], params, xs)

            @partial(jax.shard_map, in_specs=(P(), P(), P(None, "data")), out_specs=P())
            def mapped(params, metas, xs):
                _, (_, new) = te.value_and_grad(objective, (0, 1))(params, {"fp8_metas": metas}, xs)
                return new["fp8_metas"]

            check(jax.jit(mapped)(params, metas, sharded), params, xs)


def test_static_arguments_aux_and_argnums():
    calls = []

    def loss(x, variables, flag, *, power):
        calls.append(flag)
        y = Once().apply(variables, x)
        return jnp.sum(y**power if flag else y), y.shape[0]

    with te.autocast(True, RECIPE):
        params, metas = start(Once(), inputs())
        variables = {**params, "fp8_metas": metas}
        grad = te.value_and_grad(loss, argnums=1, has_aux=True)
        for flag in (True, False, True):
            (_, rows), new = grad(inputs()[0], variables, flag, power=2)
    assert calls == [True, False] and rows == 8
    assert set(new) == {"params", "fp8_metas"} and float(jnp.abs(new["params"]["shared"]["dense"]["bias"]).max()) > 0


def test_outside_autocast_and_wrong_length():
    with te.autocast(True, RECIPE):
        _, metas = start(Once(), inputs())
    collections = flax.core.freeze({"fp8_metas": metas, "cache": {}})
    assert te.combine_by_max(collections) is collections
    with te.autocast(True, RECIPE):
        assert te.combine_by_max({"cache": {}}) == {"cache": {}}
        assert isinstance(jax.eval_shape(te.combine_by_max, collections), flax.core.FrozenDict)
    with te.autocast(True, DelayedScaling(amax_history_len=8)):
        with pytest.raises(
            ValueError, match=r"fp8_metas/shared/dense/\w+_amax_history has length 4.*convert_fp8_metas"
        ):
            te.combine_by_max(collections)


def test_static_arguments_that_are_equal_but_not_the_same():
    def loss(x, p):  # a float is traced, so it is no float here
        return jnp.sum(x) * (2.0 if isinstance(p, bool) else 5.0 if isinstance(p, int) else jnp.copysign(3.0, p))

    grad = te.value_and_grad(loss)
    assert [float(grad(jnp.ones(1), p)[0]) for p in (1, True, 1.0, 0, 0.0, -0.0)] == [5, 2, 3, 5, 3, -3]
    assert float(te.value_and_grad(loss, np.int64(0))(jnp.ones(1), 1)[1][0]) == 5


def test_a_state_in_aux_is_as_it_is_stored():
    """Flax's usual mutable=...: what comes back can be fed to the next step."""

    def loss(variables, x):
        y, updated = Once().apply(variables, x, mutable=["fp8_metas"])
        return jnp.sum(y), updated

    with te.autocast(True, RECIPE):
        params, metas = start(Once(), inputs())
        grad = te.value_and_grad(loss, has_aux=True)
        (_, aux), _ = grad({**params, "fp8_metas": metas}, inputs()[0])
        jax.tree.map(np.testing.assert_array_equal, aux["fp8_metas"], metas)
        grad({**params, **te.update_fp8_metas(aux)}, inputs()[0])


def test_the_states_of_a_model_are_one_kernel():
    """The law for all tensors, and what `update_fp8_metas` and `TrainState` make of them: one launch each, and one more
    for each 32 tensors."""
    recipe, x = DelayedScaling(amax_history_len=4), jnp.ones((16, 16))

    def calls(layers):
        model = nn.Sequential([te_flax.DenseGeneral(16, name=f"dense_{i}") for i in range(layers)])
        state = jax.eval_shape(lambda: state_of(model, recipe, x))

        def step(state, x):
            with te.autocast(True, recipe):
                loss = lambda params, fp8: jnp.sum(model.apply({"params": params, **fp8}, x))
                _, grads = te.value_and_grad(loss, argnums=(0, 1))(state.params, state.fp8)
                return grads[1], state.apply_gradients(grads=grads)

        lowered = jax.jit(step).trace(state, x).lower(lowering_platforms=("cuda",))
        return lowered.as_text().count("custom_call @te_scale_update(")

    assert calls(2) == 2  # 6 tensors
    assert calls(11) == 4  # 33 tensors
