"""Kernels that live in FP8 and are trained: where their gradient goes, and how they follow a master copy.

A tree of parameters holds a QuantizedKernel instead of an array. Boxes of logical axes (Flax's `Partitioned`) may be
around its data; an array that stands for it is in a box with the names in the array's order.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from te_jax.layers.tensor import Uses
from te_jax.layers.weight import GradientTarget, QuantizedKernel, check_quantized, quantize_outside_layer, swap_axes
from te_jax.recipe import Recipe


def take_second(_: Any, other: Any, *more: Any) -> Any:
    """For `map_kernels`: what the second tree has there."""
    return other


def is_kernel(leaf: Any) -> bool:
    """Whether it is a QuantizedKernel, for `is_leaf`."""
    return isinstance(leaf, QuantizedKernel)


def has_kernels(params: Any) -> bool:
    """Whether a tree holds a QuantizedKernel."""
    return any(map(is_kernel, jax.tree.leaves(params, is_leaf=is_kernel)))


def map_kernels(
    of_kernels: Callable[..., Any], params: Any, *rest: Any, of_others: Callable[..., Any] = lambda leaf, *more: leaf
) -> Any:
    """`jax.tree.map` over trees of parameters, by one function at QuantizedKernels of the first and by another at
    arrays, or the boxes around them."""
    at = lambda leaf, *more: (of_kernels if is_kernel(leaf) else of_others)(leaf, *more)
    return jax.tree.map(at, params, *rest, is_leaf=lambda node: is_kernel(node) or _is_box(node))


def _is_box(leaf) -> bool:
    return hasattr(leaf, "names") and hasattr(leaf, "unbox")  # Flax takes a second to import


def unbox(tree: Any) -> Any:
    """`tree` without boxes of logical axes."""
    return jax.tree.map(lambda leaf: leaf.unbox(False) if _is_box(leaf) else leaf, tree, is_leaf=_is_box)


def box_array(q: QuantizedKernel, array: jax.Array) -> Any:
    """`array` [..., *C, *F], in a box like the one around the data of `q`, if there is one."""
    box = q.tensor.data if q.tensor.data_t is None else q.tensor.data_t
    if not _is_box(box):
        return array
    names = box.names if q.tensor.data_t is None else swap_axes(box.names, q.features, q.contract)
    return box.replace(value=array, names=names)


def dequantize_boxed(q: QuantizedKernel) -> Any:
    """The values of `q` in f32, [..., *C, *F], in a box as `box_array` makes."""
    return box_array(q, replace(unbox(q), dtype=jnp.dtype(jnp.float32)).dequantize())


def with_arrays(params: Any, arrays: Any) -> Any:
    """`params` with what `arrays` has instead of each QuantizedKernel."""
    return map_kernels(take_second, params, arrays)


def gradient_targets(params: Any) -> Any:
    """`params` with zeros [..., *C, *F] of its dtype instead of each QuantizedKernel: the form of the gradient."""
    return map_kernels(lambda q: box_array(q, jnp.zeros_like(unbox(q).dequantize())), params)


def with_targets(params: Any, arrays: Any) -> Any:
    """`arrays`, as `gradient_targets` makes them, with the QuantizedKernels of `params` again. The gradients of these
    kernels go to the arrays that stood there, whose values nothing reads."""
    return map_kernels(lambda q, array: q.with_wide(GradientTarget(array)), params, arrays, of_others=take_second)


def requantize(q: QuantizedKernel, array: Any, recipe: Recipe, what: str) -> QuantizedKernel:
    """`array` [..., *C, *F] as a kernel with the layouts, dtype and boxes of `q`, quantized as `recipe`, one of
    `Recipe.for_parameters`, quantizes a kernel.

    Raises ValueError, naming `what`, if `recipe` is of another form than `q`.
    """
    plain = unbox(q)
    check_quantized(what, plain, plain.shape, plain.contract, recipe)
    uses = Uses(plain.tensor.data is not None, plain.tensor.data_t is not None, False)
    made = quantize_outside_layer(unbox(array), None, uses, recipe, plain.contract, plain.stack)
    put = lambda old, new: old.replace(value=new) if _is_box(old) else new
    return jax.tree.map(put, q, replace(plain, tensor=made), is_leaf=_is_box)
