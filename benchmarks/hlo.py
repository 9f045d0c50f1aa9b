"""What became of a transformer layer's training step: custom calls, and on a GPU kernels and launches.

Without a GPU the step is lowered for CUDA all the same, and its StableHLO is counted. Under FP8 it exits with
1 if a GEMM of the layer is not a te_gemm, or if a dot is left; on a GPU also if two runs differ in a bit.
"""

import collections
import re
import statistics

from . import kernels, layers, machine, report, timing

_TOP = 30


def count_stablehlo(text: str) -> dict:
    """Custom calls and dots of a lowered module. A function that is called twice counts twice."""
    bodies = dict(re.findall(r"func\.func \w+ @([\w.$-]+)(.*?)(?=func\.func \w+ @|\Z)", text, re.DOTALL))

    def count(function: str) -> collections.Counter:
        body = bodies[function]
        found = collections.Counter(re.findall(r"stablehlo\.custom_call @([\w.$-]+)", body))
        for types in re.findall(r"stablehlo\.dot_general.*:(.*)", body):
            found["dot " + " ".join(re.findall(r"[x<]((?:bf|f|ui|i)\d+\w*)>", types))] += 1
        return sum(map(count, re.findall(r"\bcall @([\w.$-]+)", body)), found)

    return _split(count("main"))


def count_hlo(text: str) -> dict:
    """Custom calls, dots and fusions of a compiled module."""
    found = collections.Counter(re.findall(r'custom_call_target="([^"]+)"', text))
    found.update(f"dot {dtype}" for dtype in re.findall(r"= (\w+)\[[^\]]*\][^ ]* dot\(", text))
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
    expected = 3 * (4 if model.groups == model.heads else 5)  # of qkv, or q and kv; out, wi, wo
    gemms = counts["te"].get("te_gemm", 0) + counts["te"].get("te_gemm_block", 0)
    dots = sum(counts["dots"].values())
    return {"te_gemm": gemms, "expected": expected, "dots_left": dots, "good": gemms == expected and not dots}


def inspect(model, impl: str, steps: int) -> tuple[dict, str]:
    """-> the report, and the text of the module."""
    trainee = layers.trainee(model, impl)
    found = {"model": model.name, "impl": impl}
    if not timing.on_gpu():
        text = trainee.lower_for_cuda().as_text()
        found |= {"stage": "lowered", "counts": count_stablehlo(text)}
    else:
        call = trainee.compile_for_profiler()
        text = call.run.as_text()
        found |= {"stage": "compiled", "counts": count_hlo(text), "peak_bytes": call.peak_bytes}
        first = call.issue(1)
        found["ms"] = timing.queued(call)
        last = call.issue(1)
        found |= {"same_bits": timing.same_bits(first, last), "sha256": timing.digest(last)}
        found["profile"] = kernels.profile(call, steps)
    if layers.RECIPES.get(impl):
        found["verdict"] = verdict(model, found["counts"])
    return found, text


def show(found: dict):
    print(f"{found['model']}, {found['impl']}, fwd+bwd, {found['stage']}")
    if said := found.get("verdict"):
        print(f"  te_gemm: {said['te_gemm']} (expected {said['expected']}); dots left: {said['dots_left']}")
    for kind, counts in found["counts"].items():
        print(f"  {kind}: {counts}")
    if "profile" not in found:
        return
    bits = "yes" if found["same_bits"] else "NO"
    print(f"  two runs give the same bits: {bits}; SHA-256 {found['sha256'][:16]}...")
    p, ms = found["profile"], statistics.median(found["ms"])
    print(f"  queued {ms:.3f} ms; profiled {p['span_ms']:.3f} ms, of which {p['busy_ms']:.3f} in kernels")
    counts = {name: p[f"{name}_per_step"] for name in ("kernels", "copies", "graph_launches", "kernel_launches")}
    print("  per step:", ", ".join(f"{count:.1f} {name.replace('_', ' ')}" for name, count in counts.items()))
    for kernel in p["top"][:_TOP]:
        print(f"  {kernel['ms']:8.4f} ms {kernel['count']:6.1f}x  {kernel['name'][:100]}")


def main(args) -> int:
    model = layers.named(args.model, args.tiny)
    found, text = inspect(model, args.impl, args.steps)
    found["machine"] = machine.describe()
    show(found)
    report.write(found, args.out, text, args.text)
    good = found.get("verdict", {"good": True})["good"] and found.get("same_bits", True)
    return 0 if good else 1
