"""Probes of the fields and arguments of norms of queries and keys, of latent attention, and of soft caps."""

import jax
import jax.numpy as jnp
from probes import Probe
from probes_modules import CORE, KEY, LATENT, MHA, MLA, TRANSFORMER, B, H, N, S, T, V, X, applied, field_probes, made

import te_jax.flax as te_flax
from te_jax.ops.rope import NTKScaling

FIELDS = [
    (MHA, dict(qk_norm_type="RMS"), V, "qk_norm_type is 'RMS'; pass None or one of 'rmsnorm'"),
    (MHA, dict(qk_norm_type=True), T, "qk_norm_type is True"),
    (MHA, dict(qk_norm_type="L2Normalization"), None, ""),
    (MHA, dict(qk_norm_type="rmsnorm", qk_norm_eps=0.0), V, "qk_norm_eps is 0.0"),
    (MHA, dict(qk_norm_before_rope=True), V, "qk_norm_before_rope is True, but qk_norm_type is None; pass 'rmsnorm'"),
    (MHA, dict(qk_norm_eps=1e-5), V, "qk_norm_eps is 1e-05, but qk_norm_type is None"),
    (TRANSFORMER, dict(qk_norm_before_rope=True), V, "qk_norm_before_rope is True, but qk_norm_type is None"),
    (MLA, dict(kv_lora_rank=None), V, "kv_lora_rank is None; pass all of kv_lora_rank, qk_nope"),
    (MLA, dict(v_head_dim=0), V, "v_head_dim is 0"),
    (MLA, dict(q_lora_rank="4"), T, "q_lora_rank is '4'"),
    (MLA, dict(qk_rope_head_dim=3), V, "qk_rope_head_dim is 3, .*pass an even number"),
    (MLA, dict(qk_rope_head_dim=2, rotary_pos_emb_scaling=NTKScaling(2)), V, "single pair"),
    (MLA, dict(mscale=0), V, "mscale is 0; pass a number above 0"),
    (MLA, dict(num_attention_heads=None), V, "num_attention_heads is None; pass a positive int"),
    (MLA, dict(num_gqa_groups=1), T, "unexpected keyword argument 'num_gqa_groups'"),
    (CORE, dict(attn_logit_softcap=0.0), V, "attn_logit_softcap is 0.0; pass None or a number above 0"),
    (CORE, dict(attn_logit_softcap="50"), T, "attn_logit_softcap is '50'"),
    (MLA, dict(attn_logit_softcap=50.0), T, "unexpected keyword argument 'attn_logit_softcap'"),
    (TRANSFORMER, dict(attn_logit_scale=0), V, "attn_logit_scale is 0; pass None or a number above 0"),
    (TRANSFORMER, dict(attn_logit_scale=0.5, scale_attn_logits=False), V, "which is a scale of 1; leave one"),
    (TRANSFORMER, dict(residual_multiplier=0), V, "residual_multiplier is 0; pass a number above 0"),
    (TRANSFORMER, dict(post_norms=1), T, "post_norms is 1; pass True or False"),
    (TRANSFORMER, dict(post_norms=True, parallel_attention_mlp=True), V, "and post_norms are both True; set one"),
    (TRANSFORMER, dict(qk_norm_across_heads=True), V, "qk_norm_across_heads is True, but qk_norm_type is None"),
    (TRANSFORMER, dict(mlp_layernorm=0), T, "mlp_layernorm is 0; pass True or False"),
    (TRANSFORMER, dict(input_layernorm=False, output_layernorm=True), V, "input_layernorm is False, but output_layer"),
    (TRANSFORMER, dict(attention_chunk_size=0), V, "attention_chunk_size is 0; pass None or a positive int"),
    (TRANSFORMER, dict(attn_temperature=0.1), T, "attn_temperature is 0.1"),
    (MHA, dict(attn_temperature=(1, 0)), V, "attn_temperature is .1, 0."),
    (MHA, dict(attn_output_gate=1), T, "attn_output_gate is 1; pass True or False"),
    (TRANSFORMER, LATENT | dict(attn_output_gate=True), V, "attn_output_gate is True, which attention with a kv"),
    (TRANSFORMER, LATENT | dict(attention_chunk_size=8), V, "attention_chunk_size is 8, which attention with a kv"),
    (TRANSFORMER, LATENT, None, ""),
    (TRANSFORMER, dict(latent_rotary=False), V, "latent_rotary is False, but kv_lora_rank is None"),
    (MLA, dict(latent_rotary=False, rotary_pos_emb_scaling=NTKScaling(2)), V, "but latent_rotary is False; leave one"),
    (MLA, dict(latent_norm_epsilon=0), V, "latent_norm_epsilon is 0; pass None or a number above 0"),
    (TRANSFORMER, dict(mscale=1.2), V, "mscale is 1.2, but kv_lora_rank is None"),
    (TRANSFORMER, LATENT | dict(v_head_dim=None), V, "v_head_dim is None; pass all of"),
    (TRANSFORMER, LATENT | dict(num_gqa_groups=1), V, "num_gqa_groups is 1, which attention with a kv_lora_rank"),
    (TRANSFORMER, LATENT | dict(qk_norm_type="rmsnorm"), V, "qk_norm_type is 'rmsnorm', which attention with"),
    (TRANSFORMER, LATENT | dict(layer_type="decoder"), V, "kv_lora_rank is given, but layer_type is .decoder."),
    (
        TRANSFORMER,
        LATENT | dict(relative_embedding=te_flax.RelativePositionBiases(8, 9, N)),
        V,
        "relative_embedding is",
    ),
]


def continued(kv_up):
    """A step on a cache, with other parameters of `kv_up`; by shapes."""
    module = MLA(num_attention_heads=N, **LATENT)

    def run(x):
        variables = module.init(KEY, x, decode=True)
        params = {name: leaf for name, leaf in variables["params"].items() if name != "kv_up"} | kv_up
        return module.apply({**variables, "params": params}, x[:, :1], decode=True, mutable=["cache"])

    return jax.eval_shape(run, X)


PROBES = [
    *field_probes(FIELDS),
    Probe("latents of two inputs", lambda: made(MLA, {}, X, X), V, "inputs_kv is given, but latent .*pass None"),
    Probe("latents, two axes", lambda: applied(MLA, {}, jnp.ones((B, H))), V, "inputs_q has shape .*pass .batch, seq"),
    Probe("latents of ints", lambda: applied(MLA, {}, jnp.ones((B, S, H), int)), T, "inputs_q is int32"),
    Probe("latents, positions", lambda: made(MLA, {}, positions=jnp.arange(7)), V, "positions has shape .7,."),
    Probe(
        "latents, no RoPE", lambda: made(MLA, dict(latent_rotary=False), positions=jnp.arange(S)), V, "set latent_ro"
    ),
    Probe("latents without kv_up", lambda: continued({}), V, "the parameters of kv_up, which are not there"),
    Probe("latents, no cache", lambda: applied(MLA, {}, decode=True), V, "decode=True writes the collection 'cache'"),
]
