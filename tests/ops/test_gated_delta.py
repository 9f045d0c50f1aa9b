"""The gated delta rule against one token after the other in float64."""

from functools import partial

import delta_oracle as oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from delta_oracle import near, rows_of
from ssm_oracle import both

from te_jax.ops.delta import gated_delta
from te_jax.ops.delta.chunk import inverse

# s, h, g, d, e, gate by channel, dtype, absent: a token, below, at and behind a chunk of 64 and its blocks of 16, and
# behind 1024; both gates; shared keys; all d and types.
PROGRAMS = [
    (1, 2, 1, 64, 16, False, jnp.float32, ()),
    (5, 4, 2, 8, 8, True, jnp.float32, ()),
    (47, 2, 2, 64, 8, True, jnp.bfloat16, ("initial_state",)),
    (63, 4, 2, 16, 16, False, jnp.float16, ("segments",)),
    (64, 2, 1, 64, 64, False, jnp.bfloat16, ()),
    (65, 2, 1, 16, 16, True, jnp.float32, ("segments",)),
    (130, 2, 2, 16, 24, False, jnp.float32, ("initial_state",)),
    (20, 1, 1, 128, 128, False, jnp.float32, ()),
    (17, 1, 1, 128, 16, True, jnp.float16, ()),
    (9, 1, 1, 256, 64, False, jnp.bfloat16, ()),
    (1030, 1, 1, 8, 8, True, jnp.float32, ()),
]


@pytest.mark.parametrize("s, h, g, d, e, by_channel, dtype, absent", PROGRAMS)
def test_gated_delta(rng, s, h, g, d, e, by_channel, dtype, absent):
    """Outputs, final states and all gradients of 24 rows."""
    given, cotangents, segments = rows_of(rng, s, h, g, d, e, by_channel, dtype)
    given = {name: a for name, a in given.items() if name not in absent}
    of = lambda segments: None if "segments" in absent else segments

    def ours(given, segments, cotangents):
        fn = lambda given: gated_delta(**given, segments=of(segments), normalize=True, return_final_state=True)
        return both(fn, given, cotangents)

    def theirs(given, segments, cotangents):
        return both(lambda given: oracle.rule(given, of(segments)), given, cotangents)

    got = jax.jit(jax.vmap(ours))(given, segments, cotangents)
    wide = jax.tree.map(lambda a: a.astype(np.float64), (given, cotangents))
    with jax.enable_x64(True):
        want = jax.device_get(jax.jit(jax.vmap(theirs))(wide[0], segments, wide[1]))
    assert got[0]["y"].dtype == dtype and got[0]["final"].dtype == jnp.float32
    for at, ours_, exact in zip(("", "d"), got, want):
        for name, each in ours_.items():
            near(each, exact[name], at + name)


@pytest.mark.parametrize("by_channel", [False, True])
def test_steps_with_a_beta_of_two_and_a_scale(rng, by_channel):
    """Keys and queries as they are, of length 1; beta up to 2 reflects the state, which does not grow."""
    given, cotangents, _ = rows_of(rng, 70, 2, 1, 16, 8, by_channel, np.float32, count=6)
    unit = lambda a: a / np.linalg.norm(a, axis=-1, keepdims=True)
    given |= dict(q=unit(given["q"]), k=unit(given["k"]), beta=2 * given["beta"])
    of = lambda fn: jax.jit(jax.vmap(lambda given, cotangents: both(fn, given, cotangents)))
    got = of(lambda given: gated_delta(**given, scale=0.5, return_final_state=True))(given, cotangents)
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda a: a.astype(np.float64), (given, cotangents))
        want = jax.device_get(of(partial(oracle.rule, segments=None, scale=0.5, normalize=False))(*wide))
    for ours, exact in zip(got, want):
        for name, each in ours.items():
            near(each, exact[name], name)


@pytest.mark.parametrize("by_channel", [False, True])
def test_steps_are_a_prefill(rng, by_channel):
    """A call for each token, which takes the states of the one before, is as one call; so are two calls."""
    s = 9
    given, _ = oracle.row(rng, "plain", s, 4, 2, 16, 8, by_channel, np.float32)
    start = given.pop("initial_state")

    def calls(ends):
        state, ys = start, []
        for begin, end in zip((0, *ends), ends):
            part = {name: a[begin:end] for name, a in given.items()}
            y, state = gated_delta(**part, normalize=True, initial_state=state, return_final_state=True)
            ys.append(y)
        return jnp.concatenate(ys), state

    whole, *others = jax.jit(lambda: [calls(ends) for ends in ((s,), (4, s), range(1, s + 1))])()
    for other in others:
        for a, b in zip(whole, other, strict=True):
            np.testing.assert_allclose(a, b, 0, 64 * 2.0**-24 * np.abs(a).max())  # nine roundings of a few sums each


