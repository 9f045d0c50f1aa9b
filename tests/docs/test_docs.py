"""What the documents print runs: Python blocks as they stand and in order, commands as far as their arguments; links
lead somewhere. A block whose fence says `python gpu` is compiled alone where there is no GPU."""

import argparse
import contextlib
import functools
import io
import os
import pathlib
import re
import runpy
import shlex
import subprocess
import sys
import textwrap
import tomllib
import warnings

import jax
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

from te_jax.core import op

ROOT = pathlib.Path(__file__).resolve().parents[2]
FOLDERS = ".", "examples", "docs", "docs/tutorials", "docs/api", "results"
DOCUMENTS = [path.relative_to(ROOT).as_posix() for folder in FOLDERS for path in sorted((ROOT / folder).glob("*.md"))]
FENCE = re.compile(r"^( *)```([^\n]*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)

pytestmark = pytest.mark.skipif(not (ROOT / "docs").is_dir(), reason="needs the source tree")


def blocks(document, *languages):
    """(fence info, line number, text) of the document's blocks of these languages."""
    text = (ROOT / document).read_text()
    for found in FENCE.finditer(text):
        info = found[2].split()
        if info[:1] and info[0] in languages:
            yield info, text[: found.start()].count("\n") + 1, textwrap.dedent(found[3])


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_block_says_its_language(document):
    for found in FENCE.finditer((ROOT / document).read_text()):
        assert found[2] in ("python", "python gpu", "python cpu", "sh", "text"), f"{document}: {found[0]}"


def check_nnx(names):
    assert float(names["loss"]) < float(names["first"])
    assert isinstance(names["nnx_model"], nnx.Module) and float(names["nnx_model"].mlp.x_0_amax_history[-1]) > 0


def check_mesh(names):
    kernel = names["variables"]["params"]["mlp"]["wi_kernel"]
    assert kernel.addressable_data(0).size * 8 == kernel.size
    assert names["y"].sharding.spec[:2] == ("fsdp", "tp") and np.isfinite(names["y"]).all()


# {document: (words of one of its programs, what holds of its names behind it)}
DONE = {
    "docs/guide.md": ("from flax import nnx", check_nnx),
    "docs/several_devices.md": ("out_shardings=nn.logical_to_mesh_sharding", check_mesh),
}
# What goes on from what; the others stand alone.
TOGETHER = ("README.md", "docs/getting_started.md", "docs/ops.md", "docs/guide.md")
EAGER = ("README.md", "docs/migration.md")  # whose modules run op by op, as they stand
TUTORIALS = tuple(f"docs/tutorials/{name}.md" for name in ("gpt", "health", "moe", "lora"))
ALONE = [(name,) for name in DOCUMENTS if name not in (*TOGETHER, *TUTORIALS) and any(blocks(name, "python"))]


def one_program(method):
    """`init` or `apply` of a module: where nothing is traced, as a jitted function of the arrays. Each op by itself is
    a program to compile."""

    @functools.cache
    def compiled(module, tree, static):
        def call(arrays):
            args, kwargs = jax.tree.unflatten(tree, [next(arrays) if of is None else of[0] for of in static])
            return method(module, *args, **kwargs)

        return jax.jit(lambda arrays: call(iter(arrays)))

    @functools.wraps(method)
    def call(module, *args, **kwargs):
        leaves, tree = jax.tree.flatten((args, kwargs))
        if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
            return method(module, *args, **kwargs)
        arrays = [leaf for leaf in leaves if isinstance(leaf, jax.Array)]
        static = tuple(None if isinstance(leaf, jax.Array) else (leaf,) for leaf in leaves)
        return compiled(module, tree, static)(arrays)

    return call


@pytest.mark.parametrize("documents", [TOGETHER, TUTORIALS, *ALONE], ids=" ".join)
def test_python_blocks_run(documents, monkeypatch, request):
    if documents in ALONE:  # they are of several devices
        request.getfixturevalue("on_host")
    monkeypatch.setattr(op, "ops", dict(op.ops))  # "How to add an op" of docs/ops.md adds one
    as_it_is = {name: getattr(nn.Module, name) for name in ("init", "apply")}
    jitted = {name: one_program(method) for name, method in as_it_is.items()}
    names = {"__name__": "__main__"}
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # a program that we print is no reason for a warning
        for document in documents:
            for name, method in (as_it_is if document in EAGER else jitted).items():
                monkeypatch.setattr(nn.Module, name, method)
            words, check = DONE.get(document, ("", None))
            for info, line, text in blocks(document, "python"):
                code = compile("\n" * line + text, str(ROOT / document), "exec")  # tracebacks name the line
                if info[1:] in ([], [jax.default_backend()]):
                    exec(code, names)
                if check and words in text:
                    check = check(names)
            assert check is None, f"{document}: no program has {words}"
    if "loss" in names:
        assert jax.numpy.isfinite(names["loss"])


# -- commands ------------------------------------------------------------------------------------------------


def commands(document):
    """The words of each command in the document: lines of `sh` blocks, and `python ...` and the like in the text."""
    text = (ROOT / document).read_text()
    inline = re.findall(r"`((?:python|make|pip) [^`]+)`", FENCE.sub("", text))
    lines = [line for *_, block in blocks(document, "sh") for line in block.splitlines()] + inline
    for line in lines:
        line = line.replace("\\|", "|").strip()  # as a table has it
        words = shlex.split(re.sub(r"\[--.*?\]", "", line).replace("$i", "1"), comments=True)
        while words and (re.fullmatch(r"\w+=\S*", words[0]) or words[0] in ("srun", "nohup")):
            words = words[1:]
        if words and words[0] not in ("for", "done;"):
            yield line, [word for word in words if word != "&"]


class Parsed(BaseException):
    """A program has taken its arguments."""


def check_python(words, monkeypatch):
    run = runpy.run_path
    if words[0] == "-m":
        run, words = lambda path, run_name: runpy.run_module(words[0], run_name=run_name), words[1:]
    path, parse_args = ROOT / words[0], argparse.ArgumentParser.parse_args

    def parse(parser, argv=None):
        args = parse_args(parser, argv)
        if path.name == "train_gpt.py":
            sys.modules["gpt.config"].complete(args, "tiny")
        raise Parsed

    monkeypatch.setattr(sys, "argv", [str(path), *words[1:]])
    monkeypatch.setattr(sys, "path", [str(path.parent), *sys.path])
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse)
    with pytest.raises(Parsed):
        run(str(path), run_name="__main__")


