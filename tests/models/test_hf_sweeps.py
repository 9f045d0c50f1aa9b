"""te_jax.hf on all fixtures: folders of base models, heads that are tied or not, and layers of te_jax.nnx."""

import functools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hf_folders import FIXTURES, loaded, tensors, trace_once
from quick_init import quick_nnx

import te_jax.nnx as te_nnx
from te_jax import hf
from te_jax.hf import files, plan
from te_jax.hf.words import check_words
from te_jax.models import CausalLM, published

pytest.importorskip("safetensors")
from safetensors.numpy import save_file

NAMES = sorted(path.parent.name for path in FIXTURES.glob("*/expected.npz"))
WORDS = {name: json.loads((FIXTURES / name / "config.json").read_text()) for name in NAMES}
FAMILY = {name: hf.FAMILIES[words["model_type"]] for name, words in WORDS.items()}
DECODERS = [name for name, family in FAMILY.items() if family.model is CausalLM]
HEAD = "lm_head.weight"


def folder_of(name, path, held, **words):
    """A folder with the fixture's config.json, with these words, and these tensors."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(WORDS[name] | words))
    save_file({key: np.ascontiguousarray(a) for key, a in held.items()}, path / files.ONE)
    return path


def is_tied(name):
    return hf.read_config(FIXTURES / name).tie_embeddings


@pytest.fixture(autouse=True)
def equal_models_are_traced_once(monkeypatch):
    trace_once(monkeypatch)


@pytest.mark.parametrize("name", DECODERS)
def test_base_models(name, tmp_path):
    """Their tensors have no prefix, but the head next to them; and a tied embedding may stand under the head's name."""
    family, held = FAMILY[name], tensors(FIXTURES / name)
    bare = {key.removeprefix(family.prefix): a for key, a in held.items()}
    assert bare.keys() - held.keys()
    _, want = loaded(name)
    got = [hf.load(folder_of(name, tmp_path / "bare", bare))[1]]
    if is_tied(name):
        source = family.tied[HEAD]
        got.append(
            hf.load(folder_of(name, tmp_path / "head", {HEAD if key == source else key: a for key, a in held.items()}))[
                1
            ]
        )
    for each in got:
        jax.tree.map(np.testing.assert_array_equal, each, want)


@pytest.mark.parametrize("name", DECODERS)
def test_tied_or_not(name, tmp_path):
    """The other one than the fixture, there and back; a head that is missing is told."""
    family, held = FAMILY[name], tensors(FIXTURES / name)
    source = family.tied[HEAD]
    if is_tied(name):
        changed = held | {HEAD: held[source][::-1]}
    else:
        changed = {key: a for key, a in held.items() if key != HEAD}
        with pytest.raises(ValueError, match=f"lacks tensors of a {family.name} of its config.json: {HEAD}"):
            hf.load(folder_of(name, tmp_path / "headless", changed))
    tied = not is_tied(name)
    if tied and "False (te_jax reads no other)" in str(family.words):
        return
    model, variables = hf.load(folder_of(name, tmp_path / "other", changed, tie_word_embeddings=tied))
    assert model.config.tie_embeddings == tied and ("head" in variables["params"]) != tied
    hf.save(tmp_path / "again", model, variables)
    again = tensors(tmp_path / "again")
    assert again.keys() == changed.keys()
    assert all(a.tobytes() == changed[key].tobytes() for key, a in again.items())


COUNTS = {  # of the parameters of transformers' models of these sizes
    "smollm3-3b": 3_075_098_624,
    "phi4": 14_659_507_200,
    "olmo2-7b": 7_298_617_344,
    "olmo3-7b": 7_298_011_136,
    "granite3-2b": 2_533_539_840,
    "gemma3-1b": 999_885_952,
    "gemma4-31b": 30_697_345_340,
    "gemma4-26b-a4b": 25_233_141_790,
    "gemma4-e2b": 4_628_569_379,
    "gemma4-e4b": 7_463_013_418,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "glm4.5-air": 106_852_245_504,
    "llama4-scout": 107_769_861_120,
    "qwen2-moe-57b-a14b": 57_408_658_944,
    "qwen3-next-80b-a3b": 79_674_391_296,
    "kimi-linear-48b-a3b": 49_122_675_072,
    "qwen3.5-9b": 8_953_803_264,
    "qwen3.5-35b-a3b": 34_660_610_688,
    "modernbert-base": 149_655_232,
    "modernbert-large": 395_881_664,
    "siglip-base": 92_884_224,
    "siglip-large": 315_894_784,
    "vit-base": 86_389_248,
    "vit-large": 304_351_232,
}


