"""train_gpt.py on meshes of 8 devices: the losses of one device, where its state lies, what it refuses."""

import dataclasses
import functools
import json
import math
import os
import pathlib
import re
import shlex
import subprocess
import sys

import jax
import numpy as np
import pytest
from conftest import QUICK
from example_runs import unrendered  # noqa: F401
from flax import linen as nn

from te_jax import layers, recipe, sharding

ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "examples"))

import train_gpt  # noqa: E402
from gpt import config, mesh, steps  # noqa: E402
from gpt.model import GPT  # noqa: E402

needs_8 = pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices: run it on a CPU")

SMALL = "--preset tiny --layers 1 --seq-len 32 --batch-size 8 --steps 6 --amax-history-len 4 --eval-every 6"
SMALL = [*SMALL.split(), "--data", str(ROOT / "LICENSE"), "--no-checkpoint"]  # a text that nobody edits
# Partial products and partial batches are summed in another order: bf16 activations round at 2**-9 of their size, and
# losses of 4 to 5.5 nats moved by 3.6e-4 at most in six steps. In FP8 a changed last bit moves some values across the
# edge between two FP8 numbers, 2**-4 apart: 1.3e-3.
BOUNDS = {"bf16": 1e-3, "fp8": 5e-3}
REPORT = ["--fp8-report", "--fp8-report-every", "5"]


def train(out, *arguments) -> dict:
    """results.json of train_gpt.py."""
    assert train_gpt.main([*SMALL, "--out", str(out), *arguments]) == 0
    return json.loads((out / "results.json").read_text())


