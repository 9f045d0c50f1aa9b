"""Decoders: Llama, Mistral, Mixtral, Qwen 2 and 3, Gemma 2, GPT-2, Falcon."""

from dataclasses import replace
from typing import Any

import jax.numpy as jnp

from te_jax.hf import rules
from te_jax.hf.family import LAYER, Family, joins_qkv, need, read_rotary, refuse, size_of, tables, write_rotary
from te_jax.hf.rules import Recast, TensorRule
from te_jax.models import CausalLM, ModelConfig, families
from te_jax.models.families import Size

# -- Llama, Mistral, Qwen ---------------------------------------------------------------------------------------


def _read_llama(config):
    family = config["model_type"]
    need(family, config, hidden_act="silu", mlp_bias=False, attention_bias=False)
    model = families.llama(size_of(config), epsilon=config.get("rms_norm_eps", 1e-6)).with_layer(
        **read_rotary(family, config, 10_000)
    )
    return replace(model, family=family)


def _read_mistral(config):
    model, window = _read_llama(config), config.get("sliding_window")
    return model if window is None else model.with_layer(window_size=(window - 1, 0))


def _read_qwen2(config):
    if config.get("use_sliding_window"):
        refuse("qwen2", "use_sliding_window", True, "te_jax reads checkpoints without windows")
    return _read_llama(config).with_layer(use_bias=True)


def _write_llama(c: ModelConfig) -> dict[str, Any]:
    layer = c.layer
    heads = layer["num_attention_heads"]
    return dict(
        hidden_size=c.hidden_size,
        intermediate_size=layer["mlp_hidden_size"],
        num_hidden_layers=c.num_layers,
        num_attention_heads=heads,
        num_key_value_heads=layer.get("num_gqa_groups") or heads,
        head_dim=layer.get("kv_channels") or c.hidden_size // heads,
        vocab_size=c.vocab_size,
        rms_norm_eps=layer["layernorm_epsilon"],
        hidden_act="silu",
        tie_word_embeddings=c.tie_embeddings,
        **write_rotary(layer),
    )


def _write_mistral(c):
    window = c.layer.get("window_size")
    return _write_llama(c) | dict(sliding_window=None if window is None else window[0] + 1)


def _read_qwen3(config):
    if config.get("use_sliding_window"):
        refuse(config["model_type"], "use_sliding_window", True, "te_jax reads checkpoints without windows")
    epsilon = config.get("rms_norm_eps", 1e-6)
    return _read_llama(config).with_layer(qk_norm_type="rmsnorm", qk_norm_before_rope=True, qk_norm_eps=epsilon)


def _read_mixtral(config):
    experts = dict(num_experts=config["num_local_experts"], num_experts_per_tok=config["num_experts_per_tok"])
    return _read_mistral(config).with_layer(moe=experts)


def _read_qwen3_moe(config):
    need("qwen3_moe", config, decoder_sparse_step=1, mlp_only_layers=[])
    experts = dict(num_experts=config.get("num_local_experts") or config["num_experts"])
    experts["num_experts_per_tok"] = config["num_experts_per_tok"]
    if not config.get("norm_topk_prob", False):
        experts |= dict(use_pre_softmax=True, normalize_weights=False)
    return _read_qwen3(config | dict(intermediate_size=config["moe_intermediate_size"])).with_layer(moe=experts)


def _write_experts(c):
    moe = c.layer["moe"]
    used = dict(num_local_experts=moe["num_experts"], num_experts_per_tok=moe["num_experts_per_tok"])
    if c.family == "mixtral":
        return _write_mistral(c) | used
    wide = dict(moe_intermediate_size=c.layer["mlp_hidden_size"], decoder_sparse_step=1, mlp_only_layers=[])
    return (
        _write_llama(c)
        | used
        | wide
        | dict(num_experts=moe["num_experts"], norm_topk_prob=not moe.get("use_pre_softmax", False))
    )


