"""Which implementation dot_product_attention takes and why; its errors; what it lowers to on CUDA."""

import inspect
import itertools
import warnings
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_oracle import OPEN, operands

from te_jax import autocast
from te_jax.core import check
from te_jax.ops import attention
from te_jax.ops.attention import Mask, SequenceDescriptor, dot_product_attention, explain_attention
from te_jax.ops.attention.mask import Band
from te_jax.recipe import DelayedScaling

# ---- the choice ----------------------------------------------------------------------------------


def test_explain_says_which_and_why():
    struct = lambda s, heads, dtype=jnp.bfloat16, d=64: jax.ShapeDtypeStruct((2, s, heads, d), dtype)
    explain = partial(explain_attention, platform="cuda")
    q, k = struct(128, 8), struct(128, 2)
    described = SequenceDescriptor.from_seqlens(jnp.zeros(2, jnp.int32))
    for kwargs in (
        {},
        dict(attn_mask_type="causal"),
        dict(attn_mask_type="causal_bottom_right", window_size=(64, 0)),
        dict(dropout_rate=0.1),
        dict(bias=jax.ShapeDtypeStruct((128, 128), jnp.float32)),
        dict(mask=jax.ShapeDtypeStruct((128, 128), jnp.bool_)),
        dict(sequence_descriptor=described, attn_mask_type="padding_causal"),
        dict(softmax_type="off-by-one", return_lse=True),
        dict(return_max_logit=True, implementation="cudnn"),
    ):
        choice = explain(q, k, k, **kwargs)
        assert choice.implementation == "cudnn" and "xla" in choice.refused, kwargs
    choice = explain(q, k, k, logit_softcap=30.0)
    assert choice.implementation == "xla" and "softcap" in choice.refused["cudnn"] and "softcap" in str(choice)
    with pytest.raises(ValueError, match="softcap.*'xla'"):
        explain(q, k, k, implementation="cudnn", logit_softcap=30.0)
    for reason, kwargs in {
        "float32": dict(dtype=jnp.float32),
        "is 264": dict(d=264),
        "is 60": dict(d=60),
    }.items():
        q, k = struct(128, 8, **kwargs), struct(128, 2, **kwargs)
        assert reason in explain(q, k, k).refused["cudnn"]
    q, k = struct(64, 8), struct(128, 2)
    assert "k has 1" in explain(q, struct(1, 2), struct(1, 2)).refused["cudnn"]
    assert explain(struct(1, 8), k, k).implementation == "cudnn"
    assert "q has 1" in explain(struct(1, 8), k, k, dropout_rate=0.1).refused["cudnn"]


def test_explain_speaks_for_this_machine():
    """Without a GPU the op of cuDNN is plain JAX, with its logits in memory, whether it was asked for or not."""
    q = jax.ShapeDtypeStruct((2, 128, 8, 64), jnp.bfloat16)
    for kwargs in ({}, dict(implementation="cudnn"), dict(platform="cpu"), dict(recipe=DelayedScaling())):
        if jax.default_backend() == "gpu" and "platform" not in kwargs:
            assert explain_attention(q, q, q, **kwargs).implementation == "cudnn"
            continue
        choice = explain_attention(q, q, q, **kwargs)
        assert choice.implementation == "xla" and {*choice.refused} == {"cudnn"} and not choice.decodes
        why = "platform is 'cpu'" if "platform" in kwargs else "this process has no NVIDIA GPU"
        assert str(choice) == f"xla; not cudnn: {why}; on a GPU it serves this call (platform='cuda')"
    wide = jax.ShapeDtypeStruct(q.shape, jnp.float32)
    assert "float32" in explain_attention(wide, wide, wide).refused["cudnn"], "it would serve on no machine"
    with pytest.raises(ValueError, match="explain_attention: platform is 'gpu'; pass None or one of 'cuda', 'cpu'"):
        explain_attention(q, q, q, platform="gpu")


