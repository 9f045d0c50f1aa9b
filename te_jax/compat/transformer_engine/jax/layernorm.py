"""`transformer_engine.jax.layernorm`."""

from typing import Any

import jax

from te_jax import layers
from te_jax.compat._absent import GetAttr, absent
from te_jax.core.check import STRING, check
from te_jax.flax._fields import norm_type as _norm_type
from te_jax.ops.quantize.norm import KINDS

__getattr__: GetAttr = absent("transformer_engine.jax.layernorm")


def canonicalize_norm_type(x: str) -> str:
    """A `norm_type` as "layernorm" or "rmsnorm", whatever its case, spaces around it, "-" and "_".

    Raises ValueError for others, TypeError for what is no string.
    """
    check("canonicalize_norm_type", "norm_type", x, STRING)
    name = _norm_type(x.strip())
    if name not in KINDS:
        raise ValueError(f'canonicalize_norm_type: norm_type is {x!r}; pass "layernorm" or "rmsnorm".')
    return name


def layernorm(
    x: jax.Array,
    gamma: jax.Array,
    beta: jax.Array | None,
    norm_type: str,
    zero_centered_gamma: bool = False,
    epsilon: float = 1e-6,
    quantizer: Any = None,
) -> jax.Array:
    """`te_jax.layers.layernorm`. Raises ValueError for a quantizer: `layernorm_dense` has the norm and its quantization
    in one kernel."""
    if quantizer is not None:
        raise ValueError("layernorm: quantizer is given, but the result is a plain array; use layernorm_dense.")
    norm = canonicalize_norm_type(norm_type)
    return layers.layernorm(x, gamma, beta, norm=norm, zero_centered_gamma=zero_centered_gamma, epsilon=epsilon)
