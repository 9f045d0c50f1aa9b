"""Kernels and launches of a call, from jax.profiler's trace."""

import collections
import contextlib
import pathlib
import re
import tempfile
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import NamedTuple

import jax

from .timing import Call

# The driver's calls that start work, by the names that CUPTI gives them: "cuLaunchKernelEx", "cuGraphLaunch".
_GRAPH_LAUNCH = re.compile(r"^cu(da)?GraphLaunch")
_KERNEL_LAUNCH = re.compile(r"^cu(da)?Launch(Cooperative)?Kernel")
_CUDA_CALL = re.compile(r"^cu(da)?[A-Z]")
_EARLY = re.compile(r"\bte_finish\b")  # csrc/base/finish.cu
_COLLECTIVE = re.compile("nccl", re.IGNORECASE)
COPIES = re.compile(r"^(mem(cpy|set)|cuMem(cpy|set))", re.IGNORECASE)


class Event(NamedTuple):
    """A kernel, copy or memset that ran."""

    name: str
    start: float  # ns
    end: float


def record(call: Call, steps: int, read: Callable, folder: pathlib.Path | None = None):
    """Runs `steps` calls under the profiler -> read(jax.profiler.ProfileData). folder: keeps the profiler's files."""
    jax.block_until_ready(call.issue(2))
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # the tracer of Python calls would slow the host down
    with contextlib.ExitStack() as stack:
        folder = folder or stack.enter_context(tempfile.TemporaryDirectory())
        with jax.profiler.trace(str(folder), profiler_options=options):
            jax.block_until_ready(call.issue(steps))
        paths = pathlib.Path(folder).rglob("*.xplane.pb")  # one per host; the newest, where a folder was kept
        path = max(paths, key=lambda path: path.stat().st_mtime)
        return read(jax.profiler.ProfileData.from_file(str(path)))


def profile(call: Call, steps: int = 10) -> dict:
    """Runs `steps` calls under the profiler -> `summary` of them."""
    return record(call, steps, lambda data: summary(data, steps))


def summary(data: jax.profiler.ProfileData, steps: int) -> dict:
    """Per step of `steps`: kernels by name, launches, the ms in which the GPU worked or stood still, and `exposure`.

    Zeros where the trace has no GPU.
    """
    events = list(device_events(data))
    kernels = [event for event in events if not COPIES.match(event.name)]
    by_name = collections.defaultdict(lambda: [0, 0.0])
    for name, start, end in events:
        by_name[name][0] += 1
        by_name[name][1] += (end - start) / 1e6
    top = sorted(by_name.items(), key=lambda item: -item[1][1])
    spent = times(events, steps)
    graphs, launches, calls = _host_launches(data)
    return {
        "steps": steps,
        "kernels_per_step": len(kernels) / steps,
        "copies_per_step": (len(events) - len(kernels)) / steps,
        "kernel_ms": spent["kernel_ms"],
        "busy_ms": spent["span_ms"] - spent["idle_ms"],
        "span_ms": spent["span_ms"],
        "graph_launches_per_step": graphs / steps,
        "kernel_launches_per_step": launches / steps,
        "host_calls_per_step": {name: count / steps for name, count in calls.most_common()},
        **exposure(data, steps),
        "top": [{"name": n, "count": c / steps, "ms": ms / steps} for n, (c, ms) in top],
    }


def exposure(data: jax.profiler.ProfileData, steps: int) -> dict:
    """ms a step of the first GPU: in collectives, and in these while nothing else runs. Zeros without a GPU."""
    first = [plane for plane in data.planes if plane.name.startswith("/device:GPU:0")]
    kinds = {True: [], False: []}
    for name, *interval in device_events(SimpleNamespace(planes=first)):
        kinds[bool(_COLLECTIVE.search(name))].append(interval)
    exposed = union(kinds[True] + kinds[False]) - union(kinds[False])
    spent = sum(end - start for start, end in kinds[True])
    return {"collective_ms": spent / 1e6 / steps, "exposed_ms": exposed / 1e6 / steps}


def device_events(data) -> Iterator[Event]:
    """What ran on the GPUs' streams. A kernel that is started early, and waits for the one ahead of it, counts from the
    end of that."""
    reached = 0.0
    for event in sorted(_all_events(data), key=lambda event: event.start):
        start = min(max(event.start, reached), event.end) if _EARLY.search(event.name) else event.start
        yield event._replace(start=start)
        reached = max(reached, event.end)


def _all_events(data) -> Iterator[Event]:
    for plane in data.planes:
        if not plane.name.startswith("/device:GPU"):
            continue
        lines = list(plane.lines)
        streams = [line for line in lines if line.name.startswith("Stream")]
        for line in streams or lines:  # the others repeat the same time by HLO op and module
            for event in line.events:
                yield Event(event.name, event.start_ns, event.start_ns + event.duration_ns)


def _host_launches(data):
    """Graph launches, kernel launches, and all CUDA calls by name."""
    calls = collections.Counter()
    for plane in data.planes:
        if plane.name.startswith("/host"):
            events = (event for line in plane.lines for event in line.events)
            names = (event.name.partition(" (CudaGraph:")[0] for event in events)  # each graph has a number
            calls.update(name for name in names if _CUDA_CALL.match(name))
    count = lambda pattern: sum(number for name, number in calls.items() if pattern.match(name))
    return count(_GRAPH_LAUNCH), count(_KERNEL_LAUNCH), calls


def times(events: list[Event], steps: int) -> dict[str, float]:
    """ms per step: from the first start to the last end, in kernels, and neither."""
    span = max((event.end for event in events), default=0) - min((event.start for event in events), default=0)
    total, idle = sum(event.end - event.start for event in events), span - union(event[1:] for event in events)
    return {key: ns / 1e6 / steps for key, ns in (("span_ms", span), ("kernel_ms", total), ("idle_ms", idle))}


def union(intervals) -> float:
    """The length that the intervals cover together."""
    covered, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        if end > reached:
            covered += end - max(start, reached)
            reached = end
    return covered
