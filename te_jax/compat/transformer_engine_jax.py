"""`transformer_engine_jax`, the C extension of TransformerEngine: its enums, and what it says of the machine.

There is no C extension of that name here. The enums have the names of its members; their numbers mean nothing.
"""

from enum import Enum

import jax

from te_jax.compat._absent import GetAttr, absent
from te_jax.core import extension

__getattr__: GetAttr = absent("transformer_engine_jax")


class DType(Enum):
    """Element types."""

    kByte = 0
    kInt16 = 1
    kInt32 = 2
    kInt64 = 3
    kFloat32 = 4
    kFloat16 = 5
    kBFloat16 = 6
    kFloat8E4M3 = 7
    kFloat8E5M2 = 8
    kFloat8E8M0 = 9
    kFloat4E2M1 = 10


class NVTE_Bias_Type(Enum):
    """What is added to logits, and where."""

    NVTE_NO_BIAS = 0
    NVTE_PRE_SCALE_BIAS = 1
    NVTE_POST_SCALE_BIAS = 2


class NVTE_Mask_Type(Enum):
    """Which keys a query sees."""

    NVTE_NO_MASK = 0
    NVTE_PADDING_MASK = 1
    NVTE_CAUSAL_MASK = 2
    NVTE_PADDING_CAUSAL_MASK = 3
    NVTE_CAUSAL_BOTTOM_RIGHT_MASK = 4
    NVTE_PADDING_CAUSAL_BOTTOM_RIGHT_MASK = 5


class NVTE_Softmax_Type(Enum):
    """What joins the sum of a softmax."""

    NVTE_VANILLA_SOFTMAX = 0
    NVTE_OFF_BY_ONE_SOFTMAX = 1
    NVTE_LEARNABLE_SOFTMAX = 2


class NVTE_QKV_Format(Enum):
    """The order of an array's axes."""

    NVTE_SBHD = 0
    NVTE_BSHD = 1
    NVTE_THD = 2


class NVTE_QKV_Layout(Enum):
    """Which arrays hold queries, keys and values."""

    NVTE_BS3HD = 0
    NVTE_BSHD_BS2HD = 1
    NVTE_BSHD_BSHD_BSHD = 2
    NVTE_T3HD = 3
    NVTE_THD_T2HD = 4
    NVTE_THD_THD_THD = 5


class NVTE_Fused_Attn_Backend(Enum):
    """What computes attention."""

    NVTE_No_Backend = 0
    NVTE_F16_arbitrary_seqlen = 1
    NVTE_FP8 = 2


class JAXX_Scaling_Mode(Enum):
    """What shares a scale."""

    NO_SCALING = 0
    DELAYED_TENSOR_SCALING = 1
    MXFP8_1D_SCALING = 2
    CURRENT_TENSOR_SCALING = 3
    NVFP4_1D_SCALING = 4
    NVFP4_2D_SCALING = 5


class JAXX_Quantize_Layout(Enum):
    """Which FP8 copies of a tensor there are."""

    ROWWISE = 0
    COLWISE = 1
    ROWWISE_COLWISE = 2


class JAXX_Collective_Op(Enum):
    """What a GEMM would do as well as multiplying."""

    NONE = 0
    ALL_GATHER = 1
    REDUCE_SCATTER = 2


def get_cudnn_version() -> int:
    """The version of the cuDNN that te_jax found, as cuDNN encodes it (91900 is 9.19.0).

    Programs ask for it to know what attention can do. Where there is no cuDNN it is the oldest one that te_jax takes,
    for its plain JAX computes all that this one does.
    """
    return extension.status().cudnn or extension.CUDNN_MINIMUM


def get_device_compute_capability(gpu_id: int = 0) -> int:
    """Ten times the compute capability of a device (90 on Hopper); 0 of a device that is no NVIDIA GPU."""
    capability = getattr(jax.local_devices()[gpu_id], "compute_capability", None)
    return round(10 * float(capability)) if capability else 0


def nvte_built_with_cublasmp() -> bool:
    """False: te_jax has no GEMMs that communicate."""
    return False
