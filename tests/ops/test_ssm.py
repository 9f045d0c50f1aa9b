"""Mamba-2's ops against one token after the other in float64."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ssm_oracle as oracle
from arrays import on_device
from ssm_oracle import both, row, rows_of, segments_of

from te_jax.ops.ssm import causal_conv1d, kernels, scan, ssd

# s, h, g, p, n, dtype, absent: all n and p; lengths of 1, below, at and behind a chunk of 128, and odd ones.
PROGRAMS = [
    (1, 4, 2, 16, 16, jnp.float32, ()),
    (7, 4, 1, 64, 16, jnp.bfloat16, ("z",)),
    (127, 2, 2, 128, 16, jnp.float16, ("D", "dt_bias")),
    (129, 3, 1, 16, 64, jnp.float32, ("initial_state",)),
    (33, 2, 1, 64, 64, jnp.bfloat16, ()),
    (45, 2, 1, 128, 64, jnp.float32, ("z", "D")),
    (300, 4, 2, 16, 16, jnp.float32, ()),
    (128, 2, 1, 16, 128, jnp.float16, ("initial_state",)),
    (61, 1, 1, 64, 128, jnp.float32, ("dt_bias",)),
    (20, 2, 2, 128, 128, jnp.bfloat16, ("segments",)),
]


@pytest.mark.parametrize("s, h, g, p, n, dtype, absent", PROGRAMS)
def test_ssd(rng, s, h, g, p, n, dtype, absent):
    """Outputs, final states and all gradients of 24 rows."""
    given, cotangents, segments = rows_of(rng, s, h, g, p, n, dtype, absent)
    limit = (0.001, 45.0) if s % 2 else (0.0, np.inf)
    of = lambda segments: None if "segments" in absent else segments
    options = dict(dt_softplus=True, dt_limit=limit, return_final_state=True)

    def ours(given, segments, cotangents):
        return both(lambda given: ssd(**given, segments=of(segments), **options), given, cotangents)

    got = jax.jit(jax.vmap(ours))(given, segments, cotangents)
    wide = jax.tree.map(lambda a: a.astype(np.float64), (given, cotangents))

    def theirs(given, segments, cotangents):
        options = dict(softplus=True, limit=limit)
        exact = both(lambda given: oracle.ssd(given, of(segments), **options), given, cotangents)
        return exact, oracle.ssd_bounds(given, of(segments), cotangents, **options)

    with jax.enable_x64(True):
        want, sizes = jax.device_get(jax.jit(jax.vmap(theirs))(wide[0], segments, wide[1]))
    assert got[0]["y"].dtype == dtype and got[0]["final"].dtype == jnp.float32
    for at, ours, exact, size in zip(("", "d"), got, want, sizes):
        for name, each in ours.items():
            small = oracle.through_gate(name, cotangents[0])
            oracle.near(each, exact[name], size[name], at + name, oracle.DECAY + oracle.TERMS, small)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_tokens_one_by_one(rng, dtype):
    """A call for each token, which takes the states of the one before, is as one call; so are two calls. Both ops."""
    s, h, g, p, n, c, w = 9, 4, 2, 16, 16, 8, 4
    given, _ = row(rng, "plain", s, h, g, p, n, dtype)
    given = {k: a[None] if k in ("x", "dt", "B", "C", "z", "initial_state") else a for k, a in given.items()}
    taps, past, channels = (
        rng.standard_normal((w, c)),
        rng.standard_normal((1, w - 1, c)),
        rng.standard_normal((1, s, c)),
    )
    scanned = ("x", "dt", "B", "C", "z")

    def calls(ends):
        state, conv_state, ys = given["initial_state"], jnp.asarray(past, dtype), []
        for begin, end in zip((0, *ends), ends):
            part = given | {k: given[k][:, begin:end] for k in scanned} | dict(initial_state=state)
            y, state = ssd(**part, dt_softplus=True, return_final_state=True)
            conv, conv_state = causal_conv1d(
                jnp.asarray(channels[:, begin:end], dtype), taps.astype(np.float32), activation="silu",
                initial_state=conv_state, return_final_state=True,
            )  # fmt: skip
            ys.append((y, conv))
        return *map(partial(jnp.concatenate, axis=1), zip(*ys)), state, conv_state

    whole, *others = jax.jit(lambda: [calls(ends) for ends in ((s,), (4, s), range(1, s + 1))])()
    for other in others:
        for a, b in zip(whole, other, strict=True):
            tolerance = 2.0**-20 + float(jnp.finfo(a.dtype).eps)  # 16 f32 roundings of a few numbers below 16
            np.testing.assert_allclose(np.asarray(a, np.float32), np.asarray(b, np.float32), tolerance, 16 * 2.0**-20)


@pytest.mark.parametrize("width, dtype", [(2, jnp.float16), (3, jnp.bfloat16), (3, jnp.float16), (4, jnp.float32)])
def test_causal_conv1d(rng, width, dtype):
    """Outputs, final states and all gradients: lengths below the width and above it, rows of segments of all kinds."""
    c, found = 5, {}
    for s in (1, 2, 11):
        draw = lambda *shape: rng.standard_normal((8, *shape)).astype(np.float32)
        given = dict(x=draw(s, c).astype(dtype), kernel=draw(width, c), bias=draw(c))
        given["initial_state"] = draw(width - 1, c).astype(dtype)
        segments = np.stack([segments_of(rng, s, i) for i in range(8)])
        found[s] = given, segments, (draw(s, c).astype(dtype), draw(width - 1, c).astype(dtype))

    def ours(given, segments, cotangents):
        fn = lambda given: causal_conv1d(
            **given, activation="silu" if width > 2 else None, segments=segments, return_final_state=True
        )
        return both(fn, given, cotangents)

    def theirs(given, segments, cotangents):
        exact = both(lambda given: oracle.conv(given, segments, width > 2), given, cotangents)
        size = both(lambda given: oracle.conv(given, segments, False), *jax.tree.map(jnp.abs, (given, cotangents)))
        return exact, size

    each = lambda fn: jax.jit(lambda found: {s: jax.vmap(fn)(*args) for s, args in found.items()})
    got = each(ours)(found)
    with jax.enable_x64(True):
        up = jax.tree.map(lambda a: a if a.dtype == np.int64 else a.astype(np.float64), found)
        want = jax.device_get(each(theirs)(up))
    for s in found:
        for ours_, exact, size in zip(got[s], *want[s]):
            for name, a in ours_.items():
                # A dozen roundings of the terms; silu has a slope of at most 1.1, which changes by at most 0.5.
                grows = 1 + np.abs(np.asarray(want[s][1][0]["y"])).max()
                oracle.near(a, exact[name], size[name], f"{s} {name}", 16 * oracle.EPS * grows)


WRONG = [
    (
        dict(kernel=jnp.ones((5, 4))),
        ValueError,
        r"causal_conv1d: kernel has shape \(5, 4\); pass \[w, 4\] with w from 2 to 4",
    ),
    (dict(kernel=jnp.ones((3, 5))), ValueError, r"kernel has shape \(3, 5\)"),
    (dict(bias=jnp.ones(3)), ValueError, r"causal_conv1d: bias has shape \(3,\); pass \[4\]"),
    (dict(activation="gelu"), ValueError, "activation is 'gelu'; pass one of 'silu' or None"),
    (dict(x=jnp.ones((2, 6, 4), int)), TypeError, "causal_conv1d: x is int"),
    (dict(segments=jnp.ones((2, 6))), TypeError, "causal_conv1d: segments is float"),
    (dict(segments=jnp.ones((2, 5), int)), ValueError, r"segments has shape \(2, 5\); pass \[2, 6\]"),
    (dict(initial_state=jnp.ones((2, 3, 4))), ValueError, r"initial_state has shape \(2, 3, 4\); pass \[2, 2, 4\]"),
]


@pytest.mark.parametrize("changed, error, message", WRONG)
def test_wrong_convolutions(changed, error, message):
    with pytest.raises(error, match=message):
        jax.eval_shape(lambda: causal_conv1d(**(dict(x=jnp.ones((2, 6, 4)), kernel=jnp.ones((3, 4))) | changed)))


WRONG_SCANS = [
    (dict(x=jnp.ones((6, 4))), ValueError, r"ssd: x has shape \(6, 4\); pass \[b..., s, h, p\]"),
    (dict(B=jnp.ones((2, 6, 3, 8))), ValueError, r"ssd: B has shape .*, where g divides the 4 heads of x"),
    (dict(C=jnp.ones((2, 6, 2, 4))), ValueError, r"ssd: C has shape \(2, 6, 2, 4\); pass \[2, 6, 2, 8\]"),
    (dict(dt=jnp.ones((2, 6))), ValueError, r"ssd: dt has shape \(2, 6\); pass \[2, 6, 4\]"),
    (dict(A=jnp.ones(3)), ValueError, r"ssd: A has shape \(3,\); pass \[4\]"),
    (dict(D=jnp.ones((4, 3))), ValueError, r"ssd: D has shape \(4, 3\); pass \[4\] or \[4, 16\]"),
    (dict(z=jnp.ones((2, 6, 4))), ValueError, r"ssd: z has shape"),
    (dict(dt_bias=jnp.ones(5)), ValueError, r"ssd: dt_bias has shape \(5,\); pass \[4\]"),
    (dict(dt_limit=(1.0, 0.5)), ValueError, r"ssd: dt_limit is \(1.0, 0.5\); pass a tuple \(least, most\)"),
    (dict(initial_state=jnp.ones((2, 4, 8, 16))), ValueError, r"initial_state has shape .*; pass \[2, 4, 16, 8\]"),
    (dict(segments=jnp.ones((2, 6))), TypeError, "ssd: segments is float"),
    (dict(A=None), TypeError, "ssd: A is None"),
]


@pytest.mark.parametrize("changed, error, message", WRONG_SCANS)
def test_wrong_scans(changed, error, message):
    right = dict(x=jnp.ones((2, 6, 4, 16)), dt=jnp.ones((2, 6, 4)), A=jnp.ones(4))
    right |= dict(B=jnp.ones((2, 6, 2, 8)), C=jnp.ones((2, 6, 2, 8)))
    with pytest.raises(error, match=message):
        jax.eval_shape(lambda: ssd(**(right | changed)))


def test_steps_at_their_bounds():
    """A step that is at a bound has the whole gradient, one beyond it none."""
    rng, s = np.random.default_rng(0), 5
    draw = lambda *shape: rng.standard_normal(shape).astype(np.float32)
    dt = np.array([0.25, 0.5, 1.0, 2.0, 4.0], np.float32)[:, None]
    given = dict(x=draw(s, 1, 4), dt=dt, A=-np.ones(1, np.float32), B=draw(s, 1, 8), C=draw(s, 1, 8))
    ours = lambda given: ssd(**given, dt_limit=(0.5, 2.0), return_final_state=True)
    theirs = lambda given: oracle.ssd(given, None, softplus=False, limit=(0.5, 2.0))
    cotangents = draw(s, 1, 4), draw(1, 4, 8)
    got, want = (jax.jit(lambda given, fn=fn: both(fn, given, cotangents)[1]["dt"])(given) for fn in (ours, theirs))
    assert (np.asarray(got[1:4]) != 0).all() and (got[0] == got[4]).all()
    np.testing.assert_allclose(got, want, 2.0**-18, 2.0**-18)  # Two f32 sums of 5 tokens of 32 products.


def test_what_is_not_finite_stays_in_its_chunk(rng):
    """And in its segment: other segments of other chunks, and their gradients, have the same bits as without it."""
    s, bad = 300, 130  # in the second of three chunks, and the second of three segments
    draw = lambda *shape: rng.standard_normal(shape).astype(np.float32)
    given = dict(x=draw(s, 2, 4), dt=draw(s, 2), B=draw(s, 1, 8), C=draw(s, 1, 8))
    ids = np.searchsorted([100, 140], np.arange(s), side="right").astype(np.int32)
    elsewhere = (np.arange(s) // 128 != bad // 128) & (ids != ids[bad])

    @jax.jit
    @jax.vmap
    def run(given):
        fn = lambda given: ssd(A=-np.ones(2, np.float32), **given, dt_softplus=True, segments=ids)
        y, pull = jax.vjp(fn, given)
        return dict(y=y, **pull(jnp.ones_like(y))[0])

    spoiled = [given]
    for name, value in itertools.product(given, (np.nan, np.inf)):
        at = np.expand_dims(np.arange(s) == bad, tuple(range(1, given[name].ndim)))
        spoiled.append(given | {name: np.where(at, np.float32(value), given[name])})
    found = run(jax.tree.map(lambda *rows: np.stack(rows), *spoiled))
    for name, rows in jax.tree.map(np.asarray, found).items():
        assert not np.isfinite(rows[1:, ids == 1]).all() and np.isfinite(rows[0]).all()
        for spoiled_row in rows[1:, elsewhere]:
            np.testing.assert_array_equal(spoiled_row, rows[0, elsewhere], name)


def test_what_the_backward_pass_keeps():
    """The operands, and a state for each 512 tokens: nothing else as large, and no state of a token."""
    args = [jnp.zeros(shape) for shape in ((1, 999, 2, 16), (1, 999, 2), (2,), (1, 999, 1, 16), (1, 999, 1, 16))]
    _, pull = jax.eval_shape(lambda *args: jax.vjp(ssd, *args), *args)
    kept = sorted(a.shape for a in jax.tree.leaves(pull))
    assert kept == sorted([*(a.shape for a in args), (1, 2, 2, 16, 16)])


@pytest.mark.parametrize("begins", [(512, 1300), None], ids=str)
def test_pieces(rng, monkeypatch, begins):
    """A row in four pieces, which are computed as plain JAX, has its own numbers, with segments that begin where a
    piece does, and elsewhere. Weighed tokens of pieces are rounded to bf16."""
    monkeypatch.setattr(kernels, "_LEAST_PIECES", (2, kernels.KEPT))
    rows, s, h, p, n = 2, 4 * kernels.KEPT, 2, 8, 8
    draw = lambda *shape: on_device(rng.standard_normal((rows, *shape)), jnp.bfloat16)
    x, dt, B, C, dy = draw(s, h, p), draw(s, h) - 5, draw(s, 1, n), draw(s, 1, n), draw(s, h, p)
    initial, dfinal = (draw(h, p, n).astype(jnp.float32) for _ in range(2))
    segments = None if begins is None else jnp.searchsorted(jnp.array(begins, int), jnp.arange(s), side="right")
    segments = None if begins is None else jnp.broadcast_to(segments, (rows, s)).astype(jnp.int32)
    scanned = x, dt, -jnp.ones(h), B, C, None
    operands, of_bwd = (*scanned, None, None, segments), (*scanned, None, segments)
    attrs = dict(softplus=True, least=0.0, most=8.0, shared=1)
    called = []

    def bwd(*operands, outputs, slab_rows, slab_tokens, slab_heads, **attrs):
        return [a for a in scan._bwd_reference(*operands, **attrs) if a is not None]

    def of_pieces(reference):
        return lambda x, *args, **attrs: called.append(x.shape) or reference(x, *args, **attrs)

    @jax.jit
    def run():
        want = scan._reference(*operands, initial, **attrs)
        got = kernels.scan(None, of_pieces(scan._reference), *operands, initial, **attrs)
        back = [a for a in scan._bwd_reference(dy, dfinal, *of_bwd, want[2], **attrs) if a is not None]
        call = partial(of_pieces(bwd), outputs=("dx", "ddt", "dA", "dB", "dC", "dinitial"))
        return got, want, kernels.scan_bwd(None, call, dy, dfinal, *of_bwd, want[2], **attrs), back

    *forward, got, want = run()
    assert called == [(8, kernels.KEPT, h, p)] * 2
    forward = zip(*forward) if begins is None else [*zip(*forward)][:2]  # a piece keeps no state of another run
    for mine, due in (*forward, *zip(got, want, strict=True)):
        due = np.asarray(due, np.float32)
        np.testing.assert_allclose(np.asarray(mine, np.float32), due, rtol=0, atol=2.0**-7 * np.abs(due).max())


@pytest.mark.parametrize("at", range(5), ids=["rows", "tokens", "heads", "channels", "states"])
def test_a_size_of_zero(at):
    b, s, h, p, n = (0 if i == at else size for i, size in enumerate((2, 5, 2, 8, 8)))
    x, dt, B = jnp.zeros((b, s, h, p)), jnp.zeros((b, s, h)), jnp.zeros((b, s, 1, n))
    y, pull = jax.vjp(lambda x, dt, B, C: ssd(x, dt, -jnp.ones(h), B, C, jnp.ones(h)), x, dt, B, B)
    assert y.shape == x.shape
    assert [grad.shape for grad in pull(y)] == [x.shape, dt.shape, B.shape, B.shape]
