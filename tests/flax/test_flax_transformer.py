"""TransformerLayer: encoder and decoder numbers, trees, gradients, FP8, sharding, errors."""

import inspect

import flax
import flax_reference as ref
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import on_device
from flax import linen as nn
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from quick_init import quick_init

import te_jax as te
import te_jax.flax as te_flax
from te_jax import recipe
from te_jax.flax import TransformerLayerType
from te_jax.ops.attention import SequenceDescriptor

KEY = jax.random.key(0)
H, F, N, B, S, T = 16, 24, 4, 2, 6, 5
QUIET = dict(hidden_dropout=0.0, attention_dropout=0.0)


def data(*shape, dtype=jnp.float32, seed=1):
    return on_device(np.random.default_rng(seed).normal(size=shape), dtype)


def layer(**fields):
    return te_flax.TransformerLayer(
        **{"hidden_size": H, "mlp_hidden_size": F, "num_attention_heads": N, **QUIET, **fields}
    )


def inputs(kind):
    return (data(B, S, H),) if kind == "encoder" else (data(B, S, H), data(B, T, H, seed=2))


def reference(x, p, encoded=None, g=None, bias=0.0, hidden=None, post_norm=False, output_norm=False, swiglu=False):
    """The layer in float64, causal self-attention; `hidden` masks cross-attention."""
    name = "attention" if encoded is None else "self_attention"
    residual = lambda x, normed: normed if post_norm else x
    y, normed = ref.mha(x, p[name], N, g, masked=ref.causal(S, S), bias=bias)
    x = y + residual(x, normed)
    if encoded is not None:
        y, normed = ref.mha(x, p["encoder_decoder_attention"], N, g, kv=encoded, masked=hidden)
        x = y + residual(x, normed)
    y, normed = ref.mlp(x, p["mlp"], swiglu=swiglu)
    x = y + residual(x, normed)
    return ref.norm(x, p["output_layernorm"]) if output_norm else x


@pytest.mark.parametrize(
    ("kind", "fields", "equation"),
    [
        ("encoder", {}, {}),
        ("encoder", dict(num_gqa_groups=2, mlp_activations=("silu", "linear")), dict(g=2, swiglu=True)),
        ("encoder", dict(apply_residual_connection_post_layernorm=True), dict(post_norm=True)),
        ("encoder", dict(output_layernorm=True), dict(output_norm=True)),
        ("decoder", dict(use_bias=True), {}),
        (
            "decoder",
            dict(fuse_qkv_params=False, apply_residual_connection_post_layernorm=True),
            dict(post_norm=True),
        ),
    ],
)
def test_layer(kind, fields, equation):
    args = inputs(kind)
    module = layer(layer_type=kind, **fields)
    params = ref.filled(jax.eval_shape(module.init, KEY, *args)["params"])
    got = jax.jit(module.apply)({"params": params}, *args)
    want = reference(*[ref.f64(a) for a in args[:1]], ref.f64(params), *[ref.f64(a) for a in args[1:]], **equation)
    # Values reach 30: each of the three residual sums rounds at 30 * 2**-24, the products before them a few
    # times that.
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


