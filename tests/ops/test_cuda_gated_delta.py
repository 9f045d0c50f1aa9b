"""On the GPU: the kernels of the gated delta rule against one token after the other in float64."""

import ctypes
from functools import partial

import delta_oracle as oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ssm_oracle import both

from te_jax.ops import formats
from te_jax.ops.delta import gated_delta, kernels
from te_jax.ops.delta.rule import gated_delta_bwd, gated_delta_fwd
from te_jax.ops.ssm.pieces import pieces_of

pytestmark = pytest.mark.gpu
bf16, f32 = jnp.bfloat16, jnp.float32
# s, h, g, d, e, absent: one token, less than a chunk of 64, a chunk, one more, some of the 1024 after which a state is
# kept; tiles that are full, and not; more heads of a key than a CTA has warps. On a GPU also many chunks.
CASES = [
    (1, 4, 2, 8, 8, ()),
    (37, 2, 2, 16, 40, ()),
    (64, 1, 1, 128, 128, ("initial_state",)),
    (65, 2, 2, 64, 64, ("segments",)),
    (130, 4, 2, 128, 72, ()),
    (70, 5, 1, 16, 64, ()),
    (1090, 1, 1, 24, 72, ()),
    (1090, 1, 1, 8, 8, ("initial_state",)),
    (66, 2, 1, 16, 328, ()),
    (4099, 2, 1, 128, 128, ()),
]
# With a gate for each channel: several bands of 16 tokens, a chunk that is not full, one more.
CHANNEL_CASES = [
    (1, 2, 2, 8, 8, ()),
    (37, 2, 1, 16, 40, ()),
    (64, 1, 1, 128, 128, ("initial_state",)),
    (65, 2, 2, 64, 64, ("segments",)),
    (130, 1, 1, 72, 72, ()),
    (1090, 1, 1, 8, 8, ()),
    (66, 2, 1, 16, 328, ()),
    (4099, 2, 2, 128, 128, ()),
]
LITTLE = [CASES[3], (65, 1, 1, 128, 8, ())]  # with little shared memory
# The state, its difference from v, the inverse, what a token writes, and what is seen or left of that are rounded to
# bf16 as operands of products: a term passes at most five roundings, and the row's largest number is as large as any.
ERROR = oracle.ERROR + 5 * 2.0**-9
# In gradients these are the four of what a token writes, or less; on the way back the state's gradient, what reaches a
# token's writing, the inverse, and what that makes of it; and where both meet, what pairs of tokens sum up to.
GRADIENT_ERROR = oracle.ERROR + 9 * 2.0**-9
# With a gate for each channel both factors of what tokens see of each other are rounded, too, and keys and queries that
# read the state or are left of it; on the way back also the gradients to what tokens see.
CHANNEL_ERRORS = ERROR + 2 * 2.0**-9, GRADIENT_ERROR + 3 * 2.0**-9


def check(
    rng, s, h, g, d, e, absent, normalize=True, count=6, by_channel=False, errors=(ERROR, GRADIENT_ERROR), begins=None,
    **drawn,
):  # fmt: skip
    """Results and all gradients of some rows. drawn: operands. begins: of the runs of each row."""
    given, cotangents, segments = oracle.rows_of(rng, s, h, g, d, e, by_channel, bf16, count=count)
    given |= drawn
    if begins is not None:
        segments = np.stack([np.searchsorted(of, np.arange(s), side="right") for of in begins])
    given = {name: a for name, a in given.items() if name not in absent}
    if not normalize:  # of length 1 but for a rounding, so that the state does not grow
        unit = lambda a: (a / np.linalg.norm(a.astype(np.float32), axis=-1, keepdims=True)).astype(a.dtype)
        given |= dict(q=unit(given["q"]), k=unit(given["k"]), beta=given["beta"] * jnp.bfloat16(0.98))
    of = lambda segments: None if "segments" in absent else segments

    def ours(given, segments, cotangents):
        fn = lambda given: gated_delta(**given, segments=of(segments), normalize=normalize, return_final_state=True)
        return both(fn, given, cotangents)

    def theirs(given, segments, cotangents):
        return both(lambda given: oracle.rule(given, of(segments), normalize=normalize), given, cotangents)

    got = jax.jit(jax.vmap(ours))(given, segments, cotangents)
    wide = jax.tree.map(lambda a: a.astype(np.float64), (given, cotangents))
    with jax.enable_x64(True):
        want = jax.device_get(jax.jit(jax.vmap(theirs))(wide[0], segments, wide[1]))
    for at, mine, exact, error in zip(("", "d"), got, want, errors):
        for name, each in mine.items():
            oracle.near(each, exact[name], at + name, error)


