"""What corrupts FP8 state in a careless training loop, and the ways that do not. Where it is cheap the careless one
runs next to it: it must fail.

Elsewhere: a module applied twice, shared by weight tying, by field, inside remat and scan, remat, forward passes
(test_flax_state.py); `nn.scan` with shared weights, scans in the loss, several `apply`s (test_combine.py);
accumulation, clipping, donation, checkpoints of bf16, FP8 and other histories (test_train_state.py); killed runs
(test_killed_run.py).
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax import lax
from jax.sharding import PartitionSpec as P
from quick_init import quick_init
from shared_uses import CASES
from small_net import NET, RECIPE, L, close, create, data, loss_fn, make_step, newest
from states import assert_equal

import te_jax as te
import te_jax.flax as te_flax
from te_jax.recipe import DelayedScaling, Format

HISTORY = "_amax_history"


def tensors(fp8):
    """{path: (scale f32[1], history f32[L])}"""
    leaves = {
        jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(fp8)
    }
    names = [name.removesuffix("_scale") for name in leaves if name.endswith("_scale")]
    return {name: (leaves[name + "_scale"], leaves[name + HISTORY]) for name in names}


def fp8_max(tensor):
    return 57344 if tensor.rsplit("/", 1)[-1].startswith("grad") else 448


def assert_safe(fp8):
    """Finite, and no scale is too large for the amaxes that its history holds."""
    for name, (scale, history) in tensors(fp8).items():
        assert np.isfinite(history).all() and (history >= 0).all() and np.isfinite(scale).all(), name
        assert (scale > 0).all() and scale * history.max() <= fp8_max(name) * (1 + 1e-6), name


# -- uses that autodiff adds up, without te.value_and_grad ------------------------------------------------------------


@pytest.mark.parametrize(
    "case, options",
    [("scan", {}), ("remat", {}), ("microbatches", dict(amax_compute_algo="most_recent")), ("scan", dict(interval=2))],
    ids=["scan", "remat", "microbatches most_recent", "scan interval"],
)
def test_added_up_states_stay_safe(case, options):
    """`jax.value_and_grad` where `te.value_and_grad` belongs: no scale is too large, histories stay near the amaxes."""
    module, loss = CASES[case]
    xs = data(3, 8, 16) * jnp.asarray([2.0, 7.0, 3.0])[:, None, None]
    amax, uses = float(jnp.abs(xs).max()), 3
    with te.autocast(True, DelayedScaling(amax_history_len=L, **options)):
        variables = nn.meta.unbox(quick_init(module.init)(jax.random.key(0), xs if case != "microbatches" else xs[0]))
        state = create(optax.sgd(0.0)).replace(params=variables["params"], fp8={"fp8_metas": variables["fp8_metas"]})
        grad = jax.jit(jax.grad(lambda params, fp8: loss({"params": params, **fp8}, xs), (0, 1)))
        naive, naive_scales = state.fp8, []

        @jax.jit
        def step(state, naive):
            new = state.apply_gradients(grads=grad(state.params, state.fp8))
            return new, te.update_fp8_metas(grad(state.params, naive)[1])

        for _ in range(2 * L):
            state, naive = step(state, naive)
            naive_scales.append(tensors(naive)["fp8_metas/shared/dense/x"][0])
    scale, history = tensors(state.fp8)["fp8_metas/shared/dense/x"]
    assert 448 / amax / uses * (1 - 1e-6) <= scale[0] <= 448 / amax * (1 + 1e-6)
    assert amax <= history[1:].min() and history[1:].max() <= uses * amax
    _, naive_history = tensors(naive)["fp8_metas/shared/dense/x"]
    assert naive_history.max() > uses**2 * amax, "sums of sums"
    assert options == {} or max(naive_scales) > 2 * 448 / amax, "too large"


# -- losses and batches that are not finite, or of another size -------------------------------------------------------


def scaled_loss(params, fp8, batch):
    x, factor = batch
    return factor * loss_fn(params, fp8, x)


@pytest.mark.parametrize("bad", [0.0, 2.0**20, np.inf, "nan batch", "inf batch"])
def test_a_bad_step_leaves_a_state_that_recovers(bad):
    """What is not finite enters no history; once a finite outlier has left them, the state is as without it."""
    tx = optax.apply_if_finite(optax.sgd(0.0), 5)
    width = 512  # in rows of 256 and more XLA:CPU's maximum drops a NaN
    state, clean = create(tx, width=width), create(tx, width=width)
    good = [(data(8, width, seed=i), jnp.float32(1)) for i in range(L + 1)]
    state, _ = BAD_STEP(state, good[0])
    clean, _ = BAD_STEP(clean, good[0])
    x, factor = data(8, width, seed=9), jnp.float32(1)
    if isinstance(bad, str):
        x = x.at[0, 0].set(jnp.nan if bad == "nan batch" else jnp.inf)
    else:
        factor = jnp.float32(bad)
    before, (state, _) = tensors(state.fp8), BAD_STEP(state, (x, factor))
    assert_safe(state.fp8)
    assert all(np.isfinite(p).all() for p in jax.tree.leaves(state.params))
    unseen = {0.0: ["first/grad", "second/grad"], np.inf: ["second/grad"], "nan batch": ["first/x", "second/grad"]}
    for name in unseen.get(bad, ["first/x"] if bad == "inf batch" else []):
        assert_equal(tensors(state.fp8)[f"fp8_metas/{name}"], before[f"fp8_metas/{name}"])
    for batch in good[1:]:
        state, loss = BAD_STEP(state, batch)
        assert np.isfinite(loss)
        assert_safe(state.fp8)
        clean, _ = BAD_STEP(clean, batch)
    # Gradients were quantized by other scales on the way, and an E5M2 step is 1/4.
    close(state.fp8, clean.fp8, rtol=0.25)


BAD_STEP = make_step(loss_fn=scaled_loss)


# -- devices ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduce", [None, "psum", "pmean"])
def test_gradients_in_shard_map(reduce):
    """Amaxes meet across devices by max. A mean of params' gradients is all that is left to do; over the whole tree
    pmean is harmless, and psum is the careless way."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    x = data(16, 16) * jnp.arange(1.0, 17)[:, None]

    def step(params, fp8, x):
        if reduce:  # each device takes its own gradient, as in older programs
            params, fp8 = lax.pcast((params, fp8), "data", to="varying")
        grads, new = te.value_and_grad(loss_fn, (0, 1))(params, fp8, x)[1]
        if reduce is None:  # replicated parameters have their gradients summed by jax
            return jax.tree.map(lambda g: g / 8, grads), new, new
        return lax.pmean(grads, "data"), lax.pmax(new, "data"), getattr(lax, reduce)(new, "data")

    state = create(optax.sgd(0.1))

    @jax.jit
    def both(state, x):
        mapped = jax.shard_map(step, mesh=mesh, in_specs=(P(), P(), P("data")), out_specs=P())
        grads, new, whole = mapped(state.params, state.fp8, x)
        got = state.apply_gradients(grads=(grads, new))
        return grads, got, te.update_fp8_metas(whole), te.value_and_grad(loss_fn, (0, 1))(state.params, state.fp8, x)[1]

    with te.autocast(True, RECIPE):
        grads, got, careless, (want_grads, want) = both(state, x)
    close(grads, want_grads, rtol=0.05, atol=1e-2)
    amax = float(jnp.abs(x).max())
    for name, (scale, _) in tensors(want).items():
        if "grad" not in name:  # a device's mean loss has other gradients than the mean over all
            np.testing.assert_allclose(tensors(got.fp8)[name][0], scale, rtol=1e-2)
    assert_safe(got.fp8)
    assert newest(got.fp8) == amax
    scale, history = tensors(careless)["fp8_metas/first/x"]
    assert scale <= 448 / amax * (1 + 1e-6)
    np.testing.assert_allclose(history.max(), amax * (8 if reduce == "psum" else 1), rtol=1e-5)


