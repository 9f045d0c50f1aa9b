"""DeepSeek-V3: latent attention, dense layers first, then experts."""

import math
from collections.abc import Mapping
from typing import Any

from te_jax.hf import rules
from te_jax.hf.family import LAYER, Family, need, refuse, tables
from te_jax.hf.rules import TensorRule
from te_jax.models import CausalLM, ModelConfig, families
from te_jax.models.families import Latents, Size
from te_jax.ops.rope import YarnScaling

_FAMILY = "deepseek_v3"
_YARN = dict(factor="factor", beta_fast="beta_fast", beta_slow="beta_slow")  # our field -> its word
_LENGTH = "original_max_position_embeddings"


def _read(config: Mapping[str, Any]) -> ModelConfig:
    need(
        _FAMILY,
        config,
        hidden_act="silu",
        attention_bias=False,
        scoring_func="sigmoid",
        topk_method="noaux_tc",
        moe_layer_freq=1,
        rms_norm_eps=1e-6,  # the norms of latents have it whatever the word says, ours have that of the layer
    )
    layers = config["num_hidden_layers"]
    dense = min(config.get("first_k_dense_replace", 0), layers)
    size = Size(
        config["hidden_size"],
        config["moe_intermediate_size"],
        config["num_attention_heads"],
        layers,
        experts=config["n_routed_experts"],
        topk=config["num_experts_per_tok"],
        dense=dense,
        dense_ffn=config["intermediate_size"],
        latents=Latents(**{name: config[name] for name in Latents._fields}),
        vocab=config["vocab_size"],
        tied=bool(config.get("tie_word_embeddings", False)),
    )
    grouped = dict(
        num_groups=config["n_group"],
        group_topk=config["topk_group"],
        scaling_factor=float(config["routed_scaling_factor"]),
        num_shared_experts=config.get("n_shared_experts") or 0,
    )
    normalizes = bool(config.get("norm_topk_prob", True))
    if normalizes != (size.topk > 1):  # what the field's None means
        grouped["normalize_weights"] = normalizes
    if config["n_group"] != config["topk_group"] and size.topk // config["topk_group"] != 2:
        refuse(
            _FAMILY,
            "num_experts_per_tok",
            size.topk,
            f"a group is chosen by its 2 best experts, so te_jax reads 2 x topk_group={config['topk_group']} alone",
        )
    model = families.deepseek_v3(size)
    return model.with_layer(
        moe={**model.layer["moe"], **grouped},
        layernorm_epsilon=1e-6,
        rotary_pos_emb_group_method="consecutive" if config.get("rope_interleave", True) else "alternate",
        **_read_rotary(config),
    )


def _read_rotary(config) -> dict[str, Any]:
    """Fields of RoPE. Its two mscales have to be one, and not 0: else rotary channels alone would be scaled."""
    found = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    kind = found.get("rope_type", found.get("type", "default"))
    fields = dict(rotary_pos_emb_windows=(1, float(found.get("rope_theta", config.get("rope_theta", 10_000)))))
    if kind == "default":
        return fields | dict(rotary_pos_emb_scaling=None, mscale=1.0)
    if kind != "yarn":
        refuse(_FAMILY, "rope_type", kind, "te_jax reads default and yarn")
    of_logits, of_channels = found.get("mscale_all_dim", 0), found.get("mscale", 1)
    if of_logits != of_channels or found.get("attention_factor") is not None:
        refuse(_FAMILY, "mscale", of_channels, f"te_jax reads that of mscale_all_dim, {of_logits!r}, alone")
    if found.get("truncate", True) is not True:
        refuse(_FAMILY, "truncate", found["truncate"], "te_jax reads True alone")
    said = {ours: float(found[name]) for ours, name in _YARN.items() if name in found}
    scaling = YarnScaling(**said, original_max_position=found[_LENGTH])
    if scaling.factor > 1 and not of_logits:
        refuse(_FAMILY, "mscale_all_dim", of_logits, "without it transformers scales rotary channels alone")
    mscale = 0.1 * of_logits * math.log(scaling.factor) + 1 if scaling.factor > 1 else 1.0
    return fields | dict(rotary_pos_emb_scaling=scaling, mscale=mscale)


def _write_rotary(layer) -> dict[str, Any]:
    scaling, said = layer["rotary_pos_emb_scaling"], dict(rope_theta=layer["rotary_pos_emb_windows"][1])
    if scaling is None:
        return said | dict(rope_parameters=said | dict(rope_type="default"), rope_scaling=None)
    if not isinstance(scaling, YarnScaling):
        raise ValueError(f"te_jax.hf: rotary_pos_emb_scaling is {scaling}, which a {_FAMILY} has no word for.")
    # Of 12 digits, so that what was read is written again.
    of_logits = round((layer["mscale"] - 1) / (0.1 * math.log(scaling.factor)), 12) if scaling.factor > 1 else 1.0
    old = {name: getattr(scaling, ours) for ours, name in _YARN.items()}
    old |= {_LENGTH: scaling.original_max_position, "mscale": of_logits, "mscale_all_dim": of_logits}
    return said | dict(
        rope_parameters=said | old | dict(rope_type="yarn"),
        rope_scaling=old | dict(type="yarn", rope_type="yarn"),
    )


