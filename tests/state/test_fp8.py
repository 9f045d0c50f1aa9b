"""Autocast, the state's way through autodiff, and update_fp8_metas."""

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import on_device
from jax.sharding import PartitionSpec as P

import te_jax as te
from te_jax.recipe import DelayedScaling, FixedScaling, Format
from te_jax.state import fp8

RECIPE = DelayedScaling(amax_history_len=4)


def auto_mesh():
    return jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))


def uses(metas, *tensors):
    """A stand-in for a layer: its output does not matter, its amax cotangents are max |tensor|."""

    @jax.custom_vjp
    def use(meta, x):
        return jnp.sum(x)

    use.defvjp(
        lambda meta, x: (jnp.sum(x), (meta, x)),
        lambda r, g: (fp8.cotangent(r[0], jnp.max(jnp.abs(r[1])), RECIPE), g * jnp.ones_like(r[1])),
    )
    return sum(use(m, x) for m, x in zip(metas, tensors))


def new_state(loss, *args):
    return jax.grad(loss)((jnp.ones(1), jnp.zeros(4)), *args)


class TestAutocast:
    def test_scope(self):
        assert fp8.current_recipe() is None
        with te.fp8_autocast(enabled=True, fp8_recipe=RECIPE):
            assert fp8.current_recipe() == te.get_delayed_scaling() == RECIPE
            with te.autocast(recipe=FixedScaling()), pytest.raises(ValueError, match="get_delayed_scaling: the recipe"):
                te.get_delayed_scaling()
            with te.autocast(enabled=False):
                assert fp8.current_recipe() is None
            with te.autocast(enabled=True):
                assert fp8.current_recipe() == DelayedScaling()
        assert fp8.current_recipe() is None

    def test_jit_retraces_under_another_recipe(self):
        traced = []

        @jax.jit
        def f(x):
            traced.append(fp8.current_recipe())
            return x

        for recipe in (RECIPE, DelayedScaling(margin=1), RECIPE):
            with te.autocast(enabled=True, recipe=recipe):
                f(1.0)
        f(1.0)
        assert traced == [RECIPE, DelayedScaling(margin=1), None]

    def test_mesh_resource_none_inherits(self):
        resource = te.MeshResource(dp_resource="data")
        with te.autocast(enabled=True, mesh_resource=resource), te.autocast(enabled=True):
            assert te.sharding.current_mesh_resource() == resource

    def test_refuses(self):
        with pytest.raises(TypeError, match=r"pass an instance: DelayedScaling\(\)"):
            with te.autocast(enabled=True, recipe=DelayedScaling):
                pass
        with jax.set_mesh(auto_mesh()), pytest.raises(ValueError, match="'model'.*'data'"):
            with te.autocast(enabled=True, mesh_resource=te.MeshResource(tp_resource="model")):
                pass


