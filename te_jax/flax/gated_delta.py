"""GatedDeltaNet: a mixer of tokens by the gated delta rule, whose memory does not grow with the sequence."""

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from te_jax.flax._common import Initializer, activation_axes, kernel_initializer, lora_scope, parameter
from te_jax.flax._field_rules import adapters_are_on, no_mlp_is_adapted, sequences_are_split
from te_jax.flax._fields import Module, shared_fields
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
from te_jax.flax._projections import by_heads, project_normed, project_output
from te_jax.flax._state import describe
from te_jax.flax.dense import DenseGeneral
from te_jax.layers.gated_delta import DeltaState, DeltaWeights, before_delta_norm, gamma_of_heads, norm_of_heads
from te_jax.layers.gated_norm import gated_rmsnorm
from te_jax.ops.attention import SequenceDescriptor
from te_jax.sharding import BATCH_AXES, HIDDEN_AXES, SEQLEN_AXES, W_FSDP_AXES, W_NO_SHARD_AXES, W_TP_AXES

_CACHED_DELTA = DeltaState("v_conv_state", "q_conv_state", "k_conv_state", "delta_state")


def _delta_sizes_fit(module: Any) -> str | None:
    """`linear_num_key_heads` divides `linear_num_value_heads`; `gate_rank` needs `gate="channel"`."""
    heads, keys = module.linear_num_value_heads, module.linear_num_key_heads
    if heads % (keys or 1):
        return f"linear_num_value_heads={heads} does not split into linear_num_key_heads={keys}; pass a divisor of it"
    if module.gate_rank is not None and module.gate != "channel":
        return f"gate_rank is {module.gate_rank}, but gate is {module.gate!r}, which has none; leave it out"


