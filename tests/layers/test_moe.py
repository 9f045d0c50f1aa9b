"""Mixtures of experts against a loop over experts of dense layers.

In FP8 bit for bit: the operands are -1, 0 and 1, and the weights of the choices within a power of 2 of each other, so
that all sums of products, the quantized activation's and gradients' too, are exact in f32 (products of 18 bits at most,
96 of them), whatever their order.
"""

from functools import partial

import jax
import jax.numpy as jnp
import moe_oracle as oracle
import numpy as np
import pytest

from te_jax import recipe
from te_jax.core.op import Op
from te_jax.layers import MoEOptions, QuantizedKernel, layernorm, moe, quantize_experts
from te_jax.layers.tensor import Accumulator, Fp8Tensor
from te_jax.layers.weight import GradientTarget
from te_jax.ops.gemm_grouped import gemm_grouped_op, gemm_grouped_wide_op
from te_jax.ops.grouped import (
    activation_grouped_block_bwd,
    activation_grouped_block_fwd,
    activation_grouped_bwd,
    activation_grouped_fwd,
)
from te_jax.ops.permute import group, permute, permute_block_op, permute_op
from te_jax.ops.router import RouterOptions, load_balancing_loss, route, z_loss

T, H, F, E, K = 24, 32, 48, 4, 2
RELU = ("relu", "linear")


def normal(rng, *shape):
    return rng.standard_normal(shape).astype(np.float32)


def is_shape(node):
    return isinstance(node, tuple) and isinstance(node[0], int)


def operands(rng, draw=normal, scale=1.0):
    """x, gate_kernel, wi, wo, wi_bias, wo_bias."""
    weights = jax.tree.map(lambda s: scale * draw(rng, *s), oracle.shapes(E, H, F), is_leaf=is_shape)
    return draw(rng, T, H), *weights


def with_gradients(f, dy):
    """y, and the cotangents of all arguments."""

    def run(*args):
        y, vjp = jax.vjp(f, *args)
        return y, vjp(dy)

    return run


def equal(got, want, what="", ulps=0):
    for path, a in jax.tree.leaves_with_path(got):
        b = dict(jax.tree.leaves_with_path(want))[path]
        of = f"{what} {jax.tree_util.keystr(path)}"
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=ulps * 2.0**-23, atol=0, err_msg=of)


def close_sums(got, want):
    """Of f32 terms as large as 1, which are not quantized, for each token: the gradient of wo_bias."""
    np.testing.assert_allclose(got, want, rtol=0, atol=T * T * 2.0**-24)


def close_terms(got, want):
    """Of f32 w1 r1 + w2 r2, y of two choices: XLA:CPU rounds each product, or contracts one of them with the addition,
    by machine and fusion. That moves a term by half an ulp of it, and the sum, rounded in either way, by an ulp of it:
    2 ulp of the largest y, for no term is above twice that. A sum that cancels is off by more of its own ulps."""
    np.testing.assert_allclose(got, want, rtol=0, atol=2 * 2.0**-23 * np.abs(want).max())


# -- f32 -------------------------------------------------------------------------------------------------------------


def test_loop_over_experts(rng):
    """y and all gradients in f32: sums of 48 products in another order."""
    options = MoEOptions(RouterOptions(K))
    args, dy = operands(rng, scale=0.2), normal(rng, T, H)
    ours = with_gradients(lambda *a: moe(*a, options=options)[0], dy)
    loop = with_gradients(partial(oracle.loop, options=options), dy)
    got, want = jax.jit(lambda *a: (ours(*a), loop(*a)))(*args)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * np.abs(b).max())


# -- FP8 -------------------------------------------------------------------------------------------------------------


def signs(rng, *shape):
    return rng.integers(-1, 2, shape).astype(np.float32)


def gates(rng):
    """Gates that spread tokens differently, x having 1 in front: {name: gate_kernel [H, E]}."""
    gate = 0.01 * normal(rng, H, E)
    found = {"even": gate}
    for name, e, way in (("one has all", rng.integers(E), 40), ("one is idle", rng.integers(E), -40)):
        found[name] = gate.copy()
        found[name][0, e] = way
    return found


