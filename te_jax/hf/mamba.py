"""Tensors of Mamba-2 layers, and words that hybrid models share: which layers have what, and limits of steps."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import jax.numpy as jnp

from te_jax.core.check import Kind, number
from te_jax.hf import rules
from te_jax.hf.rules import Recast, TensorRule
from te_jax.hf.words import Said, Word
from te_jax.models import ModelConfig

# -- words ------------------------------------------------------------------------------------------------------

_OLDER_TYPES = {"linear_attention": "mamba", "full_attention": "attention"}  # what transformers 5 calls layers, and 4


@dataclass(frozen=True)
class TypesOfLayers(Word):
    """The types of layers, by their names in transformers 4, which all readers know."""

    def value(self, where: str, said: Said) -> list[str]:
        return [_OLDER_TYPES.get(name, name) for name in super().value(where, said)]


def pattern_of(types: Sequence[str], fields: dict[str, dict[str, Any]]) -> tuple[dict[str, Any], ...]:
    """`ModelConfig.pattern` of layers of these types: the shortest one. fields: of each type."""
    period = next(n for n in range(1, len(types) + 1) if types[n:] == types[:-n])
    return tuple(fields[name] for name in types[:period])


def layers_with(c: ModelConfig, holds: Callable[[dict[str, Any]], bool]) -> tuple[int, ...]:
    """The layers whose fields are such."""
    return tuple(i for i in range(c.num_layers) if holds(c.fields_of_layer(i)))


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
    theirs=lambda c: [_INFINITY if each == math.inf else each for each in c.layer["ssm"]["time_step_limit"]],
)


# -- tensors ----------------------------------------------------------------------------------------------------


def _parted(sizes: Sequence[int], ours: Callable = lambda a: a, theirs: Callable = lambda a: a) -> Recast:
    """One tensor whose leading axis holds, so many each, what several parameters are made of. ours, theirs: of each
    part."""
    ends = [*accumulate(sizes)][:-1]
    return Recast(
        lambda a: tuple(map(ours, jnp.split(a, ends))), lambda *parts: (jnp.concatenate([*map(theirs, parts)]),)
    )


def mamba_rules(path: str, name: str, norm: str, ssm: Mapping[str, Any], layers: tuple[int, ...]) -> list[TensorRule]:
    """`path`, a `Mamba2` with these fields, of the module `name` of transformers and the norm in front of it, in these
    layers.

    Transformers has one projection to z, x, B, C and dt, and one convolution of x, B and C.
    """
    inner, groups = ssm["ssm_num_heads"] * ssm["ssm_head_dim"], ssm["ssm_num_groups"] * ssm["ssm_state_size"]
    widths = dict(z=inner, x=inner, B=groups, C=groups, dt=ssm["ssm_num_heads"])
    taps = {part: widths[part] for part in "xBC"}
    stack = "layers"
    cut = lambda end, parts, *forms: (
        tuple(f"{path}/{part}{end}" for part in parts),
        _parted([*parts.values()], *forms),
    )
    joined = {
        "in_proj.weight": cut("/kernel", widths, jnp.transpose, jnp.transpose),
        "conv1d.weight": cut("_conv_kernel", taps, lambda a: a[:, 0].T, lambda a: a.T[:, None]),
    }
    joined |= {"in_proj.bias": cut("/bias", widths)} if ssm["use_bias"] else {}
    joined |= {"conv1d.bias": cut("_conv_bias", taps)} if ssm["use_conv_bias"] else {}
    made = [TensorRule(ours, (f"{name}.{theirs}",), form, stack) for theirs, (ours, form) in joined.items()]
    made += [TensorRule((f"{path}/{own}",), (f"{name}.{own}",), rules.SAME, stack) for own in ("A_log", "D", "dt_bias")]
    made.append(TensorRule((f"{path}/norm_scale",), (f"{name}.norm.weight",), rules.SAME, stack))
    made += rules.dense_rules(f"{path}/out", f"{name}.out_proj", ssm["use_bias"], stack)
    made += rules.norm_rules(f"{path}/x", norm, False, stack)
    return [rule._replace(layers=layers) for rule in made]
