"""The FP8 state of a module: its variables in a collection, `fp8_metas` unless the module or the autocast says another,
are created, checked and handed out here."""

import weakref
from collections.abc import Mapping
from contextvars import ContextVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax.core import tracers, unfreeze
from flax.traverse_util import flatten_dict

from te_jax.core.check import ARRAY, check, did_you_mean, warn
from te_jax.core.products import NO_RECIPE, note_recipe
from te_jax.recipe import DelayedScaling, Recipe
from te_jax.recipe._exclude import excluding
from te_jax.recipe.delayed import HISTORY, SCALE
from te_jax.state import fp8, older
from te_jax.state.fp8 import AttentionMetas, DenseMetas, TensorMeta, state_collection
from te_jax.state.metas import check_history_length
from te_jax.state.misplaced import LEAF_NAMES, is_leaf_name, warn_of_impossible

# Attribute of a bound module, {tensor: (recipe, trace, meta)}: the other branch of the fork of each state that the
# module used in this pass. Each `apply` and each lifted transform binds modules of its own, so the tracers are gone
# when the pass ends. Scopes cannot be the keys: Flax gives a module a new one after each call.
_LEFT = "_fp8_left"
_warned: weakref.WeakSet = weakref.WeakSet()  # Root scopes for which a warning about state was given.
_looked: weakref.WeakSet = weakref.WeakSet()  # roots whose FP8 state was looked at

# te_jax.nnx sets a function to call instead of `_warn_of_missing`, which raises.
on_missing_state: ContextVar = ContextVar("on_missing_state", default=None)


def describe(module: nn.Module) -> str:
    """The module's class and path, for error messages."""
    path = "/".join(module.path) if module.scope is not None else ""
    return type(module).__name__ + (f" `{path}`" if path else "")


def is_lifted(module: nn.Module) -> bool:
    """Whether a transform of Flax's is around the module: its variables come through it."""
    return module.scope.root.path_text != "/"


def not_passed_on(collection: str) -> str:
    """The end of an error about a variable that a transform around its module keeps from being made."""
    return (
        "cannot be made: a transform around the module does not pass the collection on; give `nn.scan` or `nn.vmap` "
        f"variable_axes={{{collection!r}: 0}}, or the place that params have there, and name it in `mutable` if you "
        "pass that."
    )


def recipe_of(module: nn.Module, *below: str, own: Recipe | None = None) -> Recipe | None:
    """The recipe in force for `module`, or for the submodule at the path `below`; None outside of autocast and for a
    module that the recipe excludes.

    own: a recipe of the module's own, in force also outside of autocast, but not under `autocast(False)`. Raises
         ValueError where it and the recipe of the autocast have state and differ: one law moves all state of a step.
    """
    recipe = fp8.current_recipe()
    if own is not None and not fp8.is_switched_off():
        if recipe is not None and recipe.has_state and own.has_state and recipe != own:
            raise ValueError(
                f"{describe(module)}: its recipe is {own}, but the autocast in force has {recipe}; use one recipe with "
                "state for all, or leave the module's None."
            )
        recipe = own
    if recipe is None:
        why = "te_jax.autocast(False) is in force" if fp8.is_switched_off() else NO_RECIPE
    else:
        pattern = excluding(recipe.exclude, (*module.path, *below)) if recipe.exclude else None
        why = None if pattern is None else f"the recipe's exclude has {pattern!r}"
    recipe = recipe if why is None else None
    if not below:
        note_recipe(recipe, why)
    return recipe


def dense_metas(
    module: nn.Module, postfix: str = "", *, own: Recipe | None = None, collection: str | None = None
) -> DenseMetas | None:
    """The FP8 state of one dense layer of `module`, None outside of autocast and under a recipe without state.

    own:        A recipe of the module's own, as in `recipe_of`.
    collection: Where the state lives; None: as the autocast in force says.

    The state is the variables `{x,kernel,grad}{postfix}_scale` f32[1] and `..._amax_history` f32[amax_history_len] of
    the collection. A second call in one pass returns the other branch of a fork, so that two uses combine by the larger
    amax. A fork does not reach through a lifted transform: for a module that two calls of `nn.remat` share, for all
    steps of an `nn.scan` by variable_broadcast and for two `apply`s in one loss autodiff adds the states up, unless
    `te_jax.value_and_grad` or `te_jax.combine_by_max` is used.

    Missing variables are created where the collection is mutable; else the call starts from fresh constants. A warning
    says so, except in `init`. Another warns of state that is there while no autocast is in force, and one of values
    that no step leaves behind, outside of jax's transforms, where they are known.

    Raises ValueError for a stored history of another length than the recipe has, for other wrong shapes, for leaves of
    unknown names, for two recipes in one pass, and in `init` where `nn.scan` or another transform around the module
    does not pass the collection on; TypeError for leaves that are not float32.
    """
    recipe, collection = recipe_of(module, own=own), collection or state_collection()
    if own is None:
        _warn_without_autocast(module, DenseMetas._fields[0] + postfix, collection)
    if recipe is None or not recipe.has_state:
        return None
    return DenseMetas(*(_tensor_meta(module, name + postfix, recipe, collection) for name in DenseMetas._fields))


