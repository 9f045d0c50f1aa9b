"""`train_gpt.py --api nnx`."""

import contextlib
import io
import json
import pathlib
import sys

import jax
import numpy as np
import pytest
from example_runs import compiled_once, unrendered  # noqa: F401

ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "examples"))

import generate  # noqa: E402
import train_gpt  # noqa: E402
from gpt import checkpoint, config, nnx_steps, steps  # noqa: E402

RUN = "--api nnx --preset tiny --layers 1 --seq-len 16 --batch-size 2 --steps 4 --eval-every 4 --eval-batches 1"
RUN = [*RUN.split(), "--amax-history-len", "3", "--data", str(ROOT / "examples" / "README.md")]


def train(out, *arguments) -> list:
    with contextlib.redirect_stdout(io.StringIO()):
        assert train_gpt.main([*RUN, "--out", str(out), *arguments]) == 0
    return json.loads((out / "results.json").read_text())["runs"]["fp8"]["losses"]


def test_losses_are_those_of_linen():
    """From the same weights, over steps of AdamW: scanned layers, their FP8 state, learned positions."""
    args = config.parse([*RUN, "--layers", "2"], "tiny")
    recipe, tx = train_gpt.fp8_recipe(args), steps.make_optimizer(1e-2, warmup=1, steps=4)
    ours = nnx_steps.init_state(nnx_steps.make_model(args), tx, recipe, seed=0)
    linen = steps.make_model(args)
    theirs = steps.init_state(linen, tx, recipe, seed=0)
    ours = nnx_steps.resumed(ours, nnx_steps.saved(ours)._replace(params=jax.tree.map(np.asarray, theirs.params)))
    windows = np.tile(np.arange(17, dtype=np.uint8), (2, 1)) + np.arange(2, dtype=np.uint8)[:, None]
    step = nnx_steps.compiled_step(None, tx, recipe, None, ours, windows)
    linens = steps.compiled_step(linen, tx, recipe, None, theirs, windows)
    for _ in range(3):
        (ours, loss), (theirs, want) = step(ours, windows), linens(theirs, windows)
        assert float(loss) == float(want)
    got = nnx_steps.saved(ours)
    for tree, other in ((got.params, theirs.params), (got.fp8, theirs.fp8)):
        assert jax.tree.structure(tree) == jax.tree.structure(other)
        jax.tree.map(lambda a, b: np.testing.assert_array_equal(*map(np.asarray, (a, b))), tree, other)


def test_resume_is_bit_for_bit_and_generate_reads_it(tmp_path, capsys):
    whole = train(tmp_path / "whole", "--fp8-report", "--fp8-report-every", "3")  # looks change nothing
    looks = json.loads((tmp_path / "whole" / "fp8_report.json").read_text())["looks"]
    assert [look["step"] for look in looks] == [1, 4]
    train(tmp_path / "parts", "--stop-at", "2")
    assert train(tmp_path / "parts", "--resume") == whole
    assert whole[-1][1] < whole[0][1]
    state = checkpoint.Checkpoints(tmp_path / "parts" / "fp8").manager.restore(
        4, args=checkpoint.ocp.args.Composite(fp8=checkpoint.ocp.args.StandardRestore())
    )["fp8"]["fp8_metas"]["layers"]["TransformerLayer_0"]["mlp"]
    for name in ("x_0", "kernel_1", "grad_0"):
        look = looks[-1]["tensors"][f"layers/TransformerLayer_0/mlp/{name}"]
        # Two programs of the same step: bf16 may round differently.
        np.testing.assert_allclose(look["amax"], state[f"{name}_amax_history"][:, -1], rtol=2**-6)
    directory = str(tmp_path / "parts" / "fp8")
    assert generate.main(["--checkpoint", directory, "--prompt", "def ", "--tokens", "2", "--greedy"]) == 0
    assert "def " in capsys.readouterr().out


@pytest.mark.parametrize("more", [["--dropout", "0.1"], ["--mesh", "dp=8"]])
def test_what_it_lacks(more, capsys):
    with pytest.raises(SystemExit):
        config.parse([*RUN, *more], "tiny")
    assert "--api nnx has neither --mesh nor --dropout" in capsys.readouterr().err
