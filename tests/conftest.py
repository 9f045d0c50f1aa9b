"""Set before jax is imported: 8 host devices, so that every sharding test runs on one machine."""

import contextlib
import gc
import importlib.metadata
import importlib.util
import math
import os
import platform

# Before numpy is imported: the oracles' many small products took ten times as long on threads that wait for each other
# and for the other workers.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np
import pytest

_FLAGS = "--xla_force_host_platform_device_count=8"
if platform.machine() == "x86_64":
    _FLAGS += " --xla_cpu_max_isa=AVX2"  # With AVX-512 sums have another order, and pages print other figures.
# On a CPU the tests compile some thousand programs, each run once: not worth LLVM's optimizations, nor its cutting them
# in parts for several cores. Programs that a test starts take these flags where they are short, too.
QUICK = "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
if importlib.metadata.version("jaxlib") < "0.11":
    QUICK += " --xla_cpu_use_fusion_emitters=false"  # compiles in half the time; later XLA has no other way
_OURS = _FLAGS if importlib.util.find_spec("jax_cuda13_plugin") else f"{_FLAGS} {QUICK}"
_OUTSIDE = os.environ.get("XLA_FLAGS", "")
os.environ["XLA_FLAGS"] = f"{_OURS} {_OUTSIDE}".strip()

import jax  # noqa: E402

jax.devices("cpu")  # reads the flags; programs that a test starts optimize
os.environ["XLA_FLAGS"] = f"{_FLAGS} {_OUTSIDE}".strip()
jax.config.update("jax_default_matmul_precision", "highest")  # f32 means f32 on a GPU too, not TF32
# Tracing makes many objects, few of which are garbage: looking for it took a fifth of the time to trace and lower.
gc.freeze()
# What survives once is mostly a program or its trace, which stays: to look at it again took a second each time.
gc.set_threshold(100_000, 1000, 20)


def _no_gpu() -> str:
    """Why tests marked `gpu` cannot run here; "" if they can."""
    try:
        jax.devices("cuda")
    except RuntimeError as error:
        return f"needs an NVIDIA GPU: {error}"
    return ""


def pytest_sessionfinish():
    """pytest and Python look for garbage before a process ends, which took seconds among all its programs."""
    gc.freeze()


def pytest_addoption(parser):
    text = "run the GPU's tests of simple kernels on the CPU, with the library that tests/host_cuda built"
    parser.addoption("--host-kernels", metavar="LIBRARY", help=text)


# Begin first: one that began last would keep one worker busy while the other has nothing left.
_LONGEST = ("test_kernels_on_the_cpu", "test_python_blocks_run")


def pytest_collection_modifyitems(config, items):
    if library := config.getoption("--host-kernels"):
        from host_cuda import library as host

        # They declare the ops.
        from te_jax.ops import activation, grouped, norm, permute, quantize, rope, router, scale_update  # noqa: F401

        host.install(library)
        return
    items.sort(key=lambda item: getattr(item, "originalname", "") not in _LONGEST)
    if importlib.util.find_spec("te_jax._cuda") is None:
        _skip_sources(config, items)
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and (reason := _no_gpu()):
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=reason))


def _skip_sources(config, items):
    """Where the CUDA extension was not asked for, its sources are compiled only by the tests of named files."""
    named = {os.path.basename(arg.partition("::")[0]) for arg in config.args}
    skip = pytest.mark.skip(reason="compiles the CUDA sources for the CPU: make test CUDA=1, or name the file")
    for item in items:
        if item.get_closest_marker("sources") and item.path.name not in named:
            item.add_marker(skip)


def fp8_sum_error() -> float:
    """How far a sum of FP8 products may be off, relative to its largest term. Hopper's tensor cores align the products
    of a group to the largest and keep 13 bits behind it; elsewhere such sums are f32, of 2**7 terms in these tests."""
    return 2.0**-12 if jax.default_backend() == "gpu" else 2.0**-16


def division_error() -> float:
    """How far a scale may be off, relative to itself: XLA's division on a GPU is not rounded right."""
    return 2.0**-22 if jax.default_backend() == "gpu" else 0.0


@pytest.fixture(autouse=True)
def mesh_of_enough_devices(monkeypatch):
    """A mesh that is larger than the default backend (one GPU) is made of the 8 host devices, and so is one of a test
    `on_host`."""
    make_mesh = jax.make_mesh

    def of_enough(shape, *args, **kwargs):
        default = jax.config.jax_default_device
        if math.prod(shape) > jax.device_count() or (default is not None and default.platform == "cpu"):
            kwargs.setdefault("devices", jax.devices("cpu")[: math.prod(shape)])
        return make_mesh(shape, *args, **kwargs)

    monkeypatch.setattr(jax, "make_mesh", of_enough)


def optimized(fn):
    """`fn` compiled with all optimizations: where results of one program are compared bit for bit, which else computes
    them twice, in two ways."""
    return jax.jit(fn, compiler_options={"xla_backend_optimization_level": 3})


@pytest.fixture
def on_host():
    """Runs a test on CPU devices where there are fewer than 8 others: a mesh of them is compared with one of them."""
    with jax.default_device(jax.devices("cpu")[0] if jax.device_count() < 8 else None):
        yield


@pytest.fixture
def plain_jax():
    """Runs a test of an op's plain-JAX meaning, its zeros or f32 sums, where it is what the op lowers to: on a CPU."""
    with jax.default_device(jax.devices("cpu")[0]):
        yield


@pytest.fixture(autouse=True)
def small_layers_are_no_news(monkeypatch):
    """On a GPU nearly every layer of the tests is too small for FP8 to pay, and would say so."""
    monkeypatch.setattr("te_jax.layers.norm_mlp._PAYS_FROM", 0)


@pytest.fixture(autouse=True)
def refused_on_host(request):
    """Runs tests of MXFP8 and of block scaling, as their names say it, on a CPU device where the GPU has none."""
    from te_jax.ops.formats import ROWS_32, ROWS_128

    capability, name = getattr(jax.devices()[0], "compute_capability", None), request.node.nodeid.lower()
    formats = {"mx": ROWS_32, "block": ROWS_128}
    refused = capability and any(word in name and form.refuses(str(capability)) for word, form in formats.items())
    with jax.default_device(jax.devices("cpu")[0]) if refused else contextlib.nullcontext():
        yield


@pytest.fixture
def rng() -> np.random.Generator:
    """The same numbers in every run."""
    return np.random.default_rng(0)
