"""What crosses devices in a compiled program: kind, type, bytes and mesh axes of every collective.

Read from the HLO right behind the partitioner (`xla_dump_hlo_pass_re`, a public compiler option), where types and kinds
are those that the program asks for; what the CPU backend makes of them afterwards does not matter. An all-reduce of
which only a slice is used counts as the reduce-scatter that XLA makes of it on a GPU; the CPU backend has no such pass.
"""

import collections
import itertools
import math
import pathlib
import re
import tempfile
import uuid
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import numpy as np

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast")
_PASS = "spmd-partitioning"
_BITS = {"pred": 8, "token": 0}
_LINE = re.compile(
    rf"= (?P<type>\(.*?\)|\S+) (?P<kind>{'|'.join(KINDS)})(?:-start)?\((?P<rest>.*)$"
)  # -done has no line of its own: it moves nothing
_ARRAY_TEXT = re.compile(r"(pred|token|[a-z]+\d\w*)\[([\d,]*)\]")


class Collective(NamedTuple):
    """kind: of KINDS. dtype: HLO's name, of the widest array. bytes: of the larger side, on one device. axes: the mesh
    axes whose devices take part, in the mesh's order. count: how many arrays it carries. channel: its number, which
    later passes keep. names: of the operation that it comes from, and of those that read its result, as jax names them.
    """

    kind: str
    dtype: str
    bytes: int
    axes: tuple[str, ...]
    count: int
    channel: int = 0
    names: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.kind} {self.dtype} {self.bytes} B over {'+'.join(self.axes) or '-'}"


def compiled(fn: Callable[..., Any], *args: Any, mesh: jax.sharding.Mesh) -> tuple[Any, list[Collective]]:
    """-> (the compiled program of `fn`, jitted or not, on `mesh`; its collectives). One within a loop counts once."""
    jitted = fn if hasattr(fn, "lower") else jax.jit(fn)
    with tempfile.TemporaryDirectory() as folder, jax.set_mesh(mesh):
        dump = {"xla_dump_to": folder, "xla_dump_hlo_pass_re": _PASS, "xla_dump_hlo_as_text": True}
        # jax's compilation cache knows a program by its options but for these: by this one, which names no emitter.
        dump["xla_dump_emitter_re"] = uuid.uuid4().hex
        program = jitted.lower(*args).compile(compiler_options=dump)
        found = sorted(pathlib.Path(folder).glob(f"*after_{_PASS}*"))
        if not found:
            names = sorted(path.name for path in pathlib.Path(folder).iterdir())
            raise RuntimeError(f"collectives: no HLO after {_PASS} among {names}")
        return program, parse(max((path.read_text() for path in found), key=len), mesh)


