"""Gradients of parameters, together with the step of the FP8 state."""

from collections.abc import Callable, Mapping
from functools import partial, wraps
from typing import Any

import jax
from flax import linen as nn
from flax import nnx

from te_jax.core.check import BOOL, FUNCTION, Kind, check, integer, number, warn_once
from te_jax.core.loops import plain_loops
from te_jax.flax.moe import update_expert_bias
from te_jax.gradients import check_places, check_result, combine_by_max, reach
from te_jax.nnx._layer import ExpertBias, Fp8State, Loss
from te_jax.nnx.convert import collections_of, with_collections
from te_jax.state.amax_type import errors_of_amaxes
from te_jax.state.fp8 import FP8_COLLECTION, OVERWRITE_COLLECTION, current_recipe
from te_jax.state.metas import update_fp8_metas

_VALUE_AND_GRAD = "te_jax.nnx.value_and_grad"
_DIFFERENTIABLE = Kind(
    "an nnx.Module (nnx.Dict and nnx.List hold several), or its nnx.State",
    lambda value: isinstance(value, nnx.Pytree | nnx.State),
    hint=lambda value: "of a module of Flax Linen te_jax.value_and_grad takes gradients" if _is_linen(value) else "",
)
_FILTER = Kind(
    "a filter of variables, such as nnx.Param",
    lambda value: callable(value) or value is None or isinstance(value, str | bool | type(...) | list | tuple),
)


def _is_linen(value) -> bool:
    return isinstance(value, nn.Module) or (isinstance(value, Mapping) and "params" in value)


def value_and_grad(
    f: Callable, *, argnums: int = 0, has_aux: bool = False, wrt: Any = nnx.Param, expert_bias_rate: float = 1e-3
) -> Callable:
    """`nnx.value_and_grad` of a module, which updates the module's FP8 state and biases of experts too.

        loss, grads = te_jax.nnx.value_and_grad(loss_fn)(model, batch)
        optimizer.update(model, grads)

    f:       (model, ...) -> loss f32[], or (loss, aux) with has_aux. It may change the state of its modules.
    argnums: The position of the module, or of its `nnx.State`, among the arguments.
    wrt:     The filter of the variables that get gradients. The returned gradients hold only these.
    expert_bias_rate: By how much each `ExpertBias` moves in a call, by the tokens of all its uses
             (`te_jax.flax.update_expert_bias`).

    Each call is one step of the FP8 state in the model, under the recipe in force. All uses of a tensor in `f`, by a
    layer called twice, by shared weights, in the steps of an `nnx.scan` or over microbatches, combine by their largest
    amax. A call outside of autocast, or of a model without FP8 state, changes no state. Put microbatches into `f`:
    under `optax.MultiSteps` the state would move with each microbatch, not with the parameters. A plain
    `nnx.value_and_grad` treats FP8 state and biases of experts as constants, and a warning says so.

    Loops over layers (`nnx.scan`) write what the backward pass needs of them, and gradients, into memory that is not
    filled with zeros first.

    The function that it returns is compiled as by `nnx.jit`: build it once, or call it within `nnx.jit`. Arguments that
    are bool, str, None or functions are static, by name too.

    FP8 state that `f` takes out of its modules may be mapped and looped over (`nnx.vmap`, `nnx.scan`), but not sliced,
    as by `a[i]`: jax has no gradient of that. `te_jax.value_and_grad` has.

    Warns where `f` leaves losses of routers (`Loss`) in the model, which are then in no loss, and drops them. Raises
    TypeError for such slices, for a model that is no nnx.Module and for an `f` that returns no floating scalar, or with
    has_aux no pair of one and more; ValueError for a `wrt` that selects nothing or FP8 state, for a model with FP8
    state under a recipe without state, and for histories of another length than the recipe has.
    """
    check(_VALUE_AND_GRAD, "f", f, FUNCTION)
    check(_VALUE_AND_GRAD, "argnums", argnums, integer())
    check(_VALUE_AND_GRAD, "has_aux", has_aux, BOOL)
    check(_VALUE_AND_GRAD, "wrt", wrt, _FILTER)
    check(_VALUE_AND_GRAD, "expert_bias_rate", expert_bias_rate, number(least=0))
    name = getattr(f, "__name__", repr(f))

    def call(model_at, *args):
        *args, constant, kwargs = args
        if constant:
            args[model_at] = nnx.merge_state(args[model_at], constant)
        out = f(*args, **kwargs)
        check_result(_VALUE_AND_GRAD, name, out, has_aux)
        return out

    @partial(nnx.jit, static_argnums=(0, 1))
    def run(static, model_at, args, kwargs):
        known, known_by_name = static
        args = [a if value is ... else value for value, a in zip(known, args)]
        kwargs = {**kwargs, **dict(known_by_name)}
        model = args[model_at]
        _check_selection(model, wrt)
        nnx.pop(model, Loss)  # of calls before this one
        moves = _moves_state(model)
        uses = partial(call, model_at)
        uses = _combining_uses(uses, model_at, has_aux) if moves else uses
        differentiated = nnx.DiffState(model_at, nnx.Any(wrt, ExpertBias, moves and Fp8State))
        constant = nnx.State({})
        if isinstance(model, nnx.State):  # nnx takes gradients of all that is in one, whatever the filter
            args[model_at], constant = nnx.split_state(model, differentiated.filter, ...)
        with errors_of_amaxes(_VALUE_AND_GRAD, "map and loop over it by nnx.vmap and nnx.scan"):
            step = nnx.value_and_grad(uses, argnums=differentiated, has_aux=has_aux)
            value, grads = _in_plain_loops(step, (*args, constant, kwargs))
        _drop_losses(model)
        return value, _update_state(model, grads, moves, expert_bias_rate)

    @wraps(f)
    def value_and_grad_of_f(*args, **kwargs):
        check_places(_VALUE_AND_GRAD, name, (argnums,), len(args))
        check(_VALUE_AND_GRAD, f"argument {argnums} of {name}", args[argnums], _DIFFERENTIABLE)
        static = tuple(a if _is_static(a) else ... for a in args)
        by_name = tuple((key, a) for key, a in sorted(kwargs.items()) if _is_static(a))
        traced = tuple(None if _is_static(a) else a for a in args)
        named = {key: a for key, a in kwargs.items() if not _is_static(a)}
        return run((static, by_name), range(len(args))[argnums], traced, named)

    return value_and_grad_of_f


