"""`linear_cross_entropy` against the same loss of whole logits: in float64, in FP8 by `layers.dense`, on meshes."""

import itertools
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from jaxprs import equations

from te_jax import recipe
from te_jax.layers import QuantizedKernel, dense, linear_cross_entropy
from te_jax.state import fp8

B, S, H, V = 3, 7, 10, 33  # 21 tokens in chunks of 4
ALL = dict(label_smoothing=0.1, z_loss=1e-2, logit_softcap=3.0)
IGNORED = -100


def drawn(rng, b=B, s=S, h=H, v=V):
    """x, kernel [H, V], labels of which some are ignored, and a cotangent of each token's loss."""
    x, kernel = rng.normal(size=(b, s, h)).astype(np.float32), rng.normal(size=(h, v)).astype(np.float32)
    labels = rng.integers(0, v, (b, s))
    labels[rng.random((b, s)) < 0.2] = IGNORED
    labels[0, 0], labels[-1, -1] = 0, v - 1
    return x, kernel, labels, rng.normal(size=(b, s)).astype(np.float32)


def loss_of(z, labels, label_smoothing=0.0, z_loss=0.0, logit_softcap=None):
    """The loss of each token of whole logits z [..., V], in their type."""
    z = z if logit_softcap is None else logit_softcap * jnp.tanh(z / logit_softcap)
    lse = jax.nn.logsumexp(z, -1)
    label = jnp.take_along_axis(z, jnp.maximum(labels, 0)[..., None], -1)[..., 0]
    each = lse - (1 - label_smoothing) * label - label_smoothing * jnp.mean(z, -1) + z_loss * lse**2
    return jnp.where(labels == IGNORED, 0, each)


def reduced(each, labels, reduction):
    total = {"none": each, "sum": jnp.sum(each)}
    return total.get(reduction, jnp.sum(each) / jnp.maximum(jnp.sum(labels != IGNORED), 1))


def with_gradients(f, x, kernel, cotangent, reduction):
    value, vjp = jax.vjp(f, x, kernel)
    return value, *vjp((cotangent if reduction == "none" else jnp.sum(cotangent)).astype(value.dtype))


def ours(x, kernel, labels, cotangent, reduction="mean", words_first=False, **options):
    """(loss, dx, dkernel [H, V])."""
    f = lambda x, w: linear_cross_entropy(
        x, w.T if words_first else w, labels, words_first=words_first, reduction=reduction, **options
    )
    return with_gradients(f, x, kernel, cotangent, reduction)


def whole(x, kernel, labels, cotangent, reduction="mean", **options):
    with jax.enable_x64(True):
        f = lambda x, w: reduced(loss_of(x @ w, labels, **options), labels, reduction)
        run = jax.jit(lambda *args: with_gradients(f, *args, reduction))
        return list(map(np.asarray, run(np.asarray(x, np.float64), np.asarray(kernel, np.float64), cotangent)))


def close(got, want, unit):
    """Within `unit` of the largest element: errors of logits, which are sums of H terms, reach all elements."""
    for what, a, b in zip(("loss", "dx", "dkernel"), got, want, strict=True):
        a = np.asarray(a, np.float64)
        assert a.shape == b.shape, what
        np.testing.assert_allclose(a, b, rtol=0, atol=unit * np.abs(b).max(), err_msg=what)


REDUCTIONS = "mean", "sum", "none"


@pytest.mark.parametrize("options", [{}, ALL], ids=["plain", "all"])
def test_float64(options, rng):
    """Logits up to 15 are off by H ulps of their size, and so are exponents: 2**-24 * 16 * 2 H relative errors of
    probabilities, of which sums over the words have both signs."""
    x, kernel, labels, cotangent = args = drawn(rng)

    def run(*args):
        each = itertools.product(REDUCTIONS, (False, True))
        return [ours(*args, *how, chunk_tokens=4, **options) for how in each]

    for (reduction, _), got in zip(itertools.product(REDUCTIONS, (False, True)), jax.jit(run)(*args)):
        close(got, whole(*args, reduction, **options), 2.0**-24 * 32 * H)


