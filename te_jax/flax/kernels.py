"""Kernels in FP8, quantized once: next to the parameters (collection `fp8_kernels`), or instead of them."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.traverse_util import flatten_dict, unflatten_dict

from te_jax.core.check import ARRAY, BOOL, check
from te_jax.flax._state import describe, not_passed_on, recipe_of
from te_jax.layers import QuantizedKernel, quantize_experts, quantize_kernel
from te_jax.layers.parameters import map_kernels
from te_jax.layers.tensor import Accumulator, Fp8Tensor
from te_jax.layers.weight import check_quantized, swap_axes
from te_jax.state.fp8 import DenseMetas, current_recipe
from te_jax.state.misplaced import warn_of_impossible

KERNEL_COLLECTION, WGRAD_COLLECTION = "fp8_kernels", "wgrads"
_NO_KERNELS_HINT = "make the collection anew under this recipe, by te_jax.flax.fp8_kernels, or leave it out"


class _Order(NamedTuple):
    """What modules are to put into a collection."""

    collection: str
    gradients: bool = True  # of kernels, whether a backward pass is to read them
    as_parameters: bool = False  # kernels are to replace parameters


# The order in force. It is not enough that the collection is mutable: with `mutable=True`, as for batch statistics, it
# would come back, and be passed on to the next step's other parameters.
_order = jax.make_user_context(None)


def kernel_operand(module: nn.Module, name: str, kernel: jax.Array, contract: int, metas: DenseMetas | None) -> Any:
    """What a layer is to multiply by for parameter `name` of `module`: the parameter, with its entry in the collection
    where there is one.

    Raises ValueError for an entry that the recipe in force does not read so, or of a kernel of another shape.
    """
    recipe, order = recipe_of(module), _order.value
    in_fp8, collection = isinstance(kernel, QuantizedKernel), order.collection if order else KERNEL_COLLECTION
    made = in_fp8 and order is not None and collection == KERNEL_COLLECTION
    if recipe is None or made or not module.has_variable("params", name):
        return kernel
    what = f"{describe(module)}: {collection} entry {name}"
    if order is not None:
        if collection == WGRAD_COLLECTION:
            entry = _zeros_for(kernel)
        else:
            entry = _quantize(order, kernel, recipe, contract, metas, what)
        _put_entry(module, collection, name, entry)
        return kernel
    entry = kernel if in_fp8 else None
    if not in_fp8 and module.has_variable(KERNEL_COLLECTION, name):
        entry = nn.meta.unbox(module.get_variable(KERNEL_COLLECTION, name))
        check_quantized(what, entry, kernel.shape, contract, recipe, _NO_KERNELS_HINT)
        entry = entry.with_wide(kernel)
    if (onto := _accumulator(module, name, kernel)) is None:
        return kernel if entry is None else entry
    return (entry or QuantizedKernel.unquantized(kernel, contract)).with_accumulator(onto)


def expert_operand(
    module: nn.Module, names: tuple[str, ...], kernels: Sequence[jax.Array], metas: DenseMetas | None
) -> Any:
    """`kernel_operand` for the parameters `names` [E, K, N] of `module`, which one activation reads, as
    `te_jax.layers.moe` takes them.

    The copy in FP8 of several is one entry, of the name in front of "_": they share a scale. Parameters that live in
    FP8 have scales of their own.
    """
    recipe, order, has_slots = recipe_of(module), _order.value, len(names) > 1
    plain, in_fp8 = tuple(kernels) if has_slots else kernels[0], [isinstance(k, QuantizedKernel) for k in kernels]
    if recipe is None or not all(module.has_variable("params", name) for name in names):
        return plain
    joint, what = names[0].partition("_")[0], f"{describe(module)}: {KERNEL_COLLECTION} entry"
    if order is not None:
        _make_entries(module, order, names, kernels, joint, recipe, metas)
        return plain
    ontos = [_accumulator(module, name, kernel) for name, kernel in zip(names, kernels)]
    if any(in_fp8):
        each = [k if onto is None else _of_experts(k).with_accumulator(onto) for k, onto in zip(kernels, ontos)]
        return tuple(each) if has_slots else each[0]
    entry = None
    if module.has_variable(KERNEL_COLLECTION, joint):
        entry = nn.meta.unbox(module.get_variable(KERNEL_COLLECTION, joint))
        experts, inner, outer = kernels[0].shape
        shape = (experts, inner, len(names), outer) if has_slots else kernels[0].shape
        check_quantized(f"{what} {joint}", entry, shape, 1, recipe, _NO_KERNELS_HINT)
        entry = entry.with_wide(plain)
    if None in ontos:
        return plain if entry is None else entry
    onto = tuple(ontos) if has_slots else ontos[0]
    return (entry or _of_experts(plain, 1 + has_slots)).with_accumulator(onto)


def _make_entries(module, order: _Order, names, kernels, joint: str, recipe, metas):
    """Puts what `order` wants of the weights of experts `names` into its collection."""
    collection = order.collection
    if collection == WGRAD_COLLECTION:
        for name, kernel in zip(names, kernels):
            _put_entry(module, collection, name, _zeros_for(kernel))
    if collection == WGRAD_COLLECTION or any(isinstance(k, QuantizedKernel) for k in kernels):
        return
    options = dict(gradients=order.gradients, name=f"{describe(module)}: {collection} entry")
    if order.as_parameters:
        for name, kernel in zip(names, kernels):
            q = quantize_experts(kernel, recipe=recipe.for_parameters(), **options)
            _put_entry(module, collection, name, q.without_amax())
    else:
        kernel = tuple(kernels) if len(names) > 1 else kernels[0]
        made = quantize_experts(kernel, recipe=recipe, meta=_without_probe(metas), **options)
        _put_entry(module, collection, joint, made)


def _of_experts(kernel, features: int = 1) -> QuantizedKernel:
    """A weight of experts that the layer is to quantize after all, unless it lives in FP8."""
    if isinstance(kernel, QuantizedKernel):
        return kernel
    return QuantizedKernel(Fp8Tensor(wide=kernel), 1, features, jax.tree.leaves(kernel)[0].dtype)


def _zeros_for(kernel) -> Accumulator:
    array = kernel.dequantize() if isinstance(kernel, QuantizedKernel) else kernel
    return Accumulator(jnp.zeros_like(array, jnp.float32), jnp.zeros(()))


def _put_entry(module: nn.Module, collection: str, name: str, entry):
    """Puts an entry, unless it is None or holds nothing in FP8, into the collection that is being made.

    Raises ValueError where a transform keeps it from there.
    """
    if not module.is_mutable_collection(collection):
        raise ValueError(f"{describe(module)}: {collection} entry {name} {not_passed_on(collection)}")
    if entry is not None and not (isinstance(entry, QuantizedKernel) and entry.empty):
        module.put_variable(collection, name, entry)


def _accumulator(module: nn.Module, name: str, kernel) -> Accumulator | None:
    """The entry of the kernel `name` in the collection wgrads. Raises ValueError for one of another kernel."""
    if not module.has_variable(WGRAD_COLLECTION, name):
        return None
    onto = module.get_variable(WGRAD_COLLECTION, name)
    if (onto.grad.shape, onto.grad.dtype) != (kernel.shape, jnp.float32):
        raise ValueError(
            f"{describe(module)}: {WGRAD_COLLECTION} entry {name} is {onto.grad.dtype}{list(onto.grad.shape)}, but the "
            f"kernel needs float32{list(kernel.shape)}; make the collection anew, by te_jax.flax.wgrads."
        )
    return onto


def _without_probe(metas: DenseMetas | None):
    """The kernel's entry among `metas`, without a probe."""
    return metas and metas.kernel._replace(amax=metas.kernel.scale)


