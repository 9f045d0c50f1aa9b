"""Gemma 4 (text): layers that see all tokens have heads of another width, and a RoPE of which some pairs turn; small
models share keys and have inputs of layers, others have experts next to an MLP."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from te_jax.core.check import BOOL, NONE, integer
from te_jax.hf import rules
from te_jax.hf.decoders import OF_GEMMA, ONE, QK_NORMS, gemma_rules, of_llama
from te_jax.hf.family import LAYER, at_most, epsilon, width_of
from te_jax.hf.layered import Fields, first_of, first_window, layers_are_known, rope_and_window
from te_jax.hf.rotary import TYPES_BY_WINDOW, RotaryByType, type_by_window
from te_jax.hf.rules import SAME, TensorRule
from te_jax.hf.words import ABSENT, LIST_OF_NAMES, SIZE, TABLE, Said, Word, only, stray, unused
from te_jax.models import ModelConfig, families
from te_jax.models.patterns import share_keys

_OF_FULL = {"head_dim": "kv_channels", "num_key_value_heads": "num_gqa_groups"}
_SIZES_OF_EXPERTS = {
    "num_experts": "num_experts",
    "top_k_experts": "num_experts_per_tok",
    "moe_intermediate_size": "intermediate_dim",
}
_ROPES = {
    "sliding_attention": dict(rope_type="default", rope_theta=10_000.0),
    "full_attention": dict(rope_type="proportional", rope_theta=1_000_000.0, partial_rotary_factor=0.25),
}


def _every_sixth(said: Said) -> list[str]:
    """sliding_attention, and full_attention in each sixth layer and the last"""
    count = said["num_hidden_layers"]
    return [TYPES_BY_WINDOW[(i + 1) % 6 == 0 or i + 1 == count] for i in range(count)]


def _of_full(said: Said) -> Fields:
    """What layers that see all tokens have of their own: as `per_layer_config` says, or else two words."""
    table, same = said["per_layer_config"], said["attention_k_eq_v"]
    if table is ABSENT:
        groups = said["num_global_key_value_heads"] if same else None
        own = dict(head_dim=said["global_head_dim"], num_key_value_heads=groups)
    else:
        own = next(iter(table.values()), {})
    found = {field: own.get(word) or said[word] for word, field in _OF_FULL.items()}
    return found | (dict(keys_as_values=True) if same else {})


def _first_and_pattern_of_gemma4(said: Said) -> tuple[Any, Any]:
    types = said["layer_types"]
    fields = {kind: rope_and_window(said, kind) for kind in {*types}}
    fields |= {kind: made | _of_full(said) for kind, made in fields.items() if kind == "full_attention"}
    wide = dict(mlp_hidden_size=2 * said["intermediate_size"]) if said["use_double_wide_mlp"] else {}
    first, rest = share_keys(types, said["num_kv_shared_layers"], fields, wide)
    return first, tuple(map(dict, rest))


def _experts_of_gemma4(said: Said) -> tuple[Fields | None, bool | None]:
    if not said["enable_moe_block"]:
        return None, None
    return {field: said[word] for word, field in _SIZES_OF_EXPERTS.items()} | dict(
        router_norm=True, expert_scales=True
    ), True


def _size_of_experts(field: str) -> Callable[[ModelConfig], Any]:
    return lambda c: (c.layer.get("moe") or {}).get(field, ABSENT)


def _experts_are_known(said: Said) -> tuple[str, str] | None:
    words = _SIZES_OF_EXPERTS if said["enable_moe_block"] else ()
    missing = next((word for word in words if said[word] is None), None)
    if missing is not None:
        return missing, "enable_moe_block is True; pass a positive int"
    return at_most("top_k_experts", "num_experts")(said) if words else None


def _takes(c: ModelConfig) -> int:
    """How many layers take keys and values."""
    return sum(c.fields_of_layer(i).get("kv_sharing") == "take" for i in range(c.num_layers))


def _is_wide(c: ModelConfig) -> bool:
    return _full(c).get("mlp_hidden_size") != c.layer.get("mlp_hidden_size")


def _some_keys_are_shared(said: Said) -> tuple[str, str] | None:
    types, shared = said["layer_types"], said["num_kv_shared_layers"]
    if shared and {*types[: max(len(types) - shared, 0)]} != {*types}:
        return "num_kv_shared_layers", "pass fewer, so that layers of each type come before that have keys of their own"
    return None


def _keys_of_sharing_layers(found: Mapping[str, Any]) -> Callable[[str], bool]:
    """Whether a tensor is of keys or values of a layer that takes another one's: published files have some."""
    count, shared = found.get("num_hidden_layers", 30), found.get("num_kv_shared_layers", 0)
    names = ("k_proj", "v_proj", "k_norm")
    ends = tuple(f"layers.{i}.self_attn.{name}.weight" for i in range(count - shared, count) for name in names)
    return lambda name: name.endswith(ends)


