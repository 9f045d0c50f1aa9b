"""ModernBERT: two of three layers see a window around a token, with a base of RoPE of their own; no biases."""

from dataclasses import replace
from typing import Any

from te_jax.core.check import BOOL, NONE, integer, number, one_of
from te_jax.hf import rules
from te_jax.hf.family import DECODER, ELSEWHERE, LAYER, ROPE_TABLES, STRAYS, Family, divides, dropout, epsilon, tables
from te_jax.hf.layered import Fields, pattern
from te_jax.hf.rotary import ROPE_FIELDS, TYPES_BY_WINDOW, rotary_by_type, turning, type_by_window
from te_jax.hf.rules import TensorRule
from te_jax.hf.words import LIST_OF_NAMES, SIZE, Said, Word, fixed, stray, unused, words_of
from te_jax.models import EncoderLM, ModelConfig, families
from te_jax.models.families import Size


def _types_of_modernbert(said: Said) -> list[str]:
    """full_attention in the first and each global_attn_every_n_layers-th from there on, and sliding_attention"""
    every = said["global_attn_every_n_layers"]
    return [TYPES_BY_WINDOW[i % every == 0] for i in range(said["num_hidden_layers"])]


def _fields_of_modernbert(said: Said, name: str) -> Fields:
    around = (said["local_attention"] // 2,) * 2
    made = turning(said["rope_parameters"][name], said["hidden_size"] // said["num_attention_heads"])
    own = {field: made[field] for field in ROPE_FIELDS if made[field] is not None}
    return own | (dict(window_size=around) if name == "sliding_attention" else {})


def _modernbert_layers(said: Said) -> tuple[Any, Any]:
    """The first layer, which has no norm in front of attention, and the pattern of the others."""
    of, (first, *others) = lambda name: _fields_of_modernbert(said, name), said["layer_types"]
    return (of(first) | dict(input_layernorm=False),), pattern(others, of) if others else ()


def _local_of(c: ModelConfig) -> int:
    found = (c.fields_of_layer(i).get("window_size") for i in range(c.num_layers))
    return 2 * next((each[0] for each in found if each is not None), 64)


def _layers_are_typed(said: Said) -> tuple[str, str] | None:
    types, count = said["layer_types"], said["num_hidden_layers"]
    if len(types) != count or not {*types} <= {*TYPES_BY_WINDOW}:
        return "layer_types", f"pass num_hidden_layers={count} times one of {[*TYPES_BY_WINDOW]}"
    return None


def _heads_turn(said: Said) -> tuple[str, str] | None:
    if said["hidden_size"] // said["num_attention_heads"] % 2:
        return "num_attention_heads", "RoPE turns pairs of channels: pass one that gives heads an even number of them"
    return None


_MODERNBERT = words_of(
    *DECODER[: -len(STRAYS)],
    *ELSEWHERE,
    epsilon("norm_eps"),
    dropout("mlp_dropout", "intermediate_dropout"),
    fixed("attention_dropout", 0.0),
    fixed("hidden_activation", "gelu"),
    fixed("classifier_activation", "gelu"),
    fixed("decoder_bias", True),
    *(fixed(name, False) for name in ("norm_bias", "attention_bias", "mlp_bias", "classifier_bias")),
    stray("position_embedding_type", "absolute", "rope"),
    Word("local_attention", SIZE, 128, theirs=_local_of),
    Word("global_attn_every_n_layers", SIZE, 3),
    replace(
        rotary_by_type(
            {"sliding_attention": 10_000.0, "full_attention": 160_000.0},
            {"sliding_attention": "local_rope_theta", "full_attention": "global_rope_theta"},
        ),
        scaled=TYPES_BY_WINDOW,
    ),
    Word(
        "layer_types",
        NONE | LIST_OF_NAMES,
        None,
        null=_types_of_modernbert,
        to=("first", "pattern"),
        ours=_modernbert_layers,
        theirs=lambda c: [type_by_window(c.fields_of_layer(i)) for i in range(c.num_layers)],
    ),
    *(unused(name, NONE | integer()) for name in ("cls_token_id", "sep_token_id")),
    *(unused(name, number()) for name in ("initializer_cutoff_factor", "embedding_dropout")),
    unused("sparse_pred_ignore_index", integer()),
    *(unused(name, BOOL) for name in ("deterministic_flash_attn", "sparse_prediction")),
    unused("classifier_pooling", one_of("cls", "mean")),
    vocab_size=50368,
    hidden_size=768,
    intermediate_size=1152,
    num_hidden_layers=22,
    num_attention_heads=12,
    max_position_embeddings=8192,
    norm_eps=1e-5,
    mlp_dropout=0.0,
    tie_word_embeddings=True,
)


def _norm_without_bias(path: str, name: str, stack: str | None = None) -> list[TensorRule]:
    return [*rules.norm_rules(path, name, False, stack), rules.zero_rule(f"{path}/ln_bias", stack)]


def _modernbert_rules(c: ModelConfig) -> list[TensorRule]:
    layer, attention, mlp, stack = "model.layers.{i}", f"{LAYER}/attention", f"{LAYER}/mlp", "layers"
    one = lambda path, name, form: TensorRule((path,), (f"{layer}.{name}.weight",), form, stack)
    in_front = _norm_without_bias(f"{attention}/qkv", f"{layer}.attn_norm", stack)
    return [
        *tables(c, "model.embeddings.tok_embeddings.weight", "decoder.weight"),
        *_norm_without_bias("embedding_norm", "model.embeddings.norm"),
        *(rule._replace(layers=range(1, c.num_layers)) for rule in in_front),
        one(f"{attention}/qkv/kernel", "attn.Wqkv", rules.JOINED_QKV),
        one(f"{attention}/out/kernel", "attn.Wo", rules.TURNED),
        *_norm_without_bias(mlp, f"{layer}.mlp_norm", stack),
        one(f"{mlp}/wi_kernel", "mlp.Wi", rules.GATED),
        one(f"{mlp}/wo_kernel", "mlp.Wo", rules.TURNED),
        *_norm_without_bias("final_norm", "model.final_norm"),
        *rules.dense_rules("head_dense", "head.dense", False),
        rules.zero_rule("head_dense/bias"),
        *_norm_without_bias("head_norm", "head.norm"),
        TensorRule(("head_bias",), ("decoder.bias",), rules.SAME),
    ]


MODERNBERT = Family(
    "modernbert",
    "ModernBertForMaskedLM",
    EncoderLM,
    families.modernbert(Size(1, 1, 1, 1)),
    _MODERNBERT,
    (divides("num_attention_heads", "hidden_size"), _heads_turn, _layers_are_typed),
    _modernbert_rules,
    ROPE_TABLES,
    tied={"decoder.weight": "model.embeddings.tok_embeddings.weight"},
)
