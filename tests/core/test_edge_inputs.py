"""Empty batches, symbolic ones, numpy arrays, and programs that forbid implicit rank promotion: through every op, layer
and module."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from jax import export

import te_jax as te
import te_jax.flax as te_flax
import te_jax.nnx as te_nnx
from benchmarks.op_cases import CASES
from te_jax import layers, optim
from te_jax import recipe as recipes
from te_jax.core import extension
from te_jax.core.op import ops
from te_jax.ops.activation import activation
from te_jax.ops.attention import SequenceDescriptor, dot_product_attention
from te_jax.ops.attention_bias import alibi_bias, alibi_slopes
from te_jax.ops.attention_context import context_parallel_attention
from te_jax.ops.norm import norm
from te_jax.ops.rope import rope

RECIPES = {
    "bf16": None,
    "delayed": recipes.DelayedScaling(amax_history_len=2),
    "current": recipes.Float8CurrentScaling(),
    "fixed": recipes.FixedScaling(),
    "block": recipes.Float8BlockScaling(),
    "mxfp8": recipes.MXFP8BlockScaling(),
}
H, S = 32, 4
OF_LAYER = dict(hidden_size=H, mlp_hidden_size=64, num_attention_heads=4, hidden_dropout=0.0, attention_dropout=0.0)
OF_MHA = dict(head_dim=8, num_attention_heads=4)
MODULES = {  # each with the axes of its input; b is the batch
    "dense": (te_flax.DenseGeneral((3, 24), use_bias=True), "bh"),
    "mlp": (te_flax.LayerNormMLP(64, activations=("silu", "linear"), use_bias=True, intermediate_dropout_rate=0), "bh"),
    "projection": (te_flax.LayerNormDenseGeneral(24, layernorm_type="rmsnorm", use_bias=True), "bsh"),
    "attention": (te_flax.MultiHeadAttention(**OF_MHA, transpose_batch_sequence=True, use_bias=True), "sbh"),
    "separate": (te_flax.MultiHeadAttention(**OF_MHA, fuse_qkv_params=False), "bsh"),
    "layer": (
        te_flax.TransformerLayer(
            **OF_LAYER, num_gqa_groups=2, enable_rotary_pos_emb=True, enable_relative_embedding=True
        ),
        "bsh",
    ),
}


def inputs(axes, b):
    return tuple({"b": b, "s": S, "h": H}[axis] for axis in axes)


def options(module):
    dense = isinstance(module, te_flax.DenseGeneral | te_flax.LayerNormDenseGeneral)
    return {} if dense else dict(deterministic=True)


def everything(recipe, which=tuple(MODULES)):
    """(variables, of which, xs) -> the sum of all outputs and its gradients; and variables of ones."""
    modules = {name: MODULES[name] for name in which}
    under = partial(te.autocast, recipe is not None, recipe)

    def init(xs):
        return {name: m.init(jax.random.key(0), xs[name], **options(m)) for name, (m, _) in modules.items()}

    def loss(variables, xs):
        with under():
            outs = [m.apply(variables[name], xs[name], **options(m)) for name, (m, _) in modules.items()]
        return sum(jnp.sum(out) for out in jax.tree.leaves(outs))

    with under():
        types = jax.eval_shape(init, {name: jnp.ones(inputs(axes, 2)) for name, (_, axes) in modules.items()})
    variables = jax.tree.map(lambda a: np.ones(a.shape, a.dtype), nn.meta.unbox(types))
    return jax.jit(jax.value_and_grad(loss, (0, 1))), variables


@pytest.fixture
def for_any_gpu(monkeypatch):
    """Lowering for CUDA asks for no GPU that is here, which may be too old for a recipe."""
    monkeypatch.setattr(extension, "compute_capability", lambda: None)


@pytest.fixture
def ranks_said():
    with jax.numpy_rank_promotion("raise"):
        yield


@pytest.mark.parametrize("name", RECIPES)
def test_empty_batch(name, ranks_said):
    run, variables = everything(RECIPES[name])
    xs = {n: np.ones(inputs(axes, 0), np.float32) for n, (_, axes) in MODULES.items()}
    value, (grads, dxs) = jax.device_get(run(variables, xs))
    assert value == 0 and all(dxs[n].shape == inputs(axes, 0) for n, (_, axes) in MODULES.items())
    for module, of_module in grads.items():
        assert all(not leaf.any() for leaf in jax.tree.leaves(of_module["params"]))
        for path, state in jax.tree.leaves_with_path(of_module.get("fp8_metas", {})):  # nothing was seen
            if "kernel" not in jax.tree_util.keystr(path):
                np.testing.assert_array_equal(state, 1, module)


@pytest.mark.parametrize("name", RECIPES)
def test_symbolic_batch(name, ranks_said, for_any_gpu):
    """For both platforms at once."""
    which = ("dense", "mlp", "attention") if name == "block" else ("dense", "mlp", "layer")
    (b,), (run, variables) = export.symbolic_shape("b"), everything(RECIPES[name], which)
    xs = {n: jax.ShapeDtypeStruct(inputs(MODULES[n][1], b), jnp.float32) for n in which}
    checks = [export.DisabledSafetyCheck.custom_call(op) for op in (*ops, "__op$block_scaled_dot")]
    exported = export.export(run, platforms=["cpu", "cuda"], disabled_checks=checks)(variables, xs)
    if (name, jax.default_backend()) == ("block", "cpu"):  # three rows, less than a block
        data = {n: np.ones(inputs(MODULES[n][1], 3), np.float32) for n in which}
        jax.tree.map(
            partial(np.testing.assert_allclose, rtol=1e-6), exported.call(variables, data), run(variables, data)
        )


OF_GROUPS = dict(score_function="sigmoid", num_groups=2, group_topk=1)
WITH_GROUPS = {  # of heads, channels or experts
    "mamba": te_flax.Mamba2(ssm_num_heads=4, ssm_head_dim=4, ssm_state_size=8, ssm_num_groups=2),
    "delta": te_flax.GatedDeltaNet(4, linear_num_key_heads=2, linear_key_head_dim=8, linear_value_head_dim=4),
    "kimi": te_flax.GatedDeltaNet(4, linear_key_head_dim=8, linear_value_head_dim=4, gate="channel"),
    "experts": te_flax.MoEBlock(num_experts=4, intermediate_dim=16, **OF_GROUPS, per_sequence_loss=True),
    "heads": te_flax.MultiHeadAttention(**OF_MHA, qk_norm_type="rmsnorm", qk_norm_across_heads=True),
}


@pytest.mark.parametrize("shape", [(0, S, H), (2, 0, H)])
@pytest.mark.parametrize("name", WITH_GROUPS)
def test_no_tokens_in_groups(name, shape):
    module = WITH_GROUPS[name]
    types = jax.eval_shape(module.init, jax.random.key(0), jnp.ones((2, S, H)))
    loss = lambda variables, x: jnp.sum(jax.tree.leaves(module.apply(variables, x))[0])
    lowered = jax.jit(jax.grad(loss, 1)).lower(types, jax.ShapeDtypeStruct(shape, jnp.float32))
    assert lowered.out_info.shape == shape


EXPERTS = dict(num_experts=4, intermediate_dim=64)
STREAMS = {  # of [b, s, h], where both are symbols
    "experts with losses of sequences": te_flax.MoEBlock(**EXPERTS, per_sequence_loss=True, aux_loss_coeff=0.1),
    "experts of everything": te_flax.MoEBlock(
        **EXPERTS,
        **dict(enable_layernorm=True, use_bias=True, num_shared_experts=1, capacity_factor=1.1, use_expert_bias=True),
        **dict(score_function="sigmoid", num_groups=2, group_topk=1, aux_loss_coeff=0.1, z_loss_coeff=0.1),
    ),
    "layer of experts": te_flax.TransformerLayer(
        **OF_LAYER, moe=EXPERTS, self_attn_mask_type="causal", window_size=(3, 0), enable_rotary_pos_emb=True
    ),
    "latent": te_flax.MultiHeadLatentAttention(
        num_attention_heads=4, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8
    ),
    "lora": te_flax.LayerNormMLP(64, enable_low_rank_adaptation=True),
}
HEAD = te_flax.LMHead(24)


def of_streams(recipe):
    """(variables, x, labels) -> the sum of all outputs and losses, and its gradients by the first two; variables."""

    def loss(variables, x, labels):
        with te.autocast(recipe is not None, recipe):
            run = lambda name, m: m.apply(variables[name], x, mutable=["losses"])
            outs = [run(name, module) for name, module in STREAMS.items()]
            outs += [HEAD.apply(variables["head"], x, labels, reduction=kind) for kind in ("mean", "none")]
        return sum(jnp.mean(out) for out in jax.tree.leaves(outs))

    def init(x):
        variables = {name: m.init(jax.random.key(0), x) for name, m in STREAMS.items()}
        return variables | {"head": HEAD.init(jax.random.key(0), x, jnp.ones(x.shape[:2], int))}

    with te.autocast(recipe is not None, recipe):
        variables = nn.meta.unbox(jax.eval_shape(init, jnp.ones((2, S, H))))
    return jax.jit(jax.value_and_grad(loss, (0, 1))), variables


@pytest.mark.parametrize("name", ["bf16", "delayed"])
def test_symbolic_batch_and_sequence(name, for_any_gpu):
    """Experts with and without a capacity, windows, latent attention, a head's loss, for both platforms at once."""
    (b, s), (run, variables) = export.symbolic_shape("b, s"), of_streams(RECIPES[name])
    checks = [export.DisabledSafetyCheck.custom_call(op) for op in (*ops, "__op$block_scaled_dot")]
    types = [jax.ShapeDtypeStruct((b, s, *more), dtype) for more, dtype in (((H,), jnp.float32), ((), jnp.int32))]
    export.export(run, platforms=["cpu", "cuda"], disabled_checks=checks)(variables, *types)


