"""Mamba2 against one token after the other: gradients, segments, the cache, FP8, adapters, NNX, a mesh, errors."""

import dataclasses

import flax_reference as ref
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ssm_oracle
from flax import linen as nn
from flax import nnx
from flax_reference import data
from jax.sharding import AxisType, PartitionSpec
from jaxprs import equations
from mixers_on_meshes import from_a_cache, of_a_sequence, of_rows_and_heads
from quick_init import quick_init

import te_jax as te
import te_jax.flax as te_flax
import te_jax.nnx as te_nnx
from te_jax import recipe
from te_jax.checkpoint_policies import GEMM, SSM, save
from te_jax.layers import MambaWeights, gated_rmsnorm, mamba2
from te_jax.ops.attention import SequenceDescriptor
from te_jax.sharding import MeshResource, global_shard_guard

pytestmark = pytest.mark.usefixtures("on_host")
KEY = jax.random.key(0)
B, S, H, N, P, G, STATE = 2, 12, 24, 4, 8, 2, 16
# Six products of at most 32 terms, two norms, the convolutions and the scan in f32: each adds a few roundings of 2**-24
# of the largest value, and the gradients pass twice as many.
BOUND = 256 * 2.0**-24


def mamba(**fields):
    sizes = dict(ssm_num_heads=N, ssm_head_dim=P, ssm_state_size=STATE, ssm_num_groups=G)
    return te_flax.Mamba2(**sizes | fields)


def drawn(module, *args, **kwargs):
    """Parameters, all random."""
    params = ref.unboxed(ref.filled(jax.eval_shape(lambda: module.init(KEY, *args, **kwargs))["params"]))
    return params


def close(got, want, bound=BOUND):
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        np.testing.assert_allclose(
            a, b, rtol=0, atol=bound * np.abs(b).max(initial=1.0), err_msg=jax.tree_util.keystr(path)
        )


def rms(x):
    return x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)


def reference(params, x, segments=None, groups=G, before=False):
    """One row x [s, H]."""
    dense = lambda name: normed @ params[name]["kernel"]
    normed = rms(x) * params["x"]["scale"]

    def conv(name, heads):
        own = dict(x=dense(name), kernel=params[f"{name}_conv_kernel"], bias=params[f"{name}_conv_bias"])
        return ssm_oracle.conv(own, segments, True)[0].reshape(x.shape[0], heads, -1)

    given = dict(x=conv("x", N), B=conv("B", G), C=conv("C", G), dt=dense("dt"), A=-jnp.exp(params["A_log"]))
    given |= dict(D=params["D"], dt_bias=params["dt_bias"])
    y = ssm_oracle.ssd(given, segments, softplus=True, limit=(0.0, np.inf))[0].reshape(x.shape[0], -1)
    gate = jax.nn.silu(dense("z"))
    of_groups = lambda y: rms(y.reshape(x.shape[0], groups, -1)).reshape(y.shape) * params["norm_scale"]
    y = of_groups(y) * gate if before else of_groups(y * gate)
    return y @ params["out"]["kernel"]


@pytest.mark.parametrize("fields", [{}, dict(norm_groups=1, norm_before_gate=True)], ids=["gate", "norm_first"])
def test_against_tokens_one_by_one(fields):
    """Outputs and all gradients, with segments and without."""
    module, x, weights = mamba(**fields), data(B, S, H), data(B, S, H, seed=2)
    params = drawn(module, x)
    ids = np.sort(np.random.default_rng(3).integers(1, 4, (B, S)), -1).astype(np.int32)
    of = dict(groups=fields.get("norm_groups", G), before="norm_before_gate" in fields)

    @jax.jit
    def run(params, x):
        def both(attend):
            y, vjp = jax.vjp(attend, params, x)
            return y, *vjp(weights)

        packed = SequenceDescriptor.from_segment_ids_and_pos(ids)
        got = [both(lambda p, x, m=m: module.apply({"params": p}, x, m)[0]) for m in (None, packed)]
        plain = both(lambda p, x: jax.vmap(lambda x: reference(p, x, **of))(x))
        segments = both(lambda p, x: jax.vmap(lambda x, ids: reference(p, x, ids, **of))(x, ids))
        return got, [plain, segments]

    close(*run(params, x))