@pytest.fixture(scope="module")
def one_device_path(tmp_path_factory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("one")
    train(path, "--compare", *REPORT)
    return path / "results.json"


@pytest.fixture(scope="module")
def one_device(one_device_path) -> dict:
    return json.loads(one_device_path.read_text())


@needs_8
@pytest.mark.parametrize(
    "arguments",
    [
        ["--compare", "--mesh", "dp=2,fsdp=2,tp=2", *REPORT],
        ["--compare", "--mesh", "tp=2,fsdp=4", "--sequence-parallel"],
        ["--precision", "bf16", "--mesh", "dp=8", "--remat"],
        ["--compare", "--mesh", "dp=2,tp=2", "--cp", "2", "--sequence-parallel"],
    ],
    ids=lambda arguments: " ".join(arguments[2:]),
)
def test_losses_are_those_of_one_device(arguments, one_device, one_device_path, tmp_path, capsys):
    got = train(tmp_path, *arguments, "--against", str(one_device_path), "--check-against", "5e-3")
    compare(got, one_device)
    assert got["distances"].keys() == got["runs"].keys()
    said = capsys.readouterr().out
    for precision, found in got["distances"].items():
        ours, theirs = (np.array(each["runs"][precision]["losses"])[:, 1] for each in (got, one_device))
        assert found["largest"] == np.abs(ours - theirs).max() <= BOUNDS[precision]
        assert np.abs(ours - theirs)[found["step"] - 1] == found["largest"]
        assert found["largest_of_means"] == pytest.approx(abs(ours.mean() - theirs.mean()), abs=1e-12)  # of 6 steps
        assert f"{precision} against the earlier run: losses differ by {found['largest']:.1e}" in said
    if "--fp8-report" in arguments:
        compare_looks(
            *(json.loads((path / "fp8_report.json").read_text()) for path in (tmp_path, one_device_path.parent))
        )
    assert got["device"]["count"] == 8 and got["args"]["mesh"] == config.parse(arguments, "tiny").mesh


@needs_8
def test_experts_that_devices_divide(tmp_path):
    """Parameters, optimizer and FP8 state of experts on ep, and their kernels on fsdp too; losses and loads of one
    device."""
    experts = ["--moe", "8", "--top-k", "2", "--precision", "fp8"]
    one = train(tmp_path / "one", *experts)
    got = train(tmp_path / "ep", *experts, "--mesh", "dp=2,fsdp=2,ep=2")
    compare(got, one)
    ours, theirs = (each["runs"]["fp8"]["load"]["max_over_mean"] for each in (got, one))
    np.testing.assert_allclose(ours[0], theirs[0])  # of the first step; later a token may choose otherwise


def compare(got, one_device):
    for precision, run in got["runs"].items():
        for curve in ("losses", "held_out"):
            ours, theirs = np.array(run[curve]), np.array(one_device["runs"][precision][curve])
            np.testing.assert_array_equal(ours[:, 0], theirs[:, 0])
            np.testing.assert_allclose(ours[:, 1], theirs[:, 1], atol=BOUNDS[precision], rtol=0)


STEP = 2.0**-3  # the largest distance of two neighbours in E4M3, relative to them: so far an amax may move
LOOKS = {
    "amax": dict(rtol=STEP),
    "headroom": dict(rtol=0, atol=-math.log2(1 - STEP)),
    # Of 8 * 32 rows of 128 numbers or more, some lie at an edge.
    "saturation": dict(rtol=2e-2, atol=1e-3),
    "underflow": dict(rtol=2e-2, atol=1e-3),
}


def compare_looks(got, want):
    """Counts of whole tensors, whatever devices hold of them."""
    assert [look["step"] for look in got["looks"]] == [1, 6]
    first, theirs = (report["looks"][0]["tensors"] for report in (got, want))  # later on rounding has its effects
    for path, tensor in theirs.items():
        for number, value in tensor.items():
            ours = np.array(first[path][number], float)
            bound = LOOKS.get(number, {"rtol": 0})
            np.testing.assert_allclose(ours, np.array(value, float), **bound, err_msg=f"{path} {number}")


@needs_8
def test_a_divided_sequence_goes_on_with_another_mesh(one_device, tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "SMALL", [word for word in SMALL if word != "--no-checkpoint"])
    train(tmp_path, "--mesh", "fsdp=4,cp=2", "--cp-strategy", "ring", "--remat", "--stop-at", "3")
    compare(train(tmp_path, "--mesh", "dp=2,cp=4", "--resume"), one_device)


@needs_8
@pytest.mark.parametrize("rope, groups", [(True, 2), (False, 1)])
def test_tokens_keep_their_places(rope, groups):
    """Logits of a divided sequence; its attention as large as an input, so that places matter. A single head of keys is
    copied to both devices of tp."""
    args = config.parse([*SMALL, "--mesh", "dp=2,tp=2,cp=2"], "tiny")
    size = dataclasses.replace(args.model, rope=rope, gqa_groups=groups)
    windows = np.random.default_rng(0).integers(0, 256, (8, 33), np.uint8)
    alone, devices = GPT(size, max_len=32), mesh.make(args)
    params = steps.init_variables(alone, None, jax.random.PRNGKey(0))["params"]
    params = jax.tree.map(lambda p: 3 * p, nn.meta.unbox(params))
    logits = lambda model: jax.jit(lambda tokens: model.apply({"params": params}, tokens))
    want = logits(alone)(windows[:, :-1])
    with mesh.scope(devices):
        tokens, targets = mesh.Feed(devices, 8)(windows)
        got = logits(GPT(size, max_len=32, cp=2))(tokens)
    assert tokens.addressable_data(0).shape == (4, 16)
    np.testing.assert_array_equal(sharding.inverse_reorder_causal_load_balancing(targets, 2), windows[:, 1:])
    got = sharding.inverse_reorder_causal_load_balancing(np.asarray(got), 2)
    assert np.abs(got - want).max() < 0.05 * np.abs(want).max()


# -- where the state lies ----------------------------------------------------------------------


def prepared(sizes):
    """Model, optimizer, recipe, mesh of the tiny preset: learned positions, biases, norms, tied embeddings."""
    args = config.parse([*SMALL, "--mesh", sizes], "tiny")
    model = GPT(args.model, max_len=args.seq_len)
    optimizer = steps.make_optimizer(args.lr, args.warmup, args.steps)
    return model, optimizer, recipe.DelayedScaling(amax_history_len=4), mesh.make(args)


@needs_8
def test_parameters_and_moments_are_divided():
    model, optimizer, fp8, devices = prepared("dp=2,fsdp=2,tp=2")
    with mesh.scope(devices):
        shardings = steps.state_shardings(model, optimizer, fp8, devices)
        init = steps.make_init(model, optimizer, fp8, shardings).lower(jax.random.PRNGKey(0)).compile()
        state = init(jax.random.PRNGKey(0))
    # No device holds a whole array on the way, or twice its part.
    sizes = [math.prod(map(int, shape.split(","))) for shape in re.findall(r"\b[a-z]+\d*\[([\d,]+)\]", init.as_text())]
    assert max(sizes) == max(leaf.addressable_data(0).size for leaf in jax.tree.leaves(state))

    is_adam = lambda node: hasattr(node, "mu")
    adam = next(filter(is_adam, jax.tree.leaves(state.opt_state, is_leaf=is_adam)))
    parts = {"kernel": 4, "wi_kernel": 4, "wo_kernel": 4, "embedding": 4, "positions": 2, "wi_bias": 2}
    for tree in (state.params, adam.mu, adam.nu):
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            name, of = path[-1].key, path[-2].key if len(path) > 1 else ""
            divided = 2 if (of, name) == ("qkv", "bias") else parts.get(name, 1)
            assert leaf.addressable_data(0).size * divided == leaf.size, (of, name)
    everywhere = (state.step, state.rng, state.fp8)
    assert all(leaf.is_fully_replicated for leaf in jax.tree.leaves(everywhere))

    alone = steps.init_state(model, optimizer, fp8, seed=0)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7), state, alone)


