"""ALiBi, attention with linear biases (Press et al. 2022, https://arxiv.org/abs/2108.12409)."""

import jax
import jax.numpy as jnp
import numpy as np

from te_jax.core.arrays import as_rank
from te_jax.core.check import check, integer


def alibi_slopes(num_heads: int) -> jax.Array:
    """f32[h]: each head's slope, the steepest first for h a power of two.

    These are then 2**(-8/h), 2**(-16/h), ... 2**-8 (section 3 of the paper). Another h has the slopes of p heads, the
    power of two below it, then every second one of 2p heads (https://github.com/ofirpress/attention_with_linear_biases).

    Raises ValueError for a number of heads that is not a positive int.
    """
    check("alibi_slopes", "num_heads", num_heads, integer(1))
    p = 1 << (int(num_heads).bit_length() - 1)
    exponents = np.concatenate([np.arange(1, p + 1) / p, np.arange(1, 2 * p, 2) / (2 * p)])[:num_heads]
    return jnp.asarray(2.0 ** (-8 * exponents), jnp.float32)


def alibi_bias(
    slopes: jax.Array, s: int, t: int, *, bottom_right: bool = False, q_offset: int | jax.Array | None = None
) -> jax.Array:
    """f32[h, s, t]: -slope * |query position - key position|, a bias of scaled logits. Differentiable in slopes.

    slopes:       [h], floating
    s, t:         queries and keys; key j is at position j
    bottom_right: the last query is at the last key's position; else the first at the first's
    q_offset:     instead: the first query's position, an int or i32[], or i32[b], one for each row, for f32[b, h, s, t]

    Raises ValueError for wrong shapes and sizes and for both bottom_right and q_offset, TypeError for wrong dtypes.
    """
    slopes = jnp.asarray(slopes)
    if slopes.ndim != 1:
        raise ValueError(f"alibi_bias: slopes has shape {slopes.shape}; pass [h].")
    if not jnp.issubdtype(slopes.dtype, jnp.floating):
        raise TypeError(f"alibi_bias: slopes is {slopes.dtype}; pass a floating dtype.")
    for name, length in (("s", s), ("t", t)):
        check("alibi_bias", name, length, integer(0))
    if bottom_right and q_offset is not None:
        raise ValueError(f"alibi_bias: bottom_right is True and q_offset is {q_offset}; pass one of them.")
    first = jnp.asarray((t - s if bottom_right else 0) if q_offset is None else q_offset)
    if first.ndim > 1:
        raise ValueError(f"alibi_bias: q_offset has shape {first.shape}; pass an int, [] or [b].")
    if not jnp.issubdtype(first.dtype, jnp.integer):
        raise TypeError(f"alibi_bias: q_offset is {first.dtype}; pass an integer dtype.")
    place = jnp.arange(s)[:, None] - jnp.arange(t)[None]
    distance = jnp.abs(first[..., None, None] + as_rank(place, first.ndim + 2))  # [s, t] or [b, s, t]
    each = as_rank(slopes.astype(jnp.float32)[:, None, None], first.ndim + 3)
    return -each * distance[..., None, :, :].astype(jnp.float32)
