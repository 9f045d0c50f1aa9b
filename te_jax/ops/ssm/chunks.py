"""Tokens by chunks, and who of a chunk sees whom: what scans over chunks share."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from te_jax.ops.ssm.runs import runs_of

dot: Callable[..., jax.Array] = partial(jnp.einsum, precision=lax.Precision.HIGHEST)
"""`jnp.einsum` in f32."""


class Runs(NamedTuple):
    """Of the tokens of a chunk, i32[b, l], and of the token before it, i32[b]."""

    own: jax.Array
    before: jax.Array


class Sight(NamedTuple):
    """Who of a chunk sees whom."""

    seen: jax.Array  # bool[b or 1, 1, l, l]: whether token i sees token j, itself among them
    sees_state: jax.Array | None  # bool[b, l]: the state before the chunk; None: all tokens do
    is_seen: jax.Array | None  # bool[b, l]: by the last token of the chunk; None: all are

    @classmethod
    def of(cls, length: int, runs: Runs | None) -> "Sight":
        """Of a chunk of so many tokens; runs None: one."""
        at = jnp.arange(length)
        seen = (at[:, None] >= at[None])[None, None]
        if runs is None:
            return cls(seen, None, None)
        seen = seen & (runs.own[:, None, :, None] == runs.own[:, None, None, :])
        return cls(seen, runs.own == runs.before[:, None], runs.own == runs.own[:, -1:])


def sums_between(logs: jax.Array) -> jax.Array:
    """logs [..., l] -> [..., l, l]: the sum of those behind token j up to token i; 0 unless i is behind j.

    A sum is added up from j on: the difference of sums from the chunk's beginning would lose the small ones behind a
    large one.
    """
    at = jnp.arange(logs.shape[-1])
    return jnp.cumsum(jnp.where(at[:, None] > at[None], logs[..., None], 0), -2)


def check_tokens(caller: str, name: str, shape: tuple[Any, ...]) -> None:
    """Raises ValueError for arrays [..., s, h, p] of a symbolic s (`jax.export`)."""
    if not isinstance(shape[-3], int):
        raise ValueError(
            f"{caller}: {name} has shape {shape}, of {shape[-3]} tokens; a scan over chunks needs their number: export "
            "a program for each length. The batch may be symbolic."
        )


def to_chunks(a: Any, length: int, total: int | None = None) -> Any:
    """[b, s, ...] -> [c, b, length, ...]: chunks of up to `total` tokens, by default as few as s needs, filled up with
    zeros. None stays."""
    if a is None:
        return None
    s = a.shape[1]
    fill = -s % length if total is None else total - s
    a = jnp.pad(a, [(0, 0), (0, fill)] + [(0, 0)] * (a.ndim - 2))
    return jnp.moveaxis(a.reshape(a.shape[0], a.shape[1] // length, length, *a.shape[2:]), 1, 0)


def tokens_of(a: Any, s: int) -> Any:
    """The inverse of `to_chunks`."""
    return None if a is None else lax.collapse(jnp.moveaxis(a, 0, 1), 1, 3)[:, :s]


def runs_of_chunks(segments: jax.Array | None, length: int, total: int | None = None) -> Runs | None:
    """The runs of chunks, or None: a token that fills up the last chunk belongs to the last run."""
    if segments is None:
        return None
    runs, s = runs_of(segments), segments.shape[1]
    fill = -s % length if total is None else total - s
    own = jnp.pad(runs, [(0, 0), (0, fill)], mode="edge") if s else runs
    before = jnp.pad(own, [(0, 0), (1, 0)])[:, : max(own.shape[1], 1)]
    return Runs(to_chunks(own, length), jnp.moveaxis(before[:, ::length], 1, 0)[: own.shape[1] // length])
