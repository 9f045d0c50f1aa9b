"""te_jax.hf on fixtures of tests/hf_fixtures/make.py: what transformers computes, round trips, what is refused."""

import functools
import json
import math
import shutil
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax.traverse_util import flatten_dict
from hf_folders import FIXTURES, loaded, tensors, trace_once
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import te_jax as te
from te_jax import hf
from te_jax.hf import files, plan
from te_jax.hf.words import check_words
from te_jax.models import CausalLM, ModelConfig, generate, published
from te_jax.ops.rope import LinearScaling

pytest.importorskip("safetensors")
from safetensors.numpy import load_file, save_file

FOLDERS = sorted(path.parent for path in FIXTURES.glob("*/expected.npz"))
NAMES = [folder.name for folder in FOLDERS if not hf.read_config(folder).patches]  # which read text
OPTIONS = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else None
jit = functools.partial(jax.jit, compiler_options=OPTIONS)


@pytest.fixture(autouse=True)
def equal_models_are_traced_once(monkeypatch):
    trace_once(monkeypatch)


def ours(model, variables, due):
    """The logits and greedy words of the fixture, in one program."""
    family, lengths = model.config.family, due["lengths"]
    if family == "bert":
        return model.apply(variables, due["tokens"], token_types=due["types"], lengths=lengths), None
    if "words" not in due:
        return model.apply(variables, due["tokens"], lengths=lengths), None
    if family == "t5":
        context = dict(encoded=model.apply(variables, inputs=due["tokens"], input_lengths=lengths))
        context |= dict(input_lengths=lengths)
        start = jnp.zeros((len(lengths), 1), jnp.int32)
        words = generate(model, variables, start, due["words"].shape[1], **context)
        return model.apply(variables, due["said"], **context), words
    return model.apply(variables, due["tokens"]), generate(model, variables, due["tokens"], due["words"].shape[1])


# What transformers has, writes and never computes with: te_jax writes a copy of what it does.
UNREAD_BY_ANYONE = {"bert-untied": {"cls.predictions.bias": "cls.predictions.decoder.bias"}}


@pytest.mark.parametrize("name", NAMES)
def test_transformers(name, tmp_path):
    """Logits in f32 within 1e-5 of the largest, all greedy words; and saved again, the same bytes and config."""
    due = dict(np.load(FIXTURES / name / "expected.npz"))
    model, variables = loaded(name)
    logits, words = jit(functools.partial(ours, model))(variables, due)
    known = np.arange(11) < due["lengths"][:, None] if words is None else ...
    np.testing.assert_allclose(logits[known], due["logits"][known], rtol=0, atol=1e-5 * np.abs(due["logits"]).max())
    if words is not None:
        np.testing.assert_array_equal(words, due["words"])
    hf.save(tmp_path / "again", model, variables)
    got, want = tensors(tmp_path / "again"), tensors(FIXTURES / name)
    assert got.keys() == want.keys()
    want |= {unread: want[source] for unread, source in UNREAD_BY_ANYONE.get(name, {}).items()}
    assert all(a.tobytes() == want[key].tobytes() and a.shape == want[key].shape for key, a in got.items())
    assert hf.read_config(tmp_path / "again") == hf.read_config(FIXTURES / name)


def test_bf16_in_several_files_unscanned(tmp_path):
    """bf16 keeps its bits both ways, NaNs too; layers apart give the same tensors; files as small as asked for."""
    source = tmp_path / "bf16"
    shutil.copytree(FIXTURES / "qwen2", source)
    rng = np.random.default_rng(0)
    bits = lambda a: rng.integers(0, 2**16, a.shape, np.uint16).view(jnp.bfloat16)
    save_file({name: bits(a) for name, a in load_file(source / files.ONE).items()}, source / files.ONE)
    want = tensors(source)
    for scan in (True, False):
        model, variables = hf.load(source, scan=scan)
        assert model.params_dtype == model.dtype == jnp.bfloat16
        hf.save(tmp_path / f"{scan}", model, variables, max_file_bytes=10_000)
        names = json.loads((tmp_path / f"{scan}" / files.INDEX).read_text())["weight_map"]
        assert names.keys() == want.keys() and len(set(names.values())) > 3
        assert {name: a.tobytes() for name, a in tensors(tmp_path / f"{scan}").items()} == {
            name: a.tobytes() for name, a in want.items()
        }
        again, same = hf.load(tmp_path / f"{scan}", scan=scan)
        assert again.config == model.config and jax.tree.structure(same) == jax.tree.structure(variables)
    model, variables = hf.load(source, dtype=jnp.float32, compute_dtype=jnp.bfloat16)
    assert model.params_dtype == jnp.float32 and model.dtype == jnp.bfloat16
    assert {leaf.dtype for leaf in jax.tree.leaves(variables)} == {jnp.dtype(jnp.float32)}
    with pytest.raises(FileExistsError, match="give another folder"):
        hf.save(source, model, variables)


