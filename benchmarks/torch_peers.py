"""torch's GEMMs, mamba_ssm's scan, and the gated delta rule of fla, FlashQLA and FlashKDA, in a process of their own:
two frameworks would fight for one GPU's memory.

As a program: reads lines {"kind": a name in `_KINDS`, "calls": n, "sizes": its arguments} from stdin, and answers each
on stdout with {"ms": per call}, where n is 0 with {"peak_bytes": of a call}; or with {"error": text}, and ends.
"""

import importlib.util
import json
import os
import subprocess
import sys
import time
from functools import cache, lru_cache

_WARM_UP = 5
_BEFORE_CAPTURE = 3  # calls
_ALIGNED = 16  # bytes: torch's grouped products want groups to begin at such
_LEAST_GATE = -5.0  # the logarithm that FlashKDA's gates stay above; it takes none below this one


def available(*packages: str) -> bool:
    """Whether torch is installed, and these packages."""
    return all(importlib.util.find_spec(package) for package in ("torch", *packages))


def measure(shape, accumulation: str, calls: int) -> float:
    """ms per call of torch._scaled_mm, "fast" or "split", `calls` of them issued back to back after a warm-up."""
    return _ask("scaled_mm", calls, shape=shape, fast=accumulation == "fast")["ms"]


def measure_grouped(calls: int, **sizes) -> float:
    """ms per call of torch's grouped product, likewise.

    fp8: `torch._scaled_grouped_mm` of E4M3 with a scale for each row and each column, accumulating fast; else
         `torch._grouped_mm` of bf16.
    contracted: False: rows [R, k] times [E, n, k]; True: wgrad, [n, R] times [k, R] -> [E, n, k].
    n, k, counts: R is the sum of counts, each rounded up to 16.

    Raises RuntimeError with torch's text where it fails.
    """
    return _ask("grouped_mm", calls, **sizes)["ms"]


def measure_scan(calls: int, graph: bool, **sizes) -> float:
    """ms per call of mamba_ssm's `mamba_chunk_scan_combined`, likewise: its kernels are Triton's.

    graph: as a CUDA graph, so that launches do not count; else eager.
    shape: (b, s, h, g, p, n) of x, B and C.
    backward: with the gradients of all operands.
    """
    return _ask("scan", calls, graph=graph, **sizes)["ms"]


def peak_of_scan(**sizes) -> int:
    """The bytes of operands, results and temporaries of an eager call, at the most that torch had allocated at once."""
    return _ask("scan", 0, graph=False, **sizes)["peak_bytes"]


def measure_delta(calls: int, graph: bool, **sizes) -> float:
    """ms per call of `chunk_gated_delta_rule`, or of fla's `chunk_kda` or `flash_kda.fwd`, likewise, with keys and
    queries of length 1.

    package: "fla", "flash_qla" or "flash_kda", which has only a forward pass, with a gate for each channel.
    shape: (b, s, g, h, d) of q, k [b, s, g, d] and v [b, s, h, d]; b is 1 where rows are packed.
    by_channel: whether each channel of keys has a gate.
    run: tokens of each sequence that a row packs, which divide s; 0: it is one.
    """
    return _ask("delta", calls, graph=graph, **sizes)["ms"]


def peak_of_delta(**sizes) -> int:
    """As `peak_of_scan`."""
    return _ask("delta", 0, graph=False, **sizes)["peak_bytes"]


def _ask(kind: str, calls: int, **sizes) -> dict:
    if not available():
        raise RuntimeError("torch is not installed")
    process = _process()
    process.stdin.write(json.dumps({"kind": kind, "calls": calls, "sizes": sizes}) + "\n")
    process.stdin.flush()
    line = process.stdout.readline()
    answer = json.loads(line) if line else {"error": f"torch_peers.py ended with {process.wait()}; its error is above"}
    if "error" in answer:
        _process.cache_clear()  # an error may have spoiled its GPU's context
        raise RuntimeError(answer["error"])
    return answer


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


def _scan(torch, shape, backward, graph):
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

    def normal(*shape, dtype=torch.bfloat16):
        return torch.randn(*shape, device="cuda", dtype=dtype)

    b, s, h, g, p, n = shape
    A, D, bias = (normal(h, dtype=torch.float32) for _ in range(3))
    x, dt, B, C = normal(b, s, h, p), normal(b, s, h), normal(b, s, g, n) * 0.1, normal(b, s, g, n)
    operands = [a.requires_grad_(backward) for a in (x, dt, -A.exp(), B, C, D, bias - 4)]
    dy = normal(b, s, h, p) if backward else None

    def forward():
        *tokens, D, bias = operands
        return mamba_chunk_scan_combined(*tokens, chunk_size=256, D=D, dt_bias=bias, dt_softplus=True)

    run = (lambda: torch.autograd.grad(forward(), operands, dy)) if backward else forward
    return _graph(torch, run) if graph else run


