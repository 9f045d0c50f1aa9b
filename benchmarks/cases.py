"""What is measured: a case is one computation by one implementation."""

import json
import pathlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from .timing import Call


@dataclass(frozen=True)
class Case:
    """One row of the table.

    name:    the computation and its sizes; rows of one name do the same work and compare.
    impl:    who does it.
    build:   () -> the compiled call and its data.
    flops, bytes: what the computation needs at least: each input read once, each result written once.
    fp8_flops: of `flops`, those in FP8; the others are in bf16.
    measure: (calls, repeat) -> ms per call, in place of `build` where another process measures.
    suite:   the command that measures it.
    link:    the bytes go between GPUs, so that no ceiling of one GPU bounds them.
    tokens:  of a layer's step; 0 where time per token says nothing.
    calls:   issued back to back at most: a long call needs fewer for the same precision.
    figures: ms -> more that the row says.
    bound:   where rows are measured in turns, the implementation of the same case whose time bounds this one's from
             below, as the traffic does; "" where only the traffic does.
    beside:  there, those of the same case whose times this one's is shown over.
    profiled: there, what the row says of the summary of `kernels.profile`; None: it is not traced.
    """

    name: str
    impl: str
    build: Callable[[], Call] | None = None
    flops: float = 0.0
    bytes: float = 0.0
    fp8_flops: float = 0.0
    measure: Callable[[int, int], list[float]] | None = None
    suite: str = "ops"
    link: bool = False
    tokens: int = 0
    calls: int | None = None
    figures: Callable[[float], dict] = lambda ms: {}
    bound: str = ""
    beside: tuple[str, ...] = ()
    profiled: Callable[[dict], dict] | None = None

    @property
    def label(self) -> str:
        return f"{self.name} | {self.impl}"

    def rates(self, ms: float) -> tuple[float | None, float | None]:
        """TFLOP/s and TB/s; None where the case does not count them."""
        tflops, tbs = (amount / (ms * 1e-3) / 1e12 if amount else None for amount in (self.flops, self.bytes))
        return tflops, tbs

    def products_ms(self, ceilings: dict) -> float:
        """The time that the multiplications take at the ceilings of `ceilings.measure`."""
        at = lambda amount, name: amount / (ceilings[name]["sustained"] * 1e12) * 1e3
        return at(self.fp8_flops, "fp8") + at(self.flops - self.fp8_flops, "bf16")

    def floor_ms(self, ceilings: dict) -> float:
        """`products_ms`, or the time of the traffic if that takes longer."""
        return max(self.products_ms(ceilings), self.bytes / (ceilings["copy"]["sustained"] * 1e12) * 1e3)

    def peer_ms(self, figure: float, unit: str) -> float:
        """A published figure as ms; `unit` is "ms", "TFLOP/s" or "TB/s"."""
        amount = self.flops if unit == "TFLOP/s" else self.bytes
        return figure if unit == "ms" else amount / (figure * 1e12) * 1e3


@cache
def peers() -> dict[tuple[str, str], dict]:
    """The published figures: (case name, impl) -> {"figure", "unit", "whose"}."""
    figures = json.loads(pathlib.Path(__file__).with_name("peers.json").read_text())["figures"]
    return {(each.pop("case"), each.pop("impl")): each for each in figures}