# -- parts of the model that are evaluated, averaged or frozen --------------------------------------------------------


def test_evaluation_changes_nothing():
    state, _ = make_step()(create(optax.sgd(0.1)), data(8, 16))
    x = 100 * data(8, 16, seed=1)
    with te.autocast(True, RECIPE):
        _, after = jax.jit(partial(state.apply_fn, mutable=True))(state.variables, x)
        loss = te.value_and_grad(loss_fn)(state.params, state.fp8, x)[0]  # differentiated only by params
    assert_equal({"fp8_metas": after["fp8_metas"]}, state.fp8)
    assert np.isfinite(loss)


def test_moving_average_of_parameters():
    """It averages only params and runs with the state of the last step; averaged scales and histories are no state."""
    state, step = create(optax.sgd(1e-6)), make_step()
    average, naive = state.params, state.fp8
    for factor in (0.5, 50, 50):
        state, _ = step(state, factor * data(8, 16))
        average = optax.incremental_update(state.params, average, 0.1)
        naive = optax.incremental_update(state.fp8, naive, 0.1)
    x = 50 * data(8, 16, seed=5)
    apply = jax.jit(NET.apply)
    exact = apply({"params": average}, x)
    error = lambda y: float(jnp.linalg.norm(y - exact) / jnp.linalg.norm(exact))
    with te.autocast(True, RECIPE):
        got = apply({"params": average, **state.fp8}, x)
        careless = apply({"params": average, **naive}, x)
    assert error(got) < 0.1 < 0.5 < error(careless)


