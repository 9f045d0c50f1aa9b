"""Calls of the C interface as the FFI's calls of the same ops have their arrays: right ones, and wrong ones."""

import ctypes
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
from ffi_calls import ANY_SIZE, CALLS, Call, recorded

from te_jax.c_api import Library
from te_jax.core.op import ops

TYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "float8_e4m3fn": "E4M3", "float8_e5m2": "E5M2",
         "int32": "I32"}  # fmt: skip
ALIGNED = 256  # bytes, of a workspace
_ANY = 1 << 62
INCLUDE = Path(__file__).resolve().parents[2] / "csrc/include"
OPS = tuple(re.findall(r"^TE_JAX_OP\((\w+)\);", (INCLUDE / "te_jax.h").read_text(), re.MULTILINE))
# Attributes of products that have one value in C: neither buffers side by side nor entries of one.
ONE_VALUE = {"outer", "slots", "slot", "entry"}
CASES = [case for case in CALLS if case.op.removeprefix("te_") in OPS and not case.attrs.get("slots")]


def is_there(like) -> bool:
    return like.shape != (0,)


def results(call: Call) -> dict:
    """The results of an FFI call that are there, those that the C interface has in its workspace left out."""
    return {name: like for name, like in call.results.items() if is_there(like) and name not in _inside(call)}


def _inside(call: Call) -> set:
    return {"workspace", *(f"{name}_partials" for name in ops[call.target].partials)}


def workspace_bytes(call: Call) -> int:
    """What the C interface needs for the FFI call's partial results and its workspace."""
    inside = [like for name, like in call.results.items() if name in _inside(call)]
    bytes_of = lambda like: math.prod(like.shape) * jnp.dtype(like.dtype).itemsize if is_there(like) else 0
    return sum(-(-bytes_of(like) // ALIGNED) * ALIGNED for like in inside)


def arguments(lib: Library, call: Call, pointer: Callable[[str], int]) -> tuple[str, dict]:
    """The op's name and fields for an FFI call; pointer: the name of an array -> its memory."""
    op = call.target.removeprefix("te_")
    given = {name: like for name, like in call.operands.items() if is_there(like)} | results(call)
    arrays = {n: lib.array(pointer(n), TYPES[jnp.dtype(a.dtype).name], a.shape) for n, a in given.items()}
    attrs = {name: value for name, value in call.attrs.items() if name in lib.fields(op)}
    assert set(call.attrs) - set(attrs) <= ONE_VALUE
    return op, arrays | attrs


class Memory(NamedTuple):
    """What wrong calls name, and none reads."""

    buffer: ctypes.Array

    @classmethod
    def new(cls) -> "Memory":
        return cls(ctypes.create_string_buffer(1 << 16))

    def __call__(self, name: str) -> int:
        return -(-ctypes.addressof(self.buffer) // ALIGNED) * ALIGNED


def _changed(array, **fields):
    new = type(array).from_buffer_copy(array)
    for name, value in fields.items():
        setattr(new, name, value)
    return new


def _with_shape(array, shape):
    rank = len(shape)
    return _changed(array, rank=rank, shape=(*shape, *[0] * (len(array.shape) - rank)))


def _wrong_arrays(array, is_optional: bool, any_size) -> Iterator[tuple[str, object]]:
    """any_size: the axes whose size the other arrays do not say; None: all, and their number."""
    shape = tuple(array.shape[: array.rank])
    yield "misaligned", _changed(array, data=array.data + 1)
    for number in (-1, 6, 99, 4 if array.type != 4 else 11):  # u8 has a number, but no array is of it
        yield f"type {number}", _changed(array, type=number)
    for rank in (-1, len(array.shape) + 1, 1 << 30):
        yield f"rank {rank}", _changed(array, rank=rank)
    if any_size is not None:
        yield "one axis more", _with_shape(array, (1, *shape))
    for axis in {0, len(shape) - 1} if shape else ():
        is_bound = any_size is not None and axis not in any_size
        for size in (shape[axis] // 2 or 2, -1, _ANY) if is_bound else (-1, _ANY):
            yield f"size{axis} {size}", _with_shape(array, (*shape[:axis], size, *shape[axis + 1 :]))
    if math.prod(shape):
        yield "null", _changed(array, data=None)
    if not is_optional:
        yield "absent", type(array)()
    yield "without a type", _changed(array, type=0)


_FAR = (1 << 63) - 1, -1 << 63  # what nothing may be added to, or taken from
_WRONG_NUMBERS = {
    "eps": (0.0, -1.0, math.nan, math.inf),
    "epsilon": (-1.0, math.nan, math.inf),
    **dict.fromkeys(("limit", "alpha", "glu_linear_offset"), (math.nan, math.inf, -math.inf)),
    "kind": (-1, 6, *_FAR),
    **dict.fromkeys(("split", "lead", "contract"), (-1, 9, *_FAR)),
}
FLAGS = {"square", "power_2", "rms", "zero_centered", "fast_accum", "tune"}  # of which any number is right


def wrong(lib: Library, op: str, args: dict, memory: Memory) -> Iterator[tuple[str, dict]]:
    """(what is wrong, the arguments), one thing at a time."""
    rule = ops[f"te_{op}"].rule
    optional = {o.name: o.optional for o in (*rule.inputs, *rule.outputs)}
    is_bound = (
        sum(name in optional and array.rank > 0 for name, array in args.items()) > 1
    )  # x has any size next to amax
    for name in lib.fields(op):
        if name in _WRONG_NUMBERS:
            yield from ((f"{name} {value}", args | {name: value}) for value in _WRONG_NUMBERS[name])
        elif name in optional and name not in args:
            yield f"{name} there", args | {name: lib.array(memory(name), "F32", (3, 5, 7))}
        elif name in optional:
            free = [axis for target, array, axis in ANY_SIZE if (target, array) == (f"te_{op}", name)]
            changed = _wrong_arrays(args[name], optional[name], free if is_bound else None)
            yield from ((f"{name} {what}", args | {name: a}) for what, a in changed)


def refusal(lib: Library, op: str, args: dict, workspace: int, size: int = 1 << 30) -> str:
    """ "" if the call is refused as it should be, else what came of it."""
    try:
        lib.call(op, None, workspace, size, **args)
    except ValueError as error:
        return "" if str(error).startswith(f"te_{op}: ") else f"said {error}"
    except (NotImplementedError, RuntimeError) as error:
        return f"passed: {error}"
    return "succeeded"


def survey(lib: Library, case) -> tuple[list[str], list[str]]:
    """Makes all wrong calls of a case -> the field of each that is wrong, and what came of those not refused."""
    call, memory = recorded(case), Memory.new()
    op, args = arguments(lib, call, memory)
    start, found = memory(""), []
    for what, given in wrong(lib, op, args, memory):
        found.append((what, refusal(lib, op, given, start)))
    if needed := lib.workspace(op, **args):
        places = dict(
            small=(start, needed - 1), negative=(start, -1), null=(0, needed), misaligned=(start + 16, needed)
        )
        found += ((f"workspace {what}", refusal(lib, op, args, *place)) for what, place in places.items())
    return [what.split()[0] for what, _ in found], [f"{case}: {what}: {error}" for what, error in found if error]
