"""Ctrl-C and SIGTERM: the first one lets a run save what it has, a second one ends it at once."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator

from . import cluster

SIGNALS = (signal.SIGINT, signal.SIGTERM)
NOTE = b"\nthis run ends after a step, with a checkpoint if it writes any; a second signal ends it at once\n"
EVERY = 10  # steps after which several processes ask each other: each question waits for the device


class Stopped(Exception):
    """A signal ended training, after a step whose state is saved where states are."""

    def __init__(self, number: int):
        self.number = number
        super().__init__(
            "stopped by Ctrl-C" if number == signal.SIGINT else f"stopped by {signal.Signals(number).name}"
        )


class Stop:
    """Whether this run is to stop: `number` is the signal that asks for it, 0 for none."""

    def __init__(self) -> None:
        self.number = 0

    def note(self, number: int, frame) -> None:
        """The handler. Written by `os.write`, since a signal may come in the midst of a print."""
        self.number = number
        for each in SIGNALS:
            signal.signal(each, signal.SIG_DFL)
        with contextlib.suppress(OSError):  # Ctrl-C ends a `tee` behind this process, too.
            os.write(2, NOTE)

    def agreed(self, step: int, now: bool) -> int:
        """The signal by which all processes stop after this step, 0 for none. Each calls it after each step.

        now: the device is waited for in any case.
        """
        if not cluster.several():
            return self.number
        return cluster.largest(self.number) if now or step % EVERY == 0 else 0

    def check(self) -> None:
        """Raises `Stopped` if a signal came: what is next need not begin. All processes call it."""
        if number := cluster.largest(self.number) if cluster.several() else self.number:
            raise Stopped(number)


@contextlib.contextmanager
def listening(stop: Stop) -> Iterator[None]:
    """`stop` hears signals within the block, where this is the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, stop.note) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
