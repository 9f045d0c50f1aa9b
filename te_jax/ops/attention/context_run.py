"""Attention over a sequence that is cut along a mesh axis, on each of its devices, forward and backward.

Ring: keys and values go around the devices, and each device merges what it gets from them by lse (Liu et al. 2023,
https://arxiv.org/abs/2310.01889). All-gather: each device collects all keys and values (Grattafiori et al. 2024,
https://arxiv.org/abs/2407.21783, section 3.3.2).
"""

from enum import Enum
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from te_jax.core.derivatives import custom_vjp
from te_jax.core.policies import ATTENTION, with_names
from te_jax.core.types import align, like, on_explicit_mesh
from te_jax.ops.attention.context_plan import OPEN, Call, Layout, Plan
from te_jax.ops.attention.form import form_of
from te_jax.ops.attention.mask import Band, Mask, SequenceDescriptor
from te_jax.ops.attention.mesh import Cut
from te_jax.ops.attention.options import AttentionOptions
from te_jax.ops.attention.reference import merge_keys, sum_type
from te_jax.ops.attention.vjp import attention_bwd_of, attention_fwd_of, gradient_of_sink, with_sink
from te_jax.sharding import inverse_reorder_causal_load_balancing, reorder_causal_load_balancing


class Rows(Enum):
    """What says which tokens of a row belong together, next to the band."""

    WHOLE = "nothing says it: each row is one segment"
    SEGMENTS = "i32[b..., n, 4]: the segments of the whole row, as the attention ops have them"
    TOKENS = "(ids, positions) of the row's queries, and of its keys: i32[b..., s], i32[b..., t]"


class Spec(NamedTuple):
    """The static arguments of `context_attention`.

    options: without arrays; its mask is the band in the whole sequence, or within segments, from the top left if rows
        have segments.
    """

    options: AttentionOptions
    layout: Layout
    rows: Rows

    @property
    def cut(self) -> Cut:
        """The mesh axis that cuts the sequence."""
        return self.options.cut

    @property
    def band(self) -> Band:
        """The band of `options`."""
        return self.options.mask.band

    @property
    def cuts_by_band(self) -> bool:
        """Whether the band says which blocks are hidden; else segments or tokens say it."""
        return self.rows is Rows.WHOLE or (self.rows is Rows.SEGMENTS and self.cut.ring)

    def steps(self) -> list[tuple[int, list[Plan]]]:
        """(how far the keys have gone around, the plan of each device), for each step."""
        band, fuse = self.band if self.cuts_by_band else OPEN, self.rows is Rows.WHOLE
        return _steps(self.layout, self.cut.ring, band, fuse)


@cache
def _steps(layout, ring, band, fuse):
    return layout.ring(band, fuse) if ring else [(0, layout.gathered(band, fuse))]


class _Place(NamedTuple):
    """Where in the sequence the chunks begin that a device works on, i32[] each."""

    queries: tuple[jax.Array, ...]
    keys: tuple[jax.Array, ...]


def _place(step: int, device, spec: Spec) -> _Place:
    layout, (q_size, k_size) = spec.layout, spec.layout.sizes()
    queries = tuple(chunk * q_size for chunk in layout.held(device))
    if not spec.cut.ring:
        return _Place(queries, (jnp.zeros_like(device),))
    return _Place(queries, tuple(chunk * k_size for chunk in layout.held((device - step) % layout.cp)))


# ---- one call of the op ----------------------------------------------------------------------------


