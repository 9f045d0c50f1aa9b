"""te_jax.ops.router against loops in float64; its losses; its errors; meshes and vmap by tests/core/test_op.py."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import router_oracle as oracle
from arrays import on_device

from te_jax.ops.router import RouterOptions, Routing, load_balancing_loss, route, updated_expert_bias, z_loss

KINDS = {
    "after": {},
    "before": dict(use_pre_softmax=True),
    "before_normalized": dict(use_pre_softmax=True, normalize=True),
    "sigmoid": dict(score_function="sigmoid", scaling_factor=2.5),
    "sigmoid_plain": dict(score_function="sigmoid", normalize=False),
    "sqrt_softplus": dict(score_function="sqrt_softplus", scaling_factor=1.5),
}
SIZES = [(1, 1), (3, 1), (3, 2), (8, 1), (8, 2), (8, 8), (128, 1), (128, 8)]  # experts, choices
GROUPS = {"": {}, "groups": dict(num_groups=4, group_topk=2)}
# f32 against f64: exp and sigmoid are right to a few ulps of 2**-24, a softmax divides by a sum of 128 of them.
CLOSE = dict(rtol=2.0**-18, atol=2.0**-24)


def options_of(kind, experts, topk, groups) -> RouterOptions | None:
    more = GROUPS[groups] if experts % 4 == 0 and topk <= experts // 2 else {}
    return None if groups and not more else RouterOptions(topk, **KINDS[kind], **more)


def logits_of(rng, tokens, experts, dtype):
    """Random logits with ties: a third of the rows in steps of 1/2, one of one value."""
    logits = rng.standard_normal((tokens, experts)) * 2
    logits[: tokens // 3] = np.round(logits[: tokens // 3] * 2) / 2
    logits[tokens // 2] = 0.25
    return logits.astype(dtype)


def as_rows(logits):
    return logits.astype(np.float64).tolist()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("experts, topk", SIZES)
def test_route(experts, topk, kind, rng):
    """Odd numbers of tokens, with and without groups and a bias: choices, weights, counts and gradients."""
    # The type of the logits is gone before anything is chosen.
    dtypes = (jnp.float32,) if (experts, topk) != (8, 2) else (jnp.float32, jnp.bfloat16, jnp.float16)
    cases = {
        f"{groups} {jnp.dtype(dtype)}": (options, dtype)
        for groups, dtype in itertools.product(GROUPS, dtypes)
        if (options := options_of(kind, experts, topk, groups))
    }
    run = jax.jit(lambda operands: {name: routing_and_gradient(*operands[name], cases[name][0]) for name in cases})
    for scale in (0, 1):
        operands = {
            name: (
                logits_of(rng, 13, experts, dtype),
                (scale * rng.standard_normal(experts)).astype(np.float32),
                rng.standard_normal((13, topk)).astype(np.float32),
            )
            for name, (_, dtype) in cases.items()
        }
        for name, (routing, dlogits) in jax.device_get(run(operands)).items():
            (options, dtype), (logits, bias, dweights) = cases[name], operands[name]
            check_routing(as_rows(logits), bias.astype(np.float64), routing, options)
            assert dlogits.dtype == dtype
            # A gradient is rounded to the type of the logits, and is a difference of numbers up to |dweights| < 8.
            bound = dict(rtol=2.0**-17 + float(jnp.finfo(dtype).eps), atol=8 * options.scaling_factor * 2.0**-21)
            for row, each, d, got in zip(as_rows(logits), routing.experts, dweights, dlogits):
                want = oracle.gradient(row, each, d.astype(np.float64), options)
                np.testing.assert_allclose(got.astype(np.float64), want, err_msg=name, **bound)


def routing_and_gradient(logits, bias, dweights, options):
    routing, transpose = jax.vjp(lambda logits: route(logits, options, expert_bias=bias), logits)
    zeros = lambda x: np.zeros(x.shape, jax.dtypes.float0)
    return routing, transpose(Routing(dweights, zeros(routing.experts), zeros(routing.counts)))[0]


def check_routing(rows, bias, routing, options):
    chosen = np.asarray(routing.experts)
    check_choices(rows, bias, chosen, options)
    want = [oracle.weigh(row, each, options) for row, each in zip(rows, chosen)]
    np.testing.assert_allclose(routing.weights, want, **CLOSE)
    np.testing.assert_array_equal(routing.counts, np.bincount(chosen.ravel(), minlength=len(bias)))


def check_choices(rows, bias, chosen, options):
    """The choice is the oracle's; where f32 rounds two scores to one, both are right, in either order."""
    for row, each in zip(rows, chosen):
        want = oracle.choose(row, bias, options)
        assert len(set(each)) == options.topk
        if list(each) != want:
            ranked = np.asarray(oracle.scores(row, options)) + bias
            np.testing.assert_allclose(ranked[each], ranked[want], rtol=2.0**-20, atol=2.0**-22)


