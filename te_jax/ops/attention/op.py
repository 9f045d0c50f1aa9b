"""The attention ops: cuDNN (FlashAttention, https://arxiv.org/abs/2205.14135) on CUDA, plain JAX elsewhere."""

from functools import cache, partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp

from te_jax.core import extension
from te_jax.core.op import Op
from te_jax.ops.attention import reference
from te_jax.ops.attention.decode import is_one_query, one_query

# ---- what cuDNN takes ----------------------------------------------------------------------------


def cudnn_refuses(q: Any, k: Any, v: Any) -> str:
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


def cudnn_refuses_backward(q: Any) -> str:
    """Why the gradients are plain JAX's though cuDNN takes the operands; "" if they are not. Dropout, whose mask both
    passes draw, is then as well."""
    return "q has 1 position; its gradients are plain JAX" if q.shape[-3] == 1 else ""


@cache
def gpu_refuses(d: int, e: int, *, only_band: bool, has_bias: bool, deterministic: bool, drops: bool) -> str:
    """Why this process's GPU does not take the rest; "" if it does, or if there is none. d, e: head dims of q, v.

    only_band: only attributes say which keys are hidden: no mask, no lengths, no bias.
    """
    capability = extension.compute_capability()
    if capability is None:
        return ""
    major = int(capability.split(".")[0])
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
        return f"{found}; cuDNN has no gradient of a bias with lengths there"
    if major == 10 and deterministic and (drops or extension.status().cudnn < 91800):
        return f"{found}; cuDNN has no deterministic gradients there before 9.18, nor later with dropout"
    return ""


def present(*operands: Any) -> tuple[Any, ...]:
    """The operands that a call has."""
    return tuple(x for x in operands if x is not None)


def operand_types(*operands: Any) -> tuple[Any, ...]:
    """The types of q, k, v in (q, k, v), (q, kv) or (qkv,); a None is none of them."""
    operands = tuple(x for x in operands if x is not None)
    if len(operands) == 3:
        return operands
    *apart, joined = operands
    one = jax.ShapeDtypeStruct((*joined.shape[:-3], *joined.shape[-2:]), joined.dtype)
    return (*apart, *(one,) * (3 - len(apart)))


# ---- the CUDA call -------------------------------------------------------------------------------


def _workspace(q, k, v, kv, qkv, bias, segments, *rest, outputs, deterministic=False, **attrs) -> int:
    """Bytes, from cuDNN's plan where there is a GPU; else (cross-lowering) from above."""
    joined = 4 - len(present(q, k, v, kv, qkv))
    q, _, v = operand_types(q, k, v, kv, qkv)
    (b, s, h, d), (t, g, e) = q.shape, v.shape[1:]
    is_forward, dbias = "out" in outputs, "dbias" in outputs
    module = extension.require_for_lowering()
    if module:
        return module.attention_workspace(
            "fwd" if is_forward else "bwd", "bf16" if q.dtype == jnp.bfloat16 else "f16", b, s, t, h, g, d, e,
            joined=joined, segments=0 if segments is None else segments.shape[1],
            bias_b=0 if bias is None else bias.shape[0], bias_h=0 if bias is None else bias.shape[1],
            bias_f32=bias is not None and bias.dtype == jnp.float32, dbias=dbias, deterministic=deterministic,
            top="top" in outputs, **attrs,
        )  # fmt: skip
    slack = (16 << 20) + (64 * b * segments.shape[1] if segments is not None else 0)
    if is_forward:
        return slack + 8 * b * h * s
    whole = 4 * b * h * (s * (d + 2) + t * (d + e))  # f32 dq, row sums, and dk, dv of every query head
    return slack + whole + (2 * b * h * (s + 128) * (t + 128) if deterministic or dbias else 0)


def flatten_batch(x: Any, axes: int) -> Any:
    """The axes before the last `axes` as one; None stays."""
    return None if x is None else x.reshape(prod(x.shape[: x.ndim - axes]), *x.shape[x.ndim - axes :])


def _bias_of_rows(bias, batch):
    """The bias with the batch as one axis, of 1 or all rows: the kernel takes no part of the batch broadcast."""
    if bias is None:
        return None
    lead = bias.shape[:-3]
    whole = batch if any(size > 1 for size in lead) else lead
    return flatten_batch(jnp.broadcast_to(bias, (*whole, *bias.shape[-3:])), 3)


