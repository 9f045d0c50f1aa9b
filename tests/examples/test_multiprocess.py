"""train_gpt.py in two processes of four devices each, on the CPU: one run, whose checkpoints go on anywhere."""

import functools
import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest
from conftest import QUICK
from example_runs import unrendered  # noqa: F401

ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "examples"))

import experts_across  # noqa: E402
import generate  # noqa: E402
import train_gpt  # noqa: E402
from gpt import checkpoint, rundir  # noqa: E402

RUN = "--preset tiny --layers 1 --seq-len 32 --batch-size 8 --steps 6 --amax-history-len 4 --eval-every 0"
RUN = [*RUN.split(), "--checkpoint-every", "3", "--data", str(ROOT / "examples" / "README.md")]
MOE = [*RUN, "--no-checkpoint", "--steps", "3", "--moe", "8", "--top-k", "2", "--mesh", "fsdp=2,ep=4"]

# Each process runs train_gpt.py.
TRAIN = """
import faulthandler
import sys
faulthandler.dump_traceback_later(350)  # where each thread is, if it hangs
import functools
import jax
import numpy as np
import train_gpt
heartbeat = dict(heartbeat_timeout_seconds=10)  # after which jax ends a process that waits for one that is gone
jax.distributed.initialize = functools.partial(jax.distributed.initialize, **heartbeat)
code = train_gpt.main(sys.argv[1 : sys.argv.index("--then")])
"""
# Then it says which rows of a batch of 8 it reads on meshes of other shapes, and which part of a sequence of 32 its
# first device has where all divide it.
ROWS = """
from jax.sharding import AxisType
from gpt import mesh
rows = {}
for sizes in ((2, 2, 2), (1, 1, 8), (8, 1, 1), (1, 2, 4)):
    devices = jax.make_mesh(sizes, ("dp", "fsdp", "tp"), axis_types=(AxisType.Auto,) * 3)
    feed = mesh.Feed(devices, 8)
    batch = feed(feed.rows[:, None])
    part = [int(row) for row in batch.addressable_data(0)[:, 0]]
    print("rows", *sizes, "|", *feed.rows, "|", *part, file=sys.stderr)
feed = mesh.Feed(jax.make_mesh((1, 1, 8), ("dp", "fsdp", "cp"), axis_types=(AxisType.Auto,) * 3), 8)
pair = feed(np.tile(np.arange(33), (8, 1)))
print("places", *(x.addressable_data(0)[-1].tolist() for x in pair), file=sys.stderr)
"""
# Then experts that all devices divide: a layer, whose numbers process 0 writes, and train_gpt.py. At last process 1 is
# killed, and process 0 runs the layer once more.
EXPERTS = """
import os, pathlib, signal
import experts_across
from gpt import cluster
out = pathlib.Path(sys.argv[sys.argv.index("--out") + 1])
for name in experts_across.CASES:
    layer, arguments = experts_across.case(name)
    numbers = experts_across.numbers(layer(*arguments))
    if cluster.is_first():
        np.savez(out / f"{name}.npz", **numbers)
experts = sys.argv[sys.argv.index("--then") + 1 :]
trained = train_gpt.main([*experts, "--out", str(out / "experts")])
print("codes", code, trained, file=sys.stderr)
cluster.wait_for_all("the last one goes on")
if not cluster.is_first():
    os.kill(os.getpid(), signal.SIGKILL)
cluster.leave(lambda: jax.block_until_ready(layer(*arguments)) and 0)
"""


@functools.cache
def folder_of_programs() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory()


