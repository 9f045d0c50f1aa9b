"""`transformer_engine.jax.dense`: te_jax.layers.dense with the arguments of TransformerEngine."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from te_jax import layers
from te_jax.compat._absent import GetAttr, absent
from te_jax.compat._axes import with_sharding_constraint_by_logical_axes as constrain
from te_jax.compat._collective import CollectiveOpSet, noop_collective_op_set
from te_jax.compat.transformer_engine.jax.quantize.quantizer import QuantizerSet, layer_options, noop_quantizer_set
from te_jax.core.check import check, integer, tuple_of, warn_once

__getattr__: GetAttr = absent("transformer_engine.jax.dense")


def dense(
    x: jax.Array,
    kernel: jax.Array,
    bias: jax.Array | None = None,
    contracting_dims: tuple[Sequence[int], Sequence[int]] = ((1,), (0,)),
    transpose_batch_sequence: bool = False,
    input_axes: tuple[str, ...] | None = None,
    kernel_axes: tuple[str, ...] | None = None,
    output_axes: tuple[str, ...] | None = None,
    collective_op_set: CollectiveOpSet = noop_collective_op_set,
    quantizer_set: QuantizerSet = noop_quantizer_set,
) -> jax.Array:
    """y[*B, *F] = x[*B, *C] . kernel[*C, *F] + bias[*F], in FP8 where `quantizer_set` has a recipe.

    contracting_dims: the axes of x and of kernel in C: the last ones of x, and the first ones of kernel.
    transpose_batch_sequence: without effect: shardings say how arrays lie.
    *_axes: logical axes that the arrays are constrained to.
    collective_op_set: the sums and gathers are XLA's, whatever it says; a warning tells of it once.

    Raises ValueError for other axes, and what `te_jax.layers.dense` raises.
    """
    del transpose_batch_sequence
    check_collective("dense", collective_op_set)
    contract = _count_contracted(x, kernel, contracting_dims)
    x, kernel = constrain(x, input_axes), constrain(kernel, kernel_axes)
    y = layers.dense(x, kernel, bias, contract=contract, **layer_options("dense", quantizer_set))
    return constrain(y, output_axes)


def grouped_dense(
    x: jax.Array,
    kernel: jax.Array,
    group_sizes: jax.Array,
    contracting_dims: tuple[Sequence[int], Sequence[int]] = ((1,), (1,)),
    bias: jax.Array | None = None,
    precision: Any = jax.lax.Precision.DEFAULT,
    preferred_element_type: DTypeLike | None = None,
    group_offset: jax.Array | None = None,
    quantizer_set: QuantizerSet = noop_quantizer_set,
    kernel_fsdp_info: tuple[str | None, int] = (None, -1),
) -> jax.Array:
    """`te_jax.layers.grouped_dense` of x [T, K], kernel [E, K, N], group_sizes [E] and bias [E, N], in FP8 where
    `quantizer_set` has a recipe.

    precision, kernel_fsdp_info: without effect: sums are f32, and shardings say how the kernel lies.
    preferred_element_type: the type of the result, None for x's.

    Raises ValueError for other contracting_dims and for group_offset, and what `te_jax.layers.grouped_dense` raises.
    """
    del precision, kernel_fsdp_info
    where = "grouped_dense"
    check(where, "contracting_dims", contracting_dims, _DIMS)
    if tuple(map(tuple, contracting_dims)) != ((1,), (1,)):
        raise ValueError(f"{where}: contracting_dims are {contracting_dims}; pass x [T, K] and kernel [E, K, N].")
    if group_offset is not None:
        raise ValueError(f"{where}: group_offset is given, which te_jax has not; slice x and group_sizes.")
    if preferred_element_type is not None:  # The sum is rounded to x's type: exact for a wider one.
        x = x.astype(jnp.promote_types(x.dtype, preferred_element_type))
    y = layers.grouped_dense(x, kernel, group_sizes, bias, **layer_options(where, quantizer_set))
    return y if preferred_element_type is None else y.astype(preferred_element_type)


_DIMS = tuple_of(tuple_of(integer()), 2)


def check_collective(where: str, given: CollectiveOpSet) -> None:
    """Warns, once, where `given` asks for a GEMM that communicates."""
    if given != noop_collective_op_set:
        warn_once(where, f"te_jax has no GEMM with {given.forward} inside; XLA gathers and sums, with the same result.")


def _count_contracted(x, kernel, dims) -> int:
    """How many axes are contracted. Raises ValueError unless they are x's last and kernel's first, in order."""
    check("dense", "contracting_dims", dims, _DIMS)
    for a, axes in zip((x, kernel), dims):
        if outside := [axis for axis in axes if not -a.ndim <= axis < a.ndim]:
            raise ValueError(f"dense: contracting_dims has {outside[0]}, but the array has shape {a.shape}.")
    of_x, of_kernel = (tuple(axis % a.ndim for axis in axes) for a, axes in zip((x, kernel), dims))
    n = len(of_x)
    if of_x != tuple(range(x.ndim - n, x.ndim)) or of_kernel != tuple(range(n)):
        raise ValueError(
            f"dense: contracting_dims are {dims}, for x {x.shape} and kernel {kernel.shape}; move the contracted axes "
            "to the end of x and to the front of kernel."
        )
    return n
