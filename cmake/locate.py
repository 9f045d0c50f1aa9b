"""What to build, and with what: the GPUs here, nvcc and the CUDA headers, of the system or of NVIDIA's wheels.

CMakeLists.txt reads the printed KEY=VALUE lines; the build backend and the Makefile ask for the wheels that
are missing (`--requires`), the Makefile for the architectures of the GPUs here (`--gpu`). Only the standard
library: it runs before anything is installed.
"""

import ctypes
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

# CUDA 13.0 compiles for every architecture of te_jax and runs on every driver of CUDA 13.
NVCC_WHEELS = [f"nvidia-{part}==13.0.*" for part in ("cuda-nvcc", "cuda-crt", "nvvm", "cuda-runtime", "cuda-cccl")]
# Key: (header, folders in site-packages, wheel). 1.18.0 is the last cudnn-frontend that needs no nvrtc.h.
HEADERS = {
    "CUBLAS_INCLUDE": ("cublasLt.h", ["nvidia/cu13/include"], "nvidia-cublas>=13.0,<14"),
    "CUDNN_INCLUDE": ("cudnn.h", ["nvidia/cudnn/include"], "nvidia-cudnn-cu13>=9.12,<10"),
    "CUDNN_FRONTEND_INCLUDE": ("cudnn_frontend.h", ["include"], "nvidia-cudnn-frontend==1.18.0"),
}
HEADERS_12 = {
    "CUBLAS_INCLUDE": ("cublasLt.h", ["nvidia/cublas/include"], "nvidia-cublas-cu12>=12.9,<13"),
    "CUDNN_INCLUDE": ("cudnn.h", ["nvidia/cudnn/include"], "nvidia-cudnn-cu12>=9.12,<10"),
}

_spec = importlib.util.spec_from_file_location("archs", Path(__file__).parent.parent / "te_jax/core/archs.py")
archs = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(archs)


def build_mode() -> str:
    """TE_JAX_BUILD_CUDA: "1" build the extension, "0" do not, "auto" (default) where a GPU or nvcc 13 is; "12" build it
    with CUDA 12.9 instead of 13."""
    mode = os.environ.get("TE_JAX_BUILD_CUDA") or "auto"
    if mode not in ("auto", "0", "1", "12"):
        raise SystemExit(f"te_jax: TE_JAX_BUILD_CUDA is {mode!r}; it can be auto, 1 or 0, or 12 for CUDA 12.9")
    return mode


def is_cuda(version: tuple[int, int]) -> bool:
    """Whether to build with this version of nvcc. 12.9 is the first that knows every architecture of te_jax."""
    return (12, 9) <= version < (13, 0) if build_mode() == "12" else version[0] == 13


def headers() -> dict[str, tuple[str, list[str], str]]:
    return HEADERS | HEADERS_12 if build_mode() == "12" else HEADERS


def builds_extension() -> bool:
    mode = build_mode()
    return mode in ("1", "12") or (mode == "auto" and bool(gpu_architectures() or find_nvcc()))


def architectures() -> list[str]:
    """Those to compile for: TE_JAX_CUDA_ARCHS ("all", or some), else those of the GPUs here, else all."""
    asked = re.split("[;, ]+", os.environ.get("TE_JAX_CUDA_ARCHS", "").strip())
    if asked == ["all"]:
        return [*archs.ALL]
    return asked if asked != [""] else gpu_architectures() or [*archs.ALL]


def gpu_architectures() -> list[str]:
    """Those of the GPUs that this process sees and te_jax has kernels for."""
    found = map(archs.best, gpu_capabilities())
    return [*dict.fromkeys(arch for arch in found if arch)]


