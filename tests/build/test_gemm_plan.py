"""The GEMM beyond its op case: the operand c, the tuner, tuned choices in a file."""

import ctypes
import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from te_jax.core import extension
from te_jax.ops.gemm import gemm, load_tuning, save_tuning, tune_all

E4M3, E5M2 = jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.float8_e5m2)
f32, bf16 = jnp.float32, jnp.bfloat16


def normal(rng, shape, dtype=f32):
    return jnp.asarray(rng.standard_normal(shape), f32).astype(dtype)


def test_c_is_added_in_f32_before_the_one_rounding(rng):
    lhs, rhs = (jnp.round(normal(rng, s)).astype(E4M3) for s in ((32, 64), (48, 64)))  # small integers: exact anywhere
    product = np.asarray(lhs, np.float32) @ np.asarray(rhs, np.float32).T
    c = jnp.asarray(-product * (1 + 2.0**-7)).astype(bf16)  # cancels all but what a rounded product would lose
    got = gemm(lhs, rhs, jnp.float32(1), jnp.float32(1), c=c)
    np.testing.assert_array_equal(got, jnp.asarray(product + np.asarray(c, np.float32)).astype(bf16))


def test_c_has_a_gradient(rng):
    lhs, rhs, c, bias = (normal(rng, s, bf16) for s in ((3, 4, 8), (6, 8), (3, 4, 6), (6,)))
    weight = normal(rng, (3, 4, 6))
    ours = lambda lhs, rhs, bias, c: jnp.sum(weight * gemm(lhs, rhs, bias=bias, c=c))
    plain = lambda lhs, rhs, bias, c: jnp.sum(weight * (lhs.astype(f32) @ rhs.astype(f32).T + bias + c))
    for got, want in zip(*(jax.grad(f, (0, 1, 2, 3))(lhs, rhs, bias, c) for f in (ours, plain))):
        assert got.dtype == bf16
        np.testing.assert_allclose(got.astype(f32), want.astype(f32), rtol=2e-2, atol=2e-2)


def test_c_of_another_type_is_an_error():
    x = jnp.ones((16, 16), bf16)
    with pytest.raises(TypeError, match="te_gemm: c is float32, but out is bfloat16; pass c in the type of out"):
        gemm(x, x, c=jnp.ones((16, 16)))
    with pytest.raises(ValueError, match="te_gemm"):
        gemm(x, x, c=jnp.ones((16, 8), bf16))


class Extension:
    """Stands for the CUDA extension: one plan that was tuned, one that was not."""

    def __init__(self, version=130100):
        common = dict(device="NVIDIA H200, 132 SMs", algo="0a" * 64, algos=8, chosen=1)
        self.plans = [dict(common, key="m8", tuned=True, ms=0.5), dict(common, key="m16", tuned=False, ms=0.0)]
        self.version, self.loaded = version, []

    def versions(self):
        return {"cublaslt": self.version}

    def tune_all_gemms(self, on):
        self.tuning = on

    def gemm_plans(self):
        return self.plans

    def check_gemm_plan(self, device, key, algo):
        if len(algo) != 128:
            raise RuntimeError("algo must be 128 hexadecimal digits")
        if algo.startswith("ff"):
            raise RuntimeError("algo is none of the 8 that the tuner would try here")
        return device == "NVIDIA H200, 132 SMs"

    def load_gemm_plan(self, device, key, algo, ms):
        self.loaded.append((device, key, algo, ms))
        return True


def test_a_file_holds_what_was_tuned(monkeypatch, tmp_path):
    monkeypatch.setattr(extension, "load", Extension)
    assert save_tuning(tmp_path / "t") == 1
    line = json.loads((tmp_path / "t").read_text())
    assert line == dict(device="NVIDIA H200, 132 SMs", cublaslt=130100, gemm="m8", algo="0a" * 64, ms=0.5)


def test_other_devices_and_versions_are_left_out(monkeypatch, tmp_path):
    monkeypatch.setattr(extension, "load", Extension)
    save_tuning(tmp_path / "t")
    text = (tmp_path / "t").read_text()
    (tmp_path / "t").write_text(text + text.replace("H200", "B200"))
    assert load_tuning(tmp_path / "t") == 1
    monkeypatch.setattr(extension, "load", lambda: Extension(130200))
    assert load_tuning(tmp_path / "t") == 0


