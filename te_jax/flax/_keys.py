"""Keys and values that one self-attention hands on to another, and the slots of the cache that they lie in."""

from dataclasses import dataclass, field

import jax

from te_jax.core.check import NONE, Kind


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Slots:
    """The slots of a cache during one call with s tokens for each of b rows, as `KVCache` describes them.

    positions: i32[b, s], of the call's tokens.
    real:      bool[b, s], which of them are no padding.
    fits:      bool[b, s], which of them have a slot.
    written:   bool[b, T], which slots hold a token after this call.
    counts:    i32[b], how many tokens of the call are no padding; None: all.
    fresh:     Whether this call makes the cache: then there are no keys but its own.
    """

    positions: jax.Array
    real: jax.Array
    fits: jax.Array
    written: jax.Array
    counts: jax.Array | None
    fresh: bool = field(metadata=dict(static=True))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KeysValues:
    """What attention with kv_sharing="give" hands on, for a later one with "take".

    key, value: [b, t, g, d], or [t, b, g, d] with transpose_batch_sequence: behind norms and RoPE; when decoding, of
                the slots of its cache.
    slots:      These; None without decode.
    """

    key: jax.Array
    value: jax.Array
    slots: Slots | None


KEYS_VALUES_OF_CALL = NONE | Kind(
    'what a module with kv_sharing="give" returned as its last result', lambda value: isinstance(value, KeysValues)
)