@pytest.mark.parametrize("s, h, g, d, e, absent", CASES)
def test_gated_delta(rng, monkeypatch, s, h, g, d, e, absent):
    """The backward pass in slabs of one row and 1024 tokens."""
    monkeypatch.setattr(kernels, "_RULE_SLAB_BYTES", (1, 1))
    check(rng, s, h, g, d, e, absent)


# With more channels a gate's gradient sums more terms, and is more often small by chance. So there are several heads:
# the row's largest number is then as large as any term.
MANY_KEYS = [
    (1, 2, 2, 136, 8, ()),
    (64, 8, 4, 256, 256, ("initial_state",)),
    (130, 4, 2, 256, 456, ()),
    (1090, 2, 1, 192, 64, ("segments",)),
    (4099, 2, 1, 256, 64, ()),
]


@pytest.mark.parametrize("s, h, g, d, e, absent", MANY_KEYS)
def test_more_than_128_channels_of_keys(rng, request, monkeypatch, s, h, g, d, e, absent):
    if request.config.getoption("--host-kernels"):
        pytest.skip("Hopper's kernels are run by tests/build/test_host_delta.py there")
    if not formats.has_hopper_kernels():
        pytest.skip("Hopper's kernels")
    monkeypatch.setattr(kernels, "_RULE_SLAB_BYTES", (1, 1))
    check(rng, s, h, g, d, e, absent)


@pytest.mark.parametrize("s, h, g, d, e, absent", CHANNEL_CASES)
def test_gates_of_channels(rng, monkeypatch, s, h, g, d, e, absent):
    monkeypatch.setattr(kernels, "_RULE_SLAB_BYTES", (1, 1))
    check(rng, s, h, g, d, e, absent, by_channel=True, errors=CHANNEL_ERRORS)


