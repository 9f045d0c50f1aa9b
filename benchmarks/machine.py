"""What a result was measured on: devices, driver, versions, command line, date; clock and power as it ran."""

import datetime
import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
import threading

import jax

import te_jax
from te_jax import _lib

_PACKAGES = "jax jaxlib flax jax-cuda13-plugin nvidia-cublas nvidia-cudnn-cu13 nvidia-cuda-runtime torch"


def describe() -> dict:
    device = jax.devices()[0]
    return {
        "device": device.device_kind,
        "devices": jax.device_count(),
        "compute_capability": getattr(device, "compute_capability", None),
        "driver": _driver(),
        "te_jax": {"version": te_jax.__version__, **_extension()},
        "packages": {name: version for name in _PACKAGES.split() if (version := _version(name))},
        "python": platform.python_version(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", "-m", __package__, *sys.argv[1:]]),
    }


def line(found: dict) -> str:
    """The description in one line."""
    packages = ", ".join(f"{name} {version}" for name, version in found["packages"].items())
    where = f"{found['devices']}x {found['device']}, driver {found['driver']}"
    return f"{where}, te_jax {found['te_jax']['version']}, {packages}"


def _extension() -> dict:
    status = _lib.status()
    versions = {"cuda": status.cuda, "cublaslt": status.cublaslt, "cudnn": status.cudnn}
    return {"extension": status.loads, "reason": status.reason, **versions}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _driver() -> str | None:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, timeout=60, check=True).stdout.split("\n")[0]
    except (OSError, subprocess.SubprocessError):
        return None


class Sampler:
    """Clock and power of the first visible GPU, by nvidia-smi while the block runs: `samples`, empty without one."""

    # nvidia-smi's names -> ours and the unit
    FIELDS = {
        "clocks.sm": ("sm_clock", "MHz"),
        "power.draw.instant": ("power", "W"),
        "temperature.gpu": ("temperature", "C"),
    }
    _MS = 50  # between samples
    _STARTS_WITHIN = 5.0  # seconds

    def __enter__(self):
        # nvidia-smi counts all GPUs of the host, or takes names: CUDA_VISIBLE_DEVICES has either.
        gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0] or "0"
        query = ["nvidia-smi", "-i", gpu, f"--query-gpu={','.join(self.FIELDS)}", "--format=csv,noheader,nounits"]
        self.samples, self._started, self._process = [], threading.Event(), None
        try:
            self._process = subprocess.Popen([*query, "-lms", str(self._MS)], stdout=subprocess.PIPE, text=True)
        except OSError:
            return self
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._started.wait(self._STARTS_WITHIN)
        self.samples.clear()
        return self

    def _read(self):
        for line in self._process.stdout:
            number = lambda text: float(text) if text.strip().replace(".", "", 1).isdigit() else None
            self.samples.append(dict(zip((name for name, _ in self.FIELDS.values()), map(number, line.split(",")))))
            self._started.set()
        self._started.set()

    def __exit__(self, *error):
        if self._process:
            self._process.terminate()
            self._process.wait()
            self._reader.join()