def test_explain_speaks_for_fp8():
    q, k = (jax.ShapeDtypeStruct((2, 128, heads, 64), jnp.bfloat16) for heads in (8, 2))
    fp8 = DelayedScaling(fp8_dpa=True)
    assert explain_attention(q, k, k, recipe=fp8, attn_mask_type="causal").implementation == "fp8"
    assert explain_attention(q, k, k, recipe=DelayedScaling(), platform="cuda").implementation == "cudnn"
    with autocast(recipe=fp8):
        assert explain_attention(q, k, k).implementation == "fp8"
        for kwargs in (dict(dropout_rate=0.1), dict(implementation="xla"), dict(window_size=(3, 0))):
            choice, (name,) = explain_attention(q, k, k, platform="cuda", **kwargs), kwargs
            assert choice.implementation == kwargs.get("implementation", "cudnn")
            assert name in choice.refused["fp8"]
    with pytest.raises(TypeError, match="explain_attention: recipe is .*an instance"):
        explain_attention(q, k, k, recipe=DelayedScaling)


def test_explain_speaks_for_cut_sequences():
    q, k = (jax.ShapeDtypeStruct((2, 128, heads, 64), jnp.bfloat16) for heads in (8, 2))
    with jax.set_mesh(jax.make_mesh((2, 1), ("cp", "one"))):
        choice = explain_attention(q, k, k, axis="cp", attn_mask_type="causal", recipe=DelayedScaling(fp8_dpa=True))
        assert choice.implementation == "context_parallel" and {*choice.refused} == {"fp8", "cudnn", "xla"}
        assert all("'cp' cuts the sequence" in reason for reason in choice.refused.values())
        assert explain_attention(q, k, k, axis="one", platform="cuda").implementation == "cudnn"
        with pytest.raises(ValueError, match="^context_parallel_attention: bias is of shape.*Leave bias out"):
            explain_attention(q, k, k, axis="cp", bias=jnp.zeros((128, 128)))
        with pytest.raises(ValueError, match="^context_parallel_attention: strategy is 'rong'"):
            explain_attention(q, k, k, axis="cp", strategy="rong")


# ---- keywords and masks --------------------------------------------------------------------------


def test_signatures_show_every_keyword():
    shown = inspect.signature(dot_product_attention).parameters
    assert [*shown][:3] == ["q", "k", "v"] and len(shown) == 3 + len(attention.AttentionKeywords.__annotations__)
    assert shown["attn_mask_type"].default == "no_mask" and shown["scale"].annotation == float | None
    for function in (attention.dot_product_attention_packed, explain_attention):
        assert {*inspect.signature(function).parameters} > {*shown} - {"q", "k", "v"}
    with pytest.raises(TypeError, match="'windowsize'; did you mean 'window_size'"):
        dot_product_attention(*[jnp.zeros(K)] * 3, windowsize=(1, 1))


def test_masks_compose():
    rng = np.random.default_rng(0)
    array = jnp.asarray(rng.random((2, 1, 6, 9)) < 0.3)
    lens = SequenceDescriptor.from_seqlens((jnp.array([6, 3]), jnp.array([4, 9])))
    parts = Mask.of_type("causal"), Mask.of_type("no_mask", (2, 3)), Mask(array=array), Mask(array=~array[:1])
    both, want = parts[0], parts[0].hides(6, 9)
    for each in parts[1:]:
        both, want = both & each, want | each.hides(6, 9)
    np.testing.assert_array_equal(both.hides(6, 9), want)
    assert both.band == Band(2, 0) and "'causal' with window_size None and " in both.label
    np.testing.assert_array_equal(
        (parts[1] & Mask(segments=lens) & parts[2]).hides(6, 9), Mask(parts[1].band, lens).hides(6, 9) | array
    )
    assert Mask().is_open and Mask().hides(6, 9) is None and not both.is_open
    for other, text in ((Mask.of_type("causal_bottom_right"), "different corners"), (Mask(segments=lens), "segments")):
        with pytest.raises(ValueError, match=text):
            Mask.of_type("causal") & Mask(segments=lens) & other


@pytest.mark.parametrize("described", [None, "lengths", "ids"])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("drops", [False, True])
def test_what_cudnn_is_told_hides_the_same(described, has_bias, drops):
    lens = SequenceDescriptor.from_seqlens((jnp.array([6, 3]), jnp.array([4, 9])))
    for s, t in ((1, 9), (6, 9), (12, 9)):
        pad = lambda ids, size: jnp.pad(ids, ((0, 0), (0, size - ids.shape[-1])))
        ids = tuple(pad(jnp.array([[1], [2]]).repeat(min(size, 5), 1), size) for size in (s, t))
        segments = {None: None, "lengths": lens, "ids": SequenceDescriptor.from_segment_ids_and_pos(ids)}[described]
        for kind, window in itertools.product(("no_mask", "causal", "causal_bottom_right"), (None, (2, 1), (-1, 3))):
            mask = Mask.of_type(kind, window) & Mask(segments=segments)
            band, told, rest = mask.split(s, t, has_bias=has_bias, drops=drops)
            got, want = (each.hides(s, t) for each in (Mask(band, told) & Mask(rest.band, rest.segments), mask))
            assert (got is None) == (want is None) and (want is None or np.array_equal(got, want)), (kind, window, s, t)


