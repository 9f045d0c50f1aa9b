"""The benchmarks run, at tiny sizes, and count what they say they count. Speed is not tested here."""

import dataclasses
import json
import pathlib
import re
import subprocess
import time

import jax
import jax.numpy as jnp
import pytest

from benchmarks import account, ceilings, figures, hlo, kernels, layers, machine, memory, ops, report, run, timing
from benchmarks.__main__ import COMMANDS, main
from benchmarks.cases import Case, peers

ROOT = pathlib.Path(__file__).parents[2]
ALL_FULL = [*ops.cases(tiny=False), *layers.cases(tiny=False)]
SCALING = list(layers.scaling_cases(tiny=False))
RESULTS = [figures.RESULTS / f"{name}.json" for name in ("h200/remat", "h200/microbatches", "h200x4/meshes")]
# One of each kind: the others differ in sizes and types.
ONE_OF_EACH = (
    r"copy|gemm.*te_jax.*fast$|dswiglu.*te_jax|rope.*te_jax|quantize both layouts, dbias.*te_jax|rmsnorm.*bwd \| flax"
    r"|rmsnorm to fp8.*te_jax|attention.*bwd|psum|dense.*bwd.*fast|dense.*fwd \| flax fp8"
)


def test_all_peers_have_a_row():
    """A published figure belongs to a row of ours, under its very name; torch and other GPUs are not here."""
    labels = {(case.name, case.impl) for case in ALL_FULL}
    missing = {key for key in peers() if key not in labels and "torch" not in key[1] and "GPUs" not in key[0]}
    assert not missing


@pytest.mark.parametrize(
    "name",
    [
        *(f"{model} fwd+bwd" for model in ("gpt layer", "gpt layer, dropout 0.1", "llama layer")),
        *(f"LayerNormMLP 8192 tokens 4096-16384-4096{biases} fwd+bwd" for biases in ("", ", biases")),
        "dense 8192x4096x16384 fwd+bwd",
        *(f"gemm {'x'.join(map(str, mnk))}" for mnk in ops.GEMM_MNK),
        *(f"quantize both layouts 8192x{columns}" for columns in (4096, 16384)),
        *(f"{kind} to fp8, both layouts 8192x16384" for kind in ("gelu", "swiglu")),
        *(f"{kind} to fp8, both layouts, dbias 8192x16384" for kind in ("dgelu", "dswiglu")),
        *(f"{norm}norm 32768x8192 {way}" for norm in ("layer", "rms") for way in ("fwd", "fwd+bwd")),
        *(f"{norm}norm to fp8, both layouts 32768x8192{way}" for norm in ("layer", "rms") for way in ("", " fwd+bwd")),
        "rope b1 s8192 h32 d128",
        "attention b4 s4096 h32/32 d128 causal fwd+bwd",
        "small model, 8 layers h1024 b8 s512 fwd+bwd",
    ],
)  # fmt: skip
def test_each_computation_that_has_a_target_is_a_case(name):
    impls = [case.impl for case in ALL_FULL if case.name == name]
    assert any(impl.startswith("te_jax") for impl in impls)
    # torch is not here; jax.nn has no dropout on the probabilities.
    assert any(not impl.startswith("te_jax") for impl in impls) or name == "gpt layer, dropout 0.1 fwd+bwd"


