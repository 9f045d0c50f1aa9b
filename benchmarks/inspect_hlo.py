"""What became of a transformer layer's training step: custom calls, and on a GPU kernels and launches.

    python benchmarks/inspect_hlo.py --out hlo.json

Without a GPU the step is lowered for CUDA all the same, and its StableHLO is counted. Under FP8 it exits with
1 if a GEMM of the layer is not a te_gemm, or if a dot is left; on a GPU also if two runs differ in a bit.
"""

import argparse
import collections
import json
import pathlib
import re
import statistics
import sys

# Last, so that the source tree's te_jax, which has no CUDA extension, does not hide an installed one.
sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))

import kernels
import layers
import machine
import timing

_TOP = 30
# XLA replaces CUDA graphs by single launches while a profiler watches, unless told not to.
_KEEP_GRAPHS = {"xla_enable_command_buffers_during_profiling": True}


def count_stablehlo(text: str) -> dict:
    """Custom calls and dots of a lowered module. A function that is called twice counts twice."""
    own, calls = (collections.defaultdict(collections.Counter) for _ in range(2))
    name = None
    for line in text.splitlines():
        if found := re.match(r"\s*func\.func \w+ @([\w.$-]+)", line):
            name = found[1]
        for target in re.findall(r"stablehlo\.custom_call @([\w.$-]+)", line):
            own[name][target] += 1
        if "stablehlo.dot_general" in line:
            types = re.findall(r"[x<]((?:bf|f|ui|i)\d+\w*)>", line.rsplit(":", 1)[-1])
            own[name]["dot " + " ".join(types)] += 1
        for callee in re.findall(r"(?:func\.)?call @([\w.$-]+)", line):
            if "custom_call" not in line:
                calls[name][callee] += 1

    def total(function):
        result = collections.Counter(own[function])
        for callee, times in calls[function].items():
            for key, count in total(callee).items():
                result[key] += times * count
        return result

    return _split(total("main"))


def count_hlo(text: str) -> dict:
    """Custom calls, dots and fusions of a compiled module."""
    found = collections.Counter(re.findall(r'custom_call_target="([^"]+)"', text))
    for types in re.findall(r"= (\w+)\[[^\]]*\][^ ]* dot\(", text):
        found[f"dot {types}"] += 1
    counts = _split(found)
    counts["fusions"] = len(re.findall(r" fusion\(", text))
    counts["command_buffers"] = len(set(re.findall(r"to_apply=%?(command_buffer[\w.]*)", text)))
    return counts


def _split(found: collections.Counter) -> dict:
    te = {name: n for name, n in found.items() if name.startswith("te_")}
    # XLA's own GEMMs count as dots: they are what it makes of them.
    dots = {name: n for name, n in found.items() if name.startswith(("dot ", "__cublas"))}
    other = {name: n for name, n in found.items() if name not in te and name not in dots}
    return {"te": dict(sorted(te.items())), "dots": dots, "other": other}


def verdict(model, counts: dict) -> dict:
    dense = 4 if model.groups == model.heads else 5  # qkv, or q and kv; out, wi, wo
    gemms = counts["te"].get("te_gemm", 0) + counts["te"].get("te_gemm_block", 0)
    dots = sum(counts["dots"].values())
    return {
        "te_gemm": gemms,
        "expected": 3 * dense,
        "dots_left": dots,
        "good": gemms == 3 * dense and not dots,
    }


def inspect(model, impl: str, steps: int) -> tuple[dict, str]:
    """-> the report, and the text of the module."""
    trainee = layers.trainee(model, impl)
    report = {"model": model.name, "impl": impl}
    if not timing.on_gpu():
        text = trainee.lower_for_cuda().as_text()
        report |= {"stage": "lowered", "counts": count_stablehlo(text)}
    else:
        call = trainee.compile(**_KEEP_GRAPHS)._replace(inputs=[trainee.train_inputs(trainee.state)])
        text = call.run.as_text()
        report |= {"stage": "compiled", "counts": count_hlo(text), "peak_bytes": call.peak_bytes}
        first = call.issue(1)
        report["ms"] = timing.queued(call)
        last = call.issue(1)
        report |= {"same_bits": timing.same_bits(first, last), "sha256": timing.digest(last)}
        report["profile"] = kernels.profile(call, steps)
    if layers.RECIPES.get(impl):
        report["verdict"] = verdict(model, report["counts"])
    return report, text


def show(report: dict):
    print(f"{report['model']}, {report['impl']}, fwd+bwd, {report['stage']}")
    if found := report.get("verdict"):
        print(f"  te_gemm: {found['te_gemm']} (expected {found['expected']}); dots left: {found['dots_left']}")
    for kind, counts in report["counts"].items():
        print(f"  {kind}: {counts}")
    if "profile" not in report:
        return
    print(
        f"  two runs give the same bits: {'yes' if report['same_bits'] else 'NO'}; SHA-256 {report['sha256'][:16]}..."
    )
    p, ms = report["profile"], statistics.median(report["ms"])
    print(f"  queued {ms:.3f} ms; profiled {p['span_ms']:.3f} ms, of which {p['busy_ms']:.3f} in kernels")
    counts = {name: p[f"{name}_per_step"] for name in ("kernels", "copies", "graph_launches", "kernel_launches")}
    print("  per step:", ", ".join(f"{count:.1f} {name.replace('_', ' ')}" for name, count in counts.items()))
    for kernel in p["top"][:_TOP]:
        print(f"  {kernel['ms']:8.4f} ms {kernel['count']:6.1f}x  {kernel['name'][:100]}")


def main(argv=None) -> int:
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--out", metavar="FILE", type=pathlib.Path, help="JSON")
    p.add_argument("--text", metavar="FILE", type=pathlib.Path, help="the module's text")
    p.add_argument("--model", choices=("gpt layer", "llama layer"), default="gpt layer")
    p.add_argument("--impl", choices=layers.IMPLS, default="te_jax fp8")
    p.add_argument("--steps", type=int, default=10, help="under the profiler [default: 10]")
    p.add_argument("--tiny", action="store_true", help="tiny sizes: to try the program without a GPU")
    args = p.parse_args(argv)
    (model,) = (m for m in layers.models(args.tiny) if m.name == args.model)
    report, text = inspect(model, args.impl, args.steps)
    report["machine"] = machine.describe()
    show(report)
    if args.out:
        args.out.write_text(json.dumps(report, indent=1) + "\n")
    if args.text:
        args.text.write_text(text)
    good = report.get("verdict", {"good": True})["good"] and report.get("same_bits", True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
