"""`te_jax.nnx.DotGeneral` in the modules of Flax NNX, and the arguments of `nnx.Linear` at `te_jax.nnx.Linear`."""

import inspect
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import division_error
from flax import linen as nn
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from states import data

import te_jax as te
import te_jax.flax as te_flax
import te_jax.nnx as te_nnx
from te_jax import recipe
from te_jax.core import check

RNG = np.random.default_rng(0)
DELAYED = recipe.DelayedScaling(amax_history_len=4)


def rngs():
    return nnx.Rngs(0)


# -- the product in the modules of Flax ---------------------------------------------------------------------------


class Mlp(nnx.Module):
    def __init__(self, make=None):
        self.wi = nnx.Linear(16, 32, rngs=nnx.Rngs(0), **({"dot_general": make()} if make else {}))
        self.wo = nnx.LinearGeneral((32,), (2, 8), rngs=nnx.Rngs(1), dot_general=make() if make else None)

    def __call__(self, x):
        return self.wo(jnp.sin(self.wi(x)))


class LinenMlp(nn.Module):
    @nn.compact
    def __call__(self, x):
        y = nn.Dense(32, dot_general_cls=te_flax.DotGeneral, name="wi")(x)
        return nn.DenseGeneral((2, 8), dot_general_cls=te_flax.DotGeneral, name="wo")(jnp.sin(y))


@pytest.mark.parametrize(
    "rule", [DELAYED, recipe.Float8CurrentScaling(), recipe.Float8BlockScaling()], ids=lambda rule: type(rule).__name__
)
def test_numbers_are_those_of_linen(rule):
    x = data(RNG, 4, 16)
    loss = lambda y: jnp.mean(y**2)
    with te.autocast(recipe=rule):
        model = Mlp(te_nnx.DotGeneral)
        assert bool(nnx.state(model, te_nnx.Fp8State)) == rule.has_state
        params = te_nnx.to_linen(model)["params"]
        linen, fresh = LinenMlp(), te_nnx.to_linen(model).get("fp8_metas", {})

        @jax.jit
        def of_linen(params, fresh):
            state = {name: {"DotGeneral_0": node["dot_general"]} for name, node in fresh.items()}
            of = lambda params, state: loss(linen.apply({"params": params, "_overwrite_with_gradient": state}, x))
            return te.value_and_grad(of, (0, 1))(params, state)

        want, (grads, state) = of_linen(params, fresh)
        got, of_nnx = te_nnx.value_and_grad(lambda model, x: loss(model(x)))(model, x)
    np.testing.assert_array_equal(got, want)
    jax.tree.map(np.testing.assert_array_equal, nnx.to_pure_dict(of_nnx), grads)
    after = te_nnx.to_linen(model).get("fp8_metas", {})
    after = {name: {"DotGeneral_0": node["dot_general"]} for name, node in after.items()}
    for (path, a), b in zip(jax.tree.leaves_with_path(after), jax.tree.leaves(state), strict=True):
        is_scale = jax.tree_util.keystr(path).endswith("scale']")
        np.testing.assert_allclose(a, b, rtol=division_error() if is_scale else 0)


def test_state_moves_or_says_so():
    x, steps = data(RNG, 4, 16), []
    with te.autocast(recipe=DELAYED):
        model = Mlp(te_nnx.DotGeneral)
        step = te_nnx.value_and_grad(lambda model, x: jnp.mean(model(x) ** 2))
        for k in (1, 2):
            step(model, k * x)
            steps.append(float(model.wi.dot_general.x_amax_history[-1]))
        assert steps == [float(jnp.max(jnp.abs(x))), 2 * float(jnp.max(jnp.abs(x)))]
        with pytest.warns(UserWarning, match="DotGeneral: gradients of parameters are taken, but not of the FP8 state"):
            nnx.jit(nnx.value_and_grad(lambda model, x: jnp.mean(model(x) ** 2))).eval_shape(model, x)
        late = Mlp()
        for _, module in nnx.iter_modules(late):
            if isinstance(module, nnx.Linear | nnx.LinearGeneral):
                module.dot_general = nnx.data(te_nnx.DotGeneral())
        nnx.update(late, nnx.state(model))
        np.testing.assert_array_equal(late(x), model(x))
    with te.autocast(recipe=recipe.DelayedScaling(amax_history_len=7)):
        te_nnx.convert_fp8_state(late, recipe.DelayedScaling(amax_history_len=7))(x)
    with te.autocast(recipe=DELAYED), pytest.raises(ValueError, match="no FP8 state x_scale"):
        with te.autocast(False):
            stateless = Mlp(te_nnx.DotGeneral)
        stateless(x)
    own = nnx.Linear(16, 8, dot_general=te_nnx.DotGeneral(DELAYED), rngs=rngs())
    with pytest.raises(ValueError, match="DotGeneral: recipe is DelayedScaling.*, which has state, but no te_jax.auto"):
        own(x)
    with te.autocast(recipe=DELAYED):
        narrow = own(x)
    with te.autocast(False):
        assert (own(x) != narrow).any()
    fixed = nnx.Linear(16, 8, dot_general=te_nnx.DotGeneral(recipe.FixedScaling()), rngs=rngs())
    assert (fixed(x) != nnx.Linear(16, 8, rngs=rngs())(x)).any()


