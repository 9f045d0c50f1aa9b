"""What a result was measured on: devices, driver, versions, command line, date; clock and power as it ran."""

import contextlib
import ctypes
import datetime
import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field

import jax

import te_jax
from te_jax.core import extension

_PACKAGES = "jax jaxlib flax jax-cuda13-plugin nvidia-cublas nvidia-cudnn-cu13 nvidia-cuda-runtime torch triton"
_LIBRARIES = ("cuda", "cublaslt", "cudnn")


def describe() -> dict:
    device, status = jax.devices()[0], extension.status()
    installed = {"extension": status.loads} | {key: getattr(status, key) for key in ("reason", *_LIBRARIES)}
    found = {each.name: each.version for each in importlib.metadata.distributions()}
    return {
        "device": device.device_kind,
        "devices": jax.device_count(),
        "compute_capability": getattr(device, "compute_capability", None),
        "driver": _driver(),
        "te_jax": {"version": te_jax.__version__, **installed},
        "packages": {name: found[name] for name in _PACKAGES.split() if name in found},
        "python": platform.python_version(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", "-m", __package__, *_without_out(sys.argv[1:])]),
    }


def _without_out(words: list[str]) -> list[str]:
    """Words of a command line without where its result goes."""
    return [
        word
        for before, word in zip(["", *words], words)
        if "--out" not in (before, word) and not word.startswith("--out=")
    ]


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


def _visible_gpu() -> str:
    """The first visible GPU. nvidia-smi and NVML count all GPUs of the host, or take names: CUDA_VISIBLE_DEVICES has
    either."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0] or "0"


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
        query = [
            "nvidia-smi",
            "-i",
            _visible_gpu(),
            f"--query-gpu={','.join(self.FIELDS)}",
            "--format=csv,noheader,nounits",
        ]
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


@dataclass
class Draw:
    """What a GPU drew over some spans of time, which add up: joules, seconds, and the clocks seen."""

    joules: float = 0.0
    seconds: float = 0.0
    clocks: list[int] = field(default_factory=list)  # MHz

    def row(self) -> dict[str, float]:
        """The mean power in W and the mean clock in MHz; nothing where they are not known."""
        power = {"power": self.joules / self.seconds} if self.joules else {}
        return power | ({"sm_clock": sum(self.clocks) / len(self.clocks)} if self.clocks else {})


class Meter:
    """Energy and clock of the first visible GPU, by NVIDIA's management library (NVML); nothing where there is none."""

    _SM_CLOCK = 1  # nvmlClockType_t
    _EVERY_S = 0.01

    def __init__(self):
        self._gpu, self._nvml, name = ctypes.c_void_p(), None, _visible_gpu()
        with contextlib.suppress(OSError):
            nvml = ctypes.CDLL("libnvidia-ml.so.1")
            found = nvml.nvmlInit_v2()
            if not found and name.isdigit():
                found = nvml.nvmlDeviceGetHandleByIndex_v2(int(name), ctypes.byref(self._gpu))
            elif not found:
                found = nvml.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(self._gpu))
            self._nvml = None if found else nvml

    def _joules(self) -> float:
        """Since the driver was loaded."""
        millijoules = ctypes.c_ulonglong()
        self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._gpu, ctypes.byref(millijoules))
        return millijoules.value / 1e3

    def _clock(self) -> int | None:
        clock = ctypes.c_uint()
        failed = self._nvml.nvmlDeviceGetClockInfo(self._gpu, self._SM_CLOCK, ctypes.byref(clock))
        return None if failed else clock.value

    def _sample(self, draw: Draw, end: threading.Event):
        """The counter moves by some tenths of a second: what counts is from its first move to its last one."""
        seen, moves = self._joules(), []
        while not end.wait(self._EVERY_S):
            if (clock := self._clock()) is not None:
                draw.clocks.append(clock)
            if (joules := self._joules()) != seen:
                seen = joules
                moves.append((time.perf_counter(), joules))
        if len(moves) > 1:
            draw.seconds += moves[-1][0] - moves[0][0]
            draw.joules += moves[-1][1] - moves[0][1]

    @contextlib.contextmanager
    def onto(self, draw: Draw):
        """Adds to `draw` what the GPU draws within the block, from the first to the last update of the driver's
        counter: nothing where the block has fewer than two."""
        if self._nvml is None:
            yield
            return
        end = threading.Event()
        sampler = threading.Thread(target=self._sample, args=(draw, end))
        sampler.start()
        try:
            yield
        finally:
            end.set()
            sampler.join()
