"""`transformer_engine.jax.cpp_extensions.misc`."""

import os
from collections.abc import Callable
from typing import Any

import jax

from te_jax.compat import transformer_engine_jax
from te_jax.compat._absent import GetAttr, absent

__getattr__: GetAttr = absent("transformer_engine.jax.cpp_extensions")


def get_cudnn_version() -> tuple[int, int, int]:
    """(major, minor, patch) of `transformer_engine_jax.get_cudnn_version`."""
    version = transformer_engine_jax.get_cudnn_version()
    return version // 10000, version % 10000 // 100, version % 100


def get_xla_flag(flag: str, default: Any = None, cast: Callable[[str], Any] = str) -> Any:
    """The value of `flag` in the environment variable XLA_FLAGS, after `cast`; True for one without a value; `default`
    where it is not there."""
    for each in os.environ.get("XLA_FLAGS", "").split():
        name, equals, value = each.partition("=")
        if name == flag:
            return (cast(value) if cast else value) if equals else True
    return default


def get_all_device_compute_capability() -> tuple[int, ...]:
    """Ten times the compute capability of each local device, 0 of one that is no NVIDIA GPU."""
    return tuple(map(transformer_engine_jax.get_device_compute_capability, range(jax.local_device_count())))


def get_min_device_compute_capability() -> int:
    """The smallest of `get_all_device_compute_capability`."""
    return min(get_all_device_compute_capability())
