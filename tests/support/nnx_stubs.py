"""te_jax/nnx/modules.pyi, what type checkers see of the NNX modules: `python tests/support/nnx_stubs.py` writes it.

Their constructors take the fields of Linen modules, and their calls the arguments of those modules' calls, which are
there in no source. The stub has both, by the signatures that `inspect` shows; a test holds it equal to them.
"""

import inspect
import json
import pathlib
import re

from te_jax.flax._calls import call_signature
from te_jax.nnx import _layer, modules

STUB = pathlib.Path(modules.__file__).with_suffix(".pyi")
_HEAD = '''"""Written by tests/support/nnx_stubs.py."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from te_jax.flax import KeysValues, TransformerLayerType
from te_jax.nnx._layer import Layer
from te_jax.ops.attention import SequenceDescriptor
from te_jax.ops.rope import PositionSections, Scaling
from te_jax.recipe import Recipe
'''


def _type(annotation) -> str:
    """An annotation as the stub writes it; Any for what it has no name for."""
    if annotation is inspect.Parameter.empty:
        return "Any"
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    text = re.sub(r"\b(?:\w+\.)+(?=(?:Callable|Mapping|Sequence|Any|Array|dtype|Rngs|RngStream|\w+)\b)", _short, text)
    names = set(re.findall(r"[A-Za-z_][\w.]*", text))
    known = {"int", "float", "bool", "str", "tuple", "dict", "list", "None", "type", "object", "Any", "Callable"}
    known |= {
        "Mapping",
        "Sequence",
        "jax.Array",
        "jnp.dtype",
        "nnx.Rngs",
        "nnx.RngStream",
        "Recipe",
        "Scaling",
        "PositionSections",
    }
    known |= {"TransformerLayerType", "SequenceDescriptor", "KeysValues"}
    return text if names <= known else "Any"


def _short(found: re.Match) -> str:
    return {"jax": "jax.", "numpy": "jnp.", "flax": "nnx."}.get(found[0].split(".")[0], "")


def _default(value) -> str:
    if isinstance(value, str):
        return json.dumps(value)
    return repr(value) if value is None or isinstance(value, bool | int | float) else "..."


def _parameters(parameters) -> str:
    """Of a signature, without self: `name: type = default`, a line for each."""
    parts, by_keyword = ["self"], False
    for p in parameters:
        if p.kind is p.VAR_POSITIONAL:
            by_keyword = True
        elif p.kind is p.KEYWORD_ONLY and not by_keyword:
            parts.append("*")
            by_keyword = True
        mark = {p.VAR_POSITIONAL: "*", p.VAR_KEYWORD: "**"}.get(p.kind, "")
        default = "" if p.default is p.empty else f" = {_default(p.default)}"
        kind = _type(p.annotation)
        if p.default is None and kind != "Any" and "None" not in kind:
            kind += " | None"
        parts.append(f"{mark}{p.name}: {kind}{default}")
    return "".join(f"\n        {part}," for part in parts) + "\n    "


def _call(cls: type) -> list[inspect.Parameter]:
    """The parameters of a module's call: the Linen module's, and those that the NNX one adds."""
    linen = list(call_signature(cls.linen_type).parameters.values())
    own = [p for p in inspect.signature(cls.__call__).parameters.values() if p.kind is p.KEYWORD_ONLY]
    own += [p for p in inspect.signature(cls.__call__).parameters.values() if p.name in ("rngs", "out_sharding")]
    added = {p.name: p.replace(kind=p.KEYWORD_ONLY) for p in own}
    added.setdefault("rngs", inspect.Parameter("rngs", inspect.Parameter.KEYWORD_ONLY, default=None))
    return [*linen, *(p for name, p in added.items() if name not in {p.name for p in linen})]


def stub() -> str:
    """The text of modules.pyi."""
    lines = [_HEAD]
    for name, cls in vars(modules).items():
        if not (isinstance(cls, type) and issubclass(cls, _layer.Layer) and cls.__module__ == modules.__name__):
            continue
        if name != cls.__name__:
            lines += [f"{name} = {cls.__name__}", ""]
            continue
        base = next(each for each in cls.__mro__[1:] if issubclass(each, _layer.Layer))
        returned = inspect.signature(cls.linen_type.__call__).return_annotation
        lines.append(f"class {name}({base.__name__}):")
        lines.append(f"    def __init__({_parameters(inspect.signature(cls).parameters.values())}) -> None: ...")
        lines.append(f"    def __call__({_parameters(_call(cls))}) -> {_type(returned)}: ...")
        lines.append("")
    text = "\n".join(lines).rstrip() + "\n"
    used = lambda line: len(re.findall(rf"\b{line.split()[-1]}\b", text)) > 1
    return "\n".join(line for line in text.split("\n") if not line.startswith("from te_jax") or used(line))


if __name__ == "__main__":
    STUB.write_text(stub())
