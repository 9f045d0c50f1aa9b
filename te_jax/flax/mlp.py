"""LayerNormMLP: norm, dense, activation, dropout, dense."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

from te_jax.core.check import ARRAY, BOOL, check, integer, tuple_of
from te_jax.flax._common import (
    Axes,
    Dropout,
    Initializer,
    activation_axes,
    add_lora,
    check_input_axes,
    floating,
    in_compute_dtype,
    kernel_initializer,
    lora_parameters,
    lora_scope,
    parameter,
    stack_kernels,
)
from te_jax.flax._field_rules import activations_take_their_params, adapters_are_on, last_axis_alone
from te_jax.flax._fields import Module, check_call, shared_fields
from te_jax.flax._state import describe, recipe_of
from te_jax.flax.dense import norm_dense, norm_options, operand, trailing_axes
from te_jax.flax.norm import norm_parameters
from te_jax.layers import dense, layernorm_mlp
from te_jax.layers.norm_mlp import split_residual
from te_jax.ops.quantize.activation import activation, is_fused
from te_jax.sharding import (
    BATCH_AXES,
    HIDDEN_AXES,
    HIDDEN_TP_AXES,
    SEQLEN_AXES,
    W_FSDP_AXES,
    W_JOINED_AXES,
    W_NO_SHARD_AXES,
    W_TP_AXES,
    resolve_logical_axes,
)
from te_jax.sharding import with_sharding_constraint_by_logical_axes as constrain
from te_jax.sharding.logical_axes import gathered_spec, split_tokens


class LayerNormMLP(Module):
    """y = wo . dropout(activation(wi . norm(x))); both GEMMs in FP8 under `te_jax.autocast`.

    intermediate_dim: F, the width between the two GEMMs.
    activations:      names or functions; several are multiplied, each with its own slice of `wi_kernel`:
                      ("silu", "linear") is SwiGLU. See `te_jax.ops.activation`.
    activation_params: `limit`, `alpha`, `glu_linear_offset` of ("clamped_silu", "clamped_linear").
    intermediate_dropout_rate, intermediate_dropout_rng_name, intermediate_hidden_dropout_dims: dropout after
                      the activation; the axes in the last share one mask.
    return_layernorm_output: the second result is the norm's output (the input itself without a norm).
    return_bias:      `wo_bias` is not added, but is the third result.
    ffn1_ckpt_name, ffn2_ckpt_name: names of the GEMMs' outputs for `jax.checkpoint` policies.
    dot_1_input_axes, dot_2_input_axes: logical axes that the GEMMs' inputs are constrained to.
    Fields of the norm, of low-rank adaptation and dtypes as in `LayerNormDenseGeneral`; `axis` must be -1.

    Parameters, A = len(activations): `scale`, `ln_bias` [H]; `wi_kernel` [H, A, F], `wo_kernel` [F, H],
    `wi_bias` [A, F], `wo_bias` [H]; `wi_lora_a_kernel` [H, A, r], `wi_lora_b_kernel` [A, r, F],
    `wo_lora_a_kernel` [F, r], `wo_lora_b_kernel` [r, H]. FP8 state: `*_0_*` belongs to wi, `*_1_*` to wo.
    """

    intermediate_dim: int = 2048
    enable_layernorm: bool = True
    layernorm_type: str = "layernorm"
    epsilon: float = 1e-6
    zero_centered_gamma: bool = False
    scale_init: Initializer | None = None
    scale_axes: Axes = ("embed",)
    ln_bias_init: Initializer = nn.initializers.zeros
    ln_bias_axes: Axes = ("embed",)
    kernel_init: Initializer | None = None
    kernel_axes_1: Axes = ("embed", "act", "mlp")
    kernel_axes_2: Axes = ("mlp", "embed")
    use_bias: bool = False
    bias_init: Initializer = nn.initializers.zeros
    bias_axes_1: Axes = ("act", "mlp")
    bias_axes_2: Axes = ("embed",)
    return_layernorm_output: bool = False
    activations: Sequence[str | Callable[..., Any]] = ("gelu",)
    activation_params: Mapping[str, Any] | None = None
    intermediate_dropout_rng_name: str = "dropout"
    intermediate_dropout_rate: float = 0.0
    intermediate_hidden_dropout_dims: Sequence[int] = ()
    enable_low_rank_adaptation: bool = False
    low_rank_adaptation_dim: int = 32
    low_rank_adaptation_alpha: float | None = None
    axis: int | tuple[int, ...] = -1
    dtype: jnp.dtype = jnp.float32
    layernorm_input_axes: Axes | None = None
    dot_1_input_axes: Axes | None = None
    dot_2_input_axes: Axes | None = None
    ffn1_ckpt_name: str = "ffn1"
    ffn2_ckpt_name: str = "ffn2"
    transpose_batch_sequence: bool = False
    quantization_checkpoint_name: str | None = None
    params_dtype: jnp.dtype | None = None
    return_bias: bool = False

    if not TYPE_CHECKING:  # as `Module` says
        rules = (last_axis_alone, activations_take_their_params, adapters_are_on)

    @nn.compact
    def __call__(
        self,
        inputs: jax.Array,
        deterministic: bool = False,
        *,
        wi_kernel: jax.Array | None = None,
        wo_kernel: jax.Array | None = None,
        residual: bool | jax.Array = False,
    ) -> tuple[jax.Array | None, ...]:
        """inputs [..., H] -> ([..., H], norm output [..., H] or None), of the same dtype; with return_bias also
        `wo_bias` [H], which is to be added to the first, or None without use_bias.

        deterministic: True switches dropout off.
        wi_kernel, wo_kernel: [H, A, F] and [F, H], each instead of the parameter, as in `DenseGeneral`.
        residual:      True: the inputs are added to the first result; under FP8 inside of the kernels. An array
                       [..., H] of their dtype is added in the second GEMM.

        Raises TypeError for inputs that are not floating, ValueError for unknown activations or their
        parameters, and for what `DenseGeneral` refuses of a kernel.
        """
        check_call(self, inputs=inputs, deterministic=deterministic)
        check(describe(self), "residual", residual, BOOL | ARRAY)
        inputs = in_compute_dtype(self, floating(self, "inputs", inputs))
        trailing_axes(self, inputs.ndim)  # raises unless `axis` is the last
        check_input_axes(self, inputs.ndim, "layernorm_input_axes", "dot_1_input_axes", "dot_2_input_axes")
        inputs = constrain(inputs, self.layernorm_input_axes)
        norm, wi, wo = self._parameters(inputs.shape[-1], wi_kernel, wo_kernel)
        bias, wo = wo[1], (wo[0], None if self.return_bias else wo[1], wo[2])
        drop = self.intermediate_dropout_rate > 0 and not deterministic
        plain = drop or wi[2] is not None or self.return_layernorm_output or norm is None
        if recipe_of(self) is not None and not plain and is_fused(self.activations):
            y = self._run_in_one(inputs, norm, wi, wo, residual)
            out = checkpoint_name(constrain(y, self.layernorm_input_axes), self.ffn2_ckpt_name), None
        else:
            out = self._run_by_layer(inputs, norm, wi, wo, deterministic, residual)
        return (*out, bias) if self.return_bias else out

    def _run_in_one(self, inputs, norm, wi, wo, residual):
        """Everything under one vjp: the activation and its gradient are quantized where they are computed."""
        (wi_kernel, first), (wo_kernel, second) = operand(self, wi[0], "_0"), operand(self, wo[0], "_1")
        middle = (*inputs.shape[:-1], self.intermediate_dim)
        return layernorm_mlp(
            inputs,
            *norm,
            *(wi_kernel, wo_kernel, wi[1], wo[1]),
            activations=self.activations,
            activation_params=self.activation_params,
            residual=residual,
            middle_spec=resolve_logical_axes(self.dot_2_input_axes, middle),
            **self._outside(inputs),
            middle_name=self.ffn1_ckpt_name,
            **norm_options(self),
            **first | dict(metas=(first["metas"], second["metas"])),
        )

    def _run_by_layer(self, inputs, norm, wi, wo, deterministic, residual):
        """Layer by layer: without FP8, and with what comes between the kernels."""
        adapt = wi[2] is not None
        options = dict(want_norm=adapt or self.return_layernorm_output, axes=self.dot_1_input_axes, postfix="_0")
        own, added = split_residual(residual)
        z, normed, through = norm_dense(self, inputs, wi[0], norm, wi[1], return_input=own, **options)
        if adapt:
            z = add_lora(self, z, normed, *wi[2])
        z = checkpoint_name(z, self.ffn1_ckpt_name)
        z = activation(z, self.activations, self.activation_params)
        if self.intermediate_dropout_rate > 0:
            dims, stream = tuple(self.intermediate_hidden_dropout_dims), self.intermediate_dropout_rng_name
            within = tuple_of(integer(-z.ndim, z.ndim - 1))
            check(describe(self), "intermediate_hidden_dropout_dims", dims, within)
            z = Dropout(self.intermediate_dropout_rate, dims, rng_collection=stream)(z, deterministic)
        z = constrain(z, self.dot_2_input_axes)
        kernel, call = operand(self, wo[0], "_1")
        y = dense(z, kernel, wo[1], through if own else added, out=inputs, **self._outside(inputs), **call)
        if adapt:
            y = add_lora(self, y, z, *wo[2])
        y = checkpoint_name(constrain(y, self.layernorm_input_axes), self.ffn2_ckpt_name)
        return y, (normed if self.return_layernorm_output else None)

    def _outside(self, inputs):
        """The shardings of the output's gradient where GEMMs read it and of tokens outside, if those are others."""
        axes = self.layernorm_input_axes, self.dot_1_input_axes
        return dict(grad_spec=gathered_spec(*axes, inputs.shape), tokens=split_tokens(*axes))

    def _parameters(self, width: int, wi_kernel, wo_kernel):
        """(gamma, beta) or None; (kernel, bias, LoRA) of wi, of wo. The order of creation fixes the keys."""
        slots, middle = len(self.activations), self.intermediate_dim
        each = kernel_initializer(self.kernel_init)

        def stacked(key, shape, dtype):  # one draw per activation, so that fan-in is H
            kernels = []
            for _ in range(shape[1]):
                key, one = jax.random.split(key)
                kernels.append(each(one, (shape[0], shape[2]), dtype))
            return stack_kernels(kernels, 1, self.kernel_axes_1[1] if self.kernel_axes_1 else None)

        norm = norm_parameters(self, width, self.ln_bias_init, self.ln_bias_axes) if self.enable_layernorm else None
        wi_kernel = parameter(self, "wi_kernel", stacked, self.kernel_axes_1, (width, slots, middle), wi_kernel)
        wo_kernel = parameter(self, "wo_kernel", each, self.kernel_axes_2, (middle, width), wo_kernel)
        wi_bias = wo_bias = wi_lora = wo_lora = None
        if self.use_bias:
            wi_bias = parameter(self, "wi_bias", self.bias_init, self.bias_axes_1, (slots, middle))
            wo_bias = parameter(self, "wo_bias", self.bias_init, self.bias_axes_2, (width,))
        if self.enable_low_rank_adaptation:
            wi_lora = lora_parameters(self, stacked, (width,), (slots, middle), "wi_")
            wo_lora = lora_parameters(self, each, (middle,), (width,), "wo_")
        return norm, (wi_kernel, wi_bias, wi_lora), (wo_kernel, wo_bias, wo_lora)


def mlp_of_layer(module: nn.Module, **own: Any) -> LayerNormMLP:
    """The submodule `mlp` of a layer, divided among devices by te_jax's logical axes. own: fields that the layer has
    under other names."""
    axes = dict(
        kernel_axes_1=(W_FSDP_AXES, W_JOINED_AXES, W_TP_AXES),
        kernel_axes_2=(W_TP_AXES, W_FSDP_AXES),
        bias_axes_1=(W_JOINED_AXES, W_TP_AXES),
        bias_axes_2=(W_NO_SHARD_AXES,),
        dot_1_input_axes=activation_axes(module, BATCH_AXES, SEQLEN_AXES, HIDDEN_AXES),
        dot_2_input_axes=activation_axes(module, BATCH_AXES, SEQLEN_AXES, HIDDEN_TP_AXES),
    )
    adapts = dict(enable_low_rank_adaptation=lora_scope(module)[2])
    return LayerNormMLP(**shared_fields(module, LayerNormMLP) | axes | adapts | own, name="mlp")
