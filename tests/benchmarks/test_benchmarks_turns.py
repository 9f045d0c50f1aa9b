"""The benchmarks that take turns run, at tiny sizes, and count what they say they count. Speed is not tested here."""

import ctypes
import json
import re
import time

import numpy as np
import pytest

from benchmarks import experts, machine, moe, timing, torch_peers, turns
from benchmarks.__main__ import main
from benchmarks.cases import Case

FULL = turns.SUITES["grouped"][0](False)
BY_LABEL = {case.label: case for case in FULL}
NO_METER = machine.Meter()


def test_names_are_unique_and_stand_together():
    assert len(BY_LABEL) == len(FULL)
    names = [case.name for case in FULL]
    assert len(turns.chosen(FULL, None)) == len(set(names))


@pytest.mark.parametrize(
    "label,tflop,gigabytes",
    [
        # 2 T k N K operations; rows and weights of one byte, results of two
        (
            "Mixtral 8x7B 8192 tokens, balanced: fprop wi n28672 k4096 | te_jax fp8 fast",
            2 * 16384 * 28672 * 4096 / 1e12,
            (16384 * 4096 + 8 * 28672 * 4096 + 2 * 16384 * 28672) / 1e9,
        ),
        (
            "Qwen3-30B-A3B 8192 tokens, balanced: wgrad wo n768 k2048 | te_jax bf16",
            2 * 65536 * 768 * 2048 / 1e12,
            2 * (65536 * (768 + 2048) + 128 * 768 * 2048) / 1e9,
        ),
        (
            "DeepSeek-V3, 64 of 256 experts, 32768 tokens, zipf: dgrad wi n7168 k4096 | te_jax fp8 block",
            2 * 65536 * 7168 * 4096 / 1e12,
            (65536 * 4096 + 64 * 7168 * 4096 + 2 * 65536 * 7168) / 1e9,
        ),
        # x of 2 bytes once, both layouts of 1
        ("Qwen3-30B-A3B 8192 tokens, zipf: permute to fp8, both layouts | te_jax fp8", 0, 2048 * 2 * 8192 * 9 / 1e9),
    ],
)
def test_work(label, tflop, gigabytes):
    case = BY_LABEL[label]
    assert case.flops / 1e12 == pytest.approx(tflop) and case.bytes / 1e9 == pytest.approx(gigabytes)


