"""How te_gated_delta_fwd and te_gated_delta_bwd call their kernels, and for what."""

from collections.abc import Callable
from math import prod
from typing import Any

import jax
import jax.numpy as jnp

from te_jax.ops.delta.chunk import CHUNK
from te_jax.ops.delta.pieces import WalkedPieces
from te_jax.ops.formats import ceil_div, has_hopper_kernels
from te_jax.ops.ssm.pieces import CTAS, cut, joined, kept_by_pieces, pieces_of
from te_jax.ops.ssm.runs import runs_and_rows

KEPT = 1024
"""Tokens: how often the state is kept for the backward pass."""
_MOST_KEYS, _MOST_VALUES = 128, 512  # channels
_MOST_KEYS_OF_HOPPER = 256  # on Hopper, with a gate for each head
_MOST_ROWS = 65535  # of a CUDA grid, also heads of keys
_GRADIENTS = "dq", "dk", "dv", "dbeta", "dgate"  # the kernels give all of them, or none
_INT32_MAX = 2**31 - 1  # numbers of a row's states
# Of what the kernels of a slab of the backward pass exchange, and of its chunks: half of what operands take, but at
# least and at most so many. Fewer slabs are faster.
_RULE_SLAB_BYTES = 128 << 20, 512 << 20
# Pieces of a row, and tokens of each: with fewer, one walk over whole rows takes less time than three, or, backward,
# than three and what else is done once more.
_LEAST_WALKED, _LEAST_WALKED_BACK = (6, 2048), (12, 2048)


def _rule_has_kernel(q, k, v, gate):
    """Whether the kernels take such operands."""
    sizes_known = all(isinstance(size, int) for a in (k, v) for size in a.shape)
    in_bf16 = all(a.dtype == jnp.bfloat16 for a in (q, k, v))
    d, e = k.shape[-1], v.shape[-1]
    many = sizes_known and d > _MOST_KEYS and gate.shape[-1] == 1 and has_hopper_kernels()
    sizes_fit = sizes_known and 0 not in v.shape and d % 8 == e % 8 == 0 < min(d, e)
    sizes_fit = sizes_fit and d <= (_MOST_KEYS_OF_HOPPER if many else _MOST_KEYS) and e <= _MOST_VALUES
    sizes_fit = sizes_fit and max(prod(v.shape[:-3]), k.shape[-2]) <= _MOST_ROWS and v.shape[-2] * d * e <= _INT32_MAX
    return sizes_fit and in_bf16 and gate.shape[-1] in (1, d)


def rule(
    reference: Callable[..., Any], call: Callable[..., Any], q: Any, k: Any, v: Any, beta: Any, gate: Any,
    segments: Any, initial: Any, **attrs: Any,
) -> list[jax.Array]:  # fmt: skip
    """The `cuda` of te_gated_delta_fwd."""
    if not _rule_has_kernel(q, k, v, gate):
        return reference(q, k, v, beta, gate, segments, initial, **attrs)
    beta, gate = beta.astype(jnp.float32), gate.astype(jnp.float32)
    runs, q, k, rows, beta, gate, initial = runs_and_rows(v.ndim - 3, segments, q, k, v, beta, gate, initial)
    if (count := _pieces_of_walks(rows, k, _LEAST_WALKED)) > 1:
        runs, q, k, rows, beta, gate = (cut(a, count) for a in (runs, q, k, rows, beta, gate))
        initial = _walked_pieces(count, call, q, k, rows, beta, gate, runs, **attrs).begin(rows, initial)
    results = call(q, k, rows, beta, gate, runs, initial, **attrs)
    results = [joined(a, count, v.shape[-2], True) for a in results]
    return [a.reshape(*v.shape[:-3], *a.shape[1:]) for a in results]


def _pieces_of_walks(v, k, least):
    """How many pieces the rows of v are cut in, over which walks with values of as many channels as keys go, too."""
    return pieces_of(*v.shape[:3], max(v.shape[-1], k.shape[-1]), KEPT, least)


def _walked_pieces(count, forward, q, k, v, beta, gate, runs, **attrs):
    """forward: the kernels' call of te_gated_delta_fwd."""

    def walk(values, state):
        return forward(q, k, values, beta, gate, runs, state, outputs=("y", "final"), **attrs)[1]

    return WalkedPieces(count, walk, jnp.zeros((*v.shape[:-1], k.shape[-1]), v.dtype), runs)


