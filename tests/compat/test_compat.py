"""TransformerEngine's names over te_jax: each adapter computes what te_jax does."""

from functools import partial

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import on_device
from flax import linen as nn

import te_jax
import te_jax.compat.transformer_engine.jax as te
from te_jax import layers
from te_jax.compat.transformer_engine.common import recipe
from te_jax.compat.transformer_engine.jax.dense import dense, grouped_dense
from te_jax.compat.transformer_engine.jax.flax.module import TransformerEngineBase, make_grouped_dense_cls
from te_jax.compat.transformer_engine.jax.flax.transformer import TransformerLayer, rotary_pos_emb
from te_jax.compat.transformer_engine.jax.quantize import QuantizerFactory, ScalingMode
from te_jax.ops.permute import buffer_rows
from te_jax.ops.rope import rope

# Sums of 8 products in f32 at values about 1: far below 1e-5.
CLOSE = dict(rtol=1e-5, atol=1e-5)

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
    x, kernel = (on_device(rng.standard_normal(shape), jnp.float32) for shape in ((2, 16, 32), (32, 16)))
    module = Product()
    state = jax.jit(module.init)({}, x, kernel)
    assert state["_overwrite_with_gradient"]["x_amax_history"].shape == (4,)
    loss = lambda state, x, kernel: jnp.sum(module.apply(state, x, kernel) ** 2)
    new = jax.jit(jax.grad(loss))(state, x, kernel)["_overwrite_with_gradient"]
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
        on_device(rng.standard_normal(shape), jnp.float32) for shape in ((6, 16), (16,), (16, 8), (16, 2, 24), (24, 16))
    )
    quantizers = QuantizerFactory.create_set(scaling_mode=ScalingMode.CURRENT_TENSOR_SCALING)
    current = dict(norm="rmsnorm", recipe=quantizers.recipe)
    swiglu = ("silu", "linear")
    halves = lambda x: x.reshape(6, 2, 8)

    def theirs(x, gamma, kernel, wi, wo):
        options = dict(norm_type="RMSNorm", quantizer_set=quantizers)
        of_mlp = dict(activation_type=swiglu, quantizer_sets=(quantizers,) * 2)
        return (
            te.layernorm_dense.layernorm_dense(x, kernel, gamma, None, **options),
            te.layernorm_mlp.layernorm_mlp(x, gamma, None, [wi, wo], [None, None], "rmsnorm", **of_mlp),
            te.layernorm.layernorm(x, gamma, None, "rmsnorm"),
            te.activation.activation(halves(x), swiglu),
        )

    def ours(x, gamma, kernel, wi, wo):
        return (
            layers.layernorm_dense(x, kernel, gamma, **current)[0],
            layers.layernorm_mlp(x, gamma, None, wi, wo, activations=swiglu, **current),
            layers.layernorm(x, gamma, norm="rmsnorm"),
        )

    *got, activated = jax.jit(theirs)(x, gamma, kernel, wi, wo)
    for one, expected in zip(got, jax.jit(ours)(x, gamma, kernel, wi, wo), strict=True):
        np.testing.assert_array_equal(one, expected)
    gate, value = np.moveaxis(halves(np.asarray(x)), 1, 0)
    np.testing.assert_allclose(activated, gate / (1 + np.exp(-gate)) * value, rtol=1e-6)
    for name, refused in (("layernorm", te.layernorm.layernorm), ("activation", te.activation.activation)):
        with pytest.raises(ValueError, match=f"{name}: quantizer"):
            refused(x, *(gamma, None, "rmsnorm") if name == "layernorm" else (swiglu,), quantizer=quantizers.x)


DELAYED = recipe.DelayedScaling(amax_history_len=2)


def states(length):
    """A QuantizeMetaSet with state of this length."""
    state = dict(scale=jnp.ones(1), amax_history=jnp.zeros(length))
    return te.quantize.QuantizeMetaSet(**{name: te.quantize.QuantizeMeta(**state) for name in ("x", "kernel", "grad")})


def test_state_of_quantizer_sets():
    """As TransformerEngine wants it next to a recipe; its gradient is the next state."""
    meta = te.quantize.QuantizeMeta
    empty = te.quantize.QuantizeMetaSet(x=meta(), kernel=meta(), grad=meta())
    assert QuantizerFactory.create_set(2, fp8_recipe=recipe.Float8CurrentScaling(), quantize_meta_set=empty)[1].x

    @jax.jit
    @jax.grad
    def step(state):
        given = te.quantize.QuantizeMetaSet(x=meta(*state), kernel=meta(), grad=meta())
        quantizers = QuantizerFactory.create_set(fp8_recipe=DELAYED, quantize_meta_set=given)
        return jnp.sum(dense(jnp.full((4, 8), 3.0), jnp.ones((8, 4)), quantizer_set=quantizers))

    scale, history = step((jnp.ones(1), jnp.zeros(2)))
    np.testing.assert_array_equal(history, [0, 3])
    np.testing.assert_allclose(scale, [448 / 3], rtol=2.0**-20)
    with pytest.raises(ValueError, match="QuantizeMeta of 'x': scale or amax_history is given without the other"):
        step((jnp.ones(1), None))


