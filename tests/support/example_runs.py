"""Small runs of examples/train_gpt.py within the tests' process."""

import contextlib
import functools
import io
import json
import pathlib
import sys
import tempfile

import jax
import orbax_whole  # noqa: F401
import pytest
from jax.experimental.compilation_cache import compilation_cache

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

import train_gpt  # noqa: E402
from gpt import steps  # noqa: E402

TEXT = str(EXAMPLES / "README.md")
SMALL = "--preset tiny --layers 1 --seq-len 32 --batch-size 4 --steps 12 --amax-history-len 4 --eval-every 6"
SMALL = [*SMALL.split(), "--data", TEXT, "--dropout", "0.1"]  # in all of them, so that they share programs


def made_once(make):
    """`make` of gpt/steps.py. Runs whose model, optimizer and recipe are equal share its jitted function, which traces
    anew what differs in shapes and types. A function for a mesh is made for each run: shardings have no hash."""
    once = functools.cache(make)

    @functools.wraps(make)
    def made(*arguments, **options):
        try:
            return once(*arguments, **options)
        except TypeError:
            return make(*arguments, **options)

    return made


MADE_ONCE = {
    name: made_once(getattr(steps, name))
    for name in ("make_optimizer", "make_init", "make_train_step", "make_eval_loss", "make_fp8_stats")
}


@functools.cache
def folder_of_programs() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory()


@pytest.fixture(scope="module", autouse=True)
def compiled_once():
    """Runs that resume, and those that differ in what is no part of their program, take it from jax's cache; also those
    of another module."""
    names = "compilation_cache_dir", "persistent_cache_min_compile_time_secs", "persistent_cache_min_entry_size_bytes"
    before = [getattr(jax.config, f"jax_{name}") for name in names]
    for name, value in zip(names, (folder_of_programs().name, 0, -1)):
        jax.config.update(f"jax_{name}", value)
    compilation_cache.reset_cache()
    with pytest.MonkeyPatch.context() as patched:
        for name, made in MADE_ONCE.items():
            patched.setattr(steps, name, made)
        yield
    for name, value in zip(names, before):
        jax.config.update(f"jax_{name}", value)
    compilation_cache.reset_cache()


@pytest.fixture(scope="module", autouse=True)
def unrendered():
    """Figures are composed as ever, and written as empty files: to render one takes as long as some steps."""
    from matplotlib.figure import Figure

    savefig = Figure.savefig
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Figure, "savefig", lambda figure, path, **how: pathlib.Path(path).touch())
        yield savefig


@pytest.fixture
def rendered(unrendered, monkeypatch):
    """For a test that looks at the files of figures."""
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", unrendered)


def train(out, *arguments) -> tuple[int, dict, str]:
    """(exit code, results.json, stdout) of train_gpt.py."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        code = train_gpt.main([*SMALL, "--out", str(out), *arguments])
    return code, json.loads((out / "results.json").read_text()), said.getvalue()
