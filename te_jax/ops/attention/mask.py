"""Which keys a query sees: mask types, windows, and the segments of packed or padded rows."""

from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from te_jax.core.arrays import as_rank, known_values
from te_jax.core.check import plain, show, warn_once


class MaskType(NamedTuple):
    """What a name of `attn_mask_type` means. A mask array or a SequenceDescriptor says which tokens are padding."""

    padding: bool
    causal: bool
    bottom_right: bool = False  # the last query is at the last key's position; else the first is at the first key's


MASK_TYPES = {
    "no_mask": MaskType(False, False),
    "padding": MaskType(True, False),
    "causal": MaskType(False, True),
    "causal_bottom_right": MaskType(False, True, True),
    "bottom_right_causal": MaskType(False, True, True),
    "padding_causal": MaskType(True, True),
    "causal_padding": MaskType(True, True),
    "padding_causal_bottom_right": MaskType(True, True, True),
    "causal_padding_bottom_right": MaskType(True, True, True),
    "bottom_right_causal_padding": MaskType(True, True, True),
    "bottom_right_padding_causal": MaskType(True, True, True),
}


def mask_type(name: str) -> MaskType:
    """What a name of MASK_TYPES, in any case, means."""
    return MASK_TYPES[plain(name)]


class Band(NamedTuple):
    """A query sees the keys from `left` before its position to `right` after it, ends included; None is open.

    The position of query i is i, or i + t - s with `bottom_right`.
    """

    left: int | None = None
    right: int | None = None
    bottom_right: bool = False

    @classmethod
    def of(cls, mask_type: MaskType, window: tuple[int, int] | None) -> "Band":
        """The band of the keys that the type and the window leave visible. A negative side of the window is open."""
        left, right = (None if size < 0 else size for size in window or (-1, -1))
        return cls(left, 0 if mask_type.causal else right, mask_type.bottom_right)

    def __and__(self, other: "Band") -> "Band":
        """The band of the keys that both leave visible. Raises ValueError where they count positions differently."""
        if self.is_open or other.is_open:
            return other if self.is_open else self
        if self.bottom_right != other.bottom_right:
            raise ValueError(f"Band: {self} and {other} count from different corners; trim one of them to s and t.")
        sides = zip(self[:2], other[:2])
        return Band(*(min((x for x in pair if x is not None), default=None) for pair in sides), self.bottom_right)

    @property
    def is_open(self) -> bool:
        """Whether every query sees every key."""
        return self.left is None and self.right is None

    def shift(self, s: int, t: int) -> int:
        """The position of query 0 among the keys."""
        return t - s if self.bottom_right else 0

    def trimmed(self, s: int, t: int) -> "Band":
        """This band for s queries and t keys, with a side open if it is known to hide no key: not of symbolic sizes."""
        shift = self.shift(s, t)
        reaches = lambda size, last: size is not None and isinstance(last, int) and size >= last
        left = None if reaches(self.left, s - 1 + shift) else self.left  # the last query still sees key 0
        right = None if reaches(self.right, t - 1 - shift) else self.right  # the first query still sees the last key
        return self._replace(left=left, right=right)

    def hides(self, distance: jax.Array) -> jax.Array | None:
        """True where distance, key position - query position, is outside of the band; None: nowhere."""
        below = None if self.left is None else distance < -self.left
        return either(below, None if self.right is None else distance > self.right)

    def top_left(self, s: int, t: int) -> "Band | None":
        """The band that counts from the top left and hides the same of s queries and t keys; None if there is none."""
        shift = self.shift(s, t)
        left, right = (None if size is None else size + by for size, by in ((self.left, -shift), (self.right, shift)))
        return None if min(left or 0, right or 0) < 0 else Band(left, right, False)


