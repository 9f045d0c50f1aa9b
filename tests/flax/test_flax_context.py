"""The modules' context_parallel_* fields: numbers of one device, RoPE's positions, the MeshResource, errors."""

import warnings

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
from sharded import KINDS, LAYER_BOUND, check_equal, check_state, gradients, run_on

import te_jax as te
import te_jax.flax as te_flax
from te_jax import recipe
from te_jax.ops.attention import SequenceDescriptor, dot_product_attention
from te_jax.ops.attention_context import context_parallel_attention
from te_jax.sharding import (
    MeshResource,
    collectives,
    global_shard_guard,
    inverse_reorder_causal_load_balancing,
    reorder_causal_load_balancing,
)

pytestmark = pytest.mark.usefixtures("on_host")
KEY = jax.random.key(0)
B, S, H = 2, 16, 32
RESOURCE = MeshResource(dp_resource="dp", tp_resource="tp", cp_resource="cp")


def data(*shape, seed=1, dtype=jnp.float32):
    return on_device(np.random.default_rng(seed).normal(size=shape), dtype)


def layer(**fields):
    return te_flax.TransformerLayer(
        hidden_size=H, mlp_hidden_size=48, num_attention_heads=4, num_gqa_groups=2, enable_rotary_pos_emb=True,
        hidden_dropout=0.0, attention_dropout=0.0, **fields,
    )  # fmt: skip


def mha(**fields):
    return te_flax.MultiHeadAttention(head_dim=8, num_attention_heads=4, enable_rotary_pos_emb=True, **fields)


def loss_and_gradients(module, mask=None):
    def run(params, x, weights):
        def loss(params, x):
            y = module.apply({"params": params}, x, None, mask)  # alike in both modules
            y = y[0] if isinstance(y, tuple) else y
            return jnp.sum(y * weights), y

        (_, y), grads = jax.value_and_grad(loss, (0, 1), has_aux=True)(params, x)
        return y, *grads

    return run


def close(got, want):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert ref.relative_error(a, b) < 1e-5


LENGTHS = SequenceDescriptor.from_seqlens(jnp.asarray([11, 16], jnp.int32))
SEGMENTS = SequenceDescriptor.from_segment_ids_and_pos(
    jnp.asarray([[1] * 5 + [2] * 9 + [0] * 2, [1] * 3 + [2] * 13], jnp.int32)
)


@pytest.mark.parametrize(
    ("fields", "mask"),
    [
        (dict(context_parallel_strategy="ring", context_parallel_causal_load_balanced=True), None),
        (dict(window_size=(5, 0)), None),
        (dict(context_parallel_causal_load_balanced=True, self_attn_mask_type="padding_causal"), LENGTHS),
        (
            dict(
                context_parallel_strategy="Ring",
                context_parallel_causal_load_balanced=True,
                self_attn_mask_type="padding_causal",
                transpose_batch_sequence=True,
            ),
            SEGMENTS,
        ),
    ],
    ids=["balanced_ring", "window", "balanced_lengths", "balanced_ring_segments"],
)
def test_layer_by_mesh_resource(fields, mask):
    """dp 2 x tp 2 x cp 2 by logical rules; RoPE by the true positions."""
    balanced = fields.get("context_parallel_causal_load_balanced", False)
    flip = (lambda x: jnp.swapaxes(x, 0, 1)) if fields.get("transpose_batch_sequence") else lambda x: x
    plain = {name: value for name, value in fields.items() if not name.startswith("context_parallel")}
    x, weights = data(B, S, H), data(B, S, H, seed=2)
    boxed = quick_init(layer(**plain).init)(KEY, flip(x))["params"]
    params = ref.unboxed(boxed)
    y, dparams, dx = jax.jit(loss_and_gradients(layer(**plain), mask))(params, flip(x), flip(weights))
    mesh = jax.make_mesh((2, 2, 2), ("dp", "tp", "cp"), axis_types=(AxisType.Auto,) * 3)
    order = (lambda x: reorder_causal_load_balancing(x, 2)) if balanced else lambda x: x
    back = (lambda x: inverse_reorder_causal_load_balancing(np.asarray(x), 2)) if balanced else np.asarray
    with jax.set_mesh(mesh), global_shard_guard(RESOURCE):
        rules = te_flax.extend_logical_axis_rules(())
        with nn.logical_axis_rules(rules):
            specs = nn.logical_to_mesh_sharding(nn.get_partition_spec(boxed), mesh, rules)
            placed = jax.tree.map(jax.device_put, params, specs)
            spec = PartitionSpec("dp", "cp")
            spec = PartitionSpec(*reversed(spec)) if "transpose_batch_sequence" in fields else spec
            arrays = [jax.device_put(flip(order(a)), NamedSharding(mesh, spec)) for a in (x, weights)]
            run = jax.jit(loss_and_gradients(layer(**fields), mask)).lower(placed, *arrays).compile()
            got = run(placed, *arrays)
            text = run.as_text() if "Ring" in str(fields) else ""
    close((back(flip(got[0])), got[1], back(flip(got[2]))), (flip(y), dparams, flip(dx)))
    # no activation of the whole sequence: [b/2, S, H] in either order
    assert f"f32[1,{S},{H}]" not in text and f"f32[{S},1,{H}]" not in text


