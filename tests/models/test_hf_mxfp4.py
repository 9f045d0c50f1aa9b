"""te_jax.hf on weights in MXFP4, as gpt-oss is published: their values, what is written of them, what is refused."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hf_folders import FIXTURES, tensors

from te_jax import hf
from te_jax.hf import files
from te_jax.hf.mxfp4 import Packed

pytest.importorskip("safetensors")
from safetensors.numpy import load_file, save_file

EXPERTS, ENDS = "model.layers.{}.mlp.experts.{}", ("_blocks", "_scales")


def value_of(bits: int) -> float:
    """An E2M1 number by its definition: sign, two bits of exponent with a bias of 1, one of mantissa."""
    exponent, mantissa = bits >> 1 & 3, bits & 1
    size = (1 + mantissa / 2) * 2.0 ** (exponent - 1) if exponent else mantissa / 2
    return -size if bits >> 3 else size


def packed(rng, shape):
    """(blocks, scales, values [E, in, out]) of weights [E, out, in] at random. A byte's lower bits come first."""
    experts, out, width = shape
    bits = rng.integers(0, 16, shape, np.uint8)
    scales = rng.integers(118, 131, (experts, out, width // 32), np.uint8)
    values = np.vectorize(value_of)(bits) * np.repeat(2.0 ** (scales.astype(float) - 127), 32, -1)
    blocks = (bits[..., ::2] | bits[..., 1::2] << 4).reshape(experts, out, width // 32, 16)
    return blocks, scales, values.swapaxes(1, 2)


def test_each_number_under_each_scale():
    """The bits of bf16, subnormal ones too: 2**-127 is the smallest scale, and half of it the smallest number."""
    scales = np.arange(256, dtype=np.uint8).reshape(1, 256, 1)
    blocks = np.broadcast_to(np.arange(16, dtype=np.uint8) * 17, (1, 256, 1, 16))
    got = jax.jit(lambda blocks, scales: Packed(blocks, scales).dequantize(jnp.bfloat16))(blocks, scales)
    exact = np.array([value_of(bits) for bits in range(16)]).repeat(2)[:, None] * 2.0 ** (np.arange(256.0) - 127)
    exact[:, 255] = np.nan  # this scale is no number
    with np.errstate(over="ignore"):  # 6 * 2**127 is no bf16
        want = exact.astype(np.float32).astype(jnp.bfloat16)
    np.testing.assert_array_equal(np.asarray(got)[0].view(np.uint16)[:, :255], want.view(np.uint16)[:, :255])
    assert np.isnan(np.asarray(got, np.float32)[0, :, 255]).all()


@pytest.fixture
def stored(tmp_path):
    """(the folder of a gpt-oss whose experts are in MXFP4, its tensors, {name: values})."""
    folder, rng, values = tmp_path / "mxfp4", np.random.default_rng(0), {}
    shutil.copytree(FIXTURES / "gpt-oss", folder)
    held = {name: a.astype(jnp.bfloat16) for name, a in load_file(folder / files.ONE).items()}
    for name in [EXPERTS.format(i, each) for i in range(2) for each in ("gate_up_proj", "down_proj")]:
        experts, width, out = held.pop(name).shape
        *parts, values[name] = packed(rng, (experts, out, width))
        held |= {name + end: a for end, a in zip(ENDS, parts)}
    save_file(held, folder / files.ONE)
    said = json.loads((folder / "config.json").read_text())
    said["quantization_config"] = dict(quant_method="mxfp4", modules_to_not_convert=["lm_head"])
    (folder / "config.json").write_text(json.dumps(said))
    return folder, held, values


def test_values_and_what_is_written(stored, tmp_path):
    """Weights are bf16 with exactly these values, and are written so."""
    folder, held, values = stored
    model, variables = hf.load(folder)
    assert model.dtype == jnp.bfloat16 and {a.dtype for a in jax.tree.leaves(variables)} == {jnp.dtype(jnp.bfloat16)}
    moe = variables["params"]["layers"]["layer_1"]["TransformerLayer_0"]["moe"]
    whole = values[EXPERTS.format(1, "gate_up_proj")]
    np.testing.assert_array_equal(moe["wi_0"][0].astype(np.float32), whole[..., ::2])
    np.testing.assert_array_equal(moe["wi_1"][0].astype(np.float32), whole[..., 1::2])
    hf.save(tmp_path / "wide", model, variables)
    wide = tensors(tmp_path / "wide")
    assert wide.keys() == {name for name in held if not name.endswith(ENDS)} | values.keys()
    for name, a in wide.items():
        np.testing.assert_array_equal(a.astype(np.float32), values.get(name, held.get(name, 0)))
    assert "quantization_config" not in json.loads((tmp_path / "wide" / "config.json").read_text())
    assert hf.load(tmp_path / "wide")[0].config == model.config


NAME = EXPERTS.format(0, "down_proj")
WRONG = {
    "has no .*down_proj_scales; in MXFP4": lambda held: held.pop(NAME + "_scales"),
    r"down_proj_blocks of type U8 and shape \[4, 32, 1, 8\]; in MXFP4": lambda held: held.update(
        {NAME + "_blocks": held[NAME + "_blocks"][..., :8]}
    ),
    "down_proj_blocks of type BF16": lambda held: held.update(
        {NAME + "_blocks": held[NAME + "_blocks"].astype(jnp.bfloat16)}
    ),
    r"U8 \[4, 31, 1\] for .*down_proj_scales; in MXFP4 it is U8 \[4, 32, 1\]": lambda held: held.update(
        {NAME + "_scales": held[NAME + "_scales"][:, 1:]}
    ),
    "and the only form of": lambda held: held.update({NAME: np.zeros((4, 32, 32), jnp.bfloat16)}),
    "lacks tensors of a gpt_oss": lambda held: [held.pop(NAME + end) for end in ENDS],
}


@pytest.mark.parametrize("says", WRONG)
def test_refused(says, stored, monkeypatch):
    """Before a tensor is read."""
    folder, held, _ = stored
    WRONG[says](held)
    save_file({name: np.ascontiguousarray(a) for name, a in held.items()}, folder / files.ONE)
    monkeypatch.setattr(files.Checkpoint, "read", None)
    with pytest.raises(ValueError, match=says):
        hf.load(folder)


def test_words_without_weights(stored):
    """Weights in MXFP4 need the word."""
    folder, _, _ = stored
    said = json.loads((folder / "config.json").read_text())
    del said["quantization_config"]
    (folder / "config.json").write_text(json.dumps(said))
    with pytest.raises(ValueError, match="lacks tensors of a gpt_oss.*experts.down_proj, .*"):
        hf.load(folder)
