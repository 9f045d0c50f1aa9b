"""`transformer_engine.jax.layernorm_dense`."""

import jax

from te_jax import layers
from te_jax.compat._absent import GetAttr, absent
from te_jax.compat._axes import with_sharding_constraint_by_logical_axes as constrain
from te_jax.compat.transformer_engine.jax.layernorm import canonicalize_norm_type
from te_jax.compat.transformer_engine.jax.quantize.quantizer import QuantizerSet, layer_options, noop_quantizer_set

__getattr__: GetAttr = absent("transformer_engine.jax.layernorm_dense")


def layernorm_dense(
    x: jax.Array,
    kernel: jax.Array,
    gamma: jax.Array,
    beta: jax.Array | None,
    bias: jax.Array | None = None,
    norm_type: str = "layernorm",
    zero_centered_gamma: bool = False,
    epsilon: float = 1e-6,
    transpose_batch_sequence: bool = False,
    layernorm_input_axes: tuple[str, ...] | None = None,
    dot_input_axes: tuple[str, ...] | None = None,
    kernel_axes: tuple[str, ...] | None = None,
    quantizer_set: QuantizerSet = noop_quantizer_set,
) -> jax.Array:
    """y = norm(x) . kernel + bias (`te_jax.layers.layernorm_dense`).

    transpose_batch_sequence and dot_input_axes are without effect: the norm's output is no array of its own in FP8.
    """
    del transpose_batch_sequence, dot_input_axes
    y, _ = layers.layernorm_dense(
        constrain(x, layernorm_input_axes),
        constrain(kernel, kernel_axes),
        gamma,
        beta,
        bias,
        norm=canonicalize_norm_type(norm_type),
        zero_centered_gamma=zero_centered_gamma,
        epsilon=epsilon,
        **layer_options("layernorm_dense", quantizer_set),
    )
    return y
