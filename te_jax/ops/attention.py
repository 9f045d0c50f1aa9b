"""Scaled dot-product attention: cuDNN (FlashAttention, https://arxiv.org/abs/2205.14135) or plain JAX."""

import warnings
from functools import cache, partial
from math import prod
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from te_jax import _lib
from te_jax._op import Op, align, like
from te_jax.ops.attention_check import Options, check_options
from te_jax.ops.attention_mask import MASK_TYPES as MASK_TYPES
from te_jax.ops.attention_mask import Band, either
from te_jax.ops.attention_mask import SequenceDescriptor as SequenceDescriptor

_OP = "dot_product_attention"
_LONG = 4096  # from here on the s x t logits in memory deserve a warning

# ---- the meaning, in plain JAX -------------------------------------------------------------------


def _wide(x):
    """f32, or f64 for f64: the type of logits, softmax and sums."""
    return jnp.promote_types(x.dtype, jnp.float32)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _einsum(spec, x, y):
    """einsum of two arrays of one type, in f32. Rounds the cotangent to that type: tensor cores take one."""
    return jnp.einsum(spec, x, y, preferred_element_type=_wide(x), precision=lax.Precision.HIGHEST)


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


def _group_heads(x, g):
    """[b..., (g r), s, t] -> [b..., g, r, s, t]."""
    return x.reshape(*x.shape[:-3], g, x.shape[-3] // g, *x.shape[-2:])


def _scores(q, k):
    """q k^T per head: [b..., s, (g r), d], [b..., t, g, d] -> f32[b..., (g r), s, t]."""
    grouped = _einsum("...sgrd,...tgd->...grst", _group(q, k.shape[-2]), k)
    return grouped.reshape(*q.shape[:-3], q.shape[-2], *grouped.shape[-2:])


def _mix(probs, v):
    """probs v per head: [b..., (g r), s, t], [b..., t, g, e] -> f32[b..., s, (g r), e]."""
    grouped = _einsum("...grst,...tge->...sgre", _group_heads(probs, v.shape[-2]), v)
    return grouped.reshape(*v.shape[:-3], probs.shape[-2], probs.shape[-3], v.shape[-1])


def _finite_top(top):
    """The maximum that a softmax subtracts; 0 where a row sees no key: exp(-inf - top) is 0, not NaN."""
    return lax.stop_gradient(jnp.where(top == -jnp.inf, 0, top))


def _causal_logits(q, k, causal, scale):
    """f32[b..., h, s, t] of f32 operands."""
    logits = scale * _scores(q, k)
    hidden = Band(None, 0, False).hides_of(*logits.shape[-2:]) if causal else None
    return logits if hidden is None else jnp.where(hidden, -jnp.inf, logits)


def _fwd_reference(q, k, v, *, causal, scale):
    q32, k32, v32 = (x.astype(_wide(x)) for x in (q, k, v))
    logits = _causal_logits(q32, k32, causal, scale)
    top = _finite_top(jnp.max(logits, -1, keepdims=True, initial=-jnp.inf))
    weights = jnp.exp(logits - top)
    total = jnp.sum(weights, -1, keepdims=True)
    out = _mix(weights / jnp.where(total == 0, 1, total), v32)
    lse = (top + jnp.log(total))[..., 0]
    return out.astype(q.dtype), lse.astype(jnp.float32)


def _bwd_reference(dout, q, k, v, out, lse, *, causal, scale, deterministic):
    del deterministic  # XLA's sums have a fixed order
    types, g = (q.dtype, k.dtype, v.dtype), k.shape[-2]
    dout, q, k, v, out = (x.astype(_wide(x)) for x in (dout, q, k, v, out))
    probs = jnp.exp(_causal_logits(q, k, causal, scale) - _finite_top(lse)[..., None])
    delta = jnp.swapaxes(jnp.sum(dout * out, -1), -1, -2)  # [b..., h, s]: the sum of probs * dprobs over t
    dlogits = scale * probs * (_scores(dout, v) - delta[..., None])
    dq = _mix(dlogits, k)
    dk = _einsum("...grst,...sgrd->...tgd", _group_heads(dlogits, g), _group(q, g))
    dv = _einsum("...grst,...sgre->...tge", _group_heads(probs, g), _group(dout, g))
    return [grad.astype(dtype) for grad, dtype in zip((dq, dk, dv), types, strict=True)]


def _plain(q, k, v, bias, hidden, kept, offset, options: Options):
    """All that `dot_product_attention` can do -> its out, and max_logit [h].

    hidden, kept: bool, broadcastable to [b..., h, s, t]: keys not seen, probabilities not dropped.
    offset: [h, 1, 1]. None where there is none.
    """
    logits = _scores(q, k)
    if bias is None:
        logits = options.scale * logits
    elif options.pre_scale:
        logits = options.scale * (logits + bias.astype(logits.dtype))
    else:
        logits = options.scale * logits + bias.astype(logits.dtype)
    if hidden is not None:
        logits = jnp.where(hidden, -jnp.inf, logits)
    top = jnp.max(logits, -1, keepdims=True, initial=-jnp.inf)
    max_logit = jnp.max(jnp.moveaxis(top, -3, 0).reshape(top.shape[-3], -1), -1, initial=-jnp.inf)
    top = _finite_top(top if offset is None else jnp.maximum(top, offset))
    weights = jnp.exp(logits - top)
    total = jnp.sum(weights, -1, keepdims=True)
    total = total if offset is None else total + jnp.exp(offset - top)
    probs = weights / jnp.where(total == 0, 1, total)
    if kept is not None:
        probs = jnp.where(kept, probs / (1 - options.dropout_rate), 0)
    return _mix(probs.astype(v.dtype), v).astype(q.dtype), lax.stop_gradient(max_logit)


# ---- the ops -------------------------------------------------------------------------------------


def _cudnn_refuses(q, k, v) -> str:
    """Why cuDNN does not take these operands, on any GPU; "" if it does."""
    (s, _, d), (t, _, e) = q.shape[-3:], v.shape[-3:]
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"q is {q.dtype}; cuDNN takes bfloat16 and float16"
    if not (q.dtype == k.dtype == v.dtype):
        return f"q is {q.dtype}, k {k.dtype}, v {v.dtype}; cuDNN takes one type"
    if 0 in (*q.shape, *k.shape, *v.shape):
        return f"an operand is empty: q{list(q.shape)}, k{list(k.shape)}, v{list(v.shape)}"
    for name, size in (("d, of q and k,", d), ("e, of v,", e)):
        if size % 8 or size > 128:
            return f"head dim {name} is {size}; cuDNN takes multiples of 8 up to 128"
    if s < 2 or t < 2:
        return f"q has {s} and k has {t} positions; cuDNN takes 2 and more"
    return ""


@cache
def _gpu_refuses(same_head_dims: bool) -> str:
    """Why this process's GPU does not take the rest; "" if it does, or if there is none."""
    if not _lib.has_cuda_device():
        return ""
    capability = jax.devices("cuda")[0].compute_capability
    major = int(str(capability).split(".")[0])
    found = f"the GPU has compute capability {capability}"
    if major < 8:
        return f"{found}; cuDNN attention needs 8.0 (Ampere)"
    if major < 9 and not same_head_dims:
        return f"{found}; cuDNN needs 9.0 (Hopper) where v's head dim is not q's"
    return ""


def _workspace(kind, q, k, v, *, causal, scale, deterministic=False) -> int:
    """Bytes, from cuDNN's plan where there is a GPU; else (cross-lowering) from above."""
    (b, s, h, d), (t, g, e) = q.shape, v.shape[1:]
    module = _lib.require_for_lowering()
    if module:
        dtype = "bf16" if q.dtype == jnp.bfloat16 else "f16"
        return module.attention_workspace(kind, dtype, b, s, t, h, g, d, e, causal, scale, deterministic)
    slack = 16 << 20
    if kind == "fwd":
        return slack + 8 * b * h * s
    whole = 4 * b * h * (s * (d + 2) + t * (d + e))  # f32 dq, row sums, and dk, dv of every query head
    return slack + whole + (2 * b * h * (s + 128) * (t + 128) if deterministic else 0)


def _flat(x, axes):
    """The axes before the last `axes` as one."""
    return x.reshape(prod(x.shape[: x.ndim - axes]), *x.shape[x.ndim - axes :])


def _fwd_cuda(call, q, k, v, **attrs):
    if _cudnn_refuses(q, k, v):  # the op means the same for every type and size
        return _fwd_reference(q, k, v, **attrs)
    out, lse = call(*(_flat(x, 3) for x in (q, k, v)), **attrs)
    return [x.reshape(*q.shape[:-3], *x.shape[1:]) for x in (out, lse)]


def _bwd_cuda(call, dout, q, k, v, out, lse, **attrs):
    if _cudnn_refuses(q, k, v):
        return _bwd_reference(dout, q, k, v, out, lse, **attrs)
    grads = call(*(_flat(x, 3) for x in (dout, q, k, v, out)), _flat(lse, 2), **attrs)
    return [grad.reshape(x.shape) for grad, x in zip(grads, (q, k, v), strict=True)]


attention_fwd = Op(
    "te_attention_fwd",
    "q: b... s (g r) d, k: b... t g d, v: b... t g e -> out: b... s (g r) e, lse: b... (g r) s",
    replicated="s t d e r",
    dtypes=lambda q, k, v, **attrs: (q, jnp.float32),
    reference=_fwd_reference,
    workspace=lambda q, k, v, **attrs: _workspace("fwd", q, k, v, **attrs),
    cuda=_fwd_cuda,
)
"""softmax(scale * q k^T) v per head; query head i reads key head i // r.

q, k, v: bf16 or f16 through cuDNN, any floating type elsewhere. scale: float.
causal: query i sees keys 0 .. i.
out: of q's type. lse: f32, natural log of the sum of exp(scale * q k^T) over the keys seen; -inf if none is.
"""

attention_bwd = Op(
    "te_attention_bwd",
    "dout: b... s (g r) e, q: b... s (g r) d, k: b... t g d, v: b... t g e, out: b... s (g r) e, "
    "lse: b... (g r) s -> dq: b... s (g r) d, dk: b... t g d, dv: b... t g e",
    replicated="s t d e r",
    dtypes=lambda dout, q, k, v, out, lse, **attrs: (q, k, v),
    reference=_bwd_reference,
    workspace=lambda dout, q, k, v, out, lse, **attrs: _workspace("bwd", q, k, v, **attrs),
    cuda=_bwd_cuda,
)
"""The gradients of `attention_fwd`'s out from its operands and results. deterministic: bitwise repeatable."""


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _attention(q, k, v, attrs, name):
    return _attention_fwd(q, k, v, attrs, name)[0]


def _attention_fwd(q, k, v, attrs, name):
    causal, scale, _ = attrs
    out, lse = attention_fwd(q, k, v, causal=causal, scale=scale)
    if name:  # a policy that saves this name saves all that the backward pass needs of the forward kernel
        out, lse = checkpoint_name(out, name), checkpoint_name(lse, name)
    return out, (q, k, v, out, lse)


def _attention_bwd(attrs, name, residuals, dout):
    causal, scale, deterministic = attrs
    grads = attention_bwd(dout, *residuals, causal=causal, scale=scale, deterministic=deterministic)
    return tuple(like(grad, x) for grad, x in zip(grads, residuals[:3], strict=True))


_attention.defvjp(_attention_fwd, _attention_bwd)

# ---- the choice ----------------------------------------------------------------------------------


class AttentionChoice(NamedTuple):
    """Which implementation a call takes, and why not the other."""

    implementation: str  # "cudnn" (its op lowers to plain JAX off CUDA) or "xla"
    refused: dict[str, str]  # implementation -> reason

    def __str__(self):
        refused = (f"not {name}: {reason}" for name, reason in self.refused.items())
        return "; ".join([self.implementation, *refused])


def _why_not_cudnn(q, k, v, options: Options) -> str:
    """Why the cuDNN op does not serve this call; "" if it does."""
    s, t = q.shape[-3], k.shape[-3]
    left, right, _ = options.band.trimmed(s, t)
    served = left is None and (right is None or right == options.band.shift(s, t) == 0)
    mask = f"attn_mask_type {options.attn_mask_type!r} with window_size {options.window_size}"
    for is_asked, what in (
        (options.bias is not None, "a bias is given"),
        (options.mask is not None, "a mask is given"),
        (options.sequence_descriptor is not None, "a sequence_descriptor is given"),
        (options.softmax_type != "vanilla", f"softmax_type is {options.softmax_type!r}"),
        (options.dropout_rate > 0, f"dropout_rate is {options.dropout_rate}"),
        (options.return_max_logit, "return_max_logit is set"),
        (not served, f"{mask} on {s} queries and {t} keys is neither full nor causal from the top left"),
    ):
        if is_asked:
            return f"{what}; in this version cuDNN serves plain full and causal attention"
    return _cudnn_refuses(q, k, v) or _gpu_refuses(q.shape[-1] == v.shape[-1])


def _choose(q, k, v, options: Options, implementation) -> AttentionChoice:
    if implementation not in (None, "cudnn", "xla"):
        raise ValueError(f"{_OP}: implementation is {implementation!r}; pass None, 'cudnn' or 'xla'.")
    why_not = _why_not_cudnn(q, k, v, options)
    if implementation == "cudnn" and why_not:
        raise ValueError(f"{_OP}: implementation is 'cudnn', but {why_not}; pass None or 'xla'.")
    if implementation == "xla" or why_not:
        return AttentionChoice("xla", {"cudnn": why_not or "implementation is 'xla'"})
    reason = "cuDNN serves this call without the s x t logits in memory"
    return AttentionChoice("cudnn", {"xla": "implementation is 'cudnn'" if implementation else reason})


def explain_attention(q, k, v, *, implementation: str | None = None, **kwargs) -> AttentionChoice:
    """Which implementation `dot_product_attention` takes with these arguments, and why not the other.

    Arrays may be `jax.ShapeDtypeStruct`s, and `dropout_rng` may be left out. Raises what that call raises.
    """
    return _choose(q, k, v, check_options(_OP, q, k, v, needs_rng=False, **kwargs), implementation)


@cache
def _warn_long(reason: str):
    text = f"{_OP}: plain JAX keeps the logits of a sequence over {_LONG} in memory, because {reason}."
    warnings.warn(text, stacklevel=3)


def dot_product_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    attn_mask_type: str = "no_mask",
    attn_bias_type: str | None = None,
    softmax_type: str = "vanilla",
    softmax_offset: jax.Array | None = None,
    scale: float | None = None,
    window_size: tuple[int, int] | None = None,
    dropout_rate: float = 0.0,
    dropout_rng: jax.Array | None = None,
    sequence_descriptor: SequenceDescriptor | None = None,
    deterministic: bool = False,
    implementation: str | None = None,
    return_max_logit: bool = False,
    context_checkpoint_name: str | None = None,
):
    """softmax(scale * q k^T + bias, masked) v per head, with logits, softmax and sums in f32.

    q [b..., s, h, d], k [b..., t, g, d], v [b..., t, g, e] of one floating dtype. Query head i reads key head
    i // (h / g).

    attn_mask_type: a name of MASK_TYPES. Causal: query i sees keys 0 .. i; bottom right: 0 .. i + t - s.
    mask:           bool or integer, [s, t] or [b..., h, s, t] with 1 where it broadcasts; True, 1 hide a key.
    window_size:    (l, r): query i sees keys i - l .. i + r (i + t - s in place of i for bottom-right types).
                    A negative side is open.
    sequence_descriptor: lengths or segments of the rows; type and window count within a segment.
        Type, mask, window and descriptor each hide keys. A query that sees none gets zeros, and no gradient.
    bias:           floating [s, t] or [b..., h, s, t], with 1 where it broadcasts; differentiable.
    attn_bias_type: None or "post_scale_bias"; "pre_scale_bias": softmax(scale * (q k^T + bias)); "no_bias".
    softmax_type:   "vanilla"; what joins the sum of exponentials: "off_by_one": 1; "learnable":
                    exp(softmax_offset).
    softmax_offset: [h] or [1, h, 1, 1], compared with the scaled logits; differentiable.
    scale:          float; None is 1 / sqrt(d).
    dropout_rate:   in [0, 1), on the probabilities, from the key `dropout_rng` (typed or raw).
    deterministic:  bitwise repeatable gradients.
    implementation: None: cuDNN where it serves the call (bf16 and f16, full or causal), else plain JAX, whose
                    memory grows with s * t; "cudnn" or "xla" force one. See `explain_attention`.
    return_max_logit: also return the largest logit of each head, f32[h], not differentiable.
    context_checkpoint_name: names the output, and lse with it, for `jax.checkpoint` policies.

    Returns [b..., s, h, e] of q's dtype, or (that, max_logit).
    Raises ValueError or TypeError for arguments that do not fit, and where a forced cuDNN cannot serve.
    """
    q, k, v = map(jnp.asarray, (q, k, v))
    options = check_options(
        _OP, q, k, v, bias=bias, mask=mask, attn_mask_type=attn_mask_type, attn_bias_type=attn_bias_type,
        softmax_type=softmax_type, softmax_offset=softmax_offset, scale=scale, window_size=window_size,
        dropout_rate=dropout_rate, dropout_rng=dropout_rng, sequence_descriptor=sequence_descriptor,
        deterministic=deterministic, return_max_logit=return_max_logit,
        context_checkpoint_name=context_checkpoint_name,
    )  # fmt: skip
    choice = _choose(q, k, v, options, implementation)
    s, t = q.shape[-3], k.shape[-3]
    q, restore = _undivided_groups(q, k.shape[-2])
    if choice.implementation == "cudnn":
        causal = options.band.trimmed(s, t).right is not None
        attrs = (causal, options.scale, deterministic)
        return restore(_attention(*align(q, k, v), attrs, context_checkpoint_name))
    if max(s, t) > _LONG and implementation is None:
        _warn_long(choice.refused["cudnn"])
    arrays = (bias, _hidden(options, s, t), _kept(q, t, options, dropout_rng), options.offset(q))
    out, max_logit = _plain(*align(q, k, v, *arrays), options)
    out = restore(out)
    out = checkpoint_name(out, context_checkpoint_name) if context_checkpoint_name else out
    return (out, max_logit.astype(jnp.float32)) if return_max_logit else out


