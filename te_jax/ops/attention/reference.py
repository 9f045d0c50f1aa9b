"""The meaning of the attention ops, in plain JAX."""

from collections.abc import Sequence
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from te_jax.core.arrays import as_rank
from te_jax.core.derivatives import custom_vjp
from te_jax.ops.attention.mask import Band, Mask, SequenceDescriptor

HIDDEN = -(2.0**100)
"""A bias that hides a key: far below all logits, and so far from -inf that its product with log2(e) is finite."""
HIDES = HIDDEN / 2
"""The bound below which a logit is taken for hidden."""


def sum_type(x: jax.Array) -> Any:
    """f32, or f64 for f64: the type of logits, softmax and sums."""
    return jnp.promote_types(x.dtype, jnp.float32)


@custom_vjp(0)
def _einsum(spec, x, y):
    """einsum of two arrays of one type, in f32. Rounds the cotangent to that type: tensor cores take one."""
    return jnp.einsum(spec, x, y, preferred_element_type=sum_type(x), precision=lax.Precision.HIGHEST)


def _einsum_bwd(spec, residuals, dout):
    x, y = residuals
    (x_axes, y_axes), out_axes = spec.split("->")[0].split(","), spec.split("->")[1]
    dout = dout.astype(x.dtype)
    dx = _einsum(f"{out_axes},{y_axes}->{x_axes}", dout, y)
    dy = _einsum(f"{out_axes},{x_axes}->{y_axes}", dout, x)
    return dx.astype(x.dtype), dy.astype(y.dtype)


_einsum.defvjp(lambda spec, x, y: (_einsum(spec, x, y), (x, y)), _einsum_bwd)


