"""Words of config.json that te_jax.hf refuses, by family, for tests/models/test_hf_words.py."""

import math

LLAMA3 = dict(rope_type="llama3", factor=2.0, low_freq_factor=1.0, high_freq_factor=4.0)
YARN = dict(rope_type="yarn", factor=4.0, mscale=1.0, mscale_all_dim=1.0)
ROPES = {
    "llama": (
        *(dict(rope_type="linear", factor=factor) for factor in (0, -1, 0.5, "2", None, True, math.nan, [2.0])),
        *(dict(rope_type=kind) for kind in (None, 1, [], "linear", "llama3", "yarn", "dynamic", "longrope", "su")),
        *(dict(rope_theta=theta) for theta in (0, -1, 1, None, "1e4", math.inf, [], True)),
        *(LLAMA3 | {name: value} for name in LLAMA3 if name != "rope_type" for value in (0, None, "1", -1, math.nan)),
        *(LLAMA3 | dict(original_max_position_embeddings=value) for value in (0, 1.5, "8", -2, None)),
        *(LLAMA3 | dict(high_freq_factor=0.5), dict(partial_rotary_factor=0.5), dict(full_attention=LLAMA3), [1], "x"),
    ),
    "deepseek_v3": (
        *(YARN | {name: value} for name in ("factor", "beta_fast", "beta_slow") for value in (0, "1", -1, math.nan)),
        *(YARN | {name: value} for name in ("mscale", "mscale_all_dim") for value in (0.5, None, "1", -1, [])),
        *(YARN | dict(truncate=value) for value in (False, None, 1, "yes")),
        *({name: value for name, value in YARN.items() if name != lacks} for lacks in YARN if lacks != "rope_type"),
        *(YARN | dict(attention_factor=1.0), YARN | dict(beta_slow=64.0), dict(rope_type="llama3"), LLAMA3),
    ),
}


