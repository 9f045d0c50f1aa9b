"""The rotary positions of MultiHeadAttention: where each token stands, and what is turned by it."""

from functools import partial

import jax
import jax.numpy as jnp
from flax import linen as nn

from te_jax.flax._context import Context
from te_jax.flax._state import describe
from te_jax.ops.attention import SequenceDescriptor
from te_jax.ops.rope import check_positions, rope

# {number of arrays that hold q, k and v: for each that is turned how many of the n of its axis [b, s, n, h, d] are, the
# first ones; None: it has no such axis}. The last array is, or has, the values, which are not turned.
_TURNED = {1: (2,), 2: (None, 1), 3: (None, None)}


def rotate(module: nn.Module, arrays, positions, mask, inputs_q, inputs_kv, decode: bool) -> tuple[jax.Array, ...]:
    """`Projected.arrays` with queries and keys turned by RoPE.

    positions: [b, s], [s] or, with sections, [n, b, s], of the tokens of self-attention; None: by `mask`, if that is a
    SequenceDescriptor, and by the axis that cuts the sequence, else 0, 1, 2, ...
    """
    turn = partial(
        rope,
        windows=module.rotary_pos_emb_windows,
        group_method=module.rotary_pos_emb_group_method,
        rotary_dim=module.rotary_pos_emb_dim,
        scaling=module.rotary_pos_emb_scaling,
        sections=module.rotary_pos_emb_sections,
    )
    batch_first = (lambda x: jnp.swapaxes(x, 0, 1)) if module.transpose_batch_sequence else (lambda x: x)
    at = positions_of(module, positions, mask, inputs_q, inputs_kv, decode)
    of_query = len(arrays) == 1 and arrays[0].ndim == 4  # keys are another module's
    turns = zip(arrays, at, (None,) if of_query else _TURNED[len(arrays)])
    turned = [batch_first(turn(batch_first(x), where, turned=count)) for x, where, count in turns]
    return *turned, *arrays[len(turned) :]


def positions_of(module, positions, mask, inputs_q, inputs_kv, decode: bool):
    """The positions of the queries and of the keys; None is 0, 1, 2, ..."""
    if positions is not None and inputs_kv is not None:
        raise ValueError(f"{describe(module)}: positions are for self-attention; pass a SequenceDescriptor as mask.")
    if positions is not None:
        rows = inputs_q.shape[1::-1] if module.transpose_batch_sequence else inputs_q.shape[:2]
        check_positions(describe(module), positions, rows, module.rotary_pos_emb_sections)
        return positions, positions
    descriptor = mask if isinstance(mask, SequenceDescriptor) else None
    sources = (inputs_q, inputs_q if inputs_kv is None else inputs_kv)
    lengths = tuple(x.shape[0 if module.transpose_batch_sequence else 1] for x in sources)
    if (context := None if decode else Context.of(module)) is not None:
        return tuple(context.positions(length, side, descriptor) for side, length in enumerate(lengths))
    if descriptor is None:
        return None, None
    (_, at_q), (_, at_kv) = descriptor.tokens(*lengths)
    return at_q, at_kv
