"""A dense layer with a kernel for each group of rows, as of experts; in FP8 where a recipe is given."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import custom_vjp_primal_tree_values as values_of
from jax.typing import ArrayLike

from te_jax.core.arrays import as_jax
from te_jax.core.check import INTEGERS, NONE, STRING, check
from te_jax.core.derivatives import custom_vjp
from te_jax.core.types import align, like
from te_jax.layers.config import Config
from te_jax.layers.experts.mlp import quantize_rows_grad, rows_of_tokens, rows_source
from te_jax.layers.gemms import grouped_dgrad, grouped_fprop, grouped_wgrad
from te_jax.layers.linear import check_recipe_and_metas, warn_of_bf16_products
from te_jax.layers.produce import Role, produce, quantize_stacked
from te_jax.layers.tensor import LayerUses
from te_jax.layers.vjp import (
    differentiate_metas,
    has_gradient,
    instantiate,
    jit_layer,
    save_for_backward,
    tag_for_wgrad,
)
from te_jax.layers.weight import check_is_array
from te_jax.ops.experts.permute import Groups, combine, group, permute
from te_jax.ops.gemm.grouped import gemm_grouped
from te_jax.ops.quantize.array import FLOAT
from te_jax.recipe import Recipe
from te_jax.sharding.resource import stage_axes
from te_jax.state import fp8


def grouped_dense(
    x: ArrayLike,
    kernel: ArrayLike,
    group_sizes: ArrayLike,
    bias: ArrayLike | None = None,
    *,
    recipe: Recipe | None = None,
    metas: fp8.DenseMetas | None = None,
    checkpoint: str | None = None,
    name: str = "te_jax.layers.grouped_dense",
) -> jax.Array:
    """x times the kernel of each row's group, for rows that lie group behind group: [T, N] of x's type.

    x:           f32, bf16 or f16 [T, K]; its first group_sizes[0] rows are multiplied by kernel[0], and so on.
    kernel:      f32, bf16 or f16 [E, K, N]. Quantized from its own type; without a recipe cast to x's.
    group_sizes: i32[E]. Rows behind the last group have zeros, as of `jax.lax.ragged_dot`, and enter no amax.
    bias:        [E, N], added to the rows of its group.
    recipe:      None for products in x's type (f32 accumulation), else a recipe, and then `metas`. Where it scales
                 whole tensors by their amax of this step, x and the gradient of the result have one scale each, and
                 each kernel[e] one of its own (inside `jax.shard_map`, of the kernel[e] of all devices). Blocks have
                 rows of one group. MXFP8 operands are multiplied as bf16, which holds them exactly: a warning says
                 once that this is no faster than bf16.
    metas:       `fp8.DenseMetas`, as of `dense`: one scale for all kernels, by their largest amax. None under a recipe
                 without state.
    checkpoint, name: as in `dense`.

    Differentiable by x, kernel, bias and metas; the gradients of the kernel and bias of an empty group are 0. Raises
    ValueError for sizes, TypeError for types that do not match.
    """
    x, kernel, group_sizes, bias = as_jax(x, kernel, group_sizes, bias)
    check(name, "checkpoint", checkpoint, NONE | STRING)
    _check_rows_of_groups(name, x, kernel, group_sizes, bias, recipe, metas)
    ends = jnp.cumsum(group_sizes, dtype=jnp.int32)
    experts = jnp.sum(ends[None] <= jnp.arange(x.shape[0], dtype=jnp.int32)[:, None], 1)  # as in `expert_of_tile`
    groups = group(experts[:, None], group_sizes.shape[0])
    if recipe is None:
        of_groups = groups.offsets, groups.counts
        out = gemm_grouped(permute(x, groups), kernel.astype(x.dtype), *of_groups, bias=bias, k_first=True)
        return combine(out, groups, jnp.ones(groups.rows.shape, jnp.float32))
    warn_of_bf16_products(name, recipe)
    types = jax.tree.map(jax.typeof, (x, kernel, bias))
    config = Config(recipe, 1, *types, checkpoint=checkpoint, stage_axes=stage_axes())
    x, kernel, bias, groups = align(x, kernel, bias, groups)
    return _grouped_dense(_GroupedOperands(x, kernel, bias, metas or fp8.STATELESS), groups, config)


def _check_rows_of_groups(name, x, kernel, group_sizes, bias, recipe, metas):
    """Raises ValueError or TypeError, naming the layer, for operands that make no grouped dense layer."""
    check_is_array(name, kernel)
    shapes = "pass x[T, K], kernel[E, K, N], group_sizes[E] and bias[E, N]"
    arrays = [("x", x, 2), ("kernel", kernel, 3), ("group_sizes", group_sizes, 1)]
    for what, a, ndim in arrays if bias is None else [*arrays, ("bias", bias, 2)]:
        check(name, what, a, INTEGERS if ndim == 1 else FLOAT)
        if a.ndim != ndim:
            raise ValueError(f"{name}: {what} has the shape {a.shape}; {shapes}.")
    experts, inner, features = kernel.shape
    for what, a, shape in (
        ("x", x, (x.shape[0], inner)),
        ("group_sizes", group_sizes, (experts,)),
        ("bias", bias, (experts, features)),
    ):
        if a is not None and a.shape != shape:
            raise ValueError(f"{name}: {what} has the shape {a.shape}, but kernel {kernel.shape}; {shapes}.")
    check_recipe_and_metas(name, recipe, metas)


class _GroupedOperands(NamedTuple):
    """What is differentiated."""

    x: jax.Array
    kernel: jax.Array
    bias: jax.Array | None
    metas: fp8.DenseMetas


def _multiply(operands: _GroupedOperands, groups: Groups, config: Config, train: bool, needs_wgrad: bool):
    """The result, and for the backward pass x and the weights in FP8."""
    x, kernel, bias, metas = operands
    uses = LayerUses.of(config.recipe, train, needs_wgrad)
    q, _ = produce(rows_source(x, groups), Role("x", metas.x, uses.x, config.x), config)
    w = quantize_stacked(kernel, metas.kernel, uses.weight, config)
    return rows_of_tokens(grouped_fprop(q, w, bias, groups, config), groups), q, w


@custom_vjp(2, in_fp8=lambda config: "te_jax.layers.grouped_dense")
def _layer(operands, groups, config):
    return _multiply(operands, groups, config, train=False, needs_wgrad=False)[0]


def _layer_fwd(operands, groups, config):
    needs_wgrad = has_gradient(operands.kernel)
    operands, groups = values_of((operands, groups))
    y, q, w = _multiply(operands, groups, config, train=True, needs_wgrad=needs_wgrad)
    return y, (save_for_backward(tag_for_wgrad(q, config), w, operands.metas, config, needs_wgrad), groups)


def _layer_bwd(config, residuals, dy):
    saved, groups = residuals
    grad, dbias = quantize_rows_grad(instantiate(dy), None, saved, groups, config)
    dx = like(rows_of_tokens(grouped_dgrad(grad, saved.weight, groups, config), groups), config.x)
    dweight = like(grouped_wgrad(saved.x, grad, groups, config), config.weight) if saved.needs_wgrad else None
    return _GroupedOperands(dx, dweight, dbias, differentiate_metas(saved, grad, config)), None


_layer.defvjp(_layer_fwd, _layer_bwd, symbolic_zeros=True)
_grouped_dense = jit_layer(_layer, 2)
