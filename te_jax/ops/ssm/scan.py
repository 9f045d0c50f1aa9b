"""The state-space dual (Dao, Gu 2024, https://arxiv.org/abs/2405.21060, section 6): a scan over tokens, computed as
products within chunks of tokens and a scan over the states between them."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from te_jax.core.arrays import as_jax, as_rank
from te_jax.core.check import BOOL, FLOATS_ARRAY, INTEGERS, NONE, Kind, check
from te_jax.core.derivatives import custom_vjp
from te_jax.core.op import Op
from te_jax.core.policies import SSM, with_names
from te_jax.core.types import align, like
from te_jax.ops.quantize.activation import silu
from te_jax.ops.ssm import kernels
from te_jax.ops.ssm.chunks import (
    Runs,
    Sight,
    check_tokens,
    dot,
    runs_of_chunks,
    sums_between,
    to_chunks,
    tokens_of,
)
from te_jax.ops.ssm.conv import check_shape
from te_jax.ops.ssm.kernels import KEPT
from te_jax.ops.ssm.runs import one_batch
from te_jax.ops.ssm.steps import step_sizes

_PLAIN_CHUNK = 128  # tokens of a chunk of the reference


class _Chunk(NamedTuple):
    """The tokens of a chunk: floats of which there are gradients."""

    x: jax.Array  # [b, l, h, p]
    steps: jax.Array  # f32[b, l, h], 0 for tokens that fill up the last chunk
    B: jax.Array  # [b, l, g, n]
    C: jax.Array
    z: jax.Array | None


def _by_groups(a, groups):
    """[b, h, ...] -> [b, g, r, ...]."""
    return a.reshape(a.shape[0], groups, a.shape[1] // groups, *a.shape[2:])


class _Left(NamedTuple):
    """How much is left of what tokens add to the state, f32 between 0 and 1, and who sees it."""

    within: jax.Array  # [b, h, l, l]: at token i of token j; 0 unless i sees j
    since: jax.Array  # [b, h, l]: at token i of the state before the chunk; 0 unless i sees it
    sees_state: jax.Array | None  # bool[b, l]; None: all tokens do
    is_seen: jax.Array | None  # bool[b, l]: by the last token of the chunk; None: all are


def _decays(logs, runs):
    """logs f32[b, h, l], of how much of a state a token leaves. What i does not see is masked before exp, which so is
    at most 1."""
    seen, sees_state, is_seen = Sight.of(logs.shape[-1], runs)
    since = jnp.cumsum(logs, -1)
    since = since if sees_state is None else jnp.where(sees_state[:, None], since, -jnp.inf)
    within = jnp.exp(jnp.where(seen, sums_between(logs), -jnp.inf))
    return _Left(within, jnp.exp(since), sees_state, is_seen)


def _of_chunk(A, D, state, chunk, runs):
    """state f32[b, h, p, n] before the chunk -> y [b, l, h, p], the state after it.

    Between chunks nothing of tokens crosses that are not seen, not even an inf or NaN: a factor of 0 would keep it.
    """
    wide = state.dtype
    groups = chunk.B.shape[2]
    of_groups = partial(_by_groups, groups=groups)
    x32, B, C = (a.astype(wide) for a in (chunk.x, chunk.B, chunk.C))
    steps = jnp.swapaxes(chunk.steps, 1, 2)
    left = _decays(steps * A[None, :, None], runs)
    within, since = map(of_groups, left[:2])
    x, old = of_groups(jnp.swapaxes(x32, 1, 2)), of_groups(state)  # [b, g, r, l, p], [b, g, r, p, n]
    added = x * of_groups(steps)[..., None]
    scores = dot("blgn,bmgn->bglm", C, B)
    y = dot("bgrlm,bgrmp->bgrlp", scores[:, :, None] * within, added)
    of_state = dot("blgn,bgrpn->bgrlp", _only(C, left.sees_state, 1), old) * since[..., None]
    y = y + _only(of_state, left.sees_state, 3)
    kept, B = _only(added * within[..., -1, :, None], left.is_seen, 3), _only(B, left.is_seen, 1)
    old = old * since[..., -1, None, None]
    old = old if left.sees_state is None else _only(old, left.sees_state[:, -1], 1)
    new = old + dot("bgrlp,blgn->bgrpn", kept, B)
    y = jnp.swapaxes(lax.collapse(y, 1, 3), 1, 2)
    y = y if D is None else y + as_rank(D, x32.ndim) * x32
    y = y if chunk.z is None else y * silu(chunk.z.astype(wide))
    return y.astype(chunk.x.dtype), new.reshape(state.shape)


def _only(a, tokens, axis):
    """a [b, ...], 0 but for these, bool[b, l], where `axis` is their axis of a, or bool[b]; None: a as it is."""
    if tokens is None:
        return a
    at = (0, axis) if tokens.ndim == 2 else (0,)
    return jnp.where(jnp.expand_dims(tokens, tuple(i for i in range(a.ndim) if i not in at)), a, 0)


def _length(s):
    """Tokens of a chunk."""
    return max(1, min(s, _PLAIN_CHUNK))


class _Call(NamedTuple):
    """A call with one batch axis: what is the same for all chunks, and the tokens by chunks."""

    A: jax.Array
    D: jax.Array | None
    chunks: _Chunk
    runs: Runs | None

    @classmethod
    def of(cls, x, steps, A, B, C, D, z, segments, lead):
        s = x.shape[lead]
        flat = lambda a: one_batch(a, lead)
        tokens = _Chunk(*(to_chunks(flat(a), _length(s)) for a in (x, steps, B, C, z)))
        D = None if D is None else D.astype(steps.dtype)
        return cls(A.astype(steps.dtype), D, tokens, runs_of_chunks(flat(segments), _length(s)))


def _reference(x, dt, A, B, C, D, z, dt_bias, segments, initial, *, softplus, least, most, shared):
    lead, wide = x.ndim - 3, jnp.promote_types(x.dtype, jnp.float32)
    batch, (s, h, p), n = x.shape[:lead], x.shape[lead:], B.shape[-1]
    steps = step_sizes(dt, dt_bias, softplus=softplus, least=least, most=most, wide=wide)
    call = _Call.of(x, steps, A, B, C, D, z, segments, lead)
    state = jnp.zeros((math.prod(batch), h, p, n), wide) if initial is None else one_batch(initial.astype(wide), lead)

    final, (y, states) = _scan(call, align(state, x)[0])
    y, states = tokens_of(y, s).reshape(x.shape), jnp.moveaxis(states[:: KEPT // _PLAIN_CHUNK], 0, 1)
    return y, final.reshape(*batch, *final.shape[1:]), states.reshape(*batch, *states.shape[1:])


def _scan(call, state):
    """-> the state behind all chunks; y of each chunk, and the state before it."""

    def body(state, tokens):
        y, new = _of_chunk(call.A, call.D, state, *tokens)
        return new, (y, state)

    return lax.scan(body, state, (call.chunks, call.runs))


def _bwd_reference(dy, dfinal, x, dt, A, B, C, D, dt_bias, segments, states, *, softplus, least, most, shared):
    lead, s, wide = x.ndim - 3, x.shape[-3], states.dtype
    of_steps = partial(step_sizes, softplus=softplus, least=least, most=most, wide=wide)
    steps, pull_steps = jax.vjp(of_steps, dt, dt_bias)
    call = _Call.of(x.astype(dy.dtype), steps, A, B, C, D, None, segments, lead)

    def body(carry, tokens):
        dstate, total = carry
        chunk, runs, dy, state = tokens
        _, pull = jax.vjp(lambda *floats: _of_chunk(*floats, runs), call.A, call.D, state, chunk)
        *of_all, dstate, grads = pull((dy, dstate))
        return (dstate, jax.tree.map(jnp.add, total, tuple(of_all))), grads

    first = jnp.zeros_like(states, shape=(*states.shape[:lead], *states.shape[lead + 1 :]))
    first = one_batch(first if s == 0 else states[(slice(None),) * lead + (0,)], lead)
    _, (_, states) = _scan(call, align(first, x)[0])
    dfinal = jnp.zeros(states.shape[1:], wide) if dfinal is None else one_batch(dfinal.astype(wide), lead)
    zeros = jax.tree.map(jnp.zeros_like, (call.A, call.D))
    carry = align(dfinal, zeros, x)[:2]
    xs = call.chunks, call.runs, to_chunks(one_batch(dy, lead), _length(s)), states
    (dinitial, (dA, dD)), grads = lax.scan(body, tuple(carry), xs, reverse=True)
    grads = _Chunk(*(tokens_of(a, s) for a in grads))
    ddt, ddt_bias = pull_steps(grads.steps.reshape(steps.shape))
    shaped = lambda a, of: None if of is None else a.reshape(of.shape).astype(of.dtype)
    whole = (shaped(grads.x, x), ddt, shaped(dA, A), shaped(grads.B, B), shaped(grads.C, C))
    return *whole, shaped(dD, D), ddt_bias, dinitial.reshape(*x.shape[:lead], *dinitial.shape[1:])


_X, _OF_TOKENS = "b... s (g r) p", "dt_bias?: (g r), segments?: b... s"
_OF_SCAN = f"x: {_X}, dt: b... s (g r), A: (g r), B: b... s ~g n, C: b... s ~g n, D?: (g r) ~p"
_STATE, _STATES = "b... (g r) p n", f"b... s/{KEPT} (g r) p n"
_SHARED = {"r": lambda *, shared, **_: shared}
_sum_type = lambda x: jnp.promote_types(x, jnp.float32)

ssd_fwd: Op = Op(
    "te_ssd_fwd",
    f"{_OF_SCAN}, z?: {_X}, {_OF_TOKENS}, initial?: {_STATE} -> y: {_X}, final?: {_STATE}, states?: {_STATES}",
    replicated="s r p n",
    dtypes=lambda x, *_, **attrs: (x, _sum_type(x), _sum_type(x)),
    reference=_reference,
    sizes=_SHARED,
    workspace=kernels.scan_workspace,
    cuda=partial(kernels.scan, _reference),
)
"""x, z of a floating type [b..., s, h, p], dt [b..., s, h], A, dt_bias [h], B, C [b..., s, g, n], D [h, p] or [h, 1],
segments i32[b..., s], initial [b..., h, p, n] -> y of x's type, final f32: `ssd`, and

