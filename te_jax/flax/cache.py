"""The KV cache of self-attention: keys and values of past tokens, in Flax's collection `cache`."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax.sharding import PartitionSpec

from te_jax.core.check import ARRAY, INTEGERS, check, integer
from te_jax.core.types import align, on_explicit_mesh
from te_jax.flax._common import activation_axes
from te_jax.flax._context import Context
from te_jax.flax._keys import Slots
from te_jax.flax._state import describe
from te_jax.ops.attention import Mask, SequenceDescriptor
from te_jax.ops.attention.mask import Band, warn_of_lengths
from te_jax.ops.attention.reference import split_joined
from te_jax.sharding import BATCH_AXES, HEAD_AXES, HIDDEN_AXES, SEQLEN_AXES
from te_jax.sharding import with_sharding_constraint_by_logical_axes as constrain

COLLECTION, INDEX = "cache", "cache_index"
KEYS_VALUES = ("cached_key", "cached_value")


class CachedKeys:
    """Keys and values in the slots of a cache, as one self-attention reads them during one call: its own, or those that
    another one hands on."""

    slots: Slots
    positions: jax.Array  # i32[b, s], the positions of the call's tokens
    fresh: bool  # whether this call makes the cache: then there are no keys but its own

    def __init__(self, module: nn.Module, slots: Slots) -> None:
        self._module, self._batch = module, 1 if module.transpose_batch_sequence else 0
        self.slots, self.positions, self.fresh = slots, slots.positions, slots.fresh
        self._s, self._size = slots.positions.shape[1], slots.written.shape[1]

    def descriptor(self) -> SequenceDescriptor | None:
        """The slots that each token may see, as far as the cache knows; None: all slots."""
        if self.fresh:
            return None if self.slots.counts is None else SequenceDescriptor.from_seqlens(self.slots.counts)
        if self._ends_together:
            queries = jnp.sum(self.slots.fits, 1, dtype=jnp.int32)
            return SequenceDescriptor.from_seqlens((queries, jnp.clip(self.positions[:, 0] + queries, 0, self._size)))
        slots = jnp.broadcast_to(jnp.arange(self._size), self.slots.written.shape)
        part = lambda at: 1 if self._chunk is None else at // self._chunk + 1
        ids = jnp.where(self.slots.fits, part(self.positions), 0), jnp.where(self.slots.written, part(slots), 0)
        return SequenceDescriptor.from_segment_ids_and_pos(ids, (self.positions, slots))

    def fields(self) -> dict[str, Any]:
        """The fields of attention that read otherwise on the cache. The cache is not cut along an axis; and positions
        count from the row's first token, so that the top left and the bottom right are the same."""
        whole = dict(context_parallel_axis=None, context_parallel_causal_load_balanced=False)
        if self.fresh or not self._ends_together or self._band.right != 0:
            return whole
        return whole | dict(attn_mask_type="padding_causal_bottom_right")

    @property
    def _band(self) -> Band:
        module = self._module
        return Mask.of_type(module.attn_mask_type, module.window_size).band

    @property
    def _ends_together(self) -> bool:
        """Whether lengths say what a query sees: all keys, or keys up to its own position, counted from the end."""
        return self._chunk is None and (self._band.right == 0 or self._band.is_open)

    @property
    def _chunk(self) -> int | None:
        return getattr(self._module, "attention_chunk_size", None)

    def columns(self, name: str, x: Any) -> Any:
        """A mask or bias, whose last axis is the T slots (or 1), cut to the keys that attention reads."""
        if x is None or not getattr(x, "ndim", 0):
            return x
        if x.shape[-1] not in (1, self._size):
            raise ValueError(
                f"{describe(self._module)}: {name} has shape {x.shape}; with decode=True its last axis is the "
                f"{self._size} slots of the cache, or 1."
            )
        return x[..., : self._s] if self.fresh else x

    def spoil_lost(self, context: jax.Array) -> jax.Array:
        """context [b, s, ...], NaN at tokens for which the cache has no slot."""
        if self.fresh:
            return context  # the tokens were counted at trace time
        lost = self.slots.real & ~self.slots.fits
        lost = jnp.expand_dims(lost.T if self._batch else lost, tuple(range(2, context.ndim)))
        return jnp.where(lost, jnp.nan, context)


