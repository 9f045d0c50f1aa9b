"""`python -m te_jax` and the loading of the extension: every reason names what is wrong and what to do."""

import json
import os
import pathlib
import re
import subprocess
import sys
import tomllib
import types

import jax
import pytest

from te_jax import __main__ as main
from te_jax.core import extension, versions

ROOT = pathlib.Path(__file__).resolve().parents[2]
VERSIONS = {"architectures": "80-real,90a-real", "cudart": 13000, "driver": 13000, "cublaslt": 130100, "cudnn": 91900}


def run(*args):
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, *args]
    return subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout


@pytest.fixture
def stand_in(monkeypatch):
    """A stand-in for te_jax._cuda; what it answers can be changed through the returned dict."""
    for cached in (extension._import, extension._checked_module, extension._registered_module):
        cached.cache_clear()
    versions = dict(VERSIONS)
    registered = []
    module = types.SimpleNamespace(
        versions=lambda: versions,
        registrations=lambda: {"te_norm_fwd": {"execute": object()}},
        set_library_path=lambda soname, path: None,
    )
    monkeypatch.setattr(extension, "is_built", lambda: True)
    monkeypatch.setattr(extension.importlib, "import_module", lambda name: module)
    monkeypatch.setattr(extension, "jax_cuda_plugin", lambda: (13, "0.10.2"))
    monkeypatch.setattr(extension, "compute_capability", lambda: "9.0")
    monkeypatch.setattr(jax.ffi, "register_ffi_target", lambda name, *_, **__: registered.append(name))
    yield types.SimpleNamespace(module=module, versions=versions, registered=registered)
    for cached in (extension._import, extension._checked_module, extension._registered_module):
        cached.cache_clear()


def test_report_on_cpu():
    lines = dict(line.split(None, 1) for line in run("-m", "te_jax").splitlines() if line[:1].strip())
    assert lines["jax"].strip() == jax.__version__
    assert lines["lowering"] == "ops lower to plain JAX"
    assert lines["DelayedScaling"].startswith("yes")
    assert lines["Float8BlockScaling"].startswith("yes")
    assert lines["FixedScaling"].startswith("yes") and lines["MXFP8BlockScaling"].startswith("yes")
    assert "jax[cuda13]" in lines["fused"]


def test_report_as_json():
    found = json.loads(run("-m", "te_jax", "--json"))
    assert found["versions"]["jaxlib"] == versions.installed_version("jaxlib")
    assert found["device"]["platform"] == "cpu"
    assert not found["features"]["fused attention"]["available"]


def test_import_touches_neither_extension_nor_devices():
    code = (
        "import sys, jax, te_jax, te_jax.core.extension\n"
        "assert 'te_jax._cuda' not in sys.modules\n"
        "jax.config.update('jax_num_cpu_devices', 3)  # refused once a backend is up\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    subprocess.run([sys.executable, "-c", code], check=True, env={**environment, "JAX_PLATFORMS": "cpu"})


def test_load_when_usable(stand_in):
    assert extension.load() is stand_in.module
    status = extension.status()
    assert status.loads and status.built and not status.reason and not status.attention
    assert (status.cuda, status.cudnn) == (13000, 91900)
    assert status.architectures == ("80-real", "90a-real")


def test_not_built(stand_in, monkeypatch):
    monkeypatch.setattr(extension, "is_built", lambda: False)
    with pytest.raises(RuntimeError, match="installed without its CUDA extension.*TE_JAX_BUILD_CUDA=1"):
        extension.load()
    assert not extension.status().built and extension.status().attention


def test_import_error(stand_in, monkeypatch):
    def refuse(name):
        raise ImportError("undefined symbol: x")

    monkeypatch.setattr(extension.importlib, "import_module", refuse)
    with pytest.raises(RuntimeError, match="undefined symbol: x.*Re-install"):
        extension.load()
    assert extension.status().built and not extension.status().loads


def test_jax_of_another_cuda_major(stand_in, monkeypatch):
    monkeypatch.setattr(extension, "jax_cuda_plugin", lambda: (12, "0.10.2"))
    with pytest.raises(RuntimeError, match=r"built for CUDA 13.*jax-cuda12-plugin 0\.10\.2.*jax\[cuda13\]"):
        extension.load()


def test_old_driver(stand_in):
    stand_in.versions["driver"] = 12080
    with pytest.raises(RuntimeError, match=r"driver supports only CUDA 12\.8.*Update the driver"):
        extension.load()


def test_missing_cublaslt(stand_in):
    stand_in.versions |= {"cublaslt": None, "cublaslt_error": "cannot load libcublasLt.so.13"}
    with pytest.raises(RuntimeError, match="cannot load libcublasLt"):
        extension.load()


@pytest.mark.parametrize(
    ("capability", "reason"),
    [
        ("8.6", ""),
        ("9.0", ""),
        (
            "10.0",
            "built for 80-real, 90a-real, but this GPU has compute capability 10.0. Install .*TE_JAX_CUDA_ARCHS=all",
        ),
        ("7.5", "but this GPU has compute capability 7.5. te_jax has kernels only for 80-real, .*: JAX_PLATFORMS=cpu"),
    ],
)
def test_an_extension_without_kernels_for_this_gpu(stand_in, monkeypatch, capability, reason):
    monkeypatch.setattr(extension, "compute_capability", lambda: capability)
    assert bool(extension.status().reason) == bool(reason) and re.search(reason, extension.status().reason)
    if reason:
        extension.load()  # does not start jax's backends, as to ask for the GPU would
        monkeypatch.setattr(extension, "has_cuda_device", lambda: True)
        with pytest.raises(RuntimeError, match=reason):
            extension.require_for_lowering()


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        ({"cudnn": 90400}, r"cuDNN is 9\.4\.0, fused attention needs 9\.15\.1"),
        ({"cudnn": None, "cudnn_error": "cannot load libcudnn.so.9"}, "cannot load libcudnn"),
    ],
)
def test_without_a_new_cudnn_only_attention_is_missing(stand_in, found, reason):
    stand_in.versions |= found
    assert extension.load() is stand_in.module
    assert re.search(reason, extension.status().attention)


