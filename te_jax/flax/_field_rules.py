"""What the fields of a module need of each other: the rules that `Module.rules` names, as sentences for docs/fields.md.

A rule takes the module and returns what is wrong with it, or None.
"""

from flax import linen as nn

from te_jax.core.check import plain
from te_jax.flax._fields import (
    LORA_SCOPES,
    POSITIVE_INTS,
    Module,
    as_tuple,
    has_relative_embedding,
    head_width,
    is_decoder,
    norm_type,
    warn_unused,
)
from te_jax.flax._state import describe
from te_jax.ops.quantize.activation import check_params
from te_jax.ops.rope import check_rotary
from te_jax.sharding import SEQLEN_TP_AXES, current_mesh_resource
from te_jax.sharding.resource import mesh_sizes


def widths_are_positive(module) -> str | None:
    """`features` are at least 1, and at least one."""
    features = as_tuple(module.features)
    if not POSITIVE_INTS.accepts(features) or not features:
        return f"features is {features}; pass positive ints"


def last_axis_alone(module) -> str | None:
    """`axis` is the last one, -1."""
    if len(as_tuple(module.axis)) != 1:
        return f"axis is {module.axis!r}; this module contracts only the last axis: leave it -1"


def groups_divide_heads(module) -> str | None:
    """`num_gqa_groups` divides `num_attention_heads`."""
    heads, groups = module.num_attention_heads, module.num_gqa_groups
    if groups is not None and heads % groups:
        return f"num_attention_heads={heads} does not split into num_gqa_groups={groups}; pass a divisor of it"


def head_width_is_known(module) -> str | None:
    """`num_attention_heads` divides `hidden_size`, unless `kv_channels` or latent attention says how wide a head is."""
    free = module.kv_channels is not None or getattr(module, "kv_lora_rank", None) is not None
    if not free and module.hidden_size % module.num_attention_heads:
        return (
            f"hidden_size={module.hidden_size} does not split into num_attention_heads={module.num_attention_heads}; "
            "pass a divisor, or kv_channels"
        )


def _changed(module, *names: str):
    """(name, value) of the fields that are not the class's default, without those that a module of te_jax around it
    hands on: it says itself what is wrong with them."""
    around = module.parent if isinstance(module.parent, Module) else None
    for name in names:
        value = getattr(module, name)
        if value != getattr(type(module), name) and value != getattr(around, name, None):
            yield name, value


def rotary_fields_fit(module) -> str | None:
    """`rotary_pos_emb_dim`, `rotary_pos_emb_scaling` and `rotary_pos_emb_sections` need RoPE; it turns an even number
    of a head's channels; sections go without `attn_temperature`."""
    if getattr(module, "kv_lora_rank", None) is not None:
        return None  # see `latent_widths_fit`
    decoder = getattr(module, "cross_rotary_pos_emb", False) and is_decoder(module)
    on = module.enable_rotary_pos_emb or decoder
    names = "enable_rotary_pos_emb" + (" or cross_rotary_pos_emb" if is_decoder(module) else "")
    for name in ("rotary_pos_emb_dim", "rotary_pos_emb_scaling", "rotary_pos_emb_sections"):
        if not on and getattr(module, name) is not None:
            return f"{name} is {getattr(module, name)!r}, but RoPE is off; set {names}, or leave {name} out"
    if not on:
        return None
    width, by = head_width(module), "head_dim" if hasattr(module, "head_dim") else "kv_channels"
    dim, scaling, sections = (getattr(module, f"rotary_pos_emb_{name}") for name in ("dim", "scaling", "sections"))
    check_rotary(describe(module), width, dim, scaling, sections, "rotary_pos_emb_")
    if sections is not None and module.attn_temperature is not None:
        return (
            f"rotary_pos_emb_sections is {sections}, but attn_temperature={module.attn_temperature} needs one position "
            "of a token; leave one of them out"
        )
    if width % 2:
        return f"RoPE is on, but a head has {width} channels; give it an even number of them, by {by}"


def logits_have_one_scale(module) -> str | None:
    """`attn_logit_scale` goes without `scale_attn_logits=False`."""
    if module.attn_logit_scale is not None and not module.scale_attn_logits:
        return (
            f"attn_logit_scale is {module.attn_logit_scale}, but scale_attn_logits is False, which is a scale of 1; "
            "leave one of them out"
        )


_LATENT_WIDTHS = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_NOT_LATENT = (
    "num_gqa_groups kv_channels fuse_qkv_params scale_attn_logits scaled_query_init rotary_pos_emb_dim qk_norm_type "
    "rotary_pos_emb_sections enable_relative_embedding self_attn_bias_type attn_logit_softcap attn_logit_scale "
    "attention_chunk_size attn_temperature attn_output_gate v_norm_eps keys_as_values kv_sharing"
).split()


