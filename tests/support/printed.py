"""Programs that documents print, and what they say that these print.

PYTHONPATH=. python tests/support/printed.py docs/howto/nnx.md    # runs the page, and writes its outputs anew
"""

import contextlib
import importlib.util
import io
import math
import re
import sys
import textwrap
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
FENCE = re.compile(r"^( *)```([^\n]*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
NUMBER = re.compile(r"[-+]?(?:\d+\.\d*|\.\d+|\d+)(?:e[-+]?\d+)?|\bnan\b|\binf\b")


class Block(NamedTuple):
    """A fenced block: its `info`, the `line` of its fence, its `text`; where it begins and ends in the document."""

    info: list[str]
    line: int
    text: str
    start: int
    end: int


def all_blocks(text: str) -> list[Block]:
    return [
        Block(found[2].split(), text.count("\n", 0, found.start()) + 1, textwrap.dedent(found[3]), *found.span())
        for found in FENCE.finditer(text)
    ]


def said_output(text: str, blocks: list[Block], i: int) -> Block | None:
    """The block right behind block i, if it says what that prints."""
    follows = i + 1 < len(blocks) and blocks[i + 1].info == ["text"]
    return blocks[i + 1] if follows and not text[blocks[i].end : blocks[i + 1].start].strip() else None


def run(block: Block, path: Path, names: dict) -> str:
    """Executes a block; returns what it prints. Tracebacks name the line of the document."""
    code = compile("\n" * block.line + block.text, str(path), "exec")
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(code, names)
    return out.getvalue()


def differs(said: str, printed: str, numbers: bool = True) -> str | None:
    """How what a document says differs from what its program prints; None if it does not.

    Words are the same; spaces, which tables fill up, do not count. A number may differ by 2^-3 of itself, or by one in
    the last digit shown: other versions of jax and XLA add up in another order, and the nearest E4M3 numbers, which
    what they round to may become, lie 2^-3 apart. Whole numbers of one or two digits are counts: they are exact.
    Numbers with a sign are logarithms to base 2, as tables of FP8 state show them: an eighth more of what they are of
    is log2(1 + 2^-3) in them. numbers=False compares only words.
    """
    words = [" ".join(NUMBER.sub("#", text).split()) for text in (said, printed)]
    if words[0] != words[1]:
        return f"it prints\n{printed}"
    for one, other in () if not numbers else zip(NUMBER.findall(said), NUMBER.findall(printed), strict=True):
        if one == other:
            continue
        if re.fullmatch(r"[-+]?\d{1,2}|nan|inf", one):
            return f"{one} is {other}"
        mantissa, _, power = one.partition("e")
        digit = 10.0 ** (int(power or 0) - len(mantissa.partition(".")[2]))
        of_logarithm = math.log2(1 + 2.0**-3) if one[0] in "+-" else 0.0
        if not abs(float(one) - float(other)) <= max(2.0**-3 * abs(float(one)), 1.001 * digit, of_logarithm):
            return f"{one} is {other}"
    return None


def write(path: Path) -> None:
    """Runs the document's Python blocks in one namespace, and puts their outputs behind them."""
    text = path.read_text()
    blocks, names, parts, done = all_blocks(text), {"__name__": "__main__"}, [], 0
    for i, block in enumerate(blocks):
        if block.info[:1] != ["python"] or not all(map(importlib.util.find_spec, block.info[1:])):
            continue
        printed = run(block, path, names)
        old = said_output(text, blocks, i)
        parts.append(text[done : block.end])
        if printed:
            parts.append(f"\n\n```text\n{printed.rstrip()}\n```")
        done = old.end if old else block.end
    path.write_text("".join([*parts, text[done:]]))


if __name__ == "__main__":
    for name in sys.argv[1:]:
        write(Path(name))
