"""Kernels that are quantized before the layer that multiplies them: once for many steps, or for good."""

from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero

from te_jax import fp8
from te_jax._check import BOOL, check, integer
from te_jax.layers import _fp8
from te_jax.layers._fp8 import Accumulator, Config, Fp8Tensor, Uses
from te_jax.ops.gemm_block import dequantized
from te_jax.ops.quantize import FLOAT, transpose
from te_jax.ops.quantize_block import BLOCK, spread
from te_jax.ops.quantize_mx import BLOCK as MX_BLOCK
from te_jax.recipe import Recipe
from te_jax.sharding import stage_axes

WAY_OUT = (
    "quantize the kernel again under the recipe in force, by te_jax.layers.quantize_kernel or te_jax.flax.fp8_params"
)


class GradientSlot(NamedTuple):
    """In the place of a kernel's array: where the gradient of one that lives in FP8 goes."""

    array: jax.Array  # [*C, *F] of the kernel's dtype; nothing reads its values


@partial(jax.tree_util.register_dataclass, data_fields=("tensor",), meta_fields=("contract", "features", "dtype"))
@dataclass(frozen=True)
class QuantizedKernel:
    """A kernel [*C, *F] as FP8 GEMMs read it, of `quantize_kernel`.

    `dense`, `layernorm_dense` and `layernorm_mlp` take it in the place of the kernel. Beside the array that it was made
    of (`with_wide`) it saves quantizing: results, gradients and FP8 state are those of the array, bit for bit, and
    that has the gradient. Without, it is all there is of the kernel: its FP8 state stays as it is, and what does not
    multiply in FP8 reads its dequantized values. `te_jax.value_and_grad` has a gradient of it, an array [*C, *F] of
    `dtype`, by a `GradientSlot` beside it; for `jax.grad` it is a constant. A layout that a layer reads and that is not
    there is transposed from the other.

    A pytree; leaves may have more axes in front, as `nn.scan` and `nn.vmap` stack them.
    """

    tensor: Fp8Tensor  # data FP8 [*C, *F], data_t FP8 [*F, *C], their scales, the amax, an accumulator; or None each
    contract: int  # axes in C
    features: int  # axes in F
    dtype: jnp.dtype  # of the kernel, when it is dequantized

    @property
    def ndim(self) -> int:
        """As of an array."""
        return len(self.shape)

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the kernel, [*C, *F] behind the axes of a stack."""
        if self.tensor.data is not None:
            return self.tensor.data.shape
        return turned(self.tensor.data_t.shape, self.features, self.contract)

    @property
    def empty(self) -> bool:
        """Whether nothing is in FP8, as under a recipe that takes fprop and dgrad out of it."""
        return self.tensor.data is None and self.tensor.data_t is None

    def with_wide(self, wide: jax.Array | GradientSlot | None) -> "QuantizedKernel":
        """The same beside the array that it was made of, beside a slot for its gradient, or without either."""
        return replace(self, tensor=self.tensor._replace(wide=wide))

    def with_accumulator(self, onto: Accumulator | None) -> "QuantizedKernel":
        """The same with a gradient that is added onto another in the wgrad GEMM: see `wgrads`."""
        return replace(self, tensor=self.tensor._replace(onto=onto))

    @classmethod
    def unquantized(cls, wide: jax.Array, contract: int) -> "QuantizedKernel":
        """A kernel that the layer is to quantize after all."""
        return cls(Fp8Tensor(wide=wide), contract, wide.ndim - contract, wide.dtype)

    def dequantize(self) -> jax.Array:
        """[*C, *F] of `dtype`: data * scale_inv in f32, rounded once. The gradient goes to the slot that is there."""
        if self.ndim > self.contract + self.features:
            return jax.vmap(QuantizedKernel.dequantize)(self)
        if isinstance(self.tensor.wide, GradientSlot):
            return _with_gradient(lax.stop_gradient(self.with_wide(None).dequantize()), self.tensor.wide.array)
        if self.tensor.in_rows:
            return self._dequantized_rows().astype(self.dtype)
        data, scale = self.tensor.read(Uses(True, False, False), self.contract).rows
        if scale.ndim:
            for axis in (self.contract - 1, data.ndim - 1):
                scale = spread(scale, axis, data.shape[axis])
        return (data.astype(jnp.float32) * scale).astype(self.dtype)

    def _dequantized_rows(self) -> jax.Array:
        t = self.tensor
        if t.data_t is None:
            return dequantized(*t.rows, self.features, MX_BLOCK)
        return transpose(dequantized(*t.columns, self.contract, MX_BLOCK), self.features)


@jax.custom_vjp
def _with_gradient(values, slot):
    """`values`, whose gradient is that of `slot`, of the same type."""
    return values


_with_gradient.defvjp(lambda values, slot: (values, None), lambda _, g: (None, g))


def turned(axes: tuple, first: int, second: int) -> tuple:
    """What an array has of each axis, [..., *first, *second] -> [..., *second, *first], by their numbers."""
    lead = len(axes) - first - second
    return axes[:lead] + axes[lead + first :] + axes[lead : lead + first]


def quantize_kernel(
    kernel: jax.Array,
    *,
    recipe: Recipe,
    contract: int = 1,
    meta: fp8.TensorMeta | None = None,
    gradients: bool = True,
    name: str = "te_jax.layers.quantize_kernel",
) -> QuantizedKernel:
    """kernel f32, bf16 or f16 [*C, *F] -> the same in FP8 alone, as the layers would quantize it.

    contract:  axes in C.
    meta:      under a recipe with state, that of the kernel in the layer's `metas`.
    gradients: whether a backward pass will read it. False: only the layout that fprop reads is made.

    Raises TypeError for a kernel that is not float and for no recipe, ValueError for a wrong `contract` or `meta`.
    """
    fp8.check_recipe(name, recipe)
    check(name, "kernel", kernel, FLOAT)
    check(name, "contract", contract, integer(1))
    check(name, "gradients", gradients, BOOL)
    if not 1 <= contract < kernel.ndim + (not recipe.block_scaled):
        raise ValueError(f"{name}: contract is {contract}, but kernel has {kernel.ndim} axes; use fewer.")
    fp8.check_metas(name, "meta", meta, recipe, "pass one")
    use = _fp8.uses(recipe, train=gradients, wgrad=False)["kernel"]
    made = quantized(*lax.stop_gradient((kernel, meta)), use._replace(wide=False), recipe, contract)
    return QuantizedKernel(made, contract, kernel.ndim - contract, kernel.dtype)


def quantized(kernel: jax.Array, meta, use: Uses, recipe: Recipe, contract: int) -> Fp8Tensor:
    """The tensor of a QuantizedKernel, in the layouts that `use` says."""
    features = kernel.ndim - contract
    config = Config(recipe, contract, features, None, jax.typeof(kernel), stage_axes=stage_axes())
    return _fp8.quantize_kernel(kernel, meta, use, config)


def check_quantized(what: str, q: QuantizedKernel, shape, contract: int, recipe: Recipe, way_out: str = WAY_OUT):
    """Raises ValueError, naming `what`, unless `q` is a kernel of this shape as `recipe` reads it."""
    form = lambda dtype, shape, contract, blocks: (
        f"{jnp.dtype(dtype).name}{list(shape)} with {f'scales of blocks of {blocks}' if blocks else 'one scale'}, "
        f"of which {contract} axes are contracted"
    )
    wants = _fp8.uses(recipe, train=True, wgrad=False)["kernel"].layouts
    if q.empty and not wants:
        return
    need = form(recipe.fp8_format.dtype("fwd"), shape, contract, recipe.block)
    if q.empty:
        raise ValueError(f"{what} holds nothing in FP8, but {type(recipe).__name__} needs {need}; {way_out}.")
    data, scale = q.tensor.held
    block = MX_BLOCK if q.tensor.in_rows else BLOCK if scale.ndim else 0
    if (have := form(data.dtype, q.shape, q.contract, block)) != need:
        raise ValueError(f"{what} is {have}, but {type(recipe).__name__} needs {need}; {way_out}.")


def taken(name: str, kernel, contract: int, recipe: Recipe | None):
    """A layer's kernel, which may be a QuantizedKernel: the array, or an Fp8Tensor that has `wide`.

    Raises ValueError, naming the layer, for one of another form than the recipe reads, and where what it has in FP8 is
    differentiated.
    """
    if not isinstance(kernel, QuantizedKernel):
        return kernel
    wide, onto = kernel.tensor.wide, kernel.tensor.onto
    slot, wide = (wide, None) if isinstance(wide, GradientSlot) else (None, wide)
    if onto is not None and recipe is None:
        raise ValueError(f"{name}: kernel has an accumulator, but no recipe; leave out the collection wgrads.")
    amax = None if wide is None else kernel.tensor.amax  # else it is none of this step's
    kernel = replace(kernel, tensor=_constant(kernel.tensor._replace(wide=None, onto=None, amax=amax), name))
    wide = kernel.with_wide(slot).dequantize() if wide is None else wide
    if recipe is None:
        return wide
    if onto is None or not kernel.empty:
        check_quantized(f"{name}: kernel", kernel, wide.shape, contract, recipe)
    return wide if kernel.empty and onto is None else kernel.tensor._replace(wide=wide, onto=onto)


@partial(jax.jit, static_argnums=1, inline=True)
def _constant(tensor: Fp8Tensor, name: str) -> Fp8Tensor:
    return lax.stop_gradient(_checked(tensor, name))


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def _checked(tensor, name):
    return tensor


def _refuse(name, primals, tangents):
    if any(not isinstance(t, SymbolicZero) for t in jax.tree.leaves(tangents)):
        raise ValueError(
            f"{name}: a kernel that lives in FP8, or its copy in FP8, is differentiated, but it is a constant to "
            "jax.grad; te_jax.value_and_grad gives parameters in FP8 a gradient. Or leave it out of the arguments that "
            "the gradient is with respect to (te_jax.flax.split_lora does)."
        )
    return primals[0], tangents[0]


_checked.defjvp(_refuse, symbolic_zeros=True)