def latent_widths_fit(module) -> str | None:
    """`kv_lora_rank`, `qk_nope_head_dim`, `qk_rope_head_dim` and `v_head_dim` are given; `qk_rope_head_dim` is even;
    `latent_rotary=False` goes without `rotary_pos_emb_scaling`."""
    for name in _LATENT_WIDTHS:
        if getattr(module, name) is None:
            return f"{name} is None; pass all of {', '.join(_LATENT_WIDTHS)}"
    if not module.latent_rotary:
        scaling = module.rotary_pos_emb_scaling
        return (
            None
            if scaling is None
            else f"rotary_pos_emb_scaling is {scaling}, but latent_rotary is False; leave one of them out"
        )
    if module.qk_rope_head_dim % 2:
        return f"qk_rope_head_dim is {module.qk_rope_head_dim}, but RoPE turns pairs of channels; pass an even number"
    scaling = module.rotary_pos_emb_scaling
    check_rotary(describe(module), module.qk_rope_head_dim, None, scaling, prefix="rotary_pos_emb_")


def latent_attention_stands_alone(module) -> str | None:
    """`kv_lora_rank` makes self-attention a `MultiHeadLatentAttention`, in encoders: the other fields of that need it,
    and fields of other attention it has no use for."""
    changed = lambda name: getattr(module, name) != getattr(type(module), name)
    if module.kv_lora_rank is None:
        for name in filter(changed, (*_LATENT_WIDTHS, "q_lora_rank", "mscale", "latent_rotary", "latent_norm_epsilon")):
            return f"{name} is {getattr(module, name)!r}, but kv_lora_rank is None; pass both, or leave {name} out"
        return None
    if is_decoder(module):
        return (
            'kv_lora_rank is given, but layer_type is "decoder"; use "encoder" (with self_attn_mask_type "causal" for '
            "a language model): cross-attention has no latents"
        )
    for name in filter(changed, _NOT_LATENT):
        return f"{name} is {getattr(module, name)!r}, which attention with a kv_lora_rank has no use for; leave it out"
    if has_relative_embedding(module):
        return "relative_embedding is given, which attention with a kv_lora_rank has no use for; leave it out"
    return latent_widths_fit(module)


def qk_norm_fields_fit(module) -> str | None:
    """`qk_norm_eps`, `qk_norm_before_rope` and `qk_norm_across_heads` need `qk_norm_type`."""
    names = ("qk_norm_before_rope", "qk_norm_across_heads", "qk_norm_eps")
    changed = [name for name in names if getattr(module, name) != getattr(type(module), name)]
    if module.qk_norm_type is None and changed:
        name = changed[0]
        return f"{name} is {getattr(module, name)!r}, but qk_norm_type is None; pass 'rmsnorm', or leave {name} out"


def taken_keys_are_finished(module) -> str | None:
    """`kv_sharing="take"` goes without `keys_as_values` and `v_norm_eps`, which are of the layer that gives keys and
    values; `kv_sharing` is for encoders with self-attention, and without relative embedding."""
    if module.kv_sharing is None:
        return None
    said = f"kv_sharing is {module.kv_sharing!r}"
    for name in ("keys_as_values", "v_norm_eps") if module.kv_sharing == "take" else ():
        if getattr(module, name):
            return f"{said}, but {name} is {getattr(module, name)}, of the layer that gives them; leave one of them out"
    if is_decoder(module):
        return f'{said}, but layer_type is "decoder"; use "encoder" (with self_attn_mask_type "causal")'
    for name in ("ssm", "delta"):
        if getattr(module, name, None) is not None:
            return f"{said}, but {name} is given, which has no keys; leave one of them out"
    if getattr(module, "sublayers", "both") == "mlp":
        return f"{said}, but sublayers is 'mlp', which has no attention; leave one of them out"
    if hasattr(module, "relative_embedding") and has_relative_embedding(module):
        return f"{said}, but relative embedding is on; leave one of them out"


def cross_fields_need_a_decoder(module) -> str | None:
    """`cross_window_size`, `cross_rotary_pos_emb` and `cross_drop_path` are only for a decoder; else a warning."""
    for name in ("cross_window_size", "cross_rotary_pos_emb", "cross_drop_path"):
        if getattr(module, name) and not is_decoder(module):
            text = f'{name} is {getattr(module, name)!r}, but layer_type is "encoder", which has no cross-attention'
            warn_unused(module, f'{text}; leave it out, or use "decoder"')


def adapters_are_on(module) -> str | None:
    """`low_rank_adaptation_dim` and `low_rank_adaptation_alpha` need adapters; else a warning."""
    by_scope = hasattr(module, "low_rank_adaptation_scope")
    switch = "low_rank_adaptation_scope" if by_scope else "enable_low_rank_adaptation"
    if getattr(module, switch) in (False, "none"):
        for name, value in _changed(module, "low_rank_adaptation_dim", "low_rank_adaptation_alpha"):
            warn_unused(module, f"{name} is {value!r}, but {switch} adapts nothing; set it, or leave {name} out")


def no_mlp_is_adapted(module) -> str | None:
    """`low_rank_adaptation_scope` "mlp" adapts nothing here; it gets a warning."""
    for name, value in _changed(module, "low_rank_adaptation_scope"):
        if value == "mlp":
            warn_unused(
                module, f"{name} is 'mlp', but this module has no MLP; use 'none', or a scope of its projections"
            )


