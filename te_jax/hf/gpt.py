"""Decoders of other names than Llama's: GPT-2, Falcon."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from te_jax.core.check import BOOL, NONE, RATE, one_of
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
    STRAYS,
    TIED,
    VOCAB,
    Family,
    divides,
    dropout,
    epsilon,
    even_width,
    head_of,
    joins_qkv,
    tables,
    width,
    width_of,
)
from te_jax.hf.rotary import rotary
from te_jax.hf.rules import Recast, TensorRule
from te_jax.hf.words import ABSENT, LAYERS, SIZE, Said, Word, fixed, only, words_of
from te_jax.models import CausalLM, ModelConfig, families
from te_jax.models.families import Size

# -- GPT-2 ------------------------------------------------------------------------------------------------------


def _four_times(name: str) -> Callable[[Said], int]:
    """The width of an MLP that a family's config.json need not say: four times this word."""
    of = lambda said: 4 * said[name]
    of.__doc__ = f"4 {name}"  # what the documents show
    return of


# What transformers calls them. Several names may mean one function; the first is written.
_GPT2_ACTIVATIONS: dict[str, Any] = {
    **dict.fromkeys(("gelu_new", "gelu_pytorch_tanh", "gelu_fast"), "gelu"),
    "gelu": families.exact_gelu,
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    **dict.fromkeys(("silu", "swish"), "silu"),
}


def _name_of_activation(c: ModelConfig) -> str:
    held = tuple(c.layer["mlp_activations"])
    name = next((name for name, ours in _GPT2_ACTIVATIONS.items() if (ours,) == held), None)
    if name is None:
        raise ValueError(f"te_jax.hf: a {c.family} has mlp_activations of one of {[*_GPT2_ACTIVATIONS.values()]}.")
    return name


_GPT2 = (
    VOCAB,
    Word("n_positions", SIZE, also=("max_position_embeddings",), to=("max_positions",)),
    Word("n_embd", SIZE, also=("hidden_size",), to=("hidden_size",)),
    Word("n_layer", LAYERS, also=("num_hidden_layers",), to=("num_layers",)),
    Word("n_head", SIZE, also=("num_attention_heads",), to=("layer/num_attention_heads",)),
    Word("n_inner", NONE | SIZE, null=_four_times("n_embd"), to=("layer/mlp_hidden_size",)),
    epsilon("layer_norm_epsilon"),
    dropout("resid_pdrop", "hidden_dropout"),
    dropout("attn_pdrop", "attention_dropout"),
    TIED,
    Word(
        "activation_function",
        one_of(*_GPT2_ACTIVATIONS),
        "gelu_new",
        to=("layer/mlp_activations",),
        ours=lambda said: ((_GPT2_ACTIVATIONS[said["activation_function"]],),),
        theirs=_name_of_activation,
    ),
    fixed("scale_attn_weights", True),
    fixed("scale_attn_by_inverse_layer_idx", False),
    fixed("add_cross_attention", False),
    *STRAYS,
)


def _gpt2_rules(c):
    """GPT-2's products are x W, so kernels lie as ours do."""
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


def _is_new(c: ModelConfig) -> bool:
    return not c.layer["parallel_shared_layernorm"] or c.layer["num_gqa_groups"] != 1


def _norms(said: Said) -> int | None:
    """2 with new_decoder_architecture"""
    return 2 if said["new_decoder_architecture"] else None


