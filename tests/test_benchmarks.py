"""The benchmarks run, at tiny sizes, and count what they say they count. Speed is not tested here."""

import json
import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

import cases as cases_module  # noqa: E402
import inspect_hlo  # noqa: E402
import kernels  # noqa: E402
import layers  # noqa: E402
import ops  # noqa: E402
import run  # noqa: E402
import timing  # noqa: E402
from cases import Case  # noqa: E402
from peers import PEERS  # noqa: E402

ALL_FULL = [*ops.cases(tiny=False), *layers.cases(tiny=False)]
# One of each kind: the others differ in sizes and types.
ONE_OF_EACH = (
    r"copy|gemm.*te_jax.*fast|quantize both layouts, dbias.*te_jax|rmsnorm.*bwd \| flax"
    r"|rmsnorm to fp8.*te_jax|attention.*bwd|psum|dense.*bwd.*fast|dense.*fwd \| flax fp8"
)


def test_all_peers_have_a_row():
    """A published figure belongs to a row of ours, under its very name; torch and other GPUs are not here."""
    labels = {(case.name, case.impl) for case in ALL_FULL}
    missing = {key for key in PEERS if key not in labels and "torch" not in key[1] and "GPUs" not in key[0]}
    assert not missing


def test_names_are_unique():
    labels = [case.label for case in ALL_FULL]
    assert len(labels) == len(set(labels))


@pytest.mark.parametrize(
    "label,tflop",
    [
        (
            "gpt layer fwd+bwd | te_jax fp8",
            9.895 + 0.481,
        ),  # 8192 tokens, 201e6 parameters, 3 GEMMs; attention
        ("llama layer fwd+bwd | te_jax fp8", 10.720 + 1.924),
        ("attention b4 s4096 h32/32 d128 causal fwd | te_jax", 0.5498),  # 0.92 ms are 597 TFLOP/s
        ("dense 8192x4096x16384 fwd+bwd | te_jax fp8", 3.299),
    ],
)
def test_flops(label, tflop):
    (case,) = (case for case in ALL_FULL if case.label == label)
    assert case.flops / 1e12 == pytest.approx(tflop, rel=1e-3)


def test_a_peers_figure_in_ms():
    case = Case("copy", "xla", flops=2e12, bytes=4e9)
    assert cases_module.peer_ms(case, 3.0, "ms") == 3.0
    assert cases_module.peer_ms(case, 1000, "TFLOP/s") == pytest.approx(2.0)
    assert cases_module.peer_ms(case, 4.0, "TB/s") == pytest.approx(1.0)
    assert cases_module.rate(case, 2.0) == (pytest.approx(1000), pytest.approx(2.0))


def test_run(tmp_path, capsys):
    out = tmp_path / "results.json"
    code = run.main(["--tiny", "--calls", "2", "--repeat", "2", "--only", ONE_OF_EACH, "--out", str(out)])
    printed, result = capsys.readouterr().out, json.loads(out.read_text())
    assert code == 0, printed
    assert {row["suite"] for row in result["rows"]} == {"ops", "layers"}
    for row in result["rows"]:
        assert row["ms"] > 0 and len(row["all_ms"]) == 2 and row["compile_s"] > 0
        assert row["tflops"] or row["tbs"]
        assert f"{row['case']} " in printed
    assert result["machine"]["packages"]["jax"] == jax.__version__
    assert {"device", "driver", "te_jax", "date", "command"} <= result["machine"].keys()
    attention = [row for row in result["rows"] if row["case"].startswith("attention")]
    assert [row["impl"] for row in attention] == ["te_jax", "jax.nn cudnn"]
    assert attention[0]["beside"]["jax.nn cudnn"] == pytest.approx(attention[0]["ms"] / attention[1]["ms"])


def test_a_row_that_fails_says_why_and_stops_nothing(capsys, monkeypatch):
    def fails():
        raise RuntimeError("no plan")

    good = Case("good", "xla", lambda: timing.compiled(jnp.sin, [(timing.normal(0, (8,)),)]), bytes=32)
    monkeypatch.setattr(run, "chosen", lambda args: [Case("bad", "te_jax", fails), good])
    assert run.main(["--tiny", "--calls", "1"]) == 1
    printed = capsys.readouterr().out
    assert re.search(r"bad +te_jax +error +RuntimeError: no plan", printed) and "good" in printed


def test_list_and_no_match(capsys):
    assert run.main(["--list", "--suite", "layers", "--only", "gpt layer fwd"]) == 0
    assert "gpt layer fwd+bwd | te_jax fp8 fast" in capsys.readouterr().out
    assert run.main(["--only", "nothing like this"]) == 1


def test_settled_state_stands_still():
    """After the settling steps the scales of repeated data do not change: all timed calls do the same."""
    trainee = layers.trainee(layers.Dense(32, 48, 64), "te_jax fp8")
    state = trainee.state
    again = trainee.train_call.run(*trainee.train_inputs(state))[2]
    scales = lambda tree: [leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree) if "scale" in str(path[-1])]
    assert len(scales(state)) == 3
    assert all(float(a[0]) == float(b[0]) != 1.0 for a, b in zip(scales(state), scales(again)))


