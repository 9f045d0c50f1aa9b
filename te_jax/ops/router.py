"""Which expert a token goes to."""

from te_jax.ops.experts.router import RouterOptions as RouterOptions
from te_jax.ops.experts.router import Routing as Routing
from te_jax.ops.experts.router import load_balancing_loss as load_balancing_loss
from te_jax.ops.experts.router import route as route
from te_jax.ops.experts.router import updated_expert_bias as updated_expert_bias
from te_jax.ops.experts.router import z_loss as z_loss
