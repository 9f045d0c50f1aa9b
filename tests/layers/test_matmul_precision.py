"""`jax.default_matmul_precision` around a call holds for its backward pass too, which is traced behind the block."""

import re

import jax
import jax.numpy as jnp
import pytest

import te_jax as te
import te_jax.flax as te_flax
from te_jax.layers import linear_cross_entropy
from te_jax.recipe import Float8CurrentScaling

RECIPES = {
    "none": None,
    "all out of FP8": Float8CurrentScaling(override_linear_precision=(True, True, True)),
    "wgrad out of FP8": Float8CurrentScaling(override_linear_precision=(False, False, True)),
}
X = jnp.ones((2, 4, 32))
pytestmark = pytest.mark.usefixtures("plain_jax")  # where products in FP8 are jax's, too


def others(loss, *args) -> list[str]:
    """The products of the gradients, in StableHLO, that are not of the highest precision."""

    def highest(*args):
        with jax.default_matmul_precision("highest"):
            return jnp.sum(loss(*args) ** 2)

    dots = re.findall(r"stablehlo.dot_general.*", jax.jit(jax.grad(highest, (0, 1))).lower(*args).as_text())
    assert len(dots) >= 3
    return [dot for dot in dots if "HIGHEST, HIGHEST" not in dot]


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize(
    "module",
    [
        te_flax.DenseGeneral(8),
        te_flax.LayerNormMLP(64),
        te_flax.MultiHeadAttention(16, 2, num_gqa_groups=1),  # queries, and keys with values, of one norm
        te_flax.MoEBlock(4, 2, 16),
    ],
    ids=lambda module: type(module).__name__,
)
def test_modules(module, recipe):
    def apply(variables, x):
        with te.autocast(recipe is not None, recipe):
            return jax.tree.leaves(module.apply(variables, x))[0]

    with te.autocast(recipe is not None, recipe):
        variables = jax.eval_shape(module.init, jax.random.key(0), X)
    assert not others(apply, variables, X)


@pytest.mark.parametrize("recipe", [None, RECIPES["all out of FP8"]], ids=["none", "all out of FP8"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_heads(reduction, recipe):
    labels = jnp.zeros((8,), jnp.int32)
    run = lambda x, kernel: linear_cross_entropy(x, kernel, labels, reduction=reduction, recipe=recipe)
    assert not others(run, X.reshape(8, 32), jnp.ones((32, 50)))
