"""Masks and names as programs for TransformerEngine write them: in either argument, of five axes, in any case, and
next to dummies of one row while a module is initializing."""

import enum
import warnings

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import on_device

import te_jax.flax as te_flax
from te_jax.ops.attention import SequenceDescriptor, dot_product_attention, explain_attention
from te_jax.sharding import MeshResource, global_shard_guard

KEY = jax.random.key(0)
B, S, H, G, D = 3, 5, 6, 3, 4


def core(**fields):
    return te_flax.DotProductAttention(
        **dict(head_dim=D, num_attention_heads=H, num_gqa_groups=G, attn_mask_type="padding") | fields
    )


@pytest.fixture
def qkv(rng):
    return tuple(on_device(rng.standard_normal((B, S, heads, D)), jnp.float32) for heads in (H, G, G))


@pytest.fixture
def hidden(rng):
    """bool[b, h, s, t], with a key for every query."""
    return jnp.asarray((rng.random((B, H, S, S)) < 0.4) & ~np.eye(S, dtype=bool))


def test_array_and_descriptor_in_either_argument(qkv, hidden):
    lengths = SequenceDescriptor.from_seqlens(jnp.asarray([5, 2, 3]))
    array = hidden[:, :1].astype(jnp.uint8)

    def outputs(*qkv):
        call = lambda *args, **kwargs: core().apply({}, *qkv, *args, **kwargs)
        op = lambda **masks: dot_product_attention(*qkv, attn_mask_type="padding", **masks)
        return (
            (call(mask=array), call(array), op(sequence_descriptor=array)),
            (call(lengths), call(mask=lengths), op(mask=lengths)),
            (call(lengths, mask=array), call(array, mask=lengths), op(mask=lengths, sequence_descriptor=array)),
        )

    for want, *others in jax.jit(outputs)(*qkv):
        for got in others:
            np.testing.assert_array_equal(got, want)
    assert explain_attention(*qkv, mask=lengths) == explain_attention(*qkv, sequence_descriptor=lengths)
    with pytest.raises(ValueError, match="mask and sequence_descriptor are both arrays; pass one array"):
        core().apply({}, *qkv, array, mask=array)
    with pytest.raises(ValueError, match="mask and sequence_descriptor are both SequenceDescriptors; pass one"):
        core().apply({}, *qkv, lengths, mask=lengths)
    with pytest.raises(
        TypeError, match="sequence_descriptor is 3; pass a SequenceDescriptor or a bool or integer array"
    ):
        core().apply({}, *qkv, 3)
    with pytest.raises(TypeError, match="mask is float32"):
        core().apply({}, *qkv, mask=jnp.ones((S, S)))


