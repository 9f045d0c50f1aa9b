"""`python -m te_jax [--json]`: what te_jax can do on this machine, why not, and what to do about it."""

import argparse
import json
import os
import pathlib
import platform
import re
import sys
from collections.abc import Iterator
from typing import Any

import jax

from te_jax.core import extension, versions
from te_jax.ops.formats import ROWS_32, ROWS_128

FP8_CAPABILITY = (8, 9)  # Ada has the first tensor cores with FP8.
ATTENTION_CAPABILITY = (8, 0)
SCALES_OF_TENSORS = ("DelayedScaling", "Float8CurrentScaling", "FixedScaling")
PACKAGES = ("te_jax", "jax", "jaxlib", "flax")


def driver_version() -> str | None:
    """The version of the NVIDIA driver, None if there is none."""
    try:
        text = pathlib.Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return None
    match = re.search(r"\d+\.\d+(\.\d+)?", text)
    return match[0] if match else None


def devices() -> dict[str, Any]:
    """The devices of jax's default backend: platform, count, and the kind and compute capability of the first."""
    try:
        found = jax.devices()
    except RuntimeError as error:
        return {"platform": None, "count": 0, "kind": None, "capability": None, "error": str(error)}
    capability = getattr(found[0], "compute_capability", None)
    kind = found[0].device_kind
    return {"platform": found[0].platform, "count": len(found), "kind": kind, "capability": capability}


def feature(reason: str, how: str) -> dict[str, Any]:
    """The report on one feature. reason: Why it is not available, "" if it is. how: What serves it."""
    return {"available": not reason, "detail": reason or how}


def capability_reason(what: str, capability: str | None, minimum: tuple[int, int], way_out: str) -> str:
    """Why a GPU of `capability` cannot do `what`, which needs `minimum`; "" if it can."""
    have = tuple(int(part) for part in (capability or "0.0").split("."))
    if have >= minimum:
        return ""
    needed = ".".join(map(str, minimum))
    return f"{what} needs compute capability {needed} or newer, this GPU has {capability}: {way_out}"


def features(device: dict[str, Any], cuda: bool, status: extension.Status, driver: str | None) -> dict[str, Any]:
    """{recipe or "fused attention": its `feature`} on this device; cuda: whether jax has a CUDA device."""
    if not cuda:
        install = "pip install -U 'jax[cuda13]'" if driver else "needs an NVIDIA GPU and jax[cuda13]"
        plain = feature("", f"as plain JAX, right but not fast; FP8 kernels: {install}")
        attention = feature(f"no CUDA device in jax, attention is plain JAX: {install}", "")
        recipes = *SCALES_OF_TENSORS, "Float8BlockScaling", "MXFP8BlockScaling"
        return dict.fromkeys(recipes, plain) | {"fused attention": attention}
    capability = device["capability"]
    fp8 = status.reason or capability_reason("FP8", capability, FP8_CAPABILITY, "train without autocast")
    attention = status.attention or capability_reason(
        "fused attention", capability, ATTENTION_CAPABILITY, "use the plain-JAX implementation"
    )
    kernels = "CUDA kernels and cuBLASLt"
    return dict.fromkeys(SCALES_OF_TENSORS, feature(fp8, kernels)) | {
        "Float8BlockScaling": feature(status.reason or ROWS_128.refuses(capability), kernels),
        "MXFP8BlockScaling": feature(status.reason or ROWS_32.refuses(capability), "XLA and cuDNN, not tested"),
        "fused attention": feature(attention, "cuDNN, bf16 and f16"),
    }


def report() -> dict[str, Any]:
    """All that the command says, as `--json` prints it."""
    device, driver, status = devices(), driver_version(), extension.status()
    cuda = extension.has_cuda_device()
    plugin = extension.jax_cuda_plugin()
    packages = {name: versions.installed_version(name) or "not installed" for name in PACKAGES}
    packages["CUDA plugin"] = f"{plugin[1]} (CUDA {plugin[0]})" if plugin else "not installed"
    packages["python"] = platform.python_version()
    return {
        "versions": packages,
        "device": device,
        "driver": driver,
        "lowering": "CUDA kernels" if cuda else "plain JAX",
        "extension": {
            "built": status.built,
            "loads": status.loads,
            "reason": status.reason,
            "architectures": status.architectures,
            "cuda": status.cuda and extension.cuda_text(status.cuda),
            "driver_cuda": status.driver and extension.cuda_text(status.driver),
            "cublaslt": status.cublaslt and extension.library_text(status.cublaslt),
            "cudnn": status.cudnn and extension.library_text(status.cudnn),
        },
        "features": features(device, cuda, status, driver),
    }


def rows(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The lines of the report as (label, text)."""
    device, library = found["device"], found["extension"]
    for name, version in found["versions"].items():
        reason = versions.reason_untested(name, version)
        yield name, f"{version} ({reason})" if reason else version
    if device["count"]:
        capability = f", compute capability {device['capability']}" if device["capability"] else ""
        yield "device", f"{device['count']} x {device['kind']} ({device['platform']}{capability})"
    else:
        yield "device", f"none: {device['error']}"
    driver_cuda = f", CUDA up to {library['driver_cuda']}" if library["driver_cuda"] else ""
    yield "NVIDIA driver", f"{found['driver']}{driver_cuda}" if found["driver"] else "none"
    yield "lowering", f"ops lower to {found['lowering']}"
    architectures = ", ".join(library["architectures"])
    built = f"built for CUDA {library['cuda']} ({architectures})" if library["cuda"] else "built" * library["built"]
    loads = "loads" if library["loads"] else "does not load"
    yield "extension", f"{built}, {loads}" if built else "not built"
    if library["reason"]:
        yield "", library["reason"]
    yield "cuBLASLt", library["cublaslt"] or "not found"
    yield "cuDNN", library["cudnn"] or "not found"
    yield "", ""
    for name, item in found["features"].items():
        yield name, f"{'yes' if item['available'] else 'no '}  {item['detail']}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m te_jax", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print the same as JSON")
    as_json = parser.parse_args().json
    found = report()
    if as_json:
        print(json.dumps(found, indent=2))
        return
    for label, text in rows(found):
        print(f"{label:<22}{text}".rstrip())


if __name__ == "__main__":
    try:
        main()
        sys.stdout.flush()
    except BrokenPipeError:  # as in `python -m te_jax | head`; Python would complain once more at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
