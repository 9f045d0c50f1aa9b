"""ALiBi: attention with linear biases."""

from te_jax.ops.attention.bias import alibi_bias as alibi_bias
from te_jax.ops.attention.bias import alibi_slopes as alibi_slopes