def test_bf16_operands(rng):
    """f32 logits of bf16 operands: the loss is exact to f32. The gradient of the logits is rounded to bf16, and each
    chunk rounds the kernel's gradient twice, its product and the sum: 6 chunks, and the last factor."""
    x, kernel, labels, cotangent = drawn(rng)
    x, kernel = x.astype(jnp.bfloat16), kernel.astype(jnp.bfloat16)
    for reduction, kind in itertools.product(("mean", "none"), (None, jnp.float32)):
        run = jax.jit(partial(ours, reduction=reduction, chunk_tokens=4, accumulate_dtype=kind, **ALL))
        got, want = run(x, kernel, labels, cotangent), whole(x, kernel, labels, cotangent, reduction, **ALL)
        assert [a.dtype for a in got] == [jnp.float32, jnp.bfloat16, jnp.bfloat16]
        np.testing.assert_allclose(got[0], want[0], rtol=2.0**-24 * 32 * H, atol=2.0**-24 * 32 * H)
        close(got, want, 2.0**-9 * (2 + (2 * 6 if kind is None else 1)))


RECIPES = {
    "current": recipe.Float8CurrentScaling(),
    "delayed": recipe.DelayedScaling(),
    "block": recipe.Float8BlockScaling(),
    "mx": recipe.MXFP8BlockScaling(),
    "fixed, fprop in x's type": recipe.FixedScaling(grad_scale=2.0**4, override_linear_precision=(True, False, False)),
    "delayed, dgrad and wgrad in x's type": recipe.DelayedScaling(override_linear_precision=(False, True, True)),
}
SCALES = 2.0**4, 2.0**5, 2.0**6  # of x, kernel and the gradient of the logits


def metas_of(rule, tokens):
    """State with these scales; the cotangents of the tokens are the amaxes."""
    if not rule.has_state:
        return None
    return fp8.DenseMetas(*(fp8.TensorMeta(jnp.float32(scale), token) for scale, token in zip(SCALES, tokens)))


@pytest.mark.parametrize("name", RECIPES)
def test_fp8(name, rng):
    """One chunk is what `dense` computes, with f32 logits. The gradient of logits is that of the sum of losses; where
    two orders of f32 operations differ by an ulp, FP8 may round it to a neighbour: 1/4 of an element of up to 1."""
    rule, (x, kernel, labels, cotangent) = RECIPES[name], drawn(rng)
    cotangent = np.ones_like(cotangent)
    tokens = (jnp.float32(0),) * 3

    def head(x, w, tokens, words_first, reduction):
        options = dict(recipe=rule, metas=metas_of(rule, tokens), words_first=words_first, reduction=reduction)
        return linear_cross_entropy(x, w.T if words_first else w, labels, **options)

    def by_dense(x, w, tokens):
        rows = x.reshape(-1, H)
        return jnp.sum(loss_of(dense(rows, w, recipe=rule, metas=metas_of(rule, tokens)), labels.reshape(-1)))

    def run(x, kernel, tokens):
        want = jax.value_and_grad(by_dense, (0, 1, 2))(x, kernel, tokens)
        each = itertools.product((False, True), ("sum", "none"))
        f = lambda *args: jnp.sum(head(*args))
        return want, [jax.value_and_grad(f, (0, 1, 2))(x, kernel, tokens, *how) for how in each]

    (loss, grads), got = jax.jit(run)(x, kernel, tokens)
    for value, (dx, dkernel, seen) in got:
        np.testing.assert_allclose(value, loss, rtol=2.0**-20)
        np.testing.assert_allclose(dx, grads[0], atol=0.25 * np.abs(kernel).max())
        np.testing.assert_allclose(dkernel, grads[1], atol=0.25 * np.abs(x).max())
        np.testing.assert_allclose(np.mean(dx - grads[0]), 0, atol=2.0**-10)  # flips are rare
        np.testing.assert_allclose(seen, grads[2], rtol=2.0**-20)  # the amaxes


