"""The static facts of one dense layer in FP8."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.sharding import PartitionSpec

from te_jax.core.check import warn_once
from te_jax.layers._specs import dense_spec
from te_jax.layers.tensor import Fp8Tensor, wide_of
from te_jax.layers.token_pieces import TokenPieces
from te_jax.ops.formats import format_of
from te_jax.recipe import Recipe
from te_jax.sharding.resource import current_mesh_resource, is_manual, mesh_sizes, stage_axes


class Config(NamedTuple):
    """The static facts of y[*B, *F] = x[*B, *C] . weight[*C, *F] + bias[*F] + residual[*B, *F] under a recipe."""

    recipe: Recipe
    contract: int  # axes in C
    x: ShapedArray | None  # the types of the operands: their gradients have the same
    weight: ShapedArray
    bias: ShapedArray | None = None
    residual: ShapedArray | None = None
    checkpoint: str | None = None  # name of the saved tensors, for jax.checkpoint policies
    stage_axes: frozenset[str] = frozenset()  # over which layers differ; the backward pass is traced elsewhere
    spec: PartitionSpec | None = None  # of y, on an Explicit mesh
    grad_spec: PartitionSpec | None = None  # of the gradient of y where its GEMMs read it, if y lies otherwise
    stored: bool = False  # the weight is an Fp8Tensor: only its `wide` has a gradient
    precision: Any = None  # `jax.default_matmul_precision` of the call, for unquantized GEMMs of the backward pass
    expert_axes: frozenset[str] = frozenset()  # over which experts differ, whose tensors share nothing
    on_mesh: bool = False  # a mesh of several devices is in force (`jax.set_mesh`): there may be sums over them
    gradient_dtype: Any = None  # of MeshResource
    pieces: TokenPieces | None = None  # in which tokens are multiplied
    kept_along: str | None = None  # the mesh axis along which weights in FP8 are gathered once, for both passes

    def unshared_axes(self, of_experts: bool) -> frozenset[str]:
        """The mesh axes over which a tensor shares no statistics. of_experts: each expert has its own."""
        return self.stage_axes | self.expert_axes if of_experts else self.stage_axes

    @property
    def wgrad_dtype(self) -> Any:
        """What wgrad writes and devices add up; the weight's gradient is then of the weight's type."""
        narrower = self.on_mesh and self.gradient_dtype is not None and self.weight.dtype == jnp.float32
        return self.gradient_dtype if narrower else self.weight.dtype

    @property
    def features(self) -> int:
        """Axes in F."""
        return self.weight.ndim - self.contract

    @property
    def lead(self) -> int:
        """Axes in B."""
        return self.x.ndim - self.contract

    @classmethod
    def of(
        cls,
        x: Any,
        weight: Any,
        bias: Any,
        contract: int,
        recipe: Recipe | None,
        *,
        checkpoint: str | None = None,
        residual: Any = None,
        out: Any = None,
        grad_spec: PartitionSpec | None = None,
        tokens: PartitionSpec | None = None,
        gathers: bool = False,
    ) -> "Config":
        """The config of a layer with these operands.

        out:       a type of y's shape, whose sharding y takes.
        grad_spec: the sharding of y's gradient under Auto axes; on an Explicit mesh the types say it.
        tokens, gathers: as `TokenPieces.of` has them.
        """
        typeof = lambda a: a if isinstance(a, ShapedArray) else jax.typeof(a)
        x, array, bias, residual = types = jax.tree.map(typeof, (x, wide_of(weight), bias, residual))
        spec, whole = dense_spec(x, array, contract, out, residual), dense_spec(x, array, contract)
        return cls(
            recipe,
            contract,
            *types,
            checkpoint,
            stage_axes(),
            spec,
            grad_spec if whole == spec else whole,
            isinstance(weight, Fp8Tensor),
            jax.config.jax_default_matmul_precision,
            on_mesh=jax.sharding.get_abstract_mesh().size > 1,
            gradient_dtype=_gradient_dtype(),
            pieces=None if recipe is None else TokenPieces.of(x, x.ndim - contract, spec, tokens, gathers),
            kept_along=_kept_along(recipe),
        )


def _gradient_dtype():
    """Of the MeshResource in force; not where axes are manual, whose sums are not the layer's."""
    resource = current_mesh_resource()
    if resource is None or jax.sharding.get_abstract_mesh().manual_axes:
        return None
    return resource.gradient_dtype


def _kept_along(recipe):
    """The fsdp_resource in force, where devices along it are to keep the weights that they gather; else None, as where
    the axis is manual: what is gathered along it is the caller's."""
    resource = current_mesh_resource()
    if recipe is None or resource is None or not resource.keep_gathered_weights:
        return None
    axis = resource.fsdp_resource
    if is_manual(axis) or mesh_sizes().get(axis, 1) == 1:
        return None
    if not format_of(recipe, "kernel").shared:
        asked = f"keep_gathered_weights is True, but {type(recipe).__name__}'s weights have other scales in each layout"
        warn_once("MeshResource", f"{asked}: each pass gathers its own; leave it out, or take another recipe.")
        return None
    return axis
