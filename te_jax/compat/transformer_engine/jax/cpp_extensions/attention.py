"""`transformer_engine.jax.cpp_extensions.attention`."""

from te_jax.compat._absent import GetAttr, absent
from te_jax.compat.transformer_engine.jax.attention import AttnSoftmaxType as AttnSoftmaxType
from te_jax.compat.transformer_engine.jax.attention import FusedAttnHelper as FusedAttnHelper

__getattr__: GetAttr = absent("transformer_engine.jax.cpp_extensions")
