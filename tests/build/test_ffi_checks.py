"""FFI handlers and the C interface refuse what is not as the axis rule of their op says, before they look at any
memory."""

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from c_calls import ALIGNED, CASES, FLAGS, INCLUDE, OPS, arguments, workspace_bytes
from c_calls import survey as survey_of_c
from ffi_calls import TARGETS, outcomes, recorded, survey
from host_cuda import library

from te_jax import c_api
from te_jax.core import extension

pytestmark = pytest.mark.sources
ROOT = Path(__file__).resolve().parents[2]
COPIES = {"te_address", "te_keep"}  # launch no kernel, as the cases have them


@pytest.fixture(scope="module")
def host_library(tmp_path_factory) -> Path:
    """All handlers, and the C interface, without their kernels."""
    include = library.cuda_include()
    if not include:
        pytest.skip("needs g++ and the CUDA headers")
    return library.build_handlers(tmp_path_factory.mktemp("handlers"), include)


@pytest.fixture(scope="module")
def handlers(host_library):
    """The handlers, for jax's CPU: their names begin with host_."""
    found = library.targets(host_library)
    for name, handler in found.items():
        jax.ffi.register_ffi_target(f"host_{name}", handler, platform="cpu")
    return found


@pytest.fixture
def on_cpu(handlers):
    with jax.default_device(jax.devices("cpu")[0]):
        yield


def of_other_places(found):
    """What right calls say, but those of results that must be where an operand is, which no call here has."""
    return [said for said in found["right"] if "is not where the operand is" not in said]


def test_wrong_calls_are_refused(handlers, on_cpu):
    assert handlers.keys() == set(TARGETS)
    found = [survey(target, f"host_{target}", outcomes) for target in TARGETS]
    accepted = [what for each in found for what in each["accepted"]]
    assert not accepted, "\n".join([f"{len(accepted)} of {sum(each['calls'] for each in found)}", *accepted])
    for each in found:  # they get as far as their launch
        said = of_other_places(each)
        launched = all("UNIMPLEMENTED" in a or "no GPU" in a for a in said)
        assert not any(said) if each["target"] in COPIES else launched, each


@pytest.fixture(scope="module")
def lib(host_library) -> c_api.Library:
    return c_api.Library(str(host_library), str(INCLUDE))


def test_wrong_calls_of_c_are_refused(lib):
    """Null, wrong type, rank, size, alignment, number, and workspace, in each array of each op."""
    assert lib.ops == OPS and {case.op for case in CASES} == {f"te_{op}" for op in OPS}
    fields, accepted = zip(*(survey_of_c(lib, case) for case in CASES))
    assert not any(accepted), "\n".join(sum(accepted, []))
    assert sum(map(len, fields)) > 2000
    for op in OPS:
        wrong = {name for case, names in zip(CASES, fields) for name in names if case.op == f"te_{op}"}
        assert wrong >= lib.fields(op).keys() - FLAGS, op


def test_right_calls_of_c_get_as_far_as_their_launch(lib):
    for case in CASES:
        call = recorded(case)
        op, args = arguments(lib, call, lambda name: ALIGNED)
        needed = lib.workspace(op, **args)
        assert needed == workspace_bytes(call)  # of jax's partial results: so the results are the same
        with pytest.raises(Exception, match="launched|no GPU"):
            lib.call(op, None, ALIGNED, needed, **args)


def test_ops_of_hopper_say_so_on_another_gpu(lib):
    """The status that te_jax.h names, and in its words the op and what the GPU is; other ops pass as before."""
    capability = ctypes.c_int.in_dll(ctypes.CDLL(lib.path), "te_host_capability")
    try:
        for case in CASES:
            op, args = arguments(lib, recorded(case), lambda name: ALIGNED)
            capability.value = 90
            needed = lib.workspace(op, **args)
            for capability.value in (80, 103, 120):
                assert lib.workspace(op, **args) == needed  # asks no GPU
                needs_hopper = "block" in op or op.startswith("gemm_grouped")
                says = f"te_{op}: needs compute capability 9.0 .*has {capability.value / 10}$" if needs_hopper else ""
                with pytest.raises(NotImplementedError if needs_hopper else Exception, match=says or "launched|no GPU"):
                    lib.call(op, None, ALIGNED, needed, **args)
    finally:
        capability.value = 90


