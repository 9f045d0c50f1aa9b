"""The examples run, resume bit for bit, and say what they should. How well they learn is not tested here."""

import json
import re
import shutil
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from example_runs import EXAMPLES, SMALL, compiled_once, rendered, train, unrendered  # noqa: F401

from te_jax import recipe

import plot_runs  # isort: skip
import train_gpt  # isort: skip
from gpt import (  # isort: skip
    checkpoint,
    colours,
    config,
    data,
    flops,
    health,
    plot,
    progress,
    report,
    steps,
)
from gpt.model import GPT

LLAMA = config.Model(
    layers=2, hidden=64, ffn=96, heads=4, gqa_groups=2, norm="rmsnorm", activations=("silu", "linear"),
    use_bias=False, rope=True, tie_embeddings=False,
)  # fmt: skip

QUICKSTART = """\
import flax
import jax
import jax.numpy as jnp
import te_jax as te
import te_jax.flax as te_flax
from te_jax import recipe

BATCH, SEQLEN, HIDDEN = 32, 128, 1024
rng = jax.random.PRNGKey(0)
init_rng, data_rng = jax.random.split(rng)
inp = jax.random.normal(data_rng, [BATCH, SEQLEN, HIDDEN], jnp.float32)
fp8_recipe = recipe.DelayedScaling(margin=0, interval=1, fp8_format=recipe.Format.HYBRID)

with te.fp8_autocast(enabled=True, fp8_recipe=fp8_recipe):
    model = te_flax.DenseGeneral(features=HIDDEN)

    def loss_fn(params, other_vars, inp):
        out = model.apply({'params': params, **other_vars}, inp)
        return jnp.mean(out)

    variables = model.init(init_rng, inp)
    other_variables, params = flax.core.pop(variables, 'params')
    fwd_bwd_fn = jax.value_and_grad(loss_fn, argnums=(0, 1))
    for _ in range(10):
        loss, (param_grads, other_grads) = fwd_bwd_fn(params, other_variables, inp)
        other_variables = te.update_fp8_metas(other_grads)
"""


def saved_state(directory) -> dict:
    manager = checkpoint.ocp.CheckpointManager(directory)
    args = checkpoint.ocp.args
    items = manager.restore(
        manager.latest_step(), args=args.Composite(state=args.StandardRestore(), fp8=args.StandardRestore())
    )
    return {"state": items["state"], "fp8": items["fp8"]}


# -- quickstart --------------------------------------------------------------------------------


def smaller(program: str, sizes: str = "2, 16, 64") -> str:
    assert "= 32, 128, 1024" in program
    return program.replace("= 32, 128, 1024", f"= {sizes}")


def test_quickstart_is_the_program_as_printed():
    ours = (EXAMPLES / "quickstart.py").read_text().splitlines()
    position = 0
    for line in filter(None, QUICKSTART.splitlines()):
        assert line in ours[position:], f"missing or out of order: {line}"
        position = ours.index(line, position) + 1


def test_quickstart_learns_and_shows_its_scales(capsys):
    exec(smaller((EXAMPLES / "quickstart.py").read_text(), "4, 64, 64"), {})
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 10
    losses, x, kernel, grad = np.array([re.findall(r"[a-z] ([\d.e+]+)", line) for line in lines], float).T
    assert (np.diff(losses) < 0).all() and losses[-1] < losses[0] / 100
    assert x[0] == kernel[0] == grad[0] == 1 and (x[1:] == x[1]).all()
    assert (np.diff(kernel[1:]) <= 0).all() and kernel[-1] < kernel[1], "the kernel grows"
    assert (grad[1:] > 1e6).all(), "the gradient is small"


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"jax.random.PRNGKey": "jax.random.key"},
        {"jax.value_and_grad(loss_fn, argnums=(0, 1))": "jax.jit(jax.value_and_grad(loss_fn, (0, 1)))"},
        {"model.init(": "jax.jit(model.init)(", "te.update_fp8_metas(": "jax.jit(te.update_fp8_metas)("},
    ],
    ids=["as printed", "typed keys", "jit of the step", "jit of init and update"],
)
def test_quickstart_variants(change):
    program = smaller(QUICKSTART)
    for old, new in change.items():
        assert old in program
        program = program.replace(old, new)
    scope = {}
    exec(program, scope)
    metas = scope["other_variables"]["fp8_metas"]
    amax = float(jnp.max(jnp.abs(scope["inp"])))
    np.testing.assert_allclose(metas["x_scale"], [448 / amax], rtol=1e-6)
    np.testing.assert_allclose(metas["x_amax_history"][-10:], [amax] * 10, rtol=1e-6)
    assert all(g.any() for g in jax.tree.leaves(scope["param_grads"]))