def test_decode():
    """Prompts of different lengths, padded on the right, then tokens one by one, then several: as one call each."""
    module, x = mamba(), data(B, S, H)
    params = drawn(module, x)
    lengths = np.array([5, 3], np.int32)

    @jax.jit
    def run(params, x):
        apply = lambda *args, **kwargs: module.apply({"params": params, **kwargs.pop("cache", {})}, *args, **kwargs)
        whole = apply(x)[0]
        rows = [jnp.concatenate([x[i, None, : lengths[i]], x[i, None, : 5 - lengths[i]]], 1) for i in range(B)]
        step = dict(decode=True, mutable=["cache"])
        (first, _), cache = apply(jnp.concatenate(rows), SequenceDescriptor.from_seqlens(lengths), **step)
        outs = [[first[i, : lengths[i]]] for i in range(B)]
        at = lengths
        for size in (1, 1, 4):
            (y, _), cache = apply(jnp.stack([x[i, at[i] : at[i] + size] for i in range(B)]), cache=cache, **step)
            outs, at = [[*out, row] for out, row in zip(outs, y)], at + size
        return [jnp.concatenate(out) for out in outs], [whole[i, : at[i]] for i in range(B)]

    close(*run(params, x))


def test_decode_on_explicit_axes():
    module, x = mamba(), data(B, 4, H)
    close(*from_a_cache(module, drawn(module, x), x))


def test_init_makes_an_empty_cache():
    module = mamba()
    shapes = jax.eval_shape(lambda: module.init(KEY, data(B, 1, H), decode=True))["cache"]
    assert {name: leaf.shape for name, leaf in shapes.items()} == dict(
        x_conv_state=(B, 3, N * P), B_conv_state=(B, 3, G * STATE), C_conv_state=(B, 3, G * STATE),
        ssm_state=(B, N, P, STATE), cache_index=(),
    )  # fmt: skip
    assert shapes["ssm_state"].dtype == jnp.float32


def test_initial_values():
    """Steps between their bounds, decays between 1 and 16, taps within 1 / sqrt(w)."""
    params = ref.unboxed(jax.jit(mamba(time_step_min=0.01, time_step_max=0.2).init)(KEY, data(B, 2, H))["params"])
    steps = jax.nn.softplus(params["dt_bias"])
    assert (steps > 0.0099).all() and (steps < 0.2001).all()
    assert (params["A_log"] >= 0).all() and (params["A_log"] <= np.log(16) + 1e-6).all()
    assert np.abs(params["x_conv_kernel"]).max() <= 0.5 and np.ptp(params["x_conv_kernel"]) > 0.5


@pytest.mark.parametrize("law", [recipe.DelayedScaling(), recipe.Float8BlockScaling()], ids=["delayed", "block"])
def test_fp8(law):
    """All six products are in FP8: the state of each, and results that are near those in f32."""
    module, x = mamba(dtype=jnp.bfloat16), data(B, 16, 32, dtype=jnp.bfloat16)
    with te.autocast(True, law):
        variables = quick_init(module.init)(KEY, x)
        fp8 = jax.jit(lambda v: module.apply(v, x)[0])(variables)
        rows = te.explain_fp8(lambda v: module.apply(v, x)[0], variables)
    wide = jax.jit(lambda v: module.apply(v, x)[0])({"params": variables["params"]})
    error = np.linalg.norm(np.asarray(fp8 - wide, np.float32)) / np.linalg.norm(np.asarray(wide, np.float32))
    assert 0.005 < error < 0.15  # Two E4M3 products in a row, each off by 2**-4 at most and by 3 % in the mean.
    assert str(rows).count("fprop") >= 1
    if law.has_state:
        assert set(variables[te.FP8_COLLECTION]) == {"x", "z", "B", "C", "dt", "out"}


def test_a_policy_keeps_the_scan():
    """By its name the scan runs once; without, the backward pass computes it again."""
    module, x = mamba(), data(1, S, H)
    params = jax.eval_shape(lambda: module.init(KEY, x))

    def scans(**policy):
        loss = lambda p: jnp.sum(module.apply(p, x)[0])
        grad = jax.grad(jax.checkpoint(loss, **policy) if policy else loss)
        return sum(eqn.primitive.name == "te_ssd_fwd" for eqn in equations(jax.make_jaxpr(grad)(params).jaxpr))

    assert [scans(), scans(policy=None), scans(policy=save(SSM)), scans(policy=save(GEMM))] == [1, 2, 1, 2]


