"""Functional layers: ops composed under one custom_vjp, with the FP8 state as an argument."""

from te_jax.layers.attention_fp8 import attention_fp8 as attention_fp8
from te_jax.layers.dense import dense as dense
from te_jax.layers.dot_general import dot_general as dot_general
from te_jax.layers.expert_weights import quantize_experts as quantize_experts
from te_jax.layers.grouped_dense import grouped_dense as grouped_dense
from te_jax.layers.linear_cross_entropy import linear_cross_entropy as linear_cross_entropy
from te_jax.layers.moe import MoEAux as MoEAux
from te_jax.layers.moe import MoEOptions as MoEOptions
from te_jax.layers.moe import moe as moe
from te_jax.layers.norm_dense import layernorm as layernorm
from te_jax.layers.norm_dense import layernorm_dense as layernorm_dense
from te_jax.layers.norm_mlp import layernorm_mlp as layernorm_mlp
from te_jax.layers.weight import Projection as Projection
from te_jax.layers.weight import QuantizedKernel as QuantizedKernel
from te_jax.layers.weight import quantize_kernel as quantize_kernel
