"""Optimizers (optax) for FP8: moments stored in FP8, and master copies of parameters that live in FP8."""

from te_jax.core.public import public_names as _public_names
from te_jax.optim.adam import AdamFp8State as AdamFp8State
from te_jax.optim.adam import adamw_fp8 as adamw_fp8
from te_jax.optim.adam import scale_by_adam_fp8 as scale_by_adam_fp8
from te_jax.optim.adam import state_sharding as state_sharding
from te_jax.optim.master import MasterWeightsState as MasterWeightsState
from te_jax.optim.master import apply_updates as apply_updates
from te_jax.optim.master import beside as beside
from te_jax.optim.master import master_weights as master_weights

__all__ = _public_names(globals())
