"""What is measured: a case is one computation by one implementation."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from timing import Call


@dataclass(frozen=True)
class Case:
    """One row of the table.

    name:    the computation and its sizes; rows of one name do the same work and compare.
    impl:    who does it.
    build:   () -> the compiled call and its data.
    flops, bytes: what the computation needs at least: each input read once, each result written once.
    fp8_flops: of `flops`, those in FP8; the others are in bf16.
    measure: (calls, repeat) -> ms per call, in place of `build` where another process measures.
    suite:   as of `--suite`.
    link:    the bytes go between GPUs, so that no ceiling of one GPU bounds them.
    tokens:  of a layer's step; 0 where time per token says nothing.
    calls:   issued back to back at most: a long call needs fewer for the same precision.
    figures: ms -> more that the row says.
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
    figures: Callable[[float], dict] | None = None

    @property
    def label(self) -> str:
        return f"{self.name} | {self.impl}"


def select(cases: Iterable[Case], pattern: str | None) -> list[Case]:
    """The cases whose `name | impl` matches the regular expression, all if None."""
    return [case for case in cases if not pattern or re.search(pattern, case.label)]


def rate(case: Case, ms: float) -> tuple[float | None, float | None]:
    """TFLOP/s and TB/s; None where the case does not count them."""
    per_second = lambda amount: amount / (ms * 1e-3) / 1e12 if amount else None
    return per_second(case.flops), per_second(case.bytes)


def floor_ms(case: Case, ceilings: dict) -> float:
    """The time that the work takes at the ceilings of `ceilings.measure`: the multiplications, or the traffic if that
    takes longer."""
    at = lambda amount, name: amount / (ceilings[name]["sustained"] * 1e12) * 1e3
    products = at(case.fp8_flops, "fp8") + at(case.flops - case.fp8_flops, "bf16")
    return max(products, at(case.bytes, "copy"))


def peer_ms(case: Case, value: float, unit: str) -> float:
    """A published figure as ms; `unit` is "ms", "TFLOP/s" or "TB/s"."""
    if unit == "ms":
        return value
    amount = case.flops if unit == "TFLOP/s" else case.bytes
    return amount / (value * 1e12) * 1e3
