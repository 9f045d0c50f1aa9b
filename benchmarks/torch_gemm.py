"""torch's FP8 GEMMs, in a process of their own: two frameworks would fight for one GPU's memory.

As a program: reads {"shapes": [[m, n, k], ...], "calls": n, "repeat": n} from stdin, writes
{"8192x4096x4096 fast": [ms, ...], ...} to stdout.
"""

import importlib.util
import json
import subprocess
import sys
import time
from functools import cache

_WARM_UP = 5


def available() -> bool:
    return importlib.util.find_spec("torch") is not None


def measure(shapes, shape, accumulation: str, calls: int, repeat: int) -> list[float]:
    """ms per call of torch._scaled_mm, "fast" or "split"; all shapes are measured by the first call."""
    return _measure_all(shapes, calls, repeat)[_key(shape, accumulation)]


@cache
def _measure_all(shapes, calls, repeat) -> dict[str, list[float]]:
    request = json.dumps({"shapes": shapes, "calls": calls, "repeat": repeat})
    done = subprocess.run([sys.executable, __file__], input=request, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise RuntimeError(f"torch_gemm.py failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def _key(shape, accumulation: str) -> str:
    return f"{'x'.join(map(str, shape))} {accumulation}"


def _queued(torch, run, calls, repeat) -> list[float]:
    """As `timing.queued`."""
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

    request, results = json.load(sys.stdin), {}
    one = torch.ones((), device="cuda")
    for shape in request["shapes"]:
        m, n, k = shape
        lhs, rhs = (torch.randn(rows, k, device="cuda").to(torch.float8_e4m3fn) for rows in (m, n))
        for accumulation in ("fast", "split"):

            def run(lhs=lhs, rhs=rhs, fast=accumulation == "fast"):
                torch._scaled_mm(lhs, rhs.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=fast)

            results[_key(shape, accumulation)] = _queued(torch, run, request["calls"], request["repeat"])
    print(json.dumps(results))


if __name__ == "__main__":
    main()
