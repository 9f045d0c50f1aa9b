"""Tensors as FP8 GEMMs read them.

fprop  y  = x  w      lhs x   [*B, *C], rhs w_t  [*F, *C]
dgrad  dx = dy w^T    lhs dy  [*B, *F], rhs w    [*C, *F]
wgrad  dw = x^T dy    lhs x_t [*C, *B], rhs dy_t [*F, *B]

So each tensor is wanted in two layouts, and one reading of it makes both. A GEMM that the recipe's
`override_linear_precision` takes out of FP8 reads the unquantized operands instead.
"""

from typing import Any, NamedTuple

import jax

from te_jax.ops.formats import ScaleFormat
from te_jax.ops.quantize.transpose import transpose_held
from te_jax.recipe import Recipe


class Uses(NamedTuple):
    """Which of the two layouts of a tensor a GEMM reads, and whether one reads the unquantized tensor."""

    data: bool
    data_t: bool
    wide: bool
    paired: bool = False  # both layouts from one array (`ops.experts.paired`)

    @property
    def layouts(self) -> tuple[str, ...]:
        """The names of the FP8 layouts that are read."""
        if self.paired:
            return ("paired",)
        return tuple(name for name in ("data", "data_t") if getattr(self, name))


class LayerUses(NamedTuple):
    """What the GEMMs of one layer read of each tensor."""

    x: Uses
    weight: Uses
    grad: Uses  # of y

    @classmethod
    def of(cls, recipe: Recipe, train: bool, wgrad: bool) -> "LayerUses":
        """Without `train` there is only fprop. wgrad: whether the weight has a gradient."""
        in_fprop, in_dgrad, in_wgrad = (not high for high in recipe.override_linear_precision)
        wgrad = train and wgrad
        return cls(
            Uses(in_fprop, wgrad and in_wgrad, not in_fprop or (wgrad and not in_wgrad)),
            Uses(train and in_dgrad, in_fprop, not in_fprop or (train and not in_dgrad)),
            Uses(in_dgrad, wgrad and in_wgrad, not in_dgrad or (wgrad and not in_wgrad)),
        )


class Accumulator(NamedTuple):
    """Where the gradient of a weight goes instead of to the weight: its cotangent is the sum after this pass, and the
    number of uses. More than one use would add up `grad` as often, as do devices of `shard_map` that share it."""

    grad: jax.Array  # f32 [*C, *F], the sum of the passes before
    uses: jax.Array  # f32[], a token


class Fp8Tensor(NamedTuple):
    """A tensor as its GEMMs read it; what no GEMM reads is None. x ~= data * scale_inv, block by block."""

    data: jax.Array | None = None  # FP8 [*m, *n]
    data_t: jax.Array | None = None  # FP8 [*n, *m]
    wide: jax.Array | None = None  # [*m, *n], unquantized, for a GEMM out of FP8
    scale_inv: jax.Array | None = None  # f32[], or of each block of data
    scale_inv_t: jax.Array | None = None  # of each block of data_t; None with one scale for both
    amax: jax.Array | None = None  # f32[], or f32[4] of a probed tensor (`fp8.observation`); None without state
    onto: Accumulator | None = None  # of a weight
    paired: jax.Array | None = None  # instead of data and data_t, both in one array (`ops.experts.paired`)

    @property
    def rows(self) -> tuple[jax.Array, jax.Array]:
        """[*m, *n] and what it is multiplied by."""
        return self.data, self.scale_inv

    @property
    def columns(self) -> tuple[jax.Array, jax.Array]:
        """[*n, *m] and what it is multiplied by."""
        return self.data_t, self.scale_inv if self.scale_inv_t is None else self.scale_inv_t

    @property
    def held(self) -> tuple[jax.Array, jax.Array]:
        """`rows`, or `columns` where there are no rows."""
        return self.columns if self.data is None else self.rows

    def with_one_column_axis(self, split: int) -> "Fp8Tensor":
        """A tensor [*m, g, c], with `split` axes in m, as [*m, g*c], whose blocks lie along c; another one as it is.

        Blocks of g*c are blocks of c where there is one group, or where they divide c.
        """
        shown = next(a for a in (self.data, self.data_t, self.wide) if a is not None)
        if shown.ndim == split + 1:
            return self
        at = dict(data=split, data_t=0, wide=split, scale_inv=0, scale_inv_t=split)
        merged = {name: _merge_columns(getattr(self, name), axis) for name, axis in at.items()}
        return self._replace(**merged)

    def read(self, use: Uses, split: int, form: ScaleFormat) -> "Fp8Tensor":
        """What GEMMs read of a weight of this format; `split` axes in m. A missing layout is transposed from the other.

        Raises ValueError where that cannot be done.
        """
        got = self
        if use.data and self.data is None:
            data, scale_inv = form.transpose(*self.columns, self.data_t.ndim - split, transpose_held)
            got = got._replace(data=data, scale_inv=scale_inv)
        if use.data_t and self.data_t is None:
            data_t, scale_inv_t = form.transpose(*self.rows, split, transpose_held)
            got = got._replace(data_t=data_t, scale_inv_t=scale_inv_t)
        return got._replace(**{name: None for name, is_read in use._asdict().items() if not is_read})


def _merge_columns(a, axis):
    """`a` with the axis and the next one as one; None and one scale for all as they are."""
    if a is None or not a.ndim:
        return a
    return a.reshape(*a.shape[:axis], a.shape[axis] * a.shape[axis + 1], *a.shape[axis + 2 :])


def wide_of(weight: jax.Array | Fp8Tensor) -> jax.Array:
    """The array of a layer's weight: itself, or the unquantized one of an Fp8Tensor."""
    return weight.wide if isinstance(weight, Fp8Tensor) else weight


def is_held_for_fprop(weight: Any) -> bool:
    """Whether a layer's weight was quantized before, in the layout that fprop reads, and in no other."""
    return isinstance(weight, Fp8Tensor) and weight.data is None and weight.data_t is not None
