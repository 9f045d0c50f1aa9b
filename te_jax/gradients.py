"""FP8 state whose uses combine by max where autodiff would add them up.

Autodiff adds the cotangents of a value that is used twice. The modules prevent that for a module that is applied twice
in one `apply` (`fp8.fork`), but not where the uses meet outside of modules: one `nn.remat` module called twice,
`nn.scan` with variable_broadcast, two `apply`s in one loss, a scan over microbatches. This file moves the law of the
recipe to the top of the differentiated function. The cotangents below it are amaxes, of a type whose sum is the max.
"""

import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from te_jax.core.amax import amax as amax_of
from te_jax.core.check import BOOL, FUNCTION, Kind, check, integer, show, tuple_of, warn
from te_jax.core.derivatives import custom_vjp
from te_jax.core.jaxprs import ARRAYS
from te_jax.core.loops import plain_loops
from te_jax.layers.parameters import gradient_targets, has_kernels, with_targets
from te_jax.ops.scale_update import next_states
from te_jax.recipe.delayed import HISTORY
from te_jax.state.amax_type import errors_of_amaxes, from_amaxes, is_amaxes, movable, to_amaxes
from te_jax.state.fp8 import STATE_COLLECTIONS
from te_jax.state.metas import (
    check_collections,
    check_history_length,
    check_same_state,
    direction_at,
    map_states,
    recipe_with_state,
    states_in,
    update_collections,
)
from te_jax.state.misplaced import is_bare, warn_of_impossible, with_collection_name


@custom_vjp(1, 2, in_fp8=lambda *_: "te_jax.value_and_grad")
def _receive(states, recipe, directions):
    """The states of tensors as their modules receive them: the scale, and history and probe in the type of amaxes.

    states: for each tensor (scale f32[..., 1], amax_history f32[..., L]), and its probe f32[..., 4] or none.
    """
    return tuple((scale, *map(to_amaxes, others)) for scale, *others in states)


def _receive_bwd(recipe, directions, states, cotangents):
    seen = [[from_amaxes(g) for g in of_tensor[1:]] for of_tensor in cotangents]
    amaxes = [amax_of(history, (history.ndim - 1,)) for history, *_ in seen]  # 0 if nothing used the state.
    new = next_states(recipe, [state[:2] for state in states], amaxes, directions)
    return (tuple((*state, *probe) for state, (_, *probe) in zip(new, seen)),)


_receive.defvjp(lambda states, *static: (_receive(states, *static), states), _receive_bwd)


@custom_vjp()
def reach(value: Any, states: Any) -> Any:
    """`value`. Its backward pass reaches all of `states`: the gradient of state that no module read would be 0."""
    return value


def _no_amax(leaf):
    """Zeros like `leaf`, made in f32: zeros_like of the type of amaxes does not vary over the mesh axes that `leaf`
    varies over."""
    return lax.convert_element_type(jnp.zeros_like(lax.convert_element_type(leaf, jnp.float32)), leaf.dtype)


reach.defvjp(lambda value, states: (value, states), lambda states, g: (g, jax.tree.map(_no_amax, states)))


def combine_by_max(collections: Any) -> Any:
    """`collections` with its FP8 state in a form whose uses combine by max under autodiff.

    collections: Variables with or without `fp8_metas`, a dict or FrozenDict; or FP8 state itself.

    Call it in the first line of a function to be differentiated, under the autocast of its modules. Outside of autocast
    and under a recipe without state `collections` is returned as it is. The cotangent is the new state. For a state
    with several uses, by modules, by scan steps or in several `apply`s, it is made from the largest amax of all.

    jax adds up the type of amaxes only under `jax.jit`, and cannot differentiate every operation that moves its
    elements, such as `a[i]` of a stacked state. `te_jax.value_and_grad` has neither limit.

    Raises ValueError for a history of another length than the recipe has, ValueError or TypeError for malformed FP8
    state.
    """
    collections, unnamed = with_collection_name(collections)
    check_collections("combine_by_max", collections)
    recipe = recipe_with_state()
    if recipe is None:
        return unnamed(collections)

    states = {}
    map_states(lambda path, state: states.update({path: state}) or state, collections)
    for path, state in states.items():
        check_history_length(path + HISTORY, state[1].shape[-1], recipe)
    received = _receive(tuple(states.values()), recipe, tuple(map(direction_at, states)))
    of_path = dict(zip(states, received))
    return unnamed(map_states(lambda path, _: of_path[path], collections))


