"""LayerNorm (Ba et al. 2016, https://arxiv.org/abs/1607.06450) and RMSNorm (Zhang & Sennrich 2019,
https://arxiv.org/abs/1910.07467), forward, backward, and straight to FP8 in both layouts."""

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import max_dim, min_dim

from te_jax.core.arrays import as_jax, as_rank
from te_jax.core.check import BOOL, check, number, one_of
from te_jax.core.derivatives import custom_vjp
from te_jax.core.op import Op
from te_jax.core.types import align, like
from te_jax.ops.formats import ceil_div
from te_jax.ops.producers import Producer, declare_all, on_its_gpu, tiles
from te_jax.ops.quantize.array import FLOAT
from te_jax.ops.source import Source

KINDS = ("layernorm", "rmsnorm")
# csrc/norm/norm_bwd.cu: one CTA on each multiprocessor of an H200, with a partial sum.
_ROWS_PER_CTA, MOST_CTAS = 8, 132


def _factor(gamma, zero_centered, ndim):
    """f32 [..., h] of gamma [h], to multiply an array of `ndim` axes by."""
    return as_rank(gamma.astype(jnp.float32) + (1.0 if zero_centered else 0.0), ndim)


_FAR = 2.0**-96  # The factor of numbers whose squares have no f32: csrc/norm/norm.cuh.


def rstd_of(centered: jax.Array, eps: float) -> jax.Array:
    """1 / sqrt(mean(centered**2) + eps) over the last axis. Where a square is inf in f32, centered is taken times
    2**-96, and eps counts for nothing."""
    mean_square = lambda x: jnp.mean(jnp.square(x), -1)
    is_far = jnp.isinf(mean_square(centered))
    factor = jnp.where(is_far, _FAR, 1.0)  # Chosen first: the branch that is not taken would have NaN for a derivative.
    return jax.lax.rsqrt(mean_square(centered * factor[..., None]) + jnp.where(is_far, 0.0, eps)) * factor


def _normed(x, gamma, beta, mean=None, rstd=None, *, eps, rms, zero_centered):
    x32, g = x.astype(jnp.float32), _factor(gamma, zero_centered, x.ndim)
    if mean is None:
        mean = jnp.zeros(x.shape[:-1]) if rms else jnp.mean(x32, -1)
    centered = x32 - mean[..., None]
    rstd = rstd_of(centered, eps) if rstd is None else rstd
    y = centered * rstd[..., None] * g
    y = y if beta is None else y + as_rank(beta.astype(jnp.float32), y.ndim)
    return y, dict(mean=mean, rstd=rstd)


def _check_known(op, x, gamma, beta, mean=None, rstd=None, *_, rms, **attrs):
    if (rstd is None and mean is not None) or (rstd is not None and rms != (mean is None)):
        raise ValueError(
            f"{op}: known_mean and known_rstd go together, and RMSNorm has only known_rstd; pass those that an "
            "earlier call returned."
        )


def amax_places(rows: Any, columns: Any) -> tuple[Any, Any]:
    """csrc/base/partials.h: one for a tile of data_t, and one for four rows at least."""
    chunks, strips = tiles(rows, columns)
    return chunks, max(strips, 64)


def _amax_partials(x, *args, **attrs):
    return amax_places(prod(x[:-1]), x[-1])


def statistics_workspace(x: Any, *args: Any, **attrs: Any) -> int:
    """Bytes: mean and rstd of a norm, as CTAs hand them to others (csrc/norm/norm_tiles.cuh)."""
    return 8 * prod(x.shape[:-1])


def _workspace(x, gamma, beta, mean, rstd, *args, outputs, **attrs):
    return statistics_workspace(x) if "data_t" in outputs and rstd is None else 0


NORM = Producer(
    name="te_norm{}_fwd",
    operands="x: {m} h, gamma: h, beta?: h",
    rows="...",
    columns="h",
    value=_normed,
    split=lambda y, **_: (0, y.ndim - 1),
    tensor="y",
    again="known_mean?: {m}, known_rstd?: {m}",
    more="mean?: {m}, rstd{may}: {m}",
    inverse=True,
    check=_check_known,
    op=dict(replicated="h"),
    kernels={
        "": dict(fenced="y scale_inv", partials={"amax": _amax_partials}, workspace=_workspace),
        "_block": dict(workspace=statistics_workspace, cuda=on_its_gpu),
    },
)
norm_fwd: Op
norm_block_fwd: Op
norm_fwd, norm_block_fwd = declare_all(NORM)[:2]
"""x f32|bf16|f16 [..., h], gamma and beta f32|bf16|f16 [h], known_mean (LayerNorm) and known_rstd f32 [...], scale
f32[] (with FP8 results) -> y [..., h] = (x - mean) * rstd * gamma + beta, data, data_t, .. as `te_jax.ops.producers`
says, and

mean   f32[...] (LayerNorm), rstd f32[...]: 1 / sqrt(var + eps)

known_mean and known_rstd are the mean and rstd of an earlier call, which this one then reads and has not among its
results. eps: float. rms: RMSNorm. zero_centered: gamma + 1 is applied.
"""


