"""TransformerEngine's names over te_jax: each adapter computes what te_jax does."""

from functools import partial

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import te_jax
import te_jax.compat.transformer_engine.jax as te
from te_jax import layers
from te_jax.compat.transformer_engine.common import recipe
from te_jax.compat.transformer_engine.jax.attention import (
    AttnBiasType,
    AttnMaskType,
    AttnSoftmaxType,
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
from te_jax.compat.transformer_engine.jax.dense import dense, grouped_dense
from te_jax.compat.transformer_engine.jax.flax.module import TransformerEngineBase, make_grouped_dense_cls
from te_jax.compat.transformer_engine.jax.flax.transformer import (
    DotProductAttention,
    TransformerLayer,
    rotary_pos_emb,
)
from te_jax.compat.transformer_engine.jax.quantize import QuantizerFactory, ScalingMode
from te_jax.ops.attention import MASK_TYPES
from te_jax.ops.permute import buffer_rows
from te_jax.ops.rope import rope

# -- attention ---------------------------------------------------------------------------------------------------


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
    return tuple(jnp.asarray(rng.standard_normal((2, 7, heads, 8)), jnp.float32) for heads in (4, 4, 4))


def call(arrays, described=None, mask_type=AttnMaskType.NO_MASK, layout=QKVLayout.BSHD_BSHD_BSHD, **keywords):
    types = AttnBiasType.NO_BIAS, mask_type, layout, keywords.pop("softmax", AttnSoftmaxType.VANILLA_SOFTMAX)
    return fused_attn(arrays, None, described, None, *types, 0.3, 0.0, True, **keywords)


# Sums of 7 products and an exp in f32 at values about 1: far below 1e-5.
CLOSE = dict(rtol=1e-5, atol=1e-5)


def test_fused_attention(qkv):
    q, k, v = qkv
    causal = np.triu(np.ones((7, 7), bool), 1)
    expected = attention(q, k, v, causal, 0.3)
    joined, keys = jnp.stack(qkv, 2), jnp.stack(qkv[1:], 2)
    for arrays, layout in (
        (qkv, QKVLayout.BSHD_BSHD_BSHD), ((q, keys), QKVLayout.BSHD_BS2HD), ((joined,), QKVLayout.BS3HD)
    ):  # fmt: skip
        np.testing.assert_allclose(call(arrays, None, AttnMaskType.CAUSAL_MASK, layout), expected, **CLOSE)
    lengths = SequenceDescriptor.from_seqlens(jnp.array([5, 7]))
    padded = np.broadcast_to(causal | (np.arange(7) >= np.array([[[[5]]], [[[7]]]])), (2, 1, 7, 7)).copy()
    padded[0, :, 5:] = True
    types = dict(mask_type=AttnMaskType.PADDING_CAUSAL_MASK)
    np.testing.assert_allclose(call(qkv, lengths, **types), attention(q, k, v, padded, 0.3), **CLOSE)
    np.testing.assert_allclose(call(qkv, jnp.asarray(padded), **types), attention(q, k, v, padded, 0.3), **CLOSE)
    offset = jnp.linspace(-1, 1, 4).reshape(1, 4, 1, 1)
    sink = call(qkv, softmax=AttnSoftmaxType.LEARNABLE_SOFTMAX, softmax_offset=offset)
    np.testing.assert_allclose(sink, attention(q, k, v, False, 0.3, offset), **CLOSE)
    one = call(qkv, softmax=AttnSoftmaxType.OFF_BY_ONE_SOFTMAX)
    np.testing.assert_allclose(one, attention(q, k, v, False, 0.3, np.zeros(1)), **CLOSE)


def test_fused_attention_of_several_segments(qkv):
    ids = jnp.array([[1, 1, 1, 2, 2, 0, 0], [1, 1, 2, 2, 2, 2, 0]])
    lengths, offsets = jnp.array([[3, 2, -1], [2, 4, -1]]), jnp.array([[0, 3, -1, -1], [0, 2, -1, -1]])
    hidden = (np.asarray(ids)[:, None, :, None] != np.asarray(ids)[:, None, None]) | (np.asarray(ids) == 0)[
        :, None, None
    ]
    expected = attention(*qkv, hidden, 0.3)
    options = dict(mask_type=AttnMaskType.PADDING_MASK, layout=QKVLayout.THD_THD_THD, max_segments_per_seq=2)
    for described in (
        SequenceDescriptor.from_segment_ids_and_pos(ids),
        SequenceDescriptor.from_seqlens_and_offsets((lengths, lengths), (offsets, offsets)),
    ):
        np.testing.assert_allclose(call(qkv, described, **options), expected, **CLOSE)


def test_a_mask_without_padding_is_told_of(qkv):
    """The older call, with its names: the mask counts for the types with padding alone."""
    with pytest.warns(UserWarning, match="ignores; leave it out"):
        out = fused_attn(
            qkv=qkv, bias=None, mask=jnp.ones((2, 7, 7)), seed=None, attn_bias_type=AttnBiasType.NO_BIAS,
            attn_mask_type=AttnMaskType.NO_MASK, qkv_layout=QKVLayout.BSHD_BSHD_BSHD, scaling_factor=0.3,
            dropout_probability=0.0, is_training=True,
        )  # fmt: skip
    np.testing.assert_array_equal(out, call(qkv))


def test_what_attention_refuses(qkv):
    for argument in (dict(score_mod=lambda *_: 0), dict(stripe_size=128)):
        with pytest.raises(ValueError, match=f"{next(iter(argument))} is .*, which te_jax does not have"):
            call(qkv, **argument)


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
    np.testing.assert_array_equal(run_length_fill(ids), expected)
    pos = np.arange(6)[None]
    distance = pos[:, None, :] - pos[:, :, None]
    window = make_swa_mask(pos, pos, (2, 1), jnp.int32)
    np.testing.assert_array_equal(window[:, 0], (distance >= -2) & (distance <= 1))
    assert make_swa_mask(pos, pos).all()
    ends = make_swa_mask(pos[:, :4], pos, (2, 0), bool, jnp.ones((1, 4), int), jnp.ones((1, 6), int))
    np.testing.assert_array_equal(ends[0, 0], np.arange(6) - 6 - (np.arange(4)[:, None] - 4) >= -2)


# -- dense layers ------------------------------------------------------------------------------------------------


class Product(TransformerEngineBase):
    """A dense layer as trainers make one of TransformerEngine's functions."""

    @nn.compact
    def __call__(self, x, kernel):
        quantizers = self.generate_quantizer_set(
            variable_collection="_overwrite_with_gradient", fp8_recipe=recipe.DelayedScaling(amax_history_len=4)
        )
        return dense(x, kernel, contracting_dims=((x.ndim - 1,), (0,)), quantizer_set=quantizers)


def test_a_dense_layer_with_its_quantizers(rng):
    x, kernel = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((2, 16, 32), (32, 16)))
    module = Product()
    state = module.init({}, x, kernel)
    assert state["_overwrite_with_gradient"]["x_amax_history"].shape == (4,)
    loss = lambda state, x, kernel: jnp.sum(module.apply(state, x, kernel) ** 2)
    new = jax.grad(loss)(state, x, kernel)["_overwrite_with_gradient"]
    assert float(new["x_amax_history"][-1]) == float(jnp.abs(x).max())
    assert float(new["kernel_scale"][0]) == np.float32(448) / np.float32(jnp.abs(kernel).max())
    np.testing.assert_array_equal(dense(x, kernel, contracting_dims=((2,), (0,))), layers.dense(x, kernel))
    with pytest.raises(ValueError, match="move the contracted axes"):
        dense(x, kernel)
    with pytest.warns(UserWarning, match="XLA gathers and sums"):
        gather = te.cpp_extensions.CollectiveOpSet.create(te.cpp_extensions.CollectiveOp.ALL_GATHER)
        dense(x, kernel, contracting_dims=((-1,), (0,)), collective_op_set=gather)


