"""Rotary position embeddings (Su et al. 2021, https://arxiv.org/abs/2104.09864) in plain JAX."""

import jax
import jax.numpy as jnp
import numpy as np

GROUP_METHODS = ("consecutive", "alternate")


def rope(
    x: jax.Array,
    positions: jax.Array | None = None,
    *,
    windows: tuple[float, float] = (1, 10000),
    group_method: str = "consecutive",
) -> jax.Array:
    """Turns each pair of channels of x by an angle that grows with its position.

    x:            [b, s, h, d], d even, floating
    positions:    [b, s] or [s], in tokens; None is 0 .. s-1
    windows:      (w0, w1): pair i turns by positions / (w0 * (w1 / w0)**(2i / d)) radians
    group_method: "consecutive" pairs channels (2i, 2i + 1), "alternate" pairs (i, i + d/2)

    Returns [b, s, h, d] of x.dtype, computed in float32: (x1 cos - x2 sin, x2 cos + x1 sin).
    Raises ValueError for wrong shapes, windows or method, TypeError for a dtype that is not floating.
    """
    _check(x, positions, windows, group_method)
    d = x.shape[-1]
    if positions is None:
        positions = jnp.arange(x.shape[1])
    period = windows[0] * (windows[1] / windows[0]) ** (np.arange(0, d, 2) / d)
    angle = positions[..., None].astype(jnp.float32) / jnp.asarray(period, jnp.float32)  # [(b,) s, d/2]
    cos, sin = jnp.cos(angle)[..., None, :], jnp.sin(angle)[..., None, :]  # [(b,) s, 1, d/2]
    f32 = x.astype(jnp.float32)
    consecutive = group_method == "consecutive"
    pairs = f32.reshape(*x.shape[:-1], d // 2, 2) if consecutive else f32.reshape(*x.shape[:-1], 2, d // 2)
    axis = -1 if consecutive else -2
    x1, x2 = (jax.lax.index_in_dim(pairs, i, axis, keepdims=False) for i in (0, 1))
    turned = jnp.stack([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis)
    return turned.reshape(x.shape).astype(x.dtype)


def _check(x, positions, windows, group_method):
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"rope: x is {x.dtype}; pass a floating dtype.")
    if x.ndim != 4 or x.shape[-1] % 2:
        raise ValueError(f"rope: x has shape {x.shape}; pass [b, s, h, d] with an even d.")
    if group_method not in GROUP_METHODS:
        raise ValueError(f"rope: group_method is {group_method!r}; pass one of {GROUP_METHODS}.")
    if len(windows) != 2 or not 0 < windows[0] < windows[1]:
        raise ValueError(f"rope: windows is {windows!r}; pass (w0, w1) with 0 < w0 < w1.")
    if positions is not None and positions.shape not in ((x.shape[1],), x.shape[:2], (1, x.shape[1])):
        raise ValueError(
            f"rope: positions has shape {positions.shape}, but x[b, s, h, d] has shape {x.shape}; pass [b, s] or [s]."
        )
