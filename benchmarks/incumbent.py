"""TransformerEngine's layers for JAX, where it is installed: modules with te_jax's fields and the same trees."""

import importlib
import importlib.util
from contextlib import AbstractContextManager
from types import ModuleType

_PACKAGE = "transformer_engine"
RECIPES = {  # of each implementation, the class of its recipe
    "transformer_engine bf16": None,
    "transformer_engine fp8": "DelayedScaling",
    "transformer_engine fp8 current": "Float8CurrentScaling",
}


def installed() -> bool:
    """Whether the package is there with its part for JAX; nothing is imported."""
    return importlib.util.find_spec(_PACKAGE) is not None and importlib.util.find_spec(f"{_PACKAGE}_jax") is not None


def modules() -> ModuleType:
    """Its Flax modules."""
    return importlib.import_module(f"{_PACKAGE}.jax.flax")


def scope(impl: str) -> AbstractContextManager:
    """What a step of this implementation is traced in."""
    jax_part, recipes = (importlib.import_module(f"{_PACKAGE}.{name}") for name in ("jax", "common.recipe"))
    name = RECIPES[impl]
    recipe = getattr(recipes, name)() if name else None
    return jax_part.autocast(enabled=name is not None, recipe=recipe, mesh_resource=jax_part.MeshResource())
