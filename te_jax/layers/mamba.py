"""Mamba-2 between its projections (Dao, Gu 2024, https://arxiv.org/abs/2405.21060): convolutions, scan, gated norm."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from te_jax.core.check import check
from te_jax.layers._sequence import (
    AutoAxes,
    SequenceCall,
    convolved,
    from_a_device_before,
    goes_on_from,
    inputs_before,
    on_each_device,
    real,
)
from te_jax.layers.gated_norm import gated_rmsnorm as gated_rmsnorm
from te_jax.ops.ssm import ssd
from te_jax.ops.ssm.runs import runs_of
from te_jax.ops.ssm.scan import LIMIT
from te_jax.ops.ssm.steps import step_sizes
from te_jax.sharding.constraints import split_over


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
    axis: str | None = None,
    name: str = "te_jax.layers.mamba2",
) -> Any:
    """gated_rmsnorm(ssd(silu(conv(x)), softplus(dt + dt_bias), .., silu(conv(B)), silu(conv(C))), z).

    x, z:     [b, s, h, p], dt [b, s, h], B, C [b, s, g, n], as the projections give them
    weights:  a MambaWeights
    dt_limit: bounds of softplus(dt + dt_bias)
    norm_groups, epsilon, norm_before_gate: of `gated_rmsnorm`
    segments: integers [b, s] or None: tokens know only of their run of equal numbers
    state:    the MambaState behind the tokens before these; None: there are none
    lengths:  integers [b] or None: tokens from there on are padding, of any values, and leave the state as it is
    return_state: whether the state behind the last token is wanted
    axis:     the mesh axis that cuts the sequence, in order; None: no axis does. Devices exchange the last inputs of
              convolutions, and the states behind their tokens

    Returns y [b, s, h, p] of x's type; with return_state also the MambaState behind the last token. Raises what
    `te_jax.ops.ssm.causal_conv1d`, `te_jax.ops.ssm.ssd` and `gated_rmsnorm` raise, and ValueError for lengths together
    with segments, for a state, lengths or return_state next to axis, for an axis that the mesh in force lacks or that
    shards something else, and for a sequence that the devices do not divide.
    """
    call = SequenceCall(name, segments, state, lengths, return_state, axis)
    y, z, last = before_gated_norm(x, B, C, dt, z, weights, dt_limit, call)
    options = dict(groups=norm_groups, epsilon=epsilon, norm_before_gate=norm_before_gate)
    y = gated_rmsnorm(y, z, weights.norm, **options, name=name)
    return (y, last) if return_state else y


def before_gated_norm(
    x: jax.Array,
    B: jax.Array,
    C: jax.Array,
    dt: jax.Array,
    z: jax.Array,
    weights: MambaWeights,
    dt_limit: Sequence[float],
    call: SequenceCall,
) -> tuple[jax.Array, jax.Array, MambaState | None]:
    """-> what the gated norm of `mamba2` reads, y [b, s, h, p] and z, 0 at padding; and the MambaState behind the last
    token, or None without return_state. Arguments and errors are as in `mamba2`."""
    call = call.checked(dict(x=x, B=B, C=C, dt=dt, z=z), weights, MambaWeights, MambaState)
    check(call.name, "dt_limit", dt_limit, LIMIT)
    limit, over = tuple(dt_limit), split_over(x, -2)
    if call.axis is None:
        x, B, C, dt, z = (real(a, call.lengths) for a in (x, B, C, dt, z))
        y, last = _conv_and_scan(x, B, C, dt, weights, call, limit, over)
        return y, z, last
    call.check_cut(x.shape[1], weights.x_kernel.shape[0])
    return _of_devices(call.axis, limit, over, x, B, C, dt, weights, call.segments), z, None


def _conv_and_scan(x, B, C, dt, weights, call: SequenceCall, limit, over):
    """-> y [b, s, h, p] before its norm, and the MambaState behind the tokens, or None unless it is wanted."""
    segments, lengths, wanted = call.segments, call.lengths, call.return_state
    *past, ssm = call.state or (None,) * 4
    (x, B, C), last = convolved((x, B, C), past, weights[:3], weights[3:6], segments, lengths, over, wanted)
    steps = dict(dt_bias=weights.dt_bias, dt_softplus=True, dt_limit=limit)
    if lengths is not None:  # A step of 0 moves no state, unless it meets an inf or NaN that overflow has made.
        x, B, C, dt = (real(a, lengths) for a in (x, B, C, _steps_of(dt, weights, limit)))
        steps = {}
    options = dict(segments=segments, initial_state=ssm, return_final_state=wanted)
    out = ssd(x, dt, _decay_rate(weights, x), B, C, weights.D, **steps, **options)
    return (out[0], MambaState(*last, out[1])) if wanted else (out, None)


def _steps_of(dt, weights, limit):
    """How far each token moves the state, f32[b, s, h]."""
    wide = jnp.promote_types(dt.dtype, jnp.float32)
    return step_sizes(dt, weights.dt_bias, softplus=True, least=limit[0], most=limit[1], wide=wide)


def _decay_rate(weights, x):
    return -jnp.exp(weights.A_log.astype(jnp.promote_types(x.dtype, jnp.float32)))


# -- a sequence that devices share --------------------------------------------------------------------------------


def _of_devices(axis, limit, over, x, B, C, dt, weights, segments):
    """y [b, s, h, p] before its norm. Each device scans its tokens from a state of zeros, and adds what those of the
    devices before have left to the tokens that see it."""
    place = AutoAxes.of(x, B, over)

    def shard(of_heads, of_groups, segments, weights):
        (x, dt), (B, C) = of_heads, of_groups
        runs, goes_on = None if segments is None else runs_of(segments), goes_on_from(segments, axis)
        before = inputs_before((x, B, C), weights.x_kernel.shape[0] - 1, segments, axis)
        split = ((), 1) if place.heads else over
        (x, B, C), _ = convolved((x, B, C), before, weights[:3], weights[3:6], segments, None, split, False)
        B, C = map(place.own_groups, (B, C))
        rate, steps = _decay_rate(weights, x), dict(dt_bias=weights.dt_bias, dt_softplus=True, dt_limit=limit)
        y, state = ssd(x, dt, rate, B, C, weights.D, **steps, segments=segments, return_final_state=True)
        logs = jnp.cumsum(_steps_of(dt, weights, limit) * rate, 1)
        first = None if runs is None else runs[..., None] == 0
        since = jnp.exp(logs if first is None else jnp.where(first, logs, -jnp.inf))
        return _add_state(y, C, _behind_others(state, since[:, -1], goes_on, axis), since, first)

    def specs(heads, groups):
        taps = [PartitionSpec(None, *each) for each in (heads, groups, groups)]
        return MambaWeights(*taps, heads, groups, groups, *(heads,) * 4)

    return on_each_device(shard, axis, place, (x, dt), (B, C), segments, weights, specs)


def _add_state(y, C, state, since, sees):
    """y [b, s, h, p], and what a state f32[b, h, p, n] before the tokens adds to those that see it, bool[b, s, 1], or
    all. since: f32[b, s, h], what is left of the state."""
    precision = None if y.dtype in (jnp.bfloat16, jnp.float16) else jax.lax.Precision.HIGHEST
    only = lambda a: a if sees is None else jnp.where(sees[..., None], a, 0)  # A state of NaN reaches nothing else.

    @jax.checkpoint  # The backward pass multiplies again: the product, in f32, would be kept for the gradient of since.
    def added(C, state, since):
        state = state.reshape(state.shape[0], C.shape[2], -1, *state.shape[2:])
        product = jnp.einsum("bsgn,bgrpn->bsgrp", only(C).astype(state.dtype), state, precision=precision)
        return only(product.reshape(y.shape) * since[..., None])

    return (y.astype(state.dtype) + added(C, state, since)).astype(y.dtype)


def _behind_others(state, kept, goes_on, axis):
    """The state that this device's first token finds: state f32[b, h, p, n] is behind the tokens of each device, which
    begins with 0, and kept f32[b, h] what they leave of a state before them. A scan by doubling."""
    kept, step = jnp.where(goes_on[:, None], kept, 0), 1
    while step < jax.lax.axis_size(axis):
        before, left = (from_a_device_before(a, axis, step) for a in (state, kept))
        reaches = jnp.where(kept[..., None, None] == 0, 0, before * kept[..., None, None])  # not NaN: 0 times an inf
        state, kept, step = reaches + state, left * kept, 2 * step
    return jnp.where(goes_on[:, None, None, None], from_a_device_before(state, axis), 0)