# -- training ----------------------------------------------------------------------------------


def test_compare_writes_curves_and_checks_the_gap(tmp_path, rendered):  # noqa: F811
    code, results, said = train(tmp_path, "--compare", "--check-gap", "1.0")
    assert code == 0 and "gap (FP8 - bf16)" in said
    fp8, bf16 = (np.array(results["runs"][p]["losses"]) for p in ("fp8", "bf16"))
    np.testing.assert_array_equal(fp8[:, 0], np.arange(1, 13))
    assert (fp8[:, 1] != bf16[:, 1]).any(), "both ran in the same precision"
    np.testing.assert_allclose(fp8[:, 1], bf16[:, 1], atol=0.3)
    assert fp8[-1, 1] < fp8[0, 1] - 0.5, "the loss does not fall"
    assert [s for s, _ in results["runs"]["fp8"]["held_out"]] == [6, 12]
    assert results["args"]["seed"] == 0 and results["versions"]["jax"] == jax.__version__
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")

    # Finished runs are read back, nothing is trained again, and no gap is below 0.
    code, again, _ = train(tmp_path, "--compare", "--check-gap", "0", "--resume")
    assert code == 1
    assert again["runs"]["fp8"]["losses"] == results["runs"]["fp8"]["losses"]
    assert again["gap_last_tenth"] == results["gap_last_tenth"]


def test_resume_is_bit_for_bit(tmp_path, monkeypatch, rendered):  # noqa: F811
    """From a checkpoint written while training went on; and so are the numbers of --fp8-report."""
    scalars = []

    class SummaryWriter:
        def __init__(self, directory):
            assert directory == str(tmp_path / "board")

        add_scalar = staticmethod(lambda *scalar: scalars.append(scalar))
        close = staticmethod(lambda: scalars.append("closed"))

    monkeypatch.setitem(sys.modules, "tensorboardX", types.SimpleNamespace(SummaryWriter=SummaryWriter))
    options = ["--eval-every", "0", "--checkpoint-every", "5"]
    options += ["--fp8-report", "--fp8-report-every", "4", "--tensorboard", str(tmp_path / "board")]
    _, whole, _ = train(tmp_path, *options)
    expected = saved_state(tmp_path / "fp8")
    looks = check_report(tmp_path, scalars)
    shutil.rmtree(tmp_path / "fp8" / "12")
    (tmp_path / "fp8_report.json").unlink()
    scalars.clear()
    _, resumed, said = train(tmp_path, *options, "--resume")
    assert "steps 10 to 12" in said and "FP8 tensors at step 12" in said
    assert {step for *_, step in scalars[:-1]} == {12}, "those before are there already"
    assert json.loads((tmp_path / "fp8_report.json").read_text())["looks"] == looks
    assert resumed["runs"]["fp8"]["losses"] == whole["runs"]["fp8"]["losses"]
    got = saved_state(tmp_path / "fp8")
    jax.tree.map(np.testing.assert_array_equal, got, expected)
    leaves = jax.tree_util.tree_leaves_with_path(got["fp8"])
    scales = [leaf for path, leaf in leaves if path[-1].key.endswith("_scale")]
    assert scales and all((s != 1).all() and np.isfinite(s).all() for s in scales)


