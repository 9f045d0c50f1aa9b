"""One step of delayed scaling as one kernel: a layer's step has a dozen, and XLA would take four kernels for each."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from te_jax._op import Op
from te_jax.recipe import DelayedScaling


def _reference(scale, amax_history, amax, *, fp8_max, interval, margin, newest):
    recipe = DelayedScaling(
        margin=margin,
        interval=interval,
        amax_history_len=amax_history.shape[-1],
        amax_compute_algo="most_recent" if newest else "max",
    )
    new_scale, new_history = each_tensor(recipe, fp8_max, amax.ndim)(scale[..., None], amax_history, amax)
    return new_scale[..., 0], new_history


def each_tensor(recipe: Any, fp8_max: float, axes: int) -> Callable[..., Any]:
    """The recipe's law over `axes` leading axes of tensors."""
    law = lambda *state: recipe.new_state(*state, fp8_max)
    for _ in range(axes):
        law = jax.vmap(law)
    return law


scale_update: Op = Op(
    "te_scale_update",
    "scale: b..., amax_history: b... l, amax: b... -> new_scale: b..., new_history: b... l",
    replicated="l",
    dtypes=lambda *operands, **attrs: (jnp.float32, jnp.float32),
    reference=_reference,
)
"""scale f32[b...], amax_history f32[b..., L], amax f32[b...] of this step -> the new scale and history.

The law of `te_jax.recipe.DelayedScaling.new_state` with its own scale factors. fp8_max, margin: float. interval: int.
newest: amax_compute_algo is "most_recent", else "max".
"""


def next_state(
    recipe: DelayedScaling, scale: jax.Array, amax_history: jax.Array, amax: jax.Array, direction: str
) -> tuple[jax.Array, jax.Array]:
    """`recipe.new_state` of tensors with any leading axes: scale f32[..., 1], amax_history f32[..., L], amax f32[...].

    direction: "fwd" or "bwd".
    """
    fp8_max = recipe.fp8_format.max(direction)
    if callable(recipe.amax_compute_algo) or recipe.scaling_factor_compute_algo is not None:
        return each_tensor(recipe, fp8_max, amax.ndim)(scale, amax_history, amax)
    newest = recipe.amax_compute_algo == "most_recent"
    law = dict(fp8_max=fp8_max, interval=recipe.interval, margin=float(recipe.margin), newest=newest)
    new_scale, new_history = scale_update(scale[..., 0], amax_history, amax, **law)
    return new_scale[..., None], new_history
