"""Safetensors files: one, or several with an index."""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

ONE, INDEX = "model.safetensors", "model.safetensors.index.json"
# The words of the format for dtypes that numpy, or ml_dtypes beside it, has.
DTYPES = {"F32": jnp.float32, "BF16": jnp.bfloat16, "F16": jnp.float16}
FP8 = "F8_E4M3"  # of weights that have scales in tensors of their own


def _library():
    try:
        import safetensors
        import safetensors.numpy
    except ImportError as error:
        raise ImportError("te_jax.hf needs safetensors: pip install safetensors.") from error
    return safetensors


class Stored(NamedTuple):
    """A tensor in a file."""

    path: Path
    shape: tuple[int, ...]
    dtype: str  # a word of the format


class Checkpoint:
    """The tensors of a folder by name. Use it in a `with` block; files are opened at first use, and mapped.

    Raises FileNotFoundError where there is no checkpoint, or an index names a file that is not there, and ValueError
    where a file lacks a tensor of the index.
    """

    def __init__(self, folder: Path):
        self._open, library = {}, _library()
        self._safe_open = library.safe_open
        where = self._files(folder)
        self.tensors: dict[str, Stored] = {}
        for path in sorted(set(where.values()) if where else {folder / ONE}):
            if not path.is_file():
                raise FileNotFoundError(f"te_jax.hf: there is no {path}; {folder} is no whole checkpoint.")
            held = self._handle(path)
            for name in held.keys():
                part = held.get_slice(name)
                self.tensors[name] = Stored(path, tuple(part.get_shape()), part.get_dtype())
        if lost := sorted(where.keys() - self.tensors.keys()):
            raise ValueError(f"te_jax.hf: {folder / INDEX} names {lost[0]}, which no file has ({len(lost)} in all).")

    def _files(self, folder: Path) -> dict[str, Path]:
        if not (folder / INDEX).is_file():
            return {}
        weights = json.loads((folder / INDEX).read_text())["weight_map"]
        return {name: folder / file for name, file in weights.items()}

    def _handle(self, path: Path):
        if path not in self._open:
            self._open[path] = self._safe_open(path, framework="numpy")
        return self._open[path]

    def read(self, name: str) -> np.ndarray:
        """The tensor, copied into memory."""
        stored = self.tensors[name]
        if stored.dtype == FP8:  # numpy has no such type, and the package asks it
            return _read_bytes(stored.path, name).view(jnp.float8_e4m3fn).reshape(stored.shape)
        return self._handle(stored.path).get_tensor(name)

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(self, *error: Any) -> None:
        self._open.clear()


def _read_bytes(path: Path, name: str) -> np.ndarray:
    """The bytes of a tensor, u8[n]: a file is the size of its header (u64), the header (JSON), the tensors."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        first, last = json.loads(file.read(size))[name]["data_offsets"]
        file.seek(8 + size + first)
        return np.frombuffer(file.read(last - first), np.uint8)


def write(folder: Path, sizes: Mapping[str, int], tensors: Iterator[tuple[str, np.ndarray]], most: int) -> None:
    """Tensors in the order of `sizes` (bytes by name) into files of at most `most` bytes, unless one tensor has more.

    One file's tensors are in memory at a time. The index comes last: a folder that lacks it has no whole checkpoint.
    """
    library, groups = _library(), list(_by_file(sizes, most))
    names = (
        [ONE]
        if len(groups) == 1
        else [f"model-{i:05}-of-{len(groups):05}.safetensors" for i in range(1, len(groups) + 1)]
    )
    for file, group in zip(names, groups):
        held = dict(next(tensors) for _ in group)
        library.numpy.save_file({name: held[name] for name in group}, folder / file, metadata={"format": "pt"})
    if len(groups) > 1:
        weights = {name: file for file, group in zip(names, groups) for name in group}
        index = dict(metadata=dict(total_size=sum(sizes.values())), weight_map=weights)
        (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def _by_file(sizes: Mapping[str, int], most: int) -> Iterable[list[str]]:
    group, total = [], 0
    for name, size in sizes.items():
        if group and total + size > most:
            yield group
            group, total = [], 0
        group.append(name)
        total += size
    yield group