def test_masks_of_five_axes(qkv, hidden):
    """[b, g, h / g, s, t], with 1 where it broadcasts: query head i reads key head i // (h / g)."""
    split = hidden.reshape(B, G, H // G, S, S)
    cases = [
        (split[:, :1, :1], hidden[:, :1]),
        (split[:1, :1, :1], hidden[:1, :1]),
        (split, hidden),
        (split[:, :, :1], jnp.repeat(split[:, :, 0], H // G, 1)),
        (split[:1, :1], jnp.tile(split[:1, 0], (1, G, 1, 1))),
        (split[..., :1, :], hidden[..., :1, :]),
    ]
    run = jax.jit(lambda masks: [core().apply({}, *qkv, mask) for mask in masks])
    for got, want in zip(run([five for five, _ in cases]), run([four for _, four in cases])):
        np.testing.assert_array_equal(got, want)
    for shape in ((B, H, 1, S, S), (2, 1, 1, S, S), (1, B, 1, 1, S, S), (B, S, S)):
        with pytest.raises(ValueError, match=r"mask has shape .*pass \[s, t\] or \[b.*or \[b..., g, h / g, s, t\]"):
            core().apply({}, *qkv, jnp.zeros(shape, bool))
    layer = te_flax.MultiHeadAttention(head_dim=D, num_attention_heads=H, num_gqa_groups=G, attn_mask_type="padding")
    x = qkv[0].reshape(B, S, H * D)
    got, want = jax.jit(lambda x: [layer.init_with_output(KEY, x, mask=mask)[0][0] for mask in (split, hidden)])(x)
    np.testing.assert_array_equal(got, want)


class Spelled(enum.Enum):
    NO_BIAS = 0
    PADDING_CAUSAL_MASK = 1
    OFF_BY_ONE_SOFTMAX = 2
    BSHD_BSHD_BSHD = 3


def test_names_in_any_case(qkv):
    lengths = SequenceDescriptor.from_seqlens(jnp.asarray([5, 2, 3]))
    lower = dict(attn_mask_type="padding_causal", attn_bias_type="no_bias", softmax_type="off_by_one")
    other = dict(attn_mask_type="PADDING_CAUSAL", attn_bias_type="NO_BIAS", softmax_type="Off-By-One")
    layouts = dict(qkv_layout="bshd_bshd_bshd"), dict(qkv_layout="BSHD_BSHD_BSHD")
    modules = core(**lower, **layouts[0]), core(**other, **layouts[1])
    want, got = jax.jit(lambda x: [module.apply({}, *x, lengths) for module in modules])(qkv)
    np.testing.assert_array_equal(got, want)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        jax.eval_shape(core(attn_mask_type="Padding-Causal").apply, {}, *qkv)
    assert "attn_mask_type is 'Padding-Causal', but neither" in str(told[0].message)
    layer = te_flax.TransformerLayer(
        hidden_size=24, mlp_hidden_size=8, num_attention_heads=H, self_attn_mask_type="CAUSAL"
    )
    jax.eval_shape(layer.init, dict(params=KEY, dropout=KEY), qkv[0].reshape(B, S, -1))


@pytest.mark.parametrize(
    "field, member, meant",
    [
        ("attn_bias_type", Spelled.NO_BIAS, "no_bias"),
        ("attn_mask_type", Spelled.PADDING_CAUSAL_MASK, "padding_causal"),
        ("softmax_type", Spelled.OFF_BY_ONE_SOFTMAX, "off_by_one"),
        ("qkv_layout", Spelled.BSHD_BSHD_BSHD, "bshd_bshd_bshd"),
    ],
)
def test_members_of_enums_are_refused_with_the_name_to_pass(qkv, field, member, meant):
    with pytest.raises(TypeError, match=f"{field} is <.*did you mean '{meant}'"):
        core(**{field: member}).apply({}, *qkv)


def test_initializing_reads_shapes_alone(qkv, monkeypatch):
    """Inputs of one row, and no mesh, stand for the batch and the mesh of later calls, which see the masks."""
    x = qkv[0].reshape(B, S, H * D)
    row = jax.tree.map(lambda a: a[:1], qkv)
    lengths = SequenceDescriptor.from_seqlens(jnp.asarray([5, 2, 3]))
    ids = SequenceDescriptor.from_segment_ids_and_pos(jnp.asarray([[1, 1, 2, 2, 0]] * B))
    mask = jnp.zeros((B, 1, 1, S, S), jnp.uint8)
    for fields, given in (({}, lengths), (dict(qkv_layout="THD_THD_THD", max_segments_per_seq=3), ids), ({}, mask)):
        module = core(softmax_type="learnable", **fields)
        out, variables = jax.eval_shape(module.init_with_output, KEY, *row, given)
        assert out.shape == (1, S, H, D) and list(variables) == ["params"]
        with pytest.raises(ValueError, match="has shape"):
            jax.eval_shape(module.apply, variables, *row, given)
        assert jax.eval_shape(module.apply, variables, *qkv, given).shape == (B, S, H, D)
    # A mask of the inputs' own rows counts.
    out, again = jax.jit(lambda *x: (core().init_with_output(KEY, *x)[0], core().apply({}, *x)))(*qkv, lengths)
    np.testing.assert_array_equal(out, again)
    layer = te_flax.TransformerLayer(
        hidden_size=H * D, mlp_hidden_size=8, num_attention_heads=H, self_attn_mask_type="padding_causal",
        enable_rotary_pos_emb=True, hidden_dropout=0.0, attention_dropout=0.0,
    )  # fmt: skip
    variables = jax.eval_shape(lambda x: layer.init(KEY, x, attention_mask=ids), x[:1])
    assert jax.eval_shape(lambda *a: layer.apply(*a, attention_mask=ids), variables, x).shape == x.shape
    cut = core(context_parallel_axis="context", context_parallel_causal_load_balanced=True, attn_mask_type="causal")
    assert cut.init(KEY, *row) == {}
    monkeypatch.setattr(jax, "device_count", lambda: 2)
    with pytest.raises(ValueError, match="context_parallel_axis is 'context', but the mesh in force is none"):
        cut.apply({}, *qkv)
    monkeypatch.setattr(jax, "device_count", lambda: 1)  # Then no axis has more devices.
    assert jax.eval_shape(cut.apply, {}, *qkv).shape == (B, S, H, D)


def test_axes_of_one_device_are_no_split(qkv):
    """In any role, and in several at once."""
    fields = dict(attn_mask_type="causal", window_size=[S, 0], context_parallel_causal_load_balanced=True)
    modules = [
        core(context_parallel_axis=axis, context_parallel_strategy=strategy, **fields)
        for axis in ("context", "", "tensor")
        for strategy in ("all_gather", "RING")
    ]
    mesh = jax.make_mesh((1, 1), ("context", "tensor"), (jax.sharding.AxisType.Auto,) * 2, devices=jax.devices()[:1])
    with jax.set_mesh(mesh), global_shard_guard(MeshResource(tp_resource="tensor", cp_resource="context")):
        outputs = jax.jit(lambda *x: [module.apply({}, *x) for module in modules])(*qkv)
    want = core(attn_mask_type="causal").apply({}, *qkv)
    for got in outputs:
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)


def test_hidden_size_unlike_the_width(rng):
    x = on_device(rng.standard_normal((2, 4, 24)), jnp.float32)
    fields = dict(mlp_hidden_size=8, num_attention_heads=2, hidden_dropout=0.0, attention_dropout=0.0)
    with pytest.raises(ValueError, match="hidden_size is 16; .*hidden_size=24 and kv_channels=8"):
        te_flax.TransformerLayer(hidden_size=16, **fields).init(KEY, x)
    served = te_flax.TransformerLayer(hidden_size=24, kv_channels=8, **fields)

    class AnyWidth(te_flax.TransformerLayer):
        any_width = True

    loose = AnyWidth(hidden_size=16, **fields)
    got, want = jax.jit(lambda x: [module.init_with_output(KEY, x) for module in (loose, served)])(x)
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_drop_path_behind_cross_attention(rng):
    """`cross_drop_path` is its rate; without it `drop_path` is."""
    x, encoded = (on_device(rng.standard_normal((64, n, 8)), jnp.float32) for n in (2, 3))
    layer = lambda **fields: te_flax.TransformerLayer(
        hidden_size=8, mlp_hidden_size=8, num_attention_heads=2, hidden_dropout=0.0, attention_dropout=0.0,
        layer_type="decoder", **fields,
    )  # fmt: skip
    # Without the other sub-blocks' outputs a sample is changed only by cross-attention.
    silent = lambda path: path[1] == "mlp" or path[1:3] == ("self_attention", "out")
    fields = (
        {}, dict(drop_path=0.5, cross_drop_path=0.0), dict(drop_path=0.5), dict(cross_drop_path=0.5),
        dict(drop_path=0.1, cross_drop_path=0.5),
    )  # fmt: skip

    def outputs(x):
        variables = flax.traverse_util.flatten_dict(flax.linen.meta.unbox(layer().init(KEY, x, encoded)))
        quiet = flax.traverse_util.unflatten_dict({k: a * 0 if silent(k) else a for k, a in variables.items()})
        return [layer(**each).apply(quiet, x, encoded, rngs=dict(dropout=KEY)) for each in fields]

    whole, apart, *skipping = [int((~np.isclose(y, x, atol=1e-6).all((1, 2))).sum()) for y in jax.jit(outputs)(x)]
    assert whole == apart == len(x)
    assert all(12 < count < 52 for count in skipping), skipping  # 32, sigma 4
