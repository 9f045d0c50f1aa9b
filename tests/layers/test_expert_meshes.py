"""Experts on meshes of other axes: stages of pipelines, devices that have only tokens of their own, quantized kernels,
sums of gradients, probes. The numbers are as on one device, as `test_expert_devices` says."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from expert_cases import RECIPES, B, H, S, close, layer, metas, normal, rounded, spec_of_weights, weights
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from test_expert_devices import (
    RECIPES,
    B,
    H,
    S,
    close,
    layer,
    metas,
    normal,
    rounded,
    spec_of_weights,
    weights,
)

from te_jax import checkpoint_policies
from te_jax.layers import MoEOptions, moe
from te_jax.ops.router import RouterOptions
from te_jax.sharding import MeshResource, global_shard_guard

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
