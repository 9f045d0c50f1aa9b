"""`transformer_engine.jax.quantize.metadata`: FP8 state of tensors, as a caller hands it to a quantizer."""

from dataclasses import dataclass

import jax

from te_jax.compat._absent import GetAttr, absent
from te_jax.recipe import Recipe
from te_jax.state import fp8

__getattr__: GetAttr = absent("transformer_engine.jax.quantize")


@dataclass(frozen=True)
class QuantizeMeta:
    """The state of one tensor under DelayedScaling; none of it under other recipes.

    scale: f32[1]. amax_history: f32[L], of the recipe's length. Both or neither, which is fresh state.
    """

    scale: jax.Array | None = None
    amax_history: jax.Array | None = None

    def of_recipe(self, recipe: Recipe | None, tensor: str) -> fp8.TensorMeta | None:
        """What a layer consumes, whose gradient is the next state; None for a recipe without state.

        Raises ValueError for one of the two, for state of a recipe without, and for other shapes.
        """
        given = [leaf for leaf in (self.scale, self.amax_history) if leaf is not None]
        name, of = f"QuantizeMeta of {tensor!r}", type(recipe).__name__
        if len(given) == 1:
            raise ValueError(f"{name}: scale or amax_history is given without the other; pass both, or neither.")
        if recipe is None or not recipe.has_state:
            if given:
                raise ValueError(f"{name}: scale and amax_history are given, but {of} has no state; leave them out.")
            return None
        fresh = recipe.fresh_state()
        for leaf, due in zip(given, fresh.values()):
            if leaf.shape != due.shape:
                raise ValueError(f"{name}: a leaf has shape {leaf.shape}, but {of} {due.shape}; pass that shape.")
        state = given or map(jax.numpy.asarray, fresh.values())
        return fp8.observe(*state, recipe, fp8.direction_of(tensor))


@dataclass(frozen=True)
class QuantizeMetaSet:
    """The states of the tensors of one GEMM."""

    x: QuantizeMeta
    kernel: QuantizeMeta
    grad: QuantizeMeta
