"""RoPE in a config.json: one word that stands in several places."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from te_jax.core.check import BOOL, NONE, check, integer, number, one_of, show, tuple_of
from te_jax.hf.words import ABSENT, TABLE, Said, Word, only, refuse
from te_jax.models import ModelConfig
from te_jax.ops.rope import (
    LinearScaling,
    Llama3Scaling,
    PositionSections,
    ProportionalScaling,
    Scaling,
    YarnScaling,
)

_THETA, _STRETCH, _PART = number(above=1), number(least=1), number(above=0, most=1)
_LENGTH, _PART_OF_WIDTH = "original_max_position_embeddings", "partial_rotary_factor"
_MROPE_SIZES, _MROPE_IN_TURN = "mrope_section", "mrope_interleaved"
_THREE_SIZES = NONE | tuple_of(integer(0, 2**31 - 1), 3)
_YARN = {
    "factor": (_STRETCH, ABSENT),
    "beta_fast": (NONE | number(above=0), 32.0),
    "beta_slow": (NONE | number(above=0), 1.0),
    _LENGTH: (integer(1), None),
}
# rope_type, and of what attention, -> its words: (kind, default; ABSENT: it has to be there). The length has a default
# of its own.
TYPES: dict[str, dict[str, tuple[Any, Any]]] = {
    "default": {},
    "linear": {"factor": (_STRETCH, ABSENT)},
    "proportional": {"factor": (_STRETCH, 1.0), _PART_OF_WIDTH: (_PART, 1.0)},
    "llama3": {
        "factor": (_STRETCH, ABSENT),
        "low_freq_factor": (number(above=0), ABSENT),
        "high_freq_factor": (number(above=0), ABSENT),
        _LENGTH: (integer(1), None),
    },
    "yarn": _YARN
    | {
        "attention_factor": (NONE | number(above=0), None),
        "truncate": (BOOL, True),
        "mscale": (only(None), None),
        "mscale_all_dim": (only(None), None),
    },
    "yarn of latents": _YARN
    | {
        "mscale": (NONE | number(least=0), 0.0),
        "mscale_all_dim": (NONE | number(least=0), 0.0),
        "attention_factor": (only(None), None),
        "truncate": (only(True), True),
    },
}
_SCALINGS: dict[str, type[Scaling]] = {
    "linear": LinearScaling,
    "llama3": Llama3Scaling,
    "yarn": YarnScaling,
    "proportional": ProportionalScaling,
}
_OTHER_NAMES = {_LENGTH: "original_max_position", _PART_OF_WIDTH: "share"}  # words that fields have other names than
ROPE_FIELDS = ("rotary_pos_emb_windows", "rotary_pos_emb_scaling")


@dataclass(frozen=True)
class Rotary(Word):
    """`rope_parameters`, or `rope_scaling`, which wins where it is not empty, next to `rope_theta`, which counts where
    the dict has none. `_LENGTH` outside of it wins; without any it is `max_position_embeddings`.

    default: The base where none is said.
    types:   Of `TYPES`.
    part:    The share of a head's channels that turn, where none is said; None: all do.
    absent:  The dict where config.json has none.
    sections: Which pairs turn by which of three positions, where none are said; None: tokens have one position.
    """

    types: tuple[str, ...] = ("default", "linear", "llama3")
    part: float | None = None
    absent: Mapping[str, Any] | None = None
    sections: PositionSections | None = None

    def value(self, where: str, said: Said) -> dict[str, Any]:
        """The words of its type, and no others."""
        found = said.found
        for name in ("rope_parameters", "rope_scaling"):
            check(where, name, found.get(name), NONE | TABLE)
        name = "rope_scaling" if found.get("rope_scaling") else "rope_parameters"
        table = (self.absent if found.get(name) is None else found[name]) or {}
        for key, value in table.items():
            if isinstance(value, Mapping):
                refuse(where, f"{name}[{key!r}]", value, "te_jax reads one RoPE for all layers")
        return self._made(where, name, table, said, self.default)

    def _made(self, where: str, name: str, table: Mapping[str, Any], said: Said, default: float) -> dict[str, Any]:
        """The words of the dict `name`, and what stands outside. default: of the base."""
        found, inside = said.found, f"{where}: {name}"
        part = only(1.0, None) if self.part is None else _PART
        key = table.get("rope_type", table.get("type", "default"))
        for at, words, may_be in ((where, found, part), (inside, table, _PART if key == "proportional" else part)):
            check(at, "rope_theta", words.get("rope_theta", default), _THETA)
            check(at, _PART_OF_WIDTH, words.get(_PART_OF_WIDTH, 1.0), may_be)
        if key == "mrope" and self.sections is not None and not self.sections.interleaved:
            key = "default"  # as transformers takes Qwen2-VL's
        names = {name.split()[0]: name for name in self.types}
        check(inside, "rope_type", key, one_of(*names))
        made = dict(rope_type=key, rope_theta=float(table.get("rope_theta", found.get("rope_theta", default))))
        if self.part is not None:
            made[_PART_OF_WIDTH] = float(table.get(_PART_OF_WIDTH, found.get(_PART_OF_WIDTH, self.part)))
        if self.sections is not None:
            check(inside, _MROPE_SIZES, table.get(_MROPE_SIZES), _THREE_SIZES)
            in_turn = self.sections.interleaved
            check(inside, _MROPE_IN_TURN, table.get(_MROPE_IN_TURN, in_turn), only(in_turn))
            made |= _words_of_sections(replace(self.sections, sizes=table.get(_MROPE_SIZES) or self.sections.sizes))
        for word, (may_be, default) in TYPES[names[key]].items():
            default = said["max_position_embeddings"] if word == _LENGTH else default
            value = found.get(word, table.get(word, default)) if word == _LENGTH else table.get(word, default)
            if value is ABSENT:
                raise ValueError(f"{inside} has the rope_type {key!r}, and no {word}; add it.")
            check(inside, word, value, may_be)
            made[word] = default if value is None else value
        _check_pairs(inside, made, names[key])
        return made

    def fields(self, said: Said) -> Iterable[tuple[str, Any]]:
        """The fields that `turning` makes and `to` names."""
        made = turning(said[self.name], said["head_dim"])
        return [(path, made[path.rsplit("/", 1)[-1]]) for path in self.to]

    def write(self, config: ModelConfig) -> dict[str, Any]:
        """In the forms of today and of older readers."""
        own = self._written(config.hidden_size, config.layer)
        scaled = own["rope_type"] != "default"
        outside = {name: own[name] for name in ("rope_theta", _PART_OF_WIDTH) if name in own}
        scaling = {name: value for name, value in own.items() if name not in outside} | dict(type=own["rope_type"])
        return dict(rope_parameters=own, rope_scaling=scaling if scaled else None, **outside)

    def _written(self, hidden_size: int, layer: Mapping[str, Any]) -> dict[str, Any]:
        """The dict of a layer with these fields."""
        base, scaling = layer["rotary_pos_emb_windows"][1], layer.get("rotary_pos_emb_scaling")
        keys = {name.split()[0]: name for name in self.types}
        kind = next((kind for kind in keys if type(scaling) is _SCALINGS.get(kind)), "default")
        if scaling is not None and kind == "default":
            raise ValueError(f"te_jax.hf: rotary_pos_emb_scaling is {scaling}, which config.json has no word for.")
        names = {word: _OTHER_NAMES.get(word, word) for word in TYPES[keys[kind]]}
        held = getattr(scaling, "__dataclass_fields__", ())
        own = {word: getattr(scaling, name) for word, name in names.items() if name in held}
        width = layer.get("kv_channels") or hidden_size // layer["num_attention_heads"]
        if keys[kind] == "yarn":
            own |= _written_factor(scaling, layer, width)
        if keys[kind] == "yarn of latents":  # of 12 digits, so that what was read is written again
            log = math.log(scaling.factor)
            own |= dict.fromkeys(
                ("mscale", "mscale_all_dim"), round((layer["mscale"] - 1) / (0.1 * log), 12) if log else 1.0
            )
            del own["truncate"]
        sections = layer.get("rotary_pos_emb_sections")
        if sections is not None and (self.sections is None or sections.interleaved != self.sections.interleaved):
            raise ValueError(f"te_jax.hf: rotary_pos_emb_sections is {sections}, which config.json has no word for.")
        own |= {} if sections is None else _words_of_sections(sections)
        if self.part is not None:
            own |= {_PART_OF_WIDTH: _share(layer.get("rotary_pos_emb_dim") or width, width)}
        return own | dict(rope_type=kind, rope_theta=base)


@dataclass(frozen=True)
class RotaryByType(Rotary):
    """A dict of dicts by the types of layers; older ones have `rope_scaling` of some types, and bases outside.

    default: {type: the base where none is said}.
    outside: (type, the word outside of it that says the base, too).
    scaled:  the types that `rope_scaling` belongs to.
    absent:  {type: its dict where config.json has none}.
    """

    outside: tuple[tuple[str, str], ...] = ()
    scaled: tuple[str, ...] = ("full_attention",)

    def value(self, where: str, said: Said) -> dict[str, dict[str, Any]]:
        """{type: the words of its RoPE}."""
        found = said.found
        for name in ("rope_parameters", "rope_scaling"):
            check(where, name, found.get(name), NONE | TABLE)
        tables = found.get("rope_parameters") or self.absent or {}
        for key, value in tables.items():
            if key not in self.default:
                refuse(where, f"rope_parameters[{key!r}]", value, f"te_jax reads a dict for each of {[*self.default]}")
            check(f"{where}: rope_parameters", key, value, NONE | TABLE)
        scaling = found.get("rope_scaling") or {}
        if scaling and "rope_type" not in scaling:  # transformers takes it for "default", whatever "type" says
            refuse(where, "rope_scaling", scaling, "pass a rope_type")
        for _, word in self.outside:
            check(where, word, found.get(word, 2.0), _THETA)
        made = {}
        for key, base in self.default.items():
            table = {**(tables.get(key) or {})}
            if key in self.scaled:
                table |= scaling
            base = found.get(dict(self.outside).get(key, ""), base)
            inside = Said({name: value for name, value in found.items() if name not in ("rope_theta", _LENGTH)})
            inside |= said
            name = f"rope_parameters[{key!r}]"
            check(f"{where}: {name}", "truncate", table.get("truncate", True), only(True))  # transformers reads none
            made[key] = self._made(where, name, table, inside, base)
        return made

    def fields(self, said: Said) -> Iterable[tuple[str, Any]]:
        """The word of the types of layers says them."""
        return ()

    def write(self, config: ModelConfig) -> dict[str, Any]:
        """Of the types that the model has."""
        made: dict[str, Any] = {}
        for i in range(config.num_layers):
            fields = config.fields_of_layer(i)
            key = type_by_window(fields)
            if key not in made:
                made[key] = self._written(config.hidden_size, fields)
        return dict(rope_parameters=made)


TYPES_BY_WINDOW = ("sliding_attention", "full_attention")


def type_by_window(fields: Mapping[str, Any]) -> str:
    """The type of a layer with these fields, of two."""
    return "full_attention" if fields.get("window_size") is None else "sliding_attention"


def turning(made: Mapping[str, Any], width: int) -> dict[str, Any]:
    """The fields of a layer whose RoPE has these words, with heads of `width` channels."""
    scaling, factor = _scaling(made), made.get("factor", 1.0)
    log = 0.1 * math.log(factor) if factor > 1 else 0.0
    stretched = made.get("attention_factor") or 1 + log  # of queries and of keys
    part, sizes = made.get(_PART_OF_WIDTH, 1.0), made.get(_MROPE_SIZES)
    sections = None if sizes is None else PositionSections(sizes, _MROPE_IN_TURN in made)
    return dict(
        rotary_pos_emb_windows=(1, made["rope_theta"]),
        rotary_pos_emb_scaling=scaling,
        rotary_pos_emb_dim=None if part == 1 else int(width * part),
        mscale=(made.get("mscale_all_dim") or 0.0) * log + 1,
        attn_logit_scale=stretched**2 / math.sqrt(width) if isinstance(scaling, YarnScaling) else None,
        rotary_pos_emb_sections=sections,
    )


def _words_of_sections(sections: PositionSections) -> dict[str, Any]:
    return {_MROPE_SIZES: [*sections.sizes]} | ({_MROPE_IN_TURN: True} if sections.interleaved else {})


def _share(turned: int, width: int) -> float:
    """The part of a head's channels of which `turned` turn, as a number that gives them again."""
    return next(part for part in (turned / width, math.nextafter(turned / width, 2)) if int(width * part) == turned)