def test_adapters():
    module, x = mamba(low_rank_adaptation_scope="all", low_rank_adaptation_dim=2), data(B, S, H)
    params = drawn(module, x)
    lora, _ = te_flax.split_lora(params)
    assert set(lora) == {"x", "z", "B", "C", "dt", "out"}
    got = jax.jit(lambda p: module.apply({"params": p}, x)[0])(params)
    merged = te_flax.merge_lora(params)
    close(got, jax.jit(lambda p: mamba().apply({"params": p}, x)[0])(merged))


def test_nnx():
    module = te_nnx.Mamba2(in_features=H, ssm_num_heads=N, ssm_head_dim=P, ssm_state_size=STATE, rngs=nnx.Rngs(0))
    x = data(B, S, H)
    y, _ = module(x)
    linen = te_flax.Mamba2(ssm_num_heads=N, ssm_head_dim=P, ssm_state_size=STATE)
    close(y, linen.apply({"params": te_nnx.to_linen(module)["params"]}, x)[0])


@pytest.mark.parametrize(("kind", "groups", "tp"), [
    ("auto", 1, 4), ("auto", 2, 2), ("auto", 2, 4), ("explicit", 1, 2), ("explicit", 2, 2), ("explicit", 2, 4),
])  # fmt: skip
def test_mesh(kind, groups, tp):
    """Rows over dp, heads over tp, also over more devices than there are groups: the numbers of one device, gradients
    too, and on each device the scan of its heads."""
    module, x, weights = mamba(ssm_num_groups=groups), data(4, S, H), data(4, S, H, seed=2)
    params = drawn(module, x)
    got, want, specs, text = of_rows_and_heads(module, params, x, weights, kind, tp)
    assert specs["x"]["kernel"] == specs["x_conv_kernel"] == PartitionSpec(None, "tp")
    close(got, want)
    # Two rows, and heads, of a device; or of all.
    assert f"f32[2,{S},{N // tp},{P}]" in text and f"f32[2,{S},{N},{P}]" not in text