def either(*masks: jax.Array | None) -> jax.Array | None:
    """True where one of the masks is True; None stands for a mask that is False everywhere."""
    given = [m for m in masks if m is not None]
    ndim = max((m.ndim for m in given), default=0)
    return reduce(jnp.logical_or, (as_rank(m, ndim) for m in given)) if given else None


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class SequenceDescriptor:
    """The segments of each row of a batch: a token attends within its segment, and padding sees nothing.

    The `from_` functions make one. It is a pytree; every field is None or a pair (of queries, of keys). Lengths below 0
    count as 0, and what lies outside of a row is cut off. Where the values are known, a warning tells of both.
    """

    seqlens: tuple[jax.Array, jax.Array] | None = None  # i32[b] (one segment) or i32[b, n], tokens
    seq_offsets: tuple[jax.Array, jax.Array] | None = None  # i32[b, n + 1], first token of each segment; -1: unused
    segment_ids: tuple[jax.Array, jax.Array] | None = None  # i32[b, s], i32[b, t], from 1; 0: padding
    segment_pos: tuple[jax.Array, jax.Array] | None = None  # i32[b, s], i32[b, t], position in the segment

    @classmethod
    def from_seqlens(cls, seqlens: Any) -> "SequenceDescriptor":
        """One segment per row, then padding. seqlens: i32[b], or a pair of them (queries, keys)."""
        return cls(seqlens=_pair("seqlens", seqlens, least=0, below="it counts as 0: pass lengths from 0"))

    @classmethod
    def from_seqlens_and_offsets(cls, seqlens: Any, seq_offsets: Any) -> "SequenceDescriptor":
        """Segment j of a row is tokens offsets[j] .. offsets[j] + seqlens[j] - 1.

        seqlens: i32[b, n], seq_offsets: i32[b, n + 1] (i32[b, n] will do), or pairs of them; -1 where unused.
        """
        unused = dict(least=-1, below="its segment counts as unused: pass -1 for that")
        lens, offsets = _pair("seqlens", seqlens, **unused), _pair("seq_offsets", seq_offsets, **unused)
        for length, offset in zip(lens, offsets):
            if length.ndim < 1 or offset.ndim != length.ndim or offset.shape[-1] - length.shape[-1] not in (0, 1):
                raise ValueError(
                    f"SequenceDescriptor: seqlens has shape {length.shape}, seq_offsets {offset.shape}; "
                    "pass [b, n] and [b, n + 1]."
                )
        return cls(seqlens=lens, seq_offsets=offsets)

    @classmethod
    def from_segment_ids_and_pos(cls, segment_ids: Any, segment_pos: Any = None) -> "SequenceDescriptor":
        """segment_ids: i32[b, s], from 1, 0 is padding, or a pair of them.

        segment_pos: the same shapes; None counts from the start of each run of equal ids.
        """
        ids = _pair("segment_ids", segment_ids, least=0, below="it counts as a segment: pass 0 for padding")
        pos = tuple(map(_positions, ids)) if segment_pos is None else _pair("segment_pos", segment_pos)
        for i, p in zip(ids, pos):
            if i.shape != p.shape:
                raise ValueError(f"SequenceDescriptor: segment_ids has shape {i.shape}, segment_pos {p.shape}.")
        return cls(segment_ids=ids, segment_pos=pos)

    def of_runs(self, most: int) -> "SequenceDescriptor":
        """This descriptor with lengths and offsets instead of segment ids: kernels read them without an s x t mask.

        It means the same where each id of 1 .. `most` is one run of tokens at consecutive positions. Larger ids count
        as padding.
        """
        if self.segment_ids is None:
            return self
        numbers = jnp.arange(1, most + 1)[:, None]
        inside = tuple(ids[..., None, :] == as_rank(numbers, ids.ndim + 1) for ids in self.segment_ids)  # [b, n, s]
        lens = tuple(jnp.sum(x, -1, dtype=jnp.int32) for x in inside)
        starts = tuple(jnp.where(n > 0, jnp.argmax(x, -1), -1).astype(jnp.int32) for n, x in zip(lens, inside))
        return SequenceDescriptor(seqlens=lens, seq_offsets=starts)

    @property
    def starts_at_zero(self) -> bool:
        """Whether each row is one segment, from its first token on."""
        return self.segment_ids is None and self.seq_offsets is None

    @property
    def most_segments(self) -> int:
        """How many segments a row has at most; of lengths."""
        sizes = (1 if self.seq_offsets is None else x.shape[-1] for x in self.seqlens)
        return max(1, *sizes)  # without any segment: one that is not there

    def segments(self) -> jax.Array:
        """i32[b, n, 4]: each segment's first query, number of queries, first key and number of keys.

        A descriptor of segment ids has none of this.
        """
        lens, starts = self.seqlens, self.seq_offsets
        if starts is None:
            lens = tuple(x[..., None] for x in lens)
            starts = tuple(map(jnp.zeros_like, lens))
        n = self.most_segments
        fill = lambda x, value: jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, n - x.shape[-1])], constant_values=value)
        columns = [
            c for start, size in zip(starts, lens) for c in (fill(start[..., : size.shape[-1]], -1), fill(size, 0))
        ]
        return jnp.stack(columns, -1).astype(jnp.int32)

    def tokens(self, s: int, t: int) -> Any:
        """-> ((ids, pos) of the queries, (ids, pos) of the keys), i32[b, s] and i32[b, t]."""
        return tuple(self._tokens(side, size) for side, size in enumerate((s, t)))

    def _tokens(self, side: int, size: int):
        if self.segment_ids is not None:
            return self.segment_ids[side], self.segment_pos[side]
        index = jnp.arange(size)
        if self.seq_offsets is None:
            lens = self.seqlens[side][..., None]
            index = as_rank(index, lens.ndim)
            return (index < lens).astype(jnp.int32), jnp.broadcast_to(index, (*lens.shape[:-1], size))
        lens = self.seqlens[side][..., None]  # [b, n, 1]
        index = as_rank(index, lens.ndim)
        starts = self.seq_offsets[side][..., : lens.shape[-2], None]
        inside = (index >= starts) & (index < starts + lens) & (starts >= 0) & (lens > 0)  # [b, n, size]
        number = jnp.arange(1, lens.shape[-2] + 1)[:, None]
        pick = lambda values: jnp.max(jnp.where(inside, values, 0), axis=-2, initial=0)
        return pick(number), pick(index - starts)

    def check(self, op: str, batch: tuple[int, ...], s: int, t: int) -> None:
        """ValueError unless the arrays fit `s` queries and `t` keys in rows of shape `batch`."""
        arrays = self.seqlens if self.segment_ids is None else self.segment_ids
        for name, array, size in zip(("queries", "keys"), arrays, (s, t)):
            packed = self.seq_offsets is not None
            if packed and self.seq_offsets[name == "keys"].shape[:-1] != array.shape[:-1]:
                raise ValueError(
                    f"{op}: sequence_descriptor.seq_offsets of the {name} has shape "
                    f"{self.seq_offsets[name == 'keys'].shape}, seqlens {array.shape}; pass [b, n + 1] and [b, n]."
                )
            want = (*batch, size) if self.segment_ids is not None else batch
            lead = array.shape[:-1] if packed else array.shape
            if lead != want:
                field = "seqlens" if self.segment_ids is None else "segment_ids"
                raise ValueError(
                    f"{op}: sequence_descriptor.{field} of the {name} has shape {array.shape}, needs "
                    f"{(*want, 'n') if packed else want}; pass a pair where queries and keys differ."
                )
            if self.segment_ids is None:
                starts = self.seq_offsets[name == "keys"] if packed else None
                warn_of_lengths(op, f"sequence_descriptor.seqlens of the {name}", array, size, starts)

    def hides(self, band: Band, s: int, t: int) -> jax.Array:
        """bool[b, s, t], True for keys of other segments, for padding, and outside of `band`.

        Positions count within the segment; a bottom-right band ends where the segment's queries and keys end.
        """
        (q_ids, q_pos), (k_ids, k_pos) = self.tokens(s, t)
        same = (q_ids[..., :, None] == k_ids[..., None, :]) & (q_ids != 0)[..., None]
        distance = k_pos[..., None, :] - q_pos[..., :, None]
        return either(~same, band.hides(distance - self._shift(band, q_ids, same)))

    @staticmethod
    def _shift(band: Band, q_ids, same):
        if not band.bottom_right:
            return 0
        queries = jnp.sum(q_ids[..., :, None] == q_ids[..., None, :], -1)
        return (jnp.sum(same, -1) - queries)[..., None]


