"""`exclude` of a recipe: module paths that stay out of FP8."""

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax_reference import data, unboxed
from quick_init import quick_init

import te_jax as te
import te_jax.flax as te_flax
from te_jax.recipe import DelayedScaling, FixedScaling, Float8BlockScaling, Float8CurrentScaling, MXFP8BlockScaling

KEY = jax.random.key(0)
RECIPES = [DelayedScaling, Float8CurrentScaling, Float8BlockScaling]
recipes = pytest.mark.parametrize("recipe", RECIPES)
every_recipe = pytest.mark.parametrize("recipe", [*RECIPES, FixedScaling, MXFP8BlockScaling])


class Blocks(nn.Module):
    """Two MLPs, then a dense layer without a name of its own."""

    @nn.compact
    def __call__(self, x):
        for i in range(2):
            x = x + te_flax.LayerNormMLP(32, name=f"block_{i}")(x)[0]
        return te_flax.DenseGeneral(16)(x)


class Block(nn.Module):
    """One of these MLPs."""

    @nn.compact
    def __call__(self, x):
        return x + te_flax.LayerNormMLP(32, name="inner")(x)[0]


def run(module, recipe, x, params):
    """(y, gradients of params and x, gradient of the FP8 state) under `recipe`, None for none."""
    with te.autocast(recipe is not None, recipe):
        state, _ = flax.core.pop(quick_init(module.init)(KEY, x), "params")

        def f(*args):
            y = module.apply({"params": args[0], **args[2]}, args[1])
            return (y**2).sum(), y

        grads, y = jax.jit(jax.grad(f, (0, 1, 2), has_aux=True))(params, x, state)
        return y, *grads


@recipes
def test_excluded_modules_compute_without_fp8(recipe):
    """Bit for bit what the parts give, each under its own precision."""
    x = data(8, 16)
    params = quick_init(Blocks().init)(KEY, x)["params"]
    y, dparams, dx, dmetas = run(Blocks(), recipe(exclude=("block_1",)), x, params)
    parts = [
        (Block(), "block_0", True),
        (Block(), "block_1", False),
        (te_flax.DenseGeneral(16), "DenseGeneral_0", True),
    ]
    with te.autocast(True, recipe()):
        states = {name: quick_init(module.init)(KEY, x) for module, name, fp8 in parts if fp8}
        states = {name: flax.core.pop(variables, "params")[0] for name, variables in states.items()}

        def composed(params, x, states):
            for module, name, fp8 in parts:
                mine = params[name] if isinstance(module, te_flax.DenseGeneral) else {"inner": params[name]}
                with te.autocast(fp8, recipe()):
                    x = module.apply({"params": mine, **states.get(name, {})}, x)
            return x

        def f(*args):
            y = composed(*args)
            return (y**2).sum(), y

        grads, expected = jax.jit(jax.grad(f, (0, 1, 2), has_aux=True))(params, x, states)
        expected_dparams, expected_dx, expected_states = grads
    np.testing.assert_array_equal(y, expected)
    np.testing.assert_array_equal(dx, expected_dx)
    jax.tree.map(np.testing.assert_array_equal, dparams, expected_dparams)
    metas = dmetas.get("fp8_metas", {})
    if recipe is DelayedScaling:
        assert set(metas) == {"block_0", "DenseGeneral_0"}
        jax.tree.map(np.testing.assert_array_equal, metas["block_0"], expected_states["block_0"]["fp8_metas"]["inner"])
    assert not np.array_equal(y, jax.jit(Blocks().apply)({"params": params}, x))


@pytest.mark.parametrize(
    "exclude,left",
    [
        ((), {"block_0", "block_1", "DenseGeneral_0"}),
        (("block", "lock_0", "x", "block_0/y"), {"block_0", "block_1", "DenseGeneral_0"}),
        (("block_1*",), {"block_0", "DenseGeneral_0"}),
        (("*_0", "nothing"), {"block_1"}),
        (("block_[01]",), {"DenseGeneral_0"}),
        (("*",), set()),
    ],
)
def test_patterns(exclude, left):
    with te.autocast(True, DelayedScaling(exclude=exclude)):
        made = jax.eval_shape(Blocks().init, KEY, data(8, 16))
    assert set(made.get("fp8_metas", {})) == left


@every_recipe
def test_all_is_no_fp8(recipe):
    def text(enabled):
        with te.autocast(enabled, recipe(exclude=("*",))):
            return str(jax.make_jaxpr(Blocks().init_with_output)(KEY, data(8, 16)))

    assert text(True) == text(False)


def test_the_outermost_module_has_no_path():
    with te.autocast(True, DelayedScaling(exclude=("*",))):
        assert "fp8_metas" in jax.eval_shape(te_flax.DenseGeneral(16).init, KEY, data(8, 16))


@recipes
def test_one_projection_of_an_attention(recipe):
    """Queries, keys and values share one quantized norm, unless one of them is out of FP8."""
    x = data(2, 8, 32)
    module = te_flax.TransformerLayer(
        hidden_size=32,
        mlp_hidden_size=64,
        num_attention_heads=2,
        num_gqa_groups=1,
        fuse_qkv_params=False,
        layernorm_type="rmsnorm",
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    with te.autocast(True, recipe(exclude=("attention/key",))):
        variables = quick_init(module.init)(KEY, x)
        run = jax.jit(lambda v: module.apply(v, x, mutable=["intermediates"], capture_intermediates=True))
        _, seen = run(variables)
    params = unboxed(variables["params"]["attention"])
    normed = x / jnp.sqrt((x**2).mean(-1, keepdims=True) + module.layernorm_epsilon) * params["query"]["scale"]
    seen = {name: seen["intermediates"]["attention"][name]["__call__"][0] for name in ("query", "key", "value")}
    far = {}
    for name, y in (seen | {"query": seen["query"][0]}).items():
        with jax.default_matmul_precision("highest"):
            wide = jnp.tensordot(normed, params[name]["kernel"], 1)
        far[name] = float(jnp.linalg.norm(y - wide) / jnp.linalg.norm(wide))
    # Sums of 32 products and a norm in f32: within 100 ulps. One rounding to E4M3 is off by up to 2^-4.
    assert far["key"] < 100 * 2**-23
    assert 2**-8 < far["query"] < 2**-4 and 2**-8 < far["value"] < 2**-4
    if recipe is DelayedScaling:
        assert set(variables["fp8_metas"]["attention"]) == {"query", "value", "out"}


def test_fp8_attention_by_its_path():
    x = data(2, 8, 32, dtype=jnp.bfloat16)
    module = te_flax.MultiHeadAttention(16, 2, dtype=jnp.bfloat16, attention_dropout=0.0)
    with te.autocast(True, DelayedScaling(fp8_dpa=True)):
        names = [
            name for name, child in jax.eval_shape(module.init, KEY, x, x)["fp8_metas"].items() if "dp_scale" in child
        ]
        assert len(names) == 1
    with te.autocast(True, DelayedScaling(fp8_dpa=True, exclude=tuple(names))):
        assert names[0] not in jax.eval_shape(module.init, KEY, x, x)["fp8_metas"]
