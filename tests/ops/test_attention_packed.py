"""Attention on q, k, v side by side against the same on separate arrays; nothing is copied on the way to the kernel."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import on_device
from attention_oracle import BOUND, error

import te_jax.flax as te_flax
from te_jax.ops.attention import (
    SequenceDescriptor,
    dot_product_attention,
    dot_product_attention_kv_packed,
    dot_product_attention_packed,
)


def parts(qkv):
    return tuple(qkv[..., i, :, :] for i in range(3))


def apart(qkv, **kwargs):
    return dot_product_attention(*parts(qkv), **kwargs)


@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        dict(attn_mask_type="causal", deterministic=True, context_checkpoint_name="context"),
        dict(window_size=(2, 0), scale=0.5),
        dict(sequence_descriptor=SequenceDescriptor.from_seqlens(jnp.asarray([3, 6]))),
    ],
    ids=["full", "causal", "window", "lengths"],
)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_equals_separate_arrays(kwargs, dtype):
    rng = np.random.default_rng(0)
    qkv = rng.standard_normal((2, 6, 3, 2, 16)).astype(np.float32).astype(dtype)
    dout = rng.standard_normal((2, 6, 2, 16)).astype(np.float32).astype(dtype)

    def both(x, dout, f):
        y, vjp = jax.vjp(lambda x: f(x, **kwargs), x)
        return y, vjp(dout)

    results = [jax.jit(both, static_argnums=2)(qkv, dout, f) for f in (dot_product_attention_packed, apart)]
    for got, want in zip(*map(jax.tree.leaves, results), strict=True):
        assert got.dtype == dtype and error(got, want) <= BOUND[dtype][0]


def test_max_logit_and_no_batch():
    qkv = on_device(np.random.default_rng(1).standard_normal((6, 3, 2, 16)), jnp.float32)
    run = jax.jit(lambda qkv: [f(qkv, return_max_logit=True) for f in (dot_product_attention_packed, apart)])
    (out, top), (want, want_top) = run(qkv)
    assert error(out, want) <= BOUND[jnp.float32][0] and error(top, want_top) <= BOUND[jnp.float32][0]


def test_kv_errors():
    q = jnp.ones((2, 6, 4, 16))
    for kv, interleaved, wanted in (
        (jnp.ones((2, 6, 3, 2, 16)), False, "2, heads, d"),
        (jnp.ones((2, 6, 2, 4, 16)), True, "heads, 2, d"),
    ):
        with pytest.raises(ValueError, match=rf"^dot_product_attention_kv_packed: kv has shape .*tokens, {wanted}\]"):
            dot_product_attention_kv_packed(q, kv, interleaved=interleaved)
    with pytest.raises(ValueError, match="^dot_product_attention_kv_packed: "):
        dot_product_attention_kv_packed(q, jnp.ones((2, 6, 2, 3, 16)))  # 4 heads, 3 groups


@pytest.mark.parametrize("kind", ["kv", "qkv"])
@pytest.mark.parametrize("interleaved", [False, True])
def test_joined_arrays_go_to_the_kernel_as_they_lie(kind, interleaved):
    """The call's operand and its gradient have the given array's order in memory: what turns it is undone there."""
    n, attend = (2, dot_product_attention_kv_packed) if kind == "kv" else (3, dot_product_attention_packed)
    q, joined = jnp.ones((2, 8, 4, 16), jnp.bfloat16), jnp.ones((2, 8, n, 4, 16), jnp.bfloat16)
    joined = jnp.swapaxes(joined, -3, -2) if interleaved else joined
    arrays = (q, joined) if kind == "kv" else (joined,)
    loss = lambda *x: jnp.sum(attend(*x, interleaved=interleaved).astype(jnp.float32))
    step = jax.jit(jax.grad(loss, len(arrays) - 1))
    text = step.trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    calls = [line for line in text.splitlines() if "custom_call @te_attention_" in line]
    fwd, bwd = calls
    turned, straight = ("dense<[4, 2, 3, 1, 0]>", "dense<[4, 3, 2, 1, 0]>")
    assert [line.count(turned if interleaved else straight) for line in (fwd, bwd)] == [1, 2]
    assert [line.count(straight if interleaved else turned) for line in (fwd, bwd)] == [0, 0]
    assert f"interleaved = {str(interleaved).lower()}" in fwd and f"interleaved = {str(interleaved).lower()}" in bwd
    assert not [found[0] for found in COPIES.finditer(text) if "transpose" not in found[0] and "<2x8x" in found[0]]


@pytest.mark.parametrize(
    ("qkv", "kwargs", "text"),
    [
        (jnp.ones((2, 6, 2, 2, 16)), {}, r"qkv has shape \(2, 6, 2, 2, 16\); pass \[b\.\.\., tokens, 3, heads, d\]"),
        (jnp.ones((3, 2, 16)), {}, "qkv has shape"),
        (jnp.ones((2, 6, 3, 2, 16)), dict(attn_mask_type="Casual"), "attn_mask_type is 'Casual'"),
        (jnp.ones((2, 6, 3, 2, 16)), dict(implementation="cudnn"), "float32; cuDNN takes"),
    ],
)
def test_errors(qkv, kwargs, text):
    with pytest.raises(ValueError, match=f"^dot_product_attention.*: .*{text}"):
        dot_product_attention_packed(qkv, **kwargs)


COPIES = re.compile(r"stablehlo\.(slice|dynamic_slice|concatenate|pad|dynamic_update_slice|transpose|gather)\b.*")


@pytest.mark.parametrize("fields", [{}, dict(use_bias=True), dict(enable_rotary_pos_emb=True, rotary_pos_emb_dim=8)])
def test_projection_goes_to_the_kernel_uncopied(fields):
    """b 2, s 8, 4 heads of 16: neither q, k, v nor their gradients are cut out, put together or transposed."""
    x = jnp.ones((2, 8, 32), jnp.bfloat16)
    fields = dict(head_dim=16, num_attention_heads=4, dtype=jnp.bfloat16) | fields
    for parts, module, others in (
        (3, te_flax.MultiHeadAttention(**fields), ()),
        (2, te_flax.MultiHeadAttention(**fields, num_gqa_groups=2), ()),
        (2, te_flax.MultiHeadAttention(**fields, attn_mask_type="no_mask"), (jnp.ones((2, 5, 32), jnp.bfloat16),)),
    ):
        _check_uncopied(parts, module, fields, x, *others)


def _check_uncopied(parts, module, fields, *inputs):
    variables = jax.eval_shape(module.init, jax.random.key(0), *inputs)
    step = jax.jit(jax.grad(lambda v, *x: jnp.sum(module.apply(v, *x)[0].astype(jnp.float32)), (0, 1)))
    text = step.trace(variables, *inputs).lower(lowering_platforms=("cuda",)).as_text()
    fwd, bwd = (line for line in text.splitlines() if "custom_call @te_attention_" in line)
    assert "@te_attention_fwd(" in fwd and "@te_attention_bwd(" in bwd
    joined = rf"tensor<2x\dx{parts}x\dx16xbf16>"
    assert [len(re.findall(joined, line)) for line in (fwd, bwd)] == [1, 2]
    calls = 0 if "enable_rotary_pos_emb" not in fields else 2 if parts == 3 else 4
    assert text.count("custom_call @te_rope(") == calls
    tokens = [found[0] for found in COPIES.finditer(text) if "<2x8x" in found[0] or "<2x5x" in found[0]]
    assert not tokens, tokens  # others are of weights


def test_copies_would_be_seen():
    x = jnp.ones((2, 8, 32), jnp.bfloat16)
    rotated = te_flax.MultiHeadAttention(head_dim=16, num_attention_heads=4, enable_rotary_pos_emb=True)
    forward = jax.jit(lambda x: rotated.init_with_output(jax.random.key(0), x)[0][0])
    text = forward.trace(x).lower(lowering_platforms=("cpu",)).as_text()
    assert any("<2x8x" in found[0] for found in COPIES.finditer(text))  # what the test looks for


def test_sequence_first_is_read_by_strides():
    """[s, b, heads, d]: what the module turns, the kernel's operand and result layouts turn back."""
    module = te_flax.DotProductAttention(head_dim=16, num_attention_heads=4, transpose_batch_sequence=True)
    x = jnp.ones((8, 2, 4, 16), jnp.bfloat16)
    step = jax.jit(jax.grad(lambda x: jnp.sum(module.apply({}, x, x, x).astype(jnp.float32))))
    text = step.trace(x).lower(lowering_platforms=("cuda",)).as_text()
    calls = [line for line in text.splitlines() if "custom_call @te_attention_" in line]
    sequences, turned = (
        (4, 5 + 3),
        "dense<[3, 2, 0, 1]> : tensor<4xindex>",
    )  # q, k, v, out; dout, q, k, v, out, dq, dk, dv
    assert [line.count(turned) for line in calls] == list(sequences)
    assert all(line.count("dense<[3, 2, 1, 0]>") == 0 and "seq_major = true" in line for line in calls)