def check_make(words, monkeypatch):
    assert words[0] + ":" in re.findall(r"^\w+:", (ROOT / "Makefile").read_text(), re.MULTILINE)
    arguments = dict(word.split("=", 1) for word in words[1:])
    assert set(arguments) <= {"ARGS", "SUITE", "TESTS", "CUDA", "VENV", "PYTHON"}
    if words[0] == "train":
        check_python(["examples/train_gpt.py", *shlex.split(arguments.get("ARGS", ""))], monkeypatch)


def check_pip(words, monkeypatch):
    assert words[0] == "install"
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for word in words[1:]:
        assert not word.startswith("te_jax"), "te_jax is not on PyPI: install a source tree"
        if word.startswith("."):
            assert set(re.findall(r"\w+", word)) <= set(extras), word


def check_export(words, monkeypatch):
    name, _, value = words[0].partition("=")
    path = f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "PYTHONPATH": str(ROOT)}
    found = subprocess.run(
        ["bash", "-c", f'set -e; {name}="{value}"; echo ${name}'], env=environment, capture_output=True
    )
    assert found.returncode == 0 and found.stdout.strip(), found.stderr.decode()


CHECKS = {"python": check_python, "make": check_make, "pip": check_pip, "export": check_export}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_commands_are_taken(document, monkeypatch):
    for line, words in commands(document):
        said = io.StringIO()
        try:
            with monkeypatch.context() as patched, contextlib.redirect_stderr(said):
                CHECKS[words[0]](words[1:], patched)
        except (SystemExit, AssertionError, KeyError, OSError) as error:
            pytest.fail(f"{document}: {line}: {type(error).__name__} {error} {said.getvalue()}", pytrace=False)


# -- links ---------------------------------------------------------------------------------------------------


def anchors(path):
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", path.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere(document):
    here = ROOT / document
    for target in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", here.read_text())):
        if target.startswith("http"):
            continue
        path, _, anchor = target.partition("#")
        found = (here.parent / path).resolve() if path else here
        assert found.exists(), f"{document}: {target}"
        assert not anchor or anchor in anchors(found), f"{document}: {target}"
