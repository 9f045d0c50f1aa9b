"""The head of a language model and its loss in one: logits are there for a chunk of tokens at a time, never all.

The three products are 2 N H V FLOPs each, for N tokens of width H and a vocabulary of V. A mean or sum has one number
as its cotangent, so the forward pass computes the gradients too, while a chunk's logits are there: three products in
all. Losses of single tokens each have a cotangent of their own, by which the gradient of the kernel cannot be
multiplied afterwards: the backward pass computes the logits again, and there are four.

A chunk has the whole vocabulary for its tokens: the gradient of a logit needs the sum over all logits of its token.
Chunks of the vocabulary would need no sum of dW over chunks, but a fourth product. A chunk of T tokens takes 4 T V
bytes of f32 logits and 2 T V of their gradient in 16 bits. With 1 GiB of logits (2048 tokens, V = 128k) a product has
enough rows. The sum of dW, which each chunk reads and writes, is 1 GB of traffic each way, compared with products of
2 TFLOP.
In FP8 the copies of the kernel take memory, too, and chunks are half as long. The sum of dW is in bf16 if the kernel
is: in f32 it would be 4 H V bytes more, a third of all that is needed at N = 16k, H = 4k, V = 128k.

Where devices split the vocabulary, each has maxima, sums of exponentials and labels' logits of its own: a few numbers
per token cross.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import custom_vjp_primal_tree_values as values_of

from te_jax.core.derivatives import custom_vjp
from te_jax.core.types import align, like
from te_jax.layers.loss import head_gemms
from te_jax.layers.loss.head_gemms import Amaxes, Head
from te_jax.layers.vjp import has_gradient, instantiate, jit_layer
from te_jax.state import fp8

_LOGITS_BYTES, _LOGITS_BYTES_FP8 = 1 << 30, 1 << 29  # of one chunk; in FP8 the kernel's copies take memory, too
_LEAST_TOKENS, _ROWS = 1024, 128  # of a chunk, however large the vocabulary; what its tokens are a multiple of


@dataclass(frozen=True)
class LossOptions:
    """The loss of a token, given its logits.

    label_smoothing: e: the target is (1 - e) times the label plus e / V of each entry of the vocabulary.
    z_loss:          c: adds c times the square of the logarithm of the sum of exponentials.
    logit_softcap:   c: logits z become c tanh(z / c); None leaves them.
    ignore_index:    the label of tokens without loss; None: there is none.
    """

    label_smoothing: float = 0.0
    z_loss: float = 0.0
    logit_softcap: float | None = None
    ignore_index: int | None = -100

    def counts(self, labels: jax.Array) -> jax.Array:
        """Whether a token has a loss: bool of the shape of `labels`."""
        return jnp.ones(labels.shape, bool) if self.ignore_index is None else labels != self.ignore_index


class Plan(NamedTuple):
    """The static facts of one call."""

    loss: LossOptions
    head: Head
    chunk: int | None  # tokens of a chunk; None: by the bytes of its logits
    accumulate: jnp.dtype  # of the sum of dW over chunks
    vocab_axes: tuple[str, ...]  # the manual mesh axes that split the vocabulary
    eager: bool  # the gradients are computed in the forward pass

    def tokens_of_chunk(self, tokens: int, vocabulary: int) -> int:
        """T, where there are `tokens` in all. Several chunks have about the same size."""
        logits = _LOGITS_BYTES_FP8 if self.head.recipe else _LOGITS_BYTES
        by_bytes = max(logits // (4 * vocabulary) // _ROWS * _ROWS, _LEAST_TOKENS)
        chunk = by_bytes if self.chunk is None else self.chunk
        if not isinstance(tokens, int):  # a symbol of `jax.export`: any number of chunks
            return max(chunk, 1)
        if tokens <= chunk:
            return tokens
        even = -(-tokens // -(-tokens // chunk))
        return even if chunk % _ROWS else -(-even // _ROWS) * _ROWS


class HeadOperands(NamedTuple):
    """What is differentiated."""

    x: jax.Array  # [N, H]
    kernel: jax.Array  # [H, V] or [V, H]
    metas: fp8.DenseMetas


# -- one chunk ------------------------------------------------------------------------------------------------


class _Sums(NamedTuple):
    """What the loss needs of each token's logits, over the vocabulary of all devices; f32 [T] each."""

    lse: jax.Array  # the logarithm of the sum of exponentials
    label: jax.Array  # the logit of the label, 0 where that is no entry of this device
    total: jax.Array | None  # the sum, for label smoothing