def _quantize(order: _Order, kernel, recipe, contract, metas, what) -> QuantizedKernel | None:
    """The entry of a kernel, None if nothing reads it in FP8."""
    meta = _without_probe(metas)
    if order.as_parameters:
        recipe, meta = recipe.for_parameters(), None
    q = quantize_kernel(kernel, recipe=recipe, contract=contract, meta=meta, gradients=order.gradients, name=what)
    if q.empty:
        return None
    return q.without_amax() if order.as_parameters else q


def _check_call(what: str, model, gradients=True):
    if not isinstance(model, nn.Module):
        is_class = isinstance(model, type) and issubclass(model, nn.Module)
        hint = f": {model.__name__}(...)" if is_class else ", such as the `linen` of a te_jax.nnx module"
        raise TypeError(f"{what}: model is {model!r}; pass a Linen module{hint}.")
    check(what, "gradients", gradients, BOOL)
    if current_recipe() is None:
        raise ValueError(f"{what}: there is no recipe in force; call it under te_jax.autocast(True, recipe).")


def _check_variables(what: str, variables):
    way_out = 'pass {"params": params} and the other collections of `init`'
    if not isinstance(variables, Mapping):
        raise TypeError(f"{what}: variables is {type(variables).__name__}; {way_out}.")
    if variables and "params" not in variables:  # none at all: only kernels of the caller
        raise ValueError(f"{what}: variables has {sorted(variables)}, no 'params'; {way_out}.")


