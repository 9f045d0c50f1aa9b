"""te_jax.hf.FP8Export: masters that are written in FP8, and what is read of them."""

import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from hf_folders import FIXTURES

from te_jax import hf
from te_jax.hf import files
from te_jax.hf.fp8_export import quantize_to
from te_jax.hf.quantization_config import write_scheme
from te_jax.hf.scales import Scaled
from te_jax.ops.quantize import quantize_block
from te_jax.recipe import DelayedScaling
from te_jax.state.fp8 import autocast

pytest.importorskip("safetensors")

BLOCK, TENSOR = hf.FP8Export(powers_of_2=True), hf.FP8Export(weights="tensor")
CHANNEL = hf.FP8Export("compressed-tensors", "channel")
FOLDERS = {"llama3": CHANNEL, "qwen3-moe": hf.FP8Export("compressed-tensors", "tensor"), "deepseek-v3": BLOCK}


def read(folder) -> dict[str, np.ndarray]:
    with files.Checkpoint(folder) as checkpoint:
        return {name: checkpoint.read(name) for name in checkpoint.tensors}


def config_of(folder) -> dict:
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("name", FOLDERS)
def test_there_and_back(name, tmp_path):
    """Each tensor of a linear layer has its own scale; what is read is weight * scale, exactly; routers stay."""
    export = FOLDERS[name]
    model, variables = hf.load(FIXTURES / name, dtype=jnp.float32)
    hf.save(tmp_path / "wide", model, variables)
    hf.save(tmp_path / "narrow", model, variables, fp8=export, max_file_bytes=20_000)
    assert (tmp_path / "narrow" / files.INDEX).exists()
    wide, narrow = read(tmp_path / "wide"), read(tmp_path / "narrow")
    end = "_scale_inv" if export.method == "fp8" else "_scale"
    weights = [each for each in narrow if f"{each}{end}" in narrow]
    assert wide.keys() == {each for each in narrow if not each.endswith(end)}
    assert any("experts.1.down_proj" in each for each in weights) == (name != "llama3")
    assert not any(word in each for each in weights for word in ("norm", "embed", "lm_head", "gate.weight"))
    due = dict(wide)
    for each in weights:
        w, q, scale = wide[each], narrow[each], narrow[each + end]
        rows, columns = w.shape
        shape = {"channel": (rows, 1), "tensor": (1,), "block": (-(-rows // 128), -(-columns // 128))}[export.weights]
        assert (q.dtype, q.shape, scale.dtype, scale.shape) == (jnp.float8_e4m3fn, w.shape, np.float32, shape)
        due[each] = q.astype(np.float32) * scale  # blocks: the fixtures have one for a weight
        # Half the distance of two numbers of 4 significant bits, or of two subnormal ones, 2**-9 apart; another 2**-22
        # for a scale, its inverse and products that are rounded.
        assert np.all(np.abs(due[each] - w) <= np.maximum(2.0**-4 * np.abs(w), 2.0**-10 * scale) + 2.0**-22 * np.abs(w))
        if export.weights == "channel":  # the largest of each row is 448
            np.testing.assert_array_equal(np.abs(q.astype(np.float32)).max(1), 448)
    again, values = hf.load(tmp_path / "narrow", dtype=jnp.float32)
    hf.save(tmp_path / "back", again, values)
    back = read(tmp_path / "back")
    assert "quantization_config" not in config_of(tmp_path / "back") and back.keys() == due.keys()
    for each, a in due.items():
        np.testing.assert_array_equal(back[each], a, each)
    if export.powers_of_2:
        # The weights are q * 2**n, which are quantized to themselves.
        hf.save(tmp_path / "again", again, values, fp8=export)
        assert (
            config_of(tmp_path / "again")["quantization_config"]
            == config_of(tmp_path / "narrow")["quantization_config"]
        )
        for each, a in read(tmp_path / "again").items():
            assert a.tobytes() == narrow[each].tobytes(), each


def test_scales():
    """The bits of the op of blocks, or its values with powers of 2; 1 where all are 0."""
    a = jax.random.normal(jax.random.key(0), (200, 300)).at[128:, :128].set(0)
    for power_2 in (False, True):
        got = quantize_to(hf.FP8Export().scheme, power_2, a)
        options = dict(outputs=("data", "block_inv"), lead=0, dtype=jnp.dtype(jnp.float8_e4m3fn), square=True)
        data, inverse = quantize_block(a, power_2=power_2, epsilon=0.0, **options)
        if not power_2:
            np.testing.assert_array_equal(np.asarray(got.data), np.asarray(data))
            np.testing.assert_array_equal(got.scale_inv, inverse)
        np.testing.assert_array_equal(
            got.dequantize(jnp.float32), Scaled(data, inverse, got.format).dequantize(jnp.float32)
        )
        assert got.scale_inv[1, 0] == 1


def test_scales_are_normal_numbers():
    """Of zeros, and of the least and the largest weights: neither 0 nor infinite, and values are what they were."""
    tiny, edges = np.finfo(np.float32).tiny, np.array([0.0, 1e-45, 1e-40, 2e-38, 3e-37, 1e-35, 3e38], np.float32)
    weights = np.zeros((len(edges), 2, 3), np.float32)
    weights[:, 0, 1] = edges
    # Half a step of E4M3, or of its subnormal numbers by the least scale; XLA has no subnormal numbers of f32.
    off = np.where(edges < tiny, edges, np.maximum(2.0**-4 * edges.astype(np.float64), 2.0**-136) * (1 + 2.0**-20))
    for export in (hf.FP8Export(), TENSOR, CHANNEL):
        for power_2 in (False, True):
            got = jax.vmap(partial(quantize_to, export.scheme, power_2))(weights)
            scales = np.asarray(got.scale_inv, np.float64).reshape(len(edges), -1)
            assert np.all((scales >= tiny) & np.isfinite(scales)) and np.all(scales[0] == 1)
            values = np.asarray(got.data, np.float32)[:, 0, 1] * scales[:, 0]
            assert np.all(np.abs(values - edges) <= off)


def test_powers_of_2_are_kept():
    """What is read of weights is written with the same bytes, also where the largest was rounded down to half of 448,
    which the double of the scale fits as well."""
    drawn = jax.random.uniform(jax.random.key(1), (300, 32, 32), minval=-0.7, maxval=0.7)
    largest = jnp.linspace(0.8, 1.2, 300)[:, None]  # 0.875 is 448 / 512, 0.90625 is 464 / 512
    for export in (BLOCK, hf.FP8Export(weights="tensor", powers_of_2=True)):
        write = jax.vmap(partial(quantize_to, export.scheme, True))
        first = write(drawn.at[:, 0, :1].set(largest))
        again = write(jax.vmap(lambda a: a.dequantize(jnp.float32))(first))
        assert first.data.tobytes() == again.data.tobytes() and first.scale_inv.tobytes() == again.scale_inv.tobytes()
        assert float(jnp.abs(first.data.astype(jnp.float32)).max((1, 2)).min()) > 224


def test_a_classifier_stays_as_it_is(tmp_path):
    """And is named, so that no reader expects its scale."""
    model, variables = hf.load(FIXTURES / "vit-classifier")
    hf.save(tmp_path / "narrow", model, variables, fp8=CHANNEL)
    assert config_of(tmp_path / "narrow")["quantization_config"]["ignore"] == ["lm_head", "classifier"]
    held = read(tmp_path / "narrow")
    assert held["classifier.weight"].dtype == np.float32 and "classifier.weight_scale" not in held
    assert "vit.encoder.layer.0.output.dense.weight_scale" in held


@pytest.mark.parametrize("spoiled", [np.nan, np.inf, -np.inf])
def test_weights_that_are_not_finite_are_named(spoiled, tmp_path):
    """Before anything is written: the parameter, and the tensor of its layer."""
    model, variables = hf.load(FIXTURES / "llama3", dtype=jnp.bfloat16)
    layer = variables["params"]["layers"]["TransformerLayer_0"]
    layer["mlp"]["wo_kernel"] = layer["mlp"]["wo_kernel"].at[1, 3, 5].set(spoiled)
    words = "layers/TransformerLayer_0/mlp/wo_kernel has a NaN or an infinite number, in model.layers.1.mlp.down_proj.w"
    for export in (hf.FP8Export(), TENSOR, CHANNEL):
        with pytest.raises(ValueError, match=words):
            hf.save(tmp_path / "no", model, variables, fp8=export)
    assert not (tmp_path / "no").exists()
    hf.save(tmp_path / "wide", model, variables)


def test_config():
    """The words of compressed-tensors 0.20.1, whose `QuantizationConfig` takes them."""
    array = dict(num_bits=8, type="float", symmetric=True)
    for weights, static, of_weights, of_inputs in (
        ("tensor", True, dict(strategy="tensor"), dict(strategy="tensor", dynamic=False)),
        ("tensor", False, dict(strategy="tensor"), dict(strategy="tensor", dynamic=True)),
        ("channel", False, dict(strategy="channel"), dict(strategy="token", dynamic=True)),
        (
            "block",
            False,
            dict(strategy="block", block_structure=[128, 128]),
            dict(strategy="group", group_size=128, dynamic=True),
        ),
    ):
        said = write_scheme(hf.FP8Export("compressed-tensors", weights).scheme, static, ["a.gate.weight"])
        assert said["config_groups"]["group_0"] == dict(
            targets=["Linear"],
            weights=array | of_weights | dict(dynamic=False),
            input_activations=array | of_inputs,
            output_activations=None,
        )
        assert said["ignore"] == ["lm_head", "a.gate"] and said["quantization_status"] == "compressed"


def _change(said, path, value):
    *above, last = path
    for key in above:
        said = said[key]
    said[last] = value


GROUP = ("config_groups", "group_0")
REFUSED = {
    "format": (("format",), "pack-quantized", "format='pack-quantized'; te_jax reads None or 'float-quantized'"),
    "unknown": (("rotation",), 1, "has 'rotation'=1, which te_jax does not know"),
    "targets": ((*GROUP, "targets"), ["re:.*q_proj"], r"targets=\['re:.*q_proj'\]; te_jax reads \['Linear'\]"),
    "bits": ((*GROUP, "weights", "num_bits"), 4, "num_bits=4; te_jax reads 8"),
    "type": ((*GROUP, "weights", "type"), "int", "type='int'; te_jax reads 'float'"),
    "strategy": ((*GROUP, "weights", "strategy"), "group", "strategy='group'; te_jax reads"),
    "inputs": ((*GROUP, "input_activations", "dynamic"), "local", "input_activations has dynamic='local'"),
    "groups": (("config_groups",), {}, "config_groups={}; te_jax reads one group"),
}


def test_refused(tmp_path):
    """By name: what a quantization_config has that te_jax does not read, fields that do not go with each other, and
    static activations without state."""
    model, variables = hf.load(FIXTURES / "llama3", dtype=jnp.float32)
    hf.save(tmp_path / "made", model, variables, fp8=CHANNEL)
    sound = (tmp_path / "made" / "config.json").read_text()
    for path, value, words in REFUSED.values():
        changed = json.loads(sound)
        _change(changed["quantization_config"], path, value)
        (tmp_path / "made" / "config.json").write_text(json.dumps(changed))
        with pytest.raises(ValueError, match=words):
            hf.load(tmp_path / "made")
    static = hf.FP8Export(weights="tensor", activations="static")
    with pytest.raises(ValueError, match="activations='static', but variables have no fp8_metas"):
        hf.save(tmp_path / "no", model, variables, fp8=static)
    with pytest.raises(ValueError, match="has never seen|fp8_metas lacks"):
        hf.save(tmp_path / "no", model, variables | {"fp8_metas": {}}, fp8=static)
    for fields, words in (
        (dict(weights="channel"), "'channel', but the method 'fp8' has no such scales"),
        (dict(activations="static"), "'static', but weights is 'block'; pass weights='tensor'"),
    ):
        with pytest.raises(ValueError, match=words):
            hf.FP8Export(**fields)
    with pytest.raises(TypeError, match="fp8 is 'fp8'; pass None or a te_jax.hf.FP8Export|fp8 is 'fp8'"):
        hf.save(tmp_path / "no", model, variables, fp8="fp8")
    assert not (tmp_path / "no").exists()


def test_static(tmp_path):
    """The scales of inputs are 1 / the state's, one for each tensor."""
    model, variables = hf.load(FIXTURES / "llama3", dtype=jnp.float32)
    with autocast(True, DelayedScaling(amax_history_len=2)):
        shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), jnp.zeros((1, 2), int)))["fp8_metas"]
    state = jax.tree.map(lambda a: np.full(a.shape, 4.0, np.float32), shapes)
    export = hf.FP8Export("compressed-tensors", "tensor", "static")
    hf.save(tmp_path / "static", model, variables | {"fp8_metas": state}, fp8=export)
    made = read(tmp_path / "static")
    inputs = [name for name in made if name.endswith("input_scale")]
    assert len(inputs) == sum(name.endswith("weight_scale") for name in made) == 7 * model.config.num_layers
    assert all(made[name].shape == (1,) and made[name] == 0.25 for name in inputs)
    _, again = hf.load(tmp_path / "static")
    assert flatten_dict(again).keys() == flatten_dict(variables).keys()