def test_quantizers_are_a_pytree_of_their_state():
    given = QuantizerFactory.create_set(fp8_recipe=recipe.DelayedScaling(amax_history_len=3))
    quantizers = jax.jit(lambda quantizers: quantizers)(given)
    assert quantizers.x.scaling_mode is ScalingMode.DELAYED_TENSOR_SCALING
    assert quantizers.dgrad.q_dtype == jnp.float8_e5m2 and quantizers.kernel.amax_history.shape == (3,)
    assert QuantizerFactory.create_set(scaling_mode=ScalingMode.NO_SCALING).x is None
    with pytest.raises(ValueError, match="no recipe of"):
        QuantizerFactory.create_set(scaling_mode=ScalingMode.NVFP4_1D_SCALING)


def test_functions_in_modules_get_pytrees():
    def product(generate_quantizer_set, x):
        given = jax.jit(lambda quantizers: quantizers)(generate_quantizer_set("_0"))
        assert given.x.q_dtype == jnp.float8_e4m3fn
        return x

    module = te.flax.wrap_function_in_te_state_module(product, recipe.DelayedScaling())
    assert module.__name__ == "TEWrapper_product"
    state = jax.eval_shape(module().init, {}, jnp.ones(3))
    assert "x_0_scale" in state["_overwrite_with_gradient"]


