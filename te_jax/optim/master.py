"""Master copies, in f32, of parameters that live in FP8: what an optimizer moves, and FP8 is made of."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from te_jax.fp8 import current_recipe
from te_jax.layers import QuantizedKernel
from te_jax.layers.parameters import (
    array_of,
    dequantized,
    has_kernels,
    map_kernels,
    of_parameters,
    requantized,
    second,
    unboxed,
    with_arrays,
)

_NAME = "te_jax.optim.master_weights"
_WAY_OUT = f"put {_NAME} around the whole optimizer, optax.MultiSteps included"


class MasterWeightsState(NamedTuple):
    """The state of `master_weights`."""

    master: Any  # as the parameters: f32 [..., *C, *F] for each QuantizedKernel, None for all others
    inner: Any  # of the optimizer within


class Requantized(NamedTuple):
    """The "update" of a QuantizedKernel: what takes its place. A type of its own, for `optax.apply_updates` would add
    up numbers in FP8."""

    kernel: QuantizedKernel


def master_weights(inner: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """`inner` for parameters of which some live in FP8 (`te_jax.flax.fp8_params`), with a master copy in f32 of each.

        tx = te_jax.optim.master_weights(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)))

    It goes around the whole optimizer, `optax.MultiSteps` too: for `inner` these parameters are their masters, plain
    f32 arrays, and so are their gradients, as `te_jax.value_and_grad` returns them. Norms, decay, masks and moments are
    those of parameters in f32. A step moves the masters by the updates of `inner` and makes FP8 of them anew, by the
    recipe in force: the next pass reads what it would have made of parameters in f32, and no update is too small.

    init:   a master is the dequantized kernel, or the array of one that is beside it (`beside`).
    update: under the autocast of the loss. What it returns is for `te_jax.optim.apply_updates`; `TrainState` calls it.

    Masters and moments are boxed with the kernels' logical axes where the kernels are.

    `update` raises ValueError without params, outside of autocast, and under a recipe of another form than the kernels;
    `optax.apply_updates` cannot take what it returns.
    """
    inner = optax.with_extra_args_support(inner)

    def init(params):
        start = lambda q: dequantized(q) if q.tensor.wide is None else q.tensor.wide
        master = map_kernels(start, params, of_others=lambda _: None)
        return MasterWeightsState(master, inner.init(with_arrays(params, master)))

    def update(updates, state, params=None, **extra):
        if params is None:
            raise ValueError(f"{_NAME}: update got no params; pass them, as in tx.update(grads, state, params).")
        recipe = current_recipe()
        if recipe is None and has_kernels(params):
            raise ValueError(
                f"{_NAME}: there is no recipe in force to make FP8 parameters by; call update (of a TrainState, "
                "apply_gradients) under the autocast of the loss."
            )
        in_f32 = lambda q, g: jax.tree.map(lambda a: a.astype(jnp.float32), g)
        grads = map_kernels(in_f32, params, updates, of_others=second)
        by, inner_state = inner.update(grads, state.inner, with_arrays(params, state.master), **extra)
        moved = lambda q, master, u: optax.apply_updates(master, u)
        master = map_kernels(moved, params, state.master, by, of_others=second)
        made = lambda q, u, master: Requantized(requantized(q, master, of_parameters(recipe), f"{_NAME}: a parameter"))
        new = map_kernels(made, params, by, master, of_others=second)
        return new, MasterWeightsState(master, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def apply_updates(params, updates):
    """`optax.apply_updates` for the updates of `master_weights`: those of QuantizedKernels take their places.

    Raises TypeError for a QuantizedKernel with any other update.
    """

    def placed(_, update):
        if not isinstance(update, Requantized):
            raise TypeError(
                f"te_jax.optim.apply_updates: the update of a parameter in FP8 is {type(update).__name__}; {_WAY_OUT}."
            )
        return update.kernel

    return map_kernels(placed, params, updates, of_others=optax.apply_updates)


def check_masters(what: str, params, opt_state):
    """Raises ValueError, naming `what`, for parameters in FP8 of which the optimizer's state has no masters."""
    held = jax.tree.leaves(opt_state, is_leaf=lambda node: isinstance(node, MasterWeightsState | optax.MultiStepsState))
    if has_kernels(params) and not any(isinstance(node, MasterWeightsState) for node in held):
        raise ValueError(f"{what}: params holds kernels in FP8, but tx has no masters of them; {_WAY_OUT}.")


def beside(params, arrays):
    """`params` with each QuantizedKernel beside its array, for `init` of `master_weights`.

    arrays: the tree that `te_jax.flax.fp8_params` was given, of any floating dtypes; boxes or none.

    Raises ValueError for an array of another shape.
    """

    def one(q, array):
        array, shape = unboxed(array), unboxed(q).shape
        if array.shape != shape:
            raise ValueError(
                f"te_jax.optim.beside: arrays holds {array.shape} for a kernel of {shape}; pass the parameters that "
                "the FP8 ones were made of."
            )
        return q.with_wide(array_of(q, array.astype(jnp.float32)))

    return map_kernels(one, params, arrays)
