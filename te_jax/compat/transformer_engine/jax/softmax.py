"""`transformer_engine.jax.softmax`: none of it is served, and each name says why."""

from te_jax.compat._absent import GetAttr, absent

__getattr__: GetAttr = absent("transformer_engine.jax.softmax")