def test_logical_axes_without_rules_of_flax(rng):
    x, kernel = jnp.ones((8, 4)), jnp.ones((4, 6))
    axes = dict(contracting_dims=((1,), (0,)), input_axes=(te.sharding.BATCH_AXES, None))
    axes["output_axes"] = (te.sharding.BATCH_AXES, "of_no_rule")
    resource = te.MeshResource(dp_resource="data")
    place = lambda: jax.jit(lambda x, kernel: dense(x, kernel, **axes))(x, kernel).sharding.spec
    with pytest.warns(UserWarning, match=r"mesh axes data, but no mesh is in force.*jax\.set_mesh"):
        te.autocast(mesh_resource=resource)
    with te.sharding.global_shard_guard(resource):
        assert te.sharding.get_sharding_map_logic_axis_to_mesh_axis() == {}
        with pytest.raises(ValueError, match=r"axis is 'data'; no mesh is in force: enter `jax\.set_mesh"):
            te.sharding.get_mesh_axis_size("data")
    with jax.set_mesh(jax.make_mesh((8,), ("data",), (jax.sharding.AxisType.Auto,))):
        assert "data" not in place()
        with te.autocast(mesh_resource=resource):
            assert place()[0] == "data"
            assert te.sharding.get_sharding_map_logic_axis_to_mesh_axis()[te.sharding.BATCH_AXES] == "data"


def test_norms_in_front_of_dense_layers(rng):
    x, gamma, kernel, wi, wo = (
        jnp.asarray(rng.standard_normal(shape), jnp.float32)
        for shape in ((6, 16), (16,), (16, 8), (16, 2, 24), (24, 16))
    )
    quantizers = QuantizerFactory.create_set(scaling_mode=ScalingMode.CURRENT_TENSOR_SCALING)
    current = dict(norm="rmsnorm", recipe=quantizers.recipe)
    np.testing.assert_array_equal(
        te.layernorm_dense.layernorm_dense(x, kernel, gamma, None, norm_type="RMSNorm", quantizer_set=quantizers),
        layers.layernorm_dense(x, kernel, gamma, **current)[0],
    )
    swiglu = ("silu", "linear")
    np.testing.assert_array_equal(
        te.layernorm_mlp.layernorm_mlp(
            x, gamma, None, [wi, wo], [None, None], "rmsnorm", activation_type=swiglu, quantizer_sets=(quantizers,) * 2
        ),
        layers.layernorm_mlp(x, gamma, None, wi, wo, activations=swiglu, **current),
    )
    normed = te.layernorm.layernorm(x, gamma, None, "rmsnorm")
    np.testing.assert_array_equal(normed, layers.layernorm(x, gamma, norm="rmsnorm"))
    halves = x.reshape(6, 2, 8)
    expected = jax.nn.silu(halves[:, 0]) * halves[:, 1]
    np.testing.assert_allclose(te.activation.activation(halves, swiglu), expected, rtol=1e-6)
    for name, refused in (("layernorm", te.layernorm.layernorm), ("activation", te.activation.activation)):
        with pytest.raises(ValueError, match=f"{name}: quantizer"):
            refused(x, *(gamma, None, "rmsnorm") if name == "layernorm" else (swiglu,), quantizer=quantizers.x)


