"""Which mesh axes split which axes of a call: shardings that are known -> shardings of all operands and results.

    rule       lhs: m k, rhs: n k -> out: m n, whose shards are added up (combine={"out": "sum"}), on a mesh (a=4, b=2)
    known      lhs P("a", "b"), rhs P(None, "b"); nothing is asked for out
    placement  {m: a, k: b}: lhs P("a", "b"), rhs P(None, "b"), out P("a"), summed over what it dropped, b
    asked      out P("a", "b"): n would go on b, but b splits the sum already. So the operands stay where they lie, and
               the sum is left scattered along n (a reduce-scatter, instead of gathered operands)

Nothing here is traced.
"""

from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from jax.sharding import PartitionSpec

from te_jax.core.rule import group_of


@dataclass(frozen=True)
class Placement:
    """One way to split a call over devices.

    ins, outs: the factors of each operand and result, one for each of its axes.
    axes:      {factor: mesh axes}, of operands, and of results where they are not scattered.
    scattered: {factor: mesh axes} of each result: its sum over these is left scattered along the factor.
    later:     operands that join the sum with all of the result's axes: they are added to the shard that is left of it.
    """

    ins: list[tuple[str, ...]]
    outs: list[tuple[str, ...]]
    axes: dict[str, tuple[str, ...]]
    scattered: list[dict[str, tuple[str, ...]]]
    later: frozenset[int]

    @property
    def in_specs(self) -> list[PartitionSpec]:
        """The PartitionSpecs of all operands."""
        left = next(filter(None, self.scattered), {})
        return [self._spec(factors, left if i in self.later else {}) for i, factors in enumerate(self.ins)]

    @property
    def out_specs(self) -> list[PartitionSpec]:
        """The PartitionSpecs of all results."""
        return list(map(self._spec, self.outs, self.scattered))

    def _spec(self, factors, more):
        return PartitionSpec(*(more.get(f, self.axes.get(f)) for f in factors))

    def dropped(self, factors: Any) -> tuple[str, ...]:
        """The mesh axes that split the call but not these factors; in one order, by which XLA packs collectives."""
        kept = {n for f in factors for n in self.axes.get(f, ())}
        return tuple(sorted({n for names in self.axes.values() for n in names} - kept))


def place(op: Any, rule: Any, ranks: Any, sizes: Any, devices: Any, in_specs: Any, out_specs: Any) -> Placement:
    """The placement of a call of `op` (an Op, or what has its fields `replicated`, `combine`, `once` and `apart`).

    rule, ranks, sizes: of this call. devices: {mesh axis: its devices}. in_specs, out_specs: what is known of operands
    and asked of results, a PartitionSpec each; out_specs may be None.
    """
    ins = [rule.leading(o, ranks) for o in rule.inputs]
    outs = [rule.leading(o, ranks) for o in rule.outputs]
    fixed, pieces = rule.matches(op.replicated, ranks), rule.pieces(sizes)

    def fits(factor, names):  # 2 groups, or 2 blocks, do not go on 4 devices
        return names and factor not in fixed and pieces[factor] % prod(devices[n] for n in names) == 0

    def fitting(factors, spec):
        return [(f, names) for f, names in zip(factors, map(mesh_axes, spec)) if fits(f, names)]

    placed = list(map(fitting, ins, in_specs))
    asked = list(map(fitting, outs, out_specs or [PartitionSpec()] * len(outs)))
    axes, scattered, apart = {}, [], rule.matches(op.apart, ranks)

    def take(factor, names):  # a mesh axis splits one factor, or one in each term of a sum
        others = {f for f, taken in axes.items() if set(taken) & set(names)}
        in_terms = {factor, *others} <= apart and group_of(factor) not in map(group_of, others)
        if factor not in axes and (not others or in_terms):
            axes[factor] = names

    for o, factors, wants in zip(rule.outputs, outs, asked):
        summed = _in_all(ins, placed, factors) if op.combine.get(o.name) == "sum" else {}
        over = set().union(*summed.values())
        scattered.append({f: names for f, names in wants if set(names) <= over})
        if scattered[-1]:  # the operands stay where they lie
            for pair in summed.items():
                take(*pair)
    taken = set().union(*scattered)
    for factor, names in (pair for known in (*asked, *placed) for pair in known):  # results choose first, then left
        if factor not in taken:
            take(factor, names)
    return Placement(ins, outs, axes, scattered, _later(op.once, rule.inputs, ins, outs, scattered))


def _later(once, operands, ins, outs, scattered) -> frozenset[int]:
    """See `Placement`. None, if the sum without them would lack an axis, as one that is mapped only for them."""
    of_sums = [out for left, out in zip(scattered, outs) if left]
    later = frozenset(i for i, o in enumerate(operands) if o.name in once and ins[i] in of_sums)
    summed = {f for i, factors in enumerate(ins) if i not in later for f in factors}
    return later if all(summed.issuperset(out) for out in of_sums) else frozenset()


def _in_all(ins, placed, factors) -> dict:
    """{factor: mesh axes} of what a result of `factors` lacks and all operands that have it are placed by."""
    each = [dict(known) for known in placed]
    lacking = dict.fromkeys(f for fs in ins for f in fs if f not in factors)
    alike = {f: [known.get(f) for fs, known in zip(ins, each) if f in fs] for f in lacking}
    return {f: names[0] for f, names in alike.items() if names[0] and all(n == names[0] for n in names)}


def mesh_axes(entry: Any) -> tuple[str, ...]:
    """One entry of a PartitionSpec as a tuple of mesh axes; none for one that is left to the partitioner."""
    if entry is None or entry is PartitionSpec.UNCONSTRAINED:
        return ()
    return entry if isinstance(entry, tuple) else (entry,)


def spec_of_sharding(mesh: Any, info: Any) -> PartitionSpec:
    """How the mesh axes split an operand or result; an axis of it that they split in another way is as if unsplit.

    The compiler may split an axis of a size that its shards do not divide. So the sharding is asked about an array
    that it divides in any case, and `place` takes what divides the real one.
    """
    if info.sharding is None or mesh.empty or not info.shape:
        return PartitionSpec()
    where = info.sharding.devices_indices_map((mesh.size,) * len(info.shape))
    slices = [where[device] for device in mesh.devices.flat]
    starts = [np.reshape([s[i].start or 0 for s in slices], mesh.devices.shape) for i in range(len(info.shape))]
    return PartitionSpec(*(_splitting_axes(mesh, each, mesh.size) for each in starts))


def _splitting_axes(mesh, starts, size):
    """The mesh axes, the outermost first, that split an axis of `size` whose shards begin at `starts`; else None."""
    steps = {}
    for at, name in enumerate(mesh.axis_names):
        second = [0] * starts.ndim
        second[at] = min(1, starts.shape[at] - 1)
        steps[name] = int(starts[tuple(second)])
    names = tuple(sorted((name for name, step in steps.items() if step), key=lambda name: -steps[name]))
    want, numbers = 0, np.indices(starts.shape)
    for name in names:
        size = size // mesh.shape[name]
        want = want + size * numbers[mesh.axis_names.index(name)]
    return names if names and np.array_equal(starts, want) else None
