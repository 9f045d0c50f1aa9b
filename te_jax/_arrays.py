"""What an argument that is an array goes through first, and ranks said where they differ."""

import jax
import jax.numpy as jnp
import numpy as np


def as_jax(*args):
    """numpy arrays and scalars among `args` as jax takes them (float64 as float32, where jax_enable_x64 is off); all
    else as it is."""
    return tuple(jnp.asarray(a) if isinstance(a, np.ndarray | np.generic) else a for a in args)


def as_rank(x: jax.Array, ndim: int) -> jax.Array:
    """x with axes of size 1 in front, `ndim` in all. Programs under jax_numpy_rank_promotion="raise" want them said."""
    return jnp.expand_dims(x, tuple(range(ndim - x.ndim)))
