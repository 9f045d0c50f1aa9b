"""The module paths and names of TransformerEngine for JAX, over te_jax. Where a name is spelled otherwise in te_jax, an
adapter stands here; all else is te_jax's own."""

from te_jax.compat import INTERFACE
from te_jax.compat._absent import GetAttr, absent
from te_jax.compat.transformer_engine import common as common
from te_jax.compat.transformer_engine import jax as jax

__version__ = f"{INTERFACE}+te_jax"
__getattr__: GetAttr = absent("transformer_engine")