def test_long_plain_attention_warns_once_with_the_reason():
    struct = jax.ShapeDtypeStruct((1, 4104, 1, 8), jnp.float32)
    trace = lambda **kwargs: jax.eval_shape(lambda x: dot_product_attention(x, x, x, **kwargs), struct)
    check.told.clear()
    with pytest.warns(UserWarning, match="4096.*float32"):
        trace()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        trace()
        trace(implementation="xla")  # asked for
        check.told.clear()
        jax.eval_shape(lambda x: dot_product_attention(x[:, :1], x, x), struct)  # one token on a long cache


# ---- errors --------------------------------------------------------------------------------------

Q, K = (2, 8, 4, 16), (2, 8, 2, 16)
ERRORS = {
    "groups": (ValueError, "4 query heads .* 3 groups", dict(k=(2, 8, 3, 16), v=(2, 8, 3, 16))),
    "head dim": (ValueError, "axis `d` is 16 .* 8", dict(k=(2, 8, 2, 8))),
    "keys": (ValueError, "axis `t`", dict(v=(2, 9, 2, 16))),
    "batch": (ValueError, r"axis `b...`", dict(k=(3, 8, 2, 16))),
    "rank": (ValueError, "number of axes", dict(q=(8, 4, 16))),
    "flat": (ValueError, "at least 3", dict(q=(8, 64), k=(8, 64), v=(8, 64))),
    "mask type": (ValueError, "attn_mask_type is 'Casual'.*padding_causal", dict(attn_mask_type="Casual")),
    "bias type": (ValueError, "attn_bias_type is 'alibi'", dict(attn_bias_type="alibi")),
    "bias type without bias": (ValueError, "bias is None", dict(attn_bias_type="post_scale_bias")),
    "no_bias with bias": (ValueError, "'no_bias'", dict(attn_bias_type="no_bias", bias=jnp.zeros((8, 8)))),
    "softmax type": (ValueError, "softmax_type is 'sink'", dict(softmax_type="sink")),
    "no offset": (ValueError, "softmax_offset is None", dict(softmax_type="learnable")),
    "stray offset": (ValueError, "softmax_offset is given", dict(softmax_offset=jnp.zeros(4))),
    "offset shape": (ValueError, "h = 4", dict(softmax_type="learnable", softmax_offset=jnp.zeros(3))),
    "mask rank": (ValueError, r"mask has shape \(2, 8, 8\)", dict(mask=jnp.zeros((2, 8, 8), bool))),
    "mask shape": (ValueError, "does not broadcast", dict(mask=jnp.zeros((2, 1, 8, 7), bool))),
    "mask dtype": (TypeError, "mask is float32.*`bias`", dict(mask=jnp.zeros((8, 8)))),
    "bias dtype": (TypeError, "bias is bool.*`mask`", dict(bias=jnp.zeros((8, 8), bool))),
    "bias rank": (ValueError, "bias has shape", dict(bias=jnp.zeros((4, 8, 8)))),
    "dropout without rng": (ValueError, "dropout_rng is None", dict(dropout_rate=0.1)),
    "dropout rate": (ValueError, "dropout_rate is 1.5", dict(dropout_rate=1.5)),
    "window": (ValueError, "window_size is 4", dict(window_size=4)),
    "scale": (TypeError, "scale is", dict(scale="auto")),
    "implementation": (ValueError, "implementation is 'flash'", dict(implementation="flash")),
    "descriptor": (TypeError, "SequenceDescriptor", dict(sequence_descriptor=jnp.zeros(2))),
    "descriptor shape": (
        ValueError,
        "seqlens of the queries",
        dict(sequence_descriptor=SequenceDescriptor.from_seqlens(jnp.zeros(3, int))),
    ),
    "descriptor tokens": (
        ValueError,
        "segment_ids of the queries",
        dict(sequence_descriptor=SequenceDescriptor.from_segment_ids_and_pos(jnp.zeros((2, 9), int))),
    ),
    "forced cudnn": (ValueError, "float32; cuDNN takes", dict(implementation="cudnn")),
}  # fmt: skip