class Norm(NamedTuple):
    """The attributes of te_norm_fwd, but for the FP8 type."""

    eps: float
    rms: bool
    zero_centered: bool

    @classmethod
    def of(cls, kind: str, zero_centered: bool, eps: float) -> "Norm":
        """From arguments that `check_norm` accepts."""
        return cls(float(eps), kind == "rmsnorm", bool(zero_centered))

    @property
    def statistics(self) -> tuple[str, ...]:
        """The results of te_norm_fwd that te_norm_bwd reads."""
        return ("rstd",) if self.rms else ("mean", "rstd")

    @property
    def of_backward(self) -> dict[str, bool]:
        """The attributes of te_norm_bwd."""
        return dict(rms=self.rms, zero_centered=self.zero_centered)

    def source(self, x: jax.Array, gamma: jax.Array, beta: jax.Array | None) -> Source:
        """norm(x) [..., h]."""
        return Source(NORM, self._asdict(), (x, gamma, beta), x.ndim - 1)

    def backward(
        self,
        dy: jax.Array,
        x: jax.Array,
        statistics: Sequence[jax.Array],
        operands: tuple[jax.Array, jax.Array | None],
        dres: jax.Array | None = None,
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array | None]]:
        """(dx, (dgamma, dbeta)) from `statistics` as the property names them and operands (gamma, beta); dres as in
        `norm_backward`."""
        mean, rstd = (None, *statistics)[-2:]
        dx, *others = norm_backward(dy, x, mean, rstd, *operands, dres=dres, **self.of_backward)
        return dx, tuple(others)


def _bwd_reference(dy, x, mean, rstd, gamma, dres, *, rms, zero_centered):
    dy32, g = dy.astype(jnp.float32), _factor(gamma, zero_centered, x.ndim)
    centered = x.astype(jnp.float32) - (0.0 if rms else mean[..., None])
    xhat = centered * rstd[..., None]
    dxhat = dy32 * g
    dx = dxhat - xhat * jnp.mean(dxhat * xhat, -1, keepdims=True)
    dx = dx if rms else dx - jnp.mean(dxhat, -1, keepdims=True)
    rows = tuple(range(x.ndim - 1))
    dx = rstd[..., None] * dx
    dx = (dx if dres is None else dx + dres.astype(jnp.float32)).astype(x.dtype)
    return dx, jnp.sum(dy32 * xhat, rows).astype(gamma.dtype), jnp.sum(dy32, rows).astype(gamma.dtype)


def row_groups(rows: Any, most: int = MOST_CTAS) -> tuple[Any]:
    """Partial sums over rows: one for each CTA of a backward kernel that has a column, at most `most`."""
    return (max_dim(1, min_dim(ceil_div(rows, _ROWS_PER_CTA), most)),)


def _row_groups_of_norm(dy, *args, **attrs):
    return row_groups(prod(dy[:-1]))


norm_bwd: Op = Op(
    "te_norm_bwd",
    "dy: ... h, x: ... h, mean?: ..., rstd: ..., gamma: h, dres?: ... h -> dx: ... h, dgamma: h, dbeta?: h",
    replicated="h",
    combine={"dgamma": "sum", "dbeta": "sum"},
    dtypes=lambda dy, x, mean, rstd, gamma, dres, **_: (x, gamma, gamma),
    partials={"dgamma": _row_groups_of_norm, "dbeta": _row_groups_of_norm},
    reference=_bwd_reference,
)
"""The backward pass of te_norm_fwd: dx of x's type, dgamma and dbeta of gamma's type, summed in f32 over all rows.

dres [..., h] of x's type: the gradient that reaches x by the residual connection around the norm, added to dx in f32
before its one rounding.
"""