class KVCache(CachedKeys):
    """The cache of one self-attention of g heads of width d, during one call with s tokens for each of b rows.

    The module's scope has these variables, for rows of at most T tokens:

    cached_key, cached_value: [b, T, g, d], or [T, b, g, d] with transpose_batch_sequence, in the activations' dtype.
        Slot j holds a row's token j: a token's slot is its position, whatever padding came before it.
    cache_index:   i32[], the tokens that every row was given, padding included.
    cache_padding: i32[b], how many of the tokens were padding. The next token's position is cache_index -
        cache_padding.

    Neither padding is written, nor a token at position T or later, nor a token of a row whose index is negative. The
    results for such tokens are NaN (`spoil_lost`), but for padding.
    """

    def __init__(
        self,
        module: nn.Module,
        inputs: jax.Array,
        mask: Any,
        max_decode_length: int | None,
        names: tuple[str, ...] = KEYS_VALUES,
    ) -> None:
        """inputs: [b, s, H] ([s, b, H] with transpose_batch_sequence). mask: the mask that the call got; a
        `SequenceDescriptor` says the lengths of the rows. names: of the variables of keys and values.

        Raises ValueError where there is no cache to read or to write, for more tokens than it has slots, for another
        batch size than its own, for descriptors of segments, and for tokens in the order of balanced causal attention.
        """
        if module.context_parallel_causal_load_balanced and Context.of(module) is not None:
            raise ValueError(
                f"{describe(module)}: context_parallel_causal_load_balanced is True, but decode=True; a cache holds "
                "tokens in the order of the sequence: decode with a module that has it False."
            )
        self._module, self._batch, self._names = module, 1 if module.transpose_batch_sequence else 0, names
        b, self._s = inputs.shape[self._batch], inputs.shape[1 - self._batch]
        self._index = index_of_cache(module, names)
        self.fresh: bool = module.is_initializing() or not module.has_variable(COLLECTION, names[0])
        self._size = self._capacity(max_decode_length)
        self._padding = self._variable("cache_padding", inputs, (self._batch,), jnp.int32)

        counts = lengths_of(module, mask, b, self._s)
        token, due = jnp.arange(self._s)[None], self._s if counts is None else counts[:, None]
        start = (self._index.value - self._padding.value)[:, None]
        positions = start + token
        real = jnp.broadcast_to(token < due, positions.shape)
        fits = real & (start >= 0) & (positions < self._size)
        written = jnp.arange(self._size)[None] < start + due  # [b, T], after this call
        super().__init__(module, Slots(positions, real, fits, written, counts, self.fresh))

    def extend(self, arrays: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        """Writes the keys and values of the call, which lie in `Projected.arrays`, and returns what attention reads.

        That is (query, keys, values) with the T slots of each row, values 0 where none is written; or `arrays`, where
        this call makes the cache. In `init` the cache stays empty. Raises ValueError for a cache of another shape,
        TypeError for one of another dtype.
        """
        query, key, value = split_joined(*arrays)
        axes = tuple(None if axis == 1 - self._batch else axis for axis in range(4))
        cached_key = self._variable(self._names[0], key, axes, key.dtype)
        cached_value = self._variable(self._names[1], value, axes, value.dtype)
        if self._module.is_initializing():
            return arrays
        # An index of its own for each token that is not written, so that indices are unique.
        slots = jnp.where(self.slots.fits, self.positions, self._size + jnp.arange(self._s)[None])
        cached_key.value = self._write(cached_key.value, key, slots)
        cached_value.value = self._write(cached_value.value, value, slots)
        self._index.value = self._index.value + self._s
        if self.slots.counts is not None:
            self._padding.value = self._padding.value + (self._s - self.slots.counts)
        if self.fresh:
            return arrays
        # A probability of 0 does not hide a NaN that an empty slot may hold.
        written = jnp.expand_dims(self.slots.written.T if self._batch else self.slots.written, (2, 3))
        return query, cached_key.value, jnp.where(written, cached_value.value, 0)

    def _capacity(self, asked: int | None) -> int:
        """T: the slots of the cache that is there, else max_decode_length, or in `init` the length of the inputs."""
        module, s = self._module, self._s
        if not self.fresh:
            shape = np.shape(module.get_variable(COLLECTION, self._names[0]))
            if len(shape) < 2:
                raise ValueError(
                    f"{describe(module)}: {self._names[0]} has shape {shape}; pass the {COLLECTION!r} that an earlier "
                    "call of this module returned."
                )
            size = shape[1 - self._batch]
            if asked not in (None, size):
                raise ValueError(
                    f"{describe(module)}: max_decode_length is {asked}, but the cache has {size} slots; leave it out."
                )
        elif asked is None and not module.is_initializing():
            raise ValueError(
                f"{describe(module)}: decode=True finds no {COLLECTION!r}; pass max_decode_length to make one of that "
                f"many slots in this call, or the {COLLECTION!r} of an earlier call or of `init` with decode=True."
            )
        else:
            size = s if asked is None else int(asked)
        if s > size:
            raise ValueError(
                f"{describe(module)}: the inputs have {s} tokens, but the cache has {size} slots; pass fewer, or "
                "make the cache with a larger max_decode_length."
            )
        return size

    def _variable(self, name: str, like: jax.Array, axes: tuple[int | None, ...], dtype):
        """A variable with these axes of `like`, placed on the mesh as they are; an axis None has the slots.

        Raises ValueError or TypeError for a variable that is there already and does not fit.
        """
        shape = tuple(self._size if axis is None else like.shape[axis] for axis in axes)

        def zeros():
            x, aval = jnp.zeros(shape, dtype), jax.typeof(like)
            if on_explicit_mesh(aval):
                spec = (None if axis is None else aval.sharding.spec[axis] for axis in axes)
                x = jax.sharding.reshard(x, PartitionSpec(*spec))
            return align(x, like)[0]

        return variable_of_cache(self._module, name, zeros, shape, dtype)

    def _write(self, cached: jax.Array, new: jax.Array, slots: jax.Array) -> jax.Array:
        """cached [b, T, g, d] with new [b, s, g, d] in the slots [b, s]; a slot out of bounds is dropped."""
        batch = self._batch
        if on_explicit_mesh(jax.typeof(new)):
            spec = list(jax.typeof(new).sharding.spec)
            spec[1 - batch] = None  # a shard holds whole rows
            # Of layers in a loop the cache is a row of a stack, which is copied where it moves before it is written.
            moves = list(jax.typeof(cached).sharding.spec) != spec
            cached = jax.sharding.reshard(cached, PartitionSpec(*spec)) if moves else cached
            new = jax.sharding.reshard(new, PartitionSpec(*spec))
            slots = jax.sharding.reshard(slots, PartitionSpec(spec[batch], None))
        # The writes go by rows, so that the partitioner sees that the batch stays an axis.
        write = lambda row, tokens, at: row.at[at].set(tokens, mode="drop", unique_indices=True)
        out = jax.vmap(write, (batch, batch, 0), batch)(cached, new, slots)
        return constrain(out, activation_axes(self._module, BATCH_AXES, SEQLEN_AXES, HEAD_AXES, HIDDEN_AXES))


def index_of_cache(module: nn.Module, names: Sequence[str]) -> nn.Variable[jax.Array]:
    """The variable `cache_index`, the tokens that every row was given, of a module that decodes and keeps variables of
    these names, too.

    Raises ValueError where the module may not write its cache, for a cache that has some of the variables, as another
    module's may, and for an index that is not one number; TypeError for one that is no integer.
    """
    where = describe(module)
    if not module.is_mutable_collection(COLLECTION):
        raise ValueError(
            f"{where}: decode=True writes the collection {COLLECTION!r}, which is not mutable here; "
            f"call `apply` with mutable=[{COLLECTION!r}], and name it in the variable_axes of `nn.scan`."
        )
    held = [name for name in (*names, INDEX) if module.has_variable(COLLECTION, name)]
    if held and (lacks := [name for name in (*names, INDEX) if name not in held]):
        raise ValueError(
            f"{where}: the {COLLECTION!r} has {', '.join(held)}, but not {', '.join(lacks)}; pass the whole "
            f"{COLLECTION!r} that an earlier call of this module returned, or none of it to begin."
        )
    index = module.variable(COLLECTION, INDEX, jnp.zeros, (), jnp.int32)
    if np.shape(index.value):
        raise ValueError(
            f"{where}: {INDEX} has shape {np.shape(index.value)}; pass one integer, i32[], for all rows (stacked by "
            '`nn.scan` it needs variable_axes={"cache": 0}).'
        )
    check(where, INDEX, index.value, integer() | INTEGERS)
    return index


def variable_of_cache(
    module: nn.Module, name: str, zeros: Callable[[], jax.Array], shape: tuple[int, ...], dtype: Any
) -> nn.Variable[jax.Array]:
    """The variable of this name, `zeros()` where this call makes it.

    Raises ValueError for one of another shape, TypeError for one of another dtype.
    """
    variable = module.variable(COLLECTION, name, zeros)
    held = variable.value
    check(describe(module), name, held, ARRAY)
    if held.shape != shape:
        raise ValueError(
            f"{describe(module)}: {name} has shape {held.shape}, this call needs {shape}; a cache is for one batch "
            'size and configuration (stacked by `nn.scan` it needs variable_axes={"cache": 0}).'
        )
    if held.dtype != dtype:
        raise TypeError(
            f"{describe(module)}: {name} is {held.dtype}, the inputs need {jnp.dtype(dtype)}; make the cache with "
            "inputs of their dtype."
        )
    return variable


def lengths_of(module: nn.Module, mask: Any, b: int, s: int) -> jax.Array | None:
    """i32[b], how many of the s tokens of a call that decodes are not padding; None: all of them.

    Tokens are queries and keys at once: of the two lengths in a descriptor, the queries' count. Raises ValueError for
    descriptors of segments or of other rows.
    """
    if not isinstance(mask, SequenceDescriptor):
        return None
    lengths = None if mask.seqlens is None or mask.seq_offsets is not None else mask.seqlens[0]
    if lengths is None or lengths.shape != (b,):
        kind = "segments" if lengths is None else f"seqlens of shape {lengths.shape}"
        raise ValueError(
            f"{describe(module)}: the SequenceDescriptor has {kind}; with decode=True a row is one sequence with its "
            f"padding on the right: pass SequenceDescriptor.from_seqlens(i32[{b}])."
        )
    warn_of_lengths(describe(module), "mask.seqlens", lengths, s)
    return jnp.clip(lengths, 0, s).astype(jnp.int32)


def extent(module: nn.Module, child: str, s: int, max_decode_length: int | None) -> tuple[int, Any]:
    """-> T, and the next position of each row, i32[b], or 0 for all rows, of the cache that self-attention `child` of
    `module` has, or is about to make for s tokens."""
    held = module.get_variable(COLLECTION, child) if module.has_variable(COLLECTION, child) else {}
    if module.is_initializing() or "cached_key" not in held:
        return max_decode_length or s, 0
    size = held["cached_key"].shape[0 if module.transpose_batch_sequence else 1]
    return size, held.get(INDEX, 0) - held.get("cache_padding", 0)