def cuda_driver():
    """The driver's library, initialized; None where there is no GPU to use."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    return driver if driver.cuInit(0) == 0 else None


def gpu_capabilities() -> list[tuple[int, int]]:
    """Compute capabilities of the GPUs that this process sees."""
    driver, count, part = cuda_driver(), ctypes.c_int(0), ctypes.c_int(0)
    if driver is None or driver.cuDeviceGetCount(ctypes.byref(count)):
        return []
    capabilities = []
    for device in range(count.value):
        parts = []
        for attribute in (75, 76):  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR
            driver.cuDeviceGetAttribute(ctypes.byref(part), attribute, device)
            parts.append(part.value)
        capabilities.append(tuple(parts))
    return capabilities


def site_folders() -> list[Path]:
    # Under pip's build isolation sys.path is the build environment, while sysconfig still names the
    # environment that is installed into: the nvidia wheels that jax brought there are found, too.
    folders = [*sys.path, sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    return [Path(folder) for folder in dict.fromkeys(folders) if folder and os.path.isdir(folder)]


def nvcc_version(nvcc: str) -> tuple[int, int] | None:
    try:
        text = subprocess.run([nvcc, "--version"], capture_output=True, text=True, timeout=60).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = re.search(r"release (\d+)\.(\d+)", text)
    return (int(match[1]), int(match[2])) if match else None


def find_nvcc() -> str | None:
    """The first nvcc of the CUDA to build with: CUDACXX, CUDA_HOME, CUDA_PATH, PATH, /usr/local/cuda, the wheels."""
    homes = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    candidates = [
        os.environ.get("CUDACXX"),
        *(f"{home}/bin/nvcc" for home in homes),
        shutil.which("nvcc"),
        "/usr/local/cuda/bin/nvcc",
    ]
    for site in site_folders():
        root = site / "nvidia" / "cu13"
        parts = ("nvvm/bin/cicc", "include/crt/host_config.h", "lib/libcudart_static.a")  # one wheel each
        if all((root / part).is_file() for part in parts):
            candidates.append(str(root / "bin" / "nvcc"))
    for nvcc in candidates:
        if nvcc and os.path.isfile(nvcc) and is_cuda(nvcc_version(nvcc) or (0, 0)):
            return nvcc
    return None


def toolkit_root(nvcc: str) -> Path:
    # The nvcc in PATH may be a link or a wrapper script: ask it where its toolkit is.
    command = [nvcc, "--dryrun", "-x", "cu", "/dev/null", "-c", "-o", "/dev/null"]
    text = subprocess.run(command, capture_output=True, text=True).stderr
    match = re.search(r"^#\$ TOP=(.*)$", text, re.MULTILINE)
    return Path(match[1] if match else Path(nvcc).resolve().parent.parent).resolve()


def find_folder(name: str, folders) -> str:
    return next((str(folder) for folder in folders if (Path(folder) / name).is_file()), "")


def locate() -> dict[str, str]:
    """Paths by key, "" for what is missing; {} without nvcc."""
    nvcc = find_nvcc()
    if nvcc is None:
        return {}
    root = toolkit_root(nvcc)
    # Wheels have lib/, toolkits lib64/ or targets/<platform>/lib.
    libs = [root / "lib64", root / "lib", *root.glob("targets/*/lib")]
    system = [root / "include", *root.glob("targets/*/include")]
    system += [Path("/usr/include"), *Path("/usr/include").glob("*-linux-gnu")]
    # Given for another machine than this one (cmake/wheels.py): the toolkit's own would not link.
    libs = [os.environ["CUDART_LIB"]] if os.environ.get("CUDART_LIB") else libs
    found = {
        "NVCC": nvcc,
        "CUDART_LIB": find_folder("libcudart_static.a", libs),
        "CUDART_INCLUDE": find_folder("cuda_runtime.h", system),
    }
    for key, (header, folders, _) in headers().items():
        given = [os.environ[key]] if os.environ.get(key) else []
        wheels = [site / folder for site in site_folders() for folder in folders]
        found[key] = find_folder(header, [*given, *system, *wheels])
    return found | {"ARCHS": ",".join(architectures())}


def requirements() -> list[str]:
    """The wheels to install before the extension can be built; [] if it is not to be built."""
    if not builds_extension():
        return []
    found = locate()
    if not found and build_mode() == "12":
        raise SystemExit(
            "te_jax: TE_JAX_BUILD_CUDA is 12, and there is no nvcc 12.9, which NVIDIA's wheels lack; install CUDA "
            "Toolkit 12.9 and name its folder in CUDA_HOME, or build with CUDA 13: TE_JAX_BUILD_CUDA=1."
        )
    wheels = [] if found else list(NVCC_WHEELS)
    return wheels + [wheel for key, (_, _, wheel) in headers().items() if not found.get(key)]


if __name__ == "__main__":
    if "--requires" in sys.argv:
        print(*requirements(), sep="\n")
    elif "--gpu" in sys.argv:
        print(*gpu_architectures())
    else:
        for key, value in locate().items():
            print(f"{key}={value}")
