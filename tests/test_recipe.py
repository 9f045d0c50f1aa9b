"""The law of delayed scaling, against a plain-Python account of it, and what the recipe refuses."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from te_jax.recipe import DelayedScaling, Format


def law(recipe, amaxes, fp8_max, reduce):
    """The scales after each step, from the list of all recorded amaxes: no ring buffer, no roll."""
    scale, seen, steps, scales = 1.0, [], 0, []
    for amax in amaxes:
        if math.isfinite(amax) and amax > 0:
            seen.append(amax)
            if steps % recipe.interval == 0:
                scale = min(
                    fp8_max / reduce(seen[-recipe.amax_history_len :]) / 2**recipe.margin, 3.4028234663852886e38
                )
            steps += 1
        scales.append(scale)
    return scales


def run(recipe, amaxes, fp8_max=448.0):
    state, scales = (jnp.ones(1), jnp.zeros(recipe.amax_history_len)), []
    step = jax.jit(lambda state, amax: recipe.new_state(*state, amax, fp8_max))
    for amax in amaxes:
        state = step(state, jnp.float32(amax))
        scales.append(float(state[0][0]))
    return scales, np.asarray(state[1])


AMAXES = [2.890625, 1.0, 8.0, 0.0, 0.5, math.inf, 0.25, math.nan, 0.125, 3.0, 2.0, 1.0, 0.5, 0.25]


@pytest.mark.parametrize("length", [1, 2, 4, 1024])
@pytest.mark.parametrize(
    "algo,reduce", [("max", max), ("most_recent", lambda s: s[-1]), (lambda h: h[0], lambda s: s[-1])]
)
@pytest.mark.parametrize("interval", [1, 3])
@pytest.mark.parametrize("margin", [0, 2])
def test_law(length, algo, reduce, interval, margin):
    recipe = DelayedScaling(amax_history_len=length, amax_compute_algo=algo, interval=interval, margin=margin)
    scales, _ = run(recipe, AMAXES)
    np.testing.assert_allclose(scales, law(recipe, AMAXES, 448.0, reduce), rtol=2e-7)  # a division in f32


def test_vector():
    """The vector that TransformerEngine 2.20 gave: L = 4, amax 2.890625 twice; and a gradient of ones."""
    recipe = DelayedScaling(amax_history_len=4)
    scales, history = run(recipe, [2.890625])
    assert scales[0] == pytest.approx(154.9838, abs=1e-4)
    np.testing.assert_array_equal(history, np.float32([0, 0, 0, 2.890625]))
    np.testing.assert_array_equal(run(recipe, [2.890625] * 2)[1], np.float32([0, 0, 2.890625, 2.890625]))
    assert run(recipe, [1.0], 57344.0)[0] == [57344.0]


def test_window_holds_the_last_amaxes():
    _, history = run(DelayedScaling(amax_history_len=3), [5.0, 4.0, 3.0])
    np.testing.assert_array_equal(history, np.float32([0, 4, 3]))
    scales, _ = run(DelayedScaling(amax_history_len=3), [5.0, 4.0, 3.0, 2.0])
    assert scales[2] == pytest.approx(448 / 5) and scales[3] == pytest.approx(448 / 4)


def test_tiny_amax_clamps_the_scale():
    scales, _ = run(DelayedScaling(amax_history_len=4), [1e-37])
    assert scales[0] == float(jnp.finfo(jnp.float32).max)


def test_unrecorded_amax_changes_nothing():
    recipe = DelayedScaling(amax_history_len=4, interval=2)
    for amax in (0.0, math.inf, math.nan):
        before, after = run(recipe, [2.0, 1.0, 3.0]), run(recipe, [2.0, 1.0, 3.0, amax])
        assert before[0][-1] == after[0][-1]
        np.testing.assert_array_equal(before[1], after[1])


def test_custom_scaling():
    recipe = DelayedScaling(scaling_factor_compute_algo=lambda amax, scale, fp8_max, recipe: fp8_max / (2 * amax))
    assert run(recipe, [2.0])[0] == [112.0]


@pytest.mark.parametrize(
    "error,text,kwargs",
    [
        (ValueError, "amax_history_len is 0", dict(amax_history_len=0)),
        (ValueError, "interval is 0", dict(interval=0)),
        (ValueError, "E5M2 has too few bits", dict(fp8_format=Format.E5M2)),
        (TypeError, "pass a recipe.Format", dict(fp8_format="HYBRID")),
        (ValueError, "amax_compute_algo is 'min'", dict(amax_compute_algo="min")),
        (ValueError, "override_linear_precision is", dict(override_linear_precision=(True,))),
        (ValueError, "scaling_factor_compute_algo is 3", dict(scaling_factor_compute_algo=3)),
        (ValueError, "override_linear_precision is True", dict(override_linear_precision=True)),
        (ValueError, "margin is nan", dict(margin=math.nan)),
        (ValueError, "reduce_amax is None", dict(reduce_amax=None)),
        (ValueError, "amax_history_len is True", dict(amax_history_len=True)),
        (ValueError, "fp8_dpa is 1", dict(fp8_dpa=1)),
        (ValueError, "fp8_mha is True", dict(fp8_dpa=True, fp8_mha=True)),
        (TypeError, "amax_history_length", dict(amax_history_length=16)),
    ],
)
def test_refused(error, text, kwargs):
    with pytest.raises(error, match=text):
        DelayedScaling(**kwargs)


def test_value_semantics():
    assert DelayedScaling(margin=1) == DelayedScaling(margin=1) and hash(DelayedScaling()) == hash(DelayedScaling())
    assert DelayedScaling(interval=-1).interval == 1  # how older code spells "every step"
    assert Format.HYBRID.dtype("bwd") == jnp.float8_e5m2 and Format.E4M3.dtype("bwd") == jnp.float8_e4m3fn
