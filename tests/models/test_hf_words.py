"""The words of config.json as te_jax.hf declares them, by what transformers' classes say of them: defaults.json of
tests/hf_fixtures, which defaults.py there writes."""

import json
import math
import time
from dataclasses import replace

import pytest
import word_table
from hf_folders import FIXTURES, differences
from wrong_words import OTHERS, ROPES

from te_jax import hf
from te_jax.hf.families import FAMILIES
from te_jax.hf.words import ABSENT, Said

pytest.importorskip("safetensors")

TABLE = json.loads((FIXTURES / "defaults.json").read_text())
EVERY = TABLE["every"]
NAMES = sorted(path.parent.name for path in FIXTURES.glob("*/expected.npz"))


# What the default of a class would have to be for te_jax to read it: experts next to a wider MLP, half of 42 channels.
LEAST = {"granitemoehybrid": dict(num_local_experts=0), "glm4_moe": dict(head_dim=128)}


def declared(family):
    """{name: its word}, other names too."""
    return {name: word for word in FAMILIES[family].words for name in (*word.also, word.name)}


def is_kept(word):
    """Whether te_jax computes nothing by it."""
    return not word.to and word.theirs is None


def defaults(family):
    """A config.json that says all that transformers' class has by default."""
    words = {name: default for name, (_, default) in (EVERY | TABLE[family]["words"]).items()}
    words |= dict(is_encoder_decoder=True) if family == "t5" else {}
    words |= LEAST.get(family, {})
    theta = TABLE[family]["theta"]
    table = (
        {of: dict(rope_theta=each) for of, each in theta.items()} if isinstance(theta, dict) else {"rope_theta": theta}
    )
    return words | (dict(rope_parameters=TABLE[family].get("rope", table)) if theta else {})


def refused(family, found, name):
    """Whether it is refused with an error that names config.json, the family and the word."""
    try:
        FAMILIES[family].read(found)
    except (TypeError, ValueError) as error:
        assert f"config.json of a {family}" in str(error) and name in str(error), (family, found.get(name), str(error))
        return True
    return False


@pytest.mark.parametrize("family", FAMILIES)
def test_each_word_of_transformers_is_declared(family):
    """With its default; and a config.json may lack all of them."""
    words, known = declared(family), EVERY | TABLE[family]["words"]
    assert known.keys() <= words.keys()
    for name, (_, default) in known.items():
        word = words[name]
        if name == "rope_parameters":
            assert word.default == TABLE[family]["theta"]
        elif name in TABLE[family]["words"] and not (is_kept(word) and word.default is ABSENT):
            assert word.default == default, name
    least = LEAST.get(family, {})
    said = FAMILIES[family].said(least)
    assert {name: said[name] for name in TABLE[family]["derived"]} == TABLE[family]["derived"]
    everything = defaults(family)
    whole = FAMILIES[family].read(everything)
    assert whole == FAMILIES[family].read(least)
    for name in everything.keys() - least.keys():
        without = {key: value for key, value in everything.items() if key != name}
        assert FAMILIES[family].read(without) == whole, name


VALUES = dict(int=3, float=0.5, bool=True, str="4096", null=None, dict={}, list=[])
NEVER = (
    *(math.nan, math.inf, -math.inf, 10**400, -(10**400), -7, -0.5, "false", "", [[]], [None], [{}], {"a": {"b": [1]}}),
    *({"full_attention": {"rope_theta": 7.0}}, ["sliding_attention"]),
)


def of_a_wrong_kind(types):
    """Values that transformers' types do not take."""
    for name, value in VALUES.items():
        if name not in types and not (name == "int" and "float" in types):
            yield value