def parse(text: str, mesh: jax.sharding.Mesh) -> list[Collective]:
    """The collectives in the HLO `text`; those of one device are left out."""
    found, users, callers, within = [], _users(text), _callers(text), ""
    for line in text.splitlines():
        within = match[1] if (match := _COMPUTATION.search(line)) else within
        if match := _LINE.search(line):
            groups = _groups(match["kind"], line)
            if max(map(len, groups), default=1) > 1:
                names = tuple(_whole_name(name, within, callers) for name in _op_names(line, users))
                one = _collective(match, groups, mesh)._replace(names=names, channel=_channel(line))
                sliced = one.kind == "all-reduce" and _is_sliced(line, users, one.bytes // max(map(len, groups)))
                found.append(one._replace(kind="reduce-scatter") if sliced else one)
    return found


_COMPUTATION = re.compile(r"^(?:ENTRY )?(%[\w.-]+) \(.*\) -> .*\{$")


def _callers(text) -> dict[str, tuple[str, str]]:
    """{computation: (the computation that calls it, the name of the call)}."""
    callers, within = {}, ""
    for line in text.splitlines():
        within = match[1] if (match := _COMPUTATION.search(line)) else within
        for called in re.findall(r"(?:to_apply|calls|body|condition)=(%[\w.-]+)", line):
            callers.setdefault(called, (within, _op_name(line)))
    return callers


def _whole_name(name, within, callers) -> str:
    """A name as from the program on: behind the partitioner those inside a `shard_map` are as from its call on."""
    while not name.startswith("jit(") and within in callers:
        within, outer = callers[within]
        name = f"{outer}/{name}" if outer else name
    return name


def _channel(line) -> int:
    return int(match[1]) if (match := re.search(r"channel_id=(\d+)", line)) else 0


def _op_names(line, users) -> tuple[str, ...]:
    """Of the line, and of what reads its value, past operations that only move it."""
    names, name = [_op_name(line)], _DEFINED.search(line)[1]
    while len(users[name]) == 1 and users[name][0].operation in _MOVES:
        name = users[name][0].name
    names += [user.op_name for user in users[name]]
    return tuple(filter(None, names))


def _op_name(line) -> str:
    return match[1] if (match := re.search(r'op_name="(.*?)"', line)) else ""


_DEFINED = re.compile(r"^\s*(?:ROOT )?(%\S+) = (\(.*?\)|\S+) ([\w-]+)\((.*?)\)")
_MOVES = ("copy", "bitcast", "reshape", "transpose")


class _User(NamedTuple):
    """An operation that reads a value: the name of its own, its type, its kind, and as jax names it."""

    name: str
    type: str
    operation: str
    op_name: str


def _users(text) -> dict[str, list[_User]]:
    users = collections.defaultdict(list)
    for line in text.splitlines():
        if match := _DEFINED.search(line):
            *user, operands = match.groups()
            for operand in re.findall(r"%[\w.-]+", operands):
                users[operand].append(_User(*user, _op_name(line)))
    return users


def _is_sliced(line, users, size) -> bool:
    """Whether nothing but one slice of `size` bytes, a device's part, of the value of this line is used."""
    name = _DEFINED.search(line)[1]
    while len(users[name]) == 1 and users[name][0].operation in _MOVES:
        name = users[name][0].name
    slices = [user.type for user in users[name] if user.operation == "dynamic-slice"]
    return len(users[name]) == len(slices) == 1 and _array(*_ARRAY_TEXT.search(slices[0]).groups())[1] == size


def _collective(match, groups, mesh):
    results = [_array(*a) for a in _ARRAY_TEXT.findall(match["type"])]
    kind, size = match["kind"], max(map(len, groups))
    total = sum(b for _, b in results)
    if "-start(" in match[0] and kind == "all-gather":  # its result is (operand, gathered)
        total, results = results[-1][1], results[-1:]
    total = total * size if kind == "reduce-scatter" else total
    return Collective(kind, max(results, key=lambda a: a[1])[0], total, _axes(groups, mesh), len(results))


def _array(dtype, dims):
    bits = _BITS.get(dtype) or int(re.search(r"\d+", dtype)[0])
    return dtype, math.prod(map(int, filter(None, dims.split(",")))) * bits // 8


def _groups(kind, line):
    """The devices (partition numbers) that speak with each other."""
    if kind == "collective-permute":
        pairs = re.search(r"source_target_pairs=\{(.*?)\}\}", line)[1] + "}"
        return [tuple(map(int, re.findall(r"\d+", p))) for p in re.findall(r"\{([\d, ]+)\}", pairs)]
    text = re.search(r"replica_groups=(.*)", line)[1]
    if text.startswith("mesh["):
        return _groups_of_mesh(text)
    if text.startswith("["):
        return _groups_of_iota(text)
    inside = re.match(r"\{(\{[\d,]*\}(?:,\{[\d,]*\})*)?\}", text)
    return [tuple(map(int, re.findall(r"\d+", g))) for g in re.findall(r"\{([\d,]+)\}", inside[0])]


def _groups_of_iota(text):
    """`[4,2]<=[2,4]T(1,0)`: the numbers of [2, 4], transposed, as 4 groups of 2."""
    shape, base, order = re.match(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text).groups()
    ints = lambda s: tuple(map(int, s.split(",")))
    ids = np.arange(math.prod(ints(base))).reshape(ints(base))
    ids = ids.transpose(ints(order)) if order else ids
    return [tuple(row) for row in ids.reshape(ints(shape)).tolist()]


def _groups_of_mesh(text):
    """`mesh['a'=4,'b'=2], device_ids=([8]) {'a'}`: over the axes in braces; `'a':(1)2` is a part of one."""
    head, names = re.match(r"mesh\[(.*?)\](.*?\{.*?\})", text).groups()
    sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", head)}
    ids = np.arange(math.prod(sizes.values()))
    if iota := re.search(r"device_ids=\(?\[([\d,]+)\](?:T\(([\d,]+)\))?", names):
        base = tuple(map(int, iota[1].split(",")))
        ids = ids.reshape(base)
        ids = ids.transpose(tuple(map(int, iota[2].split(",")))) if iota[2] else ids
    dims, pieces = [], []  # every axis in up to three parts: before, of, behind the sub-axis
    used = re.findall(r"'(\w+)'(?::\((\d+)\)(\d+))?", re.search(r"\{(.*?)\}", names)[1])
    parts = {name: (int(pre or 1), int(size or sizes[name])) for name, pre, size in used}
    for name, size in sizes.items():
        pre, part = parts.get(name, (1, 1))
        dims += [pre, part, size // (pre * part)]
        pieces += [False, name in parts, False]
    ids = ids.reshape(dims)
    moved = [i for i, p in enumerate(pieces) if not p] + [i for i, p in enumerate(pieces) if p]
    return [tuple(g) for g in ids.transpose(moved).reshape(-1, math.prod(p for _, p in parts.values())).tolist()]


def _axes(groups, mesh) -> tuple[str, ...]:
    """The mesh axes along which members of a group differ. Partition numbers follow the mesh's order."""
    shape = tuple(mesh.shape.values())
    moved = set()
    for group in groups:
        at = [np.unravel_index(i, shape) for i in group]
        for a, b in itertools.pairwise(at):
            moved |= {axis for axis, i, j in zip(mesh.axis_names, a, b) if i != j}
    return tuple(axis for axis in mesh.axis_names if axis in moved)


def table(found: Iterable[Collective], least: int = 0) -> dict[tuple[str, str, str], tuple[int, int]]:
    """{(kind, dtype, axes joined by "+"): (how many, bytes on one device)} of those above `least` bytes."""
    out = {}
    for c in found:
        if c.bytes > least:
            key = (c.kind, c.dtype, "+".join(c.axes))
            n, total = out.get(key, (0, 0))
            out[key] = (n + 1, total + c.bytes)
    return out
