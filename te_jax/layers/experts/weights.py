"""Weights of experts [E, K, N] as grouped GEMMs read them, one or several side by side, quantized here or before.

A layer holds the weights that one activation reads as parts, a tuple of Fp8Tensors. Arrays make one part of all slots,
which one GEMM multiplies: `wide` has the arrays, the FP8 layouts have an axis of slots, and each expert has one scale
for all of them. Kernels that were quantized one by one have scales of their own, and so are parts of one slot each.
"""

from collections.abc import Sequence
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from te_jax.core.arrays import as_jax
from te_jax.core.check import BOOL, check
from te_jax.layers.config import Config
from te_jax.layers.produce import quantize_stacked
from te_jax.layers.tensor import Fp8Tensor, LayerUses, Uses
from te_jax.layers.vjp import has_gradient
from te_jax.layers.weight import QuantizedKernel, resolve_weight
from te_jax.ops.formats import ScaleFormat, format_of
from te_jax.ops.quantize.array import FLOAT
from te_jax.recipe import Recipe
from te_jax.sharding.resource import stage_axes
from te_jax.state import fp8

Parts = tuple[Fp8Tensor, ...]
ExpertKernel = jax.Array | QuantizedKernel | Sequence[jax.Array | QuantizedKernel]


def quantize_experts(
    kernel: jax.Array | Sequence[jax.Array],
    *,
    recipe: Recipe,
    meta: fp8.TensorMeta | None = None,
    gradients: bool = True,
    name: str = "te_jax.layers.quantize_experts",
) -> QuantizedKernel:
    """Quantizes the weights of experts as `moe` would; the result holds FP8 alone, and `moe` takes it in their place.

    kernel:    f32, bf16 or f16 [E, K, N], such as wo; or a tuple of A of them, as of gated activations: (wi_0, wi_1).
    meta:      their entry in the layer's `metas`, of f32[E], under a recipe with state.
    gradients: as of `quantize_kernel`.

    Beside the arrays (`with_wide`; a tuple where `kernel` is one) it is a copy in FP8 that saves quantizing. Raises
    TypeError for a kernel that is not float and for no recipe, ValueError for shapes and a wrong `meta`.
    """
    fp8.check_recipe(name, recipe)
    check(name, "gradients", gradients, BOOL)
    fp8.check_metas(name, "meta", meta, recipe, "pass one")
    slots = isinstance(kernel, tuple | list)
    wide = as_jax(*kernel) if slots else as_jax(kernel)
    check_kernels(name, "kernel", wide)
    uses = LayerUses.of(recipe, train=True, wgrad=False).weight._replace(wide=False)
    uses = uses if gradients else uses._replace(data=False)
    config = Config(recipe, 1, None, jax.typeof(wide[0]), stage_axes=stage_axes())
    made = quantize_part(Fp8Tensor(wide=lax.stop_gradient(wide)), lax.stop_gradient(meta), uses, config, slots)
    return QuantizedKernel(made._replace(wide=None), 1, 1 + slots, wide[0].dtype, format_of(recipe, "kernel"))


def check_kernels(name: str, argument: str, wide: Sequence[jax.Array]) -> None:
    """Raises ValueError or TypeError, naming the layer, unless they are arrays [E, K, N] of one shape and type."""
    for a in wide:
        check(name, argument, a, FLOAT)
        if a.ndim != 3 or 0 in a.shape or (a.shape, a.dtype) != (wide[0].shape, wide[0].dtype):
            have = ", ".join(f"{a.dtype}{list(a.shape)}" for a in wide)
            raise ValueError(f"{name}: {argument} is {have}; pass arrays of three axes [E, K, N], all alike.")
    if not wide:
        raise ValueError(f"{name}: {argument} is {wide!r}; pass an array, or a tuple of one for each activation.")


