"""Experts that devices divide: the numbers are as on one device, and tokens cross in 8 bits.

In f32 sums have another order: 1e-5 of the largest number, of at most 200 terms of its size. In FP8 the forward pass
multiplies the same bits. The gradient crosses as te_jax.layers.experts.wire says, so one device must get the same from
the gradient that is rounded so.
"""

from functools import partial

import collectives
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
    rounded,
    spec_of_weights,
    weights,
)
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import te_jax as te
from te_jax import recipe
from te_jax.layers import ExpertExchange, MoEOptions
from te_jax.ops.router import RouterOptions
from te_jax.sharding import MeshResource, global_shard_guard

PLACES = {  # sizes of the mesh axes, their kind, MeshResource, tokens, exchange
    "ep": (dict(ep=4), AxisType.Auto, dict(ep_resource="ep"), ("ep",), ExpertExchange()),
    "ep-dp, blocks": (
        dict(dp=2, ep=4), AxisType.Explicit, dict(dp_resource="dp", ep_resource="ep"), ("dp", "ep"), BLOCKS
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
    x, w, dy = normal(rng, B, S, H).at[..., 0].set(1.0), weights(rng, SKEWED), normal(rng, B, S, H)
    want = jax.jit(partial(layer, how=None))(x, w, metas(), dy)
    close(on_mesh(sizes, kind, roles, x, w, dy, tokens=tokens, how=None, exchange=exchange), want)


@pytest.mark.parametrize("shape", [(3, 5), (7,), (4, 0)])
def test_tokens_that_devices_do_not_divide(shape, rng):
    """They are whole on the devices of experts, as of a batch of 3 on 4 of them."""
    x, w, dy = normal(rng, *shape, H), weights(rng), normal(rng, *shape, H)
    want = jax.jit(partial(layer, how=None))(x, w, metas(), dy)
    roles = dict(dp_resource="dp", ep_resource="ep")
    close(on_mesh(dict(dp=2, ep=2), AxisType.Auto, roles, x, w, dy, tokens=(), how=None), want)


@pytest.mark.parametrize("name", RECIPES)
def test_fp8(name, rng):
    """With one scale for a tensor all is as on one device, given the gradient as it arrives. In blocks wgrad's
    columns of x are rounded twice: by 2**-4 of a number of x."""
    x, w, dy = normal(rng, B, S, H), weights(rng), normal(rng, B, S, H)
    want = jax.jit(partial(layer, how=RECIPES[name]))(x, w, metas(), rounded(dy))
    roles, tokens = dict(dp_resource="dp", ep_resource="ep"), ("dp", "ep")
    options = dict(tokens=tokens, how=RECIPES[name], exchange=BLOCKS if name == "current" else ExpertExchange())
    got = on_mesh(dict(dp=2, ep=2), AxisType.Auto, roles, x, w, dy, **options)
    # dy of the router's part and of biases is not what crossed.
    (y, aux, (dx, (_, *of_experts), dmetas)), (y1, aux1, (dx1, (_, *of_experts1), dmetas1)) = got, want
    close((y, aux, dx, of_experts[1], dmetas), (y1, aux1, dx1, of_experts1[1], dmetas1))
    close(of_experts[0], of_experts1[0], 2.0**-4 if name == "block" else 1e-5)


def test_capacity_of_tokens_that_are_whole(rng):
    """A token without a row enters no amax, and each that has one on some device enters all."""
    x, w = normal(rng, 3, 5, H).at[..., 0].set(1.0), weights(rng, SKEWED)
    options = dict(how=recipe.Float8CurrentScaling(), capacity_factor=0.5)
    dy = rounded(normal(rng, 3, 5, H))
    want = jax.jit(partial(layer, **options))(x, w, metas(), dy)
    got = on_mesh(dict(ep=4), AxisType.Auto, dict(ep_resource="ep"), x, w, dy, tokens=(), **options)
    close(got[:2], want[:2])


def test_sequence_and_features_on_one_axis(rng):
    """Tokens cross it, too: each of its devices has a part of F."""
    x, w, dy = normal(rng, B, S, H), weights(rng), normal(rng, B, S, H)
    want = jax.jit(partial(layer, how=None))(x, w, metas(), dy)
    roles = dict(ep_resource="ep", tpsp_resource="tp")
    options = dict(tokens=("ep",), token_spec=P("ep", "tp"), exchange=BLOCKS, how=None)
    close(on_mesh(dict(ep=2, tp=2), AxisType.Auto, roles, x, w, dy, **options), want)


def test_inside_shard_map(rng):
    """As in a pipeline's stages: a device passes its own experts, and has the numbers of a stage by itself."""
    x, w, dy = normal(rng, B, S, H), weights(rng), normal(rng, B, S, H)
    y, _, (dx, dw, _) = jax.jit(partial(layer, how=None))(x, w, metas(), dy)
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


def test_places_that_lack(rng):
    """What finds no place in a block, or no row, is counted, and adds nothing."""
    x, w, dy = normal(rng, B, S, H).at[..., 0].set(1.0), weights(rng, SKEWED), normal(rng, B, S, H)
    whole, aux, _ = jax.jit(partial(layer, how=None))(x, w, metas(), dy)
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
    ],
)
def test_bad_exchange(fields, text):
    with pytest.raises(ValueError, match=text):
        ExpertExchange(**fields)
