"""The attention ops: cuDNN (FlashAttention, https://arxiv.org/abs/2205.14135) on CUDA, plain JAX elsewhere."""

from functools import cache, partial
from math import prod

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


def _fwd_reference(q, k, v, *, causal, scale):
    q32, k32, v32 = (x.astype(_wide(x)) for x in (q, k, v))
    logits = _causal_logits(q32, k32, causal, scale)
    top = finite_top(jnp.max(logits, -1, keepdims=True, initial=-jnp.inf))
    weights = jnp.exp(logits - top)
    total = jnp.sum(weights, -1, keepdims=True)
    out = mix(weights / jnp.where(total == 0, 1, total), v32)
    lse = (top + jnp.log(total))[..., 0]
    return out.astype(q.dtype), lse.astype(jnp.float32)


def _bwd_reference(dout, q, k, v, out, lse, *, causal, scale, deterministic):
    del deterministic  # XLA's sums have a fixed order
    types, g = (q.dtype, k.dtype, v.dtype), k.shape[-2]
    dout, q, k, v, out = (x.astype(_wide(x)) for x in (dout, q, k, v, out))
    probs = jnp.exp(_causal_logits(q, k, causal, scale) - finite_top(lse)[..., None])
    delta = jnp.swapaxes(jnp.sum(dout * out, -1), -1, -2)  # [b..., h, s]: the sum of probs * dprobs over t
    dlogits = scale * probs * (scores(dout, v) - delta[..., None])
    dq = mix(dlogits, k)
    dk = _einsum("...grst,...sgrd->...tgd", _group_heads(dlogits, g), _group(q, g))
    dv = _einsum("...grst,...sgre->...tge", _group_heads(probs, g), _group(dout, g))
    return [grad.astype(dtype) for grad, dtype in zip((dq, dk, dv), types, strict=True)]


def _parts(qkv):
    """[b..., s, 3, h, d] -> q, k, v: [b..., s, h, d] each."""
    return tuple(qkv[..., i, :, :] for i in range(3))


def _packed_fwd_reference(qkv, **attrs):
    return _fwd_reference(*_parts(qkv), **attrs)


def _packed_bwd_reference(dout, qkv, out, lse, **attrs):
    return [jnp.stack(_bwd_reference(dout, *_parts(qkv), out, lse, **attrs), axis=-3)]


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
def gpu_refuses(same_head_dims: bool) -> str:
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
    return ""


def parts_of(qkv):
    """The types of q, k, v in `qkv`."""
    return (jax.ShapeDtypeStruct((*qkv.shape[:-3], *qkv.shape[-2:]), qkv.dtype),) * 3


def _workspace(kind, q, k, v, *, packed=False, causal, scale, deterministic=False) -> int:
    """Bytes, from cuDNN's plan where there is a GPU; else (cross-lowering) from above."""
    (b, s, h, d), (t, g, e) = q.shape, v.shape[1:]
    module = _lib.require_for_lowering()
    if module:
        dtype = "bf16" if q.dtype == jnp.bfloat16 else "f16"
        return module.attention_workspace(kind, dtype, b, s, t, h, g, d, e, packed, causal, scale, deterministic)
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


def _fwd_cuda(call, q, k, v, **attrs):
    if cudnn_refuses(q, k, v):  # the op means the same for every type and size
        return _fwd_reference(q, k, v, **attrs)
    out, lse = call(*(_flat(x, 3) for x in (q, k, v)), **attrs)
    return [x.reshape(*q.shape[:-3], *x.shape[1:]) for x in (out, lse)]


def _bwd_cuda(call, dout, q, k, v, out, lse, **attrs):
    if cudnn_refuses(q, k, v):
        return _bwd_reference(dout, q, k, v, out, lse, **attrs)
    grads = call(*(_flat(x, 3) for x in (dout, q, k, v, out)), _flat(lse, 2), **attrs)
    return [grad.reshape(x.shape) for grad, x in zip(grads, (q, k, v), strict=True)]


def _packed_fwd_cuda(call, qkv, **attrs):
    if cudnn_refuses(*parts_of(qkv)):
        return _packed_fwd_reference(qkv, **attrs)
    return [x.reshape(*qkv.shape[:-4], *x.shape[1:]) for x in call(_flat(qkv, 4), **attrs)]