@pytest.mark.parametrize("name", ERRORS)
def test_errors_name_the_argument(name):
    kind, text, kwargs = ERRORS[name]
    kwargs = dict(kwargs)
    q, k, v = (jnp.zeros(kwargs.pop(n, shape)) for n, shape in (("q", Q), ("k", K), ("v", K)))
    with pytest.raises(kind, match=text) as raised:
        jax.eval_shape(lambda q, k, v: dot_product_attention(q, k, v, **kwargs), q, k, v)
    assert str(raised.value).startswith("dot_product_attention: ")


def test_wrong_dtypes():
    q, k = jnp.zeros(Q), jnp.zeros(K)
    with pytest.raises(TypeError, match="k is int32"):
        dot_product_attention(q, k.astype(jnp.int32), k)
    with pytest.raises(TypeError, match="v is bfloat16, but q is float32"):
        dot_product_attention(q, k, k.astype(jnp.bfloat16))
    with pytest.raises(TypeError, match="q is float8_e4m3fn"):
        dot_product_attention(q.astype(jnp.float8_e4m3fn), k, k)
    with pytest.raises(TypeError, match="segment_ids is float32"):
        SequenceDescriptor.from_segment_ids_and_pos(jnp.zeros((2, 8)))
    with pytest.raises(ValueError, match="seq_offsets"):
        SequenceDescriptor.from_seqlens_and_offsets(jnp.zeros((2, 3), int), jnp.zeros((2, 5), int))
    offsets = SequenceDescriptor.from_seqlens_and_offsets(jnp.ones((1, 2), int), jnp.ones((1, 3), int))
    mixed = SequenceDescriptor(seqlens=(jnp.ones((2, 2), int),) * 2, seq_offsets=offsets.seq_offsets)
    with pytest.raises(ValueError, match=r"seq_offsets of the queries has shape \(1, 3\), seqlens \(2, 2\)"):
        dot_product_attention(q, k, k, sequence_descriptor=mixed)
    with pytest.raises(TypeError, match="alibi_slopes is a list"):
        dot_product_attention(q, k, k, alibi_slopes=[1.0] * 4)
    with pytest.raises(ValueError, match="3 entries"):
        SequenceDescriptor.from_seqlens([jnp.zeros(2, int)] * 3)