def test_numbers_of_symbolic_sizes():
    module, (b, s) = STREAMS["experts of everything"], export.symbolic_shape("b, s")
    x = jax.random.normal(jax.random.key(0), (3, 5, H))
    run = jax.jit(lambda v, x: module.apply(v, x, True))
    variables = nn.meta.unbox(jax.jit(module.init)(jax.random.key(0), x))
    exported = export.export(run, platforms=[jax.default_backend()])(
        variables, jax.ShapeDtypeStruct((b, s, H), jnp.float32)
    )
    # The same operations on the same numbers; XLA may fuse them otherwise: sums of 2**7 numbers in another order.
    np.testing.assert_allclose(exported.call(variables, x), run(variables, x), rtol=2.0**-16, atol=2.0**-16)


def test_symbolic_sizes_of_nnx():
    (b, s) = export.symbolic_shape("b, s")
    for make in (lambda rngs: te_nnx.MoEBlock(H, **EXPERTS, rngs=rngs), lambda rngs: te_nnx.LMHead(H, 24, rngs=rngs)):
        graph, state = nnx.split(nnx.eval_shape(lambda: make(nnx.Rngs(0))))  # noqa: B023
        run = jax.jit(lambda state, x: nnx.merge(graph, state)(x))  # noqa: B023
        exported = export.export(run, platforms=["cpu"])(state, jax.ShapeDtypeStruct((b, s, H), jnp.float32))
        assert exported.out_avals[0].shape[:2] == (b, s)


