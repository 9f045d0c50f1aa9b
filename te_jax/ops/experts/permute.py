"""Tokens in the order of their experts and back.

`group` finds where each pair of a token and an expert lies in a buffer, `permute` gathers the tokens there, and
`combine` adds up the rows of each token. The buffer has R rows, a number that is known while tracing. The rows of an
expert are a run, its group, that starts at a multiple of 128. Behind the real rows of a group lie rows that pad it up
to 128: they are zeros. What lies behind the last group, the tail, is computed and read by nobody: on CUDA its bytes
are what the memory held.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.core import max_dim, min_dim

from te_jax.core.arrays import as_jax
from te_jax.core.check import FLOATS_ARRAY, INTEGERS, check, integer
from te_jax.core.derivatives import custom_vjp
from te_jax.core.op import Op
from te_jax.core.types import align, like
from te_jax.ops.experts.router import MOST_EXPERTS
from te_jax.ops.formats import ROWS_128, ceil_div, spread
from te_jax.ops.producers import Producer, declare_all, on_its_gpu
from te_jax.ops.quantize.array import FLOAT
from te_jax.ops.source import Source

_PERMUTE = "te_jax.ops.permute"
ALIGNMENT = 128  # of the first rows of groups; csrc/experts/permute.cu has it too
_CHUNK = 2048  # pairs of a CTA of te_group


class Groups(NamedTuple):
    """Where the pairs of a token and an expert lie in a buffer of R rows; R is `buffer_rows` of the T k pairs.

    offsets: i32[E + 1]. The group of expert e is the rows from offsets[e] to offsets[e + 1], multiples of 128.
    counts:  i32[E]. Of these, the first counts[e] belong to pairs, in the order of the pairs; the others pad.
    rows:    i32[..., T, k]. The row of each pair; -1 of a pair whose expert is none of 0 to E - 1.
    slots:   i32[R]. The pair t * k + j of each row, and -1 where there is none.
    """

    offsets: jax.Array
    counts: jax.Array
    rows: jax.Array
    slots: jax.Array


def buffer_rows(pairs: int, num_experts: int) -> int:
    """R: enough rows for `pairs` pairs of a token and an expert, however they spread over the experts."""
    return ceil_div(pairs + (ALIGNMENT - 1) * min_dim(num_experts, pairs), ALIGNMENT) * ALIGNMENT


def group(experts: jax.Array, num_experts: int) -> Groups:
    """Where each pair of a token and an expert lies in the buffer.

    experts:     integers [..., T, k], as `te_jax.ops.router.route` gives them. A pair whose expert is none of 0 to
                 E - 1 gets no row: `permute` leaves it out, and it adds 0 in `combine`.
    num_experts: E.

    Raises ValueError or TypeError for arguments that do not fit.
    """
    (experts,) = as_jax(experts)
    check(_PERMUTE, "experts", experts, INTEGERS)
    check(_PERMUTE, "num_experts", num_experts, integer(1))
    if experts.ndim < 1 or experts.shape[-1] < 1:
        raise ValueError(f"{_PERMUTE}: experts has shape {experts.shape}; pass [..., T, k] with k of 1 or more.")
    buffer = buffer_rows(experts.size, num_experts)
    if isinstance(buffer, int) and buffer >= 2**31:  # a symbol of `jax.export` is checked where the kernel is called
        raise ValueError(f"{_PERMUTE}: experts has shape {experts.shape}; pass fewer than 2**31 - {ALIGNMENT} E pairs.")
    return Groups(*group_op(experts.astype(jnp.int32), num_experts=num_experts, buffer=buffer))


def permute(x: jax.Array, groups: Groups) -> jax.Array:
    """The rows of tokens in the order of their experts, once for each pair: [R, h] of x's type; differentiable in x.

    x:      float32, bfloat16 or float16 [..., T, h]. groups: of `group`, for experts [..., T, k].

    For FP8 there is `permute_source`. Raises ValueError or TypeError for arguments that do not fit.
    """
    x, groups = _check_tokens("x", x, groups)
    x, groups = align(x, groups)
    return _permute(x, groups, jax.typeof(x))


def permute_fp8_source(
    x: jax.Array, groups: Groups, scales: jax.Array | None = None, weights: jax.Array | None = None
) -> Source:
    """As `permute_source`, of x in E4M3 times scales f32[h/128, ..., T]: a tensor in bf16."""
    return Source(
        PERMUTE_FP8, dict(topk=groups.rows.shape[-1]), (x, scales, groups.slots, groups.offsets, weights, None), 1
    )


def permute_source(x: jax.Array, groups: Groups, weights: jax.Array | None = None) -> Source:
    """What `permute` gives, as layers quantize it where the rows are gathered. weights: f32[..., T, k], what each
    pair's row is multiplied by before it is rounded: the gradient of `combine`'s rows, where x is its result's."""
    x, groups = _check_tokens("x", x, groups)
    if weights is not None:
        weights = _check_weights(weights, groups)
    return Source(PERMUTE, dict(topk=groups.rows.shape[-1]), (x, groups.slots, groups.offsets, weights), 1)


