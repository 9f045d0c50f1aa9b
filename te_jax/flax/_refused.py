"""Names that the modules take only to refuse them, so that a program written for another version is told what to do.

The names stay fields and call arguments, which keeps the order of the others. What is said of them stands only here:
`_fields.py` refuses any value but None, and docs/fields.md shows `text`.
"""

from dataclasses import dataclass

from te_jax.core.check import Kind


@dataclass(frozen=True)
class Refused(Kind):
    """The kind of a name that takes only None.

    error: what is wrong with another value, a format string of `name` and `value`.
    """

    error: str = ""


_LATER = Refused(
    "None: not in this version",
    lambda value: value is None,
    error="{name}={value!r} is not in this version of te_jax; leave it out",
)


def _older(new: str) -> Refused:
    text = f"None: an older name of {new}"
    return Refused(text, lambda value: value is None, error=f"{{name}} is an older name; use {new}")


FIELDS = dict.fromkeys(("score_mod", "score_mod_bprop"), _LATER)

CALL = dict.fromkeys(("score_mod_tensors", "score_mod_bprop_tensors"), _LATER)

# Fields of MultiHeadAttention; two of the names mean something in other modules.
OLDER = {
    "num_heads": _older("num_attention_heads"),
    "dropout_rate": _older("attention_dropout"),
    "output_layernorm": _older("input_layernorm"),
    "apply_residual_connection_post_layernorm": _older("return_layernorm_output"),
    "fuse_qkv": _older("fuse_qkv_params"),
}


def names(cls: type) -> frozenset[str]:
    """The names that a module's constructor or its call takes only to refuse them."""
    own = [name for name, kind in getattr(cls, "own_kinds", {}).items() if isinstance(kind, Refused)]
    return frozenset((*FIELDS, *CALL, *own))