def test_scaling_covers_tokens_and_widths():
    models = layers.scaling_models(tiny=False)
    assert {m.tokens for m in models if m.hidden == 4096} == {1024 << i for i in range(7)}
    assert {m.hidden for m in models if m.tokens == 8192} == {1024, 2048, 4096, 8192}
    assert all(m.hidden // m.heads == 128 and m.ffn == 4 * m.hidden for m in models)


def test_names_are_unique():
    labels = [case.label for case in [*ALL_FULL, *SCALING]]
    assert len(labels) == len(set(labels))


@pytest.mark.parametrize(
    "label,tflop",
    [
        ("gpt layer fwd+bwd | te_jax fp8", 9.895 + 0.481),  # 8192 tokens, 201e6 parameters, 3 GEMMs; attention
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
    assert case.peer_ms(3.0, "ms") == 3.0
    assert case.peer_ms(1000, "TFLOP/s") == pytest.approx(2.0)
    assert case.peer_ms(4.0, "TB/s") == pytest.approx(1.0)
    assert case.rates(2.0) == (pytest.approx(1000), pytest.approx(2.0))


CEILINGS = {
    "copy": {"sustained": 4.0, "brief": 4.2},
    "fp8": {"sustained": 1200.0, "brief": 1400.0},
    "bf16": {"sustained": 600.0, "brief": 700.0},
}


def test_the_floor_is_the_slower_of_multiplications_and_traffic():
    ms = lambda **work: Case("x", "y", **work).floor_ms(CEILINGS)
    assert ms(flops=1.8e12, fp8_flops=1.2e12) == pytest.approx(2.0)  # 1 ms each
    assert ms(flops=1.2e12, fp8_flops=1.2e12, bytes=8e9) == pytest.approx(2.0)
    assert ms(bytes=4e9) == pytest.approx(1.0)


@pytest.fixture
def known_ceilings(monkeypatch):
    """Not measured; figures with them are composed and not rendered. test_run does both."""
    monkeypatch.setattr(ceilings, "measure", lambda tiny: CEILINGS)
    if run.roofline.available():
        monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, path, **how: None)


def test_run(tmp_path, capsys):
    out = tmp_path / "new" / "results.json"
    code = main(["all", "--tiny", "--calls", "2", "--repeat", "2", "--only", ONE_OF_EACH, "--out", str(out)])
    printed, result = capsys.readouterr().out, json.loads(out.read_text())
    assert code == 0, printed
    assert {row["suite"] for row in result["rows"]} == {"ops", "layers"}
    for row in result["rows"]:
        assert row["ms"] > 0 and len(row["all_ms"]) == 2
        assert row.get("compile_s", 1) > 0  # GEMMs timed in turns with torch have none
        assert row["tflops"] or row["tbs"]
        assert f"{row['case']} " in printed
        assert ("fraction" in row) == ("per GPU" not in row["case"])  # no ceiling bounds what goes between GPUs
        assert ("us_per_token" in row) == (row["suite"] == "layers")
    assert {name: set(kinds) for name, kinds in result["ceilings"].items()} == dict.fromkeys(
        ("copy", "fp8", "bf16"), {"sustained", "brief"}
    )
    if run.roofline.available():
        assert out.with_suffix(".png").stat().st_size > 10_000
    assert result["machine"]["packages"]["jax"] == jax.__version__
    assert {"device", "driver", "te_jax", "date", "command"} <= result["machine"].keys()
    attention = [row for row in result["rows"] if row["case"].startswith("attention")]
    assert [row["impl"] for row in attention] == ["te_jax", "jax.nn cudnn", "te_jax fp8"]
    assert attention[0]["beside"]["jax.nn cudnn"] == pytest.approx(attention[0]["ms"] / attention[1]["ms"])


def test_compare_and_load(tmp_path, capsys, known_ceilings):
    """Results made by earlier versions of the program load too."""
    for path in RESULTS:
        old = report.load(path)
        half = {**old, "rows": [dict(row, ms=row["ms"] / 2) if "ms" in row else row for row in old["rows"][:-1]]}
        new = tmp_path / path.name
        new.write_text(json.dumps(half))
        assert main(["show", str(new), "--compare", str(path)]) == 0
        printed = capsys.readouterr().out
        assert f"{len(old['rows']) - 1} rows, geometric mean of new time over old: 0.500" in printed
        row = old["rows"][0]
        assert f"0.500x ({row['ms']:.4f})" in next(
            line for line in printed.splitlines() if line.startswith(row["case"])
        )
    (tmp_path / "other.json").write_text("{}")
    (tmp_path / "text.json").write_text("text")
    for name in ("other", "text", "none"):
        with pytest.raises(ValueError, match=f"{name}.json: no result"):
            main(["show", str(tmp_path / f"{name}.json")])


def test_memory_summary():
    row = lambda impl, peak: {"case": "gpt layer fwd+bwd", "impl": impl, "peak_bytes": peak, "saved_bytes": int(1e9)}
    assert not report.memory([row("te_jax fp8", 2)])
    (line,) = report.memory([row("te_jax fp8", 2 * 10**9), row("te_jax bf16", 4 * 10**9), row("flax bf16", 10**9)])
    assert "2.000 GB, 0.500 of te_jax bf16's 4.000 GB, 2.000 of flax bf16's 1.000 GB" in line
    assert "kept for the backward pass: te_jax fp8 1.000 GB" in line


def test_without_a_gpu_full_sizes_are_refused(capsys):
    if timing.on_gpu():
        pytest.skip("here is a GPU")
    assert main(["all", "--only", "gpt layer"]) == 2
    assert "--tiny" in capsys.readouterr().err


@pytest.mark.parametrize(
    "suite,only",
    [
        ("layers", r"small model.*te_jax fp8$"),
        ("scaling", "h256, 16 .*te_jax fp8"),
        ("microbatches", "te_jax fp8, .*fused"),
        ("remat", "te_jax fp8, remat saves GEMMs, attention$"),
        ("meshes", f"tp={jax.device_count()} .*te_jax bf16"),
    ],
)
def test_other_suites_run(suite, only, tmp_path, known_ceilings):
    out = tmp_path / "results.json"
    args = [suite, "--tiny", "--calls", "1", "--repeat", "1", "--only", only, "--out", str(out)]
    assert main(args) == 0
    (row,) = json.loads(out.read_text())["rows"]
    assert row["suite"] == suite and row["us_per_token"] > 0 and row["peak_bytes"] > row["io_bytes"]


def test_kept_for_the_backward_pass():
    """Of y = x . w in FP8: both operands, each once and in one layout, and a few scales; no bf16 copy."""
    m, n, k = 64, 128, 256
    saved = layers.trainee(layers.Dense(m, n, k), "te_jax fp8").saved_bytes()
    assert m * k + n * k <= saved < m * k + n * k + 64


def test_same_bits_and_digest():
    a = {"x": jnp.asarray([1.0, jnp.nan, 0.0], jnp.bfloat16), "y": jnp.ones(3)}
    b = jax.tree.map(jnp.array, a)
    assert timing.same_bits(a, b) and timing.digest(a) == timing.digest(b)
    b["x"] = b["x"].at[2].set(-0.0)
    assert not timing.same_bits(a, b) and timing.digest(a) != timing.digest(b)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["gpt layer", "llama layer", "gpt layer, hidden dropout 0.1"])
@pytest.mark.parametrize("impl", layers.RECIPES)
def test_two_runs_of_a_layer_give_the_same_bits(name, impl):
    sizes = dict(batch=2, seq=256, hidden=512, ffn=1024, heads=8)
    (model,) = (m for m in layers.models(tiny=True) if m.name == name)
    model = dataclasses.replace(model, **sizes, groups=4 if model.llama else 8)
    trainee = layers.trainee(model, impl)
    call = trainee.build(backward=True)
    first = call.issue(1)
    other = trainee.train_call._replace(inputs=[trainee.train_inputs(trainee.fresh)])
    jax.block_until_ready(other.issue(3))  # leaves other values in the workspaces
    assert timing.same_bits(first, call.issue(1))


@pytest.mark.gpu
@pytest.mark.parametrize("impl", ["te_jax bf16", "te_jax fp8"])
def test_scanned_layers_run_each_kernel_once(impl):
    """What the backward pass keeps of a layer is written into a stack, by no second run of a kernel (`_op._FENCES`)."""
    layer = layers.Layer("llama layer", 2, 256, 512, 1024, 8, 4, llama=True)
    counts = lambda model: hlo.count_hlo(layers.trainee(model, impl).train_call.run.as_text())["te"]
    assert counts(layers.Stack("two llama layers", 2, layer)) == counts(layer)


def test_a_row_that_fails_says_why_and_stops_nothing(capsys, monkeypatch, known_ceilings):
    def fails():
        raise RuntimeError("no plan")

    good = Case("good", "xla", lambda: timing.compiled(jnp.sin, [(timing.normal(0, (8,)),)]), bytes=32)
    monkeypatch.setattr(run, "chosen", lambda args: [Case("bad", "te_jax", fails), good])
    assert main(["ops", "--tiny", "--calls", "1"]) == 1
    printed = capsys.readouterr().out
    assert re.search(r"bad +te_jax +error +RuntimeError: no plan", printed) and "good" in printed


def test_list_and_no_match(capsys):
    assert main(["layers", "--list", "--only", "gpt layer fwd"]) == 0
    assert "gpt layer fwd+bwd | te_jax fp8 fast" in capsys.readouterr().out
    assert main(["all", "--only", "nothing like this"]) == 1


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


def test_hlo(tmp_path, capsys):
    out = tmp_path / "hlo.json"
    assert main(["hlo", "--tiny", "--out", str(out)]) == 0
    report = json.loads(out.read_text())
    assert report["verdict"] == {"te_gemm": 12, "expected": 12, "dots_left": 0, "good": True}
    counts = report["counts"]["te"]
    assert counts["te_norm_fwd"] == counts["te_norm_bwd"] == 2
    assert counts["te_attention_fwd"] == counts["te_attention_bwd"] == 1
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
    assert hlo.count_stablehlo(text) == {
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
    counts = hlo.count_hlo(text)
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


HLO = """
HloModule jit_step, is_scheduled=true

%fused (p: bf16[8,4]) -> bf16[8,4] {
  %p = bf16[8,4]{1,0} parameter(0)
  ROOT %loop_add_fusion.9 = bf16[8,4]{1,0} add(%p, %p)
}

ENTRY %main.1 (x.1: f8e4m3fn[8,16], w.1: f8e4m3fn[4,16]) -> bf16[8,4] {
  %x.1 = f8e4m3fn[8,16]{1,0} parameter(0), metadata={op_name="x"}
  %w.1 = f8e4m3fn[4,16]{1,0} parameter(1)
  %dy.1 = f8e5m2[4,8]{1,0} parameter(2)
  %xt.1 = f8e4m3fn[16,8]{1,0} bitcast(%x.1)
  %c.1 = f32[] constant(1)
  %q.1 = (f8e4m3fn[8,16]{1,0}, f32[1,1]{1,0}) custom-call(%x.1, %c.1), custom_call_target="te_quantize"
  %gte.1 = f8e4m3fn[8,16]{1,0} get-tuple-element(%q.1), index=0
  %ffi_call.0 = (bf16[8,4]{1,0}, u8[33554432]{0}) custom-call(%gte.1, %w.1, %c.1, %c.1, /*index=4*/%c.1), custom_call_target="te_gemm", api_version=API_VERSION_TYPED_FFI
  %y.1 = bf16[8,4]{1,0} get-tuple-element(%ffi_call.0), index=0
  %loop_add_fusion.2 = bf16[8,4]{1,0} fusion(%y.1, bf16[8,4]{1,0} %y.1), kind=kLoop, calls=%fused
  %ffi_call.2 = (bf16[4,16]{1,0}, u8[33554432]{0}) custom-call(%dy.1, %xt.1, %c.1), custom_call_target="te_gemm"
  ROOT %t = (bf16[8,4]{1,0}, bf16[4,16]{1,0}) tuple(%loop_add_fusion.2, %y.1)
}
"""  # noqa: E501


def test_work_of_a_compiled_module():
    quantize, fprop, add, wgrad = account.works(HLO, tokens=8)
    assert (quantize.family, quantize.bytes) == ("quantize", 128 + 4 + 128 + 4)
    assert (fprop.label, fprop.flops, fprop.fp8) == ("GEMM fprop 8x4x16", 2 * 8 * 4 * 16, True)
    assert (wgrad.label, wgrad.family) == ("GEMM wgrad 4x16x8", "GEMM wgrad")
    assert (add.name, add.family, add.bytes) == ("loop_add_fusion.2", "XLA", 3 * 64)


@pytest.mark.parametrize(
    "kernel,family",
    [
        ("nvjet_sm90_qrtst_128x160_128x5_2x1_v_bz_TNT", "GEMM"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7", "attention forward"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26", "attention backward"),
        ("void cudnn::fusion::compute_dot_do_o_specialized<true, 128>(void const*)", "attention backward"),
        ("void cudnn::fusion::fmha_reduce_head<true>(void const*)", "attention backward"),
        ("void te::TileKernel<te::(anonymous namespace)::QuantizeSource<__nv_bfloat16>, true>()", "quantize"),
        ("void te::TileKernel<te::(anonymous namespace)::ActivationSource<1>, true>()", "activation forward"),
        ("void te::TileKernel<te::(anonymous namespace)::GradientSource<1>, true>()", "activation backward"),
        ("void te::(anonymous namespace)::NormFwdTiles<__nv_bfloat16>(te::NormFwdArgs)", "norm forward"),
        ("void te::(anonymous namespace)::NormBwdRows<2, true>(te::NormBwdArgs)", "norm backward"),
        ("te::(anonymous namespace)::ScaleUpdate(te::ScaleUpdateArgs)", "scale update"),
        ("void te::(anonymous namespace)::te_gemm_grouped<te::Form>(te::KernelArgs)", "grouped GEMM"),
        ("void te::TileKernel<te::(anonymous namespace)::GatherSource<float>, true>()", "router, permute, combine"),
        ("void te::(anonymous namespace)::Rope<__nv_bfloat16>(te::RopeArgs)", "rope"),
        ("Memset 0", "memset, memcpy"),
        ("loop_add_fusion_2", "XLA"),
    ],
)
def test_families_of_kernels(kernel, family):
    assert account.family(kernel) == family


def test_account():
    """Three steps of 30 us, the last one slower: kernels find their instructions, times and gaps add up."""
    names = ["void te::QuantizeTile()", "nvjet_a", "loop_add_fusion_2", "nvjet_b", "Memset 0"]
    lengths = [4.0, 10.0, 6.0, 8.0, 1.0]
    events = []
    for step, slower in enumerate((1.0, 1.0, 2.0)):
        start = step * 30.0
        for name, us in zip(names, lengths):
            events.append(kernels.Event(name, start * 1e3, (start + us * slower) * 1e3))
            start += us * slower
    found = account.account(events[::-1], 3, account.works(HLO, tokens=8), brief=2, settled=1)
    assert [kernel["label"].split(" ")[0] for kernel in found["kernels"]] == [
        "te_quantize",
        "GEMM",
        "fusion",
        "GEMM",
        "",
    ]
    classes = {each["class"]: each for each in found["classes"]}
    assert list(classes)[:2] == ["GEMM fprop", "GEMM wgrad"]
    assert classes["GEMM fprop"]["ms"] == pytest.approx(0.010) and classes["GEMM fprop"]["flops"] == 1024
    assert classes["GEMM fprop"]["sustained_ms"] == pytest.approx(0.020)
    assert classes["XLA, from 5 us"]["bytes"] == 192 and not classes["memset, memcpy"]["bytes"]
    assert found["brief"] == pytest.approx({"span_ms": 59e-3 / 2, "kernel_ms": 0.029, "idle_ms": 1e-3 / 2})
    assert found["sustained"]["kernel_ms"] == pytest.approx(0.058)
    text, fraction = account.rate({"ms": 1.0, "flops": 1.05e12, "bytes": 1e9, "fp8": True}, CEILINGS)
    assert (text, fraction) == ("1050 TFLOP/s", pytest.approx(0.75))
    assert account.rate({"ms": 1.0, "flops": 0, "bytes": 0, "fp8": False}, CEILINGS) == ("", None)
    with pytest.raises(ValueError, match="14 kernels in 3 steps"):
        account.per_step(events[1:], 3)


def test_trace(tmp_path, capsys, known_ceilings):
    out = tmp_path / "new" / "trace.json"
    assert main(["trace", "--tiny", "--calls", "2", "--out", str(out)]) == 0
    result = json.loads(out.read_text())
    assert result["sustained_ms"] > 0 and {"ceilings", "machine", "samples", "queued_ms"} <= result.keys()
    sample = {"sm_clock": 1470.0, "power": 690.0, "temperature": None}
    kernel = {"kernel": "nvjet_a", "label": "GEMM fprop 8x4x16", "ms": 0.01, "sustained_ms": 0.012, "flops": 1e10}
    group = {"class": "GEMM fprop", "count": 1, **kernel}
    times = {"span_ms": 1.2, "kernel_ms": 1.1, "idle_ms": 0.2}
    more = {"kernels": [kernel], "classes": [group], "brief": times, "sustained": times, "samples": [sample] * 3}
    for each in (kernel, group):
        each |= {"bytes": 1e6, "fp8": True}
    out.write_text(json.dumps({**result, **more, "ceilings": CEILINGS}))
    capsys.readouterr()
    assert main(["show", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "sm_clock: median 1470 MHz" in printed and "temperature" not in printed
    assert "1.200 ms a step = 1.100 in kernels - 0.100 side by side + 0.200 idle" in printed
    assert re.search(r"GEMM fprop 8x4x16 +nvjet_a +0.0100 +1000 TFLOP/s +0.71 +0.0120 +833 TFLOP/s +0.69", printed)


def test_sampler(tmp_path, monkeypatch):
    smi = tmp_path / "nvidia-smi"
    smi.write_text('#!/bin/sh\nwhile :; do echo "147$2, 690.25, [N/A]"; sleep 0.01; done\n')  # called with -i GPU
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    with machine.Sampler() as sampler:
        time.sleep(0.3)
    assert len(sampler.samples) > 3
    assert sampler.samples[0] == {"sm_clock": 1473.0, "power": 690.25, "temperature": None}
    monkeypatch.setenv("PATH", "")
    with machine.Sampler() as sampler:
        pass
    assert sampler.samples == []


def test_inference_memory():
    """All kernels in FP8, so half the bytes but for norms and scales; and a forward pass makes no wide copy of them."""
    bf16, fp8 = (memory.measure(way, layers=3, hidden=256, tokens=16) for way in ("bf16", "fp8"))
    assert fp8["parameter_bytes"] / bf16["parameter_bytes"] == pytest.approx(0.5, abs=2e-3)
    saved = bf16["forward_peak_bytes"] - fp8["forward_peak_bytes"]
    assert saved > 0.9 * (bf16["parameter_bytes"] - fp8["parameter_bytes"])


def test_the_documents_have_the_tables_that_their_figures_make():
    """Else `make tables` was not run, or a figure was typed in."""
    assert main(["tables", "--check"]) == 0


def test_a_figure_of_no_result_is_refused():
    with pytest.raises(KeyError, match="3 entries are .*gpt layer fwd.bwd . te_jax fp8 current"):
        figures.figure("h200/layers : gpt layer fwd+bwd | te_jax fp8 current")
    with pytest.raises(KeyError, match="0 entries are .*gpt layer . flax"):
        figures.figure("h200/layers : gpt layer | flax : ms = .1f")
    assert figures.figure("h200/layers : gpt layer fwd+bwd | te_jax bf16 = .1f * 1e-1") == "1.7"


def test_every_command_says_what_it_does(capsys):
    for command in COMMANDS:
        with pytest.raises(SystemExit, match="0"):
            main([command, "--help"])
        assert COMMANDS[command][2].split()[-1] in capsys.readouterr().out


def test_on_gpu_script_is_bash():
    subprocess.run(["bash", "-n", ROOT / "benchmarks" / "on_gpu.sh"], check=True)
