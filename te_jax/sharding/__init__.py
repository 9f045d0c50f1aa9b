"""Names for mesh axes: which mesh axis plays which part, and the logical axis names of the Flax modules.

Nothing here is needed to run sharded: the ops follow the shardings of their operands. A `MeshResource` serves users who
shard by Flax's logical names; `extend_logical_axis_rules` turns it into rules.
"""

from te_jax.core.public import public_names as _public_names
from te_jax.sharding.constraints import (
    with_sharding_constraint_by_logical_axes as with_sharding_constraint_by_logical_axes,
)
from te_jax.sharding.load_balancing import causal_load_balanced_positions as causal_load_balanced_positions
from te_jax.sharding.load_balancing import (
    inverse_reorder_causal_load_balancing as inverse_reorder_causal_load_balancing,
)
from te_jax.sharding.load_balancing import reorder_causal_load_balancing as reorder_causal_load_balancing
from te_jax.sharding.logical_axes import BATCH_AXES as BATCH_AXES
from te_jax.sharding.logical_axes import HEAD_AXES as HEAD_AXES
from te_jax.sharding.logical_axes import HIDDEN_AXES as HIDDEN_AXES
from te_jax.sharding.logical_axes import HIDDEN_TP_AXES as HIDDEN_TP_AXES
from te_jax.sharding.logical_axes import JOINED_AXES as JOINED_AXES
from te_jax.sharding.logical_axes import SEQLEN_AXES as SEQLEN_AXES
from te_jax.sharding.logical_axes import SEQLEN_CP_AXES as SEQLEN_CP_AXES
from te_jax.sharding.logical_axes import SEQLEN_TP_AXES as SEQLEN_TP_AXES
from te_jax.sharding.logical_axes import W_FSDP_AXES as W_FSDP_AXES
from te_jax.sharding.logical_axes import W_JOINED_AXES as W_JOINED_AXES
from te_jax.sharding.logical_axes import W_NO_SHARD_AXES as W_NO_SHARD_AXES
from te_jax.sharding.logical_axes import W_TP_AXES as W_TP_AXES
from te_jax.sharding.logical_axes import extend_logical_axis_rules as extend_logical_axis_rules
from te_jax.sharding.logical_axes import logical_axis_map as logical_axis_map
from te_jax.sharding.logical_axes import resolve_logical_axes as resolve_logical_axes
from te_jax.sharding.resource import MeshResource as MeshResource
from te_jax.sharding.resource import ShardingResource as ShardingResource
from te_jax.sharding.resource import current_mesh_resource as current_mesh_resource
from te_jax.sharding.resource import global_shard_guard as global_shard_guard
from te_jax.sharding.xla_flags import recommended_xla_flags as recommended_xla_flags

__all__ = _public_names(globals())