def test_onto_a_mesh():
    """Each parameter where it is to be, as on one device."""
    mesh = jax.make_mesh((2, 2), ("fsdp", "tp"))
    _, want = loaded("llama3")
    spec = lambda a: P(*[None] * (a.ndim - 2), "fsdp", "tp") if a.ndim > 1 and a.shape[-2] % 2 == 0 else P()
    shardings = jax.tree.map(lambda a: NamedSharding(mesh, spec(a)), want)
    _, got = hf.load(FIXTURES / "llama3", shardings=shardings)
    jax.tree.map(np.testing.assert_array_equal, got, want)
    assert jax.tree.map(lambda a: a.sharding, got) == shardings


@pytest.mark.parametrize("name, sizes", [("mixtral", (1, 3, 1)), ("qwen3-moe", (2, 2, 1)), ("gpt-oss", (2, 2, 2))])
def test_experts_onto_their_devices(name, sizes):
    """As the logical axis "expert" says: a device holds its own ones, and its tokens are sent to the others'. Text is
    generated there, too."""
    model, want = loaded(name)
    due = np.load(FIXTURES / name / "expected.npz")
    wide = lambda a: np.resize(a, (2 * math.prod(sizes), *a.shape[1:]))
    mesh = jax.make_mesh(sizes, ("fsdp", "ep", "tp"), axis_types=(AxisType.Auto,) * 3)
    tokens = wide(due["tokens"][:, :4])
    boxed = jax.eval_shape(model.init, jax.random.key(0), tokens)
    resource = te.MeshResource(fsdp_resource="fsdp", ep_resource="ep", tp_resource="tp")
    words = None
    with jax.set_mesh(mesh), te.sharding.global_shard_guard(resource):
        rules = te.sharding.extend_logical_axis_rules(())
        shardings = nn.logical_to_mesh_sharding(nn.get_partition_spec(boxed), mesh, rules)
        _, got = hf.load(FIXTURES / name, shardings=shardings)
        place = functools.partial(jax.device_put, device=NamedSharding(mesh, P(("fsdp", "ep"))))
        with nn.logical_axis_rules(rules):
            logits = jit(model.apply)(got, place(tokens))
            if sizes[2] > 1:
                write = jit(lambda variables, prompts: generate(model, variables, prompts, 5))
                words = write(got, place(wide(due["tokens"])))
    jax.tree.map(np.testing.assert_array_equal, got, want)
    experts = {path[-1]: a for path, a in flatten_dict(got["params"]).items() if "moe" in path}
    for kernel in (experts["wi_0"], experts["wi_1"], experts["wo"]):
        assert kernel.addressable_data(0).shape[1] * sizes[1] == kernel.shape[1]
        assert kernel.addressable_data(0).size * math.prod(sizes) == kernel.size
    due_logits = wide(due["logits"][:, :4])
    np.testing.assert_allclose(logits, due_logits, rtol=0, atol=1e-5 * np.abs(due_logits).max())
    if words is not None:
        np.testing.assert_array_equal(words, wide(due["words"][:, :5]))


