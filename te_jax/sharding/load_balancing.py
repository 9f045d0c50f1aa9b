"""The order of a sequence that balances causal attention over the devices of context parallelism."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from te_jax.core.check import ARRAY, Kind, check, integer


def reorder_causal_load_balancing(x: ArrayLike, cp_size: int, axis: int = 1) -> jax.Array:
    """x with its `axis` (the sequence) in the order that balances causal attention over cp_size devices.

    The sequence is cut into 2 cp_size chunks, and device r gets the chunks r and 2 cp_size - 1 - r: one that sees few
    keys and one that sees many (Grattafiori et al. 2024, https://arxiv.org/abs/2407.21783, section 3.3.2). Every array
    with one entry per token needs the same order: tokens, targets, loss weights, positions. A `SequenceDescriptor`
    stays as it is.

    x: A jax or numpy array; the result is one of the same kind. x is best reordered before it is sharded.

    Raises ValueError if 2 cp_size does not divide the axis.
    """
    chunks, axis = _chunks("reorder_causal_load_balancing", x, cp_size, axis)
    if cp_size == 1:
        return x
    xp = np if isinstance(x, np.ndarray) else jnp
    first, second = xp.split(chunks, 2, axis)
    return xp.stack([first, xp.flip(second, axis)], axis + 1).reshape(x.shape)


def inverse_reorder_causal_load_balancing(x: ArrayLike, cp_size: int, axis: int = 1) -> jax.Array:
    """x with its `axis` in the order of the sequence again: the inverse of `reorder_causal_load_balancing`."""
    chunks, axis = _chunks("inverse_reorder_causal_load_balancing", x, cp_size, axis)
    if cp_size == 1:
        return x
    xp = np if isinstance(x, np.ndarray) else jnp
    pairs = chunks.reshape(*x.shape[:axis], cp_size, 2, *chunks.shape[axis + 1 :])
    first, second = (xp.take(pairs, i, axis + 1) for i in (0, 1))
    return xp.concatenate([first, xp.flip(second, axis)], axis).reshape(x.shape)


def causal_load_balanced_positions(size: int, cp_size: int) -> np.ndarray:
    """i32[size]: the position of each token of a reordered sequence in the original one, as `positions` of RoPE."""
    check("causal_load_balanced_positions", "size", size, integer(1))
    return reorder_causal_load_balancing(np.arange(size, dtype=np.int32), cp_size, axis=0)


_DEVICES = Kind("how many devices share a sequence, at least 1", lambda size: True, integer(1).accepts)


def _chunks(name: str, x, cp_size: int, axis: int):
    """x with its `axis` cut into [2 cp_size, size of a chunk] ([1, size] for one device), and `axis` counted from the
    front. Raises the errors of the public functions, which begin with `name`."""
    check(name, "x", x, ARRAY)
    check(name, "cp_size", cp_size, _DEVICES)
    check(name, "axis", axis, integer())
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(f"{name}: axis is {axis}, but x has shape {tuple(x.shape)}; pass the sequence's axis.")
    axis, chunks = axis % x.ndim, 2 * cp_size if cp_size > 1 else 1
    if x.shape[axis] % chunks:
        raise ValueError(
            f"{name}: axis {axis} of x has {x.shape[axis]} positions, which {chunks} chunks (2 for each of "
            f"cp_size={cp_size} devices) do not divide; pad the sequence."
        )
    return x.reshape(*x.shape[:axis], chunks, x.shape[axis] // chunks, *x.shape[axis + 1 :]), axis