@pytest.mark.parametrize("kind", KINDS)
def test_not_finite(kind, rng):
    """A NaN gives its token NaN weights, valid experts and a NaN in the losses; the other tokens stay as they are."""
    options = RouterOptions(2, **KINDS[kind], num_groups=2, group_topk=1)
    logits = rng.standard_normal((5, 8)).astype(np.float32)
    spoilt, top = logits.copy(), logits.copy()
    spoilt[1, 3], spoilt[2, 4], spoilt[3] = np.nan, -np.inf, np.nan
    top[0, 5] = np.inf  # the sigmoid is 1; a softmax has none

    @jax.jit
    def run(logits):
        routing = route(logits, options)
        return routing, load_balancing_loss(logits, routing.experts, options), z_loss(logits)

    (want, *_), (got, *losses), (of_top, *_) = (jax.device_get(run(x)) for x in (logits, spoilt, top))
    assert np.isnan(got.weights[[1, 3]]).all() and np.isfinite(got.weights[2]).all()
    np.testing.assert_array_equal(got.weights[[0, 4]], want.weights[[0, 4]])
    np.testing.assert_array_equal(got.experts[[0, 4]], want.experts[[0, 4]])
    assert got.counts.sum() == 10 and all(len(set(row)) == 2 for row in got.experts.tolist())
    assert np.isnan(losses).all() and len(losses) == 2
    assert np.isfinite(of_top.weights[0]).all() == kind.startswith("sigmoid")


def test_an_expert_of_a_hidden_group_is_never_chosen():
    """Not even where the best group has too few experts above -inf, or a sum of infinities."""
    inf = float("inf")
    logits = jnp.array([[-inf, -inf, 5, -inf], [inf, -inf, 1, 2], [-inf, jnp.nan, 0, -1]])
    experts = route(logits, RouterOptions(2, num_groups=2, group_topk=1)).experts
    assert experts.tolist() == [[2, 3], [0, 1], [2, 3]]


def test_ties_go_to_the_lower_index():
    for options in (RouterOptions(3), RouterOptions(3, score_function="sigmoid", num_groups=4, group_topk=2)):
        logits = jnp.array([[0.0, -0.0, 0.0, -0.0, 0.0, 0.0, -0.0, 0.0], [1, 2, 2, 1, 2, 2, 1, 2]])
        experts = route(logits, options).experts
        assert experts[0].tolist() == [0, 1, 2]
        assert experts[1].tolist() == ([1, 2, 4] if options.group_topk is None else [1, 2, 0])


@pytest.mark.parametrize("shape", [(0, 8), (3, 0, 8), (8,), (2, 3, 8)])
def test_shapes(shape, rng):
    logits = rng.standard_normal(shape).astype(jnp.bfloat16)
    routing = jax.jit(route, static_argnums=1)(logits, RouterOptions(2))
    assert routing.weights.shape == routing.experts.shape == (*shape[:-1], 2)
    assert routing.counts.tolist() == np.bincount(np.asarray(routing.experts).ravel(), minlength=8).tolist()


def test_all_of_the_most_experts_are_chosen(rng):
    """The kernel then needs more shared memory than there is unasked."""
    logits = on_device(rng.standard_normal((3, 1024)), jnp.float32)
    routing = jax.jit(route, static_argnums=1)(logits, RouterOptions(1024, use_pre_softmax=True))
    np.testing.assert_array_equal(routing.experts, np.argsort(-np.asarray(logits), -1, kind="stable"))
    # A softmax divides by a sum of 2**10 terms.
    np.testing.assert_allclose(routing.weights, -np.sort(-np.asarray(jax.nn.softmax(logits))), rtol=2.0**-13)


@pytest.mark.parametrize("experts", [1024, 1025])
def test_many_experts(experts, rng):
    """As many experts as the kernel takes, and one more."""
    options = RouterOptions(64, use_pre_softmax=True)
    logits, bias = logits_of(rng, 3, experts, jnp.float32), np.zeros(experts, np.float32)
    dweights = rng.standard_normal((3, 64)).astype(np.float32)
    run = jax.jit(routing_and_gradient, static_argnums=3)
    routing, dlogits = jax.device_get(run(logits, bias, dweights, options))
    check_routing(as_rows(logits), np.zeros(experts), routing, options)
    for row, each, d, got in zip(as_rows(logits), routing.experts, dweights, dlogits):
        want = oracle.gradient(row, each, d.astype(np.float64), options)
        # A softmax divides by a sum of 2**10 terms.
        np.testing.assert_allclose(got, want, rtol=2.0**-14, atol=2.0**-18)


@pytest.mark.parametrize("tokens", [17, 8209, 16401])
def test_counts(tokens, rng):
    """Of two parts, of more than a CTA has threads, and of as many as there are at most (`csrc/experts/router.cu`)."""
    logits = on_device(rng.standard_normal((tokens, 5)), jnp.float32)
    routing = jax.jit(route, static_argnums=1)(logits, RouterOptions(2))
    np.testing.assert_array_equal(routing.counts, np.bincount(np.ravel(routing.experts), minlength=5))