def expert_metas(module: nn.Module, experts: int) -> tuple[DenseMetas, DenseMetas] | None:
    """The FP8 state of the two layers of `module`, whose tensors are of experts, as `te_jax.layers.moe` takes it; found
    as `dense_metas` does.

    The state is `x_0`, `kernel_0`, `grad_0`, `x_1`, `kernel_1` and `grad_1`, with an axis of experts in front but for
    `x_0` and `grad_1`.
    """
    recipe, collection = recipe_of(module), state_collection()
    _warn_without_autocast(module, "x_0", collection)
    if recipe is None or not recipe.has_state:
        return None
    of_layer = ("x_0", "grad_1")
    meta = lambda name: _tensor_meta(module, name, recipe, collection, () if name in of_layer else (experts,))
    return tuple(DenseMetas(*(meta(f"{name}_{i}") for name in DenseMetas._fields)) for i in range(2))


def attention_metas(module: nn.Module) -> AttentionMetas | None:
    """The FP8 state of the attention in `module`, found as `dense_metas` does; None unless the recipe has `fp8_dpa`.

    The state is the variables `{q,k,v,o,do,dq,dk,dv,dp}_scale` and `..._amax_history`, also of tensors that the call
    does not quantize.
    """
    recipe, collection = recipe_of(module), state_collection()
    _warn_without_autocast(module, AttentionMetas._fields[0], collection)
    if recipe is None or not recipe.fp8_dpa:
        return None
    return AttentionMetas(*(_tensor_meta(module, name, recipe, collection) for name in AttentionMetas._fields))


def _check_names(module: nn.Module, collection: str):
    """Raises ValueError for a leaf that no module has: a mistyped name, or state of another library."""
    for name, leaf in module.variables.get(collection, {}).items():
        if not isinstance(leaf, Mapping) and not is_leaf_name(name):
            old = "te_jax.convert_fp8_metas(collections, recipe) reads this older name"
            hint = old if older.is_old(name) else did_you_mean(name, LEAF_NAMES)
            raise ValueError(
                f"{describe(module)}: {collection} has a leaf {name!r}, which no module reads; rename or drop it"
                f"{f' ({hint})' if hint else ''}."
            )


def _tensor_meta(module: nn.Module, tensor: str, recipe: DelayedScaling, collection: str, lead=()) -> TensorMeta:
    """lead: the axes in front of its state, (E,) of a tensor of experts."""
    left = vars(module).get(_LEFT)
    if left is None:
        _check_names(module, collection)
        object.__setattr__(module, _LEFT, left := {})  # Flax refuses plain assignment outside of setup.
    trace = tracers.current_trace()
    before = left.get(tensor)
    if before is not None and before[1] == trace:
        if before[0] != recipe:
            raise ValueError(
                f"{describe(module)}: applied twice in one pass, under {before[0]} and under {recipe}; its "
                "FP8 state follows one recipe: apply it under one, or use two modules."
            )
        meta = before[2]
    else:  # The tensor is new in this trace: tracers of an inner trace must not leave it.
        _look_once(module)
        meta = fp8.observe(
            *(
                _leaf(module, tensor + end, np.broadcast_to(fresh, lead + fresh.shape), recipe, collection)
                for end, fresh in recipe.fresh_state().items()
            ),
            recipe,
            fp8.direction_of(tensor),
            module.get_variable(collection, tensor + fp8.PROBE),
        )
    meta, rest = fp8.fork(meta)
    left[tensor] = (recipe, trace, rest)
    return meta


