"""The tables of measured figures in README.md and docs/, and the plots, are written from the files in docs/results.

docs/results/tables.md has each table below a heading of its name and its document. Its cells have places for figures,
such as `{{h200/layers : gpt layer fwd+bwd | te_jax fp8; recipes : ms = .2f * 1}}`: a file, keys in it, how the number
is shown and what it is multiplied by. A key in a list is the `case | impl` or the `class` of an entry; `; run` behind
it chooses among several runs of a case. `ms` and `.2f * 1` may be left out, and `over` between two places divides. In
the document the table stands between the comments `<!-- table: name -->` and `<!-- end -->`.
"""

import json
import pathlib
import re
from functools import cache

ROOT = pathlib.Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results"


@cache
def read(name: str):
    """The file docs/results/{name}.json."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def _entry(entries: list[dict], key: str, place: str) -> dict:
    label, _, run = key.partition("; ")
    names = lambda entry: (entry.get("class"), f"{entry.get('case')} | {entry.get('impl')}")
    found = [entry for entry in entries if label in names(entry) and run in ("", entry.get("run"))]
    if len(found) != 1:
        raise KeyError(f"docs/results/tables.md: {{{{{place}}}}}: {len(found)} entries are {key!r}; there must be one.")
    return found[0]


def _value(place: str):
    name, *keys = place.split(" : ")
    value = read(name)
    if " | " in keys[0]:
        value, keys = value["rows"], keys if keys[1:] else [*keys, "ms"]
    for key in keys:
        value = _entry(value, key, place) if isinstance(value, list) else value[key]
    return value


def figure(place: str) -> str:
    """The text in a place, whose grammar stands above. Raises KeyError where there is no such figure."""
    where, _, shown = place.partition(" = ")
    shown, _, factor = shown.partition(" * ")
    value, *divisor = map(_value, where.split(" over "))
    return format(value * float(factor or 1) / (divisor or [1])[0], shown or ".2f")


def tables() -> dict[tuple[str, str], str]:
    """(document, name of the table) -> its text."""
    found = {}
    for part in re.split(r"^## ", (RESULTS / "tables.md").read_text(), flags=re.MULTILINE)[1:]:
        heading, _, text = part.partition("\n")
        name, document = heading.split(", ")
        found[document, name] = re.sub(r"\{\{(.+?)\}\}", lambda place: figure(place[1]), text.strip())
    return found


def documents() -> dict[pathlib.Path, str]:
    """The documents with tables, as they should be. Raises ValueError where one has no place for a table."""
    found = {}
    for (document, name), table in tables().items():
        path, begin, end = ROOT / document, f"<!-- table: {name} -->\n", "<!-- end -->"
        before, marked, rest = found.get(path, path.read_text()).partition(begin)
        if not marked or end not in rest:
            raise ValueError(f"{document}: no {begin.strip()} with {end} behind it; docs/results/tables.md names it.")
        found[path] = f"{before}{begin}{table}\n{end}{rest.partition(end)[2]}"
    return found


def main(args) -> int:
    from . import plots  # draws figures of this module

    wanted = documents() | plots.drawings()
    changed = {path: text for path, text in wanted.items() if not path.is_file() or path.read_text() != text}
    for path, text in changed.items():
        if not args.check:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        print(
            path.relative_to(ROOT), "is not what docs/results makes it: `make tables`" if args.check else "is written"
        )
    return 1 if changed and args.check else 0