SCALES = (1.0, "kernel", "grad"), ("x", "kernel", 2.0)  # of wi, of wo; names stand for E of them


def scales_of(rng):
    most = dict(x=-2, kernel=5, grad=-3)  # powers of 2
    draw = lambda s: np.float32(s) if s not in most else 2.0 ** (most[s] - rng.integers(0, 3, E)).astype(np.float32)
    return jax.tree.map(draw, SCALES)


def largest_of_layer(tokens):
    """What a loop's [E] tokens say of x and of the gradient of y, which have one for the layer."""
    return jax.tree.map(lambda shape, a: a if shape.ndim else a.max(), TOKENS, tokens)


TOKENS = jax.tree.map(lambda s: np.zeros(E if isinstance(s, str) else (), np.float32), SCALES)


def test_delayed_scaling_is_the_loop(rng, plain_jax):
    """y, all gradients, and the amax of each tensor of each expert; an idle expert has seen none."""
    options = MoEOptions(RouterOptions(K, "sigmoid", normalize=False), RELU)
    dy = signs(rng, T, H)

    def ours(tokens, scales, *args):
        return moe(*args, options=options, recipe=recipe.DelayedScaling(), metas=oracle.metas_of(scales, tokens))[0]

    def loop(tokens, scales, *args):
        each = lambda tree: jax.tree.map(lambda a: jnp.broadcast_to(a, E), tree)
        metas = oracle.metas_of(each(scales), tokens)
        return oracle.loop(*args, options=options, recipe=recipe.DelayedScaling(), metas=metas)

    each = jax.tree.map(lambda a: np.zeros(E, np.float32), TOKENS)
    run = jax.jit(lambda *a: (with_gradients(ours, dy)(TOKENS, *a), with_gradients(loop, dy)(each, *a)))
    for load, gate in gates(rng).items():
        x, _, *weights = operands(rng, signs)
        x[:, 0] = 1
        (y, got), (want_y, want) = run(scales_of(rng), x, gate, *weights)
        close_terms(y, want_y)
        equal(got[2:-1], want[2:-1], load)
        close_sums(got[-1], want[-1])
        equal(got[0], largest_of_layer(want[0]), load)
        seen = np.stack([got[0][0][2], got[0][1][0]])
        assert (seen == 0).all(0).any() == (load == "one is idle"), load


RULES = {
    "current": recipe.Float8CurrentScaling(),
    "blocks": recipe.Float8BlockScaling(),
    "mx": recipe.MXFP8BlockScaling(),
    "current, fprop and wgrad in x's type": recipe.Float8CurrentScaling(override_linear_precision=(True, False, True)),
    "blocks, dgrad in x's type": recipe.Float8BlockScaling(override_linear_precision=(False, True, False)),
}


@pytest.mark.filterwarnings("ignore:.*whose grouped products are of bf16")
@pytest.mark.parametrize("name", RULES)
def test_recipe_without_state_is_the_loop(name, rng):
    """With one choice, whose weight is 1: each expert's rows of x and of the gradient then have the amax of all.

    Under current scaling that is 7, whose scale is a power of 2. XLA may round the inverses of other scales, those of
    the activation and its gradient, in two ways.
    """
    options, dy = MoEOptions(RouterOptions(1), RELU), signs(rng, T, H)
    top, ulps = (7, 2) if "current" in name else (1, 0)
    dy[:, 0] = top
    both = [partial(f, options=options, recipe=RULES[name]) for f in (lambda *a, **o: moe(*a, **o)[0], oracle.loop)]
    run = jax.jit(lambda *a: [with_gradients(f, dy)(*a) for f in both])
    for load, gate in gates(rng).items():
        x, _, *weights = operands(rng, signs)
        for kernel in jax.tree.leaves(weights[:2]):
            kernel[:, 0, 0] = top
        x[:, 0] = top
        (y, got), (want_y, want) = run(x, gate, *weights)
        equal((y, got[:-1]), (want_y, want[:-1]), load, ulps)
        close_sums(got[-1], want[-1])


