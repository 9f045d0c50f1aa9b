"""The same layers in plain Flax: what XLA makes of them, in bf16 or with Flax's own FP8 dot."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from flax import linen as nn

from .attention import of_jax
from .ops import rotate


def norm(llama: bool, param_dtype) -> nn.Module:
    return (nn.RMSNorm if llama else nn.LayerNorm)(dtype=jnp.bfloat16, param_dtype=param_dtype)


def dense(features: int, use_bias: bool = False, dot: Callable | None = None, param_dtype=jnp.bfloat16) -> nn.Module:
    """dot: what multiplies, a `dot_general_cls` of Flax."""
    return nn.Dense(features, use_bias, dtype=jnp.bfloat16, param_dtype=param_dtype, dot_general_cls=dot)


class Mlp(nn.Module):
    """norm, dense, gelu or SwiGLU, dense."""

    ffn: int
    llama: bool = False
    use_bias: bool = False
    dot: Callable | None = None
    param_dtype: jnp.dtype = jnp.bfloat16

    @nn.compact
    def __call__(self, x):
        width, more = x.shape[-1], (self.use_bias, self.dot, self.param_dtype)
        y = norm(self.llama, self.param_dtype)(x)
        y = dense(2 * self.ffn if self.llama else self.ffn, *more)(y)
        if self.llama:
            gate, up = jnp.split(y, 2, -1)
            y = nn.silu(gate) * up
        else:
            y = nn.gelu(y, approximate=True)
        return dense(width, *more)(y)


class Layer(nn.Module):
    """A transformer layer, norms first, of the sizes of a `layers.Layer`."""

    sizes: Any
    dot: Callable | None = None

    @nn.compact
    def __call__(self, x, deterministic: bool = True):
        of, (b, s, hidden) = self.sizes, x.shape
        dim, more = hidden // of.heads, (not of.llama, self.dot, of.param_dtype)
        qkv = dense((of.heads + 2 * of.groups) * dim, *more)(norm(of.llama, of.param_dtype)(x))
        if of.cut == "tp":  # between groups: a group's heads lie next to its key and value
            qkv = qkv.reshape(b, s, of.groups, -1, dim)
            q, k, v = qkv[..., :-2, :].reshape(b, s, of.heads, dim), qkv[..., -2, :], qkv[..., -1, :]
        else:
            q, k, v = jnp.split(qkv.reshape(b, s, -1, dim), (of.heads, of.heads + of.groups), 2)
        if of.llama:
            q, k = rotate(q), rotate(k)
        y = of_jax(q, k, v, is_causal=True).reshape(b, s, hidden)
        drop = lambda x: nn.Dropout(of.hidden_dropout)(x, deterministic) if of.hidden_dropout else x
        x = x + drop(dense(hidden, *more)(y))
        return x + drop(Mlp(of.ffn, of.llama, *more)(x))
