"""Grouping, permutation and combination in numpy, token by token: written apart from te_jax.ops.permute."""

import ml_dtypes
import numpy as np

ALIGNMENT = 128


def group(experts, num_experts):
    """offsets, counts, rows, slots of experts [T, k], by lists of each expert's pairs."""
    pairs_of = [[] for _ in range(num_experts)]
    for pair, expert in enumerate(experts.ravel().tolist()):
        if 0 <= expert < num_experts:
            pairs_of[expert].append(pair)
    total = experts.size + (ALIGNMENT - 1) * min(num_experts, experts.size)
    slots = np.full(-(-total // ALIGNMENT) * ALIGNMENT, -1)
    rows, offsets = np.full(experts.size, -1), [0]
    for pairs in pairs_of:
        for at, pair in enumerate(pairs, offsets[-1]):
            rows[pair], slots[at] = at, pair
        offsets.append(-(-(offsets[-1] + len(pairs)) // ALIGNMENT) * ALIGNMENT)
    return np.array(offsets), np.array([len(p) for p in pairs_of]), rows.reshape(experts.shape), slots


def permute(x, rows, total, weights=None):
    """f32[total, h]: each token's row of x, times its weight, where `rows` [T, k] says; zeros elsewhere."""
    out = np.zeros((total, x.shape[1]), np.float32)
    for token, positions in enumerate(rows):
        for choice, row in enumerate(positions):
            if row >= 0:
                factor = np.float32(1) if weights is None else np.float32(weights[token, choice])
                out[row] = np.float32(x[token]) * factor  # one rounding
    return out


def fp8(values, scale, dtype):
    """values times scale, a power of 2, clipped to the finite numbers of dtype and rounded to it."""
    most = float(ml_dtypes.finfo(dtype).max)
    return np.clip(values * np.float32(scale), -most, most).astype(dtype)


def combine(buffer, rows, weights=None):
    """f64: each token's sum of its rows times their weights, and the sum of the terms' sizes, [T, h] each."""
    sums, sizes = np.zeros((2, len(rows), buffer.shape[1]))
    for token, positions in enumerate(rows):
        for choice, row in enumerate(positions):
            if row >= 0:
                term = np.float64(buffer[row]) * (1 if weights is None else np.float64(weights[token, choice]))
                sums[token] += term
                sizes[token] += np.abs(term)
    return sums, sizes


def weight_gradient(dy, buffer, rows):
    """f64: dy of each token times each of its rows, and the sum of the terms' sizes, [T, k] each."""
    sums, sizes = np.zeros((2, *rows.shape))
    for token, positions in enumerate(rows):
        for choice, row in enumerate(positions):
            if row >= 0:
                terms = np.float64(dy[token]) * np.float64(buffer[row])
                sums[token, choice], sizes[token, choice] = terms.sum(), np.abs(terms).sum()
    return sums, sizes
