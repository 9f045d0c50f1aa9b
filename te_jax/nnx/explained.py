"""`te_jax.explain_fp8`: how modules of Flax Linen and NNX, and functions, are traced."""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import jax
from flax import linen as nn
from flax import nnx
from flax.core import DenyList

from te_jax.core.arrays import arrays_apart
from te_jax.core.check import BOOL, NONE, STRING, Kind, check, tuple_of
from te_jax.core.products import Noted, Notes, at, taking_notes
from te_jax.explain import ANY_VARIABLES
from te_jax.flax._state import on_missing_state
from te_jax.flax.kernels import WGRAD_COLLECTION
from te_jax.layers.explain_fp8 import Fp8Explanation, Traced, explain_traced
from te_jax.layers.parameters import gradient_targets, with_targets
from te_jax.recipe._exclude import naming
from te_jax.state.fp8 import autocast, check_recipe, current_recipe
from te_jax.state.misplaced import keys_of

_MODEL = Kind(
    "a module of Flax Linen or NNX, or a function",
    lambda value: isinstance(value, nn.Module | nnx.Module) or (callable(value) and not isinstance(value, type)),
    hint=lambda value: "make an instance of it" * isinstance(value, type),
)


def explain_model(
    model: Any, args: Any, kwargs: Any, recipe: Any, variables: Any, train: Any, frozen: Any
) -> Fp8Explanation:
    """As `te_jax.explain_fp8`."""
    check("explain_fp8", "model", model, _MODEL)
    check("explain_fp8", "train", train, BOOL)
    check("explain_fp8", "frozen", frozen, _OF_PATHS)
    is_linen = isinstance(model, nn.Module)
    check("explain_fp8", "variables", variables, NONE if not is_linen else ANY_VARIABLES)
    if recipe is not None:
        check_recipe("explain_fp8", recipe)
    with contextlib.ExitStack() as stack:
        if recipe is not None:
            stack.enter_context(autocast(recipe=recipe))
        notes = stack.enter_context(taking_notes())
        stack.enter_context(_fresh_state())
        stack.enter_context(nn.intercept_methods(_Linen(notes)))
        call, arrays = arrays_apart(args, kwargs)
        arrays = _types(arrays)
        if is_linen:
            traced = _of_linen(model, variables, call, arrays)
        elif isinstance(model, nnx.Module):
            traced = _of_nnx(model, call, arrays)
        else:
            traced = Traced(lambda moving, _: call(model, moving[1]), ({}, arrays))
        traced = traced._replace(frozen=_frozen_places(traced.moving[0], tuple(frozen)))
        return explain_traced(traced, notes, current_recipe(), bool(train))


_OF_PATHS = tuple_of(STRING)


@contextlib.contextmanager
def _fresh_state() -> Iterator[None]:
    """Missing FP8 state is neither an error nor a warning within the block."""
    token = on_missing_state.set(lambda *_: None)
    try:
        yield
    finally:
        on_missing_state.reset(token)


def _frozen_places(params: Any, patterns: tuple[str, ...]) -> frozenset[int]:
    """The places of the leaves of `params` that the patterns name. Raises ValueError for one that names none."""
    paths = [keys_of(path) for path, _ in jax.tree.leaves_with_path(params)]
    for pattern in patterns:
        if not any(naming((pattern,), path) for path in paths):
            some = (
                ", ".join("/".join(path) for path in paths[:8]) or "no parameters: jax.lax.stop_gradient in a function"
            )
            raise ValueError(f"explain_fp8: frozen has {pattern!r}, which names no parameter; there are {some}.")
    return frozenset(i for i, path in enumerate(paths) if naming(patterns, path))


def _types(tree):
    return jax.eval_shape(lambda tree: tree, tree)


def _noted(kind: type, module: nn.Module | nnx.Module) -> Noted:
    way, fields = _HOOKS[isinstance(module, nnx.Module)]
    if kind.__module__.startswith("te_jax."):
        return Noted(kind.__name__, None)
    hooks = [f"{name}={way}" for name in fields if hasattr(module, name)]
    if hooks:
        return Noted(kind.__name__, f"give {kind.__name__} {', '.join(hooks)}")
    return Noted(kind.__name__, f"a product of jax.numpy or jax.lax, where {way} would be in FP8")


_HOOKS = (
    ("te_jax.flax.DotGeneral", ("dot_general_cls", "qkv_dot_general_cls", "out_dot_general_cls")),
    ("te_jax.nnx.DotGeneral()", ("dot_general",)),
)


# -- Linen ----------------------------------------------------------------------------------------------------


class _Linen:
    """An interceptor of methods: says of what is traced in them which module it belongs to.

    A module that is applied inside of another, by an `apply` of its own, is at the path of that, and below.
    """

    def __init__(self, notes: Notes) -> None:
        self._notes, self._root, self._base = notes, None, ""

    def __call__(self, call, args, kwargs, context):
        module = context.module
        if module.scope is None:
            return call(*args, **kwargs)
        outer, root = (self._root, self._base), module.scope.root
        if root is not self._root and root.path_text == "/":  # else a transform of Flax's is around the module
            self._root, self._base = root, self._notes.path
        try:
            with at("/".join(filter(None, [self._base, *module.path])), _noted(type(module), module)):
                return call(*args, **kwargs)
        finally:
            self._root, self._base = outer


def _of_linen(model, variables, call, arrays) -> Traced:
    key = jax.eval_shape(jax.random.key, 0)
    if variables is None:
        init = lambda key, arrays: call(functools.partial(model.init, key), arrays)
        variables = jax.eval_shape(init, key, arrays)
    others = dict(_types(variables))
    params = others.pop("params", {})
    sums = {WGRAD_COLLECTION: others.pop(WGRAD_COLLECTION)} if WGRAD_COLLECTION in others else {}

    def function(moving, fixed):
        (slots, sums, arrays), (params, others, key) = moving, fixed
        rngs = {"params": key}  # all other streams fall back on it
        collections = {"params": with_targets(params, slots), **sums, **others}
        apply = functools.partial(model.apply, collections, rngs=rngs, mutable=DenyList(("params", WGRAD_COLLECTION)))
        return call(apply, arrays)[0]

    return Traced(function, (jax.eval_shape(gradient_targets, params), sums, arrays), (params, others, key))


# -- NNX ------------------------------------------------------------------------------------------------------


def _of_nnx(model, call, arrays) -> Traced:
    graph, params, others = nnx.split(model, nnx.Param, ...)

    def function(moving, others):
        params, arrays = moving
        copy = nnx.merge(graph, params, others)
        for path, module in nnx.iter_modules(copy):
            if callable(module):
                module.__class__ = _located(type(module), "/".join(map(str, path)))
        return call(copy, arrays)

    return Traced(function, (_types(params), arrays), _types(others))


@functools.cache
def _located(cls: type[nnx.Module], path: str) -> type[nnx.Module]:
    """`cls`, whose instances say that they are at `path` when they are called. A class, for it goes through all
    transforms of NNX, and adds no attribute to the modules."""

    def __call__(self, *args, **kwargs):
        with at(path, _noted(cls, self)):
            return cls.__call__(self, *args, **kwargs)

    return type(cls)(cls.__name__, (cls,), {"__call__": __call__, "__module__": cls.__module__})
