"""Products in FP8 inside of any Flax model: modules without parameters instead of `jax.lax.dot_general`.

Flax's modules take a product of the caller's: `nn.Dense(dot_general_cls=...)`, `nn.DenseGeneral`,
`nn.MultiHeadDotProductAttention(qkv_dot_general_cls=..., out_dot_general_cls=...)`. A module that is built there has
the FP8 state of that product in the collection `_overwrite_with_gradient`, under its own name below the module that
builds it, as Flax's own FP8 products have. Parameters stay where they are.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from flax import linen as nn

from te_jax.core.check import FUNCTION, NONE, STRING, check, warn_once
from te_jax.core.products import note
from te_jax.flax._fields import Module
from te_jax.flax._state import dense_metas, describe, recipe_of
from te_jax.layers.contraction import dot_general, why_not_fp8
from te_jax.recipe import Recipe
from te_jax.sharding.resource import check_current_mesh_resource
from te_jax.state.fp8 import OVERWRITE_COLLECTION, DenseMetas, check_recipe, state_collection


class QuantizerSet(NamedTuple):
    """How a GEMM quantizes, as keywords of `te_jax.layers.dense`: `dense(x, kernel, **quantizers._asdict())`."""

    recipe: Recipe | None  # None: not in FP8
    metas: DenseMetas | None  # the FP8 state of x, kernel and gradient, None for a recipe without state
    checkpoint: str | None  # name of the tensors kept for the backward pass
    name: str  # of the module, for errors


class QuantizingModule(Module):
    """Base of modules that hold FP8 state, and no parameters, for a function that multiplies."""

    def generate_quantizer_set(
        self,
        postfix: str = "",
        variable_collection: str | None = None,
        quantization_checkpoint_name: str | None = None,
        fp8_recipe: Recipe | None = None,
        n_groups: int | None = None,
    ) -> QuantizerSet:
        """The quantizers of one GEMM of this module, whose state are the variables `{x,kernel,grad}{postfix}_scale`
        f32[1] and `..._amax_history` f32[L]. A second call with one postfix is another use of the same state.

        postfix:             "" or "_0", "_1", ...
        variable_collection: where the state lives; None: in the collection of the autocast in force.
        quantization_checkpoint_name: name of the quantized tensors, for `jax.checkpoint` policies.
        fp8_recipe:          None: the recipe of the autocast in force. `autocast(False)` switches this one off, too.
        n_groups:            for grouped GEMMs, under recipes without state.

        Raises ValueError for another postfix, for n_groups under a recipe with state, and where fp8_recipe and the
        recipe in force both have state, but are not the same; as `te_jax.flax.DenseGeneral` for FP8 state that does not
        fit.
        """
        where = describe(self)
        check_current_mesh_resource()
        if postfix and not (postfix[0] == "_" and postfix[1:].isdigit()):
            raise ValueError(f'{where}: postfix is {postfix!r}; pass "" or "_0", "_1", ... for each GEMM.')
        recipe = recipe_of(self, own=fp8_recipe)
        if recipe is not None and recipe.has_state and n_groups is not None:
            raise ValueError(
                f"{where}: n_groups is {n_groups!r}, but {type(recipe).__name__} has state for a whole tensor; leave "
                "it out, and all groups share that state, or use a recipe without state."
            )
        metas = dense_metas(self, postfix, own=fp8_recipe, collection=variable_collection)
        return QuantizerSet(recipe, metas, quantization_checkpoint_name, where)


class DotGeneral(QuantizingModule):
    """`jax.lax.dot_general` of an activation and a weight, under a recipe in FP8:
    `nn.Dense(features, dot_general_cls=te_flax.DotGeneral)`.

    recipe:     None: the recipe of the `te_jax.autocast` in force, and no FP8 without one. A recipe of its own counts
                in and outside of autocasts, but for `autocast(False)`.
    collection: "fp8_metas" or "_overwrite_with_gradient", where FP8 state lives. None: as the autocast in force says,
                else the latter.
    quantization_checkpoint_name: as in `DenseGeneral`.

    What is no product of an activation and a weight is left to `jax.lax.dot_general`, and a warning says so once:
    batch axes, other dtypes than f32, bf16 and f16, nothing contracted.
    """

    recipe: Recipe | None = None
    collection: str | None = None
    quantization_checkpoint_name: str | None = None

    @nn.compact
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
        """As `te_jax.layers.dot_general`."""
        call = lhs, rhs, dimension_numbers, precision, preferred_element_type, out_sharding
        if recipe_of(self, own=self.recipe) is not None and (why := why_not_fp8(*call[:3])):
            note(why)
            warn_once(describe(self), f"a product is not in FP8: {why}. It runs as jax.lax.dot_general.")
            return dot_general(*call)
        quantizers = self.generate_quantizer_set(
            variable_collection=self.collection or state_collection(OVERWRITE_COLLECTION),
            quantization_checkpoint_name=self.quantization_checkpoint_name,
            fp8_recipe=self.recipe,
        )
        return dot_general(*call, **quantizers._asdict())


def make_dot_general_cls(quantization_recipe: Recipe | None) -> type[DotGeneral]:
    """`DotGeneral` as a class with this recipe: `nn.Dense(features, dot_general_cls=make_dot_general_cls(recipe))`.

    quantization_recipe: None: the recipe of the autocast in force.

    One recipe has one class, so that modules that are built twice are equal. Raises TypeError for no recipe.
    """
    if quantization_recipe is not None:
        check_recipe("make_dot_general_cls", quantization_recipe, "quantization_recipe")
    return _dot_general_cls(quantization_recipe)


@functools.cache
def _dot_general_cls(own: Recipe | None) -> type[DotGeneral]:
    class TEWrapper(DotGeneral):
        __doc__ = DotGeneral.__doc__

        recipe: Recipe | None = own

    return _with_name(TEWrapper, "dot_general")


def wrap_function_in_te_state_module(
    f: Callable,
    quantization_recipe: Recipe | None,
    name: str | None = None,
    quantization_checkpoint_name: str | None = None,
) -> type[QuantizingModule]:
    """A class of Flax modules that call `f(generate_quantizer_set, *args, **kwargs)` and hold the FP8 state for it.

        from te_jax.layers import dense

        def two_products(generate_quantizer_set, x, a, b):
            y = dense(x, a, **generate_quantizer_set("_0")._asdict())
            return dense(y, b, **generate_quantizer_set("_1")._asdict())

        y = wrap_function_in_te_state_module(two_products, recipe, "mlp")()(x, a, b)

    f:                   generate_quantizer_set(postfix="", n_groups=None) gives a `QuantizerSet`.
    quantization_recipe: None: the recipe of the autocast in force.
    name:                the class is `TEWrapper_{name}`; None: the name of f.
    quantization_checkpoint_name: as in `DenseGeneral`.

    The state lives where `DotGeneral` has it. Raises TypeError for arguments of other types.
    """
    what = "wrap_function_in_te_state_module"
    check(what, "f", f, FUNCTION)
    check(what, "name", name, NONE | STRING)
    check(what, "quantization_checkpoint_name", quantization_checkpoint_name, NONE | STRING)
    if quantization_recipe is not None:
        check_recipe(what, quantization_recipe, "quantization_recipe")

    class TEWrapper(QuantizingModule):
        def generate_quantizer_set(self, postfix: str = "", n_groups: int | None = None) -> QuantizerSet:
            collection = state_collection(OVERWRITE_COLLECTION)
            return super().generate_quantizer_set(
                postfix, collection, quantization_checkpoint_name, quantization_recipe, n_groups
            )

        @nn.compact
        def __call__(self, *args, **kwargs):
            return f(self.generate_quantizer_set, *args, **kwargs)

    return _with_name(TEWrapper, name or f.__name__)


def _with_name(cls: type, name: str) -> type:
    cls.__name__ = cls.__qualname__ = f"TEWrapper_{name}"
    return cls