def test_all_gemms_are_tuned_if_asked(monkeypatch):
    stand_in = Extension()
    monkeypatch.setattr(extension, "load", lambda: stand_in)
    for on in (True, False):
        tune_all(on)
        assert stand_in.tuning is on
    with pytest.raises(TypeError, match="tune_all: on is 'gpt.jsonl'; pass True or False"):
        tune_all("gpt.jsonl")


@pytest.mark.parametrize(
    "change,problem",
    [
        (lambda text: text.replace('"algo"', '"other"'), "KeyError: 'algo'"),
        (lambda text: text.replace("0a0a", "0a"), "RuntimeError: algo must be 128"),
        (lambda text: text[:40], "JSONDecodeError"),
        (lambda text: "[1]", "TypeError"),
        (lambda text: text.replace('"0a0a', '"ff0a'), "RuntimeError: algo is none of the 8"),
        (lambda text: text.replace('"0a0a', '"0b0a'), "ValueError: line 1 chooses otherwise"),
        (lambda text: text.replace("130100", '"130100"'), "TypeError: cublaslt is '130100'"),
        (lambda text: text.replace("0.5", "NaN"), "ValueError: ms is nan"),
    ],
    ids=["key", "algo", "cut", "list", "precision", "two choices", "version", "ms"],
)
def test_a_damaged_file_is_named_and_not_taken(change, problem, monkeypatch, tmp_path):
    stand_in = Extension()
    monkeypatch.setattr(extension, "load", lambda: stand_in)
    save_tuning(tmp_path / "t")
    (tmp_path / "t").write_text("".join([line := (tmp_path / "t").read_text(), change(line)]))
    with pytest.raises(ValueError, match=rf"load_tuning: .*/t, line 2 is not of save_tuning \({problem}"):
        load_tuning(tmp_path / "t")
    assert not stand_in.loaded
    with pytest.raises(FileNotFoundError, match="nowhere"):
        load_tuning(tmp_path / "nowhere")


def test_any_wrong_value_of_any_field_is_an_error_with_its_line(monkeypatch, tmp_path):
    monkeypatch.setattr(extension, "load", Extension)
    save_tuning(tmp_path / "t")
    good = (tmp_path / "t").read_bytes()
    saved, absent = json.loads(good), object()
    values = [absent, None, True, -1, 1e999, float("nan"), 10**400, "1", "\ud800", [], {"a": 1}]
    lines = {
        (name, index): json.dumps({k: v for k, v in {**saved, name: value}.items() if v is not absent}).encode()
        for name in saved
        for index, value in enumerate(values)
        # What a device, a GEMM or another version may be called is free; a number is a time.
        if not (name in ("device", "gemm", "algo") and isinstance(value, str))
        and not (name == "cublaslt" and type(value) is int)
    }
    lines |= {
        "bytes": b"\xff\xfe",
        "list": b"[]",
        "nested": b"[" * 100_000,
        "empty": b"",
        "UTF-16": "{}".encode("utf-16"),
    }
    wrong = {}
    for what, line in lines.items():
        (tmp_path / "t").write_bytes(good + line + b"\n")
        try:
            wrong[what] = f"taken: {load_tuning(tmp_path / 't')}"
        except Exception as error:
            if not (type(error) is ValueError and f"load_tuning: {tmp_path / 't'}, line 2 is not of" in str(error)):
                wrong[what] = repr(error)[:200]
    assert not wrong, wrong
    (tmp_path / "t").write_bytes(good.replace(b"0.5", b"1"))
    assert load_tuning(tmp_path / "t") == 1, "JSON has one kind of number"


@pytest.mark.gpu
def test_an_edited_algorithm_is_not_taken(tmp_path):
    """One whose partial sums are rounded to the type of the result: cuBLASLt would run it."""
    x = jnp.ones((512, 4096), E4M3)
    run = jax.jit(lambda x: gemm(x, x, jnp.float32(1), jnp.float32(1), tune=True))
    before = np.asarray(run(x), np.float32)
    assert save_tuning(tmp_path / "t") >= 1
    lines = (tmp_path / "t").read_text().splitlines()
    saved = json.loads(next(line for line in lines if "m512 n512 k4096" in line))
    algo = ctypes.create_string_buffer(bytes.fromhex(saved["algo"]), 64)
    extension.load().versions()  # opens cuBLASLt
    set_attribute = ctypes.CDLL("libcublasLt.so.13").cublasLtMatmulAlgoConfigSetAttribute
    for which in (2, 3):  # in how many parts k is cut: 4; the reduction scheme: 4, in the type of the result
        assert set_attribute(algo, which, ctypes.byref(ctypes.c_uint32(4)), ctypes.c_size_t(4)) == 0
    edited = json.dumps(saved | {"algo": algo.raw.hex()})
    (tmp_path / "t").write_text("\n".join([*(line for line in lines if saved["gemm"] not in line), edited]) + "\n")
    with pytest.raises(ValueError, match="load_tuning: .*algo is none of the .* that the tuner would try here"):
        load_tuning(tmp_path / "t")
    np.testing.assert_array_equal(np.asarray(run(x), np.float32), before)


