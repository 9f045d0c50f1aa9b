"""Encoders, and what begins with one: BERT, T5."""

import math
from dataclasses import replace

from te_jax.core.check import BOOL, NONE, STRING, one_of
from te_jax.hf import rules
from te_jax.hf.family import DECODER, ELSEWHERE, LAYER, STRAYS, Family, divides, dropout, epsilon, head_dim, tables
from te_jax.hf.rules import Recast, TensorRule
from te_jax.hf.words import LAYERS, SIZE, Said, Word, fixed, only, stray, words_of
from te_jax.models import EncoderDecoder, EncoderLM, ModelConfig, families
from te_jax.models.families import Size, exact_gelu

# -- BERT -------------------------------------------------------------------------------------------------------


def _is_exact(c: ModelConfig) -> str:
    if c.layer["mlp_activations"] != (exact_gelu,):
        raise ValueError("te_jax.hf: a bert has mlp_activations=(te_jax.models.families.exact_gelu,).")
    return "gelu"


_BERT = (
    *DECODER[: -len(STRAYS)],
    Word("max_position_embeddings", SIZE, 512, to=("max_positions",)),
    Word("type_vocab_size", SIZE, 2, to=("token_types",)),
    epsilon("layer_norm_eps"),
    dropout("hidden_dropout_prob", "hidden_dropout"),
    dropout("attention_probs_dropout_prob", "attention_dropout"),
    Word("hidden_act", only("gelu"), "gelu", theirs=_is_exact),
    fixed("is_decoder", False),
    fixed("add_cross_attention", False),
    stray("position_embedding_type", "absolute"),
    *ELSEWHERE,
)


def _bert_rules(c):
    stack, layer, ours = "layers", "bert.encoder.layer.{i}", LAYER
    table = lambda path, name: TensorRule((path,), (f"bert.embeddings.{name}_embeddings.weight",), rules.SAME)
    own = [f"{layer}.attention.self.{name}" for name in ("query", "key", "value")]
    predictions = "cls.predictions"
    # What transformers adds to logits; tied, it has a second name, and without ties a second, unread tensor.
    bias = TensorRule(("head_bias",), (f"{predictions}.bias",), rules.SAME)
    if not c.tie_embeddings:
        bias = TensorRule(("head_bias",), (f"{predictions}.decoder.bias", f"{predictions}.bias"), _FIRST)
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
        bias,
    ]


# The first of two tensors is read; as they are written, the second is a copy.
_FIRST = Recast(lambda first, second: (first,), lambda a: (a, a))


# -- T5 ---------------------------------------------------------------------------------------------------------


def _act(said: Said) -> str:
    """as feed_forward_proj says"""
    return {"relu": "relu", "gated-gelu": "gelu_new"}[said["feed_forward_proj"]]


def _is_gated(said: Said) -> bool:
    """as feed_forward_proj says"""
    return said["feed_forward_proj"] == "gated-gelu"


def _symmetric(said: Said) -> int:
    """num_layers"""
    return said.found.get("num_layers", 6)  # whatever the other name of that says


def _tied(said: Said) -> bool:
    """tie_word_embeddings"""
    return said["tie_word_embeddings"]


def _has_gate(c: ModelConfig) -> bool:
    return tuple(c.layer["mlp_activations"]) == ("gelu", "linear")


def _output_scale(said: Said) -> tuple[float]:
    return (1 / math.sqrt(said["d_model"]) if said["scale_decoder_outputs"] else 1.0,)


def _known_act(said: Said) -> tuple[str, str] | None:
    act, gated = said["dense_act_fn"], said["is_gated_act"]
    if (act, gated) in (("relu", False), ("gelu_new", True)):
        return None
    return "dense_act_fn", f"with is_gated_act={gated} te_jax reads {'gelu_new' if gated else 'relu'!r}"


_T5 = (
    Word("vocab_size", SIZE, 32128, to=("vocab_size",)),
    Word("d_model", SIZE, 512, also=("hidden_size",), to=("hidden_size",)),
    Word("d_ff", SIZE, 2048, to=("layer/mlp_hidden_size",)),
    Word("num_layers", LAYERS, 6, also=("num_hidden_layers",), to=("num_layers",)),
    Word(
        "num_decoder_layers",
        NONE | LAYERS,
        None,
        null=_symmetric,
        to=("num_decoder_layers",),
        theirs=lambda c: c.num_decoder_layers or c.num_layers,
    ),
    Word("num_heads", SIZE, 8, also=("num_attention_heads",), to=("layer/num_attention_heads",)),
    replace(head_dim("d_kv", "d_model", "num_heads", also=("head_dim",), may_be=SIZE), default=64),
    replace(epsilon("layer_norm_epsilon"), default=1e-6),
    replace(dropout("dropout_rate", "hidden_dropout", "attention_dropout", "intermediate_dropout"), default=0.1),
    Word(
        "feed_forward_proj",
        one_of("relu", "gated-gelu"),
        "relu",
        to=("layer/mlp_activations",),
        ours=lambda said: (("gelu", "linear") if said["is_gated_act"] else ("relu",),),
        theirs=lambda c: "gated-gelu" if _has_gate(c) else "relu",
    ),
    Word("dense_act_fn", STRING, _act, theirs=lambda c: "gelu_new" if _has_gate(c) else "relu"),
    Word("is_gated_act", BOOL, _is_gated, theirs=_has_gate),
    fixed("relative_attention_num_buckets", 32),
    fixed("relative_attention_max_distance", 128),
    Word("tie_word_embeddings", NONE | BOOL, True, null=lambda said: True, to=("tie_embeddings",)),
    Word(
        "scale_decoder_outputs",
        BOOL,
        _tied,
        to=("output_scale",),
        ours=_output_scale,
        theirs=lambda c: c.output_scale != 1.0,
    ),
    fixed("is_encoder_decoder", True),
    *ELSEWHERE,
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


# Indices, and what reads whole texts: whether one follows another.
_OF_BERT = (
    "embeddings.position_ids",
    *(f"{name}.{end}" for name in ("bert.pooler.dense", "cls.seq_relationship") for end in ("weight", "bias")),
)
_OLDER = (("LayerNorm.gamma", "LayerNorm.weight"), ("LayerNorm.beta", "LayerNorm.bias"))
# In the decoder's reading of the encoder, which has no relative positions.
_OF_T5 = (".EncDecAttention.relative_attention_bias.weight",)
_COPIES = ("lm_head.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
_TIED_IN_BERT = {
    "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
    "cls.predictions.decoder.bias": "cls.predictions.bias",
}
ENCODERS = (
    Family(
        "bert",
        "BertForMaskedLM",
        EncoderLM,
        families.bert(Size(1, 1, 1, 1)),
        words_of(
            *_BERT,
            vocab_size=30522,
            hidden_size=768,
            intermediate_size=3072,
            num_hidden_layers=12,
            num_attention_heads=12,
            layer_norm_eps=1e-12,
            hidden_dropout_prob=0.1,
            attention_probs_dropout_prob=0.1,
            tie_word_embeddings=True,
        ),
        (divides("num_attention_heads", "hidden_size"),),
        _bert_rules,
        _OF_BERT,
        tied=_TIED_IN_BERT,
        older=_OLDER,
    ),
    Family(
        "t5",
        "T5ForConditionalGeneration",
        EncoderDecoder,
        families.t5(Size(1, 1, 1, 1)),
        words_of(*_T5),
        (_known_act,),
        _t5_rules,
        _OF_T5,
        tied=dict.fromkeys(_COPIES, "shared.weight"),
        ties_by_files=True,
    ),
)
