"""The attention ops: cuDNN (FlashAttention, https://arxiv.org/abs/2205.14135) on CUDA, plain JAX elsewhere."""

from functools import cache, partial
from math import prod
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from te_jax import _lib
from te_jax._op import Op, like
from te_jax.ops.attention_mask import Band

# ---- the meaning, in plain JAX -------------------------------------------------------------------


def _wide(x):
    """f32, or f64 for f64: the type of logits, softmax and sums."""
    return jnp.promote_types(x.dtype, jnp.float32)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _einsum(spec, x, y):
    """einsum of two arrays of one type, in f32. Rounds the cotangent to that type: tensor cores take one."""
    return jnp.einsum(spec, x, y, preferred_element_type=_wide(x), precision=lax.Precision.HIGHEST)


def _einsum_bwd(spec, residuals, dout):
    x, y = residuals
    (x_axes, y_axes), out_axes = spec.split("->")[0].split(","), spec.split("->")[1]
    dout = dout.astype(x.dtype)
    dx = _einsum(f"{out_axes},{y_axes}->{x_axes}", dout, y)
    dy = _einsum(f"{out_axes},{x_axes}->{y_axes}", dout, x)
    return dx.astype(x.dtype), dy.astype(y.dtype)


_einsum.defvjp(lambda spec, x, y: (_einsum(spec, x, y), (x, y)), _einsum_bwd)