def test_layers_in_a_scan():
    """Each has a state of its own; the collection that an autocast says is only Linen's."""
    with te.autocast(recipe=DELAYED, collection="_overwrite_with_gradient"):

        @nnx.vmap(in_axes=0, out_axes=0)
        def make(key):
            return nnx.Linear(16, 16, dot_general=te_nnx.DotGeneral(), rngs=nnx.Rngs(key))

        layers = make(jax.random.split(jax.random.key(0), 3))

        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        def forward(layer, x):
            return 2 * layer(x)

        x = data(RNG, 4, 16)
        te_nnx.value_and_grad(lambda layers, x: jnp.mean(forward(layers, x) ** 2))(layers, x)
    amaxes = np.asarray(layers.dot_general.x_amax_history)[:, -1]
    assert amaxes[0] == jnp.max(jnp.abs(x)) and len(set(amaxes.tolist())) == 3


def test_a_linen_module_in_the_bridge():
    """Its state has the type that loops which split a model by `_overwrite_with_gradient` look for."""
    x, cls = data(RNG, 4, 16), te_flax.make_dot_general_cls(DELAYED)
    model = nnx.bridge.ToNNX(nn.Dense(8, dot_general_cls=cls), rngs=rngs()).lazy_init(x)
    of_state = nnx.variable_type_from_name("_overwrite_with_gradient", allow_register=True)
    graphdef, params, state, rest = nnx.split(model, nnx.Param, of_state, ...)

    @jax.jit
    @partial(jax.grad, argnums=(0, 1))
    def grads(params, state):
        return jnp.mean(nnx.merge(graphdef, params, state, rest, copy=True)(x) ** 2)

    nnx.update(model, grads(params, state)[1])
    (history,) = (leaf for path, leaf in jax.tree.leaves_with_path(nnx.state(model)) if "x_amax" in str(path))
    assert history[-1] == jnp.max(jnp.abs(x))
    grad = te_nnx.value_and_grad(lambda model: jnp.mean(model(x) ** 2))
    check.told.clear()
    with pytest.warns(UserWarning, match="FP8 state of the type _overwrite_with_gradient.* stays as it is; make"):
        grad(model)
    with te.autocast(recipe=DELAYED, collection="fp8_metas"):
        model = nnx.bridge.ToNNX(nn.Dense(8, dot_general_cls=cls), rngs=rngs()).lazy_init(x)
        grad(model)
    (history,) = (leaf for path, leaf in jax.tree.leaves_with_path(nnx.state(model)) if "x_amax" in str(path))
    assert history[-1] == jnp.max(jnp.abs(x))


# -- te_jax.nnx.Linear with the arguments of nnx.Linear -----------------------------------------------------------


