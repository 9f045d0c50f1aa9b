"""te_jax.hf and FP8: checkpoints with weights in FP8, and parameters that become FP8 as they are read."""

import json
import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax.traverse_util import flatten_dict, unflatten_dict
from hf_folders import FIXTURES, tensors, trace_once
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import te_jax as te
import te_jax.flax as te_flax
from te_jax import hf
from te_jax.hf import files
from te_jax.layers import QuantizedKernel
from te_jax.ops.formats import ROWS_32, SQUARES_128
from te_jax.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling

pytest.importorskip("safetensors")
from safetensors.numpy import save_file

E4M3, BF16 = jnp.float8_e4m3fn, jnp.bfloat16
BLOCKS = dict(activation_scheme="dynamic", fmt="e4m3", quant_method="fp8", weight_block_size=[128, 128])
CONFIG = dict(  # blocks that are cut at their ends
    model_type="llama",
    hidden_size=160,
    intermediate_size=136,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=24,
    tie_word_embeddings=False,
    quantization_config=BLOCKS,
)
LINEARS = {  # [out, in]
    **{f"self_attn.{name}_proj": (160 if name in "qo" else 80, 160) for name in "qkvo"},
    **{f"mlp.{name}_proj": (136, 160) for name in ("gate", "up")},
    "mlp.down_proj": (160, 136),
}


def spread(scales, shape):
    """Each scale of a block of 128 x 128 for all of its numbers."""
    for axis in (0, 1):
        scales = np.repeat(scales, 128, axis)
    return scales[: shape[0], : shape[1]]


@pytest.fixture
def stored(tmp_path) -> tuple:
    """(folder, tensors) of a checkpoint in FP8, with scales that no amax of a block says."""
    rng, held = np.random.default_rng(0), {}
    narrow = lambda shape: rng.normal(size=shape).astype(np.float32)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        held[name] = narrow((24, 160)).astype(BF16)
    norms = [f"model.layers.{i}.{name}_layernorm" for i in range(2) for name in ("input", "post_attention")]
    held |= {f"{name}.weight": narrow(160).astype(BF16) for name in (*norms, "model.norm")}
    for i in range(2):
        for name, shape in LINEARS.items():
            weight = f"model.layers.{i}.{name}.weight"
            held[weight] = (100 * narrow(shape)).astype(E4M3)
            blocks = [math.ceil(size / 128) for size in shape]
            held[f"{weight}_scale_inv"] = rng.uniform(1e-4, 1e-3, blocks).astype(np.float32)
    write(tmp_path / "stored", held, CONFIG)
    return tmp_path / "stored", held


def write(folder, held, config):
    folder.mkdir(exist_ok=True)
    save_file(held, folder / files.ONE)
    (folder / "config.json").write_text(json.dumps(config))


def read(folder) -> dict[str, np.ndarray]:
    """All tensors of a folder of one file, in FP8 as bytes."""
    with files.Checkpoint(folder) as checkpoint:
        return {name: checkpoint.read(name) for name in checkpoint.tensors}


def same_bytes(got, want):
    assert got.keys() == want.keys()
    for name, a in want.items():
        assert (got[name].dtype, got[name].shape) == (a.dtype, a.shape), name
        assert canonical(got[name]).tobytes() == canonical(a).tobytes(), name


def canonical(a):
    """On a GPU, which gives a NaN of 16 bits other bits than a CPU, one NaN."""
    if a.dtype != BF16 or jax.default_backend() == "cpu":
        return a
    return np.where(np.isnan(a), np.asarray(np.nan, a.dtype), a)


def equal(a, b):
    """NaNs too."""
    np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


@pytest.fixture(autouse=True)
def equal_models_are_traced_once(monkeypatch):
    trace_once(monkeypatch)


def kernels(variables) -> dict[str, QuantizedKernel]:
    flat = flatten_dict(variables["params"], sep="/")
    return {path: leaf for path, leaf in flat.items() if isinstance(leaf, QuantizedKernel)}