def resolve_experts(name: str, argument: str, kernel: ExpertKernel, recipe: Recipe | None) -> Parts:
    """The parts of an argument, each with `wide` (a tuple of arrays [E, K, N]) and `onto` (a tuple, or None).

    Raises ValueError or TypeError, naming the layer, for what makes none, and as `resolve_weight`.
    """
    one = isinstance(kernel, QuantizedKernel) or not isinstance(kernel, tuple | list)
    each = as_jax(kernel) if one else as_jax(*kernel)
    if not any(isinstance(k, QuantizedKernel) for k in each):
        parts = (Fp8Tensor(wide=each),)
    else:
        parts = tuple(_part(resolve_weight(f"{name}: {argument}", k, 1, recipe), k) for k in each)
    check_kernels(name, argument, [a for part in parts for a in part.wide])
    return parts


def _part(got, kernel) -> Fp8Tensor:
    """`got`, of `resolve_weight`, in the form of a part."""
    part = got if isinstance(got, Fp8Tensor) else Fp8Tensor(wide=got)
    wide, in_slots = part.wide, getattr(kernel, "features", 1) == 2
    if not isinstance(wide, tuple):
        wide = tuple(wide[:, :, a] for a in range(wide.shape[2])) if in_slots else (wide,)
    onto = part.onto if part.onto is None or in_slots else (part.onto,)
    return part._replace(wide=wide, onto=onto)


def wide_of_parts(parts: Parts) -> tuple[jax.Array, ...]:
    """The arrays of all slots."""
    return tuple(a for part in parts for a in part.wide)


def any_gradient(parts: Parts) -> bool:
    """Whether one of the arrays, as a custom_vjp gets them, is differentiated; raises as `has_gradient`."""
    each = [zip(part.wide, part.onto or (None,) * len(part.wide)) for part in parts]
    return any([has_gradient(Fp8Tensor(wide=a, onto=onto)) for pairs in each for a, onto in pairs])


def quantize_part(part: Fp8Tensor, meta: fp8.TensorMeta | None, uses: Uses, config: Config, slots: bool) -> Fp8Tensor:
    """A part as its GEMMs read it: data [E, K, A, N], data_t [E, A, N, K]; without the axis A unless `slots`."""
    pair = slots and len(part.wide) == 2
    array = lambda: jnp.stack(part.wide, 2) if slots else part.wide[0]
    if part.data is None and part.data_t is None:
        weight, beside = part.wide if pair else (array(), None)
        return quantize_stacked(weight, meta, uses, config, beside=beside)._replace(onto=part.onto)
    q = part._replace(wide=None, amax=None, onto=None)
    one_slot = slots and (part.data_t if part.data is None else part.data).ndim == 3
    form = format_of(config.recipe, "kernel")
    q = jax.vmap(lambda each: each.read(uses, 1, form))(q)
    q = _with_slot(q, form) if one_slot else q
    return q._replace(wide=array() if uses.wide else None, amax=part.amax, onto=part.onto)


def _with_slot(q: Fp8Tensor, form: ScaleFormat) -> Fp8Tensor:
    """Of a weight [E, K, N] in FP8 the same with an axis of one slot in front of N."""
    insert = lambda a, axis: None if a is None else jnp.expand_dims(a, axis)
    q = q._replace(data=insert(q.data, 2), data_t=insert(q.data_t, 1))
    if not form.block:
        return q
    # Scales of blocks that are not square have the contracted axis in front: [E, N / block, K] and [E, K / block, N].
    at, at_t = (2, 1) if form.square else (1, 2)
    return q._replace(scale_inv=insert(q.scale_inv, at), scale_inv_t=insert(q.scale_inv_t, at_t))


def slots_at(q: Fp8Tensor, at: Any) -> Fp8Tensor:
    """Of rows [R, A, N] as GEMMs read them those of slot `at`, [R, N], or of a slice of slots. `paired` stays whole:
    its products are told the slot."""
    pick = lambda a, *where: a if a is None or a.ndim < 2 else a[where]
    every = slice(None)
    return q._replace(
        data=pick(q.data, every, at),
        data_t=pick(q.data_t, at),
        wide=pick(q.wide, every, at),
        scale_inv=pick(q.scale_inv, at),
        scale_inv_t=pick(q.scale_inv_t, every, at),
    )


def amax_of_parts(parts: Parts) -> jax.Array | None:
    """The amax of all parts, None where none is known."""
    known = [part.amax for part in parts if part.amax is not None]
    return reduce(jnp.maximum, known) if known else None
