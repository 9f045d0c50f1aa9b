"""te_jax.hf's encoders of images on fixtures of tests/hf_fixtures/make.py: what transformers computes, round trips."""

import functools
import json
import shutil
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from hf_folders import FIXTURES, tensors
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import te_jax as te
import te_jax.nnx as te_nnx
from te_jax import hf
from te_jax.hf import files
from te_jax.models import ModelConfig, VisionEncoder
from te_jax.recipe import Float8CurrentScaling

pytest.importorskip("safetensors")
from safetensors.numpy import save_file

NAMES = ("siglip", "siglip-headless", "vit", "vit-classifier")


def compare(got, want, tolerance=1e-5):
    np.testing.assert_allclose(got, want, rtol=0, atol=tolerance * np.abs(want).max())


@pytest.mark.parametrize("name", NAMES)
def test_transformers(name, tmp_path):
    """Hidden states, pooled ones and logits in f32 within 1e-5 of the largest; and saved again, the same bytes and
    config."""
    due = np.load(FIXTURES / name / "expected.npz")
    model, variables = hf.load(FIXTURES / name)
    kinds = [key for key in ("hidden", "pooled", "logits") if key in due]
    call = lambda images, kind: model.apply(variables, images, **({} if kind == "hidden" else {kind: True}))
    for got, key in zip(jax.jit(lambda images: [call(images, kind) for kind in kinds])(due["images"]), kinds):
        compare(got, due[key])
    hf.save(tmp_path / "again", model, variables)
    got, want = tensors(tmp_path / "again"), tensors(FIXTURES / name)
    assert got.keys() == want.keys()
    assert all(a.tobytes() == want[key].tobytes() and a.shape == want[key].shape for key, a in got.items())
    assert hf.read_config(tmp_path / "again") == hf.read_config(FIXTURES / name)


def test_older_names(tmp_path):
    """As checkpoints were published: with a prefix, and indices that nothing reads."""
    folder = shutil.copytree(FIXTURES / "siglip", tmp_path / "old")
    held = {f"vision_model.{key}": a for key, a in tensors(folder).items()}
    held["vision_model.embeddings.position_ids"] = np.arange(9)[None]
    save_file(held, folder / files.ONE)
    jax.tree.map(np.testing.assert_array_equal, hf.load(folder)[1], hf.load(FIXTURES / "siglip")[1])


def test_a_vit_without_a_pooler(tmp_path):
    """What the files have counts: the vector of an image is then the class token's, and nothing more is written."""
    due = np.load(FIXTURES / "vit" / "expected.npz")
    folder = shutil.copytree(FIXTURES / "vit", tmp_path / "bare")
    held = {key: a for key, a in tensors(folder).items() if not key.startswith("pooler")}
    save_file(held, folder / files.ONE)
    model, variables = hf.load(folder)
    compare(model.apply(variables, due["images"], pooled=True), due["hidden"][:, 0])
    hf.save(tmp_path / "again", model, variables)
    assert tensors(tmp_path / "again").keys() == held.keys()


def test_labels(tmp_path):
    """Their names are kept; where the classifier is another one, config.json says how many there are now."""
    folder = shutil.copytree(FIXTURES / "vit-classifier", tmp_path / "named")
    words = json.loads((folder / "config.json").read_text())
    named = words | dict(id2label={str(i): name for i, name in enumerate("abcde")})
    (folder / "config.json").write_text(json.dumps(named))
    model, variables = hf.load(folder)
    for count in (5, 2, 0):
        params = {key: a[:count] if "head" in key else a for key, a in variables["params"].items()}
        params = params if count else {key: a for key, a in params.items() if "head" not in key}
        hf.save(tmp_path / str(count), model.clone(config=replace(model.config, num_labels=count)), dict(params=params))
        written = json.loads((tmp_path / str(count) / "config.json").read_text())
        assert written["architectures"] == ["ViTForImageClassification" if count else "ViTModel"]
        names = {5: [*"abcde"], 2: ["LABEL_0", "LABEL_1"]}
        assert count == 0 or [*written["id2label"].values()] == names[count]
        again, same = hf.load(tmp_path / str(count))
        assert again.config.num_labels == count and not again.config.pooling_head
        jax.tree.map(np.testing.assert_array_equal, same["params"], params)


