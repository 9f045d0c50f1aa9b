"""The attention ops: cuDNN (FlashAttention, https://arxiv.org/abs/2205.14135) on CUDA, plain JAX elsewhere."""

from functools import cache
from math import prod

import jax
import jax.numpy as jnp

from te_jax import _lib
from te_jax._op import Op
from te_jax.ops import attention_reference as reference
from te_jax.ops.attention_decode import one_query
from te_jax.ops.attention_reference import BIAS_FORMS

# ---- what cuDNN takes ----------------------------------------------------------------------------


def cudnn_refuses(q, k, v) -> str:
    """Why cuDNN does not take these operands, on any GPU; "" if it does."""
    d, (t, _, e) = q.shape[-1], v.shape[-3:]
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"q is {q.dtype}; cuDNN takes bfloat16 and float16"
    if not (q.dtype == k.dtype == v.dtype):
        return f"q is {q.dtype}, k {k.dtype}, v {v.dtype}; cuDNN takes one type"
    if 0 in (*q.shape, *k.shape, *v.shape):
        return f"an operand is empty: q{list(q.shape)}, k{list(k.shape)}, v{list(v.shape)}"
    for name, size in (("d, of q and k,", d), ("e, of v,", e)):
        if size % 8 or size > 256:
            return f"head dim {name} is {size}; cuDNN takes multiples of 8 up to 256"
    if t < 2:
        return f"k has {t} positions; cuDNN takes 2 and more"
    return ""


def cudnn_refuses_backward(q) -> str:
    """Why the gradients are plain JAX's though cuDNN takes the operands; "" if they are not. Dropout, whose mask both
    passes draw, is then as well."""
    return "q has 1 position; its gradients are plain JAX" if q.shape[-3] == 1 else ""


@cache
def gpu_refuses(d: int, e: int, *, only_band: bool, has_bias: bool, deterministic: bool, drops: bool) -> str:
    """Why this process's GPU does not take the rest; "" if it does, or if there is none. d, e: head dims of q, v.

    only_band: attributes alone say which keys are hidden: no mask, no lengths, no bias.
    """
    if not _lib.has_cuda_device():
        return ""
    capability = jax.devices("cuda")[0].compute_capability
    major = int(str(capability).split(".")[0])
    found = f"the GPU has compute capability {capability}"
    if major < 8:
        return f"{found}; cuDNN attention needs 8.0 (Ampere)"
    if major < 9 and d != e:
        return f"{found}; cuDNN needs 9.0 (Hopper) where v's head dim is not q's"
    if major < 9 and not only_band:
        return f"{found}; lengths, masks and biases go to cuDNN on 9.0 (Hopper) and newer"
    if major != 9 and max(d, e) > 128:
        return f"{found}; cuDNN takes head dims over 128, here {max(d, e)}, on 9.0 (Hopper)"
    if major == 10 and has_bias:
        return f"{found}; cuDNN has no gradient of a bias beside lengths there"
    if major == 10 and deterministic and (drops or _lib.status().cudnn < 91800):
        return f"{found}; cuDNN has no deterministic gradients there before 9.18, nor later with dropout"
    return ""


def parts_of(qkv):
    """The types of q, k, v in `qkv`."""
    return (jax.ShapeDtypeStruct((*qkv.shape[:-3], *qkv.shape[-2:]), qkv.dtype),) * 3


# ---- the CUDA call -------------------------------------------------------------------------------


def _workspace(kind, q, k, v, *rest, outputs, packed=False, deterministic=False, **attrs) -> int:
    """Bytes, from cuDNN's plan where there is a GPU; else (cross-lowering) from above. rest: biases, segments."""
    (b, s, h, d), (t, g, e) = q.shape, v.shape[1:]
    *biases, segments = rest
    form, bias = next(((f, x) for f, x in zip(BIAS_FORMS, biases, strict=True) if x is not None), ("", None))
    dbias = any(name.startswith("dbias") for name in outputs)
    module = _lib.require_for_lowering()
    if module:
        return module.attention_workspace(
            kind, "bf16" if q.dtype == jnp.bfloat16 else "f16", b, s, t, h, g, d, e, packed=packed,
            segments=0 if segments is None else segments.shape[1], deterministic=deterministic,
            bias_b=0 if bias is None else b if "b" in form else 1,
            bias_h=0 if bias is None else h if "h" in form else 1,
            bias_f32=bias is not None and bias.dtype == jnp.float32, dbias=dbias, **attrs,
        )  # fmt: skip
    slack = (16 << 20) + (64 * b * segments.shape[1] if segments is not None else 0)
    if kind == "fwd":
        return slack + 8 * b * h * s
    whole = 4 * b * h * (s * (d + 2) + t * (d + e))  # f32 dq, row sums, and dk, dv of every query head
    return slack + whole + (2 * b * h * (s + 128) * (t + 128) if deterministic or dbias else 0)


