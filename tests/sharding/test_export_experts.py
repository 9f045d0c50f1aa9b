"""`jax.export` of a layer whose experts devices divide."""

import jax
import jax.export
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import te_jax as te
from te_jax.layers import MoEOptions, moe
from te_jax.ops.router import RouterOptions

E, H, F = 4, 16, 16


def layer_on(kind: AxisType, rng):
    """(mesh, the jitted layer, its arguments on two devices)."""
    mesh = jax.make_mesh((2,), ("ep",), axis_types=(kind,))
    shapes = dict(x=(4, H), gate=(H, E), wi=(E, H, F), wo=(E, F, H))
    draw = {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    put = lambda name: jax.device_put(draw[name], NamedSharding(mesh, P() if name == "gate" else P("ep")))
    options = MoEOptions(RouterOptions(2), activations=("silu",))

    def layer(x, gate, wi, wo):
        with te.sharding.global_shard_guard(te.MeshResource(ep_resource="ep")):
            return moe(x, gate, wi, wo, options=options, recipe=te.recipe.Float8CurrentScaling())[0]

    return mesh, jax.jit(layer), [put(name) for name in shapes]


def test_on_explicit_axes(rng, on_host):
    mesh, layer, arguments = layer_on(AxisType.Explicit, rng)
    with jax.set_mesh(mesh):
        exported, want = jax.export.export(layer)(*arguments), layer(*arguments)
    assert exported.nr_devices == 2 and not exported.disabled_safety_checks
    got = jax.jit(exported.call)(*arguments)
    np.testing.assert_array_equal(got, want)
    assert got.addressable_data(0).shape == (2, H)


def test_auto_axes_are_refused(rng, on_host):
    """By jax, which has no form for what partitions an op."""
    mesh, layer, arguments = layer_on(AxisType.Auto, rng)
    with jax.set_mesh(mesh), pytest.raises(NotImplementedError, match="serialization of host_callbacks"):
        jax.export.export(layer)(*arguments)
