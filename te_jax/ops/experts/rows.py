"""What an MLP of experts quantizes between its grouped products: stacked weights, and the activation and its gradient
over the rows of groups (`te_jax.ops.permute.Groups`), each with a scale and an amax for every expert.

The rows that pad a group, and those of the tail, may hold anything: they enter no result but as zeros in their place. A
kernel leaves the tail of a result as it was.
"""

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from te_jax.core import extension
from te_jax.core.amax import amax
from te_jax.core.op import Op
from te_jax.core.types import align
from te_jax.ops.experts.permute import ALIGNMENT, Groups
from te_jax.ops.experts.router import MOST_EXPERTS
from te_jax.ops.quantize.activation import activation_bwd, activation_fwd, check_same_dtype, kind_of
from te_jax.ops.quantize.array import (
    BLOCK,
    HOPPER,
    fp8_type,
    on_hopper,
    quantize,
    quantize_block,
    rows_reference,
    saturate,
    tiles,
    transpose,
)
from te_jax.ops.source import PerExpert, Source
from te_jax.sharding.constraints import explicit_spec

# -- rows of groups -------------------------------------------------------------------------------------------


def expert_of_tile(offsets: jax.Array, rows: int) -> jax.Array:
    """i32[rows / 128]: the expert of each tile of 128 rows, E behind the last group."""
    starts = jnp.arange(rows // ALIGNMENT, dtype=offsets.dtype) * ALIGNMENT
    # Not jnp.searchsorted, which fails within `jax.shard_map`.
    return jnp.sum(offsets[None, 1:] <= starts[:, None], 1, dtype=jnp.int32)


def expert_of_row(offsets: jax.Array, counts: jax.Array, rows: int) -> tuple[jax.Array, jax.Array]:
    """(i32[rows], bool[rows]): the expert of each row, E - 1 behind the last group; whether the row is a token's."""
    expert = jnp.repeat(expert_of_tile(offsets, rows), ALIGNMENT, total_repeat_length=rows)
    inside = jnp.minimum(expert, counts.shape[0] - 1)
    at = jnp.arange(rows, dtype=offsets.dtype) - offsets[inside]
    return inside, (expert < counts.shape[0]) & (at < counts[inside])


def tokens_alone(x: jax.Array, is_token: jax.Array, axis: int = 0) -> jax.Array:
    """x with zeros in the place of rows that are no tokens. axis: the axis of rows."""
    return jnp.where(jnp.expand_dims(is_token, [i for i in range(x.ndim) if i != axis]), x, jnp.zeros((), x.dtype))


def sum_of_experts(
    part: Callable[..., jax.Array],
    tiles: Sequence[jax.Array],
    experts: jax.Array,
    shape: tuple[int, ...],
    spec: PartitionSpec | None = None,
) -> jax.Array:
    """f32[shape], for each of shape[0] experts the sum of part(*tile) over its tiles, in their order.

    part: what a tile adds, f32[shape[1:]]. tiles: arrays with the tiles in front. experts: i32, of each tile; what is
    not below shape[0] is left out. spec: of the result, on an Explicit mesh.
    """

    def add(sums, tile):
        expert, *tile = tile
        at = jnp.minimum(expert, shape[0] - 1)  # not a scatter, which Explicit axes refuse
        total = lax.dynamic_index_in_dim(sums, at, 0, False) + part(*tile)
        total = jnp.where(expert < shape[0], total, lax.dynamic_index_in_dim(sums, at, 0, False))
        return lax.dynamic_update_index_in_dim(sums, total, at, 0), None

    start, *_ = align(jnp.zeros(shape, jnp.float32), experts, *tiles)  # the type that `add` gives back
    start = start if spec is None else jax.sharding.reshard(start, spec)
    return lax.scan(add, start, (experts, *tiles))[0]


def in_tiles(x: jax.Array) -> jax.Array:
    """[R, ...] -> [R / 128, 128, ...]"""
    return x.reshape(x.shape[0] // ALIGNMENT, ALIGNMENT, *x.shape[1:])


def _amax_of_experts(x, offsets, counts):
    """f32[E] of x f32 [R, ...], 0 without tokens. x has zeros where there are none."""
    tiles = in_tiles(x)
    bits = lax.bitcast_convert_type(amax(tiles, tuple(range(1, tiles.ndim))), jnp.uint32)
    largest = jnp.zeros(counts.shape, jnp.uint32).at[expert_of_tile(offsets, x.shape[0])].max(bits, mode="drop")
    return lax.bitcast_convert_type(largest, jnp.float32)


def dbias_of_experts(dx: jax.Array, offsets: jax.Array, counts: jax.Array) -> jax.Array:
    """f32[E, ...]: the sum over each expert's rows of dx f32 [R, ...], which has zeros in the rows that pad a group."""
    experts, spec = expert_of_tile(offsets, dx.shape[0]), explicit_spec(jax.typeof(dx))
    shape = (*counts.shape, *dx.shape[1:])
    return sum_of_experts(lambda tile: jnp.sum(tile, 0), (in_tiles(dx),), experts, shape, spec)


# -- stacked weights ------------------------------------------------------------------------------------------


def _of_stack(reference, stack: int):
    """`reference` of one expert, for experts along the first `stack` axes of all operands and results."""
    return reference if stack == 0 else jax.vmap(_of_stack(reference, stack - 1))


def _side_by_side(x, y, axis: int):
    return x if y is None else jnp.stack((x, y), axis)


def _stacked_reference(x, y, scale, *, stack, slots, split, **attrs):
    one = lambda x, scale: quantize.reference(x, scale, split=split, **attrs)[:3]
    return _of_stack(one, stack)(_side_by_side(x, y, stack + split), scale)


def _stacked_block_reference(x, y, *, stack, slots, lead, **attrs):
    one = lambda x: quantize_block.reference(x, lead=lead, square=True, **attrs)
    data, data_t, _, _, *inverses, _ = _of_stack(one, stack)(_side_by_side(x, y, stack + lead + 1))
    return data, data_t, *inverses


def _stacked_types(op: str, x, y, *_, slots, dtype, **attrs):
    if slots != (y is not None):
        raise ValueError(f"{op}: slots is {slots}; pass 1 with a second array y, 0 without.")
    if y is not None and y != x:
        raise TypeError(f"{op}: x is {x}, y is {y}; cast one to the other.")
    return fp8_type(op, dtype), dtype, jnp.float32, jnp.float32


def _stacked_tiles(x, *_, stack, split, **attrs):
    """Of an expert: one partial amax for each."""
    return tiles(prod(x[stack : stack + split]), prod(x[stack + split :]))


_SLOTS = {"a...0": lambda **_: 2}

quantize_stacked: Op = Op(
    "te_quantize_stacked",
    "x: e... m... n..., y?: e... m... n..., scale?: e... "
    "-> data?: e... m... a... n..., data_t?: e... a... n... m..., amax?: e...",
    replicated="a...",
    combine={"amax": "max"},
    ranks={"e...": "stack", "a...": "slots", "m...": "split"},
    sizes=_SLOTS,
    dtypes=lambda *operands, **attrs: _stacked_types("te_quantize_stacked", *operands, **attrs)[:3],
    partials={"amax": _stacked_tiles},
    reference=_stacked_reference,
)
"""te_quantize of the weights of experts, each with a scale of its own: x f32|bf16|f16 [*e, *m, *n], y another array of
its shape and type that lies beside it in the results, scale f32[*e] (with FP8 results) -> results in this order, as
chosen by `outputs`:

data   FP8 [*e, *m, *a, *n]: saturate(x * scale of the expert), from f32 math
data_t FP8 [*e, *a, *n, *m]: the transpose of each expert's
amax   f32[*e]: max |x|, of y too, of each expert; NaN or inf where it has one

stack: number of axes in e, 1 of stacked weights. slots: number of axes in a: one of 2 with y, none (0) without. split:
number of axes in m. dtype: the FP8 type, a jnp.dtype. Raises ValueError for other `slots`, TypeError for a y of another
type.
"""

quantize_stacked_block: Op = Op(
    "te_quantize_stacked_block",
    "x: e... m... m n... n, y?: e... m... m n... n "
    "-> data?: e... m... m a... n... n, data_t?: e... a... n... n m... m, "
    "block_inv?: e... m... m/128 a... n... n/128, block_inv_t?: e... a... n... n/128 m... m/128",
    replicated="a...",
    ranks={"e...": "stack", "a...": "slots", "m...": "lead"},
    sizes=_SLOTS,
    dtypes=lambda *operands, **attrs: _stacked_types("te_quantize_stacked_block", *operands, **attrs),
    reference=_stacked_block_reference,
    cuda=on_hopper("te_quantize_stacked_block"),
)
"""te_quantize_block of the weights of experts, in blocks of 128 x 128: x f32|bf16|f16 [*e, *m, m, *n, n], and y beside
it as in te_quantize_stacked -> the results of that name for each expert, with *e in front.

stack: number of axes in e. slots: as of te_quantize_stacked. lead: number of axes in *m. dtype, power_2, epsilon: those
of te_quantize_block. Raises as te_quantize_stacked; on CUDA, RuntimeError while it is lowered for a GPU that is not of
compute capability 9.0.
"""


def stacked_source(weight: jax.Array, beside: jax.Array | None = None, stack: int = 1, split: int = 1) -> Source:
    """weight [*E, *C, *F], with `stack` axes in E and `split` in C, with a scale, or blocks, of its own for each entry
    of E, such as an expert; no MXFP8. beside: an array alike; the tensor is then [*E, *C, 2, *F]."""
    of_stack, slots = dict(stack=stack, slots=int(beside is not None)), 1 if beside is None else 2
    ops = {
        0: (quantize_stacked, dict(of_stack, split=split)),
        BLOCK: (quantize_stacked_block, dict(of_stack, lead=split - 1)),
    }
    experts = PerExpert(
        lambda of_expert: jnp.expand_dims(of_expert, tuple(range(stack, weight.ndim + slots - 1))),
        lambda x: jnp.sum(x, tuple(range(stack, x.ndim))),
        jnp.full(weight.shape[:stack], float(max(slots * prod(weight.shape[stack:]), 1))),
    )
    elements = lambda: _side_by_side(weight, beside, stack + split)
    return Source(ops, (weight, beside), split, scales=weight.shape[:stack], elements=elements, experts=experts)


# -- activations ----------------------------------------------------------------------------------------------


def _biased(x, bias, expert, is_token):
    """f32 x [R, a, f] plus the bias [E, a, f] of each row's expert; zeros where there is no token, which all fused
    activations keep."""
    wide = x.astype(jnp.float32)
    return tokens_alone(wide if bias is None else wide + bias.astype(jnp.float32)[expert], is_token)


def _quantized(y, scale, expert, is_token, dtype):
    """FP8 y f32 [R, ...] times the scale of each row's expert, f32[E] or [1]; and its transpose."""
    if scale is None:
        return None, None
    each = scale[expert if scale.shape[0] > 1 else jnp.zeros_like(expert)]
    data = saturate(y * jnp.expand_dims(jnp.where(is_token, each, 0.0), tuple(range(1, y.ndim))), dtype)
    return data, transpose(data, 1)


def _grouped_fwd_reference(x, offsets, counts, bias, scale, *, dtype, **attrs):
    expert, is_token = expert_of_row(offsets, counts, x.shape[0])
    y, *_ = activation_fwd.reference(_biased(x, bias, expert, is_token), None, dtype=dtype, **attrs)
    amaxes = _amax_of_experts(y, offsets, counts)
    return y.astype(x.dtype), *_quantized(y, scale, expert, is_token, dtype), amaxes


def _grouped_bwd_reference(dy, x, offsets, counts, bias, scale, *, dtype, **attrs):
    expert, is_token = expert_of_row(offsets, counts, x.shape[0])
    wide = tokens_alone(dy, is_token).astype(jnp.float32), _biased(x, bias, expert, is_token)
    dx, *_ = activation_bwd.reference(*wide, None, dtype=dtype, **attrs)
    sums = _amax_of_experts(dx, offsets, counts), dbias_of_experts(dx, offsets, counts)
    return dx.astype(x.dtype), *_quantized(dx, scale, expert, is_token, dtype), *sums


def _grouped_block_fwd_reference(x, offsets, counts, bias, *, dtype, power_2, epsilon, **attrs):
    y, *_ = _grouped_fwd_reference(x, offsets, counts, bias, None, dtype=dtype, **attrs)
    return rows_reference(y, 0, dtype, power_2, epsilon)[:4]


def _grouped_block_bwd_reference(dy, x, offsets, counts, bias, *, dtype, power_2, epsilon, **attrs):
    dx, *_ = _grouped_bwd_reference(dy, x, offsets, counts, bias, None, dtype=dtype, **attrs)
    dbias = dbias_of_experts(dx.astype(jnp.float32), offsets, counts)
    return *rows_reference(dx, 0, dtype, power_2, epsilon)[:4], dbias


def _grouped_types(op: str, of_x: int, results: tuple):
    """The `dtypes` of the op of this name, whose operand of_x is x; of_dy, where there is one, before it. results: None
    stands for x's type, "fp8" for the FP8 type."""

    def types(*operands, dtype, **_):
        x, offsets, counts = operands[of_x : of_x + 3]
        if of_x:
            check_same_dtype(op, operands[0], x)
        check_groups(op, offsets, counts)
        named = {None: x, "fp8": fp8_type(op, dtype)}
        return tuple(named.get(each, each) for each in results)

    return types


def _grouped_cuda(reference, at, call, *operands, names, **attrs):
    """The kernel, but of a bias and of more than MOST_EXPERTS experts `reference`. at: of x among the operands."""
    x, _, counts, bias = operands[at : at + 4]
    if bias is not None or not 1 <= counts.shape[0] <= MOST_EXPERTS:
        return reference(*operands, names=names, **attrs)
    return call(*operands, kind=kind_of(x, names), **attrs)


def _grouped_block_cuda(reference, at, call, *operands, **attrs):
    """As `_grouped_cuda`; the kernel is Hopper's."""
    if extension.compute_capability() not in (None, HOPPER):
        return reference(*operands, **attrs)
    return _grouped_cuda(reference, at, call, *operands, **attrs)


def _grouped_workspace(*operands, outputs, **_):
    """Bytes of f32: for each 128 rows an amax of each strip of columns, and a sum of each column."""
    rows, slots, features = next(a.shape for a in operands if a.ndim == 3)
    _, strips = tiles(rows, features)
    of_band = (strips if "amax" in outputs else 0) + (slots * features if "dbias" in outputs else 0)
    return 4 * (rows // ALIGNMENT) * of_band


def check_groups(op: str, offsets: jax.Array, counts: jax.Array) -> None:
    """Raises TypeError, naming `op`, unless both types are int32."""
    for name, dtype in (("offsets", offsets), ("counts", counts)):
        if dtype != jnp.int32:
            raise TypeError(f"{op}: {name} is {dtype}; pass int32.")


activation_grouped_fwd: Op = Op(
    "te_activation_grouped_fwd",
    "x: r a f, offsets: o, counts: e, bias?: e a f, scale?: ~e -> y?: r f, data?: r f, data_t?: f r, amax?: e",
    replicated="r a o e",
    combine={"amax": "max"},
    dtypes=_grouped_types("te_activation_grouped_fwd", 0, (None, "fp8", "fp8", jnp.float32)),
    workspace=_grouped_workspace,
    reference=_grouped_fwd_reference,
    cuda=partial(_grouped_cuda, _grouped_fwd_reference, 0),
)
"""te_activation_fwd over the rows of groups: x f32|bf16|f16 [R, a, f], offsets i32[E + 1] and counts i32[E] of
`Groups`, bias [E, a, f], scale f32[E] or [1] (with FP8 results) -> as chosen by `outputs`:

y      [R, f] of x's type: the product over a of names[a]((x + bias of the row's expert)[..., a, :]), in f32 until here
data   FP8 [R, f], data_t FP8 [f, R]: the f32 y, times the scale of the row's expert, saturated
amax   f32[E]: max |f32 y| of each expert, 0 without tokens

All are 0 in rows that pad a group; on CUDA the tail is what the memory held. Attributes: those of te_activation_fwd. A
call with a bias is XLA's, for no layer has one.
"""

activation_grouped_bwd: Op = Op(
    "te_activation_grouped_bwd",
    "dy: r f, x: r a f, offsets: o, counts: e, bias?: e a f, scale?: ~e "
    "-> dx?: r a f, data?: r a f, data_t?: a f r, amax?: e, dbias?: e a f",
    replicated="r a o e",
    combine={"amax": "max"},
    dtypes=_grouped_types("te_activation_grouped_bwd", 1, (None, "fp8", "fp8", jnp.float32, jnp.float32)),
    workspace=_grouped_workspace,
    reference=_grouped_bwd_reference,
    cuda=partial(_grouped_cuda, _grouped_bwd_reference, 1),
)
"""The backward pass of te_activation_grouped_fwd: dy [R, f] of x's type and its operands -> as chosen:

dx     [R, a, f] of x's type: dy times the derivative by x, in f32 until here
data   FP8 [R, a, f], data_t FP8 [a, f, R]: the f32 dx, times the scale of the row's expert, saturated
amax   f32[E]: max |f32 dx| of each expert, 0 without tokens
dbias  f32[E, a, f]: the sum of the f32 dx over the rows of each expert, for the bias gradient

dx, data and data_t are 0 in rows that pad a group, and in the tail as of te_activation_grouped_fwd.
"""

activation_grouped_block_fwd: Op = Op(
    "te_activation_grouped_block_fwd",
    "x: r a f, offsets: o, counts: e, bias?: e a f "
    "-> data?: r f, data_t?: f r, scale_inv?: f/128 r, scale_inv_t?: r/128 f",
    replicated="r a o e",
    dtypes=_grouped_types("te_activation_grouped_block_fwd", 0, ("fp8", "fp8", jnp.float32, jnp.float32)),
    reference=_grouped_block_fwd_reference,
    cuda=partial(_grouped_block_cuda, _grouped_block_fwd_reference, 0),
)
"""te_quantize_block, in blocks of 1 x 128, of what te_activation_grouped_fwd makes of its operands in x's type: data,
data_t, scale_inv and scale_inv_t of y [R, f], as chosen by `outputs`. A block holds rows of one expert.

Attributes: those of te_activation_block_fwd.
"""

activation_grouped_block_bwd: Op = Op(
    "te_activation_grouped_block_bwd",
    "dy: r f, x: r a f, offsets: o, counts: e, bias?: e a f "
    "-> data?: r a f, data_t?: a f r, scale_inv?: a f/128 r, scale_inv_t?: r/128 a f, dbias?: e a f",
    replicated="r a o e",
    dtypes=_grouped_types("te_activation_grouped_block_bwd", 1, ("fp8", "fp8", *(jnp.float32,) * 3)),
    workspace=_grouped_workspace,
    reference=_grouped_block_bwd_reference,
    cuda=partial(_grouped_block_cuda, _grouped_block_bwd_reference, 1),
)
"""te_quantize_block, in blocks of 1 x 128, of the gradient that te_activation_grouped_bwd makes of its operands in x's
type: data, data_t, scale_inv and scale_inv_t of dx [R, a, f], and

dbias  f32[E, a, f]: the sum over the rows of each expert of dx in x's type, for the bias gradient
"""


def grouped_activation_source(x: jax.Array, groups: Groups, attrs: dict[str, Any]) -> Source:
    """act(x) [R, f] of x [R, a, f], with a scale of its own for each expert. attrs: of `activation.attributes`."""
    ops = {0: (activation_grouped_fwd, attrs), BLOCK: (activation_grouped_block_fwd, attrs)}
    operands = x, groups.offsets, groups.counts, None
    return Source(ops, operands, 1, "y", groups.counts.shape, experts=_experts_of_rows(groups, x.shape[2:]))


def grouped_activation_grad_source(dy: jax.Array, x: jax.Array, groups: Groups, attrs: dict[str, Any]) -> Source:
    """The gradient [R, a, f] of x from dy [R, f], the gradient of act(x), with a scale of its own for each expert."""
    ops = {0: (activation_grouped_bwd, attrs), BLOCK: (activation_grouped_block_bwd, attrs)}
    operands = dy, x, groups.offsets, groups.counts, None
    return Source(ops, operands, 1, "dx", groups.counts.shape, experts=_experts_of_rows(groups, x.shape[1:]))


def _experts_of_rows(groups: Groups, row: tuple[int, ...]) -> PerExpert:
    """Of elements [R, *row], zeros in the rows that pad a group. The tail is left out."""

    def spread(of_expert):
        expert, _ = expert_of_row(groups.offsets, groups.counts, groups.slots.shape[0])
        return jnp.expand_dims(jnp.asarray(of_expert)[expert], tuple(range(1, 1 + len(row))))

    def total(x):
        sums = dbias_of_experts(x, groups.offsets, groups.counts)
        return jnp.sum(sums, tuple(range(1, sums.ndim)))

    return PerExpert(spread, total, jnp.maximum(groups.counts.astype(jnp.float32) * prod(row), 1.0))
