"""Experts that devices divide: the numbers are as on one device, and tokens cross in 8 bits.

In f32 sums have another order: 1e-5 of the largest number, of at most 200 terms of its size. In FP8 the forward pass
multiplies the same bits. The gradient crosses as te_jax.layers.experts.wire says, so one device must get the same from
the gradient that is rounded so.
"""

import re
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from expert_cases import (
    BLOCKS,
    RECIPES,
    B,
    E,
    H,
    K,
    S,
    close,
    layer,
    metas,
    normal,
    of_specs,
    on_mesh,
    on_one_device,
    rounded,
    spec_of_weights,
    weights,
)
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import te_jax as te
from benchmarks import expert_strategies
from te_jax import recipe
from te_jax.layers import ExpertExchange, MoEOptions, moe
from te_jax.layers.config import Config
from te_jax.layers.experts.devices import find_exchange, find_placement
from te_jax.layers.experts.exchange import STRATEGIES, Exchange, collect, dispatch, plan
from te_jax.layers.experts.mlp import rows_source
from te_jax.layers.experts.pieces import dgrad_in_pieces, fprop_in_pieces
from te_jax.layers.produce import Role, produce, quantize_stacked
from te_jax.layers.tensor import LayerUses
from te_jax.ops.experts.permute import group
from te_jax.ops.router import RouterOptions
from te_jax.sharding import MeshResource, collectives, global_shard_guard

pytestmark = pytest.mark.usefixtures("on_host")

PIECES = ExpertExchange(pieces=2)
WIDE = 2 * 128  # features that can be cut in two


PLACES = {  # sizes of the mesh axes, their kind, MeshResource, tokens, exchange
    "ep": (dict(ep=4), AxisType.Auto, dict(ep_resource="ep"), ("ep",), ExpertExchange()),
    "ep-dp, blocks": (
        dict(dp=2, ep=4), AxisType.Explicit, dict(dp_resource="dp", ep_resource="ep"), ("dp", "ep"),
        replace(BLOCKS, pieces=2),
    ),
    "ep-fsdp-tp": (
        dict(fsdp=2, ep=2, tp=2), AxisType.Explicit,
        dict(fsdp_resource="fsdp", ep_resource="ep", tp_resource="tp"), ("fsdp", "ep"), ExpertExchange(),
    ),
    "dp is ep": (dict(dp=4), AxisType.Auto, dict(dp_resource="dp", ep_resource="dp"), ("dp",), BLOCKS),
}  # fmt: skip
SKEWED = 9.0 * np.eye(E)[3] - 9.0 * np.eye(E)[5]  # an expert that has nearly all, one without tokens


@pytest.mark.parametrize("place", PLACES)
def test_like_one_device(place, rng):
    sizes, kind, roles, tokens, exchange = PLACES[place]
    x, w, dy = normal(rng, B, S, WIDE).at[..., 0].set(1.0), weights(rng, SKEWED, WIDE), normal(rng, B, S, WIDE)
    want = on_one_device(x, w, metas(), dy, how=None)
    close(on_mesh(sizes, kind, roles, x, w, dy, tokens=tokens, how=None, exchange=exchange), want)


@pytest.mark.parametrize("shape", [(3, 5), (7,), (4, 0)])
def test_tokens_that_devices_do_not_divide(shape, rng):
    """They are whole on the devices of experts, as of a batch of 3 on 4 of them."""
    x, w, dy = normal(rng, *shape, H), weights(rng), normal(rng, *shape, H)
    want = on_one_device(x, w, metas(), dy, how=None)
    roles = dict(dp_resource="dp", ep_resource="ep")
    close(on_mesh(dict(dp=2, ep=2), AxisType.Auto, roles, x, w, dy, tokens=(), how=None), want)