def test_tree():
    """The tree of TransformerEngine's layer: names, shapes, logical axes."""
    w = "nvte_w_"
    fsdp, tp, joined, none = w + "fsdp", w + "tp", w + "joined", w + "no_shard"
    norm = {"scale": ((H,), (none,)), "ln_bias": ((H,), (none,))}
    out = {"kernel": ((H, H), (tp, fsdp)), "bias": ((H,), (none,))}
    fused = {"kernel": ((H, 3, H), (fsdp, joined, tp)), "bias": ((3, H), (joined, tp))}
    query = {"kernel": ((H, H), (fsdp, tp)), "bias": ((H,), (tp,))}
    kv = {"kernel": ((H, 2, H), (fsdp, joined, tp)), "bias": ((2, H), (joined, tp))}
    mlp = norm | {
        "wi_kernel": ((H, 2, F), (fsdp, joined, tp)),
        "wo_kernel": ((F, H), (tp, fsdp)),
        "wi_bias": ((2, F), (joined, tp)),
        "wo_bias": ((H,), (none,)),
    }
    relpos = {"rel_embedding": ((N, 32), ("heads", "relpos_buckets"))}
    fields = dict(use_bias=True, mlp_activations=("silu", "linear"), enable_relative_embedding=True)
    self_attention = {"qkv": norm | fused, "out": out}
    encoder = {"attention": self_attention, "mlp": mlp, "relpos_bias": relpos}
    decoder = {
        "self_attention": {"qkv": fused, "out": out},  # output_layernorm: no norm before self-attention
        "encoder_decoder_attention": {"query": norm | query, "kv": kv, "out": out},
        "mlp": mlp,
        "relpos_bias": relpos,
        "output_layernorm": norm,
    }
    for kind, want in (("encoder", encoder), (TransformerLayerType.DECODER, decoder)):
        module = layer(layer_type=kind, output_layernorm=want is decoder, **fields)
        kind = kind if isinstance(kind, str) else kind.value
        params = jax.eval_shape(module.init, KEY, *inputs(kind))["params"]
        flat = {path: (b.value.shape, b.names) for path, b in flax.traverse_util.flatten_dict(params).items()}
        assert flat == {path: leaf for path, leaf in flax.traverse_util.flatten_dict(want).items()}


def test_defaults_and_order():
    names = (
        "hidden_size mlp_hidden_size num_attention_heads num_gqa_groups layernorm_type layernorm_epsilon "
        "zero_centered_gamma hidden_dropout hidden_dropout_dims attention_dropout intermediate_dropout "
        "intermediate_dropout_dims dropout_rng_name mha_kernel_init mlp_kernel_init mlp_activations "
        "mlp_activation_params use_bias bias_init apply_residual_connection_post_layernorm output_layernorm "
        "float32_attention_logits layer_type self_attn_mask_type self_attn_bias_type "
        "enable_relative_embedding relative_embedding enable_rotary_pos_emb rotary_pos_emb_windows "
        "rotary_pos_emb_group_method low_rank_adaptation_scope low_rank_adaptation_dim "
        "low_rank_adaptation_alpha dtype drop_path fuse_qkv_params transpose_batch_sequence "
        "enable_sequence_parallel scale_attn_logits scaled_query_init window_size softmax_type score_mod "
        "score_mod_bprop"
    ).split()
    fields = te_flax.TransformerLayer.__dataclass_fields__
    assert list(fields)[: len(names)] == names
    want = dict(
        hidden_size=512,
        mlp_hidden_size=2048,
        num_attention_heads=8,
        hidden_dropout=0.1,
        attention_dropout=0.1,
    )
    want |= dict(self_attn_mask_type="causal", mlp_activations=("gelu",), layer_type=TransformerLayerType.ENCODER)
    want |= dict(enable_relative_embedding=False, scale_attn_logits=True, scaled_query_init=False, fuse_qkv_params=True)
    assert {name: fields[name].default for name in want} == want
    call = list(inspect.signature(te_flax.TransformerLayer.__call__).parameters)[1:]
    assert (
        call[:9]
        == (
            "inputs encoded attention_mask encoder_decoder_mask deterministic decode max_decode_length "
            "score_mod_tensors score_mod_bprop_tensors"
        ).split()
    )
    assert [kind.value for kind in TransformerLayerType] == ["encoder", "decoder"]