def rule_bwd(
    reference: Callable[..., Any], forward: Callable[..., Any], call: Callable[..., Any], dy: Any, dfinal: Any, q: Any,
    k: Any, v: Any, beta: Any, gate: Any, segments: Any, states: Any, **attrs: Any,
) -> list[jax.Array]:  # fmt: skip
    """The `cuda` of te_gated_delta_bwd. forward: the kernels' call of te_gated_delta_fwd."""
    if not _rule_has_kernel(q, k, v, gate):
        return reference(dy, dfinal, q, k, v, beta, gate, segments, states, **attrs)
    dy, types = dy.astype(v.dtype), dict(dbeta=beta.dtype, dgate=gate.dtype)
    beta, gate = beta.astype(jnp.float32), gate.astype(jnp.float32)
    given = dy, dfinal, q, k, v, beta, gate, states
    runs, dy, dfinal, q, k, rows, beta, gate, states = runs_and_rows(v.ndim - 3, segments, *given)
    operands = sum(a.size * a.dtype.itemsize for a in (dy, q, k, rows, gate))
    count, outputs = _pieces_of_walks(rows, k, _LEAST_WALKED_BACK), call.keywords["outputs"]
    if count > 1:
        runs, dy, q, k, rows, beta, gate, states = (cut(a, count) for a in (runs, dy, q, k, rows, beta, gate, states))
        states = kept_by_pieces(states, count, runs)
        pieces = _walked_pieces(count, forward, q, k, rows, beta, gate, runs, **attrs)
    attrs |= _slab_of_rule(*rows.shape, k.shape[-1], gate.shape[-1] > 1, operands)
    back = lambda dfinal, outputs: call(dy, dfinal, q, k, rows, beta, gate, runs, states, outputs=outputs, **attrs)
    if count > 1:
        dfinal = pieces.end(back(None, ("dinitial",))[0], dfinal)
    of_kernels = outputs if outputs == ("dinitial",) else (*_GRADIENTS, *{"dinitial"}.intersection(outputs))
    results = dict(zip(of_kernels, back(dfinal, of_kernels), strict=True))
    whole = {name: joined(a, count, v.shape[-2], False) for name, a in results.items()}
    whole = {name: a.reshape(*v.shape[:-3], *a.shape[1:]) for name, a in whole.items()}
    return [whole[name].astype(types.get(name, whole[name].dtype)) for name in outputs]


def _slab_of_rule(rows, s, h, e, d, by_channel, operands):
    """How csrc/delta/delta_bwd.cu cuts a call: rows and tokens of a slab."""
    block = min(KEPT, max(1, ceil_div(s, CHUNK)) * CHUNK)
    least, most = _RULE_SLAB_BYTES
    blocks = max(1, min(max(operands // 2, least), most) // sum(_slab_bytes(block, h, e, d, by_channel)))
    # A CTA walks over the tokens of a row and head: of long rows so many that each SM has one.
    slab_rows = min(rows, blocks, max(1, CTAS // h) if s > KEPT else 256)
    tokens = block * min(blocks // slab_rows, ceil_div(s, block), 64)
    return dict(slab_rows=slab_rows, slab_tokens=min(tokens, max(1, ceil_div(s, CHUNK)) * CHUNK))


def _slab_bytes(tokens, h, e, d, by_channel):
    """What kernels need for so many tokens, of all rows of a slab: chunks; states, and what tokens write, each with its
    gradient."""
    chunks = tokens // CHUNK
    return chunks * h * _chunk_bytes(d, by_channel), 2 * chunks * h * e * d * 2, 2 * tokens * h * e * 2


def rule_workspace(q: Any, k: Any, v: Any, beta: Any, gate: Any, *_: Any, **attrs: Any) -> int:
    """Bytes."""
    (rows, s, h, _), d = v.shape, k.shape[-1]
    return rows * ceil_div(s, CHUNK) * h * _chunk_bytes(d, gate.shape[-1] > 1)


def _chunk_bytes(d, by_channel):
    """A chunk of a head, as csrc/delta/delta.cuh and channel.cuh have them."""
    if not by_channel:
        return 2 * CHUNK * CHUNK * 2 + 8 * CHUNK * 4 + 16
    wide = 64 if d <= 64 else 128
    return ceil_div(3 * CHUNK * wide * 2 + 2 * CHUNK * CHUNK * 2 + 4 * (wide + CHUNK) + 16, 128) * 128


def rule_bwd_workspace(
    dy: Any, dfinal: Any, q: Any, k: Any, v: Any, beta: Any, gate: Any, *_: Any, outputs: tuple[str, ...],
    slab_rows: int, slab_tokens: int, **attrs: Any,
) -> int:  # fmt: skip
    """Bytes, as csrc/base/ops.h has them."""
    (rows, _, h, e), d = v.shape, k.shape[-1]
    carried = 0 if "dinitial" in outputs else rows * h * d * e * 4
    sizes = carried, *_slab_bytes(slab_rows * slab_tokens, h, e, d, gate.shape[-1] > 1)
    return sum(ceil_div(size, 256) * 256 for size in sizes)
