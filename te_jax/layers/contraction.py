"""`jax.lax.dot_general` with a weight as its right operand, in FP8 where a recipe is given."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from te_jax.core.arrays import as_jax
from te_jax.core.check import ARRAY, FLOATING, NONE, check
from te_jax.layers.linear import dense
from te_jax.ops.quantize.array import FLOAT
from te_jax.recipe import Recipe
from te_jax.sharding.constraints import place_output
from te_jax.state import fp8


def why_not_fp8(lhs: jax.Array, rhs: jax.Array, dimension_numbers: Any) -> str | None:
    """Why `dense` does not compute this product; None if it does."""
    (contracted, _), (batch, _) = dimension_numbers
    if len(batch):
        return "it has batch axes, as a product of two activations or of a weight for each example"
    if not len(contracted):
        return "it contracts no axis"
    if wrong := [a.dtype.name for a in (lhs, rhs) if not FLOAT.accepts(a)]:
        return f"an operand is {wrong[0]}"
    return None


def dot_general(
    lhs: jax.Array,
    rhs: jax.Array,
    dimension_numbers: tuple[Sequence[Sequence[int]], Sequence[Sequence[int]]],
    precision: Any = None,
    preferred_element_type: Any = None,
    out_sharding: Any = None,
    *,
    recipe: Recipe | None = None,
    metas: fp8.DenseMetas | None = None,
    checkpoint: str | None = None,
    name: str = "te_jax.layers.dot_general",
) -> jax.Array:
    """`jax.lax.dot_general(lhs, rhs, dimension_numbers, ...)`, whose operands are quantized under `recipe`.

    lhs:        f32, bf16 or f16 [...], the activation.
    rhs:        f32, bf16 or f16 [...], the weight.
    dimension_numbers: ((axes of lhs, axes of rhs), (batch axes of lhs, of rhs)). Under a recipe some axes are
                contracted, and there are no batch axes.
    precision:  under a recipe None or the default one, since FP8 has no other.
    preferred_element_type: dtype of the result and of the sum. None: what the operands promote to.
    out_sharding: of the result, a PartitionSpec or NamedSharding; None as `dense` has it.
    recipe, metas, checkpoint, name: as in `dense`. Without a recipe this is `jax.lax.dot_general`.

    Returns [*free axes of lhs, *free axes of rhs]. Raises ValueError under a recipe for batch axes, operands of
    other dtypes, no contracted axis and a higher precision; for axes ValueError or TypeError as `jax.lax.dot_general`;
    otherwise as `dense`.
    """
    if recipe is None:
        types = dict(precision=precision, preferred_element_type=preferred_element_type)
        return lax.dot_general(lhs, rhs, dimension_numbers, out_sharding=out_sharding, **types)
    lhs, rhs = as_jax(lhs, rhs)
    for what, a, kind in (
        ("lhs", lhs, ARRAY), ("rhs", rhs, ARRAY), ("preferred_element_type", preferred_element_type, NONE | FLOATING)
    ):  # fmt: skip
        check(name, what, a, kind)
    types = (jax.ShapeDtypeStruct(a.shape, jnp.float32) for a in (lhs, rhs))
    jax.eval_shape(lambda *both: lax.dot_general(*both, dimension_numbers), *types)  # Refuses axes that they lack.
    if why := why_not_fp8(lhs, rhs, dimension_numbers):
        raise ValueError(f"{name}: dimension_numbers is {dimension_numbers!r}, but {why}; use jax.lax.dot_general.")
    _check_precision(name, precision)
    dtype = jnp.result_type(lhs, rhs) if preferred_element_type is None else jnp.dtype(preferred_element_type)
    # Sorted as lhs has them: mostly they are its last axes, and nothing is moved.
    inner, outer = zip(*sorted(zip(*dimension_numbers[0])))
    x = jnp.transpose(lhs, [*(i for i in range(lhs.ndim) if i not in inner), *inner])
    weight = jnp.transpose(rhs, [*outer, *(i for i in range(rhs.ndim) if i not in outer)])
    contract = len(inner)
    shape = (*x.shape[: x.ndim - contract], *weight.shape[contract:])
    # Each GEMM of the backward pass contracts the free axes of one operand, and needs one.
    x = x[None] if x.ndim == contract else x
    weight = weight[..., None] if weight.ndim == contract else weight
    # The sum is rounded to x's type: exact for a wider one, and what FP8 makes of the values is the same.
    x = x.astype(jnp.promote_types(x.dtype, dtype))
    y = dense(x, weight, contract=contract, recipe=recipe, metas=metas, checkpoint=checkpoint, name=name)
    y = (y if y.shape == shape else y.reshape(shape)).astype(dtype)
    return y if out_sharding is None else place_output(y, out_sharding)


_DEFAULT = (None, lax.Precision.DEFAULT, "default", "fastest", "bfloat16")


def _check_precision(name: str, precision):
    each = precision if isinstance(precision, tuple | list) else (precision,)
    if any(p not in _DEFAULT for p in each):
        raise ValueError(
            f"{name}: precision is {precision!r}, but operands in FP8 have 2 or 3 bits behind the point; leave it "
            "None, or keep the product out of FP8 (the recipe's exclude, or no dot_general of te_jax)."
        )