def _write(c: ModelConfig) -> dict[str, Any]:
    layer, moe = c.layer, c.layer["moe"]
    if c.pattern:
        raise ValueError(f"te_jax.hf: a {_FAMILY} has no pattern of layers; pass ModelConfig(first=...).")
    topk, groups = moe["num_experts_per_tok"], moe.get("num_groups", 1)
    normalizes = moe.get("normalize_weights")
    return dict(
        hidden_size=c.hidden_size,
        intermediate_size=c.first[0]["mlp_hidden_size"] if c.first else layer["mlp_hidden_size"],
        moe_intermediate_size=layer["mlp_hidden_size"],
        num_hidden_layers=c.num_layers,
        first_k_dense_replace=min(len(c.first), c.num_layers),
        num_attention_heads=layer["num_attention_heads"],
        num_key_value_heads=layer["num_attention_heads"],
        **{name: layer[name] for name in Latents._fields},
        n_routed_experts=moe["num_experts"],
        num_experts_per_tok=topk,
        n_shared_experts=moe.get("num_shared_experts", 0),
        n_group=groups,
        topk_group=moe.get("group_topk") or groups,
        routed_scaling_factor=moe.get("scaling_factor", 1.0),
        norm_topk_prob=topk > 1 if normalizes is None else normalizes,
        scoring_func="sigmoid",
        topk_method="noaux_tc",
        moe_layer_freq=1,
        num_nextn_predict_layers=0,
        vocab_size=c.vocab_size,
        rms_norm_eps=layer["layernorm_epsilon"],
        hidden_act="silu",
        attention_bias=False,
        rope_interleave=layer["rotary_pos_emb_group_method"] == "consecutive",
        tie_word_embeddings=c.tie_embeddings,
        **_write_rotary(layer),
    )


def _attention_rules(c: ModelConfig) -> list[TensorRule]:
    stack, ours, own = "layers", f"{LAYER}/attention", "model.layers.{i}.self_attn"
    first, made = "query", []
    if c.layer.get("q_lora_rank") is None:
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


def _mlp_rules(path: str, name: str) -> list[TensorRule]:
    wi = f"{name}.gate_proj", f"{name}.up_proj"
    return rules.mlp_rules(path, wi, f"{name}.down_proj", False, "layers")


def _expert_rules(c: ModelConfig) -> list[TensorRule]:
    ours, name, moe = f"{LAYER}/moe", "model.layers.{i}.mlp", c.layer["moe"]
    experts = {
        path: tuple(f"{name}.experts.{e}.{proj}_proj" for e in range(moe["num_experts"]))
        for path, proj in (("wi_0", "gate"), ("wi_1", "up"), ("wo", "down"))
    }
    made = rules.expert_rules(ours, f"{name}.gate", experts, "layers")
    made += _mlp_rules(f"{ours}/shared_experts", f"{name}.shared_experts") if moe.get("num_shared_experts") else []
    bias = (f"{ours}/expert_bias",), (f"{name}.gate.e_score_correction_bias",)
    return [*made, TensorRule(*bias, rules.SAME, "layers", collection="expert_bias")]


def _rules(c: ModelConfig) -> list[TensorRule]:
    dense, norm = min(len(c.first), c.num_layers), "model.layers.{i}.post_attention_layernorm"
    of_dense = rules.norm_rules(f"{LAYER}/mlp", norm, False, "layers") + _mlp_rules(
        f"{LAYER}/mlp", "model.layers.{i}.mlp"
    )
    of_experts = rules.norm_rules(f"{LAYER}/moe", norm, False, "layers") + _expert_rules(c)
    return [
        *tables(c, "model.embed_tokens.weight"),
        *rules.norm_rules("final_norm", "model.norm", False),
        *_attention_rules(c),
        *(rule._replace(layers=range(dense)) for rule in of_dense),
        *(rule._replace(layers=range(dense, c.num_layers)) for rule in of_experts),
    ]


def _spare(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Layers that predict further tokens stand behind those of the model."""
    first, count = config["num_hidden_layers"], config.get("num_nextn_predict_layers") or 0
    return tuple(f"model.layers.{i}." for i in range(first, first + count))


DEEPSEEK_V3 = Family(
    _FAMILY, "DeepseekV3ForCausalLM", CausalLM, _read, _write, _rules, (".rotary_emb.inv_freq",), spare=_spare
)
