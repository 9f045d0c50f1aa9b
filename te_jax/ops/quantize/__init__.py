"""Tensors in FP8: those that are there, the results of norms and of activations, and stacks of weights."""

from te_jax.ops.quantize.array import BLOCK as BLOCK
from te_jax.ops.quantize.array import MX_BLOCK as MX_BLOCK
from te_jax.ops.quantize.array import dequantize_rows as dequantize_rows
from te_jax.ops.quantize.array import dequantize_weight as dequantize_weight
from te_jax.ops.quantize.array import quantize as quantize
from te_jax.ops.quantize.array import quantize_block as quantize_block
from te_jax.ops.quantize.array import quantize_mx as quantize_mx
from te_jax.ops.quantize.array import transpose as transpose
from te_jax.ops.quantize.array import unusable as unusable
