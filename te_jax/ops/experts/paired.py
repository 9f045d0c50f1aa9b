"""FP8 of both layouts in one array of 16-bit numbers: the gradient of an activation's input [R, a, f] takes the
memory of that input, which is as many bytes, and grouped products read it there. So the largest tensor of a layer of
experts takes no memory of its own.

A square is 128 rows by 128 columns of a slot. Line i of a square has 256 bytes: the FP8 of its row i, then of its
column i. Groups begin at multiples of 128 rows, so a square is of one expert, and a line of either kind is what the
tensor cores read along the contracted axis.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from te_jax.core.check import check, integer
from te_jax.core.op import Op
from te_jax.core.policies import GEMM, with_names
from te_jax.ops.experts.permute import ALIGNMENT, Groups
from te_jax.ops.experts.router import MOST_EXPERTS
from te_jax.ops.experts.rows import activation_grouped_bwd, check_groups, grouped_activation_grad_source
from te_jax.ops.formats import fill, fp8_type
from te_jax.ops.gemm.dense import ONE_SCALE, check_factors
from te_jax.ops.gemm.grouped import (
    OUT_COLUMNS,
    check_arrays,
    declare_grouped,
    gemm_grouped_op,
    gemm_grouped_wgrad_op,
    product_options,
)
from te_jax.ops.quantize.activation import check_same_dtype, kind_of
from te_jax.ops.source import Source

_PAIRED_BWD_OP = "te_activation_grouped_paired_bwd"
_PAIRED_OP, _PAIRED_WGRAD_OP = "te_gemm_grouped_paired", "te_gemm_grouped_paired_wgrad"
_SIDE = ALIGNMENT  # of squares: none has rows of two experts
_HALVES = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16)


def is_pairable(x: jax.Array, counts: jax.Array) -> bool:
    """Whether x [R, a, f], of counts.size experts, is as many bytes as FP8 in both layouts, and whole squares that
    kernels take."""
    sizes = x.shape[0], x.shape[-1]
    return x.dtype in _HALVES and not any(size % _SIDE for size in sizes) and counts.size <= MOST_EXPERTS


def in_squares(x: jax.Array) -> jax.Array:
    """[..., f] -> [..., f / 128, 128]. Raises ValueError unless f is a multiple of 128."""
    if x.shape[-1] % _SIDE:
        raise ValueError(
            f"te_jax.ops.experts.paired: an array has the shape {x.shape}; pass a multiple of {_SIDE} columns."
        )
    return x.reshape(*x.shape[:-1], x.shape[-1] // _SIDE, _SIDE)


def pair(data: jax.Array, dtype: DTypeLike) -> jax.Array:
    """FP8 data [R, a, f] -> both layouts as numbers of the 16-bit type `dtype`, [R, a, f / 128, 128].

    Raises ValueError unless R and f are multiples of 128.
    """
    if data.shape[0] % _SIDE:
        raise ValueError(
            f"te_jax.ops.experts.paired: data has the shape {data.shape}; pass a multiple of {_SIDE} rows."
        )
    # Bytes are moved, since XLA:CPU moves FP8 by way of another type, where a NaN becomes another one.
    squares = in_squares(lax.bitcast_convert_type(data, jnp.uint8))
    shape = squares.shape
    squares = squares.reshape(shape[0] // _SIDE, _SIDE, *shape[1:])
    both = jnp.stack((squares, squares.swapaxes(1, 4)), 4)
    return lax.bitcast_convert_type(both.reshape(*shape, 2), dtype)


def _halves(paired):
    """The bytes of rows, and of columns, [R, a, f / 128, 128] both."""
    halves = lax.bitcast_convert_type(paired, jnp.uint8).reshape(*paired.shape[:3], 2, _SIDE)
    return halves[:, :, :, 0], halves[:, :, :, 1]


def rows_of(paired: jax.Array, dtype: DTypeLike) -> jax.Array:
    """The data [R, a, f] of FP8 type `dtype` that `pair` was given."""
    return lax.bitcast_convert_type(_halves(paired)[0].reshape(*paired.shape[:2], -1), dtype)


def columns_of(paired: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Its transpose [a, f, R]."""
    rows, slots, squares, _ = paired.shape
    lines = _halves(paired)[1].reshape(rows // _SIDE, _SIDE, slots, squares, _SIDE)
    return lax.bitcast_convert_type(lines.transpose(2, 3, 1, 0, 4).reshape(slots, squares * _SIDE, rows), dtype)


def _check_paired(op: str, name: str, dtype):
    """Raises TypeError, naming `op`, unless dtype has 16 bits."""
    if dtype not in _HALVES:
        raise TypeError(f"{op}: {name} is {dtype}; pass bf16 or f16, whose bytes are FP8 of both layouts.")


def _types_of_bytes(dtype) -> dict[str, Any]:
    """The FP8 type for the reference, and for a handler, which cannot read it off the array."""
    return dict(dtype=dtype, e5m2=dtype == jnp.float8_e5m2)


# -- the gradient of an activation ------------------------------------------------------------------------------------


def _paired_bwd_types(dy, x, offsets, counts, *_, dtype, **attrs):
    check_same_dtype(_PAIRED_BWD_OP, dy, x)
    _check_paired(_PAIRED_BWD_OP, "x", x)
    check_groups(_PAIRED_BWD_OP, offsets, counts)
    fp8_type(_PAIRED_BWD_OP, dtype)
    return x, jnp.float32


def _flat(dy, x):
    """x [R, a, f]. Raises ValueError where dy has other columns."""
    rows, slots, squares, size = x.shape
    if (size, squares * _SIDE) != (_SIDE, dy.shape[-1]):
        raise ValueError(
            f"{_PAIRED_BWD_OP}: x has the shape {x.shape}, dy {dy.shape}; pass [R, a, f / {_SIDE}, {_SIDE}] and [R, f]."
        )
    return x.reshape(rows, slots, squares * _SIDE)


def _paired_bwd_reference(dy, x, offsets, counts, scale, **attrs):
    _, data, _, amax, _ = activation_grouped_bwd.reference(dy, _flat(dy, x), offsets, counts, None, scale, **attrs)
    return pair(data, x.dtype), amax


def _paired_bwd_cuda(call, dy, x, offsets, counts, scale, *, names, dtype, **attrs):
    """The kernel, which writes over x, but of what it does not take `_paired_bwd_reference`."""
    flat = _flat(dy, x)
    if not 1 <= counts.shape[0] <= MOST_EXPERTS or 0 in x.shape:
        return _paired_bwd_reference(dy, x, offsets, counts, scale, names=names, dtype=dtype, **attrs)
    options = dict(attrs, kind=kind_of(flat, names), in_place={"x": "paired"}, **_types_of_bytes(dtype))
    return call(dy, x, offsets, counts, scale, **options)


def _paired_bwd_workspace(dy, x, *_, outputs, **attrs):
    """Bytes of an f32 for each square, of all slots."""
    return 4 * (x.shape[0] // _SIDE) * x.shape[2] if "amax" in outputs else 0


activation_grouped_paired_bwd: Op = Op(
    _PAIRED_BWD_OP,
    "dy: r f, x: r a f/128 p, offsets: o, counts: e, scale: ~e -> paired: r a f/128 p, amax?: e",
    replicated="r a o e p",
    combine={"amax": "max"},
    dtypes=_paired_bwd_types,
    workspace=_paired_bwd_workspace,
    reference=_paired_bwd_reference,
    cuda=_paired_bwd_cuda,
)
"""te_activation_grouped_bwd without a bias, for R a multiple of 128 and x bf16 or f16 [R, a, f / 128, 128] ->

paired [R, a, f / 128, 128] of x's type: data and data_t of te_activation_grouped_bwd by `pair`. On CUDA it takes the
       memory of x, which XLA copies where it is read later; the tail is what the memory held
amax   f32[E] of te_activation_grouped_bwd

dtype: the FP8 type. The other attributes are as of te_activation_grouped_bwd. Raises TypeError for other types.
This is no op of a `Producer`: it has one result of 16 bits instead of two layouts, and takes x in squares.
"""


def paired_activation_grad_source(dy: jax.Array, x: jax.Array, groups: Groups, attrs: dict[str, Any]) -> Source:
    """The gradient that `grouped_activation_grad_source` describes, also in both layouts in one array where x
    `is_pairable`."""
    source = grouped_activation_grad_source(dy, x, groups, attrs)
    if not is_pairable(x, groups.counts):
        return source
    operands = dy, in_squares(x), groups.offsets, groups.counts
    return source._replace(paired=partial(_in_one, operands, source.scales, attrs))


def _in_one(operands, scales, attrs, names, dtype, scale):
    """The results `names` of the op that writes both layouts in one array."""
    scale = jnp.broadcast_to(scale, scales)
    outputs = tuple(o.name for o in activation_grouped_paired_bwd.rule.outputs if o.name in names)
    results = activation_grouped_paired_bwd(*operands, scale, outputs=outputs, dtype=dtype, **attrs)
    return dict(zip(outputs, results, strict=True))


# -- grouped products -------------------------------------------------------------------------------------------------


def _check_pair(side: str, op: str, lhs, rhs, *_, dtype, **__):
    """The types of a product where the pair is the factor `side`."""
    factors = dict(lhs=lhs, rhs=rhs)
    _check_paired(op, side, factors[side])
    check_factors(op, *(factors | {side: dtype}).values(), 2)


def _paired_reference(lhs, rhs, offsets, counts, lhs_scale_inv, rhs_scale_inv, *, dtype, slot, **attrs):
    data = rows_of(lhs, dtype)[:, slot : slot + rhs.shape[2]]
    scales = lhs_scale_inv, rhs_scale_inv, None, None
    return gemm_grouped_op.reference(data, rhs, offsets, counts, *scales, None, outer=1, **attrs)


def _paired_wgrad_reference(lhs, rhs, offsets, counts, lhs_scale_inv, rhs_scale_inv, c, *, dtype, **attrs):
    scales, data_t = (lhs_scale_inv, rhs_scale_inv, None, None), columns_of(rhs, dtype)
    c = None if c is None else c.reshape(*c.shape[:2], -1)
    (out,) = gemm_grouped_wgrad_op.reference(lhs, data_t, offsets, counts, *scales, c, slots=1, **attrs)
    return (in_squares(out),)


def _paired_kernel(call, lhs, rhs, offsets, counts, *scales, dtype, **attrs):
    """Results have a multiple of 8 columns."""
    (out,) = call(lhs, fill(rhs, 1, OUT_COLUMNS), offsets, counts, *scales, **attrs, **_types_of_bytes(dtype))
    return (out[:, : rhs.shape[1]],)


def _paired_wgrad_kernel(call, *operands, dtype, **attrs):
    return call(*operands, **attrs, **_types_of_bytes(dtype))


gemm_grouped_paired_op: Op = declare_grouped(
    _PAIRED_OP, "r a k/128 p", "e n b k", "r n", _paired_reference, _paired_kernel,
    (ONE_SCALE,), partial(_check_pair, "lhs"), whole="a b p",
)  # fmt: skip
"""te_gemm_grouped over slots and columns of a pair lhs [R, a, k / 128, 128], of FP8 type `dtype`: out [R, n] of rhs FP8
[E, n, b, k], which meets the b slots from `slot` on. Scales are f32[E] or [1]; out_dtype and fast_accum are as of
te_gemm_grouped."""

gemm_grouped_paired_wgrad_op: Op = declare_grouped(
    _PAIRED_WGRAD_OP, "n r", "r a s p", "e n s p", _paired_wgrad_reference, _paired_wgrad_kernel,
    (ONE_SCALE,), partial(_check_pair, "rhs"), whole="a p",
)  # fmt: skip
"""te_gemm_grouped_wgrad of lhs FP8 [n, R] and a slot of a pair rhs [R, a, s, 128], of FP8 type `dtype`: out
[E, n, s, 128]. Scales are f32[E] or [1]; c, out_dtype, fast_accum and in_place are as of te_gemm_grouped_wgrad."""


def gemm_grouped_paired(
    lhs: jax.Array,
    rhs: jax.Array,
    offsets: jax.Array,
    counts: jax.Array,
    lhs_scale_inv: jax.Array,
    rhs_scale_inv: jax.Array,
    *,
    dtype: DTypeLike,
    slot: int = 0,
    out_dtype: DTypeLike,
    fast_accum: bool = False,
) -> jax.Array:
    """`gemm_grouped` of a pair lhs [R, a, k / 128, 128], of FP8 type `dtype`, and rhs FP8 [E, n, b, k] -> [R, n]; the b
    slots from `slot` on and k are contracted. Scales f32[] or f32[E].

    Not differentiable. Raises ValueError for sizes and slots, TypeError for types that do not match.
    """
    scales, attrs = _checked_call(
        _PAIRED_OP, lhs, rhs, 4, offsets, counts, lhs_scale_inv, rhs_scale_inv, out_dtype, fast_accum
    )
    if rhs.shape[-1] != lhs.shape[2] * _SIDE:
        raise ValueError(f"{_PAIRED_OP}: lhs has the shape {lhs.shape}, rhs {rhs.shape}; pass as many columns of both.")
    attrs |= _slot(_PAIRED_OP, lhs, rhs.shape[2], slot, dtype)
    return with_names(gemm_grouped_paired_op(lhs, rhs, offsets, counts, *scales, **attrs)[0], GEMM)


def gemm_grouped_paired_wgrad(
    lhs: jax.Array,
    rhs: jax.Array,
    offsets: jax.Array,
    counts: jax.Array,
    lhs_scale_inv: jax.Array,
    rhs_scale_inv: jax.Array,
    c: jax.Array | None = None,
    *,
    dtype: DTypeLike,
    slot: int = 0,
    out_dtype: DTypeLike,
    fast_accum: bool = False,
    in_place: bool = False,
) -> jax.Array:
    """`gemm_grouped_wgrad` of lhs FP8 [n, R] and a slot of a pair rhs [R, a, k / 128, 128], of FP8 type `dtype` ->
    [E, n, k], plus c. Scales f32[] or f32[E].

    Not differentiable. Raises as `gemm_grouped_paired`.
    """
    of = rhs, lhs, 2, offsets, counts, lhs_scale_inv, rhs_scale_inv, out_dtype, fast_accum
    scales, attrs = _checked_call(_PAIRED_WGRAD_OP, *of)
    attrs |= _slot(_PAIRED_WGRAD_OP, rhs, 1, slot, dtype) | (dict(in_place=True) if in_place else {})
    c = None if c is None else in_squares(c)
    (out,) = gemm_grouped_paired_wgrad_op(lhs, rhs, offsets, counts, *scales, c, **attrs)
    return with_names(out.reshape(*out.shape[:2], -1), GEMM)


def _checked_call(op: str, paired, other, rank, offsets, counts, lhs_scale_inv, rhs_scale_inv, out_dtype, fast_accum):
    """The scales and some attributes of a product of a pair and an array of `rank` axes. Raises ValueError or
    TypeError, naming `op`."""
    if paired.ndim != 4 or paired.shape[-1] != _SIDE or other.ndim != rank:
        raise ValueError(
            f"{op}: the pair has the shape {paired.shape}, the other factor {other.shape}; pass [R, a, k / {_SIDE}, "
            f"{_SIDE}] and an array of {rank} axes."
        )
    check_arrays(op, paired, other, offsets, counts, 0)
    scales = (jnp.reshape(scale, (-1,)) for scale in (lhs_scale_inv, rhs_scale_inv))
    return scales, product_options(op, paired, out_dtype, fast_accum)


def _slot(op: str, paired, used: int, slot, dtype) -> dict[str, Any]:
    """Raises ValueError, naming `op`, unless the pair has `used` slots from `slot` on."""
    check(op, "slot", slot, integer(0))
    if slot > paired.shape[1] - used:
        raise ValueError(f"{op}: slot is {slot}, but the pair has the shape {paired.shape}, of which {used} are read.")
    return dict(slot=slot, dtype=jnp.dtype(dtype))
