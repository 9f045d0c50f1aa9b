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


class Compared(ast.NodeTransformer):
    """Calls `compare` with the value of each expression that has a comment, and the comment."""

    def __init__(self, code: str):
        self.lines = code.split("\n")

    def visit_Expr(self, node: ast.Expr) -> ast.Expr:
        said = re.search(r"  # (.*)$", self.lines[node.end_lineno - 1])
        if said:
            node.value = ast.Call(ast.Name("compare", ast.Load()), [node.value, ast.Constant(said[1])], [])
        return node


def run(code: str, file: str) -> None:
    def compare(value, said):
        assert repr(value) == said, f"{file}: {value!r} is not {said}"

    tree = ast.fix_missing_locations(Compared(code).visit(ast.parse(code, file)))
    exec(compile(tree, file, "exec"), {"__name__": "__main__", "compare": compare})


@pytest.mark.parametrize("page", PAGES)
def test_examples_run(page, tmp_path, monkeypatch, capsys):
    text = (SITE / "api" / f"{page}.md").read_text()
    code = "\n".join(BLOCK.findall(text))
    monkeypatch.chdir(tmp_path)
    if page == "hf":
        shutil.copytree(SITE.parents[1] / "tests" / "hf_fixtures" / "llama2", "checkpoint")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        if page in WITH_VALUES:
            run(code, page)
        else:
            jax.eval_shape(lambda: run(code, page))
    if printed := capsys.readouterr().out:
        shape = lambda text: re.sub(r"[-+]?[\d.]+(e[-+]\d+)?", "#", text).split()
        assert shape(printed) == shape("\n".join(re.findall(r"^```text\n(.*?)^```", text, re.M | re.S)))


@pytest.mark.parametrize("page", PAGES)
def test_code_is_narrow(page):
    text = (SITE / "api" / f"{page}.md").read_text()
    for block in re.findall(r"^```.*?^```", text, re.MULTILINE | re.DOTALL):
        assert all(len(line) <= COLUMNS for line in block.split("\n")), f"{page}: over {COLUMNS} columns: {block}"
