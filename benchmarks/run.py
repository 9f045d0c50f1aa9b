"""Measures te_jax's ops and layers beside their peers; prints one table, writes JSON and a roofline.

    python -m benchmarks --out results.json --suite layers --only 'gpt layer' --compare old.json

The suite "all" is ops and layers; "scaling" are GPT layers over tokens and width; "microbatches" steps of
four of them, with kernels quantized in each or once, and gradients added up by XLA or inside of GEMMs; "remat" is a
stack of Llama layers under jax.checkpoint, by policy; "meshes" are layers on all GPUs, "training" whole steps of a GPT
of 1.08B there. The ceilings are measured first.
Times are `queued`: the wall time of 30 jitted calls issued back to back, over 30; the median of the repeats.
All results are returned, data is random normal, FP8 scales are settled first.
"""

import argparse
import json
import pathlib
import statistics
import sys
import time
import traceback

# Last, so that the source tree's te_jax, which has no CUDA extension, does not hide an installed one.
sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))

import cases as cases_module
import ceilings
import kernels
import layers
import machine
import meshes
import microbatches
import ops
import remat
import report
import roofline
import timing
import training
from cases import Case
from peers import PEERS

from te_jax.ops.gemm import tune_all


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument(
        "--out", metavar="FILE", type=pathlib.Path, help="JSON, rewritten after each row; beside it the roofline, .png"
    )
    suites = ("ops", "layers", "scaling", "microbatches", "remat", "meshes", "training", "all")
    p.add_argument("--suite", choices=suites, default="all")
    p.add_argument("--only", metavar="REGEX", help='rows whose "case | implementation" matches')
    p.add_argument(
        "--compare", metavar="OLD", type=pathlib.Path, help="an earlier JSON: each row's time against its own"
    )
    p.add_argument("--load", metavar="FILE", type=pathlib.Path, help="show an earlier JSON, measure nothing")
    p.add_argument("--repeat", type=int, default=3, help="of each measurement [default: 3]")
    p.add_argument("--calls", type=int, default=timing.CALLS, help=f"issued back to back [default: {timing.CALLS}]")
    p.add_argument("--profile", action="store_true", help="also the time in kernels, by jax.profiler")
    p.add_argument("--tune", action="store_true", help="time cuBLASLt's algorithms, where its first guess runs else")
    p.add_argument("--tiny", action="store_true", help="tiny sizes: to try the program without a GPU")
    p.add_argument("--list", action="store_true", help="print the rows' names and leave")
    return p


def chosen(args) -> list[Case]:
    found = []
    if args.suite in ("ops", "all"):
        found += ops.cases(args.tiny)
    if args.suite in ("layers", "all"):
        found += layers.cases(args.tiny)
    if args.suite == "scaling":
        found += layers.scaling_cases(args.tiny)
    if args.suite == "microbatches":
        found += microbatches.cases(args.tiny)
    if args.suite == "remat":
        found += remat.cases(args.tiny)
    if args.suite == "meshes":
        found += meshes.cases(args.tiny)
    if args.suite == "training":
        found += training.cases(args.tiny)
    return cases_module.select(found, args.only)


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
    tflops, tbs = cases_module.rate(case, row["ms"])
    row |= {"flops": case.flops, "bytes": case.bytes, "tflops": tflops, "tbs": tbs}
    if found_ceilings and not case.link:
        row["fraction"] = cases_module.floor_ms(case, found_ceilings) / row["ms"]
    if case.tokens:
        row["us_per_token"] = row["ms"] * 1e3 / case.tokens
    if case.figures:
        row |= case.figures(row["ms"])
    if not args.tiny and (found := PEERS.get((case.name, case.impl))):
        value, unit, whose = found
        row["peer"] = {
            "whose": whose,
            "figure": value,
            "unit": unit,
            "ms": cases_module.peer_ms(case, value, unit),
        }
    return row


def write(result: dict, path: pathlib.Path | None):
    result["rows"] = report.in_order(result["rows"])
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1) + "\n")


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
        result["rows"].append(row)
        said = row.get("error") or f"{row['ms']:.4f} ms"
        say(f"[{number}/{len(found)}, {time.perf_counter() - began:.0f} s] {case.label}: {said}")
        write(result, args.out)  # after each row: a run that is cut short leaves what it has
    return result


def show(result: dict, old: dict | None):
    rows = result["rows"]
    mean = report.against(rows, old) if old else None
    print(machine.line(result["machine"]))
    if "ceilings" in result:
        print(ceilings.line(result["ceilings"]))
    print(report.table(rows))
    for line in report.memory(rows):
        print(line)
    if old:
        common = sum("old_ms" in row for row in rows)
        said = f", geometric mean of new time over old: {mean:.3f}" if mean else ""
        print(f"against {old['machine']['command']!r} of {old['machine']['date']}: {common} rows{said}")


def draw(result: dict, path: pathlib.Path):
    if not roofline.available():
        print("no roofline: matplotlib is not installed", file=sys.stderr)
    elif roofline.draw(result, path):
        print(f"roofline: {path}")


def main(argv=None) -> int:
    args = parser().parse_args(argv)
    old = report.load(args.compare) if args.compare else None
    if args.load:
        result = report.load(args.load)
        args.out = args.out or args.load
    else:
        found = chosen(args)
        if args.list or not found:
            print("\n".join(case.label for case in found) or f"no row matches --only {args.only!r}")
            return 0 if found else 1
        if not args.tiny and not timing.on_gpu():
            print("no GPU here; --tiny tries the program without one, --list shows the rows", file=sys.stderr)
            return 2
        if args.tune and timing.on_gpu():
            tune_all()
        result = measure_all(found, args)
    show(result, old)
    if args.out:
        draw(result, args.out.with_suffix(".png"))
    return 1 if any("error" in row for row in result["rows"]) else 0


if __name__ == "__main__":
    sys.exit(main())
