"""Random data, compiled calls, and the wall time of calls that are issued back to back."""

import hashlib
import time
from collections.abc import Callable, Sequence
from functools import partial
from math import ceil, prod
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

CALLS = 30  # issued back to back
_WARM_UP = 5  # plans and CUDA graphs are made by then, and algorithms tuned
_BEYOND_L2 = 256 << 20  # bytes; several times the L2 cache of an H200


class Call(NamedTuple):
    """A compiled function and what to call it with."""

    run: Callable
    inputs: Sequence[tuple]  # argument sets, taken in turn
    trace_s: float = 0.0  # tracing and lowering
    compile_s: float = 0.0
    peak_bytes: int | None = None  # arguments, results and temporaries; None if the backend does not tell
    io_bytes: int | None = None  # arguments and results, each once
    saved_bytes: int | None = None  # kept from the forward to the backward pass; None where nobody counted

    def issue(self, calls: int):
        """Issues `calls` calls and returns the results of the last."""
        for i in range(calls):
            out = self.run(*self.inputs[i % len(self.inputs)])
        return out


def normal(seed: int, shape: Sequence[int], dtype=jnp.bfloat16, scale: float = 1.0) -> jax.Array:
    """Standard normal data times `scale`: zeros and constants make GPUs faster than real data does."""
    return _draw(jax.random.key(seed), tuple(shape), jnp.dtype(dtype), scale)


@partial(jax.jit, static_argnums=(1, 2, 3))
def _draw(key, shape, dtype, scale):
    return (scale * jax.random.normal(key, shape, jnp.float32)).astype(dtype)


def sets(make: Callable[[int], tuple], limit: int = 8) -> list[tuple]:
    """make(seed) -> one argument set; so many of them that none is still in the L2 cache at its turn."""
    first = make(0)
    size = sum(prod(a.shape) * a.dtype.itemsize for a in jax.tree.leaves(first))
    more = min(limit, ceil(_BEYOND_L2 / max(size, 1))) - 1 if on_gpu() else 0
    return [first, *(make(seed) for seed in range(1, more + 1))]


def compiled(fn: Callable, inputs: Sequence[tuple], donate: Sequence[int] = (), **options) -> Call:
    """`fn`, ahead of time. donate: the arguments whose memory it reuses; options: XLA's compiler options."""
    began = time.perf_counter()
    lowered = jax.jit(fn, donate_argnums=donate).lower(*inputs[0])
    lower_end = time.perf_counter()
    run = lowered.compile(compiler_options=options or None)
    seconds = lower_end - began, time.perf_counter() - lower_end
    if (memory := run.memory_analysis()) is None:
        return Call(run, inputs, *seconds)
    io = memory.argument_size_in_bytes + memory.output_size_in_bytes
    return Call(run, inputs, *seconds, int(io + memory.temp_size_in_bytes - memory.alias_size_in_bytes), int(io))


def passes(forward: Callable, inputs: Sequence[tuple], backward: bool) -> Call:
    """The call forward(*operands, *others), with `backward` also the gradients of the operands, on each (operands, dy,
    others) of `inputs`; dy is the cotangent."""

    def both(operands, dy, others):
        y, vjp = jax.vjp(lambda *operands: forward(*operands, *others), *operands)
        return y, vjp(dy)

    if backward:
        return compiled(both, inputs)
    return compiled(forward, [(*operands, *others) for operands, _, others in inputs])


def queued(call: Call, calls: int = CALLS, repeat: int = 3) -> list[float]:
    """ms per call: wall time of `calls` calls issued back to back and waited for together, over their number.

    One entry per repeat, warm-up left out. Results are kept until those of the next call are made.
    """
    jax.block_until_ready(call.issue(min(_WARM_UP, calls)))
    times = []
    for _ in range(repeat):
        began = time.perf_counter()
        jax.block_until_ready(call.issue(calls))
        times.append((time.perf_counter() - began) / calls * 1e3)
    return times


def sustained(call: Call, seconds: float) -> float:
    """ms per call in the second half of `seconds` of calls: by then the GPU's clock is what its power allows."""
    (ms,) = queued(call, calls=10, repeat=1)
    return queued(call, calls=max(10, ceil(seconds / 2 * 1e3 / ms)), repeat=2)[-1]


def digest(tree) -> str:
    """SHA-256 of the arrays' bytes: equal in two processes where the results are equal bit for bit."""
    found = hashlib.sha256()
    for leaf in jax.tree.leaves(tree):
        found.update(np.ascontiguousarray(np.asarray(leaf)).view(np.uint8))
    return found.hexdigest()


def same_bits(one, other) -> bool:
    return digest(one) == digest(other)


def on_gpu() -> bool:
    return jax.default_backend() == "gpu"
