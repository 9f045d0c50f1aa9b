"""Nemotron-H, Nemotron Nano v2 and Nemotron 3: a layer is Mamba-2, attention, an MLP or experts."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from te_jax.core.check import BOOL, NONE, RATE, STRING, Kind, integer, number
from te_jax.hf import rules
from te_jax.hf.experts import CHOSEN_BY_SIGMOIDS, GROUPS_FIT, bias_rule, expert_word
from te_jax.hf.family import (
    DECODER,
    GROUPS,
    LAYER,
    NO_WINDOW,
    Family,
    divides,
    dropout,
    epsilon,
    head_dim,
    head_of,
    tables,
)
from te_jax.hf.mamba import TIME_STEP_LIMIT, TypesOfLayers, layers_of, mixer_rules, ssm_of, ssm_word
from te_jax.hf.rules import TensorRule
from te_jax.hf.words import ABSENT, LAYERS, LIST_OF_NAMES, SIZE, Check, Said, Word, fixed, only, unused, words_of
from te_jax.models import CausalLM, ModelConfig, families
from te_jax.models.families import Size, StateSpace
from te_jax.models.patterns import pattern_of

# -- types of layers --------------------------------------------------------------------------------------------

_LETTERS = {"mamba": "M", "moe": "E", "attention": "*", "mlp": "-"}
_PATTERN = "hybrid_override_pattern"
_LETTERS_OF_LAYERS = Kind(
    "a string of at most 10000 letters M, E, * and -",
    lambda value: isinstance(value, str),
    lambda value: LAYERS.accepts(len(value)) and {*value} <= {*_LETTERS.values()},
)


def _by_letters(said: Said) -> list[str]:
    """what hybrid_override_pattern says, or one of each"""
    types = {letter: name for name, letter in _LETTERS.items()}
    letters = said[_PATTERN]
    return [types[letter] for letter in (types if letters is ABSENT else letters)]


def _kind_of(fields: dict[str, Any]) -> str:
    """ "both" is none of the family."""
    kind = fields.get("sublayers", "both")
    if kind == "mixer":
        return "attention" if fields.get("ssm") is None else "mamba"
    if kind == "mlp":
        return "mlp" if fields.get("moe") is None else "moe"
    return kind


def _kinds_of(c: ModelConfig) -> list[str]:
    return [_kind_of(c.fields_of_layer(i)) for i in range(c.num_layers)]


def _pattern_again(c: ModelConfig) -> Any:
    """Where the config.json that was read has it: transformers writes only the other word."""
    types = _kinds_of(c)
    if c.origin is None or _PATTERN not in c.origin.found() or not {*types} <= _LETTERS.keys():
        return ABSENT
    return "".join(_LETTERS[name] for name in types)


def _pattern(said: Said) -> tuple[Any]:
    return (pattern_of([_LETTERS[name] for name in said["layers_block_type"]], families.NEMOTRON_LAYERS),)


def _number_of_types(said: Said) -> int:
    """the number of layers_block_type"""
    return len(said["layers_block_type"])


# -- experts ----------------------------------------------------------------------------------------------------


def _expert_width(said: Said) -> tuple[int | None]:
    """None where it is the MLP's."""
    width = said["moe_intermediate_size"]
    return (None if width == said["intermediate_size"] else width,)


def _expert_width_of(c: ModelConfig) -> Any:
    moe = c.layer.get("moe")
    return (moe.get("intermediate_dim") or c.layer["mlp_hidden_size"]) if moe else ABSENT


def _shared_width_of(c: ModelConfig) -> Any:
    moe = c.layer.get("moe")
    return moe.get("num_shared_experts", 0) * _expert_width_of(c) if moe else ABSENT


# -- words ------------------------------------------------------------------------------------------------------

