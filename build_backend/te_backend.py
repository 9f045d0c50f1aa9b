"""PEP 517 backend: scikit-build-core, with the build requirements that this machine lacks.

Where neither a GPU nor nvcc 13 is, or with TE_JAX_BUILD_CUDA=0, te_jax is pure Python: neither CMake nor a compiler is
needed then.
"""

import sys
from pathlib import Path

from scikit_build_core import build as _build

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "cmake"))
import locate

build_sdist = _build.build_sdist
get_requires_for_build_sdist = _build.get_requires_for_build_sdist


def _settings(config_settings):
    settings = dict(config_settings or {})
    if not locate.builds_extension():
        settings |= {"wheel.cmake": "false", "wheel.py-api": "py3"}
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
