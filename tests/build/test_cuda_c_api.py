"""On the GPU: every op of the C interface against the FFI call that jax makes of it, bit for bit; and by host_cuda's
library on the CPU, as far as that has kernels."""

import ctypes
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from c_calls import ALIGNED, CASES, INCLUDE, arguments, results, workspace_bytes
from ffi_calls import recorded

from te_jax import c_api
from te_jax.core import extension
from te_jax.core.op import ops

pytestmark = pytest.mark.gpu
SHARES = 16  # csrc/base/finish.cu: threads that share a column of partial sums


@pytest.fixture(scope="module")
def lib(request) -> c_api.Library:
    if host := request.config.getoption("--host-kernels"):
        return c_api.Library(host, str(INCLUDE))
    extension.require_for_lowering()
    return c_api.load_library()


def wait():
    """For what the default stream of the GPU was given."""
    if jax.default_backend() == "gpu":
        assert ctypes.CDLL("libcuda.so.1").cuCtxSynchronize() == 0


def buffer(like, value=0):
    """An array that is written behind jax's back."""
    return jax.block_until_ready(jax.device_put(np.full(like.shape, value, like.dtype)))


def filled(rng, name, like):
    """Random numbers for an operand; of offsets and counts, those of groups of at most 128 rows with a tail behind."""
    if name in ("offsets", "counts"):
        groups = 128 * np.arange(*like.shape) if name == "offsets" else rng.integers(0, 129, like.shape)
        return jax.device_put(groups.astype(np.int32))
    is_scale = "scale" in name or name.endswith("_inv") or name == "rstd"
    values = rng.uniform(0.5, 2.0, like.shape) if is_scale else rng.standard_normal(like.shape)
    return jax.device_put(np.asarray(values, np.float32).astype(like.dtype))


def by_c(lib, call, operands):
    """{name: result} of the C interface."""
    arrays = operands | {name: buffer(like) for name, like in results(call).items()}
    op, args = arguments(lib, call, lambda name: arrays[name].unsafe_buffer_pointer())
    needed = lib.workspace(op, **args)
    assert needed == workspace_bytes(call)
    space = buffer(jax.ShapeDtypeStruct((needed + ALIGNED,), jnp.uint8), 255)  # NaN, to whom nothing was written
    lib.call(op, None, -(-space.unsafe_buffer_pointer() // ALIGNED) * ALIGNED, needed, **args)
    wait()
    return {name: np.asarray(arrays[name]) for name in results(call)}


def by_jax(call, operands):
    """{name: result} of the FFI call, partial results among them."""
    absent = {name: jnp.zeros((0,), jnp.float32) for name in call.operands.keys() - operands.keys()}
    given = [(operands | absent)[name] for name in call.operands]
    run = jax.jit(lambda *operands: call.ffi_call(call.target)(*operands, **call.attrs))
    return {name: np.asarray(a) for name, a in zip(call.results, run(*given), strict=True)}


def check(name, got, raw, combine):
    """A result of partial results: a maximum in its bits; each term of a sum meets ceil(parts / SHARES) + SHARES
    additions in f32, and the sum is rounded to its type."""
    if combine == "max":
        np.testing.assert_array_equal(got.view(np.uint32), raw.view(np.uint32).max(initial=0), name)
    else:
        wide, additions = raw.astype(np.float64), -(-len(raw) // SHARES) + SHARES
        bound = additions * 2.0**-24 * np.abs(wide).sum(0) * 1.001
        bound += (np.abs(wide.sum(0)) + bound) * float(jnp.finfo(got.dtype).eps) / 2
        exact, got = wide.sum(0), got.astype(np.float64)
        finite = np.isfinite(exact)
        np.testing.assert_array_equal(got[~finite], exact[~finite], name)
        assert (np.abs(got[finite] - exact[finite]) <= bound[finite]).all(), name


def compare(lib, case, rng, change=lambda operands: operands):
    call = recorded(case)
    operands = {n: filled(rng, n, like) for n, like in call.operands.items() if like.shape != (0,)}
    operands = jax.block_until_ready(change(operands))
    got, want = by_c(lib, call, operands), by_jax(call, operands)
    if call.target == "te_gemm_grouped":  # behind the last group nothing is written
        got, want = ({name: a[: int(operands["offsets"][-1])] for name, a in each.items()} for each in (got, want))
    op = ops[call.target]
    for name, result in got.items():
        np.testing.assert_array_equal(*(np.atleast_1d(a).view(np.uint8) for a in (result, want[name])), name)
        if name in op.partials:
            check(name, result, want[f"{name}_partials"], op.combine[name])


# More rows of tiles than SHARES, of which the last is cut, and several columns.
SEVERAL = {"m...0": 65, "m...1": 70, "n...0": 1, "n...1": 67, "...0": 65, "...1": 70, "h": 200, "f": 72}
TILED = [
    replace(case, name=f"{case}_tiled", sizes={axis: SEVERAL.get(axis, n) for axis, n in case.sizes.items()})
    for case in CASES
    if not case.op.startswith("te_gemm") and "block" not in case.op
]


@pytest.mark.parametrize("case", [*CASES, *TILED], ids=str)
def test_results_are_those_of_jax(case, lib, rng):
    compare(lib, case, rng)


@pytest.mark.parametrize("bad", [np.inf, np.nan], ids=str)
def test_an_amax_is_not_finite_where_x_is_not(bad, lib, rng):
    compare(lib, TILED[0], rng, lambda operands: operands | {"x": operands["x"].at[-1, 3, 0, 7].set(bad)})
