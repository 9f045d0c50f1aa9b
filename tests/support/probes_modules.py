"""Probes of the modules of te_jax.flax: their fields, call arguments and parameters."""

import warnings
from unittest import mock

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import ShapeDtypeStruct
from probes import Probe

import te_jax as te
import te_jax.flax as te_flax
from te_jax.ops.attention import SequenceDescriptor
from te_jax.ops.rope import LinearScaling, NTKScaling

B, S, H, N = 2, 4, 16, 2
X = ShapeDtypeStruct((B, S, H), jnp.float32)
Q = ShapeDtypeStruct((B, S, N, H // N), jnp.float32)
KEY = jax.random.key(0)
LAYER = dict(hidden_size=H, mlp_hidden_size=8, num_attention_heads=N, hidden_dropout=0.0, attention_dropout=0.0)
LATENT = dict(kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=8)
REQUIRED = {
    te_flax.DenseGeneral: dict(features=8),
    te_flax.LayerNormDenseGeneral: dict(features=8),
    te_flax.LayerNormMLP: dict(intermediate_dim=8),
    te_flax.LayerNorm: {},
    te_flax.DotProductAttention: dict(head_dim=H // N, num_attention_heads=N),
    te_flax.MultiHeadAttention: dict(head_dim=H // N, num_attention_heads=N),
    te_flax.MultiHeadLatentAttention: LATENT | dict(num_attention_heads=N),
    te_flax.RelativePositionBiases: dict(num_buckets=8, max_distance=20, num_attention_heads=N),
    te_flax.TransformerLayer: LAYER,
    te_flax.MoEBlock: {},
}
DENSE, NORM_DENSE, MLP, NORM, CORE, MHA, MLA, BIASES, TRANSFORMER, MOE = REQUIRED
INPUTS = dict.fromkeys(REQUIRED, (X,)) | {CORE: (Q, Q, Q), BIASES: (S, S)}
ENCODED = dict(encoded=X)


def on_two_devices(call, *args):
    """With one device, as on some machines, there is nothing that an axis could split."""
    with mock.patch.object(jax, "device_count", lambda: 2):
        return call(*args)


def made(cls, fields, *args, **call):
    """What `init` of the module gives, by shapes."""
    given = args or INPUTS[cls]
    arrays = [x for x in (*given, *call.values()) if isinstance(x, ShapeDtypeStruct)]

    def init(*arrays):
        arrays = iter(arrays)
        fill = lambda value: next(arrays) if isinstance(value, ShapeDtypeStruct) else value
        positional = [fill(value) for value in given]
        named = {name: fill(value) for name, value in call.items()}
        return cls(**REQUIRED[cls] | fields).init({"params": KEY, "dropout": KEY}, *positional, **named)

    out = jax.eval_shape(init, *arrays)
    return out if jax.tree.leaves(out) else "no parameters"


def applied(cls, fields, *args, initial=None, **call):
    """`apply` with the parameters of `init` of the same fields and plain inputs, by shapes."""
    module = cls(**REQUIRED[cls] | fields)

    def run():
        plain = [jnp.ones(x.shape, x.dtype) if isinstance(x, ShapeDtypeStruct) else x for x in INPUTS[cls]]
        variables = module.init({"params": KEY, "dropout": KEY}, *plain, **initial or {})
        return module.apply(variables, *(args or plain), rngs={"dropout": KEY}, **call)

    return jax.eval_shape(run) is not None


def name_of(cls, fields):
    return f"{cls.__name__}({', '.join(f'{k}={str(v)[:40]}' for k, v in fields.items())})"


def field_probes(rows):
    for cls, fields, outcome, words in rows:
        words = words and f"{cls.__name__}.*{words}"
        yield Probe(name_of(cls, fields), lambda cls=cls, fields=fields: made(cls, fields), outcome, words)


T, V, W = TypeError, ValueError, UserWarning

NUMBERS = [
    (DENSE, dict(features=True), T, "features is True; pass a positive int"),
    (DENSE, dict(features="32"), T, "features is '32'; pass a positive int"),
    (DENSE, dict(features=3.5), V, "features .*3.5"),
    (DENSE, dict(features=()), V, r"features is \(\)"),
    (DENSE, dict(features=(8, 0)), V, r"features is \(8, 0\); pass positive"),
    (DENSE, dict(features=-4), V, "features .*-4"),
    (DENSE, dict(features=None), T, "features is None"),
    (DENSE, dict(features=np.int64(8)), None, ""),
    (DENSE, dict(features=[2, 4]), None, ""),
    (DENSE, dict(axis="last"), T, "axis is 'last'; pass an int"),
    (DENSE, dict(axis=-1.0), V, "axis is -1.0; pass an int"),
    (DENSE, dict(axis=None), T, "axis is None"),
    (NORM_DENSE, dict(axis=0), V, "axis is 0 for an input of 3 axes; the contracted axes must be the trailing ones"),
    (NORM_DENSE, dict(features="8"), T, "features is '8'"),
    (NORM_DENSE, dict(epsilon=0), V, "epsilon is 0; pass a number above 0"),
    (NORM_DENSE, dict(epsilon=-1e-6), V, "epsilon is -1e-06"),
    (NORM_DENSE, dict(epsilon="1e-6"), T, "epsilon is '1e-6'"),
    (NORM_DENSE, dict(epsilon=float("nan")), V, "epsilon is nan"),
    (NORM_DENSE, dict(epsilon=None), T, "epsilon is None"),
    (NORM_DENSE, dict(depth_scaling=0.0), V, "depth_scaling is 0.0; pass None or a number above 0"),
    (NORM_DENSE, dict(depth_scaling="2"), T, "depth_scaling is '2'"),
    (NORM, dict(epsilon=float("inf")), V, "epsilon is inf"),
    (NORM, dict(epsilon=True), T, "epsilon is True"),
    (NORM, dict(epsilon=np.float32(1e-5)), None, ""),
    (MLP, dict(intermediate_dim=0), V, "intermediate_dim is 0; pass a positive int"),
    (MLP, dict(intermediate_dim="8"), T, "intermediate_dim is '8'"),
    (MLP, dict(intermediate_dim=(8,)), T, r"intermediate_dim is \(8,\)"),
    (MLP, dict(intermediate_dropout_rate=-0.1), V, "intermediate_dropout_rate is -0.1; pass a number at least 0"),
    (MLP, dict(intermediate_dropout_rate=1.0), V, "intermediate_dropout_rate is 1.0; .*below 1"),
    (MLP, dict(intermediate_dropout_rate="0.1"), T, "intermediate_dropout_rate is '0.1'"),
    (MLP, dict(intermediate_hidden_dropout_dims=1), T, "intermediate_hidden_dropout_dims is 1; pass a tuple"),
    (MLP, dict(intermediate_hidden_dropout_dims=("s",)), V, "intermediate_hidden_dropout_dims is"),
    (MLP, dict(axis=(-2, -1)), V, r"axis is \(-2, -1\)"),
    (MLP, dict(enable_low_rank_adaptation=True, low_rank_adaptation_dim=0), V, "low_rank_adaptation_dim is 0"),
    (MLP, dict(enable_low_rank_adaptation=True, low_rank_adaptation_dim=-8), V, "low_rank_adaptation_dim is -8"),
    (MLP, dict(low_rank_adaptation_dim="8"), T, "low_rank_adaptation_dim is '8'"),
    (MLP, dict(low_rank_adaptation_alpha="16"), T, "low_rank_adaptation_alpha is '16'"),
    (MLP, dict(low_rank_adaptation_alpha=float("nan")), V, "low_rank_adaptation_alpha is nan"),
    (CORE, dict(head_dim=0), V, "head_dim is 0"),
    (CORE, dict(head_dim="8"), T, "head_dim is '8'"),
    (CORE, dict(num_attention_heads=2.0), V, "num_attention_heads is 2.0; pass a positive int"),
    (CORE, dict(num_gqa_groups=0), V, "num_gqa_groups is 0"),
    (CORE, dict(attention_dropout=-0.5), V, "attention_dropout is -0.5"),
    (CORE, dict(attention_dropout=1), V, "attention_dropout is 1; .*below 1"),
    (CORE, dict(scale_factor="auto"), T, "scale_factor is 'auto'; pass None or a finite number"),
    (CORE, dict(scale_factor=float("inf")), V, "scale_factor is inf"),
    (CORE, dict(window_size=4), V, "window_size is 4; .*left, right"),
    (CORE, dict(window_size=(1.5, 0)), V, r"window_size is \(1.5, 0\)"),
    (CORE, dict(window_size=(1, 2, 3)), V, r"window_size is \(1, 2, 3\)"),
    (CORE, dict(max_segments_per_seq=0), V, "max_segments_per_seq is 0"),
    (MHA, dict(head_dim=8.0), V, "head_dim is 8.0"),
    (MHA, dict(head_dim=True), T, "head_dim is True"),
    (MHA, dict(head_dim=np.int32(8)), None, ""),
    (MHA, dict(num_gqa_groups="1"), T, "num_gqa_groups is '1'"),
    (MHA, dict(num_gqa_groups=3), V, "num_attention_heads=2 does not split into num_gqa_groups=3; pass a divisor"),
    (MHA, dict(attention_dropout=True), T, "attention_dropout is True"),
    (MHA, dict(layernorm_epsilon=-1.0), V, "layernorm_epsilon is -1.0"),
    (MHA, dict(head_dim=7, enable_rotary_pos_emb=True), V, "a head has 7 channels; .*even.*head_dim"),
    (MHA, dict(enable_rotary_pos_emb=True, rotary_pos_emb_dim=5), V, "rotary_pos_emb_dim is 5; .*even int of 2 to 8"),
    (MHA, dict(enable_rotary_pos_emb=True, rotary_pos_emb_dim=16), V, "rotary_pos_emb_dim is 16"),
    (MHA, dict(enable_rotary_pos_emb=True, rotary_pos_emb_dim="4"), T, "rotary_pos_emb_dim is '4'"),
    (MHA, dict(rotary_pos_emb_dim=4), V, "RoPE is off; set enable_rotary_pos_emb"),
    (MHA, dict(rotary_pos_emb_scaling=LinearScaling(2)), V, "RoPE is off"),
    (MHA, dict(enable_rotary_pos_emb=True, rotary_pos_emb_scaling=2.0), T, "rotary_pos_emb_scaling is 2.0; .*LinearSc"),
    (MHA, dict(enable_rotary_pos_emb=True, rotary_pos_emb_dim=2, rotary_pos_emb_scaling=NTKScaling(2)), V, "no base"),
    (MHA, dict(rotary_pos_emb_windows=(10000, 1)), V, "rotary_pos_emb_windows is .*0 < w0 < w1"),
    (MHA, dict(rotary_pos_emb_windows=10000), T, "rotary_pos_emb_windows is 10000"),
    (MHA, dict(rotary_pos_emb_windows=(0, 10000)), V, "rotary_pos_emb_windows is"),
    (TRANSFORMER, dict(hidden_size="32"), T, "hidden_size is '32'; pass a positive int"),
    (TRANSFORMER, dict(hidden_size=15), V, "hidden_size=15 does not split .*kv_channels"),
    (TRANSFORMER, dict(mlp_hidden_size=0), V, "mlp_hidden_size is 0"),
    (TRANSFORMER, dict(mlp_hidden_size=8.0), V, "mlp_hidden_size is 8.0"),
    (TRANSFORMER, dict(num_attention_heads=0), V, "num_attention_heads is 0"),
    (TRANSFORMER, dict(num_attention_heads=-2), V, "num_attention_heads is -2"),
    (TRANSFORMER, dict(num_attention_heads="2"), T, "num_attention_heads is '2'"),
    (TRANSFORMER, dict(kv_channels=0), V, "kv_channels is 0"),
    (TRANSFORMER, dict(kv_channels=7, enable_rotary_pos_emb=True), V, "a head has 7 channels"),
    (TRANSFORMER, dict(hidden_dropout=-0.1), V, "hidden_dropout is -0.1"),
    (TRANSFORMER, dict(hidden_dropout=1.5), V, "hidden_dropout is 1.5"),
    (TRANSFORMER, dict(hidden_dropout="0.1"), T, "hidden_dropout is '0.1'"),
    (TRANSFORMER, dict(intermediate_dropout=-1), V, "intermediate_dropout is -1"),
    (TRANSFORMER, dict(drop_path=1.0), V, "drop_path is 1.0"),
    (TRANSFORMER, dict(drop_path=-0.2), V, "drop_path is -0.2"),
    (TRANSFORMER, dict(hidden_dropout_dims=(5,)), V, r"hidden_dropout_dims is \(5,\); .*from -3 to 2"),
    (TRANSFORMER, dict(hidden_dropout_dims=1), T, "hidden_dropout_dims is 1; pass a tuple"),
    (TRANSFORMER, dict(layernorm_epsilon=0.0), V, "layernorm_epsilon is 0.0"),
    (TRANSFORMER, dict(layernorm_epsilon="1e-5"), T, "layernorm_epsilon is '1e-5'"),
    (TRANSFORMER, dict(window_size="8"), V, "window_size is '8'"),
    (BIASES, dict(num_buckets=1), V, "num_buckets is 1"),
    (BIASES, dict(num_buckets="32"), T, "num_buckets is '32'"),
    (BIASES, dict(max_distance=0), V, "max_distance is 0"),
    (BIASES, dict(num_attention_heads=0), V, "num_attention_heads is 0"),
]

SWITCHES = [
    *[
        (cls, {field: value}, T, f"{field} is {value!r}; pass True or False")
        for cls, field, value in [
            (DENSE, "use_bias", "False"),
            (DENSE, "use_bias", 0),
            (DENSE, "return_bias", 1),
            (DENSE, "enable_low_rank_adaptation", "yes"),
            (NORM_DENSE, "enable_layernorm", 1),
            (NORM_DENSE, "return_layernorm_output", "no"),
            (NORM, "zero_centered_gamma", 1.0),
            (MLP, "use_bias", "true"),
            (MLP, "enable_layernorm", "off"),
            (CORE, "float32_logits", 1),
            (CORE, "return_max_logit", "yes"),
            (CORE, "context_parallel_causal_load_balanced", 1),
            (MHA, "fuse_qkv_params", 1),
            (MHA, "scale_attn_logits", "no"),
            (MHA, "enable_rotary_pos_emb", "True"),
            (MHA, "scaled_query_init", 1),
            (TRANSFORMER, "use_bias", "False"),
            (TRANSFORMER, "output_layernorm", 1),
            (TRANSFORMER, "enable_relative_embedding", "no"),
            (TRANSFORMER, "parallel_attention_mlp", "yes"),
            (TRANSFORMER, "enable_sequence_parallel", "tp"),
        ]
    ],
    (MHA, dict(input_layernorm=None), T, "input_layernorm is None"),
    (NORM, dict(transpose_batch_sequence="no"), T, "transpose_batch_sequence is 'no'"),
    (NORM, dict(transpose_batch_sequence=None), None, ""),
    (DENSE, dict(use_bias=np.bool_(True)), None, ""),
    (TRANSFORMER, dict(cross_rotary_pos_emb=True), W, "cross_rotary_pos_emb is True, but layer_type.*decoder"),
    (TRANSFORMER, dict(cross_window_size=(1, 0)), W, "cross_window_size is .*no cross-attention"),
    (TRANSFORMER, dict(parallel_shared_layernorm=True), V, "parallel_attention_mlp is False; set both"),
    (TRANSFORMER, dict(parallel_attention_mlp=True, output_layernorm=True), V, "both True; set one"),
    (TRANSFORMER, dict(parallel_attention_mlp=True, layer_type="decoder"), V, 'use "encoder"'),
]

NAMES = [
    (NORM, dict(layernorm_type="batchnorm"), V, "layernorm_type is 'batchnorm'; .*'rmsnorm'"),
    (NORM, dict(layernorm_type=None), T, "layernorm_type is None"),
    (NORM, dict(layernorm_type="RMS-Norm"), None, ""),
    (NORM_DENSE, dict(layernorm_type="layer norm"), V, "did you mean 'layernorm'"),
    (CORE, dict(attn_mask_type="casual"), V, "attn_mask_type is 'casual'; .*did you mean 'causal'"),
    (CORE, dict(attn_mask_type=None), T, "attn_mask_type is None"),
    (CORE, dict(attn_mask_type="Casual"), V, "did you mean 'causal'"),
    (CORE, dict(attn_bias_type="alibi"), V, "attn_bias_type is 'alibi'"),
    (CORE, dict(attn_bias_type="NO_BIAS"), None, ""),
    (CORE, dict(attn_bias_type=False), T, "attn_bias_type is False"),
    (CORE, dict(softmax_type="sink"), V, "softmax_type is 'sink'"),
    (CORE, dict(softmax_type="off-by-one"), None, ""),
    (CORE, dict(softmax_type="Learnable"), None, ""),
    (CORE, dict(softmax_type=1), T, "softmax_type is 1"),
    (CORE, dict(qkv_layout="sbhd"), V, "qkv_layout is 'sbhd'; .*'bshd_bshd_bshd'"),
    (CORE, dict(qkv_layout=None), T, "qkv_layout is None"),
    (CORE, dict(qkv_layout="BSHD_BSHD_BSHD"), None, ""),
    (CORE, dict(context_parallel_strategy="STAR"), V, "context_parallel_strategy is 'STAR'; .*'RING'"),
    (CORE, dict(context_parallel_axis=0), T, "context_parallel_axis is 0"),
    (CORE, dict(context_checkpoint_name=3), T, "context_checkpoint_name is 3"),
    (CORE, dict(dropout_rng_name=None, attention_dropout=0.1), T, "dropout_rng_name is None"),
    (CORE, dict(score_mod=max), V, "score_mod=.*not in this version"),
    (MHA, dict(low_rank_adaptation_scope="qkv"), V, "low_rank_adaptation_scope is 'qkv'; .*did you mean 'qkv_proj'"),
    (MHA, dict(low_rank_adaptation_scope=True), T, "low_rank_adaptation_scope is True"),
    (MHA, dict(rotary_pos_emb_group_method="pairs"), V, "rotary_pos_emb_group_method is 'pairs'; .*'alternate'"),
    (MHA, dict(num_heads=2), V, "num_heads is an older name; use num_attention_heads"),
    (MHA, dict(fuse_qkv=True), V, "fuse_qkv is an older name; use fuse_qkv_params"),
    (TRANSFORMER, dict(layer_type="both"), V, "layer_type is 'both'; .*'decoder'"),
    (TRANSFORMER, dict(layer_type=None), T, "layer_type is None"),
    (TRANSFORMER, dict(layer_type=1), T, "layer_type is 1"),
    (TRANSFORMER, dict(layer_type="Encoder"), V, "layer_type is 'Encoder'"),
    (TRANSFORMER, dict(self_attn_mask_type="bidirectional"), V, "self_attn_mask_type is 'bidirectional'"),
    (TRANSFORMER, dict(self_attn_mask_type="padding-causal"), None, ""),
    (TRANSFORMER, dict(self_attn_mask_type="padding_casual"), V, "did you mean 'padding_causal'"),
    (TRANSFORMER, dict(self_attn_bias_type="post_scale_bias"), V, "self_attn_bias_type is .*relative embedding is off"),
    (TRANSFORMER, dict(self_attn_bias_type="no_bias", enable_relative_embedding=True), V, "leave the type None"),
    (TRANSFORMER, dict(relative_embedding=True), V, "relative_embedding is True; .*enable_relative_embedding"),
    (TRANSFORMER, dict(relative_embedding=te_flax.RelativePositionBiases), T, "relative_embedding is <class"),
    (TRANSFORMER, dict(relative_embedding=False, enable_relative_embedding=True), V, "leave one of them out"),
    (TRANSFORMER, dict(mlp_activations="swiglu"), V, r"mlp_activations is 'swiglu'; .*\('silu', 'linear'\)"),
    (
        TRANSFORMER,
        dict(mlp_activations=("silu", "liner")),
        V,
        "mlp_activations .*'liner' is not known; did you mean 'lin",
    ),
    (TRANSFORMER, dict(mlp_activation_params={"limit": 3.0}), V, "mlp_activation_params has 'limit'"),
    (TRANSFORMER, dict(dropout_rng_name=0), T, "dropout_rng_name is 0"),
    (MLP, dict(activations="gelu"), V, r"activations is 'gelu'; pass a tuple"),
    (MLP, dict(activations=("swiglu",)), V, r"'swiglu' is \('silu', 'linear'\)"),
    (MLP, dict(activations=("GeGLU",)), V, r"'GeGLU' is \('gelu', 'linear'\)"),
    (MLP, dict(activations=()), V, r"activations is \(\)"),
    (MLP, dict(activations=None), T, "activations is None"),
    (MLP, dict(activations=(None,)), T, "None is neither a name nor a function"),
    (MLP, dict(activations=("geul",)), V, "did you mean 'gelu'"),
    (MLP, dict(activations=("SiLU", "Linear")), None, ""),
    (MLP, dict(activations=(jax.nn.tanh,)), None, ""),
    (MLP, dict(activation_params={"alpha": 1.0}), V, "activation_params has 'alpha'"),
    (MLP, dict(activations=("clamped_silu", "clamped_linear"), activation_params={"limits": 1.0}), V, "mean 'limit'"),
    (MLP, dict(activations=("clamped_silu", "clamped_linear"), activation_params={"limit": "7"}), V, "'limit'.*'7'"),
    (MLP, dict(activation_params=3), T, "activation_params is 3; pass None or a dict"),
    (MLP, dict(ffn1_ckpt_name=None), T, "ffn1_ckpt_name is None"),
    (DENSE, dict(quantization_checkpoint_name=1), T, "quantization_checkpoint_name is 1"),
]

PARAMETERS = [
    (DENSE, dict(dtype="bf16"), T, "dtype is 'bf16'; .*did you mean 'bfloat16'"),
    (DENSE, dict(dtype="fp32"), T, "did you mean 'float32'"),
    (DENSE, dict(dtype=jnp.int32), V, "dtype is .*int32.*pass a floating dtype"),
    (DENSE, dict(dtype=jnp.int8), V, "dtype is .*int8"),
    (DENSE, dict(dtype=jnp.float8_e4m3fn), V, "dtype is .*float8_e4m3fn"),
    (DENSE, dict(dtype=None), T, "dtype is None"),
    (DENSE, dict(dtype=16), T, "dtype is 16"),
    (DENSE, dict(dtype=complex), V, "dtype is .*complex"),
    (DENSE, dict(dtype=jnp.float64), V, "dtype is .*float64.*; pass .* \\(te_jax has no float64\\)"),
    (DENSE, dict(dtype=float), None, ""),
    (DENSE, dict(dtype="bfloat16"), None, ""),
    (DENSE, dict(dtype=np.dtype("float16")), None, ""),
    (DENSE, dict(params_dtype="half precision"), T, "params_dtype is 'half precision'"),
    (DENSE, dict(params_dtype=jnp.int8), V, "params_dtype is"),
    (DENSE, dict(params_dtype=np.ones(2, np.float32)), T, r"params_dtype is float32\[2\]; pass None or a floating"),
    (TRANSFORMER, dict(dtype="bf16"), T, "dtype is 'bf16'; .*'bfloat16'"),
    (CORE, dict(dtype="bf16"), T, "dtype is 'bf16'"),
    (CORE, dict(dtype=jnp.bfloat16), V, "dtype is bfloat16, query is float32"),
    (DENSE, dict(kernel_init="lecun"), T, "kernel_init is 'lecun'; pass None or an initializer"),
    (DENSE, dict(kernel_init=jnp.zeros((H, 8))), T, r"kernel_init is float32\[16, 8\]"),
    (DENSE, dict(kernel_init=lambda key, shape, dtype: 0.0), T, "parameter kernel: its initializer gave 0.0"),
    (DENSE, dict(kernel_init=lambda key, shape, dtype: jnp.zeros(shape[::-1])), T, "its initializer gave .*8, 16"),
    (DENSE, dict(bias_init=None), T, "bias_init is None"),
    (DENSE, dict(bias_init=0.0), T, "bias_init is 0.0"),
    (NORM, dict(scale_init=1.0), T, "scale_init is 1.0"),
    (TRANSFORMER, dict(mha_kernel_init="normal"), T, "mha_kernel_init is 'normal'"),
    (TRANSFORMER, dict(mlp_kernel_init=3), T, "mlp_kernel_init is 3"),
    (BIASES, dict(embedding_init=None), T, "embedding_init is None"),
    (DENSE, dict(kernel_axes="embed"), T, "kernel_axes is 'embed'; pass a tuple"),
    (DENSE, dict(kernel_axes=("embed", "mlp", "more")), V, "kernel_axes is .*the parameter kernel has .*each axis"),
    (DENSE, dict(kernel_axes=(0, 1)), V, r"kernel_axes is \(0, 1\)"),
    (DENSE, dict(kernel_axes=["embed", None]), None, ""),
    (DENSE, dict(input_axes="batch"), T, "input_axes is 'batch'"),
    (NORM, dict(scale_axes=None), T, "scale_axes is None"),
    (MLP, dict(kernel_axes_1=("embed", "mlp")), V, "kernel_axes_1 is .*the parameter wi_kernel has"),
    (MLP, dict(kernel_axes_2=1), T, "kernel_axes_2 is 1"),
]

UNKNOWN = [
    (DENSE, dict(feature=8), T, "'feature'; did you mean 'features'"),
    (DENSE, dict(bias=True), T, "'bias'"),
    (DENSE, dict(kernel_initializer=None), T, "did you mean 'kernel_init'"),
    (NORM, dict(eps=1e-5), T, "unexpected keyword argument 'eps'"),
    (NORM, dict(epsilom=1e-5), T, "did you mean 'epsilon'"),
    (MLP, dict(hidden_dim=8), T, "unexpected keyword argument 'hidden_dim'"),
    (MLP, dict(activation=("gelu",)), T, "did you mean 'activations'"),
    (CORE, dict(scale=1.0), T, "'scale'; did you mean 'scale_factor'"),
    (CORE, dict(dropout_rate=0.1), T, "unexpected keyword argument 'dropout_rate'"),
    (MHA, dict(num_kv_groups=1), T, "did you mean 'num_gqa_groups'"),
    (TRANSFORMER, dict(hiden_size=16), T, "did you mean 'hidden_size'"),
    (TRANSFORMER, dict(num_heads=2), T, "unexpected keyword argument 'num_heads'"),
    (TRANSFORMER, dict(self_attn_mask="causal"), T, "did you mean 'self_attn_mask_type'"),
    (BIASES, dict(num_bucket=8), T, "did you mean 'num_buckets'"),
]


def boxes(variables):
    """Of each parameter the names that its box has."""
    leaves = jax.tree.leaves_with_path(variables["params"], is_leaf=lambda x: isinstance(x, nn.meta.AxisMetadata))
    return {"/".join(part.key for part in path): getattr(leaf, "names", None) for path, leaf in leaves}


BOXED = nn.with_partitioning(nn.initializers.normal(), ("in", "out"))
LOGICAL = nn.with_logical_partitioning(nn.initializers.normal(), ("in", "out"))


class Block(nn.Module):
    """A submodule with a path, of another's fields."""

    cls: type
    fields: dict

    @nn.compact
    def __call__(self, *args):
        return self.cls(**REQUIRED[self.cls] | dict(self.fields), name="mine")(*args)


def in_block(cls, **fields):
    return lambda: jax.eval_shape(lambda *x: Block(cls, fields).init(KEY, *x), *INPUTS[cls])


def bf16(x):
    return ShapeDtypeStruct(x.shape, jnp.bfloat16)


def lengths(*values):
    return SequenceDescriptor.from_seqlens(jnp.asarray(values))


ROPE = dict(enable_rotary_pos_emb=True)
DECODER = dict(layer_type="decoder")
CALLS = [
    Probe("path of a field", in_block(DENSE, dtype="bf16"), T, "DenseGeneral `mine`: dtype is 'bf16'"),
    Probe("path of a rule", in_block(MHA, num_gqa_groups=3), V, "MultiHeadAttention `mine`: .*num_gqa_groups=3"),
    Probe("path of a core", in_block(CORE, window_size=3), V, "DotProductAttention `mine`: window_size is 3"),
    Probe("decode='yes'", lambda: made(MHA, {}, decode="yes"), T, "decode is 'yes'; pass True or False"),
    Probe("decode=1", lambda: made(TRANSFORMER, {}, decode=1), T, "TransformerLayer: decode is 1"),
    Probe("deterministic=None", lambda: made(TRANSFORMER, {}, deterministic=None), T, "deterministic is None"),
    Probe("deterministic='no'", lambda: made(MLP, {}, deterministic="no"), T, "deterministic is 'no'"),
    Probe("deterministic=1", lambda: made(CORE, {}, deterministic=1), T, "deterministic is 1"),
    Probe("norm_output=0", lambda: made(MHA, {}, norm_output=0), T, "norm_output is 0"),
    Probe("residual='yes'", lambda: made(MHA, {}, residual="yes"), T, "residual is 'yes'; pass True or False"),
    Probe("residual=array", lambda: made(MHA, {}, residual=X), T, r"residual is float32.*; pass True or False\."),
    Probe("residual=1", lambda: made(MLP, {}, residual=1), T, "residual is 1"),
    Probe("operands=1", lambda: made(DENSE, {}, operands=1), T, "operands is 1"),
    Probe("return_input=1", lambda: made(NORM_DENSE, {}, return_input=1), T, "return_input is 1"),
    Probe("bidirectional=1", lambda: made(BIASES, {}, S, S, 1), T, "bidirectional is 1"),
    Probe("q_seqlen=4.0", lambda: made(BIASES, {}, 4.0, S), V, "q_seqlen is 4.0; pass a positive int"),
    Probe("q_seqlen=True", lambda: made(BIASES, {}, True, S), T, "q_seqlen is True"),
    Probe("slots, no decode", lambda: made(MHA, {}, max_decode_length=8), W, "max_decode_length is 8, but decode"),
    Probe("slots='8'", lambda: made(MHA, {}, decode=True, max_decode_length="8"), T, "max_decode_length is '8'"),
    Probe("slots=0", lambda: made(TRANSFORMER, {}, decode=True, max_decode_length=0), V, "max_decode_length is 0"),
    Probe("slots", lambda: made(MHA, {}, decode=True, max_decode_length=8)["cache"]),
    Probe("int inputs", lambda: made(DENSE, {}, ShapeDtypeStruct((B, H), jnp.int32)), T, "inputs is int32"),
    Probe("a scalar", lambda: made(NORM, {}, ShapeDtypeStruct((), jnp.float32)), V, r"LayerNorm: x is .*\[..., H\]"),
    Probe("a scalar to an MLP", lambda: made(MLP, {}, ShapeDtypeStruct((), jnp.float32)), V, r"inputs is .*\[..., H\]"),
    Probe("dropout along axis 3",
          lambda: made(MLP, dict(intermediate_dropout_rate=0.1, intermediate_hidden_dropout_dims=(3,))), V,
          r"intermediate_hidden_dropout_dims is \(3,\); .*from -3 to 2"),
    Probe("a list as inputs", lambda: DENSE(8).init(KEY, [[1.0] * H]), T, "inputs is list; pass an array"),
    Probe("inputs of two axes", lambda: made(MHA, {}, ShapeDtypeStruct((B, H), jnp.float32)), V, "inputs_q has shape"),
    Probe("another width", lambda: made(TRANSFORMER, dict(hidden_size=8)), V, "hidden_size is 8; pass"),
    Probe("no encoded", lambda: made(TRANSFORMER, DECODER), V, "a decoder layer needs `encoded`"),
    Probe("encoded of an encoder", lambda: made(TRANSFORMER, {}, **ENCODED), V, 'encoded is given, .*use "decoder"'),
    Probe("key of another type", lambda: made(CORE, {}, Q, bf16(Q), Q), T, "key is bfloat16, but query is float32"),
    Probe("value of another length", lambda: made(CORE, {}, Q, Q, ShapeDtypeStruct((B, 5, N, 8), jnp.float32)), V,
          r"DotProductAttention: .*value \(2, 5, 2, 8\)"),
    Probe("no value", lambda: made(CORE, {}, Q, Q), T, "value is NoneType"),
    Probe("key in bs3hd", lambda: made(CORE, dict(qkv_layout="bs3hd")), V, "key must be None"),
    Probe("thd without segments", lambda: made(CORE, dict(qkv_layout="thd_thd_thd")), V, "pass a sequence_descriptor"),
    Probe("bias and no_bias", lambda: made(CORE, dict(attn_bias_type="no_bias"), bias=jnp.zeros((1, N, S, S))), V,
          "DotProductAttention: attn_bias_type is 'no_bias', but bias"),
    Probe("NO_BIAS and a bias", lambda: made(CORE, dict(attn_bias_type="NO_BIAS"), bias=jnp.zeros((1, N, S, S))), V,
          "'no_bias', but bias"),
    Probe("float mask of a layer", lambda: made(TRANSFORMER, {}, attention_mask=jnp.zeros((S, S))), T,
          "TransformerLayer: attention_mask is float32.*True where a key is masked out"),
    Probe("mask as a string", lambda: made(MHA, {}, mask="causal"), T, "MultiHeadAttention: mask is .causal.; .*Seq"),
    Probe("bias of bools", lambda: made(MHA, {}, bias=jnp.zeros((S, S), bool)), T, "MultiHeadAttention: bias is bool"),
    Probe("mask of a layer", lambda: made(TRANSFORMER, {}, attention_mask=np.zeros((B, 1, S, S), np.int32))),
    Probe("float mask", lambda: made(CORE, {}, mask=jnp.zeros((S, S))), T, "DotProductAttention: mask is float32"),
    Probe("mask of another length", lambda: made(CORE, {}, mask=jnp.zeros((S, 5), bool)), V, "mask has shape"),
    Probe("padding without a mask", lambda: applied(CORE, dict(attn_mask_type="padding")), W,
          "DotProductAttention: attn_mask_type is 'padding', but neither mask nor sequence_descriptor"),
    Probe("padding without lengths", lambda: applied(MHA, dict(attn_mask_type="padding_causal")), W,
          "DotProductAttention_0`: attn_mask_type is 'padding_causal', but neither"),
    Probe("a length beyond the row", lambda: made(CORE, {}, sequence_descriptor=lengths(4, 9)), W,
          "DotProductAttention: .*seqlens of the queries has 9, but a row has 4"),
    Probe("lengths of another batch", lambda: applied(CORE, {}, sequence_descriptor=lengths(4, 4, 4)),
          V, "seqlens of the q"),
    Probe("a context axis without a mesh", lambda: on_two_devices(applied, CORE, dict(context_parallel_axis="cp")),
          V, "context_parallel_axis is 'cp', .*jax.set_mesh"),
    Probe("float lengths", lambda: lengths(1.0, 2.0), T, "seqlens is float.*integer array"),
    Probe("lengths", lambda: made(CORE, dict(attn_mask_type="padding"), sequence_descriptor=lengths(4, 2))),
    Probe("float positions", lambda: made(MHA, ROPE, positions=jnp.arange(4.0)), T, "positions is float32.*integer"),
    Probe("positions (7,)", lambda: made(MHA, ROPE, positions=jnp.arange(7)), V,
          r"MultiHeadAttention: positions has shape \(7,\); pass .*\[2, 4\] or \[4\]"),
    Probe("positions (7,) of a layer", lambda: made(TRANSFORMER, ROPE, positions=jnp.arange(7)), V,
          r"MultiHeadAttention `attention`: positions has shape \(7,\)"),
    Probe("positions as a list", lambda: made(MHA, ROPE, positions=[0, 1, 2, 3]), T, "positions is"),
    Probe("positions without RoPE", lambda: made(MHA, {}, positions=jnp.arange(4)), V, "set enable_rotary_pos_emb"),
    Probe("positions", lambda: made(MHA, ROPE, positions=jnp.zeros((B, S), jnp.int32))["params"]),
    Probe("score_mod_tensors", lambda: made(CORE, {}, score_mod_tensors={}),
          V, "score_mod_tensors=.*not in this version"),
    Probe("relative_embedding=False",
          lambda: set(made(TRANSFORMER, dict(relative_embedding=False))["params"]) == {"attention", "mlp"}),
    Probe("box of a kernel", lambda: boxes(made(DENSE, dict(kernel_init=BOXED)))["kernel"] == ("in", "out")),
    Probe("logical box of a kernel", lambda: boxes(made(DENSE, dict(kernel_init=LOGICAL, kernel_axes=("a", "b"))))
          ["kernel"] == ("in", "out")),
    Probe("box of wi", lambda: boxes(made(MLP, dict(kernel_init=LOGICAL)))["wi_kernel"] == ("in", "act", "out")),
    Probe("box of wo", lambda: boxes(made(MLP, dict(kernel_init=LOGICAL)))["wo_kernel"] == ("in", "out")),
    Probe("box of qkv",
          lambda: boxes(made(MHA, dict(kernel_init=BOXED, scaled_query_init=True)))["qkv/kernel"]
          == ("in", "nvte_w_joined", "out")),
    Probe("box of out", lambda: boxes(made(MHA, dict(kernel_init=BOXED)))["out/kernel"] == ("in", "out")),
    Probe("box of too few names", lambda: made(DENSE, dict(
        kernel_init=nn.with_partitioning(nn.initializers.normal(), ("in",)))), V, "its logical axes are"),
    Probe("nnx.with_partitioning",
          lambda: made(MLP, dict(kernel_init=nnx.with_partitioning(nn.initializers.normal(), ("in", "out")))), T,
          "parameter wi_kernel: its initializer gave VariableMetadata.*nn.with_partitioning"),
    Probe("box next to LoRA", lambda: boxes(made(DENSE, dict(kernel_init=BOXED, enable_low_rank_adaptation=True)))
          ["lora_a_kernel"] == (None, None)),
]  # fmt: skip


def excluded(pattern):
    """A model of two dense layers, `first` and `lm_head`, under a recipe that excludes `pattern`."""

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return te_flax.DenseGeneral(16, name="lm_head")(te_flax.DenseGeneral(16, name="first")(x))

    with te.autocast(True, te.recipe.Float8CurrentScaling(exclude=(pattern,))):
        jax.eval_shape(Model().init, KEY, X)
    return True


def silent(call):
    """Whether `call` works without a word."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        return call()


OTHERS = [
    Probe("exclude of no module", lambda: excluded("lm_hed"), W, "exclude .*'lm_hed'.*did you mean 'lm_head'"),
    Probe("exclude of a module", lambda: silent(lambda: excluded("lm_head"))),
    Probe("exclude by a pattern", lambda: silent(lambda: excluded("lm_*"))),
]

PROBES = [*field_probes([*NUMBERS, *SWITCHES, *NAMES, *PARAMETERS, *UNKNOWN]), *CALLS, *OTHERS]
