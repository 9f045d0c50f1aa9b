"""Memory of inference: a stack of Llama layers with parameters in bf16, and only in FP8 (te_jax.flax.fp8_params).

Each in a process of its own, whose allocator holds nothing else: the parameters after loading, as it counts them, and
the peak of a forward pass over one row of tokens, as XLA counts it for the compiled program.
"""

import json
from functools import partial

import jax
import jax.numpy as jnp
from flax import linen as nn

import te_jax as te
import te_jax.flax as te_flax

from . import machine, report
from .layers import Layer, Stack
from .process import in_own_process
from .timing import normal

WAYS = ("bf16", "fp8")
RECIPE = te.recipe.Float8CurrentScaling()  # the same GEMMs; it has no state that the two would differ by


def measure(way: str, layers: int, hidden: int, tokens: int) -> dict:
    """Bytes of the parameters, by their sizes and as the device's allocator counts them (None on a CPU), and the peak
    of a forward pass by XLA's analysis."""
    layer = Layer("", 1, tokens, hidden, hidden * 7 // 2, hidden // 128, max(1, hidden // 512), llama=True)
    model, x = Stack("", layers, layer).module("te_jax bf16"), normal(0, layer.shape)
    with te.autocast(True, RECIPE):
        init = partial(te_flax.fp8_model_init, model) if way == "fp8" else model.init
        held = jax.block_until_ready(nn.meta.unbox(jax.jit(init)(jax.random.key(0), x)))
        in_use = (jax.local_devices()[0].memory_stats() or {}).get("bytes_in_use")
        apply = jax.jit(model.apply).lower(held, x).compile()
    if not bool(jnp.isfinite(apply(held, x).astype(jnp.float32)).all()):
        raise FloatingPointError(f"{way}: the output of {layers} layers is not finite, so this is no pass of a model.")
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(held))
    analysis = apply.memory_analysis()
    peak = None if analysis is None else analysis.peak_memory_in_bytes
    return dict(way=way, parameter_bytes=size, in_use_bytes=in_use, forward_peak_bytes=peak)


def main(args) -> int:
    sizes = dict(layers=args.layers, hidden=args.hidden, tokens=args.tokens)
    if args.measure:
        print(json.dumps(measure(args.measure, **sizes)))
        return 0
    rows = []
    for way in WAYS:
        rows.append(in_own_process("memory", measure=way, **sizes))
        print(rows[-1], flush=True)
    report.write({"machine": machine.describe(), **sizes, "rows": rows}, args.out)
    return any("error" in row for row in rows)
