"""What a folder says of a model, as it was published, and what of it is carried to the folder that is saved."""

import json
import shutil
from dataclasses import replace

import jax
import numpy as np
import pytest
from hf_folders import FIXTURES, differences

from te_jax import hf
from te_jax.hf.families import FAMILIES
from te_jax.hf.words import check_words
from te_jax.models import published
from te_jax.ops.rope import PositionSections

pytest.importorskip("safetensors")


def test_letters_of_nemotron_say_its_layers(tmp_path):
    """As older config.json have them, which are written as they were read, but for what was changed."""
    words = json.loads((FIXTURES / "nemotron-h/config.json").read_text())
    types = words.pop("layers_block_type")
    words |= dict(hybrid_override_pattern="M-*-M", num_hidden_layers=5)
    (tmp_path / "config.json").write_text(json.dumps(words))
    config, family = hf.read_config(tmp_path), FAMILIES["nemotron_h"]
    assert config == hf.read_config(FIXTURES / "nemotron-h") and family.write(config) == words
    assert differences(words, family.write(replace(config, vocab_size=9))) == {"vocab_size"}
    fewer = family.write(replace(config, num_layers=3))
    assert differences(words, fewer) == {"hybrid_override_pattern", "num_hidden_layers"}
    assert (fewer["hybrid_override_pattern"], fewer["num_hidden_layers"]) == ("M-*", 3)
    for said in (dict(layer_types=types), dict(layers_block_type=["mlp"], layer_types=types)):
        assert family.read(words | said) == config
    with pytest.raises(ValueError, match=r"layers_block_type is \['both', .*pass for each layer one of"):
        family.write(replace(config, pattern=()))


def test_a_table_of_kimi_says_its_layers(tmp_path):
    """As published ones have it: it is written again, and as the model is now where that was changed."""
    words = json.loads((FIXTURES / "kimi-linear/config.json").read_text())
    for name in ("layer_types", "mlp_layer_types", "linear_head_dim", "linear_num_heads", "linear_conv_kernel_dim"):
        del words[name]
    table = dict(full_attn_layers=[2], kda_layers=[1, 3], head_dim=8, num_heads=3, short_conv_kernel_size=4, more="x")
    words |= dict(linear_attn_config=table)
    (tmp_path / "config.json").write_text(json.dumps(words))
    config, family = hf.read_config(tmp_path), FAMILIES["kimi_linear"]
    assert config == hf.read_config(FIXTURES / "kimi-linear") and family.write(config) == words
    other = replace(config, num_layers=4)
    written = family.write(other)
    assert written["linear_attn_config"] == table | dict(full_attn_layers=[2, 4]) and family.read(written) == other
    assert family.read(words | dict(layer_types=["full_attention"] * 3)).pattern[0]["kv_lora_rank"] == 16


@pytest.mark.parametrize("scalar", [12, 15])
def test_two_scales_of_logits_of_gemma2(scalar, tmp_path):
    """YaRN's, and the root of a number that config.json has: one is written as it was read, both are refused."""
    yarn = dict(rope_type="yarn", factor=8.0, rope_theta=100.0, original_max_position_embeddings=16)
    words = json.loads((FIXTURES / "gemma2/config.json").read_text()) | dict(query_pre_attn_scalar=scalar)
    family, scales = FAMILIES["gemma2"], {}
    for name, rope in dict(plain=dict(rope_type="default", rope_theta=100.0), yarn=yarn).items():
        said = words | dict(rope_parameters=rope)
        if name == "yarn" and scalar != 12:
            with pytest.raises(ValueError, match="query_pre_attn_scalar is 15; next to YaRN.* te_jax reads 12"):
                family.read(said)
            continue
        config = family.read(said)
        scales[name] = config.layer.get("attn_logit_scale")
        assert family.read(family.write(config)) == config and family.write(config)["query_pre_attn_scalar"] == scalar
    assert scales["plain"] == (None if scalar == 12 else pytest.approx(15**-0.5))
    assert scalar != 12 or scales["yarn"] == pytest.approx((1 + 0.1 * np.log(8)) ** 2 / 12**0.5)


