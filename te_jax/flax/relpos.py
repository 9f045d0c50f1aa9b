"""Relative position biases of T5 (Raffel et al. 2020, https://arxiv.org/abs/1910.10683, section 2.1)."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from te_jax.core.arrays import as_rank
from te_jax.flax._common import Axes, Initializer, in_compute_dtype, parameter
from te_jax.flax._fields import Module, check_call
from te_jax.flax._state import describe


def _distance_buckets(num_buckets: int, max_distance: int) -> np.ndarray:
    """int32[max_distance + 1]: the bucket of each distance; the last entry also serves all larger distances."""
    exact = num_buckets // 2  # one bucket per distance, then logarithmically wider ones
    distance = np.arange(max_distance + 1, dtype=np.float32)
    # The eps keeps log(0) finite and lifts quotients that rounding left just under a bucket's edge.
    log = np.log(distance / np.float32(exact) + np.finfo(np.float32).eps)
    rounded = exact + (log / np.log(max_distance / exact) * (num_buckets - exact)).astype(np.int32)
    return np.where(distance < exact, distance, np.minimum(rounded, num_buckets - 1)).astype(np.int32)


class RelativePositionBiases(Module):
    """A learned bias per head and bucket of (key position - query position).

    num_buckets:   the number of buckets; at least 4 and even if `bidirectional`, where half of them serve each sign.
    max_distance:  all distances from here on share a bucket; must exceed the number of exact buckets.
    embedding_init, embedding_axes: the initializer and the logical axes of the table.
    dtype:         the dtype of the table and of the result.
    params_dtype:  the dtype of the table, if not None.

    Parameter: `rel_embedding` [h, num_buckets].
    """

    num_buckets: int
    max_distance: int
    num_attention_heads: int
    embedding_init: Initializer = nn.initializers.variance_scaling(1.0, "fan_in", "normal", out_axis=0)
    embedding_axes: Axes = ("heads", "relpos_buckets")
    dtype: jnp.dtype = jnp.float32
    params_dtype: jnp.dtype | None = None

    @nn.compact
    def __call__(self, q_seqlen: int, k_seqlen: int, bidirectional: bool = True, *, q_offset: Any = 0) -> jax.Array:
        """-> [1, h, q_seqlen, k_seqlen], or [b, h, q_seqlen, k_seqlen] with a q_offset for each row.

        q_offset: the position of the first query, an int or int32[], or int32[b], which may be traced.

        Raises ValueError for lengths that are not ints of at least 1 and for buckets that do not fit the
        distance.
        """
        check_call(self, q_seqlen=q_seqlen, k_seqlen=k_seqlen, bidirectional=bidirectional)
        buckets = self.num_buckets // 2 if bidirectional else self.num_buckets
        if buckets < 2 or (bidirectional and self.num_buckets % 2) or self.max_distance <= buckets // 2:
            raise ValueError(
                f"{describe(self)}: num_buckets={self.num_buckets}, max_distance={self.max_distance}; pass "
                "an even num_buckets of at least 4 and a max_distance above num_buckets / 2."
            )
        shape = (self.num_attention_heads, self.num_buckets)
        table = parameter(self, "rel_embedding", self.embedding_init, self.embedding_axes, shape)
        first = jnp.asarray(q_offset)[..., None, None]
        place = jnp.arange(k_seqlen)[None] - jnp.arange(q_seqlen)[:, None]
        relative = as_rank(place, first.ndim) - first  # [q, k] or [b, q, k]
        distance = jnp.abs(relative) if bidirectional else jnp.maximum(-relative, 0)
        bucket_of = jnp.asarray(_distance_buckets(buckets, self.max_distance))
        bucket = bucket_of[jnp.minimum(distance, self.max_distance)]
        if bidirectional:
            bucket = bucket + jnp.where(relative > 0, buckets, 0)
        bias = jnp.take(in_compute_dtype(self, table), bucket, axis=1)
        return bias[None] if bias.ndim == 3 else jnp.moveaxis(bias, 1, 0)
