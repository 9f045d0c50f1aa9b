"""Builds csrc's simple kernels for the CPU and gives them to jax as the CPU's lowering of their ops; and all handlers
for the CPU up to where they launch.

The sources are taken as they are but for what is not C++: launches, and the stream that jax's CPU has not.
"""

import ctypes
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
from jax.interpreters import mlir

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
CSRC = ROOT / "csrc"
SOURCES = (
    "quantize",
    "quantize_block",
    "activation",
    "activation_block",
    "activation_grouped",
    "activation_grouped_block",
    "activation_grouped_paired",
    "groups",
    "permute",
    "permute_block",
    "permute_fp8",
    "permute_fp8_block",
    "gated_norm_fwd",
    "gated_norm_block",
    "gated_norm_bwd",
    "rope",
    "router",
    "scaling",
    "conv",
    "scan",
    "scan_bwd",
    "scan_bwd_chunks",
    "scan_bwd_states",
    "steps",
    "channel_bwd_chunks",
    "channel_chunks",
    "delta_bwd",
    "delta_bwd_chunks",
    "delta_bwd_walk",
    "delta_chunks",
    "delta_fwd",
    "finish",
)  # no tensor cores of warpgroups, no copies by tensor maps

_LAUNCH = re.compile(r"(\w+)<<<(.+?), (.+?), (.+?), stream>>>\((.*?)\);", re.DOTALL)
_LAUNCH_EX = re.compile(r"TE_CUDA\(cudaLaunchKernelEx\(&(\w+), (\w+), (\w+)\)\);")
# Their bodies end, as clang-format has them, with the first brace that is not indented; in a macro with the last.
_KERNEL = re.compile(r"(__global__ void[^{;]*?\)) \{ *\\?\n.*?(?:\n\}\n|\n  \} +(\\)\n)", re.DOTALL)
_DYNAMIC_SHARED = re.compile(r"extern __shared__ (\w+) (\w+)\[\];")
_TAIL = """
#include "base/registry.h"
#include <cstring>
extern "C" const char* te_host_name(size_t i) { return i < te::Registry().size() ? te::Registry()[i].name : nullptr; }
extern "C" void* te_host_handler(size_t i) { return reinterpret_cast<void*>(te::Registry()[i].execute); }
extern "C" int te_host_capability = 90;  // ten times that of the GPU that there seems to be
extern "C" cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
extern "C" int te_host_shared_bytes = 227 << 10;
extern "C" const int te_host_multiprocessors;
extern "C" cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  if (attribute == cudaDevAttrMaxSharedMemoryPerBlockOptin) return *value = te_host_shared_bytes, cudaSuccess;
  if (attribute == cudaDevAttrMultiProcessorCount && te_host_multiprocessors > 0)
    return *value = te_host_multiprocessors, cudaSuccess;
  const bool major = attribute == cudaDevAttrComputeCapabilityMajor;
  if (!major && attribute != cudaDevAttrComputeCapabilityMinor) return cudaErrorNoDevice;
  return *value = major ? te_host_capability / 10 : te_host_capability % 10, cudaSuccess;
}
extern "C" cudaError_t cudaDriverGetVersion(int*) { return cudaErrorNoDevice; }
extern "C" cudaError_t cudaGetDeviceCount(int*) { return cudaErrorNoDevice; }
extern "C" cudaError_t cudaDeviceCanAccessPeer(int*, int, int) { return cudaErrorNoDevice; }
extern "C" cudaError_t cudaGetLastError() { return cudaSuccess; }
extern "C" const char* cudaGetErrorString(cudaError_t) { return "no GPU"; }
extern "C" cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t) {
  return std::memcpy(to, from, bytes), cudaSuccess;
}
extern "C" cudaError_t cudaMemsetAsync(void* p, int value, size_t bytes, cudaStream_t) {
  return std::memset(p, value, bytes), cudaSuccess;
}
"""
_WITH_KERNELS = """
extern "C" const int te_host_multiprocessors = 2;
extern "C" cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
"""
# All handlers without kernels, but for LAUNCHED: who gets as far as a launch, a plan or a device hears so.
LAUNCHED = ("gemm_empty.cu",)
HANDLERS = (
    *(f"{name}.cu" for name in SOURCES),
    *("norm_fwd.cu", "norm_fwd_t.cu", "norm_bwd.cu", "norm_block.cu", "gemm_empty.cu", "gemm.cc"),
    *("gemm_grouped.cc", "gemm_grouped_run.cc", "tensor_map.cc", "attention.cc", "attention_fp8.cc"),
)
# The C interface, with the launchers of the other sources.
C_API = ("c_api.cc", "c_api_call.cc", "device.cc", "dl.cc")
_LAUNCHED = '::te::Status{::te::Status::kUnimplemented, "launched"}'
_NO_GPU = f"""
#include <cudaTypedefs.h>

#include "gemm/gemm.h"
#include "gemm/gemm_grouped.h"
#include "delta/delta_bwd.cuh"
#include "ssm/operands.cuh"
#include "ssm/scan_bwd.cuh"
namespace te {{
Status FindGemm(cudaStream_t, const GemmKey&, GemmChoice*) {{ return {_LAUNCHED}; }}
Status Matmul(cudaStream_t, cublasLtHandle_t, const GemmKey&, const Algo&, const GemmOperands&) {{
  return {_LAUNCHED};
}}
Status grouped::RunFast(cudaStream_t, const KernelArgs&) {{ return {_LAUNCHED}; }}
Status grouped::RunWide(cudaStream_t, const KernelArgs&) {{ return {_LAUNCHED}; }}
Status grouped::RunSplit(cudaStream_t, const KernelArgs&) {{ return {_LAUNCHED}; }}
Status grouped::RunBlocks(cudaStream_t, const KernelArgs&) {{ return {_LAUNCHED}; }}
Status delta::RunHopper(cudaStream_t, const WalkArgs&, int64_t) {{ return {_LAUNCHED}; }}
Status delta::RunGradWalksOnHopper(cudaStream_t, const GradArgs&, int64_t) {{ return {_LAUNCHED}; }}
Status delta::RunGradChunksOnHopper(cudaStream_t, const GradArgs&, int64_t) {{ return {_LAUNCHED}; }}
Status ssm::RunHopper(cudaStream_t, const ScanCall&, const ScanArrays&, const Steps*) {{ return {_LAUNCHED}; }}
Status ssm::MakeMaps(const ScanCall&, const GradArgs&, HopperGradArgs*) {{ return {_LAUNCHED}; }}
Status ssm::RunOnHopper(cudaStream_t, const HopperGradArgs&) {{ return {_LAUNCHED}; }}
}}  // namespace te
extern "C" const int te_host_multiprocessors = 0;  // who asks for them hears that there is no device
static const PFN_cuTensorMapEncodeTiled_v12000 encode = [](auto...) {{ return CUDA_SUCCESS; }};
extern "C" cudaError_t cudaGetDriverEntryPointByVersion(const char*, void** found, unsigned, unsigned long long,
                                                        cudaDriverEntryPointQueryResult* result) {{
  *result = cudaDriverEntryPointSuccess;
  return *found = reinterpret_cast<void*>(encode), cudaSuccess;
}}
extern "C" cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) {{ return cudaErrorNoDevice; }}
"""