def _form(call: Call, q, k, place: _Place, rows, spec: Spec):
    """The `Form` of a call on q, k: its band, and what it covers of the rows' segments or tokens."""
    band, described = call.band, None
    if spec.rows is not Rows.WHOLE:
        q_size, k_size = call.q[1], call.k[1]
        q_at, k_at = place.queries[call.q[0] // q_size], place.keys[call.k[0] // k_size]
        if spec.rows is Rows.SEGMENTS:
            up_to_query = not spec.cut.ring and spec.band.right == 0
            band = spec.band._replace(bottom_right=True) if up_to_query else call.band
            described = _segments_within(rows, (q_at, q_size), (k_at, k_size), up_to_query)
        else:
            band, described = spec.band, _tokens_within(rows, (q_at, q_size), (k_at, k_size))
    return form_of(spec.options.replace(mask=Mask(band, described)), q, k)


def _segments_within(segments, queries, keys, up_to_query: bool) -> SequenceDescriptor:
    """The parts of the segments that lie among `queries` and `keys` (first position, how many), counted from there.

    up_to_query: leave out the keys after the last query; the segments have the same tokens as queries and as keys. A
        bottom-right band then has the place that it has in the whole segment.
    """
    starts, lens = [], []
    limit = None
    for (at, size), first, count in ((queries, *_columns(segments, 0)), (keys, *_columns(segments, 2))):
        low, high = jnp.clip(first - at, 0, size), jnp.clip(first + count - at, 0, size)
        high = high if limit is None else jnp.clip(limit - at, low, high)
        limit = at + high if up_to_query else None
        starts.append(low)
        lens.append(high - low)
    there = (segments[..., 0] >= 0) & (segments[..., 2] >= 0) & (lens[0] > 0) & (lens[1] > 0)
    return SequenceDescriptor(
        seqlens=tuple(jnp.where(there, x, 0) for x in lens), seq_offsets=tuple(jnp.where(there, x, -1) for x in starts)
    )


def _columns(segments, at: int):
    return segments[..., at], segments[..., at + 1]


def _tokens_within(tokens, queries, keys) -> SequenceDescriptor:
    """The ids and positions of the tokens among `queries` and `keys` (first position, how many)."""
    cut = lambda side, at, size: (lax.dynamic_slice_in_dim(x, at, size, x.ndim - 1) for x in side)
    (q_ids, q_pos), (k_ids, k_pos) = (cut(side, *which) for side, which in zip(tokens, (queries, keys)))
    return SequenceDescriptor(segment_ids=(q_ids, k_ids), segment_pos=(q_pos, k_pos))


def _cut(x, span):
    """Positions span[0] .. span[0] + span[1] - 1 of x [b..., s, heads, d]."""
    return x if span == (0, x.shape[-3]) else lax.slice_in_dim(x, span[0], sum(span), axis=x.ndim - 3)


def _cut_lse(lse, span):
    """Positions span[0] .. span[0] + span[1] - 1 of lse [b..., h, s]."""
    return lse if span == (0, lse.shape[-1]) else lax.slice_in_dim(lse, span[0], sum(span), axis=lse.ndim - 1)


def _put(x, at, axis, value):
    """x with `value` from position `at` of `axis` on."""
    return value if value.shape == x.shape else lax.dynamic_update_slice_in_dim(x, value, at, x.ndim + axis)


# ---- one step --------------------------------------------------------------------------------------


def _on_device(plans: list[Plan], device, run, *operands):
    """run(plan, *operands) with the plan of this device, by a branch for each plan that differs."""
    unique = list(dict.fromkeys(plans))
    if len(unique) == 1:
        return run(unique[0], *operands)
    branch = jnp.asarray([unique.index(plan) for plan in plans], jnp.int32)[device]
    return lax.switch(branch, [partial(run, plan) for plan in unique], *operands)


def _see_more(plan: Plan, sums, q, k, v, place, rows, *, spec: Spec):
    """(out, lse) of the keys so far, `sums` or None, and of the keys of the plan's calls; out is wider than q."""
    for call in plan:
        operands = _cut(q, call.q), _cut(k, call.k), _cut(v, call.k)
        form = _form(call, *operands[:2], place, rows, spec)
        new = attention_fwd_of(operands, form)
        if sums is None:
            if call.q[1] == q.shape[-3]:
                sums = new[0].astype(sum_type(q)), new[1]
                continue
            sums = _see_nothing(q, v)
        old = _cut(sums[0], call.q), _cut_lse(sums[1], call.q)
        out, lse = merge_keys([old, new])
        sums = _put(sums[0], call.q[0], -3, out), _put(sums[1], call.q[0], -1, lse)
    return sums


def _see_nothing(q, v):
    """(out, lse) of queries that have seen no key."""
    out = jnp.broadcast_to(jnp.zeros_like(q[..., :1], sum_type(q)), (*q.shape[:-1], v.shape[-1]))
    return tuple(align(out, jnp.full_like(jnp.swapaxes(q[..., 0], -1, -2), -jnp.inf, jnp.float32), q))[:2]


def _add_grads(plan: Plan, grads, dout, q, k, v, out, lse, place, rows, *, spec: Spec):
    """`grads`, the f32 sums (dq, dk, dv), with the gradients of the plan's calls added."""
    for call in plan:
        operands = _cut(q, call.q), _cut(k, call.k), _cut(v, call.k)
        form = _form(call, *operands[:2], place, rows, spec)
        new = attention_bwd_of(operands, form, _cut(dout, call.q), _cut(out, call.q), _cut_lse(lse, call.q))
        sides = (call.q, call.k, call.k)
        grads = tuple(
            _put(x, side[0], -3, _cut(x, side) + grad.astype(x.dtype)) for x, side, grad in zip(grads, sides, new)
        )
    return grads


# ---- all steps -------------------------------------------------------------------------------------


def _pass_on(arrays, by: int, spec: Spec):
    """The arrays of the device that stands `by` places before this one on the ring."""
    cp = spec.layout.cp
    if by % cp == 0:
        return arrays
    return tuple(lax.ppermute(x, spec.cut.axis, [(i, (i + by) % cp) for i in range(cp)]) for x in arrays)


def _collect(x, spec: Spec):
    """The keys or values of all devices, in the order of the sequence."""
    x = lax.all_gather(x, spec.cut.axis, axis=x.ndim - 3, tiled=True)
    return inverse_reorder_causal_load_balancing(x, spec.layout.cp, x.ndim - 3) if spec.layout.balanced else x


def _distribute(dx, spec: Spec):
    """The transpose of `_collect`: each device gets the sum of its part over all devices."""
    dx = reorder_causal_load_balancing(dx, spec.layout.cp, dx.ndim - 3) if spec.layout.balanced else dx
    at = dx.ndim - 3
    if not on_explicit_mesh(jax.typeof(dx)):
        return lax.psum_scatter(dx, spec.cut.axis, scatter_dimension=at, tiled=True)
    # jax cannot lower psum_scatter where there are Explicit axes (0.10 to 0.12), nor map the shard_map that would hide
    # them (0.12). This moves as many bytes.
    of_devices = dx.reshape(*dx.shape[:at], spec.layout.cp, -1, *dx.shape[at + 1 :])
    return jnp.sum(lax.all_to_all(of_devices, spec.cut.axis, at, at), at)


@custom_vjp(5)
def context_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, sink: jax.Array | None, rows: Any, spec: Spec
) -> tuple[jax.Array, jax.Array]:
    """-> out, lse (not differentiable) of this device's queries [b..., s/cp, h, d], where `spec.cut.axis` is manual.

    k, v: the part of this device. sink: as in `vjp.attention`. rows: the whole rows, on each device, as
    `spec.rows` says; None for Rows.WHOLE. All arrays vary over the same manual axes.
    """
    return _context_fwd(q, k, v, sink, rows, spec)[0]


