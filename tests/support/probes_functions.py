"""Probes of the functions of te_jax.layers and te_jax.ops, of recipes, meshes and their names."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, PartitionSpec
from probes import Probe

import te_jax as te
from te_jax import recipe as recipes
from te_jax.layers import (
    Projection,
    attention_fp8,
    dense,
    layernorm,
    layernorm_dense,
    layernorm_mlp,
    quantize_kernel,
)
from te_jax.ops.activation import activation, activation_fwd, attributes
from te_jax.ops.attention import (
    SequenceDescriptor,
    dot_product_attention,
    dot_product_attention_kv_packed,
    dot_product_attention_packed,
)
from te_jax.ops.attention_bias import alibi_bias, alibi_slopes
from te_jax.ops.attention_context import context_parallel_attention
from te_jax.ops.gemm import gemm, gemm_sum
from te_jax.ops.norm import norm, norm_fwd
from te_jax.ops.quantize import quantize, quantize_block
from te_jax.ops.rope import LinearScaling, Llama3Scaling, NTKScaling, rope
from te_jax.sharding import (
    MeshResource,
    causal_load_balanced_positions,
    extend_logical_axis_rules,
    global_shard_guard,
    inverse_reorder_causal_load_balancing,
    reorder_causal_load_balancing,
    with_sharding_constraint_by_logical_axes,
)
from te_jax.state.fp8 import AttentionMetas, DenseMetas, TensorMeta

T, V, W = TypeError, ValueError, UserWarning
O = lambda *args: jnp.asarray(np.ones(*args))  # noqa: E741 (numpy's: no program for each shape)
CURRENT, DELAYED, BLOCK = recipes.Float8CurrentScaling(), recipes.DelayedScaling(), recipes.Float8BlockScaling()
META = TensorMeta(O(()), O(()))
METAS = DenseMetas(META, META, META)
Q = O((2, 4, 2, 8))


def shaped(f, *args, **kwargs):
    """Whether `f` can be traced with these arguments, which are constants."""
    return lambda: jax.tree.leaves(jax.eval_shape(lambda: f(*args, **kwargs)))


def probes(f, *args, rows):
    """rows: (name, what to pass instead or in addition: by place or by name, outcome, words)."""
    for name, instead, outcome, words in rows:
        by_place = [instead.get(at, arg) for at, arg in enumerate(args)]
        by_name = {key: value for key, value in instead.items() if isinstance(key, str)}
        yield Probe(f"{f.__name__}: {name}", shaped(f, *by_place, **by_name), outcome, words)


DENSE = probes(
    dense, O((4, 8)), O((8, 3)),
    rows=[
        ("x is a list", {0: [[1.0] * 8]}, T, "te_jax.layers.dense: x is .*pass an array of float32"),
        ("x is None", {0: None}, T, "x is None"),
        ("x int", {0: O((4, 8), int)}, T, "x is int32.*float32, bfloat16 or float16"),
        ("x complex", {0: O((4, 8), complex)}, T, "x is complex64"),
        ("x FP8", {0: O((4, 8), jnp.float8_e4m3fn)}, T, "x is float8_e4m3fn"),
        ("kernel None", {1: None}, T, "kernel is None"),
        ("kernel int8", {1: O((8, 3), jnp.int8)}, T, "kernel is int8"),
        ("kernel of another width", {1: O((9, 3))}, V, r"last axes of x are \(8,\).*\(9,\)"),
        ("bias int", {"bias": O(3, int)}, T, "bias is int32"),
        ("bias of another width", {"bias": O(4)}, V, r"bias is \(4,\)"),
        ("contract '1'", {"contract": "1"}, T, "contract is '1'; pass an int"),
        ("contract True", {"contract": True}, T, "contract is True"),
        ("contract 0", {"contract": 0}, V, "contract is 0"),
        ("contract 3", {"contract": 3}, V, "contract is 3; .*use fewer"),
        ("contract 1.0", {"contract": 1.0}, V, "contract is 1.0; pass an int"),
        ("recipe is a class", {"recipe": recipes.DelayedScaling}, T, r"pass an instance: DelayedScaling\(\)"),
        ("recipe is a name", {"recipe": "delayed"}, T, "recipe is 'delayed'; pass te_jax.recipe"),
        ("recipe True", {"recipe": True}, T, "recipe is True"),
        ("no metas", {"recipe": DELAYED}, V, "metas is None under DelayedScaling; pass fp8.DenseMetas"),
        ("metas without state", {"recipe": CURRENT, "metas": METAS}, V, "no state: pass None"),
        ("metas without a recipe", {"metas": METAS}, W, "metas are given, but recipe is None.*pass both"),
        ("metas a dict", {"recipe": DELAYED, "metas": {}}, T, "metas is .*DenseMetas"),
        ("residual of another shape", {"residual": O((4, 4))}, V, r"residual is float32\(4, 4\)"),
        ("residual of another type", {"residual": O((4, 3), jnp.bfloat16)}, V, "residual is bfloat16"),
        ("residual True", {"residual": True}, T, "residual is True; pass"),
        ("checkpoint 3", {"checkpoint": 3, "recipe": CURRENT}, T, "checkpoint is 3; pass None or a string"),
        ("out a shape", {"out": (4, 3)}, T, r"out is \(4, 3\); pass None or an array"),
        ("out of another shape", {"out": O((4, 8))}, V, r"out has the shape \(4, 8\), but the output \(4, 3\)"),
        ("grad_spec a tuple", {"grad_spec": ("data",)}, T, "grad_spec is .*pass None or a PartitionSpec"),
        ("grad_spec of three axes", {"grad_spec": PartitionSpec(None, None, "a")}, V, "is for 2 axes; pass at most 2"),
        ("tokens a name", {"tokens": "data"}, T, "tokens is 'data'; pass None or a PartitionSpec"),
        ("a single row under blocks", {0: O(8), "recipe": BLOCK}, V, r"pass x\[None\]"),
        ("empty batch", {0: O((0, 8))}, None, ""),
        ("bf16 kernel of f32 x", {1: O((8, 3), jnp.bfloat16)}, None, ""),
        ("current", {"recipe": CURRENT}, None, ""),
    ],
)  # fmt: skip
NORM_ROWS = [
    ("epsilon 0", {"epsilon": 0.0}, V, "epsilon is 0.0; pass a number above 0"),
    ("epsilon negative", {"epsilon": -1e-6}, V, "epsilon is -1e-06"),
    ("epsilon '1e-6'", {"epsilon": "1e-6"}, T, "epsilon is '1e-6'"),
    ("epsilon None", {"epsilon": None}, T, "epsilon is None"),
    ("norm 'batchnorm'", {"norm": "batchnorm"}, V, "norm is 'batchnorm'; .*'rmsnorm'"),
    ("norm None", {"norm": None}, T, "norm is None"),
    ("norm typo", {"norm": "layer_norm"}, V, "did you mean 'layernorm'"),
    ("zero_centered_gamma 1", {"zero_centered_gamma": 1}, T, "zero_centered_gamma is 1; pass True or False"),
]
LAYERNORM = probes(
    layernorm, O((4, 8)), O(8),
    rows=[
        *NORM_ROWS,
        ("x list", {0: [1.0]}, T, "te_jax.layers.layernorm: x is"),
        ("x int", {0: O((4, 8), int)}, T, "x is int32"),
        ("gamma None", {1: None}, T, "gamma is None"),
        ("gamma of another width", {1: O(7)}, V, "axis `h` is 7 in gamma"),
        ("beta of RMSNorm", {"beta": O(8), "norm": "rmsnorm"}, V, "RMSNorm has no beta; pass beta=None"),
    ],
)  # fmt: skip
NORM_DENSE = probes(
    layernorm_dense, O((4, 8)), O((8, 3)), O(8),
    rows=[
        *NORM_ROWS,
        ("return_layernorm_output 1", {"return_layernorm_output": 1}, T, "return_layernorm_output is 1"),
        ("return_input 'yes'", {"return_input": "yes"}, T, "return_input is 'yes'"),
        ("also of another width", {"also": (Projection(O((7, 3)), None, None),)}, V, "te_jax.layers.layernorm_dense"),
        ("also a bare kernel", {"also": (O((8, 3)),)}, V, r"also is \(float32\[8, 3\],\); .*a Projection"),
        ("two", {"also": (Projection(O((8, 3)), None, None),)}, None, ""),
        ("tokens a name", {"tokens": "data"}, T, "tokens is 'data'"),
    ],
)  # fmt: skip
MLP = probes(
    layernorm_mlp, O((4, 8)), O(8), None, O((8, 1, 6)), O((6, 8)),
    rows=[
        *NORM_ROWS,
        ("activations 'gelu'", {"activations": "gelu"}, V, "te_jax.layers.layernorm_mlp: activations is 'gelu'"),
        ("activations swiglu", {"activations": ("swiglu",)}, V, r"\('silu', 'linear'\)"),
        ("activation_params", {"activation_params": {"limit": 1.0}}, V, "activation_params has 'limit'"),
        ("wi of two axes", {3: O((8, 6))}, V, r"layernorm_mlp: wi has shape \(8, 6\); pass \[h, A, F\]"),
        ("two activations, one slot", {"activations": ("silu", "linear")}, V, "2 activations"),
        ("recipe str", {"recipe": "fp8"}, T, "layernorm_mlp: recipe is 'fp8'"),
        ("residual of another width", {"residual": True, 4: O((6, 9))}, V, "residual is"),
        ("residual 'yes'", {"residual": "yes"}, T, "residual is 'yes'"),
        ("wi None", {3: None}, T, "layernorm_mlp: wi is None"),
        ("activation_params a number", {"activation_params": 7.0}, T, "activation_params is 7.0; pass None or a dict"),
        ("middle_name 3", {"middle_name": 3}, T, "middle_name is 3; pass None or a string"),
        ("middle_spec a name", {"middle_spec": "data"}, T, "middle_spec is 'data'"),
        ("tokens a list", {"tokens": ["data"]}, T, "tokens is "),
        ("out of another width", {4: O((6, 5))}, None, ""),
    ],
)  # fmt: skip
KERNEL = [
    Probe("quantize_kernel: no recipe", shaped(quantize_kernel, O((8, 4)), recipe=None), T, "recipe is None; pass"),
    Probe("quantize_kernel: int", shaped(quantize_kernel, O((8, 4), int), recipe=CURRENT), T, "kernel is int32"),
    Probe("quantize_kernel: list", shaped(quantize_kernel, [[1.0]], recipe=CURRENT), T, "kernel is"),
    Probe("quantize_kernel: contract 2", shaped(quantize_kernel, O((8, 4)), recipe=CURRENT, contract=3),
          V, "use fewer"),
    Probe("quantize_kernel: contract '1'", shaped(quantize_kernel, O((8, 4)), recipe=CURRENT, contract="1"), T,
          "contract is '1'"),
    Probe("quantize_kernel: gradients 1", shaped(quantize_kernel, O((8, 4)), recipe=CURRENT, gradients=1), T,
          "gradients is 1; pass True or False"),
    Probe("quantize_kernel: no meta", shaped(quantize_kernel, O((8, 4)), recipe=DELAYED),
          V, "meta is None under Delay"),
    Probe("quantize_kernel", shaped(quantize_kernel, O((8, 4)), recipe=CURRENT)),
]  # fmt: skip

ROPE = probes(
    rope, O((2, 4, 3, 6)),
    rows=[
        ("x list", {0: [1.0]}, T, "rope: x is"),
        ("x int", {0: O((2, 4, 3, 6), int)}, T, "x is int32"),
        ("odd d", {0: O((2, 4, 3, 5))}, V, "an even d"),
        ("three axes", {0: O((2, 4, 6))}, V, r"pass \[b, s, h, d\]"),
        ("bf16 positions", {"positions": jnp.arange(4).astype(jnp.bfloat16)}, T, "positions is bfloat16.*integers"),
        ("bool positions", {"positions": O(4, bool)}, T, "positions is bool"),
        ("positions of another length", {"positions": jnp.arange(7)}, V, r"positions has shape \(7,\)"),
        ("positions list", {"positions": [0, 1, 2, 3]}, T, "positions is"),
        ("group_method", {"group_method": "pairs"}, V, "group_method is 'pairs'"),
        ("group_method None", {"group_method": None}, T, "group_method is None"),
        ("windows in turn", {"windows": (10000, 1)}, V, "0 < w0 < w1"),
        ("windows a number", {"windows": 10000}, T, "windows is 10000; pass .w0, w1."),
        ("windows strings", {"windows": ("1", "2")}, V, "windows is"),
        ("rotary_dim 3", {"rotary_dim": 3}, V, "an even int of 2 to 6"),
        ("rotary_dim '4'", {"rotary_dim": "4"}, V, "rotary_dim is '4'"),
        ("rotary_dim True", {"rotary_dim": True}, V, "rotary_dim is True"),
        ("turned 2.0", {0: O((2, 4, 3, 1, 6)), "turned": 2.0}, V, "turned is 2.0"),
        ("turned 9", {0: O((2, 4, 3, 1, 6)), "turned": 9}, V, "turned is 9; pass an int from 1 to 3"),
        ("scaling 8.0", {"scaling": 8.0}, T, "scaling is 8.0; pass None, LinearScaling"),
        ("integer positions", {"positions": jnp.arange(4)}, None, ""),
    ],
)  # fmt: skip
SCALINGS = [
    Probe("LinearScaling(0.5)", lambda: LinearScaling(0.5), V, "factor is 0.5; .*at least 1"),
    Probe("LinearScaling('2')", lambda: LinearScaling("2"), V, "factor is '2'"),
    Probe("LinearScaling(True)", lambda: LinearScaling(True), V, "factor is True"),
    Probe("LinearScaling(faktor=2)", lambda: LinearScaling(faktor=2), T, "did you mean 'factor'"),
    Probe("NTKScaling(nan)", lambda: NTKScaling(float("nan")), V, "factor is nan"),
    Probe("Llama3Scaling(low > high)", lambda: Llama3Scaling(8.0, 4.0, 1.0), V, "the second must be at least as large"),
    Probe("Llama3Scaling()", lambda: Llama3Scaling()),
]

ATTENTION = probes(
    dot_product_attention, Q, Q, Q,
    rows=[
        ("q int", {0: Q.astype(int)}, T, "q is int32"),
        ("k bf16", {1: Q.astype(jnp.bfloat16)}, T, "k is bfloat16, but q is float32"),
        ("k None", {1: None}, T, "k is None"),
        ("heads", {1: O((2, 4, 3, 8)), 2: O((2, 4, 3, 8))}, V, "h must be a multiple of g"),
        ("mask type", {"attn_mask_type": "casual"}, V, "did you mean 'causal'"),
        ("mask type None", {"attn_mask_type": None}, T, "attn_mask_type is None"),
        ("bias type", {"attn_bias_type": "alibi"}, V, "attn_bias_type is 'alibi'"),
        ("bias type's case", {"attn_bias_type": "No_Bias"}, None, ""),
        ("softmax type", {"softmax_type": "sink"}, V, "softmax_type is 'sink'"),
        ("softmax type True", {"softmax_type": True}, T, "softmax_type is True"),
        ("an offset of a list", {"softmax_type": "learnable", "softmax_offset": [0.0]}, T, "softmax_offset is .0.0"),
        ("a soft cap beyond 64 bits", {"logit_softcap": 10**30}, None, ""),
        ("learnable without an offset", {"softmax_type": "learnable"}, V, "softmax_offset is None"),
        ("scale 'auto'", {"scale": "auto"}, T, "scale is 'auto'; pass None or a finite"),
        ("scale nan", {"scale": float("nan")}, T, "scale is nan"),
        ("scale True", {"scale": True}, T, "scale is True"),
        ("dropout negative", {"dropout_rate": -0.1}, V, "dropout_rate is -0.1"),
        ("dropout 1", {"dropout_rate": 1.0}, V, "dropout_rate is 1.0; .*below 1"),
        ("dropout True", {"dropout_rate": True}, T, "dropout_rate is True"),
        ("dropout without a key", {"dropout_rate": 0.1}, V, "dropout_rng is None; pass a jax.random key"),
        ("a key is a number", {"dropout_rate": 0.1, "dropout_rng": 3}, T, "dropout_rng is 3; .*a jax.random key"),
        ("window 4", {"window_size": 4}, V, "window_size is 4; .*left, right"),
        ("window of floats", {"window_size": (1.0, 0)}, V, "window_size is"),
        ("window of bools", {"window_size": (True, False)}, V, "window_size is"),
        ("deterministic 1", {"deterministic": 1}, T, "deterministic is 1; pass True or False"),
        ("return_lse 'yes'", {"return_lse": "yes"}, T, "return_lse is 'yes'"),
        ("seq_major None", {"seq_major": None}, T, "seq_major is None"),
        ("implementation", {"implementation": "flash"}, V, "implementation is 'flash'"),
        ("implementation True", {"implementation": True}, T, "implementation is True"),
        ("forced cudnn of f32", {"implementation": "cudnn"}, V, "pass None or 'xla'"),
        ("checkpoint name", {"context_checkpoint_name": 1}, T, "context_checkpoint_name is 1"),
        ("mask of floats", {"mask": O((4, 4))}, T, "mask is float32; pass a bool or integer"),
        ("mask list", {"mask": [[True]]}, T, "mask is list"),
        ("bias of bools", {"bias": O((4, 4), bool)}, T, "bias is bool; pass a floating"),
        ("bias of three axes", {"bias": O((2, 4, 4))}, V, r"pass \[s, t\] or"),
        ("descriptor an array", {"sequence_descriptor": O(2, int)}, T, "pass a SequenceDescriptor, or use `mask`"),
        ("padding only", {"attn_mask_type": "padding"}, W, "neither mask nor sequence_descriptor says"),
        ("lengths beyond", {"sequence_descriptor": SequenceDescriptor.from_seqlens(jnp.array([4, 7]))}, W,
         "seqlens of the queries has 7, but a row has 4"),
        ("lengths", {"sequence_descriptor": SequenceDescriptor.from_seqlens(np.array([4, 0]))}, None, ""),
        ("slopes of ints", {"alibi_slopes": O(2, int)}, T, "alibi_slopes is int32"),
    ],
)  # fmt: skip
JOINED = [
    Probe("packed: two slots", shaped(dot_product_attention_packed, O((2, 4, 2, 2, 8))),
          V, r"qkv has shape .*3, heads"),
    Probe("packed: interleaved 1", shaped(dot_product_attention_packed, O((2, 4, 3, 2, 8)), interleaved=1), T,
          "interleaved is 1; pass True or False"),
    Probe("packed: padding only", shaped(dot_product_attention_packed, O((2, 4, 3, 2, 8)), attn_mask_type="padding"),
          W, "dot_product_attention_packed: .*neither"),
    Probe("packed: typo", shaped(dot_product_attention_packed, O((2, 4, 3, 2, 8)), attn_mask="causal"), T, "attn_mask"),
    Probe("packed", shaped(dot_product_attention_packed, O((2, 4, 3, 2, 8)))),
    Probe("kv packed: three slots", shaped(dot_product_attention_kv_packed, Q, O((2, 4, 3, 2, 8))), V, "kv has shape"),
    Probe("explain: typo", lambda: te.explain_attention(Q, Q, Q, attn_mask_type="cube"), V, "'cube'"),
    Probe("explain", lambda: te.explain_attention(Q, Q, Q)),
    Probe("alibi_slopes('2')", lambda: alibi_slopes("2"), T, "num_heads is '2'"),
    Probe("alibi_slopes(0)", lambda: alibi_slopes(0), V, "num_heads is 0"),
    Probe("alibi_slopes(True)", lambda: alibi_slopes(True), T, "num_heads is True"),
    Probe("alibi_bias of ints", lambda: alibi_bias(O(2, int), 3, 3), T, "slopes is int32"),
    Probe("alibi_bias(s=-1)", lambda: alibi_bias(O(2), -1, 3), V, "s is -1"),
    Probe("alibi_bias(q_offset=1.5)", lambda: alibi_bias(O(2), 3, 3, q_offset=1.5), T, "q_offset is float32"),
    Probe("alibi_bias, two offsets", lambda: alibi_bias(O(2), 3, 3, bottom_right=True, q_offset=1),
          V, "pass one of them"),
    Probe("descriptor of 3 parts", lambda: SequenceDescriptor.from_seqlens((O(2, int),) * 3), V, "3 entries; pass one"),
    Probe("descriptor of floats", lambda: SequenceDescriptor.from_seqlens(O(2)), T, "seqlens is float.*integer array"),
    Probe("descriptor of None", lambda: SequenceDescriptor.from_seqlens(None), T, "seqlens is None; pass an integer"),
    Probe("segment_pos of another shape",
          lambda: SequenceDescriptor.from_segment_ids_and_pos(O((2, 4), int), O((2, 5), int)), V, "segment_pos"),
    Probe("attention_fp8: f32", shaped(attention_fp8, Q, Q, Q, recipe=DELAYED, metas=None), V, "q is float32, not bf"),
    Probe("attention_fp8: no metas", shaped(attention_fp8, *[O((2, 4, 2, 16), jnp.bfloat16)] * 3, recipe=DELAYED,
          metas=None), T, "metas is None; pass fp8.AttentionMetas"),
    Probe("attention_fp8: backward", shaped(attention_fp8, *[O((2, 4, 2, 16), jnp.bfloat16)] * 3, recipe=DELAYED,
          metas=AttentionMetas(*[META] * 9), backward="f8"), V, "backward is 'f8'; .*'fp8'"),
    Probe("attention_fp8: recipe", shaped(attention_fp8, *[O((2, 4, 2, 16), jnp.bfloat16)] * 3, recipe=CURRENT,
          metas=None), V, "use DelayedScaling"),
    Probe("context: no mesh", shaped(context_parallel_attention, Q, Q, Q, axis="cp"), V, r"jax.set_mesh\(mesh\)"),
    Probe("context: strategy", shaped(context_parallel_attention, Q, Q, Q, axis=3), V, "axis is 3; pass names"),
]  # fmt: skip

E4M3 = jnp.float8_e4m3fn
EIGHTS = jnp.ones((16, 16), E4M3)
OPS = [
    *probes(activation, O((4, 1, 8)), ("gelu",), rows=[
        ("x int", {0: O((4, 1, 8), int)}, T, "x is int32"),
        ("x list", {0: [1.0]}, T, "activation: x is"),
        ("a name", {1: "gelu"}, V, "pass a tuple"),
        ("typo", {1: ("gelo",)}, V, "'gelo' is not known; did you mean 'gelu'"),
        ("swiglu", {1: ("swiglu",)}, V, r"'swiglu' is \('silu', 'linear'\)"),
        ("slots", {1: ("silu", "linear")}, V, "but 2 activations are named"),
        ("params", {"params": {"limit": 1.0}}, V, "'limit'"),
    ]),
    *probes(norm, O((4, 8)), O(8), rows=[
        ("eps 0", {"eps": 0}, V, "epsilon is 0"),
        ("kind", {"kind": "l2"}, V, "norm is 'l2'"),
        ("zero_centered 1", {"zero_centered": 1}, T, "zero_centered_gamma is 1"),
        ("x int", {0: O((4, 8), int)}, T, "x is int32"),
    ]),
    Probe("quantize to int8", shaped(quantize, O((4, 8)), O(()), outputs=("data",), split=1, dtype=jnp.dtype(jnp.int8)),
          V, "te_quantize: dtype is .*int8.*float8_e4m3fn or float8_e5m2"),
    Probe("quantize to 'fp8'", shaped(quantize, O((4, 8)), O(()), outputs=("data",), split=1, dtype="fp8"), T,
          "dtype is 'fp8'"),
    Probe("quantize to f16", shaped(quantize, O((4, 8)), O(()), outputs=("data",), split=1, dtype=jnp.dtype("float16")),
          V, "dtype is .*float16"),
    Probe("norm to int8", shaped(norm_fwd, O((4, 8)), O(8), None, None, None, O(()), outputs=("data", "rstd"), eps=1e-6,
          rms=True, zero_centered=False, dtype=jnp.dtype(jnp.int8)), V, "te_norm_fwd: dtype is"),
    Probe("activation to int8", shaped(activation_fwd, O((4, 1, 8)), O(()), outputs=("data",), dtype=jnp.dtype("int8"),
          **attributes(("gelu",))), V, "te_activation_fwd: dtype is"),
    Probe("blocks to int8", shaped(quantize_block, O((2, 4, 8)), outputs=("data", "scale_inv"), lead=1, square=False,
          power_2=True, epsilon=0.0, dtype=jnp.dtype(jnp.int8)), V, "te_quantize_block: dtype is"),
    Probe("gemm of two types", shaped(gemm, O((4, 8)), O((3, 8), jnp.bfloat16)),
          T, "te_gemm: lhs is float32, rhs is bf"),
    Probe("gemm of ints", shaped(gemm, O((4, 8), int), O((3, 8), int)), T, "te_gemm: lhs is int32"),
    Probe("gemm of a list", shaped(gemm, [[1.0]], O((3, 8))), T, "te_gemm: lhs is"),
    Probe("gemm of FP8 without scales", shaped(gemm, EIGHTS, EIGHTS), T, "both of them"),
    Probe("gemm of two E5M2", shaped(gemm, *[EIGHTS.astype(jnp.float8_e5m2)] * 2, O(()), O(())), T, "use E4M3 for one"),
    Probe("gemm with scales for f32", shaped(gemm, O((4, 8)), O((3, 8)), O(()), O(())), T, "only with FP8 operands"),
    Probe("gemm to int8", shaped(gemm, O((4, 8)), O((3, 8)), out_dtype=jnp.int8), V, "out_dtype is .*int8"),
    Probe("gemm to 'bf16'", shaped(gemm, O((4, 8)), O((3, 8)), out_dtype="bf16"), T, "out_dtype is 'bf16'"),
    Probe("gemm, contract '1'", shaped(gemm, O((4, 8)), O((3, 8)), contract="1"), T, "contract is '1'"),
    Probe("gemm, tune 1", shaped(gemm, O((4, 8)), O((3, 8)), tune=1), T, "tune is 1; pass True or False"),
    Probe("gemm of other widths", shaped(gemm, O((4, 8)), O((3, 9))), V, "k"),
    Probe("gemm_sum of none", shaped(gemm_sum, [], lead=1, out_dtype=jnp.float32), V, "gemm_sum: terms is empty"),
    Probe("gemm", shaped(gemm, O((4, 8)), O((3, 8)))),
]  # fmt: skip


def refuses(cls):
    """(fields, outcome, words) -> probes of a recipe's constructor."""
    return lambda fields, outcome, words: Probe(
        f"{cls.__name__}({', '.join(f'{k}={v!r}' for k, v in fields.items())})", lambda: cls(**fields), outcome, words
    )