@dataclass(frozen=True)
class Mask:
    """Which keys a query sees: those that neither the band, nor the segments, nor the array hides.

    `a & b` hides what `a` hides and what `b` hides.

    band:     positions around a query's own, in its row or, with segments, within its segment.
    segments: a token sees the tokens of its own segment; None: each row is one segment.
    array:    bool or integer, [s, t] or [b..., h, s, t] with 1 where it broadcasts; True, 1 hide a key. None: no key.
    label:    what errors call the band.
    """

    band: Band = Band()
    segments: SequenceDescriptor | None = None
    array: jax.Array | None = None
    label: str = ""

    @classmethod
    def of_type(cls, attn_mask_type: str, window_size: tuple[int, int] | None = None) -> "Mask":
        """The mask of a name of MASK_TYPES, in any case, and a window."""
        label = f"attn_mask_type {attn_mask_type!r} with window_size {window_size}"
        return cls(Band.of(mask_type(attn_mask_type), window_size), label=label)

    def __and__(self, other: "Mask") -> "Mask":
        if self.segments is not None and other.segments is not None:
            raise ValueError("Mask: both masks have segments; give one of them as an array (`Mask(array=...)`).")
        array = other.array if self.array is None else self.array
        if self.array is not None and other.array is not None:
            array = either(self.hidden_by_array, other.hidden_by_array)
        label = " and ".join(each for each in (self.label, other.label) if each)
        return Mask(self.band & other.band, self.segments or other.segments, array, label)

    @property
    def hidden_by_array(self) -> jax.Array | None:
        """True where `array` hides a key; None without one."""
        return None if self.array is None else jnp.asarray(self.array) != 0

    @property
    def is_open(self) -> bool:
        """Whether every query sees every key, whatever values the arrays have."""
        return self.band.is_open and self.segments is None and self.array is None

    def hides(self, s: int, t: int) -> jax.Array | None:
        """True where a key is hidden, broadcastable to [b..., h, s, t]; None: every query sees every key."""
        if self.segments is not None:
            hidden = self.segments.hides(self.band, s, t)[..., None, :, :]
        else:
            distance = jnp.arange(t)[None] - jnp.arange(s)[:, None] - self.band.shift(s, t)
            hidden = self.band.trimmed(s, t).hides(distance)
        return either(hidden, self.hidden_by_array)

    def split(self, s: int, t: int, *, has_bias: bool, drops: bool) -> tuple[Band, SequenceDescriptor | None, "Mask"]:
        """This mask in the terms of cuDNN: (the attributes of the op, its operand `segments`, what becomes a bias).

        has_bias, drops: the call has a bias, or dropout; cuDNN then takes fewer masks.
        """
        array, described = self.array, self.segments
        by_lengths = described is None or (
            array is None and described.segment_ids is None and (not has_bias or described.starts_at_zero)
        )
        band = self._of_cudnn(s, t, has_bias=has_bias, drops=drops) if by_lengths else None
        return (Band(), None, self) if band is None else (band, described, Mask(array=array))

    def _of_cudnn(self, s: int, t: int, *, has_bias: bool, drops: bool) -> Band | None:
        """The band as cuDNN takes it with what else the call has; None if it does not."""
        band, plain = self.band, not has_bias and not drops  # its bottom-right bands are for plain calls
        if self.segments is None:
            band = band.trimmed(s, t)
            band = band._replace(bottom_right=band.bottom_right and s != t)
        elif band.bottom_right and s == 1:
            band = band._replace(right=None)  # the one query is at the last key
        band = band._replace(bottom_right=band.bottom_right and not band.is_open)
        if s == 1 and not band.is_open:
            return None  # with a causal mask cuDNN is wrong for one query and grouped heads (release notes of 9.18)
        if self.segments is not None:
            return band if plain or not band.bottom_right else None
        if plain and self.array is None:
            return band
        band = band.top_left(s, t)
        return None if band is None or (band.left is not None and has_bias and s > t) else band


