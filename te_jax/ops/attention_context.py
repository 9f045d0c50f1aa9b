"""Attention of sequences that are cut along a mesh axis."""

from te_jax.ops.attention.context_api import context_parallel_attention as context_parallel_attention