@needs_8
def test_dp_and_fsdp_divide_the_batch_together():
    model, optimizer, fp8, devices = prepared("dp=2,fsdp=2,tp=2")
    feed = mesh.Feed(devices, 8)
    windows = feed(np.arange(8 * 33, dtype=np.uint8).reshape(8, 33))
    assert windows.shape == (8, 33) and windows.addressable_data(0).shape == (2, 33)
    np.testing.assert_array_equal(feed.rows, np.arange(8))
    with mesh.scope(devices):
        shardings = steps.state_shardings(model, optimizer, fp8, devices)
        state = jax.eval_shape(steps.make_init(model, optimizer, fp8, shardings), jax.random.PRNGKey(0))
        text = steps.make_train_step(model, optimizer, fp8, shardings).lower(state, windows).as_text()
    assert '[{"dp", "fsdp"}, {}, {}]' in text, "the activations between the layers' parts"


# -- bad input ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--mesh", "dp=2,pp=4"], "'pp' is no axis of it; use dp, fsdp, ep, cp, tp"),
        (["--mesh", "dp=two"], "'dp=two': give each axis once, with a size of 1 or more"),
        (["--mesh", "dp=0"], "'dp=0'"),
        (["--mesh", "dp=2,dp=4"], "'dp=4': give each axis once"),
        (["--mesh", "dp=2,cp=4", "--cp", "2"], "--cp is 2, but --mesh has cp=4: give one of the two"),
        (["--cp", "0"], "--cp is 0: give 1 or more"),
        (["--mesh", "dp=8", "--cp-strategy", "ring"], "--cp-strategy is ring, but nothing divides the sequence"),
        (["--sequence-parallel"], "--sequence-parallel needs --mesh"),
        (["--devices", "0"], "--devices is 0"),
    ],
)
def test_senseless_arguments(arguments, message, capsys):
    with pytest.raises(SystemExit) as left:
        config.parse(arguments, "tiny")
    assert left.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, message",
    [
        (
            "dp=4,fsdp=2 --batch-size 12",
            "--batch-size is 12, which does not divide by 8 (dp x fsdp of --mesh dp=4,fsdp=2)",
        ),
        ("tp=8", "preset tiny has attention heads: 4, which does not divide by 8 (tp of --mesh tp=8)"),
        ("tp=3 --layers 1", "preset tiny has attention heads: 4, which does not divide by 3 (tp of --mesh tp=3)"),
        ("fsdp=256 --batch-size 256", "preset tiny has a hidden size of 128, which does not divide by 256 (fsdp of"),
        ("dp=4,tp=2 --sequence-parallel --seq-len 31", "--seq-len is 31, which does not divide by 2 (tp with"),
        ("cp=2 --seq-len 30", "--seq-len is 30, which does not divide by 4 (2 x cp of --mesh cp=2)"),
        ("tp=4 --cp 2 --sequence-parallel --seq-len 12", "--seq-len is 12, which does not divide by 8 (cp x tp with"),
        ("cp=2 --sequence-parallel", "--sequence-parallel divides the sequence by tp, which is 1 in --mesh cp=2"),
        ("dp=8 --sequence-parallel", "--sequence-parallel divides the sequence by tp, which is 1 in --mesh dp=8"),
    ],
)
def test_what_does_not_divide(arguments, message):
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        mesh.check(config.parse([*SMALL, "--mesh", *arguments.split()], "tiny"))


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("--mesh dp=2,fsdp=3", "--mesh dp=2,fsdp=3 takes 6 devices, but 1 process(es) have "),
        ("--cp 3", "--mesh cp=3 takes 3 devices, but 1 process(es) have "),
        ("--coordinator localhost:1", "--coordinator HOST:PORT needs --processes N and --process-id I"),
        ("--process-id 1", "--process-id is given without --coordinator HOST:PORT"),
        ("--coordinator localhost:1 --processes 2 --process-id 2", "--process-id is 2, --processes 2: give 0 to 1"),
    ],
)
def test_what_does_not_start(arguments, message, tmp_path, capsys):
    assert train_gpt.main([*SMALL, "--out", str(tmp_path), *arguments.split()]) == 2
    assert message in capsys.readouterr().err


# -- what is documented ------------------------------------------------------------------------

PAGE = ROOT / "docs" / "several_devices.md"