def _leaf(module: nn.Module, name: str, fresh: np.ndarray, recipe: DelayedScaling, collection: str):
    """The leaf `name` of the state of `module`, checked: a scale f32[1] or a history f32[L], with the axes of `fresh`
    in front; `fresh` where it lacks."""
    mutable = module.is_mutable_collection(collection)
    if not module.has_variable(collection, name):
        if module.is_initializing():
            if not mutable and is_lifted(module):
                raise ValueError(f"{describe(module)}: {collection} leaf {name} {not_passed_on(collection)}")
        else:
            (on_missing_state.get() or _warn_of_missing)(module, name, mutable, collection)
        if not mutable:
            return jnp.asarray(fresh)
    value = module.variable(collection, name, lambda: jnp.asarray(fresh)).value
    what = f"{describe(module)}: {collection} leaf {name}"
    check(describe(module), f"{collection} leaf {name}", value, ARRAY)
    combined = name.endswith(HISTORY) and jax.dtypes.issubdtype(value.dtype, jax.dtypes.extended)
    if value.dtype != jnp.float32 and not combined:
        raise TypeError(f"{what} is {value.dtype}; FP8 state is float32: leave it out when casting parameters.")
    if value.shape[:-1] != fresh.shape[:-1] or (name.endswith(SCALE) and value.shape[-1] != 1):
        own = f"one of shape {[*fresh.shape[:-1], '1 or L']}" if fresh.ndim > 1 else "a 1-d leaf"
        raise ValueError(
            f"{what} has shape {value.shape}, but a module of its own has {own} here; state stacked by "
            f'`nn.scan` or `nn.vmap` needs variable_axes={{"{collection}": 0}}.'
        )
    if name.endswith(HISTORY):
        check_history_length(what, value.shape[-1], recipe)
    return value


def _warn_without_autocast(module: nn.Module, tensor: str, collection: str):
    """Warns if `module` has the state of `tensor`, but neither autocast(True) nor autocast(False) is in force."""
    if fp8.current_recipe() is None and not fp8.is_off_by_request():
        if module.has_variable(collection, tensor + SCALE):
            _warn_once(
                module,
                f"there is FP8 state ({collection}), but no te_jax.autocast is in force where this call is traced, "
                "so it runs without FP8 and the state's gradient is 0: te_jax.update_fp8_metas(grads, previous=state) "
                "keeps the state then. Enter te_jax.autocast(True, recipe) inside of the jitted function, in the "
                "thread that calls it; or te_jax.autocast(False), if that is meant.",
            )


def _warn_once(module: nn.Module, text: str):
    """Warns, naming `module`, unless a module of the same `apply` warned before."""
    if module.scope.root not in _warned:
        _warned.add(module.scope.root)
        warn(f"{describe(module)}: {text}")


def _look_once(module: nn.Module):
    """Warns of FP8 state that no step leaves behind, once for all modules of an `apply`: it waits for the values."""
    root = module.scope.root
    if root not in _looked:
        _looked.add(root)
        warn_of_impossible(describe(module), root.variables())


def _warn_of_missing(module: nn.Module, name: str, mutable: bool, collection: str):
    """Warns that the leaf `name` of the state of `module` is missing. mutable: whether the collection is."""
    if module.scope.root in _warned:
        return
    if mutable:
        then = "it is restored as fresh state (scale 1, empty history)"
    else:
        then = (
            "this call uses fresh state (scale 1, empty history) and keeps none. Initialise under the same "
            f"autocast, or apply once with mutable=[{collection!r}] and keep the collection that comes "
            "back"
        )
        if is_lifted(module):
            then += (
                "; where the state is there, a transform around the module does not pass it on: give `nn.scan` or "
                f"`nn.vmap` variable_axes={{{collection!r}: 0}}, or the place that params have there"
            )
    _warn_once(module, f"{collection} lacks {name}{_similar_state(module, collection)}: {then}.")


def _similar_state(module: nn.Module, collection: str) -> str:
    """A hint at state whose path is close to the path of `module`, "" if `module` has state of its own."""
    held = flatten_dict(unfreeze(module.scope.root.variables().get(collection, {})))
    paths = {"/".join(path[:-1]) for path in held}
    close = did_you_mean("/".join(module.path), paths) if "/".join(module.path) not in paths else ""
    return f", but has state of another module ({close})" if close else ""
