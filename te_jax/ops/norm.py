"""LayerNorm and RMSNorm, their gradients, and straight to FP8."""

from te_jax.ops.quantize.norm import norm as norm
from te_jax.ops.quantize.norm import norm_and_input as norm_and_input
from te_jax.ops.quantize.norm import norm_backward as norm_backward
from te_jax.ops.quantize.norm import norm_block_fwd as norm_block_fwd
from te_jax.ops.quantize.norm import norm_bwd as norm_bwd
from te_jax.ops.quantize.norm import norm_fwd as norm_fwd