# -- weights that were quantized before ------------------------------------------------------------------------------


def test_quantized_before_is_the_same(rng):
    """Weights quantized once, weights that live in FP8, and a gradient that is added onto another one in wgrad."""
    options, dy, rule = MoEOptions(RouterOptions(1), RELU), signs(rng, T, H), recipe.Float8CurrentScaling()
    x, gate, wi, wo, *_ = operands(rng, signs)
    sums = jax.tree.map(lambda a: signs(rng, *a.shape), (wi, wo))
    fp8_of = lambda kernel: quantize_experts(kernel, recipe=rule)
    layer = lambda *a: moe(x, gate, *a, options=options, recipe=rule)[0]

    def cached(wi, wo):
        return layer(fp8_of(wi).with_wide(wi), fp8_of(wo).with_wide(wo))

    def stored(wi, wo):
        slots = lambda a: fp8_of(jax.lax.stop_gradient(a)).with_wide(GradientTarget(a))
        return layer(tuple(map(slots, wi)), slots(wo))

    def onto(wi, wo, sums):
        of = jax.tree.map(lambda total: Accumulator(total, jnp.zeros(())), sums)
        unquantized = lambda a, total, features: QuantizedKernel(
            Fp8Tensor(wide=a, onto=total), 1, features, jnp.dtype(jnp.float32)
        )
        return layer(unquantized(wi, of[0], 2), unquantized(wo, of[1], 1))

    def run(wi, wo, sums):
        results = [with_gradients(f, dy)(wi, wo) for f in (layer, cached, stored)]
        return results, with_gradients(lambda sums: onto(wi, wo, sums), dy)(sums)

    (plain, *others), added = jax.jit(run)(wi, wo, sums)
    for what, got in zip(("cached", "stored"), others):
        equal(got, plain, what)
    want = jax.tree.map(lambda total, grad: total + grad, sums, plain[1])
    equal(added, (plain[0], (want,)), "accumulated", ulps=2)  # one rounding instead of two


# -- what the router says --------------------------------------------------------------------------------------------


def test_capacity_norm_bias_and_residual(rng):
    """The first pairs of each expert are kept; with a norm in front, x added behind, experts chosen by a bias."""
    options = MoEOptions(RouterOptions(K, "sigmoid"), ("gelu",), capacity_factor=0.75)
    x, gate, (wi, _), wo, *_ = operands(rng, scale=0.2)
    gamma, beta, bias = 1 + normal(rng, H), normal(rng, H), np.array([0, 0.7, 0, -0.2], np.float32)

    def ours(x, gamma, beta, *weights):
        return moe(x, *weights, options=options, gamma=gamma, beta=beta, residual=True, expert_bias=bias)[0]

    def loop(x, gamma, beta, gate, wi, wo):
        h = layernorm(x, gamma, beta)
        experts = route(h @ gate, options.router, expert_bias=bias).experts.reshape(-1)
        before = jnp.tril(experts[:, None] == experts[None], -1).sum(1).reshape(T, K)
        kept = before < 9  # 0.75 of 24 * 2 / 4
        return x + oracle.loop(h, gate, (wi,), wo, options=options, expert_bias=bias, kept=kept)

    args, dy = (x, gamma, beta, gate, wi, wo), normal(rng, T, H)
    run = jax.jit(lambda *a: (with_gradients(ours, dy)(*a), with_gradients(loop, dy)(*a), aux_of(*a)))

    def aux_of(x, gamma, beta, *weights):
        return moe(x, *weights, options=options, gamma=gamma, beta=beta, expert_bias=bias)[1]

    got, want, aux = run(*args)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5 * np.abs(b).max())
    assert aux.counts.sum() == T * K and aux.dropped.sum() > 0
    np.testing.assert_array_equal(aux.dropped, np.maximum(np.asarray(aux.counts) - 9, 0))


