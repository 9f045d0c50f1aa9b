"""The benchmark of training steps: what it counts, where its state lies, and that a mesh trains as one device does."""

import json
import math

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from benchmarks import ceilings, layers, meshes, training
from benchmarks.__main__ import main

COUNT = jax.device_count()
PARTS = min(COUNT, 4)  # devices of a mesh that trains: the first and the last have others between them
FULL = list(training.models(tiny=False, count=8))


def weights(model: training.Gpt):
    """Sizes of the parameters that are multiplied by, and of all."""
    shapes = jax.eval_shape(
        model.module("flax bf16").init, jax.random.key(0), jnp.zeros((1, model.stack.layer.seq), jnp.int32)
    )
    leaves = jax.tree_util.tree_leaves_with_path(shapes["params"])
    size = lambda *names: sum(leaf.size for path, leaf in leaves if jax.tree_util.keystr(path).endswith(names))
    return size("['kernel']", "['embedding'].value"), size("")


def test_flops_are_six_per_weight_and_token_and_half_of_attention():
    one, long = FULL[0], FULL[-1]
    for model in (one, long):
        multiplied, parameters = weights(model)
        seq, depth, hidden = model.stack.layer.seq, 20, 2048
        scores = depth * 6 * 2 * seq * hidden / 2  # a token: q k^T and p v, forward once and backward twice
        assert model.flops == pytest.approx(model.tokens * (6 * multiplied + scores), rel=1e-12)
        assert 6 * multiplied == pytest.approx(6 * parameters, rel=0.07)  # positions and biases are no products
    assert weights(one)[1] / 1e9 == pytest.approx(1.078, abs=1e-3)


def test_rows():
    by_place = {f"{model.role.name}={model.gpus}": model for model in FULL}
    assert list(by_place) == ["fsdp=1", "dp=8", "fsdp=8", "tp=8", "cp=1", "cp=8"]
    tokens = {place: model.tokens for place, model in by_place.items()}
    row = 2048
    assert tokens == {"fsdp=1": 8 * row, "dp=8": 64 * row, "fsdp=8": 64 * row, "tp=8": 16 * row} | dict.fromkeys(
        ("cp=1", "cp=8"), 32768
    )
    cases = list(training.cases(tiny=False))
    assert len({case.label for case in cases}) == len(cases)
    impls = lambda place: {case.impl for case in cases if f" {place} step" in case.name}
    cast = {impl + training.IN_BF16 for impl in meshes.IMPLS if "fp8" in impl}
    assert impls(f"dp={COUNT}") == impls("fsdp=1") == set(meshes.IMPLS) | cast
    gathered = {impl + training.ONE_GATHER for impl in meshes.IMPLS if "fp8" in impl}
    assert impls("fsdp=8") == impls("fsdp=1") | gathered
    assert impls(f"tp={COUNT}") == set(meshes.IMPLS) == impls(f"cp={COUNT}") | {"flax bf16"}


def test_figures():
    """16384 tokens in 0.2 s on one H200: 6 x 1.0737e9 weights and 6 x 20 x 2048 x 2048 of attention for each."""
    flops = 16384 * (6 * 1.0737e9 + 6 * 20 * 2048 * 2048)
    found = training.figures(FULL[0], True, "NVIDIA H200", 200.0)
    assert found["tokens_per_s"] == found["tokens_per_s_per_gpu"] == pytest.approx(81920)
    assert found["mfu"] == pytest.approx(flops / 0.2 / 989e12, rel=1e-3)
    assert found["mfu_fp8"] == pytest.approx(flops / 0.2 / 1979e12, rel=1e-3)
    on_eight = training.figures(FULL[1], False, "NVIDIA H200", 200.0)
    assert on_eight["tokens_per_s"] == pytest.approx(8 * 81920) and "mfu_fp8" not in on_eight
    assert on_eight["tokens_per_s_per_gpu"] == pytest.approx(81920) and on_eight["mfu"] == pytest.approx(found["mfu"])
    assert "mfu" not in training.figures(FULL[0], False, "cpu", 200.0)


