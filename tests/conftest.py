"""Set before jax is imported: 8 host devices, so that every sharding test runs on one machine."""

import math
import os

import numpy as np
import pytest

_FLAG = "--xla_force_host_platform_device_count"
if _FLAG not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FLAG}=8".strip()

import jax  # noqa: E402


def _no_gpu() -> str:
    """Why tests marked `gpu` cannot run here; "" if they can."""
    try:
        jax.devices("cuda")
    except RuntimeError as error:
        return f"needs an NVIDIA GPU: {error}"
    return ""


def pytest_collection_modifyitems(items):
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and (reason := _no_gpu()):
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def mesh_of_enough_devices(monkeypatch):
    """A mesh that is larger than the default backend (one GPU) is made of the 8 host devices."""
    make_mesh = jax.make_mesh

    def of_enough(shape, *args, **kwargs):
        if math.prod(shape) > jax.device_count():
            kwargs.setdefault("devices", jax.devices("cpu")[: math.prod(shape)])
        return make_mesh(shape, *args, **kwargs)

    monkeypatch.setattr(jax, "make_mesh", of_enough)


@pytest.fixture
def rng() -> np.random.Generator:
    """The same numbers in every run."""
    return np.random.default_rng(0)
