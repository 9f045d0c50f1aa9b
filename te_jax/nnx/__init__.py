"""Flax NNX modules for the modules of `te_jax.flax`, with variables as attributes and FP8 state as `Fp8State`."""

from te_jax.core.public import public_names as _public_names
from te_jax.nnx._layer import ExpertBias as ExpertBias
from te_jax.nnx._layer import Fp8State as Fp8State
from te_jax.nnx._layer import Layer as Layer
from te_jax.nnx._layer import Loss as Loss
from te_jax.nnx.convert import convert_fp8_state as convert_fp8_state
from te_jax.nnx.convert import from_linen as from_linen
from te_jax.nnx.convert import to_linen as to_linen
from te_jax.nnx.dot_general import DotGeneral as DotGeneral
from te_jax.nnx.grad import value_and_grad as value_and_grad
from te_jax.nnx.modules import DenseGeneral as DenseGeneral
from te_jax.nnx.modules import DiTBlock as DiTBlock
from te_jax.nnx.modules import DotProductAttention as DotProductAttention
from te_jax.nnx.modules import GatedDeltaNet as GatedDeltaNet
from te_jax.nnx.modules import LayerNorm as LayerNorm
from te_jax.nnx.modules import LayerNormDenseGeneral as LayerNormDenseGeneral
from te_jax.nnx.modules import LayerNormMLP as LayerNormMLP
from te_jax.nnx.modules import Linear as Linear
from te_jax.nnx.modules import LMHead as LMHead
from te_jax.nnx.modules import Mamba2 as Mamba2
from te_jax.nnx.modules import MoEBlock as MoEBlock
from te_jax.nnx.modules import MultiHeadAttention as MultiHeadAttention
from te_jax.nnx.modules import MultiHeadLatentAttention as MultiHeadLatentAttention
from te_jax.nnx.modules import RelativePositionBiases as RelativePositionBiases
from te_jax.nnx.modules import RMSNorm as RMSNorm
from te_jax.nnx.modules import TransformerLayer as TransformerLayer

__all__ = _public_names(globals())