@pytest.mark.parametrize("family", FAMILIES)
def test_no_wrong_value_is_taken(family):
    """Each word with values of other types than transformers' class has, and with what no such word is. What te_jax
    computes nothing by may be null."""
    everything, words, count = defaults(family), declared(family), 0
    for name, (types, _) in (EVERY | TABLE[family]["words"]).items():
        word = words[name]
        for value in of_a_wrong_kind(types):
            may = value is None and (word.null is not None or is_kept(word)) or (name, value) == ("dtype", {})
            assert refused(family, everything | {name: value}, name) or may, (name, value)
            count += 1
        for value in NEVER:
            by_type = isinstance(word.default, dict) and isinstance(value, dict) and value.keys() <= word.default.keys()
            assert is_kept(word) or by_type or refused(family, everything | {name: value}, name), (name, value)
            count += 1
    assert count > 250


@pytest.mark.parametrize("family", FAMILIES)
def test_other_names_win_as_in_transformers(family):
    """Of two names that both are there; and either says the same where it is the only one."""
    words = declared(family)
    for name, other, winner in TABLE[family]["both"]:
        word = words[name]
        assert word is words[other] and word.also
        both = {name: 8, other: 16}
        assert word.value("", Said(both)) == both[winner], (name, other)
        assert word.value("", Said({name: 8})) == word.value("", Said({other: 8})) == 8


@pytest.mark.parametrize("words, due", TABLE["rope"])
def test_rope_stands_in_several_places(words, due):
    said = FAMILIES["llama"].said(words)["rope_parameters"]
    assert said == {name: value for name, value in due.items() if name != "type"}


def test_no_wrong_rope_is_taken():
    for family, tables in ROPES.items():
        for table in tables:
            for name in ("rope_parameters", "rope_scaling"):
                assert refused(family, {name: table}, "rope_"), table
        for words in (dict(rope_theta=0), dict(rope_theta="x"), dict(partial_rotary_factor=0.5)):
            assert refused(family, words, next(iter(words))), words


@pytest.mark.parametrize("family", OTHERS)
def test_other_functions_are_refused(family):
    where = f"config.json of a {family}: "
    for words in (*OTHERS[family], dict(per_layer_config={"0": {}}), dict(configuration_files=["config.4.0.0.json"])):
        with pytest.raises(ValueError, match=where):
            FAMILIES[family].read(words)


@pytest.mark.parametrize("family", FAMILIES)
def test_great_sizes_cost_nothing(family):
    """They are compared with the files later; until then nothing is as long as they say."""
    great = {
        word.name: most
        for word in FAMILIES[family].words
        if word.to
        for most in (2**31 - 1, 10_000)
        if word.kind.accepts(most) and isinstance(word.default, int)
    }
    begin = time.process_time()
    for name, size in great.items():
        try:
            FAMILIES[family].read(LEAST.get(family, {}) | {name: size})
        except ValueError as error:
            assert f"config.json of a {family}" in str(error)
    assert time.process_time() - begin < 2


# -- what is written --------------------------------------------------------------------------------------------


