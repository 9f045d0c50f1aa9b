"""Which tokens of a packed row belong together."""

import jax
import jax.numpy as jnp


def runs_of(segments: jax.Array) -> jax.Array:
    """Segment ids [..., s] -> i32[..., s], the number of a token's run of equal ids, from 0: an id that comes again
    later is another segment."""
    changes = segments[..., 1:] != segments[..., :-1]
    changes = jnp.pad(changes, [(0, 0)] * (segments.ndim - 1) + [(1, 0)])[..., : segments.shape[-1]]
    return jnp.cumsum(changes, -1, dtype=jnp.int32)