def test_capacity_is_of_the_decimal_number():
    """1.1 * 100 / 10 is 11, and in floats 11.000000000000002: an expert that gets all of 100 tokens drops 89."""
    run = jax.jit(partial(moe, options=MoEOptions(RouterOptions(1), ("relu",), capacity_factor=1.1)))
    _, aux = run(jnp.ones((100, 1)), jnp.zeros((1, 10)), jnp.ones((10, 1, 1)), jnp.ones((10, 1, 1)))
    assert aux.dropped.sum() == 100 - 11


def test_losses(rng):
    """Those of `te_jax.ops.router`, of the logits; the balancing loss of the choice without the bias."""
    x, gate, wi, wo, *_ = operands(rng)
    bias = np.array([99, 0, 0, 0], np.float32)
    x = x.reshape(2, T // 2, H)
    for per_sequence in (False, True):
        options = MoEOptions(RouterOptions(K), per_sequence_loss=per_sequence)
        _, aux = jax.jit(partial(moe, options=options, expert_bias=bias))(x, gate, wi, wo)
        logits = jnp.dot(x, gate, precision="highest")
        experts = route(logits, options.router).experts
        want = load_balancing_loss(logits, experts, options.router, per_sequence=per_sequence)
        np.testing.assert_allclose(aux.balancing_loss, want, rtol=1e-5)
        np.testing.assert_allclose(aux.z_loss, z_loss(logits), rtol=1e-5)
        assert aux.counts[0] == T and aux.dropped.sum() == 0


# -- rows that nobody reads ------------------------------------------------------------------------------------------


POISONED = {
    permute_op: "rows data data_t",
    permute_block_op: "data data_t scale_inv scale_inv_t",
    **dict.fromkeys((gemm_grouped_op, gemm_grouped_wide_op), "out"),
    **dict.fromkeys((activation_grouped_fwd, activation_grouped_bwd), "y dx data data_t"),
    **dict.fromkeys((activation_grouped_block_fwd, activation_grouped_block_bwd), "data data_t scale_inv scale_inv_t"),
}


def poison(monkeypatch):
    """Has ops leave NaN behind the last group, as memory may hold on CUDA."""

    def reference_of(op, key):
        def run(*args):
            params = {name: value for name, _, value in key}
            results = list(op._run_reference(*args, **params))
            offsets = args[params["inputs"].index("offsets")] if op in POISONED else None
            for i, name in enumerate(params["outputs"]):
                if name in POISONED.get(op, "").split():
                    axis = results[i].ndim - 1 if name in ("data_t", "scale_inv") else 0
                    first = jnp.arange(results[i].shape[axis]) * (128 if name == "scale_inv_t" else 1)
                    tail = jnp.expand_dims(first >= offsets[-1], [j for j in range(results[i].ndim) if j != axis])
                    results[i] = jnp.where(tail, jnp.asarray(jnp.nan, results[i].dtype), results[i])
            return results

        return run

    monkeypatch.setattr(Op, "_reference_of", reference_of)


@pytest.mark.parametrize("rule", (None, recipe.DelayedScaling(), recipe.Float8BlockScaling()))
def test_tails_are_not_read(rng, monkeypatch, rule, plain_jax):
    """Nor by probes, whose numbers are only of each expert's tokens."""
    options = MoEOptions(RouterOptions(K, "sigmoid", normalize=False), RELU)
    x, _, *weights = operands(rng, signs)
    x[:, 0] = 1
    args, dy = (x, gates(rng)["one is idle"], *weights), signs(rng, T, H)
    has_state = rule is not None and rule.has_state
    scales = jax.tree.map(lambda s: np.full(E if isinstance(s, str) else (), 1, np.float32), SCALES)
    scales[1][0][:] = 2.0**4, 2.0**-11, 1, 1
    tokens = jax.tree.map(lambda s: np.zeros((*s.shape, 4), np.float32), scales)

    def layer(tokens, *args):
        metas = oracle.metas_of(scales, tokens) if has_state else None
        return moe(*args, options=options, recipe=rule, metas=metas)[0]

    def run():
        return jax.jit(lambda *a: with_gradients(layer, dy)(*a))(tokens, *args)

    want = run()
    poison(monkeypatch)
    assert np.isnan(jax.jit(lambda x: permute(x, group(jnp.zeros((T, 1), jnp.int32), E)))(x)).any()
    equal(run(), want)
    if has_state:
        check_activation_probe(want[1][0][1][0], scales[1][0], args, options)


def check_activation_probe(seen, scales, args, options):
    """seen: f32[E, 4]. The activation is exact."""
    x, gate, wi, _, wi_bias, _ = args
    experts = np.asarray(route(jnp.dot(x, gate, precision="highest"), options.router).experts)
    for e in range(E):
        rows = x[(experts == e).any(1)]
        a = np.maximum(rows @ wi[0][e] + wi_bias[0][e], 0) * (rows @ wi[1][e] + wi_bias[1][e])
        size, some = max(a.size, 1), max(np.count_nonzero(a), 1)
        scaled = np.abs(a * scales[e])
        lost = np.count_nonzero((a != 0) & (scaled <= 2.0**-10))
        want = np.abs(a).max(initial=0), scales[e], np.count_nonzero(scaled > 448) / size, lost / some
        np.testing.assert_allclose(seen[e], want, rtol=1e-6)


def test_frozen(rng):
    """Nothing is computed for a gradient of weights, and no rows are kept for one of the router, that nobody wants."""
    options, args = MoEOptions(RouterOptions(K)), operands(rng)
    loss = lambda *a: jnp.sum(moe(*a, options=options, recipe=recipe.FixedScaling(grad_scale=1.0))[0])
    of = lambda *argnums: str(jax.make_jaxpr(jax.grad(loss, argnums))(*args))
    assert "wgrad" in of(0, 2) and "wgrad" in of(0, 3)
    assert "wgrad" not in of(0, 1) and "te_combine_bwd" in of(0)
    assert "te_combine_bwd" not in of(2)


def test_no_tokens_and_nan(rng):
    """A NaN stays in its token's row of y and dx. Without tokens there is nothing to divide by."""
    options, args = MoEOptions(RouterOptions(K), ("gelu", "linear"), capacity_factor=1.0), operands(rng)
    rule = recipe.FixedScaling(grad_scale=1.0)
    layer = lambda *a: moe(*a, options=options, recipe=rule)
    no_rows = lambda *a: [layer(args[0][:0], *a)[0], *layer(args[0][:0], *a)[1][:2]]
    y, grads = jax.jit(with_gradients(no_rows, [jnp.zeros((0, H)), jnp.ones(()), jnp.ones(())]))(*args[1:])
    assert y[0].shape == (0, H) and not any(np.asarray(a).any() for a in jax.tree.leaves((y, grads)))
    run = jax.jit(lambda x: jax.vjp(lambda x: layer(x, *args[1:])[0], x)[1](jnp.ones((T, H))) + layer(x, *args[1:])[:1])
    clean, spoiled = run(args[0]), run(np.where(np.arange(T)[:, None] == T - 1, np.nan, args[0]))
    for a, b in zip(clean, spoiled):
        assert np.isnan(b[-1]).any()
        np.testing.assert_array_equal(a[:-1], b[:-1])


def test_vmap(rng):
    """Each example has its own groups; weights are shared."""
    options, (x, *weights) = MoEOptions(RouterOptions(K)), operands(rng, scale=0.2)
    xs, dy = np.stack([x, 3 * x[::-1]]), normal(rng, T, H)
    one = with_gradients(lambda x: moe(x, *weights, options=options, recipe=recipe.Float8BlockScaling())[0], dy)
    got, each = jax.jit(lambda xs: (jax.vmap(one)(xs), [one(x) for x in xs]))(xs)
    for i in range(2):
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(each[i]), strict=True):
            # sums in another order, one rounding of which may reach a step of E4M3, 2**-4, of one of 48 terms
            np.testing.assert_allclose(a[i], b, rtol=1e-3, atol=1e-3 * np.abs(b).max())


