"""The gated RMSNorm of Mamba-2 (Dao, Gu 2024, https://arxiv.org/abs/2405.21060), forward, backward, and straight to FP8
in both layouts."""

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import jax
import jax.numpy as jnp

from te_jax.core.arrays import as_jax, as_rank
from te_jax.core.check import BOOL, check, number
from te_jax.core.derivatives import custom_vjp
from te_jax.core.op import Op
from te_jax.core.types import align, like
from te_jax.ops.producers import Producer, declare_all, on_its_gpu
from te_jax.ops.quantize.activation import silu
from te_jax.ops.quantize.array import FLOAT
from te_jax.ops.quantize.norm import MOST_CTAS, amax_places, row_groups, rstd_of, statistics_workspace
from te_jax.ops.source import Source


def _value_of_gated(x, z, gamma, rstd=None, *, eps, norm_before_gate):
    x, gate = x.astype(jnp.float32), silu(z.astype(jnp.float32))
    u = x if norm_before_gate else x * gate
    rstd = rstd_of(u, eps) if rstd is None else rstd
    v = u * rstd[..., None] * as_rank(gamma.astype(jnp.float32), u.ndim)
    return v * gate if norm_before_gate else v, dict(rstd=rstd)


def _check_one_type(op, x, z, *_, **attrs):
    if z != x:
        raise TypeError(f"{op}: x is {jnp.dtype(x).name}, but z {jnp.dtype(z).name}; cast one to the other's type.")


def _amax_partials_of_gated(x, *args, **attrs):
    return amax_places(prod(x[:-2]), prod(x[-2:]))


def _workspace_of_gated(x, z, gamma, rstd, *args, **attrs):
    return statistics_workspace(x) if rstd is None else 0


GATED_NORM = Producer(
    name="te_gated_norm{}_fwd",
    operands="x: {m} g c, z: {m} g c, gamma: g c",
    rows="...",
    columns="g c",
    value=_value_of_gated,
    split=lambda y, **_: (0, y.ndim - 2),
    tensor="y",
    again="known_rstd?: {m} g",
    more="rstd{may}: {m} g",
    inverse=True,
    check=_check_one_type,
    op=dict(replicated="c"),
    kernels={
        "": dict(fenced="y scale_inv", partials={"amax": _amax_partials_of_gated}, workspace=_workspace_of_gated),
        "_block": dict(workspace=statistics_workspace, cuda=on_its_gpu),
    },
)
gated_norm_fwd: Op
gated_norm_block_fwd: Op
gated_norm_fwd, gated_norm_block_fwd = declare_all(GATED_NORM)[:2]
"""x, z f32|bf16|f16 [..., g, c] of one type, gamma f32|bf16|f16 [g, c], known_rstd f32 [..., g], scale f32[] (with FP8
results) -> y [..., g, c] = x silu(z) rstd gamma, data, data_t [g, c, ...], .. as `te_jax.ops.producers` says, and

rstd   f32[..., g]: 1 / sqrt(mean((x silu(z))^2) + eps) over the c channels of a group

norm_before_gate: y = x rstd gamma silu(z), and rstd is of x. Blocks of data lie along c, so that the last one of each
group may be cut. known_rstd is the rstd of an earlier call, which this one then reads and has not among its results.
eps: float.
"""


