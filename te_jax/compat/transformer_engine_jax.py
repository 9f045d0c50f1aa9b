"""`transformer_engine_jax`, the C extension of the incumbent: its enums, and what it says of the machine.

There is no C extension of that name here. The enums have the names of its members; their numbers mean nothing.
"""

from enum import Enum

import jax

from te_jax import _lib
from te_jax.compat._absent import absent

__getattr__ = absent("transformer_engine_jax")


def _enum(name: str, members: str) -> type[Enum]:
    return Enum(name, members, start=0, module=__name__)


DType = _enum(
    "DType",
    "kByte kInt16 kInt32 kInt64 kFloat32 kFloat16 kBFloat16 kFloat8E4M3 kFloat8E5M2 kFloat8E8M0 kFloat4E2M1",
)
NVTE_Bias_Type = _enum("NVTE_Bias_Type", "NVTE_NO_BIAS NVTE_PRE_SCALE_BIAS NVTE_POST_SCALE_BIAS")
NVTE_Mask_Type = _enum(
    "NVTE_Mask_Type",
    "NVTE_NO_MASK NVTE_PADDING_MASK NVTE_CAUSAL_MASK NVTE_PADDING_CAUSAL_MASK NVTE_CAUSAL_BOTTOM_RIGHT_MASK "
    "NVTE_PADDING_CAUSAL_BOTTOM_RIGHT_MASK",
)
NVTE_Softmax_Type = _enum("NVTE_Softmax_Type", "NVTE_VANILLA_SOFTMAX NVTE_OFF_BY_ONE_SOFTMAX NVTE_LEARNABLE_SOFTMAX")
NVTE_QKV_Format = _enum("NVTE_QKV_Format", "NVTE_SBHD NVTE_BSHD NVTE_THD")
NVTE_QKV_Layout = _enum(
    "NVTE_QKV_Layout", "NVTE_BS3HD NVTE_BSHD_BS2HD NVTE_BSHD_BSHD_BSHD NVTE_T3HD NVTE_THD_T2HD NVTE_THD_THD_THD"
)
NVTE_Fused_Attn_Backend = _enum("NVTE_Fused_Attn_Backend", "NVTE_No_Backend NVTE_F16_arbitrary_seqlen NVTE_FP8")
JAXX_Scaling_Mode = _enum(
    "JAXX_Scaling_Mode",
    "NO_SCALING DELAYED_TENSOR_SCALING MXFP8_1D_SCALING CURRENT_TENSOR_SCALING NVFP4_1D_SCALING NVFP4_2D_SCALING",
)
JAXX_Quantize_Layout = _enum("JAXX_Quantize_Layout", "ROWWISE COLWISE ROWWISE_COLWISE")
JAXX_Collective_Op = _enum("JAXX_Collective_Op", "NONE ALL_GATHER REDUCE_SCATTER")


def get_cudnn_version() -> int:
    """The version of the cuDNN that te_jax found, as cuDNN encodes it (91900 is 9.19.0).

    Programs ask for it to know what attention can do. Where there is no cuDNN it is the oldest one that te_jax takes,
    for its plain JAX computes all that this one does.
    """
    return _lib.status().cudnn or _lib.CUDNN_MINIMUM


def get_device_compute_capability(gpu_id: int = 0) -> int:
    """Ten times the compute capability of a device (90 on Hopper); 0 of a device that is no NVIDIA GPU."""
    capability = getattr(jax.local_devices()[gpu_id], "compute_capability", None)
    return round(10 * float(capability)) if capability else 0


def nvte_built_with_cublasmp() -> bool:
    """False: te_jax has no GEMMs that communicate."""
    return False
