"""`convert_fp8_metas` reads the FP8 state of TransformerEngine before 2.3: it is what the same amaxes leave here."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from probes import Probe, ended

import te_jax as te
from te_jax.recipe import DelayedScaling

STEPS, LAYERS = 6, 2
TENSORS = ("x", "kernel", "grad")


def state_there(amaxes, fp8_max, length, algo, late):
    """(scale, history f32[L]) as these versions kept them after steps with `amaxes`: a history is rolled before a step,
    whose amax goes into slot 0, and a scale follows from it after the step, or, if `late`, before the next one."""
    scale, history = np.float32(1), np.zeros(length, np.float32)
    law = lambda: fp8_max / (history.max() if algo == "max" else history[0])
    for step, amax in enumerate(amaxes):
        scale = law() if late and step else scale
        history = np.roll(history, -1)
        history[0] = amax
        scale = scale if late else law()
    return np.asarray([scale], np.float32), history


def state_here(amaxes, fp8_max, length, algo):
    """What the law of `DelayedScaling` makes of them: slot 0 is free, and the newest amax is last."""
    seen = amaxes[-length:].max() if algo == "max" else amaxes[-1]
    kept = amaxes[len(amaxes) - length + 1 :]
    return np.asarray([fp8_max / seen], np.float32), np.concatenate([np.zeros(1, np.float32), kept])


def module_there(gemms, length, algo, rows, seed):
    """One module's state by its old names, and by the new ones."""
    recipe, old, new = DelayedScaling(amax_history_len=length, amax_compute_algo=algo), {}, {}
    drawn = np.random.default_rng(seed).uniform(0.5, 8, (gemms, 3, STEPS)).astype(np.float32)
    for gemm, (i, (short, tensor)) in itertools.product(range(gemms), enumerate(zip("iwg", TENSORS))):
        fp8_max = recipe.fp8_format.max("bwd" if tensor == "grad" else "fwd")
        scale, history = state_there(drawn[gemm, i], fp8_max, length, algo, late=not rows)
        old |= {f"scale_{short}_{gemm}": scale, f"amax_{short}_{gemm}": history}
        name = f"{tensor}_{gemm}" if gemms > 1 else tensor
        here = state_here(drawn[gemm, i], fp8_max, length, algo)
        new |= {f"{name}_scale": here[0], f"{name}_amax_history": here[1]}
    if rows:
        stack = lambda kind: np.stack([leaf for name, leaf in old.items() if name.startswith(kind)])
        scale = stack("scale")
        old = dict(fp8_meta_amax=stack("amax"), fp8_meta_scale=scale, fp8_meta_scale_inv=1 / scale, fp8_max=scale)
    return old, new


def model_there(length, algo, rows, stacked):
    """Collections of a model with modules of one GEMM and of two, old and new."""
    old, new = {}, {}
    for seed, (name, gemms) in enumerate((("dense", 1), ("mlp", 2))):
        modules = [module_there(gemms, length, algo, rows, 10 * seed + i) for i in range(LAYERS if stacked else 1)]
        pick = [jax.tree.map(lambda *a: np.stack(a) if stacked else a[0], *of) for of in zip(*modules)]
        old[name], new[name] = pick
    return {"fp8_meta_collection" if rows else "fp8_metas": {"layers": old}}, {"fp8_metas": {"layers": new}}


LAWS = (4, "max", True), (4, "max", False), (4, "most_recent", False), (1, "max", True)
CASES = list(itertools.product(LAWS, (True, False)))


def test_it_is_the_state_of_the_same_amaxes():
    for (length, algo, stacked), rows in CASES:
        old, new = model_there(length, algo, rows, stacked)
        recipe = DelayedScaling(amax_history_len=length, amax_compute_algo=algo)
        got = te.convert_fp8_metas({"batch_stats": 1, **old}, recipe)
        assert set(got) == {"batch_stats", "fp8_metas"}
        got = got["fp8_metas"]
        assert jax.tree.structure(got) == jax.tree.structure(new["fp8_metas"])
        # Both divide the same two f32; XLA's quotient may differ in the last place.
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2.0**-23), got, new["fp8_metas"])


def test_of_another_length_and_dropped():
    old, new = model_there(4, "max", True, False)
    longer = te.convert_fp8_metas(old, DelayedScaling(amax_history_len=16))["fp8_metas"]["layers"]["mlp"]
    kept = new["fp8_metas"]["layers"]["mlp"]["x_0_amax_history"][1:]
    np.testing.assert_array_equal(longer["x_0_amax_history"][-3:], kept)
    assert te.convert_fp8_metas({"a": 1, **old}, te.recipe.Float8CurrentScaling()) == {"a": 1}


RECIPE = DelayedScaling(amax_history_len=4)


def converted(metas, collection="fp8_metas", f=te.convert_fp8_metas, args=(RECIPE,)):
    return lambda: f({collection: metas}, *args)


ONE = {"scale_i_0": np.ones(1, np.float32), "amax_i_0": np.ones(4, np.float32)}
NEW = {"x_scale": np.ones(1, np.float32), "x_amax_history": np.ones(4, np.float32)}
HINT = "te_jax.convert_fp8_metas.*reads this older name"
PROBES = [
    Probe("inverses go", lambda: "x_scale_inv" not in str(converted(NEW | {"x_scale_inv": NEW["x_scale"]})())),
    Probe("one GEMM only", lambda: set(converted({"a": ONE})()["fp8_metas"]["a"]) == {"x_scale", "x_amax_history"}),
    Probe("without the name of the collection", lambda: set(te.convert_fp8_metas({"a": ONE}, RECIPE)) == {"a"}),
    Probe("no amax", converted({"scale_i_0": ONE["scale_i_0"]}), UserWarning, "fp8_metas has no x_amax_history"),
    Probe("both names", converted(ONE | NEW), ValueError, "fp8_metas/x_scale is there by an older name too; drop one"),
    Probe("rows", converted({"fp8_meta_amax": np.ones((4, 2))}), ValueError, r"amax has shape \(4, 2\); pass .*3n"),
    Probe("bf16", converted(ONE | {"scale_i_0": jnp.ones(1, jnp.bfloat16)}), TypeError, "x_scale is bfloat16.*float32"),
    Probe(
        "both collections",
        lambda: te.convert_fp8_metas({"fp8_metas": NEW, "fp8_meta_collection": ONE}, DelayedScaling()),
        ValueError,
        "both 'fp8_meta_collection' and 'fp8_metas'; pass one",
    ),
    Probe("update", converted(ONE, f=te.update_fp8_metas, args=()), ValueError, f"amax_i_0 is no leaf.*{HINT}|{HINT}"),
    Probe(
        "update of the old collection",
        converted(ONE, "fp8_meta_collection", te.update_fp8_metas, ()),
        ValueError,
        "'fp8_meta_collection', FP8 state of an older.*convert_fp8_metas",
    ),
]


@pytest.mark.parametrize("probe", PROBES, ids=lambda probe: probe.name)
def test_what_is_no_such_state(probe):
    assert not ended(probe)