_SEQUENCES = ("q", "k", "v", "kv", "qkv", "out", "dout", "dq", "dk", "dv", "dkv", "dqkv")


def _layout(name, ndim, *, seq_major, interleaved, **attrs):
    """How an array lies in the kernel's memory: its axes from the outermost to the innermost."""
    axes = tuple(range(ndim))
    if ndim < 3:  # one that is absent
        return axes
    if seq_major and name in _SEQUENCES:
        axes = (1, 0, *axes[2:])
    return (*axes[:2], 3, 2, 4) if interleaved and name in ("kv", "qkv", "dkv", "dqkv") else axes


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
    another sharding than forward, or a `vmap` over only dout. The kernel would draw another mask."""
    if drawn is None:
        return lse
    seed = drawn.reshape(-1, drawn.shape[-1])[0, :2]
    return jnp.where(jnp.all(drawn == _numbered(seed, drawn.shape[:-1])), lse, jnp.nan)


def _call_forward(call, *operands, **attrs):
    """The lowering of the forward op."""
    *arrays, bias, segments, rng = operands
    q, k, v = operand_types(*arrays)
    if cudnn_refuses(q, k, v) or (rng is not None and cudnn_refuses_backward(q)):
        # The op means the same for every type and size.
        return reference.forward(*operands, **attrs)
    if len(present(*arrays)) == 3 and _decodes(q, bias, segments, rng, **attrs):
        run = lambda q, k, v, segments: _run(call, q, k, v, None, None, None, segments, None, **attrs)
        out, lse, top = one_query(run, *present(*arrays), segments)
        return out, lse, None, top
    batch, drawn = q.shape[:-3], _drawn_here(rng)
    each = (None if x is None else flatten_batch(x, x.ndim - len(batch)) for x in arrays)
    extras = _bias_of_rows(bias, batch), flatten_batch(segments, 2), flatten_batch(drawn, 2)
    asks_plain = q.shape[-3] == 1 and (segments is not None or "top" in call.keywords["outputs"])
    out, lse, top = _run(partial(call, outputs=("out", "lse")) if asks_plain else call, *each, *extras, **attrs)
    if asks_plain:
        # For single queries of given lengths cuDNN 9.19 gives a wrong lse. Where nobody reads it XLA drops all of this.
        _, plain, _, top = reference.forward(*operands, **attrs)
        lse = lse if segments is None else plain
    lse, top = (None if x is None else x.reshape(*batch, *x.shape[-2:]) for x in (lse, top))
    return out.reshape(*batch, *out.shape[1:]), lse, drawn, top


def _decodes(q, bias, segments, rng, *, left, right, seq_major, **attrs) -> bool:
    number = 0 if segments is None else segments.shape[-2]
    adds = bias is not None or rng is not None or seq_major
    return is_one_query(q.shape[-3], number, sees_all=left == right == -1, adds=adds)


def _run(call, *operands, **attrs):
    """The kernel, on arrays with one batch axis -> out, lse [b, h, s], and top, or None. Segments and rng come last."""
    outputs = tuple(name for name in call.keywords["outputs"] if name != "drawn")
    out, *by_query = call(*operands, **attrs | dict(outputs=outputs))
    if operands[-2] is not None:  # of segments they are [b, s, h]
        by_query = [jnp.swapaxes(x.reshape(x.shape[0], x.shape[2], x.shape[1]), 1, 2) for x in by_query]
    if len(by_query) == 1:
        return out, *by_query, None
    total, top = by_query
    lse = top + jnp.log(total)
    # The kernel's maximum drops a NaN, which its sum keeps; it is NaN as well where a logit is inf.
    return out, lse, jnp.where(jnp.isnan(lse) & (top < jnp.inf), jnp.nan, top)


def _backward(call, dout, *operands, **attrs):
    """The lowering of the backward op."""
    *arrays, bias, segments, out, lse, drawn = operands
    q, k, v = operand_types(*arrays)
    if cudnn_refuses(q, k, v) or cudnn_refuses_backward(q):
        return reference.backward(dout, *operands, **attrs)
    batch = q.shape[:-3]
    each = lambda x: None if x is None else flatten_batch(x, x.ndim - len(batch))
    lse = each(_lse_if_drawn_here(lse, drawn))
    if segments is not None:
        lse = jnp.swapaxes(lse, 1, 2).reshape(lse.shape)
    extras = _bias_of_rows(bias, batch), flatten_batch(segments, 2)
    grads = call(each(dout), *map(each, arrays), *extras, each(out), lse, flatten_batch(drawn, 2), **attrs)
    attended = present(*arrays)
    dbias = [_gradient_of_bias(grad, bias, batch) for grad in grads[len(attended) :]]
    return [*(grad.reshape(x.shape) for grad, x in zip(grads, attended)), *dbias]


def _gradient_of_bias(grad, bias, batch):
    """The gradient of the bias from the gradient of what `_bias_of_rows` makes of it."""
    if grad.size == bias.size:
        return grad.reshape(bias.shape)
    return reference.sum_to(grad.reshape(*batch, *bias.shape[-3:]), bias.shape)


# ---- the ops -------------------------------------------------------------------------------------

_ARRAYS = "q?: b... s (g r) d, k?: b... t g d, v?: b... t g e, kv?: b... t c g e, qkv?: b... s c g e"
_EXTRAS = "bias?: ~b... ~(g r) s t, segments?: b... n f"
_OF_QUERIES, _LSE, _WORDS = "b... s (g r) e", "b... (g r) s", "b... (g r) w"
_REPLICATED = "s t c d e r w n f"

attention_fwd: Op = Op(
    "te_attention_fwd",
    f"{_ARRAYS}, {_EXTRAS}, rng?: {_WORDS} -> out: {_OF_QUERIES}, lse: {_LSE}, drawn?: {_WORDS}, top?: {_LSE}",
    replicated=_REPLICATED,
    fenced="out lse top",
    dtypes=lambda *operands, **attrs: (present(*operands)[0], jnp.float32, operands[-1], jnp.float32),
    reference=reference.forward,
    workspace=_workspace,
    layout=_layout,
    cuda=_call_forward,
)
"""softmax(scale * q k^T + bias, masked) v per head; query head i reads key head i // r.

