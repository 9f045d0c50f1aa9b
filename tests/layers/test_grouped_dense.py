"""Grouped dense layers in FP8 against a loop over experts of `te_jax.layers.dense`, bit for bit.

The operands are integers up to 8. In FP8 they are multiples of 1 / 112 of the largest (E5M2: of 1 / 56), whatever their
scale, so all sums of products are exact in f32: the order in which tiles and experts are added up does not show.
"""

from functools import partial

import grouped_oracle as oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from te_jax import recipe
from te_jax.layers import QuantizedKernel, dense, grouped_dense
from te_jax.ops.formats import format_of
from te_jax.state import fp8

T, E, K, N = 141, 3, 150, 40  # blocks of 128 are cut
SCALES = dict(x=2.0**3, kernel=3.0, grad=2.0**5)


def metas_of(scales, tokens):
    return fp8.DenseMetas(*(fp8.TensorMeta(jnp.float32(scale), token) for scale, token in zip(scales, tokens)))


def used_rows(x, counts):
    """x [T, ...] with zeros behind the last group."""
    return jnp.where((jnp.arange(x.shape[0]) < jnp.sum(counts))[:, None], x, 0)


def loop(x, kernel, bias, tokens, counts, dy, rule):
    """A dense layer for each expert, with its rows in front and zeros behind: its blocks of rows are those of groups.

    Scales of whole tensors are given to a recipe with state: so each expert can have that of all x.
    """

    def add(total, expert):
        weight, bias, start, count = expert
        mine, options = (jnp.arange(T) < count)[:, None], dict(recipe=rule)
        if not format_of(rule, "x").block:
            options = dict(recipe=delayed(rule), metas=metas_of(scales_of(x, weight, counts, dy, rule), tokens))
        y = dense(jnp.where(mine, jnp.roll(x, -start, 0), 0), weight, bias, **options)
        return total + jnp.roll(jnp.where(mine, y, 0), start, 0), None

    return jax.lax.scan(add, jnp.zeros((T, N), x.dtype), (kernel, bias, jnp.cumsum(counts) - counts, counts))[0]


def delayed(rule):
    high = rule.override_linear_precision
    return recipe.DelayedScaling(fp8_format=rule.fp8_format, override_linear_precision=high)


def scales_of(x, weight, counts, dy, rule):
    """Of all x, of one kernel and of the gradient of all rows."""
    if rule.has_state:
        return tuple(SCALES.values())
    tensors = used_rows(x, counts), weight, used_rows(dy, counts)
    found = []
    for name, a in zip(SCALES, tensors):
        amax = jnp.max(jnp.abs(jax.lax.stop_gradient(a).astype(jnp.float32)), initial=0)
        found.append(rule.scale(name, None, amax, rule.fp8_format.max(fp8.direction_of(name))))
    return found


RULES = {
    "fixed": recipe.FixedScaling(grad_scale=2.0**4),
    "current": recipe.Float8CurrentScaling(),
    "blocks": recipe.Float8BlockScaling(),
    "blocks, fprop and wgrad in x's type": recipe.Float8BlockScaling(override_linear_precision=(True, False, True)),
    "mx": recipe.MXFP8BlockScaling(),
    "delayed, dgrad in x's type": recipe.DelayedScaling(override_linear_precision=(False, True, False)),
}


def operands(rng, dtype):
    """x, kernel, bias, dy; the amaxes of kernels differ by more than a power of 2."""
    integers = lambda *shape: rng.integers(-8, 9, shape).astype(dtype)
    kernel = np.stack([rng.integers(-most, most + 1, (K, N)) for most in (8, 5, 7)]).astype(np.float32)
    return integers(T, K), kernel, integers(E, N), integers(T, N)


@pytest.mark.filterwarnings("ignore:.*whose grouped products are of bf16")
@pytest.mark.parametrize("name", RULES)
def test_loop_over_experts(name, rng):
    """y and all gradients, the FP8 state's too, for many loads in one compilation; odd T, rows behind the groups."""
    rule = RULES[name]
    dtype = jnp.bfloat16 if name in ("current", "mx") else jnp.float32

    def ours(x, kernel, bias, tokens, counts, dy):
        metas = metas_of(SCALES.values(), tokens) if rule.has_state else None
        return grouped_dense(x, kernel, counts, bias, recipe=rule, metas=metas)

    def both(*args):
        *primals, counts, dy = args
        results = []
        for f in (ours, partial(loop, rule=rule)):
            y, vjp = jax.vjp(partial(f, counts=counts, dy=dy), *primals)
            results.append((y, *vjp(dy)))
        return results

    run, tokens = jax.jit(both), (np.float32(0),) * 3
    for load, counts in oracle.loads(rng, E, T - 2).items():
        x, kernel, bias, dy = operands(rng, dtype)
        with jax.default_device(jax.devices("cpu")[0]):  # sums are exact in f32, but not in a GPU's FP8 products
            got, want = run(x, kernel, bias, tokens, counts, dy)
        if rule.has_state:  # the loop's cotangents are summed over experts, where they should be the largest
            largest = [np.abs(a).max(initial=0) for a in (x[: counts.sum()], kernel, dy[: counts.sum()])]
            np.testing.assert_array_equal(got[-1], largest, load)
        for what, a, b in zip(("y", "dx", "dkernel", "dbias"), got, want):
            np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32), f"{load}: {what}")
        assert not np.asarray(got[0], np.float32)[counts.sum() :].any()
        assert not np.asarray(got[2])[counts == 0].any() and not np.asarray(got[3], np.float32)[counts == 0].any()


# -- what else is promised ------------------------------------------------------------------------------------

SMALL = (7, 4), (3, 4, 5), (3, 5)  # x, kernel, bias
FIXED = recipe.FixedScaling(grad_scale=1.0)


