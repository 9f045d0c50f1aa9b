"""Constraints by logical axes as TransformerEngine has them: without Flax's rules, the MeshResource says what they
mean."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import jax
from flax import linen as nn

from te_jax import sharding


def _under_rules(f: Callable[..., Any]) -> Callable[..., Any]:
    """f, called where the MeshResource in force stands in for Flax's logical axis rules if there are none."""

    @functools.wraps(f)
    def call(*args):
        rules, resource = contextlib.nullcontext(), sharding.current_mesh_resource()
        if not (nn.get_logical_axis_rules() or resource is None or jax.sharding.get_abstract_mesh().empty):
            rules = nn.logical_axis_rules(tuple(sharding.logical_axis_map(resource).items()))
        with rules:
            return f(*args)

    return call


with_sharding_constraint_by_logical_axes: Callable[..., Any] = _under_rules(
    sharding.with_sharding_constraint_by_logical_axes
)
resolve_logical_axes: Callable[..., Any] = _under_rules(sharding.resolve_logical_axes)
