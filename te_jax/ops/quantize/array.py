"""Arrays in FP8: one reading of the array writes both layouts that FP8 GEMMs want, and its column sums."""

from math import prod

import jax
import jax.numpy as jnp

from te_jax.core.check import array_of
from te_jax.core.op import Op
from te_jax.ops.producers import Producer, declare_all, on_its_gpu
from te_jax.ops.source import Source

FLOATS = (jnp.float32, jnp.bfloat16, jnp.float16)
FLOAT = array_of(*FLOATS, text="an array of float32, bfloat16 or float16")


def _matrix(x, *args, split, **attrs):
    rows = x[:split]
    return prod(rows[:-1]), rows[-1] if rows else 1, prod(x[split:])


ARRAY = Producer(
    name="te_quantize{}",
    operands="x: {m} {n}",
    rows="m...",
    columns="n...",
    value=lambda x, *, split: (x, {}),
    split=lambda y, *, split: (0, split),
    dbias=True,
    inverse=True,
    ranks={"m...": "split"},
    matrix=_matrix,
    kernels={"": dict(fenced="scale_inv"), "_block": dict(cuda=on_its_gpu)},
)
quantize: Op
quantize_block: Op
quantize_mx: Op
quantize, quantize_block, quantize_mx = declare_all(ARRAY, weights=True)[:3]
"""x f32|bf16|f16 [*m, *n], scale f32[] (with FP8 results) -> data, data_t, .. as `te_jax.ops.producers` says.

split: number of axes in m; with blocks `lead`, one less.
"""


def array_source(x: jax.Array, split: int) -> Source:
    """x [*m, *n], which is there, with `split` axes in m."""
    return Source(ARRAY, dict(split=split), (x,), split)