def _packed_workspace(kind, qkv, *rest, **attrs) -> int:
    b, s, _, h, d = qkv.shape
    part = jax.ShapeDtypeStruct((b, s, h, d), qkv.dtype)
    return _workspace(kind, part, part, part, *rest, packed=True, **attrs)


def flat(x, axes):
    """The axes before the last `axes` as one; None stays."""
    return None if x is None else x.reshape(prod(x.shape[: x.ndim - axes]), *x.shape[x.ndim - axes :])


def _extras(biases, segments):
    """Biases and segments with the batch as one axis."""
    each = (flat(x, 3 if form == "bh" else 2) if "b" in form else x for form, x in zip(BIAS_FORMS, biases))
    return (*each, flat(segments, 2))


_SEQUENCES = ("q", "k", "v", "qkv", "out", "dout", "dq", "dk", "dv", "dqkv")


def _layout(name, ndim, *, seq_major, **attrs):
    """How an array lies in the kernel's memory: its axes from the outermost to the innermost."""
    return (1, 0, *range(2, ndim)) if seq_major and name in _SEQUENCES else tuple(range(ndim))


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


def _forward(refused, plain, call, operands, batch, biases, segments, rng, attrs):
    """The call of a forward op on operands [b..., s, ...], `batch` being the shape of b...; or its reference."""
    if refused:  # the op means the same for every type and size
        return plain(*operands, *biases, segments, rng, **attrs)
    drawn = _drawn_here(rng)
    each = (flat(x, x.ndim - len(batch)) for x in operands)
    out, lse = _run(call, *each, *_extras(biases, segments), flat(drawn, 2), **attrs)
    if segments is not None and lse.shape[-1] == 1:
        # For single queries of given lengths cuDNN 9.19 gives a wrong lse. Where nobody reads it XLA drops all of this.
        lse = plain(*operands, *biases, segments, rng, **attrs)[1]
    return (*(x.reshape(*batch, *x.shape[1:]) for x in (out, lse)), drawn)


def _run(call, *operands, **attrs):
    """The kernel, on arrays with one batch axis -> out, lse [b, h, s]. Segments and rng come last."""
    out, lse = call(*operands, outputs=("out", "lse"), **attrs)
    if operands[-2] is not None:  # of segments it is [b, s, h]
        lse = jnp.swapaxes(lse.reshape(lse.shape[0], lse.shape[2], lse.shape[1]), 1, 2)
    return out, lse


def _backward(refused, plain, call, dout, operands, batch, biases, segments, out, lse, drawn, attrs):
    """The same of a backward op."""
    if refused:
        return plain(dout, *operands, *biases, segments, out, lse, drawn, **attrs)
    lse = _lse_if_drawn_here(lse, drawn)
    joined = lambda x: flat(x, x.ndim - len(batch))
    extras, like = _extras(biases, segments), [*operands, *(x for x in biases if x is not None)]
    lse = joined(lse)
    if segments is not None:
        lse = jnp.swapaxes(lse, 1, 2).reshape(lse.shape)
    grads = call(joined(dout), *map(joined, operands), *extras, joined(out), lse, flat(drawn, 2), **attrs)
    return [grad.reshape(x.shape) for grad, x in zip(grads, like)]  # without dbias: the bias is left over


def _fwd_cuda(call, q, k, v, bias_bh, bias_b, bias_h, bias, segments, rng, **attrs):
    biases = (bias_bh, bias_b, bias_h, bias)
    refused = cudnn_refuses(q, k, v) or (rng is not None and cudnn_refuses_backward(q))
    seen_by_all = attrs["left"] == attrs["right"] == -1 and (segments is None or segments.shape[-2] == 1)
    described = rng is not None or attrs["seq_major"] or any(bias is not None for bias in biases)
    if q.shape[-3] == 1 and seen_by_all and not (refused or described):
        run = lambda q, k, v, segments: _run(call, q, k, v, *biases, segments, None, **attrs)
        return *one_query(run, q, k, v, segments), None
    return _forward(refused, reference.forward, call, (q, k, v), q.shape[:-3], biases, segments, rng, attrs)


def _packed_fwd_cuda(call, qkv, bias_bh, bias_b, bias_h, bias, segments, rng, **attrs):
    biases, refused = (bias_bh, bias_b, bias_h, bias), cudnn_refuses(*parts_of(qkv))
    return _forward(refused, reference.packed_forward, call, (qkv,), qkv.shape[:-4], biases, segments, rng, attrs)


def _bwd_cuda(call, dout, q, k, v, bias_bh, bias_b, bias_h, bias, segments, *saved, **attrs):
    biases, batch = (bias_bh, bias_b, bias_h, bias), q.shape[:-3]
    refused = cudnn_refuses(q, k, v) or cudnn_refuses_backward(q)
    return _backward(refused, reference.backward, call, dout, (q, k, v), batch, biases, segments, *saved, attrs)


