"""Layers and context-parallel attention over all GPUs of a machine that has more than one: the numbers of one GPU."""

import functools

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from quick_init import quick_init
from sharded import KINDS, LAYER_BOUND, RECIPE, check_equal, gradients, run_on

import te_jax as te
import te_jax.flax as te_flax
from te_jax.layers import ExpertExchange, MoEOptions, moe
from te_jax.ops.attention import SequenceDescriptor, dot_product_attention
from te_jax.ops.attention_context import context_parallel_attention
from te_jax.ops.formats import ROWS_128
from te_jax.ops.router import RouterOptions
from te_jax.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling
from te_jax.sharding import collectives, inverse_reorder_causal_load_balancing, reorder_causal_load_balancing
from te_jax.state import fp8

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.default_backend() != "gpu" or jax.device_count() < 2, reason="needs two NVIDIA GPUs"),
]

N = jax.device_count()
B, S, H, F, HEADS, GROUPS = 8, 512, 1024, 4096, 16, 8
ROLES = {  # of the one mesh axis of all GPUs -> the MeshResource, and where the activations' batch and sequence lie
    "dp": (te.MeshResource(dp_resource="all"), P("all")),
    "fsdp": (te.MeshResource(fsdp_resource="all"), P("all")),
    "fsdp, one gather": (te.MeshResource(fsdp_resource="all", keep_gathered_weights=True), P("all")),
    "tp": (te.MeshResource(tp_resource="all"), P()),
    "tp-sp": (te.MeshResource(tpsp_resource="all"), P(None, "all")),
    "tp-sp in pieces": (te.MeshResource(tpsp_resource="all", tpsp_pieces=2), P(None, "all")),
    "cp": (te.MeshResource(cp_resource="all"), P(None, "all")),
}


def layer(role, **fields):
    return te_flax.TransformerLayer(
        hidden_size=H, mlp_hidden_size=F, num_attention_heads=HEADS, num_gqa_groups=GROUPS, hidden_dropout=0.0,
        attention_dropout=0.0, enable_rotary_pos_emb=True, dtype=jnp.bfloat16,
        enable_sequence_parallel=role in ("tp-sp", "tp-sp in pieces"),
        context_parallel_causal_load_balanced=role == "cp", **fields,
    )  # fmt: skip


def data(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape or (B, S, H)), jnp.bfloat16)


@functools.cache
def on_one_gpu(in_fp8):
    """(parameters in boxes, state, loss and gradients) of the layer."""
    module, x = layer(None), data(0)
    with te.autocast(in_fp8, RECIPE):
        others, params = flax.core.pop(quick_init(module.init)(jax.random.key(0), x), "params")
        return params, others, jax.jit(gradients(module))(nn.meta.unbox(params), others, x, data(1))


