"""The build: what locate.py finds, what the backend asks for, what is inside the extension."""

import importlib.util
import os
import pathlib
import re
import shutil
import stat
import subprocess
import sys
import types

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
EXTENSION = importlib.util.find_spec("te_jax._cuda")
HANDLER = re.compile(r"^TE_HANDLER(_INIT)?\(\s*(\w+)", re.MULTILINE)

built = pytest.mark.skipif(EXTENSION is None, reason="te_jax was installed without its CUDA extension")


def load_module(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def locate(monkeypatch):
    """cmake/locate.py in an environment without CUDA."""
    module = load_module(ROOT / "cmake" / "locate.py")
    for name in ("CUDACXX", "CUDA_HOME", "CUDA_PATH", "TE_JAX_BUILD_CUDA", "TE_JAX_CUDA_ARCHS", *module.HEADERS):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(module, "cuda_driver", lambda: None)
    monkeypatch.setattr(module.shutil, "which", lambda name: None)
    monkeypatch.setattr(module, "site_folders", list)
    real_isfile = os.path.isfile
    monkeypatch.setattr(
        module.os.path,
        "isfile",
        lambda path: real_isfile(path) and not str(path).startswith("/usr/local/cuda"),
    )
    return module


def fake_nvcc(folder, release):
    nvcc = folder / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V{release}.0'\n")
    nvcc.chmod(nvcc.stat().st_mode | stat.S_IXUSR)
    return str(nvcc)


def test_no_nvcc_no_extension(locate):
    assert locate.find_nvcc() is None
    assert locate.locate() == {}
    assert not locate.builds_extension()
    assert locate.requirements() == []


@pytest.mark.parametrize(("release", "taken"), [("12.9", False), ("13.0", True), ("13.4", True), ("14.0", False)])
def test_nvcc_of_another_cuda_major_is_not_taken(locate, monkeypatch, tmp_path, release, taken):
    nvcc = fake_nvcc(tmp_path, release)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert locate.find_nvcc() == (nvcc if taken else None)


@pytest.mark.parametrize(("release", "taken"), [("12.8", False), ("12.9", True), ("13.0", False)])
def test_a_build_for_cuda_12_takes_nvcc_and_headers_of_12_9(locate, monkeypatch, tmp_path, release, taken):
    nvcc = fake_nvcc(tmp_path, release)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setenv("TE_JAX_BUILD_CUDA", "12")
    assert locate.find_nvcc() == (nvcc if taken else None)
    if taken:
        wheels = " ".join(locate.requirements())
        assert "nvidia-cublas-cu12" in wheels and "nvidia-cudnn-cu12" in wheels and "cu13" not in wheels
    else:
        with pytest.raises(SystemExit, match="no nvcc 12.9.*CUDA_HOME.*TE_JAX_BUILD_CUDA=1"):
            locate.requirements()


def test_wheels_are_asked_for_where_nvcc_or_headers_are_missing(locate, monkeypatch, tmp_path):
    monkeypatch.setenv("TE_JAX_BUILD_CUDA", "1")
    assert locate.requirements()[: len(locate.NVCC_WHEELS)] == locate.NVCC_WHEELS
    fake_nvcc(tmp_path, "13.0")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    (tmp_path / "cudnn_frontend.h").touch()
    monkeypatch.setenv("CUDNN_FRONTEND_INCLUDE", str(tmp_path))
    wheels = locate.requirements()
    assert not set(locate.NVCC_WHEELS) & set(wheels)
    assert not any("frontend" in wheel for wheel in wheels)
    monkeypatch.setenv("TE_JAX_BUILD_CUDA", "0")
    assert locate.requirements() == []


def fake_driver(*capabilities):
    """What cmake/locate.py asks of libcuda, as a driver with these GPUs answers."""

    def get_count(count):
        count._obj.value = len(capabilities)
        return 0

    def get_attribute(value, attribute, device):
        value._obj.value = capabilities[device][{75: 0, 76: 1}[attribute]]
        return 0

    return types.SimpleNamespace(cuDeviceGetCount=get_count, cuDeviceGetAttribute=get_attribute)


@pytest.mark.parametrize(
    ("capabilities", "compiled"),
    [
        ([(9, 0), (9, 0)], ["90a-real"]),
        ([(8, 6), (9, 0)], ["80-real", "90a-real"]),
        ([(8, 9)], ["89-real"]),
        ([(10, 3)], ["100f-real"]),
        ([(13, 0)], ["120-virtual"]),
        ([(7, 5)], []),  # no kernels for it: as without a GPU
    ],
)
def test_a_gpu_has_its_own_architecture_built_and_no_other(locate, monkeypatch, capabilities, compiled):
    monkeypatch.setattr(locate, "cuda_driver", lambda: fake_driver(*capabilities))
    assert locate.gpu_architectures() == compiled
    assert locate.architectures() == (compiled or [*locate.archs.ALL])
    assert locate.builds_extension() == bool(compiled), "no nvcc is needed: wheels have it"
    assert locate.requirements()[:1] == (locate.NVCC_WHEELS[:1] if compiled else [])


@pytest.mark.parametrize(
    ("asked", "built"), [("90a-real", 1), ("80-real;90a-real", 2), ("89-real,80-real", 2), ("all", 6)]
)
def test_architectures_that_are_asked_for(locate, monkeypatch, asked, built):
    monkeypatch.setattr(locate, "cuda_driver", lambda: fake_driver((12, 0)))
    monkeypatch.setenv("TE_JAX_CUDA_ARCHS", asked)
    assert len(locate.architectures()) == built
    assert set(locate.architectures()) <= set(locate.archs.ALL)


def make(*arguments, folder):
    """What `make -n` would run, in a virtual environment that is not there yet."""
    environment = {"PATH": os.environ["PATH"]}  # a make around this test exports its own variables
    command = ["make", "-n", f"PYTHON={sys.executable}", f"VENV={folder / 'venv'}", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT, env=environment).stdout


@pytest.mark.skipif(shutil.which("make") is None, reason="no make")
def test_make_compiles_nothing_without_a_gpu_unless_asked(tmp_path):
    # Also where nvcc 13 is.
    plain = make("test", "GPU=", folder=tmp_path)
    assert ".installed-pure" in plain and "locate.py --requires" not in plain and "1/2" in plain and "2/2" in plain
    asked = make("test", "GPU=", "CUDA=1", "TE_JAX_CUDA_ARCHS=90a-real", folder=tmp_path)
    assert ".installed-90a-real\n" in asked and "locate.py --requires" in asked and "3/3" in asked
    with_gpu = make("train", "GPU=80-real 90a-real", folder=tmp_path)
    assert ".installed-80-real+90a-real\n" in with_gpu and "examples test cuda13 " in with_gpu
    assert ".installed-pure" in make("test", "GPU=90a-real", "CUDA=0", folder=tmp_path)


def test_wheels_are_not_begun_for_a_python_that_is_not_there(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "path", [str(ROOT / "cmake"), *sys.path])
    wheels = load_module(ROOT / "cmake" / "wheels.py")
    monkeypatch.setattr(wheels, "FOLDER", tmp_path / "wheels")
    monkeypatch.setattr(wheels, "tools", lambda python: pytest.fail("begun"))
    broken = tmp_path / "python3.12"  # such as a shim without a version behind it
    broken.write_text("#!/bin/sh\nexit 127\n")
    broken.chmod(0o755)
    for python in (str(broken), str(tmp_path / "none")):
        with pytest.raises(SystemExit, match=f"{python} does not run pip.*\\n.*PYTHONS="):
            wheels.main(str(tmp_path / "dist"), sys.executable, python)


def test_wheels_for_another_platform_are_not_begun_without_the_stable_abi(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "path", [str(ROOT / "cmake"), *sys.path])
    wheels = load_module(ROOT / "cmake" / "wheels.py")
    monkeypatch.setattr(wheels, "FOLDER", tmp_path / "wheels")
    monkeypatch.setattr(wheels, "said", lambda *command: str(command[2] != "pip"))
    with pytest.raises(SystemExit, match="wheels for aarch64 are of the stable ABI, and python3.11 is older than 3.12"):
        wheels.main(str(tmp_path / "dist"), "python3.11", platform="aarch64")


def test_sums_of_wheels_are_what_sha256sum_checks(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "path", [str(ROOT / "cmake"), *sys.path])
    wheels = load_module(ROOT / "cmake" / "wheels.py")
    for name in ("b.whl", "a.whl"):
        (tmp_path / name).write_text(name)
    (tmp_path / "SHA256SUMS").write_text(wheels.sums(tmp_path))
    checked = subprocess.run(["sha256sum", "--check", "SHA256SUMS"], cwd=tmp_path, capture_output=True, text=True)
    assert checked.stdout.split() == ["a.whl:", "OK", "b.whl:", "OK"]


def test_unknown_build_mode(locate, monkeypatch):
    monkeypatch.setenv("TE_JAX_BUILD_CUDA", "yes")
    with pytest.raises(SystemExit, match="TE_JAX_BUILD_CUDA is 'yes'"):
        locate.requirements()


def test_without_the_extension_the_backend_needs_no_cmake(monkeypatch):
    pytest.importorskip("scikit_build_core")
    monkeypatch.setenv("TE_JAX_BUILD_CUDA", "0")
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "path", [*sys.path])
    backend = load_module(ROOT / "build_backend" / "te_backend.py")
    assert backend.get_requires_for_build_wheel() == []


