"""Products in FP8 inside of Flax's own modules: `te_jax.layers.dot_general` and the classes around it."""

import functools
from functools import partial

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
from jax import lax
from states import data

import te_jax as te
import te_jax.flax as te_flax
from te_jax import layers, recipe

KEY = jax.random.key(0)
DELAYED = recipe.DelayedScaling(amax_history_len=4)
STATELESS = (
    recipe.Float8CurrentScaling(),
    recipe.FixedScaling(),
    recipe.Float8BlockScaling(),
    recipe.MXFP8BlockScaling(),
)
RNG = np.random.default_rng(0)


def of_tensor(name):
    return {f"{name}_scale": (1,), f"{name}_amax_history": (4,)}


SHAPES = {**of_tensor("x"), **of_tensor("kernel"), **of_tensor("grad")}


# -- the product --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dims", [((2,), (0,)), ((1, 2), (0, 1)), ((2, 1), (1, 2)), ((0,), (2,))])
def test_any_axes_are_contracted(dims):
    """Operands of small integers are exact in E4M3 at a scale of 1, and so is each sum."""
    sizes = {1: (5, 7, 3), 2: (4, 3, 6)}[len(dims[0])]
    lhs, shape = RNG.integers(-3, 4, sizes), [2, 5, 4]
    for a, b in zip(*dims):
        shape[b] = sizes[a]
    rhs = RNG.integers(-3, 4, shape)
    lhs, rhs = (jnp.asarray(a, jnp.float32) for a in (lhs, rhs))
    exact = recipe.FixedScaling(kernel_scale=1.0, grad_scale=1.0)
    want, want_vjp = jax.vjp(lambda *a: lax.dot_general(*a, (dims, ((), ()))), lhs, rhs)
    got, vjp = jax.vjp(lambda *a: layers.dot_general(*a, (dims, ((), ())), recipe=exact), lhs, rhs)
    np.testing.assert_array_equal(got, want)
    dy = jnp.asarray(RNG.integers(-2, 3, want.shape), jnp.float32)
    jax.tree.map(np.testing.assert_array_equal, vjp(dy), want_vjp(dy))


def test_dtypes_of_the_result():
    lhs, rhs = jnp.full((2, 3), 1.0625, jnp.bfloat16), jnp.full((3, 4), 1.125, jnp.bfloat16)
    run = partial(layers.dot_general, dimension_numbers=(((1,), (0,)), ((), ())), recipe=recipe.FixedScaling())
    assert run(lhs, rhs).dtype == jnp.bfloat16
    wide = run(lhs, rhs, preferred_element_type=jnp.float32)
    # 1.0625 is a tie between 1 and 1.125, and goes to the even one, 1; the sum 3.375 is exact either way.
    assert wide.dtype == jnp.float32 and (wide == 3.375).all()
    assert run(lhs.astype(jnp.float32), rhs).dtype == jnp.float32
    assert run(lhs.astype(jnp.float32), rhs, preferred_element_type=jnp.bfloat16).dtype == jnp.bfloat16
    sums = jnp.full((2, 300), 1.0, jnp.bfloat16), jnp.full((300, 4), 1.0, jnp.bfloat16)
    assert (run(*sums, preferred_element_type=jnp.float32) == 300).all()  # bf16 has no 300 + 1, so also:
    odd = sums[0].at[0, 0].set(2.0), sums[1]
    assert run(*odd, preferred_element_type=jnp.float32)[0, 0] == 301


def test_operands_without_free_axes():
    """Block scaling wants an axis beside the contracted one, which is put in and taken out."""
    x, weight = data(RNG, 256), data(RNG, 256, 3)
    for rule in (recipe.Float8BlockScaling(), recipe.Float8CurrentScaling()):
        run = partial(layers.dot_general, dimension_numbers=(((0,), (0,)), ((), ())), recipe=rule)
        assert run(x, weight).shape == (3,) and run(x, weight[:, 0]).shape == ()
        assert float(run(x, weight[:, 0])) == pytest.approx(float(x @ weight[:, 0]), abs=1.0)


