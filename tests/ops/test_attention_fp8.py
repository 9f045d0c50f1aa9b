"""The FP8 attention ops: against float64 attention of the same operands, within what rounding may do."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_fp8_oracle import (
    E4M3,
    E5M2,
    amax_close,
    backward,
    forward,
    fp8_array,
    half_step,
    stored_close,
)

from te_jax.ops.attention.fp8 import (
    LARGEST_SCALE,
    S_SCALE,
    attention_fp8_bwd,
    attention_fp8_fwd,
    backward_scales,
    forward_scales,
)

SHAPES = {  # b, s, t, h, g, d
    "mha": (2, 16, 16, 2, 2, 16),
    "gqa": (1, 33, 33, 8, 2, 32),
    "s<t": (2, 7, 33, 4, 4, 16),
    "s>t": (2, 33, 7, 4, 1, 16),
}
GPU_SHAPES = {
    "gqa": (1, 256, 256, 64, 8, 128),
    "mha": (2, 512, 512, 4, 4, 128),
    "odd": (2, 199, 199, 4, 2, 128),
    "odd_s<t": (2, 77, 333, 4, 2, 128),
    "odd_s>t": (2, 333, 77, 4, 4, 128),
    "short": (2, 2, 2, 2, 2, 128),
    "d64": (2, 256, 256, 4, 2, 64),
    "odd_d64": (3, 199, 199, 4, 4, 64),
    "d16": (2, 128, 128, 2, 2, 16),
    "d80": (2, 130, 130, 4, 4, 80),
    "long": (1, 2048, 2048, 2, 1, 128),
    "rows": (6, 128, 256, 16, 4, 128),  # causal gradients: two parts of three rows; of "gqa" two of half of its heads
    "mqa": (2, 128, 128, 56, 1, 128),  # a part has all heads of a group
    "rows_s>t": (2, 256, 128, 64, 8, 128),  # two parts of each row
    "unlike_rows": (5, 128, 128, 16, 4, 128),  # two and three
    "unlike_heads": (2, 128, 256, 53, 53, 128),  # 26 and 27 of each row
}
both_masks = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])


def operands(rng, sizes):
    """q, k, v in E4M3, and their scales."""
    b, s, t, h, g, d = sizes
    return zip(*(fp8_array(rng, shape) for shape in ((b, s, h, d), (b, t, g, d), (b, t, g, d))))


def run_forward(arrays, scales, **attrs):
    return jax.jit(lambda *a: attention_fp8_fwd(*a, **attrs))(*arrays, scales)


def check_forward(rng, sizes, causal):
    arrays, by = operands(rng, sizes)
    scales, attrs = forward_scales(*by, out=np.float32(100.0)), dict(causal=causal, scale=sizes[-1] ** -0.5)
    out, lse, amax = run_forward(arrays, scales, **attrs)
    want = forward(*arrays, scales, **attrs)
    o, lse64 = want["o"], want["lse"]
    stored_close(out, *o, 100.0, E4M3)
    assert np.max(np.abs(np.asarray(lse, np.float64) - lse64[0]) - lse64[1]) <= 0
    amax_close(amax, *o)
    # Two roundings, each off by half a step of up to 2**-3, evenly spread: no worse than that all in all.
    error = np.linalg.norm(np.asarray(out, np.float64) / 100.0 - o[0]) / np.linalg.norm(o[0])
    assert error <= np.sqrt(2) * 2**-4 / np.sqrt(3), error


@both_masks
@pytest.mark.parametrize("shape", SHAPES)
def test_forward(shape, causal, rng):
    check_forward(rng, SHAPES[shape], causal)


@pytest.mark.gpu
@both_masks
@pytest.mark.parametrize("shape", GPU_SHAPES)
def test_forward_on_gpu(shape, causal, rng):
    check_forward(rng, GPU_SHAPES[shape], causal)


def check_backward(rng, sizes, causal, dtype):
    (q, k, v), by = operands(rng, sizes)
    dout, dout_scale = fp8_array(rng, q.shape, dtype)
    out_scale, attrs = np.float32(100.0), dict(causal=causal, scale=sizes[-1] ** -0.5)
    out, lse, _ = run_forward((q, k, v), forward_scales(*by, out=out_scale), **attrs)
    spread = float(jnp.finfo(dtype).max) / 448  # of E5M2, whose numbers then are no more subnormal than E4M3's
    dp_scale, dq_scale, dk_scale, dv_scale = (np.float32(x * spread) for x in (100.0, 50.0, 40.0, 10.0))
    scales = backward_scales(*by, out_scale, dout_scale, dp_scale, dq_scale, dk_scale, dv_scale)
    arrays = (dout, q, k, v, out, lse, scales)
    got = jax.jit(lambda *a: attention_fp8_bwd(*a, **attrs))(*arrays)
    want = backward(*arrays, **attrs)
    assert np.abs(want["dp"][0]).max() * dp_scale < float(jnp.finfo(dtype).max)  # else the bound does not hold
    for name, data, scale, amax in zip(("dq", "dk", "dv"), got, (dq_scale, dk_scale, dv_scale), got[3:]):
        stored_close(data, *want[name], scale, dtype)
        amax_close(amax, *want[name])
    amax_close(got[6], *want["dp"])


both_types = pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)


@both_types
@both_masks
@pytest.mark.parametrize("shape", SHAPES)
def test_backward(shape, causal, dtype, rng):
    check_backward(rng, SHAPES[shape], causal, dtype)


@pytest.mark.gpu
@both_types
@both_masks
@pytest.mark.parametrize("shape", [name for name, sizes in GPU_SHAPES.items() if sizes[-1] == 128])
def test_backward_on_gpu(shape, causal, dtype, rng):
    check_backward(rng, GPU_SHAPES[shape], causal, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [(1, 128, 128, 64, 8, 128), (4, 128, 128, 32, 4, 128)], ids=["heads", "rows"])
def test_amaxes_of_all_parts(sizes, rng):
    """Only the first part of these causal gradients is not 0. Sums in f32, in any order, have 128 terms in dq and dp,
    in dk and dv 128 for each of a key head's 8 query heads."""
    (q, k, v), by = operands(rng, sizes)
    dout, dout_scale = fp8_array(rng, q.shape, E5M2)
    first = lambda x: x[:1, :, : x.shape[2] // (2 if len(x) == 1 else 1)]
    dout = jnp.zeros_like(dout).at[tuple(map(slice, first(dout).shape))].set(first(dout))
    scales = backward_scales(*by, np.float32(100.0), dout_scale, *map(np.float32, (100.0, 50.0, 40.0, 10.0)))

    @jax.jit
    def amaxes(dout, *arrays):
        attrs = dict(causal=True, scale=128**-0.5)
        out, lse, _ = attention_fp8_fwd(*arrays, forward_scales(*by, out=np.float32(100.0)), **attrs)
        return attention_fp8_bwd(dout, *arrays, out, lse, scales, **attrs)[3:]

    got, want = amaxes(dout, q, k, v), amaxes(*map(first, (dout, q, k, v)))
    assert min(want) > 0
    for one, other, terms in zip(got, want, (128, 1024, 1024, 128), strict=True):
        np.testing.assert_allclose(one, other, rtol=terms * 2.0**-23)


def test_probabilities_are_rounded():
    """cuDNN does not take one query: plain JAX, on a GPU as well.

    exp(logit) 0.55, times 256 is 140.8, is stored as 144: it counts as 0.5625, in a sum of 1.55.
    """
    one = jnp.ones((1, 1, 1, 1), E4M3)
    keys = jnp.concatenate([0 * one, one], 1)
    scales = forward_scales(1.0, 1.0, 1.0, out=1.0)
    _, lse, amax = attention_fp8_fwd(one, keys, keys, scales, causal=False, scale=float(np.log(0.55)))
    assert S_SCALE == 256
    np.testing.assert_allclose(amax, 0.5625 / 1.55, rtol=1e-6)
    np.testing.assert_allclose(lse, np.log(1.55), rtol=1e-6)


def check_scale_of_out(rng, sizes, factor=2.0):
    """amax is of o itself: it does not change with the scale, and the stored numbers follow it."""
    arrays, by = operands(rng, sizes)
    attrs = dict(causal=True, scale=sizes[-1] ** -0.5)
    once, twice = (run_forward(arrays, forward_scales(*by, out=np.float32(x)), **attrs) for x in (32, 32 * factor))
    assert float(once[2]) == float(twice[2]) > 0
    np.testing.assert_array_equal(once[1], twice[1])
    x, y = (np.asarray(r[0], np.float64) for r in (once, twice))
    normal = (np.abs(x) >= 2**-5) & (np.abs(y) < 448)  # else the steps differ, or it is saturated
    assert normal.mean() > 0.9
    np.testing.assert_array_equal(factor * x[normal], y[normal])
    o = forward(*arrays, forward_scales(*by, out=1.0), **attrs)["o"]
    amax_close(once[2], *o)


def check_saturation(rng, sizes):
    """What is too large is the largest number, not NaN, what is too small is 0, and the amax is always the same."""
    arrays, by = operands(rng, sizes)
    attrs = dict(causal=True, scale=sizes[-1] ** -0.5)
    scales = (2.0**13, LARGEST_SCALE, 1 / LARGEST_SCALE)  # a power of 2 does not round the amax
    runs = [run_forward(arrays, forward_scales(*by, out=np.float32(x)), **attrs) for x in scales]
    tops = [float(jnp.max(jnp.abs(out.astype(jnp.float32)))) for out, *_ in runs]
    assert tops == [448, 448, 0] and len({float(amax) for *_, amax in runs}) == 1 and float(runs[0][2]) > 0


def test_scale_of_out(rng):
    check_scale_of_out(rng, SHAPES["gqa"])
    check_saturation(rng, SHAPES["gqa"])


@pytest.mark.gpu
@pytest.mark.parametrize("shape", ["gqa", "odd", "d64"])
def test_scale_of_out_on_gpu(shape, rng):
    check_scale_of_out(rng, GPU_SHAPES[shape])
    check_saturation(rng, GPU_SHAPES[shape])


@pytest.mark.gpu
def test_amax_begins_anew(rng):
    """The amax of a call is its own, not the largest of all that were written to its memory."""
    arrays, by = operands(rng, GPU_SHAPES["gqa"])
    attrs = dict(causal=True, scale=128**-0.5)

    def both(q, k, v, scales):
        large = attention_fp8_fwd(q, k, v, scales.at[2].mul(64.0), **attrs)[2]
        _, v = jax.lax.optimization_barrier((large, v))
        return large, attention_fp8_fwd(q, k, v, scales, **attrs)[2]

    step = jax.jit(both)
    for _ in range(3):
        large, small = step(*arrays, forward_scales(*by, out=np.float32(1.0)))
        assert float(large) == 64 * float(small)


@pytest.mark.gpu
@pytest.mark.parametrize("shape,backward", [("gqa", True), ("odd", False), ("d64", False)])
def test_calls_are_in_the_program(shape, backward, rng):
    """cuDNN is called, but not for gradients that it gets wrong, or has none of."""
    (q, k, v), by = operands(rng, GPU_SHAPES[shape])
    attrs = dict(causal=True, scale=q.shape[-1] ** -0.5)

    def both(*arrays):
        out, lse, _ = attention_fp8_fwd(*arrays, forward_scales(*by, 1.0), **attrs)
        return attention_fp8_bwd(out, *arrays, out, lse, backward_scales(*by, *(1.0,) * 6), **attrs)

    text = jax.jit(both).lower(q, k, v).compile().as_text()
    called = [f'custom_call_target="te_attention_fp8_{name}"' in text for name in ("fwd", "bwd")]
    assert called == [True, backward]


def test_half_step():
    """Of the oracle: 1.0625 lies between 1 and 1.125; 2**-9 is the smallest of E4M3."""
    assert half_step(1.0, E4M3) == 2**-4 and half_step(0.0, E4M3) == 2**-10 and half_step(1.0, E5M2) == 2**-3
