"""The gated delta rule's walk on Hopper on the CPU: whole calls with threads, copies and products that come in any
order that the kernel allows (host_cuda/cluster.h), against one token after the other in float64. What it needs of
chunks is made here, in float64, as csrc/delta/delta.cuh says."""

import delta_oracle as oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from host_cuda import program

pytestmark = pytest.mark.sources
bf16, f32 = jnp.bfloat16, np.float32
CHUNK, KEPT = 64, 512
# s, h, g, d, e: one token, chunks that are full and not, more of them than stages, wide and narrow tiles, two slabs of
# values one of which is not full, states that are kept.
CASES = [(1, 2, 2, 8, 8), (200, 2, 1, 128, 64), (130, 1, 1, 64, 72), (580, 1, 1, 24, 16)]
# Roundings to bf16 that a term passes at most, as in tests/ops/test_cuda_gated_delta.py.
ERROR = oracle.ERROR + 5 * 2.0**-9


@pytest.fixture(scope="module")
def walk(tmp_path_factory):
    return program.compiled(tmp_path_factory.mktemp("delta_walk"), "delta_walk")


def chunks_of(given, runs):
    """Of one row: bytes [chunks, h, ..], each a csrc/delta/delta.cuh Chunk."""
    (s, h, _), g, d = given["v"].shape, *given["q"].shape[1:]
    fill = lambda a: np.pad(a.astype(np.float64), [(0, -s % CHUNK), *[(0, 0)] * (a.ndim - 1)])
    q, k, beta, gate = (fill(given[name]) for name in ("q", "k", "beta", "gate"))
    own = np.pad(runs, (0, -s % CHUNK), mode="edge")
    before = np.pad(own, (1, 0), mode="edge")
    unit = lambda a: 1 / np.sqrt(np.sum(a * a, -1) + 1e-6)
    parts = []
    for first in range(0, s, CHUNK):
        at = slice(first, first + CHUNK)
        same, continues = own[at, None] == own[None, at], own[at] == before[first]
        for head in range(h):
            of_q, of_k = (a[at, head // (h // g)] for a in (q, k))
            left_q, left_k = unit(of_q), unit(of_k)
            sums = np.cumsum(np.maximum(gate[at, head], -100))
            seen = np.tril(same) * np.exp(np.minimum(sums[:, None] - sums, 0)) * left_k
            betas = beta[at, head]
            solve = np.linalg.inv(
                np.eye(CHUNK) + np.tril(betas[:, None] * left_k[:, None] * (of_k @ of_k.T) * seen, -1)
            )
            since, left = np.where(continues, np.exp(sums), 0), np.exp(sums[-1] - sums) * left_k
            weights = (since * left_k, since * left_q * d**-0.5, np.where(same[-1], left, -1), [since[-1]])
            several = np.array([not same[0, -1], 0, 0], np.int32)
            products = solve * betas * same, (of_q @ of_k.T) * seen * left_q[:, None] * d**-0.5
            parts += [a.astype(bf16).tobytes() for a in products]
            parts += [np.asarray(a, f32).tobytes() for a in weights] + [several.tobytes()]
    return np.frombuffer(b"".join(parts), np.uint8)


@pytest.mark.parametrize("s, h, g, d, e", CASES, ids=str)
def test_walk(walk, rng, s, h, g, d, e):
    """Six rows, each a call of its own, of other gates and segments."""
    rows, _, segments = oracle.rows_of(rng, s, h, g, d, e, False, bf16, count=6)
    for i, ids in enumerate(segments):
        given = jax.tree.map(lambda a: a[i], rows)  # noqa: B023
        runs = np.cumsum(np.diff(ids, prepend=ids[0]) != 0)
        shapes = ((s, h, e), bf16), ((h, d, e), f32), ((-(-s // KEPT), h, d, e), f32)
        results = [np.full(shape, np.nan, dtype) for shape, dtype in shapes]
        arrays = [*(given[name] for name in "qkv"), chunks_of(given, runs), given["initial_state"], *results]
        blob = program.call(walk, [1, s, h, g, d, e], arrays)
        y, last, kept = (
            np.frombuffer(part, a.dtype).reshape(a.shape)
            for a, part in zip(results, np.split(np.frombuffer(blob, np.uint8), np.cumsum([a.nbytes for a in results])))
        )
        with jax.enable_x64(True):
            wide = jax.tree.map(lambda a: a.astype(np.float64), given)
            want, want_last = jax.device_get(jax.jit(oracle.rule)(wide, ids))
        oracle.near(y[None], want[None], "y", ERROR)
        oracle.near(last[None], want_last[None], "final", ERROR)
        np.testing.assert_array_equal(kept[0], given["initial_state"])
        assert not np.isnan(kept).any()
