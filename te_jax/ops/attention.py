"""Scaled dot-product attention: cuDNN (FlashAttention, https://arxiv.org/abs/2205.14135) or plain JAX."""

import warnings
from functools import cache
from math import prod
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from te_jax._arrays import as_jax, as_rank
from te_jax._check import ARRAY, BOOL, NONE, check, one_of
from te_jax._types import align, on_explicit_mesh, varying
from te_jax.checkpoint_policies import ATTENTION, named
from te_jax.ops.attention_check import Options, check_options, warn_of_padding
from te_jax.ops.attention_form import form_of, only_band
from te_jax.ops.attention_mask import MASK_TYPES as MASK_TYPES
from te_jax.ops.attention_mask import SequenceDescriptor as SequenceDescriptor
from te_jax.ops.attention_op import attention_bwd as attention_bwd
from te_jax.ops.attention_op import attention_fwd as attention_fwd
from te_jax.ops.attention_op import cudnn_refuses, cudnn_refuses_backward, gpu_refuses, parts_of
from te_jax.ops.attention_reference import HIDES, finite_top, mix, scores
from te_jax.ops.attention_reference import parts as reference_parts
from te_jax.ops.attention_vjp import attention

_OP = "dot_product_attention"
_IMPLEMENTATION = NONE | one_of("cudnn", "xla")
_LONG = 4096  # beyond its square the s x t logits in memory deserve a warning

# ---- all of it, in plain JAX -----------------------------------------------------------------------


def _plain(q, k, v, bias, hidden, kept, offset, options: Options):
    """All that `dot_product_attention` can do -> its out, max_logit [h], lse [b..., h, s].

    hidden, kept: bool, broadcastable to [b..., h, s, t]: keys not seen, probabilities not dropped.
    offset: [h, 1, 1]. None where there is none.
    """
    logits = scores(q, k)
    if bias is None:
        logits = options.scale * logits
    elif options.pre_scale:
        logits = options.scale * (logits + as_rank(bias.astype(logits.dtype), logits.ndim))
    else:
        logits = options.scale * logits + as_rank(bias.astype(logits.dtype), logits.ndim)
    if bias is not None:
        logits = jnp.where(logits < HIDES, -jnp.inf, logits)
    if hidden is not None:
        logits = jnp.where(hidden, -jnp.inf, logits)
    top = jnp.max(logits, -1, keepdims=True, initial=-jnp.inf)
    others = tuple(axis for axis in range(logits.ndim) if axis != logits.ndim - 3)
    max_logit = jnp.max(top, others, initial=-jnp.inf)
    if options.return_max_logit:  # a maximum drops a NaN (_amax.py)
        max_logit = jnp.where(jnp.any(jnp.isnan(logits), others), jnp.nan, max_logit)
    offset = None if offset is None else as_rank(offset, top.ndim)
    top = finite_top(top if offset is None else jnp.maximum(top, offset))
    weights = jnp.exp(logits - top)
    total = jnp.sum(weights, -1, keepdims=True)
    total = total if offset is None else total + jnp.exp(offset - top)
    probs = weights / jnp.where(total == 0, 1, total)
    if hidden is not None:  # the gradient of a hidden one, dout v of any numbers, may be inf in f16: not inf * 0
        probs = jnp.where(hidden, 0, probs)
    if kept is not None:
        probs = jnp.where(kept, probs / (1 - options.dropout_rate), 0)
    lse = (top + jnp.log(total))[..., 0]
    return mix(probs.astype(v.dtype), v).astype(q.dtype), *map(lax.stop_gradient, (max_logit, lse))


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
    wide = max(q.shape[-1], v.shape[-1])
    for is_asked, what in (
        (options.return_max_logit, "return_max_logit is set; cuDNN's op does not return it"),
        (options.scale <= 0, f"scale is {options.scale}; cuDNN multiplies the -inf of what it has hidden by it"),
        (options.has_bias and wide > 128, f"head dim is {wide}; cuDNN has a bias's gradient up to 128"),
    ):
        if is_asked:
            return what
    if options.dropout_rate > 0 and (reason := cudnn_refuses_backward(q)):
        return f"{reason}, and so is the mask of their dropout"
    return cudnn_refuses(q, k, v) or gpu_refuses(
        q.shape[-1], v.shape[-1], only_band=only_band(options, q, k), has_bias=options.has_bias,
        deterministic=options.deterministic, drops=options.dropout_rate > 0,
    )  # fmt: skip


