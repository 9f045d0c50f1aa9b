"""GEMM of FP8 operands with a scale for each block of 128 along the contracted axis, through cuBLASLt on Hopper."""

from functools import partial
from math import prod

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from te_jax._arrays import as_rank
from te_jax._op import Op
from te_jax.checkpoint_policies import GEMM, named
from te_jax.ops.gemm import FP8, FP8_ALIGNED, WORKSPACE, finished
from te_jax.ops.quantize import fill, transpose
from te_jax.ops.quantize_block import BLOCK, check_gpu, spread


def check_types(op: str, lhs, rhs, *others, out_dtype, **_):
    """The types of the results. Raises TypeError, naming `op`, for operands that it does not multiply or add."""
    c = others[-1]
    if any(all(d != f for f in FP8) for d in (lhs, rhs)) or lhs == rhs == jnp.float8_e5m2:
        raise TypeError(f"{op}: lhs is {lhs}, rhs is {rhs}; pass float8_e4m3fn, or float8_e5m2 for one of them.")
    if c is not None and c != out_dtype:
        raise TypeError(f"{op}: c is {c}, but out is {out_dtype}; pass c in the type of out, or set out_dtype.")
    return (out_dtype,)


def outer_axes(op: str, contract: int) -> int:
    """How many of the contracted axes have no blocks. Raises ValueError, naming `op`, where none is contracted."""
    if contract < 1:
        raise ValueError(f"{op}: contract is {contract}; blocks lie along a contracted axis: pass 1 or more.")
    return contract - 1


def _check_scales(rhs_scale_inv, rhs_block_inv):
    if (rhs_scale_inv is None) == (rhs_block_inv is None):
        raise ValueError("te_gemm_block: pass one of rhs_scale_inv and rhs_block_inv.")


def _reference(lhs, rhs, lhs_scale_inv, rhs_scale_inv, rhs_block_inv, bias, c, *, outer, out_dtype, **_):
    _check_scales(rhs_scale_inv, rhs_block_inv)
    contract = outer + 1
    if rhs_block_inv is None:
        right = dequantized(rhs, rhs_scale_inv, contract, BLOCK)
    else:
        r = rhs.ndim - contract - 1
        each = spread(spread(rhs_block_inv, r, rhs.shape[r]), rhs.ndim - 1, rhs.shape[-1])
        right = rhs.astype(jnp.float32) * each
    out = product(dequantized(lhs, lhs_scale_inv, contract, BLOCK), right, contract)
    return (finished(out, bias, c, out_dtype),)


def dequantized(a, scale_inv, contract, block):
    """a [*rows, *k] times scale_inv [*k', *rows] of its blocks of 1 x `block`, in f32. contract: axes in k."""
    turned = transpose(scale_inv.astype(jnp.float32), contract)
    return a.astype(jnp.float32) * spread(turned, a.ndim - 1, a.shape[-1], block)