def check_report(out, scalars) -> list[dict]:
    """The looks of the 12 steps above, which agree with the state that was saved, and with `scalars`."""
    report = json.loads((out / "fp8_report.json").read_text())
    looks, state = report["looks"], saved_state(out / "fp8")["fp8"]["fp8_metas"]
    assert [look["step"] for look in looks] == [1, 5, 9, 12]
    assert (out / "fp8_report.png").read_bytes().startswith(b"\x89PNG")
    assert set(report["numbers"]) == set(looks[0]["tensors"]["layers/TransformerLayer_0/mlp/x_0"])
    assert len(looks[0]["tensors"]) == 12 and scalars.pop() == "closed"
    known = {}
    for look in looks:
        for path, tensor in look["tensors"].items():
            assert tensor["recorded"] == [min(look["step"], 3)]
            for number, (value,) in tensor.items():
                known[f"{number}/{path}/0", look["step"]] = value
            fp8_max = 57344 if path.rsplit("/", 1)[1].startswith("grad") else 448
            (amax,), (scale,), (headroom,) = (tensor[number] for number in ("amax", "scale", "headroom"))
            np.testing.assert_allclose(headroom, np.log2(fp8_max / amax / scale), atol=1e-5)
            assert (tensor["saturation"][0] > 0) == (amax * np.float32(scale) > fp8_max)
            if look["step"] == 1:
                assert scale == 1 and tensor["trend"] == [None]
            if look["step"] == 12:
                node = state
                for part in path.split("/")[:-1]:
                    node = node[part]
                history = node[path.rsplit("/", 1)[1] + "_amax_history"]
                # Two programs of the same step: bf16 may round differently.
                np.testing.assert_allclose(history[0, -1], amax, rtol=2**-6, err_msg="not the tensor of this step")
    assert {(name, step): value for name, value, step in scalars} == {k: v for k, v in known.items() if v is not None}
    return looks


def test_tensorboard_needs_its_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(ValueError, match="--tensorboard needs tensorboardX: pip install tensorboardX"):
        health.writer()


def test_resume_needs_the_same_arguments_and_a_new_run_keeps_the_earlier(tmp_path, capsys):
    options = ["--eval-every", "0"]
    _, results, _ = train(tmp_path, *options, "--precision", "bf16", "--stop-at", "2")
    assert len(results["runs"]["bf16"]["losses"]) == 2
    other = [*options, "--precision", "bf16", "--resume", "--lr", "1"]
    assert train_gpt.main([*SMALL, "--out", str(tmp_path), *other]) == 2
    assert f"lr {config.PRESETS['tiny'].lr} there, 1.0 now" in capsys.readouterr().err
    # The checkpoint of a bf16 run, continued in FP8: fresh scales and a note.
    shutil.copytree(tmp_path / "bf16", tmp_path / "fp8")
    _, results, said = train(tmp_path, *options, "--resume", "--stop-at", "3")
    assert "has no FP8 state" in said and len(results["runs"]["fp8"]["losses"]) == 3
    _, _, said = train(tmp_path, *options, "--precision", "bf16", "--no-checkpoint")
    assert "earlier-1" in said and (tmp_path / "earlier-1" / "bf16" / "2").is_dir()


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--check-gap", "0.01"], "needs --compare"),
        (["--check-against", "0.01"], "needs --against"),
        (["--steps", "0"], "--steps is 0"),
        (["--no-checkpoint", "--resume"], "contradicts"),
        (["--tensorboard", "runs"], "--tensorboard needs --fp8-report"),
        (["--fp8-report", "--precision", "bf16"], "of an FP8 run"),
        (["--fp8-report", "--recipe", "block"], "needs --recipe delayed"),
        (["--fp8-report", "--fp8-report-every", "0"], "--fp8-report-every is 0"),
        (["--fp8-params", "--precision", "bf16"], "--fp8-params is for"),
    ],
)
def test_senseless_arguments(arguments, message, capsys):
    with pytest.raises(SystemExit) as left:
        config.parse(arguments, "tiny")
    assert left.value.code == 2 and message in capsys.readouterr().err


