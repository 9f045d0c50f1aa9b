"""Measures implementations of one computation in turns in one process, each for a second and more, so that all have the
clock that the GPU's power limit leaves; with the mean power and clock of each.

Time is wall time of jitted calls issued back to back. All results are returned, data is random. `of bound` is the least
time of a row over its own: the larger of its bytes at the rate of a copy (`copy_tbs`) and of the time that the row it
names as its bound has in the same turns. A row that names none has its products at `ceilings` instead, where the run
measured them. What fails is a row with its error.
"""

import itertools
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from math import ceil

from te_jax.ops.gemm import tune_all

from . import (
    ceilings,
    delta,
    expert_devices,
    grouped,
    grouped_ops,
    head,
    incumbent,
    kernels,
    layers,
    machine,
    moe,
    report,
    run,
    small,
    ssm,
    timing,
    token_pieces,
)
from .cases import Case

_ROUNDS = 4  # that count
_TRACED = 3  # steps
_COMPILED_AT_ONCE = 8
_SECONDS, _QUICK_SECONDS = 1.2, 0.1  # of a contender, in all of these
# energy: the driver counts joules by tenths of a second; ssm, delta: short calls, and many of them.
_OWN_SECONDS = {"energy": 4.8, "ssm": 0.8, "delta": 0.8}
_WITH_CEILINGS = {"ssm", "delta"}  # suites that measure `ceilings`, since no row bounds the others
_ON_ALL_GPUS = {"tp"}  # whose contenders run steps while they are made: collectives of two at once may lock up

SUITES = {
    "grouped": (
        lambda tiny: [*grouped.cases(tiny), *grouped_ops.cases(tiny)],
        "experts' grouped products and the ops around them, in turns with torch, ragged_dot and dense products",
    ),
    "moe": (moe.cases, "layers of experts in bf16 and FP8, in turns with ragged_dot"),
    "ep": (expert_devices.cases, "layers of experts that all GPUs share, in turns with one GPU's part"),
    "tp": (token_pieces.cases, "layers under tensor parallelism, tokens at once and in pieces"),
    "small": (small.cases, "steps of small layers, in turns with Flax"),
    "energy": (layers.energy_cases, "whole layers forward and backward, in turns with Flax: joules of a step"),
    "head": (head.cases, "the head of a language model with its loss, in turns with plain JAX"),
    "delta": (delta.cases, "the gated delta rule, in turns with kernels of fla, FlashQLA and FlashKDA"),
    "ssm": (ssm.cases, "Mamba-2's scan, convolution and block, in turns with mamba_ssm's kernels"),
}

OWN_OPTIONS = {
    "ep": dict(strategies=None, pieces=None),
    "tp": dict(pieces=None),
}  # of a suite, with their defaults; its cases get them


@dataclass
class Contender:
    """One implementation in the turns of its case."""

    case: Case
    call: timing.Call | None = None
    ms_of: Callable[[int], float] | None = None  # calls -> ms per call
    row: dict = field(default_factory=dict)
    times: list[float] = field(default_factory=list)  # ms per call, of each round
    draw: machine.Draw = field(default_factory=machine.Draw)

    def prepare(self):
        self.row = {"case": self.case.name, "impl": self.case.impl, "suite": self.case.suite}
        if self.case.measure:
            self.ms_of = lambda calls: self.case.measure(calls, 1)[0]
            return
        call = self.case.build()
        self.row |= {key: getattr(call, key) for key in ("peak_bytes", "io_bytes")}
        self.call, self.ms_of = call, lambda calls: timing.queued(call, calls, repeat=1)[0]

    def turn(self, seconds: float, meter: machine.Meter, counts: bool):
        (ms,) = self.times[-1:] or [self.ms_of(1)]
        calls = max(1, ceil(seconds * 1e3 / ms))
        if not counts:
            self.times = [self.ms_of(calls)]  # the next turn's guess
            return
        with meter.onto(self.draw):
            self.times.append(self.ms_of(calls))

    def trace(self):
        if self.case.profiled and self.call:
            self.row |= self.case.profiled(kernels.profile(self.call, _TRACED))

    def attempt(self, step: Callable, *args):
        """step(*args), unless an earlier one failed. An error becomes the row's."""
        if "error" in self.row:
            return
        try:
            step(*args)
        except Exception as error:
            traceback.print_exc()
            self.row["error"] = f"{type(error).__name__}: {error}"
            self.call = self.ms_of = None

    def finish(self):
        """Completes the row, but for what other rows say of it."""
        self.call = self.ms_of = None  # its data goes
        times, case = self.times[1:], self.case
        ms = statistics.median(times)
        tflops, tbs = case.rates(ms)
        row = self.row | {"ms": ms, "min_ms": min(times), "all_ms": times, "flops": case.flops, "bytes": case.bytes}
        tokens = {"us_per_token": ms * 1e3 / case.tokens} if case.tokens else {}
        draw = self.draw.row()
        joules = {"joules": draw["power"] * ms / 1e3} if "power" in draw else {}
        self.row = row | {"tflops": tflops, "tbs": tbs} | tokens | draw | joules | case.figures(ms)


