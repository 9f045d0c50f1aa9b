"""te_jax's docstrings as reStructuredText.

They are plain text: paragraphs, code indented by four, lists of `name: what it is` with aligned columns, names in
single backticks. Nothing in them has to be escaped; that is done here. `known` has the names that become links, and
what they lead to.
"""

import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType

_ITEM = re.compile(r"(\*{0,2}[A-Za-z_]\w*(?:, \*{0,2}[A-Za-z_]\w*)*):\s+(?=\S)")
_CODE = re.compile(r"``([^`]+)``|`([^`]+)`")


def _inline(text: str, known: Mapping[str, str]) -> str:
    """One paragraph. Names in backticks become code, those that the reference has become links."""
    parts, end = [], 0
    for found in _CODE.finditer(text):
        parts.append(_escape(text[end : found.start()]))
        code = found[1] or found[2]
        parts.append(f":py:obj:`{code} <{known[code]}>`" if code in known else f"``{code.strip()}``")
        end = found.end()
        if text[end : end + 1].isalnum():
            parts.append("\\ ")  # markup ends before space or punctuation
    return "".join([*parts, _escape(text[end:])])


def _escape(text: str) -> str:
    return re.sub(r"(?<=\w)_(?!\w)", r"\_", re.sub(r"([\\*|`])", r"\\\1", text))


def _blocks(lines: list[str]) -> Iterator[list[str]]:
    block: list[str] = []
    for line in [*lines, ""]:
        if line.strip():
            block.append(line.rstrip())
        elif block:
            yield block
            block = []


def _is_code(block: list[str]) -> bool:
    return all(line.startswith("    ") for line in block)


def _joined(blocks: Iterator[list[str]]) -> Iterator[list[str]]:
    """Blocks of code that follow each other are one, with an empty line between them."""
    held: list[str] = []
    for block in [*blocks, []]:
        if held and not (block and _is_code(block)):
            yield held
            held = []
        if not block:
            return
        if _is_code(block):
            held = [*held, "", *block] if held else block
        else:
            yield block


def _items(block: list[str]) -> list[tuple[str, str]] | None:
    """(names, text) of a block that lists arguments or fields; None if it is another."""
    items: list[list[str]] = []
    for line in block:
        found = _ITEM.match(line)
        if found:
            items.append([found[1], line[found.end() :]])
        elif not items:
            return None
        elif line[0] == " " or items[-1][1]:
            if line[0] != " " and re.match(r"(Returns|Raises|The|A|An|It|In|Fields|For|With|Without|See)\b", line):
                return [*((a, b) for a, b in items), ("", "\n".join(block[block.index(line) :]))]
            items[-1][1] += " " + line.strip()
    return [(a, b) for a, b in items]


def convert(lines: list[str], known: Mapping[str, str] = MappingProxyType({})) -> list[str]:
    """The lines of a docstring, without common indentation, as lines of reStructuredText."""
    out: list[str] = []
    for block in _joined(_blocks(lines)):
        if _is_code([line for line in block if line]):
            out += ["::", "", *block, ""]
        elif block[0].startswith("- "):
            out += [*_bullets(block, known), ""]
        elif items := _items(block):
            for names, text in items:
                if names:
                    out += [f"``{names}``", f"    {_inline(text, known)}"]
                else:
                    out += ["", _inline(" ".join(text.split()), known)]
            out.append("")
        else:
            out += [_inline(" ".join(line.strip() for line in block), known), ""]
    return out


def _bullets(block: list[str], known: Mapping[str, str]) -> list[str]:
    joined = " ".join(("\n" if line.startswith("- ") else "") + line.strip() for line in block)
    return [f"- {_inline(line.strip()[2:], known)}" for line in joined.split("\n") if line.strip()]