def sequences_are_split(module) -> str | None:
    """`enable_sequence_parallel` needs a `tpsp_resource` where a MeshResource has a `tp_resource`, or a logical axis
    rule; else a warning."""
    resource = current_mesh_resource()
    if resource is None or resource.tpsp_resource is not None or mesh_sizes().get(resource.tp_resource, 1) == 1:
        return
    if any(name == SEQLEN_TP_AXES and axes for name, axes in nn.get_logical_axis_rules()):
        return
    for name, value in _changed(module, "enable_sequence_parallel"):
        but = f"the MeshResource has tp_resource={resource.tp_resource!r}, by which sequences stay whole"
        warn_unused(module, f"{name} is {value}, but {but}; name that axis as tpsp_resource instead")


def norm_fields_need_a_norm(module) -> str | None:
    """`layernorm_type` and `zero_centered_gamma` need `enable_layernorm`; else a warning."""
    if not module.enable_layernorm:
        for name, value in _changed(module, "layernorm_type", "zero_centered_gamma"):
            if name == "layernorm_type" and norm_type(value) == getattr(type(module), name):
                continue  # in another spelling
            warn_unused(module, f"{name} is {value!r}, but enable_layernorm is False; set it, or leave {name} out")


def activations_take_their_params(module) -> str | None:
    """The activation parameters are parameters of the activations that are named."""
    field = "activations" if hasattr(module, "activations") else "mlp_activations"
    params = field.replace("activations", "activation_params")
    check_params(describe(module), params, getattr(module, field), getattr(module, params))


def experts_take_the_place_of_the_mlp(module) -> str | None:
    """`moe` goes without `intermediate_dropout`, low-rank adaptation of the MLP and
    `apply_residual_connection_post_layernorm`, also where an MLP stays next to the experts."""
    adapted = LORA_SCOPES[module.low_rank_adaptation_scope][2] and f"{module.low_rank_adaptation_scope!r}"
    for name, value in (
        ("intermediate_dropout", module.intermediate_dropout),
        ("low_rank_adaptation_scope", adapted),
        ("apply_residual_connection_post_layernorm", module.apply_residual_connection_post_layernorm),
    ):
        if module.moe is not None and value:
            which = "experts have not, nor the MLP next to them" if module.mlp_next_to_experts else "experts have not"
            return f"{name} is {value}, which {which}; leave it out, or moe"


def experts_have_an_mlp_next_to_them(module) -> str | None:
    """`mlp_next_to_experts` needs `moe` and `post_norms`."""
    for name, value in (("moe", module.moe), ("post_norms", module.post_norms)):
        if module.mlp_next_to_experts and not value:
            return f"mlp_next_to_experts is True, but {name} is {value}; set both, or neither"


def norms_in_front_are_there(module) -> str | None:
    """`input_layernorm` and `mlp_layernorm` stay True with `parallel_shared_layernorm`, `output_layernorm` and
    `apply_residual_connection_post_layernorm`, which say otherwise where norms are."""
    for name in ("input_layernorm", "mlp_layernorm"):
        for other in ("parallel_shared_layernorm", "output_layernorm", "apply_residual_connection_post_layernorm"):
            if not getattr(module, name) and getattr(module, other):
                return f"{name} is False, but {other} is True, which says where the norms are; leave one of them out"


def relative_embedding_is_a_bias(module) -> str | None:
    """`self_attn_bias_type` and relative embedding go together: the layer has no other bias."""
    on, kind = has_relative_embedding(module), module.self_attn_bias_type
    if module.enable_relative_embedding and module.relative_embedding is False:
        return "enable_relative_embedding is True, but relative_embedding is False; leave one of them out"
    if on and kind is not None and plain(kind) == "no_bias":
        return f"self_attn_bias_type is {kind!r}, but relative embedding is on; leave the type None"
    if not on and kind is not None and plain(kind) != "no_bias":
        return f"self_attn_bias_type is {kind!r}, but relative embedding is off; set it on, or leave the type None"


def parallel_layers_are_encoders(module) -> str | None:
    """`parallel_attention_mlp` is only for an encoder, with its norms before attention and MLP, not behind;
    `parallel_shared_layernorm` needs it."""
    if not module.parallel_attention_mlp:
        return module.parallel_shared_layernorm and (
            "parallel_shared_layernorm is True, but parallel_attention_mlp is False; set both, or neither: one after "
            "the other, attention and MLP cannot share a norm"
        )
    if is_decoder(module):
        return (
            'parallel_attention_mlp is True, but layer_type is "decoder"; use "encoder" (with self_attn_mask_type '
            '"causal" for a language model): cross-attention has no place in it'
        )
    for name in ("apply_residual_connection_post_layernorm", "output_layernorm", "post_norms"):
        if getattr(module, name):
            return (
                f"parallel_attention_mlp and {name} are both True; set one of them: a parallel layer has its norms "
                "before attention and MLP, its residual connection before the norms"
            )
