"""Products of tensors, in FP8 or not, and the choice of their algorithms."""

from te_jax.ops.gemm.dense import gemm as gemm
from te_jax.ops.gemm.dense import gemm_block_op as gemm_block_op
from te_jax.ops.gemm.dense import gemm_mx_op as gemm_mx_op
from te_jax.ops.gemm.dense import gemm_op as gemm_op
from te_jax.ops.gemm.dense import gemm_sum as gemm_sum
from te_jax.ops.gemm.into import gemm_into as gemm_into
from te_jax.ops.gemm.into import gemm_into_op as gemm_into_op
from te_jax.ops.gemm.tuning import load_tuning as load_tuning
from te_jax.ops.gemm.tuning import save_tuning as save_tuning
from te_jax.ops.gemm.tuning import tune_all as tune_all
