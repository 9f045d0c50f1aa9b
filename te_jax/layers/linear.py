"""y = x . kernel + bias, in FP8 where a recipe is given."""

from typing import Any, NamedTuple

import jax
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike, DTypeLike

from te_jax.core.arrays import as_jax
from te_jax.core.check import ARRAY, NONE, STRING, Kind, check, integer, warn_once
from te_jax.core.policies import GEMM, with_names
from te_jax.core.products import note, note_recipe
from te_jax.core.types import align
from te_jax.layers._specs import dense_spec
from te_jax.layers.config import Config
from te_jax.layers.gemms import are_grouped_in_fp8, plain_sum
from te_jax.layers.projections import Operands, Static, project
from te_jax.layers.tensor import wide_of
from te_jax.layers.weight import Projection, QuantizedKernel, resolve_weight
from te_jax.ops.formats import format_of
from te_jax.ops.gemm.dense import dot
from te_jax.ops.quantize.array import FLOAT
from te_jax.recipe import Recipe
from te_jax.sharding.constraints import check_spec
from te_jax.state import fp8


def dense(
    x: ArrayLike,
    kernel: jax.Array | QuantizedKernel,
    bias: ArrayLike | None = None,
    residual: ArrayLike | None = None,
    *,
    contract: int = 1,
    recipe: Recipe | None = None,
    metas: fp8.DenseMetas | None = None,
    checkpoint: str | None = None,
    out: ArrayLike | None = None,
    grad_spec: PartitionSpec | None = None,
    tokens: PartitionSpec | None = None,
    name: str = "te_jax.layers.dense",
) -> jax.Array:
    """y[*B, *F] = x[*B, *C] . kernel[*C, *F] + bias[*F] + residual[*B, *F].

    x:          f32, bf16 or f16; its last `contract` axes are C.
    kernel:     f32, bf16 or f16, x's type or another. Quantized from its own type; without a recipe cast to x's. Or a
                `QuantizedKernel`, which is not quantized here.
    residual:   of x's type, added before the one rounding in FP8.
    recipe:     None for a plain dot in x's type (f32 accumulation), else a recipe, and then `metas`.
    metas:      `fp8.DenseMetas`; their cotangent is the amax of x, kernel and the gradient of y in this step. None
                under a recipe without state.
    checkpoint: name under which the quantized residuals are tagged for `jax.checkpoint` policies.
    out:        an array of y's shape. On an Explicit mesh y is sharded as `out` is; without `out`, as the residual is.
    grad_spec:  under Auto mesh axes, the sharding [*B, *F] that the FP8 gradient of y is gathered to, once for both
                GEMMs that read it, where y lies otherwise outside, as under sequence parallelism.
    tokens:     under Auto mesh axes, the sharding [*B] of y where it lies outside, if that is another one than in the
                GEMMs: for `MeshResource.tpsp_pieces`.
    name:       what errors call this layer.

    Returns y of x's type. Raises ValueError for sizes that do not match, TypeError for operands that are not float.
    """
    x, kernel, bias, residual = as_jax(x, kernel, bias, residual)
    weight = resolve_weight(name, kernel, contract, recipe)
    check(name, "checkpoint", checkpoint, NONE | STRING)
    check_dense(name, x, wide_of(weight), bias, contract, recipe, metas)
    shape = (*x.shape[: x.ndim - contract], *wide_of(weight).shape[contract:])
    check_residual(name, residual, shape, x.dtype)
    check_shardings(name, shape, out, grad_spec=grad_spec, tokens=tokens)
    out_type = jax.tree.map(jax.typeof, out)
    if recipe is None:
        spec = dense_spec(jax.typeof(x), jax.typeof(weight), contract, out_type, jax.tree.map(jax.typeof, residual))
        y = dot(x, range(x.ndim - contract, x.ndim), weight, range(contract), x.dtype, out_spec=spec)
        return plain_sum(with_names(y, GEMM), bias, residual)
    others = dict(checkpoint=checkpoint, residual=residual, out=out_type, grad_spec=grad_spec, tokens=tokens)
    config = Config.of(x, weight, bias, contract, recipe, **others)
    x, weight, bias, residual = align(x, weight, bias, residual)
    operands = Operands(x, (Projection(weight, bias, metas or fp8.STATELESS),), residual=residual)
    return project(operands, Static((config,)))[0][0]


