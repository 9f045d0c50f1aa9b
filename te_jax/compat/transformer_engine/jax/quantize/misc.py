"""`transformer_engine.jax.quantize.misc`."""

from te_jax.compat._absent import GetAttr, absent
from te_jax.compat.transformer_engine.jax.quantize.scaling_modes import QuantizeLayout as QuantizeLayout

__getattr__: GetAttr = absent("transformer_engine.jax.quantize")
