"""What an argument that is an array goes through first, and ranks said where they differ."""

import jax
import jax.numpy as jnp
import numpy as np


def as_jax(*args):
    """numpy arrays and scalars among `args`, and what stands for an array (an `nnx.Param`), as jax takes them (float64
    as float32, where jax_enable_x64 is off); all else as it is."""
    stands_for = lambda a: isinstance(a, np.ndarray | np.generic) or hasattr(a, "__jax_array__")
    return tuple(jnp.asarray(a) if stands_for(a) else a for a in args)


def as_rank(x: jax.Array, ndim: int) -> jax.Array:
    """x with axes of size 1 in front, `ndim` in all. Programs under jax_numpy_rank_promotion="raise" want them said."""
    return jnp.expand_dims(x, tuple(range(ndim - x.ndim)))
