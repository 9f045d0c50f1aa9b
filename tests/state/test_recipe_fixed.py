"""Fixed scales: layers against plain JAX, modules against delayed scaling with the same scales, transforms and meshes;
and that nothing looks for an amax."""

import re

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from layer_cases import TENSORS, close, data, emulated, with_gradients
from quick_init import quick_init, quick_nnx
from recipe_cases import near

import te_jax as te
import te_jax.flax as te_flax
import te_jax.nnx as te_nnx
from te_jax.layers import dense
from te_jax.recipe import DelayedScaling, FixedScaling, Float8CurrentScaling, Format
from te_jax.sharding import collectives

RECIPE = FixedScaling()
SCALES = dict(x_scale=3.0, kernel_scale=100.0, grad_scale=0.5)
KEY = jax.random.key(0)
LAYER = dict(hidden_size=16, mlp_hidden_size=24, num_attention_heads=2, hidden_dropout=0.0, attention_dropout=0.0)


@pytest.mark.parametrize("override", [(False,) * 3, (True, False, False), (False, True, True)], ids=str)
@pytest.mark.parametrize("fp8_format", [Format.HYBRID, Format.E4M3])
def test_dense(override, fp8_format, rng):
    """Two axes are contracted; a row of zeros, one with an inf and numbers beyond E4M3, one with a NaN."""
    x, w, dy = data(rng, (5, 6, 8), (6, 8, 10), (5, 10))
    x = x.at[0].set(0).at[1, 2, 3:].set(jnp.array([jnp.inf, 1e3, -1e4, 3e38, -600.0])).at[2, 1, 1].set(jnp.nan)
    recipe = FixedScaling(**SCALES, fp8_format=fp8_format, override_linear_precision=override)
    y, (dx, dw) = with_gradients(lambda x, w: dense(x, w, contract=2, recipe=recipe), x, w, dy=dy)
    scales = {name: SCALES[f"{name}_scale"] for name in TENSORS}
    for got, want in zip((y, dx, dw), emulated(x, w, dy, scales, recipe, contract=2)):
        keep = np.isfinite(want)
        np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
        close(np.where(keep, got, 0), np.where(keep, want, 0))
    assert not y[0].any() and np.isnan(y[2]).all() and np.isfinite(y[1]).all() != override[0]


def test_the_ranges_of_the_default_scales():
    """Of the documentation: within them numbers keep all bits of their type, the largest are the last."""
    one = jnp.eye(2)
    layer = lambda x, w: dense(x, w, recipe=RECIPE)
    _, vjp = jax.vjp(layer, one, one)
    for run, least, bits, most in (
        (lambda a: layer(a, one), 2.0**-6, 0.875, 448.0),
        (lambda a: layer(one, a), 2.0**-12, 0.875, 7.0),
        (lambda a: vjp(a)[0], 2.0**-30, 0.75, 0.875),
    ):
        given = jnp.array([[2 * bits * least, -most], [1.25 * most, least * 2.0**-5]])
        np.testing.assert_array_equal(run(given), [[2 * bits * least, -most], [most, 0]])


def test_modules_are_those_of_delayed_scaling_with_these_scales(rng):
    """Every tensor of every module has the scale of its kind. Linen and NNX, f32, so that nothing but FP8 rounds."""
    (x,) = data(rng, (2, 8, 16))
    fixed, delayed = FixedScaling(**SCALES, fp8_format=Format.E4M3), DelayedScaling(fp8_format=Format.E4M3)
    module = te_flax.TransformerLayer(**LAYER)

    def results(recipe, state, params):
        with te.autocast(True, recipe):
            loss = lambda params, x: jnp.sum(jnp.sin(module.apply({"params": params, **state}, x)))
            return jax.jit(jax.value_and_grad(loss, (0, 1)))(params, x)

    with te.autocast(True, delayed):
        state, params = flax.core.pop(nn.meta.unbox(quick_init(module.init)(KEY, x)), "params")

    def filled(path, leaf):
        (tensor,) = [tensor for tensor in TENSORS if path[-1].key.startswith(tensor)]
        return jnp.full(1, SCALES[f"{tensor}_scale"]) if path[-1].key.endswith("_scale") else leaf

    state = jax.tree_util.tree_map_with_path(filled, state)
    want = results(delayed, state, params)
    jax.tree.map(near, results(fixed, {}, params), want)
    with te.autocast(True, fixed):
        model = quick_nnx(lambda: te_nnx.TransformerLayer(**LAYER, rngs=nnx.Rngs(0)))
        model = te_nnx.from_linen({"params": params}, model)
        assert not nnx.state(model, te_nnx.Fp8State)
        loss, grads = nnx.jit(te_nnx.value_and_grad(lambda model, x: jnp.sum(jnp.sin(model(x)))))(model, x)
    near(loss, want[0])
    jax.tree.map(near, jax.tree.leaves(grads), jax.tree.leaves(want[1][0]))


