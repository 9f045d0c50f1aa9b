"""Learned positions that are the same for all rows."""

import jax
import jax.numpy as jnp
import numpy as np

from te_jax import models

CONFIG = models.ModelConfig(
    vocab_size=8,
    hidden_size=16,
    num_layers=1,
    max_positions=8,
    layer=dict(num_attention_heads=2, mlp_hidden_size=16, self_attn_mask_type="causal"),
)
TOKENS = jnp.arange(12).reshape(3, 4) % 8


def test_positions_of_one_row_stand_for_all():
    model, positions = models.CausalLM(CONFIG), jnp.array([3, 2, 1, 0])
    variables = model.init(jax.random.key(0), TOKENS)
    want = model.apply(variables, TOKENS, positions=jnp.tile(positions, (3, 1)))
    for shared in (positions, positions[None]):
        np.testing.assert_array_equal(model.apply(variables, TOKENS, positions=shared), want)