def test_a_number_of_labels(tmp_path):
    """It may stand in config.json next to their names, or instead, and counts there, as in transformers."""
    folder = shutil.copytree(FIXTURES / "vit-classifier", tmp_path / "counted")
    words = {key: a for key, a in json.loads((folder / "config.json").read_text()).items() if key != "id2label"}
    two = {str(i): name for i, name in enumerate("ab")}
    for more in (dict(num_labels=5), dict(num_labels=5, id2label=two), dict(num_labels=5, id2label=None)):
        (folder / "config.json").write_text(json.dumps(words | more))
        assert hf.read_config(folder).num_labels == 5
    model, variables = hf.load(folder)
    jax.tree.map(np.testing.assert_array_equal, variables, hf.load(FIXTURES / "vit-classifier")[1])
    fewer = {key: a[:3] if "head" in key else a for key, a in variables["params"].items()}
    hf.save(tmp_path / "3", model.clone(config=replace(model.config, num_labels=3)), dict(params=fewer))
    assert hf.read_config(tmp_path / "3").num_labels == 3
    (folder / "config.json").write_text(json.dumps(words | dict(num_labels=-1)))
    with pytest.raises(ValueError, match="num_labels is -1"):
        hf.read_config(folder)
    (folder / "config.json").write_text(json.dumps(words | dict(num_labels=0)))
    with pytest.raises(ValueError, match="a classifier has labels: pass id2label or num_labels"):
        hf.read_config(folder)


@pytest.mark.parametrize("name", ["siglip", "vit"])
def test_nnx(name):
    """The layers of te_jax.nnx between patches and the last norm give transformers' hidden states."""
    due = np.load(FIXTURES / name / "expected.npz")
    model, variables = hf.load(FIXTURES / name, scan=False)
    c, params = model.config, variables["params"]
    at = [(row, column) for row in (0, 4, 8) for column in (0, 4, 8)]
    patches = np.stack([due["images"][:, i : i + 4, j : j + 4].reshape(2, -1) for i, j in at], 1)
    x = jnp.asarray(patches @ params["embedding"] + params["embedding_bias"])
    if c.class_token:
        x = jnp.concatenate([jnp.broadcast_to(params["class_token"], (2, 1, c.hidden_size)), x], 1)
    x = x + params["positions"]
    for i in range(c.num_layers):
        module = te_nnx.TransformerLayer(**c.fields_of_layer(i), rngs=nnx.Rngs(0))
        layer = te_nnx.from_linen(dict(params=params[f"layer_{i}"]["TransformerLayer_0"]), module)
        x = layer(x, deterministic=True)
    norm = te_nnx.from_linen(
        dict(params=params["final_norm"]),
        te_nnx.LayerNorm(**c.norm_fields(), num_features=c.hidden_size, rngs=nnx.Rngs(0)),
    )
    compare(norm(x), due["hidden"])


@pytest.mark.parametrize("name", ["siglip", "vit"])
def test_fp8_and_gradients(name):
    """Under FP8 hidden and pooled states are near f32's; all parameters get gradients.

    E4M3 is off by up to 2**-4 of a number, 2**-4 / sqrt(3) in the mean of squares: of both operands 0.05 of a product's
    terms, whose signs differ. Two layers of four products add 0.05 to a residual that is as large: within 1/16 of the
    largest. The pooling head has three more, with no residual around the first: twice that; so has ViT's one of a
    single product, in front of its tanh. A gradient meets E5M2, off by twice as much, in eight products more:
    sqrt(8 * (0.04**2 + 0.06**2)) is 0.2.
    """
    due = np.load(FIXTURES / name / "expected.npz")
    model, variables = hf.load(FIXTURES / name)
    images = jnp.asarray(due["images"])

    @functools.partial(jax.jit, static_argnames="fp8")
    def run(variables, fp8):
        def loss(params):
            hidden, vectors = (model.apply(dict(params=params), images, pooled=each) for each in (False, True))
            return jnp.sum(hidden * jnp.cos(hidden)) + jnp.sum(vectors**2), (hidden, vectors)

        with te.autocast(fp8, Float8CurrentScaling()):
            return jax.value_and_grad(loss, has_aux=True)(variables["params"])

    (_, (hidden, vectors)), grads = run(variables, True)
    compare(hidden, due["hidden"], 1 / 16)
    before_tanh = np.arctanh if model.config.class_token else np.asarray
    compare(before_tanh(vectors), before_tanh(due["pooled"]), 1 / 8)
    assert all(bool(jnp.any(g != 0)) for g in jax.tree.leaves(grads))
    exact = run(variables, False)[1]
    assert not np.array_equal(grads["final_norm"]["scale"], exact["final_norm"]["scale"])
    kernel = lambda g: np.asarray(g["layers"]["TransformerLayer_0"]["mlp"]["wi_kernel"])
    assert np.linalg.norm(kernel(grads) - kernel(exact)) < 0.2 * np.linalg.norm(kernel(exact))