def _undivided_groups(q, g: int):
    """-> q, its heads gathered if an Explicit mesh cuts through groups, and what shards out as q was."""
    spec, mesh = jax.typeof(q).sharding.spec, jax.typeof(q).sharding.mesh
    names = spec[-2] if isinstance(spec[-2], tuple) else (spec[-2],)
    if g % prod(mesh.shape[name] for name in names if name is not None) == 0:
        return q, lambda out: out
    gathered = jax.sharding.reshard(q, PartitionSpec(*spec[:-2], None, spec[-1]))
    return gathered, lambda out: jax.sharding.reshard(out, PartitionSpec(*spec[:-1], None))


def _hidden(options: Options, s: int, t: int) -> jax.Array | None:
    """True where a key is hidden, broadcastable to [b..., h, s, t]; None: nowhere."""
    described = options.sequence_descriptor
    if described is None:
        by_type = options.band.trimmed(s, t).hides_of(s, t)
    else:
        by_type = described.hides(options.band, s, t)[..., None, :, :]
    return either(by_type, None if options.mask is None else jnp.asarray(options.mask) != 0)


def _kept(q, t: int, options: Options, rng) -> jax.Array | None:
    """True where a probability is not dropped, [b..., h, s, t]; None: everywhere."""
    if not options.dropout_rate:
        return None
    shape = (*q.shape[:-3], q.shape[-2], q.shape[-3], t)
    return jax.random.bernoulli(rng, 1 - options.dropout_rate, shape)