_PREDICTED = unused("num_nextn_predict_layers", integer(0, 1000), 0)
_OF_NEMOTRON = words_of(
    Word(_PATTERN, _LETTERS_OF_LAYERS, ABSENT, theirs=_pattern_again),
    TypesOfLayers(
        "layers_block_type",
        NONE | LIST_OF_NAMES,
        None,
        null=_by_letters,
        also=("layer_types",),
        to=("pattern",),
        ours=_pattern,
        theirs=_kinds_of,
    ),
    *DECODER,
    Word("tie_word_embeddings", only(False), False, to=("tie_embeddings",)),  # transformers ties none
    GROUPS,
    head_dim(may_be=SIZE),
    epsilon("layer_norm_epsilon"),
    dropout("attention_dropout", "attention_dropout"),
    NO_WINDOW,
    fixed("mlp_hidden_act", "relu2"),
    fixed("mamba_hidden_act", "silu"),
    *(fixed(name, False) for name in ("attention_bias", "mlp_bias", "residual_in_fp32")),
    ssm_word("mamba_num_heads", 128, "ssm_num_heads"),
    ssm_word("mamba_head_dim", 64, "ssm_head_dim"),
    ssm_word("ssm_state_size", 128, "ssm_state_size"),
    ssm_word("n_groups", 8, "ssm_num_groups", also=("mamba_n_groups",)),
    ssm_word("conv_kernel", 4, "conv_width", integer(2, 4), also=("mamba_d_conv",)),
    ssm_word("use_conv_bias", True, "use_conv_bias", BOOL, also=("mamba_conv_bias",)),
    ssm_word("use_bias", False, "use_bias", BOOL),
    *CHOSEN_BY_SIGMOIDS,
    Word(
        "moe_intermediate_size",
        SIZE,
        7688,
        to=("layer/moe/intermediate_dim",),
        ours=_expert_width,
        theirs=_expert_width_of,
    ),
    Word(
        "moe_shared_expert_intermediate_size",
        SIZE,
        7688,
        to=("layer/moe/num_shared_experts",),
        ours=lambda said: (said["moe_shared_expert_intermediate_size"] // said["moe_intermediate_size"],),
        theirs=_shared_width_of,
    ),
    fixed("n_shared_experts", 1),  # some programs multiply the width by it
    expert_word("moe_latent_size", "latent_size", None, kind=NONE | SIZE),
    replace(TIME_STEP_LIMIT, also=("mamba_dt_limit",), to=(), ours=None, theirs=lambda c: ABSENT),
    Word(
        "time_step_min",
        number(least=0),
        0.001,
        also=("mamba_dt_min",),
        to=("layer/ssm/time_step_limit",),
        ours=lambda said: ((float(said["time_step_min"]), math.inf),),
        theirs=lambda c: ssm_of(c)["time_step_limit"][0],
    ),
    unused("time_step_max", number(), 0.1, ("mamba_dt_max",)),
    unused("time_step_floor", number(), 1e-4, ("mamba_dt_init_floor",)),
    *(unused(name, BOOL) for name in ("mamba_proj_bias", "use_mamba_kernels", "moe_shared_expert_overlap")),
    unused("rescale_prenorm_residual", BOOL),
    unused("chunk_size", SIZE, 128, ("mamba_chunk_size",)),
    unused("expand", SIZE, 2, ("mamba_expand",)),
    unused("hidden_dropout", RATE),
    unused("num_logits_to_keep", NONE | integer()),
    unused("mamba_ssm_cache_dtype", STRING),
    unused("mtp_layers_block_type", NONE | LIST_OF_NAMES),
    _PREDICTED,
    vocab_size=131072,
    hidden_size=4096,
    intermediate_size=21504,
    num_hidden_layers=_number_of_types,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=4096,
    attention_dropout=0.0,
    layer_norm_epsilon=1e-5,
    n_routed_experts=8,
    num_experts_per_tok=2,
    n_group=1,
    topk_group=1,
    routed_scaling_factor=1.0,
)


def _layers_are_known(said: Said) -> tuple[str, str] | None:
    types, count = said["layers_block_type"], said["num_hidden_layers"]
    if not LAYERS.accepts(len(types)) or not {*types} <= _LETTERS.keys():
        return "layers_block_type", f"pass for each layer one of {[*_LETTERS]}"
    if len(types) != count:
        return "num_hidden_layers", f"layers_block_type, or {_PATTERN}, says {len(types)} layers"
    if said[_PATTERN] not in (ABSENT, "".join(map(_LETTERS.__getitem__, types))):
        return _PATTERN, "layers_block_type says other layers; leave one of them out"
    return None


def _steps_have_a_least(said: Said) -> tuple[str, str] | None:
    if said["time_step_limit"] != [0.0, math.inf]:
        return "time_step_limit", "the least is time_step_min, as in transformers, and there is no most: leave it out"
    return None


def _shared_experts_fit(said: Said) -> tuple[str, str] | None:
    """The MLP that all tokens meet is as wide as some experts."""
    name, width = "moe_shared_expert_intermediate_size", said["moe_intermediate_size"]
    if said[name] % width:
        return name, f"te_jax reads a multiple of moe_intermediate_size={width}"
    return None


_NEMOTRON_CHECKS: tuple[Check, ...] = (
    _layers_are_known,
    divides("num_key_value_heads", "num_attention_heads"),
    divides("n_groups", "mamba_num_heads"),
    *GROUPS_FIT,
    _shared_experts_fit,
    _steps_have_a_least,
)


# -- tensors ----------------------------------------------------------------------------------------------------


def _nemotron_rules(c: ModelConfig) -> list[TensorRule]:
    stack, name, norm = "layers", "backbone.layers.{i}.mixer", "backbone.layers.{i}.norm"
    mlp, experts = f"{LAYER}/mlp", f"{LAYER}/moe"
    made = {"mlp": rules.mlp_rules(mlp, (f"{name}.up_proj",), f"{name}.down_proj", False, stack)}
    made["mlp"] += rules.norm_rules(mlp, norm, False, stack)
    made["moe"] = rules.norm_rules(experts, norm, False, stack)
    if "moe" in _kinds_of(c):
        shared = (f"{experts}/shared_experts", (f"{name}.shared_experts.up_proj",), f"{name}.shared_experts.down_proj")
        made["moe"] += rules.expert_rules(experts, name, ("up_proj", "down_proj"), c.layer["moe"]["num_experts"], stack)
        if c.layer["moe"].get("latent_size"):
            for ours, theirs in (("latent_down", "fc1_latent_proj"), ("latent_up", "fc2_latent_proj")):
                made["moe"] += rules.dense_rules(f"{experts}/{ours}", f"{name}.{theirs}", False, stack)
        made["moe"] += [*rules.mlp_rules(*shared, False, stack), bias_rule(experts, f"{name}.gate", stack)]
    return [
        *tables(c, "backbone.embeddings.weight"),
        *rules.norm_rules("final_norm", "backbone.norm_f", False),
        *mixer_rules(c, _kind_of, name, name, norm),
        *(rule._replace(layers=layers_of(c, kind, _kind_of)) for kind, of in made.items() for rule in of),
    ]


def _of_predicted(found: Mapping[str, Any]) -> Callable[[str], bool]:
    """Layers that predict further tokens have a prefix of their own."""
    predicts = _PREDICTED.value("te_jax.hf", Said(found)) > 0
    return lambda name: predicts and name.startswith("mtp.")


NEMOTRON_H = Family(
    "nemotron_h",
    "NemotronHForCausalLM",
    CausalLM,
    families.nemotron_h(Size(1, 1, 1, 1, groups=1, experts=1, topk=1, ssm=StateSpace(), pattern="M", tied=False)),
    _OF_NEMOTRON,
    _NEMOTRON_CHECKS,
    _nemotron_rules,
    prefix="backbone.",
    tied=head_of("backbone.embeddings"),
    spare=_of_predicted,
    without_spare={_PREDICTED.name: 0},
)