class GatedNorm(NamedTuple):
    """The attributes of te_gated_norm_fwd, but for the FP8 type."""

    eps: float
    norm_before_gate: bool

    @property
    def of_backward(self) -> dict[str, bool]:
        """The attributes of te_gated_norm_bwd."""
        return dict(norm_before_gate=self.norm_before_gate)

    @property
    def statistics(self) -> tuple[str, ...]:
        """The results of te_gated_norm_fwd that te_gated_norm_bwd reads."""
        return ("rstd",)

    def source(self, x: jax.Array, z: jax.Array, gamma: jax.Array) -> Source:
        """The gated norm of x and z [..., g, c]."""
        return Source(GATED_NORM, self._asdict(), (x, z, gamma), x.ndim - 2)

    def backward(
        self,
        dy: jax.Array,
        x: jax.Array,
        statistics: Sequence[jax.Array],
        operands: tuple[jax.Array, jax.Array],
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        """(dx, (dz, dgamma)) from (rstd,) and operands (z, gamma)."""
        z, gamma = operands
        dx, *others = gated_norm_backward(dy, x, z, *statistics, gamma, **self.of_backward)
        return dx, tuple(others)


def _gated_bwd_reference(dy, x, z, rstd, gamma, *, norm_before_gate):
    dy, x32, z32 = (a.astype(jnp.float32) for a in (dy, x, z))
    gate, dgate = jax.jvp(silu, (z32,), (jnp.ones_like(z32),))
    factor = as_rank(gamma.astype(jnp.float32), x.ndim)
    xhat = (x32 if norm_before_gate else x32 * gate) * rstd[..., None]
    dv = dy * gate if norm_before_gate else dy
    dxhat = dv * factor
    dx = dxhat - xhat * jnp.mean(dxhat * xhat, -1, keepdims=True)
    if norm_before_gate:
        dx, dz = rstd[..., None] * dx, dy * (xhat * factor) * dgate
    else:  # rstd meets a factor of 1 / rstd first: with a huge gate both products with dx by themselves would be 0.
        dx, dz = dx * (rstd[..., None] * gate), dx * (rstd[..., None] * x32) * dgate
    dgamma = jnp.sum(dv * xhat, tuple(range(x.ndim - 2)))
    return dx.astype(x.dtype), dz.astype(z.dtype), dgamma.astype(gamma.dtype)


def _row_groups_of_gated(dy, *args, **attrs):
    """A CTA has one group of its rows."""
    return row_groups(prod(dy[:-2]), max(MOST_CTAS // max(dy[-2], 1), 1))


gated_norm_bwd: Op = Op(
    "te_gated_norm_bwd",
    "dy: ... g c, x: ... g c, z: ... g c, rstd: ... g, gamma: g c -> dx: ... g c, dz: ... g c, dgamma: g c",
    replicated="c",
    combine={"dgamma": "sum"},
    dtypes=lambda dy, x, z, rstd, gamma, **_: (x, z, gamma),
    reference=_gated_bwd_reference,
    partials={"dgamma": _row_groups_of_gated},
)
"""The backward pass of te_gated_norm_fwd: dx and dz of x's type, dgamma of gamma's type, summed in f32 over all
rows."""


def gated_norm(
    x: jax.Array,
    z: jax.Array,
    gamma: jax.Array,
    *,
    eps: float = 1e-6,
    norm_before_gate: bool = False,
    name: str = "te_gated_norm_fwd",
) -> jax.Array:
    """RMSNorm(x silu(z)) gamma over the last axis, computed in f32.

    x, z [..., g, c] of one type, gamma [g, c] -> [..., g, c] of x's type. eps: above 0. norm_before_gate: RMSNorm(x)
    gamma silu(z) instead. name: what errors call this norm. The backward pass keeps x, z and f32[..., g].
    Differentiable in x, z and gamma. Raises ValueError for sizes that do not match, TypeError for operands that are not
    f32, bf16 or f16, and for x and z of two types.
    """
    x, z, gamma = as_jax(x, z, gamma)
    for what, a in (("x", x), ("z", z), ("gamma", gamma)):
        check(name, what, a, FLOAT)
    check(name, "eps", eps, number(above=0))
    check(name, "norm_before_gate", norm_before_gate, BOOL)
    return _gated_in_groups(*align(x, z, gamma), GatedNorm(float(eps), bool(norm_before_gate)))


@custom_vjp(3)
def _gated_in_groups(x, z, gamma, norm):
    return _gated_in_groups_fwd(x, z, gamma, norm)[0]


def _gated_in_groups_fwd(x, z, gamma, norm):
    got = norm.source(x, z, gamma).run(("y", "rstd"), jnp.dtype(jnp.float8_e4m3fn))
    return got["y"], (x, z, got["rstd"], gamma)


def gated_norm_backward(
    dy: jax.Array, x: jax.Array, z: jax.Array, rstd: jax.Array, gamma: jax.Array, *, norm_before_gate: bool
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns dx, dz and dgamma, of the types of x, z and gamma."""
    dx, dz, dgamma = gated_norm_bwd(dy, x, z, rstd, gamma, norm_before_gate=norm_before_gate)
    return like(dx, x), like(dz, z), like(dgamma, gamma)


_gated_in_groups.defvjp(
    _gated_in_groups_fwd, lambda norm, residuals, dy: gated_norm_backward(dy, *residuals, **norm.of_backward)
)
