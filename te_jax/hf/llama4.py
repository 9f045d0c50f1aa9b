"""Llama 4 (text): chunks in layers with RoPE, a temperature by position in the others, and experts that get weighed
tokens."""

from dataclasses import replace
from typing import Any

import jax.numpy as jnp

from te_jax.core.check import BOOL, NONE, Kind, integer, number
from te_jax.hf import rules
from te_jax.hf.decoders import NO_BIAS, WITH_EXPERTS, attention_of_llama, of_llama
from te_jax.hf.experts import expert_word
from te_jax.hf.family import GROUPS, LAYER, head_dim
from te_jax.hf.layered import ROPE_BY_LAYER, Fields, first_of, pattern
from te_jax.hf.rotary import rotary
from te_jax.hf.rules import Recast, TensorRule
from te_jax.hf.words import ABSENT, LIST_OF_NAMES, SIZE, Said, Word, fixed, only
from te_jax.models import ModelConfig, families

_LLAMA4_TYPES = ("full_attention", "chunked_attention")
_INDICES = Kind(
    "a list of ints from 0 to 9999",
    lambda value: isinstance(value, list),
    lambda value: all(integer(0, 9999).accepts(each) for each in value),
)
_IN_HALVES = Recast(  # two kernels of experts side by side along the last axis
    lambda a: (a[..., : a.shape[-1] // 2], a[..., a.shape[-1] // 2 :]),
    lambda a, b: (jnp.concatenate([a, b], -1),),
)


def _every(said: Said) -> list[int]:
    """each interleave_moe_layer_step-th"""
    step = said["interleave_moe_layer_step"]
    return [*range(step - 1, said["num_hidden_layers"], step)]


def _chunked_where_rope(said: Said) -> list[str]:
    """chunked_attention where there is RoPE and an attention_chunk_size, else full_attention"""
    return [_LLAMA4_TYPES[bool(turns) and said["attention_chunk_size"] is not None] for turns in _turns_of(said)]


def _turns_of(said: Said) -> list[int]:
    return said["no_rope_layers"][: said["num_hidden_layers"]]


def _llama4_fields(said: Said, name: tuple[int, str, bool]) -> Fields:
    """Of a layer with RoPE or not, of this type, with experts or not."""
    turns, kind, has_experts = name
    fields: Fields = {} if turns else dict(families.NO_ROPE)
    if turns and said["use_qk_norm"]:  # x / sqrt(mean x**2 + eps), which is sqrt(d) x / sqrt(sum x**2 + d eps)
        width = said["head_dim"]
        fields |= dict(qk_norm_type="l2normalization", qk_norm_eps=width * said["rms_norm_eps"])
        fields |= dict(attn_logit_scale=width**0.5)
    if not turns and said["attn_temperature_tuning"]:
        fields |= dict(attn_temperature=(float(said["floor_scale"]), float(said["attn_scale"])))
    fields |= dict(attention_chunk_size=said["attention_chunk_size"]) if kind == _LLAMA4_TYPES[1] else {}
    return fields if has_experts else fields | dict(moe=None, mlp_hidden_size=said["intermediate_size_mlp"])


def _llama4_pattern(said: Said) -> tuple[Any]:
    has_experts = [i in said["moe_layers"] for i in range(said["num_hidden_layers"])]
    names = [*zip(_turns_of(said), said["layer_types"], has_experts)]
    return (pattern(names, lambda name: _llama4_fields(said, name)),)


def _moe_layers(c: ModelConfig) -> list[int]:
    return [i for i in range(c.num_layers) if c.fields_of_layer(i).get("moe") is not None]


def _dense_width(c: ModelConfig) -> Any:
    dense = {*range(c.num_layers)} - {*_moe_layers(c)}
    return c.fields_of_layer(min(dense))["mlp_hidden_size"] if dense else ABSENT


def _llama4_is_known(said: Said) -> tuple[str, str] | None:
    types, count = said["layer_types"], said["num_hidden_layers"]
    if len(said["no_rope_layers"]) < count:
        return "no_rope_layers", f"pass num_hidden_layers={count} of them"
    if len(types) != count or not {*types} <= {*_LLAMA4_TYPES}:
        return "layer_types", f"pass num_hidden_layers={count} times one of {[*_LLAMA4_TYPES]}"
    if _LLAMA4_TYPES[1] in types and said["attention_chunk_size"] is None:
        return "attention_chunk_size", "layer_types has chunked_attention; pass a positive int"
    return None


def _llama4_rules(c: ModelConfig) -> list[TensorRule]:
    layer, ours, stack = "model.layers.{i}", {name: f"{LAYER}/{name}" for name in ("moe", "mlp")}, "layers"
    feed, has_experts = f"{layer}.feed_forward", (*_moe_layers(c),)
    one = lambda names, name, form: TensorRule(names, (f"{feed}.{name}",), form, stack)
    in_front = lambda path: rules.norm_rules(path, f"{layer}.post_attention_layernorm", False, stack)
    dense = in_front(ours["mlp"]) + rules.swiglu_rules(ours["mlp"], feed, stack)
    sparse = [
        *in_front(ours["moe"]),
        one((f"{ours['moe']}/gate_kernel",), "router.weight", rules.TURNED),
        one((f"{ours['moe']}/wi_0", f"{ours['moe']}/wi_1"), "experts.gate_up_proj", _IN_HALVES),
        one((f"{ours['moe']}/wo",), "experts.down_proj", rules.SAME),
        *rules.swiglu_rules(f"{ours['moe']}/shared_experts", f"{feed}.shared_expert", stack),
    ]
    others = tuple(i for i in range(c.num_layers) if i not in has_experts)
    return [
        *attention_of_llama(c),
        *(rule._replace(layers=has_experts) for rule in sparse),
        *(rule._replace(layers=others) for rule in dense),
    ]


LLAMA4_TEXT = of_llama(
    "llama4_text",
    "Llama4ForCausalLM",
    families.llama4(replace(WITH_EXPERTS, head_dim=2)),
    *(NO_BIAS, head_dim(may_be=SIZE), replace(GROUPS, kind=SIZE), *ROPE_BY_LAYER),
    expert_word("num_local_experts", "num_experts", 16),
    expert_word("num_experts_per_tok", "num_experts_per_tok", 1, kind=only(1)),
    fixed("router_jitter_noise", 0.0),
    Word("intermediate_size_mlp", SIZE, 16384, theirs=_dense_width),
    Word("interleave_moe_layer_step", SIZE, 1),
    Word("moe_layers", NONE | _INDICES, None, null=_every, theirs=_moe_layers),
    Word("use_qk_norm", BOOL, True, theirs=lambda c: first_of(c, "qk_norm_type") is not None),
    Word("attention_chunk_size", NONE | SIZE, 8192, theirs=lambda c: first_of(c, "attention_chunk_size")),
    Word("attn_temperature_tuning", BOOL, True, theirs=lambda c: first_of(c, "attn_temperature") is not None),
    Word("floor_scale", SIZE, 8192, theirs=lambda c: int(first_of(c, "attn_temperature", (8192,))[0])),
    Word("attn_scale", number(above=0), 0.1, theirs=lambda c: first_of(c, "attn_temperature", (0, 0.1))[1]),
    Word(
        "layer_types",
        NONE | LIST_OF_NAMES,
        None,
        null=_chunked_where_rope,
        to=("pattern",),
        ours=_llama4_pattern,
        theirs=lambda c: [
            _LLAMA4_TYPES[c.fields_of_layer(i).get("attention_chunk_size") is not None] for i in range(c.num_layers)
        ],
    ),
    rotary(default=500_000.0),
    checks=(_llama4_is_known,),
    tensors=_llama4_rules,
    vocab_size=202048,
    hidden_size=5120,
    intermediate_size=8192,
    num_hidden_layers=48,
    num_attention_heads=40,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=131072,
    rms_norm_eps=1e-5,
    rope_parameters=500_000.0,
)
