"""DenseGeneral and LayerNormDenseGeneral: parameters, FP8 state, one call."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import ArrayLike

from te_jax.flax._common import (
    Axes,
    Initializer,
    add_lora,
    check_input_axes,
    floating,
    in_compute_dtype,
    kernel_initializer,
    lora_parameters,
    parameter,
)
from te_jax.flax._field_rules import adapters_are_on, last_axis_alone, widths_are_positive
from te_jax.flax._fields import Module, as_tuple, check_call, norm_type
from te_jax.flax._state import dense_metas, describe, recipe_of
from te_jax.flax.kernels import kernel_operand
from te_jax.flax.norm import norm_parameters
from te_jax.layers import Projection, dense, layernorm_dense
from te_jax.sharding import resolve_logical_axes
from te_jax.sharding import with_sharding_constraint_by_logical_axes as constrain
from te_jax.sharding.logical_axes import split_tokens
from te_jax.sharding.resource import check_current_mesh_resource


def trailing_axes(module: nn.Module, ndim: int) -> int:
    """How many trailing axes `module.axis` names. ValueError if it names others."""
    axes = tuple(axis % ndim if -ndim <= axis < ndim else axis for axis in as_tuple(module.axis))
    if axes != tuple(range(ndim - len(axes), ndim)) or not axes:
        raise ValueError(
            f"{describe(module)}: axis is {module.axis!r} for an input of {ndim} axes; the contracted axes "
            f"must be the trailing ones in order, such as {tuple(range(-max(len(axes), 1), 0))}: transpose "
            "the input."
        )
    return len(axes)


class DenseGeneral(Module):
    """y = x . kernel + bias over the trailing axes of x; in FP8 under `te_jax.autocast`.

    kernel_init, bias_init: functions (key, shape, dtype) -> array. kernel_axes, bias_axes: the logical axes of both.
    features:  width(s) of the output.
    use_bias:  True here, unlike in the other modules.
    axis:      the contracted axes of the input, the trailing ones.
    dtype:     of the parameters; the output has the input's dtype.
    params_dtype: of the parameters, if not None; then inputs are cast to `dtype`, and the output has it.
    return_bias: the bias is not added, but returned, for the caller to add.
    enable_low_rank_adaptation, low_rank_adaptation_dim, low_rank_adaptation_alpha:
               adds x.A.B * (alpha / dim), with alpha None a factor of 1.
    input_axes: logical axes that the input is constrained to, by the logical axis rules in force.
    quantization_checkpoint_name: name of the quantized tensors kept for the backward pass, for
               `jax.checkpoint` policies (see `jax.ad_checkpoint.checkpoint_name`).

    Parameters: `kernel` [*contracted, *features]; `bias` [*features];
    `lora_a_kernel` [*contracted, *features[:-1], r], `lora_b_kernel` [*features[:-1], r, features[-1]].
    """

    features: int | tuple[int, ...]
    kernel_init: Initializer | None = None
    kernel_axes: Axes = ()
    use_bias: bool = True
    bias_init: Initializer = nn.initializers.zeros
    bias_axes: Axes = ()
    enable_low_rank_adaptation: bool = False
    low_rank_adaptation_dim: int = 32
    low_rank_adaptation_alpha: float | None = None
    axis: int | tuple[int, ...] = -1
    dtype: jnp.dtype = jnp.float32
    input_axes: Axes = ()
    transpose_batch_sequence: bool = False
    quantization_checkpoint_name: str | None = None
    params_dtype: jnp.dtype | None = None
    return_bias: bool = False

    if not TYPE_CHECKING:  # as `Module` says
        rules = (widths_are_positive, adapters_are_on)

    @nn.compact
    def __call__(
        self,
        inputs: jax.Array,
        *,
        kernel: jax.Array | None = None,
        residual: jax.Array | None = None,
        operands: bool = False,
        out: ArrayLike | None = None,
        grad_axes: Any = None,
        out_axes: Any = None,
        multiply: Callable[..., jax.Array] | None = None,
    ) -> jax.Array | tuple[jax.Array, jax.Array | None] | Projection:
        """inputs [..., *contracted] -> [..., *features] of the same dtype; with return_bias that and the bias, which is
        [*features] of the parameters' dtype, or None without use_bias.

        kernel:   [*contracted, *features] of any floating dtype, such as the transpose of an embedding: instead of the
                  parameter `kernel`, which there is none of then.
        residual: [..., *features], added to the output; under FP8 inside of the GEMM, before it rounds.
        out:      an array of the output's shape, as which it is sharded on an Explicit mesh; see `layers.dense`.
        grad_axes: logical axes of the output's gradient where GEMMs read it, as `grad_spec` of `layers.dense` has them;
                  and out_axes: those of the output outside.
        operands: nothing is multiplied: returns what `LayerNormDenseGeneral(...)(..., also=...)` takes.
        multiply: a function that is called instead of `te_jax.layers.dense`, with the same arguments but `contract`: it
                  computes of the inputs what it multiplies, as `te_jax.layers.gated_norm_dense` does. It gets `tokens`
                  only where `MeshResource.tpsp_pieces` asks for pieces.

        Raises TypeError for inputs that are not floating, ValueError for axes that are not trailing, for a kernel of
        another shape and for one next to a parameter, for return_bias with operands, and for multiply with operands
        or low-rank adaptation, which would read the inputs.
        """
        check_call(self, operands=operands)
        inputs = in_compute_dtype(self, floating(self, "inputs", inputs))
        features, contract = as_tuple(self.features), trailing_axes(self, inputs.ndim)
        check_input_axes(self, inputs.ndim, "input_axes")
        inputs = constrain(inputs, self.input_axes or None)
        contracted = inputs.shape[inputs.ndim - contract :]
        init = kernel_initializer(self.kernel_init, contract)
        kernel = parameter(self, "kernel", init, self.kernel_axes, (*contracted, *features), kernel)
        bias = parameter(self, "bias", self.bias_init, self.bias_axes, features) if self.use_bias else None
        if operands and self.return_bias:
            raise ValueError(
                f"{describe(self)}: return_bias is True, but operands=True leaves the sum to another layer."
            )
        if multiply is not None and (operands or self.enable_low_rank_adaptation):
            other = "operands" if operands else "enable_low_rank_adaptation"
            raise ValueError(
                f"{describe(self)}: {other} is True, but multiply computes of the inputs what is multiplied; leave one "
                "of them out."
            )
        kernel, call = operand(self, kernel, contract=contract)
        if operands:
            return Projection(kernel, bias, call["metas"])
        added = None if self.return_bias else bias
        grad_spec, tokens = resolve_logical_axes(grad_axes), split_tokens(out_axes, grad_axes)
        run = multiply or partial(dense, contract=contract)
        call |= {} if tokens is None else dict(tokens=tokens)
        y = run(inputs, kernel, added, residual, out=out, grad_spec=grad_spec, **call)
        if self.enable_low_rank_adaptation:
            y = add_lora(self, y, inputs, *lora_parameters(self, init, contracted, features))
        return (y, bias) if self.return_bias else y


class LayerNormDenseGeneral(Module):
    """LayerNorm or RMSNorm, then a dense layer; under `te_jax.autocast` the norm writes FP8 directly.

    Fields of the norm as in `LayerNorm`, of the dense layer as in `DenseGeneral`; `axis` must be -1.

    return_layernorm_output: the second result is the norm's output (the input itself without a norm).
    return_bias:             the bias is not added, but is one more result, the last.
    depth_scaling:           divides the output, after the bias.
    layernorm_input_axes, dot_input_axes: logical axes that the norm's input and the GEMM's input are
        constrained to.

    Parameters: `scale`, `ln_bias` [H]; `kernel` [H, *features]; `bias` [*features]; LoRA as in
    `DenseGeneral`.
    """

    features: int | tuple[int, ...]
    enable_layernorm: bool = True
    layernorm_type: str = "layernorm"
    epsilon: float = 1e-6
    zero_centered_gamma: bool = False
    scale_init: Initializer | None = None
    scale_axes: Axes = ("embed",)
    ln_bias_init: Initializer = nn.initializers.zeros
    ln_bias_axes: Axes = ("embed",)
    kernel_init: Initializer | None = None
    kernel_axes: Axes = ()
    use_bias: bool = False
    bias_init: Initializer = nn.initializers.zeros
    bias_axes: Axes = ()
    return_layernorm_output: bool = False
    enable_low_rank_adaptation: bool = False
    low_rank_adaptation_dim: int = 32
    low_rank_adaptation_alpha: float | None = None
    axis: int | tuple[int, ...] = -1
    dtype: jnp.dtype = jnp.float32
    layernorm_input_axes: Axes | None = None
    dot_input_axes: Axes | None = None
    depth_scaling: float | None = None
    transpose_batch_sequence: bool = False
    quantization_checkpoint_name: str | None = None
    params_dtype: jnp.dtype | None = None
    return_bias: bool = False

    if not TYPE_CHECKING:  # as `Module` says
        rules = (widths_are_positive, last_axis_alone, adapters_are_on)

    @nn.compact
    def __call__(
        self,
        inputs: jax.Array,
        *,
        kernel: jax.Array | None = None,
        return_input: bool = False,
        also: Sequence[Projection] = (),
    ) -> tuple[jax.Array, ...]:
        """inputs [..., H] -> ([..., *features], norm output [..., H] or None), of the same dtype; with return_bias also
        what is to be added to the first: [*features] of the parameters' dtype, over depth_scaling, or None.

        kernel:       [H, *features], as in `DenseGeneral`.
        return_input: a third result is the input, for a residual connection: its gradient is added in the norm's
                      backward kernel.
        also:         other dense layers that read the same norm, made with `operands=True`: the first result is then
                      the tuple of all products, without depth_scaling.

        Raises TypeError for inputs that are not floating, ValueError for an axis other than the last and for what
        `DenseGeneral` refuses of a kernel.
        """
        check_call(self, inputs=inputs, return_input=return_input)
        inputs = in_compute_dtype(self, floating(self, "inputs", inputs))
        trailing_axes(self, inputs.ndim)  # raises unless `axis` is the last
        features = as_tuple(self.features)
        check_input_axes(self, inputs.ndim, "layernorm_input_axes", "dot_input_axes")
        inputs = constrain(inputs, self.layernorm_input_axes)
        width = inputs.shape[-1]
        norm = norm_parameters(self, width, self.ln_bias_init, self.ln_bias_axes) if self.enable_layernorm else None
        init = kernel_initializer(self.kernel_init)
        kernel = parameter(self, "kernel", init, self.kernel_axes, (width, *features), kernel)
        adapt = lora_parameters(self, init, (width,), features) if self.enable_low_rank_adaptation else None
        bias = parameter(self, "bias", self.bias_init, self.bias_axes, features) if self.use_bias else None
        want_norm = bool(adapt) or self.return_layernorm_output
        options = dict(want_norm=want_norm, axes=self.dot_input_axes, also=also, return_input=return_input)
        added = None if self.return_bias else bias
        y, normed, through = norm_dense(self, inputs, kernel, norm, added, **options)
        first, *rest = y if also else (y,)
        if adapt:
            first = add_lora(self, first, normed, *adapt)
        if self.depth_scaling is not None:
            first = first / self.depth_scaling
            bias = bias if bias is None else bias / self.depth_scaling
        y = (first, *rest) if also else first
        out = y, (normed if self.return_layernorm_output else None)
        return (*out, *([through] if return_input else ()), *([bias] if self.return_bias else ()))


_KERNELS = {"": "kernel", "_0": "wi_kernel", "_1": "wo_kernel"}  # by the postfix of their FP8 state


def operand(module: nn.Module, kernel: jax.Array, postfix: str = "", contract: int = 1) -> tuple[Any, dict[str, Any]]:
    """The kernel of one GEMM of `module` as the layers take it, and what else they want to know: recipe, FP8 state,
    names."""
    check_current_mesh_resource()
    metas = dense_metas(module, postfix)
    call = dict(
        recipe=recipe_of(module),
        metas=metas,
        checkpoint=module.quantization_checkpoint_name,
        name=describe(module),
    )
    return kernel_operand(module, _KERNELS[postfix], kernel, contract, metas), call


def norm_dense(
    module: nn.Module,
    inputs: jax.Array,
    kernel: jax.Array,
    norm: tuple[jax.Array, jax.Array | None] | None,
    bias: jax.Array | None,
    *,
    want_norm: bool,
    axes: Axes | None,
    postfix: str = "",
    also: Sequence[Projection] = (),
    return_input: bool = False,
) -> tuple[Any, jax.Array | None, jax.Array | None]:
    """(y, norm output or None, inputs or None): the first GEMM of `module`, after the norm if `norm` = (gamma, beta).

    want_norm, return_input: whether the second and third result are there, bools: unused, they would get gradients of
    zeros. axes: what the GEMM's input is constrained to where it exists as an array, that is without a norm or with
    `want_norm`. also, return_input: see `te_jax.layers.layernorm_dense`.
    """
    kernel, call = operand(module, kernel, postfix)
    if norm is None:
        through, inputs = inputs, constrain(inputs, axes)
        rest = [dense(inputs, *p[:2], **call | dict(metas=p.metas)) for p in also]
        first = dense(inputs, kernel, bias, **call)
        return (first, *rest) if also else first, (inputs if want_norm else None), through
    y, normed, *through = layernorm_dense(
        inputs,
        kernel,
        *norm,
        bias,
        **norm_options(module),
        return_layernorm_output=want_norm,
        return_input=return_input,
        also=also,
        tokens=split_tokens(module.layernorm_input_axes, axes),
        **call,
    )
    return y, (constrain(normed, axes) if want_norm else None), through[0] if through else None


def norm_options(module: nn.Module) -> dict[str, Any]:
    """The fields of a norm, as the layers take them."""
    kind = norm_type(module.layernorm_type)
    return dict(norm=kind, zero_centered_gamma=module.zero_centered_gamma, epsilon=module.epsilon)
