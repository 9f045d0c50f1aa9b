"""A per-kernel account of a transformer layer's step: time, work, fraction of the measured ceiling, and what is idle.

    python benchmarks/trace.py --out trace.json [--model 'llama layer'] [--impl 'te_jax fp8 fast']

The step runs under the profiler after a pause: the first steps are at the highest clock (`ms`), the last ones at the
clock that the power limit leaves (`sustained`). Clock and power are sampled in as many calls without the profiler.
"""

import argparse
import json
import pathlib
import statistics
import sys
import time

# Last, so that the source tree's te_jax, which has no CUDA extension, does not hide an installed one.
sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))

import account
import ceilings
import kernels
import layers
import machine
import report
import timing

_CALLS = 150
_BRIEF, _SETTLED = 10, 50  # the first and the last steps under the profiler
_PAUSE_S = 1.0  # in which the power budget recovers
# XLA replaces CUDA graphs by single launches while a profiler watches, unless told not to.
_KEEP_GRAPHS = {"xla_enable_command_buffers_during_profiling": True}


def measure(model, impl: str, calls: int, tiny: bool, folder: pathlib.Path | None) -> tuple[dict, str]:
    """-> the account, and the text of the compiled module. folder: keeps the profiler's files."""
    result = {"machine": machine.describe(), "model": model.name, "impl": impl, "calls": calls}
    result["ceilings"] = ceilings.measure(tiny)
    trainee = layers.trainee(model, impl)
    on_gpu = timing.on_gpu()
    call = trainee.compile(**(_KEEP_GRAPHS if on_gpu else {}))._replace(inputs=[trainee.train_inputs(trainee.state)])
    result["peak_bytes"], text = call.peak_bytes, call.run.as_text()
    result["queued_ms"] = timing.queued(call, min(timing.CALLS, calls))
    with machine.Sampler() as sampler:
        (result["sustained_ms"],) = timing.queued(call, calls, repeat=1)
    result["samples"] = sampler.samples
    time.sleep(_PAUSE_S if on_gpu else 0)
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
    print(machine.line(result["machine"]))
    print(ceilings.line(result["ceilings"]))
    queued = statistics.median(result["queued_ms"])
    print(f"{result['model']}, {result['impl']}, fwd+bwd: queued {queued:.3f} ms, ", end="")
    print(f"sustained over {result['calls']} calls {result['sustained_ms']:.3f} ms")
    for name, unit, values in _sampled(result["samples"]):
        print(f"  {name}: median {statistics.median(values):g} {unit}, {min(values):g} to {max(values):g}")
    if "kernels" not in result:
        print("no GPU: no kernels to account for")
        return
    for name in ("brief", "sustained"):
        t = result[name]
        alongside = t["kernel_ms"] + t["idle_ms"] - t["span_ms"]
        print(
            f"  {name}: {t['span_ms']:.3f} ms a step = {t['kernel_ms']:.3f} in kernels - {alongside:.3f} side by side"
            f" + {t['idle_ms']:.3f} idle"
        )
    total = result["brief"]["kernel_ms"]
    header = ["class", "count", "ms", "share", "rate", "of ceiling", "sustained ms", "rate", "of ceiling"]
    rows = [_cells(each, result, str(each["count"]), f"{each['ms'] / total:.1%}") for each in result["classes"]]
    sums = (sum(each["count"] for each in result["classes"]), total, result["sustained"]["kernel_ms"])
    rows.append(["sum", str(sums[0]), f"{sums[1]:.4f}", "", "", "", f"{sums[2]:.4f}", "", ""])
    print(report.columns([header, *rows]))
    print()
    large = [kernel for kernel in result["kernels"] if kernel["ms"] * 1e3 >= account.SMALL_US]
    header = ["work", "kernel", *header[2:]]
    rows = [[*_cells(kernel, result, kernel["kernel"][:60], "")] for kernel in sorted(large, key=lambda k: -k["ms"])]
    print(report.columns([header, *rows]))


def _cells(row: dict, result: dict, second: str, share: str) -> list[str]:
    cells = [row.get("label") or row["class"], second, f"{row['ms']:.4f}", share]
    for key, kind in (("ms", "brief"), ("sustained_ms", "sustained")):
        text, fraction = account.rate(row, result["ceilings"], key, kind)
        cells += [
            *([f"{row[key]:.4f}"] if kind == "sustained" else []),
            text,
            "" if fraction is None else f"{fraction:.2f}",
        ]
    return cells


def _sampled(samples: list[dict]):
    """(what, unit, values) of the second half of the samples, when the clock has settled."""
    settled = samples[len(samples) // 2 :]
    for key, unit in machine.Sampler.FIELDS.values():
        if values := [sample[key] for sample in settled if sample[key] is not None]:
            yield key, unit, values


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--out", metavar="FILE", type=pathlib.Path, help="JSON")
    p.add_argument("--text", metavar="FILE", type=pathlib.Path, help="the compiled module's text")
    p.add_argument("--folder", metavar="FOLDER", type=pathlib.Path, help="keep the profiler's files here")
    p.add_argument("--load", metavar="FILE", type=pathlib.Path, help="show an earlier JSON, measure nothing")
    p.add_argument("--model", choices=("gpt layer", "llama layer"), default="gpt layer")
    p.add_argument("--impl", choices=layers.IMPLS, default="te_jax fp8 fast")
    p.add_argument("--calls", type=int, default=_CALLS, help=f"of the sustained run [default: {_CALLS}]")
    p.add_argument("--tiny", action="store_true", help="tiny sizes: to try the program without a GPU")
    return p


def main(argv=None) -> int:
    args = parser().parse_args(argv)
    if args.load:
        show(json.loads(args.load.read_text()))
        return 0
    (model,) = (m for m in layers.models(args.tiny) if m.name == args.model)
    result, text = measure(model, args.impl, args.calls, args.tiny, args.folder)
    for path, content in ((args.out, json.dumps(result, indent=1) + "\n"), (args.text, text)):
        if path:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
    show(result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
