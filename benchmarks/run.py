"""Measures te_jax's ops and layers beside their peers; prints one table, writes JSON.

    python benchmarks/run.py --out results.json --suite layers --only 'gpt layer'

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
import kernels
import layers
import machine
import ops
import timing
from cases import Case
from peers import PEERS


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--out", metavar="FILE", type=pathlib.Path, help="JSON, rewritten after each row")
    p.add_argument("--suite", choices=("ops", "layers", "all"), default="all")
    p.add_argument("--only", metavar="REGEX", help='rows whose "case | implementation" matches')
    p.add_argument("--repeat", type=int, default=3, help="of each measurement [default: 3]")
    p.add_argument("--calls", type=int, default=timing.CALLS, help=f"issued back to back [default: {timing.CALLS}]")
    p.add_argument("--profile", action="store_true", help="also the time in kernels, by jax.profiler")
    p.add_argument("--tiny", action="store_true", help="tiny sizes: to try the program without a GPU")
    p.add_argument("--list", action="store_true", help="print the rows' names and leave")
    return p


def chosen(args) -> list[Case]:
    found = []
    if args.suite in ("ops", "all"):
        found += ops.cases(args.tiny)
    if args.suite in ("layers", "all"):
        found += layers.cases(args.tiny)
    return cases_module.select(found, args.only)


def measure(case: Case, args) -> dict:
    """One row. What fails is a row too, with its error."""
    row = {"case": case.name, "impl": case.impl, "suite": case.suite}
    try:
        if case.measure:
            times = case.measure(args.calls, args.repeat)
        else:
            call = case.build()
            began = time.perf_counter()
            times = timing.queued(call, args.calls, args.repeat)
            row |= {"trace_s": call.trace_s, "compile_s": call.compile_s, "peak_bytes": call.peak_bytes}
            row["measure_s"] = time.perf_counter() - began
            if args.profile:
                row["profile"] = kernels.profile(call)
    except Exception as error:
        traceback.print_exc()
        return row | {"error": f"{type(error).__name__}: {error}"}
    row |= {"ms": statistics.median(times), "min_ms": min(times), "all_ms": times}
    tflops, tbs = cases_module.rate(case, row["ms"])
    row |= {"flops": case.flops, "bytes": case.bytes, "tflops": tflops, "tbs": tbs}
    if not args.tiny and (found := PEERS.get((case.name, case.impl))):
        value, unit, whose = found
        row["peer"] = {
            "whose": whose,
            "figure": value,
            "unit": unit,
            "ms": cases_module.peer_ms(case, value, unit),
        }
    return row


def in_order(rows: list[dict]) -> list[dict]:
    """Rows of one case together; those of te_jax with the ratio of their time to that of each other row."""
    by_case = {}
    for row in rows:
        by_case.setdefault(row["case"], []).append(row)
    for group in by_case.values():
        others = [row for row in group if not row["impl"].startswith("te_jax") and "ms" in row]
        for row in group:
            if row["impl"].startswith("te_jax") and "ms" in row:
                row["beside"] = {other["impl"]: row["ms"] / other["ms"] for other in others}
    return [row for group in by_case.values() for row in group]


HEADER = ["case", "implementation", "ms", "min", "rate", "in kernels", "beside it", "peer's figure"]


def cells(row: dict) -> list[str]:
    if "error" in row:
        return [row["case"], row["impl"], "error", "", "", "", row["error"].split("\n")[0][:60], ""]
    rate = f"{row['tflops']:.0f} TFLOP/s" if row["tflops"] else f"{row['tbs']:.2f} TB/s"
    kernel = f"{row['profile']['kernel_ms']:.4f}" if "profile" in row else ""
    beside = ", ".join(f"{ratio:.2f}x {impl}" for impl, ratio in row.get("beside", {}).items())
    peer = row.get("peer")
    figure = f"{row['ms'] / peer['ms']:.2f}x {peer['whose']} ({peer['figure']:g} {peer['unit']})" if peer else ""
    return [
        row["case"],
        row["impl"],
        f"{row['ms']:.4f}",
        f"{row['min_ms']:.4f}",
        rate,
        kernel,
        beside,
        figure,
    ]


def table(rows: list[dict]) -> str:
    lines = [HEADER, *map(cells, rows)]
    used = [i for i, name in enumerate(HEADER) if name == "case" or any(line[i] for line in lines[1:])]
    lines = [[line[i] for i in used] for line in lines]
    widths = [max(len(line[i]) for line in lines) for i in range(len(used))]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in lines)


def write(result: dict, path: pathlib.Path | None):
    result["rows"] = in_order(result["rows"])
    if path:
        path.write_text(json.dumps(result, indent=1) + "\n")


def main(argv=None) -> int:
    args = parser().parse_args(argv)
    found = chosen(args)
    if args.list or not found:
        print("\n".join(case.label for case in found) or f"no row matches --only {args.only!r}")
        return 0 if found else 1
    result = {"machine": machine.describe(), "timing": f"queued, {args.calls} calls", "rows": []}
    print(machine.line(result["machine"]), file=sys.stderr, flush=True)
    for number, case in enumerate(found, 1):
        row = measure(case, args)
        result["rows"].append(row)
        said = row.get("error") or f"{row['ms']:.4f} ms"
        print(f"[{number}/{len(found)}] {case.label}: {said}", file=sys.stderr, flush=True)
        write(result, args.out)  # after each row: a run that is cut short leaves what it has
    print(machine.line(result["machine"]))
    print(table(result["rows"]))
    return 1 if any("error" in row for row in result["rows"]) else 0


if __name__ == "__main__":
    sys.exit(main())