@pytest.mark.parametrize("name", RECIPES)
def test_fp8(name, rng):
    """With one scale for a tensor all is as on one device, given the gradient as it arrives. In blocks wgrad's
    columns of x are rounded twice: by 2**-4 of a number of x."""
    x, w, dy = normal(rng, B, S, WIDE), weights(rng, h=WIDE), normal(rng, B, S, WIDE)
    want = on_one_device(x, w, metas(), rounded(dy), how=RECIPES[name])
    roles, tokens = dict(dp_resource="dp", ep_resource="ep"), ("dp", "ep")
    options = dict(tokens=tokens, how=RECIPES[name], exchange=BLOCKS if name == "current" else PIECES)
    got = on_mesh(dict(dp=2, ep=2), AxisType.Auto, roles, x, w, dy, **options)
    # dy of the router's part and of biases is not what crossed.
    (y, aux, (dx, (_, *of_experts), dmetas)), (y1, aux1, (dx1, (_, *of_experts1), dmetas1)) = got, want
    close((y, aux, dx, of_experts[1], dmetas), (y1, aux1, dx1, of_experts1[1], dmetas1))
    close(of_experts[0], of_experts1[0], 2.0**-4 if name == "block" else 1e-5)


@pytest.mark.parametrize("name", ["block", "unquantized"])
def test_products_in_pieces(name, rng):
    """They have the bits of one product, also where the recipe takes it out of FP8."""
    how = dict(RECIPES, unquantized=recipe.Float8CurrentScaling(override_linear_precision=(True, True, True)))[name]
    experts = jnp.asarray(rng.integers(0, 4, (40, 2)))  # 3 is nobody's
    x, dy, w, bias = normal(rng, 40, 128), normal(rng, 40, WIDE), normal(rng, 3, 128, WIDE), normal(rng, 3, WIDE)
    config = Config(how, 1, jax.typeof(x), jax.typeof(w), jax.typeof(bias))
    of = LayerUses.of(how, train=True, wgrad=False)

    @jax.jit
    def products(x, dy, w, bias):
        groups = group(experts, 3)
        rows, _ = produce(rows_source(x, groups), Role("x", None, of.x, config.x), config)
        grad, _ = produce(rows_source(dy[:, :128], groups), Role("grad", None, of.grad, config.x), config)
        first = quantize_stacked(w, None, of.weight, config)
        wi = jnp.swapaxes(w, 1, 2)
        second = quantize_stacked(wi, None, of.weight, config._replace(weight=jax.typeof(wi)))
        terms, tail = [(grad, second, 0), (grad, second, 0)], jnp.arange(groups.slots.size) < groups.offsets[-1]
        make = lambda pieces: (
            fprop_in_pieces(rows, first, bias, groups, config, pieces),
            dgrad_in_pieces(terms, groups, config, pieces),
        )
        return [jnp.where(tail[:, None], jnp.concatenate(each, 1), 0) for n in (1, 2) for each in make(n)]

    fprop, dgrad, fprop2, dgrad2 = products(x, dy, w, bias)
    assert fprop.any() and dgrad.any()
    np.testing.assert_array_equal(fprop, fprop2)
    np.testing.assert_array_equal(dgrad, dgrad2)


def test_capacity_of_tokens_that_are_whole(rng):
    """A token without a row enters no amax, and each that has one on some device enters all."""
    x, w = normal(rng, 3, 5, H).at[..., 0].set(1.0), weights(rng, SKEWED)
    options = dict(how=recipe.Float8CurrentScaling(), capacity_factor=0.5)
    dy = rounded(normal(rng, 3, 5, H))
    want = on_one_device(x, w, metas(), dy, **options)
    got = on_mesh(dict(ep=4), AxisType.Auto, dict(ep_resource="ep"), x, w, dy, tokens=(), **options)
    close(got[:2], want[:2])


def test_sequence_and_features_on_one_axis(rng):
    """Tokens cross it, too: each of its devices has a part of F."""
    x, w, dy = normal(rng, B, S, H), weights(rng), normal(rng, B, S, H)
    want = on_one_device(x, w, metas(), dy, how=None)
    roles = dict(ep_resource="ep", tpsp_resource="tp")
    options = dict(tokens=("ep",), token_spec=P("ep", "tp"), exchange=BLOCKS, how=None)
    close(on_mesh(dict(ep=2, tp=2), AxisType.Auto, roles, x, w, dy, **options), want)


