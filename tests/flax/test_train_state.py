"""te_jax.flax.TrainState and fp8_masked: parameters through optax, FP8 state by its gradient."""

from functools import partial

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT, Fp8DirectDotGeneralOp
from flax.training import train_state
from jax import lax
from small_net import RECIPE, K, L, close, create, data, loss_fn, make_step, newest
from states import assert_equal, restored, saved

import te_jax as te
import te_jax.flax as te_flax
from te_jax.recipe import DelayedScaling

FACTORS = np.asarray([2.0, 7.0, 3.0], np.float32)  # the second microbatch has the largest amax


def microbatches(seed=0):
    """f32[K, 8, 16]"""
    return data(K, 8, 16, seed=seed) * FACTORS[:, None, None]


GRADIENTS = jax.jit(te.value_and_grad(loss_fn, (0, 1)))


def test_is_the_loop_by_hand_and_donates():
    tx = optax.adamw(1e-2)
    first = create(tx)
    params, fp8, opt_state = first.params, first.fp8, first.opt_state

    @jax.jit
    def by_hand(params, fp8, opt_state, x):
        with te.autocast(True, RECIPE):
            loss, (grads, fp8) = te.value_and_grad(loss_fn, (0, 1))(params, fp8, x)
            updates, opt_state = tx.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), te.update_fp8_metas(fp8), opt_state, loss

    step, state = make_step(donate_argnums=0), create(tx)
    for i in range(3):
        before, x = state, (i + 1) * data(8, 16, seed=i)
        params, fp8, opt_state, want = by_hand(params, fp8, opt_state, x)
        state, loss = step(before, x)
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(before)), "donated"
        np.testing.assert_allclose(loss, want, rtol=1e-6)
        close((state.params, state.fp8), (params, fp8))
    assert int(state.step) == 3 and step._cache_size() == 1
    assert newest(state.fp8) == float(jnp.abs(x).max())
    assert state.variables == {"params": state.params, **state.fp8}


@pytest.mark.parametrize(
    "tx, tx_args",
    [
        (optax.MultiSteps(optax.adam(1e-2), 1), {}),
        (optax.apply_if_finite(optax.chain(optax.clip_by_global_norm(1.0), optax.lamb(1e-2)), 3), {}),
        (te_flax.fp8_masked(optax.sgd(1e-2, momentum=0.9)), {}),
        (optax.chain(optax.sgd(1e-2), optax.contrib.reduce_on_plateau()), {"value": 1.0}),
    ],
    ids=["MultiSteps", "apply_if_finite", "fp8_masked", "plateau"],
)
def test_any_optimizer(tx, tx_args):
    """The optimizer is optax's on only params, and the FP8 state does not depend on it."""
    state, want = create(tx), create(optax.sgd(1e-2))
    with te.autocast(True, RECIPE):
        _, grads = GRADIENTS(state.params, state.fp8, data(8, 16))

        @jax.jit
        def run(state, want, grads):
            updates, _ = tx.update(grads[0], tx.init(state.params), state.params, **tx_args)
            by_optax = optax.apply_updates(state.params, updates)
            return state.apply_gradients(grads=grads, tx_args=tx_args), want.apply_gradients(grads=grads), by_optax

        new, want, by_optax = run(state, want, grads)
    assert_equal(new.fp8, want.fp8)
    close(new.params, by_optax)


def test_other_collections():
    class Normed(nn.Module):
        @nn.compact
        def __call__(self, x):
            return te_flax.DenseGeneral(4)(nn.BatchNorm(use_running_average=False)(x))

    state = create(optax.sgd(0.1), module=Normed())
    assert set(state.fp8) == {"fp8_metas"} and set(state.collections) == {"batch_stats"}

    def loss(params, fp8, x):
        y, updated = state.apply_fn({"params": params, **fp8, **state.collections}, x, mutable=["batch_stats"])
        return jnp.mean(y**2), updated

    with te.autocast(True, RECIPE):
        grad = jax.jit(te.value_and_grad(loss, (0, 1), has_aux=True))
        (_, updated), grads = grad(state.params, state.fp8, data(8, 16) + 5)
        new = jax.jit(lambda state, grads, updated: state.apply_gradients(grads=grads, collections=updated))(
            state, grads, updated
        )
    assert float(jnp.min(new.variables["batch_stats"]["BatchNorm_0"]["mean"])) > 0.04
    assert newest(new.fp8, layer="DenseGeneral_0") > 0