@pytest.mark.parametrize(("kind", "packed", "sizes"), [
    ("auto", False, (2, 2, 2)), ("auto", True, (1, 4, 2)), ("auto", True, (1, 2, 4)), ("explicit", True, (2, 2, 2)),
    ("manual", True, (1, 4, 2)), ("manual", "offsets", (1, 4, 2)),
])  # fmt: skip
def test_a_sequence_on_several_devices(kind, packed, sizes):
    """Over dp, cp and tp, whose devices may be more than groups: the numbers of one device, with segments that end
    within, between and behind devices; one scan, on a mesh of Auto axes of a device's own rows and heads."""
    module, x, weights = mamba(), data(B, 16, H), data(B, 16, H, seed=2)
    params = drawn(module, x)
    ids = np.array([[1] * 5 + [2] * 3 + [3] * 8, [1] * 2 + [2] * 13 + [4]], np.int32)
    mask = SequenceDescriptor.from_segment_ids_and_pos(ids) if packed else None
    if kind == "manual":  # The same segments by their first tokens.
        offsets = np.array([[0, 5, 8, 16], [0, 2, 15, 16]], np.int32)
        mask = SequenceDescriptor.from_seqlens_and_offsets(np.diff(offsets), offsets) if packed == "offsets" else mask
    got, want, jaxpr = of_a_sequence(module, params, x, weights, mask, kind, sizes)
    names = [eqn.primitive.name for eqn in equations(jaxpr)]
    assert "ppermute" in names and names.count("te_ssd_fwd") == names.count("te_ssd_bwd") == 1
    if kind == "auto":
        (scan,) = (eqn for eqn in equations(jaxpr) if eqn.primitive.name == "te_ssd_fwd")
        dp, cp, tp = sizes
        assert scan.invars[0].aval.shape == (B // dp, 16 // cp, N // tp, P)
    close(got, want)


def test_padding_of_any_values():
    """NaN and inf behind the lengths: outputs, states and gradients of a row that is full up to there."""
    rng, length = np.random.default_rng(0), 5
    draw = lambda *shape: rng.standard_normal(shape).astype(np.float32)
    inputs = [draw(1, S, N, P), draw(1, S, G, STATE), draw(1, S, G, STATE), draw(1, S, N), draw(1, S, N, P)]
    wide, narrow = N * P, G * STATE
    kernels = [draw(4, width) for width in (wide, narrow, narrow)]
    weights = MambaWeights(*kernels, None, None, None, draw(N), draw(N), draw(N), draw(wide))

    def run(weights, inputs, **given):
        fn = lambda weights: mamba2(*inputs, weights, **given, return_state=True)
        (y, state), pull = jax.vjp(fn, weights)
        return (y[:, :length], state), pull(
            (jnp.ones_like(y).at[:, length:].set(0), jax.tree.map(jnp.ones_like, state))
        )

    spoiled = [np.where(np.arange(S) < length, a.swapaxes(1, -1), bad).swapaxes(1, -1).astype(np.float32)
               for a, bad in zip(inputs, (np.nan, np.inf, np.nan, np.nan, np.inf))]  # fmt: skip
    got = jax.jit(lambda w, x: run(w, x, lengths=jnp.array([length])))(weights, spoiled)
    close(got, jax.jit(run)(weights, [a[:, :length] for a in inputs]))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (dict(lengths=jnp.ones((1,), int)), r"mamba2: lengths has shape \(1,\); pass \[2\]"),
        (dict(lengths=jnp.ones((2,), int), dt_limit=(2.0, 1.0)), r"mamba2: dt_limit is \(2.0, 1.0\); pass a tuple"),
        (dict(axis="cq"), r"mamba2: axis is 'cq', but the mesh in force has the axes \('cp', 'tp'\)"),
        (dict(axis="tp"), "mamba2: axis is 'tp', and tp_resource is the same mesh axis"),
        (dict(axis="cp", return_state=True), "'cp', which cuts the sequence; return_state is for whole ones"),
    ],
)
def test_wrong_arguments(call, message):
    """Of the functional layer, on a mesh; and an axis without a mesh."""
    x, B_, dt = jnp.ones((2, 16, N, P)), jnp.ones((2, 16, G, STATE)), jnp.ones((2, 16, N))
    kernels = [jnp.ones((4, width)) for width in (N * P, G * STATE, G * STATE)]
    weights = MambaWeights(*kernels, None, None, None, *jnp.ones((3, N)), jnp.ones(N * P))
    run = lambda **call: jax.eval_shape(lambda: mamba2(x, B_, B_, dt, x, weights, **call))
    with jax.set_mesh(jax.make_mesh((4, 2), ("cp", "tp"))), global_shard_guard(MeshResource(tp_resource="tp")):
        with pytest.raises(ValueError, match=message):
            run(**call)
    with pytest.raises(ValueError, match="axis is 'cp', but the mesh in force is none"):
        run(axis="cp")


def test_axes_that_cannot_cut():
    """The module says it as attention does; and heads that devices do not divide by the field's name."""
    x, mesh = jnp.ones((B, 16, H)), jax.make_mesh((4, 2), ("cp", "tp"), axis_types=(AxisType.Auto,) * 2)
    init = lambda module: jax.eval_shape(lambda: module.init(KEY, x))
    with jax.set_mesh(mesh), global_shard_guard(MeshResource(tp_resource="tp")):
        with pytest.raises(ValueError, match="context_parallel_axis is 'cq', but the mesh in force has the axes"):
            init(mamba(context_parallel_axis="cq"))
        with pytest.raises(ValueError, match="context_parallel_axis is 'tp', and tp_resource is the same mesh axis"):
            init(mamba(context_parallel_axis="tp"))
        with nn.logical_axis_rules(te_flax.extend_logical_axis_rules(())):
            with pytest.raises(ValueError, match="ssm_num_heads is 3, but tensor parallelism over the mesh axes"):
                init(mamba(ssm_num_heads=3, ssm_num_groups=1))


@pytest.mark.parametrize("tokens", [14, 8])
def test_sequences_that_devices_cannot_share(tokens):
    module, x = mamba(context_parallel_axis="cp"), jnp.ones((B, tokens, H))
    with jax.set_mesh(jax.make_mesh((4,), ("cp",))):
        params = jax.eval_shape(lambda: module.init(KEY, x))  # of inputs of any length
        with pytest.raises(ValueError, match=f"Mamba2: {tokens} tokens on the 4 devices of 'cp'; pass a multiple of 4"):
            jax.eval_shape(lambda p: module.apply(p, x), params)


