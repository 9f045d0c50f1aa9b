"""What layers read of tokens besides the stream between them (per-layer embeddings, as in Gemma 3n and 4)."""

import jax
import jax.numpy as jnp

import te_jax.flax as te_flax
from te_jax.flax._common import parameter
from te_jax.models.stack import TABLE_INIT, Model, look_up
from te_jax.sharding import BATCH_AXES, HIDDEN_AXES, SEQLEN_AXES, W_FSDP_AXES, W_NO_SHARD_AXES, W_TP_AXES
from te_jax.sharding import with_sharding_constraint_by_logical_axes as constrain


def layer_inputs(model: Model, tokens: jax.Array, x: jax.Array) -> jax.Array | None:
    """tokens int[b, s], their embeddings x [b, s, H] -> [L, b, s, P] of the L layers, whose field `layer_input_size` is
    P; None where they have none.

    (norm(x . kernel / sqrt(H)) + sqrt(P) * table[tokens]) / sqrt(2), with the parameters `layer_input_table` [V, L P],
    `layer_input_projection/kernel` [H, L P] and `layer_input_norm/scale` [P].

    Raises ValueError for layers of different widths.
    """
    c = model.config
    widths = {c.fields_of_layer(index).get("layer_input_size") for index in range(c.num_layers)}
    if len(widths) > 1:
        raise ValueError(
            f"te_jax.models: layer_input_size is {' and '.join(map(str, sorted(widths, key=str)))} in layers of one "
            "model; set it in ModelConfig.layer."
        )
    if (size := widths.pop()) is None:
        return None
    axes = (W_TP_AXES, W_FSDP_AXES)
    table = parameter(model, "layer_input_table", TABLE_INIT, axes, (c.vocab_size, c.num_layers * size))
    said = look_up(model, table, tokens).astype(x.dtype) * jnp.asarray(size**0.5, x.dtype)
    dense = te_flax.DenseGeneral(
        c.num_layers * size,
        use_bias=False,
        kernel_axes=(W_FSDP_AXES, W_NO_SHARD_AXES),  # Layers would lie on several devices.
        **model.dtypes,
        name="layer_input_projection",
    )
    read = dense(x) * jnp.asarray(c.hidden_size**-0.5, x.dtype)
    by_layer = lambda a: a.reshape(*a.shape[:-1], c.num_layers, size)
    norm = te_flax.LayerNorm(**c.norm_fields(), **model.dtypes, name="layer_input_norm")
    both = (norm(by_layer(read)) + by_layer(said)) * jnp.asarray(0.5**0.5, x.dtype)
    return constrain(jnp.moveaxis(both, 2, 0), (None, BATCH_AXES, SEQLEN_AXES, HIDDEN_AXES))
