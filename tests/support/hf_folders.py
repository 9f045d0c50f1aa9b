"""The folders of tests/hf_fixtures, what is in a folder, and files of any content."""

import functools
import json
import pathlib
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from te_jax import hf
from te_jax.hf import checkpoints

CLASSES = (FileNotFoundError, FileExistsError, ValueError, TypeError)  # of errors of te_jax.hf
FIXTURES = pathlib.Path(__file__).parents[1] / "hf_fixtures"


def tensors(folder) -> dict[str, np.ndarray]:
    """All tensors of a folder; those in FP8 the package cannot read."""
    from safetensors.numpy import load_file

    return {name: a for path in sorted(folder.glob("*.safetensors")) for name, a in load_file(path).items()}


ITEMS = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1}


class Accepted(Exception):
    """Nothing was refused."""


class Held(NamedTuple):
    """A tensor of a file."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    def of(self, dtype: str, *shape: int) -> "Held":
        """Zeros of another type or shape."""
        return Held(dtype, shape, bytes(ITEMS[dtype] * int(np.prod(shape))))


@functools.cache
def content(path) -> bytes:
    return path.read_bytes()


def unpack(path) -> dict[str, Held]:
    data = content(path)
    size = int.from_bytes(data[:8], "little")
    held = {}
    for name, said in json.loads(data[8 : 8 + size]).items():
        if name != "__metadata__":
            first, last = said["data_offsets"]
            held[name] = Held(said["dtype"], tuple(said["shape"]), data[8 + size + first : 8 + size + last])
    return held


def pack(held: dict[str, Held]) -> bytes:
    header, at = {}, 0
    for name, (dtype, shape, data) in held.items():
        header[name] = dict(dtype=dtype, shape=shape, data_offsets=[at, at + len(data)])
        at += len(data)
    return with_header(json.dumps(header).encode(), b"".join(each.data for each in held.values()))


def with_header(header: bytes, data: bytes = b"") -> bytes:
    return len(header).to_bytes(8, "little") + header + data


_planned = functools.cache(checkpoints.plan_of)


def trace_once(monkeypatch):
    """Equal models are traced once from now on, and have the same forms of tensors: they are loaded by the same
    programs."""
    monkeypatch.setattr(checkpoints, "plan_of", _planned)


@functools.cache
def loaded(name):
    """The model and variables of a fixture, for all tests that only read them."""
    return hf.load(FIXTURES / name)


def load_nothing(monkeypatch):
    """And nothing is read into parameters: `load` raises Accepted instead."""
    trace_once(monkeypatch)

    def accepted(*args):
        raise Accepted

    monkeypatch.setattr(checkpoints, "fill_variables", accepted)


def outcome(call: Callable, *args) -> Exception:
    try:
        call(*args)
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def differences(before: dict, after: dict) -> set[str]:
    """The words that two config.json do not say alike."""
    return {name for name in {*before, *after} if before.get(name, ...) != after.get(name, ...)}
