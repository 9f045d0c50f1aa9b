"""Hints at the argument that is meant: never at one that is refused, nor at one that means something else.

Each name that Flax, other modules of te_jax and the configurations of Hugging Face have for an argument is given to
each class that lacks it. The hints that come were read one by one (`RIGHT`): a new one fails here, to be read as well.
"""

import dataclasses
import inspect
import re

import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx

import te_jax as te
import te_jax.flax as te_flax
import te_jax.nnx as te_nnx
from te_jax import models
from te_jax.core.check import check_names
from te_jax.core.names import CALLED, OPPOSITE
from te_jax.flax import _refused
from te_jax.flax._calls import KnownArguments, call_signature, field_names, names_of_call, names_of_constructor
from te_jax.recipe import DelayedScaling, Float8CurrentScaling

MODULES = {
    name: cls
    for module in (te_flax, models)
    for name, cls in vars(module).items()
    if isinstance(cls, type) and issubclass(cls, nn.Module)
}
CONFIGURATIONS = """
    activation activation_function add_cross_attention alibi attention_bias attention_dropout attention_mask
    attention_probs_dropout_prob attn_logit_softcapping attn_pdrop bias bos_token_id classifier_dropout d_ff d_kv
    d_model decoder_sparse_step dense_act_fn dropout_rate embd_pdrop eos_token_id feed_forward_proj ffn_hidden_size
    final_logit_softcapping first_k_dense_replace head_dim hidden_act hidden_activation hidden_dropout
    hidden_dropout_prob hidden_size initializer_factor initializer_range input_ids intermediate_size is_decoder
    is_gated_act kv_lora_rank labels layer_norm_eps layer_norm_epsilon layer_types max_position_embeddings
    max_window_layers mlp_bias mlp_only_layers moe_intermediate_size multi_query n_embd n_group n_head n_inner
    n_layer n_positions n_routed_experts n_shared_experts new_decoder_architecture norm_topk_prob
    num_attention_heads num_decoder_layers num_experts_per_tok num_heads num_hidden_layers num_key_value_heads
    num_kv_heads num_layers num_ln_in_parallel_attn num_local_experts num_nextn_predict_layers output_router_logits
    pad_token_id parallel_attn position_ids pretraining_tp q_lora_rank qk_head_dim qk_nope_head_dim qk_rope_head_dim
    query_pre_attn_scalar relative_attention_max_distance relative_attention_num_buckets reorder_and_upcast_attn
    resid_pdrop rms_norm_eps rope_interleave rope_parameters routed_scaling_factor router_aux_loss_coef
    router_jitter_noise scale_attn_by_inverse_layer_idx scale_attn_weights scale_decoder_outputs sliding_window
    summary_activation summary_first_dropout summary_proj_to_labels summary_type summary_use_proj
    tie_word_embeddings topk_group torch_dtype type_vocab_size use_bidirectional_attention use_cache
    use_sliding_window v_head_dim vocab_size
""".split()
RESOURCES = [f"{name}_resource" for name in "data model tensor pipeline sequence expert context stage".split()]

