"""How te_ssd_fwd and te_ssd_bwd call their kernels, and for what."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from te_jax.core.arrays import as_rank
from te_jax.ops.formats import ceil_div
from te_jax.ops.ssm.pieces import CTAS, Pieces, cut, joined, kept_by_pieces, pieces_of
from te_jax.ops.ssm.runs import runs_and_rows
from te_jax.ops.ssm.steps import step_sizes

KEPT = 512
"""Tokens: how often the state is kept for the backward pass."""
_TILE = 64  # tokens of a chunk
_MOST_STATES = 128  # of the backward kernels
_SLAB_BYTES = 48 << 20  # of the states of a slab's chunks, which so stay in L2
_LEAST_PIECES = 4, 4096  # pieces of a row, and tokens of each piece: fewer gain less than the sums cost
_STEPS, _ENDS = 2 * _TILE * 4, (6 * _TILE + 4) * 4  # bytes of a chunk and a head


def _has_kernel(x, B, C, *others):
    """Whether the kernels take such operands. others: what they compute with in f32, or None."""
    sizes_known = all(isinstance(size, int) for a in (x, B) for size in a.shape)
    in_bf16 = all(a.dtype == jnp.bfloat16 for a in (x, B, C))
    in_f32 = all(a is None or a.dtype == jnp.float32 for a in others)
    (*rows, _, h, p), n = x.shape, B.shape[-1]
    sizes_fit = sizes_known and 0 not in (*rows, h, p) and p % 8 == 0 and n % 8 == 0 and 8 <= n <= 256
    return sizes_fit and in_bf16 and in_f32


_Reference = Callable[..., Any]


def scan(
    reference: _Reference, call: Callable[..., Any], x: Any, dt: Any, A: Any, B: Any, C: Any, D: Any, z: Any,
    dt_bias: Any, segments: Any, initial: Any, **attrs: Any,
) -> list[jax.Array]:  # fmt: skip
    """The `cuda` of te_ssd_fwd."""
    gates = z is None or z.dtype == x.dtype
    if not gates or not _has_kernel(x, B, C, A, D, dt_bias, initial):
        return reference(x, dt, A, B, C, D, z, dt_bias, segments, initial, **attrs)
    dt = dt if dt.dtype == x.dtype else dt.astype(jnp.float32)
    runs, x1, dt, B, C, z, initial = runs_and_rows(x.ndim - 3, segments, x, dt, B, C, z, initial)
    if (count := pieces_of(*x1.shape, KEPT, _LEAST_PIECES)) > 1:
        runs, x1, dt, B, C, z = (cut(a, count) for a in (runs, x1, dt, B, C, z))
        steps, pieces = _pieces(count, dt, A, dt_bias, runs, **attrs)
        initial = pieces.begin(x1, steps, B, initial)
    results = call(x1, dt, A, B, C, D, z, dt_bias, runs, initial, **attrs)
    results = [joined(a, count, x.shape[-2], True) for a in results]
    return [a.reshape(*x.shape[:-3], *a.shape[1:]) for a in results]


def _pieces(count, dt, A, dt_bias, runs, *, softplus, least, most, **_):
    steps = step_sizes(dt, dt_bias, softplus=softplus, least=least, most=most, wide=jnp.float32)
    return steps, Pieces(count, steps * A, runs)


def scan_bwd(
    reference: _Reference, call: Callable[..., Any], dy: Any, dfinal: Any, x: Any, dt: Any, A: Any, B: Any, C: Any,
    D: Any, dt_bias: Any, segments: Any, states: Any, **attrs: Any,
) -> list[jax.Array]:  # fmt: skip
    """The `cuda` of te_ssd_bwd."""
    fits = dt.dtype in (x.dtype, jnp.float32) and x.size
    if not fits or not _has_kernel(x, B, C, A, D, dt_bias, dfinal, states):
        return reference(dy, dfinal, x, dt, A, B, C, D, dt_bias, segments, states, **attrs)
    dy = dy.astype(x.dtype)
    runs, dy, dfinal, x1, dt, B, C, states = runs_and_rows(x.ndim - 3, segments, dy, dfinal, x, dt, B, C, states)
    if (count := pieces_of(*x1.shape, KEPT, _LEAST_PIECES)) > 1:
        runs, dy, x1, dt, B, C, states = (cut(a, count) for a in (runs, dy, x1, dt, B, C, states))
        pieces = _pieces(count, dt, A, dt_bias, runs, **attrs)[1]
        states, dfinal = kept_by_pieces(states, count, runs), pieces.end(dy, C, dfinal)
    attrs |= _slab(*x1.shape, min(B.shape[-1], _MOST_STATES), B.shape[-2])
    grads = _by_states(call, dy, dfinal, x1, dt, A, B, C, D, dt_bias, runs, states, **attrs)
    grads = [joined(a, count, x.shape[-2], False) for a in grads]
    return [a if a.ndim <= 2 else a.reshape(*x.shape[:-3], *a.shape[1:]) for a in grads]


def _by_states(call, dy, dfinal, x, dt, A, B, C, D, dt_bias, runs, states, **attrs):
    """The results of the kernels, which take at most 128 states, and a D of heads: others are sums of such results, for
    y is a sum over states, and over D x."""
    outputs, n = call.keywords["outputs"], B.shape[-1]
    of_heads = D is not None and D.shape[-1] == 1
    parts = []
    for first in range(0, n, _MOST_STATES):
        of = lambda a: a if a is None or n <= _MOST_STATES else a[..., first : first + _MOST_STATES]  # noqa: B023
        with_D = of_heads and first == 0
        names = tuple(name for name in outputs if name != "dD" or with_D)
        operands = dy, of(dfinal), x, dt, A, of(B), of(C), D if with_D else None, dt_bias, runs, of(states)
        parts.append(dict(zip(names, call(*operands, outputs=names, **attrs), strict=True)))
    grads = {
        name: _sum_or_join(name, [part[name] for part in parts if name in part]) for name in outputs if name in parts[0]
    }
    if D is not None and not of_heads:
        dy, wide = dy.astype(jnp.float32), x.astype(jnp.float32)
        grads["dx"] = (grads["dx"].astype(jnp.float32) + as_rank(D, x.ndim) * dy).astype(x.dtype)
        grads["dD"] = jnp.sum(dy * wide, (0, 1))
    return [grads[name] for name in outputs]


def _sum_or_join(name, parts):
    if len(parts) == 1:
        return parts[0]
    if name in ("dB", "dC", "dinitial"):
        return jnp.concatenate(parts, -1)
    return sum(a.astype(jnp.float32) for a in parts).astype(parts[0].dtype)


def _slab(rows, s, h, p, n, g):
    """How csrc/ssm/scan_bwd.cu cuts a call: rows and tokens of a slab, heads of a CTA."""
    blocks = ceil_div(s, KEPT)
    at_once = min(64, max(1, _SLAB_BYTES // (KEPT // _TILE * h * p * n * 4)))
    slab_rows = min(rows, at_once, max(1, CTAS // h))  # a CTA walks over the tokens of a row and head
    tokens = min(KEPT * min(at_once // slab_rows, blocks), ceil_div(s, _TILE) * _TILE)
    chunks = slab_rows * (tokens // _TILE) * h
    return dict(slab_rows=slab_rows, slab_tokens=tokens, slab_heads=max(1, min(h // g, ceil_div(chunks, CTAS))))


def _steps_bytes(x):
    rows, s, h, _ = x.shape
    return rows * ceil_div(s, _TILE) * h * _STEPS


def scan_workspace(x: Any, *_: Any, **attrs: Any) -> int:
    """Bytes."""
    return _steps_bytes(x)


def scan_bwd_workspace(
    dy: Any, dfinal: Any, x: Any, dt: Any, A: Any, B: Any, *_: Any, outputs: tuple[str, ...],
    slab_rows: int, slab_tokens: int, slab_heads: int, **attrs: Any,
) -> int:  # fmt: skip
    """Bytes, as csrc/base/ops.h has them."""
    (rows, _, h, p), (g, n) = x.shape, B.shape[2:]
    chunks = slab_rows * (slab_tokens // _TILE)
    carried = 0 if "dinitial" in outputs else rows * h * p * n * 4
    parts = 2 * chunks * _TILE * g * ceil_div(h // g, slab_heads) * n * 4
    sizes = _steps_bytes(x), chunks * h * _ENDS, carried, 2 * chunks * h * p * n * 2, parts
    return sum(ceil_div(size, 256) * 256 for size in sizes)


def scan_bwd_partials(dy: Any, dfinal: Any, x: Any, *_: Any, **attrs: Any) -> tuple[int, ...]:
    """Partials of what is summed over tokens: one for each chunk of a row."""
    return (x[0] * ceil_div(x[1], _TILE),)