q, k, v: bf16 or f16 through cuDNN, any floating type elsewhere. scale: float.
kv: k and v side by side (c = 2), as one projection makes them, instead of both; qkv: q, k and v (c = 3, r = 1).
    They are not copied. interleaved: in the kernel's memory they lie as [b..., t, g, 2, d] and [b..., s, h, 3, d].
bias: f32 or of q's type.
left, right: int, a query sees the keys from `left` before its position to `right` after it; -1 is open.
bottom_right: the last query (of a segment) is at the last key, else the first one is at the first.
segments: i32[b..., n, 4], the first query of each segment, its queries, its first key, its keys: tokens see only
    their segment. One that begins below 0 is not there; none overlap. Absent: each row is one.
seq_major: the kernel's arrays lie as [s, b, heads, d], with one batch axis and without segments; else as they are.
dropout_rate: of the probabilities, with rng; 0.0 without.
rng: u32[b..., h, 4], random bits, other ones for every row and head: so shards differ.
out: of q's type. lse: f32, natural log of the sum of exp(logits) over the keys seen. One that sees none has 0, -inf.
drawn: with rng: what the backward pass draws the same mask from. The mask depends on the sharding where cuDNN draws it.
top: f32, the largest of the logits that a query sees, NaN where one is; -inf if it sees none. cuDNN's is inf of inf and
    NaN; with it lse is computed from cuDNN's sums, and may differ in the last bit.
"""

attention_bwd: Op = Op(
    "te_attention_bwd",
    f"dout: {_OF_QUERIES}, {_ARRAYS}, {_EXTRAS}, out: {_OF_QUERIES}, lse: {_LSE}, drawn?: {_WORDS} -> "
    "dq?: =q, dk?: =k, dv?: =v, dkv?: =kv, dqkv?: =qkv, dbias?: =bias",
    replicated=_REPLICATED,
    combine={"dbias": "sum"},
    dtypes=lambda dout, *operands, **attrs: (*operands[:5], present(*operands)[0]),
    reference=reference.backward,
    workspace=lambda dout, *operands, **attrs: _workspace(*operands, **attrs),
    layout=_layout,
    cuda=_backward,
)
"""The gradients of `attention_fwd`'s out by what attends, and by the bias, from its operands and results.

deterministic: bitwise repeatable. The bias's gradient is of q's type.
"""
