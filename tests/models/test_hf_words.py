"""The words of config.json as te_jax.hf declares them, by what transformers' classes say of them: defaults.json of
tests/hf_fixtures, which defaults.py there writes."""

import json
import math
import time
from dataclasses import replace

import pytest
import word_table
from hf_folders import FIXTURES, differences

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


LLAMA3 = dict(rope_type="llama3", factor=2.0, low_freq_factor=1.0, high_freq_factor=4.0)
YARN = dict(rope_type="yarn", factor=4.0, mscale=1.0, mscale_all_dim=1.0)
ROPES = {
    "llama": (
        *(dict(rope_type="linear", factor=factor) for factor in (0, -1, 0.5, "2", None, True, math.nan, [2.0])),
        *(dict(rope_type=kind) for kind in (None, 1, [], "linear", "llama3", "yarn", "dynamic", "longrope", "su")),
        *(dict(rope_theta=theta) for theta in (0, -1, 1, None, "1e4", math.inf, [], True)),
        *(LLAMA3 | {name: value} for name in LLAMA3 if name != "rope_type" for value in (0, None, "1", -1, math.nan)),
        *(LLAMA3 | dict(original_max_position_embeddings=value) for value in (0, 1.5, "8", -2, None)),
        *(LLAMA3 | dict(high_freq_factor=0.5), dict(partial_rotary_factor=0.5), dict(full_attention=LLAMA3), [1], "x"),
    ),
    "deepseek_v3": (
        *(YARN | {name: value} for name in ("factor", "beta_fast", "beta_slow") for value in (0, "1", -1, math.nan)),
        *(YARN | {name: value} for name in ("mscale", "mscale_all_dim") for value in (0.5, None, "1", -1, [])),
        *(YARN | dict(truncate=value) for value in (False, None, 1, "yes")),
        *({name: value for name, value in YARN.items() if name != lacks} for lacks in YARN if lacks != "rope_type"),
        *(YARN | dict(attention_factor=1.0), YARN | dict(beta_slow=64.0), dict(rope_type="llama3"), LLAMA3),
    ),
}


def test_no_wrong_rope_is_taken():
    for family, tables in ROPES.items():
        for table in tables:
            for name in ("rope_parameters", "rope_scaling"):
                assert refused(family, {name: table}, "rope_"), table
        for words in (dict(rope_theta=0), dict(rope_theta="x"), dict(partial_rotary_factor=0.5)):
            assert refused(family, words, next(iter(words))), words


