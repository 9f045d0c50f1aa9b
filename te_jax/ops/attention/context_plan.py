"""Which blocks of a long sequence's attention each device computes, when the sequence is cut along a mesh axis.

This is pure Python on static numbers. Device r of cp holds chunk r of the sequence or, if the sequence is balanced,
the chunks r and 2 cp - 1 - r of 2 cp: under a causal mask each device then has as much to do as any other (Grattafiori
et al. 2024, https://arxiv.org/abs/2407.21783, section 3.3.2).
"""

from typing import Any, NamedTuple

from te_jax.ops.attention.mask import Band

OPEN = Band()


class Call(NamedTuple):
    """One call of the attention op: on a part of the device's queries, and a part of the keys that it has at a step."""

    q: tuple[int, int]  # (the first query, the number of queries), counted on the device
    k: tuple[int, int]  # (the first key, the number of keys)
    band: Band  # counted from these queries and keys


Plan = tuple[Call, ...]  # the calls of one device at one step


class Layout(NamedTuple):
    """How a sequence of s queries and t keys lies on cp devices."""

    cp: int
    balanced: bool
    s: int
    t: int

    @property
    def chunks(self) -> int:
        """The number of chunks on a device."""
        return 2 if self.balanced else 1

    def sizes(self) -> tuple[int, int]:
        """The (queries, keys) of a chunk."""
        return self.s // (self.cp * self.chunks), self.t // (self.cp * self.chunks)

    def held(self, device: Any) -> tuple[Any, ...]:
        """The numbers of a device's chunks in the sequence; `device` may be traced."""
        return (device, 2 * self.cp - 1 - device) if self.balanced else (device,)

    def ring(self, band: Band, fuse: bool) -> list[tuple[int, list[Plan]]]:
        """(n, the plan of each device) for each step n at which some device sees a key.

        At step n, device r has the keys of device r - n. fuse: join calls where that changes no result.
        """
        steps = ((n, [self._pairs(r, (r - n) % self.cp, band, fuse) for r in range(self.cp)]) for n in range(self.cp))
        return [(n, plans) for n, plans in steps if any(plans)]

    def _pairs(self, mine: int, theirs: int, band: Band, fuse: bool) -> Plan:
        """The plan for the queries of device `mine` and the keys of device `theirs`."""
        q_size, k_size = self.sizes()
        if fuse and mine == theirs and band == (None, 0, False) and self.s == self.t:
            # The chunks are in order, so the pair has the causal mask of the positions on the device.
            return (Call((0, self.chunks * q_size), (0, self.chunks * k_size), band),)
        shift, calls = band.shift(self.s, self.t), []
        for i, q_chunk in enumerate(self.held(mine)):
            for j, k_chunk in enumerate(self.held(theirs)):
                call = visible((q_chunk * q_size + shift, q_size), (k_chunk * k_size, k_size), band)
                calls += _shift_call(call, i * q_size, j * k_size)
        return _fuse(calls) if fuse else tuple(calls)

    def gathered(self, band: Band, fuse: bool) -> list[Plan]:
        """The plan of each device, where it has all keys, in the order of the sequence."""
        (q_size, _), shift = self.sizes(), band.shift(self.s, self.t)

        def plan(device):
            calls = []
            for i, chunk in enumerate(self.held(device)):
                call = visible((chunk * q_size + shift, q_size), (0, self.t), band)
                calls += _shift_call(call, i * q_size, 0)
            return _fuse(calls) if fuse else tuple(calls)

        return [plan(device) for device in range(self.cp)]


def visible(queries: tuple[int, int], keys: tuple[int, int], band: Band) -> Call | None:
    """The call on the part of `queries` that sees a key, and the part of `keys` that is seen; None if nothing is seen.

    queries, keys: (the first position, how many). The call counts from the starts of both. A query at position i sees
    the keys i - left .. i + right.
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
    if cut.right is not None and cut.right == n_k - n_q:  # a causal mask, which kernels serve best
        cut = Band(None if cut.left is None else cut.left + cut.right, 0, cut.right != 0)
    return Call((first_q - q, n_q), (first_k - k, n_k), cut)


def _shift_call(call: Call | None, q: int, k: int) -> list[Call]:
    """The call, counted from q queries and k keys earlier."""
    return [] if call is None else [Call((call.q[0] + q, call.q[1]), (call.k[0] + k, call.k[1]), call.band)]


def _fuse(calls: list[Call]) -> Plan:
    """The calls with neighbours joined that have no band: fewer calls, and fewer results to merge."""
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
    """Whether `two` continues `one` on `side`, with the same `other` side and no band."""
    (start, size), (next_start, _) = getattr(one, side), getattr(two, side)
    return one.band == two.band == OPEN and getattr(one, other) == getattr(two, other) and next_start == start + size