def test_transposed_and_cross_mask():
    x, encoded = inputs("decoder")
    module = layer(layer_type="decoder")
    variables = quick_init(module.init)(KEY, x, encoded)
    hidden = (np.arange(T) >= np.asarray([T, 3])[:, None])[:, None, None]
    want = reference(ref.f64(x), ref.f64(variables["params"]), ref.f64(encoded), hidden=hidden)
    mask = jnp.broadcast_to(hidden, (B, 1, S, T))
    got = jax.jit(module.apply)(variables, x, encoded, None, mask)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=2e-5)
    lengths = SequenceDescriptor.from_seqlens((jnp.asarray([S, S]), jnp.asarray([T, 3])))
    by_lengths = jax.jit(module.apply)(variables, x, encoded, None, lengths)
    np.testing.assert_allclose(by_lengths, got, rtol=1e-5, atol=1e-5)
    flipped = layer(layer_type="decoder", transpose_batch_sequence=True)
    swap = lambda a: np.swapaxes(a, 0, 1)
    got_flipped = jax.jit(flipped.apply)(variables, swap(x), swap(encoded), None, mask)
    np.testing.assert_allclose(swap(got_flipped), got, rtol=1e-5, atol=1e-5)


def test_relative_embedding():
    x = data(B, S, H)
    module = layer(enable_relative_embedding=True)
    variables = quick_init(module.init)(KEY, x)
    biases = te_flax.RelativePositionBiases(32, 128, N)
    bias = biases.apply({"params": variables["params"]["relpos_bias"]}, S, S, True)
    want = reference(ref.f64(x), ref.f64(variables["params"]), bias=ref.f64(bias))
    np.testing.assert_allclose(jax.jit(module.apply)(variables, x), want, rtol=1e-4, atol=2e-5)
    own = layer(relative_embedding=te_flax.RelativePositionBiases(8, 20, N))
    assert "relative_embedding" in jax.eval_shape(own.init, KEY, x)["params"]
    with pytest.raises(ValueError, match="hold `relpos_bias`, but enable_relative_embedding is False"):
        layer().apply(variables, x)
    with pytest.raises(ValueError, match="no_bias"):
        jax.eval_shape(layer(enable_relative_embedding=True, self_attn_bias_type="no_bias").init, KEY, x)


def test_rope_and_window_are_self_attentions_alone():
    args = inputs("decoder")
    plain = layer(layer_type="decoder")
    variables = quick_init(plain.init)(KEY, *args)
    for fields, cross in (
        (dict(enable_rotary_pos_emb=True, window_size=(1, 0)), False),
        (dict(cross_rotary_pos_emb=True, cross_window_size=(1, 0)), True),
    ):
        seen = []

        def spy(call, a, k, context, seen=seen):
            if isinstance(context.module, te_flax.MultiHeadAttention):
                seen.append((context.module.name, context.module.enable_rotary_pos_emb, context.module.window_size))
            return call(*a, **k)

        with nn.intercept_methods(spy):
            got = layer(layer_type="decoder", **fields).apply(variables, *args)
        assert dict((n, (r, w)) for n, r, w in seen) == {
            "self_attention": (False, None) if cross else (True, (1, 0)),
            "encoder_decoder_attention": (True, (1, 0)) if cross else (False, None),
        }
        assert not np.allclose(got, plain.apply(variables, *args), atol=1e-3)


def test_dropout_and_drop_path():
    x = data(8, S, H)
    variables = quick_init(layer().init)(KEY, x)
    still = layer().apply(variables, x)
    for fields in (dict(hidden_dropout=0.5), dict(attention_dropout=0.5), dict(intermediate_dropout=0.5)):
        module = layer(dropout_rng_name="mine", **fields)
        np.testing.assert_allclose(module.apply(variables, x, deterministic=True), still, rtol=1e-6)
        assert not np.allclose(module.apply(variables, x, rngs={"mine": KEY}), still, atol=1e-3)
    shared = layer(hidden_dropout=0.5, hidden_dropout_dims=(0, 1)).apply(variables, x, rngs={"dropout": KEY})
    assert not np.allclose(shared, still, atol=1e-3)
    # A sample whose two sub-blocks are both dropped passes unchanged: of 400 samples about a quarter.
    many = jnp.tile(x, (50, 1, 1))
    dropped = layer(drop_path=0.5, dropout_rng_name="mine").apply(variables, many, rngs={"mine": KEY})
    unchanged = int(np.isclose(dropped, many, atol=1e-6).all((1, 2)).sum())
    assert 60 < unchanged < 140  # 100, sigma 8.7


