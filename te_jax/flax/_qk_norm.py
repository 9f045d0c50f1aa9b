"""The norms of queries and keys over the channels of each head (Dehghani et al. 2023, https://arxiv.org/abs/2302.05442),
or of all heads; and the norm of values."""

import jax
import jax.numpy as jnp
from flax import linen as nn

from te_jax.flax._fields import norm_type
from te_jax.flax._state import describe
from te_jax.flax.norm import whole_norm
from te_jax.layers import layernorm
from te_jax.ops.attention.reference import split_joined
from te_jax.sharding.constraints import place_axis, split_over


def normalize_heads(module: nn.Module, arrays: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """`Projected.arrays` as (query, key, value) with queries and keys normalized by `module.qk_norm_type`; `arrays` as
    they are where that is None."""
    if module.qk_norm_type is None:
        return arrays
    each = _normalize_across_heads if module.qk_norm_across_heads else _normalize_over_channels
    if module.kv_sharing == "take":
        return (each(module, "q_norm", *arrays),)
    query, key, value = split_joined(*arrays)
    return each(module, "q_norm", query), each(module, "k_norm", key), value


def normalize_values(module: nn.Module, arrays: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """`Projected.arrays` as (query, key, value) with values over the root of their mean square; `arrays` as they are
    where `module.v_norm_eps` is None."""
    if module.v_norm_eps is None:
        return arrays
    query, key, value = split_joined(*arrays)
    ones, name = jnp.ones(value.shape[-1], jnp.float32), f"{describe(module)} v_norm"
    return query, key, layernorm(value, ones, norm="rmsnorm", epsilon=module.v_norm_eps, name=name)


def _normalize_across_heads(module: nn.Module, name: str, x: jax.Array) -> jax.Array:
    """x [b, s, heads, d], normalized over heads and d, which each device has whole meanwhile."""
    names, _ = split_over(x, -2)
    joined = place_axis(x, -2, ()).reshape(*x.shape[:-2], x.shape[-2] * x.shape[-1])
    return place_axis(_normalize_over_channels(module, name, joined).reshape(x.shape), -2, names)


def _normalize_over_channels(module: nn.Module, name: str, x: jax.Array) -> jax.Array:
    """x [..., d], normalized over d."""
    kind, width = norm_type(module.qk_norm_type), x.shape[-1]
    if kind == "l2normalization":  # x / sqrt(sum x**2 + eps) is RMSNorm's x / sqrt(mean x**2 + eps / d) / sqrt(d)
        gamma, epsilon = jnp.full(width, width**-0.5, jnp.float32), module.qk_norm_eps / width
        return layernorm(x, gamma, norm="rmsnorm", epsilon=epsilon, name=f"{describe(module)} {name}")
    return whole_norm(module, name, kind, module.qk_norm_eps)(x)
