"""Words of decoders whose layers differ by type: in what they see, and in RoPE."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

from te_jax.core.check import NONE, Kind
from te_jax.hf.rotary import ROPE_FIELDS, TYPES_BY_WINDOW, turning, type_by_window
from te_jax.hf.words import LIST_OF_NAMES, SIZE, Said, Word
from te_jax.models import ModelConfig
from te_jax.models.patterns import pattern_of

Fields = dict[str, Any]


def of_window(said: Said) -> Fields:
    """The field of layers that see the last `sliding_window` tokens."""
    return {"window_size": (said["sliding_window"] - 1, 0)}


def first_of(c: ModelConfig, field: str, unset: Any = None) -> Any:
    """The field of the first layer that has it."""
    found = (c.fields_of_layer(i).get(field) for i in range(c.num_layers))
    return next((each for each in found if each is not None), unset)


def first_window(c: ModelConfig) -> int | None:
    """The window of the first layer that has one."""
    window = first_of(c, "window_size")
    return None if window is None else window[0] + 1


# Which layers have it, other words say.
WINDOW_OF_SOME = Word("sliding_window", NONE | SIZE, theirs=first_window)


def pattern(names: Sequence[Hashable], fields: Callable[[Any], Fields]) -> tuple[Fields, ...]:
    """`ModelConfig.pattern` of layers of these names; () where none differs from `ModelConfig.layer`."""
    made = pattern_of(names, {name: fields(name) for name in {*names}})
    return tuple(map(dict, made)) if any(made) else ()


def by_window(said: Said, name: str) -> Fields:
    """The fields of layers of this type that only the window tells from others."""
    return of_window(said) if name == "sliding_attention" else {}


def rope_and_window(said: Said, name: str) -> Fields:
    """The fields of layers whose type has a RoPE of its own, too."""
    made = turning(said["rope_parameters"][name], said["head_dim"])
    names = (*ROPE_FIELDS, "attn_logit_scale")
    return by_window(said, name) | {field: made[field] for field in names if made[field] is not None}


def layer_types(every: int | str, fields: Callable[[Said, str], Fields]) -> Word:
    """`layer_types` of layers that see a window, or all.

    every:  where it is absent each so many-th sees all, or the word that says how many.
    fields: (said, type) -> the fields of layers of a type.
    """

    def due(said: Said) -> list[str]:
        period = said[every] if isinstance(every, str) else every
        return [TYPES_BY_WINDOW[(i + 1) % period == 0] for i in range(said["num_hidden_layers"])]

    due.__doc__ = f"sliding_attention, and full_attention in each {every}-th layer"
    return Word(
        "layer_types",
        NONE | LIST_OF_NAMES,
        None,
        null=due,
        to=("pattern",),
        ours=lambda said: (pattern(said["layer_types"], lambda name: fields(said, name)),),
        theirs=lambda c: [type_by_window(c.fields_of_layer(i)) for i in range(c.num_layers)],
    )


def layers_are_known(said: Said) -> tuple[str, str] | None:
    """As many types as layers, and a window for those that need it."""
    types, count = said["layer_types"], said["num_hidden_layers"]
    if len(types) != count or not {*types} <= {*TYPES_BY_WINDOW}:
        return "layer_types", f"pass num_hidden_layers={count} times one of {[*TYPES_BY_WINDOW]}"
    if "sliding_attention" in types and said["sliding_window"] is None:
        return "sliding_window", "layer_types has sliding_attention; pass a positive int"
    return None


# -- layers without RoPE ----------------------------------------------------------------------------------------

_FLAGS = Kind(
    "a list of 0 and 1",
    lambda value: isinstance(value, list),
    lambda value: all(type(each) is int and each in (0, 1) for each in value),
)


def _all_but_some(said: Said) -> list[int]:
    """all but each no_rope_layer_interval-th"""
    return [int((i + 1) % said["no_rope_layer_interval"] != 0) for i in range(said["num_hidden_layers"])]


ROPE_BY_LAYER = (
    Word("no_rope_layer_interval", SIZE, 4),
    Word(
        "no_rope_layers",
        NONE | _FLAGS,
        None,
        null=_all_but_some,
        theirs=lambda c: [int(c.fields_of_layer(i)["enable_rotary_pos_emb"]) for i in range(c.num_layers)],
    ),
)


def turning_is_known(said: Said) -> tuple[str, str] | None:
    """A flag for each layer."""
    if len(said["no_rope_layers"]) < said["num_hidden_layers"]:
        return "no_rope_layers", f"pass num_hidden_layers={said['num_hidden_layers']} of them"
    return None