WRONG = [
    (dict(), dict(inputs=jnp.ones((2, H))), r"Mamba2: inputs has shape \(2, 24\); pass \[batch, sequence, width\]"),
    (dict(), dict(mask=jnp.ones((B, 1, S, S), bool)), "mask is an array; the scan is causal"),
    (dict(ssm_num_groups=3), {}, "ssm_num_heads=4 does not split into ssm_num_groups=3"),
    (dict(norm_groups=3), {}, "ssm_num_heads=4 does not split into norm_groups=3"),
    (dict(conv_width=5), {}, "conv_width is 5; pass an int from 2 to 4"),
    (dict(time_step_min=1.0), {}, "time_step_min is 1.0, above time_step_max=0.1"),
    (dict(time_step_floor=1.0), {}, "time_step_floor is 1.0, above time_step_max=0.1"),
    (dict(time_step_limit=(2.0, 1.0)), {}, r"time_step_limit is \(2.0, 1.0\); pass a tuple"),
    (dict(ssm_num_heads=None), {}, "ssm_num_heads is None; pass a positive int"),
]


@pytest.mark.parametrize(("fields", "call", "message"), WRONG)
def test_wrong_calls(fields, call, message):
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda: mamba(**fields).init(KEY, **dict(inputs=jnp.ones((B, S, H))) | call))


def test_wrong_caches():
    module, x = mamba(), data(B, S, H)
    params = jax.eval_shape(lambda: module.init(KEY, x, decode=True))
    run = lambda x, mask=None, mutable=("cache",): jax.eval_shape(
        lambda p: module.apply(p, x, mask, decode=True, mutable=list(mutable)), params
    )
    ids = SequenceDescriptor.from_segment_ids_and_pos(jnp.ones((B, S), jnp.int32))
    with pytest.raises(ValueError, match="the SequenceDescriptor has segments; with decode=True a row is one sequence"):
        run(x, ids)
    with pytest.raises(ValueError, match=r"the SequenceDescriptor has seqlens of shape \(1,\); with decode=True"):
        run(x, SequenceDescriptor.from_seqlens(jnp.ones((1,), jnp.int32)))
    with pytest.raises(ValueError, match="x_conv_state has shape"):
        run(x[:1])
    with pytest.raises(TypeError, match="x_conv_state is float32, the inputs need bfloat16"):
        run(x.astype(jnp.bfloat16))
    with pytest.raises(ValueError, match="'cache', which is not mutable here"):
        run(x, mutable=("intermediates",))
    del params["cache"]["ssm_state"]
    with pytest.raises(ValueError, match="Mamba2: the 'cache' has .*but not ssm_state; pass the whole"):
        run(x)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (dict(groups=3), "groups is 3, which does not divide the 4 heads"),
        (dict(gamma=jnp.ones(4)), r"gamma \(4,\); pass \[..., h, p\] twice, and \[h\*p\]"),
        (dict(epsilon=0.0), "epsilon is 0.0; pass a number above 0"),
    ],
)
def test_wrong_norms(changed, message):
    with pytest.raises(ValueError, match=message):
        gated_rmsnorm(**dict(x=jnp.ones((2, 4, 8)), z=jnp.ones((2, 4, 8)), gamma=jnp.ones(32)) | changed)


LATENT = dict(kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=8)


def hybrid(**fields):
    """Mamba2 and MLP, attention by itself, MLP by itself, Mamba2 by itself."""
    ssm = dict(ssm_num_heads=N, ssm_head_dim=P, ssm_state_size=STATE)
    pattern = (dict(ssm=ssm), dict(sublayers="mixer"), dict(sublayers="mlp"), dict(ssm=ssm, sublayers="mixer"))
    layer = dict(num_attention_heads=2, mlp_hidden_size=32, hidden_dropout=0.0, attention_dropout=0.0)
    layer |= dict(enable_rotary_pos_emb=True, layernorm_type="rmsnorm", self_attn_mask_type="causal")
    config = te.models.ModelConfig(32, 4, H, layer=layer, pattern=pattern, **fields)
    return te.models.CausalLM(config, dtype=jnp.float32)


