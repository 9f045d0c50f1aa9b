"""A mixture of experts on one device and on meshes, with all that it returns."""

from functools import partial

import jax
import jax.numpy as jnp
import moe_oracle as oracle
import numpy as np
from arrays import on_device
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from te_jax import recipe
from te_jax.layers import ExpertExchange, MoEOptions, moe
from te_jax.ops.formats import ROWS_128
from te_jax.ops.router import RouterOptions
from te_jax.sharding import MeshResource, global_shard_guard
from te_jax.state import fp8

B, S, H, F, E, K = 8, 6, 64, 128, 8, 2
DEFAULT = ExpertExchange()
BLOCKS = ExpertExchange("all_to_all", block_factor=100.0)  # for all tokens


def normal(rng, *shape):
    return on_device(rng.standard_normal(shape), jnp.float32)


def weights(rng, gate=None, h=H):
    """gate_kernel, wi, wo, wi_bias, wo_bias. gate: what is added to the logits of the experts, x having 1 in front."""
    scaled = lambda shape: 0.2 * normal(rng, *shape)
    made = jax.tree.map(scaled, oracle.shapes(E, h, F), is_leaf=lambda n: isinstance(n[0], int))
    return made if gate is None else (made[0].at[0].set(jnp.asarray(gate, jnp.float32)), *made[1:])


def metas():
    of = lambda scale, *lead: fp8.TensorMeta(jnp.full(lead, scale, jnp.float32), jnp.zeros(lead))
    first = fp8.DenseMetas(of(8.0), of(64.0, E), of(64.0, E))
    return first, fp8.DenseMetas(of(16.0, E), of(64.0, E), of(64.0))


def layer(x, weights, metas, dy, *, how, exchange=DEFAULT, capacity_factor=None, topk=K, **more):
    """y, what the layer says, and all cotangents."""
    options = MoEOptions(RouterOptions(topk), exchange=exchange, capacity_factor=capacity_factor)
    stateful = how is not None and how.has_state

    def run(x, weights, metas):
        return moe(x, *weights, options=options, recipe=how, metas=metas if stateful else None, **more)

    y, vjp, aux = jax.vjp(run, x, weights, metas, has_aux=True)
    return y, aux, vjp(dy)


# Tests of the same operands share its programs.
on_one_device = jax.jit(layer, static_argnames=("how", "exchange", "capacity_factor", "topk"))


def spec_of_weights(fsdp=None, tp=None):
    return P(), (P("ep", fsdp, tp),) * 2, P("ep", tp, fsdp), (P("ep", tp),) * 2, P("ep")


def of_specs(f, specs):
    return jax.tree.map(f, specs, is_leaf=lambda spec: isinstance(spec, P))


def on_mesh(sizes, kind, roles, x, weights, dy, *, tokens, **options):
    """`layer` on a mesh, jitted. tokens: the mesh axes of the first axis."""
    mesh = jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(kind,) * len(sizes))
    put = lambda a, spec: jax.device_put(a, NamedSharding(mesh, spec))
    axis = lambda name: name if name in sizes else None
    specs = spec_of_weights(axis("fsdp"), axis("tp"))
    if "ep" not in sizes:
        specs = of_specs(lambda spec: P("dp", *spec[1:]) if spec else spec, specs)
    with jax.set_mesh(mesh), global_shard_guard(MeshResource(**roles)):
        placed = put(x, P(tokens)), jax.tree.map(put, weights, specs), metas(), put(dy, P(tokens))
        return jax.jit(partial(layer, **options))(*placed)


def close(got, want, rtol=1e-5):
    for (path, a), b in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        np.testing.assert_allclose(
            a, b, rtol=0, atol=rtol * np.abs(b).max(initial=0), err_msg=jax.tree_util.keystr(path)
        )


def rounded(dy):
    """dy as it arrives."""
    got = ROWS_128.write(dy, dy.ndim - 1, jnp.float8_e4m3fn, power_2=True, epsilon=0.0)
    return ROWS_128.read(got["data"], got["scale_inv"], 1)


RECIPES = {
    "delayed": recipe.DelayedScaling(reduce_amax=False),  # which is for the user's own shard_map
    "current": recipe.Float8CurrentScaling(),
    "block": recipe.Float8BlockScaling(),
}
