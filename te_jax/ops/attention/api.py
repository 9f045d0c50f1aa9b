"""Scaled dot-product attention: cuDNN (FlashAttention, https://arxiv.org/abs/2205.14135) or plain JAX."""

from collections.abc import Sequence
from typing import Any, Unpack

import jax
import jax.numpy as jnp
from jax import lax

from te_jax.core.arrays import as_jax
from te_jax.core.check import ARRAY, BOOL, check, warn_once
from te_jax.core.policies import ATTENTION, with_names
from te_jax.core.types import align
from te_jax.ops.attention.context import attend_cut
from te_jax.ops.attention.form import Form
from te_jax.ops.attention.mesh import own_key, undivided_groups, whole_rows
from te_jax.ops.attention.op import operand_types
from te_jax.ops.attention.options import AttentionKeywords, AttentionOptions, check_options, takes_options
from te_jax.ops.attention.plan import AttentionPlan, attention_plan
from te_jax.ops.attention.reference import attend, largest_by_head, split_joined
from te_jax.ops.attention.vjp import attention

_LONG = 4096  # beyond its square the s x t logits in memory deserve a warning


@takes_options()
def dot_product_attention(q: jax.Array, k: jax.Array, v: jax.Array, **options: Unpack[AttentionKeywords]) -> Any:
    """softmax(scale * q k^T + bias, masked) v per head, with logits, softmax and sums in f32.

    q [b..., s, h, d], k [b..., t, g, d], v [b..., t, g, e] of one floating dtype. Query head i reads key head
    i // (h / g).

    attn_mask_type: a name of MASK_TYPES, in any case. Causal: query i sees keys 0 .. i; bottom right: 0 .. i + t - s.
    mask:           bool or integer, [s, t], [b..., h, s, t] or [b..., g, h / g, s, t] with 1 where it broadcasts; True,
                    1 hide a key, which must be finite all the same. A SequenceDescriptor is taken here too.
    window_size:    (l, r): query i sees keys i - l .. i + r (i + t - s instead of i for bottom-right types).
                    A negative side is open.
    sequence_descriptor: lengths or segments of the rows; type and window count within a segment. An array is taken
        here too, as `mask`.
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
    logit_softcap:  c > 0: scaled logits x become c * tanh(x / c) before a post-scale bias and what hides keys
                    (Gemma 2, https://arxiv.org/abs/2408.00118, section 2). Only in plain JAX.
    dropout_rate:   in [0, 1), on the probabilities, from the key `dropout_rng` (typed or raw). One key, one mask, as
                    long as implementation, device, shapes and sharding stay; shards never share one, save along an axis
                    of `vmap` over which the key is not mapped: split the key. Inside `shard_map` with check_vma=False
                    fold the device's index into the key yourself. cuDNN 9.19 gives four queries of a head one mask,
                    and its gradients are NaN where the backward pass is sharded otherwise than the forward pass or is
                    mapped without it (`jax.jacrev`, a `vmap` of the vjp): implementation="xla" serves those.
    deterministic:  bitwise repeatable gradients.
    implementation: None: cuDNN where it serves the call (bf16 and f16), else plain JAX, which has the f32 logits
                    [b..., h, s, t] in memory; "cudnn" or "xla" force one. See `explain_attention`. cuDNN takes a
                    `mask`, segment ids, segments with a bias, bottom-right bands with a bias or dropout, and
                    the window of a single query as a bias: b * s * t numbers of q's type.
    return_max_logit: also return the largest logit of each head that a query of any row sees, scaled and with its bias,
                    f32[h], not differentiable: -inf where none is seen, NaN where one is. cuDNN may then take another
                    engine, and lse is computed from its maxima and sums: the other results may be rounded otherwise.
    return_lse:     also return the logarithm of each query's sum of exponentials, what joins it included,
                    f32[b..., h, s]; -inf for a query that sees no key. Not differentiable.
    seq_major:      the operands are turned from [s, b, heads, d]: cuDNN reads and writes them there by strides, if
                    it needs no lengths. The result is the same.
    context_checkpoint_name: names the output, and lse and the dropout's seeds with it, for `jax.checkpoint` policies.
    name:           what errors call this attention; None is the function's name.

    Returns [b..., s, h, e] of q's dtype, or a tuple of that and what else is asked for, in the order above.
    Raises ValueError or TypeError for arguments that do not fit, and where a forced cuDNN cannot serve.
    """
    q, k, v = as_jax(q, k, v)
    checked = check_options(dot_product_attention, q, k, v, options, warns=True)
    return run_attention(attention_plan((q, k, v), checked), (q, k, v))


