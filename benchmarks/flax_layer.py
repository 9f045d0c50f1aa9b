"""The same layers in plain Flax: what XLA makes of them, in bf16 or with Flax's own FP8 dot."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import linen as nn
from ops import jax_nn_attention, rotate

BF16 = dict(dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)


class Dense(nn.Module):
    """nn.Dense in bf16. dot: what multiplies, a `dot_general_cls` of Flax."""

    features: int
    use_bias: bool = False
    dot: Callable | None = None

    @nn.compact
    def __call__(self, x):
        return nn.Dense(self.features, use_bias=self.use_bias, dot_general_cls=self.dot, **BF16)(x)


class Mlp(nn.Module):
    """norm, dense, gelu or SwiGLU, dense."""

    ffn: int
    llama: bool = False
    use_bias: bool = False
    dot: Callable | None = None

    @nn.compact
    def __call__(self, x):
        width = x.shape[-1]
        y = (nn.RMSNorm if self.llama else nn.LayerNorm)(**BF16)(x)
        y = Dense(2 * self.ffn if self.llama else self.ffn, self.use_bias, self.dot)(y)
        if self.llama:
            gate, up = jnp.split(y, 2, -1)
            y = nn.silu(gate) * up
        else:
            y = nn.gelu(y, approximate=True)
        return Dense(width, self.use_bias, self.dot)(y)


class Layer(nn.Module):
    """A transformer layer, norms first: gpt (LayerNorm, gelu, biases) or llama (RMSNorm, SwiGLU, RoPE)."""

    ffn: int
    heads: int
    groups: int
    llama: bool = False
    hidden_dropout: float = 0.0
    dot: Callable | None = None

    @nn.compact
    def __call__(self, x, deterministic: bool = True):
        b, s, hidden = x.shape
        dim, use_bias = hidden // self.heads, not self.llama
        y = (nn.RMSNorm if self.llama else nn.LayerNorm)(**BF16)(x)
        qkv = Dense((self.heads + 2 * self.groups) * dim, use_bias, self.dot)(y)
        qkv = qkv.reshape(b, s, -1, dim)
        q, k, v = jnp.split(qkv, (self.heads, self.heads + self.groups), 2)
        if self.llama:
            q, k = rotate(q), rotate(k)
        y = jax_nn_attention(q, k, v).reshape(b, s, hidden)
        x = x + self._drop(Dense(hidden, use_bias, self.dot)(y), deterministic)
        return x + self._drop(Mlp(self.ffn, self.llama, use_bias, self.dot)(x), deterministic)

    def _drop(self, x, deterministic: bool) -> jax.Array:
        return nn.Dropout(self.hidden_dropout)(x, deterministic) if self.hidden_dropout else x
