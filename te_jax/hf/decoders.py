"""Decoders: Llama, Mistral, Mixtral, Qwen 2 and 3, Gemma 2."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from te_jax.core.check import BOOL, NONE, STRING, number
from te_jax.hf import rules
from te_jax.hf.family import (
    ALL_SEE_ALL,
    DECODER,
    DROPOUT_OR_NULL,
    GROUPS,
    LAYER,
    LAYER_TYPES,
    NO_WINDOW,
    ROPE_TABLES,
    Family,
    at_most,
    divides,
    dropout,
    epsilon,
    even_width,
    head_dim,
    head_of,
    joins_qkv,
    tables,
    types_of_layers,
    width_of,
    window,
)
from te_jax.hf.rotary import rotary, turning
from te_jax.hf.rules import TensorRule
from te_jax.hf.words import LIST_OF_NAMES, SIZE, Check, Said, Word, fixed, unused, words_of
from te_jax.models import CausalLM, ModelConfig, families
from te_jax.models.families import Size
from te_jax.ops.rope import YarnScaling

ONE = Size(1, 1, 1, 1, groups=1)  # each size is a word's
WITH_EXPERTS = replace(ONE, experts=1, topk=1)

# -- Llama, Mistral, Qwen ---------------------------------------------------------------------------------------


_LLAMA = (
    *DECODER,
    GROUPS,
    head_dim(),
    epsilon("rms_norm_eps"),
    dropout("attention_dropout", "attention_dropout"),
    fixed("hidden_act", "silu"),
    LAYER_TYPES,
    rotary(stretched=True),
)
_OF_LLAMA = (divides("num_key_value_heads", "num_attention_heads"), even_width)
NO_BIAS = fixed("attention_bias", False)
ALL_ALIKE = types_of_layers(lambda said, i: "full_attention" if said["sliding_window"] is None else "sliding_attention")
UNUSED_WINDOW = (fixed("use_sliding_window", False), unused("sliding_window", NONE | SIZE, 4096))
TYPES_OF_QWEN = replace(LAYER_TYPES, theirs=lambda c: ["full_attention"] * c.num_layers)
QK_NORMS = (epsilon("rms_norm_eps", "qk_norm_eps"), NO_BIAS)
_CHOSEN = Word("num_experts_per_tok", SIZE, to=("layer/moe/num_experts_per_tok",))
OF_MIXTRAL_EXPERTS = (Word("num_local_experts", SIZE, also=("num_experts",), to=("layer/moe/num_experts",)), _CHOSEN)
QWEN_EXPERTS = (
    Word("num_experts", SIZE, also=("num_local_experts",), to=("layer/moe/num_experts",)),
    _CHOSEN,
    Word("moe_intermediate_size", SIZE, 768, to=("layer/mlp_hidden_size",)),
    unused("intermediate_size", SIZE),  # of layers without experts
    Word(
        "norm_topk_prob",
        BOOL,
        False,
        to=("layer/moe/use_pre_softmax", "layer/moe/normalize_weights"),
        ours=lambda said: (False, None) if said["norm_topk_prob"] else (True, False),
        theirs=lambda c: not c.layer["moe"].get("use_pre_softmax", False),
    ),
    fixed("decoder_sparse_step", 1),
    fixed("mlp_only_layers", [], None, default=None),
)


_EXPERTS_OF_QWEN = "mlp", rules.SWIGLU  # where they are, and the names of gate, up and down
_EXPERTS_OF_MIXTRAL = "block_sparse_moe", ("w1", "w3", "w2")


def attention_of_llama(c: ModelConfig, out_bias: bool | None = False) -> list[TensorRule]:
    """Embedding, head, last norm and attention, with the norms of queries and keys. out_bias: of the last projection,
    where the others have biases; None: it has one, too."""
    stack, ours, own = "layers", f"{LAYER}/attention", "model.layers.{i}.self_attn"
    taken, same = c.layer.get("kv_sharing") == "take", c.layer.get("keys_as_values")
    fused = joins_qkv(c) and not (taken or same)
    q, k, v, out = (f"{own}.{name}_proj" for name in "qkvo")
    made = tables(c, "model.embed_tokens.weight") + rules.norm_rules("final_norm", "model.norm", False)
    if c.layer.get("input_layernorm", True):
        first = f"{ours}/{'qkv' if fused else 'query'}"
        made += rules.norm_rules(first, "model.layers.{i}.input_layernorm", False, stack)
    bias = dict(bias=bool(c.layer.get("use_bias")), out_bias=out_bias)
    sources = q, None if taken else k, None if taken or same else v, out
    made += rules.attention_rules(ours, *sources, fused=fused, **bias, stack=stack)
    for name in ("q" if taken else "qk") if c.layer.get("qk_norm_type") else "":
        made += rules.norm_rules(f"{ours}/{name}_norm", f"{own}.{name}_norm", False, stack)
    return made


def llama_rules(
    c: ModelConfig,
    norm: str | None = "post_attention_layernorm",
    experts: tuple[str, tuple[str, ...]] = _EXPERTS_OF_QWEN,
) -> list[TensorRule]:
    """norm: what the norm in front of the MLP, or the experts, is called; None: there is none."""
    return attention_of_llama(c) + feed_forward_of_llama(c, norm, experts)


def feed_forward_of_llama(
    c: ModelConfig,
    norm: str | None = "post_attention_layernorm",
    experts: tuple[str, tuple[str, ...]] = _EXPERTS_OF_QWEN,
) -> list[TensorRule]:
    """The MLP or the experts, and the norm in front. Arguments are as of `llama_rules`."""
    layer, stack, moe = "model.layers.{i}", "layers", c.layer.get("moe")
    ours = f"{LAYER}/{'moe' if moe else 'mlp'}"
    made = [] if norm is None else rules.norm_rules(ours, f"{layer}.{norm}", False, stack)
    if moe:
        where, names = experts
        return made + rules.expert_rules(ours, f"{layer}.{where}", names, moe["num_experts"], stack)
    made += rules.swiglu_rules(ours, f"{layer}.mlp", stack)
    zeros = ("wi", "wo") if c.layer.get("use_bias") else ()
    return made + [rules.zero_rule(f"{ours}/{name}_bias", stack) for name in zeros]


def post_norm_rules() -> list[TensorRule]:
    """Norms behind attention and the MLP."""
    names = {"attention": "post_attention", "mlp": "post_feedforward"}
    of = {f"{LAYER}/post_{path}_norm": f"model.layers.{{i}}.{name}_layernorm" for path, name in names.items()}
    return [rule for path, name in of.items() for rule in rules.norm_rules(path, name, False, "layers")]


# -- Gemma 2 ----------------------------------------------------------------------------------------------------


def _type_of_gemma2(i: int) -> str:
    return ("sliding_attention", "full_attention")[i % 2]


def _window_of_gemma2(c: ModelConfig) -> int | None:
    size = c.fields_of_layer(0).get("window_size")
    return None if size is None else size[0] + 1


def _scale_of_queries(said: Said) -> tuple[float | None]:
    scalar, width, rope = said["query_pre_attn_scalar"], said["head_dim"], said["rope_parameters"]
    of_rope = turning(rope, width)["attn_logit_scale"] if "rope_type" in rope else None
    return (of_rope if scalar == width else scalar**-0.5,)


def _logits_have_one_scale(said: Said) -> tuple[str, str] | None:
    if said["query_pre_attn_scalar"] != said["head_dim"] and said["rope_parameters"]["rope_type"] == "yarn":
        return "query_pre_attn_scalar", f"next to YaRN, which scales logits, too, te_jax reads {said['head_dim']}"
    return None


def _scalar_of_queries(c: ModelConfig) -> float:
    scale, scaling = (c.layer.get(name) for name in ("attn_logit_scale", "rotary_pos_emb_scaling"))
    scalar = width_of(c) if scale is None or isinstance(scaling, YarnScaling) else scale**-2
    return round(scalar) if math.isclose(scalar, round(scalar)) else scalar


OF_GEMMA = (
    unused("hidden_act", NONE | STRING),
    head_dim(may_be=SIZE),
    replace(GROUPS, kind=SIZE),
    DROPOUT_OR_NULL,
    Word(
        "hidden_size",
        SIZE,
        to=("hidden_size", "embedding_scale"),
        ours=lambda s: (s["hidden_size"], math.sqrt(s["hidden_size"])),
    ),
    Word("attn_logit_softcapping", NONE | number(above=0), to=("layer/attn_logit_softcap",)),
    Word("final_logit_softcapping", NONE | number(above=0), to=("logit_softcap",)),
    fixed("hidden_activation", "gelu_pytorch_tanh"),
    NO_BIAS,
    fixed("use_bidirectional_attention", False, None, default=None),
)
# What logits are divided by the root of, where that is not the width of a head.
QUERY_SCALAR = Word(
    "query_pre_attn_scalar",
    SIZE,
    to=("layer/attn_logit_scale",),
    ours=_scale_of_queries,
    theirs=_scalar_of_queries,
)
_GEMMA2 = (
    *OF_GEMMA,
    QUERY_SCALAR,
    Word(
        "sliding_window",
        SIZE,
        to=("pattern/0/window_size",),
        ours=lambda said: ((said["sliding_window"] - 1, 0),),
        theirs=_window_of_gemma2,
    ),
    Word("layer_types", NONE | LIST_OF_NAMES, None, theirs=lambda c: [*map(_type_of_gemma2, range(c.num_layers))]),
)


def gemma_rules(c: ModelConfig) -> list[TensorRule]:
    """The names of Llama's, but that `post_attention_layernorm` is a norm behind attention."""
    return llama_rules(c, norm="pre_feedforward_layernorm") + post_norm_rules()


