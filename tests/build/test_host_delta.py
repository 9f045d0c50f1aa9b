"""The gated delta rule's walk on Hopper on the CPU: whole calls with threads, copies and products that come in any
order that the kernel allows (host_cuda/cluster.h), against one token after the other in float64. What it needs of
chunks is made here, in float64, as csrc/delta/delta.cuh says."""

from typing import NamedTuple

import delta_oracle as oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from host_cuda import program

from te_jax.ops.delta import kernels

pytestmark = pytest.mark.sources
bf16, f32 = jnp.bfloat16, np.float32
CHUNK, KEPT = 64, 1024
# s, h, g, d, e: one token, chunks that are full and not, more of them than stages, wide and narrow tiles, two slabs of
# values one of which is not full, of one CTA and of two, states that are kept.
CASES = [(1, 2, 2, 8, 8), (200, 2, 1, 128, 64), (130, 1, 1, 128, 72), (70, 1, 1, 64, 72), (70, 1, 1, 72, 136)]
CASES += [(1090, 1, 1, 24, 16)]
CHANNEL_CASES = [(200, 2, 1, 128, 72, True), (130, 1, 1, 24, 72, True), (66, 1, 1, 128, 264, True)]
# Where two groups have half of the keys each: all of them, and some; values that are not full.
HALVES = [(200, 2, 1, 256, 72), (70, 1, 1, 136, 64)]
OF_HEADS = [(*case, False) for case in CASES + HALVES]
# Roundings to bf16 that a term passes at most, as in tests/ops/test_cuda_gated_delta.py.
ERROR = oracle.ERROR + 5 * 2.0**-9


@pytest.fixture(scope="module")
def walk(tmp_path_factory):
    return program.compiled(tmp_path_factory.mktemp("delta_walk"), "delta_walk")


@pytest.fixture(scope="module")
def bwd_walk(tmp_path_factory):
    return program.compiled(tmp_path_factory.mktemp("delta_bwd_walk"), "delta_bwd_walk")


class Chunk(NamedTuple):
    """Of one head: what csrc/delta/delta.cuh has, in float64."""

    inverse: np.ndarray
    seen: np.ndarray
    keys: np.ndarray
    queries: np.ndarray
    left: np.ndarray
    betas: np.ndarray
    keeps: float
    counts: tuple
    pairs: tuple

    def bytes(self):
        weights = *self[2:4], self.keys * self.betas, *self[4:6], [self.keeps]
        parts = [in_boxes(a, CHUNK) for a in self[:2]] + [np.asarray(a, f32) for a in weights]
        return b"".join(
            a.tobytes() for a in (*parts, np.array(self.counts, np.int32), *(np.asarray(a, f32) for a in self.pairs))
        )


class ChannelChunk(NamedTuple):
    """The same where each channel has a gate: what csrc/delta/channel.cuh has."""

    k: np.ndarray
    left: np.ndarray
    inverse: np.ndarray
    q: np.ndarray
    seen: np.ndarray
    keeps: np.ndarray
    betas: np.ndarray
    counts: tuple

    def bytes(self):
        tiles, d = self[:5], 64 if self.k.shape[1] <= 64 else 128
        parts = [in_boxes(a, d if a.shape[1] == self.k.shape[1] else CHUNK) for a in tiles]
        keeps = np.pad(self.keeps, (0, d - len(self.keeps)))
        whole = *parts, np.append(keeps, self.betas).astype(f32), np.array(self.counts, np.int32)
        of_chunk = b"".join(a.tobytes() for a in whole)
        return of_chunk + bytes(-len(of_chunk) % 128)


