"""What others call an argument: the names of Flax, of checkpoints of Hugging Face's form and of other libraries, each
with its name here.

A hint must not lead to an argument that means something else. So a name is known (`CALLED`), or it is close to a name
word by word (`closest`); a name that is neither gets no hint.
"""

import difflib
import re
from collections.abc import Iterable

_HERE = {  # name here: its names elsewhere. Of several lines with one name, the first that is known counts.
    # sizes
    "num_gqa_groups": "num_kv_heads num_key_value_heads num_kv_groups n_kv_heads n_head_kv kv_heads num_query_groups",
    "num_attention_heads": "num_heads num_head n_heads n_head nhead heads num_q_heads num_query_heads",
    "hidden_size": "d_model hidden hidden_units embed_dim n_embd emb_dim model_dim embedding_dim embedding_size",
    "kv_channels": "head_dim head_size d_head d_kv head_width size_per_head",
    "head_dim": "kv_channels head_size d_head d_kv head_width size_per_head",
    "mlp_hidden_size": "mlp_hidden mlp_size intermediate_size ffn_hidden_size d_ff mlp_dim ffn_dim n_inner "
    "ffn_size hidden_features intermediate_dim mlp_hidden_dim dim_feedforward",
    "intermediate_dim": "intermediate_size ffn_hidden_size d_ff mlp_dim ffn_dim n_inner ffn_size hidden_features "
    "mlp_hidden_size mlp_hidden_dim dim_feedforward moe_intermediate_size",
    "features": "out_features output_size output_dim units out_dim num_classes",
    "num_layers": "num_hidden_layers n_layer n_layers layers depth",
    "num_buckets": "relative_attention_num_buckets",
    "max_distance": "relative_attention_max_distance",
    "max_positions": "max_position_embeddings n_positions max_len max_seq_len",
    # norms
    "zero_centered_gamma": "zero_centered zero_centered_scale",
    "layernorm_epsilon": "eps epsilon norm_eps rms_norm_eps layer_norm_eps layer_norm_epsilon norm_epsilon",
    "epsilon": "eps norm_eps rms_norm_eps layer_norm_eps layer_norm_epsilon layernorm_epsilon norm_epsilon",
    "layernorm_type": "norm norm_type normalization normalization_type",
    "qk_norm_type": "qk_norm use_qk_norm qk_layernorm qk_layernorms normalize_qk",
    # activations, biases
    "mlp_activations": "activation activations hidden_act act_fn activation_function hidden_activation activation_fn",
    "activations": "activation mlp_activations hidden_act act_fn activation_function hidden_activation activation_fn",
    "use_bias": "bias has_bias with_bias add_bias attention_bias qkv_bias mlp_bias",
    # dropout
    "hidden_dropout": "dropout dropout_rate hidden_dropout_prob resid_pdrop resid_dropout residual_dropout",
    "attention_dropout": "dropout dropout_rate attn_dropout attn_pdrop attention_probs_dropout_prob",
    "intermediate_dropout_rate": "dropout dropout_rate intermediate_dropout",
    "intermediate_dropout": "intermediate_dropout_rate activation_dropout",
    "dropout_rate": "dropout dropout_prob dropout_p attention_dropout attn_dropout dropout_probability",
    "drop_path": "drop_path_rate stochastic_depth",
    # attention
    "self_attn_mask_type": "self_attention_mask_type self_attn_mask attn_mask_type mask_type causal is_causal",
    "attn_mask_type": "self_attn_mask self_attn_mask_type mask_type causal is_causal",
    "self_attn_bias_type": "attn_bias_type",
    "attn_bias_type": "self_attn_bias_type",
    "window_size": "window sliding_window local_window_size attention_window sliding_window_size",
    "attn_logit_softcap": "attn_logit_softcapping logits_soft_cap attn_logits_soft_cap softcap softcapping",
    "logit_softcap": "final_logit_softcapping logits_soft_cap softcap softcapping",
    "scale_factor": "scale softmax_scale scaling_factor attn_scale",
    "scale": "softmax_scale scale_factor scaling_factor attn_scale sm_scale",
    "fuse_qkv_params": "fuse_qkv fused_qkv",
    "transpose_batch_sequence": "transpose_batch",
    "scale_attn_logits": "scale_logits",
    "score_mod": "score_mode",
    "enable_rotary_pos_emb": "enable_rope use_rope rope use_rotary apply_rope rotary",
    "rotary_pos_emb_windows": "rope_theta rotary_base rotary_emb_base rope_base rope_max_timescale",
    "rotary_pos_emb_scaling": "rope_scaling rope_parameters",
    "rotary_pos_emb_dim": "rotary_dim rotary_ndims",
    "rotary_pos_emb_sections": "mrope_section",
    "enable_sequence_parallel": "sequence_parallel",
    "deterministic_gradients": "deterministic_attention",
    # experts
    "num_experts": "experts num_local_experts n_routed_experts n_experts num_routed_experts moe_num_experts",
    "num_experts_per_tok": "top_k topk num_experts_per_token experts_per_token num_selected_experts moe_topk",
    "capacity_factor": "capacity moe_capacity_factor",
    "num_shared_experts": "n_shared_experts",
    "num_groups": "n_group",
    "group_topk": "topk_group",
    "scaling_factor": "routed_scaling_factor",
    "normalize_weights": "norm_topk_prob",
    "aux_loss_coeff": "router_aux_loss_coef aux_loss_coef aux_loss_alpha load_balance_loss_weight",
    "z_loss_coeff": "router_z_loss_coef z_loss",
    "z_loss": "z_loss_coeff",
    "score_function": "scoring_func",
    # parameters
    "params_dtype": "param_dtype weight_dtype parameter_dtype torch_dtype",
    "kernel_init": "kernel_initializer weight_init w_init",
    "bias_init": "bias_initializer b_init",
    "kernel_axes": "kernel_sharding kernel_logical_axes",
    "low_rank_adaptation_dim": "lora_rank lora_r lora_dim rank",
    "low_rank_adaptation_alpha": "lora_alpha",
    "tie_embeddings": "tie_word_embeddings",
    "vocab_size": "vocab vocabulary_size num_embeddings padded_vocab_size",
    # calls
    "attention_mask": "mask attn_mask padding_mask self_attention_mask sequence_descriptor",
    "mask": "attention_mask attn_mask padding_mask",
    "encoder_decoder_mask": "cross_attention_mask encoder_attention_mask cross_attn_mask memory_mask",
    "encoded": "encoder_hidden_states encoder_output encoder_outputs memory",
    "bias": "attention_bias attn_bias",
    "inputs": "x hidden_states inputs_q input",
    "inputs_q": "x hidden_states inputs input query",
    "inputs_kv": "key value inputs_k inputs_v",
    "x": "inputs hidden_states input",
    "query": "q inputs_q",
    "key": "k inputs_k",
    "value": "v inputs_v",
    "q": "query",
    "k": "key",
    "v": "value",
    "decode": "use_cache",
    "positions": "position_ids input_positions segment_pos",
    "tokens": "input_ids token_ids",
    "token_types": "token_type_ids",
    "labels": "targets",
    # FP8
    "recipe": "fp8_recipe",
    "power_2_scale": "use_power_2_scales",
    "amax_history_len": "amax_history_length",
    # meshes
    "dp_resource": "data_resource dp data data_parallel_resource dp_axis data_axis",
    "tp_resource": "tensor_resource model_resource tp tensor model tensor_parallel_resource tp_axis model_axis",
    "tpsp_resource": "sp_resource sequence_resource sp",
    "fsdp_resource": "fsdp fsdp_axis",
    "pp_resource": "pipeline_resource stage_resource pp pipeline pipeline_parallel_resource",
    "cp_resource": "context_resource cp context context_parallel_resource",
    "ep_resource": "expert_resource ep expert expert_parallel_resource",
}
CALLED: dict[str, list[str]] = {}
for _here, _elsewhere in _HERE.items():
    for _name in _elsewhere.split():
        CALLED.setdefault(_name, []).append(_here)