def _label_places(labels, z, plan: Plan):
    """i32[T], the places of the labels in this device's part of the vocabulary, and the size of the whole."""
    vocabulary = z.shape[1]
    if not plan.vocab_axes:
        return labels, vocabulary
    return labels - lax.axis_index(plan.vocab_axes) * vocabulary, vocabulary * lax.axis_size(plan.vocab_axes)


def _is_label(z, places):
    return lax.broadcasted_iota(jnp.int32, z.shape, 1) == places[:, None]


def _sums(z, places, plan: Plan) -> _Sums:
    across = lambda a: lax.psum(a, plan.vocab_axes) if plan.vocab_axes else a
    largest = jnp.max(z, 1)
    largest = lax.pmax(largest, plan.vocab_axes) if plan.vocab_axes else largest
    largest = jnp.where(jnp.isfinite(largest), largest, 0)  # a NaN comes back by the sum
    exponentials = across(jnp.sum(jnp.exp(z - largest[:, None]), 1))
    label = across(jnp.sum(jnp.where(_is_label(z, places), z, 0), 1))
    total = across(jnp.sum(z, 1)) if plan.loss.label_smoothing else None
    return _Sums(jnp.log(exponentials) + largest, label, total)


def _cap(z, cap: float | None):
    return z if cap is None else cap * jnp.tanh(z / cap)


def _losses(z, labels, plan: Plan):
    """f32 [T], and what its gradient needs: (sums, places, the size of the vocabulary). z: capped logits f32 [T, V]."""
    loss, (places, vocabulary) = plan.loss, _label_places(labels, z, plan)
    sums = _sums(z, places, plan)
    smooth = loss.label_smoothing
    each = sums.lse - (1 - smooth) * sums.label
    if smooth:
        each = each - smooth / vocabulary * sums.total
    if loss.z_loss:
        each = each + loss.z_loss * sums.lse**2
    each = jnp.where((labels >= 0) & (labels < vocabulary), each, jnp.nan)
    return jnp.where(loss.counts(labels), each, 0), (sums, places, vocabulary)


def _gradient(z, weights, labels, of_losses, plan: Plan):
    """The gradient [T, V], in x's type, of the sum of weights f32[T] times losses by the logits before the cap."""
    loss, (sums, places, vocabulary) = plan.loss, of_losses
    weights = jnp.where((labels >= 0) & (labels < vocabulary), weights, jnp.nan)
    smooth, scale = loss.label_smoothing, weights
    if loss.z_loss:
        scale = weights * (1 + 2 * loss.z_loss * sums.lse)
    dz = jnp.exp(z - sums.lse[:, None]) * scale[:, None]
    dz = dz - jnp.where(_is_label(z, places), ((1 - smooth) * weights)[:, None], 0)
    if smooth:
        dz = dz - (smooth / vocabulary * weights)[:, None]
    if loss.logit_softcap is not None:
        dz = dz * (1 - (z / loss.logit_softcap) ** 2)
    return jnp.where(loss.counts(labels)[:, None], dz, 0).astype(plan.head.x.dtype)


# -- all chunks -----------------------------------------------------------------------------------------------


