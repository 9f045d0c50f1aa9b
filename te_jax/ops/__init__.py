"""What the layers are made of: each op is one primitive of jax, a CUDA kernel on a GPU and plain JAX elsewhere.

te_jax.ops.attention:  Scaled dot-product attention, and which kernel runs it.
te_jax.ops.gemm:       Products, in FP8 or not, and the choice of their algorithms.
te_jax.ops.norm:       LayerNorm, RMSNorm and the gated RMSNorm.
te_jax.ops.activation: Activations, gated ones among them.
te_jax.ops.rope:       Rotary position embeddings.
te_jax.ops.ssm:        The convolution and the scan of state-space models.
te_jax.ops.delta:      The gated delta rule.
te_jax.ops.quantize:   Tensors in FP8.
te_jax.ops.router, te_jax.ops.permute, te_jax.ops.grouped, te_jax.ops.gemm_grouped: Mixtures of experts.
"""

from collections.abc import Callable as _Callable
from typing import Any as _Any

from te_jax.core.public import lazy_modules

__all__ = (
    *("activation", "attention", "attention_context", "delta", "gemm", "gemm_grouped", "grouped", "norm", "permute"),
    *("quantize", "rope", "router", "ssm"),
)
__getattr__: _Callable[[str], _Any] = lazy_modules("te_jax.ops", __all__)