class Mixed(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = te_flax.DenseGeneral(16, name="first")(x)
        return nn.Dense(4, dot_general_cls=Fp8DirectDotGeneralOp, name="flax")(x)


@pytest.mark.parametrize("recipe", [None, RECIPE], ids=["", "fp8"])
def test_beside_fp8_modules_of_flax(recipe):
    """What these hold in `params` is replaced by its gradient, as by Flax's own step, and no optimizer sees it."""
    model, x, tx = Mixed(), 3 * data(8, 16), optax.adamw(1e-2)

    @jax.jit
    def run(x):
        with te.autocast(recipe is not None, recipe):
            params = nn.meta.unbox(model.init(jax.random.key(0), x))
            metas = {"fp8_metas": params.pop("fp8_metas")} if recipe else {}
            loss = lambda params, fp8: jnp.mean(model.apply({**params, **fp8}, x) ** 2)
            grads = te.value_and_grad(loss, (0, 1))(params, metas)[1]
            state = te_flax.TrainState.create(apply_fn=None, params=params, tx=tx, collections=metas)
            by_flax = train_state.TrainState.create(apply_fn=None, params=params, tx=tx)
            state, by_flax = state.apply_gradients(grads=grads), by_flax.apply_gradients(grads=grads[0])
            return (state.params, state.opt_state, state.step), (by_flax.params, by_flax.opt_state, by_flax.step)

    got, want = run(x)
    assert_equal(got, want)
    assert float(got[0][OVERWRITE_WITH_GRADIENT]["flax"]["Fp8DirectDotGeneralOp_0"]["kernel_amax_history"][0]) > 0


# -- accumulation ----------------------------------------------------------------------------------------------------


def by_scan():
    state = create(optax.adam(1e-2))

    @jax.jit
    def step(state, xs):
        with te.autocast(True, RECIPE):
            loss, grads = state.accumulate_gradients(loss_fn, xs)
            return state.apply_gradients(grads=grads), loss

    return state, step


def by_multi_steps():
    state, one = create(optax.MultiSteps(optax.adam(1e-2), K)), make_step(donate_argnums=0)

    def step(state, xs):
        losses = []
        for i, x in enumerate(xs):
            before = jax.tree.map(jnp.copy, (state.params, state.fp8))
            state, loss = one(state, x)
            losses.append(loss)
            if i < K - 1:  # nothing moves before the last microbatch
                assert_equal((state.params, state.fp8), before)
        return state, sum(losses) / K

    return state, step


@pytest.mark.parametrize("way", [by_scan, by_multi_steps])
def test_accumulation_is_one_step_with_the_largest_amaxes(way):
    (state, step), want = way(), create(optax.adam(1e-2))

    @jax.jit
    def at_once(state, xs):
        """All microbatches within one differentiated function, where `te.value_and_grad` combines them by max."""
        total = lambda params, fp8, xs: sum(loss_fn(params, fp8, x) for x in xs)
        with te.autocast(True, RECIPE):
            loss, (grads, fp8) = te.value_and_grad(total, (0, 1))(state.params, state.fp8, xs)
            return state.apply_gradients(grads=(jax.tree.map(lambda g: g / K, grads), fp8)), loss / K

    for i in range(3):
        xs = microbatches(i) / (i + 1)
        state, loss = step(state, xs)
        want, want_loss = at_once(want, xs)
        np.testing.assert_allclose(loss, want_loss, rtol=1e-4)
        assert newest(state.fp8) == float(jnp.abs(xs).max()) == float(jnp.abs(xs[1]).max())
        # Sums in another order may round a value to the other of two FP8 neighbours, in a handful of places.
        close(state.fp8, want.fp8, rtol=1e-2)
    close(state.params, want.params, atol=1e-3)


def test_naive_accumulations_are_wrong():
    """What the two ways above are there for: the last microbatch's state, the sum and the mean of states."""
    state, xs = create(optax.sgd(0.0)), microbatches()
    amax = float(jnp.abs(xs).max())
    with te.autocast(True, RECIPE):
        states = [GRADIENTS(state.params, state.fp8, x)[1][1] for x in xs]
        one_by_one = state.fp8
        for x in xs:
            one_by_one = GRADIENTS(state.params, one_by_one, x)[1][1]
        total = te.update_fp8_metas(jax.tree.map(lambda *s: sum(s), *states))
        stacked = jax.tree.map(lambda *s: np.stack(s), *states)
        best = jax.jit(te.max_fp8_metas)(state.fp8, stacked)
    assert newest(states[-1]) < 0.7 * amax and newest(total) > amax
    assert np.count_nonzero(one_by_one["fp8_metas"]["first"]["x_amax_history"]) == K
    assert newest(best) == amax
    np.testing.assert_allclose(best["fp8_metas"]["first"]["x_scale"], 448 / amax, rtol=1e-6)


@pytest.mark.parametrize("length", [1, 2, 4])
@pytest.mark.parametrize("interval", [1, 2])
def test_the_largest_of_states_is_the_law_of_the_largest_amax(length, interval):
    """For stacked layers, over steps that repeat amaxes, with microbatches that saw nothing or nothing finite."""
    law = partial(DelayedScaling(amax_history_len=length, interval=interval).new_state, fp8_max=448.0)
    law = jax.jit(jax.vmap(law))  # over two layers
    largest = jax.jit(te.max_fp8_metas)
    scale, history = jnp.ones((2, 1)), jnp.zeros((2, length))
    amaxes = [[3, 3, 1], [3, 3, 3], [3, 2, 3], [1, 3, 2]]  # at last, all of the history is the largest amax already
    amaxes += [[2, 2, 1], [jnp.nan, 1, 5], [0, 0, 0], [jnp.inf, jnp.nan, 0], [1, 0.5, 0.25]]
    for step in amaxes:
        both = np.float32(step)[:, None] * np.float32([1.0, 10.0])  # [k, layers]
        states = [law(scale, history, a) for a in both]
        stacked = {"layers": {"x_scale": np.stack([s for s, _ in states])}}
        stacked["layers"]["x_amax_history"] = np.stack([h for _, h in states])
        before = {"fp8_metas": {"layers": {"x_scale": scale, "x_amax_history": history}}}
        got = largest(before, {"fp8_metas": stacked})["fp8_metas"]["layers"]
        finite = np.where(np.isfinite(both), both, np.float32(0))
        want_scale, want_history = law(scale, history, finite.max(0))
        if length > 1:
            np.testing.assert_array_equal(got["x_amax_history"], want_history)
            np.testing.assert_array_equal(got["x_scale"], want_scale)
        else:  # an unseen microbatch cannot be told there; the scale is safe
            assert (got["x_scale"] <= want_scale).all() and (got["x_scale"] > 0).all()
        scale, history = want_scale, want_history


def of_one_tensor(recipe, tx=None, **more):
    fp8 = {"fp8_metas": {"x" + end: jnp.asarray(leaf) for end, leaf in recipe.fresh_state().items()}}
    fields = dict(params={"w": jnp.ones(1)}, tx=tx or optax.sgd(0.0), collections=fp8)
    return te_flax.TrainState.create(apply_fn=None, **fields, **more)


def pair(state):
    return state.fp8["fp8_metas"]["x_scale"], state.fp8["fp8_metas"]["x_amax_history"]


def moved(state, scale, history, gradient=0.0):
    metas = {"x_scale": scale, "x_amax_history": history}
    return state.apply_gradients(grads=({"w": jnp.full(1, gradient)}, {"fp8_metas": metas}))


@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(amax_history_len=2),
        dict(interval=3),
        dict(interval=4, amax_history_len=2),
        dict(amax_compute_algo="most_recent"),
        dict(amax_compute_algo=lambda newest_first: jnp.mean(newest_first)),
        dict(scaling_factor_compute_algo=lambda amax, scale, top, _: jnp.minimum(2 * scale, top / amax)),
    ],
    ids=["max", "short", "interval", "interval, short", "most_recent", "mean", "doubling"],
)
def test_is_the_law_where_amaxes_repeat(options):
    """A step that sees the amax that all of the history holds is told from one that sees none, and one that doubles
    scale and history (4, 1, 2 in a history of 2) from a sum."""
    recipe = DelayedScaling(**{"amax_history_len": L, **options})
    state, step = of_one_tensor(recipe), jax.jit(moved)
    law = jax.jit(partial(recipe.new_state, fp8_max=448.0))
    want = pair(state)
    with te.autocast(True, recipe):
        for amax in np.float32([8.0, 1.0, 2.0, 4.0, 1.0, 2.0, *[1.0] * 12]):
            want = law(*want, amax)
            state = step(state, *law(*pair(state), amax))
            assert_equal(pair(state), want)
    assert pair(state)[0] == 448


