"""RoPE in a config.json: one word that stands in several places."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from te_jax.core.check import NONE, check, integer, number, one_of, show
from te_jax.hf.words import ABSENT, TABLE, Said, Word, only, refuse
from te_jax.models import ModelConfig
from te_jax.ops.rope import LinearScaling, Llama3Scaling, Scaling, YarnScaling

_THETA, _STRETCH = number(above=1), number(least=1)
_LENGTH = "original_max_position_embeddings"
# rope_type -> its words: (kind, default; ABSENT: it has to be there). The length has a default of its own.
TYPES: dict[str, dict[str, tuple[Any, Any]]] = {
    "default": {},
    "linear": {"factor": (_STRETCH, ABSENT)},
    "llama3": {
        "factor": (_STRETCH, ABSENT),
        "low_freq_factor": (number(above=0), ABSENT),
        "high_freq_factor": (number(above=0), ABSENT),
        _LENGTH: (integer(1), None),
    },
    "yarn": {
        "factor": (_STRETCH, ABSENT),
        "beta_fast": (NONE | number(above=0), 32.0),
        "beta_slow": (NONE | number(above=0), 1.0),
        "mscale": (NONE | number(least=0), 0.0),
        "mscale_all_dim": (NONE | number(least=0), 0.0),
        "attention_factor": (only(None), None),
        "truncate": (only(True), True),
        _LENGTH: (integer(1), None),
    },
}
_SCALINGS: dict[str, type[Scaling]] = {"linear": LinearScaling, "llama3": Llama3Scaling, "yarn": YarnScaling}
_OTHER_NAMES = {_LENGTH: "original_max_position"}  # words that fields have other names than


@dataclass(frozen=True)
class Rotary(Word):
    """`rope_parameters`, or `rope_scaling`, which wins where it is not empty, next to `rope_theta`, which counts where
    the dict has none. `_LENGTH` outside of it wins; without any it is `max_position_embeddings`.

    default: The base where none is said.
    types:   Of `TYPES`.
    """

    types: tuple[str, ...] = ("default", "linear", "llama3")

    def value(self, where: str, said: Said) -> dict[str, Any]:
        """The words of its type, and no others."""
        found = said.found
        for name in ("rope_parameters", "rope_scaling"):
            check(where, name, found.get(name), NONE | TABLE)
        name = "rope_scaling" if found.get("rope_scaling") else "rope_parameters"
        table = found.get(name) or {}
        for key, value in table.items():
            if isinstance(value, Mapping):
                refuse(where, f"{name}[{key!r}]", value, "te_jax reads one RoPE for all layers")
        inside = f"{where}: {name}"
        for at, words in ((where, found), (inside, table)):
            check(at, "rope_theta", words.get("rope_theta", self.default), _THETA)
            check(at, "partial_rotary_factor", words.get("partial_rotary_factor", 1.0), only(1.0, None))
        kind = table.get("rope_type", table.get("type", "default"))
        check(inside, "rope_type", kind, one_of(*self.types))
        made = dict(rope_type=kind, rope_theta=float(table.get("rope_theta", found.get("rope_theta", self.default))))
        for word, (may_be, default) in TYPES[kind].items():
            default = said["max_position_embeddings"] if word == _LENGTH else default
            value = found.get(word, table.get(word, default)) if word == _LENGTH else table.get(word, default)
            if value is ABSENT:
                raise ValueError(f"{inside} has the rope_type {kind!r}, and no {word}; add it.")
            check(inside, word, value, may_be)
            made[word] = default if value is None else value
        _check_pairs(inside, made)
        return made

    def fields(self, said: Said) -> Any:
        """The base and scaling of frequencies and, where it has three fields, the factor of queries and keys."""
        made = said[self.name]
        scaling = _scaling(made)
        factor = scaling.factor if isinstance(scaling, YarnScaling) else 1.0
        mscale = 0.1 * made["mscale_all_dim"] * math.log(factor) + 1 if factor > 1 else 1.0
        return zip(self.to, ((1, made["rope_theta"]), scaling, mscale)[: len(self.to)], strict=True)

    def write(self, config: ModelConfig) -> dict[str, Any]:
        """In the forms of today and of older readers."""
        layer = config.layer
        base, scaling = layer["rotary_pos_emb_windows"][1], layer.get("rotary_pos_emb_scaling")
        kind = next((kind for kind in self.types if type(scaling) is _SCALINGS.get(kind)), "default")
        if scaling is not None and kind == "default":
            raise ValueError(f"te_jax.hf: rotary_pos_emb_scaling is {scaling}, which config.json has no word for.")
        words = [word for word in TYPES[kind] if word not in ("attention_factor", "truncate")]
        own = {word: getattr(scaling, _OTHER_NAMES.get(word, word)) for word in words if not word.startswith("mscale")}
        if isinstance(scaling, YarnScaling):  # of 12 digits, so that what was read is written again
            log = math.log(scaling.factor)
            own |= dict.fromkeys(
                ("mscale", "mscale_all_dim"), round((layer["mscale"] - 1) / (0.1 * log), 12) if log else 1.0
            )
        own |= dict(rope_type=kind)
        return dict(
            rope_parameters=own | dict(rope_theta=base),
            rope_theta=base,
            rope_scaling=None if scaling is None else own | dict(type=kind),
        )


def _scaling(made: Mapping[str, Any]) -> Scaling | None:
    if made["rope_type"] == "default":
        return None
    of = _SCALINGS[made["rope_type"]]
    fields = {_OTHER_NAMES.get(word, word): value for word, value in made.items()}
    names = [name for name in of.__dataclass_fields__ if name in fields]
    return of(**{name: fields[name] if name == _OTHER_NAMES[_LENGTH] else float(fields[name]) for name in names})


def _check_pairs(where: str, made: Mapping[str, Any]) -> None:
    """What two words of a type have to be to each other."""
    for low, high in (("low_freq_factor", "high_freq_factor"), ("beta_slow", "beta_fast")):
        if low in made and made[low] >= made[high]:
            refuse(where, high, made[high], f"pass more than {low}={show(made[low])}")
    if made["rope_type"] == "yarn":
        if made["mscale"] != made["mscale_all_dim"]:
            refuse(where, "mscale", made["mscale"], f"te_jax reads mscale_all_dim, {made['mscale_all_dim']!r}")
        if made["factor"] > 1 and not made["mscale_all_dim"]:
            refuse(where, "mscale_all_dim", made["mscale_all_dim"], "pass more, as 0 would scale only rotary channels")


def rotary(*extra: str, types: tuple[str, ...] = ("default", "linear", "llama3"), default: float = 10_000.0) -> Rotary:
    """The word of RoPE. extra: a further field, the factor of queries and keys."""
    fields = ("layer/rotary_pos_emb_windows", "layer/rotary_pos_emb_scaling", *extra)
    also = ("rope_scaling", "rope_theta", "partial_rotary_factor", _LENGTH)
    return Rotary("rope_parameters", NONE | TABLE, default, also=also, to=fields, types=types)