def max_fp8_metas(before: Any, microbatches: Any) -> Any:
    """The FP8 state after one step whose gradients were taken microbatch by microbatch.

    Each tensor has the state after the microbatch with its largest amax.

    before:       The collection `fp8_metas` (by its name in a dict or FrozenDict, or itself) that every microbatch
                  started from.
    microbatches: The k gradients with respect to it, stacked along a new first axis, as `lax.scan` and `jax.vmap`
                  return them: leaves f32[k, ..., 1] and f32[k, ..., L]. Other collections pass through.

    A microbatch that saw no finite amax counts only if no microbatch did. Where the last L - 1 recorded amaxes are
    equal, as they always are for L = 2, a microbatch that saw none looks like one that saw the same amax again, and
    counts as the latter. A history of length 1 holds no amax: the smallest scale is taken, which may be the old one.

    Raises ValueError for trees of different structure and for leaves that are not stacked, ValueError or TypeError for
    malformed FP8 state.
    """
    what = "max_fp8_metas"
    (before, _), (microbatches, unnamed) = with_collection_name(before), with_collection_name(microbatches)
    check_collections(what, before, "before")
    check_collections(what, microbatches, "microbatches")
    if not states_in(before):
        return unnamed(microbatches)
    for name in states_in(before):
        got, want = (jax.tree.structure(tree.get(name)) for tree in (microbatches, before))
        if got != want:
            raise ValueError(
                f"{what}: microbatches hold {got}, but before {want}; pass gradients with respect to `before`."
            )
        one = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), microbatches[name])
        check_same_state(what, "one of the microbatches (along the first axis)", one, "before", before[name], name)
    return unnamed(map_states(_largest, microbatches, before))


def _largest(path, new, old):
    """The state of the microbatch with the largest amax; for probes the largest numbers.

    new: (scales f32[k, ..., 1], histories f32[k, ..., L]), and probes f32[k, ..., 4] or none. old: the state before.
    """
    (scales, histories, *probes), (scale, history) = new, (leaf[None] for leaf in old[:2])
    if history.shape[-1] == 1:
        order = jnp.where(scales > 0, -scales, -jnp.inf)[..., 0]
    else:
        changed = jnp.any(histories != history, -1) | jnp.any(scales != scale, -1)
        steady = jnp.all(history[..., 1:] == history[..., -1:], -1)
        seen = (changed | steady) & jnp.isfinite(histories[..., -1])
        order = jnp.where(seen, histories[..., -1], -1.0)
    count = scales.shape[0]
    chosen = jnp.arange(count).reshape(count, *[1] * (order.ndim - 1)) == jnp.argmax(order, 0, keepdims=True)
    of_chosen = (jnp.sum(jnp.where(chosen[..., None], x, 0.0), 0) for x in new[:2])  # Exact: one term is not 0.
    return *of_chosen, *(amax_of(probe, (0,)) for probe in probes)


