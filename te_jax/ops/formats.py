"""Forms of FP8 as values: what shares a scale, by which law it is found, and how scales lie. Nothing else tells one
form from another."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from te_jax.core import extension
from te_jax.core.amax import amax
from te_jax.core.check import Kind, check, is_dtype
from te_jax.recipe import Recipe
from te_jax.recipe._base import scale_of_amax
from te_jax.recipe.mxfp8 import scale_inv_of_amax

FP8_TYPE = Kind(
    "float8_e4m3fn or float8_e5m2", is_dtype, lambda value: jnp.dtype(value) in (jnp.float8_e4m3fn, jnp.float8_e5m2)
)
HOPPER = "9.0"  # the compute capability of products of blocks of 128
_BLACKWELL = 10  # the least major one of products of blocks of 32


def has_hopper_kernels() -> bool:
    """Whether te_jax's kernels that only Hopper runs are there; also where no GPU is there to ask."""
    return extension.compute_capability() in (None, HOPPER) and extension.is_built_for("90a")


# -- arrays and blocks ----------------------------------------------------------------------------------------


def fp8_type(op: str, dtype: DTypeLike) -> Any:
    """`dtype`, the FP8 type that the op `op` is to write. Raises TypeError or ValueError for another."""
    check(op, "dtype", dtype, FP8_TYPE)
    return dtype


