"""`jax.vmap` of modules over an axis that a mesh splits, as that of experts: the numbers of one device, and no example
crosses devices."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from quick_init import quick_init

import te_jax as te
import te_jax.flax as te_flax
from te_jax import recipe
from te_jax.ops.attention import dot_product_attention
from te_jax.ops.attention_context import context_parallel_attention
from te_jax.sharding import collectives

pytestmark = pytest.mark.usefixtures("on_host")

KINDS = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}
RECIPES = {
    "wide": None,
    "delayed": recipe.DelayedScaling(amax_history_len=4),
    "current": recipe.Float8CurrentScaling(),
    "blocks": recipe.Float8BlockScaling(),
}
EXPERTS = 8  # two on each device


class Layers(nn.Module):
    """A dense layer, and an MLP with its norm."""

    @nn.compact
    def __call__(self, x):
        return te_flax.LayerNormMLP(intermediate_dim=48)(te_flax.DenseGeneral(features=32)(x))[0]


def step(call, chosen):
    """(variables, x) -> the loss of all examples, and its gradients by the variables and x."""

    def loss(variables, x):
        with te.autocast(chosen is not None, chosen):
            return jnp.sum(jnp.sin(call(variables, x)))

    return jax.value_and_grad(loss, argnums=(0, 1))


def operands(rng, module, chosen, examples):
    """Variables of every example, and x."""
    x = rng.standard_normal((examples, 2, 8, 16)).astype(np.float32)
    with te.autocast(chosen is not None, chosen):
        init = quick_init(jax.vmap(module.init, (None, 0)))(jax.random.key(0), x)
    return nn.meta.unbox(init), x


@cache
def on_one_device(chosen):
    """(operands, what experts on one device make of them) of a recipe."""
    arrays = operands(np.random.default_rng(0), Layers(), RECIPES[chosen], EXPERTS)
    return arrays, jax.jit(step(jax.vmap(Layers().apply), RECIPES[chosen]))(*arrays)


def assert_close(got, want):
    """As f32 sums of 1024 terms at most (a bias's gradient, and the loss) in another order."""
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(g, w, rtol=1024 * 2.0**-24, atol=1024 * 2.0**-24 * np.abs(w).max(initial=0))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chosen", RECIPES)
def test_experts_stay_where_they_are(chosen, kind):
    """Only the loss crosses devices; gradients and FP8 state lie as what they are of."""
    mesh = jax.make_mesh((4, 2), ("ep", "b"), axis_types=(KINDS[kind],) * 2)
    arrays, want = on_one_device(chosen)
    run = step(jax.vmap(Layers().apply), RECIPES[chosen])
    with jax.set_mesh(mesh):
        placed = jax.tree.map(lambda a: jax.device_put(np.asarray(a), NamedSharding(mesh, P("ep"))), arrays)
    program, found = collectives.compiled(run, *placed, mesh=mesh)
    assert [(c.kind, c.bytes) for c in found] == [("all-reduce", 4)]
    got = program(*placed)
    assert all(g.sharding.spec[0] == "ep" for g in jax.tree.leaves(got[1]))
    assert_close(got, want)


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_that_examples_share(kind, rng):
    """Its amaxes are those of all examples, on all devices; nothing else crosses them but the loss."""
    module, mesh = te_flax.DenseGeneral(features=16), jax.make_mesh((4,), ("ep",), axis_types=(KINDS[kind],))
    variables, x = operands(rng, module, RECIPES["delayed"], EXPERTS)
    params, metas = {"params": variables["params"]}, jax.tree.map(lambda leaf: leaf[0], variables["fp8_metas"])
    apply = jax.vmap(lambda params, metas, x: module.apply({**params, "fp8_metas": metas}, x), (0, None, 0))
    run = step(lambda variables, x: apply(*variables, x), RECIPES["delayed"])
    want = jax.jit(run)((params, metas), x)
    with jax.set_mesh(mesh):
        put = lambda tree, spec: jax.tree.map(lambda a: jax.device_put(np.asarray(a), NamedSharding(mesh, spec)), tree)
        placed = (put(params, P("ep")), put(metas, P())), put(x, P("ep"))
    program, found = collectives.compiled(run, *placed, mesh=mesh)
    assert {c.kind for c in found} == {"all-reduce"} and max(c.bytes for c in found) <= 16
    assert_close(program(*placed), want)


def test_attention_over_a_cut_sequence(rng):
    """Of both strategies, forward and backward: on an Explicit mesh collectives lie within what is mapped."""
    arrays = [rng.standard_normal((2, 2, 16, heads, 8)).astype(np.float32) for heads in (4, 2, 2, 4)]
    attend = partial(context_parallel_attention, axis="cp", attn_mask_type="causal")
    calls = {strategy: partial(attend, strategy=strategy) for strategy in ("ring", "all_gather")}

    def results(call):
        def run(q, k, v, dout):
            out, vjp = jax.vjp(call, q, k, v)
            return out, *vjp(dout)

        return jax.vmap(run)

    want = jax.jit(results(partial(dot_product_attention, attn_mask_type="causal")))(*arrays)
    mesh = jax.make_mesh((2, 2), ("ep", "cp"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        placed = [jax.device_put(x, NamedSharding(mesh, P("ep", None, "cp"))) for x in arrays]
        got = jax.jit(lambda *x: {strategy: results(call)(*x) for strategy, call in calls.items()})(*placed)
    for of_strategy in got.values():
        assert all(x.sharding.spec[0] == "ep" for x in of_strategy)
        assert_close(of_strategy, want)