def test_grouped_dense_layers(rng):
    x, kernel = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((9, 8), (3, 8, 5)))
    sizes = jnp.array([4, 0, 3])
    expected = jax.lax.ragged_dot(x, kernel, sizes)
    np.testing.assert_allclose(grouped_dense(x, kernel, sizes), expected, **CLOSE)
    module = make_grouped_dense_cls(None)
    np.testing.assert_array_equal(module.apply({}, x, kernel, sizes), grouped_dense(x, kernel, sizes))
    rule = recipe.Float8CurrentScaling()
    expected = layers.grouped_dense(x, kernel, sizes, recipe=rule)
    quantizers = QuantizerFactory.create_set(fp8_recipe=rule, n_groups=3)
    np.testing.assert_array_equal(grouped_dense(x, kernel, sizes, quantizer_set=quantizers), expected)
    np.testing.assert_array_equal(make_grouped_dense_cls(rule).apply({}, x, kernel, sizes), expected)
    narrow, wide = (x.astype(jnp.bfloat16), kernel.astype(jnp.bfloat16)), jnp.float32
    expected = jax.lax.ragged_dot(*narrow, sizes, preferred_element_type=wide)
    found = grouped_dense(*narrow, sizes, preferred_element_type=wide)
    assert found.dtype == wide
    np.testing.assert_allclose(found, expected, **CLOSE)
    state = make_grouped_dense_cls(recipe.DelayedScaling()).init(jax.random.key(0), x, kernel, sizes)
    assert len(state["_overwrite_with_gradient"]) == 6


def test_router(rng):
    logits = jnp.asarray(rng.standard_normal((5, 6)), jnp.float32)
    weights, chosen = te.router.fused_topk_with_score_function(logits, 2, True, scaling_factor=2.0)
    scores = jax.nn.softmax(logits, -1)
    expected = np.asarray(scores >= jnp.sort(scores, -1)[:, -2:-1])
    np.testing.assert_array_equal(chosen, expected)
    np.testing.assert_allclose(weights, np.where(expected, 2 * scores, 0), rtol=1e-6)
    with pytest.raises(ValueError, match="load_balancing_loss"):
        te.router.fused_topk_with_score_function(logits, 2, compute_aux_scores=True)


