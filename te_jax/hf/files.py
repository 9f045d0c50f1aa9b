"""The files of a checkpoint: config.json, and safetensors files, one or several with an index."""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from te_jax.core.check import show

CONFIG, ONE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
# The words of the format for dtypes that numpy, or ml_dtypes with it, has.
DTYPES = {"F32": jnp.float32, "BF16": jnp.bfloat16, "F16": jnp.float16}
_LFS = b"version https://git-lfs"
FP8 = "F8_E4M3"  # of weights that have scales in tensors of their own
# JSON takes up to some 30 times its bytes in memory. A config.json has some KB, with lists of layers some 100 KB; an
# index names each tensor, and is bounded as the package bounds the headers of files.
_MOST_BYTES = {CONFIG: 4 * 2**20, INDEX: 10**8}


def _library():
    try:
        import safetensors
        import safetensors.numpy
    except ImportError as error:
        raise ImportError("te_jax.hf needs safetensors: pip install safetensors.") from error
    return safetensors


@contextmanager
def name_in_errors(path: Path, done: str = "read") -> Iterator[None]:
    """Raises errors of the system and of safetensors again, as ones that name the file."""
    try:
        yield
    except (OSError, _library().SafetensorError) as error:
        kind = next((each for each in (FileNotFoundError, FileExistsError) if isinstance(error, each)), ValueError)
        raise kind(f"te_jax.hf: {path} can not be {done}: {error}") from error


def read_json(path: Path) -> dict[str, Any]:
    """The object in config.json, or in an index.

    Raises FileNotFoundError where there is no such file, ValueError where it has no object in JSON, or too many bytes.
    """
    if not os.path.isfile(path):
        wanted = "" if path.parent.is_dir() else "; pass a folder; huggingface_hub.snapshot_download returns one"
        raise FileNotFoundError(f"te_jax.hf: there is no file {path}{wanted}.")
    most = _MOST_BYTES[path.name]
    with name_in_errors(path), path.open("rb") as file:
        said = file.read(most + 1)
    if len(said) > most:
        raise ValueError(f"te_jax.hf: {path} has more than {most} bytes, which no {path.name} has.")
    try:
        found = json.loads(said.decode(), parse_int=_integer)
    except (ValueError, RecursionError) as error:  # neither UTF-8 nor JSON, or nested too deeply
        raise ValueError(f"te_jax.hf: {path} is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"te_jax.hf: {path} is {show(found)}; an object in braces is due.")
    return found


def _integer(digits: str) -> int:
    if len(digits) > 19:  # 2**63 has as many; larger ones are no sizes, and too large for a float in the end
        raise ValueError(f"an integer of {len(digits)} digits, {show(digits[:30])}")
    return int(digits)


def quote(name: str) -> str:
    """The name of a tensor as errors show it: on one line, and not endless."""
    return show(name)[1:-1]


class Stored(NamedTuple):
    """A tensor in a file."""

    path: Path
    shape: tuple[int, ...]
    dtype: str  # a word of the format


class Checkpoint:
    """The tensors of a folder by name. Use it in a `with` block; files are opened at first use, and mapped.

    As transformers does, it takes model.safetensors where there is one, else the files of the index. Each tensor is
    read from the file that the index names for it, whatever the others have of that name.

    Raises FileNotFoundError where there is no checkpoint, or an index names a file that is not there, and ValueError,
    naming the file, for one that is no safetensors file, for an index that leads out of the folder or that is none, and
    where a file lacks a tensor of the index, or has one that the index lacks.
    """

    def __init__(self, folder: Path):
        self._open, self._safe_open = {}, _library().safe_open
        self._offsets: dict[Path, dict[str, tuple[int, int]]] = {}
        self.tensors: dict[str, Stored] = {}
        if os.path.isfile(folder / ONE) or not os.path.isfile(folder / INDEX):
            self._add(folder, folder / ONE)
            return
        weights = _files_of(folder)
        due: dict[Path, set[str]] = {}
        for name, path in weights.items():
            due.setdefault(path, set()).add(name)
        for path, names in due.items():
            if lost := self._add(folder, path, names):
                raise ValueError(
                    f"te_jax.hf: {folder / INDEX} names {quote(lost[0])}, which no file has where it says, in "
                    f"{path.name} ({len(lost)} in all)."
                )

    def _add(self, folder: Path, path: Path, due: set[str] | None = None) -> list[str]:
        """Takes up the tensors `due` of a file, or all. Returns the ones of `due` that it lacks. What a file has and
        the index does not name is no tensor of the checkpoint."""
        if not os.path.isfile(path):
            raise FileNotFoundError(f"te_jax.hf: there is no {path}; {folder} is no whole checkpoint.")
        held = self._handle(path)
        names = set(held.keys())
        for name in names if due is None else names & due:
            part = held.get_slice(name)
            self.tensors[name] = Stored(path, tuple(part.get_shape()), part.get_dtype())
        return [] if due is None else sorted(due - names)

    def _handle(self, path: Path):
        if path not in self._open:
            with name_in_errors(path), path.open("rb") as file:
                if file.read(len(_LFS)) == _LFS:
                    raise ValueError(
                        f"te_jax.hf: {path} is a pointer of Git LFS; fetch what it points at: git lfs pull."
                    )
                self._open[path] = self._safe_open(path, framework="numpy")
        return self._open[path]

    def read(self, name: str) -> np.ndarray:
        """The tensor, copied into memory."""
        stored = self.tensors[name]
        with name_in_errors(stored.path):
            if stored.dtype == FP8:  # numpy has no such type, and the package asks it
                return self._read_bytes(stored.path, name).view(jnp.float8_e4m3fn).reshape(stored.shape)
            return self._handle(stored.path).get_tensor(name)

    def _read_bytes(self, path: Path, name: str) -> np.ndarray:
        """The bytes of a tensor, u8[n]: a file is the size of its header (u64), the header (JSON), the tensors. The
        package has checked them as it opened the file."""
        with path.open("rb") as file:
            if path not in self._offsets:
                size = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(size))
                header.pop("__metadata__", None)
                ends = {each: said["data_offsets"] for each, said in header.items()}
                self._offsets[path] = {each: (8 + size + a, 8 + size + b) for each, (a, b) in ends.items()}
            first, last = self._offsets[path][name]
            file.seek(first)
            return np.frombuffer(file.read(last - first), np.uint8)

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(self, *error: Any) -> None:
        self._open.clear()


