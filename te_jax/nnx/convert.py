"""Conversion of variables between NNX modules and Linen's collections, and of FP8 state between recipes."""

from collections.abc import Mapping
from typing import Any, TypeVar

from flax import linen as nn
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict

from te_jax.core.check import Kind, check
from te_jax.nnx._layer import Fp8State, Loss, collection_of
from te_jax.recipe import Recipe
from te_jax.state import fp8
from te_jax.state.fp8 import check_recipe
from te_jax.state.metas import convert_fp8_metas

AnyModule = TypeVar("AnyModule", bound=nnx.Module)


def collections_of(state: "nnx.State[Any, Any]") -> dict[str, Any]:
    """The variables of `state` in Linen's form, {collection: {name: ... array}}.

    Variables that belong to no collection of `te_jax.flax` are left out. Indices, as of an nnx.List, become strings.
    """
    found = ((collection_of(variable), path, variable) for path, variable in nnx.to_flat_state(state))
    return unflatten_dict({(of, *map(str, path)): variable.get_value() for of, path, variable in found if of})


def with_collections(state: "nnx.State[Any, Any]", collections: Mapping[str, Any]) -> "nnx.State[Any, Any]":
    """The variables of `state` that are in `collections`, with the values there: the inverse of `collections_of`."""
    values, new = flatten_dict(collections), []
    for path, variable in nnx.to_flat_state(state):
        key = collection_of(variable), *map(str, path)
        if key in values:
            new.append((path, variable.replace(values[key])))
    return nnx.from_flat_state(new)


_NNX_MODULE = Kind("an nnx.Module", lambda value: isinstance(value, nnx.Pytree))
_LINEN_VARIABLES = Kind(
    'collections of variables, {"params": ...}, as `init` of a Linen module returns them',
    lambda value: isinstance(value, Mapping),
    lambda value: all(isinstance(collection, Mapping) for collection in value.values()),
    lambda value: "the module of te_jax.nnx comes second" * isinstance(value, nnx.Pytree),
)


def to_linen(module: nnx.Module) -> dict[str, Any]:
    """The variables of an NNX module for `apply` of the Linen module of the same structure.

    Returns {"params": ..., "fp8_metas": ..., "expert_bias": ..., "cache": ...} without empty collections: every
    `nnx.Param`, `Fp8State`, `ExpertBias` and `nnx.Cache` of any nnx.Module, under the path of its attributes. A stack
    of layers made by `nnx.vmap` has the form of a stack that `nn.scan` makes with variable_axes 0. Losses of routers
    that nobody took (`Loss`) are left out: `apply` would add to them.
    """
    check("to_linen", "module", module, _NNX_MODULE)
    return collections_of(nnx.state(module, nnx.Not(Loss)))


def from_linen(variables: Mapping[str, Any], module: AnyModule) -> AnyModule:
    """`module`, which gets the variables of a Linen module of the same structure in place.

    variables: {"params": ..., "fp8_metas": ..., "expert_bias": ..., "cache": ...} as `init` returns them, in boxes or
               not. The module keeps its variables of a collection that is absent.

    Histories of FP8 state may have another length, as `te_jax.convert_fp8_metas` may return them. Raises ValueError,
    naming the first leaf, for leaves that only one of the two has, and for other shapes or dtypes; TypeError or
    ValueError for variables that are no collections, and for another module than one of NNX.
    """
    check("from_linen", "variables", variables, _LINEN_VARIABLES)
    check("from_linen", "module", module, _NNX_MODULE)
    state, variables = nnx.state(module), nn.meta.unbox(variables)
    new, held = flatten_dict(dict(variables)), flatten_dict(collections_of(state))
    for key in sorted(set(new) | {key for key in held if key[0] in variables}):
        path = "/".join(key)
        if key not in held or key not in new:
            has, lacks = ("variables", "the module") if key in new else ("the module", "variables")
            raise ValueError(
                f"from_linen: {has} has {path}, {lacks} has not; make the module with the same fields, under the same "
                f"te_jax.autocast (FP8 state) and after a call with decode=True (a cache), or leave out {key[0]!r}."
            )
        own = held[key].shape[:-1] if key[0] == fp8.FP8_COLLECTION else held[key].shape
        got = new[key].shape[:-1] if key[0] == fp8.FP8_COLLECTION else new[key].shape
        if (got, new[key].dtype) != (own, held[key].dtype):
            raise ValueError(
                f"from_linen: {path} is {new[key].dtype}{list(new[key].shape)}, but {held[key].dtype}"
                f"{list(held[key].shape)} in the module; make the module with the same fields."
            )
    nnx.update(module, with_collections(state, variables))
    return module


def convert_fp8_state(module: AnyModule, recipe: Recipe) -> AnyModule:
    """`module`, whose FP8 state is converted to `recipe` in place (`te_jax.convert_fp8_metas`), or removed for a recipe
    without state.

    Raises ValueError for a module without FP8 state and a recipe with state, TypeError for what is none of both.
    """
    check("convert_fp8_state", "module", module, _NNX_MODULE)
    check_recipe("convert_fp8_state", recipe)
    state = nnx.state(module, Fp8State)
    collections = convert_fp8_metas(collections_of(state), recipe)
    if not state and recipe.has_state:
        raise ValueError(
            f"convert_fp8_state: {type(module).__name__} has no FP8 state; make one under te_jax.autocast(True, "
            "recipe), and take over the weights with nnx.update(new, nnx.state(old, nnx.Param))."
        )
    if collections:
        nnx.update(module, with_collections(state, collections))
    else:
        for _, node in nnx.iter_modules(module):
            for name in [name for name, value in vars(node).items() if isinstance(value, Fp8State)]:
                delattr(node, name)
    return module