def _group(x, g):
    """[b..., s, (g r), d] -> [b..., s, g, r, d]."""
    return x.reshape(*x.shape[:-2], g, x.shape[-2] // g, x.shape[-1])


def group_heads(x: jax.Array, g: int) -> jax.Array:
    """[b..., (g r), s, t] -> [b..., g, r, s, t]."""
    return x.reshape(*x.shape[:-3], g, x.shape[-3] // g, *x.shape[-2:])


def scores(q: jax.Array, k: jax.Array) -> jax.Array:
    """q k^T per head: [b..., s, (g r), d], [b..., t, g, d] -> f32[b..., (g r), s, t]."""
    grouped = _einsum("...sgrd,...tgd->...grst", _group(q, k.shape[-2]), k)
    return grouped.reshape(*q.shape[:-3], q.shape[-2], *grouped.shape[-2:])


def mix(probs: jax.Array, v: jax.Array) -> jax.Array:
    """probs v per head: [b..., (g r), s, t], [b..., t, g, e] -> f32[b..., s, (g r), e]."""
    grouped = _einsum("...grst,...tge->...sgre", group_heads(probs, v.shape[-2]), v)
    return grouped.reshape(*v.shape[:-3], probs.shape[-2], probs.shape[-3], v.shape[-1])


def finite_top(top: jax.Array) -> jax.Array:
    """The maximum that a softmax subtracts; 0 where a row sees no key: exp(-inf - top) is 0, not NaN."""
    return lax.stop_gradient(jnp.where(top == -jnp.inf, 0, top))


def largest(x: jax.Array, axes: Sequence[int]) -> jax.Array:
    """The maximum over `axes`, -inf of nothing; NaN where there is one, which a maximum may drop (core/amax.py)."""
    return jnp.where(jnp.any(jnp.isnan(x), axes), jnp.nan, jnp.max(x, axes, initial=-jnp.inf))


def largest_by_head(top: jax.Array) -> jax.Array:
    """f32[h] of the largest logits of queries, f32[b..., h, s]."""
    return largest(top, [axis for axis in range(top.ndim) if axis != top.ndim - 2])


def merge_keys(partials: Sequence[tuple[jax.Array, jax.Array]]) -> tuple[jax.Array, jax.Array]:
    """(out [..., s, h, e], lse [..., h, s]) of several sets of keys -> out, lse f32 of all (Rabe, Staats 2021,
    https://arxiv.org/abs/2112.05682); out of the first one's type."""
    if len(partials) == 1:
        return partials[0]
    outs, lses = zip(*partials)
    top = finite_top(reduce(jnp.maximum, lses))
    weights = [jnp.exp(lse - top) for lse in lses]
    total = sum(weights)
    share = lambda weight: jnp.swapaxes(weight / jnp.where(total == 0, 1, total), -1, -2)[..., None]
    out = sum(share(weight) * out.astype(total.dtype) for weight, out in zip(weights, outs))
    return out.astype(outs[0].dtype), top + jnp.log(total)


def draw_kept(row: jax.Array, rate: float, s: int, t: int) -> jax.Array:
    """bool[s, t], True with probability 1 - rate, from the first words of u32[w]."""
    return jax.random.bernoulli(jax.random.wrap_key_data(row[:2], impl="threefry2x32"), 1 - rate, (s, t))


def _dropped(words, rate, s, t):
    """What dropout multiplies the probabilities by: f32[b..., h, s, t] drawn from u32[b..., h, 4]; None without."""
    if words is None:
        return None
    drawn = jax.vmap(lambda row: draw_kept(row, rate, s, t))(words.reshape(-1, words.shape[-1]))
    return drawn.reshape(*words.shape[:-1], s, t) / jnp.float32(1 - rate)


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    bias: jax.Array | None = None,
    hidden: jax.Array | None = None,
    factor: jax.Array | None = None,
    offset: jax.Array | None = None,
    scale: float,
    pre_scale: bool = False,
    softcap: float | None = None,
) -> tuple[jax.Array, ...]:
    """softmax(scale * q k^T + bias) v per head, in plain JAX: what the attention ops mean, and what users get off CUDA.

    q [b..., s, h, d], k [b..., t, g, d], v [b..., t, g, e]. Logits, softmax and sums are in f32 (f64 for f64); the
    probabilities are rounded to v's dtype, and their gradients to the operands' dtypes.

    bias:      [h, s, t] with any axes before and 1 where it broadcasts, or None. A logit below `HIDES` hides its key.
    hidden:    bool, broadcastable to [b..., h, s, t], True where a query does not see a key; None: all keys are seen.
    factor:    what dropout multiplies the probabilities by, broadcastable to [b..., h, s, t]; None without dropout.
    offset:    [h, 1, 1], a logit of each head that joins the sum of exponentials; None if nothing does.
    pre_scale: the bias is added before the scale is applied.
    softcap:   c: scaled logits x become c * tanh(x / c), before a bias that is not pre_scale; None: they stay.

    Returns out [b..., s, h, e] of q's dtype, lse [b..., h, s], the logarithm of each query's sum of exponentials, -inf
    if the query sees no key, and top [b..., h, s], the largest logit of each query, or -inf. A query that sees no key
    has out 0. Differentiable in q, k, v, bias and offset; top is not.
    """
    logits = _logits(q, k, bias, hidden, scale=scale, pre_scale=pre_scale, softcap=softcap)
    top = jnp.max(logits, -1, keepdims=True, initial=-jnp.inf)
    of_queries = largest(lax.stop_gradient(logits), [logits.ndim - 1])
    offset = None if offset is None else as_rank(offset, top.ndim)
    top = finite_top(top if offset is None else jnp.maximum(top, offset))
    weights = jnp.exp(logits - top)
    total = jnp.sum(weights, -1, keepdims=True)
    total = total if offset is None else total + jnp.exp(offset - top)
    probs = weights / jnp.where(total == 0, 1, total)
    # The gradient of a probability, dout v of any numbers, may be inf in f16: 0 where the probability does not count,
    # not inf * 0.
    if hidden is not None:
        probs = jnp.where(hidden, 0, probs)
    if factor is not None:
        probs = jnp.where(factor == 0, 0, probs * factor)
    lse = jnp.where(total == 0, -jnp.inf, top + jnp.log(jnp.where(total == 0, 1, total)))[..., 0]  # never log(0)
    return mix(probs.astype(v.dtype), v).astype(q.dtype), lse, of_queries


def _logits(q, k, bias, hidden, *, scale, pre_scale=False, softcap=None):
    """f32[b..., h, s, t]; -inf where a key is hidden. The arguments are as in `attend`."""
    logits = scores(q, k)
    bias = None if bias is None else as_rank(bias.astype(logits.dtype), logits.ndim)
    cap = (lambda x: x) if softcap is None else lambda x: softcap * jnp.tanh(x / softcap)
    if bias is None:
        logits = cap(scale * logits)
    else:
        total = scale * (logits + bias) if pre_scale else cap(scale * logits) + bias
        logits = jnp.where(total < HIDES, -jnp.inf, cap(total) if pre_scale else total)
    return logits if hidden is None else jnp.where(hidden, -jnp.inf, logits)


@partial(jax.jit, static_argnums=(0, 1), static_argnames=("left", "right", "bottom_right"), inline=True)
def _hidden(s, t, segments, *, left, right, bottom_right):  # traced once for both passes
    """bool, broadcastable to [b..., h, s, t]: the keys that the attributes and segments of an op hide; None: none."""
    band = Band(*(None if size < 0 else size for size in (left, right)), bottom_right)
    if segments is not None:
        lens, starts = ((segments[..., i], segments[..., i + 2]) for i in (1, 0))
        segments = SequenceDescriptor.from_seqlens_and_offsets(lens, starts)
    return Mask(band, segments).hides(s, t)


def split_joined(*operands: Any) -> tuple[Any, ...]:
    """q, k, v of (q, k, v), of (q, kv [b..., t, 2, g, d]) or of (qkv [b..., s, 3, h, d],)."""
    *apart, joined = operands
    missing = 3 - len(apart)
    return operands if missing == 1 else (*apart, *(joined[..., i, :, :] for i in range(missing)))


def forward(
    *operands: Any, dropout_rate: float, scale: float, seq_major: bool, interleaved: bool, **band: Any
) -> tuple[Any, ...]:
    """-> out, lse, drawn, top of the forward op."""
    del seq_major, interleaved  # they only say how arrays lie in memory
    *arrays, bias, segments, rng = operands
    q, k, v = split_joined(*(x for x in arrays if x is not None))
    s, t = q.shape[-3], k.shape[-3]
    out, lse, top = attend(
        *(x.astype(sum_type(x)) for x in (q, k, v)), bias=bias, hidden=_hidden(s, t, segments, **band),
        factor=_dropped(rng, dropout_rate, s, t), scale=scale,
    )  # fmt: skip
    return out.astype(q.dtype), lse.astype(jnp.float32), rng, top.astype(jnp.float32)


def backward(
    dout: jax.Array,
    *operands: Any,
    dropout_rate: float,
    scale: float,
    seq_major: bool,
    interleaved: bool,
    deterministic: bool,
    **band: Any,
) -> list[Any]:
    """-> the gradients of what attends, as it lies, and of the bias (None where there is none)."""
    del seq_major, interleaved, deterministic  # they only say how arrays lie in memory; XLA's sums have a fixed order
    *arrays, bias, segments, out, lse, drawn = operands
    parted = split_joined(*(x for x in arrays if x is not None))
    (s, *_), (t, g, _) = parted[0].shape[-3:], parted[1].shape[-3:]
    dout, q, k, v, out = (x.astype(sum_type(x)) for x in (dout, *parted, out))
    logits = _logits(q, k, bias, _hidden(s, t, segments, **band), scale=scale)
    probs = jnp.exp(logits - jnp.where(lse == -jnp.inf, 0, lse)[..., None])  # as `finite_top`, but of a derivative
    factor = 1.0 if drawn is None else _dropped(drawn, dropout_rate, s, t)
    delta = jnp.swapaxes(jnp.sum(dout * out, -1), -1, -2)  # [b..., h, s]: the sum of probs * dprobs over t
    dlogits = probs * (factor * scores(dout, v) - delta[..., None])
    dq = scale * mix(dlogits, k)
    dk = scale * _einsum("...grst,...sgrd->...tgd", group_heads(dlogits, g), _group(q, g))
    dv = _einsum("...grst,...sgre->...tge", group_heads(probs * factor, g), _group(dout, g))
    of_arrays = dq, dk, dv, (dk, dv), (dq, dk, dv)
    whole = lambda grad, x: (jnp.stack(grad, axis=-3) if isinstance(grad, tuple) else grad).astype(x.dtype)
    dbias = None if bias is None else sum_to(dlogits, bias.shape).astype(parted[0].dtype)
    return [*(None if x is None else whole(grad, x) for grad, x in zip(of_arrays, arrays, strict=True)), dbias]


def sum_to(x: jax.Array, shape: Sequence[int]) -> jax.Array:
    """`x` summed over the axes that are 1 in `shape`."""
    return jnp.sum(x, [i for i, (got, want) in enumerate(zip(x.shape, shape)) if got != want], keepdims=True)
