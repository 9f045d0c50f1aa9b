"""TransformerEngine's attention, and what lies around it, over te_jax."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import on_device
from flax import linen as nn

from te_jax.compat.transformer_engine.jax.attention import (
    AttnBiasType,
    AttnMaskType,
    AttnSoftmaxType,
    CPStrategy,
    QKVLayout,
    ReorderStrategy,
    SequenceDescriptor,
    canonicalize_attn_mask_type,
    fused_attn,
    inverse_reorder_causal_load_balancing,
    is_fused_attn_kernel_available,
    make_swa_mask,
    reorder_causal_load_balancing,
    run_length_fill,
)
from te_jax.compat.transformer_engine.jax.flax.transformer import DotProductAttention
from te_jax.ops.attention import MASK_TYPES


def test_mask_types_are_those_of_te_jax():
    for name, kind in MASK_TYPES.items():
        member = canonicalize_attn_mask_type(name)
        assert (member.is_padding(), member.is_causal(), member.is_bottom_right()) == kind
    with pytest.raises(ValueError, match="Causal"):
        canonicalize_attn_mask_type("Causal")


def test_layouts():
    assert QKVLayout.T3HD.is_qkvpacked() and QKVLayout.T3HD.to_separate() is QKVLayout.THD_THD_THD
    assert QKVLayout.BSHD_BSHD_BSHD.to_kvpacked() is QKVLayout.BSHD_BS2HD and not QKVLayout.BS3HD.is_thd()
    assert AttnSoftmaxType.from_str("off_by_one") is AttnSoftmaxType.OFF_BY_ONE_SOFTMAX


def attention(q, k, v, hidden, scale, offset=None):
    """softmax(scale q k^T) v in float64, with exp(offset) of each head in the sum."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    k, v = (np.repeat(x, q.shape[2] // x.shape[2], 2) for x in (k, v))
    weights = np.where(hidden, 0.0, np.exp(scale * np.einsum("bshd,bthd->bhst", q, k)))
    total = weights.sum(-1, keepdims=True)
    total = total if offset is None else total + np.exp(np.asarray(offset, np.float64))
    return np.einsum("bhst,bthd->bshd", weights / np.where(total == 0, 1, total), v)


@pytest.fixture
def qkv(rng):
    return tuple(on_device(rng.standard_normal((2, 7, heads, 8)), jnp.float32) for heads in (4, 4, 4))


def call(arrays, described=None, mask_type=AttnMaskType.NO_MASK, layout=QKVLayout.BSHD_BSHD_BSHD, **keywords):
    types = AttnBiasType.NO_BIAS, mask_type, layout, keywords.pop("softmax", AttnSoftmaxType.VANILLA_SOFTMAX)
    return fused_attn(arrays, None, described, None, *types, 0.3, 0.0, True, **keywords)


# Sums of 7 products and an exp in f32 at values about 1: far below 1e-5.
CLOSE = dict(rtol=1e-5, atol=1e-5)


def test_fused_attention(qkv):
    q, k, v = qkv
    causal = np.triu(np.ones((7, 7), bool), 1)
    expected = attention(q, k, v, causal, 0.3)
    lengths = SequenceDescriptor.from_seqlens(jnp.array([5, 7]))
    padded = np.broadcast_to(causal | (np.arange(7) >= np.array([[[[5]]], [[[7]]]])), (2, 1, 7, 7)).copy()
    padded[0, :, 5:] = True
    types = dict(mask_type=AttnMaskType.PADDING_CAUSAL_MASK)
    offset = np.linspace(-1, 1, 4, dtype=np.float32).reshape(1, 4, 1, 1)

    @jax.jit
    def run(*qkv):
        joined, keys = jnp.stack(qkv, 2), jnp.stack(qkv[1:], 2)
        layouts = {QKVLayout.BSHD_BSHD_BSHD: qkv, QKVLayout.BSHD_BS2HD: (qkv[0], keys), QKVLayout.BS3HD: (joined,)}
        return (
            [call(arrays, None, AttnMaskType.CAUSAL_MASK, layout) for layout, arrays in layouts.items()],
            [call(qkv, described, **types) for described in (lengths, jnp.asarray(padded))],
            call(qkv, softmax=AttnSoftmaxType.LEARNABLE_SOFTMAX, softmax_offset=offset),
            call(qkv, softmax=AttnSoftmaxType.OFF_BY_ONE_SOFTMAX),
            call(qkv, softmax=AttnSoftmaxType.OFF_BY_ONE_SOFTMAX, softmax_offset=offset),
        )

    of_layouts, of_lengths, sink, one, given = run(*qkv)
    for got in of_layouts:
        np.testing.assert_allclose(got, expected, **CLOSE)
    for got in of_lengths:
        np.testing.assert_allclose(got, attention(q, k, v, padded, 0.3), **CLOSE)
    np.testing.assert_allclose(sink, attention(q, k, v, False, 0.3, offset), **CLOSE)
    np.testing.assert_array_equal(given, sink)
    np.testing.assert_allclose(one, attention(q, k, v, False, 0.3, np.zeros(1)), **CLOSE)