def test_documented_commands():
    pages = PAGE, PAGE.with_name("tutorials") / "devices.md", ROOT / "README.md"
    texts = [page.read_text().replace("\\\n", " ") for page in pages]  # a line may go on
    lines = [line for text in texts for line in text.splitlines()]
    commands = [line.strip() for line in lines if line.strip().startswith("python examples/train_gpt.py")]
    assert len([command for command in commands if "--mesh" in command]) >= 8
    for command in commands:
        words = shlex.split(command.replace("$i", "1").rstrip("&"), comments=True)
        mesh.check(config.parse(words[2:], "medium"))


# -- around the program ------------------------------------------------------------------------

CACHED = """
import sys
import flax, jax, jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
import te_jax as te, te_jax.flax as te_flax
from quick_init import quick_init

jax.config.update("jax_num_cpu_devices", 4)
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
jax.config.update("jax_remove_custom_partitioning_ptr_from_cache_key", sys.argv[2] == "Auto")
events = []
jax.monitoring.register_event_listener(lambda name, **_: events.append(name))

mesh = jax.make_mesh((2, 2), ("dp", "tp"), axis_types=(AxisType[sys.argv[2]],) * 2)
resource = te.MeshResource(dp_resource="dp", tp_resource="tp", ep_resource="dp")
with jax.set_mesh(mesh), te.autocast(True, te.recipe.DelayedScaling(amax_history_len=4), resource):
    moe = dict(num_experts=4, num_experts_per_tok=2)
    fields = dict(hidden_size=16, mlp_hidden_size=32, num_attention_heads=2, attention_dropout=0.0)
    layer = te_flax.TransformerLayer(**fields, moe=moe)
    if sys.argv[2] == "Auto":
        layer = te_flax.MoEBlock(**moe, intermediate_dim=32, enable_layernorm=True)
    x = jax.random.normal(jax.random.key(0), (4, 8, 16), jnp.bfloat16)
    variables = quick_init(layer.init)({"params": jax.random.key(1), "dropout": jax.random.key(2)}, x)
    state, params = flax.core.pop(variables, "params")
    rules = (("nvte_w_tp", "tp"), ("mlp", "tp"), ("expert", "dp"))
    rules += tuple((name, None) for name in ("nvte_w_no_shard", "nvte_w_fsdp", "nvte_w_joined", "embed"))
    specs = flax.linen.logical_to_mesh_sharding(flax.linen.get_partition_spec(params), mesh, rules)
    params = jax.tree.map(jax.device_put, flax.linen.meta.unbox(params), specs)
    x = jax.device_put(x, NamedSharding(mesh, P("dp")))

    def loss(params, state, x):  # dropout of hidden states too
        y = layer.apply({"params": params, **state}, x, rngs={"dropout": jax.random.key(3)})
        return jnp.mean(y.astype(jnp.float32) ** 2)

    events.clear()
    value, grads = jax.jit(jax.value_and_grad(loss, (0, 1)))(params, state, x)
print(*(events.count(f"/jax/compilation_cache/cache_{what}") for what in ("hits", "misses")), float(value))
"""


def in_new_process(program, *arguments, flags=""):
    """What `program` prints, on the CPU. `flags` are its XLA_FLAGS."""
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": flags,
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "tests" / "support"))),
    }
    command = [sys.executable, "-c", program, *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.parametrize("kind", ["Explicit", "Auto"])
def test_a_mesh_hits_the_persistent_compilation_cache(kind, tmp_path):
    """In a second process, with experts on dp. On Auto axes `custom_partitioning` puts an address into the program,
    which jax leaves out of the key when it is told to."""
    first, second = (in_new_process(CACHED, tmp_path, kind, flags=QUICK).split() for _ in range(2))
    assert first[:2] == ["0", "1"] and second[:2] == ["1", "0"]
    assert first[2] == second[2] and float(first[2]) > 0


def test_what_an_op_is_told_is_in_the_program():
    """And so in the key of the cache, without that address."""
    mesh, x = jax.make_mesh((2,), ("dp",), axis_types=(jax.sharding.AxisType.Auto,)), np.ones((4, 8), np.float32)
    with jax.set_mesh(mesh):
        norms = [jax.jit(functools.partial(layers.layernorm, epsilon=epsilon)) for epsilon in (1e-6, 1e-5)]
        first, second = (norm.lower(x, x[0], None).as_text() for norm in norms)
    line = next(line for line in first.splitlines() if "@CustomSPMDPartitioning" in line)
    assert "te_norm_fwd" in line and "1e-06" in line
    assert "1e-05" in second and "1e-06" not in second


def test_recommended_xla_flags_are_known_to_this_jaxlib():
    """XLA aborts at one that it does not know."""
    flags = sharding.recommended_xla_flags()
    assert "--xla_gpu_enable_latency_hiding_scheduler=true" in flags.split()
    assert all(flag.startswith("--xla_gpu_") and "=" in flag for flag in flags.split())
    in_new_process("import jax; jax.devices()", flags=flags)
