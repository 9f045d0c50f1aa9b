"""Granite 4: layers of Mamba-2 and of attention, each with an MLP or with experts, and multipliers everywhere."""

from dataclasses import replace
from typing import Any

from te_jax.core.check import BOOL, NONE, integer, number, one_of
from te_jax.hf import rules
from te_jax.hf.decoders import NO_BIAS, of_llama
from te_jax.hf.family import (
    DECODER,
    DROPOUT_OR_NULL,
    GROUPS,
    LAYER,
    NO_WINDOW,
    ROPE_TABLES,
    Family,
    divides,
    epsilon,
    head_dim,
    head_of,
    tables,
)
from te_jax.hf.mamba import TIME_STEP_LIMIT, TypesOfLayers, mixer_rules, ssm_of, ssm_word
from te_jax.hf.rotary import rotary
from te_jax.hf.rules import TensorRule
from te_jax.hf.words import ABSENT, LIST_OF_NAMES, SIZE, Check, Said, Word, fixed, only, unused, words_of
from te_jax.models import CausalLM, ModelConfig, families
from te_jax.models.families import Size
from te_jax.models.patterns import pattern_of

_GRANITE_TYPES = {"mamba": {}, "attention": {"ssm": None}}  # and the fields that a layer of it has of its own


def _all_mamba(said: Said) -> list[str]:
    """all "mamba\""""
    return ["mamba"] * said["num_hidden_layers"]


def _type_of(fields: dict[str, Any]) -> str:
    return "attention" if fields.get("ssm") is None else "mamba"


def _granite_experts(c: ModelConfig) -> dict[str, Any]:
    return c.layer.get("moe") or {}


