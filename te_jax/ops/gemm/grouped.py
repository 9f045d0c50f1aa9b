"""Grouped GEMM: the rows of groups (`te_jax.ops.permute.Groups`) times the weight of their expert, and wgrad, a product
for each expert that sums over its rows. Where groups begin and how long they are is known only on the device.

Each comes in two ops. Tensor cores take FP8 factors with the contracted axis innermost, and so do te_gemm_grouped and
te_gemm_grouped_wgrad. They read unquantized factors in either order, and te_gemm_grouped_wide and
te_gemm_grouped_wide_wgrad take those as jax has them: kernels [E, k, n], rows [R, k]. So products of unquantized
factors, and their gradients, transpose nothing.
"""

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from te_jax.core.arrays import as_jax
from te_jax.core.check import ARRAY, BOOL, INTEGERS, check, integer
from te_jax.core.derivatives import custom_vjp
from te_jax.core.op import Op
from te_jax.core.policies import GEMM, with_names
from te_jax.core.types import align, like
from te_jax.ops.experts.permute import ALIGNMENT
from te_jax.ops.experts.router import MOST_EXPERTS
from te_jax.ops.experts.rows import check_groups, expert_of_row, expert_of_tile, in_tiles, only_tokens, sum_of_experts
from te_jax.ops.formats import ROWS_32, ROWS_128, SQUARES_128, fill, has_hopper_kernels
from te_jax.ops.gemm.dense import (
    FP8,
    ONE_SCALE,
    OUT_DTYPE,
    Formats,
    add_epilogue,
    check_factors,
    dot,
    dot_last,
    no_product,
    result_dtypes,
)
from te_jax.ops.quantize.array import FLOATS

_TMA_BYTES = 16  # of rows of an array that the kernel reads, a multiple
OUT_COLUMNS = 8  # of the kernel's results, a multiple
_COUNTER_BYTES = 4  # of how many tiles were taken: kGroupedWorkspace of csrc/base/ops.h
_ROWS_OP, _WGRAD_OP = "te_gemm_grouped", "te_gemm_grouped_wgrad"
_UNQUANTIZED_OP, _UNQUANTIZED_WGRAD_OP = "te_gemm_grouped_wide", "te_gemm_grouped_wide_wgrad"
_NO_SCALES = (None,) * 4
_OF_ROWS, _OF_BUFFERS, _AS_BF16 = (ROWS_128, SQUARES_128), (ROWS_128, ROWS_128), (ROWS_32, ROWS_32)
GROUPED_IN_FP8 = ONE_SCALE, _OF_ROWS, _OF_BUFFERS  # the formats of factors that are multiplied in FP8


def _check_scaled(op: str, lhs, rhs, *others, **_):
    one_scale, in_blocks = ([scale is not None for scale in pair] for pair in (others[:2], others[2:4]))
    if any(one_scale) and any(in_blocks):
        raise TypeError(f"{op}: scales of blocks are given for only one operand; quantize both in blocks of 128.")
    check_factors(op, lhs, rhs, sum(one_scale + in_blocks))


def _check_unquantized(op: str, lhs, rhs, *_, **__):
    if lhs != rhs or all(lhs != f for f in FLOATS):
        raise TypeError(f"{op}: lhs is {lhs}, rhs is {rhs}; pass two of one type among f32, bf16, f16.")


def _inverse(lhs_scale_inv, rhs_scale_inv, counts):
    """f32[E]: what the products of each expert are multiplied by."""
    if lhs_scale_inv is None:
        return jnp.ones(counts.shape, jnp.float32)
    return jnp.broadcast_to(lhs_scale_inv * rhs_scale_inv, counts.shape)


def _fp8_in_f32(a):
    return a.astype(jnp.float32) if a.dtype in FP8 else a


def _each_tile(product, lhs, offsets, counts):
    """product(rows, expert) of each 128 rows of lhs and their expert, 0 where no token is. One tile after the other: an
    array of all products, or of the weights of all tiles, might not fit."""
    rows = lhs.shape[0]
    experts = jnp.minimum(expert_of_tile(offsets, rows), counts.shape[0] - 1)
    _, is_token = expert_of_row(offsets, counts, rows)
    tile = lambda operands: only_tokens(product(*operands[:2]), operands[2])
    out = lax.map(tile, (in_tiles(lhs), experts, in_tiles(is_token)))
    return out.reshape(rows, *out.shape[2:])