def _feed_forward_rules(c: ModelConfig, norm: str) -> list[TensorRule]:
    """The MLP, or the experts, of a Llama, with the norm in front."""
    layer, ours, stack, moe = "model.layers.{i}", LAYER, "layers", c.layer.get("moe")
    if not moe:
        made = rules.norm_rules(f"{ours}/mlp", f"{layer}.{norm}", False, stack)
        wi = f"{layer}.mlp.gate_proj", f"{layer}.mlp.up_proj"
        return made + rules.mlp_rules(f"{ours}/mlp", wi, f"{layer}.mlp.down_proj", False, stack)
    where, names = _NAMES_OF_EXPERTS[c.family]
    experts = {
        ours_of: tuple(f"{layer}.{where}.experts.{e}.{name}" for e in range(moe["num_experts"]))
        for ours_of, name in zip(("wi_0", "wi_1", "wo"), names)
    }
    made = rules.norm_rules(f"{ours}/moe", f"{layer}.{norm}", False, stack)
    return made + rules.expert_rules(f"{ours}/moe", f"{layer}.{where}.gate", experts, stack)


_NAMES_OF_EXPERTS = {  # family -> where they are, and the names of gate, up and down
    "mixtral": ("block_sparse_moe", ("w1", "w3", "w2")),
    "qwen3_moe": ("mlp", ("gate_proj", "up_proj", "down_proj")),
}


def _llama_rules(c: ModelConfig, norm: str = "post_attention_layernorm") -> list[TensorRule]:
    """norm: what the norm in front of the MLP is called."""
    fused, stack, ours, own = joins_qkv(c), "layers", LAYER, "model.layers.{i}.self_attn"
    first = f"{ours}/attention/{'qkv' if fused else 'query'}"
    bias = bool(c.layer.get("use_bias"))
    names = [f"{own}.{name}_proj" for name in "qkvo"]
    made = [
        *tables(c, "model.embed_tokens.weight"),
        *rules.norm_rules("final_norm", "model.norm", False),
        *rules.norm_rules(first, "model.layers.{i}.input_layernorm", False, stack),
        *rules.attention_rules(f"{ours}/attention", *names, fused=fused, bias=bias, out_bias=False, stack=stack),
        *_feed_forward_rules(c, norm),
    ]
    if c.layer.get("qk_norm_type"):
        for name in "qk":
            made += rules.norm_rules(f"{ours}/attention/{name}_norm", f"{own}.{name}_norm", False, stack)
    return made + ([rules.zero_rule(f"{ours}/mlp/{name}_bias", stack) for name in ("wi", "wo")] if bias else [])


# -- Gemma 2 ----------------------------------------------------------------------------------------------------


def _types_of_gemma2(layers: int) -> list[str]:
    return [("sliding_attention", "full_attention")[i % 2] for i in range(layers)]


def _read_gemma2(config):
    need("gemma2", config, hidden_activation="gelu_pytorch_tanh", attention_bias=False)
    need(
        "gemma2",
        config,
        layer_types=[f"{('sliding', 'full')[i % 2]}_attention" for i in range(config["num_hidden_layers"])],
    )
    size = size_of({"tie_word_embeddings": True, **config})
    model = families.gemma2(size, window=config["sliding_window"], query_scalar=config["query_pre_attn_scalar"])
    caps = config["attn_logit_softcapping"], config["final_logit_softcapping"]
    epsilon, rotary = config.get("rms_norm_eps", 1e-6), read_rotary("gemma2", config, 10_000)
    model = model.with_layer(attn_logit_softcap=caps[0], layernorm_epsilon=epsilon, **rotary)
    return replace(model, logit_softcap=caps[1])


def _write_gemma2(c):
    written, window = _write_llama(c), c.fields_of_layer(0).get("window_size")
    if window is None:
        raise ValueError("te_jax.hf: layer 0 of a gemma2 has a window_size, and the model has none there.")
    return written | dict(
        hidden_act="gelu_pytorch_tanh",
        hidden_activation="gelu_pytorch_tanh",
        query_pre_attn_scalar=written["head_dim"],
        sliding_window=window[0] + 1,
        layer_types=_types_of_gemma2(c.num_layers),
        attn_logit_softcapping=c.layer["attn_logit_softcap"],
        final_logit_softcapping=c.logit_softcap,
    )


def _gemma2_rules(c):
    """The names of Llama's, but that `post_attention_layernorm` is a norm behind attention."""
    made = _llama_rules(c, norm="pre_feedforward_layernorm")
    for path, name in (("attention", "post_attention"), ("mlp", "post_feedforward")):
        names = f"{LAYER}/post_{path}_norm", f"model.layers.{{i}}.{name}_layernorm"
        made += rules.norm_rules(*names, False, "layers")
    return made


