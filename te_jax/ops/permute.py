"""Tokens in the order of their experts, and back."""

from te_jax.ops.experts.permute import ALIGNMENT as ALIGNMENT
from te_jax.ops.experts.permute import Groups as Groups
from te_jax.ops.experts.permute import buffer_rows as buffer_rows
from te_jax.ops.experts.permute import combine as combine
from te_jax.ops.experts.permute import group as group
from te_jax.ops.experts.permute import permute as permute
from te_jax.ops.experts.permute import permute_block_op as permute_block_op
from te_jax.ops.experts.permute import permute_op as permute_op
from te_jax.ops.experts.permute import permute_source as permute_source
