"""GEMM of MXFP8 operands, with E8M0 scales of blocks of 32 along the contracted axis, through XLA from Blackwell on."""

from functools import partial
from math import prod

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from te_jax import _lib
from te_jax._op import Op
from te_jax.checkpoint_policies import GEMM, named
from te_jax.ops.gemm import FP8_ALIGNED, finished
from te_jax.ops.gemm_block import check_types, dequantized, outer_axes, product
from te_jax.ops.quantize import fill
from te_jax.ops.quantize_mx import BLOCK

CAPABILITY = 10  # major


def unusable(capability: str) -> str:
    """Why a GPU of this compute capability has no such products, "" if it has."""
    if int(capability.partition(".")[0]) >= CAPABILITY:
        return ""
    return (
        f"MXFP8 needs compute capability {CAPABILITY}.0 (Blackwell) or newer, this GPU has {capability}: use "
        "recipe.Float8BlockScaling (on 9.0 alone), recipe.Float8CurrentScaling or recipe.DelayedScaling"
    )


def _reference(lhs, rhs, lhs_scale_inv, rhs_scale_inv, bias, c, *, outer, out_dtype):
    left, right = dequantized(lhs, lhs_scale_inv, outer + 1, BLOCK), dequantized(rhs, rhs_scale_inv, outer + 1, BLOCK)
    return (finished(product(left, right, outer + 1), bias, c, out_dtype),)


def _cuda(call, lhs, rhs, lhs_scale_inv, rhs_scale_inv, bias, c, *, outer, out_dtype):
    """XLA's block-scaled product, of two axes and whole blocks. It brings the scales into the order in which tensor
    cores read them. Bias and c are added to an f32 product, so that there is one rounding."""
    _lib.check_gpu("te_gemm_mx", unusable)
    contract = outer + 1
    m_axes, n_axes = lhs.shape[: lhs.ndim - contract], rhs.shape[: rhs.ndim - contract]
    m, n = prod(m_axes), prod(n_axes)
    plain = bias is None and c is None
    if 0 in (m, n, lhs.size):  # nothing to multiply
        return (finished(jnp.zeros((*m_axes, *n_axes)), bias, c, out_dtype),)

    def operand(a, scale_inv, rows):  # -> [1, rows, k], [1, rows, k / 32]; what fills up rows is cut off again
        filled = fill(a, a.ndim - 1, BLOCK).reshape(rows, -1)
        scales = scale_inv.reshape(-1, rows).T
        return [fill(x, 0, FP8_ALIGNED)[None] for x in (filled, scales)]

    (left, left_scales), (right, right_scales) = operand(lhs, lhs_scale_inv, m), operand(rhs, rhs_scale_inv, n)
    wide = out_dtype if plain else jnp.dtype(jnp.float32)
    out = jax.nn.scaled_matmul(left, right, left_scales, right_scales, preferred_element_type=wide)
    out = out[0, :m, :n].reshape(*m_axes, *n_axes)
    return (out if plain else finished(out, bias, c, out_dtype),)


gemm_mx_op = Op(
    "te_gemm_mx",
    "lhs: m... k... k, rhs: n... k... k, lhs_scale_inv: k... k/32 m..., rhs_scale_inv: k... k/32 n..., "
    "bias?: n..., c?: m... n... -> out: m... n...",
    combine={"out": "sum"},
    once=("bias", "c"),
    ranks={"k...": "outer"},
    dtypes=partial(check_types, "te_gemm_mx"),
    reference=_reference,
    composed=True,
    cuda=_cuda,
)


def gemm_mx(
    lhs,
    rhs,
    lhs_scale_inv,
    rhs_scale_inv,
    bias=None,
    c=None,
    *,
    contract: int = 1,
    out_dtype=jnp.bfloat16,
    out_spec: PartitionSpec | None = None,
) -> jax.Array:
    """lhs @ rhs^T of dequantized operands, both K-major: out[*m, *n] = sum_k lhs[*m, *k] rhs[*n, *k], each times the
    scale_inv of its block. Blocks of 32 lie along the last of the contracted axes k and are cut at its end.

    lhs, rhs:      FP8, E4M3 or one of them E5M2. The last `contract` axes are k. Any sizes.
    lhs_scale_inv: float8_e8m0fnu [*k', *m], k' being k with its last axis in blocks: `scale_inv` of `te_quantize_mx`.
    rhs_scale_inv: float8_e8m0fnu [*k', *n].
    bias, c, out_dtype, out_spec: as in `te_jax.ops.gemm.gemm`.

    Not differentiable. Raises ValueError for sizes, TypeError for types that do not match, RuntimeError on a GPU of a
    compute capability below 10.0.
    """
    outer = outer_axes("te_gemm_mx", contract)
    for name, a in (("lhs_scale_inv", lhs_scale_inv), ("rhs_scale_inv", rhs_scale_inv)):
        if a.dtype != jnp.float8_e8m0fnu:
            raise TypeError(f"te_gemm_mx: {name} is {a.dtype}; pass float8_e8m0fnu.")
    attrs = dict(outer=outer, out_dtype=jnp.dtype(out_dtype))
    specs = None if out_spec is None else (out_spec,)
    return named(gemm_mx_op(lhs, rhs, lhs_scale_inv, rhs_scale_inv, bias, c, out_specs=specs, **attrs)[0], GEMM)
