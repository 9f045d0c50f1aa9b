"""`transformer_engine.jax.flax`."""

from te_jax.compat._absent import GetAttr, absent
from te_jax.compat.transformer_engine.jax.flax import module as module
from te_jax.compat.transformer_engine.jax.flax import transformer as transformer
from te_jax.compat.transformer_engine.jax.flax.module import DenseGeneral as DenseGeneral
from te_jax.compat.transformer_engine.jax.flax.module import LayerNorm as LayerNorm
from te_jax.compat.transformer_engine.jax.flax.module import LayerNormDenseGeneral as LayerNormDenseGeneral
from te_jax.compat.transformer_engine.jax.flax.module import LayerNormMLP as LayerNormMLP
from te_jax.compat.transformer_engine.jax.flax.module import make_dot_general_cls as make_dot_general_cls
from te_jax.compat.transformer_engine.jax.flax.module import make_grouped_dense_cls as make_grouped_dense_cls
from te_jax.compat.transformer_engine.jax.flax.module import (
    wrap_function_in_te_state_module as wrap_function_in_te_state_module,
)
from te_jax.compat.transformer_engine.jax.flax.transformer import DotProductAttention as DotProductAttention
from te_jax.compat.transformer_engine.jax.flax.transformer import MultiHeadAttention as MultiHeadAttention
from te_jax.compat.transformer_engine.jax.flax.transformer import RelativePositionBiases as RelativePositionBiases
from te_jax.compat.transformer_engine.jax.flax.transformer import TransformerLayer as TransformerLayer
from te_jax.compat.transformer_engine.jax.flax.transformer import TransformerLayerType as TransformerLayerType
from te_jax.compat.transformer_engine.jax.flax.transformer import extend_logical_axis_rules as extend_logical_axis_rules

__getattr__: GetAttr = absent("transformer_engine.jax.flax")
