"""The families of checkpoints: config.json <-> `ModelConfig`, and their tensors' names."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import jax.numpy as jnp

from te_jax.hf import rules
from te_jax.hf.rules import Recast, TensorRule
from te_jax.models import CausalLM, EncoderDecoder, EncoderLM, ModelConfig, families
from te_jax.models.families import Size, exact_gelu
from te_jax.models.stack import Model
from te_jax.ops.rope import LinearScaling, Llama3Scaling

_LAYER = "TransformerLayer_0"


class Family(NamedTuple):
    """One kind of checkpoint.

    name:    its `model_type` in config.json.
    model:   the class of `te_jax.models`.
    read:    config.json -> ModelConfig.
    write:   ModelConfig -> config.json.
    rules:   ModelConfig -> the tensors.
    unread:  endings of tensors that hold nothing of the model: masks, frequencies.
    prefix:  of tensors' names, which some checkpoints leave out.
    tied:    names of copies of the embedding, which a checkpoint may have.
    """

    name: str
    model: type[Model]
    read: Callable[[Mapping[str, Any]], ModelConfig]
    write: Callable[[ModelConfig], dict[str, Any]]
    rules: Callable[[ModelConfig], list[TensorRule]]
    unread: tuple[str, ...] = ()
    prefix: str = ""
    tied: tuple[str, ...] = ("lm_head.weight",)


def refuse(family: str, key: str, value, way_out: str):
    """Raises ValueError for a value of config.json that te_jax has no model of."""
    raise ValueError(f"te_jax.hf: config.json of a {family} has {key}={value!r}; {way_out}.")


def need(family: str, config: Mapping[str, Any], **values):
    """Raises ValueError for values of config.json, where they are there, other than these."""
    for key, value in values.items():
        if config.get(key, value) != value:
            refuse(family, key, config[key], f"te_jax reads {value!r} alone")


def _size(config: Mapping[str, Any], **more) -> Size:
    heads = config["num_attention_heads"]
    groups, width = config.get("num_key_value_heads") or heads, config.get("head_dim")
    width = None if width is None or width * heads == config["hidden_size"] else width
    return Size(
        config["hidden_size"],
        config["intermediate_size"],
        heads,
        config["num_hidden_layers"],
        groups=groups,
        head_dim=width,
        vocab=config["vocab_size"],
        tied=bool(config.get("tie_word_embeddings", False)),
        **more,
    )


# -- RoPE -----------------------------------------------------------------------------------------------------


def _rotary(family: str, config: Mapping[str, Any], base: float) -> dict[str, Any]:
    """Fields of RoPE from either form of config.json: one dict, or a base beside `rope_scaling`."""
    found = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    kind = found.get("rope_type", found.get("type", "default"))
    fields = dict(rotary_pos_emb_windows=(1, float(found.get("rope_theta", config.get("rope_theta", base)))))
    if kind == "linear":
        fields["rotary_pos_emb_scaling"] = LinearScaling(float(found["factor"]))
    elif kind == "llama3":
        names = ("factor", "low_freq_factor", "high_freq_factor")
        length = found["original_max_position_embeddings"]
        fields["rotary_pos_emb_scaling"] = Llama3Scaling(*(float(found[name]) for name in names), length)
    elif kind != "default":
        refuse(family, "rope_type", kind, "te_jax reads default, linear and llama3")
    if config.get("partial_rotary_factor", found.get("partial_rotary_factor", 1.0)) != 1.0:
        refuse(family, "partial_rotary_factor", config.get("partial_rotary_factor"), "te_jax reads 1.0 alone")
    return fields


def _write_rotary(layer: Mapping[str, Any]) -> dict[str, Any]:
    base, scaling = layer["rotary_pos_emb_windows"][1], layer.get("rotary_pos_emb_scaling")
    parameters = dict(rope_theta=base, rope_type="default")
    if isinstance(scaling, LinearScaling):
        parameters |= dict(rope_type="linear", factor=scaling.factor)
    elif isinstance(scaling, Llama3Scaling):
        parameters |= dict(
            rope_type="llama3",
            factor=scaling.factor,
            low_freq_factor=scaling.low_freq_factor,
            high_freq_factor=scaling.high_freq_factor,
            original_max_position_embeddings=scaling.original_max_position,
        )
    elif scaling is not None:
        raise ValueError(f"te_jax.hf: rotary_pos_emb_scaling is {scaling}, which config.json has no word for.")
    old = {key: value for key, value in parameters.items() if key != "rope_theta"}
    return dict(rope_parameters=parameters, rope_theta=base, rope_scaling=None if scaling is None else old)


# -- Llama, Mistral, Qwen 2 -----------------------------------------------------------------------------------


def _read_llama(config):
    family = config["model_type"]
    need(family, config, hidden_act="silu", mlp_bias=False, attention_bias=False)
    model = families.llama(_size(config), epsilon=config.get("rms_norm_eps", 1e-6)).with_layer(
        **_rotary(family, config, 10_000)
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
        **_write_rotary(layer),
    )


def _write_mistral(c):
    window = c.layer.get("window_size")
    return _write_llama(c) | dict(sliding_window=None if window is None else window[0] + 1)


def _is_fused(c: ModelConfig) -> bool:
    """Whether queries, keys and values are one parameter."""
    return (c.layer.get("num_gqa_groups") or c.layer["num_attention_heads"]) == c.layer["num_attention_heads"]


def _tables(c: ModelConfig, embedding: str, head: str = "lm_head.weight") -> list[TensorRule]:
    made = [TensorRule(("embedding",), (embedding,), rules.SAME)]
    return made if c.tie_embeddings else [*made, TensorRule(("head",), (head,), rules.SAME)]


def _llama_rules(c: ModelConfig) -> list[TensorRule]:
    fused, stack = _is_fused(c), "layers"
    layer, ours = "model.layers.{i}", f"{_LAYER}"
    first = f"{ours}/attention/{'qkv' if fused else 'query'}"
    own = f"{layer}.self_attn"
    bias = bool(c.layer.get("use_bias"))
    names = [f"{own}.{name}_proj" for name in "qkvo"]
    made = [
        *_tables(c, "model.embed_tokens.weight"),
        *rules.norm_rules("final_norm", "model.norm", False),
        *rules.norm_rules(first, f"{layer}.input_layernorm", False, stack),
        *rules.attention_rules(f"{ours}/attention", *names, fused=fused, bias=bias, out_bias=False, stack=stack),
        *rules.norm_rules(f"{ours}/mlp", f"{layer}.post_attention_layernorm", False, stack),
        *rules.mlp_rules(
            f"{ours}/mlp", (f"{layer}.mlp.gate_proj", f"{layer}.mlp.up_proj"), f"{layer}.mlp.down_proj", False, stack
        ),
    ]
    return made + ([rules.zero_rule(f"{ours}/mlp/{name}_bias", stack) for name in ("wi", "wo")] if bias else [])


# -- GPT-2 ----------------------------------------------------------------------------------------------------


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
    stack, layer, ours = "layers", "transformer.h.{i}", _LAYER
    one = lambda path, name, form: TensorRule((f"{ours}/{path}",), (f"{layer}.{name}",), form, stack)
    return [
        *_tables(c, "transformer.wte.weight"),
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


# -- Falcon ---------------------------------------------------------------------------------------------------


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
    return families.falcon(size).with_layer(layernorm_epsilon=epsilon, **_rotary("falcon", config, 10_000))


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
        **_write_rotary(c.layer),
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
    stack, layer, ours = "layers", "transformer.h.{i}", _LAYER
    one_norm, joined = c.layer["parallel_shared_layernorm"], f"{layer}.self_attention.query_key_value.weight"
    if _is_fused(c):
        raise ValueError("te_jax.hf: a falcon has fewer heads of keys and values than of queries.")
    kernels = tuple(f"{ours}/attention/{name}/kernel" for name in ("query", "kv"))
    first = "input_layernorm" if one_norm else "ln_attn"
    made = [
        *_tables(c, "transformer.word_embeddings.weight"),
        *rules.norm_rules("final_norm", "transformer.ln_f", True),
        *rules.norm_rules(f"{ours}/attention/query", f"{layer}.{first}", True, stack),
        TensorRule(kernels, (joined,), _of_groups(c), stack),
        *rules.dense_rules(f"{ours}/attention/out", f"{layer}.self_attention.dense", False, stack),
        *rules.mlp_rules(f"{ours}/mlp", (f"{layer}.mlp.dense_h_to_4h",), f"{layer}.mlp.dense_4h_to_h", False, stack),
    ]
    return made if one_norm else made + rules.norm_rules(f"{ours}/mlp", f"{layer}.ln_mlp", True, stack)


# -- BERT -----------------------------------------------------------------------------------------------------


def _read_bert(config):
    need("bert", config, hidden_act="gelu", is_decoder=False, position_embedding_type="absolute")
    size = _size({**config, "tie_word_embeddings": config.get("tie_word_embeddings", True)})
    model = replace(
        families.bert(size, positions=config["max_position_embeddings"]), token_types=config["type_vocab_size"]
    )
    names = dict(hidden_dropout="hidden_dropout_prob", attention_dropout="attention_probs_dropout_prob")
    dropout = {ours: config.get(theirs, 0.1) for ours, theirs in names.items()}
    return model.with_layer(layernorm_epsilon=config.get("layer_norm_eps", 1e-12), num_gqa_groups=None, **dropout)


def _write_bert(c):
    if c.layer["mlp_activations"] != (exact_gelu,):
        raise ValueError("te_jax.hf: a bert has mlp_activations=(te_jax.models.families.exact_gelu,).")
    return dict(
        hidden_size=c.hidden_size,
        intermediate_size=c.layer["mlp_hidden_size"],
        num_attention_heads=c.layer["num_attention_heads"],
        num_hidden_layers=c.num_layers,
        vocab_size=c.vocab_size,
        max_position_embeddings=c.max_positions,
        type_vocab_size=c.token_types,
        layer_norm_eps=c.layer["layernorm_epsilon"],
        hidden_dropout_prob=c.layer["hidden_dropout"],
        attention_probs_dropout_prob=c.layer["attention_dropout"],
        hidden_act="gelu",
        tie_word_embeddings=c.tie_embeddings,
    )


def _bert_rules(c):
    stack, layer, ours = "layers", "bert.encoder.layer.{i}", _LAYER
    table = lambda path, name: TensorRule((path,), (f"bert.embeddings.{name}_embeddings.weight",), rules.SAME)
    own = [f"{layer}.attention.self.{name}" for name in ("query", "key", "value")]
    predictions = "cls.predictions"
    return [
        *_tables(c, "bert.embeddings.word_embeddings.weight", f"{predictions}.decoder.weight"),
        table("positions", "position"),
        table("token_types", "token_type"),
        *rules.norm_rules("embedding_norm", "bert.embeddings.LayerNorm", True),
        *rules.attention_rules(
            f"{ours}/attention", *own, f"{layer}.attention.output.dense", fused=True, bias=True, stack=stack
        ),
        *rules.norm_rules(f"{ours}/mlp", f"{layer}.attention.output.LayerNorm", True, stack),
        *rules.mlp_rules(f"{ours}/mlp", (f"{layer}.intermediate.dense",), f"{layer}.output.dense", True, stack),
        *rules.norm_rules(f"{ours}/output_layernorm", f"{layer}.output.LayerNorm", True, stack),
        *rules.dense_rules("head_dense", f"{predictions}.transform.dense", True),
        *rules.norm_rules("head_norm", f"{predictions}.transform.LayerNorm", True),
        TensorRule(("head_bias",), (f"{predictions}.bias",), rules.SAME),
    ]


# -- T5 -------------------------------------------------------------------------------------------------------


def _read_t5(config):
    kind = config.get("feed_forward_proj", "relu")
    if kind not in ("relu", "gated-gelu"):
        refuse("t5", "feed_forward_proj", kind, "te_jax reads relu and gated-gelu")
    need("t5", config, relative_attention_num_buckets=32, relative_attention_max_distance=128)
    tied = bool(config.get("tie_word_embeddings", True))
    sizes = (config["d_model"], config["d_ff"], config["num_heads"], config["num_layers"])
    more = dict(head_dim=config["d_kv"], gated=kind == "gated-gelu", vocab=config["vocab_size"], tied=tied)
    rate = config.get("dropout_rate", 0.1)
    model = families.t5(Size(*sizes, **more)).with_layer(
        layernorm_epsilon=config.get("layer_norm_epsilon", 1e-6),
        **dict.fromkeys(("hidden_dropout", "attention_dropout", "intermediate_dropout"), rate),
    )
    scale = config["d_model"] ** -0.5 if config.get("scale_decoder_outputs", tied) else 1.0
    return replace(model, num_decoder_layers=config.get("num_decoder_layers"), output_scale=scale)


def _write_t5(c):
    gated = tuple(c.layer["mlp_activations"]) == ("gelu", "linear")
    return dict(
        d_model=c.hidden_size,
        d_ff=c.layer["mlp_hidden_size"],
        d_kv=c.layer.get("kv_channels") or c.hidden_size // c.layer["num_attention_heads"],
        num_heads=c.layer["num_attention_heads"],
        num_layers=c.num_layers,
        num_decoder_layers=c.num_decoder_layers or c.num_layers,
        vocab_size=c.vocab_size,
        layer_norm_epsilon=c.layer["layernorm_epsilon"],
        dropout_rate=c.layer["hidden_dropout"],
        feed_forward_proj="gated-gelu" if gated else "relu",
        relative_attention_num_buckets=32,
        relative_attention_max_distance=128,
        tie_word_embeddings=c.tie_embeddings,
        scale_decoder_outputs=c.output_scale != 1.0,
        is_encoder_decoder=True,
    )


def _t5_rules(c):
    gated = len(c.layer["mlp_activations"]) > 1
    made = _tables(c, "shared.weight")
    for part in ("encoder", "decoder"):
        stack, block, ours = f"{part}/layers", f"{part}.block.{{i}}.layer", _LAYER
        last = 2 if part == "decoder" else 1
        own, name = f"{block}.0.SelfAttention", "self_attention" if part == "decoder" else "attention"
        table = f"{part}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        feed = f"{block}.{last}.DenseReluDense"
        names = [f"{own}.{each}" for each in "qkvo"]
        made += [
            TensorRule((f"{part}/relpos_bias",), (table,), rules.TURNED),
            *rules.norm_rules(f"{part}/final_norm", f"{part}.final_layer_norm", False),
            *rules.norm_rules(f"{ours}/{name}/qkv", f"{block}.0.layer_norm", False, stack),
            *rules.attention_rules(f"{ours}/{name}", *names, fused=True, stack=stack),
            *rules.norm_rules(f"{ours}/mlp", f"{block}.{last}.layer_norm", False, stack),
            *rules.mlp_rules(
                f"{ours}/mlp",
                (f"{feed}.wi_0", f"{feed}.wi_1") if gated else (f"{feed}.wi",),
                f"{feed}.wo",
                False,
                stack,
            ),
        ]
        if part == "decoder":
            cross, names = f"{ours}/encoder_decoder_attention", [f"{block}.1.EncDecAttention.{each}" for each in "qkvo"]
            made += rules.norm_rules(f"{cross}/query", f"{block}.1.layer_norm", False, stack)
            made += rules.attention_rules(cross, *names, fused=False, stack=stack)
    return made


_ROPE_TABLES = (".rotary_emb.inv_freq",)
_OF_T5 = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
FAMILIES = {
    family.name: family
    for family in (
        Family("llama", CausalLM, _read_llama, _write_llama, _llama_rules, _ROPE_TABLES),
        Family("mistral", CausalLM, _read_mistral, _write_mistral, _llama_rules, _ROPE_TABLES),
        Family("qwen2", CausalLM, _read_qwen2, _write_llama, _llama_rules, _ROPE_TABLES),
        Family(
            "gpt2", CausalLM, _read_gpt2, _write_gpt2, _gpt2_rules, (".attn.bias", ".attn.masked_bias"), "transformer."
        ),
        Family("falcon", CausalLM, _read_falcon, _write_falcon, _falcon_rules, _ROPE_TABLES),
        Family(
            "bert",
            EncoderLM,
            _read_bert,
            _write_bert,
            _bert_rules,
            ("position_ids", "cls.predictions.decoder.bias"),
            tied=("cls.predictions.decoder.weight",),
        ),
        Family("t5", EncoderDecoder, _read_t5, _write_t5, _t5_rules, tied=("lm_head.weight", *_OF_T5)),
    )
}