def two_processes(out, *arguments, then="") -> list[subprocess.CompletedProcess]:
    """`TRAIN` and `then` in processes 0 and 1 of one run, and what they said. Runs share their compiled programs."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    path = os.pathsep.join(map(str, (ROOT, ROOT / "examples", ROOT / "tests" / "support")))
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": QUICK,
        "JAX_COMPILATION_CACHE_DIR": folder_of_programs().name,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "PYTHONPATH": path,
    }
    common = [*RUN, "--out", str(out), "--devices", "4", "--mesh", "dp=2,fsdp=2,tp=2", *arguments]
    together = ["--coordinator", f"localhost:{port}", "--processes", "2", "--process-id"]
    program = [sys.executable, "-c", f"{TRAIN}{then}\nsys.exit(code)"]
    commands = [[*program, *common, *together, str(i), "--then", *MOE] for i in range(2)]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    started = [subprocess.Popen(command, env=environment, **pipes) for command in commands]
    try:
        with ThreadPoolExecutor() as readers:  # of both at once: a process waits while its pipe is full
            said = list(readers.map(lambda process: process.communicate(timeout=400), started))
    except subprocess.TimeoutExpired:
        for process in started:
            process.kill()
        pytest.fail("hung:\n" + "\n".join(process.communicate()[1] for process in started))
    finally:
        for process in started:
            process.kill()
    return [subprocess.CompletedProcess(p.args, p.returncode, *s) for p, s in zip(started, said)]


def losses(out) -> list:
    return json.loads((out / "results.json").read_text())["runs"]["fp8"]["losses"]


def saved(out, step: int) -> dict:
    """A checkpoint's arrays as numpy arrays, by name."""
    found = {}
    for item in ("state", "fp8"):
        path = out / "fp8" / str(step) / item
        with checkpoint.ocp.PyTreeCheckpointer() as reader:
            as_numpy = lambda _: checkpoint.ocp.RestoreArgs(restore_type=np.ndarray)
            found[item] = reader.restore(
                path, restore_args=jax.tree.map(as_numpy, reader.metadata(path).item_metadata.tree)
            )
    leaves = jax.tree_util.tree_leaves_with_path(found)
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """(--out, what the processes said) of a run without a stop."""
    out = tmp_path_factory.mktemp("whole")
    return out, two_processes(out, then=ROWS + EXPERTS)


def stopped(whole, tmp_path) -> pathlib.Path:
    """A copy of the run that ends with the checkpoint of step 3."""
    shutil.copytree(whole[0], tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "fp8" / "6")
    (tmp_path / "run" / "results.json").unlink()
    return tmp_path / "run"


def test_two_processes_are_one_run(whole):
    out, said = whole
    for one in said:
        assert "codes 0 0" in one.stderr, one.stderr[-3000:]
    assert "mesh dp=2,fsdp=2,tp=2" in said[0].stdout and "steps 0 to 6 of 6" in said[0].stdout
    assert "loss" not in said[1].stdout + said[1].stderr, "process 0 speaks for all"
    assert len(losses(out)) == 6 and (out / "loss.png").exists()
    results = json.loads((out / "results.json").read_text())
    assert results["device"]["count"] == 8 and results["args"]["process_id"] == 0


def test_devices_of_both_divide_experts(whole):
    """As devices of one process do, but for the order of sums; quantized tensors and FP8 state have the same bits."""
    for name in experts_across.CASES:
        got, (layer, arguments) = np.load(whole[0] / f"{name}.npz"), experts_across.case(name)
        want = experts_across.numbers(layer(*arguments))
        assert set(got) == set(want)
        for path in want:
            bound = 0 if "fp8" in path or "expert_bias" in path else 1e-6 * np.abs(want[path]).max()
            np.testing.assert_allclose(got[path], want[path], rtol=0, atol=bound, err_msg=path)


@pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices: run it on a CPU")
def test_two_processes_train_experts(whole, tmp_path):
    assert train_gpt.main([*MOE, "--out", str(tmp_path)]) == 0
    np.testing.assert_allclose(losses(whole[0] / "experts"), losses(tmp_path), rtol=0, atol=5e-3)  # FP8


def test_a_killed_process_ends_the_other(whole):
    """Which sends tokens to its experts: a collective fails, or jax misses the other one."""
    other, killed = whole[1]
    assert killed.returncode == -signal.SIGKILL
    words = {1: "another process of the run has ended", -signal.SIGABRT: "distributed service detected fatal errors"}
    assert words[other.returncode] in other.stderr, other.stderr[-3000:]


