"""Architectures of the CUDA extension: those it can be built for, and which GPUs a build serves.

Only the standard library: the build (cmake/locate.py) reads this file before anything is installed.
"""

import re

# As in TE_JAX_CUDA_ARCHS: "-real" is machine code, "-virtual" PTX that a driver compiles for later GPUs.
ALL = ("80-real", "89-real", "90a-real", "100f-real", "120f-real", "120-virtual")


def serves(arch: str, capability: tuple[int, int]) -> bool:
    """Whether code for `arch`, such as "90a-real", runs on a GPU of this compute capability."""
    number, suffix, code = re.fullmatch(r"(\d+)([af]?)-(real|virtual)", arch).groups()
    least = divmod(int(number), 10)
    if suffix == "a":  # of this very GPU
        return capability == least
    if code == "virtual" and not suffix:
        return capability >= least
    return capability >= least and capability[0] == least[0]


def best(capability: tuple[int, int]) -> str | None:
    """The architecture of ALL that suits such a GPU best; None if there is none."""
    return next((arch for arch in sorted(ALL, key=_rank, reverse=True) if serves(arch, capability)), None)


def _rank(arch: str) -> tuple[bool, int]:
    """Machine code before PTX, then the newest."""
    return arch.endswith("-real"), int(re.match(r"\d+", arch)[0])