def _rows_reference(
    lhs, rhs, offsets, counts, lhs_scale_inv, rhs_scale_inv, lhs_row_inv, rhs_block_inv, bias, *, outer, out_dtype, **_
):
    contract, inverse = outer + 1, _inverse(lhs_scale_inv, rhs_scale_inv, counts)
    left = _fp8_in_f32(lhs) if lhs_row_inv is None else ROWS_128.read(lhs, lhs_row_inv, contract)

    def product(left, expert):
        weight = _fp8_in_f32(rhs[expert])
        if rhs_block_inv is not None:
            weight = SQUARES_128.read(weight, rhs_block_inv[expert], contract)
        out = dot_last(left, weight, contract) * inverse[expert]
        return add_epilogue(out, None if bias is None else bias[expert], None, out_dtype)

    return (_each_tile(product, left, offsets, counts),)


def _wgrad_reference(
    lhs, rhs, offsets, counts, lhs_scale_inv, rhs_scale_inv, lhs_row_inv, rhs_row_inv, c, *, out_dtype, slots, slot, **_
):
    rows, rhs = lhs.shape[-1], rhs[slot] if slots else rhs
    _, is_token = expert_of_row(offsets, counts, rows)

    def tiles(a, inverse):  # [..., R] -> [R / 128, ..., 128]
        a = _fp8_in_f32(a) if inverse is None else ROWS_128.read(a, inverse, 1)
        a = only_tokens(a, is_token, a.ndim - 1)
        return jnp.moveaxis(a.reshape(*a.shape[:-1], rows // ALIGNMENT, ALIGNMENT), -2, 0)

    both = tiles(lhs, lhs_row_inv), tiles(rhs, rhs_row_inv)
    shape = *counts.shape, *lhs.shape[:-1], *rhs.shape[:-1]
    out = sum_of_experts(lambda left, right: dot_last(left, right, 1), both, expert_of_tile(offsets, rows), shape)
    inverse = _inverse(lhs_scale_inv, rhs_scale_inv, counts)
    return (add_epilogue(out * jnp.expand_dims(inverse, tuple(range(1, out.ndim))), None, c, out_dtype),)


def _unquantized_reference(lhs, rhs, offsets, counts, bias, *, out_dtype):
    contract = lhs.ndim - 1

    def product(left, expert):
        out = dot(left, range(1, 1 + contract), rhs[expert], range(contract), jnp.float32, lax.Precision.HIGHEST)
        return add_epilogue(out, None if bias is None else bias[expert], None, out_dtype)

    return (_each_tile(product, lhs, offsets, counts),)


def _unquantized_wgrad_reference(lhs, rhs, offsets, counts, c, *, out_dtype, **_):
    (rows, *k_axes), n_axes = lhs.shape, rhs.shape[1:]
    _, is_token = expert_of_row(offsets, counts, rows)

    def product(is_token, *both):
        left, right = (only_tokens(a, is_token) for a in both)
        return dot(left, (0,), right, (0,), jnp.float32, lax.Precision.HIGHEST)

    # Flat: programs that XLA does not optimize for a CPU have no product of 16-bit arrays of three axes.
    k, n = prod(k_axes), prod(n_axes)
    tiles = map(in_tiles, (is_token, lhs.reshape(rows, k), rhs.reshape(rows, n)))
    out = sum_of_experts(product, tuple(tiles), expert_of_tile(offsets, rows), (*counts.shape, k, n))
    return (add_epilogue(out.reshape(*counts.shape, *k_axes, *n_axes), None, c, out_dtype),)


def _kernel_takes(lhs: jax.Array, counts: jax.Array) -> bool:
    """Whether the kernel multiplies factors of this type for so many experts; XLA does otherwise."""
    return has_hopper_kernels() and lhs.dtype != jnp.float32 and 1 <= counts.shape[0] <= MOST_EXPERTS


def _bytes_aligned(a, axis: int):
    """`a` with zeros behind this axis, up to a multiple of the 16 bytes that a tensor map takes."""
    return fill(a, axis, _TMA_BYTES // a.dtype.itemsize)


def _rows_kernel(call, lhs, rhs, offsets, counts, *others, outer, out_dtype, **attrs):
    """Flattens to two axes; with blocks, which may be cut at the end of n and of k, these stay as they are. Sizes that
    the kernel does not take are filled up with zeros: a copy."""
    rows, experts, n_axes = lhs.shape[0], counts.shape[0], rhs.shape[1 : rhs.ndim - outer - 1]
    *scales, bias = others
    bias = None if bias is None else bias.astype(out_dtype)
    if scales[-1] is None:
        n, outer = prod(n_axes), 0
        lhs, rhs = lhs.reshape(rows, -1), rhs.reshape(experts, n, -1)
        bias = None if bias is None else bias.reshape(experts, n)
    last = rhs.ndim - outer - 2  # of the axes of n
    columns = rhs.shape[last]
    lhs, rhs = (_bytes_aligned(a, a.ndim - 1) for a in (lhs, rhs))
    rhs, bias = (a if a is None else fill(a, last, OUT_COLUMNS) for a in (rhs, bias))
    (out,) = call(lhs, rhs, offsets, counts, *scales, bias, outer=outer, out_dtype=out_dtype, **attrs)
    return (out[..., :columns].reshape(rows, *n_axes),)


def _wgrad_kernel(call, lhs, rhs, offsets, counts, *others, slots, **attrs):
    """As `_rows_kernel`; k is filled up. A sum that is not a multiple of that is not added to in place."""
    n_axes, k_axes, rows = lhs.shape[:-1], rhs.shape[slots:-1], lhs.shape[-1]
    *one_scale, lhs_inv, rhs_inv, c = others
    experts, n, k = counts.shape[0], prod(n_axes), prod(k_axes)
    lhs, rhs = lhs.reshape(n, rows), fill(rhs.reshape(*rhs.shape[:slots], k, rows), slots, OUT_COLUMNS)
    if lhs_inv is not None:
        lhs_inv, rhs_inv = lhs_inv.reshape(-1, n), fill(rhs_inv.reshape(-1, k), 1, OUT_COLUMNS)
    c = None if c is None else fill(c.reshape(experts, n, k), 2, OUT_COLUMNS)
    (out,) = call(lhs, rhs, offsets, counts, *one_scale, lhs_inv, rhs_inv, c, slots=slots, **attrs)
    return (out[..., :k].reshape(experts, *n_axes, *k_axes),)


def _unquantized_kernel(call, lhs, rhs, offsets, counts, bias, *, out_dtype):
    """As `_rows_kernel`."""
    rows, experts, n_axes = lhs.shape[0], counts.shape[0], rhs.shape[lhs.ndim :]
    n, k = prod(n_axes), prod(lhs.shape[1:])
    lhs, rhs = _eights(lhs.reshape(rows, k), 1), _eights(rhs.reshape(experts, k, n), 1, 2)
    bias = None if bias is None else _eights(bias.astype(out_dtype).reshape(experts, n), 1)
    (out,) = call(lhs, rhs, offsets, counts, bias, out_dtype=out_dtype)
    return (out[:, :n].reshape(rows, *n_axes),)


def _unquantized_wgrad_kernel(call, lhs, rhs, offsets, counts, c, *, out_dtype):
    """As `_wgrad_kernel`; n is filled up, too."""
    experts, rows, k_axes, n_axes = counts.shape[0], lhs.shape[0], lhs.shape[1:], rhs.shape[1:]
    k, n = prod(k_axes), prod(n_axes)
    lhs, rhs = _eights(lhs.reshape(rows, k), 1), _eights(rhs.reshape(rows, n), 1)
    c = None if c is None else _eights(c.reshape(experts, k, n), 1, 2)
    (out,) = call(lhs, rhs, offsets, counts, c, out_dtype=out_dtype)
    return (out[:, :k, :n].reshape(experts, *k_axes, *n_axes),)


def _eights(a, *axes: int):
    """`a` with zeros behind these axes, up to a multiple of 8: 16 bytes of a factor, and columns of a result."""
    for axis in axes:
        a = fill(a, axis, OUT_COLUMNS)
    return a


def declare_grouped(
    name: str, lhs: str, rhs: str, out: str, reference: Callable[..., Any], kernel: Callable[..., Any],
    formats: Sequence[Formats] = (), check: Callable[..., None] | None = None, *, slots: str = "", whole: str = "",
    biased: bool = False, **of_op: Any,
) -> Op:  # fmt: skip
    """A product of rows of groups; or, with experts in front of `out`, of the rows of each, to which `c` is added.

    lhs, rhs, out: their axes; of a factor that may be in blocks the contracted ones are behind `|`.
    reference, kernel: `reference` and `cuda` of the Op; what the kernel does not take the reference serves.
    formats: of lhs and rhs: none where the factors are unquantized; ONE_SCALE (or one scale for each expert); and a
             pair of formats of blocks, whose scales are operands of their own.
    check:   (name, the types of lhs, rhs and what is behind `counts`, **attributes): raises for types that do not fit.
    slots:   axes in front of rhs that its scales lack. whole: axes that stay on one device, too.
    biased:  whether each expert may have a bias. of_op: further arguments of the Op.
    """
    of_experts, may = out.startswith("e "), "?" if len(formats) > 1 else ""
    check_types = check or (_check_scaled if formats else _check_unquantized)
    operands = [f"lhs: {lhs}", f"rhs: {slots} {rhs}", "offsets: o", "counts: e"]
    operands += [f"{side}_scale_inv{may}: ~e" for side in ("lhs", "rhs") if formats]
    for side, form, axes in (each for in_blocks in formats[1:] for each in zip(("lhs", "rhs"), in_blocks, (lhs, rhs))):
        inverse = "block_inv" if form.square else "row_inv"
        operands.append(f"{side}_{inverse}?: {form.axes_of_inverse(*map(str.strip, axes.split('|')))}")
    operands += [f"bias?: e {out.removeprefix('r ')}"] * biased + [f"c?: {out}"] * of_experts

    def dtypes(lhs, rhs, offsets, counts, *others, out_dtype, **attrs):
        check_types(name, lhs, rhs, *others, **attrs)
        check_groups(name, offsets, counts)
        return result_dtypes(name, others[-1] if of_experts else None, out_dtype)

    def cuda(call, lhs, rhs, offsets, counts, *others, in_place=False, **attrs):
        if not _kernel_takes(lhs, counts) or 0 in (*lhs.shape, *rhs.shape):
            return reference(lhs, rhs, offsets, counts, *others, **attrs)
        in_place = {"c": "out"} if in_place and others[-1] is not None else None
        return kernel(partial(call, in_place=in_place), lhs, rhs, offsets, counts, *others, **attrs)

    rule = f"{', '.join(operands)} -> out: {out}".replace("|", "")
    of_op["workspace"] = lambda *_, **__: _COUNTER_BYTES
    of_op |= dict(replicated=f"r e o {slots} {whole}", combine={} if of_experts else {"out": "sum"})
    return Op(name, rule, once=("bias",) * biased, dtypes=dtypes, reference=reference, cuda=cuda, **of_op)


gemm_grouped_op: Op = declare_grouped(
    _ROWS_OP, "r | k... k", "e n... n | k... k", "r n... n", _rows_reference, _rows_kernel, (ONE_SCALE, _OF_ROWS),
    biased=True, ranks={"k...": "outer"},
)  # fmt: skip
gemm_grouped_wgrad_op: Op = declare_grouped(
    _WGRAD_OP, "n... | r", "k... | r", "e n... k...", _wgrad_reference, _wgrad_kernel, (ONE_SCALE, _OF_BUFFERS),
    slots="a...", ranks={"a...": "slots"},
)  # fmt: skip
gemm_grouped_wide_op: Op = declare_grouped(
    _UNQUANTIZED_OP, "r k...", "e k... n...", "r n...", _unquantized_reference, _unquantized_kernel, biased=True
)
gemm_grouped_wide_wgrad_op: Op = declare_grouped(
    _UNQUANTIZED_WGRAD_OP, "r k...", "r n...", "e k... n...", _unquantized_wgrad_reference, _unquantized_wgrad_kernel
)


def gemm_grouped(
    lhs: jax.Array,
    rhs: jax.Array,
    offsets: jax.Array,
    counts: jax.Array,
    lhs_scale_inv: jax.Array | None = None,
    rhs_scale_inv: jax.Array | None = None,
    bias: jax.Array | None = None,
    *,
    contract: int = 1,
    formats: Formats = ONE_SCALE,
    k_first: bool = False,
    out_dtype: DTypeLike | None = None,
    fast_accum: bool = False,
) -> jax.Array:
    """Rows times the weight of their expert, accumulated in f32:
    out[r, *n] = sum_k lhs[r, *k] rhs[expert of r, *n, *k].

    lhs:         [R, *k], R a multiple of 128. rhs: [E, *n, *k]. FP8 both (not both E5M2), or both f32, bf16 or f16. The
                 last `contract` axes are k.
    k_first:     rhs is [E, *k, *n], as jax has kernels; k are the `contract` axes behind E then. For f32, bf16 and f16.
    offsets:     i32[E + 1], multiples of 128: the group of expert e is lhs[offsets[e] : offsets[e + 1]].
    counts:      i32[E]: how many rows of its group, the first ones, are tokens'. The result has zeros in the rows that
                 pad a group, whatever lhs has there. Nothing reads the tail, behind the last group.
    *_scale_inv: with FP8 operands, what they are multiplied by: of both f32[] or f32[E]; or of blocks along the last
                 axis of k, which is cut at its end.
    formats:     of lhs and rhs in FP8, of `te_jax.ops.formats`: ROWS_128, [*k', R], and SQUARES_128, [E, *n', *k']; or
                 ROWS_32 both, [*k', R] and [E, *k', *n], which are multiplied as bf16, which holds their values.
    bias:        [E, *n], added to the rows of its expert.
    out_dtype:   f32, bf16 or f16; default bf16 for FP8 operands, else theirs.
    fast_accum:  as in `gemm`.

    Differentiable by lhs, rhs and bias unless the operands are FP8; no operand is transposed for it, and what dout has
    in the rows that pad a group enters no gradient. Raises ValueError for sizes and
    formats, TypeError for types that do not match.
    """
    lhs, rhs, offsets, counts, bias = as_jax(lhs, rhs, offsets, counts, bias)
    check_arrays(_ROWS_OP, lhs, rhs, offsets, counts, 0)
    check(_ROWS_OP, "contract", contract, integer(1))
    check(_ROWS_OP, "k_first", k_first, BOOL)
    attrs = dict(outer=contract - 1, **product_options(_ROWS_OP, lhs, out_dtype, fast_accum))
    if lhs.dtype in FP8 or lhs_scale_inv is not None or rhs_scale_inv is not None:
        if k_first:
            raise TypeError(
                f"{_ROWS_OP}: k_first is True, but lhs is {lhs.dtype}, or has a scale; FP8 is multiplied only with "
                "k last: pass rhs [E, *n, *k]."
            )
        if formats == _AS_BF16:
            rhs = jax.vmap(lambda each, scale_inv: _as_bf16(each, scale_inv, contract))(rhs, rhs_scale_inv)
            lhs, scales = _as_bf16(lhs, lhs_scale_inv, contract), _NO_SCALES
        else:
            scales = _operands_of_scales(_ROWS_OP, formats, _OF_ROWS, lhs_scale_inv, rhs_scale_inv)
        return with_names(gemm_grouped_op(lhs, rhs, offsets, counts, *scales, bias, **attrs)[0], GEMM)
    if k_first and contract != lhs.ndim - 1:
        raise ValueError(f"{_ROWS_OP}: contract is {contract}, but lhs has the shape {lhs.shape}; pass {lhs.ndim - 1}.")
    return with_names(_gemm_grouped(*align(lhs, rhs, bias, offsets, counts), k_first, tuple(attrs.items())), GEMM)


def gemm_grouped_wgrad(
    lhs: jax.Array,
    rhs: jax.Array,
    offsets: jax.Array,
    counts: jax.Array,
    lhs_scale_inv: jax.Array | None = None,
    rhs_scale_inv: jax.Array | None = None,
    c: jax.Array | None = None,
    *,
    formats: Formats = ONE_SCALE,
    slot: int | None = None,
    out_dtype: DTypeLike | None = None,
    fast_accum: bool = False,
    in_place: bool = False,
) -> jax.Array:
    """The product of each expert's rows of two transposed buffers, accumulated in f32:
    out[e, *n, *k] = sum over the tokens r of expert e of lhs[*n, r] rhs[*k, r].

    lhs:         [*n, R], rhs: [*k, R], of the types that `gemm_grouped` takes. Pass zeros in the rows that pad a group,
                 as all ops of te_jax write them: a kernel multiplies them, though they are no tokens'.
    offsets, counts: as of `gemm_grouped`.
    *_scale_inv: with FP8 operands, what they are multiplied by: of both f32[] or f32[E]; or of blocks of rows, R' of
                 them, [R', *n] and [R', *k].
    formats:     of lhs and rhs in FP8: ROWS_128 both, or ROWS_32 as in `gemm_grouped`.
    slot:        rhs and its scales of blocks hold several buffers, [a, *k, R] and [R', a, *k], of which this is
                 the index of the one that is read. FP8 is read where it lies.
    c:           [E, *n, *k] of out_dtype, added in f32 before the one rounding: a sum over microbatches.
    out_dtype:   f32, bf16 or f16; default bf16 for FP8 operands, else theirs.
    fast_accum, in_place: as in `gemm`.

    An expert without tokens has zeros, or c. Not differentiable. Raises as `gemm_grouped` does.
    """
    lhs, rhs, offsets, counts, c = as_jax(lhs, rhs, offsets, counts, c)
    check_arrays(_WGRAD_OP, lhs, rhs, offsets, counts, -1)
    check(_WGRAD_OP, "in_place", in_place, BOOL)
    attrs = product_options(_WGRAD_OP, lhs, out_dtype, fast_accum) | (dict(in_place=True) if in_place else {})
    if slot is not None:
        _check_slot(slot, rhs)
        rhs_scale_inv = rhs_scale_inv[:, slot] if formats[1].block else rhs_scale_inv
    attrs |= dict(slots=int(slot is not None), slot=slot or 0)
    if formats == _AS_BF16:
        rhs, attrs = rhs if slot is None else rhs[slot], attrs | dict(slots=0, slot=0)
        lhs, rhs, scales = _as_bf16(lhs, lhs_scale_inv, 1), _as_bf16(rhs, rhs_scale_inv, 1), _NO_SCALES
    else:
        scales = _operands_of_scales(_WGRAD_OP, formats, _OF_BUFFERS, lhs_scale_inv, rhs_scale_inv)
    return with_names(gemm_grouped_wgrad_op(lhs, rhs, offsets, counts, *scales, c, **attrs)[0], GEMM)


def gemm_grouped_wide_wgrad(
    lhs: jax.Array,
    rhs: jax.Array,
    offsets: jax.Array,
    counts: jax.Array,
    c: jax.Array | None = None,
    *,
    out_dtype: DTypeLike | None = None,
    in_place: bool = False,
) -> jax.Array:
    """The product of each expert's rows of two buffers as they lie, accumulated in f32:
    out[e, *k, *n] = sum over the tokens r of expert e of lhs[r, *k] rhs[r, *n].

    lhs:         [R, *k], rhs: [R, *n], both f32, bf16 or f16. What they have in the rows that pad a group, NaN too,
                 enters no sum.
    offsets, counts: as of `gemm_grouped`. c, out_dtype, in_place: as of `gemm_grouped_wgrad`, with [E, *k, *n].

    An expert without tokens has zeros, or c. Not differentiable. Raises as `gemm_grouped` does.
    """
    lhs, rhs, offsets, counts, c = as_jax(lhs, rhs, offsets, counts, c)
    check_arrays(_UNQUANTIZED_WGRAD_OP, lhs, rhs, offsets, counts, 0)
    check(_UNQUANTIZED_WGRAD_OP, "out_dtype", out_dtype, OUT_DTYPE)
    check(_UNQUANTIZED_WGRAD_OP, "in_place", in_place, BOOL)
    attrs = dict(out_dtype=jnp.dtype(out_dtype or lhs.dtype)) | (dict(in_place=True) if in_place else {})
    return with_names(gemm_grouped_wide_wgrad_op(lhs, rhs, offsets, counts, c, **attrs)[0], GEMM)


def _check_slot(slot, rhs):
    check(_WGRAD_OP, "slot", slot, integer(0))
    if rhs.ndim < 3 or slot >= rhs.shape[0]:
        raise ValueError(f"{_WGRAD_OP}: slot is {slot}, but rhs has the shape {rhs.shape}; pass [a, *k, R] of more.")


def check_arrays(op: str, lhs: jax.Array, rhs: jax.Array, offsets: jax.Array, counts: jax.Array, of_rows: int) -> None:
    """Raises ValueError or TypeError, naming `op`, for arrays of no grouped product. of_rows: lhs's axis of rows."""
    for name, x in (("lhs", lhs), ("rhs", rhs)):
        check(op, name, x, ARRAY)
        if x.ndim < 2:
            raise ValueError(f"{op}: {name} has the shape {x.shape}; pass an array of two axes or more.")
    for name, x in (("offsets", offsets), ("counts", counts)):
        check(op, name, x, INTEGERS)
    if offsets.ndim != 1 or offsets.shape[0] != counts.size + 1:
        raise ValueError(
            f"{op}: offsets has the shape {offsets.shape}, counts {counts.shape}; pass the first row of each group "
            "and the end of the last, i32[E + 1], and the tokens of each expert, i32[E]."
        )
    if lhs.shape[of_rows] % ALIGNMENT:
        raise ValueError(f"{op}: lhs has {lhs.shape[of_rows]} rows; pass a buffer of a multiple of {ALIGNMENT}.")


def product_options(op: str, lhs: jax.Array, out_dtype: DTypeLike | None, fast_accum: bool) -> dict[str, Any]:
    """Attributes of a product, checked. Raises ValueError or TypeError, naming `op`."""
    check(op, "out_dtype", out_dtype, OUT_DTYPE)
    check(op, "fast_accum", fast_accum, BOOL)
    out_dtype = jnp.dtype(out_dtype or (jnp.bfloat16 if lhs.dtype in FP8 else lhs.dtype))
    return dict(out_dtype=out_dtype, fast_accum=bool(fast_accum))


def _operands_of_scales(op: str, formats: Formats, in_blocks: Formats, lhs_scale_inv, rhs_scale_inv):
    """The four operands of scales: of one scale or one for each expert, f32[1 or E], then of blocks. Raises ValueError,
    naming `op`, for formats of which there is no product."""
    pair = lhs_scale_inv, rhs_scale_inv
    if formats == in_blocks:
        return None, None, *pair
    if formats != ONE_SCALE:
        raise no_product(op, formats, (ONE_SCALE, in_blocks, _AS_BF16))
    return *(None if scale is None else jnp.reshape(scale, (-1,)) for scale in pair), None, None


def _as_bf16(a, scale_inv, contract: int):
    """bf16: the values of a [*rows, *k] in `_AS_BF16`, exact from 2**-126 on. No product takes such blocks."""
    if scale_inv is None:
        raise TypeError(f"te_gemm_grouped: formats is {_AS_BF16[0].name} for both, but a scale is None; pass both.")
    return _AS_BF16[0].read(a, scale_inv, contract).astype(jnp.bfloat16)


@custom_vjp(5, 6)
def _gemm_grouped(lhs, rhs, bias, offsets, counts, k_first, attrs):
    attrs = dict(attrs)
    if k_first:
        return gemm_grouped_wide_op(lhs, rhs, offsets, counts, bias, out_dtype=attrs["out_dtype"])[0]
    return gemm_grouped_op(lhs, rhs, offsets, counts, *_NO_SCALES, bias, **attrs)[0]


def _gemm_grouped_bwd(k_first, attrs, residuals, dout):
    """dlhs reads rhs as it lies, by the op of the other order, and drhs both buffers."""
    lhs, rhs, bias, offsets, counts = residuals
    dout, of_groups = dout.astype(lhs.dtype), (offsets, counts)

    def wgrad(left, right, primal):
        return like(gemm_grouped_wide_wgrad_op(left, right, *of_groups, None, out_dtype=primal.dtype)[0], primal)

    if k_first:
        options = dict(outer=dout.ndim - 2, out_dtype=lhs.dtype, fast_accum=False)
        (dlhs,) = gemm_grouped_op(dout, rhs, *of_groups, *_NO_SCALES, None, **options)
    else:
        (dlhs,) = gemm_grouped_wide_op(dout, rhs, *of_groups, None, out_dtype=lhs.dtype)
    drhs = wgrad(lhs, dout, rhs) if k_first else wgrad(dout, lhs, rhs)
    # A product with ones reads dout once, and not the rows that pad a group.
    ones = jnp.ones(lhs.shape[:1], dout.dtype)
    dbias = None if bias is None else wgrad(ones, dout, bias)
    return like(dlhs, lhs), drhs, dbias, None, None


_gemm_grouped.defvjp(lambda *args: (_gemm_grouped(*args), args[:5]), _gemm_grouped_bwd)
