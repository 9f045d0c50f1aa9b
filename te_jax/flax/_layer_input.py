"""What a layer makes of its input of its own (per-layer embeddings, as in Gemma 3n and 4)."""

import jax
import jax.numpy as jnp
from flax import linen as nn

from te_jax.flax._common import activation_axes, floating, in_compute_dtype, kernel_initializer, lora_scope
from te_jax.flax._fields import shared_fields
from te_jax.flax._state import describe
from te_jax.flax.dense import DenseGeneral
from te_jax.flax.norm import whole_norm
from te_jax.ops.activation import activation
from te_jax.sharding import (
    BATCH_AXES,
    HIDDEN_AXES,
    HIDDEN_TP_AXES,
    SEQLEN_AXES,
    W_FSDP_AXES,
    W_NO_SHARD_AXES,
    W_TP_AXES,
)
from te_jax.sharding import with_sharding_constraint_by_logical_axes as constrain


def check_layer_input(module: nn.Module, layer_input: jax.Array | None, inputs: jax.Array) -> jax.Array | None:
    """`layer_input` in the dtype of the computation; zeros in `init`, where there is none. inputs: [b, s, H].

    Raises TypeError where it is not floating, ValueError where there is one and none is due, or the other way round,
    and for another shape.
    """
    size = module.layer_input_size
    if layer_input is None and (size is None or module.is_initializing()):
        return None if size is None else jnp.zeros_like(inputs, shape=(*inputs.shape[:2], size))
    if size is None:
        raise ValueError(
            f"{describe(module)}: layer_input is given, but layer_input_size is None; set it to its width, or leave "
            "layer_input out."
        )
    if layer_input is None:
        raise ValueError(
            f"{describe(module)}: layer_input_size is {size}, but there is no layer_input; pass an array "
            f"{(*inputs.shape[:2], size)}."
        )
    layer_input = in_compute_dtype(module, floating(module, "layer_input", layer_input))
    due = (*inputs.shape[:2], size)
    if layer_input.shape != due:
        raise ValueError(f"{describe(module)}: layer_input has shape {layer_input.shape}; pass {due}.")
    return layer_input


def add_layer_input(module: nn.Module, x: jax.Array, layer_input: jax.Array) -> jax.Array:
    """x + norm(out(act(gate(x)) * layer_input)), x [b, s, H], layer_input [b, s, P]."""
    each = kernel_initializer(module.mlp_kernel_init)
    shared = shared_fields(module, DenseGeneral) | dict(use_bias=False, kernel_init=each)
    shared |= dict(enable_low_rank_adaptation=lora_scope(module)[2])
    into = dict(features=module.layer_input_size, kernel_axes=(W_FSDP_AXES, W_TP_AXES))
    out = dict(features=x.shape[-1], kernel_axes=(W_TP_AXES, W_FSDP_AXES), bias_axes=(W_NO_SHARD_AXES,))
    x_of_gemm = constrain(x, activation_axes(module, BATCH_AXES, SEQLEN_AXES, HIDDEN_AXES))
    gate = DenseGeneral(**shared | into, name="layer_input_gate")(x_of_gemm)
    gated = activation(gate[..., None, :], module.mlp_activations[:1], module.mlp_activation_params) * layer_input
    gated = constrain(gated, activation_axes(module, BATCH_AXES, SEQLEN_AXES, HIDDEN_TP_AXES))
    said = DenseGeneral(**shared | out, name="layer_input_out")(gated)
    return x + whole_norm(module, "post_layer_input_norm", module.layernorm_type, module.layernorm_epsilon)(said)