def _full(c: ModelConfig) -> Mapping[str, Any]:
    """The fields of the last layer, which sees all tokens."""
    return c.fields_of_layer(c.num_layers - 1)


def _groups_of_full(c: ModelConfig) -> int | None:
    own = _full(c)
    return own.get("num_gqa_groups") or own["num_attention_heads"] if first_of(c, "keys_as_values") else None


def _tables_are_as_long(said: Said) -> tuple[str, str] | None:
    vocab = said["vocab_size"]
    if said["hidden_size_per_layer_input"] and said["vocab_size_per_layer_input"] != vocab:
        return "vocab_size_per_layer_input", f"te_jax reads vocab_size, {vocab}"
    return None


def _full_attention_is_last(said: Said) -> tuple[str, str] | None:
    if said["layer_types"][-1] != "full_attention":
        return "layer_types", "transformers makes the last one 'full_attention': say so"
    return None


def _full_layers_are_alike(said: Said) -> tuple[str, str] | None:
    table, types = said["per_layer_config"], said["layer_types"]
    if table is ABSENT or table == {}:
        return None
    due = {str(i) for i, name in enumerate(types) if name == "full_attention"}
    (own, *others), of_all = table.values(), said["num_key_value_heads"]
    known = isinstance(own, Mapping) and own.keys() <= _OF_FULL.keys() and all(map(SIZE.accepts, own.values()))
    if known and not said["attention_k_eq_v"] and own.get("num_key_value_heads", of_all) != of_all:
        return "per_layer_config", f"without attention_k_eq_v each layer has num_key_value_heads={of_all}"
    if (
        {key.lstrip("0") or "0" for key in table} != due
        or len(table) != len(due)
        or not known
        or others != [own] * len(others)
    ):
        why = f"te_jax reads {' and '.join(_OF_FULL)}, the same for each layer of full_attention and for no others"
        return "per_layer_config", why
    return None


def _heads_fit(said: Said) -> tuple[str, str] | None:
    own, heads = _of_full(said), said["num_attention_heads"]
    word = "per_layer_config" if said["per_layer_config"] is not ABSENT else "global_head_dim"
    if own["kv_channels"] % 2:
        return word, "RoPE turns pairs of channels: pass an even head_dim"
    if heads % own["num_gqa_groups"]:
        return word.replace("global_head_dim", "num_global_key_value_heads"), f"pass a divisor of {heads} heads"
    return None


_BESIDES_GEMMA3 = {  # what layers have besides those of Gemma 3: a field of layers -> {paths: (a name, how it is made)}
    "layer_scalar": {("scalar",): ("layer_scalar", SAME)},
    "moe": {
        ("moe/gate_kernel",): ("router.proj.weight", rules.TURNED),
        ("moe/router_scale",): ("router.scale", SAME),
        ("moe/expert_scale",): ("router.per_expert_scale", SAME),
        ("moe/wi_0", "moe/wi_1"): ("experts.gate_up_proj", rules.GATED_STACK),
        ("moe/wo",): ("experts.down_proj", rules.TURNED_STACK),
        ("moe/scale",): ("pre_feedforward_layernorm_2.weight", SAME),
        ("post_dense_norm/scale",): ("post_feedforward_layernorm_1.weight", SAME),
        ("post_experts_norm/scale",): ("post_feedforward_layernorm_2.weight", SAME),
    },
    "layer_input_size": {
        ("layer_input_gate/kernel",): ("per_layer_input_gate.weight", rules.TURNED),
        ("layer_input_out/kernel",): ("per_layer_projection.weight", rules.TURNED),
        ("post_layer_input_norm/scale",): ("post_per_layer_input_norm.weight", SAME),
    },
}
_TABLES_OF_INPUTS = [
    TensorRule(("layer_input_table",), ("model.embed_tokens_per_layer.weight",), SAME),
    *rules.dense_rules("layer_input_projection", "model.per_layer_model_projection", False),
    *rules.norm_rules("layer_input_norm", "model.per_layer_projection_norm", False),
]


