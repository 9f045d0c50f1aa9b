"""Weights of experts [E, K, N] as grouped GEMMs read them, one array or one for each slot of an activation, quantized
here or before.

A layer holds the weights that one activation reads as parts, a tuple of Fp8Tensors. Arrays make one part of all slots,
which one GEMM multiplies: `wide` has the arrays, the FP8 layouts have an axis of slots, and each expert has one scale
for all of them. Kernels that were quantized one by one have scales of their own: each is a part of one slot.
"""

from collections.abc import Sequence
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from te_jax.core.arrays import as_jax
from te_jax.core.check import BOOL, check
from te_jax.core.derivatives import custom_vjp
from te_jax.layers.config import Config
from te_jax.layers.produce import quantize_stacked, tag_weight
from te_jax.layers.tensor import Accumulator, Fp8Tensor, LayerUses, Uses
from te_jax.layers.vjp import accumulator_cotangent, has_gradient
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
    """Quantizes the weights of experts as `moe` would; the result holds only FP8, and `moe` takes it instead of them.

    kernel:    f32, bf16 or f16 [E, K, N], such as wo; or a tuple of A such arrays: (wi_0, wi_1) of gated activations.
    meta:      their entry in the layer's `metas`, of f32[E], under a recipe with state.
    gradients: as of `quantize_kernel`.

    Together with the arrays (`with_wide`; a tuple where `kernel` is one) it is a copy in FP8 that saves quantizing.
    Raises TypeError for a kernel that is not float and for no recipe, ValueError for shapes and a wrong `meta`.
    """
    fp8.check_recipe(name, recipe)
    check(name, "gradients", gradients, BOOL)
    fp8.check_metas(name, "meta", meta, recipe, "pass one")
    has_slots = isinstance(kernel, tuple | list)
    arrays = as_jax(*kernel) if has_slots else as_jax(kernel)
    check_kernels(name, "kernel", arrays)
    uses = LayerUses.of(recipe, train=True, wgrad=False).weight._replace(wide=False)
    uses = uses if gradients else uses._replace(data=False)
    config = Config(recipe, 1, None, jax.typeof(arrays[0]), stage_axes=stage_axes())
    made = quantize_part(Fp8Tensor(wide=lax.stop_gradient(arrays)), lax.stop_gradient(meta), uses, config, has_slots)
    return QuantizedKernel(made._replace(wide=None), 1, 1 + has_slots, arrays[0].dtype, format_of(recipe, "kernel"))


def check_kernels(name: str, argument: str, arrays: Sequence[jax.Array]) -> None:
    """Raises ValueError or TypeError, naming the layer, unless they are arrays [E, K, N] of one shape and type."""
    for a in arrays:
        check(name, argument, a, FLOAT)
        if a.ndim != 3 or 0 in a.shape or (a.shape, a.dtype) != (arrays[0].shape, arrays[0].dtype):
            have = ", ".join(f"{a.dtype}{list(a.shape)}" for a in arrays)
            raise ValueError(f"{name}: {argument} is {have}; pass arrays of three axes [E, K, N], all alike.")
    if not arrays:
        raise ValueError(f"{name}: {argument} is {arrays!r}; pass an array, or a tuple of one for each activation.")


def resolve_experts(name: str, argument: str, kernel: ExpertKernel, recipe: Recipe | None) -> Parts:
    """The parts of an argument, each with `wide` (a tuple of arrays [E, K, N]) and `onto` (a tuple, or None).

    Raises ValueError or TypeError, naming the layer, for what makes none, and as `resolve_weight`.
    """
    one = isinstance(kernel, QuantizedKernel) or not isinstance(kernel, tuple | list)
    each = as_jax(kernel) if one else as_jax(*kernel)
    if not any(isinstance(k, QuantizedKernel) for k in each):
        parts = (Fp8Tensor(wide=each),)
    else:
        parts = tuple(_part(resolve_weight(name, k, 1, recipe, argument), k) for k in each)
    check_kernels(name, argument, [a for part in parts for a in part.wide])
    return parts