def test_frozen_parameters():
    """Frozen by the optimizer, or kept out of the backward pass, whose zeros are no state."""
    frozen = optax.partition(
        {"train": optax.sgd(0.1), "freeze": optax.set_to_zero()}, lambda p: {"first": "freeze", "second": "train"}
    )
    x = data(8, 16)
    state = create(frozen)
    new, _ = make_step()(state, x)
    assert_equal(new.params["first"], state.params["first"])
    assert newest(new.fp8) == float(jnp.abs(x).max())

    class Stopped(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = lax.stop_gradient(te_flax.DenseGeneral(16, name="first")(x))
            return te_flax.DenseGeneral(4, name="second")(x)

    stopped = lambda params, fp8, x: jnp.mean(Stopped().apply({"params": params, **fp8}, x) ** 2)
    with te.autocast(True, RECIPE):
        _, grads = jax.jit(jax.value_and_grad(stopped, (0, 1)))(new.params, new.fp8, 3 * x)
        again = new.apply_gradients(grads=grads)
        naive = te.update_fp8_metas(grads[1])
    assert_equal(again.fp8["fp8_metas"]["first"], new.fp8["fp8_metas"]["first"])
    assert newest(again.fp8, layer="second") > newest(new.fp8, layer="second")
    assert newest(naive) == 0 and newest(new.fp8) > 0, "the state of the frozen layer is lost"


# -- another recipe ---------------------------------------------------------------------------------------------------


def test_converted_scales_fit_the_new_format():
    """From E5M2 gradients to E4M3: a scale that is kept would saturate all but the smallest 1/128 for one step."""
    state, _ = make_step()(create(optax.sgd(0.1)), data(8, 16))
    e4m3 = DelayedScaling(amax_history_len=2, fp8_format=Format.E4M3, margin=1)
    converted = te.convert_fp8_metas(state.fp8, e4m3)
    for name, (scale, history) in tensors(converted).items():
        assert history.shape == (2,) and history[-1] == tensors(state.fp8)[name][1][-1] > 0
        np.testing.assert_allclose(scale, 448 / history[-1] / 2, rtol=1e-6)
    fresh = create(optax.sgd(0.1)).fp8
    assert all(float(scale[0]) == 1 for scale, _ in tensors(te.convert_fp8_metas(fresh, e4m3)).values())