OF_GRANITE = (
    *(dict(layer_types=["mamba"] * 31), dict(layer_types=["mlp"] * 32), dict(layer_types=["sliding_attention"] * 32)),
    *(
        dict(mamba_d_head=32),
        dict(mamba_expand=3, mamba_d_head=64),
        dict(mamba_n_heads=3),
        dict(mamba_n_groups=3),
        dict(mamba_d_conv=5),
    ),
    *(dict(position_embedding_type="alibi"), dict(position_embedding_type="rope", head_dim=7), dict(hidden_act="gelu")),
    *(dict(attention_bias=True), dict(logits_scaling=0), dict(residual_multiplier=0)),
    *(dict(time_step_limit=limit) for limit in ([1, 0.5], [0.1], [0.0, "inf"], [{}, 1.0], [-1, 1.0])),
    *(dict(num_key_value_heads=5), dict(rope_parameters=dict(rope_type="linear", factor=2.0))),
)
OF_NEMOTRON = (
    *(dict(layers_block_type=types) for types in ([], ["linear_attention", "sliding_attention"], ["mamba"] * 10_001)),
    *(dict(hybrid_override_pattern=letters) for letters in ("", "MA", "m-")),
    *(dict(layers_block_type=["mlp"], hybrid_override_pattern="M"), dict(num_hidden_layers=5)),
    *(dict(n_groups=3), dict(mamba_num_heads=3), dict(conv_kernel=5), dict(num_key_value_heads=5), dict(n_group=3)),
    *(dict(n_group=4, topk_group=2), dict(num_experts_per_tok=9), dict(topk_group=2), dict(n_shared_experts=2)),
    *(dict(moe_latent_size=0), dict(moe_shared_expert_intermediate_size=7000), dict(tie_word_embeddings=True)),
    *(dict(mlp_hidden_act="silu"), dict(mamba_hidden_act="gelu"), dict(mlp_bias=True), dict(attention_bias=True)),
    *(dict(residual_in_fp32=True), dict(time_step_limit=[1, 0.5]), dict(sliding_window=8)),
)
OTHERS = {  # what would be another function, and was once read past
    "llama": (dict(is_causal=False), dict(sliding_window=8), dict(attention_bias=True), dict(mlp_bias=True)),
    "mistral": (dict(layer_types=["full_attention"] * 32), dict(num_key_value_heads=5), dict(head_dim=7)),
    "qwen2": (dict(use_sliding_window=True), dict(layer_types=["sliding_attention"] * 32)),
    "qwen3": (dict(layer_types=["full_attention"] * 31), dict(attention_bias=True)),
    "mixtral": (dict(router_jitter_noise=0.1), dict(num_experts_per_tok=9)),
    "qwen3_moe": (dict(mlp_only_layers=[0]), dict(decoder_sparse_step=2), dict(num_experts_per_tok=129)),
    "gemma2": (dict(query_pre_attn_scalar=144), dict(use_bidirectional_attention=True), dict(attention_bias=True)),
    "deepseek_v3": (
        *(dict(num_key_value_heads=64), dict(head_dim=32), dict(qk_head_dim=32), dict(qk_rope_head_dim=3)),
        *(dict(n_group=7), dict(topk_group=9), dict(num_experts_per_tok=6), dict(first_k_dense_replace=10**6)),
        *(dict(scoring_func="softmax"), dict(moe_layer_freq=2), dict(attention_bias=True)),
    ),
    "gpt2": (
        dict(activation_function="mish"),
        dict(scale_attn_by_inverse_layer_idx=True),
        dict(scale_attn_weights=False),
        dict(n_head=7),
    ),
    "falcon": (
        *(dict(num_ln_in_parallel_attn=2), dict(num_ln_in_parallel_attn=3), dict(multi_query=False), dict(alibi=True)),
        *(dict(new_decoder_architecture=True), dict(parallel_attn=False), dict(bias=True), dict(head_dim=63)),
    ),
    "granitemoehybrid": (
        *(dict(num_local_experts=0) | words for words in OF_GRANITE),
        *(dict(num_experts_per_tok=9), dict(num_experts_per_tok=0), {}),  # 1024 is no multiple of 11008
    ),
    "nemotron_h": OF_NEMOTRON,
    "granite": (dict(attention_bias=True), dict(mlp_bias=True), dict(sliding_window=8), dict(logits_scaling=0)),
    "gpt_oss": (
        *(dict(num_experts_per_tok=129), dict(sliding_window=None), dict(layer_types=["full_attention"] * 35)),
        *(dict(rope_parameters=dict(rope_type="llama3")), dict(swiglu_limit=0), dict(hidden_act="gelu")),
    ),
    "modernbert": (
        *(dict(norm_bias=True), dict(attention_dropout=0.1), dict(num_attention_heads=7), dict(layer_types=[])),
        *(dict(hidden_activation="silu"), dict(decoder_bias=False), dict(global_attn_every_n_layers=0)),
    ),
    "llama4_text": (
        *(dict(num_experts_per_tok=2), dict(attention_bias=True), dict(no_rope_layers=[1] * 47)),
        *(dict(layer_types=["sliding_attention"] * 48), dict(router_jitter_noise=0.1)),
        dict(layer_types=["chunked_attention"] * 48, attention_chunk_size=None),
    ),
    "qwen2_moe": (
        *(dict(shared_expert_intermediate_size=5000), dict(mlp_only_layers=[1]), dict(decoder_sparse_step=2)),
        *(dict(use_sliding_window=True), dict(num_experts_per_tok=61)),
    ),
    "qwen3_next": (
        *(dict(layer_types=types) for types in ([], ["linear_attention"], ["mamba"] * 48, ["sliding_attention"] * 48)),
        *(dict(linear_num_key_heads=5), dict(linear_conv_kernel_dim=5), dict(attn_output_gate=False)),
        *(dict(shared_expert_intermediate_size=500), dict(num_experts_per_tok=513), dict(mlp_only_layers=[1])),
        *(dict(attention_bias=True), dict(partial_rotary_factor=0.001), dict(num_key_value_heads=5), dict(head_dim=7)),
        *(
            dict(full_attention_interval=0),
            dict(decoder_sparse_step=2),
            dict(hidden_act="gelu"),
            dict(sliding_window=8),
        ),
    ),
    **dict.fromkeys(
        ("qwen3_5_text", "qwen3_5_moe_text"),
        (
            *(dict(layer_types=["linear_attention"]), dict(linear_num_key_heads=5), dict(attn_output_gate=False)),
            *(dict(attention_bias=True), dict(partial_rotary_factor=0.001), dict(rope_parameters=dict(rope_type="su"))),
        ),
    ),
    "kimi_linear": (
        *(dict(layer_types=types) for types in ([], ["linear_attention"] * 26, ["mamba"] * 27)),
        *(dict(mlp_layer_types=types) for types in (["sparse"], ["moe"] * 27)),
        *(dict(linear_attn_config=dict(full_attn_layers=[28], kda_layers=lists)) for lists in ([1], [*range(1, 27)])),
        *(dict(linear_attn_config=dict(kda_layers=lists)) for lists in ([0], ["1"], 3, [True])),
        *(dict(linear_attn_config=dict(short_conv_kernel_size=5)), dict(linear_attn_config=dict(head_dim=0))),
        *(dict(mla_use_nope=False), dict(mla_use_output_gate=True), dict(moe_router_activation_func="softmax")),
        *(dict(num_key_value_heads=8), dict(num_experts_per_token=257), dict(num_expert_group=3), dict(topk_group=2)),
        *(dict(tie_word_embeddings=True), dict(attention_bias=True), dict(num_nextn_predict_layers=1)),
    ),
    "olmo2": (dict(attention_bias=True), dict(sliding_window=8), dict(layer_types=["sliding_attention"] * 32)),
    "olmo3": (
        *(dict(rope_scaling=dict(type="yarn", factor=2.0)), dict(rope_theta=0), dict(sliding_window=None)),
        *(dict(rope_scaling=YARN | words) for words in ({}, dict(mscale=None, mscale_all_dim=None, beta_slow=64.0))),
        dict(rope_scaling=YARN | dict(mscale=None, mscale_all_dim=None, truncate=False)),
    ),
    "phi3": (
        *(dict(rope_scaling=dict(rope_type="longrope")), dict(partial_rotary_factor=0.01), dict(attention_bias=True)),
        *(dict(partial_rotary_factor=1.5), dict(rope_parameters=dict(partial_rotary_factor=0.52))),
    ),
    "glm4_moe": (
        {},  # 21 channels turn
        *(dict(head_dim=128) | words for words in (dict(n_group=3), dict(topk_group=2), dict(num_experts_per_tok=129))),
        *(dict(head_dim=128) | words for words in (dict(sliding_window=8), dict(num_key_value_heads=7))),
    ),
    "gemma3_text": (
        *(dict(layer_types=["full_attention"] * 25), dict(sliding_window=None), dict(attention_bias=True)),
        *(dict(use_bidirectional_attention=True), dict(rope_parameters=dict(rope_type="default"))),
        *(dict(rope_scaling=dict(rope_type="dynamic", factor=2.0)), dict(rope_local_base_freq=0)),
    ),
    "smollm3": (
        *(dict(no_rope_layers=[1] * 35), dict(layer_types=["full_attention"] * 35), dict(mlp_bias=True)),
        *(dict(layer_types=["sliding_attention"] * 36, **words) for words in ({}, dict(sliding_window=8))),
        *(dict(layer_types=["chunked_attention"] * 36), dict(attention_bias=True), dict(no_rope_layer_interval=0)),
    ),
    "siglip_vision_model": (
        *(dict(hidden_act="gelu"), dict(num_attention_heads=7), dict(patch_size=225), dict(image_size=15)),
    ),
    "qwen2_vl_text": (
        *(dict(rope_parameters=dict(mrope_section=sizes)) for sizes in ([16, 24, 23], [32, 32], ["16", 24, 24])),
        *(dict(rope_scaling=dict(type="mrope", mrope_interleaved=True)), dict(layer_types=["sliding_attention"] * 80)),
        *(dict(use_sliding_window=True), dict(num_attention_heads=32)),
    ),
    "qwen3_vl_text": (
        *(dict(rope_parameters=dict(mrope_interleaved=False)), dict(rope_scaling=dict(type="mrope"))),
        *(dict(rope_parameters=dict(mrope_section=[-1, 1, 1])), dict(sliding_window=8), dict(attention_bias=True)),
    ),
    "vit": (
        *(dict(architectures=name) for name in (["ViTForMaskedImageModeling"], ["ViTModel"] * 2)),
        *(dict(pooler_output_size=8), dict(pooler_act="relu"), dict(qkv_bias=False), dict(hidden_act="gelu_new")),
        dict(architectures=["ViTForImageClassification"], id2label={}),
    ),
    "bert": (dict(position_embedding_type="relative_key"), dict(is_decoder=True), dict(num_attention_heads=7)),
    "t5": (
        *(dict(dense_act_fn="gelu"), dict(is_gated_act=True), dict(feed_forward_proj="gated-silu")),
        *(dict(feed_forward_proj="gated-gelu", dense_act_fn="gelu"), dict(relative_attention_max_distance=64)),
    ),
}


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
CHANGED = {  # a family's words of what is changed below
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
    assert family.read(family.write(other)) == other
    assert differences(found, family.write(other)) == CHANGED.get(family.name, DEFAULT)


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