def _collect_kernels(what: str, order: _Order, model, variables, args, kwargs) -> dict[str, Any]:
    _check_variables(what, variables)
    warn_of_impossible(what, variables)
    collection = order.collection
    others = {name: jax.lax.stop_gradient(v) for name, v in variables.items() if name != collection}

    def run(variables):
        with _order(order):
            written = model.apply(variables, *args, mutable=nn.DenyList("params"), **kwargs)[1]
        return {name: made for name, made in written.items() if name == collection}

    made = jax.jit(run)(others)  # all but the quantization is dead code
    if collection not in made:
        raise ValueError(
            f"{what}: no module of {type(model).__name__} quantizes one of its parameters: none multiplies in FP8 (see "
            "the recipe's exclude and override_linear_precision), or all are in FP8 already."
        )
    return made


def fp8_kernels(
    model: nn.Module, variables: Mapping[str, Any], *args: Any, gradients: bool = True, **kwargs: Any
) -> dict[str, Any]:
    """{"fp8_kernels": ...}: the kernels of `variables["params"]`, quantized for calls with the same parameters.

        kernels = te_flax.fp8_kernels(model, {"params": params, **fp8}, x)

        def loss_fn(params, fp8, x):
            return loss(model.apply({"params": params, **fp8, **kernels}, x))

    Modules that find their entry quantize no kernel; results, gradients and FP8 state are the same bit for bit, and the
    gradient goes to the parameters. Such kernels are for several passes between two changes of the parameters:
    microbatches, within the jitted step, and inference. Nothing can tell that the parameters are others since: make
    them anew in every step. Without an entry, as for kernels that the caller passes, a module quantizes as ever.

    args, kwargs: of `model.apply`, such as one microbatch, or rngs; only for their shapes.
    gradients:    False: only the layout that the forward pass reads, for inference. A backward pass transposes it.

    Call it under the autocast of the passes, in a jitted function: each call outside of one compiles. Nothing but the
    quantization is computed. `nn.scan` and `nn.vmap` around modules need `variable_axes={"fp8_kernels": 0}`, as for
    params.

    Raises ValueError outside of autocast, where a transform lacks that, for variables without params, and where no
    module multiplies in FP8; TypeError for a model that is no Linen module. Modules raise ValueError for entries of
    another recipe or shape.
    """
    what = "te_jax.flax.fp8_kernels"
    _check_call(what, model, gradients)
    return dict(_collect_kernels(what, _Order(KERNEL_COLLECTION, bool(gradients)), model, variables, args, kwargs))


