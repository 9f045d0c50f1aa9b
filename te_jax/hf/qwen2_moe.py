"""Qwen 2 with experts, next to an MLP that all tokens meet behind a gate of its own."""

from typing import Any

from te_jax.core.check import BOOL, NONE, integer
from te_jax.hf import rules
from te_jax.hf.decoders import (
    OF_QWEN,
    QWEN_EXPERTS,
    TYPES_OF_QWEN,
    UNUSED_WINDOW,
    WITH_EXPERTS,
    attention_of_llama,
    feed_forward_of_llama,
    of_llama,
)
from te_jax.hf.family import ALL_SEE_ALL, LAYER, at_most
from te_jax.hf.rules import TensorRule
from te_jax.hf.words import SIZE, Check, Said, Word, unused
from te_jax.models import ModelConfig, families


def _count_of_shared(said: Said) -> tuple[int]:
    return (said["shared_expert_intermediate_size"] // said["moe_intermediate_size"],)


def _width_of_shared(c: ModelConfig) -> Any:
    return c.layer["moe"].get("num_shared_experts", 0) * c.layer["mlp_hidden_size"]


def _shared_is_a_multiple(said: Said) -> tuple[str, str] | None:
    width = said["moe_intermediate_size"]
    if said["shared_expert_intermediate_size"] % width:
        return "shared_expert_intermediate_size", f"te_jax reads a multiple of moe_intermediate_size={width}"
    return None


def experts_of_qwen_rules(c: ModelConfig) -> list[TensorRule]:
    """The experts, the shared one and its gate, and the norm in front."""
    ours, mlp, stack = f"{LAYER}/moe", "model.layers.{i}.mlp", "layers"
    gate = (f"{ours}/shared_gate_kernel",), (f"{mlp}.shared_expert_gate.weight",), rules.TURNED, stack
    shared = rules.swiglu_rules(f"{ours}/shared_experts", f"{mlp}.shared_expert", stack)
    return [*feed_forward_of_llama(c), TensorRule(*gate), *shared]


SHARED_OF_QWEN = Word(
    "shared_expert_intermediate_size",
    SIZE,
    5632,
    to=("layer/moe/num_shared_experts",),
    ours=_count_of_shared,
    theirs=_width_of_shared,
)
EXPERTS_OF_QWEN_FIT: tuple[Check, ...] = (at_most("num_experts_per_tok", "num_experts"), _shared_is_a_multiple)
_SIZES_OF_QWEN2_MOE = dict(
    hidden_size=2048, num_hidden_layers=24, num_attention_heads=16, num_key_value_heads=16, intermediate_size=5632
)
QWEN2_MOE = of_llama(
    "qwen2_moe",
    "Qwen2MoeForCausalLM",
    families.qwen2_moe(WITH_EXPERTS),
    *(*UNUSED_WINDOW, *QWEN_EXPERTS, TYPES_OF_QWEN),
    unused("sliding_window", NONE | integer(0, 2**31 - 1), 4096),  # 0 is what transformers writes
    Word("qkv_bias", BOOL, True, to=("layer/use_bias",)),
    SHARED_OF_QWEN,
    checks=(ALL_SEE_ALL, *EXPERTS_OF_QWEN_FIT),
    tensors=lambda c: attention_of_llama(c) + experts_of_qwen_rules(c),
    num_experts=60,
    num_experts_per_tok=4,
    moe_intermediate_size=1408,
    **OF_QWEN | _SIZES_OF_QWEN2_MOE,
)