def test_amaxes_of_all_chunks(rng):
    """The largest of all chunks, of f32 x too; a frozen kernel has none of its gradient's work."""
    x, kernel, labels, _ = drawn(rng)
    rule, tokens = recipe.DelayedScaling(), (jnp.float32(0),) * 3
    f = lambda tokens: linear_cross_entropy(
        x, kernel, labels, recipe=rule, metas=metas_of(rule, tokens), chunk_tokens=4
    )
    seen = jax.jit(jax.grad(f))(tokens)
    np.testing.assert_array_equal(seen[:2], [np.abs(a).max() for a in (x, kernel)])
    assert 0.9 < seen[2] <= 1.0


# -- what stays out of memory -----------------------------------------------------------------------------------


def largest(f, *args):
    """The most elements of an array in the jaxpr of f, those inside of loops too."""
    return max(v.aval.size for eqn in equations(jax.make_jaxpr(f)(*args).jaxpr) for v in eqn.outvars)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_logits_of_one_chunk(reduction):
    """No array has more elements than a chunk's logits, with 8 chunks; frozen operands get no gradient."""
    x, kernel, labels = jnp.ones((64, 8)), jnp.ones((8, 96)), jnp.zeros(64, int)
    f = lambda x, w: jnp.sum(linear_cross_entropy(x, w, labels, chunk_tokens=8, reduction=reduction))
    assert largest(jax.grad(f, (0, 1)), x, kernel) == 8 * 96
    products = lambda argnums: str(jax.make_jaxpr(jax.grad(f, argnums))(x, kernel)).count("dot_general")
    assert (products((0, 1)), products(0), products(1)) == ((3, 2, 2) if reduction == "mean" else (4, 3, 3))


# -- transformations, edges -------------------------------------------------------------------------------------


def test_transformations(rng):
    """vmap over x, under remat, in a scan: each as one after the other."""
    x, kernel, labels, cotangent = drawn(rng)
    xs = np.stack([x, 3 * x])
    f = partial(ours, cotangent=cotangent, chunk_tokens=8, **ALL)
    loss = lambda w, x: linear_cross_entropy(x, w, labels, chunk_tokens=8, **ALL)

    def run(xs, kernel):
        mapped = jax.vmap(lambda x: f(x, kernel, labels))(xs)
        of_scan = jax.grad(lambda w: jax.lax.scan(lambda t, x: (t + jax.checkpoint(loss)(w, x), None), 0.0, xs)[0])
        return mapped, of_scan(kernel), [f(x, kernel, labels) for x in xs]

    mapped, scanned, each = jax.jit(run)(xs, kernel)
    for i, one in enumerate(each):
        close([a[i] for a in mapped], list(map(np.asarray, one)), 2.0**-20)
    want = sum(np.asarray(one[2]) for one in each) / cotangent.sum()
    np.testing.assert_allclose(scanned, want, atol=2.0**-19 * np.abs(want).max())


def test_edges(rng):
    """No tokens, all ignored, a vocabulary of one, labels beyond it, NaN and inf in x."""
    x, kernel, labels, cotangent = drawn(rng)
    run = jax.jit(partial(ours, chunk_tokens=4, reduction="none"))
    mean = jax.jit(partial(ours, chunk_tokens=4))
    for got in (
        mean(x, kernel, np.full_like(labels, IGNORED), cotangent),
        mean(x[:0], kernel, labels[:0], np.ones((1, 1), np.float32)),
    ):
        assert not any(np.asarray(a).any() for a in got)
    assert not any(np.asarray(a).any() for a in mean(x, kernel[:, :1], np.zeros_like(labels), cotangent)[:1])
    for bad in (V, -1):
        wrong = labels.copy()
        wrong[1, 2] = bad
        loss, dx, dkernel = run(x, kernel, wrong, cotangent)
        alone = (np.arange(B)[:, None] == 1) & (np.arange(S) == 2)
        np.testing.assert_array_equal(np.isnan(loss), alone)
        np.testing.assert_array_equal(np.isnan(dx).all(-1), alone)
        assert np.isnan(dkernel).any() and np.isnan(mean(x, kernel, wrong, cotangent)[0])
    wrong = np.where(labels == IGNORED, 1, labels)
    for value in (np.nan, np.inf):
        spoiled = x.copy()
        spoiled[2, 3, 0] = value
        loss = np.asarray(run(spoiled, kernel, wrong, cotangent)[0])
        np.testing.assert_array_equal(~np.isfinite(loss), (np.arange(B)[:, None] == 2) & (np.arange(S) == 3))


