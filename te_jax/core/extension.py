"""The CUDA extension `te_jax._cuda`, over `libte_jax.so`: loaded, checked and registered at the first CUDA lowering."""

import dataclasses
import functools
import importlib
import importlib.metadata
import importlib.util
import pathlib
import threading
from collections.abc import Callable, Iterator
from types import ModuleType

import jax

from te_jax.core import archs

CUDA_MAJOR = 13  # What the extension is built for, unless the build was told to be for 12.
# {CUDA major: the oldest driver, and the newest CUDA version that it supports}. Drivers before 550 cannot read kernels
# as the build compresses them.
_DRIVERS = {12: (550, 12040), 13: (580, 13000)}
# 9.15.1. In earlier versions gradients of attention can be NaN (9.12,
# https://github.com/NVIDIA/cudnn-frontend/issues/160), or attention reads out of bounds in CUDA graphs where the key
# length is not a multiple of 128 (cudnn-frontend 1.16, release notes).
CUDNN_MINIMUM = 91501

# {library: packages of NVIDIA's wheels whose lib/ may hold it}, the newest layout of the wheels first. The extension
# asks for those of the CUDA that it is built for.
_LIBRARY_PACKAGES = {
    "libcublasLt.so.13": ("nvidia.cu13", "nvidia.cublas"),
    "libnvrtc.so.13": ("nvidia.cu13", "nvidia.cuda_nvrtc"),
    "libcublasLt.so.12": ("nvidia.cublas",),
    "libnvrtc.so.12": ("nvidia.cuda_nvrtc",),
    "libcudnn.so.9": ("nvidia.cudnn",),
}
REBUILD = "Install it again where the GPU is, or with TE_JAX_BUILD_CUDA=1 to build it anywhere."
_lock = threading.RLock()


@dataclasses.dataclass(frozen=True)
class Status:
    """What the CUDA extension can do here. CUDA versions are 1000 * major + 10 * minor; None if not known."""

    built: bool  # Whether te_jax was installed with the extension.
    loads: bool  # Whether `load()` succeeds.
    reason: str  # Why `load()` fails, and what to do; "" if it succeeds.
    architectures: tuple[str, ...] = ()  # Architectures that the extension is built for, such as "90a-real".
    cuda: int | None = None  # The CUDA version that it is built with.
    driver: int | None = None  # The newest CUDA version that the driver supports.
    cublaslt: int | None = None  # cublasLtGetVersion().
    cudnn: int | None = None  # cudnnGetVersion().
    attention: str = ""  # Why fused attention is not available; "" if it is.


def load() -> ModuleType:
    """The extension, ready to use. Raises RuntimeError, with the reason and the way out, if it cannot be used."""
    with _lock:
        return _checked_module()


def status() -> Status:
    """The status of the extension on this machine. Never raises."""
    with _lock:
        try:
            module = _import()
        except RuntimeError as error:
            return Status(is_built(), False, str(error), attention=str(error))
        versions = module.versions()
        reason = _unusable(versions) or _without_kernels(_architectures(versions), compute_capability())
        return Status(
            built=True,
            loads=not reason,
            reason=reason,
            architectures=_architectures(versions),
            cuda=versions["cudart"],
            driver=versions["driver"] or None,
            cublaslt=versions["cublaslt"],
            cudnn=versions["cudnn"],
            attention=reason or _attention_unusable(versions),
        )


def require_for_lowering() -> ModuleType | None:
    """The extension with all its FFI targets registered, None if this process has no CUDA device.

    Lowering for CUDA without a device (cross-lowering, export) needs no targets: XLA looks them up when it compiles.
    Raises RuntimeError, as `load()` does, if there is a device but the extension cannot be used.
    """
    if not has_cuda_device():
        return None
    with _lock:
        return _registered_module()


def has_cuda_device() -> bool:
    try:
        return bool(jax.devices("cuda"))
    except RuntimeError:  # jax has no CUDA backend, or was told not to use it.
        return False


def compute_capability() -> str | None:
    """The compute capability of this process's first GPU, such as "9.0"; None without a GPU."""
    return str(jax.devices("cuda")[0].compute_capability) if has_cuda_device() else None


@functools.cache
def has_peer_access() -> bool:
    """Whether there are GPUs, each of which can read the others' memory. Without the extension none does."""
    return has_cuda_device() and status().loads and load().peer_access()


@functools.cache
def is_built_for(arch: str) -> bool:
    """Whether the extension has machine code for an architecture, such as "90a"; also where there is no extension."""
    return not is_built() or f"{arch}-real" in status().architectures


def check_gpu(op: str, unusable: Callable[[str], str]) -> None:
    """Raises RuntimeError, naming `op`, if `unusable` gives a reason against this GPU's compute capability.

    unusable: compute capability -> the reason why `op` cannot run there, "" if it can.
    """
    capability = compute_capability()
    if capability and (reason := unusable(capability)):
        raise RuntimeError(f"{op}: {reason}.")


