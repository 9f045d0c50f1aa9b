"""Which blocks a device computes of attention over a cut sequence, and the order that balances them."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from te_jax.ops.attention.context_plan import Layout
from te_jax.ops.attention.mask import Band
from te_jax.sharding import (
    causal_load_balanced_positions,
    inverse_reorder_causal_load_balancing,
    reorder_causal_load_balancing,
)

# -- the blocks ----------------------------------------------------------------------------------------------


def shown(band, s, t):
    """1 where one of s queries sees one of t keys, else 0; in numpy."""
    distance = np.arange(t) - np.arange(s)[:, None] - band.shift(s, t)
    left, right = (np.inf if size is None else size for size in band[:2])
    return ((-left <= distance) & (distance <= right)).astype(int)


def covered(layout, steps, ring):
    """How often each query sees each key."""
    q_size, k_size = layout.sizes()
    tokens = lambda device, size: np.concatenate([np.arange(c * size, (c + 1) * size) for c in layout.held(device)])
    seen = np.zeros((layout.s, layout.t), int)
    for step, plans in steps:
        for device, plan in enumerate(plans):
            keys = tokens((device - step) % layout.cp, k_size) if ring else np.arange(layout.t)
            for call in plan:
                block = shown(call.band, call.q[1], call.k[1])
                assert min(call.band.left or 0, call.band.right or 0) >= 0  # what kernels take
                rows = tokens(device, q_size)[call.q[0] : sum(call.q)]
                seen[np.ix_(rows, keys[call.k[0] : sum(call.k)])] += block
    return seen


@pytest.mark.parametrize("balanced", [False, True])
@pytest.mark.parametrize("cp", [2, 3, 4])
def test_each_key_is_seen_once_where_the_band_shows_it(cp, balanced):
    for (s, t), left, right, bottom_right in itertools.product(
        ((24, 24), (24, 48), (48, 24)), (None, 0, 1, 7, 30), (None, 0, 2, 11), (False, True)
    ):
        layout, band = Layout(cp, balanced, s, t), Band(left, right, bottom_right)
        want = shown(band, s, t)
        for fuse in (True, False):
            np.testing.assert_array_equal(covered(layout, layout.ring(band, fuse), True), want)
            np.testing.assert_array_equal(covered(layout, [(0, layout.gathered(band, fuse))], False), want)


def test_the_work_is_balanced_and_hidden_blocks_are_left_out():
    causal = Band(None, 0, False)
    for balanced in (False, True):
        steps = Layout(4, balanced, 64, 64).ring(causal, True)
        work = [[sum(c.q[1] * c.k[1] for c in plan) for plan in plans] for _, plans in steps]
        if balanced:
            assert work == [[16 * 16] * 4] + [[16 * 8] * 4] * 3
            assert all(len(plan) == 1 for _, plans in steps for plan in plans)  # each step is one call
        else:
            assert work[1:] == [[0] * n + [16 * 16] * (4 - n) for n in (1, 2, 3)]
    assert [n for n, _ in Layout(8, False, 64, 64).ring(Band(8, 0, False), True)] == [0, 1]
    assert [n for n, _ in Layout(8, False, 64, 64).ring(Band(9, 1, False), True)] == [0, 1, 2, 7]


# -- the order that balances ---------------------------------------------------------------------------------


@pytest.mark.parametrize("xp", [np, jnp])
def test_reordering(xp):
    x = xp.arange(3 * 12 * 2).reshape(3, 12, 2)
    got = reorder_causal_load_balancing(x, 3)
    assert isinstance(got, np.ndarray) == (xp is np)
    order = [0, 1, 10, 11, 2, 3, 8, 9, 4, 5, 6, 7]
    np.testing.assert_array_equal(got, x[:, np.asarray(order)])
    np.testing.assert_array_equal(inverse_reorder_causal_load_balancing(got, 3), x)
    np.testing.assert_array_equal(causal_load_balanced_positions(12, 3), order)
    for axis in (0, -1):
        y = xp.arange(8 * 12 * 16).reshape(8, 12, 16)
        there = reorder_causal_load_balancing(y, 4, axis=axis)
        assert not np.array_equal(there, y)
        np.testing.assert_array_equal(inverse_reorder_causal_load_balancing(there, 4, axis=axis), y)
    with pytest.raises(ValueError, match="axis 1 of x has 12 positions, which 10 chunks .* cp_size=5"):
        reorder_causal_load_balancing(x, 5)
    with pytest.raises(ValueError, match="^inverse_reorder.*cp_size is 0"):
        inverse_reorder_causal_load_balancing(x, 0)
    with pytest.raises(ValueError, match=r"axis is 3, but x has shape \(3, 12, 2\)"):
        reorder_causal_load_balancing(x, 1, axis=3)
