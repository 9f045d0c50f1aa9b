"""torch's FP8 GEMMs, in a process of their own: two frameworks would fight for one GPU's memory.

As a program: reads lines {"shape": [m, n, k], "fast": true, "calls": n, "repeat": n} from stdin, answers each with a
line [ms, ...] on stdout.
"""

import importlib.util
import json
import subprocess
import sys
import time
from functools import cache

SETTLE_S = (
    0.3  # of calls before timing: an H200 under GEMMs draws all its power, and its clock falls by 15 % until then
)
_WARM_UP = 5


def available() -> bool:
    return importlib.util.find_spec("torch") is not None


def measure(shape, accumulation: str, calls: int, repeat: int) -> list[float]:
    """ms per call of torch._scaled_mm, "fast" or "split"."""
    process = _process()
    request = {"shape": shape, "fast": accumulation == "fast", "calls": calls, "repeat": repeat}
    process.stdin.write(json.dumps(request) + "\n")
    process.stdin.flush()
    answer = process.stdout.readline()
    if not answer:
        raise RuntimeError(f"torch_gemm.py ended with {process.wait()}; its error is above")
    return json.loads(answer)


@cache
def _process() -> subprocess.Popen:
    """Ends with this one, when its stdin closes. Idle between requests, so that both see the same GPU."""
    return subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _queued(torch, run, calls, repeat) -> list[float]:
    """As `ops.settled`, then `timing.queued`."""
    began = time.perf_counter()
    while time.perf_counter() - began < SETTLE_S:
        for _ in range(10):
            run()
        torch.cuda.synchronize()
    for _ in range(_WARM_UP):
        run()
    times = []
    for _ in range(repeat):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(calls):
            run()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - began) / calls * 1e3)
    return times


def main():
    import torch

    one = torch.ones((), device="cuda")
    for line in sys.stdin:
        request = json.loads(line)
        m, n, k = request["shape"]
        lhs, rhs = (torch.randn(rows, k, device="cuda").to(torch.float8_e4m3fn) for rows in (m, n))

        def run(lhs=lhs, rhs=rhs, fast=request["fast"]):
            torch._scaled_mm(lhs, rhs.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=fast)

        print(json.dumps(_queued(torch, run, request["calls"], request["repeat"])), flush=True)


if __name__ == "__main__":
    main()