def test_copies_and_left_out_prefixes(tmp_path):
    """Older checkpoints: without a prefix, with masks and a copy of the embedding, which has to be one."""
    held = load_file(FIXTURES / "gpt2" / files.ONE)
    old = {name.removeprefix("transformer."): a for name, a in held.items()}
    old |= {"h.0.attn.bias": np.ones((1, 1, 4, 4), np.float32), "lm_head.weight": held["transformer.wte.weight"]}
    shutil.copytree(FIXTURES / "gpt2", tmp_path / "old")
    save_file(old, tmp_path / "old" / files.ONE)
    jax.tree.map(np.testing.assert_array_equal, hf.load(tmp_path / "old")[1], loaded("gpt2")[1])
    save_file(old | {"lm_head.weight": 2 * old["lm_head.weight"]}, tmp_path / "old" / files.ONE)
    with pytest.raises(ValueError, match="lm_head.weight unlike transformer.wte.weight, but its config.json ties them"):
        hf.load(tmp_path / "old")


OLD_BERT = (("LayerNorm.weight", "LayerNorm.gamma"), ("LayerNorm.bias", "LayerNorm.beta"))
UNREAD = {
    "bert": [f"{name}.{end}" for name in ("bert.pooler.dense", "cls.seq_relationship") for end in ("weight", "bias")],
    "t5": ["decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"],
}


@pytest.mark.parametrize("name", UNREAD)
def test_published_encoders(name, tmp_path):
    """Checkpoints as they were published: with tensors of other tasks, and names of their time."""
    shutil.copytree(FIXTURES / name, tmp_path / "old")
    held = load_file(FIXTURES / name / files.ONE) | {more: np.ones((2, 2), np.float32) for more in UNREAD[name]}
    for now, once in OLD_BERT:
        held = {each.replace(now, once): a for each, a in held.items()}
    save_file(held, tmp_path / "old" / files.ONE)
    jax.tree.map(np.testing.assert_array_equal, hf.load(tmp_path / "old")[1], loaded(name)[1])


Q = "model.layers.1.self_attn.q_proj.weight"
WRONG = {  # what becomes of the tensors, or of config.json, and what is said
    "missing": (lambda held: held.pop(Q), {}, rf"lacks tensors of a qwen2 .*{Q}"),
    "extra": (lambda held: held.update(more=np.ones(3)), {}, "has tensors that are none of a qwen2.*: more"),
    "shape": (lambda held: held.update({Q: held[Q][:5]}), {}, rf"{Q} of shape \[5, 32\]; a qwen2 has \[32, 32\]"),
    "dtype": (lambda held: held.update({Q: held[Q].astype(int)}), {}, rf"{Q} of type I64; te_jax reads F32, BF16, F16"),
    "one layer more": (
        None,
        dict(num_hidden_layers=3, layer_types=None),
        "lacks tensors of a qwen2.*model.layers.2.*and 7 more",
    ),
    "one layer less": (None, dict(num_hidden_layers=1, layer_types=None), "has tensors that are none of a qwen2"),
    "family": (None, dict(model_type="qwen9"), "no family 'qwen9'; did you mean"),
    "Gemma 3n": (None, dict(model_type="gemma3n_text"), "no family 'gemma3n_text': its layers have several streams"),
    "several models": (
        None,
        dict(model_type="gemma3", text_config=dict(model_type="gemma3_text")),
        "config.json is of several models, a 'gemma3'; te_jax reads one: write a folder of its text_config, a gemma3_t",
    ),
    "several, none of which is known": (
        None,
        dict(model_type="gemma3n", text_config=dict(model_type="gemma3n_text")),
        "no family 'gemma3n_text': its layers have several streams between layers .AltUp., residuals of low rank .LAuR",
    ),
    "activation": (None, dict(hidden_act="gelu"), "hidden_act is 'gelu'; pass 'silu' .te_jax reads no other"),
    "window": (None, dict(use_sliding_window=True), "use_sliding_window is True; pass False"),
    "rope": (
        None,
        dict(rope_parameters=dict(rope_type="dynamic")),
        "rope_parameters: rope_type is 'dynamic'; pass one of 'default', 'linear', 'llama3', 'yarn'",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_refused(name, tmp_path, monkeypatch):
    """Before a tensor is read."""
    change, config, words = WRONG[name]
    folder = tmp_path / "wrong"
    shutil.copytree(FIXTURES / "qwen2", folder)
    held = load_file(folder / files.ONE)
    if change is not None:
        change(held)
        save_file({key: np.ascontiguousarray(a) for key, a in held.items()}, folder / files.ONE)
    there = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(there | config))
    monkeypatch.setattr(files.Checkpoint, "read", None)
    with pytest.raises(ValueError, match=words):
        hf.load(folder)
    with pytest.raises(TypeError, match="params_dtype is no argument; pass dtype"):
        hf.load(folder, params_dtype=jnp.bfloat16)


@pytest.mark.parametrize("layers", [0, 1])
def test_layers_of_nemotron_that_predict_more(layers, tmp_path, monkeypatch):
    """They are read past where config.json counts them."""
    folder = tmp_path / "more"
    shutil.copytree(FIXTURES / "nemotron-h", folder)
    held = load_file(folder / files.ONE) | {"mtp.layers.0.norm.weight": np.ones(3, np.float32)}
    save_file(held, folder / files.ONE)
    there = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(there | dict(num_nextn_predict_layers=layers)))
    monkeypatch.setattr(files.Checkpoint, "read", None)
    kind, words = (TypeError, "NoneType") if layers else (ValueError, "none of a nemotron_h.*: mtp.layers.0.norm")
    with pytest.raises(kind, match=words):
        hf.load(folder)


