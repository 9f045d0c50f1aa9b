"""What self-attention makes of the positions of tokens besides RoPE: chunks, and a temperature."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from te_jax.flax._rotary import positions_of
from te_jax.ops.attention import SequenceDescriptor
from te_jax.ops.attention.reference import split_joined


def by_chunks(descriptor: SequenceDescriptor | None, rows: int, length: int, chunk: int) -> SequenceDescriptor | None:
    """`descriptor`, None for whole rows, of `rows` rows of `length` tokens whose segments end after each `chunk`
    positions."""
    if length <= chunk:
        return descriptor
    count = -(-length // chunk)  # of the chunks of a segment
    if descriptor is None:  # lengths, which kernels read without an s x t mask
        starts = np.minimum(np.arange(count + 1) * chunk, length)
        wide = lambda a: jnp.asarray(np.broadcast_to(a, (rows, a.size)), jnp.int32)
        return SequenceDescriptor.from_seqlens_and_offsets(wide(np.diff(starts)), wide(starts))
    (ids, at), _ = descriptor.tokens(length, length)
    ids = jnp.where(ids > 0, (ids - 1) * count + at // chunk + 1, 0)
    return SequenceDescriptor.from_segment_ids_and_pos(ids, at)


def temper(module: nn.Module, arrays: tuple[jax.Array, ...], positions, mask: Any, inputs_q, inputs_kv, decode: bool):
    """`Projected.arrays` with queries multiplied as `module.attn_temperature` says. Arguments are as of `rotate`."""
    if module.attn_temperature is None:
        return arrays
    floor, slope = module.attn_temperature
    query, *others = arrays if module.kv_sharing == "take" else split_joined(*arrays)
    at = positions_of(module, positions, mask, inputs_q, inputs_kv, decode)[0]
    length = query.shape[0 if module.transpose_batch_sequence else 1]
    at = jnp.arange(length)[None] if at is None else jnp.broadcast_to(at, (at.shape[0] if at.ndim > 1 else 1, length))
    factor = 1 + slope * jnp.log1p(jnp.floor((at.astype(jnp.float32) + 1) / floor))
    factor = jnp.expand_dims(factor.T if module.transpose_batch_sequence else factor, (2, 3))
    return (query.astype(jnp.float32) * factor).astype(query.dtype), *others