def test_own_text_that_is_too_short(tmp_path, capsys):
    (tmp_path / "short.txt").write_text("to be or not to be")
    assert train_gpt.main([*SMALL, "--out", str(tmp_path), "--data", str(tmp_path / "short.txt")]) == 2
    assert "--seq-len" in capsys.readouterr().err
    assert train_gpt.main([*SMALL, "--out", str(tmp_path), "--data", str(tmp_path / "none.txt")]) == 2
    assert "none.txt" in capsys.readouterr().err


# -- its parts ---------------------------------------------------------------------------------


def test_batches_are_a_function_of_seed_and_step():
    corpus = data.load()
    assert len(corpus.train) > 5e6 and 0.04 < len(corpus.held_out) / len(corpus.train) < 0.06
    first = data.batch(corpus.train, 4, 16, seed=0, step=3)
    assert first.shape == (4, 17) and first.dtype == np.uint8
    np.testing.assert_array_equal(first, data.batch(corpus.train, 4, 16, seed=0, step=3))
    assert (first != data.batch(corpus.train, 4, 16, seed=0, step=4)).any()
    assert (first != data.batch(corpus.train, 4, 16, seed=1, step=3)).any()
    shortest = np.arange(17, dtype=np.uint8)
    np.testing.assert_array_equal(data.batch(shortest, 2, 16, 0, 0), [shortest] * 2)
    fixed = data.held_out_batches(shortest, 2, 8, 3)
    assert len(fixed) == 3 and fixed[0][0][0] == 0 and fixed[-1][-1][-1] == 16


def labels(axes) -> list[str]:
    return [text.get_text() for text in axes.get_legend().get_texts()]


def test_plot_draws_both_curves_and_the_gap():
    losses = np.linspace(3.0, 1.0, 200)
    runs = {
        "fp8": {"losses": list(losses + 0.25), "held_out": [[200, 1.7]]},
        "bf16": {"losses": list(losses), "held_out": [[200, 1.6]]},
    }
    figure = plot.draw(plot.curves(runs, "current"), "title")
    kinds = ["each step", "centred mean of 5 steps", "held-out text"]
    assert labels(figure.axes[0]) == [f"{name}, {kind}" for name in ("FP8 (current)", "bf16") for kind in kinds]
    assert labels(figure.axes[1]) == ["each step", "FP8 (current): +0.2500 over the last 20 steps"]
    for line in figure.axes[0].lines:
        assert line.get_color() == colours.OF["bf16" if line.get_label().startswith("bf16") else "current"]
    # Smoothed, what is straight stays where it is, to both ends.
    np.testing.assert_allclose(figure.axes[0].lines[4].get_ydata(), losses, rtol=1e-12)
    short = plot.draw(plot.curves({"fp8": {"losses": [3.0, 2.0], "held_out": []}}, "delayed"), "title")
    assert labels(short.axes[0]) == ["FP8 (delayed), each step"] and len(short.axes) == 1


def test_smooth_is_centred():
    step = np.repeat([0.0, 1.0], 50)
    smoothed = plot.smooth(step, 11)
    assert smoothed[49] + smoothed[50] == pytest.approx(1.0) and smoothed[44] == 0 and smoothed[55] == 1
    np.testing.assert_array_equal(plot.smooth(step, 1), step)