def test_inside_shard_map(rng):
    """As in a pipeline's stages: a device passes its own experts, and has the numbers of a stage by itself."""
    x, w, dy = normal(rng, B, S, H), weights(rng), normal(rng, B, S, H)
    y, _, (dx, dw, _) = on_one_device(x, w, metas(), dy, how=None)
    staged = lambda specs: of_specs(lambda spec: P("pp", *spec), specs)

    def stage(*args):
        args = jax.tree.map(lambda a: jax.lax.pcast(a, "pp", to="varying"), args)
        y, _, (dx, dw, _) = layer(*args[:2], metas(), args[2], how=None)
        return jax.tree.map(lambda a: a[None], (y, dx, dw))

    mesh = jax.make_mesh((2, 4), ("pp", "ep"), axis_types=(AxisType.Auto,) * 2)
    specs = P("ep"), spec_of_weights(), P("ep")
    with jax.set_mesh(mesh), global_shard_guard(MeshResource(pp_resource="pp", ep_resource="ep")):
        results = staged((P("ep"), P("ep"), spec_of_weights()))
        got = jax.jit(jax.shard_map(stage, in_specs=specs, out_specs=results))(x, w, dy)
    for each in (jax.tree.map(lambda a: a[0], got), jax.tree.map(lambda a: a[1], got)):
        close(each, (y, dx, dw))


# -- what crosses ----------------------------------------------------------------------------------------------------


def test_collectives(rng):
    """On 4 devices of T tokens each, forward: all tokens once in 8 bits, with the weights and experts of their choices;
    their sums once. Backward: the gradient once in 8 bits with a scale for 128 numbers; sums of dx, of the weights."""
    T = B * S // 4
    x, w, dy = normal(rng, B, S, H).astype(jnp.bfloat16), weights(rng), normal(rng, B, S, H).astype(jnp.bfloat16)
    mesh = jax.make_mesh((4,), ("ep",), axis_types=(AxisType.Auto,))
    put = lambda a, spec: jax.device_put(a, NamedSharding(mesh, spec))
    with global_shard_guard(MeshResource(ep_resource="ep")):
        args = put(x, P("ep")), jax.tree.map(put, w, spec_of_weights()), metas(), put(dy, P("ep"))
        how = recipe.DelayedScaling()
        _, found = collectives.compiled(partial(layer, how=how), *args, mesh=mesh)
        with jax.set_mesh(mesh):
            said = te.explain_moe(x, *args[1][:3], options=MoEOptions(RouterOptions(K)), recipe=how)
    moved = sorted((c.kind, c.dtype, c.bytes) for c in found if c.kind in ("all-gather", "all-to-all"))
    all_ = 4 * T
    assert moved == sorted([
        ("all-gather", "u8", all_ * H), ("all-gather", "u8", all_ * H),  # x, dy
        ("all-gather", "f32", all_ * 1 * 4), ("all-gather", "f32", all_ * K * 4),  # scales of dy, weights
        ("all-gather", "s32", all_ * K * 4),  # experts
        ("all-to-all", "bf16", all_ * H * 2), ("all-to-all", "bf16", all_ * H * 2),  # y, dx
        ("all-to-all", "f32", all_ * K * 4),  # the gradient of the weights
    ])  # fmt: skip
    assert (said.strategy, said.experts, said.tokens, said.received) == ("all_gather", 2, T, all_)
    received = sum(size for _, _, size in moved) * 3 // 4  # the rest is the device's own
    assert sum(said.forward.values()) + sum(said.backward.values()) == received
    assert "forward pass receives tokens 2304 B, choices" in str(said)


