"""Examples of the API pages (docs/site/api): they run as they stand, each page from its first line.

jax only traces them, where nothing in them needs values: that costs a tenth of what compiling does. An expression with
a comment behind it has the value that the comment says.
"""

import ast
import re
import shutil
import warnings
from pathlib import Path

import jax
import pytest

SITE = Path(__file__).resolve().parents[2] / "docs" / "site"
PAGES = sorted(path.stem for path in (SITE / "api").glob("*.md"))
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
WITH_VALUES = "te_jax", "sharding", "hf"  # numbers are printed, a mesh is set, files are written
COLUMNS = 88

pytestmark = pytest.mark.skipif(not SITE.is_dir(), reason="needs the source tree")


def run(code: str, file: str, names: dict) -> None:
    """Runs statements, and compares expressions with their comments."""
    lines = code.split("\n")
    for node in ast.parse(code, file).body:
        said = re.search(r"  # (.*)$", lines[node.end_lineno - 1])
        if isinstance(node, ast.Expr) and said:
            value = eval(compile(ast.Expression(node.value), file, "eval"), names)
            assert repr(value) == said[1], f"{file}: {ast.unparse(node)} is {value!r}"
        else:
            exec(compile(ast.Module([node], []), file, "exec"), names)


@pytest.mark.parametrize("page", PAGES)
def test_examples_run(page, tmp_path, monkeypatch, capsys):
    text = (SITE / "api" / f"{page}.md").read_text()
    (code,) = BLOCK.findall(text) or ("",)
    monkeypatch.chdir(tmp_path)
    if page == "hf":
        shutil.copytree(SITE.parents[1] / "tests" / "hf_fixtures" / "llama2", "checkpoint")
    names = {"__name__": "__main__"}
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        if page in WITH_VALUES:
            run(code, page, names)
        else:
            jax.eval_shape(lambda: run(code, page, names))
    if printed := capsys.readouterr().out:
        shape = lambda text: re.sub(r"[-+]?[\d.]+(e[-+]\d+)?", "#", text).split()
        assert shape(printed) in [shape(block) for block in re.findall(r"^```text\n(.*?)^```", text, re.M | re.S)]


@pytest.mark.parametrize("page", PAGES)
def test_code_is_narrow(page):
    text = (SITE / "api" / f"{page}.md").read_text()
    for block in re.findall(r"^```.*?^```", text, re.MULTILINE | re.DOTALL):
        assert all(len(line) <= COLUMNS for line in block.split("\n")), f"{page}: over {COLUMNS} columns: {block}"