def test_fused_attention_of_several_segments(qkv):
    ids = jnp.array([[1, 1, 1, 2, 2, 0, 0], [1, 1, 2, 2, 2, 2, 0]])
    lengths, offsets = jnp.array([[3, 2, -1], [2, 4, -1]]), jnp.array([[0, 3, -1, -1], [0, 2, -1, -1]])
    hidden = (np.asarray(ids)[:, None, :, None] != np.asarray(ids)[:, None, None]) | (np.asarray(ids) == 0)[
        :, None, None
    ]
    expected = attention(*qkv, hidden, 0.3)
    options = dict(mask_type=AttnMaskType.PADDING_MASK, layout=QKVLayout.THD_THD_THD, max_segments_per_seq=2)
    both = (
        SequenceDescriptor.from_segment_ids_and_pos(ids),
        SequenceDescriptor.from_seqlens_and_offsets((lengths, lengths), (offsets, offsets)),
    )
    for got in jax.jit(lambda qkv: [call(qkv, described, **options) for described in both])(qkv):
        np.testing.assert_allclose(got, expected, **CLOSE)


def test_a_mask_without_padding_is_told_of(qkv):
    """The older call, with its names: the mask counts only for the types with padding."""
    with pytest.warns(UserWarning, match="ignores; leave it out"):
        out = fused_attn(
            qkv=qkv, bias=None, mask=jnp.ones((2, 7, 7)), seed=None, attn_bias_type=AttnBiasType.NO_BIAS,
            attn_mask_type=AttnMaskType.NO_MASK, qkv_layout=QKVLayout.BSHD_BSHD_BSHD, scaling_factor=0.3,
            dropout_probability=0.0, is_training=True,
        )  # fmt: skip
    np.testing.assert_array_equal(out, call(qkv))


def test_what_attention_refuses(qkv):
    """Also what belongs to score_mod, by itself, and both names of one argument."""
    tensors = dict(score_mod_tensors=dict(a=1)), dict(score_mod_bprop_tensors=dict(a=1))
    for argument in (dict(score_mod=lambda *_: 0), dict(score_mod_bprop=lambda *_: 0), *tensors, dict(stripe_size=128)):
        with pytest.raises(ValueError, match=f"{next(iter(argument))} is .*, which te_jax does not have"):
            call(qkv, **argument)
    lengths = SequenceDescriptor.from_seqlens(jnp.array([5, 7]))
    with pytest.raises(ValueError, match="mask and sequence_descriptor are one argument"):
        call(qkv, lengths, AttnMaskType.PADDING_MASK, mask=jnp.zeros((2, 1, 7, 7), bool))
    with pytest.warns(UserWarning, match="softmax_offset is given, which .*VANILLA_SOFTMAX ignores"):
        call(qkv, softmax_offset=jnp.ones((1, 4, 1, 1)))


@pytest.mark.parametrize(
    ("place", "given", "enum"),
    [(4, "no_bias", "AttnBiasType"), (5, "causal", "AttnMaskType"), (6, "bs3hd", "QKVLayout")]
    + [(7, "vanilla", "AttnSoftmaxType"), (13, "ring", "CPStrategy")],
)
def test_enums_are_no_strings(place, given, enum, qkv):
    types = AttnBiasType.NO_BIAS, AttnMaskType.NO_MASK, QKVLayout.BSHD_BSHD_BSHD, AttnSoftmaxType.VANILLA_SOFTMAX
    args = [qkv, None, None, None, *types, 0.3, 0.0, True, 1, None, CPStrategy.DEFAULT]
    args[place] = given
    with pytest.raises(TypeError, match=f"fused_attn: .* is {given!r}; pass a member of {enum}, such as {enum}."):
        fused_attn(*args)


def test_dropout_needs_a_seed(qkv):
    types = AttnBiasType.NO_BIAS, AttnMaskType.NO_MASK, QKVLayout.BSHD_BSHD_BSHD, AttnSoftmaxType.VANILLA_SOFTMAX
    with pytest.raises(ValueError, match="fused_attn: seed is None, but dropout_probability is 0.5; pass jax.random"):
        fused_attn(qkv, None, None, None, *types, 0.3, 0.5)


def test_dropout_is_for_training_alone(qkv):
    types = AttnBiasType.NO_BIAS, AttnMaskType.NO_MASK, QKVLayout.BSHD_BSHD_BSHD, AttnSoftmaxType.VANILLA_SOFTMAX
    attend = lambda training: fused_attn(qkv, None, None, jax.random.key(0), *types, 0.3, 0.5, training)
    assert not np.allclose(attend(True), attend(False))
    np.testing.assert_array_equal(attend(False), call(qkv))


