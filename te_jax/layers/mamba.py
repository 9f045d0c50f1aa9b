"""Mamba-2 between its projections (Dao, Gu 2024, https://arxiv.org/abs/2405.21060): convolutions, scan, gated norm."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike

from te_jax.core.arrays import as_jax, as_rank
from te_jax.core.check import BOOL, FLOATS_ARRAY, INTEGERS, NONE, check, integer, number
from te_jax.core.derivatives import custom_vjp
from te_jax.core.types import align, like, on_explicit_mesh
from te_jax.ops.ssm import causal_conv1d, ssd


def _gated(x, z, gamma, groups, epsilon, norm_before_gate):
    wide = jnp.promote_types(x.dtype, jnp.float32)
    gate = jax.nn.silu(z.astype(wide))
    x = x.astype(wide) if norm_before_gate else x.astype(wide) * gate
    of_heads = jnp.mean(jnp.square(x), -1)
    if on_explicit_mesh(aval := jax.typeof(of_heads)):  # Devices that share a group's heads exchange these numbers.
        of_heads = jax.sharding.reshard(of_heads, PartitionSpec(*aval.sharding.spec[:-1], None))
    mean_square = jnp.mean(of_heads.reshape(*of_heads.shape[:-1], groups, -1), -1)
    rstd = jnp.repeat(jax.lax.rsqrt(mean_square + epsilon), x.shape[-2] // groups, -1)
    normed = x * rstd[..., None] * as_rank(gamma.astype(wide).reshape(x.shape[-2:]), x.ndim)
    return normed * gate if norm_before_gate else normed


@custom_vjp(3)
def _gated_norm(x, z, gamma, static):
    return _gated(x, z, gamma, *static).astype(x.dtype)


def _gated_norm_bwd(static, residuals, dy):
    _, pull = jax.vjp(lambda *args: _gated(*args, *static).astype(dy.dtype), *residuals)
    return tuple(map(like, pull(dy), residuals))


_gated_norm.defvjp(lambda x, z, gamma, static: (_gated_norm(x, z, gamma, static), (x, z, gamma)), _gated_norm_bwd)


def gated_rmsnorm(
    x: ArrayLike,
    z: ArrayLike,
    gamma: ArrayLike,
    *,
    groups: int = 1,
    epsilon: float = 1e-6,
    norm_before_gate: bool = False,
    name: str = "te_jax.layers.gated_rmsnorm",
) -> jax.Array:
    """RMSNorm(x silu(z)) gamma over all channels of h heads, as Mamba-2 has it in front of its output projection.

    x, z:   [..., h, p], floating
    gamma:  [h*p]
    groups: a divisor of h: each group of h / groups heads has a norm of its own
    epsilon: above 0, added to the mean square
    norm_before_gate: RMSNorm(x) gamma silu(z) instead

    Returns an array as x, computed in f32; the backward pass keeps x and z. Differentiable in x, z and gamma. Raises
    ValueError for sizes that do not match, TypeError for operands that are not floating.
    """
    x, z, gamma = as_jax(x, z, gamma)
    for what, a in (("x", x), ("z", z), ("gamma", gamma)):
        check(name, what, a, FLOATS_ARRAY)
    if x.ndim < 2 or z.shape != x.shape or gamma.shape != (math.prod(x.shape[-2:]),):
        raise ValueError(
            f"{name}: x has shape {x.shape}, z {z.shape}, gamma {gamma.shape}; pass [..., h, p] twice, and [h*p]."
        )
    check(name, "groups", groups, integer(1))
    if x.shape[-2] % groups:
        raise ValueError(f"{name}: groups is {groups}, which does not divide the {x.shape[-2]} heads of x.")
    check(name, "epsilon", epsilon, number(above=0))
    check(name, "norm_before_gate", norm_before_gate, BOOL)
    return _gated_norm(*align(x, z, gamma), (int(groups), float(epsilon), bool(norm_before_gate)))


class MambaState(NamedTuple):
    """What a Mamba-2 layer knows of past tokens: the last w-1 inputs of its convolutions, and the state of its scan."""

    x: jax.Array  # [b, w-1, h*p], as are the others in the inputs' type
    B: jax.Array  # [b, w-1, g*n]
    C: jax.Array  # [b, w-1, g*n]
    ssm: jax.Array  # f32[b, h, p, n]


class MambaWeights(NamedTuple):
    """The parameters of a Mamba-2 layer but for its projections. Kernels are [w, channels], biases [channels]."""

    x_kernel: jax.Array
    B_kernel: jax.Array
    C_kernel: jax.Array
    x_bias: jax.Array | None
    B_bias: jax.Array | None
    C_bias: jax.Array | None
    A_log: jax.Array  # [h], A = -exp(A_log)
    D: jax.Array  # [h]
    dt_bias: jax.Array  # [h]
    norm: jax.Array  # [h*p]


def mamba2(
    x: jax.Array,
    B: jax.Array,
    C: jax.Array,
    dt: jax.Array,
    z: jax.Array,
    weights: MambaWeights,
    *,
    dt_limit: Sequence[float] = (0.0, math.inf),
    norm_groups: int = 1,
    epsilon: float = 1e-6,
    norm_before_gate: bool = False,
    segments: jax.Array | None = None,
    state: MambaState | None = None,
    lengths: jax.Array | None = None,
    return_state: bool = False,
    name: str = "te_jax.layers.mamba2",
) -> Any:
    """gated_rmsnorm(ssd(silu(conv(x)), softplus(dt + dt_bias), .., silu(conv(B)), silu(conv(C))), z).

    x, z:     [b, s, h, p], dt [b, s, h], B, C [b, s, g, n], as the projections give them
    weights:  a MambaWeights
    dt_limit: bounds of softplus(dt + dt_bias)
    norm_groups, epsilon, norm_before_gate: of `gated_rmsnorm`
    segments: integers [b, s] or None: tokens know only of their run of equal numbers
    state:    the MambaState behind the tokens before these; None: there are none
    lengths:  integers [b] or None: tokens from there on are padding, and leave the state as it is

    Returns y [b, s, h, p] of x's type; with return_state also the MambaState behind the last token. Raises what
    `te_jax.ops.ssm.causal_conv1d`, `te_jax.ops.ssm.ssd` and `gated_rmsnorm` raise, and ValueError for lengths together
    with segments.
    """
    check(name, "return_state", return_state, BOOL)
    check(name, "lengths", lengths, INTEGERS | NONE)
    if lengths is not None and segments is not None:
        raise ValueError(f"{name}: lengths and segments are both given; a row of segments is full: pass one of them.")
    past = state or (None,) * 4
    given = zip((x, B, C), past, weights[:3], weights[3:6])
    conv = partial(_conv_of_heads, segments=segments, lengths=lengths, wanted=return_state)
    (x, x_last), (B, B_last), (C, C_last) = (conv(*each) for each in given)
    limit = tuple(dt_limit)
    steps = dict(dt_bias=weights.dt_bias, dt_softplus=True, dt_limit=limit)
    if lengths is not None:  # A step of 0 moves no state.
        wide = jnp.promote_types(dt.dtype, jnp.float32)
        dt = jax.nn.softplus(dt.astype(wide) + as_rank(weights.dt_bias.astype(wide), dt.ndim))
        dt, steps = jnp.where(_is_real(dt.shape[1], lengths)[..., None], jnp.clip(dt, *limit), 0), {}
    A = -jnp.exp(weights.A_log.astype(jnp.promote_types(x.dtype, jnp.float32)))
    out = ssd(
        x, dt, A, B, C, weights.D, **steps, segments=segments, initial_state=past[3], return_final_state=return_state
    )
    y, last = out if return_state else (out, None)
    options = dict(groups=norm_groups, epsilon=epsilon, norm_before_gate=norm_before_gate)
    y = gated_rmsnorm(y, z, weights.norm, **options, name=name)
    return (y, MambaState(x_last, B_last, C_last, last)) if return_state else y


def _is_real(s, lengths):
    """bool[b, s]: tokens that are no padding."""
    return jnp.arange(s) < lengths[:, None]


def _conv_of_heads(a, past, kernel, bias, *, segments, lengths, wanted):
    """silu(conv(a)) of a [b, s, heads, d], and the last inputs [b, w-1, heads*d], or None unless they are wanted."""
    channels = a.reshape(*a.shape[:2], -1)
    own = lengths is not None and wanted
    options = dict(activation="silu", segments=segments, initial_state=past, return_final_state=wanted and not own)
    out = causal_conv1d(channels, kernel, bias, **options)
    y, last = out if wanted and not own else (out, None)
    if own:
        width = kernel.shape[0] - 1
        before = jnp.zeros((a.shape[0], width, channels.shape[-1]), a.dtype) if past is None else past
        tokens = jnp.concatenate([before.astype(a.dtype), channels], 1)
        at = jnp.clip(lengths, 0, a.shape[1])[:, None] + jnp.arange(width)
        last = jnp.take_along_axis(tokens, at[..., None], 1)
    return y.reshape(a.shape), last
