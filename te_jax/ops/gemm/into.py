"""te_gemm_into: a product as one entry of an array of several, which nothing has to join then: products of pieces."""

from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from te_jax.core.check import check, integer
from te_jax.core.op import Op
from te_jax.ops.gemm.dense import FP8_ALIGNED, WORKSPACE, check_factors, gemm_op

_ENTRY_ALIGNED = 256  # bytes: kEntryAligned of csrc/gemm/gemm.cc


def _into_dtypes(lhs, rhs, lhs_scale_inv, rhs_scale_inv, bias, into, *, out_dtype, **_):
    check_factors("te_gemm_into", lhs, rhs, 2)
    if into is not None and into != out_dtype:
        raise TypeError(f"te_gemm_into: into is {into}, but out is {out_dtype}; pass into in the type of out.")
    return (out_dtype,)


def _into_on_shard(*operands, entries, entry, out_dtype, **attrs):
    *factors, into = operands
    (product,) = gemm_op.on_shard(*factors, None, out_dtype=out_dtype, tune=False, **attrs)
    into = jnp.zeros((entries, *product.shape), out_dtype) if into is None else into
    return (lax.dynamic_update_index_in_dim(into, product, entry, 0),)


def _into_cuda(_, lhs, rhs, lhs_scale_inv, rhs_scale_inv, bias, into, **attrs):
    """te_gemm writes where `into` lies, or into an array of which the other entries are not written. What it would have
    to fill up, or add a bias to behind it, is a product of its own, and copied."""
    contract, out_dtype = attrs["contract"], attrs["out_dtype"]
    m_axes, n_axes = lhs.shape[: lhs.ndim - contract], rhs.shape[: rhs.ndim - contract]
    m, n, k = prod(m_axes), prod(n_axes), prod(lhs.shape[lhs.ndim - contract :])
    is_aligned = n % FP8_ALIGNED == k % FP8_ALIGNED == m * n * out_dtype.itemsize % _ENTRY_ALIGNED == 0
    rounds_bias = bias is not None and out_dtype == jnp.float32  # an f32 epilogue would round it to bf16
    if 0 in (m, n, k) or not is_aligned or rounds_bias:
        return _into_on_shard(lhs, rhs, lhs_scale_inv, rhs_scale_inv, bias, into, **attrs)
    shape, absent = (attrs["entries"], m, n), jnp.zeros((0,), jnp.float32)
    bias = absent if bias is None else bias.reshape(n).astype(out_dtype)
    whole = absent if into is None else into.reshape(shape)
    results = jax.ShapeDtypeStruct(shape, out_dtype), jax.ShapeDtypeStruct((WORKSPACE,), jnp.uint8)
    call = jax.ffi.ffi_call(gemm_op.name, results, input_output_aliases={} if into is None else {5: 0})
    of_call = dict(contract=1, fast_accum=attrs["fast_accum"], tune=False, entry=attrs["entry"])
    out, _ = call(lhs.reshape(m, k), rhs.reshape(n, k), lhs_scale_inv, rhs_scale_inv, bias, whole, **of_call)
    # XLA may let a kernel write into a slice of a larger array, such as a scan's: then `into` would be copied there.
    return (lax.optimization_barrier(out.reshape(attrs["entries"], *m_axes, *n_axes)),)


gemm_into_op: Op = Op(
    "te_gemm_into",
    "lhs: m... k..., rhs: n... k..., lhs_scale_inv:, rhs_scale_inv:, bias?: n..., into?: p m... n... -> "
    "out: p m... n...",
    replicated="p k...",
    ranks={"k...": "contract"},
    sizes={"p": lambda entries, **_: entries},
    dtypes=_into_dtypes,
    reference=_into_on_shard,
    composed=True,
    cuda=_into_cuda,
)


def gemm_into(
    lhs: jax.Array,
    rhs: jax.Array,
    lhs_scale_inv: jax.Array,
    rhs_scale_inv: jax.Array,
    bias: jax.Array | None = None,
    into: jax.Array | None = None,
    *,
    entry: int,
    entries: int,
    contract: int,
    out_dtype: DTypeLike,
    fast_accum: bool = False,
    out_spec: PartitionSpec | None = None,
) -> jax.Array:
    """`gemm` of FP8 operands with one scale each, as one entry of out[entries, *m, *n].

    into:     what out takes the place of, of its shape and type; nothing else may read it later (XLA would copy it).
              None: the other entries have any values, NaN also: outside of `jax.jit` jax_debug_nans may name them.
    entry:    0 <= entry < entries, which one the product is.
    out_spec: on an Explicit mesh, the sharding wanted of the entry.

    The other arguments are those of `gemm`. Not differentiable, and k stays on one device. Raises ValueError for sizes
    and numbers, TypeError for types that do not match.
    """
    check("te_gemm_into", "entries", entries, integer(1))
    check("te_gemm_into", "entry", entry, integer(0, entries - 1))
    specs: Any = None if out_spec is None else (PartitionSpec(None, *out_spec),)
    attrs = dict(contract=contract, out_dtype=jnp.dtype(out_dtype), fast_accum=bool(fast_accum))
    operands = lhs, rhs, lhs_scale_inv, rhs_scale_inv, bias, into
    return gemm_into_op(*operands, out_specs=specs, entry=entry, entries=entries, **attrs)[0]
