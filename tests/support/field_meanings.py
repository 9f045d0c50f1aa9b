"""What each field of the modules does, in one sentence: `field_table.py` puts it into docs/fields.md.

A name means the same in every module, so it stands here once. "Module.name" is for a module in which it says more.
"""

_AXES_OF = "The logical axis names of {}, one for each dimension"
_INIT_OF = "How {} is initialized"

MEANINGS = {
    # sizes
    "features": "The width of the output, or its widths if it has several axes",
    "LMHead.features": "V, the size of the vocabulary",
    "hidden_size": "H, the width of the inputs and outputs",
    "mlp_hidden_size": "F, the width inside of the MLP, or of each expert",
    "intermediate_dim": "F, the width between the two products",
    "MoEBlock.intermediate_dim": "F, the width inside of an expert",
    "head_dim": "d, the channels of a head",
    "num_attention_heads": "h, the number of query heads",
    "num_gqa_groups": "g, the number of key and value heads: query heads share them in groups. None is "
    "`num_attention_heads`",
    "ssm_num_heads": "h, the number of heads of the scan",
    "ssm_head_dim": "p, the channels of a head of the scan",
    "ssm_state_size": "n, the numbers of state for each channel",
    "ssm_num_groups": "g: heads of a group share B and C",
    "linear_num_value_heads": "h, the number of states, and of heads of values",
    "linear_num_key_heads": "g, the number of heads of queries and keys: heads of values share them. None is "
    "`linear_num_value_heads`",
    "linear_key_head_dim": "d, the channels of a head of queries and keys",
    "linear_value_head_dim": "e, the channels of a head of values",
    "gate": 'What fades by itself: the state of a "head", as in Qwen3-Next, or each "channel" of its keys, as in Kimi '
    "Linear, where the gate of the norm is a sigmoid",
    "gate_rank": 'The channels between the two projections of each gate of `gate="channel"`. None is '
    "`linear_value_head_dim`",
    "allow_neg_eigval": "A token corrects the state by up to 2 instead of up to 1, so that the state can turn around",
    "conv_width": "w, the tokens that a convolution sees, its own among them",
    "use_conv_bias": "Adds biases after the convolutions",
    "time_step_min": "The least step with which a head begins",
    "time_step_max": "The largest step with which a head begins",
    "time_step_floor": "A step below this begins with it",
    "time_step_limit": "Bounds of the steps of tokens",
    "norm_groups": "The groups of heads that have a gated norm of their own. None is `ssm_num_groups`",
    "norm_before_gate": "The gated norm is RMSNorm(y) silu(z) instead of RMSNorm(y silu(z))",
    "Mamba2.kernel_init": _INIT_OF.format("each weight") + ". None is a normal, scaled by fan-in",
    "Mamba2.zero_centered_gamma": "The norm multiplies by 1 + `scale` instead of `scale`; the gated norm multiplies by "
    "`norm_scale` as it is",
    "TransformerLayer.zero_centered_gamma": "Norms multiply by 1 + `scale` instead of `scale`; the gated norms of "
    "Mamba2 and GatedDeltaNet multiply by `norm_scale` as it is",
    "GatedDeltaNet.kernel_init": _INIT_OF.format("each weight") + ". None is a normal, scaled by fan-in",
    "GatedDeltaNet.zero_centered_gamma": "The norm multiplies by 1 + `scale` instead of `scale`; the gated norm "
    "multiplies by `norm_scale` as it is",
    "GatedDeltaNet.input_layernorm": "Puts a norm on the inputs, which all projections read",
    "Mamba2.input_layernorm": "Puts a norm on the inputs, which all projections read",
    "kv_channels": "The channels of a head. None is `hidden_size / num_attention_heads`",
    "axis": "The contracted axes of the input: the last ones, in order",
    "LayerNormDenseGeneral.axis": "The contracted axis, which has to be the last one",
    "LayerNormMLP.axis": "The contracted axis, which has to be the last one",
    # dense layers
    "use_bias": "Adds biases after the products",
    "return_bias": "Returns the bias as one more result instead of adding it",
    "kernel_init": _INIT_OF.format("each weight") + ". None is a truncated normal, scaled by fan-in",
    "MultiHeadAttention.kernel_init": _INIT_OF.format("each weight") + ". None is a normal, scaled by fan-in",
    "MultiHeadLatentAttention.kernel_init": _INIT_OF.format("each weight") + ". None is a normal, scaled by fan-in",
    "LMHead.kernel_init": _INIT_OF.format("the weight") + ". The default is a normal of width 0.02",
    "mha_kernel_init": _INIT_OF.format("each weight of attention") + ". None is a normal, scaled by fan-in",
    "mlp_kernel_init": _INIT_OF.format("each weight of the MLP or the experts")
    + ". None is a truncated normal, scaled by fan-in",
    "kernel_axes": _AXES_OF.format("the weight"),
    "kernel_axes_1": _AXES_OF.format("the first weight") + ", `wi`",
    "kernel_axes_2": _AXES_OF.format("the second weight") + ", `wo`",
    "bias_init": _INIT_OF.format("each bias"),
    "LayerNorm.bias_init": _INIT_OF.format("`ln_bias`"),
    "bias_axes": _AXES_OF.format("the bias"),
    "LayerNorm.bias_axes": _AXES_OF.format("`ln_bias`"),
    "bias_axes_1": _AXES_OF.format("the first bias"),
    "bias_axes_2": _AXES_OF.format("the second bias"),
    "input_axes": "Logical axis names to which the input is constrained",
    "layernorm_input_axes": "Logical axis names to which the input of the norm is constrained",
    "dot_input_axes": "Logical axis names to which the input of the product is constrained",
    "dot_1_input_axes": "Logical axis names to which the input of the first product is constrained",
    "dot_2_input_axes": "Logical axis names to which the input of the second product is constrained",
    "depth_scaling": "Divides the output, bias included, by this number",
    # norms
    "enable_layernorm": "Puts a norm in front",
    "input_layernorm": "Puts a norm on the queries' input, which keys and values read in self-attention only",
    "layernorm_type": "The kind of the norm",
    "MultiHeadLatentAttention.layernorm_type": "The kind of the norm of the inputs. Latents always have RMSNorm",
    "epsilon": "The number that the norm adds to the variance (RMSNorm: to the mean square)",
    "layernorm_epsilon": "The number that norms add to the variance (RMSNorm: to the mean square)",
    "zero_centered_gamma": "Norms multiply by 1 + `scale` instead of `scale`",
    "scale_init": _INIT_OF.format("`scale` of the norm") + ". None is ones, or zeros with `zero_centered_gamma`",
    "scale_axes": _AXES_OF.format("`scale` of the norm"),
    "ln_bias_init": _INIT_OF.format("`ln_bias` of the norm"),
    "ln_bias_axes": _AXES_OF.format("`ln_bias` of the norm"),
    "return_layernorm_output": "The second result is the output of the norm",
    # activations, dropout
    "activations": 'The activations, which are multiplied: `("silu", "linear")` is SwiGLU. Each has its own '
    "slice of the "
    "first weight",
    "mlp_activations": "The activations of the MLP or the experts, which are multiplied: "
    '`("silu", "linear")` is SwiGLU',
    "activation_params": '`limit`, `alpha` and `glu_linear_offset` of the activations `("clamped_silu", '
    '"clamped_linear")`',
    "mlp_activation_params": "`limit`, `alpha` and `glu_linear_offset` of the activations "
    '`("clamped_silu", "clamped_linear")`',
    "intermediate_dropout_rate": "The rate of dropout after the activation",
    "intermediate_dropout_rng_name": "The random stream of this dropout",
    "intermediate_hidden_dropout_dims": "The axes along which this dropout draws one mask for all",
    "intermediate_dropout": "The rate of dropout after the activation of the MLP",
    "intermediate_dropout_dims": "The axes along which dropout after the activation draws one mask for all",
    "hidden_dropout": "The rate of dropout on the output of attention and of the MLP",
    "hidden_dropout_dims": "The axes along which this dropout draws one mask for all",
    "attention_dropout": "The rate of dropout on attention probabilities",
    "dropout_rng_name": "The random stream of dropout",
    "drop_path": "The rate at which a row of the batch skips attention or the MLP",
    "cross_drop_path": "The rate at which a row of the batch skips cross-attention. None is `drop_path`",
    # attention
    "attn_mask_type": "Which keys a query sees, together with a mask or descriptor",
    "self_attn_mask_type": "Which keys a query sees in self-attention, together with a mask or descriptor",
    "attn_bias_type": "Whether a bias is added before or after the scale. None is after, where a bias is given",
    "self_attn_bias_type": "Whether relative position biases are added before or after the scale. None is after, where "
    "there are any",
    "scale_factor": "Multiplies the logits. None is 1 / sqrt(`head_dim`)",
    "scale_attn_logits": "Divides the logits by the square root of a head's channels",
    "scaled_query_init": "Divides the query weight by the square root of a head's channels at initialization",
    "float32_logits": "Changes nothing: logits are float32 in any case",
    "float32_attention_logits": "Changes nothing: logits are float32 in any case",
    "window_size": "(l, r): query i sees the keys i - l .. i + r. None sees all",
    "TransformerLayer.window_size": "(l, r) of self-attention: query i sees the keys i - l .. i + r. None sees all",
    "cross_window_size": "(l, r) of cross-attention: query i sees the keys i - l .. i + r. None sees all",
    "softmax_type": '"off_by_one" adds 1 to the denominator, "learnable" adds the exponential of a parameter of '
    "each head",
    "qkv_layout": "Which arrays hold queries, keys and values",
    "max_segments_per_seq": "The number of segments in a row. Above 1 it promises that each id is one run of tokens, "
    "which cuDNN takes as lengths, without an s x t mask",
    "return_max_logit": "Also returns the largest logit of each head",
    "deterministic_gradients": "Gradients of attention have the same bits in every run",
    "attn_logit_softcap": "c: scaled logits x become c * tanh(x / c). Plain JAX computes that, with s x t "
    "logits in memory",
    "attn_logit_scale": "Multiplies the logits of attention instead of 1 / sqrt(d). None: as scale_attn_logits says",
    "residual_multiplier": "Multiplies what attention or another mixer, the MLP or experts give, before the residual "
    "is added",
    "context_checkpoint_name": "The name of the output for `jax.checkpoint` policies",
    "fuse_qkv_params": "One parameter for queries, keys and values (cross-attention and grouped queries: for keys and "
    "values). False has three",
    "enable_sequence_parallel": "Splits the sequence over the devices of tensor parallelism outside of the products",
    "context_parallel_axis": 'The mesh axis that cuts the sequence. "" is the `cp_resource` of the MeshResource '
    "in force, "
    "None is no axis",
    "context_parallel_strategy": "How keys and values come to a device: all at once, or around a ring",
    "context_parallel_causal_load_balanced": "Tokens are in the order of "
    "`te_jax.sharding.reorder_causal_load_balancing`",
    # positions
    "enable_rotary_pos_emb": "Rotary position embeddings (RoPE) on queries and keys",
    "TransformerLayer.enable_rotary_pos_emb": "Rotary position embeddings (RoPE) on queries and keys of self-attention",
    "cross_rotary_pos_emb": "Rotary position embeddings (RoPE) on queries and keys of cross-attention",
    "rotary_pos_emb_windows": "RoPE's shortest and longest wavelength, divided by 2 pi: (1, 10000) is the base 10000",
    "rotary_pos_emb_group_method": 'Which channels RoPE turns as a pair: 2i and 2i + 1 ("consecutive"), or i '
    'and i + r/2 of r channels ("alternate"), as Hugging Face has them',
    "rotary_pos_emb_dim": "How many channels of a head, the first ones, RoPE turns: an even number. None is all",
    "rotary_pos_emb_scaling": "How RoPE's frequencies change for longer contexts, or which of them turn",
    "rotary_pos_emb_sections": "Which pairs of channels RoPE turns by which of several positions of a token",
    "qk_norm_type": "A norm of queries and keys over the channels of each head",
    "qk_norm_eps": "The number that this norm adds to the mean square, the variance or the sum of squares",
    "qk_norm_before_rope": "This norm comes before RoPE, as in Qwen 3 and Gemma 3. False is after, as in Llama 4",
    "enable_relative_embedding": "Adds T5's relative position biases (32 buckets, distance 128) to the logits of "
    "self-attention",
    "relative_embedding": "A module whose biases are added to the logits of self-attention",
    "num_buckets": "The number of buckets of distances. In bidirectional calls it has to be even, half of them "
    "for each sign",
    "max_distance": "The distance from which on all keys share a bucket",
    "embedding_init": _INIT_OF.format("the table"),
    "embedding_axes": _AXES_OF.format("the table"),
    # latent attention
    "kv_lora_rank": "r, the width of the latent that keys and values come from",
    "TransformerLayer.kv_lora_rank": "r, the width of the latent that keys and values come from. Given, self-attention "
    "is a `MultiHeadLatentAttention`",
    "q_lora_rank": "The width of the latent that queries come from. None: queries without a latent",
    "qk_nope_head_dim": "The channels of a head's queries and keys that RoPE does not turn",
    "qk_rope_head_dim": "The channels of a head's queries and keys that RoPE turns; all heads share these of the keys",
    "v_head_dim": "The channels of a head's values",
    "mscale": "Multiplies the logits by its square, as models with a `YarnScaling` need",
    "latent_rotary": "RoPE turns the `qk_rope_head_dim` channels; False: nothing is turned, as in Kimi Linear",
    "latent_norm_epsilon": "Added to the mean square of latents. None: `layernorm_epsilon`",
    # whole layers
    "layer_type": "An encoder has self-attention and an MLP; a decoder has cross-attention between them",
    "apply_residual_connection_post_layernorm": "Residual connections start after the norms",
    "output_layernorm": "Puts a norm at the end instead of before self-attention",
    "parallel_attention_mlp": "Attention and MLP read the same input and share one residual connection, as in Falcon",
    "parallel_shared_layernorm": "The MLP reads the norm of attention, as in GPT-J and Falcon 7B",
    "attention_chunk_size": "c: a query sees only keys of its own chunk of c positions, as in Llama 4",
    "attn_temperature": "(n, a): queries at position p are multiplied by 1 + a log(1 + floor((p + 1) / n))",
    "attn_output_gate": "Attention's result is multiplied by the sigmoid of a projection, as in Qwen3-Next",
    "weights_before_experts": "An expert gets the token times its weight, instead of the result",
    "shared_expert_gate": "What shared experts give is multiplied by a sigmoid of the token",
    "router_bias": "Logits of the router have a bias",
    "v_norm_eps": "Values are over the root of their mean square plus this, in each head, as in Gemma 4. None: no norm",
    "keys_as_values": "One projection gives keys and values, before norms and RoPE, as in layers of Gemma 4",
    "router_norm": "The router reads the inputs in front of the norm, over the root of their mean square, times "
    "`router_scale` / sqrt(H), as in Gemma 4",
    "expert_scales": "A parameter for each expert multiplies what it gives, as in Gemma 4",
    "mlp_next_to_experts": "The MLP stays next to `moe`; the sum of what they give, each behind a norm, goes on, as in "
    "Gemma 4",
    "kv_sharing": '"give": keys and values, behind norms and RoPE, are a further result; "take": they are the argument '
    "`keys_values`, of a module that gives them, and only queries have a projection",
    "layer_input_size": "The width of the argument `layer_input`, what the layer has of each token for itself, as in "
    "Gemma 3n and 4: it is gated by the stream, projected, normed and added behind the MLP",
    "layer_scalar": "The last that the layer does is to multiply by a parameter of one element, as in Gemma 4",
    "qk_norm_across_heads": "This norm is over the channels of all heads together, as in OLMo 2",
    "TransformerLayer.input_layernorm": "Puts a norm on the inputs of attention or Mamba2",
    "mlp_layernorm": "Puts a norm on the inputs of the MLP or of experts",
    "post_norms": "A norm also after attention and after the MLP, as in Gemma 2",
    "ssm": "Puts a `Mamba2` of these fields, such as `dict(ssm_num_heads=8)`, instead of self-attention",
    "delta": "Puts a `GatedDeltaNet` of these fields, such as `dict(linear_num_value_heads=8)`, instead of "
    "self-attention",
    "sublayers": 'What the layer has: "mixer" is only attention or another mixer, "mlp" only the MLP or the experts',
    "moe": "Puts a mixture of experts of these fields, such as `dict(num_experts=8)`, instead of the MLP",
    # experts
    "num_experts": "E, the number of experts",
    "num_experts_per_tok": "k, the experts of a token",
    "score_function": "How the router makes scores of its logits",
    "use_pre_softmax": "Takes the softmax over all experts, before the choice. False takes it over the k that "
    "are chosen",
    "normalize_weights": "Divides the weights of a token by their sum. None does with sigmoid scores and k > 1",
    "scaling_factor": "Multiplies the weights of a token at the end",
    "num_groups": "The number of groups of neighbouring experts, such as those of one node",
    "group_topk": "How many groups the experts of a token may be in. None is all",
    "latent_size": "L, the channels that experts compute with, projected from a token's. None: all of a token's",
    "num_shared_experts": "n: all tokens also go to an MLP of width n F",
    "capacity_factor": "An expert takes at most ceil(capacity_factor T k / E) of T tokens, and the others are "
    "dropped. None drops no token",
    "exchange": "How tokens reach the devices of their experts, a `te_jax.layers.ExpertExchange`",
    "aux_loss_coeff": "The factor of the balancing loss, which goes into the collection `losses`",
    "z_loss_coeff": "The factor of the router's z loss, which goes into the collection `losses`",
    "per_sequence_loss": "The balancing loss is a mean over sequences. False is one of all tokens",
    "use_expert_bias": "Chooses experts with a bias that evens out their loads, in the collection `expert_bias`",
    "gate_axes": _AXES_OF.format("the router's weight"),
    # the head
    "label_smoothing": "The share of the target that is spread over the vocabulary",
    "z_loss": "The factor of the squared logarithm of the softmax's denominator, which keeps logits from drifting",
    "logit_softcap": "c: logits z become c * tanh(z / c)",
    "ignore_index": "The label of tokens that have no loss. None: all have one",
    # low-rank adaptation
    "enable_low_rank_adaptation": "Adds a low-rank product to the weight's (LoRA)",
    "low_rank_adaptation_scope": "Which products get a low-rank product next to them (LoRA)",
    "low_rank_adaptation_dim": "r, the rank of LoRA",
    "low_rank_adaptation_alpha": "LoRA's product is multiplied by alpha / r. None is a factor of 1",
    # FP8
    "recipe": "The recipe of this product, with or without an autocast. None follows the `te_jax.autocast` in force",
    "collection": "Where FP8 state lives. None is where the autocast in force says, else `_overwrite_with_gradient`",
    "quantization_checkpoint_name": "The name of the quantized tensors that are kept for the backward pass, for "
    "`jax.checkpoint` policies",
    "ffn1_ckpt_name": "The name of the first product's output for `jax.checkpoint` policies",
    "ffn2_ckpt_name": "The name of the second product's output for `jax.checkpoint` policies",
    # arrays
    "dtype": "The dtype of the parameters, and with `params_dtype` the dtype of computation",
    "DotProductAttention.dtype": "Has no use: None, or the dtype of the query",
    "RelativePositionBiases.dtype": "The dtype of the biases, and of the table without `params_dtype`",
    "params_dtype": "The dtype of the parameters. Inputs are then cast to `dtype`. None: parameters have "
    "`dtype`, and the inputs' dtype is kept",
    "RelativePositionBiases.params_dtype": "The dtype of the table. None is `dtype`",
    "transpose_batch_sequence": "Arrays are [sequence, batch, ...] instead of [batch, sequence, ...]",
    # refused: the kind says all
    "score_mod": "",
    "score_mod_bprop": "",
    "MultiHeadAttention.num_heads": "",
    "MultiHeadAttention.dropout_rate": "",
    "MultiHeadAttention.output_layernorm": "",
    "MultiHeadAttention.apply_residual_connection_post_layernorm": "",
    "MultiHeadAttention.fuse_qkv": "",
}
