"""`transformer_engine.jax.quantize.quantizer`: what a layer needs to multiply in FP8, in one value.

TransformerEngine's quantizers quantize arrays. The ones here tell what they would do, and layers of te_jax do it.
"""

from dataclasses import dataclass, fields
from enum import Enum
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from te_jax.compat._absent import GetAttr, absent
from te_jax.compat.transformer_engine.jax.quantize.metadata import QuantizeMeta, QuantizeMetaSet
from te_jax.compat.transformer_engine.jax.quantize.scaling_modes import ScalingMode, mode_of, recipe_class
from te_jax.core.check import NONE, Kind, check
from te_jax.recipe import Recipe
from te_jax.recipe.delayed import HISTORY
from te_jax.state import fp8

__getattr__: GetAttr = absent("transformer_engine.jax.quantize")


class AmaxComputeAlgo(Enum):
    """`amax_compute_algo` of DelayedScaling."""

    MAX = "max"
    MOST_RECENT = "most_recent"


@dataclass(frozen=True)
class Quantizer:
    """How one tensor of a dense layer is quantized.

    tensor: "x", "kernel" or "grad".
    """

    recipe: Recipe
    tensor: str

    @property
    def scaling_mode(self) -> ScalingMode:
        """The mode of the recipe."""
        return mode_of(self.recipe)

    @property
    def q_dtype(self) -> jnp.dtype:
        """The FP8 type."""
        return self.recipe.fp8_format.dtype(fp8.direction_of(self.tensor))

    @property
    def margin(self) -> float:
        """Only DelayedScaling has it."""
        return self.recipe.margin

    @property
    def amax_compute_algo(self) -> AmaxComputeAlgo:
        """Only DelayedScaling has it."""
        return AmaxComputeAlgo(self.recipe.amax_compute_algo)

    @property
    def amax_history(self) -> jax.ShapeDtypeStruct:
        """Shape and type of the history; its values stand in the collection of FP8 state."""
        history = self.recipe.fresh_state()[HISTORY]
        return jax.ShapeDtypeStruct(history.shape, history.dtype)


@partial(jax.tree_util.register_dataclass, data_fields=["metas"], meta_fields=["recipe", "checkpoint", "name"])
@dataclass(frozen=True, eq=False)
class QuantizerSet:
    """The quantizers of one GEMM, as `te_jax.flax.dot_general.QuantizerSet`, and a pytree of their state.

    recipe:     None: not in FP8.
    metas:      the state of x, kernel and gradient; None for a recipe without.
    checkpoint: the name of what is kept for the backward pass.
    name:       what errors call the layer.
    """

    recipe: Recipe | None = None
    metas: fp8.DenseMetas | None = None
    checkpoint: str | None = None
    name: str = "te_jax.compat"

    def _asdict(self) -> dict:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def _of(self, tensor: str) -> Quantizer | None:
        return None if self.recipe is None else Quantizer(self.recipe, tensor)

    @property
    def x(self) -> Quantizer | None:
        """The activations' quantizer."""
        return self._of("x")

    @property
    def kernel(self) -> Quantizer | None:
        """The weight's quantizer."""
        return self._of("kernel")

    @property
    def dgrad(self) -> Quantizer | None:
        """The quantizer of the output's gradient."""
        return self._of("grad")


noop_quantizer_set: QuantizerSet = QuantizerSet()
_SET = Kind(
    "what QuantizerFactory.create_set returns, or noop_quantizer_set", lambda given: isinstance(given, QuantizerSet)
)


def layer_options(where: str, given: QuantizerSet, name: str = "quantizer_set") -> dict[str, Any]:
    """The keywords of a layer of te_jax. Raises TypeError, naming `where` and the argument, for other than a set."""
    check(where, name, given, _SET)
    return given._asdict()


class QuantizerFactory:
    """Makes quantizer sets outside of Flax."""

    @staticmethod
    def create_set(
        n_quantizer_sets: int = 1,
        scaling_mode: ScalingMode | None = None,
        fwd_dtype: DTypeLike | None = None,
        bwd_dtype: DTypeLike | None = None,
        is_2x2x: bool | None = None,
        n_groups: int | None = None,
        checkpoint_name: str | None = None,
        fp8_recipe: Recipe | None = None,
        *,
        quantize_meta_set: QuantizeMetaSet | None = None,
    ) -> QuantizerSet | tuple[QuantizerSet, ...]:
        """A set, or a tuple of them, of `fp8_recipe`, of the recipe of `scaling_mode`, or of the one in force.

        The FP8 types are the recipe's, and layers choose the layouts: is_2x2x and n_groups have no effect. A recipe
        with state has the one in quantize_meta_set, whose gradient is the next, or fresh state, whose gradient goes
        nowhere.

        Raises TypeError for another quantize_meta_set, ValueError for fwd_dtype and bwd_dtype that the recipe does not
        have, for a mode without a recipe, for a mode next to a recipe, and for state that the recipe has not.
        """
        del is_2x2x, n_groups
        check("QuantizerFactory", "quantize_meta_set", quantize_meta_set, NONE | _META_SET)
        if fp8_recipe is not None and scaling_mode is not None:
            raise ValueError(
                f"QuantizerFactory: scaling_mode is {scaling_mode}, but fp8_recipe is given too; leave one of them out."
            )
        recipe = fp8_recipe
        if recipe is None and scaling_mode is None:
            recipe = fp8.current_recipe()
        elif recipe is None and scaling_mode is not ScalingMode.NO_SCALING:
            cls = recipe_class(scaling_mode)
            if cls is None:
                raise ValueError(f"QuantizerFactory: scaling_mode is {scaling_mode}, which te_jax has no recipe of.")
            recipe = cls()
        made = QuantizerSet(recipe, _metas_of(recipe, quantize_meta_set), checkpoint_name)
        for given, quantizer in ((fwd_dtype, made.x), (bwd_dtype, made.dgrad)):
            if given is not None and quantizer is not None and jnp.dtype(given) != quantizer.q_dtype:
                raise ValueError(
                    f"QuantizerFactory: the dtype given is {jnp.dtype(given)}, but the recipe has {quantizer.q_dtype} "
                    "there; give fp8_recipe with another fp8_format."
                )
        return made if n_quantizer_sets == 1 else (made,) * n_quantizer_sets


_META_SET = Kind("a QuantizeMetaSet", lambda value: isinstance(value, QuantizeMetaSet))


def _metas_of(recipe: Recipe | None, given: QuantizeMetaSet | None) -> fp8.DenseMetas | None:
    fresh = QuantizeMeta()
    of = {name: fresh if given is None else getattr(given, name) for name in fp8.DenseMetas._fields}
    metas = [meta.of_recipe(recipe, name) for name, meta in of.items()]
    return None if recipe is None or not recipe.has_state else fp8.DenseMetas(*metas)
