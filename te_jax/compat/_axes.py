"""Constraints by logical axes as TransformerEngine has them: without Flax's rules, the MeshResource says what they
mean."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import linen as nn

from te_jax import sharding


def _rules() -> contextlib.AbstractContextManager[Any]:
    """Where the MeshResource in force stands in for Flax's logical axis rules if there are none."""
    resource = sharding.current_mesh_resource()
    if nn.get_logical_axis_rules() or resource is None or jax.sharding.get_abstract_mesh().empty:
        return contextlib.nullcontext()
    return nn.logical_axis_rules(tuple(sharding.logical_axis_map(resource).items()))


def _constrain(x: jax.Array, logical_axis_names: Sequence[str | None] | None) -> jax.Array:
    with _rules():
        return sharding.with_sharding_constraint_by_logical_axes(x, logical_axis_names)


def _resolve(axes: Sequence[str | None] | None) -> Any:
    with _rules():
        return sharding.resolve_logical_axes(axes)


with_sharding_constraint_by_logical_axes: Callable[..., Any] = _constrain
resolve_logical_axes: Callable[..., Any] = _resolve
