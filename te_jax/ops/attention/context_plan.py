"""Which blocks of a long sequence's attention each device computes, when the sequence is cut along a mesh axis.

Pure Python on static numbers. A device of number r holds chunk r of the sequence, or, balanced, the chunks r and
2 cp - 1 - r of 2 cp: under a causal mask each device then has as much to do as any other (Grattafiori et al. 2024,
https://arxiv.org/abs/2407.21783, section 3.3.2).
"""

from typing import NamedTuple

from te_jax.ops.attention.mask import Band

OPEN = Band()


class Call(NamedTuple):
    """One call of the attention op: on a part of the device's queries, and a part of the keys that it has just now."""

    q: tuple[int, int]  # the first of the device's queries, how many
    k: tuple[int, int]
    band: Band  # on these queries and keys


Plan = tuple[Call, ...]  # of one device, at one step


class Layout(NamedTuple):
    """How a sequence of s queries and t keys lies on cp devices."""

    cp: int
    balanced: bool
    s: int
    t: int

    @property
    def chunks(self) -> int:
        """Of a device."""
        return 2 if self.balanced else 1

    def sizes(self) -> tuple[int, int]:
        """Of a chunk: queries, keys."""
        return self.s // (self.cp * self.chunks), self.t // (self.cp * self.chunks)

    def held(self, device):
        """The numbers of a device's chunks in the sequence; `device` may be traced."""
        return (device, 2 * self.cp - 1 - device) if self.balanced else (device,)

    def ring(self, band: Band, fuse: bool) -> list[tuple[int, list[Plan]]]:
        """(step, the plan of each device) of the steps at which a device sees any key. At step n a device has the keys
        of the one n before it."""
        steps = ((n, [self._pairs(r, (r - n) % self.cp, band, fuse) for r in range(self.cp)]) for n in range(self.cp))
        return [(n, plans) for n, plans in steps if any(plans)]

    def _pairs(self, mine: int, theirs: int, band: Band, fuse: bool) -> Plan:
        """Of the queries of one device and the keys of another."""
        q_size, k_size = self.sizes()
        if fuse and mine == theirs and band == (None, 0, False) and self.s == self.t:
            # Chunks in their order: the causal mask of the pair is that of its positions on the device.
            return (Call((0, self.chunks * q_size), (0, self.chunks * k_size), band),)
        shift, calls = band.shift(self.s, self.t), []
        for i, q_chunk in enumerate(self.held(mine)):
            for j, k_chunk in enumerate(self.held(theirs)):
                call = visible((q_chunk * q_size + shift, q_size), (k_chunk * k_size, k_size), band)
                calls += _moved(call, i * q_size, j * k_size)
        return _fused(calls) if fuse else tuple(calls)

    def gathered(self, band: Band, fuse: bool) -> list[Plan]:
        """The plan of each device that has all keys, in their order."""
        (q_size, _), shift = self.sizes(), band.shift(self.s, self.t)

        def plan(device):
            calls = []
            for i, chunk in enumerate(self.held(device)):
                call = visible((chunk * q_size + shift, q_size), (0, self.t), band)
                calls += _moved(call, i * q_size, 0)
            return _fused(calls) if fuse else tuple(calls)

        return [plan(device) for device in range(self.cp)]


def visible(queries: tuple[int, int], keys: tuple[int, int], band: Band) -> Call | None:
    """The call on those `queries` and `keys` (first position, how many) that see, or are seen; None if none do.

    Both count from the starts of `queries` and `keys`. A query at position i sees keys i - left .. i + right.
    """
    (q, n_q), (k, n_k) = queries, keys
    q_end, k_end, left, right = q + n_q, k + n_k, band.left, band.right
    first_q = q if right is None else max(q, k - right)
    end_q = q_end if left is None else min(q_end, k_end + left)
    first_k = k if left is None else max(k, first_q - left)
    end_k = k_end if right is None else min(k_end, end_q + right)
    if first_q >= end_q or first_k >= end_k:
        return None
    n_q, n_k, ahead = end_q - first_q, end_k - first_k, first_q - first_k
    left, right = (None if size is None else size + by for size, by in ((left, -ahead), (right, ahead)))
    cut = Band(left, right, False).trimmed(n_q, n_k)
    if cut.right is not None and cut.right == n_k - n_q:  # causal, as kernels know it best
        cut = Band(None if cut.left is None else cut.left + cut.right, 0, cut.right != 0)
    return Call((first_q - q, n_q), (first_k - k, n_k), cut)


def _moved(call: Call | None, q: int, k: int) -> list[Call]:
    return [] if call is None else [Call((call.q[0] + q, call.q[1]), (call.k[0] + k, call.k[1]), call.band)]


def _fused(calls: list[Call]) -> Plan:
    """Neighbours without a band as one: fewer calls, and fewer results to merge."""
    for side, other in (("k", "q"), ("q", "k")):
        joined: list[Call] = []
        for call in calls:
            last = joined[-1] if joined else None
            if last is not None and _are_neighbours(last, call, side, other):
                (start, size), (_, more) = getattr(last, side), getattr(call, side)
                joined[-1] = last._replace(**{side: (start, size + more)})
            else:
                joined.append(call)
        calls = joined
    return tuple(calls)


def _are_neighbours(one: Call, two: Call, side: str, other: str) -> bool:
    (start, size), (next_start, _) = getattr(one, side), getattr(two, side)
    return one.band == two.band == OPEN and getattr(one, other) == getattr(two, other) and next_start == start + size
