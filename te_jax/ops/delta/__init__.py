"""The gated delta rule: linear attention whose state forgets, and corrects what it says of a key."""

from te_jax.ops.delta.rule import gated_delta as gated_delta
from te_jax.ops.delta.rule import gated_delta_bwd as gated_delta_bwd
from te_jax.ops.delta.rule import gated_delta_fwd as gated_delta_fwd