def combine(rows: jax.Array, groups: Groups, weights: jax.Array) -> jax.Array:
    """Each token's sum of its rows times their weights: [..., T, h] of the type of `rows`; differentiable in both.

    rows:    float32, bfloat16 or float16 [R, h]. groups: of `group`. weights: floating [..., T, k], used in f32.

    The sums are f32, in the order of the k choices. The gradient of `rows` is 0 in the rows that pad a group. Behind
    the last group it is undefined, as `rows` is there: mask those rows (`row < groups.offsets[-1]`) before an operation
    whose gradient adds up all rows. Raises ValueError or TypeError for arguments that do not fit.
    """
    (rows,) = as_jax(rows)
    check(_PERMUTE, "rows", rows, FLOAT)
    _check_groups(groups)
    if rows.ndim != 2 or rows.shape[0] != groups.slots.shape[0]:
        raise ValueError(
            f"{_PERMUTE}: rows has shape {rows.shape}; pass [{groups.slots.shape[0]}, h], a row for each slot."
        )
    weights = _check_weights(weights, groups)
    return _combine(*align(rows, groups, weights))


# ---- the arguments -------------------------------------------------------------------------------------------------


def _check_groups(groups):
    if not isinstance(groups, Groups):
        raise TypeError(
            f"{_PERMUTE}: groups is {type(groups).__name__}; pass the Groups that te_jax.ops.permute.group gives."
        )


def _check_tokens(name, x, groups):
    (x,) = as_jax(x)
    check(_PERMUTE, name, x, FLOAT)
    _check_groups(groups)
    if x.ndim < 1 or x.shape[:-1] != groups.rows.shape[:-1]:
        tokens = ", ".join(map(str, groups.rows.shape[:-1]))
        raise ValueError(f"{_PERMUTE}: {name} has shape {x.shape}; pass [{tokens}, h], a row for each token of groups.")
    return x, groups


def _check_weights(weights, groups):
    (weights,) = as_jax(weights)
    check(_PERMUTE, "weights", weights, FLOATS_ARRAY)
    if weights.shape != groups.rows.shape:
        raise ValueError(
            f"{_PERMUTE}: weights has shape {weights.shape}; pass {groups.rows.shape}, one for each pair of groups."
        )
    return weights.astype(jnp.float32)


# ---- the meaning, in plain JAX -------------------------------------------------------------------------------------


def _group_reference(experts, *, num_experts, buffer):
    flat = experts.reshape(-1)
    flat = jnp.where((flat >= 0) & (flat < num_experts), flat, num_experts)
    counts = jnp.zeros(num_experts, jnp.int32).at[flat].add(1, mode="drop")
    ends = jnp.cumsum(ceil_div(counts, ALIGNMENT) * ALIGNMENT, dtype=jnp.int32)
    offsets = jnp.concatenate([jnp.zeros(1, jnp.int32), ends])
    # In the order of experts the n-th pair lies n rows behind the first, and behind the rows that pad before it.
    order = jnp.argsort(flat, stable=True).astype(jnp.int32)
    padding = jnp.append(offsets[:-1] - (jnp.cumsum(counts, dtype=jnp.int32) - counts), 0)
    sorted_experts = flat[order]
    each = jnp.where(sorted_experts < num_experts, jnp.arange(flat.size, dtype=jnp.int32) + padding[sorted_experts], -1)
    rows = jnp.zeros(flat.size, jnp.int32).at[order].set(each)
    slots = jnp.full(buffer, -1, jnp.int32).at[jnp.where(each < 0, buffer, each)].set(order, mode="drop")
    return offsets, counts, rows.reshape(experts.shape), slots