def test_blocks(stored, tmp_path):
    """Dequantized to bf16, exactly; under the recipe of blocks the bits and scales of the file, in and out."""
    folder, held = stored
    model, wide = hf.load(folder)
    assert model.params_dtype == model.dtype == BF16
    hf.save(tmp_path / "wide", model, wide)
    weights = [name for name in held if f"{name}_scale_inv" in held]
    of = lambda name: held[name].astype(np.float32) * spread(held[f"{name}_scale_inv"], held[name].shape)
    due = {name: a for name, a in held.items() if not name.endswith("_scale_inv")}
    same_bytes(tensors(tmp_path / "wide"), due | {name: of(name).astype(BF16) for name in weights})
    assert "quantization_config" not in json.loads((tmp_path / "wide" / "config.json").read_text())
    for gradients in (False, True):
        model, variables = hf.load(folder, fp8=Float8BlockScaling(), fp8_gradients=gradients)
        assert len(kernels(variables)) == 5
        hf.save(tmp_path / f"{gradients}", model, variables)
        same_bytes(read(tmp_path / f"{gradients}"), held)
        said = json.loads((tmp_path / f"{gradients}" / "config.json").read_text())["quantization_config"]
        assert BLOCKS.items() <= said.items() and said["modules_to_not_convert"] == ["lm_head"]
        jax.tree.map(equal, te_flax.dequantize_params(variables), wide)
        for q in kernels(variables).values():
            assert (q.tensor.data is not None) == gradients and q.dtype == BF16
    with te.autocast(True, Float8BlockScaling()):  # which refuses what it does not read
        jax.eval_shape(model.apply, variables, jnp.zeros((1, 2), int))
    mesh = jax.make_mesh((4,), ("tp",))
    places = jax.tree.map(lambda a: NamedSharding(mesh, P(None, "tp") if a.ndim > 2 else P()), wide)
    _, split = hf.load(folder, fp8=Float8BlockScaling(), fp8_gradients=True, shardings=places)
    jax.tree.map(equal, split, variables)
    assert kernels(split)["layers/TransformerLayer_0/mlp/wi_kernel"].tensor.data.sharding.spec == P(
        None, "tp", None, None
    )


# With kernels of the dense layer (7) and of the stack of the others (10): all, or without kv_up.
RECIPES = {Float8BlockScaling(exclude=("*kv_up",)): 15, Float8CurrentScaling(): 17}


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: type(recipe).__name__)
def test_into_fp8_parameters(recipe):
    """The bits of `fp8_params` of what is loaded without it, for dense layers, stacks and experts; onto a mesh too."""
    folder, tokens = FIXTURES / "deepseek-v3", jnp.zeros((1, 2), int)
    model, variables = hf.load(folder, dtype=BF16)

    @jax.jit
    def quantized(variables):
        with te.autocast(True, recipe):
            made = te_flax.fp8_params(model, variables, tokens)
        return {name: made[name] for name in ("params", "expert_bias")}

    want = quantized(variables)
    same, got = hf.load(folder, dtype=BF16, fp8=recipe)
    assert same == model and len(kernels(got)) == RECIPES[recipe]
    assert jax.tree.structure(got) == jax.tree.structure(want)
    jax.tree.map(equal, got, want)
    if not recipe.exclude:
        return
    mesh = jax.make_mesh((2, 2), ("fsdp", "tp"))
    spec = lambda a: P(*[None] * (a.ndim - 2), "fsdp", "tp") if a.ndim > 1 and a.shape[-2] % 2 == 0 else P()
    places = jax.tree.map(lambda a: NamedSharding(mesh, spec(a)), variables)
    _, spread_out = hf.load(folder, dtype=BF16, fp8=recipe, shardings=places)
    jax.tree.map(equal, spread_out, want)
    wo = kernels(spread_out)["layers/TransformerLayer_0/moe/wo"].tensor
    assert wo.data_t.sharding.spec == P(None, None, "tp", "fsdp") and wo.scale_inv_t.sharding.spec == P()