def _delta(torch, package, shape, backward, by_channel, run, graph):
    def normal(*shape, dtype=torch.bfloat16):
        return torch.randn(*shape, device="cuda", dtype=dtype)

    b, s, g, h, d = shape
    of_gate = (b, s, h, d) if by_channel else (b, s, h)
    gate = -torch.nn.functional.softplus(normal(*of_gate, dtype=torch.float32) - 3)
    tokens = normal(b, s, g, d), normal(b, s, g, d), normal(b, s, h, d)
    logits = normal(b, s, h)
    ends = torch.arange(0, s + 1, run, device="cuda") if run else None
    if package == "flash_kda":
        if backward:
            raise ValueError("flash_kda has no backward pass")
        call = _flash_kda(torch, *tokens, gate, logits, ends)
        return _graph(torch, call) if graph else call
    rule = _differentiable_rule(package, by_channel)
    operands = [a.requires_grad_(backward) for a in (*tokens, gate, logits.sigmoid())]
    dy = normal(b, s, h, d) if backward else None

    def forward():
        return rule(*operands, use_qk_l2norm_in_kernel=True, cu_seqlens=ends)[0]

    call = (lambda: torch.autograd.grad(forward(), operands, dy)) if backward else forward
    return _graph(torch, call) if graph else call


def _differentiable_rule(package, by_channel):
    for other in ("FLA_FLASH_QLA", "FLA_FLASH_KDA"):
        os.environ[other] = "0"  # fla calls them instead of its own kernels where they are installed
    if package == "flash_qla":
        from flash_qla import chunk_gated_delta_rule as rule
    elif by_channel:
        from fla.ops.kda import chunk_kda as rule
    else:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule as rule
    return rule


def _flash_kda(torch, q, k, v, gate, logits, ends):
    """A call of FlashKDA's forward pass. It takes neither the logarithms of gates nor beta: its kernels make them, as
    _LEAST_GATE * sigmoid(exp(A_log) * (g + dt_bias)) and as the sigmoid of logits. So g, in bf16, is made of `gate`
    here, outside of the call, for an A_log and a bias of zeros. The call reads half of the bytes of gates in f32, and
    has two sigmoids more; its gates differ by the rounding of g, about 1 %."""
    from flash_kda import fwd

    h, d = v.shape[-2:]
    g = (gate / _LEAST_GATE).logit().to(v.dtype)
    log_a, bias = (torch.zeros(shape, device=v.device) for shape in (h, (h, d)))

    def call():
        y = torch.empty_like(v)
        fwd(q, k, v, g, logits, d**-0.5, y, log_a, bias, _LEAST_GATE, cu_seqlens=ends)
        return y

    return call


def _graph(torch, run):
    """`run` as one launch. What it does at first, as to choose kernels by timing, is done before."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(_BEFORE_CAPTURE):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run()

    def replay():
        graph.replay()
        return results

    return replay


_KINDS = {"scaled_mm": _scaled_mm, "grouped_mm": _grouped_mm, "scan": _scan, "delta": _delta}


def _timed(torch, run, calls: int) -> dict:
    for number in (_WARM_UP, calls):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(number):  # as `timing.queued`: the last result stays until the next is made
            out = run()  # noqa: F841
        torch.cuda.synchronize()
    return {"ms": (time.perf_counter() - began) / calls * 1e3}


def _peak(torch, kind: str, sizes: dict) -> dict:
    """On operands of its own, so that what is kept for other requests does not count."""
    before = torch.cuda.memory_allocated()
    run = _KINDS[kind](torch, **sizes)
    run()  # which may choose kernels by timing
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return {"peak_bytes": torch.cuda.max_memory_allocated() - before}


def main():
    # Only answers go to stdout, where compilers of peers would print, too.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import torch

    @lru_cache(2)  # FP8 and bf16 of one case take turns, or eager and a CUDA graph
    def made(kind, sizes):
        return _KINDS[kind](torch, **json.loads(sizes))

    for line in sys.stdin:
        kind, calls, sizes = map(json.loads(line).get, ("kind", "calls", "sizes"))
        try:
            answer = _timed(torch, made(kind, json.dumps(sizes)), calls) if calls else _peak(torch, kind, sizes)
            print(json.dumps(answer), file=answers, flush=True)
        except Exception as error:  # of any kind: its text is the answer
            print(json.dumps({"error": f"{type(error).__name__}: {error}"}), file=answers, flush=True)
            return


if __name__ == "__main__":
    main()