def test_collectives_of_pieces(rng):
    """Of the forward pass the sums come back in pieces, and of the backward pass whole."""
    width, how = 4 * 128, recipe.DelayedScaling()
    x, w, dy = normal(rng, 4, S, width).astype(jnp.bfloat16), weights(rng, h=width), normal(rng, 4, S, width)
    mesh = jax.make_mesh((2,), ("ep",), axis_types=(AxisType.Auto,))
    with jax.set_mesh(mesh), global_shard_guard(MeshResource(ep_resource="ep")):
        say = lambda pieces: te.explain_moe(
            x, *w[:3], options=MoEOptions(RouterOptions(K), exchange=ExpertExchange(pieces=pieces)), recipe=how
        )
        step = jax.jit(partial(layer, how=how, exchange=ExpertExchange(pieces=4)))
        text = step.trace(x, w, metas(), dy.astype(jnp.bfloat16)).lower(lowering_platforms=("cuda",)).as_text()
        assert (said := say(4)).forward == say(1).forward and said.pieces == 4
        assert str(said).endswith("\nsums come back in 4 pieces: one travels while the next is multiplied")
        with pytest.raises(ValueError, match="pieces is 3, which does not divide 512 features in multiples of 128"):
            say(3)
        with pytest.raises(ValueError, match="a device has 4 experts; pass at most 256"):
            find_exchange(find_placement("", x, w[1][0], E, None, False), ExpertExchange(pieces=512), 4, 2**16, K, 4)
    sums = re.findall(r"stablehlo.all_to_all.* -> tensor<2x\d+x(\d+)xbf16>", text)
    assert sorted(map(int, sums)) == [128, 128, 128, 128, width]


def emulated_ragged(a, out, first, sends, at, gets, *, axis_name):
    """`jax.lax.ragged_all_to_all`, which XLA lacks for a CPU, of all that all devices have."""
    me, (a, first, sends, at) = (
        jax.lax.axis_index(axis_name),
        (jax.lax.all_gather(x, axis_name) for x in (a, first, sends, at)),
    )
    for sender in range(a.shape[0]):
        number = jnp.arange(out.shape[0]) - at[sender, me]
        is_sent = (number >= 0) & (number < jnp.minimum(sends[sender, me], gets[sender]))
        out = jnp.where(is_sent[:, None], a[sender][first[sender, me] + number], out)
    return out


def test_strategies_of_the_benchmark(rng, monkeypatch):
    """They bring the tokens and the sums that te_jax's own do, bit for bit."""
    monkeypatch.setattr(jax.lax, "ragged_all_to_all", emulated_ragged)
    for name, way in expert_strategies.WAYS.items():
        monkeypatch.setitem(STRATEGIES, name, way)
    x, experts = normal(rng, 4 * 6, 8), jnp.asarray(rng.integers(0, E, (4 * 6, K)), jnp.int32)

    def run(x, experts):
        def by(strategy):
            exchange = Exchange(("ep",), 4, ("ep",), 1, 2, E, strategy, 6, 4 * 6 * K)
            sent = plan(experts, exchange)
            here = dispatch(x, sent, exchange)
            return here, collect(here * jnp.sum(sent.experts + 1.3, 1, keepdims=True), sent, exchange)

        return [by(strategy) for strategy in ("all_gather", "ring", "all_to_all", "ragged")]

    mesh = jax.make_mesh((4,), ("ep",), axis_types=(AxisType.Auto,))
    with jax.set_mesh(mesh):
        gathered, ring, blocks, ragged = jax.jit(jax.shard_map(run, in_specs=P("ep"), out_specs=P("ep")))(x, experts)
    jax.tree.map(np.testing.assert_array_equal, (ring, ragged), (gathered, blocks))


@pytest.mark.parametrize("topk, name", [(2, "delayed"), (6, "block"), (2, None)])
def test_rows_that_others_read(topk, name, rng):
    """As after all_gather, but that sums of few choices are rounded once, not on each device."""
    x, w, dy = normal(rng, B, S, H).at[..., 0].set(1.0), weights(rng, SKEWED), normal(rng, B, S, H)
    how, roles = RECIPES[name] if name else None, dict(ep_resource="ep")
    run = lambda strategy: on_mesh(
        dict(ep=4),
        AxisType.Auto,
        roles,
        x,
        w,
        dy,
        tokens=("ep",),
        how=how,
        topk=topk,
        exchange=ExpertExchange(strategy),
    )
    close(run("peer_access"), run("all_gather"))


