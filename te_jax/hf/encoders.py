"""Encoders, and what begins with one: BERT, T5."""

from dataclasses import replace

from te_jax.hf import rules
from te_jax.hf.family import LAYER, Family, need, refuse, size_of, tables
from te_jax.hf.rules import TensorRule
from te_jax.models import EncoderDecoder, EncoderLM, families
from te_jax.models.families import Size, exact_gelu

# -- BERT -------------------------------------------------------------------------------------------------------


def _read_bert(config):
    need("bert", config, hidden_act="gelu", is_decoder=False, position_embedding_type="absolute")
    size = size_of({**config, "tie_word_embeddings": config.get("tie_word_embeddings", True)})
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
    stack, layer, ours = "layers", "bert.encoder.layer.{i}", LAYER
    table = lambda path, name: TensorRule((path,), (f"bert.embeddings.{name}_embeddings.weight",), rules.SAME)
    own = [f"{layer}.attention.self.{name}" for name in ("query", "key", "value")]
    predictions = "cls.predictions"
    return [
        *tables(c, "bert.embeddings.word_embeddings.weight", f"{predictions}.decoder.weight"),
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


# -- T5 ---------------------------------------------------------------------------------------------------------


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
    made = tables(c, "shared.weight")
    for part in ("encoder", "decoder"):
        stack, block, ours = f"{part}/layers", f"{part}.block.{{i}}.layer", LAYER
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


# Copies, and what reads whole texts: whether one follows another.
_OF_BERT = (
    *("position_ids", "cls.predictions.decoder.bias"),
    *(f"{name}.{end}" for name in ("bert.pooler.dense", "cls.seq_relationship") for end in ("weight", "bias")),
)
_OLDER = (("LayerNorm.gamma", "LayerNorm.weight"), ("LayerNorm.beta", "LayerNorm.bias"))
# Of the decoder's reading of the encoder, which has no relative positions.
_OF_T5 = (".EncDecAttention.relative_attention_bias.weight",)
_COPIES = ("lm_head.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
ENCODERS = (
    Family(
        "bert",
        "BertForMaskedLM",
        EncoderLM,
        _read_bert,
        _write_bert,
        _bert_rules,
        _OF_BERT,
        tied=("cls.predictions.decoder.weight",),
        older=_OLDER,
    ),
    Family("t5", "T5ForConditionalGeneration", EncoderDecoder, _read_t5, _write_t5, _t5_rules, _OF_T5, tied=_COPIES),
)
