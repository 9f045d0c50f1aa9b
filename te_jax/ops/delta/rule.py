"""The gated delta rule (Yang, Kautz, Hatamizadeh 2024, https://arxiv.org/abs/2412.06464), with a gate for each head, or
for each channel of keys (Kimi Team 2025, https://arxiv.org/abs/2510.26692): a scan over states of chunks of tokens."""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from te_jax.core.arrays import as_jax
from te_jax.core.check import BOOL, FLOATS_ARRAY, INTEGERS, NONE, check, number
from te_jax.core.derivatives import custom_vjp
from te_jax.core.op import Op
from te_jax.core.policies import SSM, with_names
from te_jax.core.types import align, like
from te_jax.ops.delta import kernels
from te_jax.ops.delta.chunk import CHUNK, Chunk, of_chunk
from te_jax.ops.delta.kernels import KEPT
from te_jax.ops.formats import ceil_div
from te_jax.ops.ssm.chunks import Runs, check_tokens, runs_of_chunks, to_chunks, tokens_of
from te_jax.ops.ssm.conv import check_shape
from te_jax.ops.ssm.runs import one_batch


class _Blocks(NamedTuple):
    """The tokens of a call by blocks of up to KEPT tokens, and these by chunks: leaves [blocks, chunks, b, l, ...]."""

    chunks: Chunk
    runs: Runs | None

    @classmethod
    def of(cls, chunks, segments):
        s = chunks.v.shape[1]
        length, total = _lengths(s)
        runs = runs_of_chunks(segments, length, total)
        return _in_blocks(cls(Chunk(*(to_chunks(a, length, total) for a in chunks)), runs), total)


