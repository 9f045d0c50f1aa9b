"""Products of the rows of groups."""

from te_jax.ops.gemm.grouped import gemm_grouped as gemm_grouped
from te_jax.ops.gemm.grouped import gemm_grouped_op as gemm_grouped_op
from te_jax.ops.gemm.grouped import gemm_grouped_wgrad as gemm_grouped_wgrad
from te_jax.ops.gemm.grouped import gemm_grouped_wgrad_op as gemm_grouped_wgrad_op
from te_jax.ops.gemm.grouped import gemm_grouped_wide_op as gemm_grouped_wide_op
from te_jax.ops.gemm.grouped import gemm_grouped_wide_wgrad as gemm_grouped_wide_wgrad
from te_jax.ops.gemm.grouped import gemm_grouped_wide_wgrad_op as gemm_grouped_wide_wgrad_op
