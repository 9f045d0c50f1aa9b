"""Phi-3 and Phi-4: a Llama whose projections are joined, in some models with RoPE of a part of a head's channels."""

from te_jax.hf import rules
from te_jax.hf.decoders import ALL_ALIKE, NO_BIAS, ONE, of_llama
from te_jax.hf.family import LAYER, dropout, joins_qkv, tables, width_of, window
from te_jax.hf.rotary import pairs_turn, rotary
from te_jax.hf.rules import TensorRule
from te_jax.hf.words import SIZE, unused
from te_jax.models import ModelConfig, families


def _phi3_rules(c: ModelConfig) -> list[TensorRule]:
    layer, attention, mlp, stack = "model.layers.{i}", f"{LAYER}/attention", f"{LAYER}/mlp", "layers"
    fused = joins_qkv(c)
    names = (f"{attention}/qkv",) if fused else (f"{attention}/query", f"{attention}/kv")
    form = rules.JOINED_QKV if fused else rules.query_and_kv(c.layer["num_attention_heads"] * width_of(c))
    kernels = tuple(f"{name}/kernel" for name in names)
    return [
        *tables(c, "model.embed_tokens.weight"),
        *rules.norm_rules("final_norm", "model.norm", False),
        *rules.norm_rules(names[0], f"{layer}.input_layernorm", False, stack),
        TensorRule(kernels, (f"{layer}.self_attn.qkv_proj.weight",), form, stack),
        *rules.dense_rules(f"{attention}/out", f"{layer}.self_attn.o_proj", False, stack),
        *rules.norm_rules(mlp, f"{layer}.post_attention_layernorm", False, stack),
        TensorRule((f"{mlp}/wi_kernel",), (f"{layer}.mlp.gate_up_proj.weight",), rules.GATED, stack),
        TensorRule((f"{mlp}/wo_kernel",), (f"{layer}.mlp.down_proj.weight",), rules.TURNED, stack),
    ]


PHI3 = of_llama(
    "phi3",
    "Phi3ForCausalLM",
    families.phi3(ONE),
    *(NO_BIAS, window(), rotary("rotary_pos_emb_dim", types=("default",), part=1.0)),
    dropout("resid_pdrop", "hidden_dropout"),
    unused("original_max_position_embeddings", SIZE, 4096),
    checks=(ALL_ALIKE, pairs_turn),
    tensors=_phi3_rules,
    vocab_size=32064,
    hidden_size=3072,
    intermediate_size=8192,
    max_position_embeddings=4096,
    rms_norm_eps=1e-5,
    sliding_window=None,
    resid_pdrop=0.0,
)
