"""The three GEMMs between hidden states and logits, of a chunk of tokens at a time, in FP8 where a recipe is given.

logits  z  = x W       x [T, H], W [H, V] or its transpose -> f32 [T, V]
dgrad   dx = dz W^T    dz [T, V]                           -> [T, H] of x's type
wgrad   dW = x^T dz    added onto a sum over chunks        -> as W lies

The FP8 tensors of a kernel [V, H] are the tensors of [H, V] with their two layouts swapped: nothing is transposed in
memory.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import ShapedArray

from te_jax.core.amax import amax as amax_of
from te_jax.core.products import DGRAD, FPROP, WGRAD, product
from te_jax.layers import gemms
from te_jax.layers.config import Config
from te_jax.layers.produce import Role, quantize_grad, quantize_tensor, quantize_weight
from te_jax.layers.tensor import Fp8Tensor, LayerUses
from te_jax.ops.gemm.dense import dot
from te_jax.recipe import Recipe
from te_jax.state import fp8


class Head(NamedTuple):
    """The static facts of the products of a head."""

    recipe: Recipe | None
    words_first: bool  # the kernel is [V, H]
    x: ShapedArray  # the types that the operands had before `align`, x [N, H]
    kernel: ShapedArray
    stage_axes: frozenset[str]
    precision: Any  # `jax.default_matmul_precision` of the call, for the backward pass

    def config(self, tokens: int) -> Config:
        """The Config of a chunk of `tokens` tokens."""
        x = self.x.update(shape=(tokens, self.x.shape[1]))
        return Config(self.recipe, 1, x, self.kernel, stage_axes=self.stage_axes, precision=self.precision)

    @property
    def hidden_axis(self) -> int:
        """The axis of the kernel that is H."""
        return 1 if self.words_first else 0


class Amaxes(NamedTuple):
    """The amaxes that a pass over chunks saw of the tensors with FP8 state; None each without state."""

    x: jax.Array | None
    kernel: jax.Array | None
    grad: jax.Array | None

    def cotangents(self, metas: fp8.DenseMetas, head: Head) -> fp8.DenseMetas:
        """The cotangents of the state."""
        if head.recipe is None:
            return fp8.DenseMetas(None, None, None)
        return fp8.DenseMetas(*(fp8.cotangent(m, a, head.recipe, head.stage_axes) for m, a in zip(metas, self)))


def read_kernel(
    kernel: jax.Array, meta: fp8.TensorMeta | None, head: Head, train: bool, needs_wgrad: bool
) -> jax.Array | Fp8Tensor:
    """The kernel as the products of all chunks read it: in x's type, or in FP8 as a tensor [H, V]."""
    if head.recipe is None:
        return kernel.astype(head.x.dtype)
    uses = LayerUses.of(head.recipe, train, needs_wgrad).weight
    if not head.words_first:
        return quantize_weight(kernel, meta, uses, head.config(0))
    q = quantize_weight(kernel, meta, uses._replace(data=uses.data_t, data_t=uses.data), head.config(0))
    scales = (q.scale_inv, None) if q.scale_inv_t is None else (q.scale_inv_t, q.scale_inv)
    unquantized = None if q.wide is None else q.wide.T
    return q._replace(data=q.data_t, data_t=q.data, wide=unquantized, scale_inv=scales[0], scale_inv_t=scales[1])


def read_tokens(
    x: jax.Array, meta: fp8.TensorMeta | None, head: Head, train: bool, needs_wgrad: bool
) -> jax.Array | Fp8Tensor:
    """x [T, H] as its products read it."""
    if head.recipe is None:
        return x
    config = head.config(x.shape[0])
    role = Role("x", meta, LayerUses.of(head.recipe, train, needs_wgrad).x, config.x)
    return quantize_tensor(x, 1, role, config)[0]


def logits(x: Any, weight: Any, head: Head, tokens: int) -> jax.Array:
    """f32 [T, V], of what `read_tokens` and `read_kernel` give. They are never rounded to x's type."""
    if head.recipe is None:
        return product(FPROP)(dot)(x, (1,), weight, (head.hidden_axis,), jnp.float32)
    config = head.config(tokens)
    return gemms.fprop(x, weight, None, config._replace(x=config.x.update(dtype=jnp.dtype(jnp.float32))))


def gradients(
    x: Any, weight: Any, dz: jax.Array, total: jax.Array | None, meta: fp8.TensorMeta | None, head: Head, dgrad: bool
) -> tuple[jax.Array | None, jax.Array | None, jax.Array | None]:
    """(dx, total with this chunk's dW, the amax of dz) from the gradient dz [T, V] of the logits, in x's type.

    total: the sum of dW over the chunks before, or None without wgrad. dgrad: whether dx is wanted; None if not.
    """
    needs_wgrad, dx = total is not None, None
    if head.recipe is None:
        if dgrad:
            dx = product(DGRAD)(dot)(dz, (1,), weight, (1 - head.hidden_axis,), head.x.dtype)
        if needs_wgrad:
            left, right = (dz, x) if head.words_first else (x, dz)
            total = total + product(WGRAD)(dot)(left, (0,), right, (0,), total.dtype)
        return dx, total, None
    config = head.config(dz.shape[0])
    grad, _ = quantize_grad(dz, meta, config, needs_wgrad)
    if dgrad:
        dx = gemms.dgrad([(grad, weight, config)])
    if needs_wgrad:
        left, right = (grad, x) if head.words_first else (x, grad)
        total = gemms.wgrad(left, right, config, total)
    return dx, total, grad.amax


def largest_amax(amaxes: jax.Array | None) -> jax.Array | None:
    """The largest of the amaxes [c, ...] of c chunks."""
    return None if amaxes is None else amax_of(amaxes, (0,))
