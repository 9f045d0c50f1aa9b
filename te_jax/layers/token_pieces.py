"""Tokens in pieces under sequence parallelism: while one piece is multiplied, the next is gathered, or the sum of the
one before travels. `MeshResource.tpsp_pieces` turns it on.

A layer cuts what its products read, and joins what they write: quantizing, norms, activations, attention and wgrad see
all tokens at once. Where a GEMM adds up in one order for any number of rows, each number of a result has the bits that
it has in one product. Pieces are rows of the batch, as many as divide the rows that a device has, for they lie together
in memory: products read them where they are, and they cross as they are. What is left of their number is cut from each
device's part of the sequence.
"""

from collections.abc import Callable, Sequence
from math import gcd, prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.sharding import PartitionSpec

from te_jax.core.check import warn_once
from te_jax.core.placement import mesh_axes
from te_jax.core.types import on_explicit_mesh
from te_jax.sharding.constraints import entries, split_axis
from te_jax.sharding.resource import current_mesh_resource

Rows = tuple[jax.Array, jax.Array]  # data and inverse scales, as `Fp8Tensor.rows`
Piece = tuple[list[Rows], jax.Array | None]  # of the factors of products, and of what is added


class Turn(NamedTuple):
    """Where a product of a piece stands among those of all pieces."""

    entry: int  # of `entries` pieces
    entries: int
    into: tuple[jax.Array | None, ...]  # what the results are entries of; None: of new arrays