@pytest.mark.gpu
@pytest.mark.parametrize("changed", ["m512 n512 k4096 f32 x f32 -> f16", "m0 n512 k4096", "a product"])
def test_a_gemm_that_is_none_is_not_taken(changed):
    with pytest.raises(RuntimeError, match="names no product"):
        extension.load().check_gemm_plan("no device", changed, "00" * 64)


_PROCESS = """
import sys, json, hashlib
import jax, jax.numpy as jnp
from te_jax.core import extension
from te_jax.ops.gemm import gemm, load_tuning, save_tuning
path, loads = sys.argv[1], sys.argv[2] == "load"
taken = load_tuning(path) if loads else None
bits = []
for m, n, k, fast in [(512, 1024, 4096, True), (1000, 512, 8192, False), (256, 256, 16384, True)]:
    operand = lambda seed, shape: jax.random.normal(jax.random.key(seed), shape).astype(jnp.float8_e4m3fn)
    run = jax.jit(lambda *a: gemm(*a, jnp.float32(1), jnp.float32(1), fast_accum=fast, tune=not loads))
    out = run(operand(0, (m, k)), operand(1, (n, k)))
    bits.append(hashlib.sha256(jax.device_get(out).tobytes()).hexdigest())
saved = None if loads else save_tuning(path)
plans = [(p["key"], p["algo"], p["algos"]) for p in extension.load().gemm_plans() if p["tuned"]]
print(json.dumps(dict(taken=taken, saved=saved, bits=bits, plans=plans)))
"""


@pytest.mark.gpu
def test_a_second_process_starts_tuned(tmp_path):
    def process(kind):
        command = [sys.executable, "-c", _PROCESS, str(tmp_path / "tuning"), kind]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout.splitlines()[-1])

    first, second = process("save"), process("load")
    assert first["saved"] == second["taken"] == 3
    assert first["bits"] == second["bits"]
    assert [plan[:2] for plan in first["plans"]] == [plan[:2] for plan in second["plans"]]
    assert all(algos > 1 for *_, algos in first["plans"]) and all(algos == 0 for *_, algos in second["plans"])


@pytest.mark.gpu
def test_a_gemm_is_timed_if_it_first_runs_while_all_are_tuned():
    def plan(n):
        x = jnp.ones((n, 208), E4M3)
        jax.block_until_ready(jax.jit(lambda x: gemm(x, x, jnp.float32(1), jnp.float32(1)))(x))
        return next(p for p in extension.load().gemm_plans() if p["key"].startswith(f"m{n} n{n} k208 "))

    before = plan(304)
    assert not before["tuned"] and before["chosen"] == 0
    tune_all()
    try:
        assert plan(304) == before
        assert plan(320)["tuned"] and plan(320)["ms"] > 0
    finally:
        tune_all(False)
    assert not plan(336)["tuned"]


@pytest.mark.gpu
@pytest.mark.parametrize("mnk", [(4096, 4096, 16384), (512, 2048, 32768), (8192, 4096, 12288)], ids=str)
@pytest.mark.parametrize("types", [(E4M3, E4M3), (E5M2, E4M3)], ids=str)
def test_tuning_keeps_split_accumulation(types, mnk, rng):
    """Whatever the tuner picks, split accumulation moves the tensor cores' 14-bit sums to f32 after some products."""
    m, n, k = mnk
    lhs, rhs = normal(rng, (m, k), types[0]), normal(rng, (n, k), types[1])
    rows = np.asarray(lhs[:64], np.float64) @ np.asarray(rhs, np.float64).T

    def error(fast):
        options = dict(out_dtype=f32, fast_accum=fast, tune=True)
        run = jax.jit(lambda *a: gemm(*a, jnp.float32(1), jnp.float32(1), **options)[:64])
        return np.linalg.norm(np.asarray(run(lhs, rhs)) - rows) / np.linalg.norm(rows)

    split, fast = error(False), error(True)
    print(mnk, types, split, fast)
    assert split < 2e-4 and split < fast / 4
