"""DeepSeek-V3: latent attention, dense layers first, then experts."""

import re
from collections.abc import Callable, Mapping
from typing import Any

from te_jax.core.check import BOOL, NONE, integer
from te_jax.hf import rules
from te_jax.hf.experts import CHOSEN_BY_SIGMOIDS, GROUPS_FIT, bias_rule, expert_word
from te_jax.hf.family import (
    ALL_SEE_ALL,
    DECODER,
    DROPOUT_OR_NULL,
    LAYER,
    LAYER_TYPES,
    NO_WINDOW,
    ROPE_TABLES,
    Family,
    epsilon,
    head_of,
    heads_of,
    tables,
)
from te_jax.hf.mamba import layers_of
from te_jax.hf.rotary import rotary
from te_jax.hf.rules import TensorRule
from te_jax.hf.words import ABSENT, SIZE, Check, Said, Word, fixed, unused, words_of
from te_jax.models import CausalLM, ModelConfig, families
from te_jax.models.families import Latents, Size


def rope_channels(said: Said) -> int:
    """qk_rope_head_dim"""
    return said["qk_rope_head_dim"]


def key_channels(said: Said) -> int:
    """qk_nope_head_dim + qk_rope_head_dim"""
    return said["qk_nope_head_dim"] + said["qk_rope_head_dim"]


def _first_layers(said: Said) -> tuple[Any]:
    dense = min(said["first_k_dense_replace"], said["num_hidden_layers"])
    return (({"moe": None, "mlp_hidden_size": said["intermediate_size"]},) * dense,)


def _count_of_first(c: ModelConfig) -> int:
    if c.pattern:
        raise ValueError(f"te_jax.hf: a {c.family} has no pattern of layers; pass ModelConfig(first=...).")
    return len(c.first)


_LAYERS = 61
_NEXT = unused("num_mtp_layers", integer(0, 1000), 1, also=("num_nextn_predict_layers",))
# The first layers have an MLP, the others experts, some of which all tokens meet.
DENSE_FIRST = (
    Word("intermediate_size", SIZE, 18432, theirs=lambda c: c.first[0]["mlp_hidden_size"] if c.first else ABSENT),
    Word("moe_intermediate_size", SIZE, 2048, to=("layer/mlp_hidden_size",)),
    Word("first_k_dense_replace", integer(0, 10_000), 3, to=("first",), ours=_first_layers, theirs=_count_of_first),
    *CHOSEN_BY_SIGMOIDS,
    expert_word("n_shared_experts", "num_shared_experts", 1, lambda c: 0, NONE | integer(0, 1000), null=lambda said: 0),
    _NEXT,
)
_OF_DEEPSEEK = words_of(
    *DECODER,
    *DENSE_FIRST,
    Word("num_key_value_heads", NONE | SIZE, 128, null=heads_of, theirs=lambda c: c.layer["num_attention_heads"]),
    *(
        Word(name, NONE | SIZE if name == "q_lora_rank" else SIZE, default, to=(f"layer/{name}",))
        for name, default in Latents()._asdict().items()
    ),
    Word("head_dim", SIZE, rope_channels, theirs=lambda c: c.layer["qk_rope_head_dim"]),
    Word("qk_head_dim", SIZE, key_channels, theirs=lambda c: c.layer["qk_nope_head_dim"] + c.layer["qk_rope_head_dim"]),
    epsilon("rms_norm_eps"),  # of all norms but the ones of latents, which have 1e-6
    DROPOUT_OR_NULL,
    Word(
        "rope_interleave",
        NONE | BOOL,
        True,
        null=lambda said: False,
        to=("layer/rotary_pos_emb_group_method",),
        ours=lambda said: ("consecutive" if said["rope_interleave"] else "alternate",),
        theirs=lambda c: c.layer["rotary_pos_emb_group_method"] == "consecutive",
    ),
    fixed("hidden_act", "silu"),
    fixed("attention_bias", False),
    # Words of the code that the model was published with.
    fixed("scoring_func", "sigmoid"),
    fixed("topk_method", "noaux_tc"),
    fixed("moe_layer_freq", 1),
    LAYER_TYPES,
    NO_WINDOW,
    rotary("mscale", types=("default", "yarn of latents")),
    vocab_size=129280,
    hidden_size=7168,
    num_hidden_layers=_LAYERS,
    num_attention_heads=128,
    max_position_embeddings=4096,
    tie_word_embeddings=False,
    attention_dropout=0.0,
    rms_norm_eps=1e-6,
)


def equal_to(name: str, due: Callable[[Said], int]) -> Check:
    """The word is what `due`, whose docstring names it, makes of the others."""
    return lambda said: (name, f"pass {due.__doc__}, {due(said)}") if said[name] != due(said) else None


def _enough_channels(said: Said) -> tuple[str, str] | None:
    least = 4 if said["rope_parameters"]["rope_type"] == "yarn" else 2
    if said["qk_rope_head_dim"] % 2 or said["qk_rope_head_dim"] < least:
        return "qk_rope_head_dim", f"RoPE turns pairs of channels: pass an even number of at least {least}"
    return None


