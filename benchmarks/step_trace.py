"""A per-kernel account of a transformer layer's step: time, work, fraction of the measured ceiling, and what is idle.

The step runs under the profiler after a pause: the first steps are at the highest clock (`ms`), the last ones at the
clock that the power limit leaves (`sustained`). Clock and power are sampled in as many calls without the profiler.
"""

import pathlib
import statistics
import time

from . import account, ceilings, kernels, layers, machine, report, timing

_BRIEF, _SETTLED = 10, 50  # the first and the last steps under the profiler
_PAUSE_S = 1.0  # in which the power budget recovers


def measure(model, impl: str, calls: int, tiny: bool, folder: pathlib.Path | None) -> tuple[dict, str]:
    """-> the account, and the text of the compiled module. folder: keeps the profiler's files."""
    result = {"machine": machine.describe(), "model": model.name, "impl": impl, "calls": calls}
    result["ceilings"] = ceilings.measure(tiny)
    call = layers.trainee(model, impl).compile_for_profiler()
    result["peak_bytes"], text = call.peak_bytes, call.run.as_text()
    result["queued_ms"] = timing.queued(call, min(timing.CALLS, calls))
    with machine.Sampler() as sampler:
        (result["sustained_ms"],) = timing.queued(call, calls, repeat=1)
    result["samples"] = sampler.samples
    time.sleep(_PAUSE_S if timing.on_gpu() else 0)
    events = kernels.record(call, calls, lambda data: list(kernels.device_events(data)), folder)
    if events:
        found = [_with_attention(work, model) for work in account.works(text, model.tokens)]
        result |= account.account(events, calls, found, min(_BRIEF, calls), min(_SETTLED, calls))
    return result, text


def _with_attention(work: account.Work, model: layers.Layer) -> account.Work:
    """An instruction does not tell which part of the scores the mask leaves; the model does."""
    forward, both = model.attention_flops(False), model.attention_flops(True)
    flops = {"attention forward": forward, "attention backward": both - forward}
    return work._replace(flops=flops[work.family]) if work.family in flops else work


def show(result: dict):
    report.show_heading(result)
    queued = statistics.median(result["queued_ms"])
    print(f"{result['model']}, {result['impl']}, fwd+bwd: queued {queued:.3f} ms, ", end="")
    print(f"sustained over {result['calls']} calls {result['sustained_ms']:.3f} ms")
    settled = result["samples"][len(result["samples"]) // 2 :]  # by then the clock has settled
    for name, unit in machine.Sampler.FIELDS.values():
        if values := [sample[name] for sample in settled if sample[name] is not None]:
            print(f"  {name}: median {statistics.median(values):g} {unit}, {min(values):g} to {max(values):g}")
    if "kernels" not in result:
        print("no GPU: no kernels to account for")
        return
    for name in ("brief", "sustained"):
        t = result[name]
        alongside = t["kernel_ms"] + t["idle_ms"] - t["span_ms"]
        print(f"  {name}: {t['span_ms']:.3f} ms a step = {t['kernel_ms']:.3f} in kernels", end="")
        print(f" - {alongside:.3f} side by side + {t['idle_ms']:.3f} idle")
    total, classes = result["brief"]["kernel_ms"], result["classes"]
    header = ["class", "count", "ms", "share", "rate", "of ceiling", "sustained ms", "rate", "of ceiling"]
    rows = [_cells(each, result, str(each["count"]), f"{each['ms'] / total:.1%}") for each in classes]
    count, sustained = sum(each["count"] for each in classes), result["sustained"]["kernel_ms"]
    rows.append(["sum", str(count), f"{total:.4f}", "", "", "", f"{sustained:.4f}", "", ""])
    print(report.columns([header, *rows]), end="\n\n")
    large = [kernel for kernel in result["kernels"] if kernel["ms"] * 1e3 >= account.SMALL_US]
    rows = [_cells(kernel, result, kernel["kernel"][:60], "") for kernel in sorted(large, key=lambda k: -k["ms"])]
    print(report.columns([["work", "kernel", *header[2:]], *rows]))


def _cells(row: dict, result: dict, second: str, share: str) -> list[str]:
    rates = []
    for key, kind in (("ms", "brief"), ("sustained_ms", "sustained")):
        text, fraction = account.rate(row, result["ceilings"], key, kind)
        rates += [f"{row[key]:.4f}", text, "" if fraction is None else f"{fraction:.2f}"]
    return [row.get("label") or row["class"], second, rates[0], share, *rates[1:]]


def main(args) -> int:
    model = layers.named(args.model, args.tiny)
    result, text = measure(model, args.impl, args.calls, args.tiny, args.folder)
    report.write(result, args.out, text, args.text)
    show(result)
    return 0
