"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL, what reads text: Qwen 2 and 3 whose heads turn by several positions of a token."""

from dataclasses import replace

from te_jax.hf.decoders import ONE, QK_NORMS, TYPES_OF_QWEN, UNUSED_WINDOW, of_llama
from te_jax.hf.family import ALL_SEE_ALL, NO_WINDOW, Family, head_dim
from te_jax.hf.rotary import rotary, sections_fit
from te_jax.hf.words import SIZE, fixed
from te_jax.models import families
from te_jax.ops.rope import PositionSections

_IN_PARTS, _BY_TURNS = PositionSections((16, 24, 24)), PositionSections((24, 20, 20), interleaved=True)


def _qwen2_vl(name: str, architecture: str) -> Family:
    return of_llama(
        name,
        architecture,
        replace(families.qwen2(ONE), family=name),
        *(*UNUSED_WINDOW, fixed("use_sliding_window", False, None), TYPES_OF_QWEN),
        rotary(stretched=True, sections=_IN_PARTS),
        checks=(ALL_SEE_ALL, sections_fit),
        rope_parameters=1_000_000.0,
        vocab_size=152064,
        hidden_size=8192,
        intermediate_size=29568,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        max_position_embeddings=32768,
        rms_norm_eps=1e-5,
    )


QWEN2_VL_TEXT = _qwen2_vl("qwen2_vl_text", "Qwen2VLTextModel")
QWEN2_5_VL_TEXT = _qwen2_vl("qwen2_5_vl_text", "Qwen2_5_VLTextModel")
QWEN3_VL_TEXT = of_llama(
    "qwen3_vl_text",
    "Qwen3VLTextModel",
    replace(families.qwen3(ONE), family="qwen3_vl_text"),
    *(*QK_NORMS, NO_WINDOW, head_dim(may_be=SIZE)),
    rotary(stretched=True, sections=_BY_TURNS),
    rope_parameters=500_000.0,
    vocab_size=151936,
    intermediate_size=22016,
    num_key_value_heads=32,
    head_dim=128,
    max_position_embeddings=128000,
)
