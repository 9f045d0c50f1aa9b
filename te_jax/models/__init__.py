"""Whole models of te_jax's layers, of language and of images, as Flax (Linen) modules, and text generation."""

from te_jax.core.public import public_names as _public_names
from te_jax.models.causal import CausalLM as CausalLM
from te_jax.models.config import ModelConfig as ModelConfig
from te_jax.models.encoder import EncoderDecoder as EncoderDecoder
from te_jax.models.encoder import EncoderLM as EncoderLM
from te_jax.models.families import SIZES as SIZES
from te_jax.models.families import published as published
from te_jax.models.generation import GREEDY as GREEDY
from te_jax.models.generation import Sampling as Sampling
from te_jax.models.generation import generate as generate
from te_jax.models.generation import read_prompts as read_prompts
from te_jax.models.generation import write_tokens as write_tokens
from te_jax.models.stack import unscan as unscan
from te_jax.models.vision import VisionEncoder as VisionEncoder

__all__ = _public_names(globals())