def _lengths(s):
    """The tokens of a chunk, and of all chunks of whole blocks."""
    length = max(1, min(s, CHUNK))
    block = length * min(KEPT // CHUNK, max(1, ceil_div(s, length)))
    return length, ceil_div(s, block) * block


def _in_blocks(tree, total):
    """[chunks, ...] -> [blocks, chunks of a block, ...]."""
    blocks = ceil_div(total, KEPT)
    split = lambda a: a.reshape(blocks, a.shape[0] // max(1, blocks), *a.shape[1:])
    return jax.tree.map(split, tree)


def _plain(q, k, v, beta, gate, segments, initial, *, scale, normalize, shared):
    lead, wide = v.ndim - 3, jnp.promote_types(v.dtype, jnp.float32)
    batch, (s, h, e), d = v.shape[:lead], v.shape[lead:], q.shape[-1]
    flat = partial(one_batch, lead=lead)
    blocks = _Blocks.of(Chunk(*map(flat, (q, k, v, beta, gate))), flat(segments))
    state = jnp.zeros((math.prod(batch), h, d, e), wide) if initial is None else flat(initial.astype(wide))

    def block(state, tokens):
        final, (y, _) = _scan_chunks(state, tokens, scale=scale, normalize=normalize)
        return final, (y.astype(v.dtype), state)

    final, (y, states) = lax.scan(block, align(state, v)[0], blocks)
    y = tokens_of(lax.collapse(y, 0, 2), s).reshape(v.shape)
    states = jnp.moveaxis(states, 0, 1)
    return y, final.reshape(*batch, *final.shape[1:]), states.reshape(*batch, *states.shape[1:])


def _scan_chunks(state, tokens, **options):
    """The chunks of a block -> the state behind them; y of each chunk, and the state before it."""

    def body(state, tokens):
        y, new = of_chunk(state, *tokens, **options)
        return new, (y, state)

    return lax.scan(body, state, tokens)


def _plain_bwd(dy, dfinal, q, k, v, beta, gate, segments, states, *, scale, normalize, shared):
    lead, s, wide = v.ndim - 3, v.shape[-3], states.dtype
    flat = partial(one_batch, lead=lead)
    blocks = _Blocks.of(Chunk(*map(flat, (q, k, v, beta, gate))), flat(segments))
    length, total = _lengths(s)
    dys = _in_blocks(to_chunks(flat(dy.astype(wide)), length, total), total)
    before = jnp.moveaxis(flat(states), 1, 0)
    options = dict(scale=scale, normalize=normalize)

    def body(dstate, tokens):
        chunk, runs, dy, state = tokens
        _, pull = jax.vjp(lambda state, chunk: of_chunk(state, chunk, runs, **options), state, chunk)
        return pull((dy, dstate))

    def block(dstate, given):
        tokens, dy, state = given
        _, (_, inner) = _scan_chunks(state, tokens, **options)
        return lax.scan(body, dstate, (*tokens, dy, inner), reverse=True)

    dfinal = jnp.zeros(before.shape[1:], wide) if dfinal is None else flat(dfinal.astype(wide))
    dinitial, grads = lax.scan(block, align(dfinal, v)[0], (blocks, dys, align(before, v)[0]), reverse=True)
    whole = [tokens_of(lax.collapse(a, 0, 2), s) for a in grads]
    shaped = [a.reshape(of.shape).astype(of.dtype) for a, of in zip(whole, (q, k, v, beta, gate))]
    return *shaped, dinitial.reshape(*v.shape[:lead], *dinitial.shape[1:])


_V, _KEYS = "b... s (g r) e", "b... s ~g d"
_OF_DELTA = f"q: {_KEYS}, k: {_KEYS}, v: {_V}, beta: b... s (g r), gate: b... s (g r) ~d, segments?: b... s"
_DELTA_STATE, _DELTA_STATES = "b... (g r) d e", f"b... s/{KEPT} (g r) d e"
_VALUES_OF_A_KEY = {"r": lambda *, shared, **_: shared}
_type_of_sums = lambda v: jnp.promote_types(v, jnp.float32)

gated_delta_fwd: Op = Op(
    "te_gated_delta_fwd",
    f"{_OF_DELTA}, initial?: {_DELTA_STATE} -> y: {_V}, final?: {_DELTA_STATE}, states?: {_DELTA_STATES}",
    replicated="s r d e",
    dtypes=lambda q, k, v, *_, **attrs: (v, _type_of_sums(v), _type_of_sums(v)),
    reference=_plain,
    sizes=_VALUES_OF_A_KEY,
    workspace=kernels.rule_workspace,
    cuda=partial(kernels.rule, _plain),
)
"""q, k [b..., s, g, d], v [b..., s, h, e] and beta [b..., s, h] of floating types, gate [b..., s, h, 1] or [b..., s, h,
d], segments i32[b..., s], initial [b..., h, d, e] -> y of v's type, final f32: `gated_delta`, and

states  f32[b..., s/1024, h, d, e], the state before each 1024 tokens

scale: of q. normalize: bool, of q and k. shared: how many heads of v share a head of q and k; 1 where these have one
head, which then is broadcast to all, so that devices may split them.
"""

gated_delta_bwd: Op = Op(
    "te_gated_delta_bwd",
    f"dy: {_V}, dfinal?: {_DELTA_STATE}, {_OF_DELTA}, states: {_DELTA_STATES} -> dq?: =q, dk?: =k, dv?: =v, "
    f"dbeta?: =beta, dgate?: =gate, dinitial?: {_DELTA_STATE}",
    replicated="s r d e",
    combine={name: "sum" for name in ("dq", "dk")},
    dtypes=lambda dy, dfinal, q, k, v, beta, gate, segments, states, **attrs: (q, k, v, beta, gate, states),
    reference=_plain_bwd,
    sizes=_VALUES_OF_A_KEY,
    workspace=kernels.rule_bwd_workspace,
    cuda=partial(kernels.rule_bwd, _plain_bwd, gated_delta_fwd.custom_call),
)
"""The backward pass of te_gated_delta_fwd, of its operands and the states that it kept: results of the operands' types,
and dinitial in f32. dy is of v's type or f32. What happens within 1024 tokens is computed again."""


def gated_delta(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    beta: jax.Array,
    gate: jax.Array,
    *,
    scale: float | None = None,
    normalize: bool = False,
    segments: jax.Array | None = None,
    initial_state: jax.Array | None = None,
    return_final_state: bool = False,
) -> Any:
    """The gated delta rule: what the state says of the key k[t] moves towards v[t], after all of it has faded.

    state = exp(gate[t]) state[t-1]; state[t] = state + beta[t] k[t] (v[t] - k[t] state); y[t] = scale q[t] state[t].

    q, k:          [b..., s, g, d], floating
    v:             [b..., s, h, e], floating: h is a multiple of g, and head j reads q and k of head j // (h/g)
    beta:          [b..., s, h], how far the state moves, from 0 to 1; up to 2 with keys of length 1
    gate:          [b..., s, h], the logarithm of what is left of the state, at most 0; or [b..., s, h, d], of each
                   channel of keys. 0 forgets nothing, as DeltaNet does; -inf all
    scale:         of q; None: d**-0.5
    normalize:     q and k are divided by sqrt(sum of their squares + 1e-6) first
    segments:      integers [b..., s] or None: each run of equal numbers begins with a state of zeros
    initial_state: [b..., h, d, e], which the first token's segment begins with; None: zeros

    Returns y as v, computed in f32; with return_final_state (y, final_state f32[b..., h, d, e]), the state behind the
    last token. A call of one token with the state before it is a step of generation. Differentiable in all floating
    arguments; the backward pass keeps the state before each 1024 tokens.

    In plain JAX it is products and a triangular solve within chunks of 64 tokens, and a scan over chunks, in f32. On a
    GPU kernels compute it, and its gradients, where q, k and v are bf16, and d and e are multiples of 8, d at most 128
    (on Hopper, with a gate for each head, 256) and e at most 512: operands of products are then rounded to bf16, sums
    are f32. Kernels compute long rows of few heads in pieces, all at the same time: the bits of a row then depend on
    how many rows the call has.

    Keys longer than sqrt(2 / beta) make the state grow with every token. An inf or NaN of a token may reach all tokens
    of its chunk of 64 and those behind it in the row, in plain JAX also of other segments, and its gradient those
    before it: what stands between segments must be finite. Raises ValueError for wrong shapes, TypeError for dtypes.
    """
    name = "gated_delta"
    names = ("q", "k", "v", "beta", "gate", "segments", "initial_state")
    operands = as_jax(q, k, v, beta, gate, segments, initial_state)
    for i, (what, a) in enumerate(zip(names, operands)):
        kind = INTEGERS if what == "segments" else FLOATS_ARRAY
        check(name, what, a, kind if i < 5 else kind | NONE)
    check(name, "scale", scale, NONE | number())
    check(name, "normalize", normalize, BOOL)
    check(name, "return_final_state", return_final_state, BOOL)
    _check_shapes_of_delta(name, dict(zip(names, operands)))
    q, k, v, beta, gate, segments, initial = operands
    gate = gate[..., None] if gate.ndim < v.ndim else gate
    initial = None if initial is None else initial.astype(jnp.promote_types(v.dtype, jnp.float32))
    groups = k.shape[-2]
    attrs = dict(
        scale=float(k.shape[-1] ** -0.5 if scale is None else scale),
        normalize=bool(normalize),
        shared=1 if groups == 1 else v.shape[-2] // groups,
    )
    static = (*attrs.items(),), bool(return_final_state)
    y, *final = _gated_delta(*align(q, k, v, beta, gate, segments, initial), static)
    return (y, *final) if return_final_state else y


def _check_shapes_of_delta(name, given):
    v, k = given["v"], given["k"]
    if v.ndim < 3:
        raise ValueError(f"{name}: v has shape {v.shape}; pass [b..., s, h, e].")
    check_tokens(name, "v", v.shape)
    *rows, h, e = v.shape
    if k.ndim != v.ndim or k.shape[:-2] != (*rows,) or not k.shape[-2] or h % k.shape[-2] or not k.shape[-1]:
        raise ValueError(f"{name}: k has shape {k.shape}; pass {rows} + [g, d], where g divides the {h} heads of v.")
    check_shape(name, "q", given["q"], k.shape)
    check_shape(name, "beta", given["beta"], (*rows, h))
    check_shape(name, "gate", given["gate"], (*rows, h), (*rows, h, k.shape[-1]))
    check_shape(name, "segments", given["segments"], (*rows,))
    check_shape(name, "initial_state", given["initial_state"], (*rows[:-1], h, k.shape[-1], e))


@custom_vjp(7)
def _gated_delta(q, k, v, beta, gate, segments, initial, static):
    attrs, final = static
    outputs = ("y", "final") if final else ("y",)
    return gated_delta_fwd(q, k, v, beta, gate, segments, initial, outputs=outputs, **dict(attrs))


def _gated_delta_fwd(*args):
    *operands, (attrs, final) = args
    outputs = ("y", "final", "states") if final else ("y", "states")
    *outs, states = with_names(gated_delta_fwd(*operands, outputs=outputs, **dict(attrs)), SSM)
    return tuple(outs), (*operands, states)


def _gated_delta_bwd(static, residuals, cotangents):
    *operands, initial, states = residuals
    dy, *dfinal = cotangents
    names = ("dq", "dk", "dv", "dbeta", "dgate", *(("dinitial",) if initial is not None else ()))
    grads = gated_delta_bwd(dy, dfinal[0] if dfinal else None, *operands, states, outputs=names, **dict(static[0]))
    of = [*operands[:5], *(() if initial is None else (initial,))]
    *floats, dinitial = (*map(like, grads, of), *((None,) if initial is None else ()))
    return *floats, None, dinitial


_gated_delta.defvjp(_gated_delta_fwd, _gated_delta_bwd)
