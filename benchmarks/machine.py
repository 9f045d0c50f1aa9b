"""What a result was measured on: devices, driver, versions, command line, date; clock and power as it ran."""

import contextlib
import datetime
import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
import tempfile
import time

import jax

import te_jax
from te_jax import _lib

_PACKAGES = "jax jaxlib flax jax-cuda13-plugin nvidia-cublas nvidia-cudnn-cu13 nvidia-cuda-runtime torch"
_LIBRARIES = ("cuda", "cublaslt", "cudnn")


def describe() -> dict:
    device, status = jax.devices()[0], _lib.status()
    extension = {"extension": status.loads} | {key: getattr(status, key) for key in ("reason", *_LIBRARIES)}
    found = {each.name: each.version for each in importlib.metadata.distributions()}
    return {
        "device": device.device_kind,
        "devices": jax.device_count(),
        "compute_capability": getattr(device, "compute_capability", None),
        "driver": _driver(),
        "te_jax": {"version": te_jax.__version__, **extension},
        "packages": {name: found[name] for name in _PACKAGES.split() if name in found},
        "python": platform.python_version(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", "-m", __package__, *sys.argv[1:]]),
    }


def line(found: dict) -> str:
    """The description in one line."""
    packages = ", ".join(f"{name} {version}" for name, version in found["packages"].items())
    where = f"{found['devices']}x {found['device']}, driver {found['driver']}"
    return f"{where}, te_jax {found['te_jax']['version']}, {packages}"


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
        self.samples, self._process, self._file = [], None, tempfile.TemporaryFile("w+")
        with contextlib.suppress(OSError):
            self._process = subprocess.Popen([*query, "-lms", str(self._MS)], stdout=self._file)
            began = time.monotonic()
            while not os.fstat(self._file.fileno()).st_size and time.monotonic() - began < self._STARTS_WITHIN:
                time.sleep(0.01)
        return self

    def __exit__(self, *error):
        if self._process:
            self._process.terminate()
            self._process.wait()
        self._file.seek(0)
        number = lambda text: float(text) if text.strip().replace(".", "", 1).isdigit() else None
        names = [name for name, _ in self.FIELDS.values()]
        self.samples = [dict(zip(names, map(number, line.split(",")))) for line in self._file if line.endswith("\n")]