# As they were published, but for what is kept.
MULTIPLIERS = dict(embedding_multiplier=12, attention_multiplier=0.0078125, residual_multiplier=0.22, logits_scaling=6)
EVERY_TENTH = ["mamba"] * 5 + ["attention"] + ["mamba"] * 4
FULL_OF_KIMI = [*range(4, 27, 4), 27]
OF_KIMI = dict(full_attn_layers=FULL_OF_KIMI, kda_layers=[i for i in range(1, 28) if i not in FULL_OF_KIMI])
OF_KIMI |= dict(head_dim=128, num_heads=32, short_conv_kernel_size=4)


def test_sections_of_positions_in_their_forms():
    """As Qwen2-VL was published, whose type of RoPE is another name of the default; and as te_jax writes them."""
    for family, sections in (
        ("qwen2_vl_text", PositionSections((30, 20, 14))),
        ("qwen3_vl_text", PositionSections((30, 20, 14), interleaved=True)),
        ("qwen3_5_text", PositionSections((12, 10, 10), interleaved=True)),
    ):
        own = dict(mrope_section=[*sections.sizes]) | (dict(mrope_interleaved=True) if sections.interleaved else {})
        config = FAMILIES[family].read(dict(rope_scaling=own | dict(rope_type="default"), rope_theta=7.0))
        assert config.layer["rotary_pos_emb_sections"] == sections and config.family == family
        assert config.layer["rotary_pos_emb_windows"] == (1, 7.0)
        written = FAMILIES[family].write(config)
        assert written["rope_parameters"].items() >= own.items() and FAMILIES[family].read(written) == config
    older = dict(rope_scaling=dict(type="mrope", mrope_section=[30, 20, 14]), rope_theta=7.0)
    assert FAMILIES["qwen2_vl_text"].read(older).layer["rotary_pos_emb_sections"] == PositionSections((30, 20, 14))
    other = published("llama3-8b").with_layer(rotary_pos_emb_sections=sections)
    with pytest.raises(ValueError, match="rotary_pos_emb_sections is .*, which config.json has no word for"):
        FAMILIES["llama"].write(other)
    of_some = replace(published("llama3-8b"), pattern=({}, dict(rotary_pos_emb_sections=sections)))
    with pytest.raises(ValueError, match="layer 1 has rotary_pos_emb_sections=.*, which config.json of a llama has no"):
        check_words("llama", of_some, FAMILIES["llama"].read(FAMILIES["llama"].write(of_some)))


@pytest.mark.parametrize("name", ["qwen2-vl", "qwen3-vl"])
def test_tokens_with_three_positions(name):
    """The logits that transformers has where times, rows and columns differ, in f32 within 1e-5 of the largest."""
    due = np.load(FIXTURES / name / "expected.npz")
    model, variables = hf.load(FIXTURES / name)
    logits = jax.jit(model.apply)(variables, due["tokens"], positions=due["places"])
    np.testing.assert_allclose(logits, due["placed"], rtol=0, atol=1e-5 * np.abs(due["placed"]).max())
    assert np.abs(due["placed"] - due["logits"]).max() > 0.1


