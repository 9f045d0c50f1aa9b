"""Builds csrc's simple kernels for the CPU and gives them to jax as the CPU's lowering of their ops.

The sources are taken as they are but for what is not C++: launches, and the stream that jax's CPU has not.
"""

import ctypes
import re
import subprocess
from functools import partial
from pathlib import Path

import jax
from jax.interpreters import mlir

ROOT = Path(__file__).resolve().parents[2]
SOURCES = (
    "quantize",
    "quantize_block",
    "activation",
    "activation_block",
    "rope",
    "scaling",
)  # no tensor cores, no asynchronous copies

_LAUNCH = re.compile(r"(\w+)<<<(.+?), (.+?), (.+?), stream>>>\((.*?)\);", re.DOTALL)
_DYNAMIC_SHARED = re.compile(r"extern __shared__ (\w+) (\w+)\[\];")
_TAIL = """
#include "registry.h"
extern "C" const char* te_host_name(size_t i) { return i < te::Registry().size() ? te::Registry()[i].name : nullptr; }
extern "C" void* te_host_handler(size_t i) { return reinterpret_cast<void*>(te::Registry()[i].execute); }
extern "C" cudaError_t cudaGetLastError() { return cudaSuccess; }
extern "C" const char* cudaGetErrorString(cudaError_t) { return "no error"; }
extern "C" cudaError_t cudaMemsetAsync(void* p, int value, size_t bytes, cudaStream_t) {
  return std::memset(p, value, bytes), cudaSuccess;
}
"""


def as_cpp(source: str) -> str:
    """A .cu or .cuh file as C++ for host_cuda.h."""
    # Only handlers get their stream from jax; what they call gets it from them, here a null stream of that name.
    handlers = re.findall(r"TE_HANDLER\(\w+, (\w+),", source)
    for handler in handlers:
        source = re.sub(rf"\b{handler}\(cudaStream_t stream, ", f"{handler}(", source)
    source = source.replace(".Ctx<Stream>()", "")
    source = _DYNAMIC_SHARED.sub(r"\1* \2 = static_cast<\1*>(::host_cuda::Cta::Get().shared());", source)
    return _LAUNCH.sub(r"::host_cuda::Launch(\2, \3, \4, [&] { \1(\5); });", source)


def build(folder: Path, cuda_include: str) -> Path:
    """Compiles into `folder` -> the library. Raises RuntimeError with the compiler's words."""
    here = Path(__file__).parent
    for path in ROOT.glob("csrc/*.*"):
        if path.suffix in (".h", ".cuh"):
            (folder / path.name).write_text(as_cpp(path.read_text()))
    for name in ("host_cuda.h", "ptx.cuh"):
        (folder / name).write_text((here / name).read_text())
    parts = [as_cpp((ROOT / f"csrc/{name}.cu").read_text()) for name in SOURCES]
    units = []
    for name, part in zip((*SOURCES, "tail"), (*parts, _TAIL)):
        head = '#include "host_cuda.h"\nnamespace te { static const cudaStream_t stream = nullptr; }\n'
        (folder / f"{name}.cc").write_text(head + part)
        units.append(str(folder / f"{name}.cc"))
    includes = [f"-I{folder}", f"-I{ROOT / 'third_party/xla_ffi'}", f"-isystem{cuda_include}"]
    # Checked copies of libc's functions, which some distributions turn on, take a jump to another fiber for an error.
    flags = ["-std=c++20", "-O1", "-fPIC", "-shared", "-w", "-ffp-contract=off", "-U_FORTIFY_SOURCE"]
    command = ["g++", *flags, *includes, *units, "-o", str(folder / "host_kernels.so")]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr[-6000:]}")
    return folder / "host_kernels.so"


def install(library: Path) -> list[str]:
    """Registers the kernels with jax's CPU and lowers their ops to them there -> the ops' names."""
    from te_jax._op import ops

    loaded = ctypes.CDLL(str(library))
    loaded.te_host_name.restype = ctypes.c_char_p
    loaded.te_host_handler.restype = ctypes.c_void_p
    new_capsule = ctypes.pythonapi.PyCapsule_New
    new_capsule.restype, new_capsule.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    names, i = [], 0
    while name := loaded.te_host_name(i):
        jax.ffi.register_ffi_target(name.decode(), new_capsule(loaded.te_host_handler(i), None, None), platform="cpu")
        op = ops[name.decode()]
        mlir.register_lowering(op.primitive, partial(op._lower, op._run_cuda), platform="cpu")
        names.append(op.name)
        i += 1
    return names
