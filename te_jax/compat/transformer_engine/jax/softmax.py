"""`transformer_engine.jax.softmax`: none of it is served, and each name says why."""

from te_jax.compat._absent import absent

__getattr__ = absent("transformer_engine.jax.softmax")
