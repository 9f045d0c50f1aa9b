"""`transformer_engine.jax.permutation`."""

from te_jax.compat._absent import absent

__getattr__ = absent("transformer_engine.jax.permutation")
