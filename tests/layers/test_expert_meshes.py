"""Experts on meshes of other axes: stages of pipelines, devices that have only tokens of their own, quantized kernels,
sums of gradients, probes. The numbers are as on one device, as `test_expert_devices` says."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from expert_cases import RECIPES, B, E, F, H, S, close, layer, metas, normal, rounded, spec_of_weights, weights
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import te_jax as te
from te_jax import checkpoint_policies
from te_jax.layers import ExpertExchange, MoEOptions, QuantizedKernel, moe, quantize_experts
from te_jax.layers.tensor import Accumulator, Fp8Tensor
from te_jax.ops.router import RouterOptions
from te_jax.sharding import MeshResource, collectives, global_shard_guard
from te_jax.state import fp8

pytestmark = pytest.mark.usefixtures("on_host")

# -- inside a jax.shard_map ------------------------------------------------------------------------------------------


def staged(kind, x, w, dy, function=layer, **options):
    """What `function` gives each of two stages, whose weights are w and 1.5 w, in a `jax.shard_map` over only "pp"."""
    mesh = jax.make_mesh((2, 2, 2), ("pp", "dp", "ep"), axis_types=(AxisType.Auto,) * 3)
    tokens, of_metas = P(("dp", "ep")), jax.tree.map(lambda _: P(), metas())
    run = partial(function, **options)
    if kind == "Explicit":
        run = jax.sharding.explicit_axes(
            run, axes=("dp", "ep"), in_sharding=(tokens, spec_of_weights(), of_metas, tokens)
        )

    def stage(*args):
        return jax.tree.map(lambda a: a[None], run(*jax.tree.map(lambda a: a[0], args)))

    both = lambda tree, by=1: jax.tree.map(lambda a: np.stack([a, by * np.asarray(a)]), tree)
    with jax.set_mesh(mesh), global_shard_guard(MeshResource("dp", pp_resource="pp", ep_resource="ep")):
        stages = jax.shard_map(stage, in_specs=P("pp"), out_specs=P("pp"), axis_names={"pp"})
        got = jax.jit(stages)(both(x), both(w, 1.5), both(metas()), both(dy))
    return [jax.tree.map(lambda a, i=i: np.asarray(a)[i], got) for i in range(2)]


@pytest.mark.parametrize("kind,name", [("Auto", "delayed"), ("Explicit", "block")])
def test_stage_of_a_pipeline(kind, name, rng):
    """The other axes are left to the layer, on Auto and Explicit meshes; each stage has FP8 state of its own."""
    x, w, dy = normal(rng, B, S, H), weights(rng), normal(rng, B, S, H)
    one = jax.jit(partial(layer, how=RECIPES[name]))
    got = staged(kind, x, w, dy, how=RECIPES[name])
    for (y, aux, (dx, (_, *of_experts), dmetas)), by in zip(got, (1, 1.5)):
        y1, aux1, (dx1, (_, *of_experts1), dmetas1) = one(
            x, jax.tree.map(lambda a, by=by: by * np.asarray(a), w), metas(), rounded(dy)
        )
        close((y, aux, dx, of_experts[1], dmetas), (y1, aux1, dx1, of_experts1[1], dmetas1))
        close(of_experts[0], of_experts1[0], 2.0**-4 if name == "block" else 1e-5)


def test_remat_of_a_stage(rng):
    """Whatever a policy keeps, the numbers are the same."""

    def run(x, w, metas, dy):
        def of_x(x, w):
            return jnp.tanh(moe(x, *w, options=MoEOptions(RouterOptions(2)))[0])

        policy = checkpoint_policies.save(checkpoint_policies.GEMM, checkpoint_policies.QUANTIZED)
        pulls = [jax.vjp(f, x, w)[1] for f in (of_x, jax.checkpoint(of_x, policy=policy))]
        return [pull(dy) for pull in pulls]

    for got, want in staged("Auto", normal(rng, B, S, H), weights(rng), normal(rng, B, S, H), run):
        close(got, want)


@partial(jax.jit, static_argnames=("axes", "per_sequence_loss", "exchange"))
def routed(router, w, x, dy=None, axes=(), **more):
    """MoEAux, and the gradients of router and bias, of both losses, and of the mean over `axes` of y dy."""

    def loss(router):
        options = MoEOptions(RouterOptions(2), **more)
        y, aux = moe(x, router[0], *w, options=options, expert_bias=router[1])
        mean = 0 if dy is None else jnp.mean(y * dy)
        return 0.3 * aux.balancing_loss + 0.2 * aux.z_loss + (jax.lax.pmean(mean, axes) if axes else mean), aux

    grads, aux = jax.grad(loss, has_aux=True)(router)
    return aux, grads


@pytest.mark.parametrize("case", ["ep", "dp", "cp", "pp"])
def test_statistics_are_of_the_batch(case, rng):
    """Where all axes are manual, counts, losses, and what router and bias get of them, are one device's, and so the
    same on all that share the batch. Stages share none."""
    x, (gate, *w), dy = normal(rng, B, S, H), weights(rng), normal(rng, B, S, H) if case == "dp" else None
    routers = [(by * gate, 0.1 * by * normal(rng, E)) for by in ((1, 2) if case == "pp" else (1,))]
    options = dict(per_sequence_loss=case == "cp")
    exchange = ExpertExchange(rows_factor=0.5 if case == "ep" else None)
    sizes, of_stages = {case: 2, "ep": 2}, P("pp" if case == "pp" else None)
    mesh = jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))
    tokens = {"dp": P(("dp", "ep")), "cp": P("ep", "cp")}.get(case, P("ep"))

    def part(routers, *rest):
        of_stage = jax.tree.map(lambda a: a[0], routers)
        axes = tuple(axis for axis in sizes if axis != "pp")
        return jax.tree.map(lambda a: a[None], routed(of_stage, *rest, axes=axes, exchange=exchange, **options))

    with jax.set_mesh(mesh), global_shard_guard(MeshResource(**{f"{axis}_resource": axis for axis in sizes})):
        shards = jax.shard_map(
            part, in_specs=(of_stages, list(spec_of_weights()[1:]), tokens, tokens), out_specs=of_stages
        )
        got = jax.jit(shards)(jax.tree.map(lambda *a: jnp.stack(a), *routers), w, x, dy)
    for i, router in enumerate(routers):
        (aux, grads), (want, want_grads) = jax.tree.map(lambda a, i=i: a[i], got), routed(router, w, x, dy, **options)
        close((aux._replace(dropped=want.dropped), grads), (want, want_grads))
        of_device = want.counts.reshape(2, -1).sum(-1)
        lost = jnp.maximum(of_device - B * S // 2, 0) if case == "ep" else 0  # half of the mean has rows
        assert (aux.dropped.reshape(2, -1).sum(-1) == lost).all()


# -- tokens of a device only -----------------------------------------------------------------------------------------


def test_tokens_stay_where_they_are(rng):
    """Without an axis of experts a device works on its own tokens: only sums cross; the numbers are one device's."""
    x, w, dy, how = normal(rng, B, S, H), weights(rng), normal(rng, B, S, H), RECIPES["delayed"]
    want = jax.jit(partial(layer, how=how))(x, w, metas(), dy)
    mesh = jax.make_mesh((4, 2), ("dp", "tp"), axis_types=(AxisType.Auto,) * 2)
    specs = P("dp"), jax.tree.map(lambda spec: P(None, *spec[1:]), spec_of_weights(tp="tp")), P(), P("dp")
    with jax.set_mesh(mesh), global_shard_guard(MeshResource("dp", "tp")):
        run = jax.jit(partial(layer, how=how), in_shardings=specs)
        program, found = collectives.compiled(run, x, w, metas(), dy, mesh=mesh)
        said = te.explain_moe(x, w[0], w[1], w[2], options=MoEOptions(RouterOptions(2)), recipe=how)
    placed, _ = jax.tree.map(jax.device_put, ((x, w, metas(), dy), {}), program.input_shardings)
    close(program(*placed), want)
    assert {c.kind for c in found if c.bytes >= 4 * B * S} == {"all-reduce"}
    assert (said.strategy, said.tokens, said.token_axes, said.hidden_axes) == ("none", B * S // 4, ("dp",), ("tp",))


# -- weights that fsdp divides ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind,name", [("Auto", "delayed"), ("Explicit", "block")])
def test_kernels_cross_in_fp8(kind, name, rng):
    """Each device quantizes its part of them; one layout crosses, a byte for a number, and the numbers are one
    device's."""
    how, wide = RECIPES[name], 2 * 128
    x, w, dy = normal(rng, B, S, wide), weights(rng, h=wide), normal(rng, B, S, wide)
    y1, aux1, (dx1, (_, *of_experts1), dmetas1) = jax.jit(partial(layer, how=how))(x, w, metas(), rounded(dy))
    mesh = jax.make_mesh((2, 2), ("fsdp", "ep"), axis_types=(getattr(AxisType, kind),) * 2)
    put = lambda a, spec: jax.device_put(a, NamedSharding(mesh, spec))
    tokens, resource = P(("fsdp", "ep")), MeshResource(fsdp_resource="fsdp", ep_resource="ep")
    with jax.set_mesh(mesh), global_shard_guard(resource):
        args = put(x, tokens), jax.tree.map(put, w, spec_of_weights("fsdp")), metas(), put(dy, tokens)
        program, found = collectives.compiled(partial(layer, how=how), *args, mesh=mesh)
        y, aux, (dx, (_, *of_experts), dmetas) = program(*args)
    close((y, aux, dx, of_experts[1], dmetas), (y1, aux1, dx1, of_experts1[1], dmetas1))
    close(of_experts[0], of_experts1[0], 2.0**-4 if name == "block" else 1e-5)
    gathered = [c for c in found if c.kind == "all-gather" and c.axes == ("fsdp",) and c.bytes >= wide * F]
    held = E // 2 * wide * F
    assert sorted((c.dtype, c.bytes) for c in gathered) == [("f8e4m3fn", held), ("f8e4m3fn", 2 * held)], gathered


def test_kernels_that_a_policy_keeps(rng):
    """What fsdp divides is named where it lies in FP8, and read by both passes: numbers up to 448, which jax's rounding
    of what a policy keeps would make NaN."""
    mesh, how = jax.make_mesh((2, 2), ("fsdp", "ep"), axis_types=(AxisType.Explicit,) * 2), RECIPES["current"]
    put = lambda a, spec: jax.device_put(np.asarray(a), NamedSharding(mesh, spec))
    policy = checkpoint_policies.save(checkpoint_policies.KERNEL)

    def losses(x, w):
        run = lambda x, w: moe(x, *w, options=MoEOptions(RouterOptions(2)), recipe=how)[0]
        return [jnp.sum(f(x, w) ** 2) for f in (run, jax.checkpoint(run, policy=policy))]

    with jax.set_mesh(mesh), global_shard_guard(MeshResource(fsdp_resource="fsdp", ep_resource="ep")):
        args = put(normal(rng, B, S, H), P(("fsdp", "ep"))), jax.tree.map(put, weights(rng), spec_of_weights("fsdp"))
        want, got = (jax.grad(lambda *args, i=i: losses(*args)[i], (0, 1)) for i in range(2))
        want, got = jax.jit(lambda *args: (want(*args), got(*args)))(*args)
    close(got, want)


# -- weights with more than an array ---------------------------------------------------------------------------------


def test_quantized_kernels_over_hidden_features(rng):
    """A scale for each expert serves all parts of its hidden features."""
    how, x, (gate, wi, wo, *_) = RECIPES["current"], normal(rng, B, S, H), weights(rng)
    quantized = [quantize_experts(kernel, recipe=how, gradients=False) for kernel in (wi, wo)]
    run = jax.jit(lambda x: moe(x, gate, *quantized, options=MoEOptions(RouterOptions(2)), recipe=how)[0])
    want = run(x)
    mesh = jax.make_mesh((2, 2), ("ep", "tp"), axis_types=(AxisType.Auto,) * 2)
    with jax.set_mesh(mesh), global_shard_guard(MeshResource(ep_resource="ep", tp_resource="tp")):
        program = run.lower(x).compile()
        close(run(x), want)
    assert "f8e4m3fn[4,2,64,64]" in program.as_text(), "half of the experts, and of F"


def test_sums_of_gradients(rng):
    """What was summed before is added once, though devices share the kernels."""
    how, x, w, dy = RECIPES["current"], normal(rng, B, S, H), weights(rng), normal(rng, B, S, H)
    (gate, wi, wo, *_), zero = w, jnp.zeros(())
    kernel = lambda wide, onto: QuantizedKernel(Fp8Tensor(wide=wide, onto=onto), 1, wide[0].ndim - 2, jnp.float32)
    sums = jax.tree.map(lambda a: Accumulator(3 * a, zero), (wi, wo))

    def run(wi, wo, sums):
        of_wi = replace(kernel(wi, sums[0]), features=2)
        of_wo = kernel((wo,), None).with_wide(wo).with_accumulator(sums[1])
        return moe(x, gate, of_wi, of_wo, options=MoEOptions(RouterOptions(2)), recipe=how)[0]

    plain = lambda wi, wo: moe(x, gate, wi, wo, options=MoEOptions(RouterOptions(2)), recipe=how)[0]
    both = lambda dy: (jax.vjp(run, wi, wo, sums)[1](dy)[2], jax.vjp(plain, wi, wo)[1](dy))
    mesh = jax.make_mesh((2, 2), ("dp", "ep"), axis_types=(AxisType.Auto,) * 2)
    with jax.set_mesh(mesh), global_shard_guard(MeshResource("dp", ep_resource="ep")):
        got, grads = jax.jit(both)(dy)
    want = jax.tree.map(lambda a, g: Accumulator(3 * a + g, zero + 1), (wi, wo), grads)
    close(got, want)


@pytest.mark.parametrize("role", ["dp_resource", "fsdp_resource"])
def test_probes(role, rng):
    """What is said of probed tensors is as on one device; each element counts once, wherever its expert is."""
    x, w, dy = normal(rng, B, S, H), weights(rng), rounded(normal(rng, B, S, H))
    is_meta = lambda a: isinstance(a, fp8.TensorMeta)
    of_probe = lambda meta: fp8.TensorMeta(16 * meta.scale, jnp.zeros((*meta.scale.shape, 4)))  # so that some saturate
    probed = jax.tree.map(of_probe, metas(), is_leaf=is_meta)
    run = jax.jit(lambda: layer(x, w, probed, dy, how=RECIPES["delayed"])[2][2])
    want = run()
    mesh = jax.make_mesh((2, 2), ("dp", "ep"), axis_types=(AxisType.Auto,) * 2)
    with jax.set_mesh(mesh), global_shard_guard(MeshResource(**{role: "dp"}, ep_resource="ep")):
        got = run()
    told = lambda metas: [list(jnp.moveaxis(m.amax, -1, 0)) for m in jax.tree.leaves(metas, is_leaf=is_meta)]
    close(told(got), told(want))  # each number within a part of itself