def value_and_grad(
    fun: Callable[..., Any], argnums: int | Sequence[int] = 0, has_aux: bool = False
) -> Callable[..., Any]:
    """`jax.value_and_grad` for functions of FP8 state and of parameters that live in FP8.

    fun, argnums, has_aux: As in `jax.value_and_grad`.

    All uses of an FP8 state combine by max (`combine_by_max`). The gradient of each `fp8_metas` within the
    differentiated arguments is its new state: the old one where no module read it, and outside of autocast. Between its
    arguments and the modules `fun` may move the elements of a state (slices, indices, stacks, loops over layers), but
    not compute with them.

    Instead of a QuantizedKernel (`te_jax.flax.fp8_params`) the gradient holds an array [*C, *F] of its dtype: the
    gradient of the dequantized values, from layers that multiply by it and from `dequantize`. What `fun` computes from
    its leaves in another way, such as a sum of squares of all parameters, has no gradient.

    Loops over layers (`nn.scan`) write what the backward pass needs of them, and gradients, into memory that is not
    filled with zeros first; plain `jax.value_and_grad` fills it.

    The function that it returns is compiled as by `jax.jit`: build it once, not in every step. Among the arguments that
    are not differentiated, arrays, floats and complex numbers are traced, so another value does not compile again. All
    others (bool, int, str, ...) are static and must be hashable: an int may be a size or a count of steps.

    Raises TypeError where `fun` computes with FP8 state or returns no floating scalar, or with has_aux no pair of one
    and more, and for argnums that are no ints; ValueError for places at which a call has no argument. Warns of state
    that nothing in `fun` reads under autocast.
    """
    check("value_and_grad", "fun", fun, FUNCTION)
    check("value_and_grad", "argnums", argnums, ARGNUMS)
    check("value_and_grad", "has_aux", has_aux, BOOL)
    differentiated = tuple(argnums) if isinstance(argnums, Sequence) else (operator.index(argnums),)
    name = getattr(fun, "__name__", repr(fun))

    def of_states(*args, **kwargs):
        args, receive = list(args), _keep_unread if recipe_with_state() is None else combine_by_max
        for i in differentiated:
            args[i] = jax.tree.map(lambda a: receive(a) if _has_state(a) else a, args[i], is_leaf=_has_state)
        out, is_read = movable(fun)(*args, **kwargs)
        check_result("value_and_grad", name, out, has_aux)
        states = [
            leaf for i in differentiated for leaf in jax.tree.leaves(args[i], is_leaf=_has_state) if _has_state(leaf)
        ]
        _warn_of_unread(args, is_read)
        value, *aux = out if has_aux else (out,)
        value = reach(
            value, [whole[name] for whole, _ in map(with_collection_name, states) for name in states_in(whole)]
        )
        return (value, *map(_as_stored, aux)) if has_aux else value

    def run(*args, **kwargs):
        check_places("value_and_grad", name, differentiated, len(args))
        in_range = differentiated
        narrow = {i: args[i] for i in in_range if has_kernels(args[i])}

        def of_targets(*args, **kwargs):
            return of_states(*_with(args, {i: with_targets(params, args[i]) for i, params in narrow.items()}), **kwargs)

        args = _with(args, {i: gradient_targets(params) for i, params in narrow.items()})
        with errors_of_amaxes("value_and_grad", "slice, index, stack, reshape or select it outside of jax.custom_vjp"):
            return plain_loops(jax.value_and_grad(of_targets, argnums, has_aux))(*args, **kwargs)

    return wraps(fun)(_compile(run, differentiated, name))


ARGNUMS = integer() | Kind(
    "a tuple of different ints, the places of arguments",
    lambda value: tuple_of(integer()).is_type(value),
    lambda value: 0 < len(value) == len(set(value)) and tuple_of(integer()).accepts(value),
)


def check_places(where: str, name: str, places: Sequence[int], count: int) -> None:
    """Raises ValueError unless `name`, a function that is called with `count` arguments by place, has all `places`."""
    for at in places:
        if not -count <= at < count:
            raise ValueError(
                f"{where}: argnums has {at}, but {name} was called with {count} arguments by place; pass what is "
                "differentiated by place, not by name."
            )


def check_result(where: str, name: str, out: Any, has_aux: bool) -> None:
    """Raises TypeError unless `out`, what the function `name` returned, is a loss f[], or with has_aux (loss, aux)."""
    if has_aux and not (isinstance(out, tuple | list) and len(out) == 2):
        raise TypeError(
            f"{where}: has_aux is True, but {name} returns {show(out)}; return (loss, aux), or leave has_aux out."
        )
    loss = out[0] if has_aux else out
    is_real = isinstance(loss, float) or (isinstance(loss, ARRAYS) and jnp.issubdtype(loss.dtype, jnp.floating))
    if not is_real or jnp.ndim(loss):
        aux = " (has_aux=True takes a pair (loss, aux))" if isinstance(out, tuple | list) and not has_aux else ""
        raise TypeError(f"{where}: the loss of {name} is {show(loss)}; return a floating scalar{aux}.")


