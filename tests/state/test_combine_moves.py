"""`te_jax.value_and_grad` of functions that slice, stack, index and loop over FP8 state before modules read it."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import te_jax as te
import te_jax.flax as te_flax
from te_jax.recipe import DelayedScaling

L, N, WIDTH = 4, 4, 16
RECIPE = DelayedScaling(amax_history_len=L)
SLOPES = np.float32([3, 1, 2, 5])  # of the loss by each layer's output, so the amaxes of its gradient
MODULE = te_flax.DenseGeneral(WIDTH, use_bias=False)
RNG = np.random.default_rng(0)
KERNELS, XS = (jnp.asarray(RNG.normal(size=(N, WIDTH, WIDTH)), jnp.float32) for _ in range(2))


def layer(kernel, metas, x, slope):
    return slope * jnp.sum(MODULE.apply({"params": {"kernel": kernel}, "fp8_metas": metas}, x))


def at(tree, i):
    return jax.tree.map(lambda a: a[i], tree)


def static(kernels, metas, layer=layer):
    return sum(layer(kernels[i], at(metas, i), XS[i], SLOPES[i]) for i in range(N))


def twice(kernels, metas):
    return static(kernels, metas) + static(kernels, metas, lambda k, m, x, slope: layer(k, m, x / 2, slope / 2))


def body(total, operands):
    return total + layer(*operands), None


def scan(kernels, metas):
    return lax.scan(body, 0.0, (kernels, metas, XS, SLOPES))[0]


def dynamic(kernels, metas):
    step = lambda total, i: (total + layer(kernels[i], at(metas, i), XS[i], jnp.asarray(SLOPES)[i]), None)
    return lax.scan(step, 0.0, jnp.arange(N))[0]


def stacked(kernels, metas):
    layers = [at(metas, i) for i in range(N)]
    return scan(kernels, jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers))


def in_stages(kernels, metas):
    """Two layers each, as the stages of a pipeline hold them."""

    def stage(total, operands):
        kernels, metas, xs, slopes = operands
        return total + sum(layer(kernels[i], at(metas, i), xs[i], slopes[i]) for i in range(2)), None

    halves = jax.tree.map(lambda a: a.reshape(2, N // 2, *a.shape[1:]), (kernels, metas, XS, jnp.asarray(SLOPES)))
    return lax.scan(stage, 0.0, halves)[0]


def indexed(kernels, metas):
    order = jnp.asarray([2, 0, 3, 1])
    return lax.scan(body, 0.0, at((kernels, metas, XS, jnp.asarray(SLOPES)), order))[0]


def rolled(kernels, metas):
    one_on = jax.tree.map(lambda a: jnp.roll(a, 1, axis=0), (kernels, metas, XS, jnp.asarray(SLOPES)))
    return lax.scan(body, 0.0, one_on)[0]


def repeated(kernels, metas):
    """Each layer in two steps."""
    pairs = jax.tree.map(lambda a: jnp.repeat(a, 2, 0), (kernels, metas, XS, jnp.asarray(SLOPES)))
    return lax.scan(body, 0.0, pairs)[0]


def of_cond(kernels, metas):
    """A branch for each example, of a state that they share."""

    def branch(metas, kernel, x, slope, which):
        half = lambda m: layer(kernel, m, x / 2, slope / 2)
        return lax.cond(which, lambda m: layer(kernel, m, x, slope), half, metas)

    of_layer = jax.vmap(branch, (None, None, 0, None, 0))
    which = jnp.asarray([True, False])
    pairs = lambda x: jnp.stack([x, x / 4])
    return sum(jnp.sum(of_layer(at(metas, i), kernels[i], pairs(XS[i]), SLOPES[i], which)) for i in range(N))


def written(kernels, metas):
    """A stack that is filled layer by layer."""
    empty = jax.tree.map(jnp.zeros_like, metas)
    for i in range(N):
        empty = jax.tree.map(lambda e, a, i=i: e.at[i].set(a[i]), empty, metas)
    return scan(kernels, empty)


def remat(kernels, metas):
    return jax.checkpoint(partial(static, layer=jax.checkpoint(layer)))(kernels, metas)


WAYS = [static, twice, scan, dynamic, stacked, in_stages, indexed, rolled, repeated, of_cond, written, remat]


def old_state():
    """f32[N, ...], another in each layer."""
    history = jnp.asarray(RNG.uniform(0.1, 2, (N, L)), jnp.float32).at[:, 0].set(0)
    return {
        f"{tensor}_{leaf}": value
        for tensor in ("x", "kernel", "grad")
        for leaf, value in (("scale", jnp.arange(1.0, N + 1)[:, None]), ("amax_history", history))
    }


@partial(jax.jit, static_argnums=3)
def by_law(scale, history, amax, fp8_max):
    return jax.vmap(partial(RECIPE.new_state, fp8_max=fp8_max))(scale, history, amax)


def assert_law(got, old, amaxes, err_msg):
    """amaxes: by tensor, [N]"""
    for tensor, amax in amaxes.items():
        top = 57344.0 if tensor == "grad" else 448.0
        want = by_law(old[f"{tensor}_scale"], old[f"{tensor}_amax_history"], jnp.asarray(amax), top)
        for leaf, value in zip(("scale", "amax_history"), want):
            np.testing.assert_allclose(got[f"{tensor}_{leaf}"], value, rtol=1e-6, err_msg=f"{err_msg} {tensor}_{leaf}")


def largest(x):
    return jnp.max(jnp.abs(x), range(1, x.ndim))


AMAXES = {"x": largest(XS), "kernel": largest(KERNELS), "grad": SLOPES}


def test_states_may_be_moved():
    """One program of all ways, each of a state of its own, whose gradient is the law of the largest amaxes."""
    old = old_state()
    states = {way.__name__: {"fp8_metas": old} for way in WAYS}

    def loss(kernels, states):
        return sum(way(kernels, states[way.__name__]["fp8_metas"]) for way in WAYS)

    with te.autocast(recipe=RECIPE):
        _, new = jax.jit(te.value_and_grad(loss, argnums=1))(KERNELS, states)
    for name, state in new.items():
        assert_law(state["fp8_metas"], old, AMAXES, name)


@pytest.mark.parametrize("by", ["shards", "index"])
def test_in_the_stages_of_a_pipeline(by):
    """Inside `shard_map`: each device slices its own layers, or those that its index says of all."""
    old, stages = old_state(), 2
    mesh = jax.make_mesh((stages,), ("pp",), axis_types=(AxisType.Auto,))
    slopes, each = jnp.asarray(SLOPES), N // stages

    def loss(kernels, fp8):
        @partial(jax.shard_map, in_specs=(P("pp"), P("pp") if by == "shards" else P(), P("pp"), P("pp")), out_specs=P())
        def run(kernels, metas, xs, slopes):
            of = lambda i: i if by == "shards" else lax.axis_index("pp") * each + i
            total = sum(layer(kernels[i], at(metas, of(i)), xs[i], slopes[i]) for i in range(each))
            return lax.psum(total, "pp")

        return run(kernels, fp8["fp8_metas"], XS, slopes)

    with jax.set_mesh(mesh), te.autocast(True, RECIPE, te.MeshResource(pp_resource="pp")):
        _, new = jax.jit(te.value_and_grad(loss, argnums=1))(KERNELS, {"fp8_metas": old})
    assert_law(new["fp8_metas"], old, AMAXES, by)


def test_a_nan_is_not_lost_on_the_way():
    """XLA's maximum on the CPU may lose it: the state stays as it was, as the law says of what is not finite."""
    recipe = DelayedScaling(amax_history_len=512)
    metas = {
        f"{t}{end}": jnp.asarray(leaf) for t in ("x", "kernel", "grad") for end, leaf in recipe.fresh_state().items()
    }
    xs = jnp.stack([XS[0], XS[1].at[3, 5].set(jnp.nan)])

    def loss(kernels, fp8):
        twice = jax.tree.map(lambda a: jnp.broadcast_to(a, (2, *a.shape)), fp8["fp8_metas"])
        return lax.scan(body, 0.0, (kernels[:2], twice, xs, jnp.ones(2)))[0]

    with te.autocast(recipe=recipe):
        _, new = jax.jit(te.value_and_grad(loss, argnums=1))(KERNELS, {"fp8_metas": metas})
    np.testing.assert_array_equal(new["fp8_metas"]["x_amax_history"], np.zeros(512))
    assert new["fp8_metas"]["kernel_amax_history"][-1] == largest(KERNELS[:2]).max()


@pytest.mark.parametrize(
    "compute",
    [lambda a: 0.9 * a, lambda a: jnp.maximum(a, 1.0), lambda a: jnp.take(a, jnp.arange(2), axis=0), jnp.sum],
    ids=["times", "maximum", "take", "sum"],
)
def test_what_computes_with_state_is_refused(compute):
    metas = {"layers": old_state()}
    with (
        te.autocast(recipe=RECIPE),
        pytest.raises(TypeError, match="value_and_grad: FP8 state is computed with.*slice"),
    ):
        te.value_and_grad(lambda fp8: jax.tree.leaves(jax.tree.map(compute, fp8))[0].sum())({"fp8_metas": metas})
