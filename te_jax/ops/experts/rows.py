"""What an MLP of experts quantizes between its grouped products: the activation and its gradient over the rows of
groups (`te_jax.ops.permute.Groups`), each with a scale and an amax for every expert.

The rows that pad a group, and the rows of the tail, may hold anything: every result takes them for zeros. A
kernel leaves the tail of a result as it was.
"""

from collections.abc import Callable, Sequence
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
from te_jax.ops.formats import ScaleFormat
from te_jax.ops.producers import Owners, Producer, declare_all, tiles
from te_jax.ops.quantize.activation import activate, activation_gradient, check_same_dtype, kind_of
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


def only_tokens(x: jax.Array, is_token: jax.Array, axis: int = 0) -> jax.Array:
    """x with zeros instead of rows that are no tokens. axis: the axis of rows."""
    return jnp.where(jnp.expand_dims(is_token, [i for i in range(x.ndim) if i != axis]), x, jnp.zeros((), x.dtype))


def sum_of_experts(
    term: Callable[..., jax.Array],
    tiles: Sequence[jax.Array],
    experts: jax.Array,
    shape: tuple[int, ...],
    spec: PartitionSpec | None = None,
) -> jax.Array:
    """f32[shape], for each of shape[0] experts the sum of term(*tile) over its tiles, in their order.

    term: what a tile adds, f32[shape[1:]]. tiles: arrays with the tiles in front. experts: i32, of each tile; what is
    not below shape[0] is left out. spec: of the result, on an Explicit mesh.
    """

    def add(sums, tile):
        expert, *tile = tile
        at = jnp.minimum(expert, shape[0] - 1)  # not a scatter, which Explicit axes refuse
        total = lax.dynamic_index_in_dim(sums, at, 0, False) + term(*tile)
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


# -- activations ----------------------------------------------------------------------------------------------


def _biased(x, bias, expert, is_token):
    """f32 x [R, a, f] plus the bias [E, a, f] of each row's expert; zeros where there is no token, which all fused
    activations keep."""
    x = x.astype(jnp.float32)
    return only_tokens(x if bias is None else x + bias.astype(jnp.float32)[expert], is_token)


def _grouped_cuda(op, form: ScaleFormat, reference):
    """The kernel; of a bias, of more than MOST_EXPERTS experts, and of blocks on GPUs that do not multiply them,
    `reference`."""

    def run(call, *operands, names, **attrs):
        at = next(i for i, a in enumerate(operands) if a is not None and a.ndim == 3)
        x, _, counts, bias = operands[at : at + 4]
        capability = extension.compute_capability()
        no_products = capability is not None and form.refuses(str(capability))
        if no_products or bias is not None or not 1 <= counts.shape[0] <= MOST_EXPERTS:
            return reference(*operands, names=names, **attrs)
        return call(*operands, kind=kind_of(x, names), **attrs)

    return run


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


def _activated_rows(x, offsets, counts, bias, **attrs):
    return activate(_biased(x, bias, *expert_of_row(offsets, counts, x.shape[0])), **attrs)


def _gradient_of_rows(dy, x, offsets, counts, bias, **attrs):
    expert, is_token = expert_of_row(offsets, counts, x.shape[0])
    return activation_gradient(only_tokens(dy, is_token), _biased(x, bias, expert, is_token), **attrs)


def _owners(x, offsets, counts, *_):
    """How numbers of experts meet the rows of groups, whose padding has zeros."""
    expert, is_token = expert_of_row(offsets, counts, x.shape[0])

    def spread(scale, axes):
        each = scale[expert if scale.shape[0] > 1 else jnp.zeros_like(expert)]
        return jnp.expand_dims(jnp.where(is_token, each, 0.0), tuple(range(1, axes)))

    of_groups = offsets, counts
    return Owners(spread, lambda y: _amax_of_experts(y, *of_groups), lambda y: dbias_of_experts(y, *of_groups))


def _check_types_of_groups(op, x, offsets, counts, *types, **attrs):
    check_groups(op, offsets, counts)


def _check_types_of_gradient(op, dy, x, offsets, counts, *types, **attrs):
    check_same_dtype(op, dy, x)
    check_groups(op, offsets, counts)


_ON_ONE_DEVICE = dict(replicated="r a o e")

