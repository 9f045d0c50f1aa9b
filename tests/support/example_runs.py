"""Small runs of examples/train_gpt.py within the tests' process."""

import contextlib
import io
import json
import pathlib
import sys

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

import train_gpt  # noqa: E402

TEXT = str(EXAMPLES / "README.md")
SMALL = "--preset tiny --layers 1 --seq-len 32 --batch-size 4 --steps 12 --amax-history-len 4 --eval-every 6"
SMALL = [*SMALL.split(), "--data", TEXT]


@pytest.fixture(scope="module", autouse=True)
def compiled_once(tmp_path_factory):
    """Runs that resume, and those that differ in what is no part of their program, take it from jax's cache."""
    names = "compilation_cache_dir", "persistent_cache_min_compile_time_secs", "persistent_cache_min_entry_size_bytes"
    before = [getattr(jax.config, f"jax_{name}") for name in names]
    for name, value in zip(names, (str(tmp_path_factory.mktemp("programs")), 0, -1)):
        jax.config.update(f"jax_{name}", value)
    compilation_cache.reset_cache()
    yield
    for name, value in zip(names, before):
        jax.config.update(f"jax_{name}", value)
    compilation_cache.reset_cache()


def train(out, *arguments) -> tuple[int, dict, str]:
    """(exit code, results.json, stdout) of train_gpt.py."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        code = train_gpt.main([*SMALL, "--out", str(out), *arguments])
    return code, json.loads((out / "results.json").read_text()), said.getvalue()
