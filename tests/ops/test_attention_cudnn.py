"""The cuDNN ops on a GPU: against float64, and no worse than jax.nn's cuDNN attention."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_oracle import OPEN, attend_dense, error, one_hot_values, operands, run

import te_jax.flax as te_flax
from te_jax.ops import attention
from te_jax.ops.attention import (
    SequenceDescriptor,
    dot_product_attention,
    dot_product_attention_kv_packed,
    dot_product_attention_packed,
)

GPU_SHAPES = {  # b, s, t, h, g, d, e
    "mha": (2, 512, 512, 8, 8, 64, 64),
    "gqa": (1, 1024, 1024, 16, 4, 128, 128),
    "mqa": (2, 384, 384, 8, 1, 64, 64),
    "odd": (3, 199, 199, 4, 2, 64, 64),
    "odd_s<t": (2, 77, 333, 4, 4, 128, 128),
    "odd_s>t": (2, 333, 77, 4, 4, 128, 128),
    "short": (2, 2, 2, 2, 2, 64, 64),
    "narrow": (2, 256, 256, 4, 4, 40, 40),
    "d_not_e": (2, 256, 256, 8, 8, 128, 64),
    "long": (1, 4096, 4096, 2, 1, 128, 128),
}


NO_EXTRAS = (None,) * 4  # kv, qkv, bias and segments
ATTRS = dict(OPEN, scale=0.125)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", GPU_SHAPES)
def test_cudnn(shape, causal, dtype):
    q, k, v, dout = operands(GPU_SHAPES[shape], dtype)
    scale, mask_type = q.shape[-1] ** -0.5, "causal" if causal else "no_mask"
    attrs = dict(ATTRS, right=0 if causal else -1, scale=scale)
    out, lse = attention.attention_fwd(q, k, v, *NO_EXTRAS, None, outputs=("out", "lse"), **attrs)
    got = run(q, k, v, dout, attn_mask_type=mask_type, implementation="cudnn")
    want = dict(
        zip(
            ("out", "lse", "dq", "dk", "dv"),
            attend_dense(q, k, v, dout, causal=causal, scale=scale),
            strict=True,
        )
    )
    assert error(out, want["out"]) == error(got["out"], want["out"])
    # f32 logits of up to about 6, and exponentials to the base 2
    assert np.max(np.abs(np.asarray(lse) - want["lse"])) <= 1e-4
    errors = {name: error(got[name], want[name]) for name in got}
    # cuDNN rounds the probabilities (and dlogits) to the type, the result, and reads a rounded `out` in the
    # backward pass: three roundings; dk, dv of a group add up to 8 heads, whose errors are independent.
    u = 2**-9 if dtype == jnp.bfloat16 else 2**-12
    assert all(e <= 6 * u for e in errors.values()), errors
    try:
        peer = jax.jit(lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=causal, implementation="cudnn"))
        theirs, vjp = jax.vjp(peer, q, k, v)
        theirs = dict(zip(("out", "dq", "dk", "dv"), (theirs, *vjp(dout)), strict=True))
    except (NotImplementedError, ValueError, jax.errors.JaxRuntimeError):
        return  # a shape that jax.nn does not take
    assert all(errors[name] <= 1.2 * error(theirs[name], want[name]) + 1e-6 for name in errors), errors


@pytest.mark.gpu
def test_cudnn_deterministic_gradients_repeat_bit_for_bit():
    q, k, v, dout = operands((2, 1024, 1024, 8, 2, 64, 64), jnp.bfloat16)
    runs = [run(q, k, v, dout, attn_mask_type="causal", implementation="cudnn", deterministic=True) for _ in range(3)]
    for other in runs[1:]:
        for name, x in runs[0].items():
            np.testing.assert_array_equal(np.asarray(x, np.float32), np.asarray(other[name], np.float32), name)


@pytest.mark.gpu
def test_cudnn_call_is_in_the_program():
    q, k, v, dout = operands((2, 256, 256, 4, 2, 64, 64), jnp.bfloat16)
    call = jax.jit(lambda q, k, v, d: jax.vjp(dot_product_attention, q, k, v)[1](d))
    text = call.lower(q, k, v, dout).compile().as_text()
    assert "te_attention_fwd" in text and "te_attention_bwd" in text


@pytest.mark.gpu
def test_one_compilation_builds_each_plan_once():
    from te_jax import _cuda

    q, k, v, dout = operands((1, 272, 272, 2, 1, 72, 72), jnp.bfloat16)  # sizes of no other test
    call = jax.jit(lambda q, k, v, d: jax.vjp(dot_product_attention, q, k, v)[1](d))
    built = _cuda.cudnn_plan_builds()
    compiled = call.lower(q, k, v, dout).compile()
    for _ in range(3):
        jax.block_until_ready(compiled(q, k, v, dout))
    assert _cuda.cudnn_plan_builds() - built == 2  # forward and backward


def joined_equals_apart(q, k, v, dout, *, kv=False, interleaved=False, **kwargs):
    """Bit for bit: cuDNN on q, k, v, or k, v, side by side, and on each of its own."""
    attend, apart, together = dot_product_attention_packed, (), (q, k, v)
    if kv:
        attend, apart, together = dot_product_attention_kv_packed, (q,), (k, v)
    axis = -2 if interleaved else -3

    @jax.jit
    def step(operands, dout):
        call = lambda *x: attend(*x, interleaved=interleaved, implementation="cudnn", **kwargs)
        out, vjp = jax.vjp(call, *operands)
        return out, vjp(dout)

    out, grads = step((*apart, jnp.stack(together, axis)), dout)
    got = (out, *grads[:-1], *jnp.moveaxis(grads[-1], axis, 0))
    want = run(q, k, v, dout, implementation="cudnn", **kwargs)
    for name, x in zip(("out", "dq", "dk", "dv"), got, strict=True):
        np.testing.assert_array_equal(np.asarray(x, np.float32), np.asarray(want[name], np.float32), name)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["qkv", "kv"])
@pytest.mark.parametrize("interleaved", [False, True], ids=["", "interleaved"])
@pytest.mark.parametrize("mask_type", ["no_mask", "causal", "padding_causal"])
@pytest.mark.parametrize("sizes", [(2, 512, 8, 64), (3, 199, 4, 128), (2, 2, 2, 40), (1, 1024, 4, 128)])
def test_joined(sizes, mask_type, interleaved, kind):
    """The same kernel on the same numbers at other strides: the same bits, where the sums have a fixed order."""
    b, s, h, d = sizes
    kwargs = dict(attn_mask_type=mask_type, deterministic=True, kv=kind == "kv", interleaved=interleaved)
    if mask_type.startswith("padding"):
        kwargs["sequence_descriptor"] = SequenceDescriptor.from_seqlens(jnp.arange(b) * s // b + 1)
    groups, keys = (h, s) if kind == "qkv" else (h // 2, s + 1)
    for dtype in (jnp.bfloat16, jnp.float16):
        joined_equals_apart(*operands((b, s, keys, h, groups, d, d), dtype), **kwargs)


@pytest.mark.gpu
@pytest.mark.parametrize("groups", [8, 2])
def test_projection_goes_to_the_kernel_uncopied(groups):
    """No kernel of the compiled step reads or writes an array of q, k or v."""
    module = te_flax.MultiHeadAttention(head_dim=64, num_attention_heads=8, num_gqa_groups=groups, dtype=jnp.bfloat16)
    x = jnp.ones((2, 256, 512), jnp.bfloat16)
    variables = module.init(jax.random.key(0), x)
    step = jax.jit(jax.grad(lambda v, x: jnp.sum(module.apply(v, x)[0].astype(jnp.float32)), (0, 1)))
    text = step.lower(variables, x).compile().as_text()
    parts = 3 if groups == 8 else 2
    for name in ("te_attention_fwd", "te_attention_bwd"):
        (call,) = (line for line in text.splitlines() if f'custom_call_target="{name}"' in line)
        assert f"bf16[2,256,{parts},{groups},64]" in call
    one = rf"= bf16\[2,256,(1,)?{groups},64\]\S* (copy|slice|fusion)"
    all_of_them = rf"= bf16\[2,256,{parts},\S* (copy|concat|fusion)"
    moved = [line for line in text.splitlines() if re.search(one, line) or re.search(all_of_them, line)]
    assert not moved, moved


# ---- dropout -------------------------------------------------------------------------------------

RATE = 0.1
DROPOUT_SHAPES = {  # b, s, t, h, g, d, e
    "mha": (2, 512, 512, 8, 8, 64, 64),
    "gqa": (2, 256, 256, 8, 2, 128, 128),
    "odd": (3, 199, 333, 4, 4, 128, 64),
    "narrow": (2, 130, 130, 4, 1, 40, 40),
}


def read_mask(q, k, e, key, mask_type):
    """bool[b, h, s, t], True where a probability is kept: from the outs of one-hot values."""
    call = jax.jit(lambda v: dot_product_attention(
        q, k, v, attn_mask_type=mask_type, implementation="cudnn", dropout_rate=RATE, dropout_rng=key))  # fmt: skip
    outs = np.concatenate([np.asarray(call(v), np.float32) for v in one_hot_values(k, e)], -1)
    return np.swapaxes(outs != 0, 1, 2)[..., : k.shape[1]]


@pytest.mark.gpu
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("mask_type", ["no_mask", "causal"])
@pytest.mark.parametrize("shape", DROPOUT_SHAPES)
def test_dropout(shape, mask_type, deterministic):
    """The mask, read off the GPU, explains out and gradients in float64."""
    q, k, v, dout = operands(DROPOUT_SHAPES[shape], jnp.bfloat16)
    key, causal = jax.random.key(11), mask_type == "causal"
    kept = read_mask(q, k, v.shape[-1], key, mask_type)
    seen = np.broadcast_to(np.tri(*kept.shape[-2:], dtype=bool) if causal else True, kept.shape)
    assert not np.any(kept & ~seen)
    n = seen.sum()
    # 5 sigma of n draws, and the rate rounded to 16 bits
    assert abs(kept.sum() / n - (1 - RATE)) < 5 * np.sqrt(RATE * (1 - RATE) / n) + 2**-16, kept.sum() / n
    kwargs = dict(attn_mask_type=mask_type, implementation="cudnn", dropout_rate=RATE, deterministic=deterministic)
    got = run(q, k, v, dout, dropout_rng=key, **kwargs)
    scale = q.shape[-1] ** -0.5
    want = attend_dense(q, k, v, dout, causal=causal, scale=scale, factor=kept / (1 - RATE))
    want = dict(zip(("out", "lse", "dq", "dk", "dv"), want, strict=True))
    errors = {name: error(got[name], want[name]) for name in got}
    assert all(e <= 6 * 2**-9 for e in errors.values()), errors  # as without dropout
    again = run(q, k, v, dout, dropout_rng=key, **kwargs)
    for name in got if deterministic else ("out",):
        np.testing.assert_array_equal(np.asarray(got[name], np.float32), np.asarray(again[name], np.float32), name)


@pytest.mark.gpu
def test_dropout_packed():
    arrays = operands((2, 256, 256, 4, 4, 64, 64), jnp.bfloat16)
    kwargs = dict(attn_mask_type="causal", dropout_rate=RATE, dropout_rng=jax.random.key(11), deterministic=True)
    joined_equals_apart(*arrays, **kwargs)


@pytest.mark.gpu
def test_dropout_masks_are_independent():
    """Of rows, heads and queries of one call, of two keys, and of seeds that differ in one bit, low or high.

    cuDNN draws one number for several probabilities of a mask: on an H200, of 13 seeds far apart as of these, the
    correlations of masks have a standard deviation of 2.03 / 256, as if a quarter of the 256 x 256 were independent:
    four queries of a head, not more, have one mask.
    """
    q, k, _, _ = operands((2, 256, 256, 4, 4, 64, 64), jnp.bfloat16)
    seed = lambda low, high: jnp.zeros((2, 4, 4), jnp.uint32).at[0, 0, 0].set(low).at[0, 0, 1].set(high)
    attrs = dict(ATTRS, dropout_rate=RATE)
    call = jax.jit(lambda v, words: attention.attention_fwd(q, k, v, *NO_EXTRAS, words, **attrs)[0])

    def mask(words):
        outs = np.concatenate([np.asarray(call(v, words), np.float32) for v in one_hot_values(k, 64)], -1)
        return np.swapaxes(outs != 0, 1, 2)

    masks = [mask(seed(*words)) for words in ((5, 9), (4, 9), (5, 8), (5, 9 | 1 << 31), (5 | 1 << 31, 9))]
    np.testing.assert_array_equal(masks[0], mask(seed(5, 9)))
    random = np.stack([read_mask(q, k, 64, jax.random.key(i), "no_mask") for i in range(2)])
    rows = np.concatenate([np.stack(masks), random]).reshape(-1, 256 * 256).astype(np.float64)  # 7 x 8 masks
    centered = (rows - rows.mean(-1, keepdims=True)) / rows.std(-1, keepdims=True)
    correlation = centered @ centered.T / rows.shape[-1]
    sigma = 2 / 256  # off the diagonal; 6 of them for 1540 pairs
    assert np.abs(correlation - np.eye(len(rows))).max() < 6 * sigma
    lines = random.reshape(-1, 256)
    assert np.unique(lines, axis=0, return_counts=True)[1].max() <= 4


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
def test_dropout_of_other_shards_gives_nan(causal):
    """cuDNN would draw another mask than forward for rows that are not where they were: no number comes of it."""
    q, k, v, dout = operands((2, 256, 256, 4, 4, 64, 64), jnp.bfloat16)
    words = jax.random.bits(jax.random.key(0), (2, 4, 4), jnp.uint32)
    attrs = dict(ATTRS, right=0 if causal else -1, dropout_rate=RATE)
    out, lse, drawn = attention.attention_fwd(q, k, v, *NO_EXTRAS, words, outputs=("out", "lse", "drawn"), **attrs)
    for rows, is_nan in ((slice(0, 2), False), (slice(1, 2), True)):
        before, after = ([x[rows] for x in xs] for xs in ((dout, q, k, v), (out, lse, drawn)))
        grads = attention.attention_bwd(
            *before, *NO_EXTRAS, *after, outputs=("dq", "dk", "dv"), deterministic=False, **attrs
        )
        assert all(np.all(np.isnan(np.asarray(grad, np.float32)) == is_nan) for grad in grads)