@pytest.mark.parametrize("model", experts.models(False), ids=lambda model: model.label)
def test_choices(model):
    """k different experts each; balanced, as many for all; skewed, as the odds 1 : 1/2 : 1/3 say at k = 1."""
    choices = np.sort(model.choices, 1)
    assert np.all(choices[:, 1:] > choices[:, :-1]) and choices.min() >= 0 and choices.max() < model.experts
    assert sum(model.counts) == model.pairs
    if not model.skewed:
        assert set(model.counts) == {model.pairs // model.experts}
        assert model.counts[0] >= 256
        return
    first = experts.Experts("", 8, 8, model.experts, 1, 20000, True)
    odds = 1 / np.arange(1, model.experts + 1)
    most = max(first.counts) / 20000
    assert most == pytest.approx(odds[0] / odds.sum(), abs=5 * (0.25 / 20000) ** 0.5)  # five standard deviations


def test_head(tmp_path, capsys):
    out = tmp_path / "head.json"
    only = r"96 fwd.*(te_jax fp8|f32 logits)$"
    assert main(["head", "--tiny", "--quick", "--only", only, "--out", str(out)]) == 0
    ours, whole = json.loads(out.read_text())["rows"]
    assert ours["beside"] == {"jax f32 logits": pytest.approx(ours["ms"] / whole["ms"])} and ours["us_per_token"] > 0


def test_grouped(tmp_path, capsys):
    out = tmp_path / "grouped.json"
    only = (
        r"zipf: (wgrad wo.*\| (te_jax fp8 fast|loop|ragged)|fprop wi.*te_jax fp8 block|dswiglu.*te_jax fp8$)"
        r"|balanced: (permute to.*te_jax fp8 block|quantize wo.*te_jax fp8$|router \|)"
    )
    assert main(["grouped", "--tiny", "--quick", "--only", only, "--out", str(out)]) == 0
    printed, rows = capsys.readouterr().out, json.loads(out.read_text())["rows"]
    impls = [row["impl"] for row in rows if "wgrad" in row["case"]]
    assert impls == ["te_jax fp8 fast", "dense fp8 fast", "dense bf16", "loop of dense fp8 fast", "ragged_dot bf16"]
    assert len(rows) == len(impls) + 2 + 4
    for row in rows:
        assert row["ms"] > 0 and len(row["all_ms"]) == 4 and row["suite"] == "grouped"
        assert ("of_bound" in row) == (not row["impl"].startswith("dense"))
        assert row["case"] in printed


def counted(calls_ms: float, order: list, name: str):
    """The `measure` of a case that notes its turns."""

    def measure(calls, repeat):
        order.append((name, calls))
        return [calls_ms] * repeat

    return measure


def test_turns_and_bounds():
    order = []
    fast = Case("a", "dense", measure=counted(1.0, order, "dense"), flops=1e9, bytes=1e6, bound="dense")
    slow = Case("a", "te_jax", measure=counted(2.0, order, "te_jax"), flops=1e9, bytes=1e6, bound="dense")
    moves = Case("a", "copies", measure=counted(4.0, order, "copies"), bytes=2e12 * 3e-3, bound="dense")
    rows = {row["impl"]: row for row in turns.measure([fast, slow, moves], 0.4, NO_METER, copy_tbs=2.0)}
    assert [name for name, _ in order[6:]] == ["dense", "te_jax", "copies"] * 4
    assert dict(order[6:]) == {"dense": 100, "te_jax": 50, "copies": 25}  # 0.1 s a turn
    assert rows["te_jax"]["of_bound"] == 0.5 and rows["copies"]["of_bound"] == pytest.approx(0.75)
    assert "of_bound" not in rows["dense"] and rows["te_jax"]["tflops"] == pytest.approx(0.5)


def test_a_contender_that_fails_is_a_row(tmp_path, monkeypatch, capsys):
    """A peer that fails is a result, and what it bounds has no bound; ours is a failure."""

    def fails(calls, repeat):
        raise RuntimeError("out of memory")

    peer = Case("a", "dense", measure=fails)
    ours = Case("a", "te_jax", measure=counted(1.0, [], ""), bytes=1, bound="dense")
    for cases, status in (([peer, ours], 0), ([Case("b", "te_jax", measure=fails)], 1)):
        monkeypatch.setitem(turns.SUITES, "grouped", (lambda tiny, cases=cases: cases, "text"))
        assert main(["grouped", "--tiny", "--quick", "--out", str(tmp_path / "a.json")]) == status
        rows = json.loads((tmp_path / "a.json").read_text())["rows"]
        assert rows[0]["error"] == "RuntimeError: out of memory"
        assert all("of_bound" not in row for row in rows)
    assert re.search(r"b +te_jax +error +RuntimeError: out of memory", capsys.readouterr().out)


def test_without_a_gpu_full_sizes_of_turns_are_refused(capsys):
    if timing.on_gpu():
        pytest.skip("here is a GPU")
    assert main(["grouped", "--only", "router fwd"]) == 2
    assert main(["grouped", "--list", "--only", "Qwen.*fprop wi.*te_jax bf16"]) == 0
    assert "dense bf16" in capsys.readouterr().out
    assert main(["grouped", "--only", "nothing like this"]) == 1


FAKE_TORCH = """
from unittest.mock import MagicMock
class Array:
    to = t = transpose = cumsum = exp = requires_grad_ = lambda self, *args, **options: self
    __mul__ = __sub__ = __neg__ = to
randn = ones = tensor = lambda *args, **options: Array()
bfloat16 = float8_e4m3fn = float32 = int32 = None
cuda, autograd = MagicMock(), MagicMock()
cuda.memory_allocated.return_value, cuda.max_memory_allocated.return_value = 30, 100
_scaled_mm = _grouped_mm = lambda *args, **options: Array()
def _scaled_grouped_mm(*args, **options):
    raise ValueError("no such kernel")
"""


def test_torch_in_a_process_of_its_own(tmp_path, monkeypatch):
    """Its errors are ours, and the next request gets another process."""
    (tmp_path / "torch.py").write_text(FAKE_TORCH)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(torch_peers, "available", lambda: True)
    torch_peers._process.cache_clear()
    sizes = dict(contracted=True, n=32, k=64, counts=[3, 0, 17])
    scan = dict(shape=(1, 8, 4, 2, 16, 32), backward=True)
    assert torch_peers.measure((32, 16, 16), "fast", 2) > 0
    with pytest.raises(RuntimeError, match="^ValueError: no such kernel$"):
        torch_peers.measure_grouped(2, fp8=True, **sizes)
    assert torch_peers.measure_grouped(2, fp8=False, **sizes) > 0
    with pytest.raises(RuntimeError, match="No module named 'mamba_ssm'"):
        torch_peers.measure_scan(2, graph=False, **scan)
    module = tmp_path / "mamba_ssm/ops/triton/ssd_combined.py"
    module.parent.mkdir(parents=True)
    module.write_text("mamba_chunk_scan_combined = lambda *operands, **options: operands")
    assert torch_peers.measure_scan(2, graph=True, **scan) > 0 and torch_peers.peak_of_scan(**scan) == 70
    torch_peers._process().stdin.close()
    torch_peers._process().wait()
    torch_peers._process.cache_clear()
    monkeypatch.setattr(torch_peers, "available", lambda: False)
    with pytest.raises(RuntimeError, match="torch is not installed"):
        torch_peers.measure_grouped(2, fp8=False, **sizes)


class FakeNvml:
    """GPU 3 draws 500 W at 1400 MHz. Its counter moves every 0.1 s."""

    def __init__(self):
        self.began = time.perf_counter()

    def nvmlInit_v2(self):
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index, gpu):
        return 0 if index == 3 else 2

    def nvmlDeviceGetTotalEnergyConsumption(self, gpu, result):
        result._obj.value = int((time.perf_counter() - self.began) // 0.1) * 50_000

    def nvmlDeviceGetClockInfo(self, gpu, kind, result):
        result._obj.value = 1400
        return 0


def test_meter(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    monkeypatch.setattr(ctypes, "CDLL", lambda name: FakeNvml())
    meter, draw = machine.Meter(), machine.Draw()
    with meter.onto(draw):
        time.sleep(0.38)  # 3 moves, 0.2 s from the first to the last; by the whole block it would be 395 W
    assert draw.row() == {"power": pytest.approx(500, rel=0.2), "sm_clock": 1400}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    draw = machine.Draw()
    with machine.Meter().onto(draw):
        pass
    assert draw.row() == {}


def test_rows_in_turns_show_again(tmp_path, capsys):
    rows = [{"case": "a", "impl": "te_jax fp8", "suite": "grouped", "ms": 1.0, "min_ms": 0.9, "tflops": 1100.0}]
    rows[0] |= {"tbs": None, "of_bound": 0.912, "sm_clock": 1411.2, "power": 689.6}
    (tmp_path / "a.json").write_text(json.dumps({"machine": machine.describe(), "rows": rows}))
    assert main(["show", str(tmp_path / "a.json")]) == 0
    assert re.search(r"a +te_jax fp8 +1.0000 +0.9000 +1100 TFLOP/s +91.2% +1411 +690", capsys.readouterr().out)


def results(impl: str):
    """y and the gradients of the parameters and of x, in f32."""
    (model, *_) = experts.models(True)
    call = moe.build(model, impl)
    y, grads = call.run(*call.inputs[0])
    leaves = {"y": y, "x": grads[-1], **grads[0]}
    return {name: np.asarray(a, np.float32) for name, a in leaves.items()}


def test_layers_of_experts_do_the_same_work():
    """By te_jax and by ragged_dot in bf16, which round at other places: by 2**-9 of a number at most, on the longest
    way of a gradient some six times, and both do. In FP8 with weights quantized once, the results are the same bits."""
    ours, theirs = results(moe.BF16), results(moe.RAGGED)
    for name, found in theirs.items():
        error = np.linalg.norm(ours[name] - found) / np.linalg.norm(found)
        assert error < 6 * 2**-8, f"{name}: {error}"
    plain, once = (results(f"te_jax fp8 fast{way}") for way in ("", moe.ONCE))
    for name, found in plain.items():
        np.testing.assert_array_equal(once[name], found)
        assert np.linalg.norm(found - ours[name]) < 0.25 * np.linalg.norm(found)  # E5M2 rounds to an eighth at most


def test_moe(tmp_path, capsys):
    out = tmp_path / "moe.json"
    assert main(["moe", "--tiny", "--quick", "--only", "(FP8 weights|ragged_dot bf16)$", "--out", str(out)]) == 0
    fp8, ragged = json.loads(out.read_text())["rows"]
    assert fp8["beside"] == {moe.RAGGED: fp8["ms"] / ragged["ms"]} and "beside" not in ragged
    assert fp8["suite"] == "moe" and fp8["us_per_token"] > 0 and "kernel_ms" in fp8["profile"]
    assert fp8["flops"] == 18 * 96 * 128 * 64 + 6 * 48 * 128 * 3  # pairs h f; tokens h E
    assert re.search(r"FP8 weights .*x ragged_dot bf16", capsys.readouterr().out)


def test_routing_is_a_share_of_the_kernels():
    names = ["te::te_router_fwd()", "void te::TileKernel<te::GatherSource<float>>()", "te::te_gemm_grouped()", "nvjet"]
    top = [{"name": name, "ms": ms} for name, ms in zip(names, (1.0, 2.0, 4.0, 3.0))]
    assert moe.routing({"kernel_ms": 10.0, "top": top})["routing"] == pytest.approx(0.3)


def test_rows_of_tokens_in_pieces():
    """The pieces that are asked for, compared with all tokens at once."""
    rows = list(turns.SUITES["tp"][0](True, pieces="4"))
    whole, cut = rows
    assert (whole.impl, cut.impl) == ("te_jax fp8 fast", "te_jax fp8 fast, 4 pieces") and whole.name == cut.name
    assert whole.beside == () and cut.beside == (whole.impl,) and whole.flops == cut.flops > 0
    summary = {"collective_ms": 2.0, "exposed_ms": 1.0, "kernel_ms": 9.0}
    assert cut.profiled(summary) == {"collective_ms": 2.0, "exposed_ms": 1.0}