def test_a_hybrid_stack_generates():
    """The sublayers of each kind; prompts of two lengths; greedy tokens as passes over whole texts choose them."""
    model = hybrid()
    tokens = np.random.default_rng(0).integers(0, 32, (2, 6)).astype(np.int32)
    variables = quick_init(model.init)(KEY, tokens)
    layers = variables["params"]["layers"]
    assert [set(layers[f"layer_{i}"]["TransformerLayer_0"]) for i in range(4)] == [
        {"mamba", "mlp"},
        {"attention"},
        {"mlp"},
        {"mamba"},
    ]
    lengths = np.array([6, 4], np.int32)
    new = jax.jit(lambda v: te.models.generate(model, v, tokens, 3, lengths=lengths))(variables)

    @jax.jit
    def checked(variables, whole):
        return [model.apply(variables, row[None])[0] for row in whole]

    whole = [np.concatenate([tokens[i, : lengths[i]], np.asarray(new)[i]]) for i in range(2)]
    for i, logits in enumerate(checked(variables, whole)):
        np.testing.assert_array_equal(np.argmax(logits, -1)[lengths[i] - 1 : -1], np.asarray(new)[i])


def test_a_stale_cache_of_states():
    """Prompts are not read behind the tokens of another text, whatever layers the model has."""
    layer = dict(ssm=dict(ssm_num_heads=N, ssm_head_dim=P, ssm_state_size=STATE), mlp_hidden_size=32)
    layer |= dict(num_attention_heads=2, hidden_dropout=0.0)
    model = te.models.CausalLM(te.models.ModelConfig(32, 1, H, layer=layer), dtype=jnp.float32)
    tokens = np.ones((2, 3), np.int32)
    shapes = jax.eval_shape(lambda: model.init(KEY, tokens, decode=True))
    empty = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)
    full = {**empty, "cache": jax.tree.map(np.ones_like, empty["cache"])}
    shape = lambda variables: jax.eval_shape(lambda: te.models.generate(model, variables, tokens, 2))
    assert shape(empty).shape == (2, 2)
    with pytest.raises(ValueError, match="variables hold 'cache', with tokens that would count as read"):
        shape(full)


def test_a_balanced_order_in_a_hybrid_stack():
    model = hybrid()
    pattern = (*model.config.pattern[:1], dict(sublayers="mixer", context_parallel_causal_load_balanced=True))
    model = model.clone(config=dataclasses.replace(model.config, pattern=pattern))
    with pytest.raises(ValueError, match="causal_load_balanced is True in layer 1, but other layers have ssm"):
        jax.eval_shape(lambda: model.init(KEY, np.ones((1, 4), np.int32)))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(ssm=dict(ssm_num_heads=2), layer_type="decoder"), 'ssm is given, but layer_type is "decoder"'),
        (dict(sublayers="mlp", parallel_attention_mlp=True), "sublayers is 'mlp', but parallel_attention_mlp is True"),
        (dict(ssm=dict(ssm_num_heads=2), transpose_batch_sequence=True), "ssm is given, but transpose_batch_sequence"),
        (
            dict(ssm=dict(ssm_num_heads=2), context_parallel_causal_load_balanced=True),
            "causal_load_balanced is on, which",
        ),
        (
            dict(ssm=dict(ssm_num_heads=2), sublayers="mlp"),
            "ssm is given, but sublayers is 'mlp', which has no use",
        ),
        (dict(moe=dict(num_experts=2), sublayers="mixer"), "moe is given, but sublayers is 'mixer', which has no use"),
        (dict(ssm=dict(ssm_num_heads=2), **LATENT), "ssm is given, but kv_lora_rank is 8, of attention"),
        (
            dict(ssm=dict(ssm_num_heads=2), self_attn_mask_type="padding"),
            "self_attn_mask_type is 'padding'; Mamba2 is causal",
        ),
        (dict(sublayers="attention"), "sublayers is 'attention'; pass one of 'both', 'mixer', 'mlp'"),
        (dict(ssm=dict(num_heads=2)), "unexpected keyword argument 'num_heads'"),
        (dict(ssm=dict(ssm_num_heads=2, name="a")), r"ssm is .*name and parent are the layer's to give"),
        (dict(moe=dict(num_experts=2, parent=None)), r"moe is .*name and parent are the layer's to give"),
        (dict(ssm={1: 2}), "ssm is {1: 2}; pass None or a dict of fields of Mamba2"),
    ],
)
def test_wrong_layers(fields, message):
    layer = te_flax.TransformerLayer(**dict(hidden_size=H, num_attention_heads=2, mlp_hidden_size=16) | fields)
    with pytest.raises((ValueError, TypeError), match=message):
        jax.eval_shape(lambda: layer.init(KEY, jnp.ones((B, S, H))))