def in_boxes(a, columns):
    """A tile as warpgroups' products want it (csrc/ssm/tiles.cuh)."""
    row, column = np.mgrid[:CHUNK, :columns]
    at = (column // 64 * CHUNK + row) * 64 + (column // 8 ^ row) % 8 * 8 + column % 8
    out = np.zeros(CHUNK * columns, bf16)
    out[at] = np.pad(a, [(0, 0), (0, columns - a.shape[1])])
    return out


def filled(a):
    """With zeros up to whole chunks, in float64."""
    return np.pad(a.astype(np.float64), [(0, -len(a) % CHUNK), *[(0, 0)] * (a.ndim - 1)])


def chunks_of(given, runs):
    """Of one row: [chunks][h] of Chunk."""
    (s, h, _), g, d = given["v"].shape, *given["q"].shape[1:]
    q, k, beta, gate = (filled(given[name]) for name in ("q", "k", "beta", "gate"))
    own = np.pad(runs, (0, -s % CHUNK), mode="edge")
    before = np.pad(own, (1, 0), mode="edge")
    unit = lambda a: 1 / np.sqrt(np.sum(a * a, -1) + 1e-6)

    def chunk(first, head):
        at = slice(first, first + CHUNK)
        same, continues = own[at, None] == own[None, at], own[at] == before[first]
        of_q, of_k = (a[at, head // (h // g)] for a in (q, k))
        left_q, left_k = unit(of_q), unit(of_k)
        sums = np.cumsum(np.maximum(gate[at, head], -100))
        seen = np.tril(same) * np.exp(np.minimum(sums[:, None] - sums, 0)) * left_k
        betas = beta[at, head]
        inverse = np.linalg.inv(np.eye(CHUNK) + np.tril(betas[:, None] * left_k[:, None] * (of_k @ of_k.T) * seen, -1))
        since, left = np.where(continues, np.exp(sums), 0), same[-1] * np.exp(sums[-1] - sums) * left_k
        return Chunk(
            inverse * same, (of_q @ of_k.T) * seen * left_q[:, None] * d**-0.5, since * left_k,
            since * left_q * d**-0.5, left, betas, since[-1], (not same[0, -1], continues.sum(), np.argmax(same[-1])),
            (sums / np.log(2), left_k, left_q),
        )  # fmt: skip

    return [[chunk(first, head) for head in range(h)] for first in range(0, s, CHUNK)]


def channel_chunks_of(given, runs):
    """Of one row: [chunks][h] of ChannelChunk."""
    (s, h, _), g, d = given["v"].shape, *given["q"].shape[1:]
    q, k, beta, gate = (filled(given[name]) for name in ("q", "k", "beta", "gate"))
    own = np.pad(runs, (0, -s % CHUNK), mode="edge")
    before = np.pad(own, (1, 0), mode="edge")
    unit = lambda a: a / np.sqrt(np.sum(a * a, -1, keepdims=True) + 1e-6)

    def chunk(first, head):
        at = slice(first, first + CHUNK)
        same, continues = own[at, None] == own[None, at], own[at] == before[first]
        of_q, of_k = (unit(a[at, head // (h // g)]) for a in (q, k))
        sums = np.cumsum(np.maximum(gate[at, head], -100), 0)
        seen = np.tril(same)[..., None] * np.exp(np.minimum(sums[:, None] - sums, 0))
        betas = beta[at, head]
        of_keys = np.einsum("ic,jc,ijc->ij", of_k, of_k, seen)
        inverse = np.linalg.inv(np.eye(CHUNK) + np.tril(betas[:, None] * of_keys, -1))
        since, of_query = continues[:, None] * np.exp(sums), of_q * d**-0.5
        return ChannelChunk(
            of_k * since, of_k * np.exp(sums[-1] - sums) * same[-1][:, None], inverse * same, of_query * since,
            np.einsum("ic,jc,ijc->ij", of_query, of_k, seen), since[-1], betas,
            (not same[0, -1], continues.sum(), np.argmax(same[-1]), 0),
        )  # fmt: skip

    return [[chunk(first, head) for head in range(h)] for first in range(0, s, CHUNK)]


def test_bytes_of_a_chunk():
    """As many as the C API says, which sizes the workspace."""
    for d, by_channel in (64, False), (64, True), (128, True):
        assert str(kernels._chunk_bytes(d, by_channel)) in (program.library.CSRC / "base/ops.h").read_text()


def in_bytes(chunks):
    return np.frombuffer(b"".join(chunk.bytes() for heads in chunks for chunk in heads), np.uint8)


def results_of(blob, like):
    """The arrays that a program wrote."""
    ends = np.cumsum([a.nbytes for a in like])
    parts = np.split(np.frombuffer(blob, np.uint8), ends)
    return [np.frombuffer(part, a.dtype).reshape(a.shape) for a, part in zip(like, parts)]


@pytest.mark.parametrize("s, h, g, d, e, by_channel", [*OF_HEADS, *CHANNEL_CASES], ids=str)
def test_walk(walk, rng, s, h, g, d, e, by_channel):
    """Six rows, each a call of its own, of other gates and segments."""
    rows, _, segments = oracle.rows_of(rng, s, h, g, d, e, by_channel, bf16, count=6)
    for i, ids in enumerate(segments):
        given = jax.tree.map(lambda a: a[i], rows)  # noqa: B023
        runs = np.cumsum(np.diff(ids, prepend=ids[0]) != 0)
        shapes = ((s, h, e), bf16), ((h, d, e), f32), ((-(-s // KEPT), h, d, e), f32)
        results = [np.full(shape, np.nan, dtype) for shape, dtype in shapes]
        chunks = in_bytes((channel_chunks_of if by_channel else chunks_of)(given, runs))
        arrays = [*(given[name] for name in "qkv"), chunks, given["initial_state"], *results]
        y, last, kept = results_of(program.call(walk, [1, s, h, g, d, e, by_channel], arrays), results)
        with jax.enable_x64(True):
            wide = jax.tree.map(lambda a: a.astype(np.float64), given)
            want, want_last = jax.device_get(jax.jit(oracle.rule)(wide, ids))
        oracle.near(y[None], want[None], "y", ERROR)
        oracle.near(last[None], want_last[None], "final", ERROR)
        np.testing.assert_array_equal(kept[0], given["initial_state"])
        assert not np.isnan(kept).any()


def walks(chunk, state, gradient, q, k, v, dy):
    """What the walks make of a chunk of a head: what its tokens write and the state behind them; the gradient to what
    they would write alone, and that to the state before them."""
    of_left, row = chunk.left[:, None], lambda a: a[:, None]
    written = chunk.inverse @ (row(chunk.betas) * (v - row(chunk.keys) * (k @ state)))
    alone = chunk.inverse.T @ (chunk.seen.T @ dy + of_left * (k @ gradient))
    before = chunk.keeps * gradient + (row(chunk.queries) * q).T @ dy - (row(chunk.keys * chunk.betas) * k).T @ alone
    return written, chunk.keeps * state + (of_left * k).T @ written, alone, before


def channel_walks(chunk, state, gradient, q, k, v, dy):
    """The same where channels have gates."""
    row = lambda a: a[:, None]
    written = chunk.inverse @ (row(chunk.betas) * (v - chunk.k @ state))
    alone = chunk.inverse.T @ (chunk.seen.T @ dy + chunk.left @ gradient)
    before = row(chunk.keeps) * gradient + chunk.q.T @ dy - (row(chunk.betas) * chunk.k).T @ alone
    return written, row(chunk.keeps) * state + chunk.left.T @ written, alone, before


BACK = [(*case, by_channel) for case in CASES[:4] for by_channel in (False, True)]


@pytest.mark.parametrize("s, h, g, d, e, by_channel", [*BACK, *((*case, False) for case in HALVES)], ids=str)
def test_walks_of_the_backward_pass(bwd_walk, rng, s, h, g, d, e, by_channel):
    """Three rows, each a call of its own."""
    rows, cotangents, segments = oracle.rows_of(rng, s, h, g, d, e, by_channel, bf16, count=3)
    count = -(-s // CHUNK)
    for i, ids in enumerate(segments):
        given, (dy, dlast) = jax.tree.map(lambda a: a[i], (rows, cotangents))  # noqa: B023
        chunks = (channel_chunks_of if by_channel else chunks_of)(given, np.cumsum(np.diff(ids, prepend=ids[0]) != 0))
        shapes = [((count, h, e, d), bf16)] * 2 + [((count * CHUNK, h, e), bf16)] * 2 + [((h, d, e), f32)]
        results = [np.zeros(shape, dtype) for shape, dtype in shapes]
        kept = given["initial_state"]
        arrays = [*(given[name] for name in "qkv"), in_bytes(chunks), dy, kept, dlast, *results]
        got = results_of(program.call(bwd_walk, [1, s, h, g, d, e, by_channel], arrays), results)
        want, of_chunk = [np.zeros(a.shape) for a in results], channel_walks if by_channel else walks
        q, k, v, dy = map(filled, (given["q"], given["k"], given["v"], dy))
        for head in range(h):
            state, gradient = kept[head].astype(np.float64), dlast[head].astype(np.float64)
            of = lambda c, *arrays: [a[c * CHUNK : (c + 1) * CHUNK] for a in arrays]
            heads = q[:, head // (h // g)], k[:, head // (h // g)], v[:, head], dy[:, head]
            for c in range(count):
                want[0][c, head] = state.T
                written, state, _, _ = of_chunk(chunks[c][head], state, gradient, *of(c, *heads))
                want[2][c * CHUNK : (c + 1) * CHUNK, head] = written
            for c in reversed(range(count)):
                want[1][c, head] = gradient.T
                _, _, alone, gradient = of_chunk(chunks[c][head], state, gradient, *of(c, *heads))
                want[3][c * CHUNK : (c + 1) * CHUNK, head] = alone
            want[4][head] = gradient
        for mine, exact, name in zip(got, want, ("states", "gradients", "written", "alone", "before")):
            if name in ("written", "alone"):
                mine, exact = mine[:s], exact[:s]
            oracle.near(mine[None], exact[None], name, ERROR)


@pytest.fixture(scope="module")
def bwd(tmp_path_factory):
    return program.compiled(tmp_path_factory.mktemp("delta_bwd"), "delta_bwd")


# As in tests/ops/test_cuda_gated_delta.py.
GRADIENT_ERROR = oracle.ERROR + 9 * 2.0**-9
# s, h, g, d, e, tokens of a slab, parts of the heads of a key, whether rows have segments: as above; more heads than
# stages, or CTAs that share a key; rows of several slabs, and a state that was kept; CTAs with half of the keys; more
# values than stages have.
GRADIENTS = [
    (1, 2, 2, 8, 8, 64, 1, False),
    (100, 2, 1, 128, 128, 128, 1, True),
    (130, 2, 1, 72, 72, 192, 2, True),
    (70, 5, 1, 16, 24, 128, 1, False),
    (1090, 1, 1, 24, 16, 1024, 1, True),
    (130, 2, 1, 256, 72, 192, 2, True),
    (70, 3, 1, 200, 16, 128, 1, False),
    (40, 2, 1, 16, 264, 64, 1, False),
    (66, 6, 2, 256, 200, 128, 3, True),
]


def kept_of(chunks, given):
    """The state before each KEPT tokens of a row, in float64."""
    state, kept, (h, g) = given["initial_state"].astype(np.float64), [], (given["v"].shape[1], given["k"].shape[1])
    q, k, v = (filled(given[name]) for name in "qkv")
    for c, heads in enumerate(chunks):
        if c % (KEPT // CHUNK) == 0:
            kept.append(state.copy())
        at = slice(c * CHUNK, (c + 1) * CHUNK)
        for i, chunk in enumerate(heads):
            key = i // (h // g)
            state[i] = walks(chunk, state[i], 0 * state[i], q[at, key], k[at, key], v[at, i], 0 * v[at, i])[1]
    return np.stack(kept).astype(f32)


class Call(NamedTuple):
    """The backward pass of some rows."""

    rows: dict
    cotangents: tuple
    segments: np.ndarray
    numbers: list  # tokens of a slab, which has two rows, and parts of the heads of a key

    def gradients(self, bwd, kept=None):
        """{name: gradient} by the kernels, of the states that the forward pass keeps, or of others."""
        rows, (dy, dlast), count = self.rows, self.cotangents, len(self.segments)
        runs = np.cumsum(np.diff(self.segments, axis=1, prepend=self.segments[:, :1]) != 0, 1).astype(np.int32)
        of = [jax.tree.map(lambda a: a[i], rows) for i in range(count)]  # noqa: B023
        chunks = [chunks_of(*each) for each in zip(of, runs)]
        kept = np.stack([kept_of(*each) for each in zip(chunks, of)]) if kept is None else kept
        names = "q", "k", "v", "beta", "gate", "initial_state"
        results = {name: np.zeros(rows[name].shape, bf16 if name in "qkv" else f32) for name in names}
        blob = np.concatenate([in_bytes(each) for each in chunks])
        arrays = [*(rows[name] for name in "qkv"), blob, dy, kept, dlast, runs if runs.any() else None]
        (s, g, d), (h, e) = rows["k"].shape[1:], rows["v"].shape[2:]
        blob = program.call(bwd, [count, s, h, g, d, e, 2, *self.numbers], arrays)
        return dict(zip(results, results_of(blob, results.values())))


@pytest.mark.parametrize("s, h, g, d, e, slab_tokens, parts, has_runs", GRADIENTS, ids=str)
def test_gradients(bwd, rng, s, h, g, d, e, slab_tokens, parts, has_runs):
    """Three rows in slabs of two, of other gates and segments."""
    rows, cotangents, segments = oracle.rows_of(rng, s, h, g, d, e, False, bf16, count=3)
    segments = segments if has_runs else 0 * segments
    got = Call(rows, cotangents, segments, [slab_tokens, parts]).gradients(bwd)

    def pull(given, ids, cotangents):
        return jax.vjp(lambda given: oracle.rule(given, ids), given)[1](cotangents)[0]

    wide = jax.tree.map(lambda a: a.astype(np.float64), (rows, cotangents))
    with jax.enable_x64(True):
        want = jax.device_get(jax.jit(jax.vmap(pull))(wide[0], segments, wide[1]))
    for name, mine in got.items():
        oracle.near(mine, want[name], f"d{name}", GRADIENT_ERROR)


@pytest.mark.parametrize("d", [16, 200])
def test_a_state_that_is_not_finite_stays_in_its_run(bwd, rng, d):
    """A run that begins with a chunk: its gradients have the same bits, whatever the state before it is."""
    rows, cotangents, _ = oracle.rows_of(rng, 2 * CHUNK, 1, 1, d, 16, False, bf16, count=1)
    call = Call(rows, cotangents, np.arange(2 * CHUNK)[None] // CHUNK, [2 * CHUNK, 1])
    clean, spoiled = call.gradients(bwd), call.gradients(bwd, np.full((1, 1, 1, d, 16), np.inf, f32))
    assert np.isnan(spoiled["q"][:, :CHUNK].astype(f32)).any()
    for name in ("q", "k", "v", "beta", "gate"):
        np.testing.assert_array_equal(spoiled[name][:, CHUNK:], clean[name][:, CHUNK:], name)
