"""Mamba-2 between its projections (Dao, Gu 2024, https://arxiv.org/abs/2405.21060): convolutions, scan, gated norm."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from te_jax.core.arrays import as_jax
from te_jax.core.check import BOOL, INTEGERS, NONE, check
from te_jax.core.types import align, on_explicit_mesh
from te_jax.layers.gated_norm import gated_rmsnorm as gated_rmsnorm
from te_jax.ops.ssm import causal_conv1d, ssd
from te_jax.ops.ssm.conv import check_shape, last_inputs
from te_jax.ops.ssm.runs import runs_of
from te_jax.ops.ssm.scan import LIMIT
from te_jax.ops.ssm.steps import step_sizes
from te_jax.sharding import current_mesh_resource
from te_jax.sharding.constraints import place_axis, repeat_groups, split_over
from te_jax.sharding.logical_axes import batch_axes
from te_jax.sharding.resource import auto_mesh, check_cuts_sequence_alone, check_in_mesh, is_manual, mesh_sizes


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
    given = dict(segments=segments, state=state, lengths=lengths, return_state=return_state, axis=axis, name=name)
    y, z, last = before_gated_norm(x, B, C, dt, z, weights, dt_limit=dt_limit, **given)
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
    *,
    dt_limit: Sequence[float],
    segments: jax.Array | None,
    state: MambaState | None,
    lengths: jax.Array | None,
    return_state: bool,
    axis: str | None,
    name: str,
) -> tuple[jax.Array, jax.Array, MambaState | None]:
    """-> what the gated norm of `mamba2` reads, y [b, s, h, p] and z, 0 at padding; and the MambaState behind the last
    token, or None without return_state. Arguments and errors are as in `mamba2`."""
    segments, lengths = as_jax(segments, lengths)
    check(name, "return_state", return_state, BOOL)
    check(name, "lengths", lengths, INTEGERS | NONE)
    check(name, "dt_limit", dt_limit, LIMIT)
    check_shape(name, "lengths", lengths, x.shape[:1])
    if lengths is not None and segments is not None:
        raise ValueError(f"{name}: lengths and segments are both given; a row of segments is full: pass one of them.")
    limit, over = tuple(dt_limit), split_over(x, -2)
    if axis is None:
        x, B, C, dt, z = (_real(a, lengths) for a in (x, B, C, dt, z))
        y, last = _conv_and_scan(x, B, C, dt, weights, segments, state, lengths, limit, over, return_state)
        return y, z, last
    _check_cut(name, x.shape[1], weights.x_kernel.shape[0], axis, state, lengths, return_state)
    return _on_each_device(axis, limit, over, x, B, C, dt, weights, segments), z, None


def _conv_and_scan(x, B, C, dt, weights, segments, state, lengths, limit, over, wanted):
    """-> y [b, s, h, p] before its norm, and the MambaState behind the tokens, or None unless `wanted`."""
    *past, ssm = state or (None,) * 4
    x, B, C, *last = _convolved(x, B, C, weights, past, segments, lengths, over, wanted)
    steps = dict(dt_bias=weights.dt_bias, dt_softplus=True, dt_limit=limit)
    if lengths is not None:  # A step of 0 moves no state, unless it meets an inf or NaN that overflow has made.
        x, B, C, dt = (_real(a, lengths) for a in (x, B, C, _steps_of(dt, weights, limit)))
        steps = {}
    options = dict(segments=segments, initial_state=ssm, return_final_state=wanted)
    out = ssd(x, dt, _decay_rate(weights, x), B, C, weights.D, **steps, **options)
    return (out[0], MambaState(*last, out[1])) if wanted else (out, None)


def _convolved(x, B, C, weights, past, segments, lengths, over, wanted):
    """-> x, B, C behind their convolutions, and the last inputs of the three, or None unless they are wanted. B and C
    have as many groups as the devices `over` which heads are split need, so that each has the group of its heads."""
    kernels, biases = weights[:3], weights[3:6]
    if B.shape[2] % over[1] and on_explicit_mesh(jax.typeof(B)):  # Such groups are whole on every device.
        whole = lambda a: None if a is None else place_axis(a, -1, ())
        kernels, biases = ((of_x, *map(whole, others)) for of_x, *others in (kernels, biases))
    conv = partial(_conv_of_heads, segments=segments, lengths=lengths, wanted=wanted)
    arrays, last = zip(*map(conv, (x, B, C), past, kernels, biases))
    if B.shape[2] > 1:  # The scan shares one group with all heads, wherever these are.
        arrays = repeat_groups(*arrays, over=over)
    return *arrays, *last


def _steps_of(dt, weights, limit):
    """How far each token moves the state, f32[b, s, h]."""
    wide = jnp.promote_types(dt.dtype, jnp.float32)
    return step_sizes(dt, weights.dt_bias, softplus=True, least=limit[0], most=limit[1], wide=wide)


def _real(a, lengths):
    """a [b, s, ...], 0 at padding. A factor of 0 would keep a NaN."""
    if lengths is None:
        return a
    is_real = jnp.arange(a.shape[1])[None] < lengths[:, None]
    return jnp.where(jnp.expand_dims(is_real, tuple(range(2, a.ndim))), a, 0)


def _decay_rate(weights, x):
    return -jnp.exp(weights.A_log.astype(jnp.promote_types(x.dtype, jnp.float32)))


def _conv_of_heads(a, past, kernel, bias, *, segments, lengths, wanted):
    """silu(conv(a)) of a [b, s, heads, d], and the last inputs [b, w-1, heads*d], or None unless they are wanted."""
    channels, count = _by_channels(a), kernel.shape[0] - 1
    options = dict(activation="silu", segments=segments, initial_state=past)
    if lengths is None and wanted:
        y, last = causal_conv1d(channels, kernel, bias, **options, return_final_state=True)
    else:
        y, last = causal_conv1d(channels, kernel, bias, **options), None
    if lengths is not None and wanted:
        before = jnp.zeros((a.shape[0], count, channels.shape[-1]), a.dtype) if past is None else past
        tokens = jnp.concatenate([before.astype(a.dtype), channels], 1)
        at = jnp.clip(lengths, 0, a.shape[1])[:, None] + jnp.arange(count)
        last = jnp.take_along_axis(tokens, at[..., None], 1)
    return y.reshape(a.shape), last


def _by_channels(a):
    """[b, s, heads, d] -> [b, s, heads*d]."""
    return a.reshape(*a.shape[:2], -1)


# -- a sequence that devices share --------------------------------------------------------------------------------


def _check_cut(name, s, width, axis, state, lengths, return_state):
    check_in_mesh(f"{name}: axis is {axis!r}", axis)
    check_cuts_sequence_alone(f"{name}: axis is {axis!r}", axis, current_mesh_resource())
    size = 1 if is_manual(axis) else jax.sharding.get_abstract_mesh().shape[axis]
    asked = dict(state=state is not None, lengths=lengths is not None, return_state=return_state)
    for what in (what for what, on in asked.items() if on):
        raise ValueError(f"{name}: axis is {axis!r}, which cuts the sequence; {what} is for whole ones: leave it out.")
    if s % size or s // size < width - 1:
        raise ValueError(
            f"{name}: {s} tokens on the {size} devices of {axis!r}; pass a multiple of {size}, and at least "
            f"{width - 1} tokens for each."
        )


def _on_each_device(axis, limit, over, x, B, C, dt, weights, segments):
    """y [b, s, h, p] before its norm. Each device scans its tokens from a state of zeros, and adds what those of the
    devices before have left to the tokens that see it."""
    place = _AutoAxes.of(x, B, over)

    def shard(x, B, C, dt, segments, weights):
        x, B, C, dt, segments, weights = align(x, B, C, dt, segments, weights)
        runs, goes_on = None if segments is None else runs_of(segments), _goes_on(segments, axis)
        tails = [last_inputs(_by_channels(a), runs, weights.x_kernel.shape[0] - 1) for a in (x, B, C)]
        before = [jnp.where(goes_on[:, None, None], _from_a_device_before(a, axis), 0) for a in tails]
        x, B, C, *_ = _convolved(x, B, C, weights, before, segments, None, ((), 1) if place.heads else over, False)
        B, C = map(place.own_groups, (B, C))
        rate, steps = _decay_rate(weights, x), dict(dt_bias=weights.dt_bias, dt_softplus=True, dt_limit=limit)
        y, state = ssd(x, dt, rate, B, C, weights.D, **steps, segments=segments, return_final_state=True)
        logs = jnp.cumsum(_steps_of(dt, weights, limit) * rate, 1)
        first = None if runs is None else runs[..., None] == 0
        since = jnp.exp(logs if first is None else jnp.where(first, logs, -jnp.inf))
        return _add_state(y, C, _behind_others(state, since[:, -1], goes_on, axis), since, first)

    if is_manual(axis):
        return shard(x, B, C, dt, segments, weights)
    one = lambda names: names or None
    heads, groups = PartitionSpec(one(place.heads)), PartitionSpec(one(place.groups))
    rows = PartitionSpec(one(place.rows), axis)
    of_heads, of_groups = PartitionSpec(*rows, *heads), PartitionSpec(*rows, *groups)
    taps = [PartitionSpec(None, *each) for each in (heads, groups, groups)]
    given = MambaWeights(*taps, heads, groups, groups, *(heads,) * 4)
    given = MambaWeights(*(None if a is None else spec for a, spec in zip(weights, given)))
    specs = (of_heads, of_groups, of_groups, of_heads, None if segments is None else rows, given)
    names = {axis, *place.rows, *place.heads}
    run = jax.shard_map(shard, in_specs=specs, out_specs=of_heads, axis_names=names)
    if on_explicit_mesh(jax.typeof(x)):
        x, B, C, dt = (place_axis(a, 1, (axis,)) for a in (x, B, C, dt))
        if segments is not None:
            segments = jax.sharding.reshard(segments, PartitionSpec(*jax.typeof(x).sharding.spec[:1], axis))
    return run(x, B, C, dt, segments, weights)


class _AutoAxes(NamedTuple):
    """The Auto mesh axes by which a device has its rows, its heads and its groups, so that kernels see only these."""

    rows: tuple[str, ...]
    heads: tuple[str, ...]
    groups: tuple[str, ...]  # (): all groups are on every device
    copies: tuple[int, int]  # how many devices share a group that none has by itself, and how many groups a device has

    @classmethod
    def of(cls, x, B, over) -> "_AutoAxes":
        resource, (names, devices), groups = current_mesh_resource(), over, B.shape[2]
        if auto_mesh() is None or resource is None:
            return cls((), (), (), (1, groups))
        rows = batch_axes(resource)
        rows = () if x.shape[0] % math.prod(mesh_sizes()[name] for name in rows) else rows
        if x.shape[2] % devices:
            names, devices = (), 1
        each = math.lcm(groups, devices)
        return cls(rows, names, () if groups % devices else names, (each // groups, each // devices))

    def own_groups(self, a):
        """a [b, s, g, n] -> the groups of this device's heads, where all are here."""
        copies, count = self.copies
        if copies == 1 or a.shape[2] == 1:
            return a
        first = jax.lax.axis_index(self.heads) * count
        return jnp.take(a, (first + jnp.arange(count)) // copies, axis=2)


def _from_a_device_before(a, axis, step=1):
    """`a` of the device `step` before this one; of the first ones 0."""
    size = jax.lax.axis_size(axis)
    return jax.lax.ppermute(a, axis, [(i, i + step) for i in range(size - step)])


def _goes_on(segments, axis):
    """bool[b], or [1]: whether the first token is of the segment of the last token of the device before."""
    is_first = jax.lax.axis_index(axis) == 0
    if segments is None:
        return ~is_first[None]
    return (_from_a_device_before(segments[:, -1], axis) == segments[:, 0]) & ~is_first


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
        before, left = (_from_a_device_before(a, axis, step) for a in (state, kept))
        reaches = jnp.where(kept[..., None, None] == 0, 0, before * kept[..., None, None])  # not NaN: 0 times an inf
        state, kept, step = reaches + state, left * kept, 2 * step
    return jnp.where(goes_on[:, None, None, None], _from_a_device_before(state, axis), 0)
