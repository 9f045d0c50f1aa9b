"""FP8 recipes: how a tensor gets its scale. Frozen, hashable values: a recipe is part of the jit cache key.

One file each, on top of `_base.Recipe`, which says what the rest of te_jax asks of them.
"""

from te_jax.core.public import public_names as _public_names
from te_jax.recipe._base import Format as Format
from te_jax.recipe._base import Recipe as Recipe
from te_jax.recipe.block import Float8BlockScaling as Float8BlockScaling
from te_jax.recipe.current import Float8CurrentScaling as Float8CurrentScaling
from te_jax.recipe.delayed import DelayedScaling as DelayedScaling
from te_jax.recipe.fixed import FixedScaling as FixedScaling
from te_jax.recipe.mxfp8 import MXFP8BlockScaling as MXFP8BlockScaling

__all__ = _public_names(globals())