_CHECKS = (
    equal_to("num_key_value_heads", heads_of),
    equal_to("head_dim", rope_channels),
    equal_to("qk_head_dim", key_channels),
    *GROUPS_FIT,
    _enough_channels,
    ALL_SEE_ALL,
)


def latent_attention_rules(q_lora_rank: int | None) -> list[TensorRule]:
    """Latent attention, with the norm in front."""
    stack, ours, own = "layers", f"{LAYER}/attention", "model.layers.{i}.self_attn"
    first, made = "query", []
    if q_lora_rank is None:
        made += rules.dense_rules(f"{ours}/query", f"{own}.q_proj", False, stack)
    else:
        first = "q_down"
        made += rules.dense_rules(f"{ours}/q_down", f"{own}.q_a_proj", False, stack)
        made += rules.norm_rules(f"{ours}/q_up", f"{own}.q_a_layernorm", False, stack)
        made += rules.dense_rules(f"{ours}/q_up", f"{own}.q_b_proj", False, stack)
    return [
        *rules.norm_rules(f"{ours}/{first}", "model.layers.{i}.input_layernorm", False, stack),
        *made,
        *rules.dense_rules(f"{ours}/kv_down", f"{own}.kv_a_proj_with_mqa", False, stack),
        *rules.norm_rules(f"{ours}/kv_up", f"{own}.kv_a_layernorm", False, stack),
        *rules.dense_rules(f"{ours}/kv_up", f"{own}.kv_b_proj", False, stack),
        *rules.dense_rules(f"{ours}/out", f"{own}.o_proj", False, stack),
    ]


def _expert_rules(c: ModelConfig, where: str, names: tuple[str, ...]) -> list[TensorRule]:
    ours, name, moe = f"{LAYER}/moe", f"model.layers.{{i}}.{where}", c.layer["moe"]
    made = rules.expert_rules(ours, name, names, moe["num_experts"], "layers")
    if moe.get("num_shared_experts"):
        made += rules.swiglu_rules(f"{ours}/shared_experts", f"{name}.shared_experts", "layers")
    return [*made, bias_rule(ours, f"{name}.gate", "layers")]


def dense_or_sparse_rules(
    c: ModelConfig, where: str = "mlp", names: tuple[str, ...] = rules.SWIGLU
) -> list[TensorRule]:
    """The MLP of some layers, and the experts of the others, with the norms in front. where: of experts; names: of an
    expert's gate, up and down."""
    norm = "model.layers.{i}.post_attention_layernorm"
    of_dense = rules.norm_rules(f"{LAYER}/mlp", norm, False, "layers")
    of_dense += rules.swiglu_rules(f"{LAYER}/mlp", "model.layers.{i}.mlp", "layers")
    zeros = ("wi", "wo") if c.layer.get("use_bias") else ()
    of_dense += [rules.zero_rule(f"{LAYER}/mlp/{name}_bias", "layers") for name in zeros]
    of_experts = rules.norm_rules(f"{LAYER}/moe", norm, False, "layers") + _expert_rules(c, where, names)
    layers = {name: layers_of(c, name, type_of_mlp) for name in ("dense", "sparse")}
    made = [rule._replace(layers=layers["dense"]) for rule in of_dense]
    return made + [rule._replace(layers=layers["sparse"]) for rule in of_experts]


def type_of_mlp(fields: Mapping[str, Any]) -> str:
    """The type of a layer with these fields: with experts or not."""
    return "dense" if fields.get("moe") is None else "sparse"


def _deepseek_rules(c: ModelConfig) -> list[TensorRule]:
    return [
        *tables(c, "model.embed_tokens.weight"),
        *rules.norm_rules("final_norm", "model.norm", False),
        *latent_attention_rules(c.layer.get("q_lora_rank")),
        *dense_or_sparse_rules(c),
    ]


def layers_behind(layers: int) -> Callable[[Mapping[str, Any]], Callable[[str], bool]]:
    """`Family.spare`: layers that predict further tokens stand behind the model's layers. layers: the default."""

    def spare(found: Mapping[str, Any]) -> Callable[[str], bool]:
        first = found.get("num_hidden_layers", layers)
        further = range(first, first + _NEXT.value("te_jax.hf", Said(found)))
        layer = lambda name: re.match(r"model\.layers\.(\d{1,9})\.", name)
        return lambda name: (of := layer(name)) is not None and int(of[1]) in further

    return spare


NONE_BEHIND = {"num_nextn_predict_layers": 0}


DEEPSEEK_V3 = Family(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    CausalLM,
    families.deepseek_v3(Size(1, 1, 1, 1, experts=1, topk=1, latents=Latents())),
    _OF_DEEPSEEK,
    _CHECKS,
    _deepseek_rules,
    ROPE_TABLES,
    prefix="model.",
    tied=head_of("model.embed_tokens"),
    spare=layers_behind(_LAYERS),
    without_spare=NONE_BEHIND,
)