def test_mlps_of_kimi_have_two_names(tmp_path):
    """Transformers writes them by the name that experts have; te_jax as they were published."""
    folder = shutil.copytree(FIXTURES / "kimi-linear", tmp_path / "written")
    held = load_file(folder / files.ONE)
    names = {name: name.replace("layers.0.mlp", "layers.0.block_sparse_moe") for name in held}
    assert sum(name != now for name, now in names.items()) == 3
    save_file({names[name]: a for name, a in held.items()}, folder / files.ONE)
    model, variables = hf.load(folder)
    jax.tree.map(np.testing.assert_array_equal, variables, loaded("kimi-linear")[1])
    hf.save(tmp_path / "again", model, variables)
    assert tensors(tmp_path / "again").keys() == held.keys()


def test_layers_of_qwen3_next_that_predict_more(tmp_path):
    """They have a prefix of their own, and no word: they are read past, and not written."""
    folder = shutil.copytree(FIXTURES / "qwen3-next", tmp_path / "more")
    want = tensors(folder)
    save_file(load_file(folder / files.ONE) | {"mtp.norm.weight": np.ones(3, np.float32)}, folder / files.ONE)
    model, variables = hf.load(folder)
    jax.tree.map(np.testing.assert_array_equal, variables, loaded("qwen3-next")[1])
    hf.save(tmp_path / "again", model, variables)
    assert tensors(tmp_path / "again").keys() == want.keys()
    save_file(load_file(folder / files.ONE) | {"mtps.norm.weight": np.ones(3, np.float32)}, folder / files.ONE)
    with pytest.raises(ValueError, match="has tensors that are none of a qwen3_next of its config.json: mtps.norm"):
        hf.load(folder)


def test_keys_of_layers_that_share_them(tmp_path):
    """Published files of Gemma 4 have some, which transformers reads past: they are not written."""
    folder = shutil.copytree(FIXTURES / "gemma4-e2b", tmp_path / "more")
    want, name = tensors(folder), "model.layers.3.self_attn.k_proj.weight"
    save_file(load_file(folder / files.ONE) | {name: np.ones((32, 32), np.float32)}, folder / files.ONE)
    model, variables = hf.load(folder)
    jax.tree.map(np.testing.assert_array_equal, variables, loaded("gemma4-e2b")[1])
    hf.save(tmp_path / "again", model, variables)
    assert tensors(tmp_path / "again").keys() == want.keys()
    save_file(load_file(folder / files.ONE) | {name.replace("3", "4"): np.ones(3, np.float32)}, folder / files.ONE)
    with pytest.raises(
        ValueError, match="has tensors that are none of a gemma4_text of its config.json: model.layers.4"
    ):
        hf.load(folder)


