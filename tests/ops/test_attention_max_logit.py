"""The largest logits of heads, `return_max_logit`: the CUDA lowering around cuDNN's maxima, and these on a GPU."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_oracle import BOUND, OPEN, error, operands, visible
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from te_jax.ops.attention import SequenceDescriptor, dot_product_attention, dot_product_attention_packed, op, reference
from te_jax.ops.attention.decode import pieces_of_row

# ---- the lowering, with plain JAX instead of the kernel ------------------------------------------


def cudnn(*operands, outputs, **attrs):
    """What the kernel gives: with its maxima, which drop a NaN, sums instead of their logarithms; of segments
    [b, s, h]."""
    q, *_, segments, _ = operands
    assert "top" not in outputs or q.shape[1] > 1
    out, lse, _, top = reference.forward(*operands, **attrs)
    top = jnp.where(jnp.isnan(top), 0.5, top)
    of_queries = [jnp.where(top == -jnp.inf, 0, jnp.exp(lse - top)), top] if "top" in outputs else [lse]
    if segments is not None:
        of_queries = [jnp.swapaxes(x, 1, 2).reshape(x.shape) for x in of_queries]
    return out, *of_queries


def lowered(*operands, **attrs):
    """lse and top as the CUDA lowering makes them, and as they are meant."""
    forward = partial(cudnn, outputs=("out", "lse", "top"))
    both = jax.jit(lambda *x: (op._call_forward(forward, *x, **attrs), reference.forward(*x, **attrs)))
    return [(lse, top) for _, lse, _, top in both(*operands)]


def assert_same(got, want):
    for x, y in zip(got, want, strict=True):
        # lse comes by way of exp and log in f32, of numbers up to about 8, and of pieces; maxima are the same
        np.testing.assert_allclose(x, y, rtol=2e-6, atol=2e-6)


SEGMENTS = [[(0, 3, 0, 5), (4, 3, 6, 2), (-1, 2, 0, 3)], [(0, 7, 0, 8), (-1, 0, 0, 0), (-1, 0, 0, 0)]]
CASES = {
    "plain": {},
    "causal": dict(right=0),
    "segments": dict(segments=SEGMENTS),
    "bias": dict(bias=np.float32([0.5, -3.0, reference.HIDDEN] * 3)[None, None, None, :8] * np.ones((7, 1))),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("number", [None, np.nan, np.inf], ids=str)
def test_the_lowering_is_the_reference(case, number):
    """Also of a NaN and of inf in a query and in a key, whose kernel's maxima are a number and inf."""
    given = dict(CASES[case])
    bias, segments = (None if x is None else jnp.asarray(x) for x in map(given.pop, ("bias", "segments"), (None, None)))
    segments = None if segments is None else segments.astype(jnp.int32)
    q, k, v, _ = operands((2, 7, 8, 4, 2, 16, 8), jnp.bfloat16)
    if number is not None:
        q, k = q.at[0, 1, 3, 0].set(number), k.at[1, 2, 0, 0].set(number)
    got, want = lowered(q, k, v, None, None, bias, segments, None, **OPEN | given | dict(scale=0.25))
    assert_same(got, want)
    if number is not None:
        assert np.any(np.isnan(got[1]) if np.isnan(number) else np.isposinf(got[1]))


@pytest.mark.parametrize("batch", [(2,), (2, 1), ()], ids=str)
@pytest.mark.parametrize("case", ["decodes", "segments", "bias", "bias and segments"])
def test_one_query(case, batch):
    """A step of decoding, in pieces; and calls of which cuDNN gets one query, and is not asked for its maximum."""
    of_batch = lambda x: (x if batch else x[:1]).reshape(*batch, *x.shape[1:])
    q, k, v = map(of_batch, operands((2, 1, 2048, 4, 2, 16, 8), jnp.bfloat16)[:3])
    assert pieces_of_row(4, 2048) == 4
    bias, segments = jnp.full((1,) * len(batch) + (1, 1, 2048), 0.5).at[..., 100:].set(reference.HIDDEN), None
    if "segments" in case:
        segments = of_batch(jnp.array([[[0, 1, 0, 700]], [[0, 0, 0, 0]]], jnp.int32))
    bias = bias if "bias" in case else None
    assert_same(*lowered(q, k, v, None, None, bias, segments, None, **OPEN, scale=0.25))


