"""Flax (Linen) modules: parameters, names and FP8 state around the functional layers.

DenseGeneral, LayerNormDenseGeneral, LayerNormMLP, LayerNorm: Products, with the norm in front of them in one.
DotProductAttention, MultiHeadAttention, MultiHeadLatentAttention, RelativePositionBiases: Attention.
KeysValues: What one attention hands on to a later one.
Mamba2: A mixer of tokens by a state-space model.
GatedDeltaNet: A mixer of tokens by the gated delta rule.
TransformerLayer, MoEBlock, LMHead: A layer; its mixture of experts; logits and their loss.
DiTBlock: A layer of a diffusion transformer.
DotGeneral, make_dot_general_cls, wrap_function_in_te_state_module: FP8 for products of modules that are not of te_jax.
TrainState, fp8_masked: Training steps.
fp8_kernels, fp8_params, fp8_model_init, dequantize_params, wgrads: Kernels that are kept in FP8.
join_lora, lora_mask, merge_lora, split_lora: Adapters of low rank.
"""

from te_jax.core.public import public_names as _public_names
from te_jax.flax._keys import KeysValues as KeysValues
from te_jax.flax.attention import DotProductAttention as DotProductAttention
from te_jax.flax.dense import DenseGeneral as DenseGeneral
from te_jax.flax.dense import LayerNormDenseGeneral as LayerNormDenseGeneral
from te_jax.flax.dit import DiTBlock as DiTBlock
from te_jax.flax.dot_general import DotGeneral as DotGeneral
from te_jax.flax.dot_general import QuantizerSet as QuantizerSet
from te_jax.flax.dot_general import QuantizingModule as QuantizingModule
from te_jax.flax.dot_general import make_dot_general_cls as make_dot_general_cls
from te_jax.flax.dot_general import wrap_function_in_te_state_module as wrap_function_in_te_state_module
from te_jax.flax.gated_delta import GatedDeltaNet as GatedDeltaNet
from te_jax.flax.head import LMHead as LMHead
from te_jax.flax.kernels import dequantize_params as dequantize_params
from te_jax.flax.kernels import fp8_kernels as fp8_kernels
from te_jax.flax.kernels import fp8_model_init as fp8_model_init
from te_jax.flax.kernels import fp8_params as fp8_params
from te_jax.flax.kernels import wgrads as wgrads
from te_jax.flax.lora import join_lora as join_lora
from te_jax.flax.lora import lora_mask as lora_mask
from te_jax.flax.lora import merge_lora as merge_lora
from te_jax.flax.lora import split_lora as split_lora
from te_jax.flax.mamba import Mamba2 as Mamba2
from te_jax.flax.mha import MultiHeadAttention as MultiHeadAttention
from te_jax.flax.mla import MultiHeadLatentAttention as MultiHeadLatentAttention
from te_jax.flax.mlp import LayerNormMLP as LayerNormMLP
from te_jax.flax.moe import MoEBlock as MoEBlock
from te_jax.flax.moe import update_expert_bias as update_expert_bias
from te_jax.flax.norm import LayerNorm as LayerNorm
from te_jax.flax.relpos import RelativePositionBiases as RelativePositionBiases
from te_jax.flax.train_state import TrainState as TrainState
from te_jax.flax.train_state import fp8_masked as fp8_masked
from te_jax.flax.transformer import TransformerLayer as TransformerLayer
from te_jax.flax.transformer import TransformerLayerType as TransformerLayerType
from te_jax.sharding import extend_logical_axis_rules as extend_logical_axis_rules

__all__ = _public_names(globals())