def test_cuda_lowering_without_a_gpu():
    q, k, v, dout = operands((2, 256, 256, 4, 2, 64, 32), jnp.bfloat16)
    call = jax.jit(
        lambda q, k, v, d: jax.vjp(lambda *a: dot_product_attention(*a, attn_mask_type="causal"), q, k, v)[1](d)
    )
    text = call.trace(q, k, v, dout).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @te_attention_fwd(") == text.count("custom_call @te_attention_bwd(") == 1
    assert "right = 0" in text and "left = -1" in text and "scale = 1.25" in text and "tensor<2x4x256xf32>" in text


def test_one_query_has_plain_gradients():
    """A decoding step is cuDNN's; what it would be with gradients is not: neither is then the mask of its dropout."""
    q, k, v, dout = operands((2, 1, 256, 4, 2, 64, 32), jnp.bfloat16)
    call = jax.jit(lambda q, k, v, d: jax.vjp(dot_product_attention, q, k, v)[1](d))
    text = call.trace(q, k, v, dout).lower(lowering_platforms=("cuda",)).as_text()
    assert "custom_call @te_attention_fwd(" in text and "custom_call @te_attention_bwd(" not in text
    words, attrs = jnp.zeros((2, 4, 4), jnp.uint32), dict(OPEN, scale=1.0, dropout_rate=0.5)
    dropped = lambda q, k, v: attention.attention_fwd(q, k, v, *(None,) * 4, words, **attrs)
    text = jax.jit(dropped).trace(q, k, v).lower(lowering_platforms=("cuda",)).as_text()
    assert "custom_call" not in text


def test_lse_of_one_query_of_given_length_is_not_the_kernels():
    """cuDNN's is wrong: such a query is one of several, or, with a bias, its lse is plain JAX's."""
    for s, plain in ((1, True), (2, False)):
        q, k, v, _ = operands((2, s, 256, 4, 2, 64, 32), jnp.bfloat16)
        lens = SequenceDescriptor.from_seqlens((jnp.array([s, 1]), jnp.array([20, 256])))
        call = partial(dot_product_attention, attn_mask_type="padding", sequence_descriptor=lens, return_lse=True)
        with_bias = partial(call, bias=jnp.ones((s, 256)))
        alone, biased = (
            jax.jit(each).trace(q, k, v).lower(lowering_platforms=("cuda",)).as_text() for each in (call, with_bias)
        )
        assert "custom_call @te_attention_fwd(" in alone and "custom_call @te_attention_fwd(" in biased
        assert "dot_general" not in alone and "tensor<2x2x" in alone and ("dot_general" in biased) == plain


def _call(s, t, dtype=jnp.bfloat16, **kwargs):
    """The forward call that CUDA gets."""
    q, k, v, _ = operands((2, s, t, 4, 2, 64, 32), dtype)
    call = jax.jit(lambda q, k, v: dot_product_attention(q, k, v, **kwargs))
    text = call.trace(q, k, v).lower(lowering_platforms=("cuda",)).as_text()
    (line,) = (line for line in text.splitlines() if "custom_call @te_attention_fwd(" in line)
    return line


def test_one_query_has_no_causal_mask():
    """With one, cuDNN is wrong for grouped heads."""
    lens = SequenceDescriptor.from_seqlens((jnp.array([1, 1]), jnp.array([20, 256])))
    for kwargs in (
        dict(attn_mask_type="padding_causal_bottom_right", sequence_descriptor=lens),
        dict(attn_mask_type="causal_bottom_right"),
        dict(attn_mask_type="causal"),
        dict(attn_mask_type="padding_causal", sequence_descriptor=lens, window_size=(3, 0)),
    ):
        call = _call(1, 256, **kwargs)
        assert "left = -1" in call and "right = -1" in call and "bottom_right = false" in call, kwargs
    assert "tensor<2x1x4xi32>" in _call(1, 256, attn_mask_type="padding_causal_bottom_right", sequence_descriptor=lens)
    assert "right = 0" in _call(2, 256, attn_mask_type="causal")


def test_explain_says_what_is_lowered_as_decoding():
    lens = SequenceDescriptor.from_seqlens((jnp.array([1, 1]), jnp.array([20, 256])))
    two = SequenceDescriptor.from_seqlens_and_offsets(jnp.ones((2, 2), int), jnp.tile(jnp.array([0, 1]), (2, 1)))
    for is_step, kwargs in (
        (True, dict(softmax_type="off_by_one")),
        (True, dict(attn_mask_type="causal_bottom_right")),
        (True, dict(attn_mask_type="padding_causal_bottom_right", sequence_descriptor=lens)),
        (True, dict(sequence_descriptor=lens, attn_mask_type="padding", seq_major=True)),
        (False, dict(seq_major=True)),
        (False, dict(attn_mask_type="causal")),
        (False, dict(sequence_descriptor=two, attn_mask_type="padding")),
        (False, dict(bias=jnp.zeros((1, 256)))),
        (False, dict(mask=jnp.zeros((1, 256), bool))),
        (False, dict(alibi_slopes=jnp.ones(4))),
    ):
        q, k, v, _ = operands((2, 1, 256, 4, 2, 64, 32), jnp.bfloat16)
        assert explain_attention(q, k, v, platform="cuda", **kwargs).decodes == is_step, kwargs
        assert ("(tensor<2x2x2x64xbf16>, " in _call(1, 256, **kwargs)) == is_step, kwargs  # r queries, g heads
    explained = [str(explain_attention(x, k, v, platform="cuda")) for x in (q, k)]
    assert "step of decoding" in explained[0] and "step" not in explained[1]


@pytest.mark.parametrize("t", [256, 320])
def test_a_bias_comes_with_lengths(t):
    """Where the last tile of 128 keys is not full."""
    for kwargs in (dict(bias=jnp.zeros((64, t))), dict(mask=jnp.zeros((64, t), bool))):
        assert ("tensor<2x1x4xi32>" in _call(64, t, **kwargs)) == (t == 320)
    assert "xi32>" not in _call(64, t, attn_mask_type="causal")
