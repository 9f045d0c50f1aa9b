"""What of a model a config.json says: `check_words` refuses what it has no word for."""

import math
from typing import Any

from te_jax.flax.moe import MoEBlock, router_of
from te_jax.flax.transformer import TransformerLayer
from te_jax.models import ModelConfig
from te_jax.ops.attention.mask import mask_type

# What changes the function of a model and is in no name or shape of a parameter.
_OF_LAYERS = (
    *("layernorm_type", "layernorm_epsilon", "zero_centered_gamma", "mlp_activations", "mlp_activation_params"),
    *("self_attn_mask_type", "window_size", "cross_window_size", "scale_attn_logits", "softmax_type", "score_mod"),
    *("attn_logit_softcap", "post_norms", "apply_residual_connection_post_layernorm", "output_layernorm"),
    *("parallel_attention_mlp", "parallel_shared_layernorm", "enable_rotary_pos_emb", "qk_norm_type"),
)
_OF_ROTARY = ("windows", "group_method", "dim", "scaling")
_OF_LATENTS = ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "mscale")
_OF_QK_NORMS = ("qk_norm_eps", "qk_norm_before_rope")
_OF_MOE = (
    *("num_experts", "capacity_factor", "use_expert_bias", "activations", "activation_params"),
    *("layernorm_type", "epsilon", "zero_centered_gamma"),
)
_OF_MODELS = ("embedding_scale", "output_scale", "logit_softcap", "embedding_norm", "final_norm", "head_transform")


def check_words(family: str, config: ModelConfig, again: ModelConfig) -> None:
    """Raises ValueError, naming what differs, where `again`, which is read from what is written of `config`, is the
    config of another function."""

    def compare(where: str, ours: dict[str, Any], theirs: dict[str, Any]):
        for name, value in ours.items():
            if not _same(value, theirs.get(name)):
                raise ValueError(
                    f"te_jax.hf.save: {where} has {name}={value!r}, which config.json of a {family} has no word for; "
                    f"it would say {theirs.get(name)!r}."
                )

    compare("the model", *({name: getattr(c, name) for name in _OF_MODELS} for c in (config, again)))
    for i in range(max(config.num_layers, config.num_decoder_layers or 0)):
        compare(f"layer {i}", *(_function_of(c.fields_of_layer(i)) for c in (config, again)))


def _function_of(fields: dict[str, Any]) -> dict[str, Any]:
    """What these fields of a layer say of its function; what nothing reads is left out."""
    layer = TransformerLayer(**fields, parent=None)
    names = [*_OF_LAYERS]
    latent = layer.kv_lora_rank is not None
    names += [f"rotary_pos_emb_{name}" for name in _OF_ROTARY] if layer.enable_rotary_pos_emb or latent else []
    names += _OF_LATENTS if latent else []
    names += _OF_QK_NORMS if layer.qk_norm_type else []
    found = {name: getattr(layer, name) for name in names}
    mask = mask_type(layer.self_attn_mask_type)
    # What a text is padded with on the right is not seen from it anyway.
    found["self_attn_mask_type"] = mask._replace(padding=False) if mask.causal else mask
    if layer.moe is None:
        return found
    experts = MoEBlock(**layer.moe, parent=None)
    router = router_of(experts)
    found |= {f"moe: {name}": getattr(experts, name) for name in _OF_MOE}
    found |= {
        f"moe: {name}": getattr(router, name) for name in ("topk", "score_function", "normalizes", "scores_first")
    }
    return found | {f"moe: {name}": getattr(router, name) for name in ("scaling_factor", "num_groups", "group_topk")}


def _same(a, b) -> bool:
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b)
    return tuple(a) == tuple(b) if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)) else a == b
