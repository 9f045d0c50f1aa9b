"""The FP8 state of a model: its form, its repair after a step, its conversion.

The state is the collection `fp8_metas`, or `_overwrite_with_gradient` (`te_jax.autocast(collection=...)`, the products
inside of Flax's own modules), or both. `states_in` finds it.
"""

import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from te_jax.core.check import Kind, check, did_you_mean, warn
from te_jax.core.types import like, on_explicit_mesh
from te_jax.ops.scale_update import apart
from te_jax.recipe import DelayedScaling, Recipe
from te_jax.recipe.delayed import HISTORY, SCALE
from te_jax.state import older
from te_jax.state.fp8 import (
    ENDINGS,
    FP8_COLLECTION,
    OVERWRITE_COLLECTION,
    PROBE,
    STATE_COLLECTIONS,
    check_recipe,
    current_recipe,
    direction_of,
)
from te_jax.state.misplaced import (
    LEAF_NAMES,
    check_no_stray,
    is_known,
    is_possible,
    tell_of_impossible,
    warn_of_impossible,
    with_collection_name,
)

_CONVERTER = "te_jax.convert_fp8_metas"  # Errors about stored state name it.


def direction_at(path: str) -> str:
    """`fp8.direction_of` the tensor at a path such as "fp8_metas/mlp/x_0"."""
    return direction_of(path.rsplit("/", 1)[-1])


def recipe_with_state() -> DelayedScaling | None:
    """The recipe in force if it has state, else None."""
    recipe = current_recipe()
    return recipe if recipe is not None and recipe.has_state else None


def states_in(collections: Any) -> list[str]:
    """The names of the collections of FP8 state among `collections`.

    `_overwrite_with_gradient` is none where it belongs to Flax's own FP8 products, whose leaves have names of their
    own. Raises ValueError where it holds theirs and te_jax's: one law does not fit both.
    """
    names = [name for name in STATE_COLLECTIONS if name in collections]
    others = collections[OVERWRITE_COLLECTION] if OVERWRITE_COLLECTION in names else {}
    leaves = [str(getattr(path[-1], "key", path[-1])) for path, _ in jax.tree.leaves_with_path(others) if path]
    of_flax = [name for name in leaves if name.startswith(("input_", "output_grad_"))]
    if not of_flax:
        return names
    if any(name.startswith(("x_", "grad_")) for name in leaves):
        raise ValueError(
            f"{OVERWRITE_COLLECTION} holds state of Flax's FP8 products ({of_flax[0]}) next to te_jax's; use one "
            "kind of product in a model, or jax.value_and_grad and an optimizer of only the parameters."
        )
    return [name for name in names if name != OVERWRITE_COLLECTION]


def map_states(f: Callable[..., Any], collections: Any, *others: Any) -> Any:
    """`collections`, with `map_tensors` of each of its collections of FP8 state. others: have the same ones."""
    new = {
        name: map_tensors(f, collections[name], *(o[name] for o in others), path=name)
        for name in states_in(collections)
    }
    return update_collections(new, collections) if new else collections


def update_collections(new: Any, original: Any) -> Any:
    """`original` with its collections replaced by those in `new`; a dict or FrozenDict, as `original` is."""
    return type(original)({**original, **new})


def map_tensors(
    f: Callable[..., Any], metas: Mapping[str, Any], *others: Mapping[str, Any], path: str = FP8_COLLECTION
) -> Any:
    """`metas` with new state for each tensor.

    f: (path of the tensor, its leaves, its leaves in each of `others`) -> its new leaves. The leaves are (scale,
       amax_history), or (scale, amax_history, probe) where the tensor has a probe. f may return fewer leaves, and the
       others stay; or a probe where there was none.

    A scale without a history, and a history without a scale, stays as it is.
    """
    out = {
        k: map_tensors(f, v, *(o[k] for o in others), path=f"{path}/{k}") if isinstance(v, Mapping) else v
        for k, v in metas.items()
    }
    for tensor in [name.removesuffix(SCALE) for name in metas if name.endswith(SCALE)]:
        names = tensor + SCALE, tensor + HISTORY, tensor + PROBE
        if names[1] in metas:
            states = (tuple(node[name] for name in names if name in node) for node in (metas, *others))
            out.update(zip(names, f(f"{path}/{tensor}", *states)))
    return type(metas)(out)


