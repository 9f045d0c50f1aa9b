"""Names for mesh axes: which mesh axis plays which part, and the logical axis names of the Flax modules.

Nothing here is needed to run sharded: the ops follow the shardings of their operands. A `MeshResource` serves users who
shard by Flax's logical names; `extend_logical_axis_rules` turns it into rules.
"""

from te_jax.sharding.constraints import constrain_to_spec as constrain_to_spec
from te_jax.sharding.constraints import entries as entries
from te_jax.sharding.constraints import explicit_spec as explicit_spec
from te_jax.sharding.constraints import place_axis as place_axis
from te_jax.sharding.constraints import place_output as place_output
from te_jax.sharding.constraints import spec_of as spec_of
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
from te_jax.sharding.logical_axes import gathered_axes as gathered_axes
from te_jax.sharding.logical_axes import gathered_spec as gathered_spec
from te_jax.sharding.logical_axes import head_axes as head_axes
from te_jax.sharding.logical_axes import logical_axis_map as logical_axis_map
from te_jax.sharding.logical_axes import resolve_logical_axes as resolve_logical_axes
from te_jax.sharding.resource import MeshResource as MeshResource
from te_jax.sharding.resource import ShardingResource as ShardingResource
from te_jax.sharding.resource import check_current_mesh_resource as check_current_mesh_resource
from te_jax.sharding.resource import check_cuts_sequence_alone as check_cuts_sequence_alone
from te_jax.sharding.resource import check_mesh_resource as check_mesh_resource
from te_jax.sharding.resource import check_no_expert_parallelism as check_no_expert_parallelism
from te_jax.sharding.resource import current_mesh_resource as current_mesh_resource
from te_jax.sharding.resource import global_shard_guard as global_shard_guard
from te_jax.sharding.resource import stage_axes as stage_axes
from te_jax.sharding.xla_flags import recommended_xla_flags as recommended_xla_flags
