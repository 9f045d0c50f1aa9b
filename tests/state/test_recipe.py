"""The laws of delayed and of current scaling, against plain-Python accounts of them; what recipes refuse, and when two
are equal. The laws of blocks: test_recipe_block.py, test_recipe_mxfp8.py."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from te_jax.layers import dense
from te_jax.recipe import (
    DelayedScaling,
    FixedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MXFP8BlockScaling,
)


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


# -- current scaling -----------------------------------------------------------------------------------------


def law_of_current(recipe, amax, top):
    if not math.isfinite(amax) or amax == 0:
        return 1.0
    scale = min(top / max(amax, recipe.amax_epsilon), 3.4028234663852886e38)
    return 2.0 ** math.floor(math.log2(scale)) if recipe.power_2_scale else scale


@pytest.mark.parametrize(
    "recipe",
    [Float8CurrentScaling(), Float8CurrentScaling(Format.E4M3, power_2_scale=True, amax_epsilon=0.5)],
    ids=["default", "power_2"],
)
@pytest.mark.parametrize("top", [448.0, 57344.0])
def test_law_of_current_scaling(recipe, top):
    scale = jax.jit(lambda amax: recipe.scale("x", None, amax, top))
    for amax in map(np.float32, (2.890625, 448.0, 1.0, 0.1, 1e-30, 1e-37, 3e38, 0.0, math.inf, math.nan)):
        want = law_of_current(recipe, float(amax), top)
        assert float(scale(amax)) == pytest.approx(want, rel=0 if recipe.power_2_scale else 2**-23), amax


def test_power_of_2_is_exact_where_a_logarithm_is_not():
    """Just under a power of 2, where log2 in f32 is the integer above."""
    below = float(np.nextafter(np.float32(8), np.float32(0)))
    recipe = Float8CurrentScaling(power_2_scale=True)
    assert float(recipe.scale("x", None, jnp.float32(1 / 2**20), below / 2**20)) == 4.0


# -- every recipe --------------------------------------------------------------------------------------------

SCALES = "x_scale", "kernel_scale", "grad_scale"
OF_ALL = [
    (ValueError, "fp8_format is .*E5M2 has too few bits", dict(fp8_format=Format.E5M2)),
    (TypeError, "pass te_jax.recipe.Format.HYBRID or", dict(fp8_format="HYBRID")),
    (ValueError, "override_linear_precision is", dict(override_linear_precision=(True,))),
    (ValueError, "override_linear_precision is True", dict(override_linear_precision=True)),
    *((ValueError, "exclude is .*pass a tuple of patterns", dict(exclude=e)) for e in ("mlp", ("",), (1,), 3, None)),
]
WITHOUT_ATTENTION = [
    (ValueError, r"fp8_dpa is True; .*DelayedScaling\(fp8_dpa=True\)", dict(fp8_dpa=True)),
    (ValueError, "fp8_mha is True", dict(fp8_mha=True)),
]
REFUSED = {
    DelayedScaling: [
        (ValueError, "amax_history_len is 0", dict(amax_history_len=0)),
        (ValueError, "amax_history_len is True", dict(amax_history_len=True)),
        (ValueError, "interval is 0", dict(interval=0)),
        (ValueError, "amax_compute_algo is 'min'", dict(amax_compute_algo="min")),
        (ValueError, "scaling_factor_compute_algo is 3", dict(scaling_factor_compute_algo=3)),
        (ValueError, "margin is nan", dict(margin=math.nan)),
        (ValueError, "reduce_amax is None", dict(reduce_amax=None)),
        (ValueError, "fp8_dpa is 1", dict(fp8_dpa=1)),
        (ValueError, "fp8_mha is True", dict(fp8_dpa=True, fp8_mha=True)),
        (TypeError, "amax_history_length", dict(amax_history_length=16)),
    ],
    Float8CurrentScaling: [
        *WITHOUT_ATTENTION,
        (ValueError, "power_2_scale is 1; pass a bool", dict(power_2_scale=1)),
        *((ValueError, "amax_epsilon is", dict(amax_epsilon=e)) for e in (-1e-6, math.nan, math.inf, 1e39, "0", True)),
        (ValueError, "split_accumulator is", dict(split_accumulator=True)),
        (ValueError, "reduce_amax is None", dict(reduce_amax=None)),
        (TypeError, "margin", dict(margin=0)),
    ],
    FixedScaling: [
        *WITHOUT_ATTENTION,
        *(
            (ValueError, f"{field} is .*; pass a number from 2\\*\\*-126", {field: bad})
            for field, bad in zip(SCALES * 3, (0, -1.0, math.nan, math.inf, "1", True, 2.0**127, 1e-39, None))
        ),
        (ValueError, "split_accumulator is", dict(split_accumulator=None)),
        (TypeError, "reduce_amax", dict(reduce_amax=True)),
    ],
    Float8BlockScaling: [
        *WITHOUT_ATTENTION,
        (ValueError, "use_f32_scales is 1; pass a bool", dict(use_f32_scales=1)),
        *((ValueError, "amax_epsilon is", dict(amax_epsilon=e)) for e in (-1e-6, math.nan, "0", True)),
        (TypeError, "split_accumulator", dict(split_accumulator=(False, False, False))),
    ],
    MXFP8BlockScaling: [
        *WITHOUT_ATTENTION,
        (TypeError, "margin", dict(margin=0)),
        (TypeError, "split_accumulator", dict(split_accumulator=(False, False, False))),
    ],
}
CASES = [(recipe, *case) for recipe, own in REFUSED.items() for case in (*OF_ALL, *own)]


@pytest.mark.parametrize("recipe,error,text,kwargs", CASES, ids=lambda a: getattr(a, "__name__", None))
def test_refused(recipe, error, text, kwargs):
    said = f"{recipe.__name__}: {text}" if error is ValueError else text
    with pytest.raises(error, match=said):
        recipe(**kwargs)


@pytest.mark.parametrize("recipe", [Float8CurrentScaling, "current"])
def test_no_recipe(recipe):
    with pytest.raises(TypeError, match="dense: recipe is .*; pass "):
        dense(jnp.ones((2, 4)), jnp.ones((4, 3)), recipe=recipe)


@pytest.mark.parametrize("recipe", REFUSED)
def test_value_semantics(recipe):
    same = {
        FixedScaling: dict(x_scale=1, kernel_scale=64),
        Float8CurrentScaling: dict(amax_epsilon=0),
        Float8BlockScaling: dict(amax_epsilon=0),
    }
    for one, other in ((recipe(**same.get(recipe, {})), recipe()), (recipe(exclude=["a"]), recipe(exclude=("a",)))):
        assert one == other and hash(one) == hash(other)


def test_recipes_that_differ():
    with_another_option = [
        DelayedScaling(margin=1),
        Float8CurrentScaling(Format.E4M3, power_2_scale=True, amax_epsilon=0.5),
        FixedScaling(2.0),
        Float8BlockScaling(True, Format.HYBRID, amax_epsilon=0.5),
        MXFP8BlockScaling(Format.HYBRID),
    ]
    each = [*with_another_option, *(recipe() for recipe in REFUSED)]
    assert not [pair for pair in itertools.combinations(each, 2) if pair[0] == pair[1]]
    assert DelayedScaling(interval=-1).interval == 1  # how older code spells "every step"
    assert Format.HYBRID.dtype("bwd") == jnp.float8_e5m2 and Format.E4M3.dtype("bwd") == jnp.float8_e4m3fn