# -- GPT-2 ------------------------------------------------------------------------------------------------------


def _read_gpt2(config):
    need(
        "gpt2",
        config,
        activation_function="gelu_new",
        scale_attn_weights=True,
        scale_attn_by_inverse_layer_idx=False,
        add_cross_attention=False,
    )
    width = config["n_embd"]
    ffn = config.get("n_inner") or 4 * width
    tied = bool(config.get("tie_word_embeddings", True))
    size = Size(width, ffn, config["n_head"], config["n_layer"], vocab=config["vocab_size"], tied=tied)
    model = families.gpt2(size, positions=config["n_positions"])
    dropout = dict(hidden_dropout=config.get("resid_pdrop", 0.1), attention_dropout=config.get("attn_pdrop", 0.1))
    return model.with_layer(layernorm_epsilon=config.get("layer_norm_epsilon", 1e-5), **dropout)


def _write_gpt2(c):
    return dict(
        n_embd=c.hidden_size,
        n_inner=c.layer["mlp_hidden_size"],
        n_head=c.layer["num_attention_heads"],
        n_layer=c.num_layers,
        n_positions=c.max_positions,
        vocab_size=c.vocab_size,
        layer_norm_epsilon=c.layer["layernorm_epsilon"],
        resid_pdrop=c.layer["hidden_dropout"],
        attn_pdrop=c.layer["attention_dropout"],
        activation_function="gelu_new",
        tie_word_embeddings=c.tie_embeddings,
    )


def _gpt2_rules(c):
    """Its products are x W, so kernels lie as ours do."""
    stack, layer, ours = "layers", "transformer.h.{i}", LAYER
    one = lambda path, name, form: TensorRule((f"{ours}/{path}",), (f"{layer}.{name}",), form, stack)
    return [
        *tables(c, "transformer.wte.weight"),
        TensorRule(("positions",), ("transformer.wpe.weight",), rules.SAME),
        *rules.norm_rules("final_norm", "transformer.ln_f", True),
        *rules.norm_rules(f"{ours}/attention/qkv", f"{layer}.ln_1", True, stack),
        *rules.norm_rules(f"{ours}/mlp", f"{layer}.ln_2", True, stack),
        one("attention/qkv/kernel", "attn.c_attn.weight", rules.CUT_IN_3),
        one("attention/qkv/bias", "attn.c_attn.bias", rules.CUT_IN_3),
        one("attention/out/kernel", "attn.c_proj.weight", rules.SAME),
        one("attention/out/bias", "attn.c_proj.bias", rules.SAME),
        one("mlp/wi_kernel", "mlp.c_fc.weight", rules.ONE_OF_1),
        one("mlp/wi_bias", "mlp.c_fc.bias", rules.ONE_OF_1),
        one("mlp/wo_kernel", "mlp.c_proj.weight", rules.SAME),
        one("mlp/wo_bias", "mlp.c_proj.bias", rules.SAME),
    ]


# -- Falcon -----------------------------------------------------------------------------------------------------


def _read_falcon(config):
    need("falcon", config, alibi=False, bias=False, parallel_attn=True, activation="gelu")
    new, heads = config.get("new_decoder_architecture", False), config["num_attention_heads"]
    if not new and not config.get("multi_query", True):
        refuse("falcon", "multi_query", False, "te_jax reads True, or the new decoder architecture")
    groups = (config.get("num_kv_heads") or heads) if new else 1
    one_norm = not new or config.get("num_ln_in_parallel_attn") == 1
    width = config["hidden_size"]
    ffn, layers = config.get("ffn_hidden_size") or 4 * width, config["num_hidden_layers"]
    tied = bool(config.get("tie_word_embeddings", True))
    size = Size(width, ffn, heads, layers, groups=groups, one_norm=one_norm, vocab=config["vocab_size"], tied=tied)
    epsilon = config.get("layer_norm_epsilon", 1e-5)
    return families.falcon(size).with_layer(layernorm_epsilon=epsilon, **read_rotary("falcon", config, 10_000))