@pytest.mark.parametrize("name", COUNTS)
def test_published_sizes(name):
    """Checkpoints of published models have as many parameters, and a config.json that says the model."""
    config = published(name)
    family = hf.FAMILIES[config.family]
    conversion = plan.plan_of(family.model(config))
    steps = [step for step in conversion.steps if step.rule.collection == "params"]
    assert sum(math.prod(shape) for step in steps for shape in conversion.tensor_shapes(step)) == COUNTS[name]
    check_words(config.family, config, family.read(family.write(config)))


NEW = (
    *("smollm3", "granite3", "phi3", "phi4", "gemma3", "glm4.5", "olmo2", "olmo3", "gpt-oss", "llama4", "qwen2-moe"),
    *("qwen3-next", "qwen3.5", "kimi-linear", "qwen2-vl", "qwen3-vl", "gemma4", "gemma4-e2b", "gemma4-a4b"),
)


def rms(x, scale, c):
    return x / np.sqrt(np.mean(np.square(x), -1, keepdims=True) + c.layer["layernorm_epsilon"]) * scale


def inputs_of_layers(c, params, tokens, x):
    """[layers, b, s, P], as published ones have them, or nothing for each."""
    if (width := c.layer.get("layer_input_size")) is None:
        return [None] * c.num_layers
    by_layer = lambda a: np.asarray(a).reshape(*tokens.shape, c.num_layers, width)
    said = by_layer(params["layer_input_table"][tokens]) * width**0.5
    read = by_layer(x @ params["layer_input_projection"]["kernel"]) / c.hidden_size**0.5
    return np.moveaxis((rms(read, params["layer_input_norm"]["scale"], c) + said) / 2**0.5, 2, 0)


@pytest.mark.parametrize("name", NEW)
def test_nnx(name):
    """The layers of te_jax.nnx between the embedding and the head give transformers' logits."""
    model, variables = hf.load(FIXTURES / name, scan=False)
    c, due = model.config, np.load(FIXTURES / name / "expected.npz")
    params = variables["params"]
    layers = []
    for i in range(c.num_layers):
        own = {kind: of[f"layer_{i}"]["TransformerLayer_0"] for kind, of in variables.items() if f"layer_{i}" in of}
        make = functools.partial(te_nnx.TransformerLayer, **c.fields_of_layer(i))
        layers.append(te_nnx.from_linen(own, quick_nnx(lambda make=make: make(rngs=nnx.Rngs(0)))))

    @nnx.jit
    def run(layers, x, inputs):
        kept = {}
        for layer, own in zip(layers, inputs):
            more = {} if own is None else dict(layer_input=own)
            more |= dict(keys_values=kept[layer.window_size]) if layer.kv_sharing == "take" else {}
            x = layer(x, deterministic=True, **more)
            if layer.kv_sharing == "give":
                x, kept[layer.window_size] = x
        return x

    x = jnp.asarray(params["embedding"][due["tokens"]]) * c.embedding_scale
    x = run(layers, x, inputs_of_layers(c, params, due["tokens"], x))
    x = rms(x, params["final_norm"]["scale"] + bool(c.layer.get("zero_centered_gamma")), c)
    logits = np.asarray(x) * c.output_scale @ np.asarray(params.get("head", params["embedding"])).T
    logits = logits if c.logit_softcap is None else c.logit_softcap * np.tanh(logits / c.logit_softcap)
    np.testing.assert_allclose(logits, due["logits"], rtol=0, atol=1e-5 * np.abs(due["logits"]).max())


def test_weights_of_the_chosen_may_be_normalized():
    """Of Qwen 2 with experts, whose published models do not."""
    read = lambda on: FAMILY["qwen2-moe"].read(WORDS["qwen2-moe"] | dict(norm_topk_prob=on)).layer["moe"]
    assert [read(on)["use_pre_softmax"] for on in (True, False)] == [False, True]