def test_the_backend_asks_for_a_compiler_that_is_not_there(monkeypatch):
    pytest.importorskip("scikit_build_core")
    monkeypatch.setenv("TE_JAX_BUILD_CUDA", "1")
    monkeypatch.setenv("CXX", "no-such-compiler -O2")
    monkeypatch.setattr(sys, "path", [*sys.path])
    backend = load_module(ROOT / "build_backend" / "te_backend.py")
    with pytest.raises(SystemExit, match="there is no no-such-compiler -O2; install one .* TE_JAX_BUILD_CUDA=0"):
        backend.get_requires_for_build_wheel()


def test_ffi_headers_are_those_of_the_oldest_jaxlib():
    # A runtime refuses a handler with a newer minor version of the API than its own.
    header = (ROOT / "third_party/xla_ffi/xla/ffi/api/c_api.h").read_text()
    assert re.findall(r"#define XLA_FFI_API_M\w+ (\d+)", header) == ["0", "3"]


def declared_handlers():
    """{name: has an initialize stage} as the sources declare them."""
    sources = [*ROOT.glob("csrc/*/*.cu"), *ROOT.glob("csrc/*/*.cc")]
    found = [match for source in sources for match in HANDLER.findall(source.read_text())]
    assert len({name for _, name in found}) == len(found), "two handlers of one name"
    return {name: bool(init) for init, name in found}