def update_fp8_metas(collections: Any, previous: Any = None) -> Any:
    """Checks and repairs the FP8 state among `collections`; all other collections pass through.

    collections: Gradients with respect to the non-parameter collections, or the collections themselves; a dict or
                 FrozenDict. Without FP8 state it is returned as it is. FP8 state itself, without the name of its
                 collection, is served too, and the result has none either.
    previous:    The collections before the step. Tensors that no module read in the step, whose gradient is 0, keep the
                 state that they have there.

    The function is pure and idempotent: the gradient already is the new state. Values that are not finite or out of
    range are repaired (an amax becomes 0, a scale follows its history, a missing leaf is made fresh, with a warning),
    and under the recipe in force no scale is larger than its history allows. All tensors are one fused computation.

    Without `previous` a tensor whose gradient is 0 starts again from fresh state. A warning says so, for which the call
    waits until the values are computed. Tracers have no values: within `jax.jit` a warning says so where no recipe is
    in force, as the modules then probably ran without one. Pass `previous` there: a branch of `lax.cond` that is not
    taken and a module that the loss leaves out have gradients of 0 too.

    A state that autodiff added up (two `apply`s in one loss, gradients summed over microbatches) is brought into range
    once, but its history holds sums: differentiate with `te_jax.value_and_grad` where that may happen.

    Raises ValueError for a history of another length than the recipe in force has, for any state under a recipe without
    state, for malformed FP8 state, and for a `previous` of another structure; TypeError for leaves that are not
    float32.
    """
    what = "update_fp8_metas"
    (collections, unnamed), (previous, _) = with_collection_name(collections), with_collection_name(previous)
    check_collections(what, collections)
    names = states_in(collections)
    if previous is not None:
        check_collections(what, previous, "previous")
        for name in set(names) ^ set(states_in(previous)):
            has, lacks = ("collections", "previous") if name in names else ("previous", "collections")
            raise ValueError(f"{what}: {has} has {name!r}, but {lacks} has none; pass states of one model.")
    for name in names:
        before = None if previous is None else previous[name]
        metas, untouched, impossible = _next_state(what, collections[name], before, name)
        if previous is None:
            _warn_of_fresh_starts(metas, untouched, current_recipe())
            if is_known(impossible) and np.any(impossible):
                tell_of_impossible(f"{what}: {name}/{_tensors_of(metas)[int(np.argmax(impossible))]}")
        collections = update_collections({name: metas}, collections)
    return unnamed(collections)


def _next_state(what: str, metas, before, collection: str):
    """`_repair` of the state in `collection`, `metas`; `before` may be None."""
    recipe = current_recipe()
    if recipe is not None and not recipe.has_state:  # Its modules did not read the state, so the gradient is 0.
        raise ValueError(
            f"{what}: there is a collection {collection!r}, but {type(recipe).__name__}, the recipe in "
            f"force, has no state; drop it with {_CONVERTER}(collections, recipe), or call this under the recipe that "
            "the modules ran under."
        )
    if before is not None:
        check_same_state(what, "collections", metas, "previous", before, collection)
        with warnings.catch_warnings(action="ignore"):  # The second call warns of the same leaf.
            before = _complete(what, before, recipe, collection, scale=-jnp.inf)
    metas = _complete(what, metas, recipe, collection, scale=-jnp.inf)  # `_repair` makes a scale of the history.
    return _repair(metas, before, recipe)


def _warn_of_fresh_starts(metas, untouched: jax.Array, recipe):
    """Warns of tensors in `metas` that start again, by `untouched` (bool[n]); for a tracer, where no recipe is in
    force.

    Under a recipe a tracer is passed over: loops that call everything under one autocast are right, and most loops.
    """
    way_out = "pass previous=the collections before the step, to keep what no module reads"
    if isinstance(untouched, jax.core.Tracer):
        if recipe is None and untouched.size:
            warn(
                "update_fp8_metas: it is traced where no recipe is in force, and without previous: state whose "
                "gradient is 0, as where modules ran without te_jax.autocast, would start again, and what it "
                f"had learned be lost. Call it under the te_jax.autocast(True, recipe) of the modules, or {way_out}.",
            )
    elif untouched.is_fully_replicated:
        names = [name for name, is_so in zip(_tensors_of(metas), jax.device_get(untouched)) if is_so]
        if names:
            more = f" and {len(names) - 1} more" if names[1:] else ""
            warn(
                f"update_fp8_metas: the state of {names[0]}{more} is 0, as the gradient of what no module read under "
                "autocast: what it had learned is not in it, and it starts again. Run the modules under "
                f"te_jax.autocast(True, recipe), and {way_out}.",
            )