@pytest.mark.parametrize("name", ["mamba", "delta"])
def test_a_symbolic_number_of_tokens_to_scan(name):
    """Is refused by name: chunks of it are not known."""
    (s,) = export.symbolic_shape("s")
    with pytest.raises(ValueError, match=r"(ssd: x|gated_delta: v) has shape .*, of s tokens; .* each length"):
        jax.eval_shape(WITH_GROUPS[name].init, jax.random.key(0), jax.ShapeDtypeStruct((2, s, H), jnp.float32))


# -- numpy arrays -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
@pytest.mark.parametrize("name", ["bf16", "delayed"])
def test_numpy_inputs(name, dtype):
    """Modules take them as jax does: float64 as float32, as in Flax; parameters too."""
    want = jnp.asarray(np.zeros(0, dtype)).dtype
    with te.autocast(RECIPES[name] is not None, RECIPES[name]):
        for module, axes in MODULES.values():
            x = np.ones(inputs(axes, 2), dtype)
            y, variables = jax.eval_shape(
                lambda module=module, x=x: module.init_with_output(jax.random.key(0), x, **options(module))
            )
            held = {**jax.tree.map(lambda a: np.ones(a.shape, a.dtype), nn.meta.unbox(variables))}
            held["params"] = jax.tree.map(lambda a: a.astype(np.float64), held["params"])
            again = jax.eval_shape(lambda module=module, x=x, held=held: module.apply(held, x, **options(module)))
            assert {a.dtype for a in jax.tree.leaves((y, again))} == {want}


