"""Fills parameters in place, one layer of them at a time, from tensors of a checkpoint."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from te_jax.hf import files
from te_jax.hf.mxfp4 import Packed
from te_jax.hf.plan import Conversion
from te_jax.hf.rules import Recast
from te_jax.hf.scales import Scaled, keep_in_fp8, spec_of_field
from te_jax.layers import QuantizedKernel, quantize_experts, quantize_kernel
from te_jax.layers.parameters import is_kernel
from te_jax.layers.tensor import Fp8Tensor
from te_jax.recipe import Recipe

_UNSIGNED = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}


def as_bits(a: jax.Array) -> jax.Array:
    """The bits of an array: moved as floats, a NaN of 16 bits may become another one on its way."""
    return jax.lax.bitcast_convert_type(a, _UNSIGNED[a.dtype.itemsize])


def types_of(plan: Conversion, held: Mapping[str, files.Stored], dtype: Any) -> dict[str, Any]:
    """The dtype of each variable by path: `dtype`, or its tensors' dtype, where FP8 counts as bf16. All
    but parameters are f32."""
    word = {name: "BF16" if stored.dtype == files.FP8 else stored.dtype for name, stored in held.items()}
    types = {path: dtype if path.startswith("params/") else jnp.float32 for path in plan.shapes}
    for step in plan.steps:
        stored = {word[name] for name in step.theirs}
        for path in step.ours:
            types[path] = types[path] or _common(stored)
    default = _common(set(word.values()) & files.DTYPES.keys())
    return {path: kind or default for path, kind in types.items()}


def _common(dtypes):
    """The one dtype of these words of the format, or the widest; None without any."""
    return jnp.result_type(*(files.DTYPES[name] for name in dtypes)) if dtypes else None


def fill_variables(
    plan: Conversion,
    forms: Mapping[str, Any],
    read: Callable[[str], Any],
    shardings: Mapping[str, Any],
    recipe: Recipe | None,
    gradients: bool,
) -> dict[str, Any]:
    """The variables by path.

    forms:     {path: ShapeDtypeStruct, or a QuantizedKernel of such}, of all variables.
    read:      name -> a tensor, or one that is `Scaled` or `Packed`.
    shardings: {path: sharding}; may lack some, or all.
    recipe, gradients: how kernels are quantized, as of `te_jax.flax.fp8_params`.
    """
    made = {}
    for path, form in forms.items():
        made[path] = _map_arrays(partial(_zeros, shardings.get(path)), form)
    for step in plan.steps:
        if not step.theirs:
            continue
        before = tuple(made[path] for path in step.ours)
        arrays, tree = jax.tree.flatten(before)
        # Arrays that nobody placed stay free to move: else a step compiles twice, next to ones that are.
        places = (tree, tuple(a.sharding for a in arrays)) if shardings else None
        program = _program(step.rule.form, step.index is not None, recipe, gradients, places)
        after = program(before, step.index or 0, *(read(name) for name in step.theirs))
        made |= zip(step.ours, jax.block_until_ready(after))  # else tensors of several steps would be on the device
    return {path: _map_arrays(partial(_place_as_asked, shardings.get(path)), a) for path, a in made.items()}


@lru_cache(maxsize=1024)
def _program(form: Recast, stacked: bool, recipe: Recipe | None, gradients: bool, places: tuple[Any, Any] | None):
    """`_put_in_place` of this form, of which jax compiles one for all steps, and loads, that have the same shapes.

    places: the structure of variables and the shardings of their arrays; None: as jax has it.
    """
    put = partial(_put_in_place, form, stacked, recipe, gradients)
    return jax.jit(put, donate_argnums=0, out_shardings=None if places is None else places[0].unflatten(places[1]))


def _map_arrays(function, variable):
    """`variable` with function(kernel or None, field, array) for its array, or for each array of a kernel."""
    if not is_kernel(variable):
        return function(None, "", variable)
    arrays = [a if a is None else function(variable, field, a) for field, a in variable.tensor._asdict().items()]
    return replace(variable, tensor=Fp8Tensor(*arrays))


def _sharding_of(sharding, kernel: QuantizedKernel | None, name: str):
    """The sharding of a field of a kernel, where `sharding` is of the kernel's array."""
    if kernel is None or not isinstance(sharding, NamedSharding):
        return sharding
    return NamedSharding(sharding.mesh, PartitionSpec(*spec_of_field(kernel, name, tuple(sharding.spec))))


def _zeros(sharding, kernel, name: str, like):
    return jnp.zeros(like.shape, like.dtype, device=_without_types(_sharding_of(sharding, kernel, name)))


def _place_as_asked(sharding, kernel, name: str, a):
    return a if sharding is None else jax.device_put(a, _sharding_of(sharding, kernel, name))


def _without_types(sharding):
    """The same places on a mesh of Auto axes: an update in place has no rule for Explicit ones."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    mesh = sharding.mesh
    return NamedSharding(
        Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * mesh.devices.ndim), sharding.spec
    )


def _put_in_place(form: Recast, stacked: bool, recipe, gradients: bool, before, index, *tensors):
    likes = [jax.tree.map(lambda a: a[0], old) if stacked else old for old in before]
    made = _make_variables(form, likes, recipe, gradients, tensors)

    def put(old, new):
        new = new if new.dtype == _UNSIGNED[old.dtype.itemsize] else as_bits(new)
        new = jax.lax.dynamic_update_index_in_dim(as_bits(old), new, index, 0) if stacked else new
        return jax.lax.bitcast_convert_type(new, old.dtype)

    return jax.tree.map(put, before, made)


def _make_variables(form: Recast, likes, recipe, gradients: bool, tensors) -> tuple:
    """Variables like `likes`, made of tensors of a checkpoint; what is not computed here comes as its bits."""
    if is_kernel(likes[0]) and all(isinstance(a, Scaled) for a in tensors):
        kept = keep_in_fp8(form, tensors, likes[0])
        if kept is not None:
            return (kept,)
    dtype = likes[0].dtype
    arrays = [a.dequantize(dtype) if isinstance(a, Scaled | Packed) else a.astype(dtype) for a in tensors]
    made = form.ours(*map(as_bits, arrays))
    return tuple(
        _quantize_like(like, jax.lax.bitcast_convert_type(a, dtype), recipe, gradients) if is_kernel(like) else a
        for a, like in zip(made, likes, strict=True)
    )


def _quantize_like(like: QuantizedKernel, kernel, recipe: Recipe, gradients: bool) -> QuantizedKernel:
    options = dict(recipe=recipe.for_parameters(), gradients=gradients, name="te_jax.hf.load")
    if like.stack:
        return quantize_experts(kernel, **options).without_amax()
    return quantize_kernel(kernel, contract=like.contract, **options).without_amax()