@pytest.mark.parametrize("kind", ["encoder", "decoder"])
def test_gradients(kind):
    """Against a directional derivative of the float64 equations."""
    args = inputs(kind)
    module = layer(layer_type=kind)
    params = ref.unboxed(ref.filled(jax.eval_shape(module.init, KEY, *args)["params"]))
    weights = data(B, S, H, seed=8)

    def loss(params, *args):
        return (module.apply({"params": params}, *args) * weights).sum()

    grads = jax.jit(jax.grad(loss, argnums=tuple(range(len(args) + 1))))(params, *args)
    rng = np.random.default_rng(5)
    p64, a64 = ref.f64(params), [ref.f64(a) for a in args]

    def equation(direction, step):
        p, *a = jax.tree.map(lambda value, d: value + step * d, (p64, *a64), direction)
        return (reference(a[0], p, *a[1:]) * ref.f64(weights)).sum()

    for _ in range(4):
        direction = jax.tree.map(lambda value: rng.normal(size=value.shape), (p64, *a64))
        want = (equation(direction, 1e-6) - equation(direction, -1e-6)) / 2e-6
        got = sum(jax.tree.leaves(jax.tree.map(lambda g, d: (ref.f64(g) * d).sum(), grads, direction)))
        scale = np.sqrt(sum(jax.tree.leaves(jax.tree.map(lambda g: (ref.f64(g) ** 2).sum(), grads))))
        assert abs(got - want) < 1e-4 * scale


def test_bf16_keeps_the_type():
    x = data(B, S, H, dtype=jnp.bfloat16)
    module = layer(dtype=jnp.bfloat16)
    variables = quick_init(module.init)(KEY, x)
    assert {leaf.dtype for leaf in jax.tree.leaves(variables)} == {jnp.dtype(jnp.bfloat16)}
    got = module.apply(variables, x)
    assert got.dtype == jnp.bfloat16
    assert ref.relative_error(got, reference(ref.f64(x), ref.f64(variables["params"]))) < 2e-2


# -- FP8 -----------------------------------------------------------------------------------------------------

RECIPE = recipe.DelayedScaling(amax_history_len=4)


@pytest.mark.parametrize("kind", ["encoder", "decoder"])
def test_fp8(kind):
    args = inputs(kind)
    module = layer(layer_type=kind)
    with te.autocast(True, RECIPE):
        variables = quick_init(module.init)(KEY, *args)
        others, params = flax.core.pop(variables, "params")
        gemms = {
            "encoder": ("attention/qkv attention/out mlp/0 mlp/1"),
            "decoder": (
                "self_attention/qkv self_attention/out encoder_decoder_attention/query "
                "encoder_decoder_attention/kv "
                "encoder_decoder_attention/out mlp/0 mlp/1"
            ),
        }[kind].split()
        want = set()
        for path in gemms:
            scope, _, number = path.rpartition("/") if path.startswith("mlp") else (path, "", "")
            postfix = f"_{number}" if number else ""
            want |= {
                f"{scope}/{t}{postfix}_{leaf}" for t in ("x", "kernel", "grad") for leaf in ("scale", "amax_history")
            }
        metas = flax.traverse_util.flatten_dict(others["fp8_metas"], sep="/")
        assert set(metas) == want

        def loss(params, others, *args):
            return (module.apply({"params": params, **others}, *args) ** 2).mean()

        run = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
        for _ in range(2):
            value, (grads, others) = run(params, others, *args)
            others = te.update_fp8_metas(others)
    scales = {
        k: float(v[0]) for k, v in flax.traverse_util.flatten_dict(others["fp8_metas"], sep="/").items() if "scale" in k
    }
    assert all(np.isfinite(v) and v != 1 for v in scales.values()), scales
    plain, plain_grads = jax.jit(jax.value_and_grad(loss))(params, {}, *args)
    # e4m3 has 3 bits: a relative error of 2**-4 / sqrt(3) per value = 3.6 %, e5m2 twice that; gradients pass
    # a few.
    assert abs(value / plain - 1) < 0.05
    for got, exact in zip(jax.tree.leaves(grads), jax.tree.leaves(plain_grads), strict=True):
        assert ref.relative_error(got, exact) < 0.25