@partial(jax.jit, static_argnums=5, inline=True)
def _context_fwd(q, k, v, sink, rows, spec):  # `Cut.run` is compiled: without the cache autodiff would trace it twice
    device, sums, at = lax.axis_index(spec.cut.axis), None, 0
    keys = (k, v) if spec.cut.ring else tuple(_collect(x, spec) for x in (k, v))
    for step, plans in spec.steps():
        keys, at = _pass_on(keys, step - at, spec), step
        if sums is None and (len(set(plans)) > 1 or not plans[0]):
            sums = _see_nothing(q, v)
        run = partial(_see_more, spec=spec)
        sums = _on_device(plans, device, run, sums, q, *keys, _place(step, device, spec), rows)
    out, lse = with_sink(*(_see_nothing(q, v) if sums is None else sums), sink)
    out = like(out, jax.typeof(q).update(shape=out.shape))
    out, lse = with_names((out, lse), ATTENTION, spec.options.context_checkpoint_name)
    return (out, lse), (q, k, v, sink, rows, out, lse)


def _context_bwd(spec, residuals, cotangents):
    q, k, v, sink, rows, out, lse = residuals
    dout, _ = cotangents
    device, at = lax.axis_index(spec.cut.axis), 0
    # Keys and values come from the other devices once more. Without the barrier the compiler would take the collectives
    # of the forward pass for the same ones, and keep their results until here.
    dout, k, v = lax.optimization_barrier((dout, k, v))
    keys = (k, v) if spec.cut.ring else tuple(_collect(x, spec) for x in (k, v))
    dq, *dkeys = align(*(jnp.zeros_like(x, sum_type(x)) for x in (q, *keys)), q)[:3]
    for step, plans in spec.steps():
        keys, dkeys = (_pass_on(x, step - at, spec) for x in (keys, tuple(dkeys)))
        at, run = step, partial(_add_grads, spec=spec)
        operands = (dout, q, *keys, out, lse, _place(step, device, spec), rows)
        dq, *dkeys = _on_device(plans, device, run, (dq, *dkeys), *operands)
    dkeys = _pass_on(tuple(dkeys), -at, spec) if spec.cut.ring else (_distribute(x, spec) for x in dkeys)
    grads = tuple(like(grad, x) for grad, x in zip((dq, *dkeys), (q, k, v)))
    return *grads, gradient_of_sink(sink, out, lse, dout), None


context_attention.defvjp(_context_fwd, _context_bwd)