def of_llama(
    name: str,
    architecture: str,
    base: ModelConfig,
    *words: Word,
    checks: tuple[Check, ...] = (ALL_SEE_ALL,),
    tensors: Callable[[ModelConfig], list[TensorRule]] = llama_rules,
    **defaults: Any,
) -> Family:
    """A family with the words of a Llama, and these. defaults: of transformers' class, where not all of these have
    them."""
    shared = dict(hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=None)
    shared |= dict(head_dim=None, rms_norm_eps=1e-6, attention_dropout=0.0, tie_word_embeddings=False)
    said = words_of(*_LLAMA, *words, **shared | defaults)
    return Family(
        name,
        architecture,
        CausalLM,
        base,
        said,
        (*_OF_LLAMA, *checks),
        tensors,
        unread=ROPE_TABLES,
        prefix="model.",
        tied=head_of("model.embed_tokens"),
    )


_OF_MISTRAL = dict(vocab_size=32000, intermediate_size=14336, num_key_value_heads=8, max_position_embeddings=131072)
OF_QWEN = dict(vocab_size=151936, intermediate_size=22016, num_key_value_heads=32, max_position_embeddings=32768)
DECODERS = (
    of_llama(
        "llama",
        "LlamaForCausalLM",
        families.llama(ONE),
        *(DROPOUT_OR_NULL, NO_BIAS, NO_WINDOW, fixed("mlp_bias", False)),
        vocab_size=32000,
        intermediate_size=11008,
        max_position_embeddings=2048,
    ),
    of_llama(
        "mistral",
        "MistralForCausalLM",
        families.mistral(ONE, window=None),
        window(),
        checks=(ALL_ALIKE,),
        sliding_window=4096,
        **_OF_MISTRAL,
    ),
    of_llama("qwen2", "Qwen2ForCausalLM", families.qwen2(ONE), *UNUSED_WINDOW, TYPES_OF_QWEN, **OF_QWEN),
    of_llama(
        "qwen3",
        "Qwen3ForCausalLM",
        families.qwen3(ONE),
        *(*UNUSED_WINDOW, *QK_NORMS, TYPES_OF_QWEN, head_dim(may_be=SIZE)),
        head_dim=128,
        **OF_QWEN,
    ),
    of_llama(
        "mixtral",
        "MixtralForCausalLM",
        families.mixtral(WITH_EXPERTS),
        *(window(), *OF_MIXTRAL_EXPERTS, fixed("router_jitter_noise", 0.0)),
        checks=(ALL_ALIKE, at_most("num_experts_per_tok", "num_local_experts")),
        tensors=partial(llama_rules, experts=_EXPERTS_OF_MIXTRAL),
        sliding_window=None,
        rms_norm_eps=1e-5,
        rope_parameters=1_000_000.0,
        num_local_experts=8,
        num_experts_per_tok=2,
        **_OF_MISTRAL,
    ),
    of_llama(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        families.qwen3(WITH_EXPERTS),
        *(*UNUSED_WINDOW, *QK_NORMS, *QWEN_EXPERTS),
        checks=(ALL_SEE_ALL, at_most("num_experts_per_tok", "num_experts")),
        num_experts=128,
        num_experts_per_tok=8,
        **OF_QWEN | dict(hidden_size=2048, num_hidden_layers=24, num_key_value_heads=4, intermediate_size=6144),
    ),
    of_llama(
        "gemma2",
        "Gemma2ForCausalLM",
        families.gemma2(replace(ONE, head_dim=1)),
        *_GEMMA2,
        checks=(_logits_have_one_scale, types_of_layers(lambda said, i: _type_of_gemma2(i))),
        tensors=gemma_rules,
        vocab_size=256000,
        hidden_size=2304,
        intermediate_size=9216,
        num_hidden_layers=26,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=256,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        query_pre_attn_scalar=256,
        sliding_window=4096,
        attn_logit_softcapping=50.0,
        final_logit_softcapping=30.0,
    ),
)