def test_plot_of_several_results(tmp_path, capsys, rendered):  # noqa: F811
    """One colour for a recipe, whatever else is drawn; the gaps of thinned curves."""
    paths = []
    for place, recipe_name in enumerate(["bf16", "delayed", "attention", "current", "block", "fixed", "mxfp8"]):
        precision = "bf16" if recipe_name == "bf16" else "fp8"
        run = {"losses": [[4 * n, 2.0 + 0.01 * place] for n in range(1, 51)], "held_out": []}
        args = {"recipe": recipe_name, "preset": "tiny", "seed": 0}
        paths.append(tmp_path / f"{recipe_name}.json")
        paths[-1].write_text(json.dumps({"args": args, "device": {"kind": "cpu"}, "runs": {precision: run}}))
    figure = plot.draw(*plot.read(paths))
    assert labels(figure.axes[0]) == ["bf16", *(f"FP8 ({name})" for name in colours.OF if name != "bf16")]
    gaps = ["delayed: +0.0100", "attention: +0.0200", "current: +0.0300", "block: +0.0400", "fixed: +0.0500"]
    gaps.append("mxfp8: +0.0600")
    assert labels(figure.axes[1]) == [f"FP8 ({gap.replace(':', '):')} over the last 20 steps" for gap in gaps]
    assert len(set(colours.OF.values()) | {colours.NO_RECIPE, colours.OTHERS}) == len(colours.OF) + 2
    assert plot_runs.main([str(paths[0]), str(paths[1]), "--out", str(tmp_path / "x.png")]) == 0
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    assert plot_runs.main([str(paths[1]), str(paths[1])]) == 2
    assert "two runs are delayed" in capsys.readouterr().err


def test_steps_are_timed_though_each_is_looked_at(capsys):
    """As with --fp8-report of a short run: a pause before every step."""
    bar = progress.Progress("fp8", 0, 3, tokens=8, flops=1.0, peak=None)
    for _ in range(3):
        bar.pause()
        bar.issues()
        bar.add(1.0)
    bar.bar.close()
    assert len(bar.seconds) == 2, "all but the first"
    run = {"losses": [1.0], "held_out": [], "step_ms": None, "tokens_per_s": None, "mfu": None}
    assert "no step was timed" in report.lines({"fp8": run}, None, {})[0]


def test_heat_maps_have_a_row_for_each_layer():
    numbers = {name: [1.0, None] for name in health.MEANINGS}
    looks = [{"step": step, "tensors": {"a/x": numbers, "a/grad": numbers}} for step in (1, 5, 7)]
    figure = health.draw(looks, "title")
    images = [axes.images[0].get_array() for axes in figure.axes[:4]]
    assert all(image.shape == (4, 3) for image in images)
    np.testing.assert_array_equal(np.ma.getmaskarray(images[2])[:, 0], [False, True, False, True])
    assert [text.get_text() for text in figure.axes[0].get_yticklabels()] == ["a/x", "a/grad"]
    assert [text.get_text() for text in figure.axes[0].get_xticklabels()] == ["1", "5", "7"]


def test_distance():
    earlier = [[step, 2.0] for step in range(1, 41)]
    spike = report.distance([2.0] * 30 + [2.1] + [2.0] * 9, earlier)
    assert spike == pytest.approx({"largest": 0.1, "step": 31, "largest_of_means": 0.1 / 20, "points": 20})
    drift = report.distance([2.0] * 20 + [1.99] * 20, earlier)
    assert drift == pytest.approx({"largest": 0.01, "step": 21, "largest_of_means": 0.01, "points": 20})
    assert np.isnan(report.distance([2.0] * 39 + [float("nan")], earlier)["largest_of_means"])


def test_an_earlier_curve_of_other_settings_is_refused(tmp_path):
    path, key = tmp_path / "results.json", {"seed": 0, "activations": ["gelu"], "text_sha256": "a"}
    runs = {"fp8": {"losses": [[1, 5.0], [2, 4.0]]}}
    path.write_text(json.dumps({"args": key, "runs": runs}))
    assert report.read(path, key, ("fp8",), 2) == {"fp8": [[1, 5.0], [2, 4.0]]}
    for changed, precisions, last, message in (
        ({"seed": 1}, ("fp8",), 2, "seed 0 there, 1 now"),
        ({"text_sha256": "b"}, ("fp8",), 2, "text_sha256 a there, b now"),
        ({}, ("fp8", "bf16"), 2, "it has fp8, not bf16"),
        ({}, ("fp8",), 3, "fp8 ends at step 2 there, at 3 here"),
    ):
        with pytest.raises(ValueError, match=message):
            report.read(path, key | changed, precisions, last)
    path.write_text("[]")
    with pytest.raises(ValueError, match="no results.json of train_gpt.py"):
        report.read(path, key, ("fp8",), 2)


