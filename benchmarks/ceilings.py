"""What this GPU does at best, measured: a copy of device memory, and large GEMMs in FP8 and bf16."""

import contextlib
from collections.abc import Callable

import jax.numpy as jnp

from .ops import bf16_gemm, fp8_gemm
from .timing import Call, compiled, normal, queued, sustained

_SECONDS = 1.0  # of calls; the clock settles within some 0.1 s
UNITS = {"copy": "TB/s", "fp8": "TFLOP/s", "bf16": "TFLOP/s"}


def measure(tiny: bool = False, metered: Callable = contextlib.nullcontext) -> dict[str, dict[str, float]]:
    """{"copy": {"sustained": TB/s, "brief": TB/s}, "fp8": ... TFLOP/s, "bf16": ...}

    sustained: over a second of calls, at the clock that the power limit leaves. brief: the best of some bursts of 10.
    copy is the better of a device-to-device memcpy and a kernel; fp8 accumulates fast. metered: as `copy` has it.
    """
    size = 64 if tiny else 8192
    products = {"fp8": fp8_gemm(size, size, size, fast_accum=True), "bf16": bf16_gemm(size, size, size)}
    return {
        "copy": copy(tiny, metered),
        **{name: _rates(call, 2 * size**3, tiny) for name, call in products.items()},
    }


def copy(tiny: bool = False, metered: Callable = contextlib.nullcontext) -> dict[str, float]:
    """The TB/s of a copy, as `measure` has them, by the kernel that is faster briefly. metered: makes the context in
    which the sustained one runs."""
    n = 64 if tiny else 16384
    x = [(normal(seed, (n, n)),) for seed in range(2)]  # 512 MB each: ten times the L2 cache
    copies = [compiled(fn, x) for fn in (jnp.copy, lambda x: x + 1)]
    return _rates(min(copies, key=_brief), 2 * 2 * n * n, tiny, metered)


def _rates(call: Call, amount: float, tiny: bool, metered: Callable = contextlib.nullcontext) -> dict[str, float]:
    """Per second, in units of 1e12."""
    brief = _brief(call)
    with metered():
        ms = sustained(call, 0.0 if tiny else _SECONDS)
    return {"sustained": amount / ms / 1e9, "brief": amount / brief / 1e9}


def _brief(call: Call) -> float:
    return min(queued(call, calls=10, repeat=5))


def line(found: dict) -> str:
    """The ceilings in one line."""
    each = (f"{name} {f['sustained']:.4g} {UNITS[name]} ({f['brief']:.4g} briefly)" for name, f in found.items())
    return "ceilings: " + ", ".join(each)