def test_arguments_of_nnx_linear():
    """What `nnx.Linear` would compute, with its variables."""
    x = data(RNG, 4, 16).astype(jnp.bfloat16)
    for options, dtypes in (
        (dict(param_dtype=jnp.bfloat16), (jnp.bfloat16, jnp.bfloat16)),
        (dict(param_dtype=jnp.float32, dtype=jnp.bfloat16), (jnp.float32, jnp.bfloat16)),
        (dict(dtype=None, use_bias=False), (jnp.float32, jnp.bfloat16)),
        (dict(param_dtype=jnp.bfloat16, dtype=jnp.float32, use_bias=False), (jnp.bfloat16, jnp.float32)),
    ):
        of_flax = nnx.Linear(16, 8, rngs=rngs(), **options)
        ours = te_nnx.Linear(in_features=16, out_features=8, rngs=rngs(), **options)
        nnx.update(ours, nnx.state(of_flax))
        assert (ours.kernel.dtype, ours(x).dtype) == dtypes
        if options.get("dtype", x.dtype):  # None is what the parameters promote to, there
            got, want = (module(x).astype(jnp.float32) for module in (ours, of_flax))
            np.testing.assert_allclose(got, want, rtol=2.0**-7, atol=2.0**-7)  # a bias in f32 or after the rounding
    several = te_nnx.Linear(16, out_features=(2, 4), rngs=rngs())
    assert several.kernel.shape == (16, 2, 4) and te_nnx.Linear(16, 8, rngs=rngs()).kernel.shape == (16, 8)
    names = set(te_nnx.Linear.__signature__.parameters)
    of_flax = (nnx.Linear.__init__, nnx.LinearGeneral.__init__)
    assert set().union(*(inspect.signature(f).parameters for f in of_flax)) - {"self"} <= names


def test_metadata():
    mesh = jax.make_mesh((2,), ("tp",), axis_types=(AxisType.Auto,))
    fields = dict(kernel_metadata=dict(out_sharding=(None, "tp"), tag=1), bias_metadata=dict(out_sharding=("tp",)))
    with jax.set_mesh(mesh):
        ours, of_flax = te_nnx.Linear(16, 8, rngs=rngs(), **fields), nnx.Linear(16, 8, rngs=rngs(), **fields)
    for name in ("kernel", "bias"):
        got, want = getattr(ours, name), getattr(of_flax, name)
        assert type(got) is nnx.Param and got.get_value().sharding == want.get_value().sharding
        assert {k: got.get_metadata()[k] for k in want.get_metadata()} == want.get_metadata()
    assert te_nnx.Linear(16, 8, use_bias=False, bias_metadata=dict(tag=1), rngs=rngs()).kernel.shape == (16, 8)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_where_the_output_goes(kind):
    mesh = jax.make_mesh((2,), ("tp",), axis_types=(kind,))
    x = data(RNG, 4, 16)
    with jax.set_mesh(mesh), te.autocast(recipe=recipe.FixedScaling()):
        layer = te_nnx.Linear(16, 8, return_bias=True, rngs=rngs())
        x = jax.device_put(x, NamedSharding(mesh, PartitionSpec()))
        y, bias = nnx.jit(lambda layer, x: layer(x, PartitionSpec(None, "tp")))(layer, x)
        assert y.sharding.spec == PartitionSpec(None, "tp") and bias.shape == (8,)


@pytest.mark.parametrize(
    "argument, value",
    [
        ("precision", "highest"),
        ("promote_dtype", lambda arrays, dtype: arrays),
        ("preferred_element_type", jnp.float32),
        ("dot_general", jnp.dot),
        ("dot_general_cls", te_flax.DotGeneral),
        ("batch_axis", {0: 3}),
    ],
)
def test_refused_arguments(argument, value):
    with pytest.raises(ValueError, match=rf"DenseGeneral: {argument} is .*; .*"):
        te_nnx.Linear(16, 8, rngs=rngs(), **{argument: value})
    default = inspect.signature(nnx.LinearGeneral.__init__).parameters[argument].default
    te_nnx.Linear(16, 8, rngs=rngs(), **{argument: default})


def test_one_argument_by_two_names():
    for both in (dict(features=8, out_features=8), dict(param_dtype=jnp.float32, params_dtype=jnp.float32, features=8)):
        with pytest.raises(TypeError, match="its other name; pass one of them"):
            te_nnx.Linear(16, rngs=rngs(), **both)
    with pytest.raises(TypeError, match="DenseGeneral: .*features"):
        te_nnx.Linear(16, 8, out_features=8, rngs=rngs())


def test_a_subclass_takes_them_too():
    class Mine(te_nnx.Linear):
        pass

    assert (
        "out_features" in Mine.__signature__.parameters and Mine(16, out_features=8, rngs=rngs()).kernel.shape[1] == 8
    )
