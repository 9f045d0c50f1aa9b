"""`transformer_engine.jax.cpp_extensions.gemm`."""

from te_jax.compat._absent import GetAttr, absent
from te_jax.compat._collective import CollectiveOp as CollectiveOp
from te_jax.compat._collective import CollectiveOpSet as CollectiveOpSet
from te_jax.compat._collective import collective_gemm_bootstrap as collective_gemm_bootstrap
from te_jax.compat._collective import noop_collective_op_set as noop_collective_op_set

__getattr__: GetAttr = absent("transformer_engine.jax.cpp_extensions")