@pytest.mark.parametrize("kind", KINDS)
def test_layer_in_fp8(kind):
    """dp 2 x tp 2 x cp 2, ring, balanced, f32 data: LAYER_BOUND of it. A device's tokens cross tp as without cp, in one
    all-reduce a block and direction, keys and values go around, and nothing is gathered."""
    fields = dict(context_parallel_strategy="ring", context_parallel_causal_load_balanced=True)
    order, x, weights = (lambda x: reorder_causal_load_balancing(x, 2)), data(B, S, H), data(B, S, H, seed=2)
    mesh = jax.make_mesh((2, 2, 2), ("dp", "tp", "cp"), axis_types=(KINDS[kind],) * 3)
    with te.autocast(True, recipe.DelayedScaling(amax_history_len=4)):
        others, params = flax.core.pop(quick_init(layer().init)(KEY, x), "params")
        want = jax.jit(gradients(layer()))(nn.meta.unbox(params), others, x, weights)
        spec, arrays = PartitionSpec("dp", "cp"), (order(x), order(weights))
        got, found = run_on(mesh, RESOURCE, layer(**fields), params, others, arrays, spec)
    dx = inverse_reorder_causal_load_balancing(np.asarray(got[1][2]), 2)
    check_equal((got[0], got[1][0], dx), (want[0], want[1][0], want[1][2]), LAYER_BOUND[jnp.float32])
    check_state(got[1][1], want[1][1])
    table = collectives.table(found, 512)
    assert table.pop(("all-reduce", "f32", "tp")) == (4, 4 * x.nbytes // 4), table
    assert sum(c.kind == "collective-permute" for c in found) == 2 + 2 + 2 * 2, found  # k, v; again; their gradients
    assert set(table) == {("all-reduce", "f32", "dp+cp")}, table


def test_dp_and_fsdp_divide_the_batch_of_attention():
    """No device holds more than its rows, 3 of 12."""
    q = data(12, S, 4, 8)
    module = te_flax.DotProductAttention(head_dim=8, num_attention_heads=4)
    attend = lambda q: module.apply({}, q, q, q)
    mesh = jax.make_mesh((2, 2, 2), ("dp", "fsdp", "cp"), axis_types=(AxisType.Auto,) * 3)
    with jax.set_mesh(mesh), global_shard_guard(MeshResource("dp", fsdp_resource="fsdp", cp_resource="cp")):
        place = NamedSharding(mesh, PartitionSpec(("dp", "fsdp"), "cp"))
        run = jax.jit(attend, in_shardings=place, out_shardings=place).lower(q).compile()
        got = run(jax.device_put(q, place))
    close(got, attend(q))
    assert f"f32[3,{S},4,8]" in run.as_text() and "f32[12," not in run.as_text()


def test_cp_and_tpsp_divide_the_sequence_together():
    """Outside of the GEMMs and attention, where they do all the same for each token."""
    x = data(B, S, H)
    boxed = quick_init(layer(enable_sequence_parallel=True).init)(KEY, x)["params"]
    params = ref.unboxed(boxed)
    mesh = jax.make_mesh((2, 2, 2), ("dp", "tp", "cp"), axis_types=(AxisType.Auto,) * 3)
    with jax.set_mesh(mesh), global_shard_guard(MeshResource("dp", tpsp_resource="tp", cp_resource="cp")):
        rules = te_flax.extend_logical_axis_rules(())
        with nn.logical_axis_rules(rules):
            specs = nn.logical_to_mesh_sharding(nn.get_partition_spec(boxed), mesh, rules)
            placed = jax.tree.map(jax.device_put, params, specs)
            module = layer(enable_sequence_parallel=True)
            got = jax.jit(lambda params, x: module.apply({"params": params}, x))(placed, x)
    assert got.sharding.spec[:2] == ("dp", ("cp", "tp"))
    close(got, layer().apply({"params": params}, x))


@pytest.mark.parametrize("balanced", [False, True])
@pytest.mark.parametrize("mask", [None, LENGTHS], ids=["", "lengths"])
def test_attention_inside_shard_map(mask, balanced):
    """RoPE counts on from device to device."""
    kinds = dict(attn_mask_type="causal" if mask is None else "padding_causal")
    x, weights = data(B, S, H), data(B, S, H, seed=2)
    params = ref.unboxed(quick_init(mha(**kinds).init)(KEY, x))["params"]
    want = jax.jit(loss_and_gradients(mha(**kinds), mask))(params, x, weights)
    mesh = jax.make_mesh((4,), ("cp",), axis_types=(AxisType.Explicit,))
    module = mha(context_parallel_axis="cp", context_parallel_causal_load_balanced=balanced, **kinds)
    order = (lambda x: reorder_causal_load_balancing(x, 4)) if balanced else lambda x: x
    back = (lambda x: inverse_reorder_causal_load_balancing(np.asarray(x), 4)) if balanced else np.asarray
    spec = PartitionSpec(None, "cp")

    def local(mask, params, x, weights):
        return loss_and_gradients(module, mask)(params, x, weights)

    with jax.set_mesh(mesh):
        run = jax.shard_map(
            local,
            in_specs=(PartitionSpec(), PartitionSpec(), spec, spec),
            out_specs=(spec, PartitionSpec(), spec),
        )
        put = lambda x: jax.device_put(order(x), NamedSharding(mesh, spec))
        y, dparams, dx = jax.jit(run)(mask, params, put(x), put(weights))
    close((back(y), dparams, back(dx)), want)


def test_joined_projection_and_positions_of_the_user():
    """bs3hd; positions are of the tokens as they lie."""
    x = data(B, S, H)
    module = mha(context_parallel_axis="cp", context_parallel_causal_load_balanced=True)
    params = quick_init(mha().init)(KEY, x)["params"]
    at = 3 + 2 * jnp.arange(S)
    want = jax.jit(lambda x: mha().apply({"params": params}, x, positions=at)[0])(x)
    with jax.set_mesh(jax.make_mesh((4,), ("cp",), axis_types=(AxisType.Auto,))):
        positions = reorder_causal_load_balancing(at, 4, axis=0)
        run = jax.jit(lambda x: module.apply({"params": params}, x, positions=positions)[0])
        got = run(reorder_causal_load_balancing(x, 4))
    close(inverse_reorder_causal_load_balancing(np.asarray(got), 4), want)


def test_fp8_attention_is_told_to_be_wide():
    x = data(B, S, H, dtype=jnp.bfloat16)
    fp8 = recipe.DelayedScaling(fp8_dpa=True)
    with te.autocast(True, fp8):
        variables = quick_init(mha(dtype=jnp.bfloat16).init)(KEY, x)
        module = mha(dtype=jnp.bfloat16, context_parallel_axis="cp")
        with jax.set_mesh(jax.make_mesh((2,), ("cp",), axis_types=(AxisType.Auto,))):
            with pytest.warns(UserWarning, match="not in FP8.*mesh axis 'cp' cuts the sequence"):
                got = jax.jit(module.apply)(variables, x)[0]
    assert np.all(np.isfinite(np.asarray(got, np.float32)))


def test_decoding_is_not_cut():
    x = data(B, 3, H)
    module = mha()
    run = lambda: jax.jit(lambda x: module.init_with_output(KEY, x, decode=True)[0][0])(x)
    want = run()
    with jax.set_mesh(jax.make_mesh((2,), ("cp",), axis_types=(AxisType.Auto,))):
        with global_shard_guard(MeshResource(cp_resource="cp")):
            close(run(), want)
            with pytest.raises(ValueError, match="load_balanced is True, but decode=True"):
                jax.eval_shape(lambda: mha(context_parallel_causal_load_balanced=True).init(KEY, x, decode=True))


@pytest.mark.parametrize(
    ("fields", "resource", "text"),
    [
        (dict(context_parallel_axis="sp"), None, r"axis is 'sp', but the mesh in force has the axes \('tp', 'cp'\)"),
        (
            dict(context_parallel_axis="tp"),
            MeshResource(tp_resource="tp"),
            "'tp', and tp_resource is the same mesh axis",
        ),
        (dict(context_parallel_axis="cp", context_parallel_strategy="STAR"), None, "strategy is 'STAR'; pass one of"),
        (
            dict(context_parallel_causal_load_balanced=True),
            None,
            "no axis cuts the sequence; set context_parallel_axis",
        ),
        (dict(context_parallel_axis="cp", attention_dropout=0.1), None, "dropout_rate is 0.1, which attention over"),
        (dict(context_parallel_axis="cp", s=15), None, "q has 15 positions, which 4 pieces do not divide"),
    ],
    ids=lambda value: None if isinstance(value, MeshResource) else str(value)[:40],
)
def test_errors(fields, resource, text):
    fields = dict(fields)
    q = data(B, fields.pop("s", S), 4, 8)
    module = te_flax.DotProductAttention(head_dim=8, num_attention_heads=4, **fields)
    with jax.set_mesh(jax.make_mesh((2, 4), ("tp", "cp"), axis_types=(AxisType.Auto,) * 2)):
        with global_shard_guard(resource), pytest.raises(ValueError, match=text):
            module.apply({}, q, q, q, rngs={"dropout": KEY})


def test_one_axis_for_two_parts():
    with pytest.raises(ValueError, match="dp_resource and cp_resource are both 'cp'; give each an axis of its own"):
        MeshResource(dp_resource="cp", cp_resource="cp")


def test_mesh_resource_without_a_mesh():
    """As everywhere: a MeshResource has no effect without a mesh."""
    q = data(B, S, 4, 8)
    module = te_flax.DotProductAttention(head_dim=8, num_attention_heads=4)
    want = module.apply({}, q, q, q)
    with global_shard_guard(MeshResource(cp_resource="cp")):
        close(module.apply({}, q, q, q), want)


def one_device_mesh(kind):
    return jax.make_mesh((2, 1), ("dp", "cp"), axis_types=(KINDS[kind],) * 2)


@pytest.mark.parametrize("kind", KINDS)
def test_an_axis_of_one_device_cuts_nothing(kind):
    """So masks, dropout, biases and any length work as without the axis, in whatever order."""
    q, bias = data(B, 15, 4, 8), data(1, 4, 15, 15)
    mask = jnp.asarray(np.random.default_rng(3).random((B, 1, 15, 15)) < 0.3)
    fields = dict(head_dim=8, num_attention_heads=4, attention_dropout=0.25, attn_bias_type="post_scale_bias")
    attend = lambda module: lambda q: module.apply({}, q, q, q, None, bias, mask=mask, rngs={"dropout": KEY})
    want = jax.jit(attend(te_flax.DotProductAttention(**fields)))(q)
    cut = dict(context_parallel_causal_load_balanced=True, context_parallel_strategy="ring")
    mesh = one_device_mesh(kind)
    with jax.set_mesh(mesh), global_shard_guard(MeshResource("dp", cp_resource="cp")):
        placed = jax.device_put(q, NamedSharding(mesh, PartitionSpec("dp", "cp")))
        fns = [
            attend(te_flax.DotProductAttention(**fields, **more)) for more in (cut, dict(context_parallel_axis="cp"))
        ]
        for got in jax.jit(lambda q: [fn(q) for fn in fns])(placed):
            close(got, want)
        named = dict(axis="cp", batch_axis=("dp", "cp"), head_axis="cp", load_balanced=True)
        options = dict(bias=bias, mask=mask, dropout_rate=0.25, dropout_rng=KEY, attn_mask_type="causal")
        got = jax.jit(lambda q: context_parallel_attention(q, q, q, **named, **options))(placed)
    close(got, jax.jit(lambda q: dot_product_attention(q, q, q, **options))(q))
    np.testing.assert_array_equal(reorder_causal_load_balancing(np.arange(15), 1, 0), np.arange(15))
    np.testing.assert_array_equal(inverse_reorder_causal_load_balancing(np.arange(15), 1, 0), np.arange(15))


def test_what_an_axis_of_one_device_leaves_as_it_is():
    """FP8 attention, decoding, and the segments of several rows with RoPE."""
    x, tokens = data(B, S, H, dtype=jnp.bfloat16), data(B, 3, H)
    fp8 = te_flax.MultiHeadAttention(head_dim=16, num_attention_heads=2, dtype=jnp.bfloat16)
    order = dict(context_parallel_causal_load_balanced=True)
    packed, kinds = data(B, S, H), dict(attn_mask_type="padding_causal")
    with te.autocast(True, recipe.DelayedScaling(fp8_dpa=True)):
        variables = quick_init(fp8.init)(KEY, x)
        want = jax.jit(fp8.apply)(variables, x)[0]
    params = quick_init(mha(**kinds).init)(KEY, packed)
    of_segments = lambda **fields: jax.jit(lambda x: mha(**kinds, **fields).apply(params, x, None, SEGMENTS)[0])(packed)
    decode = lambda module: jax.jit(lambda x: module.init_with_output(KEY, x, decode=True)[0][0])
    decoded = lambda **fields: decode(mha(**fields))(tokens)
    wants = of_segments(), decoded()
    with jax.set_mesh(one_device_mesh("auto")), global_shard_guard(MeshResource("dp", cp_resource="cp")):
        with te.autocast(True, recipe.DelayedScaling(fp8_dpa=True)), warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            got = jax.jit(fp8.apply)(variables, x)[0]
        close((of_segments(**order), decoded(**order)), wants)
    np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(want, np.float32))


@pytest.mark.parametrize("reduce_amax", [True, False])
def test_fp8_state_on_a_stage_axis_of_one_device(reduce_amax):
    """It need not vary over an axis that has no second device, of pipelines or of data."""
    chosen, x = recipe.DelayedScaling(amax_history_len=4, reduce_amax=reduce_amax), data(8, 16)
    module = te_flax.DenseGeneral(features=16)
    with te.autocast(True, chosen):
        metas, params = flax.core.pop(nn.meta.unbox(quick_init(module.init)(KEY, x)), "params")
        loss = lambda metas, x: jnp.sum(module.apply({"params": params, **metas}, x))
        want = jax.jit(jax.grad(loss))(metas, x)
        with jax.set_mesh(jax.make_mesh((1,), ("pp",), axis_types=(AxisType.Auto,))):
            with global_shard_guard(MeshResource(pp_resource="pp")):
                got = jax.jit(
                    jax.shard_map(
                        jax.grad(loss), in_specs=(PartitionSpec(), PartitionSpec("pp")), out_specs=PartitionSpec()
                    )
                )(metas, x)
    jax.tree.map(np.testing.assert_array_equal, got, want)