OF_GRANITE = (
    *(dict(layer_types=["mamba"] * 31), dict(layer_types=["mlp"] * 32), dict(layer_types=["sliding_attention"] * 32)),
    *(
        dict(mamba_d_head=32),
        dict(mamba_expand=3, mamba_d_head=64),
        dict(mamba_n_heads=3),
        dict(mamba_n_groups=3),
        dict(mamba_d_conv=5),
    ),
    *(dict(position_embedding_type="alibi"), dict(position_embedding_type="rope", head_dim=7), dict(hidden_act="gelu")),
    *(dict(attention_bias=True), dict(logits_scaling=0), dict(residual_multiplier=0)),
    *(dict(time_step_limit=limit) for limit in ([1, 0.5], [0.1], [0.0, "inf"], [{}, 1.0], [-1, 1.0])),
    *(dict(num_key_value_heads=5), dict(rope_parameters=dict(rope_type="linear", factor=2.0))),
)
OF_GEMMA4 = (
    *(dict(layer_types=["sliding_attention"] * 30), dict(layer_types=["full_attention"] * 29), dict(layer_types=[])),
    *(dict(use_bidirectional_attention="all"), dict(attention_bias=True), dict(rope_scaling=dict(rope_type="linear"))),
    *(dict(num_kv_shared_layers=25), dict(num_kv_shared_layers=31), dict(enable_moe_block=True)),
    dict(enable_moe_block=True, num_experts=4, top_k_experts=5, moe_intermediate_size=8),
    *(dict(vocab_size_per_layer_input=7), dict(vocab_size=7)),
    *(dict(global_head_dim=7), dict(attention_k_eq_v=True, num_global_key_value_heads=3)),
    *(dict(per_layer_config=table) for table in ({"0": {"head_dim": 8}}, {"5": {"head_dim": 512}}, {"x": {}})),
    *(
        dict(per_layer_config={str(i): own for i in (5, 11, 17, 23, 29)})
        for own in (dict(head_dim=7), dict(head_dim="8"), dict(hidden_size=8), dict(num_key_value_heads=3), 3, [])
    ),
    *(
        dict(rope_parameters=dict(full_attention=dict(rope_type="proportional", partial_rotary_factor=part)))
        for part in (0, 2)
    ),
)
OF_NEMOTRON = (
    *(dict(layers_block_type=types) for types in ([], ["linear_attention", "sliding_attention"], ["mamba"] * 10_001)),
    *(dict(hybrid_override_pattern=letters) for letters in ("", "MA", "m-")),
    *(dict(layers_block_type=["mlp"], hybrid_override_pattern="M"), dict(num_hidden_layers=5)),
    *(dict(n_groups=3), dict(mamba_num_heads=3), dict(conv_kernel=5), dict(num_key_value_heads=5), dict(n_group=3)),
    *(dict(n_group=4, topk_group=2), dict(num_experts_per_tok=9), dict(topk_group=2), dict(n_shared_experts=2)),
    *(dict(moe_latent_size=0), dict(moe_shared_expert_intermediate_size=7000), dict(tie_word_embeddings=True)),
    *(dict(mlp_hidden_act="silu"), dict(mamba_hidden_act="gelu"), dict(mlp_bias=True), dict(attention_bias=True)),
    *(dict(residual_in_fp32=True), dict(sliding_window=8)),
    *(dict(time_step_limit=limit) for limit in ([1, 0.5], [0.0, 2.0])),
)
OTHERS = {  # what would be another function, and was once read past
    "llama": (dict(is_causal=False), dict(sliding_window=8), dict(attention_bias=True), dict(mlp_bias=True)),
    "mistral": (dict(layer_types=["full_attention"] * 32), dict(num_key_value_heads=5), dict(head_dim=7)),
    "qwen2": (dict(use_sliding_window=True), dict(layer_types=["sliding_attention"] * 32)),
    "qwen3": (dict(layer_types=["full_attention"] * 31), dict(attention_bias=True)),
    "mixtral": (dict(router_jitter_noise=0.1), dict(num_experts_per_tok=9)),
    "qwen3_moe": (dict(mlp_only_layers=[0]), dict(decoder_sparse_step=2), dict(num_experts_per_tok=129)),
    "gemma2": (dict(query_pre_attn_scalar=0), dict(use_bidirectional_attention=True), dict(attention_bias=True)),
    "deepseek_v3": (
        *(dict(num_key_value_heads=64), dict(head_dim=32), dict(qk_head_dim=32), dict(qk_rope_head_dim=3)),
        *(dict(n_group=7), dict(topk_group=9), dict(num_experts_per_tok=6), dict(first_k_dense_replace=10**6)),
        *(dict(scoring_func="softmax"), dict(moe_layer_freq=2), dict(attention_bias=True)),
    ),
    "gpt2": (
        dict(activation_function="mish"),
        dict(scale_attn_by_inverse_layer_idx=True),
        dict(scale_attn_weights=False),
        dict(n_head=7),
    ),
    "falcon": (
        *(dict(num_ln_in_parallel_attn=2), dict(num_ln_in_parallel_attn=3), dict(multi_query=False), dict(alibi=True)),
        *(dict(new_decoder_architecture=True), dict(parallel_attn=False), dict(bias=True), dict(head_dim=63)),
    ),
    "granitemoehybrid": (
        *(dict(num_local_experts=0) | words for words in OF_GRANITE),
        *(dict(num_experts_per_tok=9), dict(num_experts_per_tok=0), {}),  # 1024 is no multiple of 11008
    ),
    "nemotron_h": OF_NEMOTRON,
    "granite": (dict(attention_bias=True), dict(mlp_bias=True), dict(sliding_window=8), dict(logits_scaling=0)),
    "gpt_oss": (
        *(dict(num_experts_per_tok=129), dict(sliding_window=None), dict(layer_types=["full_attention"] * 35)),
        *(dict(rope_parameters=dict(rope_type="llama3")), dict(swiglu_limit=0), dict(hidden_act="gelu")),
    ),
    "modernbert": (
        *(dict(norm_bias=True), dict(attention_dropout=0.1), dict(num_attention_heads=7), dict(layer_types=[])),
        *(dict(hidden_activation="silu"), dict(decoder_bias=False), dict(global_attn_every_n_layers=0)),
    ),
    "llama4_text": (
        *(dict(num_experts_per_tok=2), dict(attention_bias=True), dict(no_rope_layers=[1] * 47)),
        *(dict(layer_types=["sliding_attention"] * 48), dict(router_jitter_noise=0.1)),
        dict(layer_types=["chunked_attention"] * 48, attention_chunk_size=None),
    ),
    "qwen2_moe": (
        *(dict(shared_expert_intermediate_size=5000), dict(mlp_only_layers=[1]), dict(decoder_sparse_step=2)),
        *(dict(use_sliding_window=True), dict(num_experts_per_tok=61)),
    ),
    "qwen3_next": (
        *(dict(layer_types=types) for types in ([], ["linear_attention"], ["mamba"] * 48, ["sliding_attention"] * 48)),
        *(dict(linear_num_key_heads=5), dict(linear_conv_kernel_dim=5), dict(attn_output_gate=False)),
        *(dict(shared_expert_intermediate_size=500), dict(num_experts_per_tok=513), dict(mlp_only_layers=[1])),
        *(dict(attention_bias=True), dict(partial_rotary_factor=0.001), dict(num_key_value_heads=5), dict(head_dim=7)),
        *(
            dict(full_attention_interval=0),
            dict(decoder_sparse_step=2),
            dict(hidden_act="gelu"),
            dict(sliding_window=8),
        ),
    ),
    **dict.fromkeys(
        ("qwen3_5_text", "qwen3_5_moe_text"),
        (
            *(dict(layer_types=["linear_attention"]), dict(linear_num_key_heads=5), dict(attn_output_gate=False)),
            *(dict(attention_bias=True), dict(partial_rotary_factor=0.001), dict(rope_parameters=dict(rope_type="su"))),
        ),
    ),
    "kimi_linear": (
        *(dict(layer_types=types) for types in ([], ["linear_attention"] * 26, ["mamba"] * 27)),
        *(dict(mlp_layer_types=types) for types in (["sparse"], ["moe"] * 27)),
        *(dict(linear_attn_config=dict(full_attn_layers=[28], kda_layers=lists)) for lists in ([1], [*range(1, 27)])),
        *(dict(linear_attn_config=dict(kda_layers=lists)) for lists in ([0], ["1"], 3, [True])),
        *(dict(linear_attn_config=dict(short_conv_kernel_size=5)), dict(linear_attn_config=dict(head_dim=0))),
        *(dict(mla_use_nope=False), dict(mla_use_output_gate=True), dict(moe_router_activation_func="softmax")),
        *(dict(num_key_value_heads=8), dict(num_experts_per_token=257), dict(num_expert_group=3), dict(topk_group=2)),
        *(dict(tie_word_embeddings=True), dict(attention_bias=True), dict(num_nextn_predict_layers=1)),
    ),
    "olmo2": (dict(attention_bias=True), dict(sliding_window=8), dict(layer_types=["sliding_attention"] * 32)),
    "olmo3": (
        *(dict(rope_scaling=dict(type="yarn", factor=2.0)), dict(rope_theta=0), dict(sliding_window=None)),
        *(dict(rope_scaling=YARN | words) for words in ({}, dict(mscale=None, mscale_all_dim=None, beta_slow=64.0))),
        dict(rope_scaling=YARN | dict(mscale=None, mscale_all_dim=None, truncate=False)),
    ),
    "phi3": (
        *(dict(rope_scaling=dict(rope_type="longrope")), dict(partial_rotary_factor=0.01), dict(attention_bias=True)),
        *(dict(partial_rotary_factor=1.5), dict(rope_parameters=dict(partial_rotary_factor=0.52))),
    ),
    "glm4_moe": (
        {},  # 21 channels turn
        *(dict(head_dim=128) | words for words in (dict(n_group=3), dict(topk_group=2), dict(num_experts_per_tok=129))),
        *(dict(head_dim=128) | words for words in (dict(sliding_window=8), dict(num_key_value_heads=7))),
    ),
    "gemma3_text": (
        *(dict(layer_types=["full_attention"] * 25), dict(sliding_window=None), dict(attention_bias=True)),
        *(dict(use_bidirectional_attention=True), dict(rope_parameters=dict(rope_type="default"))),
        *(dict(rope_scaling=dict(rope_type="dynamic", factor=2.0)), dict(rope_local_base_freq=0)),
        dict(attn_logit_softcapping=50.0),
    ),
    "gemma4_text": OF_GEMMA4,
    "smollm3": (
        *(dict(no_rope_layers=[1] * 35), dict(layer_types=["full_attention"] * 35), dict(mlp_bias=True)),
        *(dict(layer_types=["sliding_attention"] * 36, **words) for words in ({}, dict(sliding_window=8))),
        *(dict(layer_types=["chunked_attention"] * 36), dict(attention_bias=True), dict(no_rope_layer_interval=0)),
    ),
    "siglip_vision_model": (
        *(dict(hidden_act="gelu"), dict(num_attention_heads=7), dict(patch_size=225), dict(image_size=15)),
    ),
    "qwen2_vl_text": (
        *(dict(rope_parameters=dict(mrope_section=sizes)) for sizes in ([16, 24, 23], [32, 32], ["16", 24, 24])),
        *(dict(rope_scaling=dict(type="mrope", mrope_interleaved=True)), dict(layer_types=["sliding_attention"] * 80)),
        *(dict(use_sliding_window=True), dict(num_attention_heads=32)),
    ),
    "qwen3_vl_text": (
        *(dict(rope_parameters=dict(mrope_interleaved=False)), dict(rope_scaling=dict(type="mrope"))),
        *(dict(rope_parameters=dict(mrope_section=[-1, 1, 1])), dict(sliding_window=8), dict(attention_bias=True)),
    ),
    "vit": (
        *(dict(architectures=name) for name in (["ViTForMaskedImageModeling"], ["ViTModel"] * 2)),
        *(dict(pooler_output_size=8), dict(pooler_act="relu"), dict(qkv_bias=False), dict(hidden_act="gelu_new")),
        dict(architectures=["ViTForImageClassification"], id2label={}),
    ),
    "bert": (dict(position_embedding_type="relative_key"), dict(is_decoder=True), dict(num_attention_heads=7)),
    "t5": (
        *(dict(dense_act_fn="gelu"), dict(is_gated_act=True), dict(feed_forward_proj="gated-silu")),
        *(dict(feed_forward_proj="gated-gelu", dense_act_fn="gelu"), dict(relative_attention_max_distance=64)),
    ),
}