@takes_options()
def dot_product_attention_packed(
    qkv: jax.Array, *, interleaved: bool = False, **options: Unpack[AttentionKeywords]
) -> Any:
    """`dot_product_attention` of q, k, v in qkv [b..., s, 3, h, d], or interleaved [b..., s, h, 3, d].

    It takes the keywords of `dot_product_attention`. cuDNN reads q, k, v and writes their gradients in place, without
    copies; plain JAX slices. Of the two, a call takes what `explain_attention(q, k, v)` says.
    """
    return _attend_joined(dot_product_attention_packed, "qkv", (qkv,), interleaved, options)


@takes_options()
def dot_product_attention_kv_packed(
    q: jax.Array, kv: jax.Array, *, interleaved: bool = False, **options: Unpack[AttentionKeywords]
) -> Any:
    """`dot_product_attention_packed` of q [b..., s, h, d] and k, v in kv [b..., t, 2, g, d], or interleaved
    [b..., t, g, 2, d]."""
    return _attend_joined(dot_product_attention_kv_packed, "kv", (q, kv), interleaved, options)


def _attend_joined(function, name, operands, interleaved, options):
    op = function.__name__
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
    checked = check_options(function, *operand_types(*operands), options, interleaved=bool(interleaved), warns=True)
    return run_attention(attention_plan(operands, checked), operands)


# ---- one device, or arrays that the compiler shards ----------------------------------------------


def run_attention(plan: AttentionPlan, operands: Sequence[jax.Array]) -> Any:
    """What a plan, of no "fp8", returns for (q, k, v), (q, kv) or (qkv,): out, or a tuple of out and what else is asked
    for."""
    choice, options, form = plan
    if choice.implementation == "context_parallel":
        out, lse, top = *attend_cut(*split_joined(*operands), options), None
    elif choice.implementation == "cudnn":
        out, lse, top = _attend_cudnn(operands, options, form)
    else:
        q, k, v = split_joined(*operands)
        logits = q.shape[-3] * k.shape[-3]  # a symbol under `jax.export` may be of any size
        if isinstance(logits, int) and logits > _LONG**2 and options.implementation is None:
            text = f"plain JAX keeps s x t logits of more than {_LONG} x {_LONG} in memory, because"
            warn_once(options.name, f"{text} {choice.refused['cudnn']}.")
        out, lse, top = _attend_xla(q, k, v, options)
    more = [largest_by_head(top).astype(jnp.float32)] if options.return_max_logit else []
    more += [lse.astype(jnp.float32)] if options.return_lse else []
    return (out, *more) if more else out


def _attend_cudnn(operands, options: AttentionOptions, form: Form):
    """-> out, lse, top (None where not asked for) of the ops."""
    restore = lambda out: out
    if len(operands) > 1:
        q, restore = undivided_groups(operands[0], operands[-1].shape[-2])
        operands = (q, *operands[1:])
    q, k, _ = operand_types(*operands)
    (bias, segments), sink = form.extras(q, k), options.offset(q)
    sink = None if sink is None else sink.reshape(-1)
    words = None
    if options.dropout_rate:  # random bits for every row and head of a query: u32[b..., h, 4]
        words = jax.random.bits(own_key(options.dropout_rng, *operands), (*q.shape[:-3], q.shape[-2], 4), jnp.uint32)
    *operands, bias, sink, segments, rng = align(*operands, bias, sink, segments, words)
    name = options.context_checkpoint_name
    out, lse, top = attention(tuple(operands), bias, sink, segments, rng, form.attrs, name)
    return restore(out), lse, top


def _attend_xla(q, k, v, options: AttentionOptions):
    """-> out, lse, top in plain JAX."""
    s, t = q.shape[-3], k.shape[-3]
    q, restore = undivided_groups(q, k.shape[-2])
    factor = None
    if options.dropout_rate:
        kept = jax.random.bernoulli(
            own_key(options.dropout_rng, q, k, v), 1 - options.dropout_rate, (*q.shape[:-3], q.shape[-2], s, t)
        )
        factor = kept / jnp.float32(1 - options.dropout_rate)
    q, restore_rows = whole_rows(q)
    k, v = whole_rows(k)[0], whole_rows(v)[0]
    arrays = (options.total_bias(s, t), options.mask.hides(s, t), factor, options.offset(q))
    q, k, v, bias, hidden, factor, offset = align(q, k, v, *arrays)
    out, lse, top = attend(
        q, k, v, bias=bias, hidden=hidden, factor=factor, offset=offset, scale=options.scale,
        pre_scale=options.pre_scale, softcap=options.logit_softcap,
    )  # fmt: skip
    out = with_names(restore(restore_rows(out)), ATTENTION, options.context_checkpoint_name)
    return out, lax.stop_gradient(lse), top
