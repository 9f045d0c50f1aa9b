"""examples/train_gpt.py with experts: sizes, arguments, loads. How well they learn is not tested here."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from example_runs import compiled_once, rendered, train, unrendered  # noqa: F401

import generate  # isort: skip
from gpt import config, flops, load  # isort: skip
from gpt.model import GPT  # isort: skip

MOE = ["--preset", "moe-tiny", "--layers", "1", "--moe", "3", "--eval-every", "0", "--dropout", "0"]


def test_a_token_meets_its_own_experts():
    """moe-small: about 1B parameters, 0.3B of them active."""
    model = config.PRESETS["moe-small"].model
    expert = 3 * model.hidden * model.ffn
    around = model.layers * (4 * model.hidden**2 + model.hidden * 8) + 256 * model.hidden
    assert flops.per_token(model, seq_len=0) == 6 * (around + model.layers * 2 * expert)
    assert (around + model.layers * 2 * expert) / 1e9 == pytest.approx(0.3, rel=0.05)
    assert (around + model.layers * 8 * expert) / 1e9 == pytest.approx(1.0, rel=0.05)
    shapes = jax.eval_shape(GPT(model, max_len=16).init, jax.random.key(0), jnp.zeros((1, 16), jnp.int32))["params"]
    held, norms = sum(p.size for p in jax.tree.leaves(shapes)), (2 * model.layers + 1) * model.hidden
    assert held == around + model.layers * 8 * expert + norms


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--top-k", "2"], "--top-k and --balance are of experts: give --moe N"),
        (["--balance", "bias"], "--top-k and --balance are of experts: give --moe N"),
        (["--moe", "2", "--top-k", "3"], "--top-k is 3 of 2 experts"),
        (["--moe", "0"], "--moe is 0: give a whole number from 1 to 10000"),
        (["--moe", "4", "--api", "nnx"], "--api nnx is for models without experts"),
        (["--preset", "moe-tiny", "--mesh", "dp=1"], "--mesh has no ep, which divides experts"),
        (["--preset", "tiny", "--mesh", "ep=2"], "ep=2 of --mesh divides experts, and the model has none"),
    ],
)
def test_senseless_arguments_of_experts(arguments, message, capsys):
    with pytest.raises(SystemExit) as left:
        config.parse(arguments, "tiny")
    assert left.value.code == 2 and message in capsys.readouterr().err


def test_experts_of_arguments_and_checkpoints():
    args = config.parse(["--moe", "4", "--top-k", "1", "--balance", "bias"], "tiny")
    assert args.model.experts == config.Experts(4, 1, "bias", 4 / 300) and args.model.hidden == config.TINY.hidden
    key = json.loads(json.dumps(config.resume_key(args, "")))
    assert config.Model.of(key) == args.model and not config.differing(key, config.resume_key(args, ""))
    early = {name: value for name, value in key.items() if name != "experts"}
    assert config.Model.of(early).experts is None
    dense = config.resume_key(config.parse([], "tiny"), "")
    assert not config.differing({k: v for k, v in dense.items() if k != "experts"}, dense)
    assert "experts" in config.differing(key, dense)[0]


def test_loads():
    kept = load.fresh()
    assert load.summary(kept) is None
    for step in range(1, 21):
        load.add(kept, jnp.array([[4, 0, 2], [2, 2, 2]] if step > 18 else [[6, 0, 0], [6, 0, 0]]), late=step > 18)
    found = load.summary(json.loads(json.dumps(kept)))
    assert found["late"] == pytest.approx((2 + 1) / 2) and found["steps"] == 2 and found["worst"] == 2
    assert found["counts"] == [[8, 0, 4], [4, 4, 4]] and found["max_over_mean"][:1] == [3.0]
    said = load.line("fp8", found)
    assert "1.50 times the mean in a step, over the last tenth of the steps together 2.00 in the least even" in said
    figure = load.draw({"fp8": {"load": found}, "bf16": {"load": found}}, "title")
    images = [axes.images[0].get_array() for axes in figure.axes[:2]]
    np.testing.assert_allclose(images[0], [[2, 0, 1], [1, 1, 1]])
    assert [axes.get_title() for axes in figure.axes[:2]] == ["fp8, at most 2.00", "bf16, at most 2.00"]
    cut_short = load.summary({"max_over_mean": [2.0], "counts": []})
    assert load.draw({"fp8": {"load": cut_short}}, "") is None and "together" not in load.line("fp8", cut_short)


def check_loads(run: dict):
    """Of 12 steps, the last of which is the last tenth."""
    losses, loads = np.array(run["losses"])[:, 1], run["load"]
    assert losses[-1] < losses[0] - 0.5, "the loss does not fall"
    assert len(loads["max_over_mean"]) == 12 and 1 <= loads["late"] <= 2 and loads["steps"] == 1
    assert np.sum(loads["counts"], -1).tolist() == [2 * 4 * 32]  # top k, batch, sequence


def test_balanced_by_a_loss(tmp_path, rendered):  # noqa: F811
    """In FP8 and in bf16."""
    code, results, said = train(tmp_path, *MOE, "--compare", "--no-checkpoint")
    assert code == 0 and said.count("times the mean in a step") == 2
    assert (tmp_path / load.PNG).read_bytes().startswith(b"\x89PNG")
    for run in results["runs"].values():
        check_loads(run)


def test_balanced_by_a_bias(tmp_path):
    """Resumed on the way, it gives the same losses and loads bit for bit; generate.py reads the bias."""
    options = [*MOE, "--balance", "bias", "--checkpoint-every", "5"]
    _, whole, _ = train(tmp_path, *options)
    check_loads(whole["runs"]["fp8"])
    shutil.rmtree(tmp_path / "fp8" / "12")
    _, resumed, said = train(tmp_path, *options, "--resume")
    assert "steps 10 to 12" in said
    assert [resumed["runs"]["fp8"][key] for key in ("losses", "load")] == [
        whole["runs"]["fp8"][key] for key in ("losses", "load")
    ]
    model, variables, trained = generate.load(tmp_path / "fp8", bf16=False)
    (bias,) = jax.tree.leaves(variables["expert_bias"])
    steps = np.asarray(bias) / (config.BIAS_TRAVEL / 12)  # each moves it by -1, 0 or 1
    assert bias.shape == (1, 3) and steps.any() and np.abs(steps).max() < 12.5
    np.testing.assert_allclose(steps, np.round(steps), atol=1e-3)
    choose = generate.chooser(True, 1.0, 0)
    both = [generate.generate(model, variables, trained, [b"import os"], 6, choose, cache=c)[0] for c in (True, False)]
    np.testing.assert_array_equal(*both)