@built
def test_every_declared_handler_is_registered():
    # In a fresh process, without jax: the module needs no driver, no CUDA library and no jax to import.
    code = (
        "import importlib.util, sys\n"
        "spec = importlib.util.spec_from_file_location('te_jax._cuda', sys.argv[1])\n"
        "module = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(module)\n"
        "for name, stages in module.registrations().items(): print(name, *sorted(stages))\n"
        "print(*module.ffi_api_version())\n"
    )
    command = [sys.executable, "-c", code, EXTENSION.origin]
    *lines, version = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    registered = {name: "initialize" in stages for name, *stages in map(str.split, lines)}
    assert registered == declared_handlers()
    assert all(name.startswith("te_") for name in registered)
    assert version == "0 3"


@built
@pytest.mark.skipif(shutil.which("readelf") is None, reason="no readelf")
@pytest.mark.parametrize(
    ("library", "seen"),
    [("_cuda", r"PyInit__cuda"), ("libte_jax.so", r"te_jax_\w+@@TE_JAX|_ZN2te\w+@@TE_JAX_PRIVATE|TE_JAX(_PRIVATE)?")],
)
def test_no_cuda_library_is_linked_and_few_symbols_are_visible(library, seen):
    extension = pathlib.Path(EXTENSION.origin)
    path = extension if library == "_cuda" else extension.parent / library
    command = ["readelf", "--wide", "--dynamic", "--dyn-syms", str(path)]
    dynamic = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    needed = re.findall(r"\(NEEDED\).*\[(.+)\]", dynamic)
    assert not [name for name in needed if re.search("cu|nv", name)], needed
    assert ("libte_jax.so" in needed) == (library == "_cuda")
    visible = re.findall(r"(?:GLOBAL|WEAK|UNIQUE) +DEFAULT +(?:ABS|\d+) (\S+)", dynamic)
    assert visible and not [name for name in visible if not re.fullmatch(seen, name)]