def _in_plain_loops(step: Callable, args: tuple):
    """step(*args), which may change modules among its arguments, with the loops of `te_jax.core.loops`."""
    afterwards = []

    def pure(state):
        with nnx.merge_context(_VALUE_AND_GRAD, inner=True) as context:
            args = context.merge(structure, state)
        results = step(*args)
        with nnx.split_context(_VALUE_AND_GRAD) as context:
            after, state = context.split((args, results))
        afterwards.append(after)
        return state

    with nnx.update_context(_VALUE_AND_GRAD):
        with nnx.split_context(_VALUE_AND_GRAD) as context:
            structure, state = context.split(args)
        state = plain_loops(pure)(state)
        with nnx.merge_context(_VALUE_AND_GRAD, inner=False) as context:
            return context.merge(afterwards[-1], state)[1]


def _moves_state(model) -> bool:
    """Whether a call moves FP8 state in the model. Raises ValueError for state under a recipe without."""
    recipe = current_recipe()
    moves = recipe is not None and bool(nnx.state(model, Fp8State))
    if moves and not recipe.has_state:
        raise ValueError(
            f"{_VALUE_AND_GRAD}: the model has FP8 state, but {type(recipe).__name__}, the recipe in force, has none; "
            "drop it with te_jax.nnx.convert_fp8_state(model, recipe), or use the state's recipe."
        )
    return moves


def _update_state(model, grads, moves: bool, expert_bias_rate: float):
    """Moves the FP8 state of the model, with `moves`, and its biases of experts by their gradients; returns the other
    gradients."""
    new, counts, grads = nnx.split_state(grads, Fp8State, ExpertBias, ...)
    if moves:
        nnx.update(model, with_collections(new, update_fp8_metas(collections_of(new))))
    biases = collections_of(nnx.state(model, ExpertBias))
    biases = update_expert_bias(biases, collections_of(counts), expert_bias_rate)
    nnx.update(model, with_collections(counts, biases))
    return grads


def _drop_losses(model):
    """Takes the losses of routers out of the model, with a warning: they are in no loss."""
    if left := nnx.pop(model, Loss):
        path = "/".join(map(str, nnx.to_flat_state(left)[0][0]))
        warn_once(
            _VALUE_AND_GRAD,
            f"the function leaves losses of routers in the model, {path} and what else nobody took: add the sum of "
            "nnx.pop(model, te_jax.nnx.Loss) to its loss, as MoEBlock's docstring does, or set the coefficients to 0.",
        )


def _check_selection(model, wrt):
    """Raises ValueError where `wrt` selects nothing of the model, or its FP8 state; warns of state that stays."""
    if not nnx.state(model, wrt):
        raise ValueError(
            f"{_VALUE_AND_GRAD}: wrt is {wrt!r}, which selects no variable of the model; pass nnx.Param, "
            "or a filter of what is to be trained."
        )
    if nnx.state(model, nnx.All(wrt, Fp8State)):
        raise ValueError(
            f"{_VALUE_AND_GRAD}: wrt is {wrt!r}, which takes FP8 state for parameters; pass wrt=nnx.Param "
            "here and to nnx.Optimizer: FP8 state moves next to them."
        )
    if nnx.state(model, lambda _, variable: type(variable).__name__ == OVERWRITE_COLLECTION):
        warn_once(
            _VALUE_AND_GRAD,
            f"the model has FP8 state of the type {OVERWRITE_COLLECTION}, as of Linen modules in nnx.bridge.ToNNX, "
            'which stays as it is; make the model under te_jax.autocast(..., collection="fp8_metas"), or take the '
            "gradient of that state for its next value.",
        )


def _is_static(argument) -> bool:
    function = callable(argument) and not isinstance(argument, nnx.Pytree) and jax.tree_util.all_leaves([argument])
    return argument is None or isinstance(argument, bool | str) or function


def _combining_uses(f: Callable, model_at: int, has_aux: bool) -> Callable:
    """`f`, in which all uses of the model's FP8 state combine by max (see `te_jax.combine`)."""

    def call(*args):
        model = args[model_at]
        state = nnx.state(model, Fp8State)
        amaxes = combine_by_max(collections_of(state))
        nnx.update(model, with_collections(state, amaxes))
        out = f(*args)
        nnx.update(model, state)
        value, *aux = out if has_aux else (out,)
        value = reach(value, amaxes[FP8_COLLECTION])
        return (value, *aux) if has_aux else value

    return call