_FALCON = (
    *(word for word in DECODER if word.name != "intermediate_size"),
    Word("hidden_size", SIZE, also=("n_embed",), to=("hidden_size",)),
    Word("ffn_hidden_size", NONE | SIZE, null=_four_times("hidden_size"), to=("layer/mlp_hidden_size",)),
    Word("new_decoder_architecture", NONE | BOOL, False, theirs=_is_new),
    Word("multi_query", NONE | BOOL, True, theirs=lambda c: True),
    Word(
        "num_kv_heads",
        NONE | SIZE,
        null=GROUPS.null,
        to=("layer/num_gqa_groups",),
        ours=lambda said: (said["num_kv_heads"] if said["new_decoder_architecture"] else 1,),
        theirs=lambda c: c.layer["num_gqa_groups"] if _is_new(c) else ABSENT,
    ),
    Word(
        "num_ln_in_parallel_attn",
        only(None, 1, 2),
        null=_norms,
        to=("layer/parallel_shared_layernorm",),
        ours=lambda said: (said["num_ln_in_parallel_attn"] != 2,),
        theirs=lambda c: (1 if c.layer["parallel_shared_layernorm"] else 2) if _is_new(c) else None,
    ),
    epsilon("layer_norm_epsilon"),
    dropout("hidden_dropout", "hidden_dropout", may_be=NONE | RATE),
    DROPOUT_OR_NULL,
    fixed("alibi", False, None),
    fixed("bias", False, None),
    fixed("parallel_attn", True),
    fixed("activation", "gelu"),
    LAYER_TYPES,
    NO_WINDOW,
    Word("head_dim", SIZE, width, theirs=lambda c: ABSENT),
    rotary(),
)


def _arrangement(said: Said) -> tuple[str, str] | None:
    """What te_jax has a model of: few heads of keys and values, one norm or two."""
    if said["new_decoder_architecture"]:
        heads, groups = said["num_attention_heads"], said["num_kv_heads"]
        few = heads % groups == 0 and heads != groups
        return None if few else ("num_kv_heads", f"pass a smaller divisor of num_attention_heads={heads}")
    if not said["multi_query"]:
        return "multi_query", "te_jax reads True, or the new decoder architecture"
    if said["num_ln_in_parallel_attn"] == 2:
        return "num_ln_in_parallel_attn", "there are 2 only in the new decoder architecture"
    return None


def _of_groups(c: ModelConfig) -> Recast:
    """Rows of one tensor [g (n + 2) d, H]: of each group n heads of queries, one of keys, one of values."""
    groups = c.layer["num_gqa_groups"]
    width = width_of(c)

    def ours(a):
        each = a.reshape(groups, -1, width, a.shape[-1])
        flat = lambda heads: heads.reshape(-1, a.shape[-1]).T
        kv = jnp.stack([flat(each[:, -2]), flat(each[:, -1])], -2)
        return flat(each[:, :-2]), kv

    def theirs(query, kv):
        by_group = lambda heads: heads.T.reshape(groups, -1, width, heads.shape[0])
        each = [by_group(query), by_group(kv[:, 0]), by_group(kv[:, 1])]
        return (jnp.concatenate(each, 1).reshape(-1, query.shape[0]),)

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


_MASKS = (".attn.bias", ".attn.masked_bias")
GPTS = (
    Family(
        "gpt2",
        "GPT2LMHeadModel",
        CausalLM,
        families.gpt2(Size(1, 1, 1, 1)),
        words_of(
            *_GPT2,
            vocab_size=50257,
            n_positions=1024,
            n_embd=768,
            n_layer=12,
            n_head=12,
            n_inner=None,
            layer_norm_epsilon=1e-5,
            resid_pdrop=0.1,
            attn_pdrop=0.1,
            tie_word_embeddings=True,
        ),
        (divides("n_head", "n_embd"),),
        _gpt2_rules,
        _MASKS,
        "transformer.",
        head_of("transformer.wte"),
    ),
    Family(
        "falcon",
        "FalconForCausalLM",
        CausalLM,
        families.falcon(Size(1, 1, 1, 1, groups=1)),
        words_of(
            *_FALCON,
            vocab_size=65024,
            hidden_size=4544,
            ffn_hidden_size=None,
            num_hidden_layers=32,
            num_attention_heads=71,
            num_kv_heads=None,
            num_ln_in_parallel_attn=None,
            layer_norm_epsilon=1e-5,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            max_position_embeddings=2048,
            tie_word_embeddings=True,
        ),
        (divides("num_attention_heads", "hidden_size"), even_width, _arrangement, ALL_SEE_ALL),
        _falcon_rules,
        ROPE_TABLES,
        prefix="transformer.",
        tied=head_of("transformer.word_embeddings"),
    ),
)
