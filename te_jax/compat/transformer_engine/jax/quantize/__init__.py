"""`transformer_engine.jax.quantize`: names of all its modules."""

from te_jax.compat._absent import GetAttr, absent
from te_jax.compat.transformer_engine.jax.quantize.device_utils import (
    get_device_compute_capability as get_device_compute_capability,
)
from te_jax.compat.transformer_engine.jax.quantize.helper import NVTE_FP8_COLLECTION_NAME as NVTE_FP8_COLLECTION_NAME
from te_jax.compat.transformer_engine.jax.quantize.helper import QuantizeConfig as QuantizeConfig
from te_jax.compat.transformer_engine.jax.quantize.helper import TensorSource as TensorSource
from te_jax.compat.transformer_engine.jax.quantize.helper import autocast as autocast
from te_jax.compat.transformer_engine.jax.quantize.helper import fp8_autocast as fp8_autocast
from te_jax.compat.transformer_engine.jax.quantize.helper import (
    get_global_quantize_recipe as get_global_quantize_recipe,
)
from te_jax.compat.transformer_engine.jax.quantize.helper import get_quantization_recipe as get_quantization_recipe
from te_jax.compat.transformer_engine.jax.quantize.helper import (
    get_quantize_config_with_recipe as get_quantize_config_with_recipe,
)
from te_jax.compat.transformer_engine.jax.quantize.helper import (
    get_supported_quantization_recipes as get_supported_quantization_recipes,
)
from te_jax.compat.transformer_engine.jax.quantize.helper import (
    get_supported_scaling_modes as get_supported_scaling_modes,
)
from te_jax.compat.transformer_engine.jax.quantize.helper import is_fp8_available as is_fp8_available
from te_jax.compat.transformer_engine.jax.quantize.helper import (
    is_quantize_recipe_supported as is_quantize_recipe_supported,
)
from te_jax.compat.transformer_engine.jax.quantize.helper import is_scaling_mode_supported as is_scaling_mode_supported
from te_jax.compat.transformer_engine.jax.quantize.helper import update_collections as update_collections
from te_jax.compat.transformer_engine.jax.quantize.metadata import QuantizeMeta as QuantizeMeta
from te_jax.compat.transformer_engine.jax.quantize.metadata import QuantizeMetaSet as QuantizeMetaSet
from te_jax.compat.transformer_engine.jax.quantize.quantizer import AmaxComputeAlgo as AmaxComputeAlgo
from te_jax.compat.transformer_engine.jax.quantize.quantizer import Quantizer as Quantizer
from te_jax.compat.transformer_engine.jax.quantize.quantizer import QuantizerFactory as QuantizerFactory
from te_jax.compat.transformer_engine.jax.quantize.quantizer import QuantizerSet as QuantizerSet
from te_jax.compat.transformer_engine.jax.quantize.quantizer import noop_quantizer_set as noop_quantizer_set
from te_jax.compat.transformer_engine.jax.quantize.scaling_modes import QuantizeLayout as QuantizeLayout
from te_jax.compat.transformer_engine.jax.quantize.scaling_modes import ScalingMode as ScalingMode
from te_jax.compat.transformer_engine.jax.sharding import (
    with_sharding_constraint_by_logical_axes as with_sharding_constraint_by_logical_axes,
)

__getattr__: GetAttr = absent("transformer_engine.jax.quantize")