@pytest.mark.parametrize("uses", [2, 3, 7, 100])
def test_sums_of_states_that_saw_nothing_leave_the_old_one(uses):
    """Uses that autodiff added up, whose gradients become 0: neither history nor scale may run away."""
    recipe = DelayedScaling(amax_history_len=L)
    state, law = of_one_tensor(recipe), partial(recipe.new_state, fp8_max=448.0)

    @jax.jit
    def step(state, amax):
        scale, history = law(*pair(state), amax)
        add = lambda leaf: lax.fori_loop(1, uses, lambda _, total: total + leaf, leaf)
        return moved(state, add(scale), add(history))

    with te.autocast(True, recipe):
        for amax in [0.0, 0.0, 0.7, 0.7, *[0.0] * 20]:
            state = step(state, jnp.float32(amax))
    total = np.float32(0)
    for _ in range(uses):
        total += np.float32(0.7)
    assert_equal(pair(state), (np.float32([448]) / total, np.asarray([0, 0, total, total], np.float32)))


@pytest.mark.parametrize("amaxes", [[100, 1, 2], [1, 100, 2], [1, 2, 100, 1]])
def test_microbatches_that_are_skipped_leave_no_trace(amaxes):
    recipe = DelayedScaling(amax_history_len=L)
    tx = optax.MultiSteps(optax.sgd(0.0), 2, should_skip_update_fn=optax.skip_not_finite)
    state = of_one_tensor(recipe, tx)

    @jax.jit
    def step(state, amax, gradient):
        return moved(state, *recipe.new_state(*pair(state), amax, 448.0), gradient=gradient)

    with te.autocast(True, recipe):
        for amax in amaxes:
            state = step(state, jnp.float32(amax), jnp.float32(jnp.nan if amax == 100 else 0.0))
    assert_equal(pair(state), (np.full(1, 448 / 2, np.float32), np.asarray([0, 0, 0, 2], np.float32)))