@pytest.mark.parametrize("align_size", [None, 32])
def test_tokens_go_to_their_experts_and_back(rng, align_size):
    """Against loops: token 2 goes to no expert, the others to one or two of four."""
    x = jnp.asarray(rng.standard_normal((2, 3, 8)), jnp.float32)
    chosen = np.array([[0, 1, 0, 1], [1, 0, 0, 0], [0, 0, 0, 0], [0, 1, 1, 0], [0, 0, 0, 1], [1, 0, 0, 1]])
    probs = jnp.asarray(chosen * rng.uniform(0.1, 1, chosen.shape), jnp.float32)
    dispatch = lambda x, map: te.permutation.token_dispatch(x, map, 9, probs.reshape(2, 3, 4), align_size)
    rows, weights, row_id_map, padding, counts = jax.jit(dispatch)(x, jnp.asarray(chosen).reshape(2, 3, 4))
    tokens = [(e, t) for e in range(4) for t in range(6) if chosen[t, e]]
    begin = 0
    for expert, size in enumerate(np.asarray(counts)):
        own = [t for e, t in tokens if e == expert]
        np.testing.assert_array_equal(rows[begin : begin + len(own)], x.reshape(6, 8)[np.array(own, int)])
        np.testing.assert_array_equal(weights[begin : begin + len(own)], probs[np.array(own, int), expert])
        assert (
            size == len(own)
            if align_size is None
            else size % 128 == 0 and not rows[begin + len(own) : begin + size].any()
        )
        begin += size
    assert (padding is None) == (align_size is None) and not rows[begin:].any()
    back = te.permutation.token_combine(rows, row_id_map, probs, padding)
    np.testing.assert_allclose(back, x.reshape(6, 8) * probs.sum(-1, keepdims=True), rtol=1e-6)
    many = jax.jit(dispatch)(x, jnp.ones((2, 3, 4), int))[0]
    assert jnp.isnan(many).any()  # 24 pairs, of which 9 get a row: of the tokens, none gets all of its rows


MAPS = {  # experts of each of four tokens
    "even": [{0, 1}, {1, 2}, {0, 2}, {0, 1}],
    "one token without": [{0, 1}, {1, 2}, {0, 2}, set()],
    "two tokens without": [{0, 1}, {1, 2}, set(), set()],
    "one to three": [{0, 1, 2}, {1}, {0, 2}, {1}],
    "one expert": [{1}, set(), {1}, {1}],
    "none": [set()] * 4,
    "all": [{0, 1, 2}] * 4,
}


@pytest.mark.parametrize("align_size", [None, 16])
def test_tokens_have_different_numbers_of_experts(rng, align_size):
    """Values and gradients against loops over pairs, of maps that are traced."""

    @partial(jax.jit, static_argnums=3)
    def run(x, chosen, probs, most, of_rows, of_probs, of_tokens):
        def loss(x, probs):
            rows, weights, row_id_map, padding, _ = te.permutation.token_dispatch(x, chosen, most, probs, align_size)
            weighed = te.permutation.token_combine(rows, row_id_map, probs, padding)
            plain = te.permutation.token_combine(rows * weights[:, None], row_id_map, None, padding)
            used = jnp.sum(rows * of_rows[: rows.shape[0]]) + jnp.sum(weights * of_probs[: rows.shape[0]])
            return used + jnp.sum((weighed + plain) * of_tokens), (rows, weights, weighed, plain)

        return jax.value_and_grad(loss, (0, 1), has_aux=True)(x, probs)

    for name, experts_of in MAPS.items():
        pairs = [(e, t) for e in range(3) for t in range(4) if e in experts_of[t]]
        chosen = np.array([[e in of_token for e in range(3)] for of_token in experts_of])
        x, of_tokens = rng.standard_normal((2, 4, 8)).astype(np.float32)
        of_rows, of_probs = rng.standard_normal((512, 8)).astype(np.float32), rng.standard_normal(512).astype("f")
        probs = np.where(chosen, rng.random((4, 3)), 0).astype(np.float32)
        most = max(len(pairs), 8)
        (_, (rows, weights, *sums)), (dx, dprobs) = run(x, chosen, probs, most, of_rows, of_probs, of_tokens)
        # Groups of fewer than 128 tokens: with align_size one begins 128 rows behind the last.
        held = sorted({e for e, _ in pairs})
        first = {e: [e for e, _ in pairs].index(e) for e in held}
        want, want_weights = np.zeros(rows.shape, np.float32), np.zeros(len(rows), np.float32)
        want_sums, want_dx, want_dprobs = (np.zeros(a.shape, np.float32) for a in (x, x, probs))
        for n, (e, t) in enumerate(pairs):
            row = n if align_size is None else 128 * held.index(e) + n - first[e]
            want[row], want_weights[row] = x[t], probs[t, e]
            want_sums[t] += probs[t, e] * x[t]
            want_dx[t] += of_rows[row] + 2 * probs[t, e] * of_tokens[t]
            want_dprobs[t, e] = of_probs[row] + 2 * np.sum(of_tokens[t] * x[t])
        assert len(rows) == (most if align_size is None else buffer_rows(most, 3)), name
        np.testing.assert_array_equal(rows, want, name)
        np.testing.assert_array_equal(weights, want_weights, name)
        each = (*sums, dx, dprobs), (want_sums, want_sums, want_dx, want_dprobs)
        for got, wanted in zip(*each):  # f32 sums of up to 8 products and 3 pairs, in another order
            np.testing.assert_allclose(got, wanted, rtol=2.0**-18, atol=2.0**-18, err_msg=name)