class TestState:
    def test_cotangent_is_the_new_state(self):
        loss = lambda s, x: uses([fp8.observe(*s, RECIPE, "fwd")], x)
        scale, history = new_state(loss, jnp.array([1.0, -4.0]))
        assert float(scale[0]) == 112.0
        np.testing.assert_array_equal(history, [0, 0, 0, 4])

    def test_unused_keeps_the_state(self):
        loss = lambda s, x: jnp.sum(x) + 0.0 * fp8.observe(*s, RECIPE, "fwd").scale
        scale, history = jax.grad(loss)((jnp.full(1, 7.0), jnp.array([0.0, 0, 2, 1])), jnp.ones(2))
        assert float(scale[0]) == 7.0
        np.testing.assert_array_equal(history, [0, 0, 2, 1])

    @pytest.mark.parametrize("a,b", [(4.0, 2.0), (2.0, 4.0), (4.0, 0.0)])
    def test_two_uses_combine_by_max(self, a, b):
        loss = lambda s, x, y: uses(fp8.fork(fp8.observe(*s, RECIPE, "fwd")), x, y)
        scale, history = new_state(loss, jnp.array([a]), jnp.array([b]))
        assert float(scale[0]) == 112.0
        np.testing.assert_array_equal(history, [0, 0, 0, 4])

    def test_one_not_finite_use_spoils_the_step_not_the_state(self):
        loss = lambda s, x, y: uses(fp8.fork(fp8.observe(*s, RECIPE, "fwd")), x, y)
        scale, history = new_state(loss, jnp.array([jnp.inf]), jnp.array([2.0]))
        assert float(scale[0]) == 1.0 and not history.any()

    def test_vmap_over_a_shared_state(self):
        def loss(s, xs):
            meta = fp8.observe(*s, RECIPE, "fwd")
            return jnp.sum(jax.vmap(lambda x: uses([meta], x))(xs))

        scale, history = new_state(loss, jnp.array([[1.0], [4.0], [2.0]]))
        assert float(scale[0]) == 112.0 and history[-1] == 4

    def test_vmap_over_states(self):
        loss = lambda s, xs: jnp.sum(jax.vmap(lambda s, x: uses([fp8.observe(*s, RECIPE, "fwd")], x))(s, xs))
        state = jnp.ones((3, 1)), jnp.zeros((3, 4))
        scales, histories = jax.grad(loss)(state, jnp.array([[1.0], [4.0], [2.0]]))
        np.testing.assert_array_equal(scales[:, 0], [448, 112, 224])
        np.testing.assert_array_equal(histories[:, -1], [1, 4, 2])

    def test_shard_map_reduces_over_devices(self):
        mesh = auto_mesh()

        def step(s, x):
            return jax.grad(lambda s: uses([fp8.observe(*s, RECIPE, "fwd")], x))(s)

        mapped = jax.shard_map(step, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
        scale, history = jax.jit(mapped)((jnp.ones(1), jnp.zeros(4)), jnp.arange(1.0, 9.0))
        assert float(scale[0]) == 56.0 and history[-1] == 8

    def test_shard_map_without_reduction(self):
        mesh, local = auto_mesh(), DelayedScaling(amax_history_len=4, reduce_amax=False)

        def step(s, x):
            meta = fp8.observe(*s, local, "fwd")
            return fp8.cotangent(meta, jnp.max(x), local).amax[None]

        specs = dict(mesh=mesh, in_specs=(P("data"), P("data")), out_specs=P("data"))
        own = jax.jit(jax.shard_map(step, **specs))((jnp.ones(8), jnp.zeros(32)), jnp.arange(8.0))
        np.testing.assert_array_equal(own, np.arange(8.0))
        with pytest.raises(ValueError, match=r"reduce_amax=False.*mesh axis \['data'\]"):
            jax.shard_map(step, mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data"))(
                (jnp.ones(1), jnp.zeros(4)), jnp.arange(8.0)
            )


def metas(scale=4.0, history=(0.0, 1, 3, 2), **more):
    leaves = {"x_scale": jnp.full(1, scale), "x_amax_history": jnp.array(history)}
    return {"fp8_metas": {"layer": leaves}, **more}


class TestUpdate:
    def test_good_state_is_unchanged(self):
        state = metas(448 / 5)  # an older amax of 5 has left the window
        for _ in range(2):
            with te.autocast(enabled=True, recipe=RECIPE):
                got = te.update_fp8_metas(state)
            jax.tree.map(np.testing.assert_array_equal, got, state)

    def test_other_collections_pass_through(self):
        other = {"count": jnp.arange(3)}
        assert te.update_fp8_metas({"batch_stats": other}) == {"batch_stats": other}
        got = te.update_fp8_metas(metas(batch_stats=other))
        assert got["batch_stats"] is other
        frozen = te.update_fp8_metas(flax.core.freeze(metas()))
        assert isinstance(frozen, flax.core.FrozenDict)

    @pytest.mark.parametrize(
        "scale,history,want_scale,want_history",
        [
            (np.nan, (0, 1, 3, 2), 448 / 3, (0, 1, 3, 2)),
            (-2.0, (0, 1, 4, 2), 112.0, (0, 1, 4, 2)),
            (np.inf, (0, 0, 0, 0), 3.4028234663852886e38, (0, 0, 0, 0)),
            (0.0, (0, 0, 0, 0), 1.0, (0, 0, 0, 0)),
            (1.0, (9, np.inf, np.nan, -2), 1.0, (0, 0, 0, 0)),
            (2 * 448 / 4, (0, 0, 0, 8), 56.0, (0, 0, 0, 8)),  # summed over two uses: too large for its history
        ],
    )
    def test_repairs(self, scale, history, want_scale, want_history):
        with te.autocast(enabled=True, recipe=RECIPE):
            once = te.update_fp8_metas(metas(scale, history))
            twice = te.update_fp8_metas(once)
        leaves = once["fp8_metas"]["layer"]
        assert float(leaves["x_scale"][0]) == pytest.approx(want_scale, rel=2e-7)
        np.testing.assert_array_equal(leaves["x_amax_history"], np.float32(want_history))
        jax.tree.map(np.testing.assert_array_equal, once, twice)

    def test_gradients_have_their_own_maximum(self):
        state = {"fp8_metas": {"grad_scale": jnp.full(1, np.nan), "grad_amax_history": jnp.array([0.0, 0, 0, 2])}}
        with te.autocast(enabled=True, recipe=RECIPE):
            assert float(te.update_fp8_metas(state)["fp8_metas"]["grad_scale"][0]) == 57344 / 2
        # Without a recipe the gradients' type is not known: the smaller maximum is safe for both.
        assert float(te.update_fp8_metas(state)["fp8_metas"]["grad_scale"][0]) == 448 / 2

    def test_leaves_of_different_shardings_on_an_explicit_mesh(self):
        mesh = jax.make_mesh((8,), ("a",), axis_types=(jax.sharding.AxisType.Explicit,))
        with jax.set_mesh(mesh):
            put = lambda a, s: jax.device_put(a, jax.sharding.NamedSharding(mesh, s))
            stacked = {"x_scale": put(jnp.full((8, 1), 4.0), P("a")), "x_amax_history": put(jnp.zeros((8, 4)), P("a"))}
            state = {"fp8_metas": {"layers": stacked, **metas()["fp8_metas"]}}
            got = jax.jit(te.update_fp8_metas)(state)
        jax.tree.map(np.testing.assert_array_equal, got, state)

    def test_stacked_layers_and_one_computation(self):
        rng = np.random.default_rng(0)
        stacked = {
            f"{t}_{leaf}": on_device(rng.uniform(1, 2, (5, 3, n)), jnp.float32).at[..., 0].multiply(leaf == "scale")
            for t in ("x", "kernel", "grad")
            for leaf, n in (("scale", 1), ("amax_history", 4))
        }
        with te.autocast(enabled=True, recipe=RECIPE):
            got = te.update_fp8_metas({"fp8_metas": stacked})
            text = jax.jit(te.update_fp8_metas).lower({"fp8_metas": stacked}).as_text()
        jax.tree.map(np.testing.assert_array_equal, got["fp8_metas"], stacked)
        assert text.count("stablehlo.divide") <= 2  # one law for all tensors, not one each

    def test_refuses(self):
        with te.autocast(enabled=True, recipe=DelayedScaling(amax_history_len=16)):
            with pytest.raises(ValueError, match="length 4.*amax_history_len=16.*te_jax.convert_fp8_metas"):
                te.update_fp8_metas(metas())

    @pytest.mark.parametrize("lost", ["x_scale", "x_amax_history"])
    def test_missing_leaf_is_made_fresh(self, lost):
        state = metas(56.0, (0.0, 0, 0, 8))
        del state["fp8_metas"]["layer"][lost]
        with te.autocast(enabled=True, recipe=RECIPE), pytest.warns(UserWarning, match=f"layer has no {lost}"):
            leaves = te.update_fp8_metas(state)["fp8_metas"]["layer"]
        assert float(leaves["x_scale"][0]) == 56.0  # kept, or from the history
        np.testing.assert_array_equal(leaves["x_amax_history"], [0, 0, 0, 0 if lost.endswith("history") else 8])

    def test_interval_counter_survives_without_a_recipe(self):
        state = metas(7.0, (-2.0, 0, 0, 8))
        jax.tree.map(np.testing.assert_array_equal, te.update_fp8_metas(state), state)

    def test_update_collections(self):
        original = flax.core.freeze({"a": 1, "b": 2})
        got = te.update_collections({"b": 3}, original)
        assert isinstance(got, flax.core.FrozenDict) and dict(got) == {"a": 1, "b": 3}
        assert type(te.update_collections({"b": 3}, {"a": 1})) is dict


@pytest.mark.parametrize(
    "length, want, amax",
    [(4, [0, 1, 3, 2], 3), (3, [0, 3, 2], 3), (2, [0, 2], 3), (6, [0, 0, 0, 1, 3, 2], 3), (1, [0], 2)],
)
def test_convert(length, want, amax):
    state = metas(opaque={"n": jnp.ones(2)})
    got = te.convert_fp8_metas(state, DelayedScaling(amax_history_len=length))
    np.testing.assert_array_equal(got["fp8_metas"]["layer"]["x_amax_history"], np.float32(want))
    np.testing.assert_allclose(got["fp8_metas"]["layer"]["x_scale"], [448 / amax], rtol=1e-6)
    assert got["opaque"] is state["opaque"]
    fresh = te.convert_fp8_metas(metas(4.0, (0.0, 0, 0, 0)), DelayedScaling(amax_history_len=length))
    assert float(fresh["fp8_metas"]["layer"]["x_scale"][0]) == 4.0


def test_format_names():
    assert Format.HYBRID.value == (448.0, 57344.0)


def test_a_fork_of_one_use_takes_no_maximum():
    """XLA would run a kernel for it: it does not know that amaxes are not negative."""
    meta = fp8.TensorMeta(jnp.float32(2), jnp.float32(2))

    def used(uses):
        def fn(meta):
            return sum((i + 3) * each.amax for i, each in zip(range(uses), fp8.fork(meta)))

        return jax.grad(fn)

    assert float(used(1)(meta).amax) == 3 and float(used(2)(meta).amax) == 4
    assert "max" not in str(jax.make_jaxpr(used(1))(meta)) and "max" in str(jax.make_jaxpr(used(2))(meta))
