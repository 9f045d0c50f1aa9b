"""GEMM, FP8 or not. Both operands are K-major: the layout that FP8 needs on Hopper.

FP8 operands have one scale each (te_gemm) or one for each block of 128 (te_gemm_block), both through cuBLASLt, or for
each block of 32 (te_gemm_mx), through XLA from Blackwell on. `gemm` is all of them, by the formats of the factors. What
cuBLASLt multiplies only after a copy, blocks of 128 x 128 that are cut, goes to the kernel of grouped products, and so
does what that kernel multiplies faster (csrc/gemm/gemm_own.cc).

Which algorithm runs, and how others are asked for, is in tuning.py.
"""

from collections.abc import Sequence
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from te_jax.core import extension
from te_jax.core.arrays import as_jax, as_rank
from te_jax.core.check import ARRAY, BOOL, NONE, Kind, check, integer, is_dtype
from te_jax.core.derivatives import custom_vjp
from te_jax.core.op import Op
from te_jax.core.policies import GEMM, with_names
from te_jax.core.types import align, like, on_explicit_mesh
from te_jax.ops.formats import ROWS_32, ROWS_128, SQUARES_128, TENSOR, ScaleFormat, fill
from te_jax.ops.quantize.array import FLOATS

FP8 = (jnp.float8_e4m3fn, jnp.float8_e5m2)
FP8_ALIGNED = 16  # cuBLASLt's FP8 kernels take N and K in multiples of 16 elements
OUT_DTYPE = NONE | Kind("float32, bfloat16 or float16", is_dtype, lambda dtype: jnp.dtype(dtype) in FLOATS)
Formats = tuple[ScaleFormat, ScaleFormat]  # of the left and of the right factor
ONE_SCALE: Formats = TENSOR, TENSOR
WORKSPACE = 32 << 20  # bytes; what NVIDIA recommends for Hopper's cuBLASLt kernels


def check_factors(op: str, lhs: jax.Array, rhs: jax.Array, scales: int) -> None:
    """Raises TypeError, naming `op`, for operands of types that tensor cores do not multiply, or with `scales` inverse
    scales in all, which are not 2 of FP8 operands and 0 of others."""
    is_fp8 = [any(d == f for f in FP8) for d in (lhs, rhs)]
    if not all(is_fp8) and (lhs != rhs or all(lhs != f for f in FLOATS)):
        raise TypeError(
            f"{op}: lhs is {lhs}, rhs is {rhs}; pass two FP8 operands, or two of one type among f32, bf16, f16."
        )
    if all(is_fp8) and lhs == rhs == jnp.float8_e5m2:
        raise TypeError(
            f"{op}: lhs and rhs are both float8_e5m2, which tensor cores do not multiply; use E4M3 for one."
        )
    if scales != 2 * all(is_fp8):
        raise TypeError(
            f"{op}: lhs_scale_inv and rhs_scale_inv go with FP8 operands, both of them, and with no others."
        )


def _dtypes(lhs, rhs, lhs_scale_inv, rhs_scale_inv, bias, c, *, contract, out_dtype, **_):
    check_factors("te_gemm", lhs, rhs, sum(scale is not None for scale in (lhs_scale_inv, rhs_scale_inv)))
    return result_dtypes("te_gemm", c, out_dtype)


def result_dtypes(op: str, c: jax.Array | None, out_dtype: DTypeLike) -> tuple[Any]:
    """The types of the results of a product. Raises TypeError, naming `op`, for a sum `c` of another."""
    if c is not None and c != out_dtype:
        raise TypeError(f"{op}: c is {c}, but out is {out_dtype}; pass c in the type of out, or set out_dtype.")
    return (out_dtype,)


def _reference(lhs, rhs, lhs_scale_inv, rhs_scale_inv, bias, c, *, contract, out_dtype, **_):
    factors = [a.astype(jnp.float32) if a.dtype in FP8 else a for a in (lhs, rhs)]
    out = dot_last(*factors, contract)
    if lhs_scale_inv is not None:
        out = out * (lhs_scale_inv * rhs_scale_inv)
    return (add_epilogue(out, bias, c, out_dtype),)


