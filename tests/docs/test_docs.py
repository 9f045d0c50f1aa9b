"""What the documents print runs: each document's Python blocks in order, in a namespace of their own, and prints what
the document shows; commands as far as their arguments; links lead somewhere."""

import argparse
import contextlib
import functools
import importlib.util
import io
import os
import pathlib
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
import warnings

import jax
import numpy as np
import pytest
from flax import linen as nn
from printed import FENCE, all_blocks, differs, run, said_output

from te_jax.core import op

ROOT = pathlib.Path(__file__).resolve().parents[2]
FOLDERS = ".", "examples", "docs", "docs/tutorials", "docs/howto", "docs/api", "results"
DOCUMENTS = [path.relative_to(ROOT).as_posix() for folder in FOLDERS for path in sorted((ROOT / folder).glob("*.md"))]
WIDTH = 88  # columns of code that a page of the site shows without a scroll bar

pytestmark = pytest.mark.skipif(not (ROOT / "docs").is_dir(), reason="needs the source tree")


def blocks(document, *languages):
    """The document's blocks of these languages."""
    return [block for block in all_blocks((ROOT / document).read_text()) if {*block.info[:1]} & {*languages}]


def where_it_runs(block) -> bool:
    """Whether a block's fence, `python cpu`, `python gpu` or `python PACKAGE`, says that it runs here."""
    needs = block.info[1:]
    if needs and needs[0] in ("cpu", "gpu"):
        return needs == [jax.default_backend()]
    return all(importlib.util.find_spec(package) for package in needs)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_block_says_its_language(document):
    for block in all_blocks((ROOT / document).read_text()):
        assert " ".join(block.info[:1]) in ("python", "sh", "text"), f"{document}:{block.line}"
        assert block.info[1:] == [] or block.info[0] == "python", f"{document}:{block.line}"


def test_pages_fit_the_site():
    """Code of how-tos, tutorials and the first pages, and what it prints."""
    first = "README.md", "docs/getting_started.md", "docs/several_devices.md", "docs/site/index.md"
    pages = [name for name in DOCUMENTS if name.startswith(("docs/howto", "docs/tutorials"))]
    for name in (*first, *pages):
        for block in blocks(name, "python"):
            long = [line for line in block.text.splitlines() if len(line) > WIDTH]
            assert not long, f"{name}:{block.line}: {long[0]}"


def test_pages_say_how_their_blocks_stand():
    """A page of several programs says whether they are one, or which runs by itself."""
    for name in DOCUMENTS:
        if name.startswith(("docs/howto", "docs/tutorials")) and len(blocks(name, "python")) > 1:
            text = " ".join((ROOT / name).read_text().split())
            said = re.search(r"locks (of this page )?are one program|This block runs without the one", text)
            assert said, f"{name} does not say on what its blocks stand"


def check_mesh(names):
    kernel = names["variables"]["params"]["mlp"]["wi_kernel"]
    assert kernel.addressable_data(0).size * 8 == kernel.size
    assert names["y"].sharding.spec[:2] == ("fsdp", "tp") and np.isfinite(names["y"]).all()


# {document: (words of one of its programs, what holds of its names behind it)}
DONE = {"docs/several_devices.md": ("out_shardings=shardings", check_mesh)}
EAGER = ("docs/migration.md",)  # whose modules run op by op, as they stand
PROGRAMS = [name for name in DOCUMENTS if blocks(name, "python")]
SHOWN = ("docs/howto/", "docs/tutorials/", "docs/getting_started.md", "README.md")  # with their outputs


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


@pytest.fixture
def in_this_process(monkeypatch):
    """Programs that would run in an interpreter of their own leave nothing behind, and find devices that are there."""
    update = jax.config.update
    alike = lambda name, value: None if name == "jax_num_cpu_devices" else update(name, value)
    monkeypatch.setattr(jax.config, "update", alike)
    monkeypatch.setattr(op, "ops", dict(op.ops))  # "How to add an op" of docs/ops.md adds one


@pytest.mark.parametrize("document", PROGRAMS)
def test_python_blocks_run(document, monkeypatch, request, in_this_process):
    if document not in EAGER:
        for name in ("init", "apply"):
            monkeypatch.setattr(nn.Module, name, one_program(getattr(nn.Module, name)))
    text, names = (ROOT / document).read_text(), {"__name__": "__main__"}
    if "make_mesh" in text:
        request.getfixturevalue("on_host")
    every, (words, check) = all_blocks(text), DONE.get(document, ("", None))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # a program that we print is no reason for a warning
        for i, block in enumerate(every):
            if block.info[:1] != ["python"] or not where_it_runs(block):
                continue
            printed, said = run(block, ROOT / document, names), said_output(text, every, i)
            if said or (printed and document.startswith(SHOWN)):
                wrong = differs(said.text if said else "", printed, numbers=jax.default_backend() == "cpu")
                assert not wrong, f"{document}:{block.line}: {wrong}"
            if check and words in block.text:
                check = check(names)
    assert check is None, f"{document}: no program has {words}"


@pytest.mark.parametrize(
    ("said", "printed", "wrong"),
    [
        ("loss 0.50  a", "loss  0.55 a", None),
        ("loss 0.50", "loss 0.60", "0.50 is 0.60"),
        ("loss 0.50", "lost 0.50", "it prints"),
        ("1.0e-04 -0.02", "2.0e-04 0.01", "1.0e-04 is 2.0e-04"),
        ("step 1.4e+02", "step 151.0", None),
        ("step 4", "step 5", "4 is 5"),
        ("+0.05 -0.02", "+0.02 +0.10", None),
        ("+0.05", "+0.25", "+0.05 is +0.25"),
        ("nan", "1.0", "nan is 1.0"),
        ("", "1", "it prints"),
    ],
)
def test_outputs_are_compared(said, printed, wrong):
    found = differs(said, printed)
    assert found is None if wrong is None else wrong in found


# -- commands ------------------------------------------------------------------------------------------------


def commands(document):
    """The words of each command in the document: lines of `sh` blocks, and `python ...` and the like in the text."""
    text = (ROOT / document).read_text()
    inline = re.findall(r"`((?:python|make|pip) [^`]+)`", FENCE.sub("", text))
    texts = [block.text.replace("\\\n", " ") for block in blocks(document, "sh")]  # a line may go on
    lines = [line for text in texts for line in text.splitlines()] + inline
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
    assert set(arguments) <= {"ARGS", "SUITE", "TESTS", "CUDA", "PLATFORM", "VENV", "PYTHON"}
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
