"""docs/config_words.md from the declarations of te_jax.hf: `python tests/support/word_table.py` writes it."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from te_jax.hf.families import FAMILIES  # noqa: E402
from te_jax.hf.rotary import TYPES, Rotary  # noqa: E402
from te_jax.hf.words import ABSENT, KEPT  # noqa: E402

PATH = ROOT / "docs" / "config_words.md"
HEAD = """# Words of config.json

What `te_jax.hf` reads of a checkpoint's config.json, by family. A word that is absent means what it does in the
family's configuration class of transformers. Where a word has other names, the last of those that are there counts, as
in transformers. A value that is not of its kind is a TypeError or ValueError, and so is one by which te_jax would have
another model:

```text
te_jax.hf: config.json of a mistral: sliding_window is 0; pass None or a positive int of 31 bits.
```

Words that become no field are checked, so that the model is the one that transformers has. All others are kept:
`hf.save` writes them again as `hf.load` found them, and copies a tokenizer's and generation's files. A word
below is kept as it was, too, unless the model was changed.

This file is made of the declarations in `te_jax/hf`, which tests/support/word_table.py writes down.
"""


ROPE = """## RoPE

`rope_scaling` counts where it is not empty, else `rope_parameters`. The type is its `rope_type`, else its `type`, else
"default"; the base its `rope_theta`, else config.json's, else the family's. `original_max_position_embeddings` of
config.json wins over the dict's. `partial_rotary_factor`, of the dict or else of config.json, is 1.0 where a family
does not say otherwise. One dict is for all layers, but where a family has a base for each type of them: there
`rope_parameters` has a dict for each, and `rope_scaling` belongs to the dict of `full_attention`. Where tokens may have
several positions, the dict has `mrope_section` too, three sizes of `rotary_pos_emb_sections`, and `mrope_interleaved`
as the family has them in turn or not; in parts the type "mrope" is "default".
"""


def text_of_default(word) -> str:
    if isinstance(word, Rotary):
        of_types = word.default if isinstance(word.default, dict) else {"": word.default}
        bases = ", ".join(f"{base:g}{of and f' in {of}'}" for of, base in of_types.items())
        return f"a base of {bases}{'' if word.part in (None, 1) else f', {word.part:g} of a head'}"
    if word.default is ABSENT:
        return ""
    if callable(word.default):
        return word.default.__doc__
    null = f", which is {word.null.__doc__}" if word.default is None and word.null and word.null.__doc__ else ""
    return f"{word.default!r}{null}"


def text_of_rope() -> str:
    rows = []
    for name, words in TYPES.items():
        texts = (
            f"`{word}` ({kind.text}{f'; absent: {text_of_length(word, default)}' if default is not ABSENT else ''})"
            for word, (kind, default) in words.items()
        )
        rows.append(f"| `{name}` | {', '.join(texts)} |")
    return "\n".join([ROPE, "| type | words |", "|---|---|", *rows, ""])


def text_of_length(word, default) -> str:
    return "max_position_embeddings" if word.startswith("original") else repr(default)


def section(family) -> str:
    kept = {word.name for word in KEPT}
    rows = []
    for word in family.words:
        if word.name in kept and not word.to and word.theirs is None:
            continue
        names = ", ".join(f"`{name}`" for name in (word.name, *word.also))
        becomes = ", ".join(f"`{path}`" for path in word.to) or ("" if word.theirs else "kept")
        rows.append(f"| {names} | {text_of_default(word)} | {word.takes} | {becomes} |")
    table = "\n".join(["| word | absent | takes | becomes |", "|---|---|---|---|", *rows])
    return f"## {family.name}\n\n{table}\n"


ALL = """## Kept by all

What is not above, and te_jax computes nothing by. Its models have no dropout of embeddings (`embd_pdrop`); what a loss
adds for experts is a field of `te_jax.flax.MoEBlock`, and not read.

| word | takes |
|---|---|"""


def of_all() -> str:
    return "\n".join([ALL, *(f"| `{word.name}` | {word.kind.text} |" for word in KEPT), ""])


def text() -> str:
    return "\n".join([HEAD, *(section(family) for family in FAMILIES.values()), text_of_rope(), of_all()])


if __name__ == "__main__":
    PATH.write_text(text())
