"""LayerNorm, RMSNorm and the gated RMSNorm of Mamba-2, their gradients, and straight to FP8."""

from te_jax.ops.quantize.gated_norm import gated_norm as gated_norm
from te_jax.ops.quantize.gated_norm import gated_norm_backward as gated_norm_backward
from te_jax.ops.quantize.gated_norm import gated_norm_block_fwd as gated_norm_block_fwd
from te_jax.ops.quantize.gated_norm import gated_norm_bwd as gated_norm_bwd
from te_jax.ops.quantize.gated_norm import gated_norm_fwd as gated_norm_fwd
from te_jax.ops.quantize.norm import norm as norm
from te_jax.ops.quantize.norm import norm_and_input as norm_and_input
from te_jax.ops.quantize.norm import norm_backward as norm_backward
from te_jax.ops.quantize.norm import norm_block_fwd as norm_block_fwd
from te_jax.ops.quantize.norm import norm_bwd as norm_bwd
from te_jax.ops.quantize.norm import norm_fwd as norm_fwd
