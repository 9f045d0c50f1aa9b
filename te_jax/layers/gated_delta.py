"""Gated DeltaNet between its projections (Yang, Kautz, Hatamizadeh 2024, https://arxiv.org/abs/2412.06464), and Kimi
Delta Attention (Kimi Team 2025, https://arxiv.org/abs/2510.26692): convolutions, the delta rule, gated norm."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from te_jax.core.arrays import as_rank
from te_jax.core.check import BOOL, check
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
from te_jax.layers.gated_norm import gated_rmsnorm
from te_jax.ops.delta import gated_delta
from te_jax.ops.delta.pieces import of_two_spans
from te_jax.ops.ssm.conv import check_shape
from te_jax.sharding.constraints import split_over


class DeltaState(NamedTuple):
    """What a Gated DeltaNet layer knows of past tokens: the last w-1 inputs of its convolutions, and its state."""

    v: jax.Array  # [b, w-1, h*e], as are the others in the inputs' type
    q: jax.Array  # [b, w-1, g*d]
    k: jax.Array  # [b, w-1, g*d]
    delta: jax.Array  # f32[b, h, d, e]


class DeltaWeights(NamedTuple):
    """The parameters of a Gated DeltaNet layer but for its projections. Kernels are [w, channels], biases [channels]"""

    v_kernel: jax.Array
    q_kernel: jax.Array
    k_kernel: jax.Array
    v_bias: jax.Array | None
    q_bias: jax.Array | None
    k_bias: jax.Array | None
    A_log: jax.Array  # [h]
    dt_bias: jax.Array  # [h], or [h*d] with a gate for each channel
    norm: jax.Array  # [e], of all heads


def gated_delta_net(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    b: jax.Array,
    a: jax.Array,
    z: jax.Array,
    weights: DeltaWeights,
    *,
    allow_neg_eigval: bool = False,
    activation: str = "silu",
    epsilon: float = 1e-6,
    segments: jax.Array | None = None,
    state: DeltaState | None = None,
    lengths: jax.Array | None = None,
    return_state: bool = False,
    axis: str | None = None,
    name: str = "te_jax.layers.gated_delta_net",
) -> Any:
    """RMSNorm(gated_delta(silu(conv(q)), silu(conv(k)), silu(conv(v)), beta, gate)) activation(z), by heads.

    beta = sigmoid(b), gate = -exp(A_log) softplus(a + dt_bias); queries and keys get length 1 first.

    q, k:     [b, s, g, d], v, z [b, s, h, e], b [b, s, h], a [b, s, h] or, for a gate of each channel, [b, s, h, d], as
              the projections give them
    weights:  a DeltaWeights
    allow_neg_eigval: beta is 2 sigmoid(b), so that the state may turn around (https://arxiv.org/abs/2411.12537)
    activation, epsilon: of `gated_rmsnorm`
    segments: integers [b, s] or None: tokens know only of their run of equal numbers
    state:    the DeltaState behind the tokens before these; None: there are none
    lengths:  integers [b] or None: tokens from there on are padding, of any values, and leave the state as it is
    return_state: whether the state behind the last token is wanted
    axis:     the mesh axis that cuts the sequence, in order; None: no axis does. Devices exchange the last inputs of
              convolutions, the states behind their tokens, and what these leave of a state before them

    Returns y [b, s, h, e] of v's type; with return_state also the DeltaState behind the last token. Raises what
    `te_jax.ops.ssm.causal_conv1d`, `te_jax.ops.delta.gated_delta` and `gated_rmsnorm` raise, and ValueError where
    `mamba2` does for lengths, state, return_state and axis.
    """
    call = SequenceCall(name, segments, state, lengths, return_state, axis)
    y, z, last = before_delta_norm(q, k, v, b, a, z, weights, allow_neg_eigval, call)
    y = gated_rmsnorm(y, z, gamma_of_heads(weights, y), **norm_of_heads(y, epsilon), activation=activation, name=name)
    return (y, last) if return_state else y


def gamma_of_heads(weights: DeltaWeights, y: jax.Array) -> jax.Array:
    """[h*e], of a norm that all heads of y [b, s, h, e] share."""
    return jnp.tile(weights.norm, y.shape[-2])


def norm_of_heads(y: jax.Array, epsilon: float) -> dict[str, Any]:
    """Arguments of `gated_rmsnorm` for a norm of each head by itself, before its gate."""
    return dict(groups=y.shape[-2], epsilon=epsilon, norm_before_gate=True)


def before_delta_norm(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    b: jax.Array,
    a: jax.Array,
    z: jax.Array,
    weights: DeltaWeights,
    allow_neg_eigval: bool,
    call: SequenceCall,
) -> tuple[jax.Array, jax.Array, DeltaState | None]:
    """-> what the gated norm of `gated_delta_net` reads, y [b, s, h, e] and z, 0 at padding; and the DeltaState behind
    the last token, or None without return_state. Arguments and errors are as in `gated_delta_net`."""
    name, call = call.name, call.checked(dict(v=v, q=q, k=k, b=b, a=a, z=z), weights, DeltaWeights, DeltaState)
    check(name, "allow_neg_eigval", allow_neg_eigval, BOOL)
    check_shape(name, "b", b, v.shape[:-1])
    check_shape(name, "a", a, v.shape[:-1], (*v.shape[:-1], k.shape[-1]))
    check_shape(name, "weights.A_log", weights.A_log, v.shape[2:3])
    check_shape(name, "weights.dt_bias", weights.dt_bias, (math.prod(a.shape[2:]),))
    over = split_over(v, -2)
    if call.axis is None:
        q, k, v, b, a, z = (real(x, call.lengths) for x in (q, k, v, b, a, z))
        y, last = _conv_and_rule(((v, q, k), b, a), weights, allow_neg_eigval, call, over)
        return y, z, last
    call.check_cut(v.shape[1], weights.v_kernel.shape[0])
    return _rule_of_devices(call.axis, over, (v, b, a), (q, k), weights, allow_neg_eigval, call.segments), z, None


def _conv_and_rule(tokens, weights, twice, call: SequenceCall, over):
    """-> y [b, s, h, e] before its norm, and the DeltaState behind the tokens, or None unless it is wanted."""
    segments, lengths, wanted = call.segments, call.lengths, call.return_state
    arrays, b, a = tokens
    *past, start = call.state or (None,) * 4
    (v, q, k), last = convolved(arrays, past, weights[:3], weights[3:6], segments, lengths, over, wanted)
    beta, gate = _beta_and_gate(b, a, weights, twice)
    if lengths is not None:  # A token of beta 0 and gate 0 leaves the state as it is.
        v, q, k, beta, gate = (real(x, lengths) for x in (v, q, k, beta, gate))
    options = dict(normalize=True, segments=segments, initial_state=start, return_final_state=wanted)
    out = gated_delta(q, k, v, beta, gate, **options)
    return (out[0], DeltaState(*last, out[1])) if wanted else (out, None)


def _beta_and_gate(b, a, weights, twice):
    """f32[b, s, h] and, as a, f32[b, s, h] or f32[b, s, h, d]."""
    wide = jnp.promote_types(a.dtype, jnp.float32)
    rate, bias = jnp.exp(weights.A_log.astype(wide)), weights.dt_bias.astype(wide).reshape(a.shape[2:])
    rate, bias = (as_rank(x, a.ndim) for x in (rate[:, None] if a.ndim == 4 else rate, bias))
    beta = jax.nn.sigmoid(b.astype(wide))
    return 2 * beta if twice else beta, -rate * jax.nn.softplus(a.astype(wide) + bias)


# -- a sequence that devices share --------------------------------------------------------------------------------


def _rule_of_devices(axis, over, of_heads, of_groups, weights, twice, segments):
    """y [b, s, h, e] before its norm. What a device's tokens leave of a state is linear in it: they read values of 0,
    from a state of one for each channel. Each device finds that, with the state behind its tokens, then its first
    state from those of the devices before, and only then reads."""
    place = AutoAxes.of(of_heads[0], of_groups[0], over)

    def shard(of_heads, of_groups, segments, weights):
        (v, b, a), (q, k) = of_heads, of_groups
        before = inputs_before((v, q, k), weights.v_kernel.shape[0] - 1, segments, axis)
        split = ((), 1) if place.heads else over
        (v, q, k), _ = convolved((v, q, k), before, weights[:3], weights[3:6], segments, None, split, False)
        q, k = map(place.own_groups, (q, k))
        tokens = dict(zip(("beta", "gate"), _beta_and_gate(b, a, weights, twice)), normalize=True, segments=segments)
        (rows, _, h, e), d = v.shape, k.shape[-1]
        wide = jnp.promote_types(v.dtype, jnp.float32)
        start = jnp.broadcast_to(jnp.eye(d, d + e, dtype=wide), (rows, h, d, d + e))
        values = jnp.pad(v, [(0, 0)] * 3 + [(d, 0)])  # which lies as v does, also on Explicit axes
        _, found = gated_delta(q, k, values, **tokens, initial_state=start, return_final_state=True)
        state = _state_before(found[..., d:], found[..., :d], goes_on_from(segments, axis), axis)
        return gated_delta(q, k, v, **tokens, initial_state=state)

    def specs(heads, groups):
        taps = [PartitionSpec(None, *each) for each in (heads, groups, groups)]
        return DeltaWeights(*taps, heads, groups, groups, heads, heads, PartitionSpec())

    return on_each_device(shard, axis, place, of_heads, of_groups, segments, weights, specs)


def _state_before(state, left, goes_on, axis):
    """The state that this device's first token finds: state f32[b, h, d, e] is behind the tokens of each device, which
    begins with 0, and left f32[b, h, d, d] what they leave of each channel of a state before them. A scan by doubling.
    """
    goes_on, step = goes_on[:, None, None, None], 1
    left = jnp.where(goes_on, left, 0)
    while step < jax.lax.axis_size(axis):
        earlier, kept = (from_a_device_before(a, axis, step) for a in (state, left))
        state, left = of_two_spans(state, left, earlier, kept)
        step *= 2
    return jnp.where(goes_on, from_a_device_before(state, axis), 0)
