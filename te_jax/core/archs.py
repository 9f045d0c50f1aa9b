"""Architectures that the CUDA extension can be built for, and the GPUs that a build serves.

This file uses only the standard library: the build (cmake/locate.py) reads it before anything is installed.
"""

import re

# Names as in TE_JAX_CUDA_ARCHS. "-real" is machine code, "-virtual" is PTX that a driver compiles for later GPUs.
ALL = ("80-real", "89-real", "90a-real", "100f-real", "120f-real", "120-virtual")


def serves(arch: str, capability: tuple[int, int]) -> bool:
    """Whether code for `arch`, such as "90a-real", runs on a GPU of compute capability `capability`."""
    number, suffix, code = re.fullmatch(r"(\d+)([af]?)-(real|virtual)", arch).groups()
    least = divmod(int(number), 10)
    if suffix == "a":  # Such code runs only on this capability.
        return capability == least
    if code == "virtual" and not suffix:
        return capability >= least
    return capability >= least and capability[0] == least[0]


def best(capability: tuple[int, int]) -> str | None:
    """The architecture in ALL that suits a GPU of compute capability `capability` best; None if none serves it."""
    return next((arch for arch in sorted(ALL, key=_rank, reverse=True) if serves(arch, capability)), None)


def _rank(arch: str) -> tuple[bool, int]:
    """A sort key by which machine code is above PTX, and newer architectures above older ones."""
    return arch.endswith("-real"), int(re.match(r"\d+", arch)[0])
