"""Conversions of array arguments to jax arrays and to a rank."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def as_jax(*args: Any) -> Any:
    """`args` with numpy arrays and scalars, and objects that stand for an array (`nnx.Param`), as jax arrays.

    float64 becomes float32 where jax_enable_x64 is off. Other arguments are returned as they are.
    """
    stands_for = lambda a: isinstance(a, np.ndarray | np.generic) or hasattr(a, "__jax_array__")
    return tuple(jnp.asarray(a) if stands_for(a) else a for a in args)


def known_values(array: Any) -> np.ndarray | None:
    """An array of integers as i64 of numpy, or None: of a tracer, or of what other processes hold, nothing is known."""
    if isinstance(array, jax.core.Tracer) or not isinstance(array, np.ndarray | np.generic | jax.Array):
        return None
    return np.asarray(array).astype(np.int64) if getattr(array, "is_fully_addressable", True) else None


def as_rank(x: jax.Array, ndim: int) -> jax.Array:
    """x with `ndim` axes, the new ones of size 1 in front: needed under jax_numpy_rank_promotion="raise"."""
    return jnp.expand_dims(x, tuple(range(ndim - x.ndim)))


def arrays_apart(args: Any, kwargs: Any) -> tuple[Callable[..., Any], list[Any]]:
    """(function, arrays) -> the call of these arguments; and the arrays among them, or their types. Others stay."""
    leaves, tree = jax.tree.flatten((args, kwargs))
    places = [i for i, leaf in enumerate(leaves) if hasattr(leaf, "shape") and hasattr(leaf, "dtype")]

    def call(function, arrays):
        whole = list(leaves)
        for place, array in zip(places, arrays):
            whole[place] = array
        args, kwargs = jax.tree.unflatten(tree, whole)
        return function(*args, **kwargs)

    return call, [leaves[i] for i in places]


def bytes_text(count: int) -> str:
    """As "512 B", "1.5 KiB", "19.7 MiB"."""
    if count < 1024:
        return f"{count} B"
    power = min(int(math.log2(count)) // 10, 4)
    return f"{count / 1024**power:.1f} {('KiB', 'MiB', 'GiB', 'TiB')[power - 1]}"
