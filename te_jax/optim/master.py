"""Master copies, in f32, of parameters that live in FP8: what an optimizer moves, and FP8 is made of."""

import warnings
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from te_jax._check import ARRAY
from te_jax.fp8 import current_recipe
from te_jax.layers import QuantizedKernel
from te_jax.layers.parameters import (
    box_array,
    dequantize_boxed,
    has_kernels,
    is_kernel,
    map_kernels,
    requantize,
    second,
    unbox,
    with_arrays,
)
from te_jax.optim.adam import WAY_OUT, check_no_fp8_state

_NAME = "te_jax.optim.master_weights"


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

    Raises TypeError for an `inner` that is no transformation. `init` warns of parameters none of which is in FP8, and
    raises ValueError for FP8 state among them; `update` raises it without params, outside of autocast, under a recipe
    of another form than the kernels and for gradients of another shape. `optax.apply_updates` cannot take what it
    returns.
    """
    if isinstance(inner, optax.MultiSteps):
        inner = optax.GradientTransformationExtraArgs(inner.init, inner.update)
    if not isinstance(inner, optax.GradientTransformation):
        call = "; call it first, as in optax.adamw(1e-3)" if callable(inner) else ""
        raise TypeError(f"{_NAME}: inner is {inner!r}; pass an optax.GradientTransformation{call}.")
    inner = optax.with_extra_args_support(inner)

    def init(params):
        check_no_fp8_state(_NAME, params)
        if not has_kernels(params):
            warnings.warn(
                f"{_NAME}: params holds no kernel in FP8, so there are no masters, and params are updated as they are; "
                "make them by te_jax.flax.fp8_params, or leave out this wrapper, which is put around once.",
                stacklevel=2,
            )
        start = lambda q: dequantize_boxed(q) if q.tensor.wide is None else q.tensor.wide
        master = map_kernels(start, params, of_others=lambda _: None)
        return MasterWeightsState(master, inner.init(with_arrays(params, master)))

    def update(updates, state, params=None, **extra):
        if params is None:
            raise ValueError(f"{_NAME}: update got no params; pass them, as in tx.update(grads, state, params).")
        if not isinstance(state, MasterWeightsState):
            raise TypeError(f"{_NAME}: state is {type(state).__name__}; pass what init returned, or the last update.")
        recipe = current_recipe()
        if recipe is None and has_kernels(params):
            raise ValueError(
                f"{_NAME}: there is no recipe in force to make FP8 parameters by; call update (of a TrainState, "
                "apply_gradients) under the autocast of the loss."
            )
        _check_gradients(params, updates)
        in_f32 = lambda q, g: jax.tree.map(lambda a: a.astype(jnp.float32), g)
        grads = map_kernels(in_f32, params, updates, of_others=second)
        by, inner_state = inner.update(grads, state.inner, with_arrays(params, state.master), **extra)
        moved = lambda q, master, u: optax.apply_updates(master, u)
        master = map_kernels(moved, params, state.master, by, of_others=second)
        made = lambda q, u, master: Requantized(requantize(q, master, recipe.for_parameters(), f"{_NAME}: a parameter"))
        new = map_kernels(made, params, by, master, of_others=second)
        return new, MasterWeightsState(master, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def _check_gradients(params, grads):
    """Raises TypeError or ValueError unless the gradient of each kernel is an array of its shape, in a box or not."""

    def one(path, q, g):
        if not is_kernel(q):
            return
        name, g = jax.tree_util.keystr(path), unbox(g)
        way_out = "pass the gradient that te_jax.value_and_grad returns"
        if not ARRAY.accepts(g):
            raise TypeError(f"{_NAME}: the gradient of {name} is {type(g).__name__}, but no array; {way_out}.")
        if g.shape != (shape := unbox(q).shape):
            raise ValueError(
                f"{_NAME}: the gradient of {name} is {g.dtype}{list(g.shape)}, but the kernel {list(shape)}; {way_out}."
            )

    jax.tree_util.tree_map_with_path(one, params, grads, is_leaf=is_kernel)


def apply_updates(params, updates):
    """`optax.apply_updates` for the updates of `master_weights`: those of QuantizedKernels take their places.

    Raises TypeError for a QuantizedKernel with any other update, and for such an update of an array.
    """
    where = "te_jax.optim.apply_updates"

    def placed(path, p, update):
        if is_kernel(p) and not isinstance(update, Requantized):
            raise TypeError(f"{where}: the update of a parameter in FP8 is {type(update).__name__}; {WAY_OUT}.")
        if not is_kernel(p) and isinstance(update, Requantized):
            name = jax.tree_util.keystr(path)
            raise TypeError(
                f"{where}: the update of {name} is a kernel in FP8, but the parameter an array; pass the params that "
                "update was given."
            )
        return update.kernel if is_kernel(p) else optax.apply_updates(p, update)

    return jax.tree_util.tree_map_with_path(placed, params, updates, is_leaf=is_kernel)


def check_masters(what: str, params, opt_state):
    """Raises ValueError, naming `what`, for parameters in FP8 of which the optimizer's state has no masters, and where
    a transformation would change what `master_weights` returned."""
    if not has_kernels(params):
        return
    if isinstance(opt_state, tuple) and any(isinstance(node, MasterWeightsState) for node in opt_state[:-1]):
        raise ValueError(f"{what}: tx has a transformation behind master_weights, which returns no updates; {WAY_OUT}.")
    held = jax.tree.leaves(opt_state, is_leaf=lambda node: isinstance(node, MasterWeightsState | optax.MultiStepsState))
    if not any(isinstance(node, MasterWeightsState) for node in held):
        raise ValueError(f"{what}: params holds kernels in FP8, but tx has no masters of them; {WAY_OUT}.")


def beside(params, arrays):
    """`params` with each QuantizedKernel beside its array, for `init` of `master_weights`.

    arrays: the tree that `te_jax.flax.fp8_params` was given, of any floating dtypes; boxes or none.

    Raises ValueError for an array of another shape, and for params none of which is in FP8; TypeError for arrays that
    are not floating.
    """
    where, way_out = "te_jax.optim.beside", "pass the parameters that the FP8 ones were made of"
    if not has_kernels(params):
        raise ValueError(
            f"{where}: params holds no kernel in FP8, so masters have no place; make them by te_jax.flax.fp8_params, "
            "or leave masters out."
        )

    def one(q, array):
        array, shape = unbox(array), unbox(q).shape
        if is_kernel(array):
            raise TypeError(f"{where}: arrays holds a QuantizedKernel of {shape}; {way_out}.")
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise TypeError(f"{where}: arrays holds {array.dtype} for a kernel of {shape}; {way_out}.")
        if array.shape != shape:
            raise ValueError(f"{where}: arrays holds {array.shape} for a kernel of {shape}; {way_out}.")
        return q.with_wide(box_array(q, array.astype(jnp.float32)))

    return map_kernels(one, params, arrays)