class GatedDeltaNet(Module):
    """A mixer by the gated delta rule: h heads, whose states of d x e fade, and are corrected by each token.

    Gated DeltaNet (https://arxiv.org/abs/2412.06464) as in Qwen3-Next, and with gate="channel" Kimi Delta Attention
    (https://arxiv.org/abs/2510.26692). Norm and projections, which read one norm, causal convolutions of queries, keys
    and values, the rule, a gated norm of each head, and the projection back; the projections are in FP8 under
    `te_jax.autocast`.

    linear_num_value_heads, linear_num_key_heads: h and g, a divisor of h (None: h): each head of queries and keys
                           serves h / g heads. Tensor parallelism may have more devices than key heads: each then has
                           those of its heads.
    linear_key_head_dim, linear_value_head_dim: d and e.
    gate:                  "head": a state fades by one factor, exp(-exp(A_log) softplus(a + dt_bias)), and the norm's
                           gate is silu(z). "channel": each channel of keys by its own; the projections of decay and of
                           the norm's gate, which is sigmoid(z), go through `gate_rank` channels (None: e).
    allow_neg_eigval:      a token corrects the state by up to 2 instead of up to 1.
    conv_width:            w, from 2 to 4, the tokens that a convolution sees. use_conv_bias: with biases.
    time_step_min, time_step_max, time_step_floor: dt_bias begins so that steps are spread from the first to the second
                           by their logarithm, and none is below the third.
    use_bias:              of the projections.
    context_parallel_axis: the mesh axis that cuts the sequence, in order; "": the cp_resource of the MeshResource.
                           Devices exchange the states behind their tokens.
    low_rank_adaptation_scope: "qkv_proj" adapts all projections but the one back.
    Other fields are as in `MultiHeadAttention`.

    Parameters, where H is the width of the inputs: `q/{scale, ln_bias}` [H], `q/kernel`, `k/kernel` [H, g*d],
    `v/kernel` [H, h*e], `b/kernel` [H, h], `out/kernel` [h*e, H]; with gate="head" `z/kernel` [H, h*e], `a/kernel`
    [H, h], with "channel" `f_a/kernel`, `g_a/kernel` [H, r], `f_b/kernel` [r, h*d], `g_b/kernel` [r, h*e];
    `v_conv_kernel` [w, h*e], `q_conv_kernel`, `k_conv_kernel` [w, g*d] and with use_conv_bias their biases; `A_log`
    [h]; `dt_bias` [h] or [h*d]; `norm_scale` [e].
    """

    linear_num_value_heads: int = None  # required
    linear_num_key_heads: int | None = None
    linear_key_head_dim: int = 128
    linear_value_head_dim: int = 128
    gate: str = "head"
    gate_rank: int | None = None
    allow_neg_eigval: bool = False
    conv_width: int = 4
    use_conv_bias: bool = False
    time_step_min: float = 0.001
    time_step_max: float = 0.1
    time_step_floor: float = 1e-4
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
        rules = (_delta_sizes_fit, steps_are_in_order, adapters_are_on, no_mlp_is_adapted, sequences_are_split)

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

        mask: a `SequenceDescriptor`: a token knows only of its segment. Arrays are refused: the rule is causal.
        residual, norm_output: as in `MultiHeadAttention`.
        decode: the inputs are the next s >= 1 tokens of each row. The collection `cache`, which must be mutable, holds
            the last inputs of the convolutions, `v_conv_state` [b, w-1, h*e], `q_conv_state`, `k_conv_state`
            [b, w-1, g*d], `delta_state` f32[b, h, d, e], and `cache_index` i32[], the tokens that every row was given,
            padding included. Prompts of different lengths and what else there is to a cache are as in `Mamba2`.
        max_decode_length: has no effect, as states do not grow: attention next to this module takes it.

        Raises what `Mamba2` raises.
        """
        flags = dict(norm_output=norm_output, residual=residual)
        inputs, call = begin_call(self, inputs, mask, decode, max_decode_length, **flags)
        (q, k, v, b, a, z), normed, through = self._project(inputs, norm_output, residual)
        states = self._cached(v, k) if decode else None
        weights = self._weights()
        if decode:
            call = call._replace(state=DeltaState(*(variable.value for variable in states)))
        y, z, new = before_delta_norm(q, k, v, b, a, z, weights, self.allow_neg_eigval, call)
        if decode:
            write_states(self, states, new, inputs.shape[1])
        norm, gamma = norm_of_heads(y, self.layernorm_epsilon), gamma_of_heads(weights, y)
        if self.gate == "head":
            return project_gated_norm(self, y, z, gamma, norm, inputs, through), normed
        y = gated_rmsnorm(y, z, gamma, **norm, activation="sigmoid", name=describe(self))
        return project_output(self, y, inputs, through), normed

    @property
    def _key_heads(self) -> int:
        return self.linear_num_key_heads or self.linear_num_value_heads

    def _project(self, inputs, norm_output: bool, residual: bool):
        """-> (q, k [b, s, g, d], v [b, s, h, e], b [b, s, h], a [b, s, h] or [b, s, h, d], z [b, s, h, e]), and
        `normed` and `through` of `Projected`."""
        h, d, e = self.linear_num_value_heads, self.linear_key_head_dim, self.linear_value_head_dim
        init = kernel_initializer(self.kernel_init, distribution="normal")
        shared = shared_fields(self, DenseGeneral) | dict(
            kernel_init=init, enable_low_rank_adaptation=lora_scope(self)[0]
        )
        split = dict(kernel_axes=(W_FSDP_AXES, W_TP_AXES), bias_axes=(W_TP_AXES,))
        whole = dict(kernel_axes=(W_FSDP_AXES, W_NO_SHARD_AXES), bias_axes=(W_NO_SHARD_AXES,))
        rank, of_keys = self.gate_rank or e, self._key_heads * d
        widths = dict(q=of_keys, k=of_keys, v=h * e, b=h)
        widths |= dict(a=h, z=h * e) if self.gate == "head" else dict(f_a=rank, g_a=rank)
        is_whole = lambda name: name in ("f_a", "g_a") or (self._key_heads == 1 and name in "qk")
        fields = {name: shared | (whole if is_whole(name) else split) | dict(features=n) for name, n in widths.items()}
        (q, k, v, b, a, z), normed, through = project_normed(self, fields, inputs, None, norm_output, residual)
        if self.gate == "channel":
            axes = activation_axes(self, BATCH_AXES, SEQLEN_AXES, HIDDEN_AXES)
            up = lambda name, width: DenseGeneral(
                **shared | split | dict(features=h * width, input_axes=axes), name=name
            )
            a, z = by_heads(self, "f_b", up("f_b", d)(a), d), up("g_b", e)(z)
        q, k = by_heads(self, "q", q, d), by_heads(self, "k", k, d)
        return (q, k, by_heads(self, "v", v, e), b, a, by_heads(self, "z", z, e)), normed, through

    def _weights(self) -> DeltaWeights:
        h, d, e = self.linear_num_value_heads, self.linear_key_head_dim, self.linear_value_head_dim
        channels = dict(v=h * e, q=self._key_heads * d, k=self._key_heads * d)
        kernels, biases = parameters_of_convs(self, channels, "qk" if self._key_heads == 1 else "")
        rate = parameter(self, "A_log", of_decay, (W_TP_AXES,), (h,))
        step = parameter(self, "dt_bias", of_step(self), (W_TP_AXES,), (h if self.gate == "head" else h * d,))
        norm = parameter(self, "norm_scale", nn.initializers.ones, (W_NO_SHARD_AXES,), (e,))
        return DeltaWeights(*kernels, *biases, rate, step, norm)

    def _cached(self, v, k) -> list[Any]:
        """The variables of the cache."""
        b, past, (h, e), (g, d) = v.shape[0], self.conv_width - 1, v.shape[2:], k.shape[2:]
        wide = jnp.promote_types(v.dtype, jnp.float32)
        shapes = DeltaState((b, past, h * e), (b, past, g * d), (b, past, g * d), (b, h, d, e))
        return states_in_cache(self, _CACHED_DELTA, shapes, (v.dtype,) * 3 + (wide,), v)