D, C, B, M, F = map(
    refuses,
    (
        recipes.DelayedScaling,
        recipes.Float8CurrentScaling,
        recipes.Float8BlockScaling,
        recipes.MXFP8BlockScaling,
        recipes.FixedScaling,
    ),
)
RECIPES = [
    D(dict(margin=1000), V, "margin is 1000; .*from -32 to 32"),
    D(dict(margin="1"), V, "margin is '1'"),
    D(dict(margin=True), V, "margin is True"),
    D(dict(margin=float("inf")), V, "margin is inf"),
    D(dict(margin=-1000), V, "margin is -1000"),
    D(dict(amax_history_len=0), V, "amax_history_len is 0"),
    D(dict(amax_history_len="16"), V, "amax_history_len is '16'"),
    D(dict(amax_history_len=16.0), V, "amax_history_len is 16.0"),
    D(dict(amax_history_length=16), T, "did you mean 'amax_history_len'"),
    D(dict(interval=0), V, "interval is 0"),
    D(dict(interval=1.5), V, "interval is 1.5"),
    D(dict(fp8_format="HYBRID"), T, "fp8_format is 'HYBRID'; pass te_jax.recipe.Format"),
    D(dict(fp8_format=jnp.int8), T, "fp8_format is .*int8"),
    D(dict(fp8_format=recipes.Format.E5M2), V, "use Format.HYBRID or Format.E4M3"),
    D(dict(fp8_format=None), T, "fp8_format is None"),
    D(dict(amax_compute_algo="min"), V, "amax_compute_algo is 'min'"),
    D(dict(amax_compute_algo=None), V, "amax_compute_algo is None"),
    D(dict(scaling_factor_compute_algo="pow2"), V, "scaling_factor_compute_algo is 'pow2'"),
    D(dict(override_linear_precision=True), V, "pass three bools"),
    D(dict(override_linear_precision=(1, 0, 0)), V, "pass three bools"),
    D(dict(split_accumulator=(True, True)), V, "split_accumulator is"),
    D(dict(reduce_amax="no"), V, "reduce_amax is 'no'; pass a bool"),
    D(dict(fp8_dpa=1), V, "fp8_dpa is 1; pass a bool"),
    D(dict(fp8_mha=True), V, "fp8_mha is True; .*leave it False"),
    D(dict(exclude="lm_head"), V, "exclude is 'lm_head'; pass a tuple"),
    D(dict(exclude=("",)), V, "exclude is"),
    D(dict(exclude=(None,)), V, "exclude is"),
    D(dict(exclude=["lm_head"]), None, ""),
    D(dict(margin=np.float32(1)), None, ""),
    C(dict(use_power_2_scales=True), T, "did you mean 'power_2_scale'"),
    C(dict(power_2_scale=1), V, "power_2_scale is 1; pass a bool"),
    C(dict(amax_epsilon=-1.0), V, "amax_epsilon is -1.0"),
    C(dict(amax_epsilon="0"), V, "amax_epsilon is '0'"),
    C(dict(fp8_dpa=True), V, "DelayedScaling.fp8_dpa=True"),
    C(dict(margin=1), T, "unexpected keyword argument 'margin'"),
    B(dict(use_f32_scales=0), V, "use_f32_scales is 0"),
    B(dict(use_f32_scale=True), T, "did you mean 'use_f32_scales'"),
    B(dict(amax_epsilon=float("inf")), V, "amax_epsilon is inf"),
    M(dict(block=16), T, "unexpected keyword argument 'block'"),
    M(dict(fp8_format="E4M3"), T, "fp8_format is 'E4M3'"),
    F(dict(x_scale=0), V, "x_scale is 0"),
    F(dict(x_scale=-1.0), V, "x_scale is -1.0"),
    F(dict(grad_scale="2"), V, "grad_scale is '2'"),
    F(dict(scale=1.0), T, "unexpected keyword argument 'scale'"),
    F(dict(kernel_scale=2.0**7), None, ""),
]


