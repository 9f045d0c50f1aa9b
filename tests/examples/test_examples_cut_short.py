"""What ends a run of train_gpt.py, or keeps it from going on: what is said, what is left, and that nothing hangs."""

import contextlib
import errno
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from example_runs import EXAMPLES, SMALL, TEXT, compiled_once, train, unrendered  # noqa: F401

import train_gpt  # isort: skip
from gpt import checkpoint, config, progress, rundir, steps, stopping  # isort: skip

FAST = ["--eval-every", "0"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run with checkpoints of steps 8 and 12."""
    out = tmp_path_factory.mktemp("finished")
    assert train(out, *FAST, "--checkpoint-every", "8")[0] == 0
    return out


def damage(path, how: str) -> None:
    """path: of a checkpoint."""
    files = [file for file in (path / "state").rglob("d/*") if file.is_file()]
    largest = max(files, key=lambda file: file.stat().st_size)
    if how == "cut":
        os.truncate(largest, 10)
    elif how == "bit":
        content = bytearray(largest.read_bytes())
        content[len(content) // 2] ^= 4
        largest.write_bytes(content)
    elif how == "gone":
        shutil.rmtree(path / "state")
    else:
        os.truncate(path / "run" / "metadata", 20)


def state(step: int) -> steps.TrainState:
    return steps.TrainState(jnp.int32(step), {"w": jnp.arange(4096.0) + step}, (), {}, jnp.zeros(2, jnp.uint32))


@pytest.mark.parametrize("how", ["cut", "bit", "gone", "run"])
def test_a_damaged_checkpoint_is_put_aside(how, tmp_path, capsys):
    run = {"key": {config.TEXT: "a"}}
    with checkpoint.opened(tmp_path) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(state(step), run)
    damage(tmp_path / "3", how)
    with checkpoint.opened(tmp_path) as checkpoints:
        restored, _ = checkpoints.restore(state(0), run["key"])
        said = capsys.readouterr().out
        assert f"{tmp_path / '3'} is damaged (" in said and "step 2's is taken" in said
        jax.tree.map(np.testing.assert_array_equal, restored, state(2))
        assert checkpoint.saved_steps(tmp_path) == [2]
        checkpoints.save(state(3), run)
    # It is one of the two that are kept no more: those are whole.
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2", "3", "damaged-3"]
    damage(tmp_path / "3", how)
    with checkpoint.opened(tmp_path) as checkpoints:
        assert int(checkpoints.restore(state(0), run["key"])[0].step) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2", "damaged-3", "damaged-3-2"]


def test_a_run_goes_on_before_a_damaged_checkpoint(finished, tmp_path):
    out = tmp_path / "run"
    shutil.copytree(finished, out)
    damage(out / "fp8" / "12", "cut")
    code, results, said = train(out, *FAST, "--resume")
    assert code == 0 and "steps 8 to 12" in said and "damaged-12 now" in said
    whole = json.loads((finished / "results.json").read_text())
    assert results["runs"]["fp8"]["losses"] == whole["runs"]["fp8"]["losses"]


def test_a_checksum_tells_any_element():
    kinds = [jnp.float32, jnp.bfloat16, jnp.float8_e4m3fn, jnp.int32]
    arrays = {str(i): jnp.ones((3, 5), kind) for i, kind in enumerate(kinds)}
    before = checkpoint.checksums(arrays)
    changes = [{n: x.at[place].set(2) for n, x in arrays.items()} for place in ((0, 0), (0, 1), (2, 0), (2, 4))]
    for sums in zip(before.values(), *(checkpoint.checksums(changed).values() for changed in changes), strict=True):
        assert len(set(sums)) == 5


def test_without_a_whole_checkpoint_nothing_is_touched(finished, tmp_path, capsys):
    out = tmp_path / "run"
    shutil.copytree(finished, out)
    damage(out / "fp8" / "12", "gone")
    damage(out / "fp8" / "8", "run")
    assert train_gpt.main([*SMALL, *FAST, "--out", str(out), "--resume"]) == 2
    error = capsys.readouterr().err
    assert "no checkpoint in" in error and "12: FileNotFoundError" in error and "8: JSONDecodeError" in error
    assert checkpoint.saved_steps(out / "fp8") == [8, 12]


def test_a_text_of_equal_length_is_another_text(finished, tmp_path, capsys):
    shutil.copytree(finished, tmp_path / "run")
    text = tmp_path / "other.txt"
    text.write_bytes(pathlib.Path(TEXT).read_bytes().replace(b"FP8", b"fp8"))
    options = [*SMALL, *FAST, "--out", str(tmp_path / "run"), "--resume", "--data", str(text)]
    assert train_gpt.main(options) == 2
    assert "text_sha256 " in capsys.readouterr().err
    text.write_bytes(pathlib.Path(TEXT).read_bytes())
    assert train_gpt.main(options) == 0, "the same text in another file"


def test_one_run_at_a_time(tmp_path, capsys):
    with rundir.locked(tmp_path):
        assert train_gpt.main([*SMALL, "--out", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert f"another run writes to {tmp_path} (process {os.getpid()} on " in error and "another --out" in error
    with rundir.locked(tmp_path):
        pass


@contextlib.contextmanager
def read_only(directory):
    """Also for root, whom permissions do not stop: by a mount."""
    if os.geteuid():
        directory.chmod(0o555)
        yield
        directory.chmod(0o755)
        return
    mount = lambda *options: subprocess.run(["mount", *options, directory], capture_output=True).returncode == 0
    if not mount("--bind", directory):
        pytest.skip("root here, and no mounts")
    try:
        assert mount("-o", "remount,ro,bind")
        yield
    finally:
        subprocess.run(["umount", directory], check=True)


def test_a_read_only_directory(tmp_path, capsys):
    with read_only(tmp_path):
        assert train_gpt.main([*SMALL, "--out", str(tmp_path)]) == 2
    assert str(tmp_path) in capsys.readouterr().err


def test_a_checkpoint_that_cannot_be_made_ends_the_run(finished, tmp_path, capsys, monkeypatch):
    """Without a thread that waits for what does not come: it would keep the process for 20 minutes."""
    out = tmp_path / "run"
    shutil.copytree(finished, out)
    shutil.rmtree(out / "fp8" / "12")
    before = set(threading.enumerate())

    makedirs = os.makedirs

    def full(path, *arguments, **options):
        if "orbax-checkpoint-tmp" in str(path):
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        makedirs(path, *arguments, **options)

    monkeypatch.setattr(os, "makedirs", full)
    code = train_gpt.main([*SMALL, *FAST, "--out", str(out), "--resume"])
    error = capsys.readouterr().err
    assert code == 1 and "Traceback" not in error
    assert f"a checkpoint in {out / 'fp8'} could not be written: no space left on device" in error
    assert f"the last checkpoint is {out / 'fp8' / '8'}: the same command with --resume goes on from there" in error
    waiting = [t for t in threading.enumerate() if t not in before and t.is_alive() and not t.daemon]
    for thread in waiting:
        thread.join(5)
    assert not any(thread.is_alive() for thread in waiting)


def test_signals_save_a_checkpoint(finished, tmp_path, capsys, monkeypatch):
    """Ctrl-C, then SIGTERM in the run that goes on from there: the losses at the end are those of a run in one."""
    out, before = tmp_path / "run", [signal.getsignal(number) for number in stopping.SIGNALS]
    shutil.copytree(finished, out)
    shutil.rmtree(out / "fp8" / "12")
    issues = progress.Progress.issues
    for number, step, name in ((signal.SIGINT, 9, "Ctrl-C"), (signal.SIGTERM, 10, "SIGTERM")):

        def signalled(self, number=number):
            os.kill(os.getpid(), number)
            issues(self)

        monkeypatch.setattr(progress.Progress, "issues", signalled)
        arguments = [*SMALL, *FAST, "--out", str(out), "--checkpoint-every", "0", "--resume"]
        assert train_gpt.main(arguments) == 128 + number
        error = capsys.readouterr().err
        assert f"stopped by {name}; the last checkpoint is {out / 'fp8' / str(step)}: the same command with" in error
        assert error.rstrip().endswith(f"--out {out} --checkpoint-every 0 --resume")
        assert [signal.getsignal(number) for number in stopping.SIGNALS] == before
    monkeypatch.setattr(progress.Progress, "issues", issues)
    code, results, said = train(out, *FAST, "--resume")
    assert code == 0 and "steps 10 to 12" in said
    whole = json.loads((finished / "results.json").read_text())
    assert results["runs"]["fp8"]["losses"] == whole["runs"]["fp8"]["losses"]
    assert said.splitlines()[-1].endswith(f"generate.py --checkpoint {out / 'fp8'} --prompt 'def main('")


@pytest.mark.parametrize("is_heard", [True, False], ids=["heard", "stderr is a broken pipe"])
def test_a_second_signal_ends_at_once(is_heard, capfd, monkeypatch):
    def write(fd, text, write=os.write):
        if not is_heard:
            raise BrokenPipeError
        return write(fd, text)

    monkeypatch.setattr(os, "write", write)
    with stopping.listening(stop := stopping.Stop()):
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.agreed(1, False) == signal.SIGTERM
        assert all(signal.getsignal(number) is signal.SIG_DFL for number in stopping.SIGNALS)
    monkeypatch.undo()
    assert ("a second signal ends it at once" in capfd.readouterr().err) == is_heard
    assert signal.getsignal(signal.SIGINT) is not signal.SIG_DFL
    with pytest.raises(stopping.Stopped, match="SIGTERM"):
        stop.check()  # the run behind this one does not begin


def test_processes_agree_on_the_step(monkeypatch):
    """One that heard nothing stops with the others, which asked it: after the same step, and not after each."""
    asked = []
    monkeypatch.setattr(stopping.cluster, "several", lambda: True)
    monkeypatch.setattr(stopping.cluster, "largest", lambda number: asked.append(number) or signal.SIGTERM)
    stop = stopping.Stop()
    assert not any(stop.agreed(step, False) for step in range(1, stopping.EVERY)) and not asked
    assert stop.agreed(stopping.EVERY, False) == stop.agreed(3, True) == signal.SIGTERM and asked == [0, 0]


def test_a_run_that_cannot_begin_displaces_nothing(finished, tmp_path, capsys, monkeypatch):
    out = tmp_path / "run"
    shutil.copytree(finished, out)
    content = sorted(out.rglob("*"))
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    report = ["--fp8-report", "--tensorboard", str(tmp_path / "board")]
    assert train_gpt.main([*SMALL, *FAST, "--out", str(out), *report]) == 2
    assert "--tensorboard needs tensorboardX: pip install tensorboardX" in capsys.readouterr().err

    def no_memory(*arguments):
        raise ValueError("the step does not compile")

    monkeypatch.setattr(steps, "compiled_step", no_memory)
    assert train_gpt.main([*SMALL, *FAST, "--out", str(out)]) == 2
    assert "train_gpt: the step does not compile" in capsys.readouterr().err
    assert sorted(out.rglob("*")) == content


def test_resume_without_a_checkpoint(finished, tmp_path, capsys):
    out = tmp_path / "none"
    assert train_gpt.main([*SMALL, "--out", str(out), "--resume"]) == 2
    assert f"--resume: there is no checkpoint in {out / 'fp8'} (none in {out})" in capsys.readouterr().err
    assert not out.exists()
    assert train_gpt.main([*SMALL, "--out", str(finished), "--resume", "--precision", "bf16"]) == 2
    assert f"only one of --precision fp8 in {finished}): leave --resume out, or" in capsys.readouterr().err


def test_whats_next(tmp_path):
    given = [*SMALL, "--stop-at", "5", "--out", str(tmp_path)]
    args = config.parse(given, "tiny")
    args.given = given
    go_on = train_gpt.whats_next(args, tmp_path)[-1]
    assert go_on.startswith("to go on to step 12: python ") and go_on.endswith(f"--out {tmp_path} --resume")
    assert "--stop-at" not in go_on and args.checkpoint_every == 10
    assert config.parse(["--steps", "1000"], "tiny").checkpoint_every == 100
    assert rundir.command(["--stop-at=5", "--resume"], "--resume", without="--stop-at").endswith(
        "train_gpt.py --resume"
    )


def test_way_on(tmp_path):
    assert "there is no checkpoint" in rundir.way_on(tmp_path, True)
    assert "--no-checkpoint" in rundir.way_on(tmp_path, False)


def test_packages_are_asked_for_when_they_are_needed(tmp_path):
    """--help needs none but Install's; a run says what it lacks, before it does anything."""
    program = """
import contextlib, sys
sys.modules.update(tqdm=None, matplotlib=None, tensorboardX=None)
import generate, plot_runs, train_gpt
for program in (generate, plot_runs, train_gpt):
    with contextlib.suppress(SystemExit):
        program.main(["--help"])
sys.exit(train_gpt.main(sys.argv[1:]))
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(EXAMPLES.parent), str(EXAMPLES)])}
    command = [sys.executable, "-c", program, "--out", str(tmp_path / "run")]
    said = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert said.returncode == 2 and "tqdm and matplotlib not installed: pip install tqdm matplotlib" in said.stderr
    assert "--no-cache" in said.stdout and "results.json" in said.stdout and "--fp8-report" in said.stdout
    assert not (tmp_path / "run").exists()
