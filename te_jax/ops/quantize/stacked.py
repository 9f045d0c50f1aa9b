"""Stacks of weights in FP8, each with a scale, or blocks, of its own: of the experts of a layer, of the layers of a
stack."""

from math import prod

import jax
import jax.numpy as jnp

from te_jax.core.op import Op
from te_jax.ops.producers import Producer, declare_all, on_its_gpu
from te_jax.ops.source import PerExpert, Source


def _side_by_side(x, y, axis: int):
    return x if y is None else jnp.stack((x, y), axis)


def _check_slots_of_stack(op, x, y, *_, slots, **attrs):
    if slots != (y is not None):
        raise ValueError(f"{op}: slots is {slots}; pass 1 with a second array y, 0 without.")
    if y is not None and y != x:
        raise TypeError(f"{op}: x is {x}, y is {y}; cast one to the other.")


def _matrix_of_entry(x, *_, stack, split, **attrs):
    rows = x[stack : stack + split]
    return prod(rows[:-1]), rows[-1] if rows else 1, prod(x[stack + split :])


STACKED = Producer(
    name="te_quantize_stacked{}",
    operands="x: e... {m} {n}, y?: e... {m} {n}",
    rows="m...",
    columns="n...",
    slots="a...",
    value=lambda x, y, *, stack, slots, split: (_side_by_side(x, y, stack + split), {}),
    split=lambda y, *, stack, slots, split: (stack, stack + split),
    lead="e...",
    check=_check_slots_of_stack,
    ranks={"e...": "stack", "a...": "slots", "m...": "split"},
    matrix=_matrix_of_entry,
    op=dict(replicated="a...", sizes={"a...0": lambda **_: 2}),
    kernels={"": {}, "_block": dict(cuda=on_its_gpu)},
)
quantize_stacked: Op
quantize_stacked_block: Op
quantize_stacked_mx: Op
quantize_stacked, quantize_stacked_block, quantize_stacked_mx = declare_all(STACKED, tensors=False, weights=True)[:3]
"""te_quantize of each entry of a stack: x f32|bf16|f16 [*e, *m, *n], y another array of its shape and type that lies
next to it in the results, scale f32[*e] (with FP8 results) -> data, data_t, .. as `te_jax.ops.producers` says, with *e
in front, of the tensor [*m, *a, *n]; amax is f32[*e].

stack: number of axes in e. slots: number of axes in a: one of 2 with y, none (0) without. split: number of axes in m;
with blocks `lead`, one less. Raises ValueError for other `slots`, TypeError for a y of another type.
"""


def stacked_source(weight: jax.Array, beside: jax.Array | None = None, stack: int = 1, split: int = 1) -> Source:
    """weight [*E, *C, *F], with `stack` axes in E and `split` in C, with a scale, or blocks, of its own for each entry
    of E, such as an expert. beside: an array of the same shape and type; the tensor is then [*E, *C, 2, *F]."""
    slots = 1 if beside is None else 2
    experts = PerExpert(
        lambda of_expert: jnp.expand_dims(of_expert, tuple(range(stack, weight.ndim + slots - 1))),
        lambda x: jnp.sum(x, tuple(range(stack, x.ndim))),
        jnp.full(weight.shape[:stack], float(slots * prod(weight.shape[stack:]))),
    )
    attrs = dict(stack=stack, slots=int(beside is not None), split=split)
    elements = lambda: _side_by_side(weight, beside, stack + split)
    return Source(STACKED, attrs, (weight, beside), split, weight.shape[:stack], elements, experts)
