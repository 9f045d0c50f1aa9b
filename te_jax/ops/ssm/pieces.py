"""A few long rows in pieces, which the kernels scan at the same time as rows of their own: the state that each piece
begins with, and the gradient to the state that it ends with, from one sum over the tokens of each piece."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from te_jax.ops.formats import ceil_div

CTAS = 132  # of a kernel: one for each multiprocessor of an H100
_CHANNELS = 64  # of a CTA


def pieces_of(rows: int, s: int, h: int, channels: int, kept: int, least: tuple[int, int]) -> int:
    """How many pieces each row of s tokens with h heads of so many channels is cut in; 1: it stays whole. Pieces have
    the same length, a multiple of `kept` tokens: by having more tokens than heads `joined` tells tokens from states.
    least: how many pieces there are at least, and how many tokens each has."""
    least_count, least_length = least
    most = min(CTAS // max(1, rows * h * ceil_div(channels, _CHANNELS)), s // least_length)
    return max((count for count in range(least_count, most + 1) if s % (count * kept) == 0), default=1)


def cut(a: jax.Array | None, count: int) -> jax.Array | None:
    """[rows, s, ...] -> [rows count, s / count, ...]. None stays."""
    return None if a is None else a.reshape(a.shape[0] * count, a.shape[1] // count, *a.shape[2:])


def joined(a: jax.Array, count: int, h: int, of_end: bool) -> jax.Array:
    """A result of pieces, of rows: [rows count, s / count, ...] -> [rows, s, ...], and of states [rows count, h, p, n]
    those of the last pieces, or the first. Sums over rows stay."""
    if a.ndim <= 2:
        return a
    if a.ndim == 4 and a.shape[1] == h:  # states that are kept have five axes, and as many of them may be as heads
        return a[count - 1 :: count] if of_end else a[::count]
    return a.reshape(a.shape[0] // count, a.shape[1] * count, *a.shape[2:])


def pieces_first(a: jax.Array, count: int) -> jax.Array:
    """[rows count, ...] -> [count, rows, ...]."""
    return jnp.moveaxis(a.reshape(-1, count, *a.shape[1:]), 1, 0)


def together(runs: jax.Array, count: int) -> jax.Array:
    """bool[count - 1, rows]: whether a piece and the next one are of one run where they meet, by i32[rows count, l]."""
    return pieces_first(runs[:, -1], count)[:-1] == pieces_first(runs[:, 0], count)[1:]


def kept_by_pieces(states: jax.Array, count: int, runs: jax.Array | None) -> jax.Array:
    """f32[k, m, h, ...], states that rows kept; 0 where a run begins with a piece: that state is another run's."""
    if runs is None:
        return states
    edge = jnp.pad(together(runs, count), [(1, 0), (0, 0)], constant_values=True)  # a row's first state is as given
    goes_on = jnp.moveaxis(edge, 0, 1).reshape(-1, 1, 1, 1)
    return states.at[:, 0].set(jnp.where(goes_on, states[:, 0], 0))


class Pieces(NamedTuple):
    """What is left of states: k pieces of l tokens, `count` of them in each row."""

    count: int
    logs: jax.Array  # f32[k, l, h], of how much of a state a token leaves
    runs: jax.Array | None  # i32[k, l]

    def begin(self, x: jax.Array, steps: jax.Array, B: jax.Array, initial: jax.Array | None) -> jax.Array:
        """f32[k, h, p, n], the states that pieces begin with. x [k, l, h, p], steps f32[k, l, h], B [k, l, g, n],
        initial f32[rows, h, p, n] or None."""
        later = jnp.pad(self.logs[:, 1:], [(0, 0), (0, 1), (0, 0)])
        until = jnp.cumsum(later[:, ::-1], 1)[:, ::-1]  # from a token to the end
        ends = self._sums(x, steps * jnp.exp(until), B, self._is_of(-1))
        return self._passed(ends, initial, reverse=False)

    def end(self, dy: jax.Array, C: jax.Array, dfinal: jax.Array | None) -> jax.Array:
        """f32[k, h, p, n], the gradients to the states that pieces end with. dy [k, l, h, p], C [k, l, g, n], dfinal
        f32[rows, h, p, n] or None."""
        begins = self._sums(dy, jnp.exp(jnp.cumsum(self.logs, 1)), C, self._is_of(0))
        return self._passed(begins, dfinal, reverse=True)

    def _is_of(self, token):
        return None if self.runs is None else self.runs == self.runs[:, token, None]

    def _sums(self, x, weights, B, counts):
        """Sums over tokens of weights x B', products on the tensor cores; of the tokens that count, for 0 times an inf
        would stay."""
        groups = B.shape[2]
        only = lambda a: a if counts is None else jnp.where(counts[:, :, None, None], a, 0)
        x = only((x * weights[..., None]).astype(x.dtype)).reshape(*x.shape[:2], groups, -1, x.shape[-1])
        sums = jnp.einsum("klgrp,klgn->kgrpn", x, only(B), preferred_element_type=jnp.float32)
        return sums.reshape(sums.shape[0], -1, *sums.shape[3:])

    def _passed(self, sums, first, reverse):
        """What each piece gets from those before it, or behind it: `sums`, and what they leave of what they got."""
        keeps, sums = pieces_first(jnp.exp(jnp.sum(self.logs, 1)), self.count), pieces_first(sums, self.count)
        is_whole = goes_on = jnp.ones(keeps.shape[:2], bool)
        if self.runs is not None:
            is_whole = pieces_first(self.runs[:, 0] == self.runs[:, -1], self.count)
            edge = (1, 0) if reverse else (0, 1)
            goes_on = jnp.pad(together(self.runs, self.count), [edge, (0, 0)], constant_values=True)
        of_state = lambda a: a[..., None, None, None]

        def body(state, piece):
            keep, sum_, whole, on = piece
            left = jnp.where(of_state(whole), state * keep[..., None, None], 0) + sum_
            return jnp.where(of_state(on), left, 0), state

        first = jnp.zeros_like(sums[0]) if first is None else first
        _, got = lax.scan(body, first, (keeps, sums, is_whole, goes_on), reverse=reverse)
        return jnp.moveaxis(got, 0, 1).reshape(-1, *sums.shape[2:])