def test_numpy_inputs_of_layers_and_ops():
    x, kernel, row = np.ones((2, 3, 32)), np.ones((32, 32)), np.ones(32)
    recipe = recipes.Float8CurrentScaling()
    q = x.reshape(2, 3, 2, 16)

    def run():
        for r in (None, recipe):
            yield layers.dense(x, kernel, row, x, recipe=r)
            yield layers.layernorm_dense(x, kernel, row, row, row, recipe=r)[0]
            yield layers.layernorm_mlp(x, row, row, kernel[:, None], kernel, row[None], row, residual=x, recipe=r)
        yield norm(x, row, row)
        yield activation(x[:, :, None], ("gelu",))
        yield rope(q, np.arange(3))
        yield dot_product_attention(q, q, q)

    assert {y.dtype for y in jax.eval_shape(lambda: list(run()))} == {jnp.dtype(jnp.float32)}


# -- jax_numpy_rank_promotion="raise" ---------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=str)
def test_ops_say_their_ranks(case, ranks_said, for_any_gpu):
    args = case.types()
    jax.eval_shape(partial(case.declared.reference, **case.attrs), *args)
    jax.jit(lambda *args: case(*args)).trace(*args).lower(lowering_platforms=("cuda",))


def attention_of_all_kinds(q, offset, slopes):
    b, s, h, _ = q.shape
    lengths = SequenceDescriptor.from_seqlens(jnp.full(b, s - 1))
    packed = SequenceDescriptor.from_seqlens_and_offsets(
        jnp.full((b, 2), 2), jnp.broadcast_to(jnp.arange(0, 6, 2), (b, 3))
    )
    ids = SequenceDescriptor.from_segment_ids_and_pos(jnp.ones((b, s), int)).of_runs(2)
    for x in (q, q.astype(jnp.bfloat16)):  # plain JAX, the ops
        call = partial(dot_product_attention, x, x, x)
        for described in (lengths, packed, ids):
            yield call(sequence_descriptor=described, attn_mask_type="padding_causal")
        yield call(mask=jnp.zeros((s, s), bool), attn_mask_type="causal", bias=jnp.ones((s, s)))
        yield call(bias=jnp.ones((h, s, s)).reshape(1, h, s, s), softmax_type="learnable", softmax_offset=offset)
        yield call(softmax_type="off_by_one", alibi_slopes=slopes, window_size=(2, 1))
        yield call(bias=jnp.ones((s, s)), attn_bias_type="pre_scale_bias", attn_mask_type="causal_bottom_right")
    yield alibi_bias(slopes, s, s), alibi_bias(slopes, s, s, q_offset=jnp.arange(b))