def _rows_of_slots(x, slots, offsets, weights, *, topk):
    """f32[r, h]: the token of each slot, times the pair's weight; zeros where there is none."""
    is_pair = slots >= 0
    if x.size == 0:
        return jnp.zeros((slots.size, x.shape[-1]), jnp.float32), {}
    pairs = jnp.where(is_pair, slots, 0)
    rows = x.reshape(-1, x.shape[-1])[pairs // topk].astype(jnp.float32)
    if weights is not None:
        rows = rows * weights.reshape(-1)[pairs][:, None]
    return jnp.where(is_pair[:, None], rows, 0.0), {}


def _rows_of_fp8(x, scales, slots, offsets, weights, addresses, *, topk):
    """As `_rows_of_slots`, of numbers in E4M3 times their blocks' scales."""
    _refuse_addresses("te_permute_fp8", addresses)
    rows, _ = _rows_of_slots(x, slots, offsets, None, topk=topk)
    if x.size == 0 or (scales is None and weights is None):
        return rows, {}
    pairs, factors = jnp.maximum(slots, 0), jnp.ones((), jnp.float32)
    if weights is not None:
        factors = weights.reshape(-1)[pairs][:, None]
    if scales is not None:
        of_tokens = scales.reshape(scales.shape[0], -1).T[pairs // topk]
        factors = spread(of_tokens, 1, x.shape[-1], ROWS_128.block) * factors
    return jnp.where((slots >= 0)[:, None], rows * factors, 0.0), {}


def _refuse_addresses(op, addresses):
    if addresses is not None:
        raise NotImplementedError(f"{op}: addresses of other devices' memory are read by CUDA kernels only.")


def _rows_of_pairs(rows, positions):
    """f32[m..., k, h]: the row of each pair; zeros where it has none."""
    if rows.shape[0] == 0:
        return jnp.zeros((*positions.shape, rows.shape[1]), jnp.float32)
    each = rows[jnp.maximum(positions, 0)].astype(jnp.float32)
    return jnp.where((positions >= 0)[..., None], each, 0.0)


def _combine_reference(rows, positions, weights, addresses):
    _refuse_addresses("te_combine", addresses)
    each = _rows_of_pairs(rows, positions)
    if weights is not None:
        each = jnp.where((positions >= 0)[..., None], each * weights[..., None], 0.0)
    return (jnp.sum(each, -2).astype(rows.dtype),)


def _combine_bwd_reference(dy, rows, positions, scales):
    dy = dy.astype(jnp.float32)
    if scales is not None:
        dy = dy * jnp.moveaxis(spread(scales, 0, dy.shape[-1], ROWS_128.block), 0, -1)
    products = jnp.expand_dims(dy, -2) * _rows_of_pairs(rows, positions)
    return (jnp.where(positions >= 0, jnp.sum(products, -1), 0.0),)


# ---- the ops -------------------------------------------------------------------------------------------------------


def _check_fp8(op, x, *_, **__):
    if x != jnp.float8_e4m3fn:
        raise TypeError(f"{op}: x is {x}; pass float8_e4m3fn.")


def _group_cuda(call, experts, *, num_experts, buffer):
    if num_experts > MOST_EXPERTS or not isinstance(buffer, int):
        return _group_reference(experts, num_experts=num_experts, buffer=buffer)
    return call(experts, num_experts=num_experts, buffer=buffer)


def _group_workspace(experts, *, num_experts, **_):
    return 4 * num_experts * max_dim(1, ceil_div(experts.size, _CHUNK))


group_op: Op = Op(
    "te_group",
    "experts: m... k -> offsets: f, counts: e, rows: m... k, slots: r",
    replicated="m... k f e r",
    sizes={
        "f": lambda num_experts, **_: num_experts + 1,
        "e": lambda num_experts, **_: num_experts,
        "r": lambda buffer, **_: buffer,
    },
    fenced="offsets counts rows slots",
    dtypes=lambda *_, **attrs: (jnp.int32,) * 4,
    workspace=_group_workspace,
    reference=_group_reference,
    cuda=_group_cuda,
)
"""`group` of i32 experts; buffer: R. All of it stays on one device: a pair's row depends on all pairs. XLA
computes a call with a symbolic buffer (`jax.export`), which is no attribute of a kernel."""

PERMUTE = Producer(
    name="te_permute{}",
    operands="x: m... h, slots: r, offsets: f, weights?: m... k",
    rows="r",
    columns="h",
    value=_rows_of_slots,
    split=lambda y, **_: (0, 1),
    tensor="rows",
    matrix=lambda x, slots, *_, **__: (1, slots[0], x[-1]),
    op=dict(replicated="m... k f r"),
    kernels={"": dict(fenced="rows"), "_block": dict(cuda=on_its_gpu)},
)
permute_op: Op
permute_block_op: Op
permute_op, permute_block_op = declare_all(PERMUTE)[:2]
"""x f32|bf16|f16 [*m, h], slots i32[r] and offsets i32[f] of `Groups`, weights f32[*m, k], scale f32[] (with FP8
results) -> rows [r, h], the row of x of each slot, times the pair's weight, data, data_t, .. as `te_jax.ops.producers`
says. No block has rows of two groups.

Rows that pad a group are 0, and the tail is undefined (on a CPU 0); neither enters amax. topk: k. The rows of the
buffer are of tokens from anywhere, so devices share only h.
"""

PERMUTE_FP8 = Producer(
    name="te_permute_fp8{}",
    operands="x: m... h, scales?: h/128 m..., slots: r, offsets: f, weights?: m... k, addresses?: d c",
    rows="r",
    columns="h",
    value=_rows_of_fp8,
    split=lambda y, **_: (0, 1),
    tensor="rows",
    type=jnp.dtype(jnp.bfloat16),
    check=_check_fp8,
    matrix=lambda x, scales, slots, *_, **__: (1, slots[0], x[-1]),
    op=dict(replicated="m... k f r d c"),
    kernels={"": dict(fenced="rows"), "_block": dict(cuda=on_its_gpu)},
)
permute_fp8_op: Op
permute_fp8_block_op: Op
permute_fp8_op, permute_fp8_block_op = declare_all(PERMUTE_FP8)[:2]
"""x E4M3 [*m, h], scales f32[h/128, *m] that it is multiplied by, slots, offsets, weights and scale as of `permute_op`
-> as of `permute_op`, of a tensor in bf16.

addresses: u32[d, 2] of `te_jax.ops.experts.peers`, without scales and weights: x of device i has the tokens from i m
on.
"""

combine_op: Op = Op(
    "te_combine",
    "rows: r h, positions: m... k, weights?: m... k, addresses?: d c -> y: m... h",
    replicated="r k d c",
    fenced="y",
    dtypes=lambda rows, *_, **attrs: (rows,),
    reference=_combine_reference,
)
"""rows f32|bf16|f16 [r, h], positions i32[*m, k] (`Groups.rows`), weights f32[*m, k] -> y [*m, h] of the type of rows:
`combine`; without weights the sum of a token's rows.

addresses: u32[d, 2] of `te_jax.ops.experts.peers`: position i r + j is row j of device i.
"""

combine_bwd_op: Op = Op(
    "te_combine_bwd",
    "dy: m... h, rows: r h, positions: m... k, scales?: h/128 m... -> dweights: m... k",
    replicated="r k",
    combine={"dweights": "sum"},
    dtypes=lambda *_, **attrs: (jnp.float32,),
    reference=_combine_bwd_reference,
)
"""dy [*m, h] and rows [r, h] of one type, positions i32[*m, k] -> dweights f32[*m, k]: the gradient of the weights. Or
dy in E4M3, times scales f32[h/128, *m], and rows in bf16."""


def _permuted(x, groups: Groups, weights=None):
    attrs = dict(topk=groups.rows.shape[-1], dtype=jnp.dtype(jnp.float8_e4m3fn))  # no result has this type
    return permute_op(x, groups.slots, groups.offsets, weights, None, outputs=("rows",), **attrs)[0]


@custom_vjp(2)
def _permute(x, groups, aval):
    return _permuted(x, groups)


def _permute_fwd(x, groups, aval):
    return _permuted(x, groups), groups


def _permute_bwd(aval, groups, drows):
    (dx,) = combine_op(drows, groups.rows, None, None)
    return like(dx, aval), None


_permute.defvjp(_permute_fwd, _permute_bwd)


@custom_vjp()
def _combine(rows, groups, weights):
    return combine_op(rows, groups.rows, weights, None)[0]


def _combine_fwd(rows, groups, weights):
    return _combine(rows, groups, weights), (rows, groups, weights)


def _combine_bwd(saved, dy):
    rows, groups, weights = saved
    drows = _permuted(dy, groups, weights)
    (dweights,) = combine_bwd_op(dy, rows, groups.rows, None)
    return like(drows, rows), None, like(dweights, weights)


_combine.defvjp(_combine_fwd, _combine_bwd)
