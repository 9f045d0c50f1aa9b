"""How much of the collectives XLA hides behind kernels: layers on all GPUs under several flags, unrolled or not.

    python benchmarks/overlap.py --out overlap.json [--role fsdp] [--impl 'te_jax fp8 fast'] [--only REGEX]

Each candidate runs in a process of its own, for XLA reads its flags once. Weak scaling is the time of the same program,
unrolled as much, on one GPU over that on all.
"""

import argparse
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
from dataclasses import dataclass, replace
from types import SimpleNamespace

# Last, so that the source tree's te_jax, which has no CUDA extension, does not hide an installed one.
sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))

import jax
import kernels
import machine
import meshes
import report
import timing

from te_jax.sharding import recommended_xla_flags

_PROFILED = 5  # steps
_TIMEOUT_S = 240  # of a process
_COLLECTIVE = re.compile("nccl", re.IGNORECASE)


@dataclass(frozen=True)
class Candidate:
    flags: str = ""  # XLA's, beside those of the environment
    unrolled: bool = False  # the loop over layers
    one: bool = False  # on one GPU


_ALL, _HIDING = recommended_xla_flags(), "--xla_gpu_enable_latency_hiding_scheduler=true"
_DOUBLE = "--xla_gpu_enable_while_loop_double_buffering=true"
# Names of flags: https://github.com/openxla/xla/blob/main/xla/debug_options_flags.cc
CANDIDATES = {
    "one GPU": Candidate(one=True),
    "one GPU, unrolled": Candidate(one=True, unrolled=True),
    "no flags": Candidate(),
    "recommended": Candidate(_ALL),
    "latency hiding alone": Candidate(_HIDING),
    "recommended but double buffering": Candidate(_ALL.replace(_DOUBLE, "")),
    "unrolled, no flags": Candidate(unrolled=True),
    "unrolled, recommended": Candidate(_ALL, unrolled=True),
    "unrolled, latency hiding alone": Candidate(_HIDING, unrolled=True),
    "unrolled, two at once": Candidate(
        f"{_HIDING} --xla_gpu_experimental_parallel_collective_overlap_limit=2", unrolled=True
    ),
    "unrolled, registered buffers": Candidate(f"{_HIDING} --xla_gpu_enable_nccl_user_buffers=true", unrolled=True),
    "unrolled, 8 channels": Candidate(f"{_HIDING} --xla_gpu_nccl_collective_max_nchannels=8", unrolled=True),
}


def exposure(data: jax.profiler.ProfileData, steps: int) -> dict:
    """ms a step of the first GPU: in collectives, and in these while nothing else runs. Zeros without a GPU."""
    first = [plane for plane in data.planes if plane.name.startswith("/device:GPU:0")]
    events = list(kernels.device_events(SimpleNamespace(planes=first)))
    all_of = lambda which: [event[1:] for event in events if which(bool(_COLLECTIVE.search(event.name)))]
    each = kernels.union(all_of(lambda _: True)), kernels.union(all_of(lambda collective: not collective))
    spent = sum(end - start for start, end in all_of(lambda collective: collective))
    return {"collective_ms": spent / 1e6 / steps, "exposed_ms": (each[0] - each[1]) / 1e6 / steps}


def measure(args) -> dict:
    """One candidate, in this process."""
    candidate = CANDIDATES[args.measure]
    place = ("fsdp", 1) if candidate.one else (args.role, jax.device_count())
    models = meshes.models(args.tiny, jax.device_count())
    model, role, count = next(each for each in models if (each[1].name, each[2]) == place)
    model = replace(model, unroll=model.depth if candidate.unrolled else 1)
    call = meshes.trainee(model, args.impl, role, count).build(backward=True)
    times = timing.queued(call, args.calls, args.repeat)
    found = kernels.record(call, _PROFILED, lambda data: exposure(data, _PROFILED))
    row = {"ms": statistics.median(times), "all_ms": times, "peak_bytes": call.peak_bytes, "compile_s": call.compile_s}
    return {"machine": machine.describe(), "model": model.name, "row": row | found}


def in_own_process(name: str, args) -> dict:
    """What `measure` returns, or {"row": {"error": ...}}."""
    words = ["--measure", name, "--role", args.role, "--impl", args.impl]
    words += ["--calls", str(args.calls), "--repeat", str(args.repeat), *(["--tiny"] if args.tiny else [])]
    flags = f"{os.environ.get('XLA_FLAGS', '')} {CANDIDATES[name].flags}".strip()
    try:
        done = subprocess.run(
            [sys.executable, __file__, *words],
            env=os.environ | {"XLA_FLAGS": flags},
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return {"row": {"error": f"took more than {_TIMEOUT_S} s"}}
    if done.returncode:
        return {"row": {"error": done.stderr.strip()[-500:] or f"exit code {done.returncode}"}}
    return json.loads(done.stdout.splitlines()[-1])


def measure_all(args) -> dict:
    result = {"role": args.role, "impl": args.impl, "rows": {}}
    names = [name for name in CANDIDATES if re.search(args.only or "", name)]
    for name in names:
        found = in_own_process(name, args)
        row = found.pop("row")
        result |= found
        result["rows"][name] = {"flags": CANDIDATES[name].flags} | row
        print(f"{name}: {row.get('error') or round(row['ms'], 3)}", file=sys.stderr, flush=True)
        if args.out:  # after each row: a run that is cut short leaves what it has
            args.out.write_text(json.dumps(result, indent=1) + "\n")
    return result


def table(result: dict) -> str:
    rows = {name: row for name, row in result["rows"].items() if "error" not in row}
    one = {False: rows.get("one GPU"), True: rows.get("one GPU, unrolled")}
    lines = [["candidate", "ms", "weak scaling", "collectives ms", "of them alone", "peak GB"]]
    for name, row in rows.items():
        alone = one[CANDIDATES[name].unrolled]
        scaling = f"{alone['ms'] / row['ms']:.3f}" if alone and not CANDIDATES[name].one else ""
        peak = f"{row['peak_bytes'] / 1e9:.2f}" if row["peak_bytes"] else ""
        lines.append(
            [name, f"{row['ms']:.2f}", scaling, f"{row['collective_ms']:.2f}", f"{row['exposed_ms']:.2f}", peak]
        )
    return report.columns(lines)


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--out", metavar="FILE", type=pathlib.Path, help="JSON, rewritten after each candidate")
    p.add_argument("--role", choices=("fsdp", "dp", "tp"), default="fsdp", help="of all GPUs [default: fsdp]")
    p.add_argument("--impl", choices=meshes.IMPLS, default="te_jax fp8 fast")
    p.add_argument("--only", metavar="REGEX", help="candidates whose name matches")
    p.add_argument("--calls", type=int, default=10, help="issued back to back [default: 10]")
    p.add_argument("--repeat", type=int, default=4, help="of each measurement [default: 4]")
    p.add_argument("--tiny", action="store_true", help="tiny sizes: to try the program without a GPU")
    p.add_argument("--measure", choices=CANDIDATES, help=argparse.SUPPRESS)  # one candidate, in this process
    return p


def main(argv=None) -> int:
    args = parser().parse_args(argv)
    if args.measure:
        print(json.dumps(measure(args)))
        return 0
    result = measure_all(args)
    if "machine" in result:
        print(machine.line(result["machine"]))
        print(f"{result['model']}, {args.impl}, fwd+bwd")
        print(table(result))
    for name, row in result["rows"].items():
        if "error" in row:
            print(f"{name}: {row['error']}")
    return 1 if any("error" in row for row in result["rows"].values()) else 0


if __name__ == "__main__":
    sys.exit(main())