def test_seeds_of_dropout(qkv):
    """Flax's module gets one key of whatever the incumbent takes; without dropout the seed is not looked at."""
    types = AttnBiasType.NO_BIAS, AttnMaskType.NO_MASK, QKVLayout.BSHD_BSHD_BSHD, AttnSoftmaxType.VANILLA_SOFTMAX
    attend = jax.jit(lambda seed, rate: fused_attn(qkv, None, None, seed, *types, 0.3, rate), static_argnums=1)
    key = jax.random.key(3, impl="threefry2x32")
    expected = attend(key, 0.5)
    words = jax.random.key_data(key)
    for seed in (words, jnp.stack([words, words + 1]), jnp.stack([key, jax.random.key(4, impl="threefry2x32")])):
        np.testing.assert_array_equal(attend(seed, 0.5), expected)
    np.testing.assert_array_equal(attend(jnp.zeros((3, 1), jnp.int32), 0.0), attend(key, 0.0))


def test_attention_inside_of_modules(qkv):
    """It is a function: the module that calls it has no submodule of it."""

    class Compact(nn.Module):
        @nn.compact
        def __call__(self, q, k, v):
            return DotProductAttention(8, 4)(q, k, call((q, k, v)))

    class Setup(nn.Module):
        def setup(self):
            self.dense = nn.Dense(8)

        def __call__(self, q, k, v):
            return self.dense(call((q, k, v)))

    names = []
    record = lambda f, args, kwargs, context: names.append(context.module.name) or f(*args, **kwargs)
    with nn.intercept_methods(record):
        jax.eval_shape(Compact().init, jax.random.key(0), *qkv)
    assert "DotProductAttention_0" in names and "DotProductAttention_1" not in names
    assert set(jax.eval_shape(Setup().init, jax.random.key(0), *qkv)["params"]) == {"dense"}


def test_whether_cudnn_attends():
    ask = lambda dtype: is_fused_attn_kernel_available(
        True, dtype, dtype, QKVLayout.BSHD_BSHD_BSHD, AttnBiasType.POST_SCALE_BIAS, AttnMaskType.CAUSAL_MASK,
        AttnSoftmaxType.LEARNABLE_SOFTMAX, 0.0, 4, 2, 64, 64, 64, 64, (-1, -1),
    )  # fmt: skip
    assert ask(jnp.bfloat16) and not ask(jnp.float32)


def test_orders_of_a_balanced_sequence():
    x = np.arange(32).reshape(2, 16)
    swapped = reorder_causal_load_balancing(x, ReorderStrategy.DualChunkSwap, cp_size=4, seq_dim=1)
    assert swapped[0].tolist() == [0, 1, 14, 15, 2, 3, 12, 13, 4, 5, 10, 11, 6, 7, 8, 9]
    for size, first in ((None, [0, 4, 8, 12, 1, 5, 9, 13]), (2, [0, 1, 8, 9, 2, 3, 10, 11])):
        striped = reorder_causal_load_balancing(x, ReorderStrategy.Striped, 4, 1, size)
        assert striped[0, :8].tolist() == first and isinstance(striped, np.ndarray)
        back = inverse_reorder_causal_load_balancing(jnp.asarray(striped), ReorderStrategy.Striped, 4, -1, size)
        np.testing.assert_array_equal(back, x)
    with pytest.raises(ValueError, match="stripe_size is 2"):
        reorder_causal_load_balancing(x, ReorderStrategy.DualChunkSwap, 4, 1, 2)
    with pytest.raises(ValueError, match="3 do not divide"):
        reorder_causal_load_balancing(x, ReorderStrategy.Striped, 3, 1)


def test_a_sequence_in_stripes_is_refused(qkv):
    module = DotProductAttention(
        8, 4, qkv_layout="thd_thd_thd", attn_mask_type="padding_causal", context_parallel_axis="cp",
        context_parallel_causal_load_balanced=True,
    )  # fmt: skip
    with jax.set_mesh(jax.make_mesh((2,), ("cp",))), pytest.raises(ValueError, match="Striped"):
        module.init({}, *qkv, SequenceDescriptor.from_seqlens(jnp.array([5, 7])))


def test_runs_and_windows(rng):
    ids = np.repeat(rng.integers(0, 4, (3, 9)), rng.integers(1, 3, 9), 1)
    expected = np.zeros_like(ids)
    for row, out in zip(ids, expected):
        edges = [0, *np.flatnonzero(np.diff(row)) + 1, len(row)]
        for begin, end in zip(edges, edges[1:]):
            out[begin:end] = (end - begin) * (row[begin] != 0)
    np.testing.assert_array_equal(jax.jit(run_length_fill)(ids), expected)
    pos = np.arange(6)[None]
    distance = pos[:, None, :] - pos[:, :, None]

    @jax.jit
    def masks(pos):
        ends = make_swa_mask(pos[:, :4], pos, (2, 0), bool, jnp.ones((1, 4), int), jnp.ones((1, 6), int))
        return make_swa_mask(pos, pos, (2, 1), jnp.int32), make_swa_mask(pos, pos), ends

    window, everywhere, ends = map(np.asarray, masks(pos))
    np.testing.assert_array_equal(window[:, 0], (distance >= -2) & (distance <= 1))
    assert everywhere.all()
    np.testing.assert_array_equal(ends[0, 0], np.arange(6) - 6 - (np.arange(4)[:, None] - 4) >= -2)