_NO_CUDNN = """
#include "attention/attention_fp8_plan.h"
#include "attention/attention_segments.h"
namespace te {
GraphRecipe AttentionRecipe(const AttentionKey&) { return {}; }
GraphRecipe Fp8AttentionRecipe(const Fp8Attention&) { return {}; }
Status FindGraph(cudaStream_t, const GraphRecipe&, int64_t*) { return LAUNCHED; }
Status RunGraph(cudaStream_t, const GraphRecipe&, GraphPointers, void*, int64_t) { return LAUNCHED; }
int64_t GraphWorkspace(const GraphRecipe&) { return 0; }
int64_t SegmentBytes(const AttentionKey&) { return 0; }
Status PutSegments(cudaStream_t, const AttentionKey&, const int32_t*, void*, GraphPointers*) {
  return LAUNCHED;
}
Status FillOutside(cudaStream_t, const AttentionKey&, const int32_t*, std::initializer_list<TokenRows>) {
  return LAUNCHED;
}
}  // namespace te
""".replace("LAUNCHED", _LAUNCHED)


def as_cpp(source: str, launches: bool = True) -> str:
    """A source of csrc as C++ for host_cuda.h. Without `launches` kernels are empty, and who launches one returns an
    error."""
    source = source.replace("ffi::PlatformStream<cudaStream_t>;", "host_cuda::NoStream;")
    source = source.replace('#include "xla/ffi/api/ffi.h"', '#include "no_stream.h"')
    source = _DYNAMIC_SHARED.sub(r"\1* \2 = static_cast<\1*>(::host_cuda::Cta::Get().shared());", source)
    if launches:
        source = _LAUNCH_EX.sub(r"\2<<<\1.gridDim, \1.blockDim, \1.dynamicSmemBytes, stream>>>(\3);", source)
        return _LAUNCH.sub(r"::host_cuda::Launch(\2, \3, \4, [&] { \1(\5); });", source)
    launched = f"return {_LAUNCHED};"
    return _LAUNCH_EX.sub(launched, _LAUNCH.sub(launched, _KERNEL.sub(r"\1 {} \2\n", source)))


def _of_launchers_in(sources: str, handlers: str) -> str:
    """Only the handlers whose launchers are defined in the sources."""
    is_there = lambda line: re.search(rf"^Status {line[1]}\(", sources, re.MULTILINE)
    return re.sub(r"^TE_HANDLER\w*\(\w+, (\w+)[,)].*?;$", lambda line: line[0] if is_there(line) else "", handlers,
                  flags=re.MULTILINE | re.DOTALL)  # fmt: skip