def check_norm_options(op: str, kind: str, epsilon: float, zero_centered: bool) -> None:
    """Raises ValueError or TypeError, naming `op`, for options of no norm."""
    check(op, "norm", kind, one_of(*KINDS))
    check(op, "epsilon", epsilon, number(above=0))
    check(op, "zero_centered_gamma", zero_centered, BOOL)


def check_norm(
    op: str, x: jax.Array, gamma: jax.Array, beta: jax.Array | None, kind: str, epsilon: float, zero_centered: bool
) -> None:
    """Raises ValueError or TypeError, naming `op`, where the arguments make no norm."""
    check_norm_options(op, kind, epsilon, zero_centered)
    if kind == "rmsnorm" and beta is not None:
        raise ValueError(f"{op}: RMSNorm has no beta; pass beta=None or norm='layernorm'.")
    for name, a in (("x", x), ("gamma", gamma), ("beta", beta)):
        if a is not None or name != "beta":
            check(op, name, a, FLOAT)


def norm(
    x: jax.Array,
    gamma: jax.Array,
    beta: jax.Array | None = None,
    *,
    kind: str = "layernorm",
    zero_centered: bool = False,
    eps: float = 1e-6,
    name: str = "te_norm_fwd",
) -> jax.Array:
    """LayerNorm or RMSNorm over the last axis, statistics in f32.

    x [..., h], gamma [h], beta [h] or None -> [..., h] of x's type. zero_centered: gamma + 1 is applied.
    kind: "layernorm" or "rmsnorm" (without beta). eps: above 0. name: what errors call this norm. Differentiable in x,
    gamma and beta. Raises ValueError for an unknown kind or sizes that do not match, TypeError for operands that are
    not floating point.
    """
    x, gamma, beta = as_jax(x, gamma, beta)
    check_norm(name, x, gamma, beta, kind, eps, zero_centered)
    return _norm(*align(x, gamma, beta), Norm.of(kind, zero_centered, eps))


@custom_vjp(3)
def _norm(x, gamma, beta, norm):
    return _norm_fwd(x, gamma, beta, norm)[0]


def _norm_fwd(x, gamma, beta, norm):
    got = norm.source(x, gamma, beta).run(("y", *norm.statistics), jnp.dtype(jnp.float8_e4m3fn))
    return got["y"], (x, got.get("mean"), got["rstd"], gamma, beta)


def norm_backward(
    dy: jax.Array,
    x: jax.Array,
    mean: jax.Array | None,
    rstd: jax.Array,
    gamma: jax.Array,
    beta: jax.Array | None,
    *,
    rms: bool,
    zero_centered: bool,
    dres: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Returns dx, dgamma and dbeta (None without beta), of the types of x, gamma and beta.

    dres [..., h]: the gradient of x by another way, a residual connection; dx is the sum of both, rounded once.
    """
    outputs = ("dx", "dgamma") if beta is None else ("dx", "dgamma", "dbeta")
    attrs = dict(rms=rms, zero_centered=zero_centered)
    dx, dgamma, *dbeta = norm_bwd(dy, x, mean, rstd, gamma, dres, outputs=outputs, **attrs)
    return like(dx, x), like(dgamma, gamma), like(dbeta[0], beta) if dbeta else None


_norm.defvjp(_norm_fwd, lambda norm, residuals, dy: norm_backward(dy, *residuals, **norm.of_backward))


def norm_and_input(
    x: jax.Array,
    gamma: jax.Array,
    beta: jax.Array | None = None,
    *,
    kind: str = "layernorm",
    zero_centered: bool = False,
    eps: float = 1e-6,
    name: str = "te_norm_fwd",
) -> tuple[jax.Array, jax.Array]:
    """(`norm`, x itself) for a residual connection: what comes back through x is added in the backward kernel."""
    x, gamma, beta = as_jax(x, gamma, beta)
    check_norm(name, x, gamma, beta, kind, eps, zero_centered)
    return _norm_and_input(*align(x, gamma, beta), Norm.of(kind, zero_centered, eps))


@custom_vjp(3)
def _norm_and_input(x, gamma, beta, norm):
    return _norm_fwd(x, gamma, beta, norm)[0], x


def _and_input_fwd(x, gamma, beta, norm):
    y, residuals = _norm_fwd(x, gamma, beta, norm)
    return (y, x), residuals


def _and_input_bwd(norm, residuals, cotangents):
    dy, dres = cotangents
    return norm_backward(dy, *residuals, dres=dres, **norm.of_backward)


_norm_and_input.defvjp(_and_input_fwd, _and_input_bwd)