states  f32[b..., s/512, h, p, n], the state before each 512 tokens

softplus: bool. least, most: bounds of dt. shared: how many heads share a group of B and C; 1 where there is one group,
which then is broadcast to all heads, so that devices may split them.
"""

ssd_bwd: Op = Op(
    "te_ssd_bwd",
    f"dy: {_X}, dfinal?: {_STATE}, {_OF_SCAN}, {_OF_TOKENS}, states: {_STATES} -> dx: =x, ddt: =dt, dA: =A, "
    f"dB: =B, dC: =C, dD?: =D, ddt_bias?: =dt_bias, dinitial?: {_STATE}",
    replicated="s r p n",
    combine={name: "sum" for name in ("dA", "dB", "dC", "dD", "ddt_bias")},
    dtypes=lambda dy, dfinal, x, dt, A, B, C, D, dt_bias, segments, states, **attrs: (
        *(x, dt, A, B, C, D, dt_bias, states),
    ),
    reference=_bwd_reference,
    sizes=_SHARED,
    partials=dict.fromkeys(("dA", "dD", "ddt_bias"), kernels.scan_bwd_partials),
    workspace=kernels.scan_bwd_workspace,
    cuda=partial(kernels.scan_bwd, _bwd_reference),
)
"""The backward pass of te_ssd_fwd without z, of its operands and the states that it kept: results of the operands'
types, and dinitial in f32. dy is of x's type or f32. What happens within a chunk is computed again."""