def test_a_kernel_without_code_for_the_gpu_is_not_implemented(lib, tmp_path):
    """No failure of CUDA: the caller may take another way."""
    (tmp_path / "main.cc").write_text("""
#include "base/status.h"
extern "C" const char* cudaGetErrorString(cudaError_t) { return "as CUDA says it"; }
extern "C" cudaError_t cudaGetLastError() { return cudaSuccess; }
extern "C" cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
extern "C" cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  return *value = attribute == cudaDevAttrComputeCapabilityMajor ? 7 : 5, cudaSuccess;
}
te::Status Launch(cudaError_t error) { TE_CUDA(error); return {}; }
int main() {
  for (cudaError_t error : {cudaErrorNoKernelImageForDevice, cudaErrorMemoryAllocation, cudaSuccess}) {
    const te::Status status = Launch(error);
    std::printf("%d %s\\n", status.code, status.message.c_str());
  }
}
""")
    include = ["-I", str(ROOT / "csrc"), "-isystem", library.cuda_include()]
    subprocess.run(["g++", "-std=c++20", *include, str(tmp_path / "main.cc"), "-o", "main"], cwd=tmp_path, check=True)
    lines = subprocess.run([tmp_path / "main"], capture_output=True, text=True, check=True).stdout.splitlines()
    assert lines[0].startswith("12 main.cc:")
    assert lines[0].endswith("without code of this kernel for compute capability 7.5")
    assert lines[1].startswith("13 main.cc:") and lines[1].endswith("as CUDA says it") and lines[2] == "0 "


def test_null_arguments_and_bad_paths_of_c_are_refused(lib, tmp_path):
    plain = ctypes.CDLL(lib.path)
    plain.te_jax_error.restype = ctypes.c_char_p
    for op in lib.ops:
        for null in (getattr(plain, f"te_jax_{op}"), getattr(plain, f"te_jax_{op}_workspace")):
            assert null(None, None) == 3 and b"args is null" in plain.te_jax_error()
    assert plain.te_jax_set_library_path(None, None) == 3
    for soname, path, says in (
        ("libcublas.so.13", str(tmp_path), "pass libcublasLt"),
        ("libcublasLt.so.13", str(tmp_path / "none"), "cannot be read"),
    ):
        with pytest.raises(ValueError, match=says):
            lib.set_library_path(soname, path)
    with pytest.raises(TypeError, match="quantize has no axis; its fields are x, scale, data"):
        lib.call("quantize", None, 0, 0, axis=1)
    with pytest.raises(ValueError, match="'quantise' is no op"):
        lib.workspace("quantise")
    with pytest.raises(ValueError, match="type 'GELU' and 1 axes; use I32"):
        lib.array(0, "GELU", (1,))


def check_no_products(prefix, target, dtype, bias_dtype, in_place, rng):
    """`target` with k = 0; of FP8 operands where the bias of an f32 result is bf16."""
    m, n = 4, 48
    is_block = target == "te_gemm_block"
    lhs_dtype = dtype if dtype == bias_dtype and not is_block else jnp.float8_e4m3fn
    c, bias = (jnp.asarray(rng.standard_normal(s), jnp.float32) for s in ((m, n), (n,)))
    c, bias = c.astype(dtype), bias.astype(bias_dtype)
    results = jax.ShapeDtypeStruct((m, n), dtype), jax.ShapeDtypeStruct((64,), jnp.uint8)
    absent = jnp.zeros((0,), jnp.float32)
    scales = (jnp.zeros((0, m)), jnp.zeros((0, n)), absent) if is_block else (absent, absent)
    operands = jnp.zeros((m, 0), lhs_dtype), jnp.zeros((n, 0), lhs_dtype), *scales
    aliases = {len(operands) + 1: 0} if in_place else {}
    call = jax.ffi.ffi_call(f"{prefix}{target}", results, input_output_aliases=aliases)
    attrs = dict(outer=0) if is_block else dict(contract=1, fast_accum=False, entry=-1)
    run = jax.jit(lambda bias, c: call(*operands, bias, c, tune=False, **attrs)[0])
    exact = np.asarray(bias, np.float32) + np.asarray(c, np.float32)
    np.testing.assert_array_equal(run(bias, c), jnp.asarray(exact).astype(dtype))
    if not in_place:
        np.testing.assert_array_equal(run(absent, c), c)
        np.testing.assert_array_equal(run(bias, absent), jnp.broadcast_to(bias.astype(dtype), (m, n)))
        np.testing.assert_array_equal(run(absent, absent), jnp.zeros((m, n), dtype))