ONE = jnp.ones((2, 3, 8)), jnp.ones((8, 5)), jnp.zeros((2, 3), int)
BAD = {  # operands, keywords, error, words
    "x int": ((ONE[0].astype(int), *ONE[1:]), {}, TypeError, "x is int32"),
    "another H": ((ONE[0][..., 1:], *ONE[1:]), {}, ValueError, r"x has the shape \(2, 3, 7\), kernel \(8, 5\)"),
    "words first": (ONE, dict(words_first=True), ValueError, r"kernel \[V, H\]"),
    "no vocabulary": ((ONE[0], ONE[1][:, :0], ONE[2]), {}, ValueError, "a vocabulary of at least one entry"),
    "labels float": ((*ONE[:2], ONE[2].astype(float)), {}, TypeError, "labels is float32"),
    "labels of other tokens": ((*ONE[:2], ONE[2][:, 1:]), {}, ValueError, r"labels has the shape \(2, 2\)"),
    "quantized": ((ONE[0], QuantizedKernel.unquantized(ONE[1], 1), ONE[2]), {}, TypeError, "is a QuantizedKernel"),
    "smoothing": (ONE, dict(label_smoothing=1.0), ValueError, "label_smoothing is 1.0"),
    "z loss": (ONE, dict(z_loss=-1.0), ValueError, "z_loss is -1.0"),
    "cap": (ONE, dict(logit_softcap=0.0), ValueError, "logit_softcap is 0.0"),
    "reduction": (ONE, dict(reduction="avg"), ValueError, "reduction is 'avg'"),
    "chunk": (ONE, dict(chunk_tokens=0), ValueError, "chunk_tokens is 0"),
    "class": (ONE, dict(recipe=recipe.FixedScaling), TypeError, "pass an instance"),
    "no state": (ONE, dict(recipe=recipe.DelayedScaling()), ValueError, "metas is None"),
    "no mesh": (ONE, dict(vocab_axis="tp"), ValueError, "vocab_axis names the mesh axis 'tp', but no mesh is in force"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name):
    args, options, error, words = BAD[name]
    with pytest.raises(error, match=words) as raised:
        jax.eval_shape(lambda: linear_cross_entropy(*args, **options))
    assert str(raised.value).startswith("te_jax.layers.linear_cross_entropy: ")


# -- meshes -----------------------------------------------------------------------------------------------------

TOKENS = P(("dp", "fsdp"), "cp")
BLOCK = RECIPES["block"]  # rounds the same wherever tokens are


def placed(mesh, x, kernel, labels, cotangent):
    put = lambda a, *spec: jax.device_put(a, jax.NamedSharding(mesh, P(*spec)))
    return put(x, *TOKENS), put(kernel, "fsdp", "tp"), put(labels, *TOKENS), put(cotangent, *TOKENS)


@cache
def of_both_reductions(rule, is_told):
    extra = dict(ALL, vocab_axis="tp", token_spec=TOKENS) if is_told else ALL
    return jax.jit(lambda *args: [ours(*args, how, chunk_tokens=3, recipe=rule, **extra) for how in ("mean", "none")])


@pytest.mark.parametrize("rule", [None, BLOCK], ids=["f32", "block"])
@pytest.mark.parametrize("kind", ["explicit", "auto", "auto, told"])
def test_mesh(kind, rule, rng):
    """As on one device, with tokens over dp, fsdp and cp, words over tp. What crosses is smaller than logits."""
    args = drawn(rng, 4, 6, 16, 2 * V)
    want = of_both_reductions(rule, False)(*args)
    explicit = AxisType.Explicit if kind == "explicit" else AxisType.Auto
    mesh = jax.make_mesh((1, 2, 2, 2), ("dp", "fsdp", "cp", "tp"), axis_types=(explicit,) * 4)
    with jax.set_mesh(mesh):
        got = of_both_reductions(rule, kind == "auto, told")(*placed(mesh, *args))
    # In blocks a device's own words may be scaled otherwise than all: half an ulp of E5M2 of each gradient of a logit.
    for a, b in zip(got, want):
        close(a, list(map(np.asarray, b)), 2.0**-18 if rule is None else 2.0**-2)
    if explicit == AxisType.Explicit:
        assert [jax.typeof(a).sharding.spec for a in got[1]] == [TOKENS, P(*TOKENS, None), P("fsdp", "tp")]


def test_words_over_a_manual_axis(rng):
    """Inside jax.shard_map, of the device's own tokens: its mean is the mean of them."""
    x, kernel, labels, cotangent = drawn(rng, 4, 6, 16, 2 * V)
    mesh = jax.make_mesh((2, 2), ("dp", "tp"), axis_types=(AxisType.Auto,) * 2)
    specs = P("dp"), P(None, "tp"), P("dp")

    def of_device(x, kernel, labels, **options):
        options = dict(vocab_axis="tp", chunk_tokens=3, **ALL) | options
        return jax.lax.pmean(linear_cross_entropy(x, kernel, labels, **options), "dp")

    def ours_on(mesh):
        return jax.jit(jax.value_and_grad(jax.shard_map(of_device, mesh=mesh, in_specs=specs, out_specs=P()), (0, 1)))

    means = lambda x, w: sum(
        reduced(loss_of(x[i : i + 2] @ w, labels[i : i + 2], **ALL), labels[i : i + 2], "mean") / 2 for i in (0, 2)
    )
    value, grads = ours_on(mesh)(x, kernel, labels)
    loss, want = jax.jit(jax.value_and_grad(means, (0, 1)))(x, kernel)
    close((value, *grads), list(map(np.asarray, (loss, *want))), 2.0**-18)
    with jax.set_mesh(mesh):
        unchecked = jax.shard_map(of_device, in_specs=specs, out_specs=P(), check_vma=False)
        same = jax.shard_map(of_device, in_specs=(specs[0], P(), specs[2]), out_specs=P())
        told = jax.shard_map(partial(of_device, token_spec=P("dp")), in_specs=specs, out_specs=P())
        for f, words in (
            (unchecked, "needs jax.shard_map"),
            (same, "kernel is the same along"),
            (told, "token_spec is"),
        ):
            with pytest.raises(ValueError, match=words):
                jax.eval_shape(f, x, kernel, labels)


def test_odd_splits(rng, recwarn):
    """What the devices do not divide is not split over them, with a warning; contradictions are errors."""
    x, kernel, labels, cotangent = drawn(rng)
    for kind in (AxisType.Auto, AxisType.Explicit):
        with jax.set_mesh(jax.make_mesh((2, 2), ("dp", "tp"), axis_types=(kind,) * 2)):
            run = lambda **options: linear_cross_entropy(x, kernel, labels, **options)
            if kind == AxisType.Explicit:
                on_mesh = jax.device_put(x, P())
                with pytest.raises(ValueError, match="the types of x and kernel say"):
                    linear_cross_entropy(
                        on_mesh, jax.device_put(kernel, P()), jax.device_put(labels, P()), vocab_axis="tp"
                    )
                continue
            got = jax.jit(partial(run, vocab_axis="tp", token_spec=P("dp")))()
            np.testing.assert_allclose(got, run(), rtol=2.0**-20)
            texts = " ".join(str(w.message) for w in recwarn)
            assert (
                "3 tokens, which the 2 devices" in texts
                and "33 entries of the vocabulary, which the 2 devices" in texts
            )
            with pytest.raises(ValueError, match="both name"):
                run(vocab_axis="tp", token_spec=P("tp"))
            with pytest.raises(ValueError, match="token_spec names the mesh axis 'cp'"):
                run(token_spec=P("cp"))