LIMIT = Kind(
    "a tuple (least, most) of numbers with 0 <= least <= most",
    lambda v: isinstance(v, tuple | list),
    lambda v: len(v) == 2 and all(isinstance(x, int | float) for x in v) and 0 <= v[0] <= v[1],
)
"""Bounds of dt."""


def ssd(
    x: jax.Array,
    dt: jax.Array,
    A: jax.Array,
    B: jax.Array,
    C: jax.Array,
    D: jax.Array | None = None,
    z: jax.Array | None = None,
    *,
    dt_bias: jax.Array | None = None,
    dt_softplus: bool = False,
    dt_limit: Sequence[float] = (0.0, math.inf),
    segments: jax.Array | None = None,
    initial_state: jax.Array | None = None,
    return_final_state: bool = False,
) -> Any:
    """Mamba-2's scan: state[t] = exp(dt A) state[t-1] + dt x[t] B[t], y[t] = (C[t] state[t] + D x[t]) silu(z[t]).

    x:             [b..., s, h, p], floating: h heads of p channels
    dt:            [b..., s, h]; dt_bias [h] is added, dt_softplus: then softplus, then the bounds `dt_limit`
    A:             [h], below 0
    B, C:          [b..., s, g, n], g groups of heads that share them: h is a multiple of g
    D:             [h] or [h, p], or None
    z:             [b..., s, h, p], a gate, or None
    segments:      integers [b..., s] or None: each run of equal numbers begins with a state of zeros
    initial_state: [b..., h, p, n], which the first token's segment begins with; None: zeros

    Returns y as x, computed in f32; with return_final_state (y, final_state f32[b..., h, p, n]), the state behind the
    last token. A call of one token with the state before it is a step of generation. Differentiable in all floating
    arguments; the backward pass keeps the state before each 512 tokens.

    On a GPU kernels compute it and its gradients where x, B, C and z are bf16, and p and n multiples of 8, n at most
    256. Operands of products are then rounded to bf16, sums are f32. Everything else is plain JAX there too. With z the
    backward pass computes y before its gate again; with more than 128 states, or with a D [h, p], its results are sums
    of rounded ones.

    An inf or NaN of a token may reach all tokens of its chunk of 128, as 0 times it in a product, and from other chunks
    only those of its segment; so does that of a gradient. What stands between segments must be finite, as keys that
    attention hides. Raises ValueError for wrong shapes or bounds, TypeError for dtypes.
    """
    name = "ssd"
    operands = x, dt, A, B, C, D, z, dt_bias, segments, initial_state = as_jax(
        x, dt, A, B, C, D, z, dt_bias, segments, initial_state
    )
    names = ("x", "dt", "A", "B", "C", "D", "z", "dt_bias", "segments", "initial_state")
    for i, (what, a) in enumerate(zip(names, operands)):
        kind = INTEGERS if what == "segments" else FLOATS_ARRAY
        check(name, what, a, kind if i < 5 else kind | NONE)
    check(name, "dt_softplus", dt_softplus, BOOL)
    check(name, "dt_limit", dt_limit, LIMIT)
    check(name, "return_final_state", return_final_state, BOOL)
    _check_shapes(name, dict(zip(names, operands)))
    wide = jnp.promote_types(x.dtype, jnp.float32)
    A, D, dt_bias, initial_state = (None if a is None else a.astype(wide) for a in (A, D, dt_bias, initial_state))
    D = D[:, None] if D is not None and D.ndim == 1 else D
    groups = B.shape[-2]
    shared = 1 if groups == 1 else x.shape[-2] // groups
    attrs = dict(softplus=bool(dt_softplus), least=float(dt_limit[0]), most=float(dt_limit[1]), shared=shared)
    static = (*attrs.items(),), bool(return_final_state)
    y, *final = _ssd(*align(x, dt, A, B, C, D, z, dt_bias, segments, initial_state), static)
    return (y, *final) if return_final_state else y