def _feed_forward(said: Said) -> tuple[Any, int]:
    """The experts' fields and the width, of an expert or of the MLP."""
    shared, count = said["shared_intermediate_size"], said["num_local_experts"]
    if not count:
        return None, shared
    width = said["intermediate_size"]
    sizes = dict(num_experts=count, num_experts_per_tok=said["num_experts_per_tok"])
    return sizes | dict(num_shared_experts=shared // width), width


def _shared_width(c: ModelConfig) -> int:
    moe = _granite_experts(c)
    return c.layer["mlp_hidden_size"] * (moe.get("num_shared_experts", 0) if moe else 1)


def _inner_width(said: Said) -> int:
    """mamba_expand * hidden_size // mamba_n_heads"""
    return said["mamba_expand"] * said["hidden_size"] // said["mamba_n_heads"]


_MULTIPLIERS = (
    Word("embedding_multiplier", number(above=0), 1.0, to=("embedding_scale",)),
    Word("attention_multiplier", number(above=0), 1.0, to=("layer/attn_logit_scale",)),
    Word("residual_multiplier", number(above=0), 1.0, to=("layer/residual_multiplier",)),
    Word(
        "logits_scaling",
        number(least=2**-100),
        1.0,
        to=("output_scale",),
        ours=lambda said: (1 / said["logits_scaling"],),
        theirs=lambda c: float(f"{1 / c.output_scale:.15g}"),  # so that what was read is written again
    ),
)
_OF_GRANITE = words_of(
    *DECODER,
    GROUPS,
    head_dim(),
    epsilon("rms_norm_eps"),
    DROPOUT_OR_NULL,
    NO_WINDOW,
    fixed("hidden_act", "silu"),
    fixed("attention_bias", False),
    TypesOfLayers(
        "layer_types",
        NONE | LIST_OF_NAMES,
        None,
        null=_all_mamba,
        also=("layers_block_type",),
        to=("pattern",),
        ours=lambda said: (pattern_of(said["layer_types"], _GRANITE_TYPES),),
        theirs=lambda c: [_type_of(c.fields_of_layer(i)) for i in range(c.num_layers)],
    ),
    # Any other word than "rope" is none, as "nope" in published ones.
    Word(
        "position_embedding_type",
        only(None, "nope", "rope"),
        None,
        null=lambda said: "nope",
        to=("layer/enable_rotary_pos_emb",),
        ours=lambda said: (said["position_embedding_type"] == "rope",),
        theirs=lambda c: "rope" if c.layer["enable_rotary_pos_emb"] else "nope",
    ),
    rotary(types=("default",)),
    *_MULTIPLIERS,
    Word("num_local_experts", integer(0, 2**31 - 1), 8, theirs=lambda c: _granite_experts(c).get("num_experts", 0)),
    Word(
        "num_experts_per_tok",
        integer(0, 2**31 - 1),
        2,
        theirs=lambda c: _granite_experts(c).get("num_experts_per_tok", ABSENT),
    ),
    Word("intermediate_size", SIZE, 11008, theirs=lambda c: c.layer["mlp_hidden_size"]),
    Word(
        "shared_intermediate_size",
        SIZE,
        1024,
        to=("layer/moe", "layer/mlp_hidden_size"),
        ours=_feed_forward,
        theirs=_shared_width,
    ),
    ssm_word("mamba_n_heads", 128, "ssm_num_heads"),
    ssm_word("mamba_n_groups", 1, "ssm_num_groups"),
    ssm_word("mamba_d_state", 256, "ssm_state_size"),
    Word("mamba_expand", SIZE, 2, theirs=lambda c: _channels(c) // c.hidden_size),
    ssm_word(
        "mamba_d_head",
        "auto",
        "ssm_head_dim",
        one_of("auto") | SIZE,
        ours=lambda said: (_inner_width(said) if said["mamba_d_head"] == "auto" else said["mamba_d_head"],),
    ),
    ssm_word("mamba_d_conv", 4, "conv_width", integer(2, 4)),
    ssm_word("mamba_conv_bias", True, "use_conv_bias", BOOL),
    ssm_word("mamba_proj_bias", False, "use_bias", BOOL),
    TIME_STEP_LIMIT,
    unused("mamba_chunk_size", SIZE, 256),
    vocab_size=32000,
    hidden_size=4096,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=None,
    head_dim=None,
    max_position_embeddings=2048,
    rms_norm_eps=1e-6,
    attention_dropout=0.0,
    tie_word_embeddings=False,
)


def _channels(c: ModelConfig) -> int:
    return ssm_of(c)["ssm_num_heads"] * ssm_of(c)["ssm_head_dim"]


def _types_are_known(said: Said) -> tuple[str, str] | None:
    types, count = said["layer_types"], said["num_hidden_layers"]
    if len(types) == count and {*types} <= _GRANITE_TYPES.keys():
        return None
    return "layer_types", f"pass num_hidden_layers={count} times one of {[*_GRANITE_TYPES]}"


def _channels_fit(said: Said) -> tuple[str, str] | None:
    """Which `mamba_expand` says too."""
    heads, due = said["mamba_n_heads"], said["mamba_expand"] * said["hidden_size"]
    width = _inner_width(said) if said["mamba_d_head"] == "auto" else said["mamba_d_head"]
    if heads * width != due:
        return "mamba_d_head", f"pass mamba_expand * hidden_size / mamba_n_heads, {due} / {heads}"
    return None


def _experts_fit(said: Said) -> tuple[str, str] | None:
    """The MLP that all tokens meet is as wide as some experts."""
    count, width = said["num_local_experts"], said["intermediate_size"]
    if not count:
        return None
    if not 1 <= said["num_experts_per_tok"] <= count:
        return "num_experts_per_tok", f"pass a positive int of at most num_local_experts={count}"
    if said["shared_intermediate_size"] % width:
        return "shared_intermediate_size", f"te_jax reads a multiple of intermediate_size={width}, next to experts"
    return None


def _turns_pairs(said: Said) -> tuple[str, str] | None:
    width = said["head_dim"]
    if not width or said["position_embedding_type"] == "rope" and width % 2:
        return "head_dim", "RoPE turns pairs of channels: pass a positive even number"
    return None


_GRANITE_CHECKS: tuple[Check, ...] = (
    divides("num_key_value_heads", "num_attention_heads"),
    divides("mamba_n_groups", "mamba_n_heads"),
    *(_types_are_known, _channels_fit, _experts_fit, _turns_pairs),
)


def _granite_feed_forward(c: ModelConfig) -> list[TensorRule]:
    layer, stack, moe = "model.layers.{i}", "layers", _granite_experts(c)
    ours = f"{LAYER}/{'moe' if moe else 'mlp'}"
    made = rules.norm_rules(ours, f"{layer}.post_attention_layernorm", False, stack)
    one = lambda path, name, form: TensorRule(path, (f"{layer}.{name}.weight",), form, stack)
    if moe:
        name = "block_sparse_moe"
        made += [
            one((f"{ours}/gate_kernel",), f"{name}.router.layer", rules.TURNED),
            one((f"{ours}/wi_0", f"{ours}/wi_1"), f"{name}.input_linear", rules.GATED_STACK),
            one((f"{ours}/wo",), f"{name}.output_linear", rules.TURNED_STACK),
        ]
    shared = f"{ours}/shared_experts" if moe else ours
    return [
        *made,
        one((f"{shared}/wi_kernel",), "shared_mlp.input_linear", rules.GATED),
        one((f"{shared}/wo_kernel",), "shared_mlp.output_linear", rules.TURNED),
    ]


def _granite_rules(c: ModelConfig) -> list[TensorRule]:
    names = (f"model.layers.{{i}}.{name}" for name in ("mamba", "self_attn", "input_layernorm"))
    return [
        *tables(c, "model.embed_tokens.weight"),
        *rules.norm_rules("final_norm", "model.norm", False),
        *mixer_rules(c, _type_of, *names),
        *_granite_feed_forward(c),
    ]


_BASE = families.llama(Size(1, 1, 1, 1, groups=1)).with_layer(ssm={}, attn_logit_scale=1.0, residual_multiplier=1.0)
GRANITE_HYBRID = Family(
    "granitemoehybrid",
    "GraniteMoeHybridForCausalLM",
    CausalLM,
    replace(_BASE, family="granitemoehybrid"),
    _OF_GRANITE,
    _GRANITE_CHECKS,
    _granite_rules,
    ROPE_TABLES,
    prefix="model.",
    tied=head_of("model.embed_tokens"),
)
GRANITE = of_llama(
    "granite",
    "GraniteForCausalLM",
    replace(_BASE, family="granite", layer={name: value for name, value in _BASE.layer.items() if name != "ssm"}),
    *(NO_BIAS, NO_WINDOW, fixed("mlp_bias", False), *_MULTIPLIERS, rotary()),
    vocab_size=32000,
    intermediate_size=11008,
    max_position_embeddings=2048,
)
