"""The rows of experts between their products, and the stacked weights of experts, in FP8."""

from te_jax.ops.experts.rows import activation_grouped_block_bwd as activation_grouped_block_bwd
from te_jax.ops.experts.rows import activation_grouped_block_fwd as activation_grouped_block_fwd
from te_jax.ops.experts.rows import activation_grouped_bwd as activation_grouped_bwd
from te_jax.ops.experts.rows import activation_grouped_fwd as activation_grouped_fwd
from te_jax.ops.quantize.stacked import quantize_stacked as quantize_stacked
from te_jax.ops.quantize.stacked import quantize_stacked_block as quantize_stacked_block
