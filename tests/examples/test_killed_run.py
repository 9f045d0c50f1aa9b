"""train_gpt.py killed by SIGKILL, at any moment: --resume goes on from the last whole checkpoint, bit for bit."""

import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import time

import jax.numpy as jnp
from conftest import QUICK

ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "examples"))

import train_gpt  # noqa: E402
from gpt import checkpoint, steps  # noqa: E402

EVERY, STEPS = 3, 90
RUN = f"--preset tiny --layers 1 --seq-len 16 --batch-size 2 --steps {STEPS} --amax-history-len 4 --eval-every 0"
RUN = [*RUN.split(), "--dropout", "0.1", "--data", str(ROOT / "examples" / "README.md")]


def start(out: pathlib.Path, *arguments) -> subprocess.Popen:
    """Runs at the same time share their compiled programs."""
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": QUICK,
        "JAX_COMPILATION_CACHE_DIR": str(out.parent / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, str(ROOT / "examples" / "train_gpt.py"), *RUN, "--out", str(out), *arguments]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finished(process: subprocess.Popen) -> str:
    said, _ = process.communicate(timeout=400)
    assert process.returncode == 0, said
    return said


def losses(out: pathlib.Path) -> list:
    return json.loads((out / "results.json").read_text())["runs"]["fp8"]["losses"]


def saved_steps(directory: pathlib.Path) -> list[int]:
    """Of checkpoints that are whole: orbax gives one its name when all of it is written."""
    return sorted(int(path.name) for path in directory.glob("*") if path.name.isdecimal())


def test_a_killed_run_resumes_bit_for_bit(tmp_path, capsys):
    out, delay = tmp_path / "killed", random.uniform(0, 0.5)
    print(f"killed {delay:.3f} s after its first checkpoint")
    started = [killed := start(out, "--checkpoint-every", str(EVERY))]
    try:
        while not saved_steps(out / "fp8"):
            assert killed.poll() is None, finished(killed)
            time.sleep(0.01)
        started.append(whole := start(tmp_path / "whole", "--no-checkpoint"))
        assert train_gpt.main([*RUN, "--out", str(out), "--resume"]) == 2, "it took the directory of a run that goes on"
        assert f"another run writes to {out} (process {killed.pid} on " in capsys.readouterr().err
        time.sleep(delay)
        assert killed.poll() is None, "it was over before the signal"
        os.kill(killed.pid, signal.SIGKILL)
        assert killed.wait() == -signal.SIGKILL
        last = saved_steps(out / "fp8")[-1]
        assert EVERY <= last < STEPS
        # What a kill in the midst of writing leaves, were there none: the next checkpoint without a part of its files.
        cut = out / "fp8" / f"{last + EVERY}.orbax-checkpoint-tmp"
        if not cut.exists():
            shutil.copytree(out / "fp8" / str(last), cut)
            shutil.rmtree(cut / "fp8")
            (cut / "_CHECKPOINT_METADATA").unlink(missing_ok=True)
        said = finished(start(out, "--resume"))
        assert f"steps {last} to {STEPS}" in said
        finished(whole)
    finally:
        for process in started:
            process.kill()
    assert losses(out) == losses(tmp_path / "whole")
    assert [step for step, _ in losses(out)] == list(range(1, STEPS + 1))


def test_a_checkpoint_holds_the_run_as_it_was_saved(tmp_path):
    """orbax may write the run only when training has gone on and added losses to it."""
    state = steps.TrainState(jnp.int32(1), {"w": jnp.ones(3)}, (), {}, jnp.zeros(2, jnp.uint32))
    run, asked = {"key": {}, "losses": [1.0]}, []
    checkpoints = checkpoint.Checkpoints(tmp_path / "bf16")
    checkpoints.manager.save = lambda step, args: asked.append(args)
    checkpoints.save(state, run)
    run["losses"].append(2.0)
    checkpoints.close()
    assert asked[0]["run"].item["losses"] == [1.0]
