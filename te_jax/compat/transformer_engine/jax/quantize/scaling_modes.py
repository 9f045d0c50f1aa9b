"""`transformer_engine.jax.quantize.scaling_modes`: what shares a scale, by TransformerEngine's names."""

from enum import Enum

from te_jax import recipe
from te_jax.compat._absent import GetAttr, absent
from te_jax.compat.transformer_engine_jax import JAXX_Quantize_Layout, JAXX_Scaling_Mode
from te_jax.recipe import Recipe

__getattr__: GetAttr = absent("transformer_engine.jax.quantize")


class ScalingMode(Enum):
    """One mode for each recipe that TransformerEngine has for JAX."""

    NO_SCALING = JAXX_Scaling_Mode.NO_SCALING
    DELAYED_TENSOR_SCALING = JAXX_Scaling_Mode.DELAYED_TENSOR_SCALING
    MXFP8_1D_SCALING = JAXX_Scaling_Mode.MXFP8_1D_SCALING
    CURRENT_TENSOR_SCALING = JAXX_Scaling_Mode.CURRENT_TENSOR_SCALING
    NVFP4_1D_SCALING = JAXX_Scaling_Mode.NVFP4_1D_SCALING
    NVFP4_2D_SCALING = JAXX_Scaling_Mode.NVFP4_2D_SCALING

    def is_tensor_scaling(self) -> bool:
        """Whether a tensor has one scale."""
        return self in (ScalingMode.DELAYED_TENSOR_SCALING, ScalingMode.CURRENT_TENSOR_SCALING)

    def is_1d_block_scaling(self) -> bool:
        """Whether blocks along one axis have a scale each."""
        return self in (ScalingMode.MXFP8_1D_SCALING, ScalingMode.NVFP4_1D_SCALING)

    @property
    def is_block_scaling(self) -> bool:
        """Whether blocks have a scale each."""
        return self.is_nvfp4_scaling or self.is_mxfp8_scaling

    @property
    def is_nvfp4_scaling(self) -> bool:
        """Whether the numbers are FP4."""
        return self in (ScalingMode.NVFP4_1D_SCALING, ScalingMode.NVFP4_2D_SCALING)

    @property
    def is_mxfp8_scaling(self) -> bool:
        """Whether the blocks are the MX formats'."""
        return self is ScalingMode.MXFP8_1D_SCALING


class QuantizeLayout(Enum):
    """Which copies of a tensor there are: by rows, by columns, both. te_jax's layers choose them themselves."""

    ROWWISE = JAXX_Quantize_Layout.ROWWISE
    COLWISE = JAXX_Quantize_Layout.COLWISE
    ROWWISE_COLWISE = JAXX_Quantize_Layout.ROWWISE_COLWISE


_MODES = {
    recipe.DelayedScaling: ScalingMode.DELAYED_TENSOR_SCALING,
    recipe.Float8CurrentScaling: ScalingMode.CURRENT_TENSOR_SCALING,
    recipe.MXFP8BlockScaling: ScalingMode.MXFP8_1D_SCALING,
}


def mode_of(recipe: Recipe | None) -> ScalingMode:
    """The mode of a recipe, NO_SCALING of None. Raises ValueError for a recipe that TransformerEngine has no mode
    for."""
    if recipe is None:
        return ScalingMode.NO_SCALING
    for cls, mode in _MODES.items():
        if isinstance(recipe, cls):
            return mode
    name = type(recipe).__name__
    raise ValueError(
        f"{name} has no ScalingMode in TransformerEngine's JAX interface; ask te_jax.state.fp8.current_recipe()."
    )


def recipe_class(mode: ScalingMode) -> type[Recipe] | None:
    """The class of te_jax's recipe of a mode, None where there is none."""
    return {mode: cls for cls, mode in _MODES.items()}.get(mode)