def _choose(q, k, v, options: Options, implementation) -> AttentionChoice:
    check(_OP, "implementation", implementation, _IMPLEMENTATION)
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
    text = f"{_OP}: plain JAX keeps s x t logits of more than {_LONG} x {_LONG} in memory, because {reason}."
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
    alibi_slopes: jax.Array | None = None,
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
    return_lse: bool = False,
    seq_major: bool = False,
    context_checkpoint_name: str | None = None,
    name: str = _OP,
):
    """softmax(scale * q k^T + bias, masked) v per head, with logits, softmax and sums in f32.

    q [b..., s, h, d], k [b..., t, g, d], v [b..., t, g, e] of one floating dtype. Query head i reads key head
    i // (h / g).

    attn_mask_type: a name of MASK_TYPES. Causal: query i sees keys 0 .. i; bottom right: 0 .. i + t - s.
    mask:           bool or integer, [s, t] or [b..., h, s, t] with 1 where it broadcasts; True, 1 hide a key, which
                    must be finite all the same.
    window_size:    (l, r): query i sees keys i - l .. i + r (i + t - s in place of i for bottom-right types).
                    A negative side is open.
    sequence_descriptor: lengths or segments of the rows; type and window count within a segment.
        Type, mask, window and descriptor each hide keys. A query that sees none gets zeros, and no gradient.
    bias:           floating [s, t] or [b..., h, s, t], with 1 where it broadcasts; differentiable. Below -2**99 it
                    hides a key.
    attn_bias_type: None or "post_scale_bias"; "pre_scale_bias": softmax(scale * (q k^T + bias)); "no_bias"; in
                    any case.
    alibi_slopes:   [h], adds -slope * |query position - key position| to the scaled logits (`alibi_slopes(h)` in
                    te_jax.ops.attention_bias); for rows of one segment. Differentiable.
    softmax_type:   "vanilla"; what joins the sum of exponentials: "off_by_one": 1; "learnable":
                    exp(softmax_offset).
    softmax_offset: [h] or [1, h, 1, 1], compared with the scaled logits; differentiable.
    scale:          float; None is 1 / sqrt(d).
    dropout_rate:   in [0, 1), on the probabilities, from the key `dropout_rng` (typed or raw). One key, one mask, as
                    long as implementation, device, shapes and sharding stay; shards never share one, save along an axis
                    of `vmap` over which the key is not mapped: split the key. Inside `shard_map` with check_vma=False
                    fold the device's index into the key yourself. cuDNN 9.19 gives four queries of a head one mask,
                    and its gradients are NaN where the backward pass is sharded otherwise than the forward pass or is
                    mapped alone (`jax.jacrev`, a `vmap` of the vjp): implementation="xla" serves those.
    deterministic:  bitwise repeatable gradients.
    implementation: None: cuDNN where it serves the call (bf16 and f16), else plain JAX, which has the f32 logits
                    [b..., h, s, t] in memory; "cudnn" or "xla" force one. See `explain_attention`. cuDNN takes a
                    `mask`, segment ids, segments beside a bias, bottom-right bands beside a bias or dropout, and
                    the window of a single query as a bias: b * s * t numbers of q's type.
    return_max_logit: also return the largest logit of each head, f32[h], not differentiable.
    return_lse:     also return the logarithm of each query's sum of exponentials, what joins it included,
                    f32[b..., h, s]; -inf for a query that sees no key. Not differentiable.
    seq_major:      the operands are turned from [s, b, heads, d]: cuDNN reads and writes them there by strides, if
                    it needs no lengths. The result is the same.
    context_checkpoint_name: names the output, and lse and the dropout's seeds with it, for `jax.checkpoint` policies.
    name:           what errors call this attention.

    Returns [b..., s, h, e] of q's dtype, or a tuple of that and what else is asked for, in the order above.
    Raises ValueError or TypeError for arguments that do not fit, and where a forced cuDNN cannot serve.
    """
    q, k, v = as_jax(q, k, v)
    for argument, x in (("q", q), ("k", k), ("v", v)):
        check(name, argument, x, ARRAY)
    options = check_options(
        _OP, q, k, v, bias=bias, mask=mask, attn_mask_type=attn_mask_type, attn_bias_type=attn_bias_type,
        alibi_slopes=alibi_slopes,
        softmax_type=softmax_type, softmax_offset=softmax_offset, scale=scale, window_size=window_size,
        dropout_rate=dropout_rate, dropout_rng=dropout_rng, sequence_descriptor=sequence_descriptor,
        deterministic=deterministic, return_max_logit=return_max_logit, return_lse=return_lse, seq_major=seq_major,
        context_checkpoint_name=context_checkpoint_name, name=name,
    )  # fmt: skip
    if name == _OP:  # modules warn themselves, but not while they are initialized
        warn_of_padding(name, attn_mask_type, mask, sequence_descriptor)
    choice = _choose(q, k, v, options, implementation)
    q, restore = undivided_groups(q, k.shape[-2])
    dropout_rng = _own_key(dropout_rng, q, k, v) if options.dropout_rate else None
    if choice.implementation == "cudnn":
        out, lse = _op((q, k, v), options, dropout_rng, context_checkpoint_name)
        return _asked(options, restore(out), None, lse)
    s, t = q.shape[-3], k.shape[-3]
    if s * t > _LONG**2 and implementation is None:
        _warn_long(choice.refused["cudnn"])
    q, restore_rows = _whole_rows(q)
    k, v = _whole_rows(k)[0], _whole_rows(v)[0]
    arrays = (options.total_bias(s, t), options.hidden(s, t), _kept(q, t, options, dropout_rng), options.offset(q))
    out, *others = _plain(*align(q, k, v, *arrays), options)
    return _asked(options, named(restore(restore_rows(out)), ATTENTION, context_checkpoint_name), *others)