@pytest.mark.parametrize("in_fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("role", ROLES)
def test_layer(role, kind, in_fp8):
    """Forward and backward; kernels are gathered only in FP8; scales are the same on all GPUs."""
    params, others, want = on_one_gpu(in_fp8)
    mesh, (resource, spec) = jax.make_mesh((N,), ("all",), axis_types=(KINDS[kind],)), ROLES[role]
    order = functools.partial(reorder_causal_load_balancing, cp_size=N) if role == "cp" else lambda a: a
    arrays = [order(data(seed)) for seed in (0, 1)]
    with te.autocast(in_fp8, RECIPE):
        (loss, (dparams, state, dx)), found = run_on(mesh, resource, layer(role), params, others, arrays, spec)
    dx = inverse_reorder_causal_load_balancing(np.asarray(dx), N) if role == "cp" else dx
    check_equal((loss, dparams, dx), (want[0], want[1][0], want[1][2]), LAYER_BOUND[jnp.bfloat16])
    for leaf in jax.tree.leaves(nn.meta.unbox(state)):
        for shard in leaf.addressable_shards:
            np.testing.assert_array_equal(shard.data, leaf.addressable_shards[0].data)
    gathered = {c.dtype for c in found if c.kind == "all-gather" and c.bytes > 2**16}
    if in_fp8 and role != "cp":
        assert gathered <= {"f8e4m3fn", "f8e5m2"}, collectives.table(found)


EXCHANGES = [
    ExpertExchange(),
    ExpertExchange("all_to_all", block_factor=100.0),
    ExpertExchange("peer_access"),
    ExpertExchange(pieces=2),
]


def test_recomputed_experts():
    """What others read in a forward pass that is run again is there, to the bit."""
    experts, hidden, f = 4 * N, 512, 1024
    x, gate = data(2, B, S, hidden), data(4, hidden, experts).astype(jnp.float32)
    wi, wo = tuple(data(i, experts, hidden, f) * 0.05 for i in (5, 6)), data(7, experts, f, hidden) * 0.05
    options = MoEOptions(RouterOptions(2), exchange=ExpertExchange("peer_access"))
    layer = lambda x, wi, wo: moe(x, gate, wi, wo, options=options, recipe=Float8CurrentScaling())[0]
    loss = lambda layer: lambda *args: jnp.sum(layer(*args).astype(jnp.float32) ** 2)
    mesh = jax.make_mesh((N,), ("ep",), axis_types=(AxisType.Auto,))
    with jax.set_mesh(mesh), te.sharding.global_shard_guard(te.MeshResource(ep_resource="ep")):
        args = jax.device_put((x, wi, wo), NamedSharding(mesh, P("ep")))
        run = lambda layer: jax.jit(jax.grad(loss(layer), (0, 1, 2)))(*args)
        want = run(layer)
        for _ in range(3):
            jax.tree.map(np.testing.assert_array_equal, run(jax.checkpoint(layer)), want)


@pytest.mark.parametrize("exchange", EXCHANGES, ids=str)
@pytest.mark.parametrize("how", [None, DelayedScaling(), Float8CurrentScaling(), Float8BlockScaling()], ids=repr)
def test_experts(how, exchange):
    """Experts on all GPUs. Sums are rounded to bf16 on the way back, where one GPU adds up in f32: 2**-8 of the largest
    of two terms. Gradients cross in E4M3: one GPU gets them rounded so."""
    experts, topk, hidden, f = 4 * N, 2, 512, 1024
    x, dy, gate = data(2, B, S, hidden), data(3, B, S, hidden), data(4, hidden, experts).astype(jnp.float32)
    wi, wo = [data(i, experts, hidden, f) * 0.05 for i in (5, 6)], data(7, experts, f, hidden) * 0.05
    one = lambda *lead: fp8.TensorMeta(jnp.full(lead, 16.0), jnp.zeros(lead))
    metas = fp8.DenseMetas(one(), one(experts), one(experts)), fp8.DenseMetas(one(experts), one(experts), one())
    options = MoEOptions(RouterOptions(topk), exchange=exchange)

    def run(x, wi, wo, metas, dy):
        stateful = how is not None and how.has_state
        layer = lambda x, wi, wo: moe(
            x, gate, tuple(wi), wo, options=options, recipe=how, metas=metas if stateful else None
        )
        y, vjp, aux = jax.vjp(layer, x, wi, wo, has_aux=True)
        return y, aux.counts, aux.dropped, vjp(dy)

    rounded = ROWS_128.write(dy.astype(jnp.float32), 2, jnp.float8_e4m3fn, power_2=True, epsilon=0.0)
    arrives = dy if how is None else ROWS_128.read(rounded["data"], rounded["scale_inv"], 1).astype(dy.dtype)
    want = jax.jit(run)(x, wi, wo, metas, arrives)
    mesh = jax.make_mesh((N,), ("ep",), axis_types=(AxisType.Auto,))
    with jax.set_mesh(mesh), te.sharding.global_shard_guard(te.MeshResource(ep_resource="ep")):
        place = lambda a: jax.device_put(a, NamedSharding(mesh, P("ep") if a.ndim else P()))
        got = jax.jit(run)(*jax.tree.map(place, (x, wi, wo, metas, dy)))
    np.testing.assert_array_equal(got[1], want[1])
    assert not np.any(got[2])
    bound = 2.0**-4 if isinstance(how, Float8BlockScaling) else 2.0**-7  # of wgrad, whose columns are rounded twice
    for a, b, most in zip(
        jax.tree.leaves((got[0], got[3])), jax.tree.leaves((want[0], want[3])), [2.0**-7] * 2 + [bound] * 3
    ):
        a, b = (np.asarray(v, np.float32) for v in (a, b))
        assert np.max(np.abs(a - b)) <= most * np.max(np.abs(b))


LENGTHS = SequenceDescriptor.from_seqlens(jnp.asarray([1111, 2048], jnp.int32))
PACKED = SequenceDescriptor.from_seqlens_and_offsets(
    jnp.asarray([[300, 700, 513], [1500, 31, 0]], jnp.int32), jnp.asarray([[0, 300, 1200, -1], [20, 1700, -1, -1]])
)
CASES = {
    "full": {},
    "causal": dict(attn_mask_type="causal"),
    "window": dict(attn_mask_type="causal", window_size=(300, 0)),
    "bottom_right": dict(attn_mask_type="causal_bottom_right"),
    "causal_lengths": dict(attn_mask_type="padding_causal", sequence_descriptor=LENGTHS),
    "packed": dict(attn_mask_type="padding_causal", sequence_descriptor=PACKED),
    "sink": dict(attn_mask_type="causal", softmax_type="off_by_one"),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("balanced", [False, True], ids=["striped", "balanced"])
@pytest.mark.parametrize("strategy", ["ring", "all_gather"])
def test_context_parallel_attention(strategy, balanced, case):
    """cuDNN's kernels over all GPUs, against them on one. Each of the partial results is rounded to bf16: 2**-9 of
    values up to 4; the order of sums over keys is another."""
    shapes = [(2, 2048, heads, 128) for heads in (8, 2, 2, 8)]
    arrays = [data(seed, *shape) for seed, shape in enumerate(shapes)]

    def with_gradients(f):
        def run(q, k, v, dout):
            out, vjp = jax.vjp(f, q, k, v)
            return out, *vjp(dout)

        return jax.jit(run)

    want = with_gradients(lambda *qkv: dot_product_attention(*qkv, **CASES[case]))(*arrays)
    mesh = jax.make_mesh((N,), ("cp",), axis_types=(AxisType.Auto,))
    with jax.set_mesh(mesh):
        order = functools.partial(reorder_causal_load_balancing, cp_size=N) if balanced else lambda a: a
        placed = [jax.device_put(order(a), NamedSharding(mesh, P(None, "cp"))) for a in arrays]
        run = with_gradients(
            lambda *qkv: context_parallel_attention(
                *qkv, axis="cp", strategy=strategy, load_balanced=balanced, **CASES[case]
            )
        )
        got = [inverse_reorder_causal_load_balancing(np.asarray(a), N) if balanced else a for a in run(*placed)]
    for name, a, b in zip(("out", "dq", "dk", "dv"), got, want):
        a, b = (np.asarray(x, np.float32) for x in (a, b))
        assert np.all(np.isfinite(a)), name
        assert np.max(np.abs(a - b)) <= 2.0**-6 * max(1, np.max(np.abs(b))), (name, np.max(np.abs(a - b)))


def test_dropout_differs_between_gpus():
    """Each GPU draws its rows' own mask; the same key gives the same one again."""
    mesh = jax.make_mesh((N,), ("dp",), axis_types=(AxisType.Auto,))
    shape = (N, 256, 4, 128)
    q, v = jnp.zeros(shape, jnp.bfloat16), jnp.broadcast_to(data(0, 256, 4, 128), shape)
    with jax.set_mesh(mesh):
        q, v = (jax.device_put(a, NamedSharding(mesh, P("dp"))) for a in (q, v))
        run = jax.jit(lambda q, v, key: dot_product_attention(q, q, v, dropout_rate=0.5, dropout_rng=key))
        one, again = (np.asarray(run(q, v, jax.random.key(3)), np.float32) for _ in range(2))
    np.testing.assert_array_equal(one, again)
    for i in range(1, N):
        assert np.mean(one[0] == one[i]) < 0.1
