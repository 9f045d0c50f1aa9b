"""Attention of one query per row as the CUDA lowering computes it, with the reference in place of the kernel."""

import jax
import numpy as np
import pytest
from attention_oracle import OPEN

from te_jax.ops.attention import reference
from te_jax.ops.attention.decode import one_query, pieces_of_row

NO_BIAS = (None,) * 3  # kv, qkv, bias
ATTRS = dict(OPEN, scale=0.3)


def forward(q, k, v, segments):
    out, lse, _, top = reference.forward(q, k, v, *NO_BIAS, segments, None, **ATTRS)
    return out, lse, top


# First query, queries, first key, keys: a full row, pieces of a row, only one piece, none, none of queries, absent.
SEGMENTS = [(0, 1, 0, 2048), (0, 1, 5, 1300), (0, 1, 600, 100), (0, 1, 0, 0), (0, 0, 0, 77), (-1, 1, 0, 2048)]


@pytest.mark.parametrize("heads", [(4, 2), (3, 3), (6, 1)], ids=str)
@pytest.mark.parametrize("t,pieces", [(2048, 4), (1020, 1)], ids=str)
@pytest.mark.parametrize("given", [False, True], ids=["", "segments"])
def test_one_query_is_forward(heads, t, pieces, given):
    (h, g), rng = heads, np.random.default_rng(0)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
    q, k, v = draw(3, 2, 1, h, 16), draw(3, 2, t, g, 16), draw(3, 2, t, g, 8)
    segments = np.minimum(np.asarray(SEGMENTS, np.int32).reshape(3, 2, 1, 4), t) if given else None
    seen = []

    def run(*operands):
        seen.append([x.shape for x in operands[:2]])
        return forward(*operands)

    both = jax.jit(lambda *operands: (one_query(run, *operands), forward(*operands)))
    (out, lse, top), (want_out, want_lse, want_top) = both(q, k, v, segments)
    assert seen == [[(6 * pieces, max(h // g, 2), g, 16), (6 * pieces, t // pieces, g, 16)]]
    assert out.shape == want_out.shape and lse.shape == want_lse.shape and top.shape == want_top.shape
    # f32 sums of up to t terms in another order, of numbers of size 1
    np.testing.assert_allclose(out, want_out, atol=1e-5)
    np.testing.assert_allclose(lse, want_lse, rtol=1e-6, atol=1e-5)
    np.testing.assert_allclose(top, want_top, rtol=1e-6, atol=1e-5)
    if given:
        assert np.all(np.asarray(lse).reshape(6, h)[3:] == -np.inf) and not np.any(np.asarray(out).reshape(6, -1)[3:])


def test_pieces():
    assert pieces_of_row(8, 32768) == 16 and pieces_of_row(8, 2048) == 4
    assert pieces_of_row(128, 32768) == 1 and pieces_of_row(1, 1023) == 1 and pieces_of_row(1, 3 * 1024) == 4