class AxisPieces(NamedTuple):
    """An axis in equal pieces: each device cuts its own part."""

    axis: int  # of B
    devices: int  # that divide this axis
    count: int  # of pieces

    def apply(self, a: jax.Array, before: int = 0) -> list[jax.Array]:
        """The pieces of a [..., *B, ...], with `before` axes in front of B."""
        at = before + self.axis
        if self.devices == 1:
            return jnp.split(a, self.count, at)
        whole = (*a.shape[:at], a.shape[at] // self.count, *a.shape[at + 1 :])
        a = a.reshape(*a.shape[:at], self.devices, self.count, -1, *a.shape[at + 1 :])
        return [jax.lax.index_in_dim(a, i, at + 1, keepdims=False).reshape(whole) for i in range(self.count)]

    def undo(self, pieces: Sequence[jax.Array]) -> jax.Array:
        """What was cut: [*B, ...]."""
        if self.devices == 1:
            return jnp.concatenate(pieces, self.axis)
        at, (first, *_) = self.axis, pieces
        apart = (*first.shape[:at], self.devices, -1, *first.shape[at + 1 :])
        whole = (*first.shape[:at], first.shape[at] * self.count, *first.shape[at + 1 :])
        return jnp.stack([piece.reshape(apart) for piece in pieces], at + 1).reshape(whole)


class TokenPieces(NamedTuple):
    """How the tokens [*B] of a dense layer are cut."""

    cuts: tuple[AxisPieces, ...]  # the outermost first
    crossing: int  # the axis of B that tensor parallelism splits outside of the products
    devices: int  # of tensor parallelism
    gathers: bool  # x's tokens are gathered for fprop; else y's sum is scattered
    spec: PartitionSpec | None  # of tokens outside of the products, under Auto mesh axes
    whole_mesh: bool  # no other mesh axis has devices, over which gradients of weights would be added up

    @classmethod
    def of(
        cls, x: ShapedArray, lead: int, result: PartitionSpec | None, tokens: PartitionSpec | None, gathers: bool
    ) -> "TokenPieces | None":
        """The pieces that the MeshResource in force asks for; None where it asks for none, where tokens don't cross
        tensor parallelism, and where its devices do not divide them.

        x: the type of the layer's input, `lead` axes in B. result: the sharding of its output on an Explicit mesh.
        tokens: under Auto axes that of x (`gathers`) or of y outside of the products, of which the first axes are B.
        """
        resource, mesh = current_mesh_resource(), jax.sharding.get_abstract_mesh()
        if resource is None or resource.tpsp_pieces == 1 or mesh.manual_axes:
            return None
        name, count = resource.tpsp_resource, resource.tpsp_pieces
        if mesh.shape.get(name, 1) == 1 or (result is None and tokens is None):
            return None
        if result is not None:
            before, after = entries(x)[:lead], tuple(map(mesh_axes, result))[:lead]
            gathers = any(name in names for names in before)
            lies, other = (before, after) if gathers else (after, before)
            if any(name in names for names in other):
                return None
        else:
            lies = tuple(map(mesh_axes, (*tokens, *[None] * lead)[:lead]))
        crossing = next((i for i, names in enumerate(lies) if names == (name,)), None)
        if crossing is None:
            return None
        if 0 in x.shape[:lead]:
            return None
        cuts, left = [], count
        for axis in (*(i for i in range(lead) if i != crossing), crossing):
            devices = prod(mesh.shape[each] for each in lies[axis])
            number = gcd(x.shape[axis] // devices, left)
            if x.shape[axis] % devices == 0 and number > 1:
                cuts.append(AxisPieces(axis, devices, number))
                left //= number
        if left > 1 or x.shape[crossing] % mesh.shape[name]:
            asked = f"tpsp_pieces is {count}, which tokens {tuple(x.shape[:lead])} of a dense layer are not divided by"
            way_out = "pass a number that divides rows of the batch, or what each device has of the sequence"
            warn_once("MeshResource", f"{asked}; they are multiplied at once: {way_out}.")
            return None
        devices, spec = mesh.shape[name], None if result is not None else tokens
        return cls(tuple(cuts), crossing, devices, gathers, spec, mesh.size == devices)

    def cut(self, a: jax.Array | None, before: int = 0) -> Sequence[jax.Array | None]:
        """The pieces of a [..., *B, ...], with `before` axes in front of B; of None, and of one number, itself."""
        if a is None or not a.ndim:
            return [a] * prod(cut.count for cut in self.cuts)
        pieces = [a]
        for cut in self.cuts:
            pieces = [part for piece in pieces for part in cut.apply(piece, before)]
        return pieces

    def join(self, pieces: Sequence[jax.Array]) -> jax.Array:
        """What was cut: [*B, ...]."""
        pieces = list(pieces)
        for cut in reversed(self.cuts):
            pieces = [cut.undo(pieces[i : i + cut.count]) for i in range(0, len(pieces), cut.count)]
        return pieces[0]

    @property
    def lie_together(self) -> bool:
        """Whether each piece is rows of the batch that lie together, so that products can write where they lie."""
        return len(self.cuts) == 1 and self.cuts[0].axis == 0 != self.crossing

    def whole(self, a: jax.Array) -> jax.Array:
        """What was cut, of its pieces, which `lie_together`: [pieces, *B of one, ...] -> [*B, ...]."""
        (cut,), rest = self.cuts, a.shape[2:]
        a = a.reshape(cut.count, cut.devices, -1, *rest)
        return jnp.moveaxis(a, 0, 1).reshape(-1, *rest)

    def multiply(
        self,
        product: Callable[..., tuple[jax.Array, ...]],
        rows: Sequence[Rows],
        added: jax.Array | None,
        others: Any,
        lead: int,
        gathers: bool,
        results: int = 0,
    ) -> tuple[tuple[jax.Array, ...], list[list[Rows]]]:
        """product((rows, added)) in pieces, each of its results [*B, ...] joined; and the pieces of each of the rows as
        they were read.

        rows: data [*B, ...] and scales, [..., *B] or one. added: [*B, ...] or None. others: arrays that all products
        read. lead: axes in B. gathers: the rows are gathered, as those of x in fprop; else the results are scattered.
        results: how many results product((rows, added), turn) writes as entries of arrays, in place; 0: it returns
        what the piece gives.
        """
        before = [max(scale_inv.ndim - lead, 0) for _, scale_inv in rows]  # axes of blocks
        cut = [list(zip(self.cut(data), self.cut(inverse, at))) for (data, inverse), at in zip(rows, before)]
        each = list(zip(map(list, zip(*cut)), self.cut(added)))

        def gather(piece):
            whole = [(self.gather(data), self.gather(inverse, at)) for (data, inverse), at in zip(piece[0], before)]
            return whole, piece[1]

        if gathers:
            joined, each = _in_turn(product, each, gather, others, results)
            joined = tuple(map(self.whole if results else self.join, joined))
        else:
            sums = [tuple(map(self.scatter, product(piece))) for piece in each]
            joined = tuple(map(self.join, zip(*sums)))
        return joined, [list(of_one) for of_one in zip(*(piece[0] for piece in each))]

    def gather(self, a: jax.Array | None, before: int = 0) -> jax.Array | None:
        """A piece [..., *B, ...] as products read it, all of its tokens on every device."""
        return a if a is None or not a.ndim else split_axis(a, before + self.crossing, ())

    def gather_columns(self, a: jax.Array, before: int) -> jax.Array:
        """A tensor [..., *B], with `before` axes in front of B, with all tokens on every device. It crosses as it lies:
        XLA would transpose it before, and for all layers of a scan at once."""
        at = before + self.crossing
        apart = a.reshape(*a.shape[:at], self.devices, -1, *a.shape[at + 1 :])
        whole = split_axis(jnp.moveaxis(apart, at, 0), 0, ())
        return jnp.moveaxis(whole, 0, at).reshape(a.shape)

    def scatter(self, a: jax.Array) -> jax.Array:
        """A piece [*B, ...] of a product's result as it lies outside. On an Explicit mesh the product was told."""
        if self.spec is None or on_explicit_mesh(jax.typeof(a)):
            return a
        free = [PartitionSpec.UNCONSTRAINED] * a.ndim
        lead = tuple(self.spec)[: self.crossing + 1]
        return jax.lax.with_sharding_constraint(a, PartitionSpec(*lead, *free[len(lead) :]))


def _in_turn(product, pieces: list[Piece], gather, others, results: int):
    """The results of the products, each a list of its pieces or an array of them, and the gathered pieces. A piece is
    gathered only when the product of the last but one is there, the second one when `others` are, which products read
    too: XLA starts collectives as soon as it can, and runs one at a time, so that the first product would wait for all
    but one, and what makes `others` for the first."""
    first, second, *_ = pieces
    second, _ = jax.lax.optimization_barrier((second, others))
    whole, of_pieces, into = [gather(first), gather(second)], [], (None,) * results or None
    for i in range(len(pieces)):
        y = product(whole[i], Turn(i, len(pieces), into) if into else None)
        if i + 1 < len(pieces):
            y, whole[i + 1], later = jax.lax.optimization_barrier((y, whole[i + 1], pieces[i + 2 : i + 3]))
            whole += map(gather, later)
        of_pieces.append(y)
        into = y if results else None
    return list(zip(*of_pieces)) if into is None else into, whole