def _packed_bwd_cuda(call, dout, qkv, bias_bh, bias_b, bias_h, bias, segments, *saved, **attrs):
    biases, refused, batch = (bias_bh, bias_b, bias_h, bias), cudnn_refuses(*parts_of(qkv)), qkv.shape[:-4]
    return _backward(refused, reference.packed_backward, call, dout, (qkv,), batch, biases, segments, *saved, attrs)


# ---- the ops -------------------------------------------------------------------------------------

_EXTRAS = "bias_bh?: b... {h} s t, bias_b?: b... s t, bias_h?: {h} s t, bias?: s t, segments?: b... n f"
_SPLIT, _JOINED = _EXTRAS.format(h="(g r)"), _EXTRAS.format(h="h")
_DBIASES = "dbias_bh?: b... {h} s t, dbias_b?: b... s t, dbias_h?: {h} s t, dbias?: s t"
_SUMS = dict.fromkeys(("dbias_b", "dbias_h", "dbias"), "sum")

attention_fwd = Op(
    "te_attention_fwd",
    f"q: b... s (g r) d, k: b... t g d, v: b... t g e, {_SPLIT}, rng?: b... (g r) w -> "
    "out: b... s (g r) e, lse: b... (g r) s, drawn?: b... (g r) w",
    replicated="s t d e r w n f",
    dtypes=lambda q, *rest, **attrs: (q, jnp.float32, rest[-1]),
    reference=reference.forward,
    workspace=lambda *operands, **attrs: _workspace("fwd", *operands[:-1], **attrs),
    layout=_layout,
    cuda=_fwd_cuda,
)
"""softmax(scale * q k^T + bias, masked) v per head; query head i reads key head i // r.

q, k, v: bf16 or f16 through cuDNN, any floating type elsewhere. scale: float.
bias_bh, bias_b, bias_h, bias: one bias, by the axes that it has beside s and t; f32 or of q's type.
left, right: int, a query sees the keys from `left` before its position to `right` after it; -1 is open.
bottom_right: the last query (of a segment) is at the last key, else the first one is at the first.
segments: i32[b..., n, 4], the first query of each segment, its queries, its first key, its keys: tokens see their
    segment alone. One that begins below 0 is not there; none overlap. Absent: each row is one.
seq_major: the kernel's arrays lie as [s, b, heads, d], with one batch axis and without segments; else as they are.
dropout_rate: of the probabilities, with rng; 0.0 without.
rng: u32[b..., h, 4], random bits, other ones for every row and head: so shards differ.
out: of q's type. lse: f32, natural log of the sum of exp(logits) over the keys seen. One that sees none has 0, -inf.
drawn: with rng: what the backward pass draws the same mask from. The mask depends on the sharding where cuDNN draws it.
"""

attention_bwd = Op(
    "te_attention_bwd",
    f"dout: b... s (g r) e, q: b... s (g r) d, k: b... t g d, v: b... t g e, {_SPLIT}, out: b... s (g r) e, "
    "lse: b... (g r) s, drawn?: b... (g r) w -> dq: b... s (g r) d, dk: b... t g d, dv: b... t g e, "
    + _DBIASES.format(h="(g r)"),
    replicated="s t d e r w n f",
    combine=_SUMS,
    dtypes=lambda dout, q, k, v, *_, **attrs: (q, k, v, q, q, q, q),
    reference=reference.backward,
    workspace=lambda dout, *operands, **attrs: _workspace("bwd", *operands[:-3], **attrs),
    layout=_layout,
    cuda=_bwd_cuda,
)
"""The gradients of `attention_fwd`'s out from its operands and results. deterministic: bitwise repeatable.

That of a bias is of q's type.
"""

attention_packed_fwd = Op(
    "te_attention_packed_fwd",
    f"qkv: b... s c h d, {_JOINED}, rng?: b... h w -> out: b... s h d, lse: b... h s, drawn?: b... h w",
    replicated="s t c d w n f",
    dtypes=lambda qkv, *rest, **attrs: (qkv, jnp.float32, rest[-1]),
    reference=reference.packed_forward,
    workspace=lambda *operands, **attrs: _packed_workspace("fwd", *operands[:-1], **attrs),
    layout=_layout,
    cuda=_packed_fwd_cuda,
)
"""`attention_fwd` of q, k, v side by side in one array, c = 3, as one projection makes them: none is copied."""

attention_packed_bwd = Op(
    "te_attention_packed_bwd",
    f"dout: b... s h d, qkv: b... s c h d, {_JOINED}, out: b... s h d, lse: b... h s, drawn?: b... h w -> "
    "dqkv: b... s c h d, " + _DBIASES.format(h="h"),
    replicated="s t c d w n f",
    combine=_SUMS,
    dtypes=lambda dout, qkv, *_, **attrs: (qkv,) * 5,
    reference=reference.packed_backward,
    workspace=lambda dout, *operands, **attrs: _packed_workspace("bwd", *operands[:-3], **attrs),
    layout=_layout,
    cuda=_packed_bwd_cuda,
)
"""The gradient of `attention_packed_fwd`'s out, side by side as well."""