def test_cuda_gets_one_more_result_where_it_is_asked_for():
    q, k, v, dout = operands((2, 64, 256, 4, 2, 64, 32), jnp.bfloat16)

    def calls(**kwargs):
        call = partial(dot_product_attention, attn_mask_type="causal", **kwargs)
        step = jax.jit(lambda q, k, v, d: (lambda out, vjp, *aux: (out, aux, vjp(d)))(
            *jax.vjp(call, q, k, v, has_aux=bool(kwargs))))  # fmt: skip
        lines = step.trace(q, k, v, dout).lower(lowering_platforms=("cuda",)).as_text().splitlines()
        return [line.rsplit(" -> ", 1)[1] for line in lines if "custom_call @te_attention_" in line]

    (plain, plain_bwd), (asked, asked_bwd) = calls(), calls(return_max_logit=True)
    assert plain.count("tensor<2x4x64xf32>") == 1 and asked.count("tensor<2x4x64xf32>") == 2
    assert plain_bwd == asked_bwd


# ---- transformations -----------------------------------------------------------------------------


@pytest.mark.parametrize("mesh_type", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_over_devices(mesh_type):
    """The maximum is of all rows; heads stay where they are."""
    q, k, v, _ = operands((4, 8, 8, 4, 2, 16, 16), jnp.bfloat16)
    call = jax.jit(partial(dot_product_attention, attn_mask_type="causal", return_max_logit=True))
    want = call(q, k, v)[1]
    mesh = jax.make_mesh((2, 2), ("dp", "tp"), axis_types=(mesh_type,) * 2)
    with jax.set_mesh(mesh):
        placed = [jax.device_put(x, NamedSharding(mesh, P("dp", None, "tp"))) for x in (q, k, v)]
        np.testing.assert_allclose(call(*placed)[1], want, rtol=1e-6)


def test_vmap_and_remat():
    """A mapped axis has maxima of its own. Saved by name, the forward op runs once, whoever reads its maxima."""
    q, k, v, dout = operands((3, 8, 8, 4, 2, 16, 16), jnp.bfloat16)
    call = partial(dot_product_attention, return_max_logit=True, context_checkpoint_name="context")
    got = jax.jit(jax.vmap(call))(q, k, v)[1]
    want = [call(*x)[1] for x in zip(q, k, v)]
    assert got.shape == (3, 4)
    np.testing.assert_allclose(got, np.stack(want), rtol=1e-6)
    saved = jax.checkpoint(call, policy=jax.checkpoint_policies.save_only_these_names("context"))

    def step(q, k, v, dout):
        _, vjp, top = jax.vjp(saved, q, k, v, has_aux=True)
        return vjp(dout), top

    text = str(jax.make_jaxpr(step)(q, k, v, dout))
    assert text.count("te_attention_fwd") == text.count("te_attention_bwd") > 0


# ---- cuDNN's on a GPU ----------------------------------------------------------------------------

GPU_SHAPES = {  # b, s, t, h, g, d, e
    "mha": (2, 512, 512, 8, 8, 64, 64),
    "gqa": (2, 1024, 1024, 16, 4, 128, 128),
    "odd": (3, 199, 199, 4, 2, 64, 64),
    "odd_s<t": (2, 77, 333, 4, 4, 128, 128),
    "odd_s>t": (2, 333, 77, 4, 4, 128, 128),
    "short": (2, 2, 2, 2, 2, 64, 64),
    "wide": (1, 256, 256, 4, 4, 256, 256),
    "d_not_e": (2, 256, 256, 8, 8, 128, 64),
    "long": (1, 4096, 4096, 2, 1, 128, 128),
}
MASKS = {
    "no_mask": {},
    "causal": dict(causal=True),
    "causal_bottom_right": dict(causal=True, bottom_right=True),
    "window": dict(causal=True, window=(50, 0)),
}


def largest(q, k, scale, seen, bias=0.0):
    """[h] in float64; -inf where a head sees no key. seen: bool, broadcastable to [b, h, s, t]."""
    q, k = (np.asarray(x, np.float64) for x in (q, k))
    logits = scale * np.einsum("bshd,bthd->bhst", q, np.repeat(k, q.shape[2] // k.shape[2], 2), optimize=True) + bias
    return np.where(np.broadcast_to(seen, logits.shape), logits, -np.inf).max((0, 2, 3))


@partial(jax.jit, static_argnums=3)
def on_gpu(arrays, dout, more, kwargs):
    """out, the largest logits or None, and the gradients."""
    kwargs = dict(kwargs)
    kwargs.setdefault("return_max_logit", True)
    has_top, attend = kwargs["return_max_logit"], dot_product_attention
    if len(arrays) == 1:
        attend = dot_product_attention_packed
    call = lambda *x: attend(*x, implementation="cudnn", **more, **kwargs)
    out, vjp, *top = jax.vjp(call, *arrays, has_aux=has_top)
    return out, (*top, None)[0], vjp(dout)


def check_on_gpu(arrays, dout, want, more=None, **kwargs):
    """The largest logits are `want`, and out and the gradients are those without them.

    f32 sums of up to 256 products: 1e-4, as of lse in test_attention_cudnn.py. With the maxima cuDNN may take another
    engine, and lse is computed from its numbers: the bounds allow for results that are rounded anew.
    """
    more = more or {}
    out, top, grads = on_gpu(arrays, dout, more, tuple(kwargs.items()))
    plain, _, plain_grads = on_gpu(arrays, dout, more, tuple(dict(kwargs, return_max_logit=False).items()))
    assert top.dtype == jnp.float32 and np.array_equal(np.isfinite(top), np.isfinite(want))
    seen = np.isfinite(want)
    np.testing.assert_allclose(np.asarray(top)[seen], want[seen], atol=1e-4, rtol=1e-5)
    of_out, of_grads = BOUND[out.dtype.type]
    assert error(out, plain) <= of_out, error(out, plain)
    errors = [error(*pair) for pair in zip(grads, plain_grads, strict=True)]
    assert max(errors) <= of_grads, errors


@pytest.mark.gpu
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("shape", GPU_SHAPES)
def test_cudnn(shape, mask):
    """In bf16 and f16 in turn, so that each shape and each mask has both."""
    dtype = (jnp.bfloat16, jnp.float16)[([*GPU_SHAPES].index(shape) + [*MASKS].index(mask)) % 2]
    q, k, v, dout = operands(GPU_SHAPES[shape], dtype)
    seen = visible(q.shape[1], k.shape[1], **MASKS[mask])
    given = dict(attn_mask_type="causal", window_size=(50, 0)) if mask == "window" else dict(attn_mask_type=mask)
    scale = q.shape[-1] ** -0.5
    check_on_gpu((q, k, v), dout, largest(q, k, scale, seen), **given, deterministic=True)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "mask_type,dtype",
    [("padding", jnp.bfloat16), ("padding_causal", jnp.float16), ("padding_causal_bottom_right", jnp.bfloat16)],
)
def test_cudnn_with_segments(mask_type, dtype):
    """Lengths, of which a row has none, and packed segments with gaps: what is outside does not count, however loud."""
    q, k, v, dout = operands((3, 199, 199, 8, 2, 64, 64), dtype)
    causal, bottom_right = "causal" in mask_type, "bottom" in mask_type
    lens = np.array([[[150, 199]], [[0, 0]], [[77, 120]]])
    packed = np.array([[[50, 50], [60, 64]], [[199, 199], [0, 0]], [[1, 30], [100, 100]]])
    starts = np.array([[[0, 0], [60, 70]], [[0, 0], [199, 199]], [[2, 0], [50, 99]]])
    for lengths, at in ((lens, np.zeros_like(lens)), (packed, starts)):
        seen = np.zeros((3, 1, 199, 199), bool)
        for row, i in np.ndindex(lengths.shape[:2]):
            (s, t), (first, key) = lengths[row, i], at[row, i]
            seen[row, 0, first : first + s, key : key + t] = visible(s, t, causal=causal, bottom_right=bottom_right)
        loud_q, loud_k = (
            jnp.where(jnp.asarray(seen.any(axes))[..., None, None], x, jnp.asarray(50, x.dtype))
            for x, axes in ((q, (1, 3)), (k, (1, 2)))
        )
        lengths, at = (tuple(jnp.asarray(x[..., i], jnp.int32) for i in range(2)) for x in (lengths, at))
        described = SequenceDescriptor.from_seqlens_and_offsets(lengths, at)
        want, more = largest(loud_q, loud_k, 0.125, seen), dict(sequence_descriptor=described)
        check_on_gpu((loud_q, loud_k, v), dout, want, more, attn_mask_type=mask_type)


@pytest.mark.gpu
def test_cudnn_of_heads_that_see_no_key():
    """A mask, which becomes a bias, hides all keys of one head, and some of another; no segment has a token."""
    q, k, v, dout = operands((2, 130, 130, 4, 2, 64, 64), jnp.bfloat16)
    mask = np.zeros((2, 4, 130, 130), bool)
    mask[:, 1], mask[:, 2, :, 40:] = True, True
    check_on_gpu((q, k, v), dout, largest(q, k, 0.125, ~mask), dict(mask=jnp.asarray(mask)))
    empty = SequenceDescriptor.from_seqlens(jnp.zeros(2, jnp.int32))
    check_on_gpu((q, k, v), dout, np.full(4, -np.inf), dict(sequence_descriptor=empty), attn_mask_type="padding")


@pytest.mark.gpu
def test_cudnn_with_a_bias_and_dropout():
    """What a bias adds counts, what dropout drops does too."""
    q, k, v, dout = operands((2, 256, 256, 8, 2, 64, 64), jnp.bfloat16)
    bias = jnp.asarray(3 * np.random.default_rng(1).standard_normal((1, 8, 256, 256)), jnp.float32)
    check_on_gpu((q, k, v), dout, largest(q, k, 0.125, True, np.asarray(bias)), dict(bias=bias))
    key, causal = jax.random.key(0), visible(256, 256, causal=True)
    given = dict(attn_mask_type="causal", dropout_rate=0.3, deterministic=True)
    check_on_gpu((q, k, v), dout, largest(q, k, 0.125, causal), dict(dropout_rng=key), **given)


@pytest.mark.gpu
@pytest.mark.parametrize("interleaved", [False, True])
def test_cudnn_of_one_array_and_of_sequence_major_ones(interleaved):
    q, k, v, dout = operands((2, 199, 199, 4, 4, 64, 64), jnp.bfloat16)
    want = largest(q, k, 0.125, visible(199, 199, causal=True))
    given = dict(attn_mask_type="causal", deterministic=True)
    check_on_gpu((jnp.stack((q, k, v), -2 if interleaved else -3),), dout, want, interleaved=interleaved, **given)
    check_on_gpu((q, k, v), dout, want, seq_major=True, **given)


@pytest.mark.gpu
@pytest.mark.parametrize("t", [333, 8192])
def test_cudnn_of_one_query(t):
    """Steps of decoding: all keys, of given lengths, and in a window, which is a bias."""
    q, k, v, dout = operands((2, 1, t, 8, 2, 128, 128), jnp.bfloat16)
    scale, at = 128**-0.5, np.arange(t)
    check_on_gpu((q, k, v), dout, largest(q, k, scale, True))
    lens = np.array([t // 3, t])
    described = SequenceDescriptor.from_seqlens((jnp.ones(2, jnp.int32), jnp.asarray(lens, jnp.int32)))
    shown = at < lens[:, None, None, None]
    for window, seen in (((-1, 0), shown), ((100, 0), shown & (at >= lens[:, None, None, None] - 101))):
        given = dict(attn_mask_type="padding_causal_bottom_right", window_size=window)
        check_on_gpu((q, k, v), dout, largest(q, k, scale, seen), dict(sequence_descriptor=described), **given)


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [False, True])
def test_cudnn_keeps_a_nan(lengths):
    """In the head that has it; without one there, the others have numbers."""
    q, k, v, _ = operands((2, 199, 199, 4, 2, 64, 64), jnp.bfloat16)
    given = dict(attn_mask_type="no_mask")
    if lengths:
        given = dict(
            attn_mask_type="padding", sequence_descriptor=SequenceDescriptor.from_seqlens(jnp.array([199, 150]))
        )
    call = jax.jit(lambda q: dot_product_attention(q, k, v, implementation="cudnn", return_max_logit=True, **given)[1])
    for at in (0, 100, 149):
        assert np.isnan(call(q.at[1, at, 2, 5].set(jnp.nan))).tolist() == [False, False, True, False]