def _write_falcon(c):
    one_norm, groups = c.layer["parallel_shared_layernorm"], c.layer["num_gqa_groups"]
    new = not one_norm or groups != 1
    return dict(
        hidden_size=c.hidden_size,
        ffn_hidden_size=c.layer["mlp_hidden_size"],
        num_attention_heads=c.layer["num_attention_heads"],
        num_kv_heads=groups,
        num_hidden_layers=c.num_layers,
        vocab_size=c.vocab_size,
        layer_norm_epsilon=c.layer["layernorm_epsilon"],
        new_decoder_architecture=new,
        num_ln_in_parallel_attn=(1 if one_norm else 2) if new else None,
        multi_query=True,
        parallel_attn=True,
        alibi=False,
        bias=False,
        activation="gelu",
        tie_word_embeddings=c.tie_embeddings,
        **write_rotary(c.layer),
    )


def _of_groups(c: ModelConfig) -> Recast:
    """Rows of one tensor [g (n + 2) d, H]: of each group n heads of queries, one of keys, one of values."""
    groups = c.layer["num_gqa_groups"]
    width = c.layer.get("kv_channels") or c.hidden_size // c.layer["num_attention_heads"]

    def ours(a):
        each = a.reshape(groups, -1, width, a.shape[-1])
        flat = lambda part: part.reshape(-1, a.shape[-1]).T
        kv = jnp.stack([flat(each[:, -2]), flat(each[:, -1])], -2)
        return (flat(each[:, :-2]), *((kv,)))

    def theirs(query, kv):
        by_group = lambda part: part.T.reshape(groups, -1, width, part.shape[0])
        parts = [by_group(query), by_group(kv[:, 0]), by_group(kv[:, 1])]
        return (jnp.concatenate(parts, 1).reshape(-1, query.shape[0]),)

    return Recast(ours, theirs)


def _falcon_rules(c):
    stack, layer, ours = "layers", "transformer.h.{i}", LAYER
    one_norm, joined = c.layer["parallel_shared_layernorm"], f"{layer}.self_attention.query_key_value.weight"
    if joins_qkv(c):
        raise ValueError("te_jax.hf: a falcon has fewer heads of keys and values than of queries.")
    kernels = tuple(f"{ours}/attention/{name}/kernel" for name in ("query", "kv"))
    first = "input_layernorm" if one_norm else "ln_attn"
    made = [
        *tables(c, "transformer.word_embeddings.weight"),
        *rules.norm_rules("final_norm", "transformer.ln_f", True),
        *rules.norm_rules(f"{ours}/attention/query", f"{layer}.{first}", True, stack),
        TensorRule(kernels, (joined,), _of_groups(c), stack),
        *rules.dense_rules(f"{ours}/attention/out", f"{layer}.self_attention.dense", False, stack),
        *rules.mlp_rules(f"{ours}/mlp", (f"{layer}.mlp.dense_h_to_4h",), f"{layer}.mlp.dense_4h_to_h", False, stack),
    ]
    return made if one_norm else made + rules.norm_rules(f"{ours}/mlp", f"{layer}.ln_mlp", True, stack)


_ROPE_TABLES = (".rotary_emb.inv_freq",)
_MASKS = (".attn.bias", ".attn.masked_bias")


def _of_llama(name: str, architecture: str, read, write=_write_llama, tensors=_llama_rules) -> Family:
    return Family(name, architecture, CausalLM, read, write, tensors, unread=_ROPE_TABLES)


DECODERS = (
    _of_llama("llama", "LlamaForCausalLM", _read_llama),
    _of_llama("mistral", "MistralForCausalLM", _read_mistral, _write_mistral),
    _of_llama("qwen2", "Qwen2ForCausalLM", _read_qwen2),
    _of_llama("qwen3", "Qwen3ForCausalLM", _read_qwen3),
    _of_llama("mixtral", "MixtralForCausalLM", _read_mixtral, _write_experts),
    _of_llama("qwen3_moe", "Qwen3MoeForCausalLM", _read_qwen3_moe, _write_experts),
    _of_llama("gemma2", "Gemma2ForCausalLM", _read_gemma2, _write_gemma2, _gemma2_rules),
    Family("gpt2", "GPT2LMHeadModel", CausalLM, _read_gpt2, _write_gpt2, _gpt2_rules, _MASKS, "transformer."),
    Family("falcon", "FalconForCausalLM", CausalLM, _read_falcon, _write_falcon, _falcon_rules, _ROPE_TABLES),
)
