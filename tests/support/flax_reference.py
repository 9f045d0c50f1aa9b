"""The equations of the Flax modules in float64 numpy, from raw parameters; FP8 layers emulated in float32."""

import flax
import jax
import jax.numpy as jnp
import numpy as np
import rope_oracle
from arrays import on_device

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2


def data(*shape, dtype=jnp.float32, seed=1):
    return on_device(np.random.default_rng(seed).normal(size=shape), dtype)


def unboxed(variables):
    return flax.core.meta.unbox(variables)


def f64(tree):
    return jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), unboxed(tree))


def shapes(tree):
    return jax.tree.map(lambda leaf: leaf.shape, unboxed(tree))


def filled(params, seed=0, spread=0.3):
    """`params` with every leaf (biases and scales too) replaced by normal numbers, boxes kept."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda a: on_device(rng.normal(size=a.shape) * spread, a.dtype), params)


def norm(x, p, kind="layernorm", eps=1e-6, zero_centered=False):
    if "scale" not in p:
        return x
    gamma = p["scale"] + (1 if zero_centered else 0)
    if kind == "rmsnorm":
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * gamma
    mean = x.mean(-1, keepdims=True)
    return (x - mean) / np.sqrt(((x - mean) ** 2).mean(-1, keepdims=True) + eps) * gamma + p["ln_bias"]


def dense(x, p, alpha=None):
    """Contracts the last axis of x; LoRA where p holds it, per feature group."""
    y = np.tensordot(x, p["kernel"], 1) + p.get("bias", 0)
    if "lora_a_kernel" in p:
        a, b = p["lora_a_kernel"], p["lora_b_kernel"]
        down = np.tensordot(x, a, 1)  # [..., *G, r]
        up = np.einsum("...r,...rf->...f", down, np.broadcast_to(b, (*down.shape[: x.ndim - 1], *b.shape)))
        y = y + up * (1 if alpha is None else alpha / a.shape[-1])
    return y


def gelu(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def mlp(x, p, kind="layernorm", swiglu=False, alpha=None):
    """-> (y, norm output)."""
    normed = norm(x, p, kind)
    lora = {name: p[f"wi_{name}"] for name in ("lora_a_kernel", "lora_b_kernel") if f"wi_{name}" in p}
    z = dense(normed, {"kernel": p["wi_kernel"], "bias": p.get("wi_bias", 0), **lora}, alpha)
    z = z[..., 0, :] / (1 + np.exp(-z[..., 0, :])) * z[..., 1, :] if swiglu else gelu(z[..., 0, :])
    lora = {name: p[f"wo_{name}"] for name in ("lora_a_kernel", "lora_b_kernel") if f"wo_{name}" in p}
    return dense(z, {"kernel": p["wo_kernel"], "bias": p.get("wo_bias", 0), **lora}, alpha), normed


def attention(q, k, v, masked=None, bias=0.0, scale=None, pre_scale=False, offset=None):
    """q [b, s, h, d], k, v [b, t, g, d]; masked: True = masked out; offset [h]: exp(it) joins the
    denominator."""
    repeat = q.shape[2] // k.shape[2]
    k, v = np.repeat(k, repeat, 2), np.repeat(v, repeat, 2)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    logits = np.einsum("bshd,bthd->bhst", q, k)
    logits = (logits + bias) * scale if pre_scale else logits * scale + bias
    logits = np.where(False if masked is None else masked, -np.inf, logits)
    top = logits.max(-1, keepdims=True)
    top = np.where(np.isinf(top), 0, top)  # a query that sees no key gets zeros
    p = np.exp(logits - top)
    extra = 0 if offset is None else np.exp(offset[None, :, None, None] - top)
    total = p.sum(-1, keepdims=True) + extra
    return np.einsum("bhst,bthd->bshd", p / np.where(total == 0, 1, total), v)


def causal(s, t):
    return np.arange(t)[None, :] > np.arange(s)[:, None]


def mha(x, p, h, g=None, kv=None, kind="layernorm", masked=None, bias=0.0, scale=None, rope=None, alpha=None):
    """kv None is self-attention. rope: None, its options, or a function that turns. -> (out, norm output)."""
    g = g or h
    first = p["qkv"] if "qkv" in p else p["query"]
    normed = norm(x, first, kind)
    source = normed if kv is None else kv
    heads = lambda y, n: y.reshape(*y.shape[:2], n, -1)
    if "qkv" in p:
        q, k, v = (heads(y, h) for y in np.moveaxis(dense(normed, first, alpha), 2, 0))
    else:
        q = heads(dense(normed, first, alpha), h)
        if "kv" in p:
            k, v = (heads(y, g) for y in np.moveaxis(dense(source, p["kv"], alpha), 2, 0))
        else:
            k, v = (heads(dense(source, p[name], alpha), g) for name in ("key", "value"))
    if rope is not None:
        q, k = (rope(x) if callable(rope) else rope_oracle.rotate(x, **rope)[0] for x in (q, k))
    context = attention(q, k, v, masked, bias, scale)
    return dense(context.reshape(*context.shape[:2], -1), p["out"], alpha), normed


# -- FP8 -----------------------------------------------------------------------------------------------------


def batch_second(module, params, x):
    """What a MultiHeadAttention makes of x [b, s, h] where the batch is its second axis, as [b, s, h]."""
    flipped = module.clone(transpose_batch_sequence=True)
    return jnp.swapaxes(flipped.apply({"params": params}, jnp.swapaxes(x, 0, 1))[0], 0, 1)


def decoded(module, params, x):
    """What a MultiHeadAttention makes of x [b, s, h] in three parts, of 3, 1 and s - 4 tokens, by its cache."""
    cache, parts, s = {}, [], x.shape[1]
    for at, slots in ((slice(0, 3), dict(max_decode_length=s)), (slice(3, 4), {}), (slice(4, s), {})):
        (y, _), cache = module.apply({"params": params, **cache}, x[:, at], decode=True, mutable=["cache"], **slots)
        parts.append(y)
    return jnp.concatenate(parts, 1)


def quantized(x, scale, dtype=E4M3):
    """x after a round trip through FP8."""
    top = float(jnp.finfo(dtype).max)
    return jnp.clip(x.astype(jnp.float32) * scale, -top, top).astype(dtype).astype(jnp.float32) / scale


@jax.custom_vjp
def fp8_dense(x, kernel, scales):
    """x [..., k], kernel [k, n], scales (x, kernel, grad): HYBRID FP8 on dequantized operands."""
    return quantized(x, scales[0]) @ quantized(kernel, scales[1])


def _fp8_bwd(saved, dy):
    x, kernel, scales = saved
    dy = quantized(dy, scales[2], E5M2)
    flat = lambda a: a.reshape(-1, a.shape[-1])
    dx = dy @ quantized(kernel, scales[1]).T
    return dx, flat(quantized(x, scales[0])).T @ flat(dy), jnp.zeros_like(scales)


fp8_dense.defvjp(lambda x, kernel, scales: (fp8_dense(x, kernel, scales), (x, kernel, scales)), _fp8_bwd)


def relative_error(got, want) -> float:
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))
