"""The blocks of GPT-2, BERT, T5, Llama 3, Falcon, Mixtral, Qwen 3 and DeepSeek-V3 in plain Flax, without te_jax.

Written from the papers and the published models; layers have the names of the published checkpoints, with kernels
[in, out] as Flax has them. Inputs are [b, s, H]; `hidden` is True at keys that no query may see.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn


def layernorm(eps: float, name: str) -> nn.LayerNorm:
    # Flax's default variance, mean(x**2) - mean(x)**2, loses digits.
    return nn.LayerNorm(epsilon=eps, use_fast_variance=False, name=name)


def linear(features: int, name: str) -> nn.Dense:
    return nn.Dense(features, use_bias=False, name=name)


def causal(length: int) -> jax.Array:
    return jnp.triu(jnp.ones((length, length), bool), 1)


def split_heads(x: jax.Array, heads: int) -> jax.Array:
    return x.reshape(*x.shape[:2], heads, -1)


def attention(q, k, v, hidden=False, scale=1.0, bias=0.0) -> jax.Array:
    """q [b, s, h, d], k, v [b, t, g, d] -> [b, s, h*d]; queries of h/g neighbouring heads share a key."""
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    logits = jnp.einsum("bshd,bthd->bhst", q, k) * scale + bias
    weights = nn.softmax(jnp.where(hidden, -jnp.inf, logits))
    return jnp.einsum("bhst,bthd->bshd", weights, v).reshape(*q.shape[:2], -1)


def rotate(x: jax.Array, base: float) -> jax.Array:
    """RoPE (https://arxiv.org/abs/2104.09864) of x [b, s, h, d], channel i with i + d/2."""
    half = x.shape[-1] // 2
    frequency = 1.0 / base ** (np.arange(half) / half)
    angle = np.arange(x.shape[1])[:, None, None] * np.concatenate([frequency, frequency])
    turned = jnp.concatenate([-x[..., half:], x[..., :half]], axis=-1)
    return x * jnp.asarray(np.cos(angle), x.dtype) + turned * jnp.asarray(np.sin(angle), x.dtype)


class GPT2(nn.Module):
    ffn: int
    heads: int

    @nn.compact
    def __call__(self, x):
        width = x.shape[-1]
        y = nn.Dense(3 * width, name="c_attn")(layernorm(1e-5, "ln_1")(x))
        q, k, v = (split_heads(part, self.heads) for part in jnp.split(y, 3, axis=-1))
        y = attention(q, k, v, causal(x.shape[1]), (width // self.heads) ** -0.5)
        x = x + nn.Dense(width, name="attn_c_proj")(y)
        y = nn.Dense(self.ffn, name="c_fc")(layernorm(1e-5, "ln_2")(x))
        y = 0.5 * y * (1 + jnp.tanh(jnp.sqrt(2 / jnp.pi) * (y + 0.044715 * y**3)))
        return x + nn.Dense(width, name="mlp_c_proj")(y)


class Bert(nn.Module):
    ffn: int
    heads: int

    @nn.compact
    def __call__(self, x, hidden):
        width = x.shape[-1]
        q, k, v = (split_heads(nn.Dense(width, name=name)(x), self.heads) for name in ("query", "key", "value"))
        y = attention(q, k, v, hidden, (width // self.heads) ** -0.5)
        x = layernorm(1e-12, "attention_norm")(x + nn.Dense(width, name="attention_output")(y))
        y = nn.Dense(self.ffn, name="intermediate")(x)
        y = 0.5 * y * (1 + jax.lax.erf(y / np.sqrt(2)))
        return layernorm(1e-12, "output_norm")(x + nn.Dense(width, name="output")(y))


def t5_bucket(relative: int, bidirectional: bool, buckets=32, max_distance=128) -> int:
    """The bucket of key position - query position, by integers: one for each distance below half of the buckets, then
    as many again whose edges grow geometrically up to max_distance."""
    first = 0
    if bidirectional:
        buckets //= 2
        first = buckets if relative > 0 else 0
    distance = abs(relative) if bidirectional else max(-relative, 0)
    exact = buckets // 2
    if distance < exact:
        return first + distance
    wide = buckets - exact
    # log(distance / exact) / log(max_distance / exact) >= step / wide
    steps = (step for step in range(wide) if distance**wide * exact**step >= exact**wide * max_distance**step)
    return first + exact + max(steps)


class T5Attention(nn.Module):
    """Logits are not divided by sqrt(d)."""

    heads: int
    head_dim: int

    @nn.compact
    def __call__(self, x, source, hidden, bias=0.0):
        wide = self.heads * self.head_dim
        q = split_heads(linear(wide, "q")(x), self.heads)
        k, v = (split_heads(linear(wide, name)(source), self.heads) for name in ("k", "v"))
        return linear(x.shape[-1], "o")(attention(q, k, v, hidden, 1.0, bias))


class T5(nn.Module):
    """A block of the encoder, or with `encoded` one of the decoder."""

    ffn: int
    heads: int
    head_dim: int
    gated: bool

    @nn.compact
    def __call__(self, x, hidden, encoded=None):
        """hidden: in the encoder of its own keys, in the decoder of those of `encoded`."""
        norm = lambda name: nn.RMSNorm(epsilon=1e-6, name=name)
        decoder, length = encoded is not None, x.shape[1]
        table = nn.Embed(32, self.heads, name="relative_attention_bias")
        bucket_of = {relative: t5_bucket(relative, not decoder) for relative in range(1 - length, length)}
        buckets = [[bucket_of[t - s] for t in range(length)] for s in range(length)]
        bias = jnp.moveaxis(table(jnp.asarray(buckets)), -1, 0)
        self_attention = T5Attention(self.heads, self.head_dim, name="SelfAttention")
        y = norm("norm_1")(x)
        x = x + self_attention(y, y, causal(length) if decoder else hidden, bias)
        if decoder:
            cross = T5Attention(self.heads, self.head_dim, name="EncDecAttention")
            x = x + cross(norm("norm_2")(x), encoded, hidden)
        y = norm("norm_3")(x)
        if self.gated:
            y = nn.gelu(linear(self.ffn, "wi_0")(y), approximate=True) * linear(self.ffn, "wi_1")(y)
        else:
            y = nn.relu(linear(self.ffn, "wi")(y))
        return x + linear(x.shape[-1], "wo")(y)


class Llama3(nn.Module):
    ffn: int
    heads: int
    groups: int

    @nn.compact
    def __call__(self, x):
        width, length = x.shape[-1], x.shape[1]
        d = width // self.heads
        y = nn.RMSNorm(epsilon=1e-5, name="input_layernorm")(x)
        q = split_heads(linear(width, "q_proj")(y), self.heads)
        k, v = (split_heads(linear(self.groups * d, name)(y), self.groups) for name in ("k_proj", "v_proj"))
        y = attention(rotate(q, 500_000), rotate(k, 500_000), v, causal(length), d**-0.5)
        x = x + linear(width, "o_proj")(y)
        y = nn.RMSNorm(epsilon=1e-5, name="post_attention_layernorm")(x)
        y = nn.silu(linear(self.ffn, "gate_proj")(y)) * linear(self.ffn, "up_proj")(y)
        return x + linear(width, "down_proj")(y)


class Falcon(nn.Module):
    ffn: int
    heads: int
    groups: int
    one_norm: bool

    @nn.compact
    def __call__(self, x):
        width, length = x.shape[-1], x.shape[1]
        d = width // self.heads
        if self.one_norm:
            to_attention = to_mlp = layernorm(1e-5, "input_layernorm")(x)
        else:
            to_attention, to_mlp = layernorm(1e-5, "ln_attn")(x), layernorm(1e-5, "ln_mlp")(x)
        # By groups: the queries of one, then its key, then its value.
        joined = linear((self.heads + 2 * self.groups) * d, "query_key_value")(to_attention)
        joined = joined.reshape(*x.shape[:2], self.groups, -1, d)
        q, k, v = joined[..., :-2, :].reshape(*x.shape[:2], -1, d), joined[..., -2, :], joined[..., -1, :]
        y = attention(rotate(q, 10_000), rotate(k, 10_000), v, causal(length), d**-0.5)
        z = linear(self.ffn, "dense_h_to_4h")(to_mlp)
        z = z * 0.5 * (1 + jax.lax.erf(z / np.sqrt(2)))
        return x + linear(width, "dense")(y) + linear(width, "dense_4h_to_h")(z)


# -- experts -------------------------------------------------------------------------------------------------


class Experts(nn.Module):
    """The sum over experts of weight(token, expert) * MLP, each expert computed for all tokens.

    choose: logits f32[b, s, E] -> the weights f32[b, s, E], 0 of experts that are not chosen.
    """

    ffn: int
    count: int
    choose: Callable

    @nn.compact
    def __call__(self, x):
        width, draw = x.shape[-1], nn.initializers.normal()
        shapes = {"gate_proj": (width, self.ffn), "up_proj": (width, self.ffn), "down_proj": (self.ffn, width)}
        gate, up, down = (self.param(name, draw, (self.count, *shape)) for name, shape in shapes.items())
        weights = self.choose(linear(self.count, "gate")(x))
        return sum(weights[..., e, None] * ((nn.silu(x @ gate[e]) * (x @ up[e])) @ down[e]) for e in range(self.count))


def softmax_of_best(logits, topk: int) -> jax.Array:
    """Mixtral: the softmax over a token's k largest logits. Qwen 3 has that over all, made to sum to 1: the same."""
    bound = jnp.sort(logits, -1)[..., -topk, None]
    return nn.softmax(jnp.where(logits >= bound, logits, -jnp.inf))


def sigmoids_of_groups(logits, bias, topk: int, groups: int, group_topk: int, factor: float) -> jax.Array:
    """DeepSeek-V3: of the groups with the largest sums of their two best sigmoids the k best experts, by sigmoids plus
    a bias; their own sigmoids, made to sum to `factor`, weigh them."""
    scores = nn.sigmoid(logits)
    choice = (scores + bias).reshape(*logits.shape[:-1], groups, -1)
    of_groups = jnp.sum(jnp.sort(choice, -1)[..., -2:], -1)
    bound = jnp.sort(of_groups, -1)[..., -group_topk, None]
    choice = jnp.where((of_groups >= bound)[..., None], choice, -jnp.inf).reshape(logits.shape)
    bound = jnp.sort(choice, -1)[..., -topk, None]
    scores = jnp.where(choice >= bound, scores, 0.0)
    return factor * scores / jnp.sum(scores, -1, keepdims=True)


class Mixtral(nn.Module):
    """Of Qwen 3, too: with heads of another width than the hidden one over their number, and normed."""

    ffn: int
    heads: int
    groups: int
    head_dim: int
    experts: int
    topk: int
    epsilon: float = 1e-5
    qk_norm: bool = False

    @nn.compact
    def __call__(self, x):
        norm = lambda name: nn.RMSNorm(epsilon=self.epsilon, name=name)
        d, y = self.head_dim, norm("input_layernorm")(x)
        q = split_heads(linear(self.heads * d, "q_proj")(y), self.heads)
        k, v = (split_heads(linear(self.groups * d, name)(y), self.groups) for name in ("k_proj", "v_proj"))
        if self.qk_norm:
            q, k = norm("q_norm")(q), norm("k_norm")(k)
        y = attention(rotate(q, 1_000_000), rotate(k, 1_000_000), v, causal(x.shape[1]), d**-0.5)
        x = x + linear(x.shape[-1], "o_proj")(y)
        choose = partial(softmax_of_best, topk=self.topk)
        return x + Experts(self.ffn, self.experts, choose, name="mlp")(norm("post_attention_layernorm")(x))


def yarn(x, base=10_000, factor=40, positions=4096, fast=32, slow=1) -> jax.Array:
    """RoPE of x [b, s, h, d], neighbouring channels, of which the slow pairs turn `factor` times slower
    (https://arxiv.org/abs/2309.00071)."""
    d = x.shape[-1]
    frequency = 1.0 / base ** (np.arange(0, d, 2) / d)
    pair = lambda turns: d * np.log(positions / (turns * 2 * np.pi)) / (2 * np.log(base))
    low, high = max(np.floor(pair(fast)), 0), min(np.ceil(pair(slow)), d - 1)
    share = np.clip((np.arange(d // 2) - low) / (high - low), 0, 1)
    angle = np.arange(x.shape[1])[:, None, None] * frequency * (1 - share + share / factor)
    cos, sin, (a, b) = np.cos(angle), np.sin(angle), (x[..., ::2], x[..., 1::2])
    return jnp.stack([a * cos - b * sin, a * sin + b * cos], -1).reshape(x.shape)


class DeepSeekV3(nn.Module):
    """bias: f32[experts], of the choice."""

    ffn: int
    heads: int
    ranks: tuple[int, int]  # of queries, of keys and values
    dims: tuple[int, int, int]  # of a head: keys without RoPE, with it, values
    experts: int
    bias: tuple[float, ...]

    @nn.compact
    def __call__(self, x):
        norm = lambda name: nn.RMSNorm(epsilon=1e-6, name=name)
        (q_rank, kv_rank), (nope, rope, value) = self.ranks, self.dims
        y = norm("input_layernorm")(x)
        q = norm("q_a_layernorm")(linear(q_rank, "q_a_proj")(y))
        q = split_heads(linear(self.heads * (nope + rope), "q_b_proj")(q), self.heads)
        down = linear(kv_rank + rope, "kv_a_proj_with_mqa")(y)
        up = linear(self.heads * (nope + value), "kv_b_proj")(norm("kv_a_layernorm")(down[..., :kv_rank]))
        up, shared = split_heads(up, self.heads), yarn(down[..., None, kv_rank:])
        q = jnp.concatenate([q[..., :nope], yarn(q[..., nope:])], -1)
        k = jnp.concatenate([up[..., :nope], jnp.broadcast_to(shared, (*up.shape[:-1], rope))], -1)
        scale = (0.1 * np.log(40) + 1) ** 2 * (nope + rope) ** -0.5
        x = x + linear(x.shape[-1], "o_proj")(attention(q, k, up[..., nope:], causal(x.shape[1]), scale))
        y = norm("post_attention_layernorm")(x)
        choose = partial(sigmoids_of_groups, bias=np.array(self.bias), topk=8, groups=8, group_topk=4, factor=2.5)
        z = Experts(self.ffn, self.experts, choose, name="mlp")(y)
        shared = nn.silu(linear(self.ffn, "shared_gate_proj")(y)) * linear(self.ffn, "shared_up_proj")(y)
        return x + z + linear(x.shape[-1], "shared_down_proj")(shared)