def check_collections(what: str, collections: Any, name: str = "collections") -> None:
    """Raises TypeError, naming `what`, unless `collections` is a dict or FrozenDict; ValueError for FP8 state in it
    that is not in a collection at the top; as `check_state` for the FP8 state in it."""
    check(what, name, collections, _BY_NAME)
    check_no_stray(what, name, collections)
    for state in states_in(collections):
        check_state(what, collections[state], state)


_BY_NAME = Kind(
    f'a dict or FrozenDict of collections by name, such as {{"{FP8_COLLECTION}": ...}}',
    lambda value: isinstance(value, Mapping),
)


def check_state(what: str, node: Any, path: str = FP8_COLLECTION) -> None:
    """Raises ValueError or TypeError, naming `what` and the path, unless `node` is FP8 state."""
    if not isinstance(node, Mapping):
        raise TypeError(f"{what}: {path} is {type(node).__name__}; pass the dict of FP8 state that `init` returns.")
    for name, leaf in node.items():
        at, ends = f"{path}/{name}", [end for end in ENDINGS if str(name).endswith(end)]
        if isinstance(leaf, Mapping):
            check_state(what, leaf, at)
            continue
        if not ends:
            hint = did_you_mean(name, LEAF_NAMES)
            hint = f"{_CONVERTER}(collections, recipe) reads this older name" if older.is_old(name) else hint
            raise ValueError(
                f"{what}: {at} is no leaf of FP8 state, which are named {{tensor}}{SCALE} and {{tensor}}{HISTORY}; "
                f"pass the collection as `init` returns it{f' ({hint})' if hint else ''}."
            )
        shape, dtype = getattr(leaf, "shape", None), getattr(leaf, "dtype", None)
        if not _may_be_state(dtype):
            got = type(leaf).__name__ if dtype is None else dtype
            raise TypeError(
                f"{what}: {at} is {got}; FP8 state is arrays of float32: leave it out when casting parameters."
            )
        size = {SCALE: 1, PROBE: 4}.get(ends[0])
        if not shape or (size and shape[-1] != size):
            raise ValueError(f"{what}: {at} has shape {shape}; pass one of shape [..., {size or 'L'}], as `init` does.")
        other = node.get(name.removesuffix(SCALE) + HISTORY) if ends == [SCALE] else None
        if other is not None and getattr(other, "shape", shape)[:-1] != shape[:-1]:
            raise ValueError(
                f"{what}: {at} has shape {shape}, but its history {other.shape}; pass both with the same leading axes."
            )


def _may_be_state(dtype) -> bool:
    """Whether FP8 state may have leaves of `dtype`: float32, integers (of a state written by hand) or amaxes (see
    `combine`)."""
    if dtype is None or jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
        return dtype is not None
    return dtype == jnp.float32 or jnp.issubdtype(dtype, jnp.integer)


def check_same_state(
    what: str,
    name: str,
    metas: Mapping[str, Any],
    other: str,
    expected: Mapping[str, Any],
    collection: str = FP8_COLLECTION,
) -> None:
    """Raises ValueError, naming `what` and a leaf, unless `metas` and `expected` have the same leaves and shapes."""
    got, want = ({path: jnp.shape(leaf) for path, leaf in _by_path(tree).items()} for tree in (metas, expected))
    for path in sorted({*got, *want}):
        if got.get(path) != want.get(path):
            of = [f"a leaf of shape {tree[path]}" if path in tree else "none" for tree in (got, want)]
            raise ValueError(
                f"{what}: at {collection}/{path} {name} has {of[0]}, but {other} {of[1]}; pass states of one model."
            )


