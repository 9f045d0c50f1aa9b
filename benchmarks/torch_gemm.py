"""torch's GEMMs, in a process of their own: two frameworks would fight for one GPU's memory.

As a program: reads lines {"kind": a name in `_KINDS`, "calls": n, "sizes": its arguments} from stdin, and answers each
on stdout with {"ms": per call}; or with {"error": text}, and ends.
"""

import importlib.util
import json
import subprocess
import sys
import time
from functools import cache, lru_cache

_WARM_UP = 5
_ALIGNED = 16  # bytes: torch's grouped products want groups to begin at such


def available() -> bool:
    return importlib.util.find_spec("torch") is not None


def measure(shape, accumulation: str, calls: int) -> float:
    """ms per call of torch._scaled_mm, "fast" or "split", `calls` of them issued back to back after a warm-up."""
    return _ask("scaled_mm", calls, shape=shape, fast=accumulation == "fast")


def measure_grouped(calls: int, **sizes) -> float:
    """ms per call of torch's grouped product, likewise.

    fp8: `torch._scaled_grouped_mm` of E4M3 with a scale for each row and each column, accumulating fast; else
         `torch._grouped_mm` of bf16.
    contracted: False: rows [R, k] times [E, n, k]; True: wgrad, [n, R] times [k, R] -> [E, n, k].
    n, k, counts: R is the sum of counts, each rounded up to 16.

    Raises RuntimeError with torch's text where it fails.
    """
    return _ask("grouped_mm", calls, **sizes)


def _ask(kind: str, calls: int, **sizes) -> float:
    if not available():
        raise RuntimeError("torch is not installed")
    process = _process()
    process.stdin.write(json.dumps({"kind": kind, "calls": calls, "sizes": sizes}) + "\n")
    process.stdin.flush()
    line = process.stdout.readline()
    answer = json.loads(line) if line else {"error": f"torch_gemm.py ended with {process.wait()}; its error is above"}
    if "error" in answer:
        _process.cache_clear()  # an error may have spoiled its GPU's context
        raise RuntimeError(answer["error"])
    return answer["ms"]


@cache
def _process() -> subprocess.Popen:
    """Idle between requests; it ends with this process, when its stdin closes."""
    return subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _random(torch, fp8: bool, *shape):
    values = torch.randn(*shape, device="cuda", dtype=torch.bfloat16)
    return values.to(torch.float8_e4m3fn) if fp8 else values


def _scaled_mm(torch, shape, fast):
    m, n, k = shape
    one, lhs, rhs = torch.ones((), device="cuda"), _random(torch, True, m, k), _random(torch, True, n, k)
    options = dict(scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=fast)
    return lambda: torch._scaled_mm(lhs, rhs.t(), **options)


def _grouped_mm(torch, fp8, contracted, n, k, counts):
    counts, experts = [-(-count // _ALIGNED) * _ALIGNED for count in counts], len(counts)
    offsets, rows = torch.tensor(counts, device="cuda").cumsum(0, dtype=torch.int32), sum(counts)
    if contracted:
        lhs, rhs = _random(torch, fp8, n, rows), _random(torch, fp8, k, rows).t()
        scales = (experts * n,), (experts * k,)
    else:
        lhs, rhs = _random(torch, fp8, rows, k), _random(torch, fp8, experts, n, k).transpose(1, 2)
        scales = (rows,), (experts, n)
    if not fp8:
        return lambda: torch._grouped_mm(lhs, rhs, offs=offsets)
    scales = [torch.ones(shape, device="cuda") for shape in scales]
    options = dict(offs=offsets, out_dtype=torch.bfloat16, use_fast_accum=True)
    return lambda: torch._scaled_grouped_mm(lhs, rhs, *scales, **options)


_KINDS = {"scaled_mm": _scaled_mm, "grouped_mm": _grouped_mm}


def _answer(torch, run, calls: int) -> dict:
    for number in (_WARM_UP, calls):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(number):  # as `timing.queued`: the last result stays until the next is made
            out = run()  # noqa: F841
        torch.cuda.synchronize()
    return {"ms": (time.perf_counter() - began) / calls * 1e3}


def main():
    import torch

    @lru_cache(2)  # FP8 and bf16 of one case take turns
    def made(kind, sizes):
        return _KINDS[kind](torch, **json.loads(sizes))

    for line in sys.stdin:
        request = json.loads(line)
        try:
            run = made(request["kind"], json.dumps(request["sizes"]))
            print(json.dumps(_answer(torch, run, request["calls"])), flush=True)
        except Exception as error:  # of any kind: its text is the answer
            print(json.dumps({"error": f"{type(error).__name__}: {error}"}), flush=True)
            return


if __name__ == "__main__":
    main()
