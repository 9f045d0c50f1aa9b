"""All families of checkpoints by name."""

from te_jax.hf.decoders import DECODERS
from te_jax.hf.deepseek import DEEPSEEK_V3
from te_jax.hf.encoders import ENCODERS
from te_jax.hf.gemma import GEMMA3_TEXT
from te_jax.hf.gemma4 import GEMMA4_TEXT
from te_jax.hf.glm import GLM4_MOE
from te_jax.hf.gpt import GPTS
from te_jax.hf.gpt_oss import GPT_OSS
from te_jax.hf.granite import GRANITE, GRANITE_HYBRID
from te_jax.hf.kimi import KIMI_LINEAR
from te_jax.hf.llama4 import LLAMA4_TEXT
from te_jax.hf.modernbert import MODERNBERT
from te_jax.hf.nemotron import NEMOTRON_H
from te_jax.hf.olmo import OLMO2, OLMO3
from te_jax.hf.phi import PHI3
from te_jax.hf.qwen2_moe import QWEN2_MOE
from te_jax.hf.qwen3_next import QWEN3_5_MOE_TEXT, QWEN3_5_TEXT, QWEN3_NEXT
from te_jax.hf.qwen_vl import QWEN2_5_VL_TEXT, QWEN2_VL_TEXT, QWEN3_VL_TEXT
from te_jax.hf.siglip import SIGLIP_VISION
from te_jax.hf.smollm import SMOLLM3
from te_jax.hf.vit import VIT

_LIKE_LLAMA = (*DECODERS, QWEN2_MOE, GEMMA3_TEXT, GEMMA4_TEXT, SMOLLM3, PHI3, OLMO2, OLMO3, GRANITE)
_TEXT_OF_IMAGES = (QWEN2_VL_TEXT, QWEN2_5_VL_TEXT, QWEN3_VL_TEXT)
_OTHER_DECODERS = (*GPTS, DEEPSEEK_V3, GLM4_MOE, GPT_OSS, LLAMA4_TEXT, GRANITE_HYBRID, NEMOTRON_H)
_WITH_DELTA_RULE = (QWEN3_NEXT, QWEN3_5_TEXT, QWEN3_5_MOE_TEXT, KIMI_LINEAR)
_DECODERS = (*_LIKE_LLAMA, *_TEXT_OF_IMAGES, *_OTHER_DECODERS, *_WITH_DELTA_RULE)
FAMILIES = {family.name: family for family in (*_DECODERS, *ENCODERS, MODERNBERT, SIGLIP_VISION, VIT)}
# What layers of these have and te_jax has no field for.
_OF_GEMMA3N = "several streams between layers (AltUp), residuals of low rank (LAuReL) and activations that are mostly 0"
MISSING = {"gemma3n_text": _OF_GEMMA3N}