def test_memory(monkeypatch):
    """Whenever a tensor is read, there is on the device no more than the parameters in FP8 and their scales."""
    bytes_held = lambda: sum(a.nbytes for a in jax.live_arrays())
    before, held, read_one = bytes_held(), [], files.Checkpoint.read

    def reading(checkpoint, name):
        held.append(bytes_held() - before)
        return read_one(checkpoint, name)

    monkeypatch.setattr(files.Checkpoint, "read", reading)
    _, variables = hf.load(FIXTURES / "llama3", dtype=BF16, fp8=Float8CurrentScaling())
    total = sum(a.nbytes for a in jax.tree.leaves(variables))
    wide = jax.eval_shape(te_flax.dequantize_params, variables)
    assert max(held) <= total < 0.7 * sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(wide))


@pytest.mark.parametrize("dtype", [BF16, np.float16])
def test_scales_of_16_bits(dtype, stored, tmp_path):
    """They are those numbers in f32."""
    _, held = stored
    short = {name: a.astype(dtype) if name.endswith("_scale_inv") else a for name, a in held.items()}
    wide = {name: a.astype(np.float32) if name.endswith("_scale_inv") else a for name, a in short.items()}
    write(tmp_path / "short", short, CONFIG), write(tmp_path / "wide", wide, CONFIG)
    for options in ({}, dict(fp8=Float8BlockScaling())):
        got, want = (hf.load(tmp_path / name, **options)[1] for name in ("short", "wide"))
        jax.tree.map(equal, got, want)


def seen(state):
    """The state of a model that has seen inputs: each tensor its own scale."""
    rng = np.random.default_rng(1)
    leaf = lambda path, a: (
        rng.uniform(1, 2, a.shape).astype(np.float32) if path[-1].key.endswith("_scale") else np.ones_like(a)
    )
    return jax.tree_util.tree_map_with_path(leaf, state)


def test_one_scale_each(tmp_path):
    """What inference servers read: `weight`, `weight_scale` and, of delayed scales, `input_scale`."""
    tokens, recipe = jnp.zeros((1, 2), int), DelayedScaling(amax_history_len=2)
    model, variables = hf.load(FIXTURES / "qwen3-moe", dtype=BF16, fp8=recipe)
    with te.autocast(True, recipe):
        shapes = jax.eval_shape(lambda: nn.unbox(model.init(jax.random.key(0), tokens))["fp8_metas"])
    fresh = jax.tree.map(lambda a: np.zeros(a.shape, np.float32), shapes)
    state = seen(fresh)
    hf.save(tmp_path / "static", model, variables | {"fp8_metas": state})
    hf.save(tmp_path / "dynamic", model, variables)
    static, dynamic = read(tmp_path / "static"), read(tmp_path / "dynamic")
    same_bytes({name: a for name, a in static.items() if not name.endswith("input_scale")}, dynamic)
    said = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("static", "dynamic")]
    said = [config["quantization_config"] for config in said]
    assert [each["activation_scheme"] for each in said] == ["static", "dynamic"]
    apart = ["lm_head", "model.layers.0.mlp.gate", "model.layers.1.mlp.gate"]
    assert all(each["quant_method"] == "fp8" and each["ignored_layers"] == apart for each in said)
    # Values are weight * scale; inputs are divided by theirs.
    flat, metas = kernels(variables), flatten_dict(state, sep="/")
    path = "layers/TransformerLayer_0/"
    for name, q, at, x in (
        ("model.layers.1.self_attn.o_proj", flat[path + "attention/out/kernel"], (1,), "attention/out/x_scale"),
        ("model.layers.1.self_attn.v_proj", flat[path + "attention/kv/kernel"], (1,), "attention/kv/x_scale"),
        ("model.layers.0.mlp.experts.2.up_proj", flat[path + "moe/wi_1"], (0, 2), "moe/x_0_scale"),
        ("model.layers.0.mlp.experts.3.down_proj", flat[path + "moe/wo"], (0, 3), "moe/x_1_scale"),
    ):
        weight, scale = static[f"{name}.weight"], static[f"{name}.weight_scale"]
        rows = q.tensor.data_t[at]
        np.testing.assert_array_equal(weight, rows[1] if rows.ndim == 3 else rows)
        assert scale.shape == () and scale == q.tensor.scale_inv[at]
        due = metas[path + x][at[: metas[path + x].ndim - 1]][0]
        assert static[f"{name}.input_scale"] == np.float32(1) / due
    again, wide = hf.load(tmp_path / "static")
    assert again.config == model.config
    jax.tree.map(equal, wide, te_flax.dequantize_params(variables))
    for wrong, words in (
        (fresh, "fp8_metas has never seen the inputs of params/layers/TransformerLayer_0/attention/query/kernel"),
        ({}, "fp8_metas lacks layers/TransformerLayer_0/attention/query/x_scale"),
    ):
        with pytest.raises(ValueError, match=words):
            hf.save(tmp_path / "no", model, variables | {"fp8_metas": wrong})
    assert not (tmp_path / "no").exists()