def _complete(what, node, recipe, path, scale):
    """`node` with a fresh history where a scale has none, and `scale` where a history has none; each with a warning."""
    if not isinstance(node, Mapping):
        return node
    out = {name: _complete(what, child, recipe, f"{path}/{name}", scale) for name, child in node.items()}
    for name, leaf in node.items():
        for have, lack in ((SCALE, HISTORY), (HISTORY, SCALE)):
            sibling = name.removesuffix(have) + lack
            if not name.endswith(have) or sibling in node:
                continue
            warn(f"{what}: {path} has no {sibling}; it is restored as fresh state.")
            fresh = (recipe or DelayedScaling()).fresh_state()[lack]
            out[sibling] = jnp.full((*leaf.shape[:-1], *fresh.shape), scale if lack == SCALE else 0.0)
    return type(node)(out)


def _tensors_of(metas) -> list[str]:
    """The paths of the tensors in `metas`, in the order of the leaves."""
    return [path.removesuffix(SCALE) for path in _by_path(metas) if path.endswith(SCALE)]


def _by_path(tree) -> dict:
    """{path: leaf}."""
    return {jax.tree_util.keystr(p, simple=True, separator="/"): leaf for p, leaf in jax.tree.leaves_with_path(tree)}


@partial(jax.jit, static_argnums=2)
def _repair(metas, previous, recipe):
    """`metas` in range, where untouched tensors have the state of `previous`; which tensors are untouched, bool[n], and
    which have an amax or a scale, but for -inf, that no step leaves behind, bool[n].

    A tensor is untouched where its scale and history are 0, the gradient of state that no module read.
    """
    leaves, before, untouched, impossible, by_length = _by_path(metas), _by_path(previous), {}, {}, {}
    for name in _tensors_of(metas):
        length = leaves[name + HISTORY].shape[-1]
        check_history_length(f"update_fp8_metas: {name + HISTORY}", length, recipe)
        by_length.setdefault(length, []).append(name)
    for names in by_length.values():
        scales, histories = _join_states(leaves, names)
        wrong_scale = ~is_possible(SCALE, scales[:, 0]) & ~jnp.isneginf(scales[:, 0])
        wrong = wrong_scale | jnp.any(~is_possible(HISTORY, histories), 1)
        reached = (scales != 0) | jnp.any(histories != 0, 1, keepdims=True)
        if before:
            scales, histories = (
                jnp.where(reached, *of) for of in zip((scales, histories), _join_states(before, names))
            )
        sizes = [leaves[n + SCALE].size for n in names]
        are_bwd = [jnp.full(size, direction_at(n) == "bwd") for n, size in zip(names, sizes)]
        in_force = recipe is not None
        law = recipe or DelayedScaling()
        fixed = law.mend_states(scales[:, 0], histories, jnp.concatenate(are_bwd), in_force=in_force)
        leaves |= _split_states(leaves, names, *fixed)
        ends = np.cumsum(sizes)
        untouched |= {n: ~jnp.all(reached[end - size : end]) for n, size, end in zip(names, sizes, ends)}
        impossible |= {n: jnp.any(wrong[end - size : end]) for n, size, end in zip(names, sizes, ends)}
    names = _tensors_of(metas)
    for name, state in zip(names, apart([tuple(leaves[name + end] for end in (SCALE, HISTORY)) for name in names])):
        leaves |= {name + end: a for end, a in zip((SCALE, HISTORY), state)}
    metas = jax.tree.unflatten(jax.tree.structure(metas), map(like, leaves.values(), jax.tree.leaves(metas)))
    return metas, *(jnp.asarray([of[name] for name in _tensors_of(metas)]) for of in (untouched, impossible))


def map_jointly(f: Callable[..., Any], metas: Mapping[str, Any], *others: Mapping[str, Any]) -> Any:
    """`metas` with new state for each tensor, from one computation for all of one length and direction.

    f: (direction, (scales f32[n, 1], histories f32[n, L]), scales and histories of each of `others`) -> (new scales,
       new histories). A tensor has several rows if it is stacked. A scale or history without the other stays as it is.
    """
    leaves, *more = map(_by_path, (metas, *others))
    alike = {}
    for name in _tensors_of(metas):
        if (history := leaves.get(name + HISTORY)) is not None:
            alike.setdefault((history.shape[-1], direction_at(name)), []).append(name)
    for (_, direction), names in alike.items():
        new = f(direction, _join_states(leaves, names), *(_join_states(tree, names) for tree in more))
        leaves |= _split_states(leaves, names, *new)
    return jax.tree.unflatten(jax.tree.structure(metas), map(like, leaves.values(), jax.tree.leaves(metas)))


