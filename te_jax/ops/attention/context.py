"""Attention over a sequence that a mesh axis cuts: what is refused, what each device needs, and its run."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from te_jax.core.types import align
from te_jax.ops.attention.context_plan import Layout
from te_jax.ops.attention.context_run import Rows, Spec, context_attention
from te_jax.ops.attention.mask import SequenceDescriptor
from te_jax.ops.attention.op import cudnn_refuses, gpu_refuses
from te_jax.ops.attention.options import AttentionOptions


def context_refuses(q: Any, k: Any, v: Any, options: AttentionOptions) -> str:
    """Why `attend_cut` does not serve q, k, v (arrays, or their types); "" if it does."""
    for name, value in (
        ("bias", options.bias),
        ("mask", options.mask.array),
        ("alibi_slopes", options.alibi_slopes),
        ("dropout_rate", options.dropout_rate or None),
        ("logit_softcap", options.logit_softcap),
        ("return_max_logit", options.return_max_logit or None),
        ("implementation", options.implementation),
    ):
        if value is not None:
            shown = f"of shape {tuple(value.shape)}" if hasattr(value, "shape") and value.ndim else repr(value)
            return (
                f"{name} is {shown}, which attention over a cut sequence does not support; it takes every "
                f"attn_mask_type, window_size, softmax_type and a sequence_descriptor. Leave {name} out, or call "
                "dot_product_attention"
            )
    if reason := _sizes_refuse(q, k, options) or options.cut.refuses(q, k):
        return reason
    if options.scale <= 0:
        return f"scale is {options.scale}; pass a positive one (change the sign of q)"
    if cudnn_refuses(q, k, v):
        return ""  # the ops are plain JAX then
    lacks = gpu_refuses(
        q.shape[-1], v.shape[-1], only_band=options.mask.segments is None, has_bias=False,
        deterministic=options.deterministic, drops=False,
    )  # fmt: skip
    return f"{lacks}; pass float32 arrays, which are plain JAX's" if lacks else ""


def _sizes_refuse(q, k, options: AttentionOptions) -> str:
    cut = options.cut
    pieces = (2 if cut.load_balanced else 1) * (1 if cut.is_inside else cut.cp)
    for name, x in (("q", q), ("k and v", k)):
        if x.shape[-3] % pieces or not x.shape[-3]:
            each = " (2 for each device, with load_balanced)" if cut.load_balanced else ""
            return (
                f"{name} has {x.shape[-3]} positions{' on each device' if cut.is_inside else ''}, which {pieces} "
                f"pieces{each} do not divide; mesh axis {cut.axis!r} has {cut.cp} devices. Pad the sequence"
            )
    return ""


def attend_cut(q: jax.Array, k: jax.Array, v: jax.Array, options: AttentionOptions) -> tuple[jax.Array, jax.Array]:
    """-> out [b..., s, h, e], lse f32[b..., h, s] of a call that `context_refuses` does not refuse."""
    rows, spec = _plan(q, k, options)
    sink = options.offset(q)
    sink = None if sink is None else sink.reshape(-1)
    return options.cut.run(partial(_attend_on_device, spec=spec), q, k, v, sink, rows)


def _plan(q, k, options: AttentionOptions):
    """-> (what of the segments the devices need, the rows whose results are NaN) or None, and what is static."""
    cut, band, described = options.cut, options.mask.band, options.mask.segments
    (s, t), kind, rows = (x.shape[-3] for x in cut.whole(q, k)), Rows.WHOLE, None
    if described is not None:
        by_lengths = described.segment_ids is None
        causal = band.right == 0 and (band.left is None or not cut.ring)
        kind = Rows.SEGMENTS if by_lengths and (band.is_open or (s == t and causal)) else Rows.TOKENS
        needed = described.segments() if kind is Rows.SEGMENTS else described.tokens(s, t)
        counts = not band.is_open and (by_lengths or band.bottom_right)
        rows = needed, (_differ(described, s, t) if counts else None)
        band = band._replace(bottom_right=False)  # where the segments are the same, the corners are
    return rows, Spec(options.static(band), Layout(cut.cp, cut.load_balanced, s, t), kind)


def _differ(described: SequenceDescriptor, s: int, t: int) -> jax.Array:
    """bool[b...]: rows whose segments as queries and as keys are not the same tokens."""
    if described.segment_ids is not None:
        queries, keys = described.segment_ids
        return jnp.any(queries != keys, -1) if s == t else jnp.ones(queries.shape[:-1], bool)
    segments = described.segments()
    end = lambda at, size: jnp.minimum(segments[..., at] + segments[..., at + 1], size)
    there = lambda at: (segments[..., at] >= 0) & (segments[..., at + 1] > 0)
    same = (segments[..., 0] == segments[..., 2]) & (end(0, s) == end(2, t))
    return jnp.any((there(0) != there(2)) | (there(0) & ~same), -1)


def _attend_on_device(q, k, v, sink, rows, *, spec: Spec):
    """`context_attention` of what one device has."""
    rows, differ = (None, None) if rows is None else rows
    spoil = lambda x: x if differ is None else jnp.where(differ[..., None, None, None], jnp.nan, x)
    leaves, tree = jax.tree.flatten(rows)
    # An operand that is the same on all devices, as `sink` is, is made to vary: its gradient is the sum of theirs.
    anchor = jax.lax.axis_index(spec.cut.axis).astype(jnp.int32)
    q, k, v, sink, _, *leaves = align(spoil(q), k, v, sink, anchor, *leaves)  # q is spoiled for the gradients
    out, lse = context_attention(q, k, v, sink, jax.tree.unflatten(tree, leaves), spec)
    return spoil(out), spoil(lse[..., None])[..., 0]