def test_gap():
    flat = [2.0] * 40
    found = report.gap([9.0] * 36 + [2.01, 1.99, 2.02, 2.0], flat)
    assert found["steps"] == 4
    np.testing.assert_allclose([found["mean"], found["mean_abs"]], [0.005, 0.01])
    assert report.within(found, 0.006) and not report.within(found, 0.004)
    assert not report.within(report.gap([float("nan")], [2.0]), 1.0)


def test_model_flops_are_six_per_weight():
    model = config.PRESETS["medium"].model
    weights = model.layers * 12 * model.hidden**2 + 256 * model.hidden
    assert flops.per_token(model, seq_len=0) == 6 * weights
    attention = flops.per_token(model, seq_len=1024) - 6 * weights
    assert attention == 3 * model.layers * 2 * 2 * 1024 * model.hidden / 2
    assert flops.peak("NVIDIA H200", "fp8") == 1979e12 and flops.peak("NVIDIA H200", "bf16") == 989e12
    assert flops.peak("cpu", "fp8") is None and flops.peak("NVIDIA A100-SXM4-40GB", "fp8") is None


@pytest.mark.parametrize("name, millions", [("small", 125), ("medium", 350)])
def test_preset_sizes(name, millions):
    preset = config.PRESETS[name]
    model = GPT(preset.model, max_len=preset.seq_len)
    shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 16), jnp.int32))["params"]
    assert sum(p.size for p in jax.tree.leaves(shapes)) / 1e6 == pytest.approx(millions, rel=0.03)


@pytest.mark.parametrize("remat", [False, True], ids=["keep", "remat"])
def test_llama_shape_trains_in_fp8(remat):
    model = GPT(LLAMA, max_len=32, remat=remat)
    delayed = recipe.DelayedScaling(amax_history_len=4)
    optimizer = steps.make_optimizer(1e-2, warmup=1, steps=8)
    state = steps.init_state(model, optimizer, delayed, seed=0)
    step = steps.make_train_step(model, optimizer, delayed)
    windows = np.tile(np.arange(33, dtype=np.uint8), (2, 1))
    losses = []
    for _ in range(8):
        state, loss = step(state, windows)
        losses.append(float(loss))
    assert losses[-1] < losses[0] - 1
    # Scanned layers have their own FP8 state: each leaf starts with the layer axis.
    assert {leaf.shape for leaf in jax.tree.leaves(state.fp8)} == {(2, 1), (2, 4)}


def test_parameters_in_fp8():
    """--fp8-params: the kernels' bytes, and the losses of parameters in f32."""
    windows = np.tile(np.arange(33, dtype=np.uint8), (2, 1))
    current, losses = recipe.Float8CurrentScaling(), []
    for fp8_params in (False, True):
        model = GPT(LLAMA, max_len=32, fp8_params=fp8_params)
        optimizer = steps.make_optimizer(1e-2, warmup=1, steps=4, fp8_params=fp8_params)
        state = steps.init_state(model, optimizer, current, seed=0)
        step = steps.make_train_step(model, optimizer, current)
        for _ in range(4):
            state, loss = step(state, windows)
            losses.append(float(loss))
    np.testing.assert_allclose(losses[4:], losses[:4], rtol=1e-4)  # equal, but for sums that XLA orders otherwise
    masters = sum(leaf.nbytes for leaf in jax.tree.leaves(state.opt_state.master))
    in_fp8 = sum(leaf.nbytes for leaf in jax.tree.leaves(state.params) if leaf.dtype == jnp.float8_e4m3fn)
    assert 4 * in_fp8 == masters == 4 * 2 * (64 * (64 + 2 * 32) + 64 * 64 + 3 * 64 * 96)  # qkv, out, wi, wo