def _files_of(folder: Path) -> dict[str, Path]:
    """The file of each tensor, as the index names it."""
    weights = read_json(folder / INDEX).get("weight_map")
    if not isinstance(weights, dict):
        raise ValueError(
            f"te_jax.hf: {folder / INDEX} has weight_map={show(weights)}; an object of names and files is due."
        )
    for name, file in weights.items():
        if not isinstance(file, str) or not _is_inside(file):
            raise ValueError(
                f"te_jax.hf: {folder / INDEX} has {show(file)} as the file of {show(name)}; the name of a file in its "
                "folder is due."
            )
    return {name: folder / file for name, file in weights.items()}


def _is_inside(file: str) -> bool:
    """Whether the name is one of a file in a folder, or below it, by the rules of any system."""
    paths = PurePosixPath(file), PureWindowsPath(file)
    return 0 < len(file) < 256 and not any(path.anchor or ".." in path.parts for path in paths)


def write(folder: Path, sizes: Mapping[str, int], tensors: Iterator[tuple[str, np.ndarray]], most: int) -> None:
    """Tensors in the order of `sizes` (bytes by name) into files of at most `most` bytes, unless one tensor has more.

    One file's tensors are in memory at a time. The index comes last: a folder that lacks it has no whole checkpoint.
    """
    library, each = _library(), list(_by_file(sizes, most))
    count = len(each)
    files = [ONE] if count == 1 else [f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]
    with name_in_errors(folder, "made"):
        folder.mkdir(parents=True, exist_ok=True)
    for file, names in zip(files, each):
        held = dict(next(tensors) for _ in names)
        with name_in_errors(folder / file, "written"):
            library.numpy.save_file({name: held[name] for name in names}, folder / file, metadata={"format": "pt"})
    if count > 1:
        weights = {name: file for file, names in zip(files, each) for name in names}
        write_json(folder / INDEX, dict(metadata=dict(total_size=sum(sizes.values())), weight_map=weights))


def write_json(path: Path, said: Mapping[str, Any]) -> None:
    """An object as config.json, or as an index."""
    with name_in_errors(path, "written"):
        path.write_text(json.dumps(said, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _by_file(sizes: Mapping[str, int], most: int) -> Iterable[list[str]]:
    """The names of each file."""
    names, total = [], 0
    for name, size in sizes.items():
        if names and total + size > most:
            yield names
            names, total = [], 0
        names.append(name)
        total += size
    yield names
