"""The texts of te_jax's errors and warnings, read from its sources. "..." stands for what a program fills in."""

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def _text(node: ast.AST) -> str:
    """The text that an expression makes, "" if it makes none."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) or "..." for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _text(node.left) + _text(node.right)
    return ""


def _strings(node: ast.AST) -> Iterator[str]:
    """The texts in a tree, each as a whole; docstrings left out."""
    if text := _text(node):
        yield " ".join(text.split())
        return
    for child in ast.iter_child_nodes(node):
        if not (isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)):
            yield from _strings(child)


@functools.cache
def texts() -> dict[str, tuple[str, ...]]:
    """{file of te_jax: the texts in it, of five words and more}, in the order of the source."""
    found = {}
    for path in sorted((ROOT / "te_jax").rglob("*.py")):
        said = [text for text in _strings(ast.parse(path.read_text())) if len(text.split()) >= 5]
        if said and path.name != "__main__.py":
            found[path.relative_to(ROOT).as_posix()] = tuple(dict.fromkeys(said))
    return found


def page() -> str:
    """All texts, for a reader who looks for one."""
    lines = [
        "# All messages",
        "",
        "The texts of errors and warnings, and parts of them, by the file that has them. `...` stands for names,",
        "values and shapes. [Troubleshooting](troubleshooting.md) explains those that are met most often.",
        "",
    ]
    for path, said in texts().items():
        lines += [f"## `{path}`", "", "```text", *said, "```", ""]
    return "\n".join(lines)
