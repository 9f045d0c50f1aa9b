"""DiTBlock: a block of a diffusion transformer, whose norms and residual connections a condition moves."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from te_jax.core.products import product
from te_jax.flax._common import Initializer, floating, in_compute_dtype, parameter, residual_axes
from te_jax.flax._field_rules import adapters_are_on, head_width_is_known, sequences_are_split
from te_jax.flax._fields import Module, head_width, norm_type, shared_fields
from te_jax.flax._state import describe
from te_jax.flax.mha import MultiHeadAttention, input_of
from te_jax.flax.mlp import LayerNormMLP, mlp_of_layer
from te_jax.layers import adaptive_layernorm, dense, gated_residual
from te_jax.ops.quantize.activation import silu
from te_jax.sharding import BATCH_AXES, HIDDEN_AXES, JOINED_AXES, W_FSDP_AXES, W_JOINED_AXES, W_TP_AXES
from te_jax.sharding import with_sharding_constraint_by_logical_axes as constrain
from te_jax.sharding.constraints import place_axis


class DiTBlock(Module):
    """A block with adaLN-Zero (Peebles & Xie 2022, https://arxiv.org/abs/2212.09748, section 3.2).

    x + gate_1 attention(norm(x) (1 + scale_1) + shift_1), and the same with the MLP and a shift, scale and gate of its
    own. All six are one product of silu(condition); its weights begin at 0, so that the block begins as the identity.
    Attention is without a mask, norms without parameters. Attention's and the MLP's projections are in FP8 under
    `te_jax.autocast`; the condition's is not: it has one row for each sample, so its time goes into
    reading the kernel, and quantizing would read that, too.

    hidden_size, mlp_hidden_size, num_attention_heads: H, F, h.
    kv_channels:        the width of a head; None is hidden_size / num_attention_heads.
    mha_kernel_init, mlp_kernel_init: None scales by fan-in; attention's is normal, the MLP's truncated normal.
    mlp_activations:    as `activations` in `LayerNormMLP`; "gelu" is the approximation by tanh.
    use_bias, bias_init: of attention's and the MLP's projections. The condition's always has a bias.
    low_rank_adaptation_*: as in `TransformerLayer`; the condition's projection is not adapted.
    params_dtype:       the dtype of the parameters, if not None; then x and condition are cast to `dtype`, and the
                        output has it.
    Other fields mean what they do in `MultiHeadAttention`.

    Parameters, where c is the width of the condition: `condition_kernel` [c, 6, H] and `condition_bias` [6, H], in the
    order shift, scale, gate of attention, then of the MLP; `attention` as `MultiHeadAttention`, `mlp` as
    `LayerNormMLP`, both without a norm.
    """

    hidden_size: int = 512
    mlp_hidden_size: int = 2048
    num_attention_heads: int = 8
    kv_channels: int | None = None
    layernorm_type: str = "layernorm"
    layernorm_epsilon: float = 1e-6
    mha_kernel_init: Initializer | None = None
    mlp_kernel_init: Initializer | None = None
    mlp_activations: Sequence[str | Callable[..., Any]] = ("gelu",)
    use_bias: bool = True
    bias_init: Initializer = nn.initializers.zeros
    qk_norm_type: str | None = None
    low_rank_adaptation_scope: str = "none"
    low_rank_adaptation_dim: int = 32
    low_rank_adaptation_alpha: float | None = None
    dtype: jnp.dtype = jnp.float32
    enable_sequence_parallel: bool = False
    params_dtype: jnp.dtype | None = None

    transpose_batch_sequence = False  # no field: inputs are [b, s, H]
    if not TYPE_CHECKING:  # as `Module` says
        rules = (head_width_is_known, adapters_are_on, sequences_are_split)

    @nn.compact
    def __call__(self, x: jax.Array, condition: jax.Array) -> jax.Array:
        """x [b, s, H] -> the same shape and dtype.

        condition: [b, c], such as the sum of the embeddings of a sample's time and class. Its projection is computed in
            its type, and what follows of it in f32.

        Raises ValueError for shapes that do not match, TypeError for arrays that are not floating.
        """
        x = constrain(input_of(self, "x", x), residual_axes(self))
        if x.shape[-1] != self.hidden_size:
            raise ValueError(
                f"{describe(self)}: x has shape {x.shape}, but hidden_size is {self.hidden_size}; pass "
                f"[batch, sequence, {self.hidden_size}]."
            )
        shift, scale, gate, *of_mlp = self._modulation(x, condition)
        y, _ = self._attention()(self._norm(x, shift, scale), norm_output=False)
        x = self._add(x, y, gate)
        shift, scale, gate = of_mlp
        y, _ = self._mlp()(self._norm(x, shift, scale))
        return self._add(x, y, gate)

    @product("condition")
    def _modulation(self, x, condition) -> tuple[jax.Array, ...]:
        """(shift, scale, gate) of attention and of the MLP, each [b, H]."""
        condition = in_compute_dtype(self, floating(self, "condition", condition))
        if condition.ndim != 2 or condition.shape[0] != x.shape[0]:
            raise ValueError(
                f"{describe(self)}: condition has shape {condition.shape}, but x {x.shape}; pass one row for each "
                f"sample, [{x.shape[0]}, c]."
            )
        shape, zeros = (condition.shape[-1], 6, self.hidden_size), nn.initializers.zeros
        kernel = parameter(self, "condition_kernel", zeros, (W_FSDP_AXES, W_JOINED_AXES, W_TP_AXES), shape)
        bias = parameter(self, "condition_bias", zeros, (W_JOINED_AXES, W_TP_AXES), shape[1:])
        wide = condition.astype(jnp.promote_types(condition.dtype, jnp.float32))
        y = dense(silu(wide).astype(condition.dtype), kernel, bias, name=describe(self))
        # Tensor parallelism divides this kernel too, a third of the block's weights; norms need whole rows.
        y = constrain(place_axis(y, -1, ()), (BATCH_AXES, JOINED_AXES, HIDDEN_AXES))
        return tuple(y[:, i] for i in range(6))

    def _norm(self, x, shift, scale):
        of_norm = dict(norm=norm_type(self.layernorm_type), epsilon=self.layernorm_epsilon, name=describe(self))
        return adaptive_layernorm(x, shift, scale, **of_norm)

    def _add(self, x, y, gate):
        return constrain(gated_residual(x, y, gate, name=describe(self)), residual_axes(self))

    def _attention(self) -> MultiHeadAttention:
        own = dict(
            head_dim=head_width(self),
            input_layernorm=False,
            kernel_init=self.mha_kernel_init,
            attn_mask_type="no_mask",
        )
        return MultiHeadAttention(**shared_fields(self, MultiHeadAttention) | own, name="attention")

    def _mlp(self) -> LayerNormMLP:
        return mlp_of_layer(
            self,
            intermediate_dim=self.mlp_hidden_size,
            enable_layernorm=False,
            kernel_init=self.mlp_kernel_init,
            activations=self.mlp_activations,
            layernorm_input_axes=residual_axes(self),
        )
