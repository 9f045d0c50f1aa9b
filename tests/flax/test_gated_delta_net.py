"""GatedDeltaNet against one token after the other: gradients, segments, caches, FP8, adapters, NNX, a mesh, errors."""

from functools import partial

import delta_oracle
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
from te_jax.layers import DeltaWeights, gated_delta_net
from te_jax.ops.attention import SequenceDescriptor
from te_jax.sharding import MeshResource, global_shard_guard

pytestmark = pytest.mark.usefixtures("on_host")
KEY = jax.random.key(0)
B, S, H, N, G, D, E = 2, 12, 24, 4, 2, 8, 16
# Eight products of at most 64 terms, two norms, the convolutions and the rule in f32: each adds a few roundings of
# 2**-24 of the largest value, norms of short rows as many again, and the gradients pass twice as many.
BOUND = 512 * 2.0**-24
SIZES = dict(linear_num_value_heads=N, linear_num_key_heads=G, linear_key_head_dim=D, linear_value_head_dim=E)
PROJECTIONS = {"head": {"q", "k", "v", "b", "a", "z"}, "channel": {"q", "k", "v", "b", "f_a", "f_b", "g_a", "g_b"}}
gates = pytest.mark.parametrize("gate", ["head", "channel"])


def mixer(**fields):
    return te_flax.GatedDeltaNet(**SIZES | fields)


def drawn(module, *args, **kwargs):
    """Parameters, all random."""
    return ref.unboxed(ref.filled(jax.eval_shape(lambda: module.init(KEY, *args, **kwargs))["params"]))


def close(got, want, bound=BOUND):
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        name = jax.tree_util.keystr(path)
        np.testing.assert_allclose(a, b, rtol=0, atol=bound * np.abs(b).max(initial=1.0), err_msg=name)


def rms(x):
    return x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)


