"""te_jax.nnx: variables as attributes, and the results of the Linen modules from the same weights, bit for bit."""

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import on_device
from flax import linen as nn
from flax import nnx
from quick_init import quick_nnx

import te_jax as te
import te_jax.flax as te_flax
import te_jax.nnx as te_nnx
from te_jax.sharding import MeshResource, extend_logical_axis_rules, global_shard_guard

RECIPE = te.recipe.DelayedScaling(amax_history_len=3)
H = 32  # hidden size
X = on_device(np.random.default_rng(0).normal(size=(2, 16, H)), jnp.bfloat16)
LAYER = dict(hidden_size=H, mlp_hidden_size=48, num_attention_heads=2, hidden_dropout=0.0, attention_dropout=0.0)

BIASES = ("num_buckets", "max_distance", "num_attention_heads")


def unboxed(variables):
    return nn.meta.unbox(flax.core.unfreeze(variables))


def assert_same(tree, other):
    assert jax.tree.structure(tree) == jax.tree.structure(other)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), tree, other)


def paths(tree):
    return {"/".join(key): leaf.shape for key, leaf in flax.traverse_util.flatten_dict(tree).items()}


# name -> (NNX class, arguments besides the fields, fields, arguments of a call)
CASES = {
    "dense": (te_nnx.DenseGeneral, (H,), dict(features=(3, 16), use_bias=True), (X,)),
    "dense, two axes": (te_nnx.Linear, ((16, H),), dict(features=8, axis=(-2, -1)), (X,)),
    "dense, LoRA": (te_nnx.DenseGeneral, (H,), dict(features=16, enable_low_rank_adaptation=True), (X,)),
    "layernorm": (te_nnx.LayerNorm, (H,), dict(zero_centered_gamma=True), (X,)),
    "rmsnorm": (te_nnx.RMSNorm, (H,), dict(), (X,)),
    "norm, dense": (te_nnx.LayerNormDenseGeneral, (H,), dict(features=16, return_layernorm_output=True), (X,)),
    "mlp": (te_nnx.LayerNormMLP, (H,), dict(intermediate_dim=48, activations=("silu", "linear")), (X,)),
    "attention": (
        te_nnx.DotProductAttention,
        (),
        dict(head_dim=16, num_attention_heads=2, softmax_type="learnable", qkv_layout="bs3hd"),
        (jnp.broadcast_to(X.reshape(2, 16, 1, 2, 16), (2, 16, 3, 2, 16)),),
    ),
    "self-attention": (te_nnx.MultiHeadAttention, (H,), dict(head_dim=16, num_attention_heads=2), (X,)),
    "biases": (te_nnx.RelativePositionBiases, (), dict(zip(BIASES, (9, 20, 2))), (4, 5, False)),
    "layer": (
        te_nnx.TransformerLayer,
        (),
        dict(**LAYER, num_gqa_groups=1, use_bias=True, enable_relative_embedding=True, output_layernorm=True),
        (X,),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_variables_and_outputs_are_linens(case):
    """Under autocast, so that there is FP8 state."""
    cls, sizes, fields, args = CASES[case]
    linen = cls.linen_type(**{**cls.defaults, **fields})
    with te.autocast(True, RECIPE):
        module = quick_nnx(lambda: cls(*sizes, **fields, rngs=nnx.Rngs(7)))
        want = unboxed(jax.eval_shape(lambda key: linen.init(key, *args), jax.random.key(0)))
        variables = te_nnx.to_linen(module)
        assert {c: paths(variables[c]) for c in variables} == {c: paths(want[c]) for c in want}
        assert_same(nnx.jit(lambda module: module(*args))(module), jax.jit(lambda v: linen.apply(v, *args))(variables))
    for collection, kind in (("params", nnx.Param), ("fp8_metas", te_nnx.Fp8State)):
        held = [path for path, _ in nnx.to_flat_state(nnx.state(module, kind))]
        assert {"/".join(path) for path in held} == set(paths(variables.get(collection, {})))
    assert not issubclass(te_nnx.Fp8State, nnx.Param)


def test_initial_values_are_linens():
    """From the key that the constructor takes, and of another key by the converter."""
    cls, sizes, fields, args = CASES["mlp"]
    module = cls(*sizes, **fields, rngs=nnx.Rngs(7))
    init = jax.jit(lambda key: cls.linen_type(**fields).init(key, *args))  # its boxes, and frozen, are taken as well
    # Compiled or not, an initialiser's products differ in the last bit, and its uniform numbers by one of 1.
    same = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=2.0**-23 * np.abs(b).max(initial=0))
    jax.tree.map(same, te_nnx.to_linen(module), unboxed(init(nnx.Rngs(7).params())))
    others = init(jax.random.key(8))
    assert te_nnx.from_linen(flax.core.freeze(others), module) is module
    assert_same(te_nnx.to_linen(module), unboxed(others))


def test_cross_attention_and_decoder():
    """Widths of `encoded` that are not the layer's."""
    encoded = jnp.ones((2, 8, 24), jnp.bfloat16)
    fields = dict(head_dim=16, num_attention_heads=2, attn_mask_type="no_mask")
    attention = quick_nnx(lambda: te_nnx.MultiHeadAttention(H, **fields, kv_features=24, rngs=nnx.Rngs(0)))
    assert attention.kv.kernel.shape == (24, 2, 32)
    variables = te_nnx.to_linen(attention)
    assert_same(attention(X, encoded), te_flax.MultiHeadAttention(**fields).apply(variables, X, encoded))

    layer = quick_nnx(
        lambda: te_nnx.TransformerLayer(**LAYER, layer_type="decoder", encoded_features=24, rngs=nnx.Rngs(0))
    )
    want = jax.jit(te_flax.TransformerLayer(**LAYER, layer_type="decoder").apply)(te_nnx.to_linen(layer), X, encoded)
    assert_same(nnx.jit(lambda layer, *args: layer(*args))(layer, X, encoded), want)
    same = quick_nnx(
        lambda: te_nnx.TransformerLayer(**LAYER, layer_type=te_flax.TransformerLayerType.DECODER, rngs=nnx.Rngs(0))
    )
    assert same.encoder_decoder_attention.kv.kernel.shape == (H, 2, H)


def test_attributes():
    with te.autocast(True, RECIPE):
        layer = quick_nnx(lambda: te_nnx.TransformerLayer(**LAYER, low_rank_adaptation_scope="mlp", rngs=nnx.Rngs(0)))
    attention = layer.attention
    assert type(attention) is te_nnx.MultiHeadAttention and type(layer.mlp) is te_nnx.LayerNormMLP
    assert type(attention.qkv) is te_nnx.LayerNormDenseGeneral and type(attention.out) is te_nnx.DenseGeneral
    assert type(layer.attention.qkv.kernel) is nnx.Param and type(layer.mlp.wi_lora_a_kernel) is nnx.LoRAParam
    assert type(layer.attention.qkv.x_scale) is te_nnx.Fp8State
    assert layer.hidden_size == H and layer.attention.num_attention_heads == 2  # fields
    layer.mlp.wo_kernel[...] = jnp.zeros_like(layer.mlp.wo_kernel)
    layer.mlp.wo_lora_b_kernel[...] = jnp.zeros_like(layer.mlp.wo_lora_b_kernel)
    without_mlp = layer.attention(X, deterministic=True, residual=True)[0]  # a submodule can be called, too
    np.testing.assert_array_equal(np.asarray(layer(X), np.float32), np.asarray(without_mlp, np.float32))
    with pytest.raises(AttributeError, match="TransformerLayer: hidden_size is a field, fixed when the module is made"):
        layer.hidden_size = 64
    with pytest.raises(AttributeError, match="no attribute 'hidden'"):
        layer.hidden  # noqa: B018
    assert str(te_nnx.TransformerLayer.__signature__).startswith("(hidden_size: int = 512")
    assert "in_features" in te_nnx.Linear.__signature__.parameters and "Fp8State" in repr(layer)


def test_state_of_fp8_attention():
    dpa = te.recipe.DelayedScaling(amax_history_len=3, fp8_dpa=True)
    with te.autocast(True, dpa):
        layer = quick_nnx(lambda: te_nnx.MultiHeadAttention(H, 16, 2, rngs=nnx.Rngs(0)))
        want = jax.eval_shape(te_flax.MultiHeadAttention(16, 2).init, jax.random.key(0), X)
    assert paths(te_nnx.to_linen(layer)["fp8_metas"]) == paths(want["fp8_metas"])
    assert type(layer.DotProductAttention_0) is te_nnx.DotProductAttention
    with te.autocast(True, RECIPE):
        layer(X)  # it has more than this recipe needs
        other = quick_nnx(lambda: te_nnx.MultiHeadAttention(H, 16, 2, rngs=nnx.Rngs(0)))
    with te.autocast(True, dpa), pytest.raises(ValueError, match="DotProductAttention_0`: .*no FP8 state q_scale"):
        other(X)


def test_layers_of_equal_fields_are_one_to_jit():
    traced = []

    @nnx.jit
    def run(layer, x):
        traced.append(1)
        return layer(x)

    for seed in range(3):
        run(te_nnx.MultiHeadAttention(H, 16, 2, rngs=nnx.Rngs(seed)), X)
    assert len(traced) == 1


def test_split_merge_clone():
    with te.autocast(True, RECIPE):
        layer = quick_nnx(lambda: te_nnx.LayerNormMLP(H, 48, rngs=nnx.Rngs(0)))
        graphdef, params, fp8 = nnx.split(layer, nnx.Param, te_nnx.Fp8State)
        assert len(jax.tree.leaves(fp8)) == 2 * 3 * 2
        want = layer(X)[0]
        for other in (nnx.merge(graphdef, params, fp8), nnx.clone(layer)):
            assert_same(other(X)[0], want)


def test_replaced_submodule_is_called():
    """In the old one's place, with its arguments; also one of te_jax.nnx with other fields."""

    class Double(nnx.Module):
        def __init__(self, rngs):
            self.inner = te_nnx.TransformerLayer(**LAYER, rngs=rngs)  # has an `attention` and a `mlp` of its own

        def __call__(self, x, deterministic, residual):
            assert residual is True and deterministic is True
            return x + self.inner(x, deterministic=True), None

    layer = quick_nnx(lambda: te_nnx.TransformerLayer(**LAYER, rngs=nnx.Rngs(0)))
    layer.mlp = Double(nnx.Rngs(1))
    after_attention = layer.attention(X, deterministic=True, residual=True)[0]
    assert_same(layer(X, deterministic=True), after_attention + layer.mlp.inner(after_attention, deterministic=True))
    graphdef, state = nnx.split(layer)  # and it stays so
    assert_same(nnx.merge(graphdef, state)(X, deterministic=True), layer(X, deterministic=True))

    relu = quick_nnx(lambda: te_nnx.TransformerLayer(**LAYER, mlp_activations=("relu",), rngs=nnx.Rngs(0)))
    want = relu(X)
    layer.mlp, layer.attention = relu.mlp, relu.attention
    assert_same(layer(X), want)


def test_dropout_keys():
    fields = {**LAYER, "hidden_dropout": 0.5}
    layer = te_nnx.TransformerLayer(**fields, rngs=nnx.Rngs(0, dropout=1))
    first, second = layer(X), layer(X)
    assert jnp.any(first != second), "each call takes a key"
    key = jax.random.key(3)
    want = te_flax.TransformerLayer(**fields).apply(te_nnx.to_linen(layer), X, rngs={"dropout": key})
    assert_same(layer(X, rngs=key), want)
    assert_same(layer(X, rngs=nnx.Rngs(dropout=5)), layer(X, rngs=nnx.Rngs(5)))
    silent = layer(X, deterministic=True)
    assert_same(nnx.view(layer, deterministic=True)(X), silent)
    layer.eval()
    assert_same(layer(X), silent)
    layer.train()
    assert jnp.any(layer(X) != silent)
    with pytest.raises(ValueError, match=r"MultiHeadAttention: dropout needs a key; pass rngs=nnx.Rngs\(dropout="):
        te_nnx.TransformerLayer(**{**fields, "attention_dropout": 0.5}, rngs=nnx.Rngs(0)).attention(X)


def test_decoding():
    """A prompt, then token by token: the cache is the modules' state, under nnx.jit too."""
    fields = dict(**LAYER, enable_rotary_pos_emb=True)
    layer = quick_nnx(lambda: te_nnx.TransformerLayer(**fields, rngs=nnx.Rngs(0)))
    step = nnx.jit(lambda layer, x: layer(x, decode=True))
    prompt, token = X[:, :6], X[:, 6:7]
    got = [layer(prompt, decode=True, max_decode_length=8), step(layer, token), step(layer, token)]
    linen, variables = te_flax.TransformerLayer(**fields), te_nnx.to_linen(layer)
    variables.pop("cache")
    want, cache = linen.apply(variables, prompt, decode=True, max_decode_length=8, mutable=["cache"])
    assert_same(got[0], want)
    apply = jax.jit(lambda cache, x: linen.apply({**variables, **cache}, x, decode=True, mutable=["cache"]))
    for y in got[1:]:
        want, cache = apply(cache, token)
        assert_same(y, want)
    assert_same(te_nnx.to_linen(layer)["cache"], cache["cache"])
    assert type(layer.attention.cache_index) is nnx.Cache and int(layer.attention.cache_index[...]) == 8
    te_nnx.from_linen(cache, layer)


def test_converter_refuses_what_does_not_fit():
    layer = quick_nnx(lambda: te_nnx.DenseGeneral(H, 8, rngs=nnx.Rngs(0)))
    params = te_nnx.to_linen(layer)["params"]
    with pytest.raises(ValueError, match="variables has params/extra, the module has not"):
        te_nnx.from_linen({"params": {**params, "extra": params["bias"]}}, layer)
    with pytest.raises(ValueError, match="the module has params/bias, variables has not"):
        te_nnx.from_linen({"params": {"kernel": params["kernel"]}}, layer)
    with pytest.raises(ValueError, match=r"params/bias is float32\[9\], but float32\[8\] in the module"):
        te_nnx.from_linen({"params": {**params, "bias": jnp.zeros(9)}}, layer)
    with pytest.raises(ValueError, match="bias is bfloat16"):
        te_nnx.from_linen({"params": {**params, "bias": jnp.zeros(8, jnp.bfloat16)}}, layer)
    assert_same(te_nnx.to_linen(te_nnx.from_linen({}, layer)), {"params": params})


def test_constructor_refuses():
    with pytest.raises(TypeError, match="missing a required argument: 'in_features'"):
        te_nnx.LayerNormMLP(rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match=r"LayerNormMLP: rngs is 0; pass nnx.Rngs\(seed\)"):
        te_nnx.LayerNormMLP(H, rngs=0)
    with pytest.raises(TypeError, match="got an unexpected keyword argument 'width'"):
        te_nnx.LayerNormMLP(H, width=3, rngs=nnx.Rngs(0))
    biases = te_nnx.RelativePositionBiases(8, 20, 2, rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match="relative_embedding is an nnx.Module, RelativePositionBiases"):
        te_nnx.TransformerLayer(**LAYER, relative_embedding=biases, rngs=nnx.Rngs(0))


def test_parameters_lie_by_logical_axis_rules(on_host):
    mesh = jax.make_mesh((2, 2), ("fsdp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    resource = MeshResource(fsdp_resource="fsdp", tp_resource="tp")
    with jax.set_mesh(mesh), global_shard_guard(resource), nn.logical_axis_rules(extend_logical_axis_rules(())):
        layer = te_nnx.TransformerLayer(**LAYER, rngs=nnx.Rngs(0))
        kernel = layer.attention.qkv.kernel
        assert kernel.out_sharding == ("fsdp", None, "tp")
        assert kernel[...].sharding.shard_shape(kernel.shape) == (16, 3, 16)
        assert layer.attention.qkv.scale[...].sharding.is_fully_replicated

        @nnx.split_rngs(splits=3)
        @nnx.vmap(transform_metadata={nnx.PARTITION_NAME: None})
        def stacked(rngs):
            return te_nnx.DenseGeneral(H, 16, kernel_axes=("nvte_w_fsdp", "nvte_w_tp"), rngs=rngs)

        kernel = stacked(nnx.Rngs(0)).kernel
        assert kernel.out_sharding == (None, "fsdp", "tp") and kernel.shape == (3, H, 16)
    bare = te_nnx.TransformerLayer(**LAYER, rngs=nnx.Rngs(0))
    assert not bare.attention.qkv.kernel.has_metadata("out_sharding")
    assert_same(te_nnx.to_linen(bare), te_nnx.to_linen(layer))