def _gemma4_rules(c: ModelConfig) -> list[TensorRule]:
    """As `gemma_rules` of each kind of layers, and what those have besides."""
    kinds: dict[tuple[Any, ...], list[int]] = {}
    for i in range(c.num_layers):
        fields = c.fields_of_layer(i)
        names = ("num_attention_heads", "num_gqa_groups", "keys_as_values", "kv_sharing")
        kinds.setdefault(tuple(fields.get(name) for name in names), []).append(i)
    made = [rule for rule in gemma_rules(c) if rule.stack is None]
    for layers in kinds.values():
        fields = c.fields_of_layer(layers[0])
        own = replace(c, layer={name: value for name, value in fields.items() if name not in ("hidden_size", "moe")})
        made += [rule._replace(layers=(*layers,)) for rule in gemma_rules(own) if rule.stack is not None]
    for field in filter(c.layer.get, _BESIDES_GEMMA3):
        for paths, (name, form) in _BESIDES_GEMMA3[field].items():
            ours = tuple(f"{LAYER}/{path}" for path in paths)
            made.append(TensorRule(ours, (f"model.layers.{{i}}.{name}",), form, "layers"))
    return made + (_TABLES_OF_INPUTS if c.layer.get("layer_input_size") else [])


GEMMA4_TEXT = of_llama(
    "gemma4_text",
    "Gemma4ForCausalLM",
    replace(families.gemma4(replace(ONE, head_dim=1)), pattern=()),
    *(*OF_GEMMA, *QK_NORMS, epsilon("rms_norm_eps", "qk_norm_eps", "v_norm_eps")),
    stray("attn_logit_softcapping", None),
    stray("rope_scaling", None),
    # "vision": only patches of images see each other.
    unused("use_bidirectional_attention", only(None, "vision"), None),
    Word("sliding_window", SIZE, theirs=lambda c: first_window(c) or ABSENT),
    Word("global_head_dim", SIZE, 512, theirs=lambda c: _full(c).get("kv_channels") or width_of(c)),
    Word("num_global_key_value_heads", NONE | SIZE, None, theirs=_groups_of_full),
    Word("attention_k_eq_v", BOOL, False, theirs=lambda c: first_of(c, "keys_as_values", False)),
    Word("per_layer_config", TABLE, theirs=lambda c: ABSENT),  # wins where it is there
    RotaryByType(
        "rope_parameters",
        NONE | TABLE,
        {name: each["rope_theta"] for name, each in _ROPES.items()},
        types=("default", "linear", "llama3", "proportional"),
        absent=_ROPES,
        scaled=(),
    ),
    Word(
        "layer_types",
        NONE | LIST_OF_NAMES,
        None,
        null=_every_sixth,
        to=("first", "pattern"),
        ours=_first_and_pattern_of_gemma4,
        theirs=lambda c: [type_by_window(c.fields_of_layer(i)) for i in range(c.num_layers)],
    ),
    Word("num_kv_shared_layers", integer(0, 10_000), 0, theirs=_takes),
    Word("use_double_wide_mlp", BOOL, False, theirs=_is_wide),
    Word(
        "hidden_size_per_layer_input",
        integer(0, 2**31 - 1),
        256,
        to=("layer/layer_input_size",),
        ours=lambda said: (said["hidden_size_per_layer_input"] or None,),
        theirs=lambda c: c.layer.get("layer_input_size") or 0,
    ),
    Word("vocab_size_per_layer_input", SIZE, 262144, theirs=lambda c: c.vocab_size),
    *(Word(word, NONE | SIZE, None, theirs=_size_of_experts(field)) for word, field in _SIZES_OF_EXPERTS.items()),
    Word(
        "enable_moe_block",
        BOOL,
        False,
        to=("layer/moe", "layer/mlp_next_to_experts"),
        ours=_experts_of_gemma4,
        theirs=lambda c: c.layer.get("moe") is not None,
    ),
    checks=(
        *(layers_are_known, _full_attention_is_last, _full_layers_are_alike, _heads_fit, _some_keys_are_shared),
        *(_tables_are_as_long, _experts_are_known),
    ),
    tensors=_gemma4_rules,
    vocab_size=262144,
    hidden_size=2304,
    intermediate_size=9216,
    num_hidden_layers=30,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=256,
    max_position_embeddings=131072,
    tie_word_embeddings=True,
    sliding_window=512,
    final_logit_softcapping=None,
)._replace(spare=_keys_of_sharing_layers)
