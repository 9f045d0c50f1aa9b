"""Gemma 3 (text): five of six layers see a window, with a base of RoPE of their own."""

from dataclasses import replace

from te_jax.hf.decoders import OF_GEMMA, ONE, QK_NORMS, QUERY_SCALAR, gemma_rules, of_llama
from te_jax.hf.layered import WINDOW_OF_SOME, layer_types, layers_are_known, rope_and_window
from te_jax.hf.rotary import rotary_by_type
from te_jax.hf.words import SIZE, Word, fixed
from te_jax.models import families

GEMMA3_TEXT = of_llama(
    "gemma3_text",
    "Gemma3ForCausalLM",
    families.gemma3(replace(ONE, head_dim=1)),
    *(*OF_GEMMA, *QK_NORMS, WINDOW_OF_SOME),
    fixed("attn_logit_softcapping", None),  # which transformers knows, and computes nothing by
    fixed("use_bidirectional_attention", False, None),
    QUERY_SCALAR,
    rotary_by_type(
        {"sliding_attention": 10_000.0, "full_attention": 1_000_000.0},
        {"sliding_attention": "rope_local_base_freq", "full_attention": "rope_theta"},
    ),
    Word("sliding_window_pattern", SIZE, 6),
    layer_types("sliding_window_pattern", rope_and_window),
    checks=(layers_are_known,),
    tensors=gemma_rules,
    vocab_size=262208,
    hidden_size=2304,
    intermediate_size=9216,
    num_hidden_layers=26,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=256,
    max_position_embeddings=131072,
    tie_word_embeddings=True,
    query_pre_attn_scalar=256,
    sliding_window=4096,
    final_logit_softcapping=None,
)
