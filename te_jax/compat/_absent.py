"""What TransformerEngine has and te_jax.compat does not serve: each name once, with the reason and the way out.

A module of te_jax.compat has `__getattr__ = absent("transformer_engine. ...")`, so that an import of such a name, or a
use of it, says why. `python -m te_jax.compat check` reads the same table.
"""

import sys
from collections.abc import Callable
from dis import opmap
from types import FrameType
from typing import NoReturn

_QUANTIZED = "te_jax quantizes inside of its layers: give `quantizer_set` to dense, layernorm_dense or layernorm_mlp"
INTERNAL = "it is an internal op of TransformerEngine: use the functions of `.dense`, `.layernorm` and `.attention`"
_MOE = "te_jax has its own layer of experts: te_jax.layers.moe, te_jax.flax.MoEBlock, TransformerLayer(moe=...)"
_EP = (
    "te_jax.layers.moe and te_jax.flax.MoEBlock send tokens themselves, where MeshResource(ep_resource=...) names a "
    "mesh axis; docs/migration.md has each name"
)
_MESH = "use `jax.lax` and the axes of the MeshResource directly"
_SCORE = "te_jax has no score_mod: cuDNN's callbacks have no plain-JAX form. Give a bias or a mask"

ABSENT: dict[str, dict[str, str]] = {
    "transformer_engine": {
        "pytorch": "te_jax serves only JAX",
    },
    "transformer_engine.common": {
        "utils": "it is internal to TransformerEngine",
        "load_framework_extension": "there is no C extension to load",
    },
    "transformer_engine.jax": {
        "debug": "te_jax.fp8_probes and te_jax.fp8_stats show what happens to tensors in FP8",
        "ep": _EP,
        "moe": _MOE,
        "fp8": "newer releases have it as `.quantize`: import from there",
        "fused_attn": "newer releases have it as `.attention`: import from there",
        "triton_extensions": "te_jax has no Triton kernels: use jax.experimental.pallas",
    },
    "transformer_engine.jax.attention": {
        "fused_attn_thd": "it is deprecated: use fused_attn with a SequenceDescriptor",
        "run_length_fill_flattened": "use run_length_fill, which takes ids of any rank",
    },
    "transformer_engine.jax.flax": {
        "_MoEBlock": _MOE,
        "moe": _MOE,
    },
    "transformer_engine.jax.flax.module": {
        "Softmax": "te_jax's attention has the scale, the mask and the softmax in it: use DotProductAttention",
    },
    "transformer_engine.jax.cpp_extensions": {
        **dict.fromkeys(
            "grouped_gemm quantize quantize_dbias grouped_quantize act_lu dact_lu quantize_dact_dbias "
            "layernorm_fwd layernorm_bwd rmsnorm_fwd rmsnorm_bwd normalization_fwd normalization_bwd fused_attn_fwd "
            "fused_attn_bwd sanitize_dims BasePrimitive register_primitive get_non_contracting_dims".split(),
            INTERNAL,
        ),
        "is_softmax_kernel_available": "te_jax has no softmax outside of attention: use jax.nn.softmax",
        **dict.fromkeys(
            ("jax_dtype_to_te_dtype", "te_dtype_to_jax_dtype"), "te_jax's functions take types of jax and no others"
        ),
        "make_fused_attn_score_mod_config": _SCORE,
        "validate_fused_attn_score_mod": _SCORE,
        **dict.fromkeys(("activation", "base", "normalization", "quantization", "amax", "topk", "router"), INTERNAL),
        "ep": _EP,
        "flex_attention": _SCORE,
        "softmax": "use jax.nn.softmax",
    },
    "transformer_engine.jax.quantize": {
        **dict.fromkeys(
            "ScaledTensor ScaledTensor1x ScaledTensor2x GroupedScaledTensor1x NoScaleTensor GroupedNoScaleTensor "
            "ScaledTensorFactory ScalingModeToDequantizerMap DelayedScaleQuantizer CurrentScaleQuantizer "
            "BlockScaleQuantizer NVFP4Quantizer GroupedQuantizer TensorUsage apply_rht "
            "get_rht_matrix get_wgrad_sign_vector get_sign_from_vector compute_scale_from_amax "
            "apply_padding_to_scale_inv remove_padding_from_scale_inv".split(),
            _QUANTIZED,
        ),
        **dict.fromkeys(("tensor", "dequantizer", "hadamard"), _QUANTIZED),
        **dict.fromkeys(
            "get_quantize_config_class BaseQuantizeConfig NoOpQuantizeConfig DelayedScalingQuantizeConfig "
            "CurrentScalingQuantizeConfig BlockScalingQuantizeConfig".split(),
            "one class is there for all: ask get_quantize_config_with_recipe, or the recipe (recipe.delayed(), ...)",
        ),
        "is_fp8_gemm_with_all_layouts_supported": "te_jax chooses layouts itself",
    },
    "transformer_engine.jax.permutation": {
        **dict.fromkeys(
            "sort_chunks_by_index routing_map_to_selected_experts PureJaxPermState pure_jax_token_dispatch "
            "pure_jax_token_combine compute_ragged_all_to_all_params compute_reverse_ragged_all_to_all_params "
            "local_permute_after_a2a local_unpermute_before_a2a".split(),
            "te_jax.layers.moe sends tokens itself, where MeshResource(ep_resource=...) names a mesh axis",
        ),
    },
    "transformer_engine.jax.router": {
        "fused_moe_aux_loss": "use te_jax.ops.router.load_balancing_loss, which takes logits and experts",
    },
    "transformer_engine.jax.sharding": {
        **dict.fromkeys(
            "lax_paral_op get_mesh_axis_rank get_mesh_axis_rank_host all_reduce_sum_along_dp_fsdp "
            "all_reduce_sum_along_dp_fsdp_tpsp all_reduce_max_along_all_axes_except_PP get_padded_spec "
            "with_sharding_constraint".split(),
            _MESH,
        ),
    },
    "transformer_engine.jax.softmax": {
        **dict.fromkeys(
            ("softmax", "SoftmaxFusionType"),
            "te_jax has no softmax outside of attention: use jax.nn.softmax, or dot_product_attention",
        ),
    },
    "transformer_engine.jax.version_utils": {
        "jax_version_meet_requirement": "compare jax.__version_info__ with a tuple",
    },
    "transformer_engine_jax": {
        **dict.fromkeys(("registrations", "get_fused_attn_backend"), "there is no C extension of that name"),
    },
}