GROUPED_ACTIVATION = Producer(
    name="te_activation_grouped{}_fwd",
    operands="x: r a f, offsets: o, counts: e, bias?: e a f",
    rows="r",
    columns="f",
    value=_activated_rows,
    split=lambda y, **_: (0, 1),
    tensor="y",
    each="e",
    owners=_owners,
    check=_check_types_of_groups,
    op=_ON_ONE_DEVICE,
    kernels={"": dict(workspace=_grouped_workspace, cuda=_grouped_cuda), "_block": dict(cuda=_grouped_cuda)},
)
activation_grouped_fwd: Op
activation_grouped_block_fwd: Op
activation_grouped_fwd, activation_grouped_block_fwd = declare_all(GROUPED_ACTIVATION)[:2]
"""te_activation_fwd over the rows of groups: x f32|bf16|f16 [R, a, f], offsets i32[E + 1] and counts i32[E] of
`Groups`, bias [E, a, f], scale f32[E] or [1] (with FP8 results) -> y [R, f], the product over a of
names[a]((x + bias of the row's expert)[..., a, :]), data, data_t, .. as `te_jax.ops.producers` says, but with

amax   f32[E]: max |f32 y| of each expert, 0 without tokens

All are 0 in rows that pad a group; on CUDA the tail is what the memory held. A block holds rows of one expert.
The attributes are as of te_activation_fwd. XLA computes a call with a bias, for no layer has one.
"""

GROUPED_ACTIVATION_GRAD = Producer(
    name="te_activation_grouped{}_bwd",
    operands="dy: r f, x: r a f, offsets: o, counts: e, bias?: e a f",
    rows="r",
    columns="a f",
    value=_gradient_of_rows,
    split=lambda y, **_: (0, 1),
    tensor="dx",
    each="e",
    owners=lambda dy, *operands: _owners(*operands),
    dbias=True,
    check=_check_types_of_gradient,
    op=_ON_ONE_DEVICE,
    kernels=dict.fromkeys(("", "_block"), dict(workspace=_grouped_workspace, cuda=_grouped_cuda)),
)
activation_grouped_bwd: Op
activation_grouped_block_bwd: Op
activation_grouped_bwd, activation_grouped_block_bwd = declare_all(GROUPED_ACTIVATION_GRAD)[:2]
"""The backward pass of te_activation_grouped_fwd: dy [R, f] of x's type and its operands -> dx [R, a, f], dy times the
derivative by x, data, data_t, .. as `te_jax.ops.producers` says, but with

amax   f32[E]: max |f32 dx| of each expert, 0 without tokens
dbias  f32[E, a, f]: the sum over the rows of each expert

dx, data and data_t are 0 in rows that pad a group, and in the tail as of te_activation_grouped_fwd.
"""


def grouped_activation_source(x: jax.Array, groups: Groups, attrs: dict[str, Any]) -> Source:
    """act(x) [R, f] of x [R, a, f], with a scale of its own for each expert. attrs: of `activation.attributes`."""
    operands, scales = (x, groups.offsets, groups.counts, None), groups.counts.shape
    return Source(GROUPED_ACTIVATION, attrs, operands, 1, scales, experts=_experts_of_rows(groups, x.shape[2:]))


def grouped_activation_grad_source(dy: jax.Array, x: jax.Array, groups: Groups, attrs: dict[str, Any]) -> Source:
    """The gradient [R, a, f] of x from dy [R, f], the gradient of act(x), with a scale of its own for each expert."""
    operands, scales = (dy, x, groups.offsets, groups.counts, None), groups.counts.shape
    return Source(GROUPED_ACTIVATION_GRAD, attrs, operands, 1, scales, experts=_experts_of_rows(groups, x.shape[1:]))


def _experts_of_rows(groups: Groups, row: tuple[int, ...]) -> PerExpert:
    """Of elements [R, *row], zeros in the rows that pad a group. The tail is left out."""

    def spread(of_expert):
        expert, _ = expert_of_row(groups.offsets, groups.counts, groups.slots.shape[0])
        return jnp.expand_dims(jnp.asarray(of_expert)[expert], tuple(range(1, 1 + len(row))))

    def total(x):
        sums = dbias_of_experts(x, groups.offsets, groups.counts)
        return jnp.sum(sums, tuple(range(1, sums.ndim)))

    return PerExpert(spread, total, groups.counts.astype(jnp.float32) * prod(row))
