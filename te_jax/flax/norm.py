"""LayerNorm and RMSNorm as a module, and the norm parameters of the modules that begin with one."""

import jax
import jax.numpy as jnp
from flax import linen as nn

from te_jax.flax._common import Axes, Initializer, floating, in_compute_dtype, parameter
from te_jax.flax._fields import Module, check_call, norm_type
from te_jax.flax._state import describe
from te_jax.layers import layernorm
from te_jax.sharding import W_NO_SHARD_AXES


def norm_parameters(
    module: nn.Module, width: int, bias_init: Initializer, bias_axes: Axes
) -> tuple[jax.Array, jax.Array | None]:
    """`scale` [width] and `ln_bias` [width], None for RMSNorm."""
    identity = nn.initializers.zeros if module.zero_centered_gamma else nn.initializers.ones
    gamma = parameter(module, "scale", module.scale_init or identity, module.scale_axes, (width,))
    if norm_type(module.layernorm_type) == "rmsnorm":
        return gamma, None
    return gamma, parameter(module, "ln_bias", bias_init, bias_axes, (width,))


def whole_norm(module: nn.Module, name: str, kind: str, epsilon: float) -> "LayerNorm":
    """The submodule `name` of `module`, a norm of this kind whose parameters are whole on every device."""
    return LayerNorm(
        epsilon=epsilon,
        layernorm_type=kind,
        zero_centered_gamma=module.zero_centered_gamma,
        scale_axes=(W_NO_SHARD_AXES,),
        bias_axes=(W_NO_SHARD_AXES,),
        dtype=module.dtype,
        params_dtype=module.params_dtype,
        name=name,
    )


class LayerNorm(Module):
    """LayerNorm (https://arxiv.org/abs/1607.06450) or RMSNorm (https://arxiv.org/abs/1910.07467).

    epsilon:             added to the variance (RMSNorm: to the mean square).
    layernorm_type:      "layernorm" or "rmsnorm".
    zero_centered_gamma: the scale that is applied is 1 + `scale`.
    scale_init:          None is ones, or zeros with `zero_centered_gamma`. bias_init is of `ln_bias`.
    scale_axes, bias_axes: the logical axes of `scale` and `ln_bias`.
    dtype:               of the parameters.
    params_dtype:        of the parameters, if not None; then x is cast to `dtype`, and the result has it.

    Parameters: `scale` [H]; `ln_bias` [H], not with RMSNorm.
    """

    epsilon: float = 1e-6
    layernorm_type: str = "layernorm"
    zero_centered_gamma: bool = False
    scale_init: Initializer | None = None
    scale_axes: Axes = ("embed",)
    bias_init: Initializer = nn.initializers.zeros
    bias_axes: Axes = ("embed",)
    dtype: jnp.dtype = jnp.float32
    transpose_batch_sequence: bool = False
    params_dtype: jnp.dtype | None = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """x [..., H] -> the same shape and dtype. Raises TypeError for a dtype that is not floating."""
        check_call(self, x=x)
        x = in_compute_dtype(self, floating(self, "x", x))
        gamma, beta = norm_parameters(self, x.shape[-1], self.bias_init, self.bias_axes)
        return layernorm(
            x,
            gamma,
            beta,
            norm=norm_type(self.layernorm_type),
            zero_centered_gamma=self.zero_centered_gamma,
            epsilon=self.epsilon,
            name=describe(self),
        )
