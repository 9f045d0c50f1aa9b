"""The scan's kernels on Hopper on the CPU: whole calls with threads, copies and products that come in any order that
the kernels allow (host_cuda/cluster.h), against one token after the other in float64."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ssm_oracle as oracle
from host_cuda import program

pytestmark = pytest.mark.sources
bf16, f32 = jnp.bfloat16, np.float32
CHUNK, KEPT = 64, 512
LIMIT = (0.001, 45.0)
ssd = partial(oracle.ssd, softplus=True, limit=LIMIT)
last_state = jax.jit(lambda given, segments: ssd(given, segments)[1])
# s, h, g, p, n, absent: one token, a chunk and one more token, more chunks than stages, wide and narrow tiles, a tile
# that is not full, states that are kept.
FORWARD = [
    (1, 2, 2, 8, 8, ()),
    (65, 2, 1, 64, 128, ("segments",)),
    (330, 1, 1, 72, 128, ("initial_state", "D")),
    (580, 1, 1, 24, 24, ("segments",)),
    (200, 2, 2, 64, 64, ()),
]
# And rows, tokens and heads of slabs: heads that share a CTA, more of them than stages, and what is left of them.
BACKWARD = [
    (1, 2, 2, 8, 8, (), (1, 64, 1)),
    (130, 4, 1, 64, 128, ("segments",), (1, 192, 4)),
    (150, 5, 1, 24, 128, ("D",), (2, 192, 3)),
    (700, 2, 1, 16, 40, (), (1, 512, 2)),
]
# Roundings to bf16 that a term passes at most, as in tests/ops/test_cuda_ssm.py.
ERROR = oracle.DECAY + oracle.TERMS + 3 * 2.0**-9


@pytest.fixture(scope="module")
def forward(tmp_path_factory):
    return program.compiled(tmp_path_factory.mktemp("scan"), "scan")


@pytest.fixture(scope="module")
def backward(tmp_path_factory):
    return program.compiled(tmp_path_factory.mktemp("scan_bwd"), "scan_bwd")


def steps_of(given):
    """f32 [1, chunks, h, 2, 64]: sums of logarithms to base 2 of decays over a chunk, and steps."""
    steps = np.clip(np.logaddexp(0, given["dt"].astype(f32) + given["dt_bias"]), *LIMIT)
    s, h = steps.shape
    steps, logs = (np.pad(a, [(0, -s % CHUNK), (0, 0)]).reshape(-1, CHUNK, h) for a in (steps, steps * given["A"]))
    logs = np.maximum(logs / np.log(2), -160)
    return np.stack([np.cumsum(logs, 1), steps], 1).transpose(0, 3, 1, 2).astype(f32)


def cases(rng, s, h, g, p, n, absent):
    """Six rows, each a call of its own, since each has its A: operands, cotangents, segments."""
    given, cotangents, segments = oracle.rows_of(rng, s, h, g, p, n, bf16, ("z", *absent), 6)
    of_row = lambda tree, i: jax.tree.map(lambda a: a[i], tree)
    for i in range(len(segments)):
        yield of_row(given, i), of_row(cotangents, i), None if "segments" in absent else segments[i]


def runs_of(segments):
    return None if segments is None else np.cumsum(np.diff(segments, prepend=segments[0]) != 0, dtype=np.int32)


def unknown(*shapes):
    return [np.full(shape, np.nan, dtype) for shape, dtype in shapes]


def split(blob, like):
    out = []
    for a in like:
        out.append(np.frombuffer(blob[: a.nbytes], a.dtype).reshape(a.shape))
        blob = blob[a.nbytes :]
    assert not blob
    return out


@jax.jit
def passes(given, segments, cotangents):
    """Results and gradients, and the sizes of the sums that they are."""
    out, grads = oracle.both(lambda given: ssd(given, segments), given, cotangents)
    sizes, of_grads = oracle.ssd_bounds(given, segments, cotangents, softplus=True, limit=LIMIT)
    return out, grads, sizes, of_grads


def exact(given, segments, cotangents):
    """The same in float64."""
    given, cotangents = jax.tree.map(lambda a: a.astype(np.float64), (given, cotangents))
    with jax.enable_x64(True):
        return jax.device_get(passes(given, segments, cotangents))


@pytest.mark.parametrize("s, h, g, p, n, absent", FORWARD, ids=str)
def test_scan(forward, rng, s, h, g, p, n, absent):
    for given, cotangents, segments in cases(rng, s, h, g, p, n, absent):
        results = unknown(((s, h, p), bf16), ((h, p, n), f32), ((-(-s // KEPT), h, p, n), f32))
        arrays = [*(given[k] for k in "xBC"), steps_of(given), given.get("D"), given.get("initial_state")]
        blob = program.call(forward, [1, s, h, p, g, n, 1], [*arrays, runs_of(segments), *results])
        y, last, kept = split(blob, results)
        want, _, sizes, _ = exact(given, segments, cotangents)
        for name, got in dict(y=y, final=last).items():
            oracle.near(got, want[name], sizes[name], name, ERROR)
        np.testing.assert_array_equal(kept[0], given.get("initial_state", np.zeros_like(last)))
        assert not np.isnan(kept).any()


def kept_states(given, segments, s):
    """f32 [s / 512, h, p, n]: the state before each 512 tokens."""
    upto = lambda end: {k: a[:end] if k in ("x", "dt", "B", "C") else a for k, a in given.items()}
    first = given.get("initial_state", np.zeros((*given["x"].shape[1:], given["B"].shape[-1])))
    states = [first]
    for end in range(KEPT, s, KEPT):
        of = None if segments is None else segments[:end]
        states.append(last_state(upto(end), of))
    return np.stack(states).astype(f32)


@pytest.mark.parametrize("s, h, g, p, n, absent, slab", BACKWARD, ids=str)
def test_gradients(backward, rng, s, h, g, p, n, absent, slab):
    for given, cotangents, segments in cases(rng, s, h, g, p, n, absent):
        given["dt"] = given["dt"].astype(f32)
        dy, dlast = cotangents
        of_chunks = (-(-s // CHUNK), h)
        results = unknown(
            *(((s, h, p), bf16), ((s, h), f32), ((s, g, n), bf16), ((s, g, n), bf16)),
            *((of_chunks, f32),) * 3,
            ((h, p, n), f32),
        )
        arrays = [dy, *(given[k] for k in ("x", "B", "C", "dt", "dt_bias", "A")), steps_of(given), given.get("D")]
        with jax.enable_x64(True):
            wide = jax.tree.map(lambda a: a.astype(np.float64), given)
            kept = kept_states(wide, segments, s)
        blob = program.call(backward, [1, s, h, p, g, n, *slab], [*arrays, kept, dlast, runs_of(segments)])
        *of_tokens, dA, dbias, dD, dinitial = split(blob, results)
        got = dict(zip(("x", "dt", "B", "C"), of_tokens), A=dA.sum(0), dt_bias=dbias.sum(0), D=dD.sum(0))
        got["initial_state"] = dinitial
        _, want, _, sizes = exact(given, segments, cotangents)
        for name in want:
            oracle.near(got[name], want[name], sizes[name], name, ERROR)