def _check_shapes(name, given):
    x, B = given["x"], given["B"]
    if x.ndim < 3:
        raise ValueError(f"{name}: x has shape {x.shape}; pass [b..., s, h, p].")
    check_tokens(name, "x", x.shape)
    *rows, h, p = x.shape
    if B.ndim != x.ndim or B.shape[:-2] != (*rows,) or not B.shape[-2] or h % B.shape[-2]:
        raise ValueError(f"{name}: B has shape {B.shape}; pass {rows} + [g, n], where g divides the {h} heads of x.")
    check_shape(name, "C", given["C"], B.shape)
    check_shape(name, "dt", given["dt"], (*rows, h))
    check_shape(name, "A", given["A"], (h,))
    check_shape(name, "D", given["D"], (h,), (h, p))
    check_shape(name, "z", given["z"], x.shape)
    check_shape(name, "dt_bias", given["dt_bias"], (h,))
    check_shape(name, "segments", given["segments"], (*rows,))
    check_shape(name, "initial_state", given["initial_state"], (*rows[:-1], h, p, B.shape[-1]))


@custom_vjp(10)
def _ssd(x, dt, A, B, C, D, z, dt_bias, segments, initial, static):
    attrs, final = static
    outputs = ("y", "final") if final else ("y",)
    return ssd_fwd(x, dt, A, B, C, D, z, dt_bias, segments, initial, outputs=outputs, **dict(attrs))


def _ssd_fwd(*args):
    *operands, (attrs, final) = args
    outputs = ("y", "final", "states") if final else ("y", "states")
    *outs, states = with_names(ssd_fwd(*operands, outputs=outputs, **dict(attrs)), SSM)
    return tuple(outs), (*operands, states)


def _ssd_bwd(static, residuals, cotangents):
    x, dt, A, B, C, D, z, dt_bias, segments, initial, states = residuals
    operands, attrs = (x, dt, A, B, C, D, dt_bias, segments), dict(static[0])
    dy, *dfinal = cotangents
    if z is not None:
        (y,) = ssd_fwd(*operands[:6], None, dt_bias, segments, initial, outputs=("y",), **attrs)
        dy, dz = _ungated(dy, y, z)
    floats = dict(dx=x, ddt=dt, dA=A, dB=B, dC=C, dD=D, ddt_bias=dt_bias, dinitial=initial)
    wanted = tuple(name for name, of in floats.items() if of is not None)
    grads = ssd_bwd(dy, dfinal[0] if dfinal else None, *operands, states, outputs=wanted, **attrs)
    got = {name: like(grad, floats[name]) for name, grad in zip(wanted, grads)}
    *of, dbias, dinitial = (got.get(name) for name in floats)
    return *of, None if z is None else like(dz, z), dbias, None, dinitial


def _ungated(dy, y, z):
    """The gradients of y silu(z), to y not rounded to its type."""
    wide = jnp.promote_types(y.dtype, jnp.float32)
    _, pull = jax.vjp(lambda y, z: y * silu(z), y.astype(wide), z.astype(wide))
    return pull(dy.astype(wide))


_ssd.defvjp(_ssd_fwd, _ssd_bwd)