DEFAULT = {"num_hidden_layers", "intermediate_size", "vocab_size"}
CHANGED = {  # a family's or fixture's words of what is changed below
    "gpt2": {"n_layer", "n_inner", "vocab_size"},
    "falcon": {"num_hidden_layers", "ffn_hidden_size", "vocab_size"},
    "t5": {"num_layers", "num_decoder_layers", "d_ff", "vocab_size"},
    "gemma2": {"num_hidden_layers", "layer_types", "intermediate_size", "vocab_size"},
    "deepseek_v3": {"num_hidden_layers", "moe_intermediate_size", "vocab_size"},
    "granitemoehybrid": DEFAULT | {"shared_intermediate_size", "layer_types"},
    "nemotron_h": {"layers_block_type", "intermediate_size", "vocab_size"},
    "qwen2_moe": {"num_hidden_layers", "moe_intermediate_size", "vocab_size", "layer_types"}
    | {"shared_expert_intermediate_size"},
    "qwen3_moe": {"num_hidden_layers", "moe_intermediate_size", "vocab_size"},
    **dict.fromkeys(
        ("qwen3_next", "qwen3_5_moe_text"),
        {"num_hidden_layers", "moe_intermediate_size", "vocab_size", "layer_types", "shared_expert_intermediate_size"},
    ),
    "qwen3_5_text": DEFAULT | {"layer_types"},
    "kimi_linear": {"num_hidden_layers", "moe_intermediate_size", "vocab_size", "layer_types", "mlp_layer_types"},
    **dict.fromkeys(("gemma3_text", "olmo3", "gpt_oss", "modernbert"), DEFAULT | {"layer_types"}),
    "glm4_moe": {"num_hidden_layers", "moe_intermediate_size", "vocab_size"},
    "smollm3": DEFAULT | {"layer_types", "no_rope_layers"},
    "llama4_text": {"intermediate_size", "vocab_size"},
    "gemma4_text": {"intermediate_size", "vocab_size", "per_layer_config", "global_head_dim"}
    | {"num_global_key_value_heads", "vocab_size_per_layer_input"},
    **dict.fromkeys(
        ("gemma4-e2b", "gemma4-a4b"),
        {"intermediate_size", "vocab_size", "per_layer_config", "global_head_dim", "vocab_size_per_layer_input"},
    ),
    **dict.fromkeys(("siglip_vision_model", "vit"), DEFAULT - {"vocab_size"}),
    **dict.fromkeys(
        ("qwen2", "qwen3", "qwen2_vl_text"), {"num_hidden_layers", "layer_types", "intermediate_size", "vocab_size"}
    ),
}


@pytest.mark.parametrize("name", NAMES)
def test_words_are_written_as_they_were_read(name):
    """Also those of no model, and of a model that was changed since, all but those that say so."""
    found = json.loads((FIXTURES / name / "config.json").read_text())
    config = hf.read_config(FIXTURES / name)
    family = FAMILIES[config.family]
    assert family.write(config) == found and config.origin.folder == str(FIXTURES / name)
    assert family.read(family.write(replace(config, origin=None))) == config
    decoder = None if config.num_decoder_layers is None else 5
    other = replace(config, num_layers=4, num_decoder_layers=decoder).with_layer(mlp_hidden_size=44)
    other = replace(other, vocab_size=97) if config.vocab_size else other
    wide = lambda fields: {**fields, "mlp_hidden_size": 88} if "mlp_hidden_size" in fields else fields
    other = replace(other, pattern=tuple(map(wide, other.pattern))) if family.name == "gemma4_text" else other
    assert family.read(family.write(other)) == other
    assert differences(found, family.write(other)) == CHANGED.get(name, CHANGED.get(family.name, DEFAULT))


def test_a_changed_word_leaves_none_of_its_other_names(tmp_path):
    words = json.loads((FIXTURES / "llama3/config.json").read_text())
    words |= dict(rope_scaling=words.pop("rope_parameters"), rope_theta=7.0, partial_rotary_factor=None, mine=[{}])
    (tmp_path / "config.json").write_text(json.dumps(words))
    config = hf.read_config(tmp_path)
    assert FAMILIES["llama"].write(config) == words
    other = config.with_layer(rotary_pos_emb_windows=(1, 99.0), rotary_pos_emb_scaling=None)
    written = FAMILIES["llama"].write(other)
    assert differences(words, written) == {"rope_scaling", "rope_theta", "partial_rotary_factor", "rope_parameters"}
    assert written["rope_parameters"] == dict(rope_type="default", rope_theta=99.0) and written["mine"] == [{}]
    assert FAMILIES["llama"].read(written).with_layer(rotary_pos_emb_scaling=None) == other
    mistral = replace(config, family="mistral")
    assert FAMILIES["mistral"].write(mistral)["sliding_window"] is None


def test_the_documents_have_these_words():
    assert word_table.PATH.read_text() == word_table.text(), "run `python tests/support/word_table.py`"