def test_lowering_registers_once_and_only_with_a_cuda_device(stand_in, monkeypatch):
    monkeypatch.setattr(extension, "has_cuda_device", lambda: False)
    assert extension.require_for_lowering() is None
    assert stand_in.registered == []
    monkeypatch.setattr(extension, "has_cuda_device", lambda: True)
    assert extension.require_for_lowering() is extension.require_for_lowering() is stand_in.module
    assert stand_in.registered == ["te_norm_fwd"]


def test_lowering_on_a_cuda_device_refuses_an_unusable_extension(stand_in, monkeypatch):
    monkeypatch.setattr(extension, "has_cuda_device", lambda: True)
    stand_in.versions["driver"] = 12080
    with pytest.raises(RuntimeError, match="Update the driver"):
        extension.require_for_lowering()
    assert stand_in.registered == []


@pytest.mark.parametrize(
    ("capability", "fp8", "attention"),
    [("9.0", True, True), ("10.0", True, True), ("8.9", True, True), ("8.0", False, True), ("7.5", False, False)],
)
def test_features_by_compute_capability(capability, fp8, attention):
    found = main.features({"capability": capability}, True, extension.Status(True, True, ""), "580.65")
    assert found["DelayedScaling"]["available"] == found["FixedScaling"]["available"] == fp8
    assert found["fused attention"]["available"] == attention
    blocks = found["Float8BlockScaling"]
    assert blocks["available"] == (capability == "9.0")
    assert blocks["available"] or f"this GPU has {capability}: use recipe.Float8CurrentScaling" in blocks["detail"]
    mx = found["MXFP8BlockScaling"]
    assert mx["available"] == (capability == "10.0")
    assert mx["available"] or f"this GPU has {capability}: use recipe.Float8BlockScaling" in mx["detail"]
    if not fp8:
        assert f"this GPU has {capability}" in found["DelayedScaling"]["detail"]


def test_a_gpu_that_jax_does_not_use_is_named():
    found = main.features({"capability": None}, False, extension.Status(False, False, "not built"), "580.65")
    assert "pip install -U 'jax[cuda13]'" in found["fused attention"]["detail"]


TOLD = """
import importlib.metadata, sys, warnings
found = importlib.metadata.version
importlib.metadata.version = lambda name: sys.argv[1] if name == "flax" else found(name)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import te_jax, te_jax.flax, te_jax.nnx
print(*(str(each.message) for each in caught if str(each.message).startswith("te_jax")), sep="\\n")
"""


def test_a_version_beyond_the_newest_tested_is_told_once():
    newest = versions.NEWEST_TESTED["flax"]
    told = run("-c", TOLD, "99.0").splitlines()
    assert len(told) == 1
    assert told[0].startswith(f"te_jax: flax is 99.0, newer than {newest}, ") and f"flax=={newest}" in told[0]
    assert run("-c", TOLD, newest).split() == []


@pytest.mark.parametrize(
    ("package", "version", "beyond"),
    [("jax", "0.10.2", False), ("jax", "0.12.0.1", False), ("jax", "0.12.0.2", True), ("jax", "0.12.1.dev3", True),
     ("jax", "0.100", True), ("flax", "0.9.9", False), ("flax", "1.0rc1", True), ("flax", None, False),
     ("jaxlib", "99", False)],
)  # fmt: skip
def test_which_versions_are_beyond(package, version, beyond):
    assert bool(versions.reason_untested(package, version)) == beyond


def test_supported_versions_are_said_alike():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    oldest = dict(found.groups() for text in project["dependencies"] if (found := re.match(r"(\w+)>=([\d.]+)$", text)))
    said = (ROOT / "README.md").read_text()
    for package, newest in versions.NEWEST_TESTED.items():
        assert f"{package.replace('flax', 'Flax')} {oldest[package]} to {newest}" in said