def dot_last(left: jax.Array, right: jax.Array, contract: int) -> jax.Array:
    """f32 left @ right^T over the last `contract` axes of both."""
    axes = [tuple(range(a.ndim - contract, a.ndim)) for a in (left, right)]
    highest = dict(precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
    return lax.dot_general(left, right, (axes, ((), ())), **highest)


def add_epilogue(out: jax.Array, bias: jax.Array | None, c: jax.Array | None, out_dtype: DTypeLike) -> jax.Array:
    """out f32 [*m, *n] with bias [*n] and c [*m, *n], where they are given, in one rounding."""
    if bias is not None:
        bias = bias.astype(out_dtype).astype(jnp.float32)  # as in the epilogue, bias comes in the result's type
        out = out + as_rank(bias, out.ndim)
    if c is not None:
        out = out + c.astype(jnp.float32)
    return out.astype(out_dtype)


def _cuda(call, lhs, rhs, lhs_scale_inv, rhs_scale_inv, bias, c, *, contract, out_dtype, in_place=False, **attrs):
    """Flattens to two axes; FP8 sizes that cuBLASLt does not take are padded with zeros and sliced off again. What its
    epilogue does not add in f32 is added here: the product then comes in f32, so that there is one rounding still."""
    m_axes, n_axes = lhs.shape[: lhs.ndim - contract], rhs.shape[: rhs.ndim - contract]
    m, n, k = prod(m_axes), prod(n_axes), prod(lhs.shape[lhs.ndim - contract :])
    bias = None if bias is None else bias.reshape(n).astype(out_dtype)
    c = None if c is None else c.reshape(m, n)
    is_fp8 = lhs.dtype in FP8
    taken = is_fp8 or out_dtype in (lhs.dtype, jnp.float32)  # cuBLASLt has no bf16 x bf16 -> f16
    inside = taken and (is_fp8 or n % 8 == k % 8 == 0)  # an unaligned product (FP8 is padded) rounds before it adds
    bias_inside = inside and out_dtype != jnp.float32  # an f32 epilogue would round the bias to bf16
    after = [x for x, is_inside in ((bias, bias_inside), (c, inside)) if x is not None and not is_inside]
    if 0 in (m, n, k):  # nothing to multiply
        return (add_epilogue(jnp.zeros((m, n)), bias, c, out_dtype).reshape(*m_axes, *n_axes),)
    lhs, rhs = lhs.reshape(m, k), rhs.reshape(n, k)
    bias, c = bias if bias_inside else None, c if inside else None
    if is_fp8:
        lhs, rhs = fill(lhs, 1, FP8_ALIGNED), fill(fill(rhs, 1, FP8_ALIGNED), 0, FP8_ALIGNED)
        bias, c = (x if x is None else fill(x, x.ndim - 1, FP8_ALIGNED) for x in (bias, c))
    call_dtype = jnp.dtype(jnp.float32) if after or not taken else out_dtype
    in_place = {"c": "out"} if in_place and c is not None else None
    options = dict(contract=1, out_dtype=call_dtype, in_place=in_place, entry=-1, **attrs)
    (out,) = call(lhs, rhs, lhs_scale_inv, rhs_scale_inv, bias, c, **options)
    out = sum((as_rank(x.astype(jnp.float32), 2) for x in after), out[:, :n])
    return (out.astype(out_dtype).reshape(*m_axes, *n_axes),)


gemm_op: Op = Op(
    "te_gemm",
    "lhs: m... k..., rhs: n... k..., lhs_scale_inv?:, rhs_scale_inv?:, bias?: n..., c?: m... n... -> out: m... n...",
    combine={"out": "sum"},
    once=("bias", "c"),
    ranks={"k...": "contract"},
    fenced="out",
    dtypes=_dtypes,
    reference=_reference,
    workspace=lambda *args, **attrs: WORKSPACE,
    cuda=_cuda,
)


# -- a scale for each block -----------------------------------------------------------------------------------


def _block_dtypes(op: str, lhs, rhs, *others, out_dtype, **_):
    *scales, _, c = others
    if sum(scale is not None for scale in scales) != 2:
        raise ValueError(f"{op}: pass lhs_scale_inv, and one of rhs_scale_inv and rhs_block_inv.")
    if any(all(d != f for f in FP8) for d in (lhs, rhs)) or lhs == rhs == jnp.float8_e5m2:
        raise TypeError(f"{op}: lhs is {lhs}, rhs is {rhs}; pass float8_e4m3fn, or float8_e5m2 for one of them.")
    return result_dtypes(op, c, out_dtype)


def _outer_axes(op: str, contract: int) -> int:
    """How many of the contracted axes have no blocks. Raises ValueError, naming `op`, where none is contracted."""
    if contract < 1:
        raise ValueError(f"{op}: contract is {contract}; blocks lie along a contracted axis: pass 1 or more.")
    return contract - 1


def _block_cuda(call, lhs, rhs, *others, outer, out_dtype, in_place=False, **attrs):
    """A product of matrices, or of axes as they are for the kernel of grouped products, to which blocks of 128 x 128 go
    that are cut. An f32 result's bias is added here, for an f32 epilogue would round it to bf16."""
    ROWS_128.check_gpu("te_gemm_block")
    *scales, bias, c = others
    block, square, contract = ROWS_128.block, scales[-1] is not None, outer + 1
    m_axes, n_axes = lhs.shape[: lhs.ndim - contract], rhs.shape[: rhs.ndim - contract]
    bias = None if bias is None else bias.astype(out_dtype)
    if 0 in (*lhs.shape, *n_axes):  # nothing to multiply
        return (add_epilogue(jnp.zeros((*m_axes, *n_axes)), bias, c, out_dtype),)
    inside, after = (None, bias) if out_dtype == jnp.float32 else (bias, None)
    as_it_is = square and (lhs.shape[-1] % block or n_axes[-1] % block) and extension.is_built_for("90a")
    run = _cut_blocks_cuda if as_it_is else _whole_blocks_cuda
    in_place = {"c": "out"} if in_place and c is not None else None
    options = dict(out_dtype=out_dtype, in_place=in_place, **attrs)
    out = run(partial(call, **options), lhs, rhs, scales, inside, c, m_axes, n_axes)
    return (out if after is None else out + as_rank(after, out.ndim),)


def _whole_blocks_cuda(call, lhs, rhs, scales, bias, c, m_axes, n_axes):
    """Flattens to two axes and fills up with zeros: contracted axes to whole blocks, m to a multiple of 4 and n to one
    of 16, as cuBLASLt wants them; rows in cut blocks of 128 x 128 too, where n has more axes."""
    lhs_scale_inv, rhs_scale_inv, rhs_block_inv = scales
    block, square, m = ROWS_128.block, rhs_block_inv is not None, prod(m_axes)
    n_up = block if square else FP8_ALIGNED
    lhs, rhs = fill(lhs, lhs.ndim - 1, block), fill(fill(rhs, rhs.ndim - 1, block), len(n_axes) - 1, n_up)
    k_up = prod(lhs.shape[len(m_axes) :])
    blocks, filled = k_up // block, rhs.shape[: len(n_axes)]
    n = prod(filled)
    columns = lambda a, lead: None if a is None else fill(a, a.ndim - 1, n_up).reshape(*lead, n)
    lhs, rhs = fill(lhs.reshape(m, k_up), 0, 4), rhs.reshape(n, k_up)
    lhs_scale_inv = fill(lhs_scale_inv.reshape(blocks, m), 1, 4)
    rhs_scale_inv = columns(rhs_scale_inv, (blocks,))
    rhs_block_inv = fill(rhs_block_inv.reshape(-1, blocks), 1, 4) if square else None
    c = None if c is None else fill(columns(c, (m,)), 0, 4)
    scales = lhs_scale_inv, rhs_scale_inv, rhs_block_inv
    (out,) = call(lhs, rhs, *scales, columns(bias, ()), c, outer=0)
    return out[:m].reshape(*m_axes, *filled)[..., : n_axes[-1]]


def _cut_blocks_cuda(call, lhs, rhs, scales, bias, c, m_axes, n_axes):
    """Fills up k and n, each its last axis, with zeros to multiples of 16: a copy only where they are none. n has two
    axes or more, by which the launcher tells this product from one of matrices."""
    lhs_scale_inv, _, rhs_block_inv = scales
    if len(n_axes) == 1:
        rhs, rhs_block_inv, bias = (a if a is None else a[None] for a in (rhs, rhs_block_inv, bias))
        c = None if c is None else jnp.expand_dims(c, len(m_axes))
    last, outer = max(len(n_axes) - 1, 1), lhs.ndim - len(m_axes) - 1  # of the axes of n; of k
    lhs, rhs = (fill(a, a.ndim - 1, FP8_ALIGNED) for a in (lhs, rhs))
    rhs, bias = (a if a is None else fill(a, last, FP8_ALIGNED) for a in (rhs, bias))
    c = None if c is None else fill(c, c.ndim - 1, FP8_ALIGNED)
    (out,) = call(lhs, rhs, lhs_scale_inv, None, rhs_block_inv, bias, c, outer=outer)
    return out[..., : n_axes[-1]].reshape(*m_axes, *n_axes)


def _mx_cuda(call, lhs, rhs, lhs_scale_inv, rhs_scale_inv, bias, c, *, outer, out_dtype):
    """XLA's block-scaled product, of two axes and whole blocks. It brings the scales into the order in which tensor
    cores read them. Bias and c are added to an f32 product, so that there is one rounding."""
    ROWS_32.check_gpu("te_gemm_mx")
    contract = outer + 1
    m_axes, n_axes = lhs.shape[: lhs.ndim - contract], rhs.shape[: rhs.ndim - contract]
    m, n = prod(m_axes), prod(n_axes)
    plain = bias is None and c is None
    if 0 in (m, n, lhs.size):  # nothing to multiply
        return (add_epilogue(jnp.zeros((*m_axes, *n_axes)), bias, c, out_dtype),)

    def operand(a, scale_inv, rows):  # -> [1, rows, k], [1, rows, k / 32]; what fills up rows is cut off again
        filled = fill(a, a.ndim - 1, ROWS_32.block).reshape(rows, -1)
        scales = scale_inv.reshape(-1, rows).T
        return [fill(x, 0, FP8_ALIGNED)[None] for x in (filled, scales)]

    (left, left_scales), (right, right_scales) = operand(lhs, lhs_scale_inv, m), operand(rhs, rhs_scale_inv, n)
    dtype = out_dtype if plain else jnp.dtype(jnp.float32)
    out = jax.nn.scaled_matmul(left, right, left_scales, right_scales, preferred_element_type=dtype)
    out = out[0, :m, :n].reshape(*m_axes, *n_axes)
    return (out if plain else add_epilogue(out, bias, c, out_dtype),)


_products: dict[Formats, tuple[Op, int]] = {}  # the op, and which of its scales of the right factor is given


def _declare_product(left: ScaleFormat, *rights: ScaleFormat, **of_op: Any) -> Op:
    """The product of a left factor in one format and a right factor in one of several. Blocks lie along k, and in
    squares along the last axis of n, too."""
    name, k = f"te_gemm{left.suffix}", "k... k"
    n, may = "n... n" if any(right.square for right in rights) else "n...", "?" if len(rights) > 1 else ""
    of_left = f"lhs_scale_inv: {left.axes_of_inverse('m...', k)}"
    of_right = [f"rhs_{right.inverses['data']}{may}: {right.axes_of_inverse(n, k)}" for right in rights]

    def reference(lhs, rhs, lhs_scale_inv, *others, outer, out_dtype, **_):
        *scales, bias, c = others
        right, scale_inv = next(each for each in zip(rights, scales, strict=True) if each[1] is not None)
        factors = left.read(lhs, lhs_scale_inv, outer + 1), right.read(rhs, scale_inv, outer + 1)
        return (add_epilogue(dot_last(*factors, outer + 1), bias, c, out_dtype),)

    op = Op(
        name,
        f"lhs: m... {k}, rhs: {n} {k}, {', '.join([of_left, *of_right])}, bias?: {n}, c?: m... {n} -> out: m... {n}",
        combine={"out": "sum"},
        once=("bias", "c"),
        ranks={"k...": "outer"},
        dtypes=partial(_block_dtypes, name),
        reference=reference,
        **of_op,
    )
    _products.update({(left, right): (op, at) for at, right in enumerate(rights)})
    return op


_BY_CUBLASLT = dict(fenced="out", workspace=lambda *args, **attrs: WORKSPACE, cuda=_block_cuda)
gemm_block_op: Op = _declare_product(ROWS_128, ROWS_128, SQUARES_128, **_BY_CUBLASLT)
gemm_mx_op: Op = _declare_product(ROWS_32, ROWS_32, composed=True, cuda=_mx_cuda)


# -- a sum of products ----------------------------------------------------------------------------------------

_TERMS = 3  # of one sum: queries, keys and values


def _in_fours(operands):
    """(lhs, rhs, lhs_scale_inv, rhs_scale_inv) of every term that is there."""
    return [term for term in zip(*[iter(operands)] * 4) if term[0] is not None]


def _sum_dtypes(*operands, out_dtype, **_):
    *operands, c = operands
    return [_dtypes(*term, None, c, contract=None, out_dtype=out_dtype) for term in _in_fours(operands)][0]


def _sum_on_shard(*operands, lead, out_dtype, fast_accum, tune, precision):
    *operands, out = operands
    for lhs, rhs, *scales in _in_fours(operands):
        contract = lhs.ndim - lead
        if lhs.dtype in FP8:
            attrs = dict(contract=contract, out_dtype=out_dtype, fast_accum=fast_accum, tune=tune)
            (out,) = gemm_op.on_shard(lhs, rhs, *scales, None, out, **attrs)
        else:
            axes = range(lead, lhs.ndim), range(rhs.ndim - contract, rhs.ndim)
            product = dot(lhs, axes[0], rhs, axes[1], out_dtype, precision)
            out = product if out is None else out + product
    return (out,)


gemm_sum_op: Op = Op(
    "te_gemm_sum",
    "".join(
        f"lhs{i}{may}: m... k{i}..., rhs{i}{may}: n... k{i}..., lhs{i}_scale_inv?:, rhs{i}_scale_inv?:, "
        for i, may in enumerate(["", *["?"] * (_TERMS - 1)])
    )
    + "c?: m... n... -> out: m... n...",
    combine={"out": "sum"},
    once=(*(f"lhs{i}" for i in range(_TERMS)), "c"),
    apart=" ".join(f"k{i}..." for i in range(_TERMS)),
    ranks={"m...": "lead"},
    dtypes=_sum_dtypes,
    reference=_sum_on_shard,
    composed=True,
)


def gemm_sum(
    terms: Sequence[tuple[Any, ...]],
    c: jax.Array | None = None,
    *,
    lead: int,
    out_dtype: DTypeLike,
    formats: Formats = ONE_SCALE,
    fast_accum: bool = False,
    tune: bool = False,
    out_spec: PartitionSpec | None = None,
) -> jax.Array:
    """The sum of lhs @ rhs^T over terms (lhs [*m, *k], rhs [*n, *k], lhs_scale_inv, rhs_scale_inv), plus c [*m, *n].

    Where devices split k, it is their sum that crosses them, once, instead of each product; with scales of blocks each
    product crosses. k may differ from term to term. FP8 terms (with scales as in `gemm`) are chained through `c` of
    `gemm`; others (scales None) are XLA's products of lhs's type, added in out_dtype.

    lead: how many axes m has. c: of out_dtype. The other arguments are those of `gemm`. More than three terms take
    another sum. Not differentiable. Raises ValueError for sizes, TypeError for types that do not match.
    """
    if not terms:
        raise ValueError("gemm_sum: terms is empty; pass at least one (lhs, rhs, lhs_scale_inv, rhs_scale_inv).")
    terms = [(lhs, rhs if lhs.dtype in FP8 else rhs.astype(lhs.dtype), *scales) for lhs, rhs, *scales in terms]
    if formats != ONE_SCALE:
        options = dict(out_dtype=out_dtype, formats=formats, tune=tune, out_spec=out_spec)
        for lhs, rhs, *scales in terms:
            c = gemm(lhs, rhs, *scales, c=c, contract=lhs.ndim - lead, **options)
        return c
    attrs = dict(lead=lead, out_dtype=jnp.dtype(out_dtype), fast_accum=bool(fast_accum), tune=bool(tune))
    precision = jax.config.jax_default_matmul_precision  # read here: shards are traced when XLA compiles
    specs = None if out_spec is None else (out_spec,)
    for at in range(0, len(terms), _TERMS):
        some = [a for term in terms[at : at + _TERMS] for a in term]
        absent = [None] * (4 * _TERMS - len(some))
        (c,) = gemm_sum_op(*some, *absent, c, out_specs=specs, precision=precision, **attrs)
    return c


# -- one product ----------------------------------------------------------------------------------------------


def gemm(
    lhs: jax.Array,
    rhs: jax.Array,
    lhs_scale_inv: jax.Array | None = None,
    rhs_scale_inv: jax.Array | None = None,
    bias: jax.Array | None = None,
    c: jax.Array | None = None,
    *,
    contract: int = 1,
    out_dtype: DTypeLike | None = None,
    formats: Formats = ONE_SCALE,
    fast_accum: bool = False,
    tune: bool = False,
    in_place: bool = False,
    out_spec: PartitionSpec | None = None,
) -> jax.Array:
    """lhs @ rhs^T, both K-major, accumulated in f32: out[*m, *n] = sum_k lhs[*m, *k] rhs[*n, *k].

    lhs, rhs:    FP8 (E4M3 x E4M3, or E4M3 with E5M2), or both f32, bf16 or f16. The last `contract` axes are k.
                 Any sizes: FP8 sizes that are no multiple of 16 are padded inside.
    *_scale_inv: with FP8 operands, what they are multiplied by, as `te_jax.ops.quantize` gives it: f32[]; or of each
                 block along the last axis of k, which is cut at its end, [*k', *m] and [*k', *n], where k' is k with
                 its last axis in blocks: f32 of blocks of 128, float8_e8m0fnu of blocks of 32.
    formats:     of lhs and rhs in FP8, of `te_jax.ops.formats`: with SQUARES_128 rhs_scale_inv is [*n', *k'],
                 `block_inv` of te_quantize_block.
    bias:        [*n], added in the epilogue.
    c:           [*m, *n] of out_dtype, added in f32 before the one rounding: a sum over microbatches or a residual.
    out_dtype:   f32, bf16 or f16; default bf16 for FP8 operands, else theirs.
    fast_accum:  FP8 partial sums stay in the tensor core's reduced precision: faster, some 1e-3 less exact. Sums over
                 blocks are always scaled and added in f32.
    tune:        False: te_jax's own kernel or cuBLASLt's first guess, by the shape, the same in every process. True:
                 candidates are timed once per shape at first use, so that another process may choose another and give
                 other bits; see `tune_all`.
    in_place:    the FP8 product takes the place of c, which nothing reads later (XLA would copy it): of sums.
    out_spec:    on an Explicit mesh, the sharding wanted of the result; None: the operands', the left one's first.

    Differentiable unless the operands are FP8. Raises ValueError for sizes, TypeError for types that do not match, and
    RuntimeError while a product of blocks is lowered for a GPU that has none: of 128 are for compute capability 9.0, of
    32 for 10.0 and newer, where tune and in_place do nothing.
    """
    lhs, rhs, bias, c = as_jax(lhs, rhs, bias, c)
    for name, x in (("lhs", lhs), ("rhs", rhs)):
        check("te_gemm", name, x, ARRAY)
    for name, flag in (("fast_accum", fast_accum), ("tune", tune), ("in_place", in_place)):
        check("te_gemm", name, flag, BOOL)
    check("te_gemm", "out_dtype", out_dtype, OUT_DTYPE)
    in_blocks, is_fp8 = formats != ONE_SCALE, lhs.dtype in FP8
    out_dtype = jnp.dtype(out_dtype or (jnp.bfloat16 if is_fp8 or in_blocks else lhs.dtype))
    specs = None if out_spec is None else (out_spec,)
    of_c = dict(in_place=True) if in_place else {}
    if in_blocks:
        operands = lhs, rhs, lhs_scale_inv, rhs_scale_inv, bias, c
        attrs = dict(out_dtype=out_dtype, tune=bool(tune), **of_c)
        return with_names(_gemm_of_blocks(operands, contract, formats, specs, attrs), GEMM)
    check("te_gemm", "contract", contract, integer(1))
    attrs = dict(contract=contract, out_dtype=out_dtype, fast_accum=bool(fast_accum), tune=bool(tune))
    if is_fp8:
        attrs |= of_c
        return with_names(gemm_op(lhs, rhs, lhs_scale_inv, rhs_scale_inv, bias, c, out_specs=specs, **attrs)[0], GEMM)
    if lhs_scale_inv is not None or rhs_scale_inv is not None:
        raise TypeError(f"te_gemm: scales are given, but lhs is {lhs.dtype}; they go only with FP8 operands.")
    return with_names(_gemm(*align(lhs, rhs, bias, c), tuple(attrs.items())), GEMM)


def _gemm_of_blocks(operands, contract: int, formats: Formats, specs, attrs) -> jax.Array:
    """The product of factors in these formats."""
    lhs, rhs, *scales, bias, c = operands
    if formats not in _products:
        raise no_product("te_gemm", formats, (ONE_SCALE, *_products))
    op, at = _products[formats]
    for name, scale_inv, form in zip(("lhs_scale_inv", "rhs_scale_inv"), scales, formats):
        if scale_inv is not None and scale_inv.dtype != form.scale_dtype:
            raise TypeError(f"{op.name}: {name} is {scale_inv.dtype}; pass {jnp.dtype(form.scale_dtype).name}.")
    of_right = [None] * sum(each is op for each, _ in _products.values())
    of_right[at] = scales[1]
    attrs = dict(out_dtype=attrs["out_dtype"]) if op.composed else attrs
    outer = _outer_axes(op.name, contract)
    return op(lhs, rhs, scales[0], *of_right, bias, c, out_specs=specs, outer=outer, **attrs)[0]


def no_product(op: str, formats: Formats, known: Sequence[Formats]) -> ValueError:
    """The error for factors in formats of which the op `op` has no product."""
    text, *there = (" by ".join(form.name for form in each) for each in (formats, *known))
    return ValueError(f"{op}: formats is {text}, of which there is no product; there are {', '.join(there)}.")


def dot(
    lhs: jax.Array,
    lhs_axes: Sequence[int],
    rhs: jax.Array,
    rhs_axes: Sequence[int],
    out_dtype: DTypeLike,
    precision: Any = None,
    out_spec: PartitionSpec | None = None,
) -> jax.Array:
    """XLA's own product over the given axes, in lhs's type, of `out_dtype`.

    out_spec: on an Explicit mesh the result's sharding. Operands go in as they lie: so the backward pass keeps shards
              of them, and autodiff asks for gradients in their shardings, whose sums XLA leaves scattered.
    """
    dimensions = ((tuple(lhs_axes), tuple(rhs_axes)), ((), ()))
    types = dict(precision=precision, preferred_element_type=out_dtype)
    return lax.dot_general(lhs, rhs.astype(lhs.dtype), dimensions, out_sharding=out_spec, **types)


@custom_vjp(4)
def _gemm(lhs, rhs, bias, c, attrs):
    return gemm_op(lhs, rhs, None, None, bias, c, **dict(attrs))[0]


def _gemm_bwd(attrs, residuals, dout):
    lhs, rhs, bias, c = residuals
    contract = dict(attrs)["contract"]
    m, n = lhs.ndim - contract, rhs.ndim - contract
    exact = lax.Precision.HIGHEST  # as the forward pass: f32 is not TF32
    spec = lambda a: jax.typeof(a).sharding.spec if on_explicit_mesh(jax.typeof(a)) else None
    dlhs = dot(dout, range(m, m + n), rhs, range(n), jnp.float32, exact, spec(lhs))
    drhs = dot(dout, range(m), lhs, range(m), jnp.float32, exact, spec(rhs))
    dbias = None if bias is None else like(jnp.sum(dout.astype(jnp.float32), tuple(range(m))), bias)
    return like(dlhs, lhs), like(drhs, rhs), dbias, None if c is None else like(dout, c)


_gemm.defvjp(lambda *args: (_gemm(*args), args[:4]), _gemm_bwd)
