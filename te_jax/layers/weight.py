"""Weights that are quantized before the layer that multiplies them: once for many steps, or for good."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero

from te_jax.core.check import BOOL, check, integer
from te_jax.core.derivatives import custom_vjp
from te_jax.layers.config import Config
from te_jax.layers.produce import quantize_stacked, quantize_weight
from te_jax.layers.tensor import Accumulator, Fp8Tensor, LayerUses, Uses
from te_jax.ops.formats import TENSOR, ScaleFormat, format_of, transpose
from te_jax.ops.quantize.array import FLOAT
from te_jax.recipe import Recipe
from te_jax.sharding.resource import stage_axes
from te_jax.state import fp8

_WAY_OUT = (
    "quantize the kernel again under the recipe in force, by te_jax.layers.quantize_kernel or te_jax.flax.fp8_params"
)


class GradientTarget(NamedTuple):
    """Stands for a weight's array: the gradient of a weight that lives in FP8 goes to it."""

    array: jax.Array  # [*C, *F] of the weight's dtype; nothing reads its values


_OF_KERNEL = ("contract", "features", "dtype", "format")


@partial(jax.tree_util.register_dataclass, data_fields=("tensor",), meta_fields=_OF_KERNEL)
@dataclass(frozen=True)
class QuantizedKernel:
    """A kernel [*C, *F] as FP8 GEMMs read it, of `quantize_kernel`.

    `dense`, `layernorm_dense` and `layernorm_mlp` take it instead of the kernel.

    Together with the array that it was made of (`with_wide`) it saves quantizing: results, gradients and FP8 state are
    the same as with the array, bit for bit, and the array has the gradient. Without the array it is all there is of the
    kernel: its FP8 state stays as it is, and what does not multiply in FP8 reads its dequantized values. It is a
    constant to `jax.grad` then; `te_jax.value_and_grad` has a gradient of it, an array [*C, *F] of `dtype`, by a
    `GradientTarget` instead of the array. A layout that a layer reads and that is not there is transposed from the
    other.

    A pytree; leaves may have more axes in front, as `nn.scan` and `nn.vmap` stack them.
    """

    tensor: Fp8Tensor  # data FP8 [*C, *F], data_t FP8 [*F, *C], their scales, the amax, an accumulator; or None each
    contract: int  # axes in C
    features: int  # axes in F
    dtype: jnp.dtype  # of the kernel, when it is dequantized
    format: ScaleFormat = TENSOR  # what shares a scale, and how the scales lie

    @property
    def ndim(self) -> int:
        """The number of axes, with the axes of a stack."""
        return len(self.shape)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the kernel, [*C, *F] behind the axes of a stack."""
        if self.tensor.data is not None:
            return self.tensor.data.shape
        return swap_axes(self.tensor.data_t.shape, self.features, self.contract)

    @property
    def stack(self) -> int:
        """The number of axes in front of C and F: of layers, of experts."""
        return self.ndim - self.contract - self.features

    @property
    def empty(self) -> bool:
        """Whether nothing is in FP8, as under a recipe that takes fprop and dgrad out of it."""
        return self.tensor.data is None and self.tensor.data_t is None

    def with_wide(self, wide: jax.Array | GradientTarget | None) -> "QuantizedKernel":
        """This kernel with the array that it was made of (for experts' weights, a tuple of arrays), with a target for
        its gradient, or without either."""
        return replace(self, tensor=self.tensor._replace(wide=wide))

    def with_accumulator(self, onto: Accumulator | None) -> "QuantizedKernel":
        """This kernel with a gradient that is added onto another one in the wgrad GEMM: see `te_jax.flax.wgrads`."""
        return replace(self, tensor=self.tensor._replace(onto=onto))

    def without_amax(self) -> "QuantizedKernel":
        """This kernel as a parameter, whose amax nothing reads."""
        return replace(self, tensor=self.tensor._replace(amax=None))

    @classmethod
    def unquantized(cls, kernel: jax.Array, contract: int) -> "QuantizedKernel":
        """A kernel [*C, *F] that the layer is to quantize after all."""
        return cls(Fp8Tensor(wide=kernel), contract, kernel.ndim - contract, kernel.dtype)

    def dequantize(self) -> jax.Array:
        """[*C, *F] of `dtype`: data * scale_inv in f32, rounded once. The gradient goes to the target that is there."""
        if self.stack:
            return jax.vmap(QuantizedKernel.dequantize)(self)
        if isinstance(self.tensor.wide, GradientTarget):
            return _with_gradient(lax.stop_gradient(self.with_wide(None).dequantize()), self.tensor.wide.array)
        data, scale_inv = self.tensor.held
        if self.tensor.data is not None:
            return self.format.read(data, scale_inv, self.features).astype(self.dtype)
        values = self.format.read(data, scale_inv, self.contract)
        return transpose(values, self.features).astype(self.dtype)


class Projection(NamedTuple):
    """The parameters of a dense layer, and its FP8 state."""

    kernel: jax.Array | QuantizedKernel  # [h, *F]
    bias: jax.Array | None  # [*F]
    metas: fp8.DenseMetas | None  # under a recipe with state


@custom_vjp()
def _with_gradient(values, target):
    """`values`, whose gradient goes to `target`, an array of their type."""
    return values


_with_gradient.defvjp(lambda values, target: (values, None), lambda _, g: (None, g))


def swap_axes(axes: tuple[Any, ...], first: int, second: int) -> tuple[Any, ...]:
    """`axes`, one entry for each axis of an array [..., *first, *second], in the order [..., *second, *first]. first,
    second: how many axes these are."""
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
    """Quantizes kernel [*C, *F] of f32, bf16 or f16 as the layers would; the result holds only FP8.

    contract:  axes in C.
    meta:      the kernel's entry in the layer's `metas`, under a recipe with state.
    gradients: whether a backward pass will read it. False: only the layout that fprop reads is made.

    Raises TypeError for a kernel that is not float and for no recipe, ValueError for a wrong `contract` or `meta`.
    """
    fp8.check_recipe(name, recipe)
    check(name, "kernel", kernel, FLOAT)
    check(name, "contract", contract, integer(1))
    check(name, "gradients", gradients, BOOL)
    if not 1 <= contract <= kernel.ndim - format_of(recipe, "kernel").free_axes:
        raise ValueError(f"{name}: contract is {contract}, but kernel has {kernel.ndim} axes; use fewer.")
    fp8.check_metas(name, "meta", meta, recipe, "pass one")
    uses = LayerUses.of(recipe, train=gradients, wgrad=False).weight
    made = quantize_outside_layer(*lax.stop_gradient((kernel, meta)), uses._replace(wide=False), recipe, contract)
    features, form = kernel.ndim - contract, format_of(recipe, "kernel")
    return QuantizedKernel(made, contract, features, kernel.dtype, form)


def quantize_outside_layer(
    weight: jax.Array, meta: fp8.TensorMeta | None, uses: Uses, recipe: Recipe, contract: int, stack: int = 0
) -> Fp8Tensor:
    """The tensor of a QuantizedKernel, in the layouts that `uses` says. stack: how many axes of `weight` are in front
    of C and F; each of the stacked kernels is quantized by itself."""
    config = Config(recipe, contract, None, jax.typeof(weight), stage_axes=stage_axes())
    if stack:
        return quantize_stacked(weight, meta, uses, config, stack)
    return quantize_weight(weight, meta, uses, config)


def check_is_array(name: str, kernel: Any) -> None:
    """Raises TypeError, naming the layer, for a QuantizedKernel, where the layer itself quantizes the kernel."""
    if isinstance(kernel, QuantizedKernel):
        raise TypeError(f"{name}: kernel is a QuantizedKernel; pass the array, which is quantized here.")


def check_quantized(
    what: str, q: QuantizedKernel, shape: tuple[int, ...], contract: int, recipe: Recipe, way_out: str = _WAY_OUT
) -> None:
    """Raises ValueError, naming `what`, unless `q` is a kernel of this shape as `recipe` reads it."""
    form = lambda dtype, shape, contract, blocks: (
        f"{jnp.dtype(dtype).name}{list(shape)} with {f'scales of blocks of {blocks}' if blocks else 'one scale'}, "
        f"of which {contract} axes are contracted"
    )
    wants = LayerUses.of(recipe, train=True, wgrad=False).weight.layouts
    if q.empty and not wants:
        return
    need = form(recipe.fp8_format.dtype("fwd"), shape, contract, format_of(recipe, "kernel").block)
    if q.empty:
        raise ValueError(f"{what} holds nothing in FP8, but {type(recipe).__name__} needs {need}; {way_out}.")
    data, _ = q.tensor.held
    if (have := form(data.dtype, q.shape, q.contract, q.format.block)) != need:
        raise ValueError(f"{what} is {have}, but {type(recipe).__name__} needs {need}; {way_out}.")


def resolve_weight(name: str, kernel: Any, contract: int, recipe: Recipe | None, argument: str = "kernel") -> Any:
    """A layer's weight, which may be a QuantizedKernel: the array, or an Fp8Tensor that has `wide`.

    Raises ValueError, naming the layer, for one of another form than the recipe reads, and where what it has in FP8 is
    differentiated.
    """
    if not isinstance(kernel, QuantizedKernel):
        return kernel
    array, onto = kernel.tensor.wide, kernel.tensor.onto
    target, array = (array, None) if isinstance(array, GradientTarget) else (None, array)
    if onto is not None and recipe is None:
        raise ValueError(f"{name}: {argument} has an accumulator, but no recipe; leave out the collection wgrads.")
    amax = None if array is None else kernel.tensor.amax  # without the array it is not this step's
    kernel = replace(kernel, tensor=_as_constant(kernel.tensor._replace(wide=None, onto=None, amax=amax), name))
    array = kernel.with_wide(target).dequantize() if array is None else array
    if recipe is None:
        return array
    if onto is None or not kernel.empty:
        check_quantized(f"{name}: {argument}", kernel, _shape_of(array), contract, recipe)
    return array if kernel.empty and onto is None else kernel.tensor._replace(wide=array, onto=onto)


def _shape_of(kernel) -> tuple[int, ...]:
    """The shape of a kernel; [E, K, A, N] for a tuple of A arrays [E, K, N], the weights of experts."""
    if not isinstance(kernel, tuple):
        return kernel.shape
    experts, inner, outer = kernel[0].shape
    return experts, inner, len(kernel), outer


def _as_constant(tensor: Fp8Tensor, name: str) -> Fp8Tensor:
    """`tensor`, which must not be differentiated. Its FP8 stays the array that was given: a loop over layers keeps a
    copy of what it computes for the backward pass, but not of what it is given."""
    held = dict(data=tensor.data, data_t=tensor.data_t)
    return _constant(tensor, name)._replace(**held)


@partial(jax.jit, static_argnums=1, inline=True)
def _constant(tensor: Fp8Tensor, name: str) -> Fp8Tensor:
    return lax.stop_gradient(_check_constant(tensor, name))


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def _check_constant(tensor, name):
    return tensor


def _refuse_weight(name, primals, tangents):
    if any(not isinstance(t, SymbolicZero) for t in jax.tree.leaves(tangents)):
        raise ValueError(
            f"{name}: a kernel that lives in FP8, or its copy in FP8, is differentiated, but it is a constant to "
            "jax.grad; te_jax.value_and_grad gives parameters in FP8 a gradient. Or leave it out of the arguments that "
            "the gradient is with respect to (te_jax.flax.split_lora does)."
        )
    return primals[0], tangents[0]


_check_constant.defjvp(_refuse_weight, symbolic_zeros=True)