def _part(got, kernel) -> Fp8Tensor:
    """`got`, of `resolve_weight`, in the form of a part."""
    part = got if isinstance(got, Fp8Tensor) else Fp8Tensor(wide=got)
    arrays, has_slots = part.wide, getattr(kernel, "features", 1) == 2
    if not isinstance(arrays, tuple):
        arrays = tuple(arrays[:, :, a] for a in range(arrays.shape[2])) if has_slots else (arrays,)
    onto = part.onto if part.onto is None or has_slots else (part.onto,)
    return part._replace(wide=arrays, onto=onto)


def arrays_of(parts: Parts) -> tuple[jax.Array, ...]:
    """The arrays of all slots."""
    return tuple(a for part in parts for a in part.wide)


def hidden_block(parts: Parts, recipe: Recipe | None) -> int:
    """What a device's part of the hidden features must be a multiple of, for the numbers of one device; 0 where they
    stay whole: scales of blocks that are not square, of weights that are quantized already."""
    form = None if recipe is None else format_of(recipe, "kernel")
    if form is None or not form.block:
        return 1
    quantized = any(part.data is not None or part.data_t is not None for part in parts)
    return form.block if form.square or not quantized else 0


@custom_vjp()
def from_zero(onto: Accumulator) -> Accumulator:
    """`onto` with zeros for the sum so far, which joins the sum behind all devices: each of them would add it."""
    return onto._replace(grad=jnp.zeros_like(onto.grad))


from_zero.defvjp(
    lambda onto: (onto._replace(grad=jnp.zeros_like(onto.grad)), onto),
    lambda onto, got: (accumulator_cotangent(onto.grad + got.grad, onto),),
)


def any_gradient(parts: Parts) -> bool:
    """Whether one of the arrays, as a custom_vjp gets them, is differentiated; raises as `has_gradient`."""
    each = [zip(part.wide, part.onto or (None,) * len(part.wide)) for part in parts]
    return any([has_gradient(Fp8Tensor(wide=a, onto=onto)) for pairs in each for a, onto in pairs])


def quantize_part(
    part: Fp8Tensor, meta: fp8.TensorMeta | None, uses: Uses, config: Config, has_slots: bool, crosses: bool = False
) -> Fp8Tensor:
    """A part as its GEMMs read it: data [E, K, A, N], data_t [E, A, N, K]; without the axis A unless `has_slots`.

    crosses: whether data is to cross devices, behind which another call makes data_t of it. That one names it.
    """
    array = lambda: jnp.stack(part.wide, 2) if has_slots else part.wide[0]
    if part.data is None and part.data_t is None:
        weight, second = part.wide if has_slots and len(part.wide) == 2 else (array(), None)
        return quantize_stacked(weight, meta, uses, config, second=second, named=not crosses)._replace(onto=part.onto)
    q, crossed = part._replace(wide=None, amax=None, onto=None), part.data is not None and part.data_t is None
    one_slot = has_slots and (part.data_t if part.data is None else part.data).ndim == 3
    form = format_of(config.recipe, "kernel")
    q = jax.vmap(lambda each: each.read(uses, 1, form))(q)
    q = _with_slot(q, form) if one_slot else q
    q = q._replace(wide=array() if uses.wide else None, amax=part.amax, onto=part.onto)
    return tag_weight(q, config) if crossed else q


def _with_slot(q: Fp8Tensor, form: ScaleFormat) -> Fp8Tensor:
    """A weight [E, K, N] in FP8, with an axis of one slot in front of N."""
    insert = lambda a, axis: None if a is None else jnp.expand_dims(a, axis)
    q = q._replace(data=insert(q.data, 2), data_t=insert(q.data_t, 1))
    if not form.block:
        return q
    # Scales of blocks that are not square have the contracted axis in front: [E, N / block, K] and [E, K / block, N].
    at, at_t = (2, 1) if form.square else (1, 2)
    return q._replace(scale_inv=insert(q.scale_inv, at), scale_inv_t=insert(q.scale_inv_t, at_t))


def slots_at(q: Fp8Tensor, at: Any) -> Fp8Tensor:
    """The rows [R, N] of slot `at`, or of a slice of slots, from rows [R, A, N] as GEMMs read them. `paired` stays
    whole: its products are told the slot."""
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
