"""`train_gpt.py --mixer`: which layers have what, arguments, a run, and plots of several mixers."""

import json

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from example_runs import compiled_once, rendered, train, unrendered  # noqa: F401

import generate  # isort: skip
import plot_runs  # isort: skip
from gpt import colours, config, flops, mesh, plot, steps  # isort: skip
from gpt.model import GPT  # isort: skip


@pytest.mark.parametrize(
    "arguments, message",
    [
        (
            "--mixer hybrid --layers 1",
            "--mixer hybrid has attention in the second layer of four: --layers is 1, give 2",
        ),
        ("--mixer mamba2 --api nnx", "--api nnx is for --mixer attention here, not mamba2"),
        ("--mixer mamba2 --recipe attention", "--recipe attention is for attention, which --mixer mamba2 has not"),
        ("--mixer mamba2 --cp 2 --cp-strategy ring", "--cp-strategy is for attention, which --mixer mamba2 has not"),
    ],
)
def test_senseless_arguments_of_mixers(arguments, message, capsys):
    with pytest.raises(SystemExit) as left:
        config.parse(arguments.split(), "tiny")
    assert left.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, message",
    [
        (
            "--mixer mamba2 --mesh tp=8",
            "--mixer mamba2 has heads: 4, which does not divide by 8 (tp of --mesh tp=8)",
        ),
        ("--mixer hybrid --mesh cp=3", "--seq-len is 128, which does not divide by 3 (cp of --mesh cp=3)"),
    ],
)
def test_sizes_that_devices_do_not_divide(arguments, message):
    with pytest.raises(ValueError) as error:
        mesh.check(config.parse(arguments.split(), "tiny"))
    assert message in str(error.value)


def test_mixers_of_arguments_and_checkpoints():
    args = config.parse(["--mixer", "hybrid", "--preset", "moe-tiny"], "tiny")
    assert args.model.ssm == config.Ssm(attention_every=4) and args.model.experts == config.Experts(8)
    key = json.loads(json.dumps(config.resume_key(args, "")))
    assert config.Model.of(key) == args.model and not config.differing(key, config.resume_key(args, ""))
    early = config.resume_key(config.parse([], "tiny"), "")
    assert early.pop("ssm") is None and config.Model.of(early).ssm is None
    assert not config.differing(early, early | {"ssm": None})
    assert "ssm" in config.differing(key, key | {"ssm": None})[0]
    assert [config.described(args), config.described(config.parse([], "tiny"))] == ["moe-tiny, hybrid", "tiny"]


@pytest.mark.parametrize("mixer", config.MIXERS)
@pytest.mark.parametrize("layers", [2, 7])
def test_which_layers_have_attention(mixer, layers):
    """The second of four; flops are six per weight and token, and the scan's, where the sequence has no length."""
    model = config.parse(["--mixer", mixer, "--layers", str(layers)], "tiny").model
    shapes = jax.eval_shape(GPT(model, max_len=16).init, jax.random.key(0), jnp.zeros((1, 16), jnp.int32))["params"]
    shapes = nn.meta.unbox(shapes)
    other = "delta" if "delta" in mixer else "mamba"
    kind = lambda block: next(name for name in ("attention", "mamba", "delta") if name in block["TransformerLayer_0"])
    behind = [kind(shapes[f"layer_{i}"]) for i in range(layers) if f"layer_{i}" in shapes]
    scanned = shapes.get("layers", {})
    if "hybrid" in mixer:
        found = [kind(scanned[f"layer_{i}"]) for i in range(len(scanned))] + behind
        assert found == ["attention" if i % 4 == 1 else other for i in range(layers)]
    else:
        found = [kind(scanned)] * layers
        assert found == ["attention" if mixer == "attention" else other] * layers and not behind
    assert model.layers_with_attention == found.count("attention")
    sizes = {jax.tree_util.keystr(path): leaf.size for path, leaf in jax.tree_util.tree_leaves_with_path(shapes)}
    weights = sum(size for path, size in sizes.items() if "kernel" in path and "conv" not in path)
    scans = found.count(other) * 2 * model.hidden * model.ssm.state if model.ssm else 0
    scans *= 3 if other == "delta" else 2
    assert flops.per_token(model, seq_len=0) == 6 * (weights + 256 * model.hidden + scans)


