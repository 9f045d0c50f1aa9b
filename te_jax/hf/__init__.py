"""Checkpoints of Hugging Face's form: safetensors and config.json, to and from `te_jax.models`. Needs safetensors."""

from te_jax.core.public import public_names as _public_names
from te_jax.hf.checkpoints import load as load
from te_jax.hf.checkpoints import read_config as read_config
from te_jax.hf.checkpoints import save as save
from te_jax.hf.families import FAMILIES as FAMILIES
from te_jax.hf.fp8_export import FP8Export as FP8Export

__all__ = _public_names(globals())
