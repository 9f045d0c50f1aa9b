"""Products in FP8 inside of any model of Flax NNX."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx
from jax import ShapeDtypeStruct

import te_jax.flax as te_flax
from te_jax.nnx._layer import Layer, warn_of_plain_gradients
from te_jax.recipe import Recipe
from te_jax.state.fp8 import FP8_COLLECTION, current_recipe, is_switched_off

_WIDTH = 128  # of the operands that the state is made with; it has the same leaves for all


class DotGeneral(Layer):
    """`te_jax.flax.DotGeneral` for the modules of Flax NNX: `nnx.Linear(..., dot_general=te_nnx.DotGeneral())`.

    recipe: None: the recipe of the `te_jax.autocast` in force. A recipe of its own counts outside of autocasts, too, if
            it has no state; if it has, the autocast in force must have the same one, as `value_and_grad` asks it.
    quantization_checkpoint_name: as in `te_jax.flax.DotGeneral`.

    FP8 state is made by the constructor, under autocast or of `recipe`, and becomes a part of the module that takes it:
    `linear.dot_general.x_scale`, of the type `Fp8State`. One instance in several modules is one state, of their largest
    amaxes; so make one for each:

        for _, module in nnx.iter_modules(model):
            if isinstance(module, nnx.Linear | nnx.LinearGeneral):
                module.dot_general = nnx.data(te_nnx.DotGeneral())

    `dot_general_cls` of `nnx.LinearGeneral` makes an instance in each call, which forgets its state: use it only under
    recipes without state.
    """

    linen_type: type[nn.Module] = te_flax.DotGeneral

    def __init__(
        self,
        recipe: Recipe | None = None,
        *,
        quantization_checkpoint_name: str | None = None,
        rngs: nnx.Rngs | None = None,
    ):
        fields = dict(collection=FP8_COLLECTION, quantization_checkpoint_name=quantization_checkpoint_name)
        super().__init__(recipe, **fields, rngs=rngs or nnx.Rngs(0))

    @staticmethod
    def inputs(linen: Any) -> Any:
        operand = ShapeDtypeStruct((_WIDTH, _WIDTH), jnp.bfloat16)
        return operand, operand, (((1,), (0,)), ((), ()))

    def __call__(
        self,
        lhs: jax.Array,
        rhs: jax.Array,
        dimension_numbers: Any,
        precision: Any = None,
        preferred_element_type: Any = None,
        *,
        out_sharding: Any = None,
    ) -> jax.Array:
        """As `te_jax.layers.dot_general`. Raises ValueError where FP8 state would not move: outside of an autocast that
        has the recipe of it."""
        own = self.linen.recipe
        if own is not None and own.has_state and current_recipe() is None and not is_switched_off():
            raise ValueError(
                f"{type(self).__name__}: recipe is {own!r}, which has state, but no te_jax.autocast is in force; enter "
                "te_jax.autocast(recipe=...) with it around te_jax.nnx.value_and_grad and other calls."
            )
        warn_of_plain_gradients(type(self).__name__, {("params", "kernel"): rhs, **self._gather()[0]})
        options = dict(out_sharding=out_sharding)
        return super().__call__(lhs, rhs, dimension_numbers, precision, preferred_element_type, **options)