NAME = "model.layers.1.mlp.up_proj.weight"
SCALE = f"{NAME}_scale_inv"
WRONG = {  # what becomes of the tensors, or of config.json, and what is said
    "missing": (lambda held: held.pop(SCALE), {}, f"lacks tensors of a llama .*{SCALE}"),
    "shape": (
        lambda held: held.update({SCALE: held[SCALE][:1].copy()}),
        {},
        rf"{SCALE} of shape \[1, 2\]; a llama has \[2, 2\]",
    ),
    "dtype": (
        lambda held: held.update({SCALE: held[SCALE].astype(np.int32)}),
        {},
        f"{SCALE} of type I32; te_jax reads ",
    ),
    "none's": (lambda held: held.update({NAME: held[NAME].astype(BF16)}), {}, f"tensors that are none of .*{SCALE}"),
    "a norm": (
        lambda held: held.update({"model.norm.weight": held["model.norm.weight"].astype(E4M3)}),
        {},
        "lacks tensors.*model.norm.weight_scale_inv",
    ),
    "nothing said": (
        lambda held: [held.pop(name) for name in [*held] if name.endswith("_scale_inv")],
        dict(quantization_config=None),
        "of type F8_E4M3, but its config.json no quantization_config",
    ),
    "method": (None, dict(quantization_config=dict(quant_method="gptq")), "quant_method='gptq'; te_jax reads 'fp8'"),
    "blocks": (
        None,
        dict(quantization_config=BLOCKS | dict(weight_block_size=[64, 64])),
        r"weight_block_size=\[64, 64\]; te_jax reads None or \[128, 128\]",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_refused(name, stored, monkeypatch):
    """Before a tensor is read."""
    (folder, held), (change, config, words) = stored, WRONG[name]
    if change is not None:
        change(held)
    write(folder, held, CONFIG | config)
    monkeypatch.setattr(files.Checkpoint, "read", None)
    with pytest.raises(ValueError, match=words):
        hf.load(folder)


def test_refused_parameters(tmp_path):
    """What checkpoints in FP8 have no form for."""
    model, variables = hf.load(FIXTURES / "gpt2", dtype=BF16, fp8=Float8CurrentScaling())
    out = "layers/TransformerLayer_0/attention/out/kernel"
    scales = {
        rf"params/{out} is float8_e4m3fn with scales of blocks of 32; checkpoints have": ((2, 1, 32), ROWS_32),
        rf"{out} and params/layers.* have scales of different forms; use one recipe": ((2, 1, 1), SQUARES_128),
        "is in FP8, but the tensors of a gpt2 that it becomes have no scales of their own": None,
    }
    for words, of_blocks in scales.items():
        params = flatten_dict(variables["params"], sep="/")
        if of_blocks is not None:
            shape, form = of_blocks
            inverse = jnp.ones(shape, form.scale_dtype)
            tensor = params[out].tensor._replace(scale_inv=None, scale_inv_t=inverse)
            params = {out: replace(params.pop(out), tensor=tensor, format=form), **params}
        with pytest.raises(ValueError, match=words):
            hf.save(tmp_path / "no", model, {"params": unflatten_dict(params, sep="/")})
    with pytest.raises(TypeError, match="te_jax.hf.load: fp8 is"):
        hf.load(FIXTURES / "gpt2", fp8=True)
    assert not (tmp_path / "no").exists()
