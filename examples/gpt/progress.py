"""The progress bar, and the step times behind its figures."""

import contextlib
import math
import os
import statistics
import sys
import time

WINDOW = 20  # steps that the bar's rate looks back


class Progress:
    """Takes losses as they arrive. `tokens` and `flops` are one step's, `peak` is in FLOP/s or None.

    shown: False in all processes but one.
    """

    def __init__(self, name: str, start: int, total: int, tokens: int, flops: float, peak: float | None, shown=True):
        import tqdm  # only for a run: --help needs none

        self.tokens, self.flops, self.peak = tokens, flops, peak
        self.seconds: list[float] = []  # from one step's end, or from its issue to an idle device, to its own end
        self.last: float | None = None
        self.started = False
        # Into a file the bar writes a line now and then, on a terminal it moves.
        self.file = sys.stderr if shown else open(os.devnull, "w")  # a disabled bar would not count
        slow = 0.2 if self.file.isatty() else 15.0
        options = dict(unit="step", mininterval=slow, dynamic_ncols=True, file=self.file)
        self.bar = tqdm.tqdm(total=total, initial=start, desc=name, **options)

    def issues(self) -> None:
        """A step is issued now. The first one is not timed: what it needs may still be on its way to the device."""
        if self.started and self.last is None:
            self.last = time.perf_counter()
        self.started = True

    def add(self, loss: float) -> None:
        """FloatingPointError if the loss is not finite: nothing good comes after it."""
        now = time.perf_counter()
        if self.last is not None:
            self.seconds.append(now - self.last)
        self.last = now
        with contextlib.suppress(BrokenPipeError):  # Who read the bar is gone; losses are kept all the same.
            self.bar.set_postfix_str(f"loss {loss:.3f}" + "".join(f", {part}" for part in self.rates(WINDOW)), False)
            self.bar.update()
        if not math.isfinite(loss):
            self.bar.close()
            raise FloatingPointError(f"the loss is {loss} at step {self.bar.n}: try a smaller --lr")

    def pause(self) -> None:
        """The device is idle: what happens between now and the next step's issue is not a step's time."""
        self.last = None

    def note(self, text: str) -> None:
        self.bar.write(text, file=self.file)

    def step_seconds(self, window: int = 0) -> float | None:
        """Median of the last `window` steps (0: of all)."""
        return statistics.median(self.seconds[-window:]) if self.seconds else None

    def tokens_per_second(self, window: int = 0) -> float | None:
        seconds = self.step_seconds(window)
        return seconds and self.tokens / seconds

    def utilisation(self, window: int = 0) -> float | None:
        """The model's FLOP/s over the GPU's peak in this run's precision; None where no peak is known."""
        seconds = self.step_seconds(window)
        return self.flops / seconds / self.peak if seconds and self.peak else None

    def rates(self, window: int = 0) -> list[str]:
        rate, used = self.tokens_per_second(window), self.utilisation(window)
        return ([f"{rate:,.0f} tokens/s"] if rate else []) + ([f"MFU {used:.1%}"] if used else [])