def _group(x, g):
    """[b..., s, (g r), d] -> [b..., s, g, r, d]."""
    return x.reshape(*x.shape[:-2], g, x.shape[-2] // g, x.shape[-1])


def _group_heads(x, g):
    """[b..., (g r), s, t] -> [b..., g, r, s, t]."""
    return x.reshape(*x.shape[:-3], g, x.shape[-3] // g, *x.shape[-2:])


def scores(q, k):
    """q k^T per head: [b..., s, (g r), d], [b..., t, g, d] -> f32[b..., (g r), s, t]."""
    grouped = _einsum("...sgrd,...tgd->...grst", _group(q, k.shape[-2]), k)
    return grouped.reshape(*q.shape[:-3], q.shape[-2], *grouped.shape[-2:])


def mix(probs, v):
    """probs v per head: [b..., (g r), s, t], [b..., t, g, e] -> f32[b..., s, (g r), e]."""
    grouped = _einsum("...grst,...tge->...sgre", _group_heads(probs, v.shape[-2]), v)
    return grouped.reshape(*v.shape[:-3], probs.shape[-2], probs.shape[-3], v.shape[-1])


def finite_top(top):
    """The maximum that a softmax subtracts; 0 where a row sees no key: exp(-inf - top) is 0, not NaN."""
    return lax.stop_gradient(jnp.where(top == -jnp.inf, 0, top))


def _causal_logits(q, k, causal, scale):
    """f32[b..., h, s, t] of f32 operands."""
    logits = scale * scores(q, k)
    hidden = Band(None, 0, False).hides_of(*logits.shape[-2:]) if causal else None
    return logits if hidden is None else jnp.where(hidden, -jnp.inf, logits)


def _kept(row, rate, s, t):
    """bool[s, t] from the words of one row and head."""
    return jax.random.bernoulli(jax.random.wrap_key_data(row[:2], impl="threefry2x32"), 1 - rate, (s, t))


def _dropped(words, rate, s, t):
    """What dropout multiplies the probabilities by: f32[b..., h, s, t] drawn from u32[b..., h, 4]; 1 without words."""
    if words is None:
        return 1.0
    kept = jax.vmap(lambda row: _kept(row, rate, s, t))(words.reshape(-1, words.shape[-1]))
    kept = kept.reshape(*words.shape[:-1], s, t)
    return kept / jnp.float32(1 - rate)


def _fwd_reference(q, k, v, rng=None, *, causal, scale, dropout_rate):
    q32, k32, v32 = (x.astype(_wide(x)) for x in (q, k, v))
    logits = _causal_logits(q32, k32, causal, scale)
    top = finite_top(jnp.max(logits, -1, keepdims=True, initial=-jnp.inf))
    weights = jnp.exp(logits - top)
    total = jnp.sum(weights, -1, keepdims=True)
    probs = weights / jnp.where(total == 0, 1, total)
    out = mix(probs * _dropped(rng, dropout_rate, *logits.shape[-2:]), v32)
    lse = (top + jnp.log(total))[..., 0]
    return out.astype(q.dtype), lse.astype(jnp.float32), rng


def _bwd_reference(dout, q, k, v, out, lse, drawn=None, *, causal, scale, dropout_rate, deterministic):
    del deterministic  # XLA's sums have a fixed order
    types, g = (q.dtype, k.dtype, v.dtype), k.shape[-2]
    dout, q, k, v, out = (x.astype(_wide(x)) for x in (dout, q, k, v, out))
    probs = jnp.exp(_causal_logits(q, k, causal, scale) - finite_top(lse)[..., None])
    factor = _dropped(drawn, dropout_rate, *probs.shape[-2:])
    delta = jnp.swapaxes(jnp.sum(dout * out, -1), -1, -2)  # [b..., h, s]: the sum of probs * dprobs over t
    dlogits = scale * probs * (factor * scores(dout, v) - delta[..., None])
    dq = mix(dlogits, k)
    dk = _einsum("...grst,...sgrd->...tgd", _group_heads(dlogits, g), _group(q, g))
    dv = _einsum("...grst,...sgre->...tge", _group_heads(probs * factor, g), _group(dout, g))
    return [grad.astype(dtype) for grad, dtype in zip((dq, dk, dv), types, strict=True)]


def _parts(qkv):
    """[b..., s, 3, h, d] -> q, k, v: [b..., s, h, d] each."""
    return tuple(qkv[..., i, :, :] for i in range(3))


def _packed_fwd_reference(qkv, rng=None, **attrs):
    return _fwd_reference(*_parts(qkv), rng, **attrs)


def _packed_bwd_reference(dout, qkv, out, lse, drawn=None, **attrs):
    return [jnp.stack(_bwd_reference(dout, *_parts(qkv), out, lse, drawn, **attrs), axis=-3)]


# ---- the ops -------------------------------------------------------------------------------------


def cudnn_refuses(q, k, v) -> str:
    """Why cuDNN does not take these operands, on any GPU; "" if it does."""
    (s, _, d), (t, _, e) = q.shape[-3:], v.shape[-3:]
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"q is {q.dtype}; cuDNN takes bfloat16 and float16"
    if not (q.dtype == k.dtype == v.dtype):
        return f"q is {q.dtype}, k {k.dtype}, v {v.dtype}; cuDNN takes one type"
    if 0 in (*q.shape, *k.shape, *v.shape):
        return f"an operand is empty: q{list(q.shape)}, k{list(k.shape)}, v{list(v.shape)}"
    for name, size in (("d, of q and k,", d), ("e, of v,", e)):
        if size % 8 or size > 128:
            return f"head dim {name} is {size}; cuDNN takes multiples of 8 up to 128"
    if s < 2 or t < 2:
        return f"q has {s} and k has {t} positions; cuDNN takes 2 and more"
    return ""


@cache
def gpu_refuses(same_head_dims: bool, repeatable_dropout: bool) -> str:
    """Why this process's GPU does not take the rest; "" if it does, or if there is none."""
    if not _lib.has_cuda_device():
        return ""
    capability = jax.devices("cuda")[0].compute_capability
    major = int(str(capability).split(".")[0])
    found = f"the GPU has compute capability {capability}"
    if major < 8:
        return f"{found}; cuDNN attention needs 8.0 (Ampere)"
    if major < 9 and not same_head_dims:
        return f"{found}; cuDNN needs 9.0 (Hopper) where v's head dim is not q's"
    if major == 10 and repeatable_dropout:
        return f"{found}; cuDNN has no deterministic gradients with dropout there"
    return ""


def parts_of(qkv):
    """The types of q, k, v in `qkv`."""
    return (jax.ShapeDtypeStruct((*qkv.shape[:-3], *qkv.shape[-2:]), qkv.dtype),) * 3


def _workspace(kind, q, k, v, *, packed=False, causal, scale, dropout_rate, deterministic=False) -> int:
    """Bytes, from cuDNN's plan where there is a GPU; else (cross-lowering) from above."""
    (b, s, h, d), (t, g, e) = q.shape, v.shape[1:]
    module = _lib.require_for_lowering()
    if module:
        dtype = "bf16" if q.dtype == jnp.bfloat16 else "f16"
        attrs = (packed, causal, scale, dropout_rate, deterministic)
        return module.attention_workspace(kind, dtype, b, s, t, h, g, d, e, *attrs)
    slack = 16 << 20
    if kind == "fwd":
        return slack + 8 * b * h * s
    whole = 4 * b * h * (s * (d + 2) + t * (d + e))  # f32 dq, row sums, and dk, dv of every query head
    return slack + whole + (2 * b * h * (s + 128) * (t + 128) if deterministic else 0)


def _packed_workspace(kind, qkv, **attrs) -> int:
    b, s, _, h, d = qkv.shape
    part = jax.ShapeDtypeStruct((b, s, h, d), qkv.dtype)
    return _workspace(kind, part, part, part, packed=True, **attrs)


def _flat(x, axes):
    """The axes before the last `axes` as one."""
    return x.reshape(prod(x.shape[: x.ndim - axes]), *x.shape[x.ndim - axes :])


def _numbered(seed, shape):
    """u32[2] -> u32[*shape, 4]: the seed, the number of the row and head in its shard, 0.

    The kernel reads the first 4 words: seed and offset, i64 each.
    """
    number = jnp.arange(prod(shape), dtype=jnp.uint32).reshape(shape)
    return jnp.stack([jnp.full(shape, seed[0]), jnp.full(shape, seed[1]), number, jnp.zeros_like(number)], axis=-1)


def _drawn_here(rng):
    """What the kernel draws its mask from, on this shard.

    cuDNN has one seed for all rows and heads, and draws by their numbers in the shard. The sum of the words of a
    shard, which are random bits, is a seed of its own; the words of each mapped key of a `vmap` are in it.
    """
    return None if rng is None else _numbered(jnp.sum(rng[..., :2], range(rng.ndim - 1), jnp.uint32), rng.shape[:-1])


def _lse_if_drawn_here(lse, drawn):
    """`lse`, or NaN, and so NaN gradients, where the backward pass does not see the shard that the mask was drawn for:
    another sharding than forward, or a `vmap` over dout alone. The kernel would draw another mask."""
    if drawn is None:
        return lse
    seed = drawn.reshape(-1, drawn.shape[-1])[0, :2]
    return jnp.where(jnp.all(drawn == _numbered(seed, drawn.shape[:-1])), lse, jnp.nan)


def _flat_rng(rng):
    return None if rng is None else _flat(rng, 2)


def _results(out, lse, drawn):
    """Without dropout nothing is drawn, and the call has two results."""
    return [out, lse] if drawn is None else [out, lse, drawn]


def _fwd_cuda(call, q, k, v, rng, **attrs):
    if cudnn_refuses(q, k, v):  # the op means the same for every type and size
        return _results(*_fwd_reference(q, k, v, rng, **attrs))
    drawn = _drawn_here(rng)
    operands = (*(_flat(x, 3) for x in (q, k, v)), _flat_rng(drawn))
    out, lse = call(*operands, outputs=("out", "lse"), **attrs)
    return _results(*(x.reshape(*q.shape[:-3], *x.shape[1:]) for x in (out, lse)), drawn)


def _bwd_cuda(call, dout, q, k, v, out, lse, drawn, **attrs):
    if cudnn_refuses(q, k, v):
        return _bwd_reference(dout, q, k, v, out, lse, drawn, **attrs)
    lse = _lse_if_drawn_here(lse, drawn)
    grads = call(*(_flat(x, 3) for x in (dout, q, k, v, out)), _flat(lse, 2), _flat_rng(drawn), **attrs)
    return [grad.reshape(x.shape) for grad, x in zip(grads, (q, k, v), strict=True)]


def _packed_fwd_cuda(call, qkv, rng, **attrs):
    if cudnn_refuses(*parts_of(qkv)):
        return _results(*_packed_fwd_reference(qkv, rng, **attrs))
    drawn = _drawn_here(rng)
    out, lse = call(_flat(qkv, 4), _flat_rng(drawn), outputs=("out", "lse"), **attrs)
    return _results(*(x.reshape(*qkv.shape[:-4], *x.shape[1:]) for x in (out, lse)), drawn)


def _packed_bwd_cuda(call, dout, qkv, out, lse, drawn, **attrs):
    if cudnn_refuses(*parts_of(qkv)):
        return _packed_bwd_reference(dout, qkv, out, lse, drawn, **attrs)
    lse = _lse_if_drawn_here(lse, drawn)
    (grad,) = call(_flat(dout, 3), _flat(qkv, 4), _flat(out, 3), _flat(lse, 2), _flat_rng(drawn), **attrs)
    return [grad.reshape(qkv.shape)]


attention_fwd = Op(
    "te_attention_fwd",
    "q: b... s (g r) d, k: b... t g d, v: b... t g e, rng?: b... (g r) w -> "
    "out: b... s (g r) e, lse: b... (g r) s, drawn?: b... (g r) w",
    replicated="s t d e r w",
    dtypes=lambda q, k, v, rng, **attrs: (q, jnp.float32, rng),
    reference=_fwd_reference,
    workspace=lambda q, k, v, rng, **attrs: _workspace("fwd", q, k, v, **attrs),
    cuda=_fwd_cuda,
)
"""softmax(scale * q k^T) v per head; query head i reads key head i // r.

q, k, v: bf16 or f16 through cuDNN, any floating type elsewhere. scale: float.
causal: query i sees keys 0 .. i.
dropout_rate: of the probabilities, with rng; 0.0 without.
rng: u32[b..., h, 4], random bits, other ones for every row and head: so shards differ.
out: of q's type. lse: f32, natural log of the sum of exp(scale * q k^T) over the keys seen; -inf if none is.
drawn: with rng: what the backward pass draws the same mask from. The mask depends on the sharding where cuDNN draws it.
"""

attention_bwd = Op(
    "te_attention_bwd",
    "dout: b... s (g r) e, q: b... s (g r) d, k: b... t g d, v: b... t g e, out: b... s (g r) e, "
    "lse: b... (g r) s, drawn?: b... (g r) w -> dq: b... s (g r) d, dk: b... t g d, dv: b... t g e",
    replicated="s t d e r w",
    dtypes=lambda dout, q, k, v, *_, **attrs: (q, k, v),
    reference=_bwd_reference,
    workspace=lambda dout, q, k, v, *_, **attrs: _workspace("bwd", q, k, v, **attrs),
    cuda=_bwd_cuda,
)
"""The gradients of `attention_fwd`'s out from its operands and results. deterministic: bitwise repeatable."""

attention_packed_fwd = Op(
    "te_attention_packed_fwd",
    "qkv: b... s c h d, rng?: b... h w -> out: b... s h d, lse: b... h s, drawn?: b... h w",
    replicated="s c d w",
    dtypes=lambda qkv, rng, **attrs: (qkv, jnp.float32, rng),
    reference=_packed_fwd_reference,
    workspace=lambda qkv, rng, **attrs: _packed_workspace("fwd", qkv, **attrs),
    cuda=_packed_fwd_cuda,
)
"""`attention_fwd` of q, k, v side by side in one array, c = 3, as one projection makes them: none is copied."""

attention_packed_bwd = Op(
    "te_attention_packed_bwd",
    "dout: b... s h d, qkv: b... s c h d, out: b... s h d, lse: b... h s, drawn?: b... h w -> dqkv: b... s c h d",
    replicated="s c d w",
    dtypes=lambda dout, qkv, *_, **attrs: (qkv,),
    reference=_packed_bwd_reference,
    workspace=lambda dout, qkv, *_, **attrs: _packed_workspace("bwd", qkv, **attrs),
    cuda=_packed_bwd_cuda,
)
"""The gradient of `attention_packed_fwd`'s out, side by side as well."""


class AttentionAttrs(NamedTuple):
    """The attributes of the ops."""

    causal: bool
    scale: float
    dropout_rate: float
    deterministic: bool  # of the backward pass


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def attention(operands, rng, attrs: AttentionAttrs, name: str | None):
    """out of `attention_fwd` for operands (q, k, v), of `attention_packed_fwd` for (qkv,).

    rng: u32[b..., h, 4], or None without dropout. name: of out, lse and drawn for checkpoint policies.
    """
    return _attention_fwd(operands, rng, attrs, name)[0]


def _attention_fwd(operands, rng, attrs, name):
    forward = attention_packed_fwd if len(operands) == 1 else attention_fwd
    outputs = ("out", "lse") if rng is None else ("out", "lse", "drawn")
    causal, scale, dropout_rate, _ = attrs
    results = forward(*operands, rng, outputs=outputs, causal=causal, scale=scale, dropout_rate=dropout_rate)
    if name:  # a policy that saves this name saves all that the backward pass needs of the forward kernel
        results = [checkpoint_name(x, name) for x in results]
    out, lse, *drawn = results
    return out, (operands, out, lse, drawn[0] if drawn else None)


def _attention_bwd(attrs, name, residuals, dout):
    operands, *saved = residuals
    backward = attention_packed_bwd if len(operands) == 1 else attention_bwd
    grads = backward(dout, *operands, *saved, **attrs._asdict())
    return tuple(like(grad, x) for grad, x in zip(grads, operands, strict=True)), None


attention.defvjp(_attention_fwd, _attention_bwd)
