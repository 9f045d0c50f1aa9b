"""Mamba2: a mixer of tokens by a state-space model, whose memory does not grow with the sequence."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from te_jax.flax._common import (
    Initializer,
    kernel_initializer,
    lora_scope,
    parameter,
)
from te_jax.flax._field_rules import adapters_are_on, no_mlp_is_adapted, sequences_are_split
from te_jax.flax._fields import (
    Module,
    shared_fields,
)
from te_jax.flax._mixers import (
    begin_call,
    of_decay,
    of_step,
    parameters_of_convs,
    project_gated_norm,
    states_in_cache,
    steps_are_in_order,
    write_states,
)
from te_jax.flax._projections import by_heads, project_normed
from te_jax.flax.dense import DenseGeneral
from te_jax.layers.mamba import MambaState, MambaWeights, before_gated_norm
from te_jax.ops.attention import SequenceDescriptor
from te_jax.sharding import (
    W_FSDP_AXES,
    W_NO_SHARD_AXES,
    W_TP_AXES,
)

CACHED = MambaState("x_conv_state", "B_conv_state", "C_conv_state", "ssm_state")


def _ssm_sizes_fit(module: Any) -> str | None:
    """`ssm_num_groups` and `norm_groups` divide `ssm_num_heads`."""
    for name in ("ssm_num_groups", "norm_groups"):
        if module.ssm_num_heads % (getattr(module, name) or 1):
            return (
                f"ssm_num_heads={module.ssm_num_heads} does not split into {name}={getattr(module, name)}; pass a "
                "divisor of it"
            )


class Mamba2(Module):
    """A Mamba-2 mixer (Dao, Gu 2024, https://arxiv.org/abs/2405.21060): h heads of p channels with states of n.

    Norm and projections to x, z, B, C and dt, which read one norm, causal convolutions of x, B and C, the scan, a gated
    norm, and the projection back; the projections are in FP8 under `te_jax.autocast`.

    ssm_num_heads, ssm_head_dim, ssm_state_size: h, p and n.
    ssm_num_groups:        g, a divisor of h: heads of a group share B and C. Tensor parallelism may have more devices
                           than groups: each then has the group of its heads.
    conv_width:            w, from 2 to 4, the tokens that a convolution sees. use_conv_bias: with biases.
    time_step_min, time_step_max, time_step_floor: dt_bias begins so that steps are spread from the first to the second
                           by their logarithm, and none is below the third.
    time_step_limit:       bounds of steps.
    norm_groups:           of the gated norm: a divisor of h; None is g.
    norm_before_gate:      the gated norm is RMSNorm(y) silu(z) instead of RMSNorm(y silu(z)).
    use_bias:              of the projections.
    context_parallel_axis: the mesh axis that cuts the sequence, in order; "": the cp_resource of the MeshResource.
                           Devices exchange the states behind their tokens.
    low_rank_adaptation_scope: "qkv_proj" adapts the projections to x, z, B, C and dt.
    Other fields are as in `MultiHeadAttention`.

    Parameters, where H is the width of the inputs: `x/{scale, ln_bias}` [H], `x/kernel`, `z/kernel` [H, h*p],
    `B/kernel`, `C/kernel` [H, g*n], `dt/kernel` [H, h], `out/kernel` [h*p, H]; `x_conv_kernel` [w, h*p],
    `B_conv_kernel`, `C_conv_kernel` [w, g*n] and with use_conv_bias their biases; `A_log`, `D`, `dt_bias` [h];
    `norm_scale` [h*p].
    """

    ssm_num_heads: int = None  # required
    ssm_head_dim: int = 64
    ssm_state_size: int = 128
    ssm_num_groups: int = 1
    conv_width: int = 4
    use_conv_bias: bool = True
    time_step_min: float = 0.001
    time_step_max: float = 0.1
    time_step_floor: float = 1e-4
    time_step_limit: Sequence[float] = (0.0, math.inf)
    norm_groups: int | None = None
    norm_before_gate: bool = False
    input_layernorm: bool = True
    layernorm_type: str = "rmsnorm"
    layernorm_epsilon: float = 1e-6
    return_layernorm_output: bool = False
    zero_centered_gamma: bool = False
    kernel_init: Initializer | None = None
    use_bias: bool = False
    bias_init: Initializer = nn.initializers.zeros
    low_rank_adaptation_scope: str = "none"
    low_rank_adaptation_dim: int = 32
    low_rank_adaptation_alpha: float | None = None
    dtype: jnp.dtype = jnp.float32
    enable_sequence_parallel: bool = False
    context_parallel_axis: str | None = ""
    params_dtype: jnp.dtype | None = None

    transpose_batch_sequence = False  # no field: inputs are [b, s, H]
    if not TYPE_CHECKING:  # as `Module` says
        rules = (_ssm_sizes_fit, steps_are_in_order, adapters_are_on, no_mlp_is_adapted, sequences_are_split)

    @nn.compact
    def __call__(
        self,
        inputs: jax.Array,
        mask: SequenceDescriptor | None = None,
        *,
        decode: bool = False,
        residual: bool = False,
        norm_output: bool = True,
        max_decode_length: int | None = None,
    ) -> tuple[jax.Array, jax.Array | None]:
        """inputs [b, s, H] -> ([b, s, H], norm output [b, s, H] or None).

        mask: a `SequenceDescriptor`: a token knows only of its segment. Arrays are refused: the scan is causal.
        residual, norm_output: as in `MultiHeadAttention`.
        decode: the inputs are the next s >= 1 tokens of each row. The collection `cache`, which must be mutable, holds
            the last inputs of the convolutions, `x_conv_state` [b, w-1, h*p], `B_conv_state`, `C_conv_state`
            [b, w-1, g*n], `ssm_state` f32[b, h, p, n], and `cache_index` i32[], the tokens that every row was given,
            padding included. A call that finds none makes them; `init` makes them 0. Tokens cannot be taken back from
            states: go on from an earlier cache.
            Prompts of different lengths: pass them padded on the right, and as mask
            `SequenceDescriptor.from_seqlens(lengths)`, i32[b].
        max_decode_length: has no effect, as states do not grow: attention next to this module takes it.

        Inside a `jax.shard_map` over the axis that cuts the sequence the descriptor is of whole rows, as attention's.

        Raises ValueError for inputs that are not [b, s, H], for a mask that is an array or of other rows, for segments
        with decode=True, for a cache of another shape, for an axis that the mesh lacks or that shards something else,
        and for a sequence that its devices, which cut it in order, do not divide; TypeError for a cache of another
        dtype.
        """
        flags = dict(norm_output=norm_output, residual=residual)
        inputs, call = begin_call(self, inputs, mask, decode, max_decode_length, **flags)
        (x, z, B, C, dt), normed, through = self._project(inputs, norm_output, residual)
        states = self._cached(x, B) if decode else None
        weights = self._weights()
        if decode:
            call = call._replace(state=MambaState(*(variable.value for variable in states)))
        y, z, new = before_gated_norm(x, B, C, dt, z, weights, tuple(self.time_step_limit), call)
        if decode:
            write_states(self, states, new, inputs.shape[1])
        norm = dict(
            groups=self.norm_groups or self.ssm_num_groups,
            epsilon=self.layernorm_epsilon,
            norm_before_gate=self.norm_before_gate,
        )
        return project_gated_norm(self, y, z, weights.norm, norm, inputs, through), normed

    # -- projections and parameters -------------------------------------------------------------------------------

    def _project(self, inputs, norm_output: bool, residual: bool):
        """-> x, z [b, s, h, p], B, C [b, s, g, n], dt [b, s, h], and `normed` and `through` of `Projected`."""
        h, p, g, n = self.ssm_num_heads, self.ssm_head_dim, self.ssm_num_groups, self.ssm_state_size
        init = kernel_initializer(self.kernel_init, distribution="normal")
        shared = shared_fields(self, DenseGeneral) | dict(
            kernel_init=init, enable_low_rank_adaptation=lora_scope(self)[0]
        )
        split = dict(kernel_axes=(W_FSDP_AXES, W_TP_AXES), bias_axes=(W_TP_AXES,))
        whole = dict(kernel_axes=(W_FSDP_AXES, W_NO_SHARD_AXES), bias_axes=(W_NO_SHARD_AXES,))
        widths = dict(x=h * p, z=h * p, B=g * n, C=g * n, dt=h)
        fields = {
            name: shared | (whole if g == 1 and name in "BC" else split) | dict(features=width)
            for name, width in widths.items()
        }
        products, normed, through = project_normed(self, fields, inputs, None, norm_output, residual)
        *arrays, dt = products
        by_name = zip(fields, arrays, (p, p, n, n))
        return (*(by_heads(self, name, a, width) for name, a, width in by_name), dt), normed, through

    def _weights(self) -> MambaWeights:
        h = self.ssm_num_heads
        channels = dict(x=h * self.ssm_head_dim) | dict.fromkeys("BC", self.ssm_num_groups * self.ssm_state_size)
        kernels, biases = parameters_of_convs(self, channels, "BC" if self.ssm_num_groups == 1 else "")
        own = dict(A_log=of_decay, D=nn.initializers.ones, dt_bias=of_step(self))
        heads = [parameter(self, name, init, (W_TP_AXES,), (h,)) for name, init in own.items()]
        norm = parameter(self, "norm_scale", nn.initializers.ones, (W_TP_AXES,), (channels["x"],))
        return MambaWeights(*kernels, *biases, *heads, norm)

    def _cached(self, x, B) -> MambaState:
        """The variables of the cache."""
        b, past, (h, p), (g, n) = x.shape[0], self.conv_width - 1, x.shape[2:], B.shape[2:]
        wide = jnp.promote_types(x.dtype, jnp.float32)
        shapes = MambaState((b, past, h * p), (b, past, g * n), (b, past, g * n), (b, h, p, n))
        types = MambaState(x.dtype, x.dtype, x.dtype, wide)
        return MambaState(*states_in_cache(self, CACHED, shapes, types, x))