def _op(operands, options: Options, key, name, interleaved: bool = False):
    """The ops on (q, k, v), (q, kv) or (qkv,) -> out, lse."""
    q, k, _ = parts_of(*operands)
    form, sink = form_of(options, q, k), options.offset(q)
    sink = None if sink is None else sink.reshape(-1)
    *operands, bias, sink, segments, rng = align(*operands, form.bias, sink, form.segments, _words(key, q.shape))
    return attention(tuple(operands), bias, sink, segments, rng, form.attrs._replace(interleaved=interleaved), name)


def _asked(options: Options, out, max_logit, lse):
    """out, or a tuple of it and of what else is asked for."""
    more = [max_logit.astype(jnp.float32)] if options.return_max_logit else []
    more += [lse.astype(jnp.float32)] if options.return_lse else []
    return (out, *more) if more else out


def dot_product_attention_packed(
    qkv: jax.Array, *, interleaved: bool = False, implementation: str | None = None, **kwargs
):
    """`dot_product_attention` of q, k, v in qkv [b..., s, 3, h, d], or interleaved [b..., s, h, 3, d].

    With the keywords of that. cuDNN reads them and writes their gradients in place, without copies; plain JAX slices.
    The choice between the two is that of `explain_attention(q, k, v)`.
    """
    return _of_joined("dot_product_attention_packed", "qkv", (qkv,), interleaved, implementation, kwargs)


def dot_product_attention_kv_packed(
    q: jax.Array, kv: jax.Array, *, interleaved: bool = False, implementation: str | None = None, **kwargs
):
    """The same of q [b..., s, h, d] and k, v in kv [b..., t, 2, g, d], or interleaved [b..., t, g, 2, d]."""
    return _of_joined("dot_product_attention_kv_packed", "kv", (q, kv), interleaved, implementation, kwargs)


