"""Writes defaults.json next to this file, with transformers, which the tests do not need.

    pip install torch transformers
    python tests/hf_fixtures/defaults.py

What transformers' configuration classes say of the words of config.json, for tests/models/test_hf_words.py, by family:

words:   {word: [types that it may have, default]}, without those that every class has (`every`).
every:   the same of the words of every class.
theta:   the base of RoPE where none is said, or {type of layers: it}; null: the class has none.
both:    [name, other name, which of them wins where both are given].
rope:    the dict of RoPE where none is said, if that stretches it.
derived: {word: its value in the class made without arguments}, where that is not the default.
rope:    [words of a Llama's config.json, the `rope_parameters` that its model reads].
"""

import dataclasses
import json
import pathlib
import types
import typing

import torch
import transformers as hf

HERE = pathlib.Path(__file__).parent
FAMILIES = (
    *("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe", "gemma2", "deepseek_v3"),
    *("gpt2", "falcon", "bert", "t5", "granitemoehybrid", "nemotron_h", "smollm3", "granite"),
    *("phi3", "glm4_moe", "gemma3_text", "olmo2", "olmo3", "gpt_oss", "modernbert", "llama4_text", "qwen2_moe"),
    *("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "kimi_linear", "gemma4_text"),
    *("siglip_vision_model", "vit", "qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text"),
)
NAMES = {int: "int", float: "float", bool: "bool", str: "str", type(None): "null", dict: "dict", list: "list"}
DERIVED = (
    *("head_dim", "qk_head_dim", "num_key_value_heads", "num_kv_heads", "ffn_hidden_size", "num_decoder_layers"),
    *("dense_act_fn", "is_gated_act", "scale_decoder_outputs", "tie_word_embeddings"),
)
_LINEAR, _OTHER = dict(rope_type="linear", factor=2.0), dict(rope_type="linear", factor=4.0, rope_theta=7.0)
_LLAMA3 = dict(rope_type="llama3", factor=2.0, low_freq_factor=1.0, high_freq_factor=4.0)
ROPES = (
    dict(),
    dict(rope_theta=9.0),
    dict(rope_scaling=None, rope_theta=9.0),
    dict(rope_scaling=_LINEAR),
    dict(rope_scaling=_LINEAR, rope_theta=9.0),
    dict(rope_scaling=_LINEAR, rope_parameters=_OTHER),
    dict(rope_scaling=_LINEAR, rope_parameters=_OTHER, rope_theta=9.0),
    dict(rope_scaling={}, rope_parameters=_OTHER),
    dict(rope_parameters=_OTHER, rope_theta=9.0),
    dict(rope_scaling=dict(type="linear", factor=3.0)),
    dict(rope_scaling=dict(type="llama3", rope_type="linear", factor=3.0)),
    dict(rope_parameters=_LLAMA3),
    dict(rope_parameters=_LLAMA3, max_position_embeddings=4096),
    dict(rope_parameters=_LLAMA3 | dict(original_max_position_embeddings=64)),
    dict(rope_parameters=_LLAMA3 | dict(original_max_position_embeddings=64), original_max_position_embeddings=32),
)


def types_of(annotation) -> list[str]:
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union:
        return sorted({name for each in typing.get_args(annotation) for name in types_of(each)})
    origin = typing.get_origin(annotation) or annotation
    if origin is typing.Literal:
        return ["str"]
    return [NAMES.get(origin, "dict")]


def words_of(cls, base=()) -> dict:
    hints = typing.get_type_hints(cls, localns=dict(torch=torch))
    found = {}
    for field in dataclasses.fields(cls):
        if field.name not in base:
            found[field.name] = [types_of(hints[field.name]), field.default]
    return found


def both_of(cls, name: str, other: str) -> list[str]:
    made = cls(**{name: 8, other: 16})
    return [name, other, name if getattr(made, name) == 8 else other]


def family(name: str, base: dict) -> dict:
    cls = hf.CONFIG_MAPPING[name]
    words, made = words_of(cls, base), cls()
    made.allow_global_per_layer_attribute_access = True  # of Gemma 4, whose layers differ
    now = {word: getattr(made, word) for word in words} | {w: v for w, v in made.to_dict().items() if w not in base}
    derived = {word: value for word, value in now.items() if word not in words or value != words[word][1]}
    derived = {word: value for word, value in derived.items() if isinstance(value, int | str) and word in DERIVED}
    names = [word for word in cls.attribute_map.items() if "layer_types" not in word]  # whose values are no numbers
    names = [word for word in names if not isinstance(getattr(made, word[0]), bool)]
    both = [both_of(cls, *pair) for word in names for pair in (word, word[::-1])]
    both += [both_of(cls, "hidden_size", "n_embed")] if name == "falcon" else []
    ropes = getattr(made, "rope_parameters", None) or {}
    by_type = {of: table["rope_theta"] for of, table in ropes.items() if isinstance(table, dict)}
    theta = (by_type or cls.default_theta) if "rope_parameters" in words else None
    tables = ropes.values() if by_type else [ropes]
    stretched = dict(rope=ropes) if any(each.get("rope_type", "default") != "default" for each in tables) else {}
    return dict(words=words, derived=derived, theta=theta, both=both) | stretched


def rope_of(words: dict) -> dict:
    made = hf.LlamaConfig(**json.loads(json.dumps(words)))
    made.standardize_rope_params()  # as the model does again
    return made.rope_parameters


def main():
    hf.logging.set_verbosity_error()
    base = words_of(hf.PreTrainedConfig)
    table = dict(transformers=hf.__version__, every=base, rope=[[words, rope_of(words)] for words in ROPES])
    table |= {name: family(name, base) for name in FAMILIES}
    lines = (f"{json.dumps(key)}: {json.dumps(value, sort_keys=True)}" for key, value in table.items())
    (HERE / "defaults.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
