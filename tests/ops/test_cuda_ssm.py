"""On the GPU: the kernels of Mamba-2's scan and convolution against one token after the other in float64."""

import ctypes

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ssm_oracle as oracle

from te_jax.ops.ssm import causal_conv1d, kernels, pieces, scan, ssd

pytestmark = pytest.mark.gpu
# s, h, g, p, n, type of dt, absent: tiles that are full, and not; one token, a chunk of 64, one more, some of the 512
# after which a state is kept; heads of a group that CTAs share. On a GPU also many chunks.
SCANS = [
    (1, 4, 2, 8, 8, jnp.bfloat16, ()),
    (64, 1, 1, 64, 128, jnp.float32, ("initial_state",)),
    (65, 2, 2, 64, 64, jnp.bfloat16, ("segments",)),
    (130, 3, 1, 72, 128, jnp.bfloat16, ("D", "dt_bias")),
    (580, 1, 1, 24, 24, jnp.float32, ()),
    (8192, 2, 1, 64, 128, jnp.bfloat16, ()),
]
LITTLE = SCANS[3:4]  # with little shared memory
# More states than the backward kernels take, and a gate.
WIDE = [(70, 2, 1, 64, 256, jnp.bfloat16, ()), (130, 1, 1, 24, 200, jnp.float32, ("segments", "D"))]
# Scores times decays and steps, the state, and what tokens add to it are rounded to bf16 as operands of products, and
# of gradients the sums of scores' as well: no term passes more than three roundings.
ROUNDINGS = 3 * 2.0**-9


@pytest.mark.parametrize("s, h, g, p, n, of_dt, absent", SCANS)
def test_scan(rng, monkeypatch, s, h, g, p, n, of_dt, absent):
    """Results and all gradients, in slabs of one row."""
    monkeypatch.setattr(kernels, "_SLAB_BYTES", 1 << 20)
    monkeypatch.setattr(kernels, "CTAS", 2)
    check_scan(rng, s, h, g, p, n, of_dt, ("z", *absent))


@pytest.mark.parametrize("p", [16, 72])
def test_rows_of_one_call(rng, monkeypatch, p):
    """Rows have the bits that each has in a call of its own, gradients too, where slabs have two rows of three."""
    rows, s, h, g, n = 3, 70, 2, 1, 16
    monkeypatch.setattr(kernels, "_SLAB_BYTES", 2 * 8 * h * p * n * 4)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.bfloat16)
    given = dict(x=draw(rows, s, h, p), dt=draw(rows, s, h), B=draw(rows, s, g, n), C=draw(rows, s, g, n))
    given["initial_state"] = draw(rows, h, p, n).astype(jnp.float32)
    segments = jnp.asarray(np.sort(rng.integers(0, 3, (rows, s))), jnp.int32)
    dy, dlast = draw(rows, s, h, p), draw(rows, h, p, n).astype(jnp.float32)

    @jax.jit
    def run(given, segments, dy, dlast):
        fn = lambda given: ssd(A=-jnp.ones(h), segments=segments, return_final_state=True, **given)
        outs, pull = jax.vjp(fn, given)
        return outs, pull((dy, dlast))[0]

    got = run(given, segments, dy, dlast)
    of_row = lambda i: jax.tree.map(lambda a: a[i : i + 1], (given, segments, dy, dlast))
    each = [run(*of_row(i)) for i in range(rows)]
    jax.tree.map(lambda a, *rows: np.testing.assert_array_equal(a, jnp.concatenate(rows)), got, *each)


def test_no_tokens():
    """The state stays as it is."""
    empty = lambda *shape: jnp.zeros((2, 0, *shape), jnp.bfloat16)
    initial = jnp.arange(2 * 3 * 8 * 8, dtype=jnp.float32).reshape(2, 3, 8, 8)
    tokens = empty(3, 8), empty(3), -jnp.ones(3), empty(1, 8), empty(1, 8)
    y, final = jax.jit(lambda: ssd(*tokens, initial_state=initial, return_final_state=True))()
    assert y.shape == (2, 0, 3, 8)
    np.testing.assert_array_equal(final, initial)


def test_a_nan_step_stays_in_its_segment():
    s, bad = 330, 195
    x = jnp.ones((1, s, 1, 8), jnp.bfloat16)
    ids = jnp.asarray(np.searchsorted([100, 200], np.arange(s), side="right")[None], jnp.int32)
    dt = jnp.zeros((1, s, 1), jnp.float32).at[0, bad].set(jnp.nan)
    y = jax.jit(lambda dt: ssd(x, dt, -jnp.ones(1), x, x, dt_softplus=True, segments=ids))(dt)
    chunk = np.arange(s) // 64 == bad // 64
    elsewhere = ~chunk & (ids[0] != ids[0, bad])
    assert np.isnan(np.asarray(y, np.float32)[0, bad:200]).all()
    assert np.isfinite(np.asarray(y, np.float32)[0, elsewhere]).all()


@pytest.mark.parametrize("absent", [(), ("segments", "initial_state")], ids=str)
def test_scan_in_pieces(rng, monkeypatch, absent):
    """A few long rows, of which pieces are scanned at the same time."""
    monkeypatch.setattr(kernels, "_LEAST_PIECES", (2, kernels.KEPT))
    s, h, g, p, n = 1024, 1, 1, 8, 8
    assert pieces.pieces_of(6, s, h, p, kernels.KEPT, kernels._LEAST_PIECES) == 2
    check_scan(rng, s, h, g, p, n, jnp.bfloat16, ("z", *absent))