def _written_factor(scaling: Scaling, layer: Mapping[str, Any], width: int) -> dict[str, Any]:
    """The factor of queries and keys, where it is not the one that the scaling has."""
    held = layer.get("attn_logit_scale") or 1 / math.sqrt(width)
    found = math.sqrt(held * math.sqrt(width))
    log = 0.1 * math.log(scaling.factor) if scaling.factor > 1 else 0.0
    return {} if math.isclose(found, 1 + log) else dict(attention_factor=round(found, 12))


def _scaling(made: Mapping[str, Any]) -> Scaling | None:
    if made["rope_type"] == "default":
        return None
    of = _SCALINGS[made["rope_type"]]
    fields = {_OTHER_NAMES.get(word, word): value for word, value in made.items()}
    names = [name for name in of.__dataclass_fields__ if name in fields]
    kept = (_OTHER_NAMES[_LENGTH], "truncate")
    return of(**{name: fields[name] if name in kept else float(fields[name]) for name in names})


def _check_pairs(where: str, made: Mapping[str, Any], kind: str) -> None:
    """What two words of a type have to be to each other."""
    if made.get("low_freq_factor", 0) > made.get("high_freq_factor", 0):
        least = show(made["low_freq_factor"])
        refuse(where, "high_freq_factor", made["high_freq_factor"], f"pass at least low_freq_factor={least}")
    if made.get("beta_slow", 0) >= made.get("beta_fast", 1):
        refuse(where, "beta_fast", made["beta_fast"], f"pass more than beta_slow={show(made['beta_slow'])}")
    if kind == "yarn of latents":
        if made["mscale"] != made["mscale_all_dim"]:
            refuse(where, "mscale", made["mscale"], f"te_jax reads mscale_all_dim, {made['mscale_all_dim']!r}")
        if made["factor"] > 1 and not made["mscale_all_dim"]:
            refuse(where, "mscale_all_dim", made["mscale_all_dim"], "pass more, as 0 would scale only rotary channels")