def mesh(shape=(2, 4), names=("data", "model"), kind=AxisType.Auto):
    return jax.make_mesh(shape, names, axis_types=(kind,) * len(shape))


def under(resource, call, place=None):
    """`call` with a MeshResource in force, and a mesh."""

    def run():
        with jax.set_mesh(place()) if place else global_shard_guard(None), global_shard_guard(resource):
            return call()

    return run


def older_idiom():
    with Mesh(np.array(jax.devices("cpu")).reshape(2, 4), ("data", "model")), global_shard_guard(MeshResource("data")):
        return extend_logical_axis_rules(())


X = O((8, 4))
RULES = (("mine", None),)
MESHES = [
    Probe("MeshResource(3)", lambda: MeshResource(3), T, "dp_resource is 3; pass the name of a mesh axis"),
    Probe("MeshResource(dp='data')", lambda: MeshResource(dp="data"), T, "unexpected keyword argument 'dp'"),
    Probe("MeshResource(tp_ressource)", lambda: MeshResource(tp_ressource="x"), T, "did you mean 'tp_resource'"),
    Probe("MeshResource of one axis twice", lambda: MeshResource("x", "x"), V, "give each an axis of its own"),
    Probe("MeshResource(('a', 'b'))", lambda: MeshResource(("a", "b")), T, r"dp_resource is \('a', 'b'\)"),
    Probe("MeshResource('')", lambda: MeshResource(""), V, "dp_resource is ''"),
    Probe("guard of a class", under(MeshResource, bool), T, "pass a te_jax.MeshResource"),
    Probe("guard of a dict", under({"dp": "data"}, bool), T, "pass a te_jax.MeshResource"),
    Probe("axis that the mesh lacks", under(MeshResource("batch"), bool, mesh), V, "mesh in force has the axes"),
    Probe("rules, resource, no mesh", under(MeshResource("data"), lambda: extend_logical_axis_rules(RULES)), V,
          r"dp_resource='data'.*no mesh is; enter `jax.set_mesh\(mesh\)`"),
    Probe("rules under `with Mesh`", older_idiom, V, r"enter `jax.set_mesh\(mesh\)`"),
    Probe("rules, empty resource", under(MeshResource(), lambda: extend_logical_axis_rules(RULES) is RULES)),
    Probe("rules only", lambda: extend_logical_axis_rules(RULES) is RULES),
    Probe("rules without a resource", under(None, lambda: extend_logical_axis_rules(()), mesh),
          V, "but no MeshResource"),
    Probe("rules", under(MeshResource("data", "model"), lambda: extend_logical_axis_rules(()), mesh)),
    Probe("rule of three", lambda: extend_logical_axis_rules((("a", "b", "c"),)), V, "not a pair"),
    Probe("rule to a number", lambda: extend_logical_axis_rules((("a", 3),)), V, "not a pair"),
    Probe("rules a dict", lambda: extend_logical_axis_rules({"a": "b"}), T, "rules is .*pass a tuple"),
    Probe("rules None", lambda: extend_logical_axis_rules(None), T, "rules is None"),
    Probe("rule against the resource", under(MeshResource("data", "model"), lambda: extend_logical_axis_rules(
        (("nvte_batch", "model"),)), mesh), V, "leave the rule out"),
    Probe("reorder in 3", lambda: reorder_causal_load_balancing(X, 3, 0), V, "pad the sequence"),
    Probe("reorder in '2'", lambda: reorder_causal_load_balancing(X, "2", 0), V, "cp_size is '2'"),
    Probe("reorder in True", lambda: reorder_causal_load_balancing(X, True, 0), V, "cp_size is True"),
    Probe("reorder axis 5", lambda: reorder_causal_load_balancing(X, 2, 5), V, "axis is 5"),
    Probe("reorder axis None", lambda: reorder_causal_load_balancing(X, 2, None), T, "axis is None"),
    Probe("reorder a list", lambda: reorder_causal_load_balancing([1, 2], 1, 0), T, "x is"),
    Probe("inverse in 0", lambda: inverse_reorder_causal_load_balancing(X, 0, 0), V, "cp_size is 0"),
    Probe("positions of '8'", lambda: causal_load_balanced_positions("8", 2), T, "size is '8'"),
    Probe("reorder", lambda: reorder_causal_load_balancing(X, 2, 0).shape == X.shape),
    Probe("constraint as a spec", lambda: with_sharding_constraint_by_logical_axes(X, PartitionSpec(None, None)) is X),
]  # fmt: skip

PROBES = [
    *DENSE, *LAYERNORM, *NORM_DENSE, *MLP, *KERNEL, *ROPE, *SCALINGS, *ATTENTION, *JOINED, *OPS, *RECIPES, *MESHES
]  # fmt: skip
