"""`transformer_engine.jax`."""

from te_jax.compat._absent import GetAttr, absent
from te_jax.compat.transformer_engine.jax import activation as activation
from te_jax.compat.transformer_engine.jax import attention as attention
from te_jax.compat.transformer_engine.jax import checkpoint_policies as checkpoint_policies
from te_jax.compat.transformer_engine.jax import cpp_extensions as cpp_extensions
from te_jax.compat.transformer_engine.jax import dense as dense
from te_jax.compat.transformer_engine.jax import flax as flax
from te_jax.compat.transformer_engine.jax import layernorm as layernorm
from te_jax.compat.transformer_engine.jax import layernorm_dense as layernorm_dense
from te_jax.compat.transformer_engine.jax import layernorm_mlp as layernorm_mlp
from te_jax.compat.transformer_engine.jax import permutation as permutation
from te_jax.compat.transformer_engine.jax import quantize as quantize
from te_jax.compat.transformer_engine.jax import router as router
from te_jax.compat.transformer_engine.jax import sharding as sharding
from te_jax.compat.transformer_engine.jax import softmax as softmax
from te_jax.compat.transformer_engine.jax import version_utils as version_utils
from te_jax.compat.transformer_engine.jax.quantize import NVTE_FP8_COLLECTION_NAME as NVTE_FP8_COLLECTION_NAME
from te_jax.compat.transformer_engine.jax.quantize import autocast as autocast
from te_jax.compat.transformer_engine.jax.quantize import fp8_autocast as fp8_autocast
from te_jax.compat.transformer_engine.jax.quantize import update_collections as update_collections
from te_jax.compat.transformer_engine.jax.sharding import MeshResource as MeshResource
from te_jax.sharding import ShardingResource as ShardingResource
from te_jax.state.fp8 import get_delayed_scaling as get_delayed_scaling
from te_jax.state.metas import update_fp8_metas as update_fp8_metas

__getattr__: GetAttr = absent("transformer_engine.jax")
