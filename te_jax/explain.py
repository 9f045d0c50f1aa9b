"""Which products of a model are in FP8, and why the others are not."""

import importlib
from collections.abc import Sequence
from typing import Any

from te_jax.layers.explain_fp8 import Fp8Explanation
from te_jax.recipe import Recipe


def explain_fp8(
    model: Any,
    *args: Any,
    recipe: Recipe | None = None,
    variables: Any = None,
    train: bool = True,
    frozen: Sequence[str] = (),
    **kwargs: Any,
) -> Fp8Explanation:
    """Which products of a model are in FP8, why the others are not, by which ops they run, and what each module keeps
    for the backward pass.

        print(te_jax.explain_fp8(model, x, recipe=te_jax.recipe.DelayedScaling()))

    model:     a module of Flax Linen or NNX; or a function, such as a loss, all of whose floating arguments are
               differentiated. Of a function that takes gradients itself, such as a training step, pass train=False.
    args, kwargs: of its call. Arrays may be `jax.ShapeDtypeStruct`s: the call is traced, and nothing is computed.
    recipe:    None: the one in force (`te_jax.autocast`).
    variables: of a Linen module, arrays or their types, such as `jax.eval_shape(model.init, key, x)`. None: as `init`
               with these arguments makes them.
    train:     False: the forward pass only. Else also the gradients by parameters and floating arguments.
    frozen:    patterns of paths of parameters without a gradient, as a recipe's `exclude` has them of modules, such as
               ("lm_head", "layers/*/kernel"). In a function `jax.lax.stop_gradient` says that.

    The answer is read off the jaxpr of the call, by the names that modules leave there. So it has the products of any
    library that are te_jax's, or jax's own (`jax.lax.dot_general` and convolutions, not kernels of other libraries),
    and none that are not made. Bytes kept for the backward pass are what `jax.vjp` keeps of the forward pass,
    each at the module that computes it: no parameters or arguments, and before XLA joins or recomputes anything. FP8
    state that the model lacks is no error here.

    Raises TypeError for another model, no recipe and `variables` of another model than a Linen module; ValueError for
    patterns that name no parameter; and what the call raises.
    """
    options = recipe, variables, train, frozen
    # Imported here, for Flax takes a second to import.
    return importlib.import_module("te_jax.nnx.explained").explain_model(model, args, kwargs, *options)
