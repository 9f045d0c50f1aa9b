"""te_jax.hf: which file and tensor is read, and what is no argument."""

import functools
import json
import os
import shutil
from dataclasses import replace

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict
from hf_folders import CLASSES, FIXTURES, Accepted, load_nothing, outcome, pack, trace_once, unpack

from te_jax import hf
from te_jax.hf import files, filling
from te_jax.models import CausalLM, EncoderDecoder, EncoderLM, generate

pytest.importorskip("safetensors")
from safetensors.numpy import load_file, save_file


def of_llama3(tmp_path, **changed):
    """The final norm of what is loaded."""
    folder = tmp_path / "m"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(FIXTURES / "llama3", folder)
    held = {**unpack(folder / files.ONE), **changed}
    return folder, held


def test_the_index_names_the_file_of_a_tensor(tmp_path):
    """Whatever other files have of that name; a folder may be made of links, as the hub's cache is."""
    norm, embedding = "model.norm.weight", "model.embed_tokens.weight"
    folder, held = of_llama3(tmp_path)
    other = held[norm].of("F32", *held[norm].shape)
    first = {name: a for name, a in held.items() if name != embedding}
    parts = {"a.safetensors": first, "sub/z.safetensors": {embedding: held[embedding], norm: other}}
    (folder / files.ONE).unlink()
    (tmp_path / "blobs").mkdir()
    (folder / "sub").mkdir()
    for file, part in parts.items():
        blob = tmp_path / "blobs" / file.replace("/", "-")
        blob.write_bytes(pack(part))
        (folder / file).symlink_to(os.path.relpath(blob, (folder / file).parent))
    index = dict.fromkeys(first, "a.safetensors") | {embedding: "sub/z.safetensors"}
    (folder / files.INDEX).write_text(json.dumps(dict(weight_map=index)))
    with files.Checkpoint(folder) as checkpoint:
        assert {name: checkpoint.read(name).tobytes() for name in held} == {name: a.data for name, a in held.items()}
    (folder / files.ONE).write_bytes(pack({norm: other}))  # which comes first, as in transformers
    with files.Checkpoint(folder) as checkpoint:
        assert checkpoint.tensors.keys() == {norm} and not checkpoint.read(norm).any()


def test_a_copy_may_have_any_bits(monkeypatch, tmp_path):
    """A NaN is as another one, and a copy may be of a narrower type that holds the same."""
    load_nothing(monkeypatch)
    head, source = "lm_head.weight", "model.embed_tokens.weight"
    folder, held = of_llama3(tmp_path)
    a = np.frombuffer(held[source].data, np.float32).astype(np.float16).astype(np.float32)
    a[:3] = np.nan, -0.0, np.inf
    wide, narrow = (
        held[source]._replace(dtype=d, data=a.astype(t).tobytes()) for d, t in (("F32", "f4"), ("F16", "f2"))
    )
    for copy in (wide, narrow):
        (folder / files.ONE).write_bytes(pack(held | {source: wide, head: copy}))
        with pytest.raises(Accepted):
            hf.load(folder)


def test_the_head_of_a_t5_is_in_its_files(tmp_path):
    """As transformers has it, whose config.json says that all are tied."""
    folder = tmp_path / "t5"
    shutil.copytree(FIXTURES / "t5-v1.1", folder)
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"]
    held = unpack(folder / files.ONE)
    shared = held["shared.weight"]
    for data, tied in ((shared.data, True), (shared.data[::-1], False)):
        (folder / files.ONE).write_bytes(pack(held | {"lm_head.weight": shared._replace(data=data)}))
        model, variables = hf.load(folder)
        assert model.config.tie_embeddings == tied and ("head" in variables["params"]) != tied
    assert variables["params"]["head"].tobytes() == shared.data[::-1]
    hf.save(tmp_path / "again", model, variables)
    assert unpack(tmp_path / "again" / files.ONE)["lm_head.weight"].data == shared.data[::-1]


def test_what_is_no_argument(monkeypatch, tmp_path):
    trace_once(monkeypatch)
    model, variables = hf.load(FIXTURES / "bert-untied")
    flat = {"/".join(path): leaf for path, leaf in flatten_dict(variables["params"]).items()}
    one = lambda leaf: {"params": unflatten_dict({**flat, "head_bias": leaf}, sep="/")}
    (tmp_path / "file").write_text("")
    wrong = {
        "folder is None": (hf.load, None),
        "folder is 3": (hf.read_config, 3),
        "shardings is ": (functools.partial(hf.load, shardings=[1]), FIXTURES / "bert"),
        "shardings, at embedding, is 'x'": (
            functools.partial(hf.load, shardings={"embedding": "x"}),
            FIXTURES / "bert",
        ),
        "shardings has params/layer_0/x, and the model no such": (
            functools.partial(hf.load, shardings={"params": {"layer_0": {"x": None}}, "fp8_metas": {"y": None}}),
            FIXTURES / "bert",
        ),
        "fp8_gradients is True, but fp8 is None": (functools.partial(hf.load, fp8_gradients=True), FIXTURES / "bert"),
        "remat is 'full'; pass True or False": (functools.partial(hf.load, remat="full"), FIXTURES / "bert"),
        "remat_policy is given, but remat is False": (
            functools.partial(hf.load, remat_policy=jax.checkpoint_policies.dots_saveable),
            FIXTURES / "bert",
        ),
        "save: folder is None": (hf.save, None, model, variables),
        "save: model is None": (hf.save, tmp_path / "no", None, variables),
        "save: variables is None": (hf.save, tmp_path / "no", model, None),
        "do not both have": (hf.save, tmp_path / "no", model, {}),
        "params/head_bias is 3": (hf.save, tmp_path / "no", model, one(3)),
        "params/head_bias is int32": (hf.save, tmp_path / "no", model, one(flat["head_bias"].astype(int))),
        "params/head_bias has shape": (hf.save, tmp_path / "no", model, one(flat["head_bias"][1:])),
        f"{tmp_path}/file can not be made": (hf.save, tmp_path / "file", model, variables),
        f"{tmp_path}/file/x can not be made": (hf.save, tmp_path / "file" / "x", model, variables),
    }
    for says, call in wrong.items():
        error = outcome(*call)
        assert type(error) in CLASSES and says in str(error), (says, error)
    assert not (tmp_path / "no").exists()


