"""`transformer_engine.jax.activation`."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from te_jax.compat._absent import GetAttr, absent
from te_jax.ops.quantize.activation import activation as _activation

__getattr__: GetAttr = absent("transformer_engine.jax.activation")


def activation(
    x: jax.Array, activation_type: Sequence[str | Callable[..., Any]], quantizer: Any = None, act_params: Any = None
) -> jax.Array:
    """x [..., A, F] -> [..., F]: the product of A activations (`te_jax.ops.activation.activation`).

    act_params: a dict of the activations' parameters. Raises ValueError for a quantizer: `layernorm_mlp` has the
    activation and its quantization in one kernel.
    """
    if quantizer is not None:
        raise ValueError("activation: quantizer is given, but the result is a plain array; use layernorm_mlp.")
    return _activation(x, activation_type, act_params)