def measure(
    cases: list[Case],
    seconds: float,
    meter: machine.Meter,
    copy_tbs: float,
    at_once: int = _COMPILED_AT_ONCE,
    found: dict | None = None,
) -> list[dict]:
    """The rows of cases of one name, each for `seconds` in all of `_ROUNDS` rounds, after one that does not count.
    copy_tbs: TB/s that the memory moves at best. at_once: contenders that are compiled at once. found: the ceilings of
    `ceilings.measure`, or None."""
    contenders = [Contender(case) for case in cases]
    prepare = lambda contender: contender.attempt(contender.prepare)
    prepare(contenders[0])  # by itself: what all share is made once
    with ThreadPoolExecutor(at_once) as pool:
        list(pool.map(prepare, contenders[1:]))
    for number in range(_ROUNDS + 1):
        for contender in contenders:
            contender.attempt(contender.turn, seconds / _ROUNDS, meter, number > 0)
    for contender in contenders:
        contender.attempt(contender.trace)
        contender.attempt(contender.finish)
    return _compared(cases, [contender.row for contender in contenders], copy_tbs, found)


def _compared(cases: list[Case], rows: list[dict], copy_tbs: float, found: dict | None) -> list[dict]:
    """The rows, each with its least time, and that over the others'. A row whose bound failed has none."""
    ms = {row["impl"]: row.get("ms") for row in rows}
    for case, row in zip(cases, rows, strict=True):
        products = ms.get(case.bound, case.products_ms(found) if found else 0.0)
        if "ms" in row and products is not None and (case.bytes or found) and case.bound != case.impl:
            row["bound_ms"] = max(case.bytes / copy_tbs / 1e9, products)
            row["of_bound"] = row["bound_ms"] / row["ms"]
        if "ms" in row and (others := [impl for impl in case.beside if ms.get(impl)]):
            row["beside"] = {impl: row["ms"] / ms[impl] for impl in others}
    return rows


def chosen(cases: Iterable[Case], only: str | None) -> list[list[Case]]:
    """The cases whose label `only` finds, and their bounds; those of one name together."""
    groups = []
    for _, group in itertools.groupby(cases, key=lambda case: case.name):
        group = list(group)
        wanted = [case for case in group if run.matches(case, only)]
        impls = {impl for case in wanted for impl in (case.impl, case.bound)}
        groups.append([case for case in group if case.impl in impls])
    return [group for group in groups if group]


def measure_all(groups: list[list[Case]], args) -> dict:
    seconds = _QUICK_SECONDS if args.quick else _OWN_SECONDS.get(args.command, _SECONDS)
    # Algorithms are timed where nothing else runs, and a recipe of TransformerEngine's holds for all threads.
    of_incumbent = any(case.impl in incumbent.RECIPES for group in groups for case in group)
    apart = args.tune or args.command in _ON_ALL_GPUS or of_incumbent
    at_once = 1 if apart else _COMPILED_AT_ONCE
    result = {"machine": machine.describe(), "timing": f"in turns, {seconds} s each", "rows": []}
    say = lambda text: print(text, file=sys.stderr, flush=True)
    say(machine.line(result["machine"]))
    began, meter, draw = time.perf_counter(), machine.Meter(), machine.Draw()
    of_copies = lambda: meter.onto(draw)
    if args.command in _WITH_CEILINGS:
        result["ceilings"] = ceilings.measure(args.tiny, of_copies)
        copies = result["ceilings"]["copy"]
    else:
        copies = ceilings.copy(args.tiny, of_copies)
    result["copy_tbs"] = copy_tbs = max(copies.values())
    if "power" in draw.row():
        result["copy_joules_per_gb"] = draw.row()["power"] / copies["sustained"] / 1e3
    for number, group in enumerate(groups, 1):
        rows = measure(group, seconds, meter, copy_tbs, at_once, result.get("ceilings"))
        result["rows"] += rows
        for row in rows:
            ms, bound = row.get("ms"), row.get("of_bound")
            said = row.get("error") or f"{ms:.4f} ms" + (f", {bound:.1%} of its bound" if bound else "")
            say(f"[{number}/{len(groups)}, {time.perf_counter() - began:.0f} s] {row['case']} | {row['impl']}: {said}")
        report.write(result, args.out)  # after each case: a run that is cut short leaves what it has
    return result


def main(args) -> int:
    more = {name: getattr(args, name) for name in OWN_OPTIONS.get(args.command, ())}
    groups = chosen(SUITES[args.command][0](args.tiny, **more), args.only)
    if (status := run.refuses(list(itertools.chain(*groups)), args)) is not None:
        return status
    if args.tune and timing.on_gpu():
        tune_all()
    result = measure_all(groups, args)
    run.show(result, args.out, None)
    ours = [row for row in result["rows"] if row["impl"].startswith("te_jax")]
    return 1 if any("error" in row for row in ours) else 0  # that a peer fails is a result