ROPE = dict(rope_type="yarn", factor=8.0, mscale=1.0, mscale_all_dim=1.0, original_max_position_embeddings=16)
OF_DEEPSEEK = {
    "mscale is 0.707; te_jax reads mscale_all_dim, 1.0": dict(rope_parameters=ROPE | dict(mscale=0.707)),
    "mscale_all_dim is 0.0; pass more": dict(rope_parameters=ROPE | dict(mscale=0.0, mscale_all_dim=0.0)),
    "rope_type is 'linear'; pass one of 'default', 'yarn'": dict(rope_parameters=dict(rope_type="linear", factor=2.0)),
    "truncate is False; pass True": dict(rope_parameters=ROPE | dict(truncate=False)),
    "num_experts_per_tok is 2; a group is chosen by its 2 best": dict(num_experts_per_tok=2),
    "scoring_func is 'softmax'; pass 'sigmoid'": dict(scoring_func="softmax"),
    "topk_method is 'greedy'; pass 'noaux_tc'": dict(topk_method="greedy"),
    "lacks tensors of a deepseek_v3.*model.layers.1.mlp.down_proj": dict(first_k_dense_replace=2),
    "lacks tensors of a deepseek_v3.*layers.1.mlp.experts.8.*and 1 more": dict(n_routed_experts=9, n_group=3),
    r"q_b_proj.weight of shape \[48, 24\]; a deepseek_v3 has \[64, 24\]": dict(qk_nope_head_dim=12, qk_head_dim=16),
    "has tensors that are none of a deepseek_v3.*: model.layers.3.eh_proj.weight": dict(num_nextn_predict_layers=0),
}


@pytest.mark.parametrize("words", OF_DEEPSEEK)
def test_refused_of_deepseek(words, tmp_path, monkeypatch):
    """Layers that predict further words are read past where config.json counts them, and only there."""
    folder = tmp_path / "wrong"
    shutil.copytree(FIXTURES / "deepseek-v3", folder)
    held = load_file(folder / files.ONE) | {"model.layers.3.eh_proj.weight": np.ones((2, 2), np.float32)}
    save_file(held, folder / files.ONE)
    there = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(there | OF_DEEPSEEK[words]))
    monkeypatch.setattr(files.Checkpoint, "read", None)
    with pytest.raises(ValueError, match=words):
        hf.load(folder)
    (folder / "config.json").write_text(json.dumps(there))
    with pytest.raises(TypeError, match="NoneType"):  # nothing is refused
        hf.load(folder)


def test_refused_files_and_parameters(tmp_path):
    folder = tmp_path / "some"
    shutil.copytree(FIXTURES / "llama2", folder)
    index = json.loads((folder / files.INDEX).read_text())
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="model-00002.*no whole checkpoint"):
        hf.load(folder)
    shutil.copytree(FIXTURES / "llama2", folder, dirs_exist_ok=True)
    index["weight_map"]["nothing"] = "model-00001-of-00003.safetensors"
    (folder / files.INDEX).write_text(json.dumps(index))
    with pytest.raises(ValueError, match="names nothing, which no file has"):
        hf.load(folder)
    model, variables = loaded("qwen2")
    biased = jax.tree.map(lambda a: a, variables)
    mlp = biased["params"]["layers"]["TransformerLayer_0"]["mlp"]
    mlp["wo_bias"] = mlp["wo_bias"] + 1
    with pytest.raises(ValueError, match="mlp/wo_bias is not 0, but a qwen2 has no such tensor"):
        hf.save(tmp_path / "biased", model, biased)
    del mlp["wo_bias"]
    with pytest.raises(ValueError, match="do not both have .*wo_bias"):
        hf.save(tmp_path / "less", model, biased)
    nobodys = model.clone(config=ModelConfig(8, 1, 8))
    with pytest.raises(ValueError, match="the family of this ModelConfig is ''; say which .*There are llama"):
        hf.save(tmp_path / "none", nobodys, variables)


@pytest.mark.parametrize("name", ["llama3", "mixtral", "gemma2"])
def test_what_config_json_has_no_word_for(name, tmp_path):
    """Nothing is written of a model that would be read as another one."""
    model, variables = loaded(name)
    _, params = hf.load(FIXTURES / name, scan=False)
    c = model.config
    changed = {
        "self_attn_mask_type=": c.with_layer(self_attn_mask_type="no_mask"),
        "embedding_scale=3": replace(c, embedding_scale=3),
        "layer 1 has layernorm_epsilon=0.5": replace(
            c, pattern=(*(c.pattern or ({},))[:1], dict(layernorm_epsilon=0.5))
        ),
    }
    if name == "llama3":
        changed["mlp_activations=.*gelu.* would say .*silu"] = c.with_layer(mlp_activations=("gelu", "linear"))
        changed["layer 0 has window_size=.3, 0."] = c.with_layer(window_size=(3, 0))
    if name == "mixtral":
        changed["score_function='sigmoid'"] = c.with_layer(moe={**c.layer["moe"], "score_function": "sigmoid"})
    if name == "gemma2":
        changed["sliding_window is None; pass a positive int"] = replace(c, pattern=())
    for words, config in changed.items():
        apart = model.clone(config=config, scan=False)
        with pytest.raises(ValueError, match=words):
            hf.save(tmp_path / "no", apart, params)
    assert not (tmp_path / "no").exists()
    hf.save(tmp_path / "yes", model.clone(config=c.with_layer(self_attn_mask_type="padding_causal")), variables)