def rotary(
    *extra: str,
    types: tuple[str, ...] = ("default", "linear", "llama3"),
    default: float = 10_000.0,
    part: float | None = None,
    stretched: bool = False,
    sections: PositionSections | None = None,
) -> Rotary:
    """The word of RoPE. extra: further fields of `turning` that it becomes. stretched: YaRN too, which scales logits,
    where no other word does, and all channels turn. sections: as of `Rotary`."""
    if stretched:
        extra, types = (*extra, "attn_logit_scale"), (*types, "yarn")
    if sections is not None:
        extra = (*extra, "rotary_pos_emb_sections")
    fields = tuple(f"layer/{field}" for field in (*ROPE_FIELDS, *extra))
    also = ("rope_scaling", "rope_theta", _PART_OF_WIDTH, _LENGTH)
    own = dict(types=types, part=part, sections=sections)
    return Rotary("rope_parameters", NONE | TABLE, default, also=also, to=fields, **own)


def rotary_by_type(
    default: Mapping[str, float], outside: Mapping[str, str], types: tuple[str, ...] = ("default", "linear", "llama3")
) -> RotaryByType:
    """The word of RoPE that types of layers have each of their own, and its words as of `RotaryByType`."""
    also = ("rope_scaling", *outside.values())
    return RotaryByType("rope_parameters", NONE | TABLE, default, also=also, types=types, outside=(*outside.items(),))


def pairs_turn(said: Said) -> tuple[str, str] | None:
    """RoPE turns pairs of a part of a head's channels."""
    width = int(said["head_dim"] * said["rope_parameters"][_PART_OF_WIDTH])
    if width % 2 or not width:
        return (
            "rope_parameters",
            f"{_PART_OF_WIDTH} of {said['head_dim']} channels gives {width}; pass a positive even number",
        )
    return None


def sections_fit(said: Said) -> tuple[str, str] | None:
    """Parts of the pairs of a head, which turn by a position each, are all of them."""
    sizes, pairs = said["rope_parameters"][_MROPE_SIZES], said["head_dim"] // 2
    if sum(sizes) != pairs:
        return "rope_parameters", f"{_MROPE_SIZES} is {sizes}; pass sizes that add up to {pairs}, the pairs of channels"
    return None
