"""PEP 517 backend: scikit-build-core, with the build requirements that this machine lacks.

Where neither a GPU nor nvcc 13 is, or with TE_JAX_BUILD_CUDA=0, te_jax is pure Python: neither CMake nor a compiler is
needed then.
"""

import os
import shlex
import shutil
import sys
import sysconfig
from pathlib import Path

from scikit_build_core import build as _build

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "cmake"))
import locate

build_sdist = _build.build_sdist
get_requires_for_build_sdist = _build.get_requires_for_build_sdist


def _settings(config_settings):
    settings = dict(config_settings or {})
    if not locate.builds_extension():
        return settings | {"wheel.cmake": "false", "wheel.py-api": "py3"}
    compiler = os.environ.get("CXX") or sysconfig.get_config_var("CXX") or "c++"  # as scikit-build-core chooses it
    if not shutil.which(shlex.split(compiler)[0]):
        raise SystemExit(
            f"te_jax: the CUDA extension needs a C++ compiler, and there is no {compiler}; install one (such as the "
            "package g++) or name it in CXX. TE_JAX_BUILD_CUDA=0 installs te_jax without its CUDA extension."
        )
    return settings


def _with_settings(hook):
    def call(directory, config_settings=None, *args):
        return hook(directory, _settings(config_settings), *args)

    return call


build_wheel = _with_settings(_build.build_wheel)
build_editable = _with_settings(_build.build_editable)
prepare_metadata_for_build_wheel = _with_settings(_build.prepare_metadata_for_build_wheel)
prepare_metadata_for_build_editable = _with_settings(_build.prepare_metadata_for_build_editable)


def get_requires_for_build_wheel(config_settings=None):
    return [*_build.get_requires_for_build_wheel(_settings(config_settings)), *locate.requirements()]


def get_requires_for_build_editable(config_settings=None):
    return [*_build.get_requires_for_build_editable(_settings(config_settings)), *locate.requirements()]