def test_loads_of_a_pattern_are_in_the_order_of_layers():
    """Two rounds of two layers, and eleven without a round."""
    tree = lambda loads: {"TransformerLayer_0": {"moe": {"tokens_per_expert": (jnp.array(loads),)}}}
    rounds = {f"layer_{i}": tree([[i, 0], [i + 2, 0]]) for i in range(2)}
    behind = {f"layer_{i}": tree([i, 0]) for i in range(4, 15)}
    np.testing.assert_array_equal(steps.loads_in({"layers": rounds, **behind})[:, 0], np.arange(15))
    np.testing.assert_array_equal(steps.loads_in({"layers": tree([[1, 2], [3, 4]])}), [[1, 2], [3, 4]])


def test_a_sequence_that_devices_share_stays_in_order():
    """Where a layer has Mamba-2."""
    if jax.device_count() < 2:
        pytest.skip("one device cuts nothing")
    windows = np.arange(2 * 9, dtype=np.uint8).reshape(2, 9)
    devices = jax.make_mesh((1, 2), ("dp", "cp"), devices=jax.devices()[:2])
    tokens, targets = mesh.Feed(devices, 2, balanced=False)(windows)
    np.testing.assert_array_equal(tokens, windows[:, :-1]), np.testing.assert_array_equal(targets, windows[:, 1:])
    balanced = lambda mixer: GPT(config.parse(["--mixer", mixer], "tiny").model, max_len=8, cp=2).balanced
    assert [balanced(mixer) for mixer in config.MIXERS] == [True] + [False] * 4


@pytest.mark.parametrize(("mixer", "name"), [("hybrid", "mamba"), ("gated-delta-hybrid", "delta")])
def test_a_hybrid_trains(tmp_path, mixer, name):
    """In FP8; generate.py reads its checkpoint."""
    code, results, _ = train(tmp_path, "--mixer", mixer, "--layers", "2", "--eval-every", "0", "--dropout", "0")
    losses = np.array(results["runs"]["fp8"]["losses"])[:, 1]
    assert code == 0 and losses[-1] < losses[0] - 0.5, "the loss does not fall"
    model, variables, _ = generate.load(tmp_path / "fp8", bf16=False)
    assert model.config.ssm == config.MIXERS[mixer]
    assert all(name in variables[kind]["layer_0"]["TransformerLayer_0"] for kind in ("params", "fp8_metas"))


def results_of(path, mixer, recipe, precisions, first, last=200):
    """A file as train_gpt.py writes it: each run's losses 0.25 above the one before."""
    runs = {
        name: {"losses": [[n, first + 0.25 * i] for n in range(4, last + 1, 4)], "held_out": [[last, first]]}
        for i, name in enumerate(precisions)
    }
    args = {"recipe": recipe, "preset": "small", "seed": 0, "mixer": mixer}
    path.write_text(json.dumps({"args": args, "device": {"kind": "cpu"}, "runs": runs}))
    return path


def test_plot_of_several_mixers(tmp_path, capsys):
    """Gaps are to bf16 with the same mixer; a mixer has one colour."""
    paths = [
        results_of(tmp_path / f"{mixer}.json", mixer, "delayed", ("bf16", "fp8"), first)
        for first, mixer in enumerate(config.MIXERS, 1)
    ]
    found, title = plot.read(paths)
    figure = plot.draw(found, title)
    assert title == "byte-level GPT, small, cpu, seed 0"
    texts = [[text.get_text() for text in axes.get_legend().get_texts()] for axes in figure.axes]
    assert texts[0] == [f"{mixer}, {name}" for mixer in config.MIXERS for name in ("bf16", "FP8 (delayed)")]
    assert texts[1] == [f"{mixer}, FP8 (delayed): +0.2500 over the last 20 steps" for mixer in config.MIXERS]
    drawn = {line.get_label(): line.get_color() for axes in figure.axes for line in axes.lines}
    assert all(colour == colours.MIXERS[name.split(",")[0]] for name, colour in drawn.items() if "," in name)
    assert plot_runs.main([*map(str, paths), "--out", str(tmp_path / "x.png")]) == 0
    said = capsys.readouterr().out
    assert "hybrid, bf16: loss 3.0000 nats over the last tenth of 200 steps\n" in said
    assert "hybrid, FP8 (delayed): loss 3.2500 nats over the last tenth of 200 steps; gap to bf16 +0.2500 over" in said
    assert plot.read(paths[1:2])[1] == "byte-level GPT, small, mamba2, cpu, seed 0"
    other = results_of(tmp_path / "other.json", "hybrid", "block", ("fp8",), 1)
    with pytest.raises(ValueError, match="several mixers are under block, delayed: give one recipe for all of them"):
        plot.read([*paths, other])