NO_PRODUCTS = [
    ("te_gemm", "float32", "float32", False),
    ("te_gemm", "bfloat16", "bfloat16", True),
    ("te_gemm", "float32", "bfloat16", False),
    ("te_gemm_block", "bfloat16", "bfloat16", False),
]


@pytest.mark.parametrize("case", NO_PRODUCTS, ids=str)
def test_a_gemm_of_no_products_is_bias_plus_c(case, on_cpu, rng):
    check_no_products("host_", *case, rng)


def entry_call(shape, entry, in_place):
    """te_gemm of no products, whose bias becomes an entry of an array of this shape."""
    results = jax.ShapeDtypeStruct(shape, jnp.float32), jax.ShapeDtypeStruct((64,), jnp.uint8)
    call = jax.ffi.ffi_call("host_te_gemm", results, input_output_aliases={5: 0} if in_place else {})
    (m, n), absent = shape[1:], jnp.zeros((0,), jnp.float32)
    operands = jnp.zeros((m, 0)), jnp.zeros((n, 0)), absent, absent
    attrs = dict(contract=1, fast_accum=False, tune=False, entry=entry)
    return jax.jit(lambda bias, whole: call(*operands, bias, whole, **attrs)[0])


@pytest.mark.parametrize("entry, in_place", [(0, True), (2, True), (1, False)])
def test_a_gemm_writes_one_entry(entry, in_place, on_cpu, rng):
    bias, whole = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((32,), (3, 4, 32)))
    want = whole.at[entry].set(jnp.broadcast_to(bias, (4, 32)))
    np.testing.assert_array_equal(entry_call(whole.shape, entry, in_place)(bias, whole), want)


@pytest.mark.parametrize(
    "shape, entry, says",
    [
        ((3, 4, 32), 3, "entry is 3, out is .3, 4, 32."),
        ((3, 4, 8), 1, "an entry of out has 128 bytes; pass a multiple of 256"),
    ],
)
def test_wrong_entries_of_a_gemm(shape, entry, says, on_cpu):
    with pytest.raises(jax.errors.JaxRuntimeError, match=says):
        entry_call(shape, entry, in_place=True)(jnp.zeros(shape[-1]), jnp.zeros(shape)).block_until_ready()


@pytest.mark.gpu
@pytest.mark.parametrize("case", NO_PRODUCTS, ids=str)
def test_a_gemm_of_no_products_is_bias_plus_c_on_the_gpu(case, rng):
    extension.require_for_lowering()
    check_no_products("", *case, rng)


@pytest.mark.gpu
@pytest.mark.timeout(900)
def test_wrong_calls_are_refused_on_the_gpu():
    """In a process of its own; if a call ends it, in another from the next target on."""
    left, found, died = list(TARGETS), [], []
    environment = os.environ | {"PYTHONPATH": str(ROOT)}  # for benchmarks/op_cases.py
    while left:
        command = [sys.executable, str(ROOT / "tests/support/ffi_calls.py"), *left]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
        lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        found += lines
        left = left[len(lines) :]
        if left:
            died.append(f"{left.pop(0)}: exit code {done.returncode}: {done.stderr[-1000:]}")
    assert not died, died
    accepted = [what for each in found for what in each["accepted"]]
    assert not accepted, "\n".join(accepted)
    assert not [each for each in found if any(of_other_places(each))]  # right calls succeed, also after the wrong ones
