"""`transformer_engine.jax.checkpoint_policies`: policies by name, for te_jax's GEMMs are no primitives of one name."""

from te_jax.checkpoint_policies import checkpoint_dots_and_te_gemms as checkpoint_dots_and_te_gemms
from te_jax.checkpoint_policies import dots_and_te_gemms_with_no_batch_dims as dots_and_te_gemms_with_no_batch_dims
from te_jax.checkpoint_policies import te_gemms_saveable as te_gemms_saveable
from te_jax.compat._absent import GetAttr, absent

__getattr__: GetAttr = absent("transformer_engine.jax.checkpoint_policies")
