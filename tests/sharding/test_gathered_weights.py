"""`MeshResource.keep_gathered_weights`: one all-gather of each weight in FP8, and the bits of two."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxprs import equations
from sharded import KINDS, RECIPE, SMALL, check_same_bits, on_mesh

import te_jax as te
import te_jax.flax as te_flax
from te_jax import recipe
from te_jax.checkpoint_policies import GEMM, KERNEL, QUANTIZED, save
from te_jax.layers import dense, layernorm_mlp, quantize_kernel
from te_jax.sharding import collectives, global_shard_guard

pytestmark = pytest.mark.usefixtures("on_host")

CURRENT, BLOCKS, MX = recipe.Float8CurrentScaling(), recipe.Float8BlockScaling(), recipe.MXFP8BlockScaling()
WEIGHTS = "all-gather", "f8e4m3fn", "fsdp"
BOTH = [te.MeshResource(fsdp_resource="fsdp", tp_resource="tp", keep_gathered_weights=keep) for keep in (False, True)]


def mesh_of(kind, **sizes):
    sizes = sizes or dict(fsdp=2, tp=2)
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(kind,) * len(sizes))


def draw(mesh, seed, shape, *spec):
    a = np.random.default_rng(seed).standard_normal(shape).astype(jnp.bfloat16)
    return jax.device_put(a, NamedSharding(mesh, P(*spec)))


def run_both(mesh, fn, *args):
    """[(results, {(kind, type, axes): (number, bytes)})] of `fn` without and with what is tested."""
    found = []
    for resource in BOTH:
        with jax.set_mesh(mesh), global_shard_guard(resource):
            program, crossing = collectives.compiled(fn(), *args, mesh=mesh)
        found.append((program(*args), collectives.table(crossing, 0)))
    return found


def check_halved(found, *gathers):
    """The same bits, and half as many of these gathers; what else crosses is as it was."""
    (want, before), (got, after) = found
    check_same_bits(got, want)
    assert after == before | {key: (before[key][0] // 2, before[key][1] // 2) for key in gathers}


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer(kind):
    """Projections of attention and an MLP, under data, sequence and fully sharded data parallelism."""
    where = "layer", "dp-fsdp-tp-sp", kind, RECIPE, jnp.bfloat16
    each = on_mesh(*where), on_mesh(*where, keep_gathered_weights=True)
    check_halved([(results, collectives.table(found, SMALL)) for results, found in each], WEIGHTS)
    assert sum(c.count for c in each[1][1] if (c.kind, c.dtype, *c.axes) == WEIGHTS) == 4


def test_blocks_in_a_scan_with_remat():
    """What KERNEL names is gathered; its numbers are up to 448, and jax would round what a forward pass reads of it."""
    h, f, depth, mesh = 256, 512, 2, mesh_of(AxisType.Explicit)
    wi, wo = draw(mesh, 1, (depth, h, 1, f), None, "fsdp", None, "tp"), draw(mesh, 2, (depth, f, h), None, "tp", "fsdp")
    args = draw(mesh, 3, (4, 8, h), "fsdp"), (wi, wo)

    def loss(x, weights):
        gamma = jnp.ones(h, x.dtype)
        mlp = lambda x, w: (layernorm_mlp(x, gamma, None, *w, norm="rmsnorm", residual=True, recipe=BLOCKS), None)
        layer = jax.checkpoint(mlp, policy=save(GEMM, KERNEL, QUANTIZED))
        return jnp.mean(jax.lax.scan(layer, x, weights)[0].astype(jnp.float32) ** 2)

    found = run_both(mesh, lambda: jax.jit(jax.value_and_grad(loss, (0, 1))), *args)
    check_halved(found, WEIGHTS, ("all-gather", "f32", "fsdp"))
    assert found[1][1][WEIGHTS][0] == 2 and all(np.isfinite(np.float32(a)).all() for a in jax.tree.leaves(found[1][0]))


@pytest.mark.parametrize("gradients", [False, True])
def test_weights_that_are_quantized_before(gradients):
    """With one layout, as a parameter in FP8, and with two; the weight is not differentiated, as with LoRA."""
    mesh = mesh_of(AxisType.Explicit)
    x, w = draw(mesh, 0, (8, 32), "fsdp"), draw(mesh, 1, (32, 64), "fsdp", "tp")

    def loss(x, w):
        held = quantize_kernel(w, recipe=CURRENT, gradients=gradients)
        return jnp.sum(dense(x, held, recipe=CURRENT).astype(jnp.float32) ** 2)

    check_halved(run_both(mesh, lambda: jax.jit(jax.grad(loss)), x, w), WEIGHTS)


@pytest.mark.parametrize("kind", list(KINDS.values()), ids=str)
def test_explained(kind):
    """The one gather is of the forward pass."""
    mesh = mesh_of(kind)
    x, w = draw(mesh, 0, (8, 64), "fsdp"), draw(mesh, 1, (64, 64), "fsdp", "tp")
    layer = te_flax.DenseGeneral(64, kernel_axes=("nvte_w_fsdp", "nvte_w_tp"), use_bias=False)
    with jax.set_mesh(mesh), te.autocast(recipe=CURRENT, mesh_resource=BOTH[1]):
        explained = te.explain_sharding(layer, x, variables={"params": {"kernel": w}})
    (one,) = {c for c in explained.crossings if (c.kind, c.dtype, *c.axes) == WEIGHTS}
    assert (one.times, one.bytes, one.is_backward) == (1, 64 * 64 // 2, False)


def operations(mesh, form, differentiated=True, shards=None):
    """The equations of a dense layer and its gradient, without and with what is tested."""
    run = lambda x, w: dense(x, w, recipe=form)
    run = run if shards is None else jax.shard_map(run, in_specs=shards, out_specs=shards[0], axis_names={"fsdp"})
    for resource in BOTH:
        loss = lambda x, w: jnp.sum(run(x, w).astype(jnp.float32))
        loss = jax.grad(loss, (0, 1)) if differentiated else loss
        with jax.set_mesh(mesh), global_shard_guard(resource):
            jaxpr = jax.make_jaxpr(loss)(draw(mesh, 0, (8, 64), "fsdp"), draw(mesh, 1, (64, 64), "fsdp", "tp")).jaxpr
        yield [(e.primitive.name, *(v.aval.str_short() for v in e.outvars)) for e in equations(jaxpr)]


def test_where_nothing_is_to_be_kept():
    """On one device of fsdp, forwards only, and in a region that cuts arrays along fsdp itself."""
    one, two = mesh_of(AxisType.Auto, fsdp=1, tp=2), mesh_of(AxisType.Auto)
    cases = operations(one, CURRENT), operations(two, CURRENT, False), operations(two, CURRENT, True, (P("fsdp"), P()))
    for before, after in cases:
        assert before == after
    before, after = operations(two, CURRENT)
    assert before != after


def test_layouts_with_scales_of_their_own():
    with pytest.warns(UserWarning, match="keep_gathered_weights is True, but MXFP8BlockScaling's weights .*; leave it"):
        before, after = operations(mesh_of(AxisType.Auto), MX)
    assert before == after


def test_what_it_may_be():
    with pytest.raises(ValueError, match="MeshResource: keep_gathered_weights is True, but fsdp_resource None"):
        te.MeshResource("dp", keep_gathered_weights=True)
    with pytest.raises(TypeError, match="MeshResource: keep_gathered_weights is 1"):
        te.MeshResource(fsdp_resource="fsdp", keep_gathered_weights=1)
