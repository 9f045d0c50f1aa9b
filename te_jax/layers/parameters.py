"""Kernels that live in FP8 and are trained: where their gradient goes, and how they follow a master copy.

A tree of parameters holds a QuantizedKernel in the place of an array; boxes of logical axes (Flax's `Partitioned`) may
be around its data. Its array, where one stands for it, is in a box with the names in the array's order.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp

from te_jax.layers.tensor import Uses
from te_jax.layers.weight import GradientSlot, QuantizedKernel, check_quantized, quantize_alone, swap_groups
from te_jax.recipe import Recipe


def second(_, other, *more):
    """For `map_kernels`: what the second tree has there."""
    return other


def is_kernel(leaf) -> bool:
    """Whether it is a QuantizedKernel, for `is_leaf`."""
    return isinstance(leaf, QuantizedKernel)


def has_kernels(params) -> bool:
    """Whether a tree holds a QuantizedKernel."""
    return any(map(is_kernel, jax.tree.leaves(params, is_leaf=is_kernel)))


def map_kernels(of_kernels, params, *rest, of_others=lambda leaf, *more: leaf):
    """`jax.tree.map` over trees of parameters, by one function at QuantizedKernels of the first and by another at
    arrays, or the boxes around them."""
    at = lambda leaf, *more: (of_kernels if is_kernel(leaf) else of_others)(leaf, *more)
    return jax.tree.map(at, params, *rest, is_leaf=lambda node: is_kernel(node) or _is_box(node))


def _is_box(leaf) -> bool:
    return hasattr(leaf, "names") and hasattr(leaf, "unbox")  # Flax takes a second to import


def unbox(tree):
    """`tree` without boxes of logical axes."""
    return jax.tree.map(lambda leaf: leaf.unbox(False) if _is_box(leaf) else leaf, tree, is_leaf=_is_box)


def box_array(q: QuantizedKernel, array: jax.Array):
    """`array` [..., *C, *F], in a box like the one around the data of `q`, if there is one."""
    box = q.tensor.data if q.tensor.data_t is None else q.tensor.data_t
    if not _is_box(box):
        return array
    names = box.names if q.tensor.data_t is None else swap_groups(box.names, q.features, q.contract)
    return box.replace(value=array, names=names)


def dequantize_boxed(q: QuantizedKernel):
    """Its values in f32, [..., *C, *F]."""
    return box_array(q, replace(unbox(q), dtype=jnp.dtype(jnp.float32)).dequantize())


def with_arrays(params, arrays):
    """`params` with what `arrays` has in the place of each QuantizedKernel."""
    return map_kernels(second, params, arrays)


def gradient_slots(params):
    """`params` with zeros [..., *C, *F] of its dtype in the place of each QuantizedKernel: the form of the gradient."""
    return map_kernels(lambda q: box_array(q, jnp.zeros_like(unbox(q).dequantize())), params)


def with_slots(params, arrays):
    """`arrays`, as `gradient_slots` makes them, with the QuantizedKernels of `params` in their places again.

    Gradients of these kernels go to the arrays that stood there, whose values nothing reads.
    """
    return map_kernels(lambda q, array: q.with_wide(GradientSlot(array)), params, arrays, of_others=second)


def requantize(q: QuantizedKernel, array, recipe: Recipe, what: str) -> QuantizedKernel:
    """`array` [..., *C, *F] in the place of `q`: with its layouts, dtype and boxes, quantized as `recipe`, which is one
    of `Recipe.for_parameters`, quantizes a kernel.

    Raises ValueError, naming `what`, if `recipe` is of another form than `q`.
    """

    def one(q, array):
        if q.ndim > q.contract + q.features:
            return jax.vmap(one)(q, array)
        check_quantized(what, q, q.shape, q.contract, recipe)
        use = Uses(q.tensor.data is not None, q.tensor.data_t is not None, False)
        return replace(q, tensor=quantize_alone(array, None, use, recipe, q.contract))

    new = one(unbox(q), unbox(array))
    return jax.tree.map(lambda old, new: old.replace(value=new) if _is_box(old) else new, q, new, is_leaf=_is_box)