def _of_joined(op, name, operands, interleaved, implementation, kwargs):
    check(op, "interleaved", interleaved, BOOL)
    operands = as_jax(*operands)
    for x in operands:
        check(op, name if x is operands[-1] else "q", x, ARRAY)
    *apart, joined = operands
    n, at = 4 - len(operands), -2 if interleaved else -3
    if joined.ndim < 4 or joined.shape[at] != n:
        wanted = f"heads, {n}, d" if interleaved else f"{n}, heads, d"
        raise ValueError(f"{op}: {name} has shape {tuple(joined.shape)}; pass [b..., tokens, {wanted}].")
    operands = (*apart, jnp.swapaxes(joined, -3, -2) if interleaved else joined)  # only in name: see `Op.layout`
    parts = parts_of(*operands)
    options = check_options(op, *parts, **kwargs)
    if "name" not in kwargs:
        warn_of_padding(op, options.attn_mask_type, options.mask, options.sequence_descriptor)
        kwargs["name"] = op
    if _choose(*parts, options, implementation).implementation == "xla":
        return dot_product_attention(*reference_parts(*operands), implementation=implementation, **kwargs)
    q, restore = (operands[0], lambda out: out) if n == 3 else undivided_groups(operands[0], parts[1].shape[-2])
    key = _own_key(kwargs["dropout_rng"], *operands) if options.dropout_rate else None
    out, lse = _op((q, *operands[1:]), options, key, kwargs.get("context_checkpoint_name"), interleaved)
    return _asked(options, restore(out), None, lse)


def _own_key(key: jax.Array, *arrays: jax.Array) -> jax.Array:
    """`key`, made another one on every device of the manual mesh axes over which the arrays vary and it does not."""
    for name in sorted(frozenset().union(*map(varying, arrays)) - varying(key)):
        key = jax.random.fold_in(key, lax.axis_index(name))
    return key


def _words(key: jax.Array | None, shape: tuple[int, ...]) -> jax.Array | None:
    """Random bits for every row and head of a query [b..., s, h, d]: u32[b..., h, 4]."""
    return None if key is None else jax.random.bits(key, (*shape[:-3], shape[-2], 4), jnp.uint32)


def undivided_groups(q, g: int):
    """-> q, its heads gathered if an Explicit mesh cuts through groups, and what shards out as q was."""
    spec, mesh = jax.typeof(q).sharding.spec, jax.typeof(q).sharding.mesh
    names = spec[-2] if isinstance(spec[-2], tuple) else (spec[-2],)
    if g % prod(mesh.shape[name] for name in names if name is not None) == 0:
        return q, lambda out: out
    gathered = jax.sharding.reshard(q, PartitionSpec(*spec[:-2], None, spec[-1]))
    return gathered, lambda out: jax.sharding.reshard(out, PartitionSpec(*spec[:-1], None))


def _whole_rows(x):
    """-> x [b..., tokens, heads, d], on an Explicit mesh with the tokens on every device, for types would split logits
    and sums by them; and what shards out as x was."""
    spec = jax.typeof(x).sharding.spec
    if not on_explicit_mesh(jax.typeof(x)) or spec[-3] is None:
        return x, lambda out: out
    shard = lambda a, names: jax.sharding.reshard(
        a, PartitionSpec(*jax.typeof(a).sharding.spec[:-3], names, *spec[-2:])
    )
    return shard(x, None), lambda out: shard(out, spec[-3])


def _kept(q, t: int, options: Options, rng) -> jax.Array | None:
    """True where a probability is not dropped, [b..., h, s, t]; None: everywhere."""
    if not options.dropout_rate:
        return None
    shape = (*q.shape[:-3], q.shape[-2], q.shape[-3], t)
    return jax.random.bernoulli(rng, 1 - options.dropout_rate, shape)