def test_what_functions_refuse():
    """Arguments that the incumbent has a use for, or refuses, and that had none here."""
    create, current = QuantizerFactory.create_set, recipe.Float8CurrentScaling()
    for given, error, words in (
        (dict(quantize_meta_set=object(), fp8_recipe=current), TypeError, "pass None or a QuantizeMetaSet"),
        (dict(quantize_meta_set=states(0), fp8_recipe=current), ValueError, "but Float8CurrentScaling has no state"),
        (dict(quantize_meta_set=states(3), fp8_recipe=DELAYED), ValueError, r"shape \(3,\), but DelayedScaling \(2,\)"),
        (dict(n_quantizer_set=2), TypeError, "n_quantizer_set"),
        (
            dict(fp8_recipe=current, scaling_mode=ScalingMode.CURRENT_TENSOR_SCALING),
            ValueError,
            "fp8_recipe is given too",
        ),
    ):
        with pytest.raises(error, match=words):
            create(**given)
    x, kernels = jnp.ones((6, 8)), (jnp.ones((8, 1, 16)), jnp.ones((16, 8)))
    mlp = lambda *given, **more: te.layernorm_mlp.layernorm_mlp(x, jnp.ones(8), None, *given, "rmsnorm", **more)
    with pytest.raises(ValueError, match="kernels has 3 entries"):
        mlp((*kernels, kernels[0]), (None, None))
    named = tuple(create(fp8_recipe=current, checkpoint_name=name) for name in "ab")
    with pytest.warns(UserWarning, match="checkpoint_name of quantizer_sets is 'a' and 'b'"):
        mlp(kernels, (None, None), quantizer_sets=named)
    for layer in (dense, te.layernorm_dense.layernorm_dense, grouped_dense):
        of_layer = dict(group_sizes=jnp.ones(8, int)) if layer is grouped_dense else {}
        with pytest.raises(TypeError, match=f"{layer.__name__}: quantizer_set is None; pass what QuantizerFactory"):
            more = () if layer is not te.layernorm_dense.layernorm_dense else (jnp.ones(8), None)
            layer(x, kernels[0], *more, quantizer_set=None, **of_layer)
    for dims, words in (((1, 0), r"is \(1, 0\); pass a tuple of 2"), (((2,), (0,)), "has 2, but the array has shape")):
        with pytest.raises(ValueError, match=f"dense: contracting_dims {words}"):
            dense(x, kernels[0], contracting_dims=dims)


def test_arguments_by_the_incumbents_names():
    x = jnp.ones((4, 8))
    constrained = te.sharding.with_sharding_constraint_by_logical_axes(x=x, logical_axis_names=("a", "b"))
    np.testing.assert_array_equal(constrained, x)
    assert te.layernorm.canonicalize_norm_type(x="RMS_Norm") == "rmsnorm"
    route = te.router.fused_topk_with_score_function
    for one, other in zip(
        route(x, 2, score_function="SIGMOID", routing_map_format="ByteMap"), route(x, 2, False, -1, -1, 1.0, "sigmoid")
    ):
        np.testing.assert_array_equal(one, other)


def test_grouped_dense_layers(rng):
    x, kernel = (on_device(rng.standard_normal(shape), jnp.float32) for shape in ((9, 8), (3, 8, 5)))
    sizes = jnp.array([4, 0, 3])
    rule, wide = recipe.Float8CurrentScaling(), jnp.float32
    quantizers = QuantizerFactory.create_set(fp8_recipe=rule, n_groups=3)
    narrow = lambda *arrays: (a.astype(jnp.bfloat16) for a in arrays)

    def theirs(x, kernel, sizes):
        return (
            grouped_dense(x, kernel, sizes),
            make_grouped_dense_cls(None).apply({}, x, kernel, sizes),
            grouped_dense(x, kernel, sizes, quantizer_set=quantizers),
            make_grouped_dense_cls(rule).apply({}, x, kernel, sizes),
            grouped_dense(*narrow(x, kernel), sizes, preferred_element_type=wide),
        )

    def others(x, kernel, sizes):
        return (
            jax.lax.ragged_dot(x, kernel, sizes),
            layers.grouped_dense(x, kernel, sizes, recipe=rule),
            jax.lax.ragged_dot(*narrow(x, kernel), sizes, preferred_element_type=wide),
        )

    plain, of_module, *in_fp8, widened = jax.jit(theirs)(x, kernel, sizes)
    expected, expected_in_fp8, expected_wide = jax.jit(others)(x, kernel, sizes)
    np.testing.assert_allclose(plain, expected, **CLOSE)
    np.testing.assert_array_equal(of_module, plain)
    for got in in_fp8:
        np.testing.assert_array_equal(got, expected_in_fp8)
    assert widened.dtype == wide
    np.testing.assert_allclose(widened, expected_wide, **CLOSE)
    init = make_grouped_dense_cls(recipe.DelayedScaling()).init
    state = jax.eval_shape(init, jax.random.key(0), x, kernel, sizes)
    assert len(state["_overwrite_with_gradient"]) == 6


