"""`transformer_engine.common`: the recipes."""

from te_jax.compat._absent import GetAttr, absent
from te_jax.compat.transformer_engine.common import recipe as recipe

__getattr__: GetAttr = absent("transformer_engine.common")
