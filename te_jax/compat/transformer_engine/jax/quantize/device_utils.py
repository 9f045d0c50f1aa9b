"""`transformer_engine.jax.quantize.device_utils`."""

from te_jax.compat._absent import GetAttr, absent
from te_jax.compat.transformer_engine_jax import get_device_compute_capability as get_device_compute_capability

__getattr__: GetAttr = absent("transformer_engine.jax.quantize")