def test_fp8_layers_in_a_rematted_scan():
    x = data(B, S, H)

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            body = nn.remat(lambda module, x, _: (module(x), None), prevent_cse=False)
            scan = nn.scan(
                body,
                variable_axes={"params": 0, "fp8_metas": 0},
                length=2,
                split_rngs={"params": True, "dropout": True},
                metadata_params={nn.PARTITION_NAME: "layers"},
            )
            return scan(layer(hidden_dropout=0.1, name="layer"), x, None)[0]

    with te.autocast(True, RECIPE):
        variables = quick_init(Model().init)({"params": KEY, "dropout": KEY}, x)
        others, params = flax.core.pop(variables, "params")
        assert others["fp8_metas"]["layer"]["mlp"]["x_0_scale"].shape == (2, 1)
        assert params["layer"]["mlp"]["wi_kernel"].names == (
            "layers",
            "nvte_w_fsdp",
            "nvte_w_joined",
            "nvte_w_tp",
        )

        def loss(params, others):
            return (Model().apply({"params": params, **others}, x, rngs={"dropout": KEY}) ** 2).mean()

        grads, new = jax.jit(jax.grad(loss, argnums=(0, 1)))(params, others)
    for name, leaf in flax.traverse_util.flatten_dict(new["fp8_metas"], sep="/").items():
        if name.endswith("amax_history"):
            assert (np.asarray(leaf[:, -1]) > 0).all() and not np.asarray(leaf[:, :-1]).any(), name
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(grads))


# -- sharding ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fp8", [False, True])
def test_logical_axes_on_a_mesh(fp8):
    """dp 2 x fsdp 2 x tp 2 by logical rules: the same numbers, and parameters where the rules put them."""
    x = data(4, S, H)
    module = layer(use_bias=True, enable_sequence_parallel=True)

    def loss(params, others, x):
        return (module.apply({"params": params, **others}, x) ** 2).mean()

    with te.autocast(fp8, RECIPE):
        variables = quick_init(module.init)(KEY, x)
        others, params = flax.core.pop(variables, "params")
        want = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(params, others, x)
        mesh = jax.make_mesh((2, 2, 2), ("dp", "fsdp", "tp"), axis_types=(AxisType.Auto,) * 3)
        resource = te.MeshResource(dp_resource="dp", fsdp_resource="fsdp", tpsp_resource="tp")
        with jax.set_mesh(mesh), te.autocast(fp8, RECIPE, resource):
            rules = te_flax.extend_logical_axis_rules(())
            specs = nn.logical_to_mesh_sharding(nn.get_partition_spec(params), mesh, rules)
            assert specs["attention"]["qkv"]["kernel"].spec == PartitionSpec("fsdp", None, "tp")
            placed = jax.tree.map(jax.device_put, ref.unboxed(params), specs)
            # Boxes put the constraints of the parameters into the trace as well.
            placed = jax.tree.map(
                lambda box, leaf: box.replace_boxed(leaf),
                params,
                placed,
                is_leaf=lambda leaf: isinstance(leaf, nn.meta.AxisMetadata),
            )
            x = jax.device_put(x, NamedSharding(mesh, PartitionSpec("fsdp")))
            with nn.logical_axis_rules(rules):
                got = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(placed, others, x)
    # FP8: sums of another order may cross an edge between two FP8 numbers here and there.
    bound = 2e-2 if fp8 else 1e-5
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert ref.relative_error(a, b) < bound


