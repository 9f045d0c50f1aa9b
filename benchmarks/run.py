"""Measures the rows of a suite: te_jax's ops, layers or steps next to their peers, after the ceilings of this GPU.

Prints one table; writes JSON and a roofline. Times are `queued`: the wall time of 30 jitted calls issued back to back,
over 30; the median of the repeats. All results are returned, data is random normal, FP8 scales are settled first.
"""

import pathlib
import re
import statistics
import sys
import time
import traceback

import te_jax
from te_jax.core import extension
from te_jax.ops.gemm import tune_all

from . import (
    ceilings,
    kernels,
    layers,
    machine,
    meshes,
    microbatches,
    ops,
    remat,
    report,
    roofline,
    timing,
    training,
)
from .cases import Case, peers

SUITES = {
    "ops": (ops.cases, "single ops"),
    "layers": (layers.cases, "transformer layers, their parts, a small model"),
    "all": (lambda tiny: [*ops.cases(tiny), *layers.cases(tiny)], "ops and layers"),
    "scaling": (layers.scaling_cases, "GPT layers over tokens and width"),
    "microbatches": (microbatches.cases, "steps of four microbatches: what is done in each, and what once"),
    "remat": (remat.cases, "a stack of Llama layers under jax.checkpoint, by policy"),
    "meshes": (meshes.cases, "layers on all GPUs"),
    "training": (training.cases, "whole steps of a GPT of 1.08B parameters on all GPUs"),
}


def matches(case: Case, only: str | None) -> bool:
    return bool(re.search(only or "", case.label))


def chosen(args) -> list[Case]:
    return [case for case in SUITES[args.command][0](args.tiny) if matches(case, args.only)]


def measure(case: Case, args, found_ceilings: dict) -> dict:
    """One row. What fails is a row too, with its error."""
    row = {"case": case.name, "impl": case.impl, "suite": case.suite}
    calls = min(args.calls, case.calls or args.calls)
    try:
        if case.measure:
            times = case.measure(calls, args.repeat)
        else:
            call = case.build()
            began = time.perf_counter()
            times = timing.queued(call, calls, args.repeat)
            fields = ("trace_s", "compile_s", "peak_bytes", "io_bytes", "saved_bytes")
            row |= {field: getattr(call, field) for field in fields}
            row["measure_s"] = time.perf_counter() - began
            if args.profile:
                row["profile"] = kernels.profile(call)
    except Exception as error:
        traceback.print_exc()
        return row | {"error": f"{type(error).__name__}: {error}"}
    row |= {"ms": statistics.median(times), "min_ms": min(times), "all_ms": times}
    tflops, tbs = case.rates(row["ms"])
    row |= {"flops": case.flops, "bytes": case.bytes, "tflops": tflops, "tbs": tbs}
    if found_ceilings and not case.link:
        row["fraction"] = case.floor_ms(found_ceilings) / row["ms"]
    if case.tokens:
        row["us_per_token"] = row["ms"] * 1e3 / case.tokens
    row |= case.figures(row["ms"])
    if not args.tiny and (peer := peers().get((case.name, case.impl))):
        row["peer"] = {**peer, "ms": case.peer_ms(peer["figure"], peer["unit"])}
    return row


def measure_all(found: list[Case], args) -> dict:
    result = {"machine": machine.describe(), "timing": f"queued, {args.calls} calls", "rows": []}
    say = lambda text: print(text, file=sys.stderr, flush=True)
    say(machine.line(result["machine"]))
    try:
        result["ceilings"] = ceilings.measure(args.tiny)
        say(ceilings.line(result["ceilings"]))
    except Exception:  # the rows can be measured without them
        traceback.print_exc()
    began = time.perf_counter()
    for number, case in enumerate(found, 1):
        row = measure(case, args, result.get("ceilings"))
        result["rows"] = report.in_order([*result["rows"], row])
        said = row.get("error") or f"{row['ms']:.4f} ms"
        say(f"[{number}/{len(found)}, {time.perf_counter() - began:.0f} s] {case.label}: {said}")
        report.write(result, args.out)  # after each row: a run that is cut short leaves what it has
    return result


def show(result: dict, out: pathlib.Path | None, compare: pathlib.Path | None):
    """Prints the rows, next to those of an earlier JSON if there is one, and draws the roofline next to `out`."""
    rows = result["rows"]
    old = report.load(compare) if compare else None
    mean = report.against(rows, old) if old else None
    report.show_heading(result)
    print(report.table(rows), *report.memory(rows), sep="\n")
    if old:
        common = sum("old_ms" in row for row in rows)
        said = f", geometric mean of new time over old: {mean:.3f}" if mean else ""
        print(f"against {old['machine']['command']!r} of {old['machine']['date']}: {common} rows{said}")
    if out and not roofline.available():
        print("no roofline: matplotlib is not installed", file=sys.stderr)
    elif out and roofline.draw(result, picture := out.with_suffix(".png")):
        print(f"roofline: {picture}")


def refuses(found: list[Case], args) -> int | None:
    """The exit status where `found` are not to be measured, but listed or refused, which it has printed; else None."""
    if args.list or not found:
        print("\n".join(case.label for case in found) or f"no row matches --only {args.only!r}")
        return 0 if found else 1
    if not args.tiny and not timing.on_gpu():
        print("no GPU here; --tiny tries the program without one, --list shows the rows", file=sys.stderr)
        return 2
    if timing.on_gpu() and not extension.status().loads:
        where = pathlib.Path(te_jax.__file__).parent
        print(f"{extension.status().reason}\nte_jax comes from {where}.", file=sys.stderr)
        return 2
    return None


def main(args) -> int:
    found = chosen(args)
    if (status := refuses(found, args)) is not None:
        return status
    if args.compare:
        report.load(args.compare)  # raises now, not after an hour
    if args.tune and timing.on_gpu():
        tune_all()
    result = measure_all(found, args)
    show(result, args.out, args.compare)
    return 1 if any("error" in row for row in result["rows"]) else 0
