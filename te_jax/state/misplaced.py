"""Finds FP8 state that stands outside of its collection, or that an optimizer has changed."""

import itertools
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from te_jax.core.check import told, warn_once
from te_jax.recipe.delayed import HISTORY, SCALE
from te_jax.state import older
from te_jax.state.fp8 import (
    ENDINGS,
    FP8_COLLECTION,
    OVERWRITE_COLLECTION,
    STATE_COLLECTIONS,
    AttentionMetas,
    DenseMetas,
)

LEAF_NAMES = tuple(tensor + end for of in (DenseMetas, AttentionMetas) for tensor in of._fields for end in ENDINGS)
_HOMES = {*STATE_COLLECTIONS, older.COLLECTION}


def is_leaf_name(name: str) -> bool:
    """Whether a leaf of FP8 state may have this name; tensors of a module with several GEMMs have a postfix."""
    return re.sub(r"_\d+(?=_)", "", name) in LEAF_NAMES


def keys_of(path: tuple[Any, ...]) -> tuple[str, ...]:
    """The keys of a path of jax's; a key that is a path itself, "a/b", counts as two."""
    keys = (str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in path)
    return tuple(itertools.chain(*(key.split("/") for key in keys)))


def stray_state(tree: Any) -> list[tuple[str, ...]]:
    """The paths of leaves of FP8 state in `tree` that stand below no name of a collection of FP8 state. State of Flax's
    own FP8 products is none."""
    paths = [keys_of(path) for path, _ in jax.tree.leaves_with_path(tree)]
    paths = {path for path in paths if path and _HOMES.isdisjoint(path)}
    found = {path for path in paths if older.has_pair(path, paths)}
    for *node, name in paths:
        pair = {(*node, name), (*node, name.removesuffix(HISTORY) + SCALE)}
        of_flax = (*node, "input_scale") in paths
        if name.endswith(HISTORY) and is_leaf_name(name) and pair <= paths and not of_flax:
            found |= pair
    return sorted(found)


def is_bare(tree: Any) -> bool:
    """Whether `tree` is FP8 state itself, without the name of its collection."""
    if not isinstance(tree, Mapping) or not stray_state(tree):
        return False
    names = [keys_of(path)[-1] for path, _ in jax.tree.leaves_with_path(tree)]
    return all(name.endswith((*ENDINGS, older.INVERSE)) or older.is_old(name) for name in names)


def with_collection_name(tree: Any) -> tuple[Any, Callable[[Any], Any]]:
    """(tree, function). Where `tree` is FP8 state itself, it becomes {"fp8_metas": tree}, and the function, for what is
    made of that, takes the name off again; elsewhere both change nothing."""
    if not is_bare(tree):
        return tree, lambda made: made
    return type(tree)({FP8_COLLECTION: tree}), lambda made: made.get(FP8_COLLECTION, type(tree)({}))


def check_no_stray(what: str, name: str, collections: Any) -> None:
    """Raises ValueError, naming `what` and the argument `name`, for FP8 state in `collections` where nothing would find
    it: below no name of a collection, or below one that is not at the top."""
    strays, old = stray_state(collections), older.COLLECTION
    for path, _ in jax.tree.leaves_with_path(collections):
        keys = keys_of(path)
        strays += [keys] if not _HOMES.isdisjoint(keys[1:]) else []
    if strays:
        raise ValueError(
            f"{what}: {name} has FP8 state at {'/'.join(strays[0])}, which is in no collection at the top; pass "
            f"{{{FP8_COLLECTION!r}: ...}} of one model, as `init` returns it."
        )
    if isinstance(collections, Mapping) and old in collections:
        raise ValueError(
            f"{what}: {name} has the collection {old!r}, FP8 state of an older library; read it by "
            "te_jax.convert_fp8_metas(collections, recipe)."
        )


_IMPOSSIBLE = (
    "this FP8 state has a negative amax, or a scale that is negative or not finite, which no step leaves behind: an "
    "optimizer changed it like a parameter. FP8 state moves by its gradient, which is its next value. Train by "
    "te_jax.flax.TrainState; or by Flax's own, whose optimizer does not see the state of te_jax.autocast(..., "
    f'collection="{OVERWRITE_COLLECTION}"); or wrap the optimizer by te_jax.flax.fp8_masked. Begin with fresh state, '
    "as `init` makes it."
)


def is_possible(name: str, values: Any) -> Any:
    """Which numbers of the leaf `name` of FP8 state, or of arrays in its form, a step may leave behind; bool."""
    if name.endswith(HISTORY):  # Entry 0 holds minus a count.
        return values[..., 1:] >= 0
    return (values >= 0) & (values < np.inf)  # 0 is the gradient of what no module read.


def tell_of_impossible(where: str) -> None:
    """Warns, naming `where`, once in a process, that FP8 state is none that a step leaves behind."""
    warn_once(where, _IMPOSSIBLE)


def warn_of_impossible(what: str, tree: Any) -> None:
    """`tell_of_impossible`, naming `what`, if there is such FP8 state in `tree`.

    The check waits until the values are computed. Tracers, which have none, and arrays of which this process holds only
    a part are passed over.
    """
    if _IMPOSSIBLE in told or not any(map(is_known, jax.tree.leaves(tree))):
        return
    leaves = ((keys_of(path), leaf) for path, leaf in jax.tree.leaves_with_path(with_collection_name(tree)[0]))
    in_state = lambda path: path[-1:] and path[-1].endswith((SCALE, HISTORY)) and not _HOMES.isdisjoint(path)
    leaves = [(path, leaf) for path, leaf in leaves if in_state(path) and is_known(leaf)]
    for (path, _), values in zip(leaves, jax.device_get([leaf for _, leaf in leaves])):
        if not np.all(is_possible(path[-1], values)):
            tell_of_impossible(f"{what}: {'/'.join(path)}")
            return


def is_known(leaf: Any) -> bool:
    """Whether this process can look at all values of an array."""
    if isinstance(leaf, np.ndarray):
        return True
    if not isinstance(leaf, jax.Array) or isinstance(leaf, jax.core.Tracer):
        return False
    known = leaf.is_fully_addressable or leaf.is_fully_replicated
    return known and not jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.extended)
