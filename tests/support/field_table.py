"""docs/fields.md from the declarations of te_jax/flax/_fields.py: `python tests/support/field_table.py` writes it."""

import dataclasses
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

from field_meanings import MEANINGS  # noqa: E402

import te_jax.flax as te_flax  # noqa: E402
from te_jax.core.check import BOOL  # noqa: E402
from te_jax.flax import _fields  # noqa: E402

PATH = ROOT / "docs" / "fields.md"
MODULES = [
    getattr(te_flax, name)
    for name in (
        "DenseGeneral",
        "LayerNorm",
        "LayerNormDenseGeneral",
        "LayerNormMLP",
        "MoEBlock",
        "DotProductAttention",
        "MultiHeadAttention",
        "MultiHeadLatentAttention",
        "Mamba2",
        "GatedDeltaNet",
        "RelativePositionBiases",
        "DotGeneral",
        "TransformerLayer",
        "DiTBlock",
        "LMHead",
    )
]
HEAD = """# Fields

What each field of the modules does, its default, and what it takes. They are the same in `te_jax.flax` and in
`te_jax.nnx`. Where nothing else is said a field takes True or False. An initializer is a function
`f(key, shape, dtype)` that returns an array.

A value of another type is a TypeError, one out of range a ValueError, an unknown field a TypeError. They come from
`init` and `apply`, or from the constructor of an NNX module, and name the module, its path, the field, its value and
what to pass instead:

```text
MultiHeadAttention `attention`: num_attention_heads=8 does not split into num_gqa_groups=3; pass a divisor of it.
```

This file is made of the declarations in `te_jax/flax/_fields.py` and the sentences in
`tests/support/field_meanings.py`; `tests/support/field_table.py` writes the page.
"""


def fields_of(cls):
    return [f for f in dataclasses.fields(cls) if f.name not in ("parent", "name")]


def default_of(field, kind) -> str:
    value = field.default
    if value is dataclasses.MISSING or not kind.accepts(value):
        return "required"
    if callable(value) and hasattr(value, "__name__"):
        return value.__name__ if value.__name__ != "init" else "an initializer"
    return f'"{value}"' if isinstance(value, str) else _quoted(str(getattr(value, "value", value)))


def _quoted(text: str) -> str:
    return re.sub(r"'(\w*)'", r'"\1"', text)


def meaning_of(cls, name: str) -> str:
    """The sentence of a field. KeyError if there is none."""
    own = f"{cls.__name__}.{name}"
    return MEANINGS[own] if own in MEANINGS else MEANINGS[name]


def row(cls, field, kind) -> str:
    takes = kind.text.replace(", f(key, shape, dtype) -> array", "").replace("None or True or", "None, True or")
    takes = _quoted(takes)
    meaning = meaning_of(cls, field.name)
    parts = meaning and f"{meaning}.", "" if kind is BOOL else f"*{takes[:1].upper()}{takes[1:]}.*"
    return f"| `{field.name}` | {default_of(field, kind)} | {' '.join(filter(None, parts))} |"


def section(cls) -> str:
    kinds = dict(_fields.kinds_of(cls))
    rows = [row(cls, field, kinds[field.name]) for field in fields_of(cls)]
    rules = [f"- {' '.join(rule.__doc__.split())}" for rule in cls.rules]
    table = "\n".join(["| field | default | what it does |", "|---|---|---|", *rows])
    return "\n\n".join([f"## {cls.__name__}", table, *(["\n".join(rules)] if rules else [])])


def text() -> str:
    return "\n".join([HEAD, *(section(cls) + "\n" for cls in MODULES)])


if __name__ == "__main__":
    PATH.write_text(text())