@pytest.mark.parametrize("s, h, g, p, n, of_dt, absent", LITTLE)
def test_scan_in_little_shared_memory(rng, request, s, h, g, p, n, of_dt, absent):
    """As GPUs have it that are no Hopper: one stage."""
    if not (path := request.config.getoption("--host-kernels")):
        pytest.skip("the GPU's shared memory is what it is")
    held = ctypes.c_int.in_dll(ctypes.CDLL(path), "te_host_shared_bytes")
    request.addfinalizer(lambda before=held.value: setattr(held, "value", before))
    held.value = 99 << 10
    check_scan(rng, s, h, g, p, n, of_dt, ("z", *absent))


def test_the_one_group_of_a_device(rng):
    """Of several groups a device may have one, with the heads that share it; of one group all heads have it."""
    draw = lambda *shape: jnp.asarray(rng.standard_normal((2, 70, *shape)), jnp.bfloat16)
    x, dt, B, C, dy = draw(4, 16), draw(4), draw(1, 16), draw(1, 16), draw(4, 16)
    A, outputs = -jnp.ones(4), ("dx", "ddt", "dA", "dB", "dC")

    def run(shared):
        attrs = dict(softplus=True, least=0.0, most=4.0, shared=shared)
        y, states = scan.ssd_fwd(x, dt, A, B, C, *(None,) * 5, outputs=("y", "states"), **attrs)
        operands = (x, dt, A, B, C, *(None,) * 3, states)
        return y, *scan.ssd_bwd(dy, None, *operands, outputs=outputs, **attrs)

    jax.tree.map(np.testing.assert_array_equal, jax.jit(lambda: run(1))(), jax.jit(lambda: run(4))())


@pytest.mark.parametrize("s, h, g, p, n, of_dt, absent", WIDE)
@pytest.mark.parametrize("of_channels", [False, True], ids=["heads", "channels"])
def test_sums_of_calls(rng, s, h, g, p, n, of_dt, absent, of_channels):
    """The backward pass of such a call adds up those of others, of 128 states or none for D, each rounded; and y before
    its gate is rounded, as is the gradient to it."""
    check_scan(rng, s, h, g, p, n, of_dt, absent, of_channels=of_channels, error=ROUNDINGS + 3 * 2.0**-9)


def check_scan(rng, s, h, g, p, n, of_dt, absent, *, of_channels=False, error=ROUNDINGS):
    rows = 6
    given, cotangents, segments = oracle.rows_of(rng, s, h, g, p, n, jnp.bfloat16, absent, rows)
    given["dt"] = given["dt"].astype(of_dt)
    if of_channels and "D" in given:
        given["D"] = rng.standard_normal((rows, h, p)).astype(np.float32)
    options = dict(dt_softplus=True, dt_limit=(0.001, 45.0), return_final_state=True)
    of = lambda segments: None if "segments" in absent else segments

    def ours(given, segments, cotangents):
        return oracle.both(lambda given: ssd(**given, segments=of(segments), **options), given, cotangents)

    got = jax.jit(jax.vmap(ours))(given, segments, cotangents)
    wide = jax.tree.map(lambda a: a.astype(np.float64), (given, cotangents))

    def theirs(given, segments, cotangents):
        options = dict(softplus=True, limit=(0.001, 45.0))
        exact = oracle.both(lambda given: oracle.ssd(given, of(segments), **options), given, cotangents)
        return exact, oracle.ssd_bounds(given, of(segments), cotangents, **options)

    with jax.enable_x64(True):
        want, sizes = jax.device_get(jax.jit(jax.vmap(theirs))(wide[0], segments, wide[1]))
    for at, mine, exact, size in zip(("", "d"), got, want, sizes):
        for name, each in mine.items():
            small = oracle.through_gate(name, cotangents[0])
            oracle.near(each, exact[name], size[name], at + name, oracle.DECAY + oracle.TERMS + error, small)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16], ids=lambda d: d.__name__)
@pytest.mark.parametrize("s, c, width", [(1, 8, 4), (2, 16, 3), (33, 264, 2), (300, 40, 4), (0, 8, 3)])
def test_convolution(rng, s, c, width, dtype):
    """Results and all gradients: rows shorter than the kernel, and of more tokens than a thread has."""
    draw = lambda *shape: rng.standard_normal((3, *shape)).astype(np.float32)
    given = dict(x=draw(s, c).astype(dtype), kernel=draw(width, c)[0], bias=draw(c)[0])
    given["initial_state"] = draw(width - 1, c).astype(dtype)
    segments = np.stack([oracle.segments_of(rng, s, i + 1) for i in range(3)]) if s else None
    cotangents = draw(s, c).astype(dtype), draw(width - 1, c).astype(dtype)
    options = dict(activation="silu", segments=segments, return_final_state=True)
    fn = lambda given: causal_conv1d(**given, **options)
    got = jax.jit(lambda given: oracle.both(fn, given, cotangents))(given)

    def of_rows(given, segments):
        one = lambda x, start, ids: oracle.conv({**given, "x": x, "initial_state": start}, ids, True)
        return jax.vmap(one, (0, 0, None if segments is None else 0))(given["x"], given["initial_state"], segments)

    if not s:
        np.testing.assert_array_equal(got[0]["final"], given["initial_state"])
        np.testing.assert_array_equal(got[1]["initial_state"], cotangents[1])
        return
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda a: np.asarray(a, np.float64), (given, cotangents))
        want = jax.device_get(
            jax.jit(lambda given: oracle.both(lambda g: of_rows(g, segments), given, wide[1]))(wide[0])
        )
    terms = 3 * s * 4  # of the sums over tokens of all rows; each a product of numbers that are mostly below 4
    for mine, exact in zip(got, want):
        for name, a in mine.items():
            size = np.abs(exact[name]) + (terms if name in ("kernel", "bias") else 4) * 4
            oracle.near(a, exact[name], size, name, 16 * oracle.EPS)
