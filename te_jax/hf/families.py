"""All families of checkpoints by name."""

from te_jax.hf.decoders import DECODERS
from te_jax.hf.deepseek import DEEPSEEK_V3
from te_jax.hf.encoders import ENCODERS

FAMILIES = {family.name: family for family in (*DECODERS, DEEPSEEK_V3, *ENCODERS)}
