"""Tensors and words of Mamba-2, and of stacks of it and attention, as hybrid models have them."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from te_jax.core.check import Kind, number
from te_jax.flax.mamba import Mamba2
from te_jax.hf import rules
from te_jax.hf.family import LAYER, joins_qkv
from te_jax.hf.rules import TensorRule
from te_jax.hf.words import SIZE, Said, Word
from te_jax.models import ModelConfig

# -- words ------------------------------------------------------------------------------------------------------

_OLDER_TYPES = {"linear_attention": "mamba", "full_attention": "attention"}  # what transformers 5 calls layers, and 4


@dataclass(frozen=True)
class TypesOfLayers(Word):
    """The types of layers, by their names in transformers 4, which all readers know."""

    def value(self, where: str, said: Said) -> list[str]:
        return [_OLDER_TYPES.get(name, name) for name in super().value(where, said)]


def layers_of(c: ModelConfig, name: str, type_of: Callable[[dict[str, Any]], str]) -> tuple[int, ...]:
    """The layers of this type. type_of: the fields of a layer -> its type."""
    return tuple(i for i in range(c.num_layers) if type_of(c.fields_of_layer(i)) == name)


def ssm_of(c: ModelConfig) -> dict[str, Any]:
    """The fields of `Mamba2` in the model's layers, defaults put in."""
    return {name: field.default for name, field in Mamba2.__dataclass_fields__.items()} | dict(c.layer.get("ssm") or {})


def ssm_word(name: str, default: Any, field: str, kind: Kind = SIZE, **more: Any) -> Word:
    """A word that becomes a field of Mamba-2."""
    return Word(name, kind, default, to=(f"layer/ssm/{field}",), **dict(theirs=lambda c: ssm_of(c)[field]) | more)


_INFINITY = {"__float__": "Infinity"}  # as transformers writes it, since JSON has none


def _bounds(value: Any) -> tuple[Any, ...]:
    return tuple(math.inf if each in (math.inf, _INFINITY) else each for each in value)


def _are_bounds(value: list[Any]) -> bool:
    low, high = _bounds(value) if len(value) == 2 else (None, None)
    finite = number(least=0)
    return finite.accepts(low) and (high == math.inf or finite.accepts(high)) and low <= high


@dataclass(frozen=True)
class _Limit(Word):
    def value(self, where: str, said: Said) -> list[float]:
        return [*map(float, _bounds(super().value(where, said)))]


TIME_STEP_LIMIT = _Limit(
    "time_step_limit",
    Kind("a list of two numbers of at least 0, in order", lambda value: isinstance(value, list), _are_bounds),
    [0.0, math.inf],
    to=("layer/ssm/time_step_limit",),
    ours=lambda said: (tuple(said["time_step_limit"]),),
    theirs=lambda c: [_INFINITY if each == math.inf else each for each in ssm_of(c)["time_step_limit"]],
)


# -- tensors ----------------------------------------------------------------------------------------------------


def _mamba_rules(path: str, name: str, norm: str, ssm: Mapping[str, Any]) -> list[TensorRule]:
    """`path`, a `Mamba2` with these fields, of the module `name` of transformers and the norm in front of it.

    Transformers has one projection to z, x, B, C and dt, and one convolution of x, B and C.
    """
    inner, groups = ssm["ssm_num_heads"] * ssm["ssm_head_dim"], ssm["ssm_num_groups"] * ssm["ssm_state_size"]
    widths = dict(z=inner, x=inner, B=groups, C=groups, dt=ssm["ssm_num_heads"])
    taps = {part: widths[part] for part in "xBC"}
    stack = "layers"
    cut = lambda end, parts, form: (tuple(f"{path}/{part}{end}" for part in parts), form)
    as_it_is = lambda parts: rules.parted([*parts.values()])
    joined = {
        "in_proj.weight": cut("/kernel", widths, rules.parted([*widths.values()], jnp.transpose, jnp.transpose)),
        "conv1d.weight": cut("_conv_kernel", taps, rules.parted_taps([*taps.values()])),
    }
    joined |= {"in_proj.bias": cut("/bias", widths, as_it_is(widths))} if ssm["use_bias"] else {}
    joined |= {"conv1d.bias": cut("_conv_bias", taps, as_it_is(taps))} if ssm["use_conv_bias"] else {}
    made = [TensorRule(ours, (f"{name}.{theirs}",), form, stack) for theirs, (ours, form) in joined.items()]
    made += [TensorRule((f"{path}/{own}",), (f"{name}.{own}",), rules.SAME, stack) for own in ("A_log", "D", "dt_bias")]
    made.append(TensorRule((f"{path}/norm_scale",), (f"{name}.norm.weight",), rules.SAME, stack))
    made += rules.dense_rules(f"{path}/out", f"{name}.out_proj", ssm["use_bias"], stack)
    return made + rules.norm_rules(f"{path}/x", norm, False, stack)


def mixer_rules(
    c: ModelConfig, type_of: Callable[[dict[str, Any]], str], mamba: str, attention: str, norm: str
) -> list[TensorRule]:
    """The mixers of layers that are "mamba" or "attention" by `type_of`. mamba, attention, norm: the names of either,
    and of the norm in front of both, in transformers; `{i}` in them is the layer."""
    fused, ours = joins_qkv(c), f"{LAYER}/attention"
    attends = rules.norm_rules(f"{ours}/{'qkv' if fused else 'query'}", norm, False, "layers")
    names = (f"{attention}.{name}_proj" for name in "qkvo")
    attends += rules.attention_rules(ours, *names, fused=fused, stack="layers")
    made = dict(mamba=_mamba_rules(f"{LAYER}/mamba", mamba, norm, ssm_of(c)), attention=attends)
    return [rule._replace(layers=layers_of(c, name, type_of)) for name, of_type in made.items() for rule in of_type]