def _join_states(leaves: dict, names: list[str]) -> tuple[jax.Array, jax.Array]:
    """(scales f32[n, 1], histories f32[n, L]) of the tensors `names` in `leaves`, {path: leaf}, one below the other."""
    rows = lambda x: _replicate(x).reshape(-1, x.shape[-1])
    return tuple(jnp.concatenate([rows(leaves[name + end]) for name in names]) for end in (SCALE, HISTORY))


def _split_states(leaves: dict, names: list[str], scales: jax.Array, histories: jax.Array) -> dict:
    """{path: leaf}, in the shapes of `leaves`, of states that `_join_states` joined."""
    split, at = {}, 0
    for name in names:
        size = leaves[name + SCALE].size
        for end, values in ((SCALE, scales), (HISTORY, histories)):
            split[name + end] = values[at : at + size].reshape(leaves[name + end].shape)
        at += size
    return split


def _replicate(x):
    """x, on every device of an Explicit mesh: leaves of different shardings are concatenated."""
    return jax.sharding.reshard(x, PartitionSpec()) if on_explicit_mesh(jax.typeof(x)) else x


def check_history_length(what: str, length: int, recipe: DelayedScaling | None) -> None:
    """Raises ValueError, which begins with `what`, if a stored history of `length` does not fit `recipe` (None: all
    fit)."""
    if recipe is not None and length != recipe.amax_history_len:
        raise ValueError(
            f"{what} has length {length}, but the recipe in force has amax_history_len={recipe.amax_history_len}; "
            f"convert the state with {_CONVERTER}(collections, recipe), an NNX module's with "
            f"te_jax.nnx.convert_fp8_state(module, recipe), or use amax_history_len={length}."
        )


def convert_fp8_metas(collections: Any, recipe: Recipe) -> Any:
    """`collections` with its FP8 state converted to `recipe`, or without FP8 state for a recipe that has none.

    collections: As in `update_fp8_metas`. State of TransformerEngine before 2.3 is read too: `amax_{i,w,g}_0`,
                 `scale_{i,w,g}_0`, ..., or a collection `fp8_meta_collection`. All becomes `fp8_metas`.

    Histories get the recipe's length and keep the newest amaxes. Scales become what the recipe makes of these amaxes,
    and stay as they are where none is recorded. A leaf without its sibling is completed, with a warning.

    Raises TypeError if `recipe` is not a recipe instance, ValueError or TypeError for malformed FP8 state.
    """
    what = "convert_fp8_metas"
    check_recipe(what, recipe)
    collections, unnamed = with_collection_name(collections)
    check(what, "collections", collections, _BY_NAME)
    collections = _with_names_of_today(what, collections)
    check_collections(what, collections)
    warn_of_impossible(what, collections)
    names = states_in(collections)
    if not recipe.has_state:
        return unnamed(type(collections)({name: value for name, value in collections.items() if name not in names}))

    def convert(path, state):
        return recipe.adopt_state(*state[:2], recipe.fp8_format.max(direction_at(path)))

    whole = {name: _complete(what, collections[name], recipe, name, scale=1.0) for name in names}
    return unnamed(map_states(convert, update_collections(whole, collections)) if names else collections)


def _with_names_of_today(what: str, collections):
    """`collections`, whose FP8 state has the names of today (`_old_state`)."""
    old = older.COLLECTION
    if old in collections:
        if FP8_COLLECTION in collections:
            raise ValueError(f"{what}: collections have both {old!r} and {FP8_COLLECTION!r}; pass one of them.")
        others = {FP8_COLLECTION if name == old else name: value for name, value in collections.items()}
        collections = type(collections)(others)
    names = states_in(collections)
    return update_collections(
        {name: older.names_of_today(what, collections[name], name) for name in names}, collections
    )
