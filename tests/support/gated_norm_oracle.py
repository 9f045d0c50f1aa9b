"""The gated RMSNorm and its gradients in float64, and how far f32 may be from them."""

import jax.numpy as jnp
import numpy as np
from arrays import on_device

EPS = 1e-5  # of all norms here
# In units of 2**-24 of a number: x, its gate, u, rstd, gamma and the product round once each; silu and 1 / sqrt are
# good to 4 ulp each; the mean adds c squares, which rounds by at most c of the sum, and half as much of its root.
ROUNDINGS = 16
UNIT = 2.0**-24


def in_f64(x, z, gamma, before):
    """y and rstd."""
    x, z, gamma = (np.asarray(a, np.float64) for a in (x, z, gamma))
    gate = z * np.exp(-np.logaddexp(0.0, -z))
    u = x if before else x * gate
    rstd = 1 / np.sqrt(np.sum(u**2, -1) / max(x.shape[-1], 1) + EPS)
    with np.errstate(invalid="ignore"):  # 0 times inf
        y = u * rstd[..., None] * gamma
    return y * gate if before else y, rstd


def gradients_in_f64(x, z, gamma, dy, before):
    """dx, dz and dgamma, and the sums of the absolute values of their terms, which rounding errors are parts of."""
    x, z, gamma, dy = (np.asarray(a, np.float64) for a in (x, z, gamma, dy))
    rstd, s = in_f64(x, z, gamma, before)[1][..., None], np.exp(-np.logaddexp(0.0, -z))
    gate, mean = z * s, lambda a: np.sum(a, -1, keepdims=True) / max(x.shape[-1], 1)
    out = []
    for size in (lambda a: a, np.abs):
        minus = 1 if size is np.abs else -1
        dgate = s + size(z) * s * (1 - s)
        xhat = size((x if before else x * gate) * rstd)
        dv = size(dy * gate if before else dy)
        dxhat = dv * size(gamma)
        t = rstd * (dxhat + minus * xhat * mean(dxhat * xhat))
        if before:
            dx, dz = t, size(dy) * xhat * size(gamma) * dgate
        else:
            dx, dz = t * size(gate), t * size(x) * dgate
        out.append((dx, dz, np.sum(dv * xhat, tuple(range(x.ndim - 2)))))
    return out


def drawn(rng, rows, g, c, dtype, gamma_type=jnp.float32):
    shapes = (*rows, g, c), (*rows, g, c), (g, c), (*rows, g, c)
    types = dtype, dtype, gamma_type, dtype
    return [on_device(rng.standard_normal(shape) * 2, t) for shape, t in zip(shapes, types)]