def small(rng):
    return [rng.standard_normal(shape).astype(np.float32) for shape in SMALL]


def with_gradients(x, kernel, bias, counts):
    """y and the gradients of its squares."""
    y, vjp = jax.vjp(lambda x, kernel, bias: grouped_dense(x, kernel, counts, bias, recipe=FIXED), x, kernel, bias)
    return y, *vjp(2 * y)


alone = jax.jit(with_gradients)


def test_vmap(rng):
    """Each example has its own groups."""
    x, kernel, bias = small(rng)
    xs, counts = np.stack([x, 9 * x[::-1]]), np.array([[3, 0, 4], [1, 5, 0]])
    got = jax.jit(jax.vmap(with_gradients, (0, None, None, 0)))(xs, kernel, bias, counts)
    for i in range(2):
        for a, b in zip(got, alone(xs[i], kernel, bias, counts[i]), strict=True):
            np.testing.assert_allclose(a[i], b, rtol=2.0**-20, atol=2.0**-20 * np.abs(b).max())  # sums of 7 f32 terms


def test_nan_stays_in_its_row(rng):
    """A NaN reaches its row of y and of dx, and only its expert's gradients. Behind the groups it is not read."""
    x, kernel, bias = small(rng)
    counts = np.array([3, 0, 3])
    clean = alone(x, kernel, bias, counts)
    x[[4, 6], 1] = np.nan
    spoiled = alone(x, kernel, bias, counts)
    for of_rows, (a, b) in zip((True, True, False, False), zip(clean, spoiled)):
        hit = np.arange(a.shape[0]) == (4 if of_rows else 2)
        assert np.isnan(np.asarray(b)[hit]).any()
        np.testing.assert_array_equal(np.asarray(a)[~hit], np.asarray(b)[~hit])


def test_frozen_kernel(rng):
    """Without a gradient of the kernel nothing is computed for one."""
    x, kernel, bias = small(rng)
    loss = lambda x, kernel: jnp.sum(grouped_dense(x, kernel, jnp.array([3, 0, 3]), bias, recipe=FIXED) ** 2)
    assert "wgrad" in str(jax.make_jaxpr(jax.grad(loss, (0, 1)))(x, kernel))
    assert "wgrad" not in str(jax.make_jaxpr(jax.grad(loss))(x, kernel))


def test_probe(rng):
    """A probe counts the rows of groups, not what pads them: 500 is beyond E4M3, 2**-11 is lost."""
    x = np.ones((7, 4), np.float32)
    x[:3, 0] = 500, 2.0**-11, 0
    _, kernel, bias = small(rng)
    probed = fp8.TensorMeta(np.float32(1), np.zeros(4, np.float32))
    plain = fp8.TensorMeta(np.float32(1), np.float32(0))
    layer = lambda meta: grouped_dense(
        x, kernel, np.array([3, 0, 3]), bias, recipe=recipe.DelayedScaling(), metas=fp8.DenseMetas(meta, plain, plain)
    )
    seen = jax.jit(jax.grad(lambda meta: jnp.sum(layer(meta))))(probed).amax
    np.testing.assert_allclose(seen, [500.0, 1.0, 1 / 28, 1 / 23], rtol=2.0**-23)  # the last row is in no group


def test_no_rows():
    y, dx, dkernel, dbias = alone(
        *(np.ones(shape, np.float32) for shape in ((0, 4), *SMALL[1:])), np.zeros(3, np.int32)
    )
    assert (y.shape, dx.shape) == ((0, 5), (0, 4)) and not dkernel.any() and not dbias.any()


ONE = np.ones((7, 4), np.float32), np.ones((3, 4, 5), np.float32), np.array([3, 0, 4], np.int32)
BAD = {  # operands, keywords, error, words
    "kernel of one expert": ((ONE[0], ONE[1][0], ONE[2]), {}, ValueError, r"kernel has the shape \(4, 5\)"),
    "another E": ((*ONE[:2], ONE[2][:2]), {}, ValueError, r"group_sizes has the shape \(2,\)"),
    "another K": ((ONE[0][:, :3], *ONE[1:]), {}, ValueError, r"x has the shape \(7, 3\)"),
    "another N": ((*ONE, np.ones((3, 4), np.float32)), {}, ValueError, r"bias has the shape \(3, 4\)"),
    "sizes": ((*ONE[:2], np.ones(3, np.float32)), {}, TypeError, "group_sizes is float32"),
    "quantized": ((ONE[0], QuantizedKernel.unquantized(ONE[1], 1), ONE[2]), {}, TypeError, "is a QuantizedKernel"),
    "type": ((ONE[0].astype(np.int32), *ONE[1:]), {}, TypeError, "x is int32"),
    "class": (ONE, dict(recipe=recipe.FixedScaling), TypeError, "pass an instance"),
    "no state": (ONE, dict(recipe=recipe.DelayedScaling()), ValueError, "metas is None"),
    "state": (ONE, dict(recipe=FIXED, metas=fp8.STATELESS), ValueError, "it has no state"),
    "name": (ONE, dict(recipe=FIXED, checkpoint=3), TypeError, "checkpoint is 3"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name):
    """Refused while it is traced, with the layer, the value and a way out."""
    args, options, error, words = BAD[name]
    with pytest.raises(error, match=words) as raised:
        jax.eval_shape(lambda: grouped_dense(*args, **options))
    assert str(raised.value).startswith("te_jax.layers.grouped_dense: ")


def test_mx_warns(monkeypatch):
    monkeypatch.setattr("te_jax.core.check.told", set())
    with pytest.warns(UserWarning, match="grouped products are of bf16"):
        jax.eval_shape(lambda: grouped_dense(*ONE, recipe=recipe.MXFP8BlockScaling()))
