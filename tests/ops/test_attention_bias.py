"""ALiBi against the paper's numbers, and a bias made one entry at a time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import on_device
from attention_oracle import BOUND, error, operands

from te_jax.ops.attention import SequenceDescriptor, dot_product_attention
from te_jax.ops.attention_bias import alibi_bias, alibi_slopes

S8 = [2.0**-i for i in range(1, 9)]  # "for 8 heads 1/2, 1/4 ... 1/256"
S16 = [2 ** (-i / 2) for i in range(1, 17)]  # "for 16 heads": every second one is one of 8 heads


@pytest.mark.parametrize(
    ("h", "want"),
    [
        (1, [2.0**-8]),
        (2, [2.0**-4, 2.0**-8]),
        (8, S8),
        (16, S16),
        (3, [2.0**-4, 2.0**-8, 2.0**-2]),
        (12, [*S8, *S16[:8:2]]),
        (15, [*S8, *S16[:14:2]]),
        (20, [*S16, *(2 ** (-i / 4) for i in (1, 3, 5, 7))]),
    ],
)
def test_slopes(h, want):
    got = alibi_slopes(h)
    assert got.dtype == jnp.float32
    np.testing.assert_array_equal(got, np.float32(want))  # both rounded once, from float64


def by_entry(slopes, s, t, first):
    return np.array([[[-m * abs(first + i - j) for j in range(t)] for i in range(s)] for m in slopes])


@pytest.mark.parametrize(("s", "t"), [(1, 1), (5, 5), (3, 7), (7, 3), (1, 199)])
def test_bias(s, t, rng):
    slopes = rng.uniform(0.1, 1, 3).astype(np.float32)
    cases = [({}, 0), (dict(bottom_right=True), t - s), (dict(q_offset=4), 4), (dict(q_offset=jnp.int32(-2)), -2)]
    for kwargs, first in cases:
        got = alibi_bias(jnp.asarray(slopes), s, t, **kwargs)
        assert got.dtype == jnp.float32 and got.shape == (3, s, t)
        # The distances are exact in f32: one rounding, of the product.
        np.testing.assert_allclose(got, by_entry(slopes.astype(float), s, t, first), rtol=2**-24)


def test_rows_of_their_own(rng):
    slopes, first = on_device(rng.uniform(0.1, 1, 3), jnp.float32), jnp.asarray([0, 9, 4])
    got = jax.jit(lambda slopes, at: alibi_bias(slopes, 2, 11, q_offset=at))(slopes, first)
    np.testing.assert_array_equal(got, np.stack([alibi_bias(slopes, 2, 11, q_offset=int(at)) for at in first]))


def test_gradient_of_the_slopes(rng):
    slopes = on_device(rng.uniform(0.1, 1, 3), jnp.bfloat16)
    dbias = rng.integers(-9, 9, (2, 3, 4, 6))  # small integers: sums are exact
    at = jnp.asarray([1, 5])
    got = jax.grad(lambda m: jnp.sum(alibi_bias(m, 4, 6, q_offset=at) * dbias))(slopes.astype(jnp.float32))
    distance = np.stack([-by_entry([1], 4, 6, first) for first in (1, 5)])
    np.testing.assert_array_equal(got, -np.sum(distance * dbias, (0, 2, 3)))
    assert alibi_bias(slopes, 4, 6).dtype == jnp.float32
    assert jax.grad(lambda m: jnp.sum(alibi_bias(m, 4, 6)))(slopes).dtype == jnp.bfloat16


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: alibi_slopes(0), ValueError, "num_heads is 0"),
        (lambda: alibi_slopes(8.0), ValueError, r"num_heads is 8\.0"),
        (lambda: alibi_bias(jnp.ones((2, 2)), 3, 3), ValueError, r"slopes has shape \(2, 2\)"),
        (lambda: alibi_bias(jnp.ones(2, int), 3, 3), TypeError, "slopes is int32"),
        (lambda: alibi_bias(jnp.ones(2), -1, 3), ValueError, "s is -1"),
        (lambda: alibi_bias(jnp.ones(2), 3, 3.5), ValueError, r"t is 3\.5"),
        (lambda: alibi_bias(jnp.ones(2), 3, 3, bottom_right=True, q_offset=1), ValueError, "bottom_right is True"),
        (lambda: alibi_bias(jnp.ones(2), 3, 3, q_offset=jnp.ones((2, 2), int)), ValueError, r"q_offset has shape"),
        (lambda: alibi_bias(jnp.ones(2), 3, 3, q_offset=1.5), TypeError, "q_offset is float32"),
    ],
)
def test_errors(call, error, text):
    with pytest.raises(error, match=f"alibi_.*: {text}"):
        call()


ALIBI_CASES = {  # s, t, mask type, lengths
    "square": (6, 6, "causal", None),
    "bottom_right": (5, 9, "causal_bottom_right", None),
    "lengths": (7, 7, "padding", ((7, 3), (5, 6))),
    "lengths_bottom_right": (6, 8, "padding_causal_bottom_right", ((2, 6), (8, 3))),
    "lengths_beyond_the_row": (6, 8, "padding_causal_bottom_right", ((2, 9), (12, 3))),
}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("case", ALIBI_CASES)
def test_slopes_of_an_attention(case, dtype):
    """The keyword is the bias of its rows, to the last gradient, whichever implementation."""
    s, t, mask_type, lengths = ALIBI_CASES[case]
    q, k, v, dout = operands((2, s, t, 4, 2, 16, 16), dtype)
    slopes, kwargs = alibi_slopes(4), dict(attn_mask_type=mask_type)
    if lengths:
        kwargs["sequence_descriptor"] = SequenceDescriptor.from_seqlens(tuple(map(jnp.array, lengths)))
    first = np.zeros(2) if "bottom_right" not in mask_type else np.full(2, t - s)
    if lengths and "bottom_right" in mask_type:
        first = np.subtract(np.minimum(lengths[1], t), np.minimum(lengths[0], s))
    distance = np.abs(first[:, None, None] + np.arange(s)[:, None] - np.arange(t))
    bias = lambda slopes: -slopes[:, None, None] * jnp.asarray(distance, jnp.float32)[:, None]

    @jax.jit
    def both(dout, *args):
        by_slopes = lambda q, k, v, slopes: dot_product_attention(q, k, v, alibi_slopes=slopes, **kwargs)
        by_bias = lambda q, k, v, slopes: dot_product_attention(q, k, v, bias=bias(slopes), **kwargs)
        (got, vjp), (want, want_vjp) = jax.vjp(by_slopes, *args), jax.vjp(by_bias, *args)
        return (got, *vjp(dout)), (want, *want_vjp(dout))

    for x, y in zip(*both(dout, q, k, v, slopes), strict=True):
        assert np.any(np.asarray(y, np.float32)) and error(x, y) <= BOUND[dtype][1]


@pytest.mark.parametrize(
    ("kwargs", "text"),
    [
        (dict(alibi_slopes=jnp.ones(3)), r"alibi_slopes has shape \(3,\).*h = 4"),
        (dict(alibi_slopes=jnp.ones(4), bias=jnp.ones((6, 6)), attn_bias_type="pre_scale_bias"), "pre_scale_bias"),
        (
            dict(
                alibi_slopes=jnp.ones(4),
                sequence_descriptor=SequenceDescriptor.from_segment_ids_and_pos(jnp.ones((2, 6), jnp.int32)),
            ),
            "several segments a row",
        ),
    ],
)
def test_slopes_that_do_not_fit(kwargs, text):
    q = jnp.ones((2, 6, 4, 16))
    with pytest.raises(ValueError, match=text):
        dot_product_attention(q, q, q, **kwargs)
