"""Programs that run a kernel of Hopper on the CPU, with threads of cluster.h."""

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from . import library

_SHARED = "extern __shared__ __align__(1024) uint8_t shared[];"
_KERNELS = (
    "delta/delta_bwd_chunks_hopper.cuh",
    "delta/delta_bwd_hopper.cuh",
    "delta/delta_halves.cuh",
    "delta/delta_hopper.cuh",
    "gemm/gemm_grouped.cuh",
    "ssm/scan_hopper.cuh",
    "ssm/scan_bwd_hopper_chunks.cuh",
    "ssm/scan_bwd_hopper_states.cuh",
)


def compiled(folder: Path, name: str) -> Path:
    """The program of <name>.cc."""
    include = library.cuda_include()
    if not include:
        pytest.skip("needs g++ and the CUDA headers")
    for tree in (library.CSRC, library.HERE):
        shutil.copytree(tree, folder, dirs_exist_ok=True)
    for kernel in (folder / each for each in _KERNELS):
        text = kernel.read_text()
        assert _SHARED in text, kernel
        kernel.write_text(text.replace(_SHARED, "uint8_t* shared = ::cluster::Mine().shared();"))
    command = ["g++", "-std=c++20", "-O1", "-w", "-U_FORTIFY_SOURCE", f"-I{folder}", f"-isystem{include}"]
    subprocess.run([*command, folder / f"{name}.cc", "-o", folder / name], check=True)
    return folder / name


def call(program: Path, numbers: list[int], arrays: list[np.ndarray | None]) -> bytes:
    """What the program writes, of numbers and of arrays, each behind the number of its bytes."""
    raw = [b"" if a is None else np.ascontiguousarray(a).tobytes() for a in arrays]
    blob = np.array(numbers, np.int32).tobytes() + b"".join(np.int64(len(a)).tobytes() + a for a in raw)
    done = subprocess.run([program], input=blob, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout
