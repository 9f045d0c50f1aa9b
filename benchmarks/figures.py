"""Measured figures by name: a place such as `h200/layers : gpt layer fwd+bwd | te_jax fp8; recipes : ms = .2f * 1` is a
file of results/, keys in it, how the number is shown and what it is multiplied by.

A key in a list is the `case | impl` or the `class` of an entry; `; run` behind it chooses among several runs of a case.
`ms` and `.2f * 1` may be left out, and `over` between two places divides.
"""

import json
import pathlib
from functools import cache

ROOT = pathlib.Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results"


@cache
def read(name: str):
    """The file results/{name}.json."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def _entry(entries: list[dict], key: str, place: str) -> dict:
    label, _, run = key.partition("; ")
    names = lambda entry: (entry.get("class"), f"{entry.get('case')} | {entry.get('impl')}")
    found = [entry for entry in entries if label in names(entry) and run in ("", entry.get("run"))]
    if len(found) != 1:
        raise KeyError(f"results/tables.md: {{{{{place}}}}}: {len(found)} entries are {key!r}; there must be one.")
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
