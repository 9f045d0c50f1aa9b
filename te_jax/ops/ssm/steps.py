"""How far each token moves the state of a scan."""

from typing import Any

import jax
import jax.numpy as jnp

from te_jax.core.arrays import as_rank


def step_sizes(
    dt: jax.Array, bias: jax.Array | None, *, softplus: bool, least: float, most: float, wide: Any
) -> jax.Array:
    """How far each token moves the state, f32[b, s, h]. A step that is at a bound has the gradient of one within, which
    jnp.clip would halve."""
    dt = dt.astype(wide)
    dt = dt if bias is None else dt + as_rank(bias.astype(wide), dt.ndim)
    dt = jax.nn.softplus(dt) if softplus else dt
    return jnp.where(dt < least, least, jnp.where(dt > most, most, dt))