def test_memory_that_others_read_is_kept(rng):
    """In a recomputed forward pass too, whose y nobody wants. Under vmap, where rows are parts of an array, none is
    read."""
    x, w = normal(rng, B, S, WIDE).astype(jnp.bfloat16), weights(rng, h=WIDE)
    options = MoEOptions(RouterOptions(K), exchange=ExpertExchange("peer_access"))
    run = lambda x, w: moe(x, *w, options=options, recipe=RECIPES["current"])[0]
    loss = lambda x, w: jnp.sum(jax.checkpoint(run)(x, w).astype(jnp.float32))
    mesh = jax.make_mesh((4,), ("ep",), axis_types=(AxisType.Auto,))
    text = lambda f, *args: jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    with jax.set_mesh(mesh), global_shard_guard(MeshResource(ep_resource="ep")):
        recomputed, mapped = text(jax.grad(loss, (0, 1)), x, w), text(jax.vmap(run, (0, None)), x[None], w)
    read = re.findall(r"call @te_(?:permute_fp8|combine)\w*\((%\w+)#0, .*tensor<4x2xui32>", recomputed)
    kept = re.findall(r"call @te_keep\w*\(%[\w#]+, (%\w+)#0, ", recomputed)
    assert len(read) >= 2 and {*read} == {*kept} and "te_address" not in mapped


def test_places_that_lack(rng):
    """What finds no place in a block, or no row, is counted, and adds nothing."""
    x, w, dy = normal(rng, B, S, H).at[..., 0].set(1.0), weights(rng, SKEWED), normal(rng, B, S, H)
    whole, aux, _ = on_one_device(x, w, metas(), dy, how=None)
    for exchange in (ExpertExchange("all_to_all", block_factor=0.5), ExpertExchange(rows_factor=0.5)):
        options = dict(tokens=("ep",), how=None, exchange=exchange)
        y, got, _ = on_mesh(dict(ep=4), AxisType.Auto, dict(ep_resource="ep"), x, w, dy, **options)
        places = 4 * 6 if exchange.block_factor else 12  # of 12 tokens and 24 pairs of a device, on another one
        assert 0 < got.dropped.sum() and (got.counts == aux.counts).all()
        on_device = (got.counts - got.dropped).reshape(4, 2)
        assert (on_device.sum(1) <= (K * places if exchange.block_factor else 12 * 4 * K // 4 // 2)).all()
        assert np.isfinite(y).all() and not np.allclose(y, whole)


def test_cuda_lowering(rng):
    """A program for GPUs is made of it, whose attributes XLA takes."""
    x, w, dy = normal(rng, B, S, H).astype(jnp.bfloat16), weights(rng), normal(rng, B, S, H).astype(jnp.bfloat16)
    mesh = jax.make_mesh((4,), ("ep",), axis_types=(AxisType.Auto,))
    with jax.set_mesh(mesh), global_shard_guard(MeshResource(ep_resource="ep")):
        for how, exchange in ((recipe.DelayedScaling(), ExpertExchange()), (recipe.Float8BlockScaling(), BLOCKS)):
            traced = jax.jit(partial(layer, how=how, exchange=exchange)).trace(x, w, metas(), dy)
            assert "te_gemm_grouped" in traced.lower(lowering_platforms=("cuda",)).as_text()


# -- errors ----------------------------------------------------------------------------------------------------------


def test_experts_that_devices_do_not_divide(rng):
    mesh = jax.make_mesh((3,), ("ep",), axis_types=(AxisType.Auto,))
    args = normal(rng, 3, S, H), weights(rng), metas(), normal(rng, 3, S, H)
    with jax.set_mesh(mesh), global_shard_guard(MeshResource(ep_resource="ep")):
        with pytest.raises(
            ValueError, match="8 experts are divided among the 3 devices of mesh axis 'ep'; pass a number"
        ):
            jax.eval_shape(partial(layer, how=None), *args)


@pytest.mark.parametrize(
    "fields,text",
    [
        (dict(strategy="all_to_all"), "block_factor is None, and blocks need a size"),
        (dict(strategy="all_gather", block_factor=1.0), "which has no blocks, but block_factor is 1.0"),
        (dict(strategy="ring"), "strategy is 'ring'"),
        (dict(rows_factor=0.0), "rows_factor is 0.0"),
        (dict(pieces=0), "pieces is 0"),
    ],
)
def test_bad_exchange(fields, text):
    with pytest.raises(ValueError, match=text):
        ExpertExchange(**fields)