@pytest.mark.parametrize("name", ["siglip", "vit"])
def test_explicit_axes(name):
    """Devices share the images and the channels of kernels: pooled states are transformers'."""
    due = np.load(FIXTURES / name / "expected.npz")
    model, variables = hf.load(FIXTURES / name)
    mesh = jax.make_mesh((2, 2), ("fsdp", "tp"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh), te.sharding.global_shard_guard(te.MeshResource(fsdp_resource="fsdp", tp_resource="tp")):
        rules = te.sharding.extend_logical_axis_rules(())
        spec = nn.get_partition_spec(jax.eval_shape(model.init, jax.random.key(0), due["images"]))
        placed = jax.device_put(variables, nn.logical_to_mesh_sharding(spec, mesh, rules))
        images = jax.device_put(due["images"], NamedSharding(mesh, P("fsdp")))
        with nn.logical_axis_rules(rules):
            got = jax.jit(lambda variables, images: model.apply(variables, images, pooled=True))(placed, images)
    assert placed["params"]["embedding"].sharding.spec == P(None, "fsdp")
    compare(got, due["pooled"])


def test_initial_variables_and_refusals():
    for name in NAMES:
        config = hf.read_config(FIXTURES / name)
        images = jnp.zeros((1, *[config.image_size] * 2, config.image_channels))
        made = nn.unbox(jax.eval_shape(VisionEncoder(config).init, jax.random.key(0), images))
        want = hf.load(FIXTURES / name)[1]
        assert jax.tree.map(jnp.shape, made) == jax.tree.map(jnp.shape, want)
    config, images = hf.read_config(FIXTURES / "siglip"), jnp.zeros((1, 13, 13, 3))
    call = lambda config, images, **more: jax.eval_shape(
        lambda: VisionEncoder(config).init(jax.random.key(0), images, **more)
    )
    with pytest.raises(ValueError, match=r"images has shape \(1, 3, 13, 13\); pass \[b, 13, 13, 3\]"):
        call(config, images.transpose(0, 3, 1, 2))
    with pytest.raises(ValueError, match="pooled is True, but config.pooling_head is False"):
        call(replace(config, pooling_head=False), images, pooled=True)
    with pytest.raises(ValueError, match="logits is True, but config.num_labels is 0"):
        call(config, images, logits=True)
    with pytest.raises(ValueError, match="num_labels is 5, but there is neither config.class_token nor"):
        call(replace(config, pooling_head=False, num_labels=5), images)
    with pytest.raises(ValueError, match="logits is given together with pooled"):
        call(replace(config, num_labels=5), images, logits=True, pooled=True)
    with pytest.raises(ValueError, match="config.image_size is None"):
        call(hf.read_config(FIXTURES / "bert"), images)
    for sizes in (dict(vocab_size=0), dict(vocab_size=7, image_size=8, patch_size=4), dict(vocab_size=0, image_size=8)):
        with pytest.raises(ValueError, match="pass a vocab_size above 0, or 0 and both sizes of images"):
            ModelConfig(num_layers=1, hidden_size=8, **sizes)
    assert json.loads((FIXTURES / "siglip/config.json").read_text())["model_type"] == config.family
