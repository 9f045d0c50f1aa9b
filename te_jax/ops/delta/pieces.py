"""Long rows of few heads in pieces, which the kernels take as rows of their own, at the same time. A piece's tokens
change the state before them linearly, by a matrix: it is the state behind them where all values are 0 and the state
before them is the identity. The states that pieces begin with follow from these matrices and a walk from states of 0;
the gradients to the states that pieces end with from the matrices and a walk back from gradients of 0."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from te_jax.ops.ssm.pieces import pieces_first, together


class WalkedPieces(NamedTuple):
    """k pieces of l tokens, `count` of them in each row."""

    count: int
    walk: Callable[..., jax.Array]  # values [k, l, h, e], a state f32[k, h, d, e] or None -> that behind the tokens
    zeros: jax.Array  # [k, l, h, d], as values
    runs: jax.Array | None  # i32[k, l]

    def begin(self, v: jax.Array, initial: jax.Array | None) -> jax.Array:
        """f32[k, h, d, e], the states that pieces begin with. v [k, l, h, e], initial f32[rows, h, d, e] or None."""
        return self._passed(self.walk(v, None), self._left(), initial, reverse=False)

    def end(self, of_begins: jax.Array, dfinal: jax.Array | None) -> jax.Array:
        """f32[k, h, d, e], the gradients to the states that pieces end with. of_begins: those to the states that pieces
        begin with, where the gradients to the states behind pieces are 0; dfinal f32[rows, h, d, e] or None."""
        return self._passed(of_begins, jnp.matrix_transpose(self._left()), dfinal, reverse=True)

    def _left(self):
        """f32[k, h, d, d], what tokens leave of each channel of a state before them."""
        k, _, h, d = self.zeros.shape
        return self.walk(self.zeros, jnp.broadcast_to(jnp.eye(d, dtype=jnp.float32), (k, h, d, d)))

    def _passed(self, found, left, first, reverse):
        """What each piece gets from those before it, or behind it: `found`, and what they leave of what they got. The
        scan doubles its steps, with products of all pieces at the same time."""
        order = slice(None, None, -1 if reverse else None)
        found, left = (pieces_first(a, self.count)[order][:-1] for a in (found, left))
        if self.runs is not None:
            of_states = lambda a: a[order][..., None, None, None]
            meets = of_states(together(self.runs, self.count))
            is_whole = of_states(pieces_first(self.runs[:, 0] == self.runs[:, -1], self.count))[:-1]
            found, left = jnp.where(meets, found, 0), jnp.where(meets & is_whole, left, 0)  # else NaN of another run
        first = jnp.zeros_like(found[:1]) if first is None else first[None]
        got, left = jnp.concatenate([first, found]), jnp.concatenate([jnp.zeros_like(left[:1]), left])
        step = 1
        while step < self.count:
            both = of_two_spans(got[step:], left[step:], got[:-step], left[:-step])
            got, left = (a.at[step:].set(of_both) for a, of_both in zip((got, left), both))
            step *= 2
        return jnp.moveaxis(got[order], 0, 1).reshape(-1, *found.shape[2:])


def of_two_spans(state: jax.Array, left: jax.Array, earlier: jax.Array, kept: jax.Array) -> tuple[jax.Array, jax.Array]:
    """What two spans of tokens make of states, one after the other: f32[..., d, e], the state behind both, and
    f32[..., d, d], what both leave of each channel of a state before them. state, left: of the later span, whose state
    before it is 0; earlier, kept: of the span ahead of it."""
    sees = jnp.any(left != 0, (-2, -1), keepdims=True)  # else 0 times an inf
    product = lambda a: jnp.einsum("...ij,...jk->...ik", left, jnp.where(sees, a, 0), precision=lax.Precision.HIGHEST)
    return product(earlier) + state, product(kept)
