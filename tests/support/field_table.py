"""docs/fields.md from the declarations of te_jax/flax/_fields.py: `python tests/support/field_table.py` writes it."""

import dataclasses
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

import te_jax.flax as te_flax  # noqa: E402
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
        "RelativePositionBiases",
        "DotGeneral",
        "TransformerLayer",
        "LMHead",
    )
]
HEAD = """# Fields

What the fields of the modules may be, of `te_jax.flax` and of `te_jax.nnx` alike; what they do stands in the
docstrings. A value of another type is a TypeError, one out of range a ValueError, an unknown field a TypeError. They
come from `init` and `apply`, or from the constructor of an NNX module, and name the module, its path, the field, its
value and the way out:

```text
MultiHeadAttention `attention`: num_attention_heads=8 does not split into num_gqa_groups=3; pass a divisor of it.
```

This file is made of the declarations in `te_jax/flax/_fields.py`, which tests/support/field_table.py writes down.
"""


def fields_of(cls):
    return [f for f in dataclasses.fields(cls) if f.name not in ("parent", "name")]


def default_of(field) -> str:
    value = field.default
    if value is dataclasses.MISSING:
        return "required"
    if callable(value) and hasattr(value, "__name__"):
        return value.__name__ if value.__name__ != "init" else "an initializer"
    return str(getattr(value, "value", value)) if not isinstance(value, str) else repr(value)


def section(cls) -> str:
    kinds = dict(_fields.kinds_of(cls))
    rows = [f"| `{f.name}` | {default_of(f)} | {kinds[f.name].text} |" for f in fields_of(cls)]
    rules = [f"- {' '.join(rule.__doc__.split())}" for rule in cls.rules]
    table = "\n".join(["| field | default | takes |", "|---|---|---|", *rows])
    return "\n\n".join([f"## {cls.__name__}", table, *(["\n".join(rules)] if rules else [])])


def text() -> str:
    return "\n".join([HEAD, *(section(cls) + "\n" for cls in MODULES)])


if __name__ == "__main__":
    PATH.write_text(text())
