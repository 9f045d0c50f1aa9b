"""Bytes to learn from, and batches that are a pure function of (seed, step)."""

import hashlib
import pathlib
import sysconfig
from typing import NamedTuple

import numpy as np

HELD_OUT = 0.05  # of the text


class Corpus(NamedTuple):
    train: np.ndarray  # u8[n]
    held_out: np.ndarray  # u8[n]
    source: str  # in words
    sha256: str  # of all bytes


def load(files: list[str] | None = None) -> Corpus:
    """The text as bytes. Without `files`: the source of Python's standard library (30 MB, or 11 where the
    system's package leaves the library's own tests out), `pydoc_data/topics.py` among it.

    The last 5 % of the concatenation are held out. The library's files are put in the order of the hash of
    their names first, so that those 5 % are whole files (but one) from all over it.
    """
    if files:
        paths, source = [pathlib.Path(f) for f in files], ", ".join(files)
    else:
        root = pathlib.Path(sysconfig.get_path("stdlib"))
        paths, source = library_files(root), f"Python's standard library, {root}"
    text = np.frombuffer(b"".join(p.read_bytes() for p in paths), np.uint8)
    cut = len(text) - int(len(text) * HELD_OUT)
    described = f"{source}: {len(paths)} files, {len(text) / 1e6:.1f} MB"
    return Corpus(text[:cut], text[cut:], described, hashlib.sha256(text).hexdigest())


def library_files(root: pathlib.Path) -> list[pathlib.Path]:
    names = [p.relative_to(root).as_posix() for p in root.rglob("*.py")]
    own = [n for n in names if not {"site-packages", "dist-packages"} & set(n.split("/"))]
    return [root / n for n in sorted(own, key=lambda n: hashlib.sha256(n.encode()).digest())]


def check_length(corpus: Corpus, seq_len: int) -> None:
    for part, data in (("training", corpus.train), ("held-out", corpus.held_out)):
        if len(data) < seq_len + 1:
            raise ValueError(
                f"the {part} text has {len(data)} bytes, a sequence needs {seq_len + 1}: "
                "give more text with --data, or a smaller --seq-len"
            )


def batch(data: np.ndarray, batch_size: int, seq_len: int, seed: int, step: int, rows=slice(None)) -> np.ndarray:
    """u8[batch_size, seq_len + 1]: random windows, or only the windows of `rows`. Without state, so that a resumed run
    sees its own."""
    starts = np.random.default_rng((seed, step)).integers(0, len(data) - seq_len, batch_size)[rows]
    return data[starts[:, None] + np.arange(seq_len + 1)]


def held_out_batches(data: np.ndarray, batch_size: int, seq_len: int, count: int) -> list[np.ndarray]:
    """`count` fixed batches of windows spread evenly over `data`, u8[batch_size, seq_len + 1] each."""
    starts = np.linspace(0, len(data) - seq_len - 1, count * batch_size).astype(np.int64)
    return list(data[starts.reshape(count, batch_size, 1) + np.arange(seq_len + 1)])