def is_built() -> bool:
    """Whether te_jax was installed with its CUDA extension."""
    return importlib.util.find_spec("te_jax._cuda") is not None


@functools.cache
def _import() -> ModuleType:
    if not is_built():
        raise RuntimeError(f"te_jax was installed without its CUDA extension. {REBUILD}")
    try:
        module = importlib.import_module("te_jax._cuda")
    except ImportError as error:
        reason = f"te_jax: the CUDA extension cannot be imported ({error}). Re-install te_jax."
        raise RuntimeError(reason) from error
    for soname, path in library_paths():
        module.set_library_path(soname, path)
    return module


@functools.cache
def _checked_module() -> ModuleType:
    module = _import()
    if reason := _unusable(module.versions()):
        raise RuntimeError(reason)
    return module


@functools.cache
def _registered_module() -> ModuleType:
    # The module is checked first: XLA keeps registered targets for the life of the process.
    module = _checked_module()
    # The GPU is checked here and not at import, since to ask for its capability starts jax's backends.
    if reason := _without_kernels(_architectures(module.versions()), compute_capability()):
        raise RuntimeError(reason)
    for name, stages in module.registrations().items():
        jax.ffi.register_ffi_target(name, stages, platform="CUDA")
    return module


def library_paths() -> Iterator[tuple[str, str]]:
    """(soname, path) of the libraries that are in NVIDIA's wheels here."""
    for soname, packages in _LIBRARY_PACKAGES.items():
        if path := _wheel_library(soname, packages):
            yield soname, path


def _wheel_library(soname: str, packages: tuple[str, ...]) -> str | None:
    for package in packages:
        try:
            spec = importlib.util.find_spec(package)
        except ImportError:
            continue
        for folder in (spec and spec.submodule_search_locations) or ():
            path = pathlib.Path(folder) / "lib" / soname
            if path.is_file():
                return str(path)
    return None


def jax_cuda_plugin() -> tuple[int, str] | None:
    """(CUDA major, version) of the installed jax CUDA plugin, None if there is none; that for CUDA 13 goes first."""
    for major in (CUDA_MAJOR, CUDA_MAJOR + 1, CUDA_MAJOR - 1):
        try:
            return major, importlib.metadata.version(f"jax-cuda{major}-plugin")
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _unusable(versions: dict) -> str:
    built = versions["cudart"] // 1000
    plugin = jax_cuda_plugin()
    if plugin and plugin[0] != built:
        return (
            f"te_jax: the CUDA extension is built for CUDA {built}, but the installed "
            f"jax-cuda{plugin[0]}-plugin {plugin[1]} is for CUDA {plugin[0]}. Install jax[cuda{built}]."
        )
    driver, oldest = _DRIVERS[built]
    if 0 < versions["driver"] < oldest:
        return (
            f"te_jax: the CUDA extension is built for CUDA {built}, but the NVIDIA driver supports only "
            f"CUDA {cuda_text(versions['driver'])}. Update the driver ({driver} or newer for CUDA {built})."
        )
    if versions["cublaslt"] is None:
        return f"te_jax: {versions['cublaslt_error']}"
    return ""


def _architectures(versions: dict) -> tuple[str, ...]:
    return tuple(versions["architectures"].split(","))


def _without_kernels(architectures: tuple[str, ...], capability: str | None) -> str:
    """Why a GPU of `capability` cannot run kernels for `architectures`; "" if it can, and without a GPU (None)."""
    if capability is None:
        return ""
    gpu = tuple(map(int, capability.split(".")))
    if any(archs.serves(arch, gpu) for arch in architectures):
        return ""
    way_out = "Install te_jax again on this machine, or with TE_JAX_CUDA_ARCHS=all."
    if archs.best(gpu) is None:
        way_out = f"te_jax has kernels only for {', '.join(archs.ALL)}: JAX_PLATFORMS=cpu runs plain JAX."
    built = ", ".join(architectures)
    return (
        f"te_jax: the CUDA extension is built for {built}, but this GPU has compute capability {capability}. {way_out}"
    )


def _attention_unusable(versions: dict) -> str:
    if versions["cudnn"] is None:
        return f"te_jax: {versions['cudnn_error']}"
    if versions["cudnn"] < CUDNN_MINIMUM:
        found, minimum = library_text(versions["cudnn"]), library_text(CUDNN_MINIMUM)
        package = f"nvidia-cudnn-cu{versions['cudart'] // 1000}"
        return f"te_jax: cuDNN is {found}, fused attention needs {minimum}: pip install -U {package}"
    return ""


def cuda_text(version: int) -> str:
    """13000 -> "13.0"."""
    return f"{version // 1000}.{version % 1000 // 10}"


def library_text(version: int) -> str:
    """90501 -> "9.5.1". Versions of cuDNN 9 and cuBLASLt 13 are 10000 * major + 100 * minor + patch."""
    return f"{version // 10000}.{version % 10000 // 100}.{version % 100}"