def wgrads(model: nn.Module, variables: Mapping[str, Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
    """{"wgrads": ...}: for each kernel that a module multiplies under the recipe in force an `Accumulator` (grad f32
    [*C, *F], uses f32[]) of zeros, for `TrainState.accumulate_gradients(..., wgrads=...)`.

    Modules that find their entry add the kernel's gradient onto `grad` inside of the wgrad GEMM, in f32: the cotangent
    of `grad` is the sum, the one of `uses` is 1, and the kernel has none. Autodiff could not add up that sum: a kernel
    may be used once in a pass, and has to reach its module as it is (not scaled or masked by the loss or
    `nn.map_variables`, whose factor is lost). In a loop of your own check that `uses` comes back as 1.

    Arguments and errors are as of `fp8_kernels`; `nn.scan` and `nn.vmap` need `variable_axes={"wgrads": 0}`, never
    variable_broadcast.
    """
    what = "te_jax.flax.wgrads"
    _check_call(what, model)
    return dict(_collect_kernels(what, _Order(WGRAD_COLLECTION), model, variables, args, kwargs))


def fp8_params(
    model: nn.Module, variables: Mapping[str, Any], *args: Any, gradients: bool = False, **kwargs: Any
) -> dict[str, Any]:
    """`variables` with a QuantizedKernel instead of each kernel that a module multiplies in FP8: half the bytes of
    bf16.

        variables = te_flax.fp8_params(model, {"params": restored, **fp8}, x)

    For inference; for training of the other parameters (`split_lora`); and for training of these, by
    `te_jax.value_and_grad` (to `jax.grad` they are constants), with `te_jax.optim.master_weights` for their masters.

    gradients: True: both layouts are kept, 2 bytes a number. A backward pass under MXFP8, whose other layout cannot be
               made of the one, needs that, or a recipe without dgrad in FP8. False: only fprop's layout is kept, and
               transposed for dgrad.

    Scales follow the recipe in force, from the kernel's own amax where that has state, which then stays as it is.
    Modules whose parameters `nn.map_variables` changes on the way have to be in the recipe's `exclude`. Boxes of
    logical axes stay, around the data in the order of its axes. The rest is as in `fp8_kernels`. Call it under
    `jax.jit` with the initialisation or the restoring of arrays that need not exist in whole; `fp8_model_init` does so.
    """
    what = "te_jax.flax.fp8_params"
    _check_call(what, model, gradients)
    order = _Order(KERNEL_COLLECTION, bool(gradients), as_parameters=True)
    made = _collect_kernels(what, order, model, variables, args, kwargs)
    params = flatten_dict(variables["params"])
    for path, q in flatten_dict(made[KERNEL_COLLECTION]).items():
        params[path] = _box(q, params[path])
    return {**variables, "params": unflatten_dict(params)}


def _box(q: QuantizedKernel, kernel):
    """`q` with its data in a box like the one around `kernel`, if there is one."""
    if not isinstance(kernel, nn.Partitioned):
        return q
    names = swap_axes(kernel.names, q.contract, q.features)
    data = {"data_t": kernel.replace(value=q.tensor.data_t, names=names)}
    if q.tensor.data is not None:
        data["data"] = kernel.replace(value=q.tensor.data)
    return replace(q, tensor=q.tensor._replace(**data))


def dequantize_params(params: Any) -> Any:
    """A tree with each QuantizedKernel in it as an array again, of the dtype that it had before `fp8_params`; boxes of
    logical axes are gone from these. Raises TypeError for a leaf that is no array."""
    for leaf in jax.tree.leaves(params):
        if not (ARRAY.accepts(leaf) or isinstance(leaf, jax.ShapeDtypeStruct)):
            raise TypeError(f"te_jax.flax.dequantize_params: params has {leaf!r}; pass a tree of arrays.")
    return map_kernels(lambda q: nn.meta.unbox(q).dequantize(), params)


def fp8_model_init(model: nn.Module, rngs: Any, *args: Any, gradients: bool = False, **kwargs: Any) -> dict[str, Any]:
    """`model.init(rngs, *args, **kwargs)` by one compiled program, with kernels as `fp8_params` makes them: in other
    dtypes they exist only within it."""

    _check_call("te_jax.flax.fp8_model_init", model, gradients)

    def init(rngs):
        variables = model.init(rngs, *args, **kwargs)
        return fp8_params(model, variables, *args, gradients=gradients, rngs=rngs, **kwargs)

    return jax.jit(init)(rngs)
