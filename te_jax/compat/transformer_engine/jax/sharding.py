"""`transformer_engine.jax.sharding`."""

import math
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

from te_jax.compat._absent import GetAttr, absent
from te_jax.compat._axes import (
    with_sharding_constraint_by_logical_axes as with_sharding_constraint_by_logical_axes,
)
from te_jax.sharding import BATCH_AXES as BATCH_AXES
from te_jax.sharding import HEAD_AXES as HEAD_AXES
from te_jax.sharding import HIDDEN_AXES as HIDDEN_AXES
from te_jax.sharding import HIDDEN_TP_AXES as HIDDEN_TP_AXES
from te_jax.sharding import JOINED_AXES as JOINED_AXES
from te_jax.sharding import SEQLEN_AXES as SEQLEN_AXES
from te_jax.sharding import SEQLEN_CP_AXES as SEQLEN_CP_AXES
from te_jax.sharding import SEQLEN_TP_AXES as SEQLEN_TP_AXES
from te_jax.sharding import W_FSDP_AXES as W_FSDP_AXES
from te_jax.sharding import W_JOINED_AXES as W_JOINED_AXES
from te_jax.sharding import W_NO_SHARD_AXES as W_NO_SHARD_AXES
from te_jax.sharding import W_TP_AXES as W_TP_AXES
from te_jax.sharding import MeshResource as MeshResource
from te_jax.sharding import current_mesh_resource, logical_axis_map
from te_jax.sharding import global_shard_guard as global_shard_guard

__getattr__: GetAttr = absent("transformer_engine.jax.sharding")


def global_mesh_resource() -> MeshResource:
    """The MeshResource in force. Raises ValueError where there is none."""
    resource = current_mesh_resource()
    if resource is None:
        raise ValueError(
            "global_mesh_resource: no MeshResource is in force; enter `global_shard_guard(MeshResource(...))`, or give "
            "one to `autocast`."
        )
    return resource


def is_mesh_available() -> bool:
    """Whether a mesh is in force (`jax.set_mesh`)."""
    return not jax.sharding.get_abstract_mesh().empty


def get_sharding_map_logic_axis_to_mesh_axis() -> dict[str, Any]:
    """Logical axis name -> mesh axis, by the MeshResource in force; {} without a mesh, and where all its axes are
    Manual."""
    mesh = jax.sharding.get_abstract_mesh()
    if set(mesh.manual_axes) == set(mesh.axis_names):
        return {}
    return logical_axis_map(global_mesh_resource())


def get_all_mesh_axes() -> tuple[str, ...]:
    """The axes of the mesh in force, () without one."""
    return jax.sharding.get_abstract_mesh().axis_names


def num_of_devices() -> int:
    """The number of all devices."""
    return jax.device_count()


def get_num_devices_in_mesh(mesh: Mesh | AbstractMesh | None = None) -> int:
    """The number of devices of `mesh`, or of the mesh in force; 1 without one."""
    mesh = jax.sharding.get_abstract_mesh() if mesh is None else mesh
    return math.prod(mesh.shape.values())


def get_mesh_axis_size(axis: str | None, mesh: Mesh | AbstractMesh | None = None) -> int:
    """The number of devices along `axis` of `mesh`, or of the mesh in force; 1 for None. Raises ValueError for an axis
    that the mesh lacks."""
    mesh = jax.sharding.get_abstract_mesh() if mesh is None else mesh
    if axis is not None and axis not in mesh.shape:
        way_out = f"the mesh has the axes {tuple(mesh.shape)}"
        if mesh.empty:
            way_out = "no mesh is in force: enter `jax.set_mesh(mesh)`, for te_jax does not see `with mesh:` by itself"
        raise ValueError(f"get_mesh_axis_size: axis is {axis!r}; {way_out}.")
    return 1 if axis is None else mesh.shape[axis]


def get_active_resource_axis(resource_name: str) -> str | None:
    """The mesh axis of a field of the MeshResource in force, None unless it has several devices."""
    resource = current_mesh_resource()
    axis = None if resource is None else getattr(resource, resource_name)
    return axis if jax.sharding.get_abstract_mesh().shape.get(axis, 1) > 1 else None


def tpsp_axis_size() -> int:
    """The devices along tpsp_resource."""
    return get_mesh_axis_size(global_mesh_resource().tpsp_resource)


def dp_or_fsdp_axis_size() -> int:
    """The devices along dp_resource, or, where these are one, along fsdp_resource."""
    resource = global_mesh_resource()
    sizes = [get_mesh_axis_size(axis) for axis in (resource.dp_resource, resource.fsdp_resource)]
    return sizes[0] if sizes[0] > 1 else sizes[1]


def ep_axis_size() -> int:
    """The devices along ep_resource."""
    return get_mesh_axis_size(global_mesh_resource().ep_resource)