RIGHT = {  # argument: names for which it is hinted at
    "activations": "activation activation_fn activation_function hidden_act hidden_activation mlp_activations",
    "amax_history_len": "amax_history_length",
    "attention_dropout": "attention_probs_dropout_prob attn_pdrop dropout_rate",
    "attn_bias_type": "self_attn_bias_type",
    "attn_logit_softcap": "attn_logit_softcapping",
    "attn_mask_type": "self_attn_mask_type",
    "aux_loss_coeff": "router_aux_loss_coef",
    "dp_resource": "data_resource",
    "ep_resource": "expert_resource",
    "epsilon": "layer_norm_eps layer_norm_epsilon layernorm_epsilon rms_norm_eps",
    "features": "out_features",
    "fuse_qkv_params": "fuse_qkv",
    "group_topk": "topk_group",
    "head_dim": "d_kv kv_channels",
    "hidden_dropout": "dropout_rate hidden_dropout_prob resid_pdrop",
    "hidden_size": "d_model n_embd",
    "intermediate_dim": "d_ff ffn_hidden_size hidden_features intermediate_size mlp_hidden_size moe_intermediate_size "
    "n_inner",
    "intermediate_dropout": "intermediate_dropout_rate",
    "intermediate_dropout_rate": "dropout_rate intermediate_dropout",
    "kv_channels": "d_kv head_dim",
    "layernorm_epsilon": "epsilon layer_norm_eps layer_norm_epsilon rms_norm_eps",
    "logit_softcap": "final_logit_softcapping",
    "low_rank_adaptation_dim": "lora_rank",
    "max_distance": "relative_attention_max_distance",
    "max_positions": "max_position_embeddings n_positions",
    "mlp_activations": "activation activation_fn activation_function activations hidden_act hidden_activation",
    "mlp_hidden_size": "d_ff ffn_hidden_size hidden_features intermediate_dim intermediate_size n_inner",
    "name": "names",
    "normalize_weights": "norm_topk_prob",
    "num_attention_heads": "n_head num_heads",
    "num_buckets": "relative_attention_num_buckets",
    "num_experts": "n_routed_experts num_local_experts",
    "num_gqa_groups": "num_key_value_heads num_kv_heads",
    "num_groups": "n_group",
    "num_layers": "layers n_layer num_hidden_layers",
    "num_shared_experts": "n_shared_experts",
    "params_dtype": "param_dtype torch_dtype",
    "pp_resource": "pipeline_resource",
    "qk_norm_type": "normalize_qk",
    "rotary_pos_emb_scaling": "rope_parameters",
    "scale_factor": "scaling_factor",
    "scaling_factor": "routed_scaling_factor",
    "self_attn_bias_type": "attn_bias_type",
    "self_attn_mask_type": "attn_mask_type",
    "tie_embeddings": "tie_word_embeddings",
    "tp_resource": "model model_resource tensor_resource",
    "tpsp_resource": "sequence_resource",
    "use_bias": "attention_bias bias mlp_bias",
    "vocab_size": "num_embeddings",
    "window_size": "sliding_window",
    "z_loss": "z_loss_coeff",
    "z_loss_coeff": "z_loss",
}


def names() -> set[str]:
    """Of arguments, wherever they are taken."""
    classes = [cls for library in (nn, nnx) for cls in vars(library).values() if isinstance(cls, type)]
    functions = [
        method for cls in (*classes, *MODULES.values()) for method in (cls.__init__, vars(cls).get("__call__"))
    ]
    found = {*CONFIGURATIONS, *RESOURCES}
    for function in functions:
        try:
            found.update(inspect.signature(function).parameters)
        except (TypeError, ValueError):
            continue
    return found - {"self", "args", "kwargs", "parent", "name"}


def hint(known, given: str, **names) -> str | None:
    with pytest.raises(TypeError) as raised:
        check_names("here", [given], known, **names)
    found = re.search(r"did you mean '(\w+)'", str(raised.value))
    return found and found[1]


def test_hints_are_right():
    targets = {cls: (field_names(cls), names_of_constructor(cls)) for cls in MODULES.values()}
    plain = (te.MeshResource, DelayedScaling, models.ModelConfig)
    targets |= {cls: ([field.name for field in dataclasses.fields(cls)], {}) for cls in plain}
    calls = {
        f"call of {cls.__name__}": (list(call_signature(cls).parameters), names_of_call(cls))
        for cls in MODULES.values()
    }
    right = {(name, here) for here, given in RIGHT.items() for name in given.split()}
    right |= {(name, here) for name, meant in CALLED.items() for here in meant} | set(OPPOSITE.items())
    count, wrong, given = 0, set(), names()
    for target, (known, options) in {**targets, **calls}.items():
        for name in given - set(known):
            count += 1
            found = hint(known, name, **options)
            if found and ((name, found) not in right or found in options.get("refused", ())):
                wrong.add((target, name, found))
    assert not wrong, wrong
    assert count > 5000