def test_router(rng):
    logits = on_device(rng.standard_normal((5, 6)), jnp.float32)
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
    x = rng.standard_normal((2, 3, 8)).astype(np.float32)
    chosen = np.array([[0, 1, 0, 1], [1, 0, 0, 0], [0, 0, 0, 0], [0, 1, 1, 0], [0, 0, 0, 1], [1, 0, 0, 1]])
    probs = (chosen * rng.uniform(0.1, 1, chosen.shape)).astype(np.float32)
    dispatch = jax.jit(lambda x, map: te.permutation.token_dispatch(x, map, 9, probs.reshape(2, 3, 4), align_size))
    found = dispatch(x, chosen.reshape(2, 3, 4))
    rows, weights, row_id_map, padding, counts = jax.device_get(found)
    tokens = [(e, t) for e in range(4) for t in range(6) if chosen[t, e]]
    begin = 0
    for expert, size in enumerate(counts):
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
    back = jax.jit(te.permutation.token_combine)(rows, row_id_map, probs, padding)
    np.testing.assert_allclose(back, x.reshape(6, 8) * probs.sum(-1, keepdims=True), rtol=1e-6)
    many = dispatch(x, np.ones((2, 3, 4), int))[0]
    assert np.isnan(many).any()  # 24 pairs, of which 9 get a row: of the tokens, none gets all of its rows


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
    x, chosen = rng.standard_normal((tokens, 8)).astype(np.float32), np.ones((tokens, 1), np.float32)
    rows, probs, row_id_map, padding, _ = jax.jit(te.permutation.token_dispatch, static_argnums=2)(
        x, chosen, 10, chosen
    )
    np.testing.assert_array_equal(rows, np.pad(x, ((0, 10 - tokens), (0, 0))))
    np.testing.assert_array_equal(probs, np.arange(10) < tokens)
    back = jax.jit(te.permutation.token_combine)(rows, row_id_map, None, padding)
    np.testing.assert_array_equal(back, x)


# -- modules -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("decoder", [False, True])
def test_a_layer_with_the_incumbents_defaults(rng, decoder):
    """The same tree and numbers as a layer of te_jax that asks for each of them, at a width unlike hidden_size."""
    x = on_device(rng.standard_normal((2, 6, 12)), jnp.float32)
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
    both = jax.jit(lambda rngs, *arguments: [layer.init_with_output(rngs, *arguments) for layer in (theirs, ours)])
    (y, variables), (expected, same) = both(rngs, *arguments)
    assert jax.tree.structure(variables) == jax.tree.structure(same)
    np.testing.assert_array_equal(y, expected)
    assert "relpos_bias" in variables["params"]


def test_relative_embedding_is_switched_off_by_false(rng):
    x = on_device(rng.standard_normal((1, 3, 8)), jnp.float32)
    layer = TransformerLayer(hidden_size=8, mlp_hidden_size=8, num_attention_heads=2, relative_embedding=False)
    variables = jax.eval_shape(lambda: layer.init(jax.random.key(0), x, deterministic=True))
    assert "relpos_bias" not in flax.core.unfreeze(variables)["params"]


@pytest.mark.parametrize("method", ["consecutive", "alternate"])
def test_rotary_positions(rng, method):
    x = rng.standard_normal((2, 5, 3, 2, 6)).astype(np.float32)
    turn = jax.jit(partial(rope, windows=(1, 100), group_method=method))
    expected = np.stack([turn(x[:, :, i]) for i in range(3)], 2)
    turned = jax.jit(rotary_pos_emb, static_argnums=(1, 2, 3))
    np.testing.assert_array_equal(turned(x, (1, 100), False, method), expected)
    swapped = np.asarray(turned(x.swapaxes(0, 1), (1, 100), True, method))
    np.testing.assert_array_equal(swapped.swapaxes(0, 1), expected)
