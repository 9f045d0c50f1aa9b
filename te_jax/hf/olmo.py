"""OLMo 2 and 3: norms only behind sub-blocks, and of all queries and all keys together; OLMo 3 has windows."""

from dataclasses import replace
from typing import Any

from te_jax.hf.decoders import ONE, QK_NORMS, llama_rules, of_llama, post_norm_rules
from te_jax.hf.family import ALL_SEE_ALL, NO_WINDOW
from te_jax.hf.layered import WINDOW_OF_SOME, layer_types, layers_are_known, rope_and_window
from te_jax.hf.rotary import rotary_by_type
from te_jax.hf.rules import TensorRule
from te_jax.models import ModelConfig, families


def _olmo_rules(c: ModelConfig) -> list[TensorRule]:
    return llama_rules(c, norm=None) + post_norm_rules()


_OF_OLMO: dict[str, Any] = dict(
    vocab_size=50304, intermediate_size=11008, max_position_embeddings=2048, rms_norm_eps=1e-5
)
_BASE_OF_OLMO3 = dict.fromkeys(("sliding_attention", "full_attention"), 500_000.0)
OLMO2 = of_llama(
    "olmo2",
    "Olmo2ForCausalLM",
    families.olmo2(ONE),
    *(*QK_NORMS, NO_WINDOW),
    checks=(ALL_SEE_ALL,),
    tensors=_olmo_rules,
    **_OF_OLMO,
)
OLMO3 = of_llama(
    "olmo3",
    "Olmo3ForCausalLM",
    replace(families.olmo2(ONE), family="olmo3"),
    *(*QK_NORMS, WINDOW_OF_SOME),
    rotary_by_type(_BASE_OF_OLMO3, {"full_attention": "rope_theta"}, ("default", "linear", "llama3", "yarn")),
    layer_types(4, rope_and_window),
    checks=(layers_are_known,),
    tensors=_olmo_rules,
    sliding_window=4096,
    **_OF_OLMO,
)