def _compile(f, differentiated: tuple[int, ...], name: str):
    """`jax.jit(f)`, whose static arguments are all that are neither differentiated nor of `_TRACED`.

    differentiated: The positions of these arguments. name: The function's name, for errors.
    """
    seen, calls = set(), itertools.count(1)  # Static arguments; calls so far.

    @partial(jax.jit, static_argnums=(1, 2))
    def run(arrays, static, treedef):
        leaves = [array if array is not None else value for array, (*_, value) in zip(arrays, static)]
        args, kwargs = jax.tree.unflatten(treedef, leaves)
        return f(*args, **kwargs)

    def call(*args, **kwargs):
        if (n := next(calls)) & (n - 1) == 0:  # Calls 1, 2, 4, 8, ...: looking waits for the step before.
            warn_of_impossible("value_and_grad", [with_collection_name(arg)[0] for arg in args])
        traced = {i % len(args) for i in differentiated if -len(args) <= i < len(args)}
        marks = [jax.tree.map(lambda _, i=i: i in traced, a) for i, a in enumerate(args)]
        marks = jax.tree.leaves((marks, jax.tree.map(lambda _: False, kwargs)))
        leaves, treedef = jax.tree.flatten((args, kwargs))
        dynamic = [mark or isinstance(a, _TRACED) for a, mark in zip(leaves, marks)]
        arrays = [a if d else None for a, d in zip(leaves, dynamic)]
        # With their type: 1 and True are equal, but do not compute the same.
        static = tuple((None,) if d else (type(a), a) for a, d in zip(leaves, dynamic))
        for _, value in (s for s in static if len(s) == 2):
            check("value_and_grad", f"an argument of {name}", value, _HASHABLE)
        if static not in seen and len(seen) < _MANY:
            seen.add(static)
            if len(seen) == _MANY:
                _warn_of_many(name, static)
        return run(arrays, static, treedef)

    return call


def _is_hashable(value) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


_TRACED = ARRAYS | float | complex
_HASHABLE = Kind("an array, a number or something hashable", _is_hashable)
_MANY = 8


def _warn_of_many(name: str, static):
    values = [value for *_, value in static if isinstance(value, int) and not isinstance(value, bool)]
    warn(
        f"value_and_grad: {name} was compiled for {_MANY} values of its static arguments"
        f"{f', the last {values[0]}' if values else ''}; pass what changes, such as a step, as an array: "
        "jnp.asarray(step).",
    )


def _keep_unread(collections):
    """`collections`, where the gradient of state that no module reads is the state: for no recipe with state."""
    collections, unnamed = with_collection_name(collections)
    kept = _keep({name: collections[name] for name in states_in(collections)})
    return unnamed(update_collections(kept, collections))


@custom_vjp()
def _keep(states):
    return states


def _keep_bwd(states, grads):
    """The state where its gradient is 0, else the gradient: a module may have an autocast of its own."""

    def of_tensor(_, new, old):
        read = (new[0] != 0) | jnp.any(new[1] != 0, -1, keepdims=True)
        return (jnp.where(read, n, o) for n, o in zip(new, old))

    return (map_states(of_tensor, grads, states),)


_keep.defvjp(lambda states: (states, states), _keep_bwd)


def _warn_of_unread(args, is_read: list[bool]):
    """Warns of FP8 state in `args` that nothing reads. is_read: For each leaf of `args` that is an array."""
    names = []
    arrays = [(path, leaf) for path, leaf in jax.tree.leaves_with_path(args) if isinstance(leaf, ARRAYS)]
    for (path, array), used in zip(arrays, is_read):
        if is_amaxes(array) and not used:
            keys = [str(getattr(key, "key", getattr(key, "name", key))) for key in path]
            at = next((i for i, key in enumerate(keys) if key in STATE_COLLECTIONS), 1)  # Behind the argument's index.
            names.append("/".join(keys[at:]).removesuffix(HISTORY))
    if names:
        more = f" and {len(names) - 1} more" if names[1:] else ""
        warn(
            f"value_and_grad: no module reads the FP8 state {names[0]}{more}, so it stays as it is; pass the state "
            "that `init` made of the modules that run, under the same recipe.",
        )


def _with(args, others):
    """`args` with the arguments `others` ({index: argument}) in their places."""
    args = list(args)
    for i, other in others.items():
        args[i] = other
    return args


def _has_state(node):
    return isinstance(node, Mapping) and (bool(states_in(node)) or is_bare(node))


def _as_stored(aux):
    """`aux` with state in f32: `apply(mutable=...)` returns the state that `combine_by_max` converted."""
    return jax.tree.map(lambda a: lax.convert_element_type(a, jnp.float32) if is_amaxes(a) else a, aux)
