"""The same layers in plain Flax: what XLA makes of them, in bf16 or with Flax's own FP8 dot."""

from collections.abc import Callable

import jax
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
    """A transformer layer, norms first: gpt (LayerNorm, gelu, biases) or llama (RMSNorm, SwiGLU, RoPE)."""

    ffn: int
    heads: int
    groups: int
    llama: bool = False
    hidden_dropout: float = 0.0
    dot: Callable | None = None
    param_dtype: jnp.dtype = jnp.bfloat16
    by_group: bool = False  # a group's heads beside its key and value: tensor parallelism cuts between groups

    @nn.compact
    def __call__(self, x, deterministic: bool = True):
        b, s, hidden = x.shape
        dim, more = hidden // self.heads, (not self.llama, self.dot, self.param_dtype)
        y = norm(self.llama, self.param_dtype)(x)
        qkv = dense((self.heads + 2 * self.groups) * dim, *more)(y)
        if self.by_group:
            qkv = qkv.reshape(b, s, self.groups, -1, dim)
            q, k, v = qkv[..., :-2, :].reshape(b, s, self.heads, dim), qkv[..., -2, :], qkv[..., -1, :]
        else:
            q, k, v = jnp.split(qkv.reshape(b, s, -1, dim), (self.heads, self.heads + self.groups), 2)
        if self.llama:
            q, k = rotate(q), rotate(k)
        y = of_jax(q, k, v, is_causal=True).reshape(b, s, hidden)
        x = x + self._drop(dense(hidden, *more)(y), deterministic)
        return x + self._drop(Mlp(self.ffn, self.llama, *more)(x), deterministic)

    def _drop(self, x, deterministic: bool) -> jax.Array:
        return nn.Dropout(self.hidden_dropout)(x, deterministic) if self.hidden_dropout else x
