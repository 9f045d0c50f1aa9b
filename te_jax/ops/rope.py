"""Rotary position embeddings (Su et al. 2021, https://arxiv.org/abs/2104.09864)."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from te_jax._op import Op, align
from te_jax.ops.quantize import FLOATS

GROUP_METHODS = ("consecutive", "alternate")


def _reference(x, positions, *, turned, consecutive, inverse, w0, w1):
    d = x.shape[-1]
    period = w0 * (w1 / w0) ** (np.arange(0, d, 2) / d)
    angle = positions[..., None] / jnp.asarray(period, jnp.float32)  # [b..., s, d/2]
    cos, sin = (f(angle)[..., None, None, :] for f in (jnp.cos, jnp.sin))  # [b..., s, 1, 1, d/2]
    sin = -sin if inverse else sin
    x, rest = x[..., :turned, :, :], x[..., turned:, :, :]
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    pairs = wide.reshape(*x.shape[:-1], d // 2, 2) if consecutive else wide.reshape(*x.shape[:-1], 2, d // 2)
    axis = -1 if consecutive else -2
    x1, x2 = (jax.lax.index_in_dim(pairs, i, axis, keepdims=False) for i in (0, 1))
    y = jnp.stack([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis).reshape(x.shape).astype(x.dtype)
    return (jnp.concatenate([y, rest], -3) if rest.size else y,)


def _cuda(call, x, positions, **attrs):
    if x.dtype not in FLOATS:  # f64
        return _reference(x, positions, **attrs)
    return call(x, positions, **attrs)


rope_op = Op(
    "te_rope",
    "x: b... s n h d, positions: b... s -> y: b... s n h d",
    replicated="n d",
    dtypes=lambda x, positions, **attrs: (x,),
    reference=_reference,
    cuda=_cuda,
)
"""x of a floating type [b..., s, n, h, d], positions f32[b..., s] -> y of x's type: `rope`, with `inverse` its inverse.

turned: how many of the n slots are turned, the others are copied. consecutive: group_method is "consecutive", else
"alternate". w0, w1: float, the windows.
"""


def rope(
    x: jax.Array,
    positions: jax.Array | None = None,
    *,
    windows: tuple[float, float] = (1, 10000),
    group_method: str = "consecutive",
    turned: int | None = None,
) -> jax.Array:
    """Turns each pair of channels of x by an angle that grows with its position.

    x:            [b, s, h, d], d even, floating
    positions:    [b, s] or [s], in tokens; None is 0 .. s-1
    windows:      (w0, w1): pair i turns by positions / (w0 * (w1 / w0)**(2i / d)) radians
    group_method: "consecutive" pairs channels (2i, 2i + 1), "alternate" pairs (i, i + d/2)
    turned:       given, x is [b, s, n, h, d], as a joined projection gives queries, keys and values: the first
                  `turned` of its n slots are turned, the others copied

    Returns an array as x, computed in float32: (x1 cos - x2 sin, x2 cos + x1 sin). Differentiable in x.
    Raises ValueError for wrong shapes, windows or method, TypeError for a dtype that is not floating.
    """
    _check(x, positions, windows, group_method, turned)
    positions = jnp.arange(x.shape[1]) if positions is None else positions
    positions = jnp.broadcast_to(positions, x.shape[:2]).astype(jnp.float32)
    w0, w1 = map(float, windows)
    attrs = (("turned", turned or 1), ("consecutive", group_method == "consecutive"), ("w0", w0), ("w1", w1))
    slots = x if turned else x[:, :, None]
    return _rope(*align(slots, positions), attrs).reshape(x.shape)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _rope(x, positions, attrs):
    return rope_op(x, positions, inverse=False, **dict(attrs))[0]


def _rope_bwd(attrs, positions, dy):
    return rope_op(dy, positions, inverse=True, **dict(attrs))[0], None


_rope.defvjp(lambda x, positions, attrs: (_rope(x, positions, attrs), positions), _rope_bwd)


def _check(x, positions, windows, group_method, turned):
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"rope: x is {x.dtype}; pass a floating dtype.")
    if x.ndim != (4 if turned is None else 5) or x.shape[-1] % 2:
        axes = "[b, s, h, d]" if turned is None else "[b, s, n, h, d]"
        raise ValueError(f"rope: x has shape {x.shape}; pass {axes} with an even d.")
    if turned is not None and not 1 <= turned <= x.shape[2]:
        raise ValueError(f"rope: turned is {turned}; x of shape {x.shape} has 1 to {x.shape[2]} slots to turn.")
    if group_method not in GROUP_METHODS:
        raise ValueError(f"rope: group_method is {group_method!r}; pass one of {GROUP_METHODS}.")
    if len(windows) != 2 or not 0 < windows[0] < windows[1]:
        raise ValueError(f"rope: windows is {windows!r}; pass (w0, w1) with 0 < w0 < w1.")
    if positions is not None and positions.shape not in ((x.shape[1],), x.shape[:2], (1, x.shape[1])):
        raise ValueError(
            f"rope: positions has shape {positions.shape}, but x[b, s, h, d] has shape {x.shape}; pass [b, s] or [s]."
        )