@pytest.mark.parametrize("tokens", [4, 0])
def test_more_rows_than_tokens_have_experts(tokens, rng):
    x, chosen = jnp.asarray(rng.standard_normal((tokens, 8)), jnp.float32), jnp.ones((tokens, 1))
    rows, probs, row_id_map, padding, _ = jax.jit(te.permutation.token_dispatch, static_argnums=2)(
        x, chosen, 10, chosen
    )
    np.testing.assert_array_equal(rows, jnp.pad(x, ((0, 10 - tokens), (0, 0))))
    np.testing.assert_array_equal(probs, np.arange(10) < tokens)
    np.testing.assert_array_equal(te.permutation.token_combine(rows, row_id_map, None, padding), x)


# -- modules -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("decoder", [False, True])
def test_a_layer_with_the_incumbents_defaults(rng, decoder):
    """The same tree and numbers as a layer of te_jax that asks for each of them, at a width unlike hidden_size."""
    x = jnp.asarray(rng.standard_normal((2, 6, 12)), jnp.float32)
    shared = dict(
        mlp_hidden_size=16, num_attention_heads=2, layer_type="decoder" if decoder else "encoder", drop_path=0.5,
        hidden_dropout=0.0, attention_dropout=0.0, window_size=(2, 2), self_attn_mask_type="no_mask",
        enable_rotary_pos_emb=True,
    )  # fmt: skip
    cross = dict(cross_window_size=(2, 2), cross_rotary_pos_emb=True, cross_drop_path=0.0) if decoder else {}
    asked = dict(enable_relative_embedding=True, scale_attn_logits=False, scaled_query_init=True, **cross)
    theirs = TransformerLayer(hidden_size=8, **shared)
    ours = te_jax.flax.TransformerLayer(hidden_size=12, kv_channels=4, **shared, **asked)
    arguments, rngs = ((x, x) if decoder else (x,)), {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    (y, variables), (expected, same) = (layer.init_with_output(rngs, *arguments) for layer in (theirs, ours))
    assert jax.tree.structure(variables) == jax.tree.structure(same)
    np.testing.assert_array_equal(y, expected)
    assert "relpos_bias" in variables["params"]


def test_relative_embedding_is_switched_off_by_false(rng):
    x = jnp.asarray(rng.standard_normal((1, 3, 8)), jnp.float32)
    layer = TransformerLayer(hidden_size=8, mlp_hidden_size=8, num_attention_heads=2, relative_embedding=False)
    variables = jax.eval_shape(lambda: layer.init(jax.random.key(0), x, deterministic=True))
    assert "relpos_bias" not in flax.core.unfreeze(variables)["params"]


@pytest.mark.parametrize("method", ["consecutive", "alternate"])
def test_rotary_positions(rng, method):
    x = jnp.asarray(rng.standard_normal((2, 5, 3, 2, 6)), jnp.float32)
    expected = jnp.stack([rope(x[:, :, i], windows=(1, 100), group_method=method) for i in range(3)], 2)
    np.testing.assert_array_equal(rotary_pos_emb(x, (1, 100), False, method), expected)
    swapped = rotary_pos_emb(x.swapaxes(0, 1), (1, 100), True, method)
    np.testing.assert_array_equal(swapped.swapaxes(0, 1), expected)
