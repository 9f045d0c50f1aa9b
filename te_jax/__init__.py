"""FP8 transformers in JAX and Flax on NVIDIA GPUs; the same code in plain JAX everywhere else.

    import te_jax
    from te_jax.flax import TransformerLayer

    with te_jax.autocast(recipe=te_jax.recipe.DelayedScaling()):
        variables = TransformerLayer(...).init(key, x)

te_jax:              `autocast`, gradients of functions with FP8 state, updates of that state, statistics.
te_jax.flax, .nnx:   Modules of Flax Linen and of Flax NNX.
te_jax.layers:       The functions that the modules call: arrays in, arrays out.
te_jax.ops:          What the layers are made of, each one primitive of jax.
te_jax.recipe:       How tensors get their scales.
te_jax.models, .hf:  Whole language models; checkpoints of Hugging Face's form.
te_jax.optim:        Optimizers of optax with FP8 in their state.
te_jax.sharding:     Which mesh axis does what.
te_jax.checkpoint_policies: What `jax.checkpoint` keeps.
te_jax.compat:       TransformerEngine's module paths.
te_jax.c_api:        The kernels for programs in C++.
"""

import typing
from collections.abc import Callable as _Callable

from te_jax import c_api as c_api
from te_jax import checkpoint_policies as checkpoint_policies
from te_jax import recipe as recipe
from te_jax import sharding as sharding
from te_jax.c_api import get_cmake_dir as get_cmake_dir
from te_jax.c_api import get_include as get_include
from te_jax.c_api import get_library as get_library
from te_jax.core import versions
from te_jax.core.public import lazy_modules as _lazy_modules
from te_jax.core.public import public_names as _public_names
from te_jax.explain import explain_fp8 as explain_fp8
from te_jax.explain import explain_sharding as explain_sharding
from te_jax.gradients import combine_by_max as combine_by_max
from te_jax.gradients import max_fp8_metas as max_fp8_metas
from te_jax.gradients import value_and_grad as value_and_grad
from te_jax.layers import explain_attention as explain_attention
from te_jax.layers import explain_moe as explain_moe
from te_jax.layers.explain_fp8 import Fp8Explanation as Fp8Explanation
from te_jax.layers.explain_fp8 import Fp8Product as Fp8Product
from te_jax.sharding import MeshResource as MeshResource
from te_jax.sharding import ShardingResource as ShardingResource
from te_jax.sharding.explain import Crossing as Crossing
from te_jax.sharding.explain import ShardingExplanation as ShardingExplanation
from te_jax.state import fp8 as fp8
from te_jax.state.fp8 import FP8_COLLECTION as FP8_COLLECTION
from te_jax.state.fp8 import autocast as autocast
from te_jax.state.fp8 import fp8_autocast as fp8_autocast
from te_jax.state.fp8 import get_delayed_scaling as get_delayed_scaling
from te_jax.state.metas import convert_fp8_metas as convert_fp8_metas
from te_jax.state.metas import update_collections as update_collections
from te_jax.state.metas import update_fp8_metas as update_fp8_metas
from te_jax.stats import expert_heat_map as expert_heat_map
from te_jax.stats import expert_stats as expert_stats
from te_jax.stats import expert_stats_table as expert_stats_table
from te_jax.stats import fp8_probes as fp8_probes
from te_jax.stats import fp8_stats as fp8_stats
from te_jax.stats import fp8_stats_table as fp8_stats_table

if typing.TYPE_CHECKING:
    from te_jax import compat as compat
    from te_jax import flax as flax
    from te_jax import hf as hf
    from te_jax import layers as layers
    from te_jax import models as models
    from te_jax import nnx as nnx
    from te_jax import ops as ops
    from te_jax import optim as optim

_LAZY = ("compat", "flax", "hf", "layers", "models", "nnx", "ops", "optim")
__getattr__: _Callable[[str], typing.Any] = _lazy_modules("te_jax", _LAZY)  # Flax and optax take a second to import

NVTE_FP8_COLLECTION_NAME = FP8_COLLECTION  # the name that users of TransformerEngine know
__version__ = versions.installed_version("te_jax") or "0.0.0"  # run from a source tree that is not installed

__all__ = [*_LAZY, "c_api", "checkpoint_policies", "fp8", "recipe", "sharding", *_public_names(globals())]


def __dir__() -> list[str]:
    return __all__


versions.warn_if_untested()