def _packed_bwd_cuda(call, dout, qkv, out, lse, **attrs):
    if cudnn_refuses(*parts_of(qkv)):
        return _packed_bwd_reference(dout, qkv, out, lse, **attrs)
    (grad,) = call(_flat(dout, 3), _flat(qkv, 4), _flat(out, 3), _flat(lse, 2), **attrs)
    return [grad.reshape(qkv.shape)]


attention_fwd = Op(
    "te_attention_fwd",
    "q: b... s (g r) d, k: b... t g d, v: b... t g e -> out: b... s (g r) e, lse: b... (g r) s",
    replicated="s t d e r",
    dtypes=lambda q, k, v, **attrs: (q, jnp.float32),
    reference=_fwd_reference,
    workspace=lambda q, k, v, **attrs: _workspace("fwd", q, k, v, **attrs),
    cuda=_fwd_cuda,
)
"""softmax(scale * q k^T) v per head; query head i reads key head i // r.

q, k, v: bf16 or f16 through cuDNN, any floating type elsewhere. scale: float.
causal: query i sees keys 0 .. i.
out: of q's type. lse: f32, natural log of the sum of exp(scale * q k^T) over the keys seen; -inf if none is.
"""

attention_bwd = Op(
    "te_attention_bwd",
    "dout: b... s (g r) e, q: b... s (g r) d, k: b... t g d, v: b... t g e, out: b... s (g r) e, "
    "lse: b... (g r) s -> dq: b... s (g r) d, dk: b... t g d, dv: b... t g e",
    replicated="s t d e r",
    dtypes=lambda dout, q, k, v, out, lse, **attrs: (q, k, v),
    reference=_bwd_reference,
    workspace=lambda dout, q, k, v, out, lse, **attrs: _workspace("bwd", q, k, v, **attrs),
    cuda=_bwd_cuda,
)
"""The gradients of `attention_fwd`'s out from its operands and results. deterministic: bitwise repeatable."""

attention_packed_fwd = Op(
    "te_attention_packed_fwd",
    "qkv: b... s c h d -> out: b... s h d, lse: b... h s",
    replicated="s c d",
    dtypes=lambda qkv, **attrs: (qkv, jnp.float32),
    reference=_packed_fwd_reference,
    workspace=lambda qkv, **attrs: _packed_workspace("fwd", qkv, **attrs),
    cuda=_packed_fwd_cuda,
)
"""`attention_fwd` of q, k, v side by side in one array, c = 3, as one projection makes them: none is copied."""

attention_packed_bwd = Op(
    "te_attention_packed_bwd",
    "dout: b... s h d, qkv: b... s c h d, out: b... s h d, lse: b... h s -> dqkv: b... s c h d",
    replicated="s c d",
    dtypes=lambda dout, qkv, out, lse, **attrs: (qkv,),
    reference=_packed_bwd_reference,
    workspace=lambda dout, qkv, out, lse, **attrs: _packed_workspace("bwd", qkv, **attrs),
    cuda=_packed_bwd_cuda,
)
"""The gradient of `attention_packed_fwd`'s out, side by side as well."""


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def attention(operands, attrs, name):
    """out of `attention_fwd` for operands (q, k, v), of `attention_packed_fwd` for (qkv,).

    attrs: causal, scale, deterministic. name: of out and lse for checkpoint policies, or None.
    """
    return _attention_fwd(operands, attrs, name)[0]


def _attention_fwd(operands, attrs, name):
    causal, scale, _ = attrs
    forward = attention_packed_fwd if len(operands) == 1 else attention_fwd
    out, lse = forward(*operands, causal=causal, scale=scale)
    if name:  # a policy that saves this name saves all that the backward pass needs of the forward kernel
        out, lse = checkpoint_name(out, name), checkpoint_name(lse, name)
    return out, (operands, out, lse)


def _attention_bwd(attrs, name, residuals, dout):
    operands, *saved = residuals
    causal, scale, deterministic = attrs
    backward = attention_packed_bwd if len(operands) == 1 else attention_bwd
    grads = backward(dout, *operands, *saved, causal=causal, scale=scale, deterministic=deterministic)
    return (tuple(like(grad, x) for grad, x in zip(grads, operands, strict=True)),)


attention.defvjp(_attention_fwd, _attention_bwd)
