"""Activations, gated or not, their gradients, and both straight to FP8."""

from te_jax.ops.quantize.activation import activation as activation
from te_jax.ops.quantize.activation import activation_block_bwd as activation_block_bwd
from te_jax.ops.quantize.activation import activation_block_fwd as activation_block_fwd
from te_jax.ops.quantize.activation import activation_bwd as activation_bwd
from te_jax.ops.quantize.activation import activation_fwd as activation_fwd
from te_jax.ops.quantize.activation import attributes as attributes
from te_jax.ops.quantize.activation import is_fused as is_fused
from te_jax.ops.quantize.activation import slots as slots
