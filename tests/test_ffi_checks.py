"""FFI handlers refuse what is not as the axis rule of their op says, before they look at any memory."""

from pathlib import Path

import jax
import pytest
from ffi_calls import TARGETS, survey
from host_cuda import library

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def handlers(tmp_path_factory):
    """All handlers without their kernels, for jax's CPU: their names begin with host_."""
    include = library.cuda_include()
    if not include:
        pytest.skip("needs g++ and the CUDA headers")
    found = library.targets(library.build_handlers(tmp_path_factory.mktemp("handlers"), include))
    for name, handler in found.items():
        jax.ffi.register_ffi_target(f"host_{name}", handler, platform="cpu")
    with jax.default_device(jax.devices("cpu")[0]):
        yield found


def test_wrong_calls_are_refused(handlers):
    assert handlers.keys() == set(TARGETS)
    found = [survey(target, f"host_{target}") for target in TARGETS]
    accepted = [what for each in found for what in each["accepted"]]
    assert not accepted, "\n".join([f"{len(accepted)} of {sum(each['calls'] for each in found)}", *accepted])
    for each in found:  # they get as far as their launch
        assert all("UNIMPLEMENTED" in said or "no GPU" in said for said in each["right"]), each
