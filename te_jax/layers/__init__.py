"""Functional layers: ops composed under one custom_vjp, with the FP8 state as an argument."""

from te_jax.core.public import public_names as _public_names
from te_jax.layers.contraction import dot_general as dot_general
from te_jax.layers.experts.block import MoEAux as MoEAux
from te_jax.layers.experts.block import MoEOptions as MoEOptions
from te_jax.layers.experts.block import moe as moe
from te_jax.layers.experts.devices import ExpertExchange as ExpertExchange
from te_jax.layers.experts.explain import MoEExplanation as MoEExplanation
from te_jax.layers.experts.explain import explain_moe as explain_moe
from te_jax.layers.experts.linear import grouped_dense as grouped_dense
from te_jax.layers.experts.weights import quantize_experts as quantize_experts
from te_jax.layers.explain import explain_attention as explain_attention
from te_jax.layers.fp8_attention import attention_fp8 as attention_fp8
from te_jax.layers.gated_delta import DeltaState as DeltaState
from te_jax.layers.gated_delta import DeltaWeights as DeltaWeights
from te_jax.layers.gated_delta import gated_delta_net as gated_delta_net
from te_jax.layers.gated_norm import gated_norm_dense as gated_norm_dense
from te_jax.layers.gated_norm import gated_rmsnorm as gated_rmsnorm
from te_jax.layers.linear import dense as dense
from te_jax.layers.loss.head import linear_cross_entropy as linear_cross_entropy
from te_jax.layers.mamba import MambaState as MambaState
from te_jax.layers.mamba import MambaWeights as MambaWeights
from te_jax.layers.mamba import mamba2 as mamba2
from te_jax.layers.norm_adaptive import adaptive_layernorm as adaptive_layernorm
from te_jax.layers.norm_adaptive import gated_residual as gated_residual
from te_jax.layers.norm_dense import layernorm as layernorm
from te_jax.layers.norm_dense import layernorm_dense as layernorm_dense
from te_jax.layers.norm_mlp import layernorm_mlp as layernorm_mlp
from te_jax.layers.weight import Projection as Projection
from te_jax.layers.weight import QuantizedKernel as QuantizedKernel
from te_jax.layers.weight import quantize_kernel as quantize_kernel

__all__ = _public_names(globals())