def test_attention_says_its_ranks(ranks_said):
    q, offset = jnp.ones((2, S, 4, 16)), jnp.ones(4)
    loss = lambda *args: sum(jnp.sum(y) for y in jax.tree.leaves(list(attention_of_all_kinds(*args))))
    jax.jit(jax.grad(loss, (0, 1, 2))).lower(q, offset, alibi_slopes(4))


@pytest.mark.usefixtures("on_host")
@pytest.mark.parametrize("strategy", ["ring", "all_gather"])
def test_context_parallelism_says_its_ranks(strategy, ranks_said):
    q, offset = jnp.ones((2, 32, 4, 16)), jnp.ones(4)
    packed = SequenceDescriptor.from_seqlens_and_offsets(jnp.full((2, 2), 12), jnp.array([[0, 16], [2, 20]]))
    mesh = jax.make_mesh((4,), ("cp",), axis_types=(jax.sharding.AxisType.Auto,))

    def loss(q, offset):
        run = partial(context_parallel_attention, axis="cp", strategy=strategy)
        causal = run(
            q, q, q, attn_mask_type="causal", load_balanced=True, softmax_type="learnable", softmax_offset=offset
        )
        return jnp.sum(causal + run(q, q, q, attn_mask_type="padding_causal", sequence_descriptor=packed))

    with jax.set_mesh(mesh):
        jax.jit(jax.grad(loss, (0, 1))).lower(q, offset)


def test_decoding_says_its_ranks(ranks_said):
    module = te_flax.MultiHeadAttention(**OF_MHA, enable_rotary_pos_emb=True)
    step = partial(module.apply, decode=True, deterministic=True, max_decode_length=8, mutable=["cache"])

    def two_steps(x):
        variables = module.init(jax.random.key(0), x)
        lengths = SequenceDescriptor.from_seqlens(jnp.full(2, 3))
        _, cache = step(variables, x, mask=lengths)
        return step({**variables, **cache}, x[:, :1])

    jax.jit(two_steps).lower(jnp.ones((2, S, H)))


def test_training_says_its_ranks(ranks_said):
    recipe, model = RECIPES["delayed"], te_flax.LayerNormMLP(64, use_bias=True, intermediate_dropout_rate=0)
    x = jnp.ones((2, 2, H))

    def steps(x):
        with te.autocast(True, recipe):
            variables = nn.meta.unbox(model.init(jax.random.key(0), x[0]))
            others = {"fp8_metas": variables["fp8_metas"]}
            fields = dict(apply_fn=model.apply, params=variables["params"], collections=others)
            state = te_flax.TrainState.create(tx=optax.MultiSteps(optim.adamw_fp8(1e-3), 2), **fields)
            loss = lambda p, fp8, x: jnp.mean(model.apply({"params": p, **fp8}, x, deterministic=True)[0] ** 2)
            _, grads = state.accumulate_gradients(loss, x)
            probed = te.value_and_grad(loss, (0, 1))(state.params, te.fp8_probes(state.fp8), x[0])[1]
            return state.apply_gradients(grads=grads), te.fp8_stats(probed), te.convert_fp8_metas(state.fp8, recipe)

    jax.jit(steps).lower(x)


def test_no_examples_and_one():
    """Of an axis that `jax.vmap` maps, where each example has a kernel of its own."""
    step = jax.jit(jax.vmap(jax.grad(lambda w, x: jnp.sum(layers.dense(x, w, recipe=recipes.Float8CurrentScaling())))))
    for examples in (0, 1):
        w, x = jnp.ones((examples, 16, 8)), jnp.ones((examples, 4, 16))
        # Exact but for the two factors that undo the scales: a division of XLA's is right to 2 ulp on a GPU, 2**-22.
        np.testing.assert_allclose(step(w, x), np.full((examples, 16, 8), 4.0), rtol=2.0**-20)
