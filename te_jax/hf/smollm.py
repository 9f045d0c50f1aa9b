"""SmolLM3: a Llama whose every fourth layer has no RoPE."""

from typing import Any

from te_jax.core.check import BOOL, NONE
from te_jax.hf.decoders import NO_BIAS, ONE, of_llama
from te_jax.hf.layered import (
    ROPE_BY_LAYER,
    WINDOW_OF_SOME,
    Fields,
    first_window,
    layers_are_known,
    of_window,
    pattern,
    turning_is_known,
)
from te_jax.hf.rotary import rotary, type_by_window
from te_jax.hf.words import LIST_OF_NAMES, Said, Word, fixed
from te_jax.models import families


def _smollm3_types(said: Said) -> list[str]:
    """full_attention; with use_sliding_window and a sliding_window sliding_attention where there is no RoPE"""
    slides = said["use_sliding_window"] and said["sliding_window"] is not None
    turns = said["no_rope_layers"][: said["num_hidden_layers"]]
    return ["sliding_attention" if slides and not each else "full_attention" for each in turns]


def _smollm3_pattern(said: Said) -> tuple[Any]:
    def fields(name: tuple[int, str]) -> Fields:
        return ({} if name[0] else families.NO_ROPE) | (of_window(said) if name[1] == "sliding_attention" else {})

    return (pattern([*zip(said["no_rope_layers"], said["layer_types"])], fields),)


def _windows_are_used(said: Said) -> tuple[str, str] | None:
    if "sliding_attention" in said["layer_types"] and not said["use_sliding_window"]:
        return "use_sliding_window", "layer_types has sliding_attention; pass True"
    return None


SMOLLM3 = of_llama(
    "smollm3",
    "SmolLM3ForCausalLM",
    families.smollm3(ONE),
    *(NO_BIAS, fixed("mlp_bias", False), WINDOW_OF_SOME, *ROPE_BY_LAYER, rotary()),
    Word("use_sliding_window", BOOL, False, theirs=lambda c: first_window(c) is not None),
    Word(
        "layer_types",
        NONE | LIST_OF_NAMES,
        None,
        null=_smollm3_types,
        to=("pattern",),
        ours=_smollm3_pattern,
        theirs=lambda c: [type_by_window(c.fields_of_layer(i)) for i in range(c.num_layers)],
    ),
    checks=(turning_is_known, layers_are_known, _windows_are_used),
    vocab_size=128256,
    hidden_size=2048,
    intermediate_size=11008,
    num_hidden_layers=36,
    num_attention_heads=16,
    num_key_value_heads=4,
    max_position_embeddings=32768,
    sliding_window=None,
    rope_parameters=2_000_000.0,
    tie_word_embeddings=True,
)