def saturate(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """f32 -> FP8, clipped to the finite range; NaN stays NaN.

    E4M3 has no inf, and a cast without the clip gives NaN from 464 on (https://arxiv.org/abs/2209.05433, section 3.1).
    """
    fp8_max = float(jnp.finfo(dtype).max)
    return jnp.clip(x, -fp8_max, fp8_max).astype(dtype)


def ceil_div(size: Any, by: int) -> Any:
    """size / by, rounded up; an int, or symbolic in `jax.export`. In this form jax knows that the quotient is enough,
    and at least 1."""
    return -(-size // by)


def fill(x: jax.Array, axis: int, multiple: int) -> jax.Array:
    """x with zeros behind it along `axis`, up to a multiple of `multiple`."""
    more = ceil_div(x.shape[axis], multiple) * multiple - x.shape[axis]
    return jnp.pad(x, [(0, more if i == axis else 0) for i in range(x.ndim)]) if more else x


def transpose(x: jax.Array, split: int) -> jax.Array:
    """[*m, *n] -> [*n, *m], with `split` axes in m."""
    return jnp.transpose(x, (*range(split, x.ndim), *range(split)))


def invert(scale: jax.Array) -> jax.Array:
    """What FP8 of this scale is multiplied by."""
    return 1.0 / scale


def spread(values: jax.Array, axis: int, size: int, block: int) -> jax.Array:
    """The value of each block along `axis` for each of its elements, `size` in all."""
    shape = list(values.shape)
    shape[axis : axis + 1] = [shape[axis], block]
    each = jnp.broadcast_to(jnp.expand_dims(values, axis + 1), shape)
    return lax.slice_in_dim(each.reshape(*shape[:axis], shape[axis] * block, *shape[axis + 2 :]), 0, size, axis=axis)


def _amaxes(x, axis, block):
    """The largest |x| of each block along `axis`; NaN where there is one."""
    blocks = ceil_div(x.shape[axis], block)
    x = fill(x, axis, block)
    return amax(x.reshape(*x.shape[:axis], blocks, block, *x.shape[axis + 1 :]), (axis + 1,))


# -- the laws of scales ---------------------------------------------------------------------------------------


def _floats(amaxes, fp8_max, *, power_2, epsilon):
    scale = scale_of_amax(amaxes, fp8_max, epsilon, power_2)
    return scale, invert(scale)


def _exponents(amaxes, fp8_max):
    inverse = scale_inv_of_amax(amaxes, fp8_max)
    return 1.0 / inverse.astype(jnp.float32), inverse


# -- formats --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ScaleFormat:
    """How a tensor [*m, *n] lies in FP8, as data [*m, *n] and its transpose data_t [*n, *m].

    name:        by which recipes name the format, and messages.
    suffix:      in the names of the ops that write it.
    block:       how many neighbours share a scale, along the last axis of n in data and of m in data_t, where the last
                 block may be cut; 0: all numbers do, and the scale is an operand of the ops.
    square:      blocks are block x block, the same in both layouts; else 1 x block, with scales of their own in each.
    law:         (amaxes f32, the largest FP8 number, **attributes) -> (scales f32, their inverses as they are stored).
    attributes:  the names of the law's attributes, which the ops that find scales have too.
    scale_dtype: of the inverse scales.
    refuses:     (a GPU's compute capability) -> why it multiplies no such factors, "" where it does.
    """

    name: str
    suffix: str = ""
    block: int = 0
    square: bool = False
    law: Callable[..., tuple[jax.Array, jax.Array]] = _floats
    attributes: tuple[str, ...] = ("power_2", "epsilon")
    scale_dtype: Any = jnp.float32
    refuses: Callable[[str], str] = lambda capability: ""

    @property
    def inverses(self) -> Mapping[str, str]:
        """The results that are the inverse scales of each layout, of blocks."""
        inverse = "block_inv" if self.square else "scale_inv"
        return {"data": inverse, "data_t": f"{inverse}_t"} if self.block else {}

    @property
    def shared(self) -> bool:
        """Whether both layouts have the same scales, so that each is the other's transpose."""
        return self.square or not self.block

    @property
    def free_axes(self) -> int:
        """How many axes that are not contracted a tensor must have: blocks of the transposed layout lie along one."""
        return int(self.block > 0)

    def axes_of_inverse(self, rows: str, columns: str) -> str:
        """The axes of the inverse scales of [rows, columns], with blocks along columns, in the order of cuBLASLt: in
        1 x block the contracted axis comes first, in block x block last."""
        blocks = f"{columns}/{self.block}"
        return f"{rows}/{self.block} {blocks}" if self.square else f"{blocks} {rows}"

    def rule_of_inverses(self, rows: str, columns: str, lead: str = "") -> list[str]:
        """The rule's text of `inverses` of a tensor [lead, rows, columns]."""
        layouts = (rows, columns), (columns, rows)
        return [f"{name}?: {lead} {self.axes_of_inverse(*of)}" for name, of in zip(self.inverses.values(), layouts)]

    def write(self, y: jax.Array, split: int, dtype: DTypeLike, **law: Any) -> dict[str, jax.Array]:
        """The meaning of ops of blocks: data, data_t and `inverses` of y f32 [*m, *n], with `split` axes in m."""
        rows, columns, fp8_max = split - 1, y.ndim - 1, float(jnp.finfo(dtype).max)
        if self.square:
            scale, inverse = self.law(_amaxes(_amaxes(y, rows, self.block), columns, self.block), fp8_max, **law)
            each = spread(spread(scale, rows, y.shape[rows], self.block), columns, y.shape[columns], self.block)
            data = saturate(y * each, dtype)
            made = data, transpose(data, split), inverse, transpose(inverse, split)
        else:

            def along(axis):
                scale, inverse = self.law(_amaxes(y, axis, self.block), fp8_max, **law)
                return saturate(y * spread(scale, axis, y.shape[axis], self.block), dtype), inverse

            (data, inverse), (data_t, inverse_t) = along(columns), along(rows)
            made = data, transpose(data_t, split), transpose(inverse, split), inverse_t
        return dict(zip(("data", "data_t", *self.inverses.values()), made))

    def read(self, data: jax.Array, scale_inv: jax.Array, contract: int) -> jax.Array:
        """The values, f32, of a layout [*rows, *k] in FP8, with `contract` axes in k, and its inverse scales."""
        rows, columns = data.ndim - contract - 1, data.ndim - 1
        scale_inv = scale_inv.astype(jnp.float32)
        if self.square:
            scale_inv = spread(scale_inv, rows, data.shape[rows], self.block)
        elif self.block:
            scale_inv = transpose(scale_inv, contract)
        if self.block:
            scale_inv = spread(scale_inv, columns, data.shape[columns], self.block)
        return data.astype(jnp.float32) * scale_inv

    def transpose(
        self, data: jax.Array, scale_inv: jax.Array, split: int, by: Callable[..., jax.Array] = transpose
    ) -> tuple[jax.Array, jax.Array]:
        """A layout [*m, *n] and its inverse scales -> the other one. split: axes in m. by: what does it.

        Raises ValueError where the layouts have scales of their own.
        """
        if not self.shared:
            raise ValueError(
                f"te_jax.layers: an MXFP8 kernel holds one layout, and its blocks of 1 x {self.block} are not the "
                "blocks of the other, which a backward pass reads; quantize it with gradients=True, or take dgrad out "
                "of FP8: override_linear_precision=(False, True, False)."
            )
        return by(data, split), by(scale_inv, split) if self.block else scale_inv

    def check_gpu(self, op: str) -> None:
        """Raises RuntimeError, naming `op`, where the GPU has no products of this format: csrc/*/*_block.cu need not be
        compiled for it."""
        extension.check_gpu(op, self.refuses)


def _not_hopper(capability: str) -> str:
    if capability == HOPPER:
        return ""
    return (
        f"cuBLASLt multiplies with scales of 128-element blocks only on compute capability {HOPPER} (Hopper), "
        f"this GPU has {capability}: use recipe.Float8CurrentScaling or recipe.DelayedScaling"
    )


def _before_blackwell(capability: str) -> str:
    if int(capability.partition(".")[0]) >= _BLACKWELL:
        return ""
    return (
        f"MXFP8 needs compute capability {_BLACKWELL}.0 (Blackwell) or newer, this GPU has {capability}: use "
        "recipe.Float8BlockScaling (only on 9.0), recipe.Float8CurrentScaling or recipe.DelayedScaling"
    )


TENSOR = ScaleFormat("tensor", attributes=())
ROWS_128 = ScaleFormat("rows_128", "_block", 128, refuses=_not_hopper)
SQUARES_128 = ScaleFormat("squares_128", "_block", 128, square=True, refuses=_not_hopper)
ROWS_32 = ScaleFormat("rows_32", "_mx", 32, False, _exponents, (), jnp.float8_e8m0fnu, _before_blackwell)
IN_USE = (TENSOR, TENSOR), (ROWS_128, SQUARES_128), (ROWS_32, ROWS_32)  # of tensors, and of the weights next to them
FORMATS = {form.name: form for pair in IN_USE for form in pair}


def format_of(recipe: Recipe, tensor: str) -> ScaleFormat:
    """The format of a tensor, "x", "kernel" or "grad", under a recipe, which names it."""
    return FORMATS[recipe.weight_scale_format if tensor == "kernel" else recipe.scale_format]
