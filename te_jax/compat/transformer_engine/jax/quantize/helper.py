"""`transformer_engine.jax.quantize.helper`: which recipe is in force, what it says, what this machine can do."""

import functools
from contextlib import AbstractContextManager
from enum import Enum
from typing import Any

import jax
import jax.numpy as jnp

import te_jax
from te_jax.__main__ import report
from te_jax.compat._absent import GetAttr, absent
from te_jax.compat.transformer_engine.common import recipe as recipes
from te_jax.compat.transformer_engine.jax.quantize.quantizer import AmaxComputeAlgo
from te_jax.compat.transformer_engine.jax.quantize.scaling_modes import ScalingMode, mode_of, recipe_class
from te_jax.compat.transformer_engine.jax.sharding import MeshResource, is_mesh_available
from te_jax.compat.transformer_engine_jax import DType as DType
from te_jax.core.check import warn_once
from te_jax.recipe import Format, Recipe
from te_jax.state import fp8
from te_jax.state.fp8 import FP8_COLLECTION
from te_jax.state.metas import update_collections as update_collections

__getattr__: GetAttr = absent("transformer_engine.jax.quantize")

NVTE_FP8_COLLECTION_NAME = FP8_COLLECTION


class TensorSource(Enum):
    """A tensor of a dense layer."""

    X = 0
    KERNEL = 1
    DGRAD = 2


def autocast(
    enabled: bool = False, recipe: Recipe | None = None, mesh_resource: MeshResource | None = None
) -> AbstractContextManager[Any]:
    """`te_jax.autocast`, which is off unless it is switched on. recipe: None is TransformerEngine's `DelayedScaling()`.

    Off means that no recipe is in force for all, not even an outer one; the recipes that a module or a quantizer set
    has of its own count. Without a mesh_resource the outer one stays in force. Warns, once, where a mesh_resource names
    axes and no mesh is in force.
    """
    _warn_without_mesh(mesh_resource)
    if not enabled:
        return fp8.without_recipe(mesh_resource)
    return te_jax.autocast(True, recipe or recipes.DelayedScaling(), mesh_resource)


def _warn_without_mesh(resource: MeshResource | None) -> None:
    axes = [axis for axis in resource.axes.values() if axis] if isinstance(resource, MeshResource) else []
    if axes and not is_mesh_available() and jax.device_count() > 1:
        warn_once(
            "autocast",
            f"mesh_resource names the mesh axes {', '.join(axes)}, but no mesh is in force, so it places nothing; "
            "enter `jax.set_mesh(mesh)`, for te_jax does not see `with mesh:` by itself.",
        )


def fp8_autocast(
    enabled: bool = False, fp8_recipe: Recipe | None = None, mesh_resource: MeshResource | None = None
) -> AbstractContextManager[Any]:
    """The first name of `autocast`."""
    return autocast(enabled, fp8_recipe, mesh_resource)


def get_global_quantize_recipe() -> Recipe | None:
    """The recipe in force, None outside of `autocast` or where it is off."""
    return fp8.current_recipe()


# -- what the machine can do -----------------------------------------------------------------------------------


@functools.cache
def _features() -> dict:
    return report()["features"]


def is_scaling_mode_supported(
    scaling_mode: ScalingMode = ScalingMode.NO_SCALING, gpu_id: int | None = None
) -> tuple[bool, str]:
    """Whether te_jax computes a mode on the first device, or the reason why not. What needs no kernel is plain JAX: all
    recipes of te_jax are there on a CPU.

    gpu_id: without effect; all devices count as the first one.
    """
    del gpu_id
    if scaling_mode is ScalingMode.NO_SCALING:
        return True, ""
    cls = recipe_class(scaling_mode)
    if cls is None:
        return False, f"{scaling_mode.name}: te_jax has no recipe of this mode"
    return _whether_available(cls)


def _whether_available(cls: type[Recipe]) -> tuple[bool, str]:
    found = _features()[cls.__name__]
    return found["available"], "" if found["available"] else found["detail"]


def is_fp8_available(
    scaling_mode: ScalingMode = ScalingMode.DELAYED_TENSOR_SCALING, gpu_id: int | None = None
) -> tuple[bool, str]:
    """`is_scaling_mode_supported`, by its first name."""
    return is_scaling_mode_supported(scaling_mode, gpu_id)


def get_supported_scaling_modes() -> list[ScalingMode]:
    """The modes that `is_scaling_mode_supported`."""
    return [mode for mode in ScalingMode if is_scaling_mode_supported(mode)[0]]


def get_quantization_recipe(name: str) -> Recipe:
    """A recipe of `transformer_engine.common.recipe` by the name of its class. Raises ValueError for another name, and
    for one that te_jax does not serve."""
    return _recipe_class(name)()


def _recipe_class(name: str) -> type[Recipe]:
    cls = getattr(recipes, name, None)
    if not (isinstance(cls, type) and issubclass(cls, Recipe)) or cls in (Recipe, recipes.NotServed):
        raise ValueError(f"get_quantization_recipe: name is {name!r}; pass the name of a recipe.")
    return cls


def get_supported_quantization_recipes() -> list[Recipe]:
    """A recipe for each mode that `is_scaling_mode_supported`."""
    classes = filter(None, map(recipe_class, get_supported_scaling_modes()))
    return [get_quantization_recipe(cls.__name__) for cls in classes]


def is_quantize_recipe_supported(recipe_name: str) -> tuple[bool, str]:
    """Whether te_jax computes the recipe of a name on the first device, or the reason why not. Raises ValueError for a
    name that is none of a recipe."""
    cls = _recipe_class(recipe_name)
    if issubclass(cls, recipes.NotServed):
        return False, f"{recipe_name}: {cls.way_out}"
    return _whether_available(cls)


# -- what a recipe says ----------------------------------------------------------------------------------------


def _format2dtypes(fp8_format: Format | None) -> tuple[jnp.dtype, jnp.dtype]:
    """The FP8 types of the forward pass and of gradients."""
    return (jnp.bfloat16,) * 2 if fp8_format is None else tuple(map(fp8_format.dtype, ("fwd", "bwd")))


class QuantizeConfig:
    """What a recipe says, by TransformerEngine's names of its fields; what only some recipes have is an AttributeError
    of the others."""

    COLLECTION_NAME = FP8_COLLECTION
    INFERENCE_MODE = False

    def __init__(self, recipe: Recipe | None):
        self.recipe = recipe
        self.FWD_DTYPE, self.BWD_DTYPE = _format2dtypes(getattr(recipe, "fp8_format", None))

    @property
    def MARGIN(self) -> float:
        return self.recipe.margin

    @property
    def AMAX_HISTORY_LEN(self) -> int:
        return self.recipe.amax_history_len

    @property
    def AMAX_COMPUTE_ALGO(self) -> AmaxComputeAlgo:
        return AmaxComputeAlgo(self.recipe.amax_compute_algo)

    def is_fp8_enabled(self) -> bool:
        """Whether there is a recipe."""
        return self.recipe is not None

    def get_scaling_mode(self, tensor_source: TensorSource) -> ScalingMode:
        """The mode of a tensor, which is the recipe's."""
        return mode_of(self.recipe)

    def is_supported(self) -> tuple[bool, str]:
        """`is_scaling_mode_supported` for the recipe."""
        return is_scaling_mode_supported(mode_of(self.recipe))


def get_quantize_config_with_recipe(fp8_recipe: Recipe | None) -> QuantizeConfig:
    """What `fp8_recipe` says; None: that there is no FP8."""
    return QuantizeConfig(fp8_recipe)
