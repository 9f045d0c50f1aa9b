"""The directory of a run: one run at a time writes into it, and what an earlier one left there moves aside."""

import contextlib
import datetime
import fcntl
import itertools
import os
import pathlib
import shlex
import socket
import sys
from collections.abc import Iterator

from . import checkpoint, health, load

LOCK = "run.lock"
PRECISIONS = "fp8", "bf16"  # the folders of their checkpoints


@contextlib.contextmanager
def locked(out: pathlib.Path) -> Iterator[None]:
    """Makes `out`, and keeps other runs out of it. ValueError, which says who is there, where a run is in it.

    The lock is the kernel's, on an open file: it ends with the process, whatever ends that.
    """
    out.mkdir(parents=True, exist_ok=True)
    file = os.open(out / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.read(file, 2000).decode(errors="replace").strip() or "it has not said which yet"
            raise ValueError(
                f"another run writes to {out} ({holder}): wait for its end, or give another --out"
            ) from error
        except OSError as error:
            print(f"note: {out} cannot be locked ({error.strerror}): start no second run there", file=sys.stderr)
        os.ftruncate(file, 0)
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        os.write(file, f"process {os.getpid()} on {socket.gethostname()} since {now}: {shlex.join(sys.argv)}".encode())
        yield
    finally:
        os.close(file)


def keep_earlier(out: pathlib.Path) -> None:
    """A new run must not overwrite the checkpoints of another: they move to `earlier-N` next to it."""
    names = (*PRECISIONS, "results.json", "loss.png", load.PNG, *health.FILES)
    found = [out / name for name in names if (out / name).exists()]
    if not found:
        return
    earlier = next(p for n in itertools.count(1) if not (p := out / f"earlier-{n}").exists())
    earlier.mkdir()
    for path in found:
        path.rename(earlier / path.name)
    print(f"note: {out} held a run; it is in {earlier} now (--resume would have continued it)")


def check_resumable(out: pathlib.Path, precisions: tuple[str, ...]) -> None:
    """ValueError where no run of `precisions` has left a checkpoint in `out`."""
    if not any(checkpoint.saved_steps(out / name) for name in precisions):
        others = [name for name in PRECISIONS if checkpoint.saved_steps(out / name)]
        found = f"only one of --precision {others[0]}" if others else "none"
        raise ValueError(
            f"--resume: there is no checkpoint in {out / precisions[0]} ({found} in {out}): leave --resume out, or "
            "give the --out of the run that is to go on"
        )


def way_on(out: pathlib.Path, checkpoints: bool, command: str = "") -> str:
    """What is left of a run that was cut short, and how to go on. checkpoints: whether it was to write any. command:
    the one that goes on from there."""
    if not checkpoints:
        return "nothing is saved, since --no-checkpoint is given"
    last = [out / name / str(steps[-1]) for name in PRECISIONS if (steps := checkpoint.saved_steps(out / name))]
    if not last:
        return f"there is no checkpoint in {out} (--checkpoint-every N writes them on the way)"
    way = f"the last checkpoint is {' and '.join(map(str, last))}: the same command with --resume goes on from there"
    return way + (f":\n  {command}" if command else "")


def command(given: list[str], *more: str, program: str = "train_gpt.py", without: str = "") -> str:
    """The command line of a `program` of this folder with the arguments `given`, but for the option `without` and its
    value, and what they lack of `more`."""
    given, place = list(given), next((i for i, part in enumerate(given) if without and part.startswith(without)), None)
    if place is not None:
        del given[place : place + (1 if "=" in given[place] else 2)]
    path = os.path.relpath(pathlib.Path(__file__).parents[1] / program)
    return shlex.join(["python", path, *given, *(part for part in more if part not in given)])