def calls_of(recipe):
    """The text of a training step's program."""
    module, x = te_flax.TransformerLayer(**LAYER), jnp.ones((2, 8, 16))
    with te.autocast(True, recipe):
        variables = nn.meta.unbox(jax.eval_shape(module.init, KEY, x))
        return str(jax.make_jaxpr(jax.grad(lambda v, x: module.apply(v, x).sum()))(variables, x))


def test_no_kernel_is_asked_for_an_amax_that_nobody_reads():
    """None under fixed scales. Under current scaling the one that sets the scale, but not a second one of the kernel
    that quantizes; under delayed scaling, where it becomes the state, only that one."""
    recipes = RECIPE, Float8CurrentScaling(), DelayedScaling()
    fixed, current, delayed = (re.findall(r"outputs=(\(.*?\))", calls_of(recipe)) for recipe in recipes)
    with_amax = lambda calls: [call for call in calls if "'amax'" in call]
    quantizing = lambda calls: [call for call in calls if "'data" in call]
    assert len(quantizing(fixed)) >= 8 and not with_amax(fixed)
    assert with_amax(current) and not quantizing(with_amax(current))
    assert with_amax(delayed) == quantizing(delayed)


def test_vmap_is_one_call(rng):
    """All examples have the scales in common, so their axis joins the rows instead of becoming a loop."""
    x, w = data(rng, (3, 4, 16), (16, 8))
    x = x * jnp.array([1e-2, 1.0, 50.0])[:, None, None]
    step = jax.vmap(lambda x: jax.vjp(lambda x: dense(x, w, recipe=RECIPE), x)[0])
    assert not re.search(r"\b(scan|while)\b", str(jax.make_jaxpr(step)(x)))
    close(jax.jit(step)(x), dense(x, w, recipe=RECIPE))


@pytest.mark.usefixtures("on_host")
@pytest.mark.parametrize("kind", ["auto", "explicit", "manual"])
def test_nothing_crosses_devices_for_a_scale(kind, rng):
    """Data parallelism: the numbers of one device, and nothing but the gradient of the kernel, whole."""
    x, w, weight = data(rng, (16, 8, 32), (32, 24), (16, 8, 24))
    step = lambda x, w, weight: jax.grad(lambda x, w: jnp.sum(dense(x, w, recipe=RECIPE) * weight), (0, 1))(x, w)
    want = jax.jit(step)(x, w, weight)
    types = (AxisType.Explicit if kind == "explicit" else AxisType.Auto,)
    mesh = jax.make_mesh((8,), ("dp",), axis_types=types)
    specs = P("dp"), P(), P("dp")
    with jax.set_mesh(mesh):
        operands = [jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in zip((x, w, weight), specs)]
        run = jax.shard_map(step, in_specs=specs, out_specs=(P("dp"), P())) if kind == "manual" else step
        program, found = collectives.compiled(jax.jit(run, out_shardings=None), *operands, mesh=mesh)
        got = program(*operands)
    jax.tree.map(close, got, want)
    assert [(each.kind, each.bytes) for each in found] == [("all-reduce", 4 * w.size)]