def _absent_launchers(sources: str) -> str:
    """Those that the sources lack, as functions that say so: the C interface names all."""
    text = _source("ops.h")
    declared = re.findall(r"^Status (Launch\w+)(\(.*?\));$", text, re.MULTILINE | re.DOTALL)
    absent = [name + of for name, of in declared if not re.search(rf"^Status {name}\(", sources, re.MULTILINE)]
    bodies = "\n".join(f"Status {each} {{ return {_LAUNCHED}; }}" for each in absent)
    return f'#include "base/ops.h"\nnamespace te {{\n{bodies}\n}}\n'


def _source(name: str) -> str:
    """The text of the file of csrc that is called so."""
    [path] = CSRC.rglob(name)
    return path.read_text()


def cuda_include() -> str:
    """The folder of the CUDA headers; "" where they, or g++, are missing."""
    found = subprocess.run([sys.executable, ROOT / "cmake/locate.py"], capture_output=True, text=True).stdout
    paths = dict(line.split("=", 1) for line in found.splitlines() if "=" in line)
    return paths.get("CUDART_INCLUDE", "") if shutil.which("g++") else ""


def build(folder: Path, cuda_include: str) -> Path:
    """Compiles the kernels into `folder` -> the library. Raises RuntimeError with the compiler's words."""
    sources = [*(f"{name}.cu" for name in SOURCES), *C_API]
    return _compile(folder, cuda_include, sources, {"tail": _TAIL + _WITH_KERNELS}, "-O1")


def build_handlers(folder: Path, cuda_include: str) -> Path:
    """The same of all handlers, without kernels: a call that a handler does not refuse ends as UNIMPLEMENTED, or as
    INTERNAL for want of a device."""
    parts = {"tail": _TAIL + _NO_GPU, "no_cudnn": _NO_CUDNN}
    flags = "-O0", "-fpermissive", "-DTE_HAS_90A"
    return _compile(folder, cuda_include, (*HANDLERS, *C_API), parts, *flags, launches=False)


def _compile(folder: Path, cuda_include: str, sources, parts: dict, *flags: str, launches: bool = True) -> Path:
    for path in CSRC.glob("*/*.*h"):
        (folder / path.parent.name).mkdir(exist_ok=True)
        (folder / path.relative_to(CSRC)).write_text(as_cpp(path.read_text(), launches))
    for path in HERE.rglob("*.*h"):  # PTX as C++, instead of that in csrc
        (folder / path.relative_to(HERE)).write_text(path.read_text())
    run = lambda name: launches or name in LAUNCHED
    units = {Path(name).stem: as_cpp(_source(name), run(name)) for name in sources}
    text, handlers = "\n".join(units.values()), _source("handlers.cc")
    units |= parts | {"handlers": _of_launchers_in(text, handlers), "absent": _absent_launchers(text)}
    for name, part in units.items():
        (folder / f"{name}.cc").write_text('#include "head.h"\n' + part)
    stream = "namespace te { static const cudaStream_t stream = nullptr; }\n"
    (folder / "head.h").write_text(f'#pragma once\n#include "host_cuda.h"\n{stream}')
    includes = [f"-I{folder}", f"-I{ROOT / 'third_party/xla_ffi'}", f"-isystem{cuda_include}"]
    # Checked copies of libc's functions, which some distributions turn on, take a jump to another fiber for an error.
    command = ["g++", "-std=c++20", *flags, "-fPIC", "-w", "-ffp-contract=off", "-U_FORTIFY_SOURCE", *includes]
    # Parsed once for all: most of the time goes into headers.
    _run([*command, "-x", "c++-header", str(folder / "head.h"), "-o", str(folder / "head.h.gch")])
    files = [str(folder / f"{name}.cc") for name in units]
    _run([*command, "-shared", *files, "-o", str(folder / "host_kernels.so")])
    return folder / "host_kernels.so"


def _run(command: list[str]):
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr[-6000:]}")


def targets(library: Path) -> dict[str, object]:
    """{name: capsule} of the library's handlers."""
    loaded = ctypes.CDLL(str(library))
    loaded.te_host_name.restype = ctypes.c_char_p
    loaded.te_host_handler.restype = ctypes.c_void_p
    new_capsule = ctypes.pythonapi.PyCapsule_New
    new_capsule.restype, new_capsule.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    names = iter(lambda: loaded.te_host_name(len(found)), None)
    found = {}
    for name in names:
        found[name.decode()] = new_capsule(loaded.te_host_handler(len(found)), None, None)
    return found


def install(library: Path) -> list[str]:
    """Registers the kernels with jax's CPU and lowers their ops to them there -> the ops' names."""
    from te_jax.core.op import ops

    found = targets(library)
    for name, handler in found.items():
        jax.ffi.register_ffi_target(name, handler, platform="cpu")
        op = ops[name]
        mlir.register_lowering(op.primitive, partial(op._lower, op._run_cuda), platform="cpu")
    return list(found)