def test_parameters_are_random():
    trainee = layers.trainee(layers.Mlp(16, 32, 64, use_bias=True), "te_jax bf16")
    for path, leaf in jax.tree_util.tree_leaves_with_path(trainee.params):
        assert float(jnp.std(leaf.astype(jnp.float32))) > 0.005, path


def test_inspect_hlo(tmp_path, capsys):
    out = tmp_path / "hlo.json"
    assert inspect_hlo.main(["--tiny", "--out", str(out)]) == 0
    report = json.loads(out.read_text())
    assert report["verdict"] == {"te_gemm": 12, "expected": 12, "dots_left": 0, "good": True}
    counts = report["counts"]["te"]
    assert counts["te_norm_fwd"] == counts["te_norm_bwd"] == 2
    assert counts["te_attention_packed_fwd"] == counts["te_attention_packed_bwd"] == 1
    assert "te_gemm: 12" in capsys.readouterr().out


def test_stablehlo_functions_count_as_often_as_they_are_called():
    text = """
      func.func public @main(%0: tensor<2x2xbf16>) {
        %1 = call @f(%0) : (tensor<2x2xbf16>) -> tensor<2x2xbf16>
        %2 = func.call @f(%1) : (tensor<2x2xbf16>) -> tensor<2x2xbf16>
        %3 = stablehlo.dot_general %2, %2, contracting_dims = [1] x [0] : (tensor<2x2xbf16>, tensor<2x2xbf16>) -> tensor<2x2xf32>
      func.func private @f(%0: tensor<2x2xbf16>) {
        %1 = stablehlo.custom_call @te_gemm(%0) : (tensor<2x2xbf16>) -> tensor<2x2xbf16>
    """  # noqa: E501
    assert inspect_hlo.count_stablehlo(text) == {
        "te": {"te_gemm": 2},
        "dots": {"dot bf16 bf16 f32": 1},
        "other": {},
    }


def test_compiled_module_counts():
    text = """
      %c.1 = (bf16[8,8]{1,0}, u8[16]{0}) custom-call(%a, %b), custom_call_target="te_gemm", api_version=API_VERSION_TYPED_FFI
      %c.2 = bf16[8,8]{1,0} custom-call(%a, %b), custom_call_target="__cublas$lt$matmul"
      ROOT %d.3 = bf16[8,8]{1,0} dot(%a, %b), lhs_contracting_dims={1}
      %f.4 = bf16[8]{0} fusion(%a), kind=kLoop, calls=%fused
      %call = bf16[8]{0} call(%a), to_apply=%command_buffer.7
    """  # noqa: E501
    counts = inspect_hlo.count_hlo(text)
    assert counts["te"] == {"te_gemm": 1}
    assert counts["dots"] == {"__cublas$lt$matmul": 1, "dot bf16": 1}
    assert (counts["fusions"], counts["command_buffers"]) == (1, 1)


TRACE = """
planes { id: 1 name: "/device:GPU:0 (a GPU)"
  lines { id: 1 name: "Stream #1(Compute)" timestamp_ns: 1000
    events { metadata_id: 1 offset_ps: 0 duration_ps: 2000000 }
    events { metadata_id: 1 offset_ps: 3000000 duration_ps: 2000000 }
    events { metadata_id: 2 offset_ps: 4000000 duration_ps: 2000000 } }
  lines { id: 2 name: "XLA Ops" timestamp_ns: 1000 events { metadata_id: 1 duration_ps: 9000000 } }
  event_metadata { key: 1 value { id: 1 name: "te::Kernel" } }
  event_metadata { key: 2 value { id: 2 name: "MemcpyD2D" } } }
planes { id: 2 name: "/host:CUPTI"
  lines { id: 1 name: "7" timestamp_ns: 1000
    events { metadata_id: 1 duration_ps: 10 } events { metadata_id: 2 duration_ps: 10 }
    events { metadata_id: 3 duration_ps: 10 } }
  event_metadata { key: 1 value { id: 1 name: "cuLaunchKernelEx" } }
  event_metadata { key: 2 value { id: 2 name: "cuGraphLaunch" } }
  event_metadata { key: 3 value { id: 3 name: "custom-call.1" } } }
"""


def test_trace_summary():
    data = jax.profiler.ProfileData
    found = kernels.summary(data.from_serialized_xspace(data.text_proto_to_serialized_xspace(TRACE)), steps=2)
    assert (found["kernels_per_step"], found["copies_per_step"]) == (1.0, 0.5)
    assert found["kernel_ms"] == pytest.approx(0.003)  # 2 + 2 + 2 us in two steps
    assert found["busy_ms"] == pytest.approx(0.0025)  # one us of them side by side
    assert found["span_ms"] == pytest.approx(0.003)
    assert (found["graph_launches_per_step"], found["kernel_launches_per_step"]) == (0.5, 0.5)
    assert found["host_calls_per_step"] == {"cuLaunchKernelEx": 0.5, "cuGraphLaunch": 0.5}
    assert found["top"][0] == {"name": "te::Kernel", "count": 1.0, "ms": pytest.approx(0.002)}


def test_profile_of_a_call():
    call = timing.compiled(lambda x: x + 1, [(timing.normal(0, (8,)),)])
    assert kernels.profile(call, steps=1)["steps"] == 1


def test_on_gpu_script_is_bash():
    subprocess.run(["bash", "-n", ROOT / "benchmarks" / "on_gpu.sh"], check=True)