def _in_chunks(a, tokens: int, fill):
    """a [N, ...] -> [c, T, ...], filled up. A chunk has every c-th token: so a mesh axis that splits N splits T."""
    count = -(-a.shape[0] // max(tokens, 1)) or 1
    if count == 1:
        return a[None]
    a = jnp.pad(a, ((0, count * tokens - a.shape[0]), *[(0, 0)] * (a.ndim - 1)), constant_values=fill)
    return jnp.moveaxis(a.reshape(tokens, count, *a.shape[1:]), 1, 0)


def _from_chunks(a, tokens: int):
    """[c, T, ...] -> [N, ...], N of `tokens`."""
    return jnp.moveaxis(a, 0, 1).reshape(-1, *a.shape[2:])[:tokens]


def _each_chunk(operands: HeadOperands, labels, weights, plan: Plan):
    """x, labels and weights of each chunk. Tokens that fill up the last one have no loss, whatever their label."""
    count, vocabulary = operands.x.shape[0], operands.kernel.shape[1 - plan.head.hidden_axis]
    tokens = plan.tokens_of_chunk(count, vocabulary)
    return _in_chunks(operands.x, tokens, 0), _in_chunks(labels, tokens, 0), _in_chunks(weights, tokens, 0)


def _only_losses(operands: HeadOperands, labels, plan: Plan) -> jax.Array:
    """The losses f32 [N]."""
    head, (x, kernel, metas) = plan.head, operands
    weight = head_gemms.read_kernel(kernel, metas.kernel, head, train=False, needs_wgrad=False)

    def one(chunk):
        tokens, labels = chunk
        q = head_gemms.read_tokens(tokens, metas.x, head, train=False, needs_wgrad=False)
        z = _cap(head_gemms.logits(q, weight, head, tokens.shape[0]), plan.loss.logit_softcap)
        return _losses(z, labels, plan)[0]

    return _from_chunks(lax.map(one, _each_chunk(operands, labels, labels, plan)[:2]), x.shape[0])


class _Gradients(NamedTuple):
    """The gradients of the sum of weighted losses; arrays without elements instead of what is not wanted."""

    x: jax.Array
    kernel: jax.Array
    amaxes: Amaxes


def _losses_and_gradients(operands: HeadOperands, labels, weights, plan: Plan, needs_dgrad: bool, needs_wgrad: bool):
    """The losses f32 [N], and the gradients of their sum, each times its weight f32 [N]."""
    head, (x, kernel, metas) = plan.head, operands
    weight = head_gemms.read_kernel(kernel, metas.kernel, head, train=True, needs_wgrad=needs_wgrad)

    def one(total, chunk):
        tokens, labels, weights = chunk
        q = head_gemms.read_tokens(tokens, metas.x, head, train=True, needs_wgrad=needs_wgrad)
        z = _cap(head_gemms.logits(q, weight, head, tokens.shape[0]), plan.loss.logit_softcap)
        losses, of_losses = _losses(z, labels, plan)
        dz = _gradient(z, weights, labels, of_losses, plan)
        dx, total, seen = head_gemms.gradients(q, weight, dz, total, metas.grad, head, needs_dgrad)
        return total, (losses, dx, getattr(q, "amax", None), seen)

    start = jnp.zeros(kernel.shape if needs_wgrad else (0,), plan.accumulate)
    start = align(start, kernel)[0] if needs_wgrad else None
    total, (losses, dx, *seen) = lax.scan(one, start, _each_chunk(operands, labels, weights, plan))
    losses, nothing = _from_chunks(losses, x.shape[0]), jnp.zeros((0,))
    dx = _from_chunks(dx, x.shape[0]) if needs_dgrad else nothing
    amaxes = Amaxes(head_gemms.largest_amax(seen[0]), getattr(weight, "amax", None), head_gemms.largest_amax(seen[1]))
    return losses, _Gradients(dx, total if needs_wgrad else nothing, amaxes)


# -- differentiated -------------------------------------------------------------------------------------------


def _result(losses, plan: Plan):
    return jnp.sum(losses) if plan.eager else losses


def _name_in_fp8(plan: Plan) -> str | None:
    return "te_jax.layers.linear_cross_entropy" if plan.head.recipe else None


@custom_vjp(2, in_fp8=_name_in_fp8)
def _cross_entropy(operands, labels, plan):
    return _result(_only_losses(operands, labels, plan), plan)


def _fwd(operands, labels, plan):
    """An eager plan keeps gradients, another the operands; both say by arrays of size 0 what is not differentiated."""
    wanted = operands.x.perturbed, has_gradient(operands.kernel)
    operands, labels = values_of((operands, labels))
    if not plan.eager:
        flags = tuple(jnp.zeros((1 if each else 0,)) for each in wanted)
        return _only_losses(operands, labels, plan), (operands, labels, flags)
    ones = align(jnp.ones(labels.shape, jnp.float32), labels)[0]
    losses, gradients = _losses_and_gradients(operands, labels, ones, plan, *wanted)
    return _result(losses, plan), (operands.metas, gradients)


def _bwd(plan, residuals, cotangent):
    cotangent, head = instantiate(cotangent), plan.head
    if plan.eager:
        metas, gradients = residuals
        scaled = lambda a: cotangent * a.astype(jnp.float32)
    else:
        operands, labels, flags = residuals
        with jax.default_matmul_precision(head.precision):
            wanted = (bool(flag.size) for flag in flags)
            _, gradients = _losses_and_gradients(operands, labels, cotangent, plan, *wanted)
        metas, scaled = operands.metas, lambda a: a
    dx, dkernel, amaxes = gradients
    dx = like(scaled(dx), head.x) if dx.size else None
    dkernel = like(scaled(dkernel), head.kernel) if dkernel.size else None
    return HeadOperands(dx, dkernel, amaxes.cotangents(metas, head)), None


_cross_entropy.defvjp(_fwd, _bwd, symbolic_zeros=True)
cross_entropy: Callable[..., Any] = jit_layer(_cross_entropy, 2)