HYBRIDS = {
    "granite4-h-tiny": MULTIPLIERS
    | dict(hidden_size=1536, num_hidden_layers=40, num_attention_heads=12, num_key_value_heads=4, vocab_size=100352)
    | dict(intermediate_size=512, shared_intermediate_size=1024, num_local_experts=64, num_experts_per_tok=6)
    | dict(mamba_d_state=128, mamba_n_groups=1, mamba_n_heads=48, mamba_d_head=64, mamba_expand=2, mamba_d_conv=4)
    | dict(layer_types=4 * EVERY_TENTH, rms_norm_eps=1e-5, tie_word_embeddings=True, position_embedding_type="nope"),
    "nemotron-3-nano-30b-a3b": dict(hidden_size=2688, num_attention_heads=32, num_key_value_heads=2, head_dim=128)
    | dict(hybrid_override_pattern="MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME", num_hidden_layers=52)
    | dict(mamba_num_heads=64, mamba_head_dim=64, ssm_state_size=128, n_groups=8, conv_kernel=4, vocab_size=131072)
    | dict(n_routed_experts=128, num_experts_per_tok=6, n_group=1, topk_group=1, routed_scaling_factor=2.5)
    | dict(moe_intermediate_size=1856, moe_shared_expert_intermediate_size=3712, intermediate_size=1856)
    | dict(layer_norm_epsilon=1e-5, n_shared_experts=1, norm_topk_prob=True),
    # As it says layers, and what differs from its class.
    "qwen3-next-80b-a3b": dict(full_attention_interval=4, rope_theta=10_000_000, max_position_embeddings=262144),
    "qwen3.5-9b": dict(full_attention_interval=4, rope_theta=10_000_000),
    "kimi-linear-48b-a3b": dict(linear_attn_config=OF_KIMI, first_k_dense_replace=1, head_dim=72, mla_use_nope=True)
    | dict(num_experts=256, num_experts_per_token=8, num_shared_experts=1, num_expert_group=1, moe_renormalize=True)
    | dict(moe_router_activation_func="sigmoid", use_grouped_topk=True, moe_layer_freq=1, num_nextn_predict_layers=0)
    | dict(rope_scaling=None, rope_theta=10000.0, model_max_length=1048576),
    # Its class has these sizes by default.
    "nemotron-h-8b": dict(hybrid_override_pattern="M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"),
}


@pytest.mark.parametrize("name", HYBRIDS)
def test_published_hybrids(name):
    """Words that are written of a model of te_jax.models say what the published ones say."""
    config = published(name)
    family = FAMILIES[config.family]
    assert family.read(family.write(config)) == family.read(HYBRIDS[name])


FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.json", "vocab.txt", "merges.txt"),
    *("tokenizer.model", "spiece.model", "added_tokens.json", "chat_template.jinja", "chat_template.json"),
    *("generation_config.json", "qwen.tiktoken", "additional_chat_templates/tools.jinja"),
)
NO_FILES = ("README.md", "optimizer.pt", "model.bin", "hf_quant_config.json", "pytorch_model.bin.index.json")


def test_files_of_a_tokenizer_and_of_generation(tmp_path):
    """They are copied, but not over others; words of config.json as well; a folder that is gone is told."""
    source = tmp_path / "source"
    shutil.copytree(FIXTURES / "llama3", source)
    (source / "additional_chat_templates").mkdir()
    for name in (*FILES, *NO_FILES):
        (source / name).write_text(f"{name} of the source")
    words = json.loads((source / "config.json").read_text())
    words |= dict(max_position_embeddings=8192, eos_token_id=[7, 8], bos_token_id=5, mine={"a": [None, 1.5]})
    words |= dict(torch_dtype=words.pop("dtype"))
    (source / "config.json").write_text(json.dumps(words))
    model, variables = hf.load(source)
    to = tmp_path / "to"
    to.mkdir()
    (to / "merges.txt").write_text("mine")
    hf.save(to, model, variables)
    assert differences(words, json.loads((to / "config.json").read_text())) == {"dtype"}
    written = {str(path.relative_to(to)) for path in to.rglob("*") if path.is_file()}
    assert written == {*FILES, "config.json", "model.safetensors"}
    assert (to / "merges.txt").read_text() == "mine"
    assert all((to / name).read_text() == f"{name} of the source" for name in FILES if name != "merges.txt")
    shutil.rmtree(source)
    with pytest.warns(UserWarning, match="source, which the model was read from, is gone"):
        hf.save(tmp_path / "again", model, variables)
    assert json.loads((tmp_path / "again/config.json").read_text())["mine"] == {"a": [None, 1.5]}
