"""`transformer_engine.jax.cpp_extensions`: the few names of it that programs use."""

from te_jax.compat._absent import GetAttr, absent
from te_jax.compat.transformer_engine.jax.cpp_extensions.attention import FusedAttnHelper as FusedAttnHelper
from te_jax.compat.transformer_engine.jax.cpp_extensions.gemm import CollectiveOp as CollectiveOp
from te_jax.compat.transformer_engine.jax.cpp_extensions.gemm import CollectiveOpSet as CollectiveOpSet
from te_jax.compat.transformer_engine.jax.cpp_extensions.gemm import (
    collective_gemm_bootstrap as collective_gemm_bootstrap,
)
from te_jax.compat.transformer_engine.jax.cpp_extensions.gemm import noop_collective_op_set as noop_collective_op_set
from te_jax.compat.transformer_engine.jax.cpp_extensions.misc import (
    get_all_device_compute_capability as get_all_device_compute_capability,
)
from te_jax.compat.transformer_engine.jax.cpp_extensions.misc import get_cudnn_version as get_cudnn_version
from te_jax.compat.transformer_engine.jax.cpp_extensions.misc import (
    get_min_device_compute_capability as get_min_device_compute_capability,
)
from te_jax.compat.transformer_engine.jax.cpp_extensions.misc import get_xla_flag as get_xla_flag

__getattr__: GetAttr = absent("transformer_engine.jax.cpp_extensions")