def warn_of_lengths(op: str, what: str, lengths: Any, size: int, starts: Any = None) -> None:
    """Warns, once, where values are known, of segments beyond a row of `size` tokens. starts: of segments, else 0."""
    lengths, starts = known_values(lengths), 0 if starts is None else known_values(starts)
    if lengths is None or starts is None or not isinstance(size, int):
        return
    if (most := int(lengths.max(initial=0))) > size:
        warn_once(op, f"{what} has {most}, but a row has {size} tokens; it counts as {size}: pass lengths up to that.")
        return
    starts = starts if isinstance(starts, int) else starts[..., : lengths.shape[-1]]
    ends = np.where((starts >= 0) & (lengths > 0), starts + lengths, 0)
    if (end := int(ends.max(initial=0))) > size:
        warn_once(
            op, f"{what} has a segment up to token {end}, but a row has {size}, where it ends: pass those inside."
        )


def _pair(name: str, value, least: int | None = None, below: str = "") -> tuple[jax.Array, jax.Array]:
    """(of queries, of keys). `below` says what becomes of known values under `least`, and the way out."""
    pair = tuple(value) if isinstance(value, (tuple, list)) else (value, value)
    if len(pair) != 2:
        raise ValueError(f"SequenceDescriptor: {name} has {len(pair)} entries; pass one array, or (queries, keys).")
    for array in pair:
        if not hasattr(array, "dtype") or not jnp.issubdtype(array.dtype, jnp.integer):
            raise TypeError(
                f"SequenceDescriptor: {name} is {show(value)}; pass an integer array, or a pair (queries, keys)."
            )
        known = None if least is None else known_values(array)
        if known is not None and (lowest := int(known.min(initial=least))) < least:
            warn_once("SequenceDescriptor", f"{name} has {lowest}; {below}.")
    return pair


def _positions(ids: jax.Array) -> jax.Array:
    """Each token's distance from the first token of its run of equal ids."""
    index = jnp.broadcast_to(jnp.arange(ids.shape[-1]), ids.shape)
    before = jnp.concatenate([ids[..., :1] - 1, ids[..., :-1]], axis=-1)
    starts = jnp.where(ids != before, index, 0)
    return index - lax.cummax(starts, axis=ids.ndim - 1)