def test_each_process_reads_its_rows(whole):
    """Half of a batch, or all of it where the processes share the rows; device 0 has the first ones."""
    said = ["\n".join(line for line in one.stderr.splitlines() if line.startswith("rows")) for one in whole[1]]
    first = "rows 2 2 2 | 0 1 2 3 | 0 1\nrows 1 1 8 | 0 1 2 3 4 5 6 7 | 0 1 2 3 4 5 6 7\n"
    assert said[0] == first + "rows 8 1 1 | 0 1 2 3 | 0\nrows 1 2 4 | 0 1 2 3 | 0 1 2 3"
    second = "rows 2 2 2 | 4 5 6 7 | 4 5\nrows 1 1 8 | 0 1 2 3 4 5 6 7 | 0 1 2 3 4 5 6 7\n"
    assert said[1] == second + "rows 8 1 1 | 4 5 6 7 | 4\nrows 1 2 4 | 4 5 6 7 | 4 5 6 7"


def test_each_process_takes_its_part_of_a_sequence(whole):
    """An early and a late one for each device: those of the tokens, and one further those of the targets."""
    said = [next(line for line in one.stderr.splitlines() if line.startswith("places")) for one in whole[1]]
    assert said == ["places [0, 1, 30, 31] [1, 2, 31, 32]", "places [8, 9, 22, 23] [9, 10, 23, 24]"]


def test_a_resumed_run_is_the_same_bit_for_bit(whole, tmp_path):
    """From the checkpoint before one of which a file is damaged that not all processes read."""
    out = stopped(whole, tmp_path)
    shutil.copytree(whole[0] / "fp8" / "6", out / "fp8" / "6")
    files = (out / "fp8" / "6" / "state" / "ocdbt.process_1" / "d").iterdir()
    os.truncate(max(files, key=lambda file: file.stat().st_size), 10)
    said = two_processes(out, "--resume")
    assert [one.returncode for one in said] == [0, 0], said[0].stderr[-3000:]
    assert "steps 3 to 6 of 6" in said[0].stdout and "damaged-6 now" in said[0].stdout
    assert losses(out) == losses(whole[0])
    got, want = saved(out, 6), saved(whole[0], 6)
    assert got.keys() == want.keys() and any("fp8_metas" in name for name in got)
    for name in want:
        np.testing.assert_array_equal(got[name], want[name], err_msg=name)


def test_an_error_in_one_process_ends_both(tmp_path):
    """Only process 0 asks for the lock, which is held here."""
    with rundir.locked(tmp_path):
        said = two_processes(tmp_path)
    assert [one.returncode for one in said] == [2, 2], said[0].stderr[-3000:] + said[1].stderr[-3000:]
    assert "another run writes to" in said[0].stderr and "another process cannot go on" in said[1].stderr


@pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices: run it on a CPU")
def test_one_process_goes_on_with_another_mesh(whole, tmp_path, monkeypatch):
    out = stopped(whole, tmp_path)
    restored = []
    restore = checkpoint.Checkpoints.restore

    def keep(self, fresh, key):
        state, run = restore(self, fresh, key)
        kernel = state.params["layers"]["TransformerLayer_0"]["mlp"]["wo_kernel"]
        assert kernel.addressable_data(0).size * 8 == kernel.size
        assert jax.tree.all(jax.tree.map(lambda a, b: a.sharding == b.sharding, state, fresh))
        items = {"state": {k: v for k, v in state._asdict().items() if k != "fp8"}, "fp8": state.fp8}
        restored.append(jax.tree.map(np.asarray, items))
        return state, run

    monkeypatch.setattr(checkpoint.Checkpoints, "restore", keep)
    assert train_gpt.main([*RUN, "--out", str(out), "--mesh", "fsdp=4,tp=2", "--resume"]) == 0
    for got, (name, want) in zip(jax.tree.leaves(restored[0]), saved(whole[0], 3).items(), strict=True):
        np.testing.assert_array_equal(got, want, err_msg=name)
    ours, theirs = np.array(losses(out)), np.array(losses(whole[0]))
    np.testing.assert_array_equal(ours[:3], theirs[:3])  # from the checkpoint
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=5e-3)  # FP8, as in test_train_mesh.py


def test_one_device_writes_text_with_it(whole):
    """generate.py: the parameters of all devices on one."""
    _, variables, fp8 = generate.load(whole[0] / "fp8", bf16=False)
    assert fp8 is not None and all(len(leaf.devices()) == 1 for leaf in jax.tree.leaves(variables))
    want = saved(whole[0], 6)
    for path, leaf in jax.tree_util.tree_leaves_with_path(variables["params"]):
        np.testing.assert_array_equal(leaf, want["['state']['params']" + jax.tree_util.keystr(path)])