def test_row(tmp_path, capsys, monkeypatch):
    found = {"sustained": 1.0, "brief": 1.0}
    monkeypatch.setattr(ceilings, "measure", lambda tiny: dict.fromkeys(("copy", "fp8", "bf16"), found))
    monkeypatch.setattr(jax, "device_count", lambda: PARTS)
    only = rf" dp={PARTS} step \| te_jax fp8 fast$"
    out = tmp_path / "results.json"
    args = ["training", "--tiny", "--calls", "1", "--repeat", "1", "--only", only, "--out", str(out)]
    assert main(args) == 0
    (row,) = json.loads(out.read_text())["rows"]
    assert row["tokens_per_s"] == pytest.approx(PARTS * row["tokens_per_s_per_gpu"])
    assert row["tokens_per_s"] == pytest.approx(1e6 / row["us_per_token"])
    assert "tokens/s" in capsys.readouterr().out


@pytest.mark.skipif(COUNT == 1, reason="one device cuts nothing")
def test_kernels_of_flax_are_cut_as_megatron_cuts_them():
    """Into the heads and the MLP by columns, out of them by rows: one sum over devices behind each pair."""
    model = next(model for model in training.models(tiny=True, count=PARTS) if model.role is meshes.TP)
    trainee = training.Trainee(model, "flax bf16")
    cuts, _ = trainee.shardings
    (layer,) = cuts["_Scanned_0"]["layers"].values()
    spec = lambda dense: dense["kernel"].spec
    axis = meshes.TP.row[1]
    for part in (layer, layer["Mlp_0"]):
        assert spec(part["Dense_0"]) == P(None, None, axis)
        assert spec(part["Dense_1"]) == P(None, axis)
    assert cuts["embedding"].spec[0] == axis
    _, loss = trainee.training().issue(1)
    assert float(loss) == pytest.approx(math.log(256), abs=0.2)  # the tokens are random, the logits small


def trained(role: meshes.Role, gpus: int):
    """A small GPT in bf16: the loss that its 12th step finds, and the state after it."""
    cut = role.name if role in (meshes.TP, meshes.CP) else ""
    layer = layers.Layer("", 8, 32, 128, 256, 8, 8, cut=cut, param_dtype=jnp.float32)
    call = training.Trainee(training.Gpt(256, layers.Stack("", 2, layer), role, gpus), "te_jax bf16").training()
    before = call.run.state
    state, loss = call.issue(7)
    assert int(state.step) == 12 and jax.tree.leaves(before.params)[0].is_deleted()  # its memory is the next one's
    return float(loss), state


@pytest.fixture(scope="module")
def loss_of_one():
    return trained(meshes.FSDP, 1)[0]


@pytest.mark.parametrize("role", [meshes.FSDP, meshes.TP, meshes.CP], ids=lambda role: role.name)
def test_a_mesh_trains_as_one_device(role, loss_of_one):
    """Other orders of summation round bf16 otherwise: some 10 roundings of 2^-9 between a token and its logits, whose
    spread is 0.5 at most, in a mean over 256 tokens are 2e-4; four times that, and again as much for the updates that
    led there. By then the loss has fallen by 0.2 from 5.6."""
    loss, state = trained(role, PARTS)
    assert loss_of_one < 5.45 and loss == pytest.approx(loss_of_one, abs=1.6e-3)
    if role is meshes.FSDP:  # all but biases, norms and positions is an equal part on each device
        arrays = jax.tree.leaves((state.params, state.opt_state))
        of_one = sum(array.addressable_shards[0].data.size for array in arrays)
        small = 3 * (32 * 128 + 2 * (384 + 128 + 256 + 128 + 4 * 128) + 2 * 128) + 3  # three of each, and counts
        assert of_one <= sum(array.size for array in arrays) / PARTS + small