@pytest.mark.parametrize("kind", ["explicit", "shard_map"])
def test_data_parallel_without_names(kind):
    """Only the inputs' shardings: Explicit axes, and manual ones with their types checked."""
    x = data(4, S, H)
    module = layer(enable_rotary_pos_emb=True)

    def loss(params, others, x):
        return (module.apply({"params": params, **others}, x) ** 2).mean()

    with te.autocast(True, RECIPE):
        others, params = flax.core.pop(quick_init(module.init)(KEY, x), "params")
        params = ref.unboxed(params)
        run = jax.value_and_grad(loss, argnums=(0, 1))
        want = jax.jit(run)(params, others, x)
        kinds = (AxisType.Explicit if kind == "explicit" else AxisType.Auto,)
        mesh = jax.make_mesh((4,), ("data",), axis_types=kinds)
        if kind == "shard_map":
            mean = lambda *args: jax.lax.pmean(loss(*args), "data")
            local = jax.value_and_grad(mean, argnums=(0, 1))
            sharded = jax.shard_map(
                local,
                mesh=mesh,
                in_specs=(PartitionSpec(), PartitionSpec(), PartitionSpec("data")),
                out_specs=PartitionSpec(),
                check_vma=True,
            )
            got = jax.jit(sharded)(params, others, x)
        else:
            with jax.set_mesh(mesh):
                x = jax.device_put(x, NamedSharding(mesh, PartitionSpec("data")))
                got = jax.jit(run)(params, others, x)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert ref.relative_error(a, b) < 1e-2  # FP8 edges, as above


# -- errors --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "args", "kwargs", "error", "text"),
    [
        (
            dict(layer_type="both"),
            (data(B, S, H),),
            {},
            ValueError,
            "'both'; pass one of .'encoder', 'decoder'.",
        ),
        (dict(layer_type="decoder"), (data(B, S, H),), {}, ValueError, "needs `encoded`"),
        ({}, inputs("decoder"), {}, ValueError, 'encoded is given, but layer_type is "encoder"'),
        ({}, (data(B, S, H),), dict(encoder_decoder_mask=1), ValueError, "encoder_decoder_mask is given"),
        ({}, (data(B, S, H + 1),), {}, ValueError, "hidden_size is 16"),
        ({}, (data(S, H),), {}, ValueError, r"\[batch, sequence, 16\]"),
        ({}, (jnp.ones((B, S, H), jnp.int32),), {}, TypeError, "inputs is int32"),
        ({}, (data(B, S, H),), dict(score_mod_tensors={}), ValueError, "score_mod_tensors"),
        (
            dict(num_attention_heads=5),
            (data(B, S, H),),
            {},
            ValueError,
            "hidden_size=16 .* num_attention_heads=5",
        ),
        (dict(num_gqa_groups=3), (data(B, S, H),), {}, ValueError, "attention.*num_gqa_groups=3"),
        (dict(self_attn_mask_type="cube"), (data(B, S, H),), {}, ValueError, "'cube'"),
        (dict(mlp_activations=("gelo",)), (data(B, S, H),), {}, ValueError, "'gelo'"),
        (dict(low_rank_adaptation_scope="some"), (data(B, S, H),), {}, ValueError, "'some'"),
    ],
)
def test_errors(fields, args, kwargs, error, text):
    with pytest.raises(error, match=text):
        jax.eval_shape(lambda: layer(**fields).init(KEY, *args, **kwargs))


def test_kv_channels():
    x = data(B, S, H)
    params = jax.eval_shape(layer(num_attention_heads=5, kv_channels=8).init, KEY, x)["params"]
    assert ref.shapes(params)["attention"]["qkv"]["kernel"] == (H, 3, 40)


def test_without_jit(rng):
    """`jax.disable_jit` evaluates every op by itself: forward and backward, with FP8 state."""
    module = te_flax.TransformerLayer(
        hidden_size=16, mlp_hidden_size=32, num_attention_heads=2, hidden_dropout=0.0, attention_dropout=0.0
    )
    x = on_device(rng.standard_normal((2, 4, 16)), jnp.float32)
    with te.autocast(True, recipe.DelayedScaling(amax_history_len=4)):
        variables = nn.meta.unbox(quick_init(module.init)(jax.random.key(0), x))
        step = jax.value_and_grad(lambda variables: jnp.sum(jnp.sin(module.apply(variables, x))))
        want = jax.jit(step)(variables)
        with jax.disable_jit():
            got = step(variables)
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-5), got, want)