def test_a_frozen_dict_of_state():
    state = create(optax.sgd(0.1))
    frozen, _ = make_step()(state.with_fp8(flax.core.freeze(state.fp8)), data(8, 16))
    plain, _ = make_step()(state, data(8, 16))
    assert_equal(flax.core.unfreeze(frozen.fp8), plain.fp8)


def test_two_arrays_of_parameters_are_no_pair_of_gradients():
    params = (jnp.ones(2), jnp.ones(3))
    state = te_flax.TrainState.create(apply_fn=None, params=params, tx=optax.sgd(1.0))
    assert_equal(state.apply_gradients(grads=params).params, jax.tree.map(jnp.zeros_like, params))


def test_collections_without_fp8_pass_through():
    assert te.max_fp8_metas({}, {"other": 1}) == {"other": 1}


# -- clipping --------------------------------------------------------------------------------------------------------


def test_clipping_by_global_norm_leaves_fp8_out_both_ways():
    state, x = create(optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(1.0))), 3 * data(8, 16)
    clip = optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(1.0))
    with te.autocast(True, RECIPE):
        _, (dparams, dfp8) = GRADIENTS(state.params, state.fp8, x)
        norm = optax.tree.norm(dparams)
        assert norm > 0.1
        want = jax.tree.map(lambda p, g: p - 0.1 / norm * g, state.params, dparams)
        # 1. TrainState
        new = state.apply_gradients(grads=(dparams, dfp8))
        close(new.params, want)
        assert_equal(new.fp8, dfp8)
        # 2. The wrapper, on the whole tree
        variables, grads = {"params": state.params, **state.fp8}, {"params": dparams, **dfp8}
        masked = te_flax.fp8_masked(clip)
        updates, _ = jax.jit(masked.update)(grads, masked.init(variables), variables)
        variables = optax.apply_updates(variables, updates)
        close(variables["params"], want)
        assert_equal(variables["fp8_metas"], state.fp8["fp8_metas"])
        new_fp8 = te.update_fp8_metas({"fp8_metas": grads["fp8_metas"]})
        assert_equal(te.update_collections(new_fp8, variables)["fp8_metas"], new.fp8["fp8_metas"])
        # And without: the scales are the norm, and scales that the optimizer adds up are none.
        variables = {"params": state.params, **state.fp8}
        updates, _ = clip.update(grads, clip.init(variables), variables)
        assert optax.tree.norm(updates["params"]) < 1e-3
        naive = optax.apply_updates(variables, updates)["fp8_metas"]["first"]
        assert float(naive["x_scale"][0]) < 2 < float(new.fp8["fp8_metas"]["first"]["x_scale"][0])


