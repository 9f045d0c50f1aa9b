"""Current scaling on meshes of 8 devices: a tensor's amax is that of all of its shards, and of no other tensor."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sharded
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from layer_cases import close
from quick_init import quick_init
from recipe_cases import near, results

import te_jax as te
import te_jax.flax as te_flax
from te_jax.core.types import varying_axes
from te_jax.layers import dense, layernorm_mlp
from te_jax.recipe import Float8CurrentScaling

pytestmark = pytest.mark.usefixtures("on_host")

RECIPE = Float8CurrentScaling()
kinds = pytest.mark.parametrize("kind", sharded.KINDS)


def mesh_of(kind):
    return jax.make_mesh((4, 2), ("dp", "tp"), axis_types=(sharded.KINDS[kind],) * 2)


def uneven(rng, *shape):
    """Such that shards along any axis have amaxes of their own."""
    x = rng.standard_normal(shape).astype(np.float32)
    for axis, size in enumerate(shape):
        x = x * np.exp2(8 * np.arange(size, dtype=np.float32) / size).reshape(-1, *[1] * (len(shape) - 1 - axis))
    return jnp.asarray(x)


def kept(layer, *args):
    """What the forward pass leaves for the backward pass: FP8 operands, each with 1 / scale."""
    return jax.tree.leaves(jax.vjp(layer, *args)[1])


def inverse_scales(leaves):
    return [leaf for leaf in leaves if leaf.shape == ()]


LAYOUTS = {
    "data": (P("dp"), P()),
    "column": (P("dp"), P(None, "tp")),
    "row": (P("dp", "tp"), P("tp")),
    "fsdp": (P(("dp", "tp")), P("dp")),
}


@kinds
@pytest.mark.parametrize("specs", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("bad", [None, jnp.nan], ids=["finite", "nan"])
def test_dense(kind, specs, bad, rng):
    """Operands and scales are those of one device bit for bit, also where one shard has a NaN: each device then scales
    by 1. The gradient of y is sharded as y is."""
    x, w, mesh = uneven(rng, 16, 32), uneven(rng, 32, 64), mesh_of(kind)
    x = x if bad is None else x.at[15, 31].set(bad)
    layer = lambda x, w: dense(x, w, recipe=RECIPE)
    leaves, step = (jax.jit(functools.partial(fn, layer)) for fn in (kept, results))
    want, want_step = leaves(x, w), step(x, w)
    with jax.set_mesh(mesh):
        placed = [jax.device_put(np.asarray(a), NamedSharding(mesh, spec)) for a, spec in zip((x, w), specs)]
        got = leaves(*placed)
        got_step = results(layer, *placed) if bad is None else None
    assert sorted(str(leaf.dtype) for leaf in want) == ["float32"] * 2 + ["float8_e4m3fn"] * 2
    for a, b in zip(got, want):  # in f32, where numpy takes a NaN for a NaN
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))
    if bad is None:
        jax.tree.map(close, got_step, want_step)


@kinds
def test_layernorm_mlp(kind, rng):
    """Tensor parallel. The scales of x, wi and wo are those of one device; the activation is behind a product, whose
    sums another tiling may order otherwise."""
    x, gamma, beta, wi, wo = (uneven(rng, *shape) for shape in ((8, 4, 16), (16,), (16,), (16, 1, 32), (32, 16)))
    layer = lambda *args: layernorm_mlp(*args, recipe=RECIPE)
    mesh, args = mesh_of(kind), (x, gamma, beta, wi, wo)
    scales = lambda leaves: list(map(float, inverse_scales(leaves)))
    run = jax.jit(functools.partial(kept, layer))
    want, want_y = scales(run(*args)), jax.jit(layer)(*args)
    with jax.set_mesh(mesh):
        specs = P("dp"), P(), P(), P(None, None, "tp"), P("tp")
        placed = [jax.device_put(np.asarray(a), NamedSharding(mesh, spec)) for a, spec in zip(args, specs)]
        got, y = scales(run(*placed)), jax.jit(layer)(*placed)
    assert len(want) == 4  # of x, wi, the activation, wo
    np.testing.assert_array_equal(np.delete(got, 2), np.delete(want, 2))
    np.testing.assert_allclose(got[2], want[2], rtol=2.0**-20)
    near(y, want_y)


# -- shard_map -----------------------------------------------------------------------------------------------


def local_scales(recipe, x, w, specs, resource=None):
    """The scales of x and w on each of 4 x 2 devices, f32[4, 2, 2], and the axes of all maxima over devices."""
    mesh = mesh_of("auto")

    def scales(x, w):
        both = jnp.stack(inverse_scales(kept(lambda x, w: dense(x, w, recipe=recipe), x, w)))
        lacks = tuple(sorted({"dp", "tp"} - varying_axes(both)))
        return (lax.pcast(both, lacks, to="varying") if lacks else both)[None, None]

    with jax.set_mesh(mesh), te.autocast(mesh_resource=resource):
        run = jax.shard_map(scales, mesh=mesh, in_specs=specs, out_specs=P("dp", "tp"))
        maxima = re.findall(r"pmax\w*\[.*?axes=\((.*?)\)", str(jax.make_jaxpr(run)(x, w)), re.S)
        return 1 / np.asarray(jax.jit(run)(x, w)), [axes.rstrip(",").replace("'", "") for axes in maxima]


def scale_of(shards, axes):
    """448 / amax over `axes`, f32 with a rounding or two."""
    return 448 / np.abs(np.asarray(shards)).max(axes)


def test_all_shards_of_a_tensor_and_nothing_else(rng):
    """x lies on dp, w on tp: the amax of x crosses only dp, the amax of w only tp."""
    x, w = uneven(rng, 8, 16), uneven(rng, 16, 32)
    got, maxima = local_scales(RECIPE, x, w, (P("dp"), P(None, "tp")))
    np.testing.assert_allclose(got[..., 0], scale_of(x, None), rtol=2.0**-22)
    np.testing.assert_allclose(got[..., 1], scale_of(w, None), rtol=2.0**-22)
    assert maxima == ["dp", "tp"]
    assert local_scales(RECIPE, x, w, (P(), P()))[1] == []


def test_each_device_for_itself(rng):
    x, w = uneven(rng, 8, 16), uneven(rng, 16, 32)
    got, maxima = local_scales(Float8CurrentScaling(reduce_amax=False), x, w, (P("dp"), P(None, "tp")))
    own = scale_of(x.reshape(4, 2, 16), (1, 2))[:, None], scale_of(w.reshape(16, 2, 16), (0, 2))
    np.testing.assert_allclose(got, np.stack(np.broadcast_arrays(*own), -1), rtol=2.0**-22)
    assert maxima == []


def test_stages_of_a_pipeline(rng):
    """Their weights are tensors of their own, each sharded over tp."""
    x, w = uneven(rng, 8, 16), uneven(rng, 4 * 16, 32)
    got, maxima = local_scales(RECIPE, x, w, (P(), P("dp", "tp")), te.MeshResource(pp_resource="dp"))
    own = scale_of(w.reshape(4, 16, 32), (1, 2))[:, None]
    np.testing.assert_allclose(got[..., 1], np.broadcast_to(own, (4, 2)), rtol=2.0**-22)
    assert maxima == ["tp"]


def test_gradients(rng):
    """A step inside of shard_map: that of one device. The gradient of y has one scale for all of its shards."""
    x, w, dy = uneven(rng, 8, 16), uneven(rng, 16, 32), uneven(rng, 8, 32)
    step = lambda x, w, dy: jax.vjp(lambda x, w: dense(x, w, recipe=RECIPE), x, w)[1](dy)
    mesh, specs = mesh_of("auto"), (P("dp"), P(None, "tp"), P("dp", "tp"))
    got = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=specs[:2]))(x, w, dy)
    jax.tree.map(close, got, step(x, w, dy))


def test_without_vma_the_shards_are_not_known(rng):
    x, w = uneven(rng, 8, 16), uneven(rng, 16, 32)
    layer = lambda x, w: dense(x, w, recipe=RECIPE)
    run = jax.shard_map(layer, mesh=mesh_of("auto"), in_specs=(P("dp"), P()), out_specs=P("dp"), check_vma=False)
    with pytest.raises(ValueError, match=r"need shard_map\(check_vma=True\)"):
        run(x, w)


def test_outside_of_jit(rng):
    """`shard_map` that nobody has compiled, which knows no symbolic zeros: a module with state, and its gradients."""
    x = uneven(rng, 8, 16)
    with te.autocast(True, te.recipe.DelayedScaling()):
        module = te_flax.DenseGeneral(32)
        variables = quick_init(module.init)(jax.random.key(0), x)
        step = jax.grad(lambda variables, x: module.apply(variables, x).sum())
        specs = dict(in_specs=(P(), P("dp")), out_specs=P())
        run = jax.shard_map(step, mesh=jax.make_mesh((2,), ("dp",), axis_types=(jax.sharding.AxisType.Auto,)), **specs)
        jax.tree.map(np.testing.assert_array_equal, run(variables, x), jax.jit(run)(variables, x))
