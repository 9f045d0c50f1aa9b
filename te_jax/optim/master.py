"""Master copies in f32 of parameters that live in FP8: the optimizer updates them, and FP8 is quantized from them."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from te_jax.core.check import ARRAY, show, warn
from te_jax.layers import QuantizedKernel
from te_jax.layers.parameters import (
    box_array,
    dequantize_boxed,
    has_kernels,
    is_kernel,
    map_kernels,
    requantize,
    take_second,
    unbox,
    with_arrays,
)
from te_jax.optim.adam import USE_MASTERS, check_no_fp8_state
from te_jax.state.fp8 import current_recipe

_THIS = "te_jax.optim.master_weights"
# The states of wrappers that read the updates of what they are around as numbers.
_READERS = (
    optax.MultiStepsState,
    optax.ApplyIfFiniteState,
    optax.InjectHyperparamsState,
    optax.InjectStatefulHyperparamsState,
)


class MasterWeightsState(NamedTuple):
    """The state of `master_weights`."""

    master: Any  # The tree of parameters with f32 [..., *C, *F] for each QuantizedKernel and None for all others.
    inner: Any  # The state of the inner optimizer.


class Requantized(NamedTuple):
    """The update of a QuantizedKernel: the kernel that replaces it. It has a type of its own, since
    `optax.apply_updates` would add numbers in FP8."""

    kernel: QuantizedKernel


def master_weights(inner: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """`inner` with a master copy in f32 of each parameter that lives in FP8 (`te_jax.flax.fp8_params`).

        inner = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
        tx = te_jax.optim.master_weights(inner)

    The wrapper goes around the whole optimizer, `optax.MultiSteps` too. `inner` sees f32 arrays, the masters, instead
    of these parameters, and f32 gradients, which `te_jax.value_and_grad` returns. Norms, decay, masks and moments are
    the same as for parameters in f32. A step adds the updates of `inner` to the masters and quantizes them by the
    recipe in force. So the next pass reads what it would have quantized from parameters in f32, and no update is too
    small.

    init:   A master is the array next to the kernel (`beside`), or else the dequantized kernel.
    update: Call it under the autocast of the loss. Its result is for `te_jax.optim.apply_updates`, which `TrainState`
            calls, not for `optax.apply_updates`.

    Masters and moments are in boxes with the kernels' logical axes where the kernels are.

    Raises TypeError for an `inner` that is no transformation. `init` warns if no parameter is in FP8, and raises
    ValueError for FP8 state among the parameters. `update` raises ValueError without params, outside of autocast, under
    a recipe of another form than the kernels and for gradients of another shape, TypeError for another state.
    """
    if isinstance(inner, optax.MultiSteps):
        inner = optax.GradientTransformationExtraArgs(inner.init, inner.update)
    if not isinstance(inner, optax.GradientTransformation):
        call = "; call it first, as in optax.adamw(1e-3)" if callable(inner) else ""
        raise TypeError(f"{_THIS}: inner is {inner!r}; pass an optax.GradientTransformation{call}.")
    inner = optax.with_extra_args_support(inner)

    def init(params):
        check_no_fp8_state(_THIS, params)
        if not has_kernels(params):
            warn(
                f"{_THIS}: params holds no kernel in FP8, so there are no masters, and params are updated as they are; "
                "make them by te_jax.flax.fp8_params, or leave out this wrapper, which is put around once.",
            )
        start = lambda q: dequantize_boxed(q) if q.tensor.wide is None else q.tensor.wide
        master = map_kernels(start, params, of_others=lambda _: None)
        return MasterWeightsState(master, inner.init(with_arrays(params, master)))

    def update(updates, state, params=None, **extra):
        if params is None:
            raise ValueError(f"{_THIS}: update got no params; pass them, as in tx.update(grads, state, params).")
        if not isinstance(state, MasterWeightsState):
            raise TypeError(f"{_THIS}: state is {type(state).__name__}; pass what init returned, or the last update.")
        recipe = current_recipe()
        if recipe is None and has_kernels(params):
            raise ValueError(
                f"{_THIS}: there is no recipe in force to make FP8 parameters by; call update (of a TrainState, "
                "apply_gradients) under the autocast of the loss."
            )
        _check_kernel_gradients(params, updates)
        in_f32 = lambda q, g: jax.tree.map(lambda a: a.astype(jnp.float32), g)
        grads = map_kernels(in_f32, params, updates, of_others=take_second)
        by, inner_state = inner.update(grads, state.inner, with_arrays(params, state.master), **extra)
        moved = lambda q, master, u: optax.apply_updates(master, u)
        master = map_kernels(moved, params, state.master, by, of_others=take_second)
        made = lambda q, u, master: Requantized(requantize(q, master, recipe.for_parameters(), f"{_THIS}: a parameter"))
        new = map_kernels(made, params, by, master, of_others=take_second)
        return new, MasterWeightsState(master, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def _check_kernel_gradients(params, grads):
    """Raises TypeError or ValueError unless the gradient of each QuantizedKernel is an array of its shape, in a box or
    not."""

    def one(path, q, g):
        if not is_kernel(q):
            return
        name, g = jax.tree_util.keystr(path), unbox(g)
        way_out = "pass the gradient that te_jax.value_and_grad returns"
        if not ARRAY.accepts(g):
            raise TypeError(f"{_THIS}: the gradient of {name} is {type(g).__name__}, but no array; {way_out}.")
        if g.shape != (shape := unbox(q).shape):
            raise ValueError(
                f"{_THIS}: the gradient of {name} is {g.dtype}{list(g.shape)}, but the kernel {list(shape)}; {way_out}."
            )

    jax.tree_util.tree_map_with_path(one, params, grads, is_leaf=is_kernel)


def apply_updates(params: Any, updates: Any) -> Any:
    """`optax.apply_updates` for the updates of `master_weights`, which replace QuantizedKernels.

    Raises TypeError for a QuantizedKernel whose update is not of `master_weights`, and for such an update of an array;
    ValueError for updates of another tree.
    """
    where = "te_jax.optim.apply_updates"
    is_leaf = lambda node: is_kernel(node) or isinstance(node, Requantized)
    own, given = (jax.tree.structure(tree, is_leaf=is_leaf) for tree in (params, updates))
    if own != given:
        raise ValueError(
            f"{where}: updates are of another tree than params, {show(given)} instead of {show(own)}; pass what the "
            "optimizer's update returned for these params."
        )

    def apply(path, p, update):
        if is_kernel(p) and not isinstance(update, Requantized):
            raise TypeError(f"{where}: the update of a parameter in FP8 is {type(update).__name__}; {USE_MASTERS}.")
        if not is_kernel(p) and isinstance(update, Requantized):
            name = jax.tree_util.keystr(path)
            raise TypeError(
                f"{where}: the update of {name} is a kernel in FP8, but the parameter an array; pass the params that "
                "update was given."
            )
        return update.kernel if is_kernel(p) else optax.apply_updates(p, update)

    return jax.tree_util.tree_map_with_path(apply, params, updates, is_leaf=is_kernel)


def check_masters(what: str, params: Any, opt_state: Any) -> None:
    """Raises ValueError, naming `what`, for parameters in FP8 without masters in the optimizer's state, and for a
    transformation after `master_weights` or a wrapper around it that reads updates as numbers."""
    if not has_kernels(params):
        return
    if isinstance(opt_state, tuple) and any(isinstance(node, MasterWeightsState) for node in opt_state[:-1]):
        raise ValueError(
            f"{what}: tx has a transformation behind master_weights, which returns no updates; {USE_MASTERS}."
        )
    held = jax.tree.leaves(opt_state, is_leaf=lambda node: isinstance(node, (MasterWeightsState, *_READERS)))
    if any(isinstance(node, MasterWeightsState) for node in held):
        return
    outside = [type(node).__name__ for node in held if isinstance(node, _READERS)]
    none = f"has no masters of them{f' outside of its {outside[0]}' if outside else ''}"
    raise ValueError(f"{what}: params holds kernels in FP8, but tx {none}; {USE_MASTERS}.")


def beside(params: Any, arrays: Any) -> Any:
    """`params` with each QuantizedKernel next to its array, from which `init` of `master_weights` makes the master.

    arrays: The tree that `te_jax.flax.fp8_params` quantized, of any floating dtypes, in boxes or not.

    Raises ValueError for an array of another shape, and if no parameter is in FP8; TypeError for arrays that are not
    floating.
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