def product(left, right, contract):
    """f32 left @ right^T over the last `contract` axes of both."""
    axes = [tuple(range(a.ndim - contract, a.ndim)) for a in (left, right)]
    highest = dict(precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
    return lax.dot_general(left, right, (axes, ((), ())), **highest)


def _cuda(
    call, lhs, rhs, lhs_scale_inv, rhs_scale_inv, rhs_block_inv, bias, c, *, outer, out_dtype, in_place=False, **attrs
):
    """Flattens to two axes and fills up with zeros: contracted axes to whole blocks, m to a multiple of 4 and n to one
    of 16, as cuBLASLt wants them; rows in cut blocks of 128 x 128 too, where n has more axes."""
    _check_scales(rhs_scale_inv, rhs_block_inv)
    check_gpu("te_gemm_block")
    contract, square = outer + 1, rhs_block_inv is not None
    m_axes, n_axes = lhs.shape[: lhs.ndim - contract], rhs.shape[: rhs.ndim - contract]
    m, k = prod(m_axes), prod(lhs.shape[lhs.ndim - contract :])
    bias = None if bias is None else bias.astype(out_dtype)
    if 0 in (m, *n_axes, k):  # nothing to multiply
        return (finished(jnp.zeros((*m_axes, *n_axes)), bias, c, out_dtype),)
    n_up = BLOCK if square else FP8_ALIGNED
    lhs, rhs = fill(lhs, lhs.ndim - 1, BLOCK), fill(fill(rhs, rhs.ndim - 1, BLOCK), len(n_axes) - 1, n_up)
    k_up = prod(lhs.shape[lhs.ndim - contract :])
    blocks, filled = k_up // BLOCK, rhs.shape[: len(n_axes)]
    n = prod(filled)
    columns = lambda a, lead: fill(a, a.ndim - 1, n_up).reshape(*lead, n)
    lhs, rhs = fill(lhs.reshape(m, k_up), 0, 4), rhs.reshape(n, k_up)
    lhs_scale_inv = fill(lhs_scale_inv.reshape(blocks, m), 1, 4)
    if square:
        rhs_block_inv = fill(rhs_block_inv.reshape(-1, blocks), 1, 4)
    else:
        rhs_scale_inv = columns(rhs_scale_inv, (blocks,))
    c = None if c is None else fill(columns(c, (m,)), 0, 4)
    after = bias if out_dtype == jnp.float32 else None  # an f32 epilogue would round the bias to bf16
    inside = None if bias is None or after is not None else columns(bias, ())
    scales = lhs_scale_inv, rhs_scale_inv, rhs_block_inv
    in_place = {"c": "out"} if in_place and c is not None else None
    options = dict(outer=0, out_dtype=out_dtype, in_place=in_place, **attrs)
    (out,) = call(lhs, rhs, *scales, inside, c, **options)
    out = out[:m].reshape(*m_axes, *filled)[..., : n_axes[-1]]
    return (out if after is None else out + as_rank(after, out.ndim),)


gemm_block_op = Op(
    "te_gemm_block",
    "lhs: m... k... k, rhs: n... n k... k, lhs_scale_inv: k... k/128 m..., rhs_scale_inv?: k... k/128 n... n, "
    "rhs_block_inv?: n... n/128 k... k/128, bias?: n... n, c?: m... n... n -> out: m... n... n",
    combine={"out": "sum"},
    once=("bias", "c"),
    ranks={"k...": "outer"},
    fenced="out",
    dtypes=partial(check_types, "te_gemm_block"),
    reference=_reference,
    workspace=lambda *args, **attrs: WORKSPACE,
    cuda=_cuda,
)


def gemm_block(
    lhs,
    rhs,
    lhs_scale_inv,
    rhs_scale_inv,
    bias=None,
    c=None,
    *,
    square: bool,
    contract: int = 1,
    out_dtype=jnp.bfloat16,
    tune: bool = False,
    in_place: bool = False,
    out_spec: PartitionSpec | None = None,
) -> jax.Array:
    """lhs @ rhs^T of dequantized operands, both K-major: out[*m, *n] = sum_k lhs[*m, *k] rhs[*n, *k], each times the
    scale_inv of its block. Blocks of 128 lie along the last of the contracted axes k and are cut at its end.

    lhs, rhs:      FP8, E4M3 or one of them E5M2. The last `contract` axes are k. Any sizes.
    lhs_scale_inv: f32 [*k', *m], where k' is k with its last axis in blocks: `scale_inv` of `te_quantize_block`.
    rhs_scale_inv: f32 [*k', *n]; with `square`, of blocks of 128 x 128, [*n', *k']: `block_inv`.
    bias, c, out_dtype, tune, in_place, out_spec: as in `te_jax.ops.gemm.gemm`.

    On CUDA partial sums of 128 products are scaled and added in f32. Not differentiable. Raises ValueError for sizes,
    TypeError for types that do not match, RuntimeError on a GPU that is not of compute capability 9.0.
    """
    attrs = dict(outer=outer_axes("te_gemm_block", contract), out_dtype=jnp.dtype(out_dtype), tune=bool(tune))
    attrs |= dict(in_place=True) if in_place else {}
    scales = (None, rhs_scale_inv) if square else (rhs_scale_inv, None)
    specs = None if out_spec is None else (out_spec,)
    return named(gemm_block_op(lhs, rhs, lhs_scale_inv, *scales, bias, c, out_specs=specs, **attrs)[0], GEMM)