def test_the_table_is_of_names_here():
    fields = {field for cls in MODULES.values() for field in (*field_names(cls), *call_signature(cls).parameters)}
    fields |= {
        field.name
        for cls in (te.MeshResource, DelayedScaling, Float8CurrentScaling, models.ModelConfig)
        for field in dataclasses.fields(cls)
    }
    functions = (te.ops.attention.dot_product_attention, te.autocast)
    fields |= {name for function in functions for name in inspect.signature(function).parameters}
    assert {here for meant in CALLED.values() for here in meant} <= fields


@pytest.mark.parametrize("cls", MODULES.values(), ids=MODULES)
def test_calls_say_what_is_meant(cls):
    """Linen's and NNX's; signatures stay as they were."""
    if cls is te_flax.QuantizingModule:
        return  # a base without a call of its own
    assert issubclass(cls, KnownArguments) and "self" in inspect.signature(cls.__call__).parameters
    known = call_signature(cls).parameters
    fields = dict(
        features=2, hidden_size=8, config=models.ModelConfig(8, 1, 8), head_dim=8, num_attention_heads=2, num_experts=2
    )
    fields |= dict(num_buckets=2, max_distance=2, ssm_num_heads=2, linear_num_value_heads=2)
    if cls is te_flax.MultiHeadLatentAttention:
        fields |= dict(kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8)
    module, x = cls(**{name: value for name, value in fields.items() if name in field_names(cls)}), jnp.ones((2, 8))
    for given in (
        "train",
        "training",
        "mask",
        "attention_mask",
        "hidden_states",
        "deterministc",
        "dtype",
        "score_mod_tensor",
    ):
        if given in known:
            continue
        with pytest.raises(
            TypeError, match=rf"{cls.__name__}.*: got an unexpected keyword argument '{given}'; "
        ) as raised:
            module.apply({}, x, **{given: None})
        said = str(raised.value)
        if given == "dtype" and "dtype" in field_names(cls):
            assert f"the constructor of {cls.__name__} takes it" in said
        elif "deterministic" in known and given.startswith("train"):
            assert f"did you mean 'deterministic', which is True where {given} is False?" in said
        elif "deterministic" in known and given.startswith("determ"):
            assert "did you mean 'deterministic'?" in said
        elif "mask" in given and {"mask", "attention_mask"} & set(known):
            assert re.search("did you mean '(attention_)?mask', which is True where a key is hidden", said)
        else:
            assert "did you mean '" in said or "it takes " in said
        assert not {name for name in _refused.names(cls) if f"{name}," in said or f"'{name}'" in said}


def test_nnx_says_the_same():
    layer = te_nnx.LayerNormMLP(16, 32, rngs=nnx.Rngs(0))
    for given, meant in (
        ("train", "'deterministic', which is True where train is False"),
        ("epsilon", "the constructor of LayerNormMLP"),
    ):
        with pytest.raises(TypeError, match=f"LayerNormMLP: .*{given!r}; .*{meant}"):
            layer(jnp.ones((2, 16)), **{given: True})
    with pytest.raises(TypeError, match="MultiHeadAttention: .*'num_kv_heads'; did you mean 'num_gqa_groups'"):
        te_nnx.MultiHeadAttention(16, 8, 2, num_kv_heads=1, rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match="TransformerLayer: .*'deterministic'; the call of TransformerLayer takes it"):
        te_nnx.TransformerLayer(
            hidden_size=16, mlp_hidden_size=16, num_attention_heads=2, deterministic=True, rngs=nnx.Rngs(0)
        )


def test_a_module_of_the_user():
    """A call with **keywords is its own affair; another one is checked as well."""

    class Mine(te_flax.DenseGeneral):
        extra: int = 0

        def __call__(self, x, extra_call=None):
            return super().__call__(x)

    class Free(te_flax.DenseGeneral):
        def __call__(self, x, **options):
            return options

    with pytest.raises(TypeError, match="Mine.*'extra_cal'; did you mean 'extra_call'"):
        Mine(8).apply({}, jnp.ones((2, 8)), extra_cal=1)
    assert Free(8).apply({}, jnp.ones((2, 8)), anything=1) == {"anything": 1}
    with pytest.raises(TypeError, match="got an unexpected keyword argument 'train'; it takes inputs, kernel"):
        nn.remat(te_flax.DenseGeneral)(8).apply({}, jnp.ones((2, 8)), train=True)