GetAttr = Callable[[str], NoReturn]  # `__getattr__` of a module that has nothing more


def why_absent(path: str) -> str:
    """Why te_jax.compat does not serve the dotted `path` of TransformerEngine; "" if the table does not have it."""
    module, _, name = path.rpartition(".")
    text = ABSENT.get(module, {}).get(name, "")
    return text or (why_absent(module) if module else "")


def _imports(frame: FrameType) -> bool:
    """Whether what the frame is at is a `from ... import`: no exception is of both types, so the caller decides."""
    return frame.f_code.co_code[frame.f_lasti] == opmap["IMPORT_FROM"]


def absent(module: str) -> GetAttr:
    """`__getattr__` of TransformerEngine's `module`. It raises AttributeError, so that `hasattr` says no, with the
    reason for a name of the table; to `from module import name` it raises ImportError then, for that statement drops
    the text of an AttributeError."""

    def __getattr__(name: str) -> NoReturn:
        if text := why_absent(f"{module}.{name}"):
            text = f"{module}.{name} is not in te_jax.compat; {text}."
            if _imports(sys._getframe(1)):
                raise ImportError(text, name=module)
            raise AttributeError(text, name=name)
        raise AttributeError(f"module {module!r} of te_jax.compat has no attribute {name!r}")

    return __getattr__
