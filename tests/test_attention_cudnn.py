"""The cuDNN ops on a GPU: against float64, and no worse than jax.nn's cuDNN attention."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_oracle import attend_dense, error, operands, run

from te_jax.ops import attention
from te_jax.ops.attention import dot_product_attention

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


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", GPU_SHAPES)
def test_cudnn(shape, causal, dtype):
    q, k, v, dout = operands(GPU_SHAPES[shape], dtype)
    scale, mask_type = q.shape[-1] ** -0.5, "causal" if causal else "no_mask"
    out, lse = attention.attention_fwd(q, k, v, causal=causal, scale=scale)
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