def test_what_generate_refuses(monkeypatch):
    """Before anything is computed. A list of lengths is checked as an array is."""
    trace_once(monkeypatch)
    config, tokens, init = hf.read_config(FIXTURES / "llama3"), np.ones((2, 4), int), jax.random.key(0)
    run = functools.partial(generate, CausalLM(config), {}, tokens, 2)
    wrong = {
        r"lengths are \[0, 9\], of prompts of 4 tokens": dict(lengths=[0, 9]),
        "lengths is float32.2.; pass None or an integer array": dict(lengths=np.array([2.5, 3])),
        r"lengths has the shape \(1,\); pass \(2,\)": dict(lengths=np.array([3])),
        "stop_at is -1; pass None or an int from 0 to 82": dict(stop_at=-1),
        "stop_at is 83": dict(stop_at=83),
        "stop_at is 84": dict(stop_at=np.array(84)),
        "stop_at is 85": dict(stop_at=np.int32(85)),
        "sampling is None; pass a te_jax.models.Sampling": dict(sampling=None),
        "key is 0; pass None or a jax.random key": dict(key=0),
        "input_lengths is given without encoded": dict(input_lengths=np.array([1, 2])),
        r"prompts has the shape \(2, 0\); pass": dict(prompts=np.ones((2, 0), int)),
    }
    for says, given in wrong.items():
        with pytest.raises(CLASSES, match=says):
            run(**given) if "prompts" not in given else generate(CausalLM(config), {}, given["prompts"], 2)
    with pytest.raises(ValueError, match="hidden is given together with labels"):
        EncoderLM(hf.read_config(FIXTURES / "bert")).init(init, tokens, tokens, hidden=True)
    with pytest.raises(ValueError, match="labels is given without tokens"):
        EncoderDecoder(hf.read_config(FIXTURES / "t5")).init(init, None, tokens, inputs=tokens)
    with pytest.raises(TypeError, match=r"CausalLM: tokens is float32\[2, 4\]; pass an integer array"):
        CausalLM(config).init(init, tokens.astype(np.float32))


def test_only_models_that_write_generate():
    model = EncoderLM(hf.read_config(FIXTURES / "bert"))
    with pytest.raises(TypeError, match="model is <EncoderLM>; pass a CausalLM or an EncoderDecoder"):
        generate(model, {}, np.ones((1, 2), int), 2)


def test_what_the_index_does_not_name_is_no_tensor_of_the_checkpoint(tmp_path):
    """Files may have frequencies, or a copy, that no reader takes."""
    folder = shutil.copytree(FIXTURES / "llama2", tmp_path / "llama2")
    shard = folder / "model-00001-of-00003.safetensors"
    save_file(load_file(shard) | {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)}, shard)
    got, want = (hf.load(each)[1] for each in (folder, FIXTURES / "llama2"))
    assert jax.tree.all(jax.tree.map(np.array_equal, got, want))


@pytest.mark.parametrize("name", ["llama3", "nemotron-h"])
def test_a_second_load_traces_nothing(monkeypatch, name):
    """The programs that fill parameters are there, whichever load they were made for; Nemotron-H has some in parts."""
    _, first = hf.load(FIXTURES / name)

    def traced(*args):
        raise AssertionError("a program was made anew")

    monkeypatch.setattr(filling, "_make_variables", traced)
    jax.tree.map(np.testing.assert_array_equal, hf.load(FIXTURES / name)[1], first)


def test_models_read_what_their_config_sets():
    """A field of another model, or of a layer, that nothing would read."""
    config, tokens = hf.read_config(FIXTURES / "llama3"), np.ones((2, 4), int)
    for name, value in dict(num_labels=3, head_transform=True, num_decoder_layers=1).items():
        with pytest.raises(ValueError, match=f"CausalLM: config.{name} is {value}, which a CausalLM does not read"):
            CausalLM(replace(config, **{name: value})).init(jax.random.key(0), tokens)
    for name, value in dict(transpose_batch_sequence=True, dtype=np.float32, hidden_size=8).items():
        with pytest.raises(ValueError, match=f"ModelConfig: layer has {name}, .*; leave it out there"):
            config.with_layer(**{name: value})
    config.with_layer(transpose_batch_sequence=False)