def test_where_products_of_channels_are_split(rng):
    """In the middle of a chunk where the gates of 16 channels leave at least 2**-72 in each half: channels with a
    little more, with a little less, and with both in the same 16."""
    s, h, d, e = 130, 2, 72, 16
    least = np.where(np.arange(d) // 16 % 2, 73, 71) + 4 * (np.arange(d) == 40)
    gate = -(least + rng.uniform(-0.5, 0.5, (2, s, h, d))) * np.log(2) / 32
    check(rng, s, h, h, d, e, (), count=2, by_channel=True, errors=CHANNEL_ERRORS, gate=gate.astype(np.float32))


def test_more_than_128_channels_of_keys_elsewhere(rng, request):
    if not request.config.getoption("--host-kernels"):
        pytest.skip("a GPU that is no Hopper gets plain JAX")
    with pytest.raises(jax.errors.JaxRuntimeError, match="k has 136 channels; more than 128 need compute capability"):
        check(rng, 64, 1, 1, 136, 8, ())


@pytest.mark.parametrize("s, e", [(300, 72), (70, 200)])
@pytest.mark.parametrize("by_channel", [False, True])
def test_more_walks_than_multiprocessors(rng, request, by_channel, s, e):
    """On Hopper a CTA then has two slabs of values, of which one may be empty: 6 x 12 x 2 walks, or 6 x 12."""
    if request.config.getoption("--host-kernels"):
        pytest.skip("Hopper's kernels are run by tests/build/test_host_delta.py there")
    errors = CHANNEL_ERRORS if by_channel else (ERROR, GRADIENT_ERROR)
    check(rng, s, 12, 12, 128, e, (), by_channel=by_channel, errors=errors)


def test_gates_of_a_run_without_a_loss(rng):
    """Their gradients are 0, whatever those of the next run in the chunk: with gates of channels these are sums of
    what is rounded."""
    s, h, d, cut = 64, 1, 16, 24
    given, (dy, _), _ = oracle.rows_of(rng, s, h, h, d, d, True, bf16, count=3)
    given.pop("initial_state")
    ids, dy = np.broadcast_to(np.arange(s) >= cut, (3, s)).astype(np.int32), dy * (np.arange(s) >= cut)[:, None, None]
    _, pull = jax.vjp(lambda gate: gated_delta(**given | dict(gate=gate), segments=ids), given["gate"])
    (dgate,) = jax.device_get(jax.jit(pull)(dy.astype(bf16)))
    assert (dgate[:, :cut] == 0).all()
    assert dgate[:, cut:].any()


def test_slabs_of_several_rows_and_blocks(rng, monkeypatch):
    """Two rows and two blocks of 1024 tokens: a slab is cut short by the rows, and one by the tokens."""
    h, d, e = 1, 8, 8
    of_block = 2 * h * e * 2 * (16 * d + 1024) + 16 * h * kernels._chunk_bytes(d, False)
    monkeypatch.setattr(kernels, "_RULE_SLAB_BYTES", (4 * of_block, 4 * of_block))
    assert kernels._slab_of_rule(3, 2100, h, e, d, False, 0) == dict(slab_rows=3, slab_tokens=1024)
    monkeypatch.setattr(kernels, "CTAS", 2)
    assert kernels._slab_of_rule(3, 2100, h, e, d, False, 0) == dict(slab_rows=2, slab_tokens=2048)
    check(rng, 2100, h, 1, d, e, (), count=3)


def of_pieces(monkeypatch, count):
    """From here on rows of as many times 1024 tokens are cut."""
    for of in ("_LEAST_WALKED", "_LEAST_WALKED_BACK"):
        monkeypatch.setattr(kernels, of, (count, kernels.KEPT))
    assert pieces_of(2, count * kernels.KEPT, 2, 40, kernels.KEPT, kernels._LEAST_WALKED) == count
    return count * kernels.KEPT


@pytest.mark.parametrize(
    "by_channel, h, d, e, absent", [(False, 2, 24, 40, ("segments",)), (True, 1, 8, 8, ()), (False, 1, 8, 8, ())]
)
def test_pieces_of_long_rows(rng, monkeypatch, by_channel, h, d, e, absent):
    """Rows of few heads in pieces, of which one begins with a run; few tokens write, little is forgotten. What begins a
    piece is rounded as a state is, so is what earlier tokens leave of it: once more than in a walk over the whole row.
    """
    rows, s = 2, of_pieces(monkeypatch, 3)
    errors = CHANNEL_ERRORS if by_channel else (ERROR, GRADIENT_ERROR)
    errors = [error + more * 2.0**-9 for error, more in zip(errors, (5, 9))]
    beta = (rng.random((rows, s, h)) * (rng.random((rows, s, h)) < 1 / 128)).astype(bf16)
    gate = -(rng.random((rows, s, h, d) if by_channel else (rows, s, h)) / 1024).astype(np.float32)
    begins = [700, 2 * kernels.KEPT], [2 * kernels.KEPT + 5]
    options = dict(count=rows, by_channel=by_channel, errors=errors, begins=begins)
    check(rng, s, h, 1, d, e, absent, beta=beta, gate=gate, **options)


def test_what_is_not_finite_stays_in_its_run_of_pieces(rng, monkeypatch):
    """On the way back, where a piece ends a run ahead of a key that is NaN; jax's numbers are of 64 bits by default."""
    s, h, d, e, start, bad = of_pieces(monkeypatch, 2), 1, 8, 16, 1200, 1700
    given, (dy, dlast), _ = oracle.rows_of(rng, s, h, h, d, e, False, bf16, count=2)
    ids = np.broadcast_to(np.arange(s) >= start, (2, s)).astype(np.int32)
    spoiled = given | dict(k=given["k"].copy())
    spoiled["k"][:, bad] = np.nan
    fn = lambda given: gated_delta(**given, segments=ids, normalize=True, return_final_state=True)
    with jax.enable_x64(True):
        run = jax.jit(lambda given: jax.vjp(fn, given)[1]((dy, dlast))[0])
        got, want = run(spoiled), run(given)
    oracle.near(got.pop("initial_state"), want.pop("initial_state"), "dinitial_state")
    before = start // 64 * 64  # the chunk gets it
    for name in got:
        assert not np.isfinite(np.asarray(got[name], np.float32)[:, bad]).all()
        oracle.near(got[name][:, :before], want[name][:, :before], f"d{name}")


def test_keys_as_they_are(rng):
    check(rng, 70, 2, 1, 64, 16, (), normalize=False)


@pytest.mark.parametrize("by_channel", [False, True])
@pytest.mark.parametrize("s, h, g, d, e, absent", LITTLE)
def test_little_shared_memory(rng, request, s, h, g, d, e, absent, by_channel):
    """As GPUs have it that are no Hopper: one stage."""
    if not (path := request.config.getoption("--host-kernels")):
        pytest.skip("the GPU's shared memory is what it is")
    held = ctypes.c_int.in_dll(ctypes.CDLL(path), "te_host_shared_bytes")
    request.addfinalizer(lambda before=held.value: setattr(held, "value", before))
    held.value = 99 << 10
    errors = CHANNEL_ERRORS if by_channel else (ERROR, GRADIENT_ERROR)
    check(rng, s, h, g, d, e, absent, by_channel=by_channel, errors=errors)


@pytest.mark.parametrize("by_channel", [False, True])
@pytest.mark.parametrize("end", [72, 100])
def test_what_is_not_finite_stays_in_its_run(rng, end, by_channel):
    """Keys, values, betas and gates, of a run that ends in the chunk where the next one begins, or within the same 16
    tokens: all tokens of that chunk may get it, later chunks not; nor what was in the memory of results."""
    s, bad, h, d, e = 200, 67, 2, 16, 16
    given, _, _ = oracle.rows_of(rng, s, h, h, d, e, by_channel, bf16, count=6)
    given.pop("initial_state")
    ids = np.broadcast_to(np.arange(s) >= end, (6, s)).astype(np.int32)
    clean = {name: a.copy() for name, a in given.items()}
    for name, value in dict(k=np.inf, v=np.nan, beta=np.nan, gate=np.nan).items():
        given[name][:, bad] = value
    unknown = lambda: [jnp.full((6, *shape), jnp.nan, dtype) for shape, dtype in (((s, h, e), bf16), ((h, d, e), f32))]

    @partial(jax.jit, donate_argnums=1, keep_unused=True)
    def run(given, unknown):
        return gated_delta(**given, segments=ids, normalize=True, return_final_state=True)

    (y, final), (want, want_final) = run(given, unknown()), run(clean, unknown())
    chunk = np.arange(s) // 64 == bad // 64
    assert np.isnan(np.asarray(y, np.float32)[:, bad:end]).all()
    # Sums of gates begin with other ones, so numbers are rounded another way: both are as far from what is exact.
    error = CHANNEL_ERRORS[0] if by_channel else ERROR
    oracle.near(y[:, ~chunk], want[:, ~chunk], "y", 2 * error)
    oracle.near(final, want_final, "final", 2 * error)


@pytest.mark.parametrize("by_channel", [False, True])
def test_what_is_not_finite_stays_in_its_run_on_the_way_back(rng, by_channel):
    """As forward, with what stands before the run: gradients of the chunk's tokens, and of earlier ones not; and the
    gradient to a state that a run ahead of it begins with."""
    s, start, bad, h, d, e = 130, 70, 90, 1, 16, 16
    given, (dy, dlast), _ = oracle.rows_of(rng, s, h, h, d, e, by_channel, bf16, count=6)
    ids = np.broadcast_to(np.arange(s) >= start, (6, s)).astype(np.int32)
    spoiled = {name: a.copy() for name, a in given.items()}, dy.copy()
    for name, value in dict(q=np.inf, k=np.nan, v=np.inf, gate=np.nan).items():
        spoiled[0][name][:, bad] = value
    spoiled[1][:, bad + 1] = np.nan
    unknown = lambda: [jnp.full((6, s, h, n), jnp.nan, bf16) for n in (d, d, e)]

    @partial(jax.jit, donate_argnums=1, keep_unused=True)
    def run(given, unknown):
        fn = lambda given: gated_delta(**given, segments=ids, normalize=True, return_final_state=True)
        return jax.vjp(fn, given[0])[1]((given[1], dlast))[0]

    got, want = run(spoiled, unknown()), run((given, dy), unknown())
    chunk = np.arange(s) // 64 == bad // 64
    assert np.isnan(np.asarray(got["v"], np.float32)[:, start : bad + 1]).any()
    first = got.pop("initial_state"), want.pop("initial_state")
    error = CHANNEL_ERRORS[1] if by_channel else GRADIENT_ERROR
    oracle.near(*first, "dinitial_state", 2 * error)
    for name in got:
        before = ~chunk & (np.arange(s) < start)  # as above, of gradients
        oracle.near(got[name][:, before], want[name][:, before], f"d{name}", 2 * error)


@pytest.mark.parametrize("by_channel", [False, True])
def test_rows_of_one_call(rng, monkeypatch, by_channel):
    """Rows have the bits that each has in a call of its own, gradients too, where slabs have two rows of three."""
    rows, s, h, d, e = 3, 70, 2, 16, 8
    of_row = 2 * h * e * 2 * (2 * d + 128) + 2 * h * kernels._chunk_bytes(d, by_channel)
    monkeypatch.setattr(kernels, "_RULE_SLAB_BYTES", (2 * of_row, 2 * of_row))
    assert kernels._slab_of_rule(rows, s, h, e, d, by_channel, 0) == dict(slab_rows=2, slab_tokens=128)
    given, cotangents, segments = oracle.rows_of(rng, s, h, 1, d, e, by_channel, bf16, count=rows)

    @jax.jit
    def run(given, segments, cotangents):
        fn = lambda given: gated_delta(**given, segments=segments, return_final_state=True, normalize=True)
        outs, pull = jax.vjp(fn, given)
        return outs, pull(cotangents)[0]

    got = run(given, segments, cotangents)
    of_row = lambda i: jax.tree.map(lambda a: a[i : i + 1], (given, segments, cotangents))
    each = [run(*of_row(i)) for i in range(rows)]
    jax.tree.map(lambda a, *rows: np.testing.assert_array_equal(a, jnp.concatenate(rows)), got, *each)


def test_no_tokens():
    """The state stays as it is."""
    empty = lambda *shape: jnp.zeros((2, 0, *shape), jnp.bfloat16)
    initial = jnp.arange(2 * 3 * 8 * 8, dtype=jnp.float32).reshape(2, 3, 8, 8)
    tokens = empty(1, 8), empty(1, 8), empty(3, 8), empty(3), empty(3)
    y, final = jax.jit(lambda: gated_delta(*tokens, initial_state=initial, return_final_state=True))()
    assert y.shape == (2, 0, 3, 8)
    np.testing.assert_array_equal(final, initial)


def test_the_one_group_of_a_device(rng):
    """Of several keys a device may have one, with the heads that share it; of one key all heads have it."""
    draw = lambda *shape: jnp.asarray(rng.standard_normal((2, 70, *shape)), jnp.bfloat16)
    operands, dy = (draw(1, 16), draw(1, 16), draw(4, 16), draw(4), -jnp.abs(draw(4, 1)), None), draw(4, 16)
    outputs = ("dq", "dk", "dv", "dbeta", "dgate")

    def run(shared):
        attrs = dict(scale=0.25, normalize=True, shared=shared)
        y, states = gated_delta_fwd(*operands, None, outputs=("y", "states"), **attrs)
        return y, *gated_delta_bwd(dy, None, *operands, states, outputs=outputs, **attrs)

    jax.tree.map(np.testing.assert_array_equal, jax.jit(lambda: run(1))(), jax.jit(lambda: run(4))())


def test_which_calls_have_a_kernel(monkeypatch):
    """One place says it; the others are plain JAX on a GPU, too."""
    of = lambda dtype=bf16, d=128, e=128, c=1: [
        jax.ShapeDtypeStruct((1, 9, 2, n), t) for n, t in ((d, dtype), (d, dtype), (e, dtype), (c, f32))
    ]
    assert all(kernels._rule_has_kernel(*of(**case)) for case in ({}, dict(d=64), dict(e=8), dict(c=128), dict(e=512)))
    without = dict(dtype=f32), dict(d=264), dict(d=136, c=136), dict(e=520), dict(d=12), dict(d=12, c=12)
    assert not any(kernels._rule_has_kernel(*of(**case)) for case in without)
    monkeypatch.setattr(formats.extension, "is_built_for", lambda arch: True)
    for capability, has in (("9.0", True), (None, True), ("8.9", False), ("10.0", False)):
        monkeypatch.setattr(formats.extension, "compute_capability", lambda: capability)  # noqa: B023
        assert kernels._rule_has_kernel(*of(d=256)) == has
