"""Tensors in FP8: those that are there, the results of norms and of activations, and stacks of weights."""

from te_jax.ops.quantize.array import quantize as quantize
from te_jax.ops.quantize.array import quantize_block as quantize_block
from te_jax.ops.quantize.array import quantize_mx as quantize_mx
from te_jax.ops.quantize.stacked import quantize_stacked as quantize_stacked
from te_jax.ops.quantize.stacked import quantize_stacked_block as quantize_stacked_block
from te_jax.ops.quantize.stacked import quantize_stacked_mx as quantize_stacked_mx