def reference(params, x, segments=None, twice=False):
    """One row x [s, H]."""
    normed = rms(x) * params["q"]["scale"]

    def dense(*names):
        out = normed
        for name in names:
            out = out @ params[name]["kernel"]
        return out

    def conv(name, heads):
        own = dict(x=dense(name), kernel=params[f"{name}_conv_kernel"])
        own |= {k: params[f"{name}_conv_bias"] for k in ("bias",) if f"{name}_conv_bias" in params}
        return ssm_oracle.conv(own, segments, True)[0].reshape(x.shape[0], heads, -1)

    by_channel = "f_a" in params
    a, z = (dense("f_a", "f_b"), dense("g_a", "g_b")) if by_channel else (dense("a"), dense("z"))
    rate = -jnp.repeat(jnp.exp(params["A_log"]), a.shape[-1] // N)
    gate = (rate * jax.nn.softplus(a + params["dt_bias"])).reshape(x.shape[0], N, -1)
    given = dict(q=conv("q", G), k=conv("k", G), v=conv("v", N), gate=gate)
    given["beta"] = jax.nn.sigmoid(dense("b")) * (2 if twice else 1)
    y = rms(delta_oracle.rule(given, segments)[0]) * params["norm_scale"]
    y = y.reshape(x.shape[0], -1) * (jax.nn.sigmoid if by_channel else jax.nn.silu)(z)
    return y @ params["out"]["kernel"]


@pytest.mark.parametrize(
    "fields",
    [{}, dict(gate="channel", gate_rank=6), dict(allow_neg_eigval=True, use_conv_bias=True)],
    ids=["head", "channel", "reflects"],
)
def test_against_tokens_one_by_one(fields):
    """Outputs and all gradients, with segments and without."""
    module, x, weights = mixer(**fields), data(B, S, H), data(B, S, H, seed=2)
    params = drawn(module, x)
    ids = np.sort(np.random.default_rng(3).integers(1, 4, (B, S)), -1).astype(np.int32)
    row = partial(reference, twice="allow_neg_eigval" in fields)

    @jax.jit
    def run(params, x):
        def both(attend):
            y, vjp = jax.vjp(attend, params, x)
            return y, *vjp(weights)

        packed = SequenceDescriptor.from_segment_ids_and_pos(ids)
        got = [both(lambda p, x, m=m: module.apply({"params": p}, x, m)[0]) for m in (None, packed)]
        plain = both(lambda p, x: jax.vmap(lambda x: row(p, x))(x))
        segments = both(lambda p, x: jax.vmap(lambda x, ids: row(p, x, ids))(x, ids))
        return got, [plain, segments]

    close(*run(params, x))


@gates
def test_decode(gate):
    """Prompts of different lengths, padded on the right, then tokens one by one, then several: as one call each."""
    module, x = mixer(gate=gate), data(B, S, H)
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
    module, x = mixer(), data(B, 4, H)
    close(*from_a_cache(module, drawn(module, x), x))


def test_init_makes_an_empty_cache():
    shapes = jax.eval_shape(lambda: mixer().init(KEY, data(B, 1, H), decode=True))["cache"]
    assert {name: leaf.shape for name, leaf in shapes.items()} == dict(
        v_conv_state=(B, 3, N * E), q_conv_state=(B, 3, G * D), k_conv_state=(B, 3, G * D),
        delta_state=(B, N, D, E), cache_index=(),
    )  # fmt: skip
    assert shapes["delta_state"].dtype == jnp.float32


@gates
def test_fp8(gate):
    """All products are in FP8: the state of each, which moves, and results that are near those in f32."""
    law, x = recipe.DelayedScaling(), data(B, 16, 32, dtype=jnp.bfloat16)
    module = mixer(gate=gate, dtype=jnp.bfloat16)
    loss = lambda v: jnp.sum(jnp.square(module.apply(v, x)[0].astype(jnp.float32)))
    with te.autocast(True, law):
        variables = quick_init(module.init)(KEY, x)
        fp8 = jax.jit(lambda v: module.apply(v, x)[0])(variables)
        grads = jax.jit(jax.grad(loss))(variables)
        rows = te.explain_fp8(lambda v: module.apply(v, x)[0], variables)
    wide = jax.jit(lambda v: module.apply(v, x)[0])({"params": variables["params"]})
    error = np.linalg.norm(np.asarray(fp8 - wide, np.float32)) / np.linalg.norm(np.asarray(wide, np.float32))
    assert 0.005 < error < 0.2  # Two or three E4M3 products in a row, each off by 2**-4 at most and 3 % in the mean.
    names = {*PROJECTIONS[gate], "out"}
    assert all(f"{name} " in str(rows) or f"{name}/" in str(rows) for name in names)
    assert set(variables[te.FP8_COLLECTION]) == names
    moved = jax.tree.map(lambda a, b: bool((a != b).any()), variables[te.FP8_COLLECTION], grads[te.FP8_COLLECTION])
    assert all(any(jax.tree.leaves(moved[name])) for name in names)


def test_a_policy_keeps_the_rule():
    """By its name the rule runs once; without, the backward pass computes it again."""
    module, x = mixer(), data(1, S, H)
    params = jax.eval_shape(lambda: module.init(KEY, x))

    def calls(**policy):
        loss = lambda p: jnp.sum(module.apply(p, x)[0])
        grad = jax.grad(jax.checkpoint(loss, **policy) if policy else loss)
        jaxpr = jax.make_jaxpr(grad)(params).jaxpr
        return sum(eqn.primitive.name == "te_gated_delta_fwd" for eqn in equations(jaxpr))

    assert [calls(), calls(policy=None), calls(policy=save(SSM)), calls(policy=save(GEMM))] == [1, 2, 1, 2]


@gates
def test_adapters(gate):
    module, x = mixer(gate=gate, low_rank_adaptation_scope="all", low_rank_adaptation_dim=2), data(B, S, H)
    params = drawn(module, x)
    lora, _ = te_flax.split_lora(params)
    assert set(lora) == {*PROJECTIONS[gate], "out"}
    got = jax.jit(lambda p: module.apply({"params": p}, x)[0])(params)
    merged = te_flax.merge_lora(params)
    close(got, jax.jit(lambda p: mixer(gate=gate).apply({"params": p}, x)[0])(merged))


@gates
def test_ranks_are_said(gate):
    """In programs that forbid implicit rank promotion; also from a cache, and where devices cut the sequence."""
    module, x = mixer(gate=gate, use_bias=True, use_conv_bias=True), jnp.ones((B, 16, H))
    lengths = SequenceDescriptor.from_seqlens(jnp.array([3, 4]))

    def run(**call):
        variables = module.init(KEY, x)
        loss = lambda v: jnp.sum(module.apply(v, x, **call, mutable=["cache"])[0][0])
        return jax.grad(loss)(variables)

    with jax.numpy_rank_promotion("raise"):
        jax.eval_shape(partial(run, mask=lengths, decode=True))
        with jax.set_mesh(jax.make_mesh((4,), ("cp",))):
            module = module.clone(context_parallel_axis="cp")
            jax.eval_shape(run)


def test_nnx():
    """The numbers of Linen, and initial values in their ranges."""
    module = te_nnx.GatedDeltaNet(in_features=H, **SIZES, gate="channel", time_step_max=0.2, rngs=nnx.Rngs(0))
    x = data(B, S, H)
    y, _ = module(x)
    params = te_nnx.to_linen(module)["params"]
    close(y, mixer(gate="channel").apply({"params": params}, x)[0])
    steps = jax.nn.softplus(params["dt_bias"])
    assert params["dt_bias"].shape == (N * D,) and (steps > 0.00099).all() and (steps < 0.2001).all()
    assert (params["A_log"] >= 0).all() and (params["A_log"] <= np.log(16) + 1e-6).all()
    assert (params["norm_scale"] == 1).all() and params["norm_scale"].shape == (E,)


@pytest.mark.parametrize(("kind", "gate", "keys", "tp"), [
    ("auto", "head", 1, 4), ("auto", "channel", 4, 2), ("auto", "head", 2, 4), ("explicit", "head", 2, 4),
    ("explicit", "channel", 2, 2),
])  # fmt: skip
def test_mesh(kind, gate, keys, tp):
    """Rows over dp, heads over tp, also over more devices than there are heads of keys: the numbers of one device,
    gradients too, and on each device the rule of its heads."""
    module, x, weights = mixer(gate=gate, linear_num_key_heads=keys), data(4, S, H), data(4, S, H, seed=2)
    params = drawn(module, x)
    got, want, specs, text = of_rows_and_heads(module, params, x, weights, kind, tp)
    assert specs["v"]["kernel"] == specs["v_conv_kernel"] == PartitionSpec(None, "tp")
    close(got, want)
    # Two rows, and heads, of a device; or of all.
    assert f"f32[2,{S},{N // tp},{E}]" in text and f"f32[2,{S},{N},{E}]" not in text


@pytest.mark.parametrize(("kind", "gate", "packed", "sizes"), [
    ("auto", "head", False, (2, 2, 2)), ("auto", "channel", True, (1, 4, 2)), ("auto", "head", True, (1, 2, 4)),
    ("explicit", "head", True, (2, 2, 2)), ("manual", "head", True, (1, 4, 2)),
])  # fmt: skip
def test_a_sequence_on_several_devices(kind, gate, packed, sizes):
    """Over dp, cp and tp, whose devices may be more than heads of keys: the numbers of one device, with segments that
    end within, between and behind devices; on a mesh of Auto axes the rule has a device's own rows and heads."""
    module, x, weights = mixer(gate=gate), data(B, 16, H), data(B, 16, H, seed=2)
    params = drawn(module, x)
    ids = np.array([[1] * 5 + [2] * 3 + [3] * 8, [1] * 2 + [2] * 13 + [4]], np.int32)
    mask = SequenceDescriptor.from_segment_ids_and_pos(ids) if packed else None
    got, want, jaxpr = of_a_sequence(module, params, x, weights, mask, kind, sizes)
    calls = [eqn for eqn in equations(jaxpr) if eqn.primitive.name == "te_gated_delta_fwd"]
    assert len(calls) == 2 and any(eqn.primitive.name == "ppermute" for eqn in equations(jaxpr))
    if kind == "auto":
        dp, cp, tp = sizes
        widths = {call.invars[2].aval.shape for call in calls}
        assert widths == {(B // dp, 16 // cp, N // tp, width) for width in (E, D + E)}
    close(got, want)


def test_padding_of_any_values():
    """NaN and inf behind the lengths: outputs, states and gradients of a row that is full up to there."""
    rng, length = np.random.default_rng(0), 5
    draw = lambda *shape: rng.standard_normal(shape).astype(np.float32)
    shapes = (1, S, G, D), (1, S, G, D), (1, S, N, E), (1, S, N), (1, S, N), (1, S, N, E)
    inputs = [draw(*shape) for shape in shapes]
    kernels = [draw(4, width) for width in (N * E, G * D, G * D)]
    weights = DeltaWeights(*kernels, None, None, None, draw(N), draw(N), draw(E))

    def run(weights, inputs, **given):
        fn = lambda weights: gated_delta_net(*inputs, weights, **given, return_state=True)
        (y, state), pull = jax.vjp(fn, weights)
        return (y[:, :length], state), pull(
            (jnp.ones_like(y).at[:, length:].set(0), jax.tree.map(jnp.ones_like, state))
        )

    spoiled = [np.where(np.arange(S) < length, a.swapaxes(1, -1), bad).swapaxes(1, -1).astype(np.float32)
               for a, bad in zip(inputs, (np.nan, np.inf, np.nan, np.nan, np.inf, np.nan))]  # fmt: skip
    got = jax.jit(lambda w, x: run(w, x, lengths=jnp.array([length])))(weights, spoiled)
    close(got, jax.jit(run)(weights, [a[:, :length] for a in inputs]))


def test_a_hybrid_stack_generates():
    """GatedDeltaNet and attention in turn; greedy tokens as passes over whole texts choose them."""
    layer = dict(num_attention_heads=2, mlp_hidden_size=32, hidden_dropout=0.0, attention_dropout=0.0)
    layer |= dict(enable_rotary_pos_emb=True, layernorm_type="rmsnorm", self_attn_mask_type="causal")
    config = te.models.ModelConfig(32, 2, H, layer=layer, pattern=(dict(delta=SIZES), {}))
    model = te.models.CausalLM(config, dtype=jnp.float32)
    tokens = np.random.default_rng(0).integers(0, 32, (2, 6)).astype(np.int32)
    variables = quick_init(model.init)(KEY, tokens)
    layers = variables["params"]["layers"]
    found = [set(layers[f"layer_{i}"]["TransformerLayer_0"]) for i in range(2)]
    assert found == [{"delta", "mlp"}, {"attention", "mlp"}]
    lengths = np.array([6, 4], np.int32)
    new = np.asarray(jax.jit(lambda v: te.models.generate(model, v, tokens, 3, lengths=lengths))(variables))
    for i in range(2):
        whole = np.concatenate([tokens[i, : lengths[i]], new[i]])
        logits = model.apply(variables, whole[None])[0]
        np.testing.assert_array_equal(np.argmax(logits, -1)[lengths[i] - 1 : -1], new[i])


WRONG = [
    (dict(), dict(inputs=jnp.ones((2, H))), r"GatedDeltaNet: inputs has shape \(2, 24\); pass \[batch, sequence"),
    (dict(), dict(mask=jnp.ones((B, 1, S, S), bool)), "mask is an array; the scan is causal"),
    (dict(linear_num_key_heads=3), {}, "linear_num_value_heads=4 does not split into linear_num_key_heads=3"),
    (dict(conv_width=5), {}, "conv_width is 5; pass an int from 2 to 4"),
    (dict(time_step_min=1.0), {}, "time_step_min is 1.0, above time_step_max=0.1"),
    (dict(gate="token"), {}, "gate is 'token'; pass one of 'head', 'channel'"),
    (dict(gate_rank=4), {}, "gate_rank is 4, but gate is 'head', which has none"),
    (dict(linear_num_value_heads=None), {}, "linear_num_value_heads is None; pass a positive int"),
]


@pytest.mark.parametrize(("fields", "call", "message"), WRONG)
def test_wrong_calls(fields, call, message):
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda: mixer(**fields).init(KEY, **dict(inputs=jnp.ones((B, S, H))) | call))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(delta=SIZES, layer_type="decoder"), 'delta is given, but layer_type is "decoder"'),
        (dict(delta=SIZES, ssm=dict(ssm_num_heads=2)), "ssm and delta are given, but a layer has one mixer"),
        (dict(delta=SIZES, sublayers="mlp"), "delta is given, but sublayers is 'mlp', which has no use"),
        (dict(delta=SIZES, self_attn_mask_type="padding"), "is 'padding'; GatedDeltaNet is causal"),
        (dict(delta=dict(num_heads=2)), "unexpected keyword argument 'num_heads'"),
    ],
)
def test_wrong_layers(fields, message):
    layer = te_flax.TransformerLayer(**dict(hidden_size=H, num_attention_heads=2, mlp_hidden_size=16) | fields)
    with pytest.raises((ValueError, TypeError), match=message):
        jax.eval_shape(lambda: layer.init(KEY, jnp.ones((B, S, H))))


def test_heads_that_devices_cannot_split():
    x, mesh = jnp.ones((B, 16, H)), jax.make_mesh((2,), ("tp",), axis_types=(AxisType.Auto,))
    with jax.set_mesh(mesh), global_shard_guard(MeshResource(tp_resource="tp")):
        with nn.logical_axis_rules(te_flax.extend_logical_axis_rules(())):
            with pytest.raises(ValueError, match="linear_num_value_heads is 3, but tensor parallelism over"):
                module = mixer(linear_num_value_heads=3, linear_num_key_heads=1)
                jax.eval_shape(lambda: module.init(KEY, x))
