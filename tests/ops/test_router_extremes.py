"""Routers and their losses at the ends of f32's range, values and gradients, against float64."""

import itertools
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import router_oracle as oracle

from te_jax.ops.router import RouterOptions, Routing, load_balancing_loss, route, z_loss

TOP = float(np.finfo("f4").max)
HALF = TOP / 4
NUMBERS = [0.0, 1e-45, 1e-30, 5.0, 20.0, 23.0, 45.0, 46.1, 50.0, 88.0, 100.0, 140.0, 1e4, 1e30, TOP]
KINDS = {
    "after": {},
    "before": dict(use_pre_softmax=True),
    "before_normalized": dict(use_pre_softmax=True, normalize=True),
    "sigmoid": dict(score_function="sigmoid", scaling_factor=2.5),
    "sigmoid_plain": dict(score_function="sigmoid", normalize=False),
    "sqrt_softplus": dict(score_function="sqrt_softplus", scaling_factor=1.5),
}
E, K = 6, 2


def extreme_logits(rng):
    """Rows of one number, of one and a usual neighbour, of pairs of numbers; and usual ones, for their neighbours."""
    numbers = [sign * n for n in NUMBERS for sign in (1, -1)]
    rows = [[n] * E for n in numbers] + [[n, n + 1, n - 0.5, n, n + 0.25, n] for n in numbers if abs(n) < 200]
    rows += [rng.permutation([n, n, *[-TOP] * (E - 2)]) for n in numbers]  # all but two are out of the question
    rows += [rng.choice(numbers, E) for _ in range(40)] + list(rng.standard_normal((10, E)))
    return np.asarray(rows, np.float32)


def wrong(got, want, atol):
    """Which entries are not `want`, f64, within the roundings of f32.

    A logarithm of a score, of at most 150 where the score has an f32, is off by 2**-24 of itself, three times. Over the
    least sum that scores are not taken times e**46 at, 1e-10, a score that has no f32 is 2**-126 * 2**34.
    """
    got = np.asarray(got, np.float64)
    return ~(np.abs(got - want) <= 2.0**-15 * np.abs(want) + atol + 2.0**-92)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_extreme_logits(kind, biased, rng):
    """With a bias that has experts chosen whose scores are small, too."""
    options, logits = RouterOptions(K, **KINDS[kind]), extreme_logits(rng)
    bias = jnp.asarray([0, 0, 0, 0, 9, 8.0] if biased else [0.0] * E)
    dweights = rng.standard_normal((len(logits), K)).astype(np.float32)

    @jax.jit
    def run(logits):
        routing, transpose = jax.vjp(lambda logits: route(logits, options, expert_bias=bias), logits)
        zeros = lambda x: np.zeros(x.shape, jax.dtypes.float0)
        return routing, transpose(Routing(dweights, zeros(routing.experts), zeros(routing.counts)))[0]

    routing, dlogits = jax.device_get(run(logits))
    rows = logits.astype(np.float64)
    want = np.array([oracle.weigh(row.tolist(), each, options) for row, each in zip(rows, routing.experts)])
    assert not wrong(routing.weights, want, 0).any()
    dwant = np.array([oracle.gradient(*each, options) for each in zip(rows, routing.experts, dweights)])
    # A difference of numbers up to the largest weight times its gradient, here and in the sum over all experts.
    atol = 2.0**-18 * np.max(np.abs(want), -1, keepdims=True) * np.abs(dweights).max(-1, keepdims=True)
    assert not (off := wrong(dlogits, dwant, atol)).any(), logits[off.any(-1)]


@pytest.mark.parametrize("per_sequence", [False, True])
@pytest.mark.parametrize("kind", ["after", "sigmoid", "sqrt_softplus"])
def test_extreme_logits_of_losses(kind, per_sequence, rng):
    options, logits = RouterOptions(K, **KINDS[kind]), extreme_logits(rng)[None]
    tokens, rows = logits.shape[1], logits[0].astype(np.float64)
    experts = np.asarray(route(logits, options).experts)
    balance = lambda logits: load_balancing_loss(logits, experts, options, per_sequence=per_sequence)
    loss, grad = jax.device_get(jax.jit(jax.value_and_grad(balance))(logits))
    counts = Counter(itertools.chain(*experts[0].tolist()))
    every = RouterOptions(E, options.score_function, True, normalize=options.score_function != "softmax")
    slope = np.array([counts[e] for e in range(E)]) / tokens * E / K
    scores = np.array([oracle.weigh(row.tolist(), range(E), every) for row in rows])
    np.testing.assert_allclose(loss, scores.mean(0) @ slope, rtol=2.0**-15)
    want = np.array([oracle.gradient(row, np.arange(E), slope / tokens, every) for row in rows])
    atol = 2.0**-20 * slope.max() / tokens * scores.max(-1, keepdims=True)
    assert not (off := wrong(grad[0], want, atol)).any(), rows[off.any(-1)]


def test_extreme_logits_of_z_loss(rng):
    """Its gradient is 2 lse times the softmax, which f32 holds where it does not hold the loss: from lse = 2**64 on."""
    logits = extreme_logits(rng)
    logits = logits[np.abs(logits).max(-1) < 2.0**127]  # else 2 lse has no f32
    loss, grad = jax.device_get(jax.jit(jax.value_and_grad(z_loss))(logits))
    rows = logits.astype(np.float64)
    lse = np.logaddexp.reduce(rows, -1, keepdims=True)
    powers = np.exp(rows - rows.max(-1, keepdims=True))
    want = 2 * lse * powers / powers.sum(-1, keepdims=True) / len(rows)
    atol = 2.0**-22 * (2 + np.abs(rows.max(-1, keepdims=True))) / len(rows)  # lse is a sum of the largest and log(E)
    assert np.isinf(loss) and not (off := wrong(grad, want, atol)).any(), rows[off.any(-1)]
    small = logits[np.abs(logits).max(-1) < 2.0**63]
    np.testing.assert_allclose(z_loss(small), np.mean(lse[np.abs(rows).max(-1) < 2.0**63] ** 2), rtol=2.0**-18)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_on_a_gpu_are_the_cpus(kind, rng):
    """Of tokens with the same experts: a rounding may choose another of two equal ones."""
    options, logits = RouterOptions(K, **KINDS[kind]), extreme_logits(rng)
    dweights = rng.standard_normal((len(logits), K)).astype(np.float32)

    def run(logits):
        routing, transpose = jax.vjp(lambda logits: route(logits, options), logits)
        zeros = lambda x: np.zeros(x.shape, jax.dtypes.float0)
        (dlogits,) = transpose(Routing(dweights, zeros(routing.experts), zeros(routing.counts)))
        balance = jax.grad(load_balancing_loss)(logits, jnp.zeros_like(routing.experts), options)
        return routing.experts, routing.weights, dlogits, balance, jax.grad(z_loss)(jnp.clip(logits, -HALF, HALF))

    on = lambda backend: jax.device_get(jax.jit(run)(jax.device_put(logits, jax.devices(backend)[0])))
    (experts, weights, *grads), (same, *wants) = on("gpu"), on("cpu")
    alike = (experts == same).all(-1)
    assert alike.mean() > 0.8
    for got, want in zip((weights, *grads), wants):
        atol = 2.0**-17 * np.abs(want).max(-1, keepdims=True)
        if want is wants[1]:  # as above
            atol = 2.0**-17 * np.abs(wants[0]).max(-1, keepdims=True) * np.abs(dweights).max(-1, keepdims=True)
        assert np.isfinite(got).all() and not wrong(got, want.astype(np.float64), atol)[alike].any()
