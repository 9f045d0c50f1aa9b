"""The GPU's tests of the simpler kernels, on the CPU: their sources compiled as C++, see host_cuda/host_cuda.h."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from host_cuda import library

pytestmark = pytest.mark.sources
ROOT = Path(__file__).resolve().parents[2]
_NAMES = (
    "cuda_ssm cuda_gated_delta cuda_gated_norm cuda_ops cuda_block recipe_block cuda_rope permute peers grouped paired "
    "router router_extremes cuda_c_api"
)
FILES = [str(path) for name in _NAMES.split() for path in (ROOT / "tests").glob(f"*/test_{name}.py")]
# Large sizes show what a GPU does at speed; here they would only take long. A kernel of activations is compiled for a
# dtype and one or two slots, the function is an argument: with bf16 all are run, else one of each number of slots.
SELECTION = (
    "(c_api and not (gemm or norm or rms or block or gelu)) or not c_api and "
    "(cuda_ssm or cuda_gated_delta or cuda_gated_norm or amax_alone or quantize or stacked or activation or rope or "
    "scale_update or permute or (router and (8-2 or experts or counts[17] or extreme_logits[))) "
    "and not (8192 or 4099 or 65536 or 12288 or large) and not (test_chosen_results and e5m2) "
    "and not ((amax_alone or test_activation and (-float16 or -float32)) "
    "and not ([gelu-bfloat16 or [gelu-float or [quantize- or silu-linear))"
)


@pytest.fixture
def cuda_include() -> str:
    return library.cuda_include() or pytest.skip("needs g++ and the CUDA headers")


def run_tests(kernels: Path, selection: str, *options: str, files=FILES) -> subprocess.CompletedProcess:
    """The GPU's tests with these kernels as the CPU's; a process of its own, for they stay registered."""
    command = [sys.executable, "-m", "pytest", "-q", *options, "-p", "no:cacheprovider", "-k", selection,
               "--timeout", "0", "--host-kernels", str(kernels), *files]  # fmt: skip
    env = os.environ | {"JAX_PLATFORMS": "cpu"}  # on a machine with a GPU too
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env)


@pytest.mark.timeout(1800)
def test_kernels_on_the_cpu(tmp_path, cuda_include):
    done = run_tests(library.build(tmp_path, cuda_include), SELECTION, "-x")
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert int(done.stdout.rsplit(" passed", 1)[0].rsplit(maxsplit=1)[-1]) > 200


def test_a_missing_barrier_is_seen(tmp_path, monkeypatch, cuda_include):
    """What the harness is for: without the barrier behind the table of sines RoPE reads what is not there yet."""
    monkeypatch.setattr(library, "SOURCES", ("rope",))
    monkeypatch.setattr(library, "C_API", ())
    kept = library.as_cpp
    monkeypatch.setattr(library, "as_cpp", lambda *source: kept(*source).replace("__syncthreads();", ""))
    of_rope = [name for name in FILES if "rope" in name]
    done = run_tests(library.build(tmp_path, cuda_include), "rope and 199", files=of_rope)
    assert "12 failed" in done.stdout, done.stdout[-3000:]
