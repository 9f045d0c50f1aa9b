"""The layout that a product reads of a weight of which another one is kept."""

from collections.abc import Callable
from typing import Any

import jax
from jax.experimental.layout import Layout, with_layout_constraint

from te_jax.core.op import Op
from te_jax.ops.formats import transpose


def _transpose_reference(x: jax.Array, *, split: int) -> list[jax.Array]:
    return [transpose(x, split)]


def _transpose_cuda(call: Callable[..., Any], x: jax.Array, *, split: int) -> list[jax.Array]:
    """What is transposed has its axes in memory in their order. XLA would else have the transposed order in memory, and
    where x is an entry of a stack, of layers in a loop, transpose the whole stack before the loop, and keep it."""
    return [transpose(with_layout_constraint(x, Layout(major_to_minor=tuple(range(x.ndim)))), split)]


transpose_op: Op = Op(
    "te_transpose",
    "x: m... n... -> y: n... m...",
    dtypes=lambda x, **attrs: (x,),
    ranks={"m...": "split"},
    reference=_transpose_reference,
    composed=True,
    cuda=_transpose_cuda,
)
"""x [*m, *n], of any type, with `split` axes in m -> y [*n, *m]."""


def transpose_held(x: jax.Array, split: int) -> jax.Array:
    """te_transpose, as `te_jax.ops.formats.transpose` has its arguments."""
    return transpose_op(x, split=split)[0]
