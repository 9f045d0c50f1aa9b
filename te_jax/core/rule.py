"""Axis rules: one line that says what every axis of a kernel is.

    "x: m... n..., scale: -> data: m... n..., data_t?: n... m..., amax:"

Names left of `:` are operands, then come their axes. `h` is one axis, `m...` any number of axes (a group; plain
`...` is one too), `(g r)` one axis made of two (r is the inner one), `k/128` an axis with an entry for each block of
128 along `k`, of which the last may be cut. `name?` may be absent in a call.

    "logits: b... (g r) s t, bias?: ~b... ~(g r) s t -> y: b... (g r) s t, dbias?: =bias"

`~b...` may be 1, as jax broadcasts: of a group each axis by itself, of `(g r)` the whole. An axis that is 1 is then a
factor of its own, `b...0~`: the operand lacks `b...0`. A result with the axes `=bias` has the shape of operand `bias`.
An inner factor `r` that no operand tells is 1.

From this one line follow the checks, the result shapes, the vmap rule and the shardings.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

Axis = str | tuple[str, ...]  # "h", "m...", "k/128" or ("g", "r")


def is_group(axis: Axis) -> bool:
    """Whether `axis` stands for any number of axes."""
    return isinstance(axis, str) and axis.endswith("...")


def group_of(factor: str) -> str:
    """`"m...1"` -> `"m..."`."""
    return factor.partition("...")[0] + "..."


def block_of(axis: str) -> tuple[str, int]:
    """`"k/128"` -> ("k", 128); another axis has entries of its own: `"k"` -> ("k", 1)."""
    factor, _, size = axis.partition("/")
    return factor, int(size or 1)


def factors_of(axis: Axis) -> tuple[str, ...]:
    """The factors that an array axis is made of."""
    return axis if isinstance(axis, tuple) else (block_of(axis)[0],)


@dataclass(frozen=True)
class Operand:
    """One operand or result: its name, its axes, and whether a call may leave it out.

    broadcast: the axes that may be 1. ones: the factors (of a split axis the outer one) that are 1 so in this call.
    like:      the operand that a result has the axes of.
    """

    name: str
    axes: tuple[Axis, ...]
    optional: bool = False
    broadcast: frozenset[Axis] = frozenset()
    ones: frozenset[str] = frozenset()
    like: str = ""

    @classmethod
    def parse(cls, text: str) -> "Operand":
        """`"data_t?: n... m..."` -> Operand."""
        name, axes = map(str.strip, text.split(":"))
        like = axes.removeprefix("=") if axes.startswith("=") else ""
        words = [] if like else re.findall(r"~?\([^)]*\)|[^\s()]+", axes)
        bare = [w.lstrip("~") for w in words]
        out = [tuple(w.strip("()").split()) if w.startswith("(") else w for w in bare]
        broadcast = frozenset(a for a, w in zip(out, words) if w.startswith("~"))
        return cls(name.rstrip("?"), tuple(out), name.endswith("?"), broadcast, like=like)

    def __str__(self) -> str:
        words = (a if isinstance(a, str) else "(" + " ".join(a) + ")" for a in self.axes)
        marked = ("~" * (a in self.broadcast) + word for a, word in zip(self.axes, words))
        return f"{self.name}[{' '.join(marked)}]"

    def has(self, group: str) -> bool:
        """Whether `group` is among the axes, and none of it is broadcast in this call."""
        return group in self.axes and not any(f.startswith(group) for f in self.ones)


@dataclass(frozen=True)
class Rule:
    """The operands and results of an op, and what follows from their axes."""

    inputs: tuple[Operand, ...]
    outputs: tuple[Operand, ...]

    @classmethod
    def parse(cls, text: str) -> "Rule":
        """`"x: m k, w: n k -> y: m n"` -> Rule."""
        inputs, outputs = (tuple(map(Operand.parse, side.split(","))) for side in text.split("->"))
        named = {o.name: o for o in inputs}
        same = lambda o: replace(o, axes=named[o.like].axes, broadcast=named[o.like].broadcast) if o.like else o
        return cls(inputs, tuple(map(same, outputs)))

    def select(self, inputs: Collection[str], outputs: Collection[str]) -> "Rule":
        """The rule of a call with just these operands and results (by name)."""
        return Rule(
            tuple(o for o in self.inputs if o.name in inputs), tuple(o for o in self.outputs if o.name in outputs)
        )

    def mapped(self, levels: Sequence[Collection[str]]) -> "Rule":
        """The rule of a call for each entry of mapped axes, which come first: `levels` names the operands that have
        each, the outermost first; all results have all. The axes are `#0`, `#1`, ..."""

        def lead(operand, has):
            axes = (f"#{i}" for i, names in enumerate(levels) if has(names))
            return replace(operand, axes=(*axes, *operand.axes))

        return Rule(
            tuple(lead(o, lambda names, o=o: o.name in names) for o in self.inputs),
            tuple(lead(o, lambda names: True) for o in self.outputs),
        )

    @property
    def operands(self) -> tuple[Operand, ...]:
        """Inputs, then outputs."""
        return (*self.inputs, *self.outputs)

    @property
    def groups(self) -> tuple[str, ...]:
        """Names of the axis groups, in order of appearance."""
        return tuple(dict.fromkeys(a for o in self.operands for a in o.axes if is_group(a)))

    def ranks(self, op: str, ndims: Iterable[int], known: Mapping[str, int]) -> dict[str, int]:
        """Solves every group for its number of axes, from the operands' ranks and the `known` groups.

        Raises ValueError where an operand has too few or too many axes.
        """
        ranks, pending = dict(known), list(zip(self.inputs, ndims, strict=True))
        while pending:
            later = []
            for operand, ndim in pending:
                unknown = [a for a in operand.axes if is_group(a) and a not in ranks]
                if len(unknown) > 1:
                    later.append((operand, ndim))
                    continue
                fixed = sum(ranks.get(a, 0) if is_group(a) else 1 for a in operand.axes)
                if ndim < fixed or (ndim > fixed and not unknown):
                    least = "at least " if unknown else ""
                    raise ValueError(f"{op}: {operand} has {ndim} axes, needs {least}{fixed}.")
                if unknown:
                    ranks[unknown[0]] = ndim - fixed
            if len(later) == len(pending):
                raise ValueError(f"{op}: {later[0][0]} leaves the rank of its axis groups open; pass one of them.")
            pending = later
        return ranks

    def broadcast(self, shapes: Iterable[Sequence[int]], ranks: Mapping[str, int]) -> "Rule":
        """The rule of a call with operands of these shapes, which says where they are broadcast: `Operand.ones`."""

        def ones(operand, shape):
            may = [a in operand.broadcast for a in operand.axes for _ in _array_axes(a, ranks)]
            each = zip(self.leading(operand, ranks), shape, may, strict=True)
            return frozenset(factor for factor, size, is_marked in each if is_marked and size == 1)

        found = {o.name: ones(o, shape) for o, shape in zip(self.inputs, shapes, strict=True) if o.broadcast}
        of = lambda o, name: replace(o, ones=found.get(name, o.ones))
        return Rule(tuple(of(o, o.name) for o in self.inputs), tuple(of(o, o.like) for o in self.outputs))

    def expand(self, operand: Operand, ranks: Mapping[str, int]) -> tuple[Axis, ...]:
        """The axes of `operand`, one entry per array axis: `m...` becomes `m...0 m...1`, or `m...0~` if that is 1."""
        axes = (a for axis in operand.axes for a in _array_axes(axis, ranks))
        return tuple(f"{factors_of(a)[0]}~" if factors_of(a)[0] in operand.ones else a for a in axes)

    def sizes(
        self,
        op: str,
        shapes: Iterable[Sequence[int]],
        ranks: Mapping[str, int],
        filled: bool = False,
        known: Mapping[str, int] | None = None,
    ) -> dict[str, int]:
        """Solves every axis name for its size. Raises ValueError naming both operands on a clash.

        filled: axes in blocks may have more entries, with which the lowering filled them up for its kernel.
        known:  sizes that the call's attributes say.
        """
        sizes = dict(known or {})
        seen = dict.fromkeys(sizes, "the attributes")

        def bind(factor, size, operand):
            if sizes.setdefault(factor, size) != size:
                where = f"axis `{factor}` is {size} in {operand}, but {sizes[factor]} in {seen[factor]}"
                raise ValueError(f"{op}: {where}; make both equal.")
            seen.setdefault(factor, str(operand))

        splits, blocked = [], []
        for operand, shape in zip(self.inputs, shapes, strict=True):
            for axis, size in zip(self.expand(operand, ranks), shape, strict=True):
                if isinstance(axis, tuple):
                    splits.append((axis, size, operand))
                elif block_of(axis)[1] > 1:
                    blocked.append((axis, size, operand))
                else:
                    bind(axis, size, operand)
        for axis, size, operand in splits:
            unknown = [f for f in axis if f not in sizes]
            rest = prod(sizes[f] for f in axis if f in sizes)
            if len(unknown) > 1 or (size % rest if rest else size):
                known_sizes = ", ".join(f"{f} = {sizes[f]}" for f in axis if f in sizes)
                raise ValueError(f"{op}: {operand} has an axis of {size}, which {known_sizes} does not divide.")
            for f in unknown:
                bind(f, size // rest if rest else 0, operand)
            if prod(sizes[f] for f in axis) != size:
                raise ValueError(f"{op}: {operand} has an axis of {size}, but {axis} is {[sizes[f] for f in axis]}.")
        for axis in (a for o in self.outputs for a in o.axes if isinstance(a, tuple)):
            sizes |= {f: 1 for f in axis[1:] if f not in sizes}
        for axis, size, operand in blocked:
            if size < _entries(axis, sizes) or (size > _entries(axis, sizes) and not filled):
                factor, block = block_of(axis)
                where = f"axis `{factor}` is {sizes[factor]}: {_entries(axis, sizes)} blocks of {block}"
                raise ValueError(f"{op}: {where}, but {operand} has {size}; pass a scale for each block.")
        return sizes

    def shape(self, operand: Operand, ranks: Mapping[str, int], sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The shape of `operand` under solved ranks and sizes."""
        return tuple(_entries(a, sizes) for a in self.expand(operand, ranks))

    def leading(self, operand: Operand, ranks: Mapping[str, int]) -> tuple[str, ...]:
        """One factor per array axis; a split axis counts as its outer factor (the one that can be sharded)."""
        return tuple(factors_of(a)[0] for a in self.expand(operand, ranks))

    @property
    def blocks(self) -> dict[str, int]:
        """{factor: size of a block} of the axes that some operand has in blocks."""
        axes = (a for o in self.operands for a in o.axes if isinstance(a, str))
        return {factor: size for factor, size in map(block_of, axes) if size > 1}

    def pieces(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """Into how many pieces a mesh may split each factor: of whole blocks, and none where the last block is cut."""
        whole = {f: sizes[f] // size if sizes[f] % size == 0 else 1 for f, size in self.blocks.items()}
        return {**sizes, **whole}

    def matches(self, names: Collection[str], ranks: Mapping[str, int]) -> frozenset[str]:
        """The factors that `names` (axes or groups of the rule) stand for."""
        found = {f for o in self.operands for a in self.expand(o, ranks) for f in factors_of(a)}
        return frozenset(f for f in found if f in names or ("..." in f and group_of(f) in names))

    def shardy(
        self, ranks: Mapping[str, int], sizes: Mapping[str, int], replicated: Collection[str]
    ) -> tuple[str, dict[str, int], tuple[str, ...]]:
        """The rule as Shardy reads it; by Shardy's names, the sizes of the factors only found inside split axes, and
        the factors that stay on one device, in order of appearance: the factors of `replicated`, and what `pieces`
        leaves whole.

        An axis in blocks is split into `k/128` and `k%128`; one left whole has no factor in common with its blocks.
        """
        pieces, inner_sizes = self.pieces(sizes), dict(sizes)

        def as_shardy(axis):  # Shardy refuses a factor of size 1 next to others in one axis
            if axis in self.blocks and pieces[axis] > 1:
                size = self.blocks[axis]
                inner_sizes[f"{axis}%{size}"] = size
                return f"{axis}/{size}", f"{axis}%{size}"
            kept = tuple(f for f in axis if sizes[f] != 1) or axis[:1] if isinstance(axis, tuple) else axis
            return kept[0] if isinstance(kept, tuple) and len(kept) == 1 else kept

        axes = [as_shardy(a) for o in self.operands for a in self.expand(o, ranks)]
        names = {f: f"f{i}" for i, f in enumerate(dict.fromkeys(f for a in axes for f in _together(a)))}

        def text(operand):
            words = (
                "(" + " ".join(names[f] for f in a) + ")" if isinstance(a, tuple) else names[a]
                for a in map(as_shardy, self.expand(operand, ranks))
            )
            return " ".join(words)

        whole = {a for a in axes if isinstance(a, str)}
        cut = {f for f in self.blocks if pieces[f] < 2}
        fixed = self.matches(replicated, ranks) | cut
        fixed |= {f"{f}{sign}{size}" for f, size in self.blocks.items() if f in fixed for sign in "/%"}
        rule = " -> ".join(", ".join(map(text, side)) for side in (self.inputs, self.outputs))
        inner = {names[f]: inner_sizes[f] for f in names if f not in whole}
        return rule, inner, tuple(names[f] for f in names if f in fixed)


def _array_axes(axis: Axis, ranks) -> list[Axis]:
    """What `axis` stands for, one entry per array axis."""
    return [f"{axis}{i}" for i in range(ranks[axis])] if is_group(axis) else [axis]


def _together(axis: Axis) -> tuple[str, ...]:
    return axis if isinstance(axis, tuple) else (axis,)


def _entries(axis: Axis, sizes) -> int:
    """The size of an array axis."""
    if isinstance(axis, tuple):
        return prod(sizes[f] for f in axis)
    factor, block = block_of(axis)
    return -(-sizes[factor] // block)