METAS = NONE | Kind("fp8.DenseMetas", lambda metas: isinstance(metas, fp8.DenseMetas))


def check_residual(name: str, residual: jax.Array | None, shape: tuple[int, ...], dtype: DTypeLike) -> None:
    """Raises ValueError, naming the layer, for a residual that has not the output's shape and type."""
    check(name, "residual", residual, NONE | ARRAY)
    if residual is not None and (residual.shape != shape or residual.dtype != dtype):
        raise ValueError(f"{name}: residual is {residual.dtype}{residual.shape}, but the output {dtype}{shape}.")


def check_shardings(name: str, shape: tuple[int, ...], out: Any = None, **specs: Any) -> None:
    """Raises TypeError or ValueError, naming the layer, for arguments that do not say how an array of `shape` lies."""
    check(name, "out", out, NONE | ARRAY)
    if out is not None and out.shape != shape:
        raise ValueError(f"{name}: out has the shape {out.shape}, but the output {shape}; pass an array of that.")
    for argument, spec in specs.items():
        check_spec(name, argument, spec, len(shape))


def check_recipe_and_metas(name: str, recipe: Any, metas: Any, argument: str = "metas") -> None:
    """Raises TypeError or ValueError, naming the layer, unless `metas` are the state that `recipe` has. Warns of state
    without a recipe."""
    check(name, argument, metas, METAS)
    note_recipe(recipe, default=True)
    if recipe is not None:
        fp8.check_recipe(name, recipe)
        fp8.check_metas(name, argument, metas, recipe, "pass fp8.DenseMetas")
    elif metas is not None:
        warn_once(name, "metas are given, but recipe is None, so nothing is in FP8; pass both, or none.")


def warn_of_bf16_products(name: str, recipe: Recipe) -> None:
    """Warns, once, naming the layer, of a recipe whose grouped products multiply bf16."""
    if not are_grouped_in_fp8(recipe):
        text = f"recipe is {type(recipe).__name__}, whose grouped products are of bf16"
        note(f"{text}, which holds its FP8 exactly")
        warn_once(name, f"{text}: no faster than bf16; recipe.Float8BlockScaling() multiplies in FP8.")


class OperandNames(NamedTuple):
    """What errors call the operands of a dense layer: the arguments that the user passed."""

    x: str = "x"
    kernel: str = "kernel"
    bias: str = "bias"
    metas: str = "metas"


_OF_DENSE = OperandNames()


def check_dense(
    name: str, x: Any, kernel: Any, bias: Any, contract: int, recipe: Any, metas: Any, names: OperandNames = _OF_DENSE
) -> None:
    """Raises ValueError or TypeError, naming the layer, for operands that make no dense layer."""
    for what, a, kind in ((names.x, x, FLOAT), (names.kernel, kernel, FLOAT), (names.bias, bias, NONE | FLOAT)):
        check(name, what, a, kind)
    check(name, "contract", contract, integer())
    if not 1 <= contract <= min(x.ndim, kernel.ndim):
        raise ValueError(
            f"{name}: contract is {contract}; {names.x} has {x.ndim} axes, {names.kernel} {kernel.ndim}: use fewer."
        )
    inner, outer = x.shape[x.ndim - contract :], kernel.shape[:contract]
    if inner != outer:
        raise ValueError(
            f"{name}: the last axes of {names.x} are {inner}, but the first of {names.kernel} are {outer}; make both "
            "equal."
        )
    if bias is not None and bias.shape != kernel.shape[contract:]:
        features = f"{names.kernel}'s features are {kernel.shape[contract:]}"
        raise ValueError(f"{name}: {names.bias} is {bias.shape}, but {features}.")
    check_recipe_and_metas(name, recipe, metas, names.metas)
    if recipe is None:
        return
    for what, a, add in ((names.x, x, "x[None]"), (names.kernel, kernel, f"{names.kernel}[..., None]")):
        if a.ndim - contract < format_of(recipe, "x").free_axes:
            kind = type(recipe).__name__
            raise ValueError(f"{name}: {what} has only axes that are contracted, {kind} needs one more; pass {add}.")