# -- what is refused -------------------------------------------------------------------------------------------------

GOOD = MoEOptions(RouterOptions(K))
SHAPES = dict(zip(("gate_kernel", "wi", "wo", "wi_bias", "wo_bias"), oracle.shapes(E, 8, 16)))


def ones(**others):
    """Operands of ones, some replaced by others."""
    made = jax.tree.map(lambda s: np.ones(s, np.float32), {"x": (3, 8)} | SHAPES, is_leaf=is_shape)
    return made | others


f32 = lambda *shape: np.ones(shape, np.float32)
BAD = {  # arguments, error, words
    "one kernel": (dict(wi=f32(E, 8, 16)), ValueError, r"wi is 1 arrays.*pass 2"),
    "stacked slots": (dict(wi=f32(E, 8, 2, 16)), ValueError, "pass arrays of three axes"),
    "unlike": (dict(wi=(f32(E, 8, 16), f32(E, 8, 8))), ValueError, "all alike"),
    "two wo": (dict(wo=(f32(E, 16, 8),) * 2), ValueError, "wo is 2 arrays"),
    "another E": (dict(gate_kernel=f32(8, 3)), ValueError, r"gate_kernel has the shape \(8, 3\)"),
    "another F": (dict(wo=f32(E, 15, 8)), ValueError, r"wo has the shape \(4, 15, 8\)"),
    "another H": (dict(x=f32(3, 7)), ValueError, r"x has the shape \(3, 7\)"),
    "a bias": (dict(wi_bias=f32(E, 16)), ValueError, "wi_bias is 1 arrays"),
    "a bias's shape": (dict(wo_bias=f32(8)), ValueError, r"wo_bias has the shape \(8,\)"),
    "type": (dict(x=np.ones((3, 8), np.int32)), TypeError, "x is int32"),
    "a vector": (dict(x=f32(8)), ValueError, r"pass \[..., T, 8\]"),
    "options": (dict(options=RouterOptions(K)), TypeError, "pass a MoEOptions"),
    "too many choices": (dict(options=MoEOptions(RouterOptions(5))), ValueError, "topk is 5"),
    "no state": (
        dict(recipe=recipe.DelayedScaling()),
        ValueError,
        "metas is None under DelayedScaling; pass a tuple of 2",
    ),
    "a recipe's class": (dict(recipe=recipe.FixedScaling), TypeError, "pass an instance"),
    "not fused": (
        dict(options=MoEOptions(RouterOptions(K), ("tanh", "linear")), recipe=recipe.Float8CurrentScaling()),
        ValueError,
        "has no op that quantizes it",
    ),
    "beta only": (dict(beta=f32(8)), ValueError, "beta is given without gamma"),
    "residual": (dict(residual=f32(3, 7)), ValueError, "residual is float32"),
    "of another recipe": (
        dict(
            wo=quantize_experts(f32(E, 16, 8), recipe=recipe.Float8BlockScaling()), recipe=recipe.Float8CurrentScaling()
        ),
        ValueError,
        "with scales of blocks of 128",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name):
    """Refused while it is traced, with the layer or the options, the value and a way out."""
    others, error, words = BAD[name]
    with pytest.raises(error, match=words):
        jax.eval_shape(lambda: moe(**{"options": GOOD} | ones(**others)))


BAD_OPTIONS = {
    "router": (dict(router=2), TypeError, "router is 2; pass a RouterOptions"),
    "name": (dict(router=RouterOptions(1), capacity=2), TypeError, "did you mean 'capacity_factor'"),
    "factor": (dict(router=RouterOptions(1), capacity_factor=0), ValueError, "capacity_factor is 0"),
    "activation": (dict(router=RouterOptions(1), activations=("sillu",)), ValueError, "did you mean 'silu'"),
    "params": (dict(router=RouterOptions(1), activation_params={"limit": 1}), ValueError, "has 'limit'"),
    "per sequence": (dict(router=RouterOptions(1), per_sequence_loss=2), TypeError, "per_sequence_loss is 2"),
}


@pytest.mark.parametrize("name", BAD_OPTIONS)
def test_bad_options(name):
    others, error, words = BAD_OPTIONS[name]
    with pytest.raises(error, match=words) as raised:
        MoEOptions(**others)
    assert str(raised.value).startswith("MoEOptions: ")
