"""torch's FP8 GEMMs, in a process of their own: two frameworks would fight for one GPU's memory.

As a program: reads lines {"shape": [m, n, k], "fast": true, "calls": n} from stdin, answers each with the ms per call
on stdout.
"""

import importlib.util
import json
import subprocess
import sys
import time
from functools import cache, lru_cache

_WARM_UP = 5


def available() -> bool:
    return importlib.util.find_spec("torch") is not None


def measure(shape, accumulation: str, calls: int) -> float:
    """ms per call of torch._scaled_mm, "fast" or "split", `calls` of them issued back to back after a warm-up."""
    process = _process()
    process.stdin.write(json.dumps({"shape": shape, "fast": accumulation == "fast", "calls": calls}) + "\n")
    process.stdin.flush()
    answer = process.stdout.readline()
    if not answer:
        raise RuntimeError(f"torch_gemm.py ended with {process.wait()}; its error is above")
    return json.loads(answer)


@cache
def _process() -> subprocess.Popen:
    """Idle between requests; it ends with this process, when its stdin closes."""
    return subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def main():
    import torch

    @lru_cache(1)
    def operands(m, n, k):
        return [torch.randn(rows, k, device="cuda").to(torch.float8_e4m3fn) for rows in (m, n)]

    one = torch.ones((), device="cuda")
    for line in sys.stdin:
        request = json.loads(line)
        lhs, rhs = operands(*request["shape"])

        options = dict(scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=request["fast"])
        for calls in (_WARM_UP, request["calls"]):
            torch.cuda.synchronize()
            began = time.perf_counter()
            for _ in range(calls):  # as `timing.queued`: the last result stays until the next is made
                out = torch._scaled_mm(lhs, rhs.t(), **options)  # noqa: F841
            torch.cuda.synchronize()
        print(json.dumps((time.perf_counter() - began) / calls * 1e3), flush=True)


if __name__ == "__main__":
    main()