# -- checkpoints -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("several", [False, True], ids=["adamw", "MultiSteps"])
def test_orbax_round_trip_is_bit_for_bit(tmp_path, several):
    """With MultiSteps in the midst of a step."""
    tx = optax.MultiSteps(optax.adamw(1e-2), K) if several else optax.adamw(1e-2)
    step, state = make_step(), create(tx)
    for x in (*microbatches(0), *microbatches(1)[:2]):
        state, _ = step(state, x)
    saved(tmp_path / "state", state)
    abstract = jax.eval_shape(lambda: create(tx))
    again = restored(tmp_path / "state", abstract)
    assert jax.tree.structure(again) == jax.tree.structure(state)
    assert_equal(again, state)
    for x in microbatches(2):
        (state, loss), (again, same) = step(state, x), step(again, x)
        assert float(loss) == float(same)
    assert_equal(again, state)


def test_bf16_checkpoint_in_an_fp8_model_and_the_reverse(tmp_path):
    tx, x = optax.MultiSteps(optax.adamw(1e-2), 2), data(8, 16)
    plain, in_fp8 = make_step(None), make_step()
    bf16, fp8 = plain(create(tx, None), x)[0], in_fp8(create(tx), x)[0]
    saved(tmp_path / "bf16", bf16)
    saved(tmp_path / "fp8", fp8)
    fresh = create(tx)
    with pytest.raises(ValueError):  # the naive way: orbax misses leaves
        restored(tmp_path / "bf16", fresh)
    again = restored(tmp_path / "bf16", fresh.with_fp8({})).with_fp8(fresh.fp8)
    assert_equal((again.params, again.opt_state, again.fp8), (bf16.params, bf16.opt_state, fresh.fp8))
    again, _ = in_fp8(in_fp8(again, x)[0], x)
    assert newest(again.fp8) == float(jnp.abs(x).max())
    back = restored(tmp_path / "fp8", fresh).with_fp8({})
    assert_equal((back.params, back.opt_state), (fp8.params, fp8.opt_state))
    back, loss = plain(back, x)
    assert back.fp8 == back.fp8_microbatch == {} and np.isfinite(loss)


