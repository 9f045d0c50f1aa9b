"""How much of the collectives XLA hides behind kernels: layers on all GPUs under several flags, unrolled or not.

Each candidate runs in a process of its own, for XLA reads its flags once. Weak scaling is the time of the same program,
unrolled as much, on one GPU over that on all.
"""

import json
import re
import statistics
import sys
from dataclasses import dataclass, replace

import jax

from te_jax.sharding import recommended_xla_flags

from . import kernels, layers, machine, meshes, report, timing
from .process import in_own_process

_PROFILED = 5  # steps
_TIMEOUT_S = 240  # of a process


@dataclass(frozen=True)
class Candidate:
    flags: str = ""  # XLA's, in addition to the flags of the environment
    unrolled: bool = False  # the loop over layers
    one: bool = False  # on one GPU


_ALL, _HIDING = recommended_xla_flags(), "--xla_gpu_enable_latency_hiding_scheduler=true"
_DOUBLE = "--xla_gpu_enable_while_loop_double_buffering=true"
# Names of flags: https://github.com/openxla/xla/blob/main/xla/debug_options_flags.cc
_UNROLLED = {
    "no flags": "",
    "recommended": _ALL,
    "latency hiding alone": _HIDING,
    "two at once": f"{_HIDING} --xla_gpu_experimental_parallel_collective_overlap_limit=2",
    "registered buffers": f"{_HIDING} --xla_gpu_enable_nccl_user_buffers=true",
    "8 channels": f"{_HIDING} --xla_gpu_nccl_collective_max_nchannels=8",
}
CANDIDATES = {
    "one GPU": Candidate(one=True),
    "one GPU, unrolled": Candidate(one=True, unrolled=True),
    "no flags": Candidate(),
    "recommended": Candidate(_ALL),
    "latency hiding alone": Candidate(_HIDING),
    "recommended but double buffering": Candidate(_ALL.replace(_DOUBLE, "")),
    **{f"unrolled, {name}": Candidate(flags, unrolled=True) for name, flags in _UNROLLED.items()},
}


def measure(args) -> dict:
    """One candidate, in this process."""
    candidate = CANDIDATES[args.measure]
    place = ("fsdp", 1) if candidate.one else (args.role, jax.device_count())
    models = meshes.models(args.tiny, jax.device_count())
    model, role, count = next(each for each in models if (each[1].name, each[2]) == place)
    model = replace(model, unroll=model.depth if candidate.unrolled else 1)
    call = layers.trainee(model, args.impl, role, count, make=meshes.Trainee).build(backward=True)
    times = timing.queued(call, args.calls, args.repeat)
    found = kernels.record(call, _PROFILED, lambda data: kernels.exposure(data, _PROFILED))
    row = {"ms": statistics.median(times), "all_ms": times, "peak_bytes": call.peak_bytes, "compile_s": call.compile_s}
    return {"machine": machine.describe(), "model": model.name, "row": row | found}


def measure_all(args) -> dict:
    result = {"role": args.role, "impl": args.impl, "rows": {}}
    given = {name: getattr(args, name) for name in ("role", "impl", "calls", "repeat", "tiny")}
    for name in [name for name in CANDIDATES if re.search(args.only or "", name)]:
        flags = CANDIDATES[name].flags
        found = in_own_process("overlap", flags, _TIMEOUT_S, measure=name, **given)
        row = result["rows"][name] = {"flags": flags} | found.pop("row", found)
        result |= {key: value for key, value in found.items() if key != "error"}
        print(f"{name}: {row.get('error') or round(row['ms'], 3)}", file=sys.stderr, flush=True)
        report.write(result, args.out)  # after each row: a run that is cut short leaves what it has
    return result


def table(result: dict) -> str:
    rows = {name: row for name, row in result["rows"].items() if "error" not in row}
    one = {False: rows.get("one GPU"), True: rows.get("one GPU, unrolled")}
    lines = [["candidate", "ms", "weak scaling", "collectives ms", "of them alone", "peak GB"]]
    for name, row in rows.items():
        alone = one[CANDIDATES[name].unrolled]
        scaling = f"{alone['ms'] / row['ms']:.3f}" if alone and not CANDIDATES[name].one else ""
        peak = f"{row['peak_bytes'] / report.GB:.2f}" if row["peak_bytes"] else ""
        times = [f"{row[key]:.2f}" for key in ("ms", "collective_ms", "exposed_ms")]
        lines.append([name, times[0], scaling, *times[1:], peak])
    return report.columns(lines)


def main(args) -> int:
    if args.measure:
        print(json.dumps(measure(args)))
        return 0
    result = measure_all(args)
    if "machine" in result:
        print(machine.line(result["machine"]))
        print(f"{result['model']}, {args.impl}, fwd+bwd")
        print(table(result))
    errors = [f"{name}: {row['error']}" for name, row in result["rows"].items() if "error" in row]
    print(*errors, sep="\n", end="")
    return 1 if errors else 0
