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
    """A new run must not overwrite the checkpoints of another: they move to `earlier-N` beside it."""
    names = ("fp8", "bf16", "results.json", "loss.png", load.PNG, *health.FILES)
    found = [out / name for name in names if (out / name).exists()]
    if not found:
        return
    earlier = next(p for n in itertools.count(1) if not (p := out / f"earlier-{n}").exists())
    earlier.mkdir()
    for path in found:
        path.rename(earlier / path.name)
    print(f"note: {out} held a run; it is in {earlier} now (--resume would have continued it)")


def way_on(out: pathlib.Path, checkpoints: bool) -> str:
    """What is left of a run that was cut short, and how to go on. checkpoints: whether it was to write any."""
    if not checkpoints:
        return "nothing is saved, since --no-checkpoint is given"
    last = [out / name / str(steps[-1]) for name in ("fp8", "bf16") if (steps := checkpoint.saved_steps(out / name))]
    if not last:
        return f"there is no checkpoint in {out} (--checkpoint-every N writes them on the way)"
    return f"the last checkpoint is {' and '.join(map(str, last))}: the same command with --resume goes on from there"
