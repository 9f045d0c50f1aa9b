"""Which tokens of a packed row belong together."""

import math
from typing import Any

import jax
import jax.numpy as jnp


def runs_of(segments: jax.Array) -> jax.Array:
    """Segment ids [..., s] -> i32[..., s], the number of a token's run of equal ids, from 0: an id that comes again
    later is another segment."""
    changes = segments[..., 1:] != segments[..., :-1]
    changes = jnp.pad(changes, [(0, 0)] * (segments.ndim - 1) + [(1, 0)])[..., : segments.shape[-1]]
    return jnp.cumsum(changes, -1, dtype=jnp.int32)


def one_batch(a: Any, lead: int) -> Any:
    """[b..., ...] with one axis for its first `lead`. None stays."""
    return None if a is None else a.reshape(math.prod(a.shape[:lead]), *a.shape[lead:])


def runs_and_rows(lead: int, segments: jax.Array | None, *arrays: jax.Array | None) -> list[Any]:
    """The runs of segments, or None, and the arrays, all with one batch axis for the first `lead`."""
    runs = None if segments is None else runs_of(one_batch(segments, lead))
    return [runs, *(one_batch(a, lead) for a in arrays)]