UNLIKE = {"layer_types"}  # names elsewhere that look like one here, and mean something else
OPPOSITE = {name: "deterministic" for name in ("train", "training", "is_training", "is_train")}
_HIDING = {"attention_mask", "mask", "encoder_decoder_mask"}  # in Flax and in Hugging Face True where a key is seen


def meant(name: str, known: Iterable[str]) -> str:
    """ "did you mean 'x'?" for the argument among `known` that another library calls `name`, or whose name `name` is
    but for typos; "" where there is none."""
    known, lower = tuple(known), name.lower()
    if OPPOSITE.get(lower) in known:
        return f"did you mean {OPPOSITE[lower]!r}, which is True where {name} is False?"
    known_as = [here for here in CALLED.get(lower, ()) if here in known][:1]
    if _HIDING.intersection(known_as):
        return f"did you mean {known_as[0]!r}, which is True where a key is hidden?"
    return asked(known_as or ([] if lower in UNLIKE else closest(name, known)), most=1)


def asked(names: list[str], most: int = 3) -> str:
    """ "did you mean 'x' or 'y'?"; "" for none, and for more than `most`, which are no hint."""
    return f"did you mean {' or '.join(map(repr, names))}?" if 0 < len(names) <= most else ""


def closest(name: str, known: Iterable[str], unfinished: bool = False) -> list[str]:
    """The names among `known`, all as close, that `name` is but for typos: case, how it is cut into words, a few
    letters of a word.

    unfinished: Also where one of the two has more words at its end, unless another name is `name` but for typos.
    """
    found = {each: _likeness(name, each, unfinished) for each in known}
    best = max(found.values(), default=0.0)
    return [each for each, likeness in found.items() if likeness == best > 0]


def _likeness(a: str, b: str, unfinished: bool) -> float:
    """From 3 (the same words) down to 0 (another name)."""
    ours, theirs = _words(a.lower()), _words(b.lower())
    if "".join(ours) == "".join(theirs):
        return 3.0
    if len(ours) == len(theirs):
        alike = [_alike(x, y) for x, y in zip(ours, theirs)]
        return 1 + sum(alike) / len(alike) if all(alike) else 0.0
    least = min(len(ours), len(theirs))
    begun = unfinished and ours[:least] == theirs[:least] and len("".join(ours[:least])) > 2
    return least / max(len(ours), len(theirs)) if begun else 0.0


def _words(name: str) -> list[str]:
    return re.findall(r"[^\W_]+", name)


def _alike(a: str, b: str) -> float:
    """How alike two words are, at most 1; 0 where one is no typo of the other."""
    if a == b:
        return 1.0
    shorter = min(len(a), len(b))
    if shorter < 3 or a[0] != b[0]:
        return 0.0
    ratio = difflib.SequenceMatcher(None, a, b).ratio()
    return ratio if ratio >= (0.75 if shorter > 3 else 0.85) else 0.0