@pytest.mark.parametrize("shape, per_sequence", [((0, 8), False), ((3, 0, 8), True), ((0, 3, 8), True)])
def test_no_tokens(shape, per_sequence):
    """Losses are 0."""

    @jax.jit
    def losses(logits):
        options = RouterOptions(2)
        experts = route(logits, options).experts
        return load_balancing_loss(logits, experts, options, per_sequence=per_sequence), z_loss(logits)

    assert losses(jnp.zeros(shape)) == (0, 0)


@pytest.mark.parametrize("per_sequence", [False, True])
@pytest.mark.parametrize("kind", ["before", "sigmoid"])
def test_losses(kind, per_sequence, rng):
    options = RouterOptions(2, **KINDS[kind])
    logits = rng.standard_normal((3, 7, 8)).astype(np.float32)
    direction = rng.standard_normal(logits.shape).astype(np.float32)

    @jax.jit
    def run(logits, direction):
        experts = route(logits, options).experts
        loss = lambda logits: load_balancing_loss(logits, experts, options, per_sequence=per_sequence)
        even = load_balancing_loss(jnp.zeros((4, 8)), jnp.arange(8).reshape(4, 2), options)
        moved = loss(logits + step * direction), loss(logits - step * direction)
        return experts, *jax.value_and_grad(loss)(logits), even, moved, z_loss(logits)

    step = 2.0**-7
    experts, loss, grad, even, (ahead, behind), of_sums = jax.device_get(run(logits, direction))
    scores = np.array([[oracle.scores(t.tolist(), options) for t in row] for row in np.asarray(logits, np.float64)])
    scores = scores / scores.sum(-1, keepdims=True)
    counts = np.array([[np.bincount(t, minlength=8) for t in row] for row in experts])
    mean = lambda x: x.mean(1) if per_sequence else x.reshape(1, -1, 8).mean(1)
    want = np.mean([8 / 2 * sum(mean(counts)[i] * mean(scores)[i]) for i in range(len(mean(counts)))])
    np.testing.assert_allclose(loss, want, rtol=2.0**-19)
    np.testing.assert_allclose(even, 1, rtol=2.0**-20)
    slope = (ahead - behind) / (2 * step)
    # The difference of two losses near 1 in f32, over the step, and the third derivative times step**2.
    np.testing.assert_allclose(np.vdot(grad, direction), slope, atol=2.0**-14)
    sums = np.log(np.exp(np.asarray(logits, np.float64)).sum(-1))
    np.testing.assert_allclose(of_sums, np.mean(sums**2), rtol=2.0**-19)


def test_expert_bias_follows_the_loads():
    bias = updated_expert_bias(jnp.zeros(4, jnp.float32), jnp.array([1, 5, 3, 3]), 0.25)
    assert bias.tolist() == [0.25, -0.25, 0, 0]


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: RouterOptions(0), "RouterOptions: topk is 0; pass"),
        (lambda: RouterOptions(2, score_function="tanh"), "score_function is 'tanh'"),
        (lambda: RouterOptions(2, num_groups=2, group_topk=3), "group_topk is 3"),
        (lambda: route(jnp.ones((4, 8)), RouterOptions(9)), "topk is 9, but a token chooses among 8 of 8"),
        (lambda: route(jnp.ones((4, 8)), RouterOptions(3, num_groups=4, group_topk=1)), "among 2 of 8 experts"),
        (lambda: route(jnp.ones((4, 8)), RouterOptions(2, num_groups=3)), "num_groups is 3, which does not divide 8"),
        (lambda: route(jnp.ones((4, 8)), RouterOptions(2), expert_bias=jnp.ones(4)), "expert_bias has shape"),
        (lambda: route(jnp.ones(()), RouterOptions(1)), "logits has shape"),
        (lambda: load_balancing_loss(jnp.ones((4, 8)), jnp.ones((4, 3), int), RouterOptions(2)), "experts has shape"),
        (lambda: load_balancing_loss(jnp.ones(8), jnp.ones(2, int), RouterOptions(2), per_sequence=True), "logits has"),
        (lambda: z_loss(jnp.ones(())), "logits has shape"),
        (lambda: updated_expert_bias(jnp.ones(4), jnp.ones(1), 0.1), "counts has shape"),
    ],
)
def test_errors(make, words):
    with pytest.raises(ValueError, match=words.replace("(", "\\(")):
        make()


def test_wrong_types():
    for make in (
        lambda: RouterOptions("2"),
        lambda: RouterOptions(2, normalize=1),
        lambda: route(jnp.ones((4, 8), int), RouterOptions(2)),
    ):
        with pytest.raises(TypeError):
            make()