def test_another_history_length_on_restore(tmp_path):
    longer = DelayedScaling(amax_history_len=7)
    tx, x = optax.adamw(1e-2), data(8, 16)
    state, _ = make_step()(create(tx), x)
    saved(tmp_path / "state", state)
    state = restored(tmp_path / "state", jax.eval_shape(lambda: create(tx)))
    with pytest.raises(ValueError, match=r"length 4.*amax_history_len=7.*te_jax\.convert_fp8_metas"):
        make_step(longer)(state, x)
    new, _ = make_step(longer)(state.with_fp8(te.convert_fp8_metas(state.fp8, longer)), x)
    np.testing.assert_array_equal(new.fp8["fp8_metas"]["first"]["x_amax_history"][:5], np.zeros(5))
    assert newest(new.fp8) == newest(state.fp8) == float(jnp.abs(x).max())


# -- what it says no to ----------------------------------------------------------------------------------------------


def test_errors():
    state, x = create(optax.sgd(0.1)), data(8, 16)
    with te.autocast(True, RECIPE):
        grads, fp8 = jax.grad(loss_fn, (0, 1))(state.params, state.fp8, x)
        with pytest.raises(TypeError, match=r"grads is dict.*argnums=\(0, 1\)"):
            state.apply_gradients(grads=grads)
        with pytest.raises(ValueError, match="differentiate with respect to state.fp8"):
            state.apply_gradients(grads=(grads, {}))
    two = {"a": optax.MultiSteps(optax.sgd(0.1), 2), "b": optax.MultiSteps(optax.sgd(0.1), 3)}
    with pytest.raises(ValueError, match="2 optax.MultiSteps.*around the whole optimizer"):
        create(optax.partition(two, lambda p: {"first": "a", "second": "b"}))
    nested = optax.MultiSteps(optax.MultiSteps(optax.sgd(0.1), 2).gradient_transformation(), 3)
    with pytest.raises(ValueError, match="2 optax.MultiSteps"):
        create(nested)
    with te.autocast(True, RECIPE), pytest.raises(TypeError, match=r"argnums=\(0, 1\)"):
        state.apply_gradients(grads=(grads, None))
    with pytest.raises(ValueError, match="with_fp8: fp8 has FP8 state at first/.* no collection"):
        state.with_fp8(state.fp8["fp8_metas"])
    with pytest.raises(ValueError, match="max_fp8_metas: .* pass gradients with respect to `before`"):
        te.max_fp8_metas(state.fp8, {"fp8_metas": {}})
    plain = create(optax.sgd(0.1), None)
    assert int(plain.apply_gradients(grads=jax.tree.map(jnp.zeros_like, plain.params)).step) == 1


def test_under_eval_shape_and_scan():
    """`create` traces; a state is a carry of `lax.scan`."""
    state = create(optax.adam(1e-2))
    abstract = jax.eval_shape(lambda: create(optax.adam(1e-2)))
    shapes = lambda tree: jax.tree.map(lambda a: (a.shape, a.dtype), tree)
    assert shapes((abstract.params, abstract.fp8, abstract.step)) == shapes((state.params, state.fp8, state.step))
    step = make_step()
    many, _ = jax.jit(lambda state, xs: lax.scan(step, state, xs))(state, microbatches())
    for x in microbatches():
        state, _ = step(state, x)
    assert newest(many.fp8) == newest(state.fp8)
    close(many.params, state.params)