@pytest.mark.parametrize("name", ["granite4-h-tiny", "nemotron-h-8b", "nemotron-3-nano-30b-a3b"])
def test_hybrids_cut_small_have_checkpoints(name):
    """Each parameter is of a tensor, though the config has only fields that differ from the layers' defaults."""
    config = published(name, num_layers=8, hidden_size=16, vocab_size=32)
    sizes = dict(mlp_hidden_size=24, num_attention_heads=2, num_gqa_groups=1, kv_channels=8)
    moe = dict(moe={**config.layer["moe"], "num_experts": 8}) if "moe" in config.layer else {}
    config = config.with_layer(**sizes, **moe, ssm=dict(ssm_num_heads=4, ssm_head_dim=8, ssm_num_groups=2))
    family = plan.plan_of(CausalLM(config)).family  # which raises for others
    check_words(config.family, config, family.read(family.write(config)))


def test_published_deepseek(tmp_path):
    """What the config.json that was published says of the model, in the words of its time."""
    words = dict(beta_fast=32, beta_slow=1, factor=40, mscale=1.0, mscale_all_dim=1.0, type="yarn")
    said = dict(
        model_type="deepseek_v3",
        vocab_size=129280,
        hidden_size=7168,
        intermediate_size=18432,
        moe_intermediate_size=2048,
        num_hidden_layers=61,
        first_k_dense_replace=3,
        num_attention_heads=128,
        num_key_value_heads=128,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        n_routed_experts=256,
        num_experts_per_tok=8,
        n_shared_experts=1,
        n_group=8,
        topk_group=4,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
        scoring_func="sigmoid",
        topk_method="noaux_tc",
        hidden_act="silu",
        rms_norm_eps=1e-06,
        rope_theta=10000,
        rope_scaling=words | dict(original_max_position_embeddings=4096),
        num_nextn_predict_layers=1,
    )
    (tmp_path / "config.json").write_text(json.dumps(said))
    config = published("deepseek-v3")
    assert hf.read_config(tmp_path) == config and hf.read_config(tmp_path).family == config.family


def test_what_a_deepseek_has_no_word_for(tmp_path):
    """And layers that predict further words are not said to be there where they are not written."""
    folder = tmp_path / "with further layers"
    shutil.copytree(FIXTURES / "deepseek-v3", folder)
    held = load_file(folder / files.ONE) | {"model.layers.3.eh_proj.weight": np.ones((2, 2), np.float32)}
    save_file(held, folder / files.ONE)
    model, variables = hf.load(folder)
    c = model.config
    for words, config in {
        "has no pattern of layers; pass ModelConfig.first=": replace(c, pattern=({},)),
        "layer 0 has window_size=.3, 0.": replace(c, first=({**c.first[0], "window_size": (3, 0)},)),
        "moe: score_function='softmax'": c.with_layer(moe={**c.layer["moe"], "score_function": "softmax"}),
        "rotary_pos_emb_scaling is LinearScaling": c.with_layer(rotary_pos_emb_scaling=LinearScaling(2.0)),
    }.items():
        with pytest.raises(ValueError, match=words):
            hf.save(tmp_path / "no", model.clone(config=config), variables)
    with pytest.raises(ValueError, match="do not both have .*expert_bias/layers.*/expert_bias"):
        hf.save(tmp_path / "no", model, {"params": variables["params"]})
    assert not (tmp_path / "no").exists()
    hf.save(tmp_path / "yes", model, variables)
    assert json.loads((tmp_path / "yes/config.json").read_text())["num_nextn_predict_layers"] == 0