def test_similar_keys(rng):
    """One key for all tokens of a chunk, whose system has the largest powers: its inverse has two diagonals."""
    below = np.tril(np.ones((64, 64), np.float32), -1)
    exact = np.eye(64) - np.eye(64, k=-1)
    np.testing.assert_array_equal(inverse(below), exact)
    x = below * rng.standard_normal((3, 64, 64)).astype(np.float32) / 8
    got, (dx,) = (lambda y, pull: (y, pull(jnp.ones_like(y))))(*jax.vjp(inverse, x))
    want = np.linalg.inv(np.eye(64) + x.astype(np.float64))
    np.testing.assert_allclose(got, want, 0, 64 * 2.0**-24 * np.abs(want).max())
    ones = np.ones((64, 64))
    of_x = -np.swapaxes(want, 1, 2) @ ones @ np.swapaxes(want, 1, 2)
    np.testing.assert_allclose(dx, of_x, 0, 256 * 2.0**-24 * np.abs(of_x).max())


def test_what_the_backward_pass_keeps():
    """The operands, and a state for each 1024 tokens: nothing else as large, and no state of a token."""
    args = [jnp.zeros(shape) for shape in (*[(1, 1999, 1, 16)] * 2, (1, 1999, 2, 8), (1, 1999, 2), (1, 1999, 2, 16))]
    _, pull = jax.eval_shape(lambda *args: jax.vjp(gated_delta, *args), *args)
    kept = sorted(a.shape for a in jax.tree.leaves(pull))
    assert kept == sorted([*(a.shape for a in args), (1, 2, 2, 16, 8)])


@pytest.mark.parametrize("at", range(4), ids=["rows", "tokens", "heads", "values"])
def test_a_size_of_zero(at):
    b, s, h, e = (0 if i == at else size for i, size in enumerate((2, 5, 2, 8)))
    k, v, beta = jnp.zeros((b, s, 1, 4)), jnp.zeros((b, s, h, e)), jnp.zeros((b, s, h))
    (y, final), pull = jax.vjp(partial(gated_delta, return_final_state=True), k, k, v, beta, beta)
    assert y.shape == v.shape and final.shape == (b, h, 4, e)
    assert [grad.shape for grad in pull((y, final))] == [k.shape, k.shape, v.shape, beta.shape, beta.shape]


WRONG = [
    (dict(v=jnp.ones((6, 4))), ValueError, r"gated_delta: v has shape \(6, 4\); pass \[b..., s, h, e\]"),
    (dict(k=jnp.ones((2, 6, 3, 8))), ValueError, r"gated_delta: k has shape .*, where g divides the 4 heads of v"),
    (dict(q=jnp.ones((2, 6, 2, 4))), ValueError, r"q has shape \(2, 6, 2, 4\); pass \[2, 6, 2, 8\]"),
    (dict(beta=jnp.ones((2, 6))), ValueError, r"beta has shape \(2, 6\); pass \[2, 6, 4\]"),
    (dict(gate=jnp.ones((2, 6, 4, 3))), ValueError, r"gate has shape .*; pass \[2, 6, 4\] or \[2, 6, 4, 8\]"),
    (dict(initial_state=jnp.ones((2, 4, 16, 8))), ValueError, r"initial_state has shape .*; pass \[2, 4, 8, 16\]"),
    (dict(segments=jnp.ones((2, 6))), TypeError, "gated_delta: segments is float"),
    (dict(segments=jnp.ones((2, 5), int)), ValueError, r"segments has shape \(2, 5\); pass \[2, 6\]"),
    (dict(scale="1"), TypeError, "gated_delta: scale is '1'"),
    (dict(beta=None), TypeError, "gated_delta: beta is None"),
    (dict(q=jnp.ones((2, 6, 2, 8), jnp.float8_e4m3fn)), TypeError, "q is float8_e4m3fn.*; pass .* of 16 bits or more"),
]


@pytest.mark.parametrize("changed, error, message", WRONG)
def test_wrong_calls(changed, error, message):
    right = dict(q=jnp.ones((2, 6, 2, 8)), k=jnp.ones((2, 6, 2, 8)), v=jnp.ones((2, 6, 4, 16)))
    right |= dict(beta=jnp.ones((2, 6, 4)), gate=jnp.zeros((2, 6, 4)))
    with pytest.raises(error, match=message):
        jax.eval_shape(lambda: gated_delta(**(right | changed)))