def test_what_a_product_refuses():
    x = jnp.ones((2, 3, 4))
    run = partial(layers.dot_general, x, x, recipe=recipe.FixedScaling())
    for dims in ((((2,), (2,)), ((0,), (0,))), (((), ()), ((), ()))):
        with pytest.raises(ValueError, match=r"te_jax.layers.dot_general: dimension_numbers is .*; use jax.lax"):
            run(dims)
    run = partial(run, (((2,), (2,)), ((), ())))
    for precision in ("highest", lax.Precision.HIGH, (None, "highest")):
        with pytest.raises(ValueError, match="precision is .*; leave it None"):
            run(precision=precision)
    for precision in (None, "default", lax.Precision.DEFAULT, (lax.Precision.DEFAULT, None)):
        run(precision=precision)


# -- in Flax's modules --------------------------------------------------------------------------------------------


class Net(nn.Module):
    """A transformer of two layers of Flax's modules alone."""

    dot: type | None = None

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(16, 32)(tokens)
        mask = nn.make_causal_mask(tokens)
        for _ in range(2):
            y = nn.LayerNorm()(x)
            y = nn.SelfAttention(2, qkv_dot_general_cls=self.dot, out_dot_general_cls=self.dot)(y, mask)
            x = x + y
            y = nn.gelu(nn.Dense(64, dot_general_cls=self.dot)(nn.LayerNorm()(x)))
            x = x + nn.Dense(32, dot_general_cls=self.dot)(y)
        return nn.DenseGeneral(16, dot_general_cls=self.dot)(nn.LayerNorm()(x))


def loss_of(variables, tokens, model):
    logits = model.apply(variables, tokens[:, :-1])
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]))


def losses(model, rule, steps=30):
    """Of a training whose tokens count up, from the one before by 3 or 5: half a bit to learn of each."""
    starts, strides = RNG0.integers(0, 16, (8, 1)), RNG0.choice([3, 5], (8, 1))
    tokens = jnp.asarray((starts + strides * np.arange(17)) % 16)
    variables = jax.jit(model.init)(KEY, tokens[:, :-1])
    state, params = flax.core.pop(variables, "params")
    tx = optax.adam(3e-3)

    @jax.jit
    def step(params, state, moments):
        with te.autocast(rule is not None, rule):
            loss, (grads, state) = te.value_and_grad(
                lambda params, state: loss_of({"params": params, **state}, tokens, model), (0, 1)
            )(params, state)
        updates, moments = tx.update(grads, moments, params)
        return optax.apply_updates(params, updates), state, moments, loss

    moments, found = tx.init(params), []
    for _ in range(steps):
        params, state, moments, loss = step(params, state, moments)
        found.append(float(loss))
    return variables, found


RNG0 = np.random.default_rng(7)


@pytest.mark.parametrize("rule", [DELAYED, *STATELESS], ids=lambda rule: type(rule).__name__)
def test_a_transformer_learns(rule):
    """Its loss stays near the one in f32, with the tree of parameters that Flax makes."""
    plain, want = plain_losses()
    variables, got = losses(Net(te_flax.make_dot_general_cls(rule)), rule)
    jax.tree.map(np.testing.assert_array_equal, variables["params"], plain["params"])
    assert set(variables) == {"params", *([OVERWRITE_WITH_GRADIENT] if rule.has_state else [])}
    assert want[-1] < want[0] / 2, want
    assert abs(got[-1] - want[-1]) < 0.1 * want[0], (got, want)


@functools.cache
def plain_losses():
    return losses(Net(), None)


def test_the_tree_of_the_state():
    tokens = jnp.zeros((1, 4), jnp.int32)
    cls = te_flax.make_dot_general_cls(DELAYED)
    state = jax.eval_shape(Net(cls).init, KEY, tokens)[OVERWRITE_WITH_GRADIENT]
    of_attention = {name: {"TEWrapper_dot_general_0": SHAPES} for name in ("query", "key", "value", "out")}
    got = jax.tree.map(jnp.shape, state)
    assert got["Dense_0"] == {"TEWrapper_dot_general_0": SHAPES}
    assert got["SelfAttention_0"] == of_attention
    with te.autocast(recipe=DELAYED):
        by_name = jax.eval_shape(nn.Dense(8, dot_general_cls=te_flax.DotGeneral).init, KEY, jnp.ones((2, 4)))
    assert set(by_name[OVERWRITE_WITH_GRADIENT]) == {"DotGeneral_0"}


class Twins(nn.Module):
    """One instance of the product, in two layers."""

    @nn.compact
    def __call__(self, x):
        dot = te_flax.make_dot_general_cls(DELAYED)()
        return nn.Dense(6, dot_general=dot)(nn.Dense(8, dot_general=dot)(x))
