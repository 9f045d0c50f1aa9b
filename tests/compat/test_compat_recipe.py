"""TransformerEngine's recipes and autocast over te_jax."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import on_device
from flax import linen as nn

import te_jax
import te_jax.compat.transformer_engine.jax as te
from te_jax.compat.transformer_engine.common import recipe
from te_jax.compat.transformer_engine.jax.quantize import (
    ScalingMode,
    TensorSource,
    get_quantize_config_with_recipe,
    is_scaling_mode_supported,
)


def test_recipes_take_the_incumbents_arguments():
    delayed = recipe.DelayedScaling(3.0, recipe.Format.E4M3, 7, "most_recent")
    assert (delayed.margin, delayed.amax_history_len, delayed.amax_compute_algo) == (3.0, 7, "most_recent")
    assert isinstance(delayed, te_jax.recipe.DelayedScaling) and hash(delayed) == hash(delayed)
    fast, exact = recipe.MMParams(False), recipe.MMParams()
    current = recipe.Float8CurrentScaling(True, fp8_gemm_dgrad=fast, fp8_gemm_wgrad=exact)
    assert current.power_2_scale and current.split_accumulator == (False, False, True)
    assert recipe.Float8BlockScaling(use_f32_scales=True).use_f32_scales
    assert recipe.MXFP8BlockScaling(fp8_format=recipe.Format.HYBRID).fp8_format is recipe.Format.HYBRID


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: recipe.DelayedScaling(backward_override="dequantized"), "backward_override is 'dequantized'"),
        (lambda: recipe.MXFP8BlockScaling(margin=1), "margin is 1"),
        (lambda: recipe.Float8BlockScaling(x_block_scaling_dim=2), "x_block_scaling_dim is 2"),
        (lambda: recipe.Float8BlockScaling(fp8_gemm_fprop=recipe.MMParams(False)), "use_split_accumulator"),
        (lambda: recipe.NVFP4BlockScaling(disable_rht=True), "out of te_jax's scope"),
        (lambda: recipe.CustomRecipe(print), "te_jax.recipe.Recipe"),
        (lambda: recipe.DelayedScaling(fp8_mha=True), "fp8_mha is True"),
    ],
)
def test_recipes_refuse(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_recipes_do_not_drop_arguments():
    with pytest.raises(TypeError, match="amax_history_length"):
        recipe.DelayedScaling(amax_history_length=16)
    with pytest.warns(UserWarning, match="margin is 5.25"):
        recipe.Float8CurrentScaling(margin=5.25)


def test_autocast_is_off_unless_switched_on():
    with te.autocast(recipe=recipe.Float8CurrentScaling()):
        assert te.quantize.get_global_quantize_recipe() is None
    with te.autocast(enabled=True):
        assert te.quantize.get_global_quantize_recipe() == recipe.DelayedScaling()
    with te.fp8_autocast(True, recipe.Float8CurrentScaling(), te.MeshResource()):
        assert te.sharding.global_mesh_resource() == te.MeshResource()
    with pytest.raises(ValueError, match="no MeshResource"):
        te.sharding.global_mesh_resource()


def test_recipes_of_modules_count_where_autocast_is_off(rng):
    x, own = on_device(rng.standard_normal((3, 16)), jnp.float32), recipe.Float8CurrentScaling()
    dense = nn.Dense(5, dot_general_cls=te.flax.make_dot_general_cls(own))
    variables = dense.init(jax.random.key(0), x)
    expected = dense.apply(variables, x)
    assert not np.array_equal(expected, x @ variables["params"]["kernel"])
    with te.autocast(True, own), te.autocast(mesh_resource=te.MeshResource()):
        assert te.quantize.get_global_quantize_recipe() is None
        np.testing.assert_array_equal(dense.apply(variables, x), expected)


def test_recipes_say_which_they_are():
    current = recipe.Float8CurrentScaling(True, fp8_gemm_dgrad=recipe.MMParams(False))
    assert current.float8_current_scaling() and current.float8_per_tensor_scaling() and not current.delayed()
    assert recipe.DelayedScaling().delayed() and recipe.Float8BlockScaling().float8_block_scaling()
    assert recipe.MXFP8BlockScaling.mxfp8() and recipe.NVFP4BlockScaling.nvfp4() and recipe.CustomRecipe.custom()
    assert current.use_power_2_scales and recipe.MXFP8BlockScaling().margin == 0
    gemms = current.fp8_gemm_fprop, current.fp8_gemm_dgrad, current.fp8_gemm_wgrad
    assert [each.use_split_accumulator for each in gemms] == [False, False, True]
    assert current.backward_override is None and recipe.Float8BlockScaling().fp8_gemm_dgrad == recipe.MMParams()


def test_a_recipe_speaks_by_the_incumbents_names():
    config = get_quantize_config_with_recipe(recipe.DelayedScaling(2.0, amax_history_len=5))
    assert (config.MARGIN, config.AMAX_HISTORY_LEN, config.AMAX_COMPUTE_ALGO.value) == (2.0, 5, "max")
    assert (config.FWD_DTYPE, config.BWD_DTYPE) == (jnp.float8_e4m3fn, jnp.float8_e5m2)
    assert config.get_scaling_mode(TensorSource.X) is ScalingMode.DELAYED_TENSOR_SCALING and config.is_fp8_enabled()
    assert not get_quantize_config_with_recipe(None).is_fp8_enabled()
    with pytest.raises(ValueError, match="Float8BlockScaling has no ScalingMode"):
        get_quantize_config_with_recipe(recipe.Float8BlockScaling()).get_scaling_mode(TensorSource.X)
    found, reason = is_scaling_mode_supported(ScalingMode.NVFP4_1D_SCALING)
    assert not found and "NVFP4" in reason
    if jax.default_backend() == "cpu":
        assert is_scaling_mode_supported(ScalingMode.MXFP8_1D_SCALING) == (True, "")

    found, reason = te.quantize.is_quantize_recipe_supported("NVFP4BlockScaling")
    assert not found and "Blackwell" in reason
    for name in ("Float8BlockScaling", "DelayedScaling"):
        assert len(te.quantize.is_quantize_recipe_supported(name)) == 2
    with pytest.raises(ValueError, match="'Recipe'"):
        te.quantize.is_quantize_recipe_supported("Recipe")
