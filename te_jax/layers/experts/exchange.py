"""Tokens on their way to the devices that hold their experts, and what the experts make of them on the way back.

    plan        which of its tokens a device sends where, from the experts that they chose
    dispatch    arrays [T, ...] of this device's tokens -> [N, ...] of the tokens that came here
    collect     [N, ...] -> [T, ...]: for each token the sum of what the devices made of it, in f32, in their order

`collect` is the transpose of `dispatch`. All runs inside `jax.shard_map`. What is FP8 crosses devices as bytes.
"""

from collections.abc import Callable
from functools import reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from te_jax.core.derivatives import custom_vjp
from te_jax.core.types import like
from te_jax.ops.experts.peers import combine_of_peers, tell_peers
from te_jax.ops.experts.permute import Groups, buffer_rows, combine_op, group


class Exchange(NamedTuple):
    """The static facts of an exchange."""

    axes: tuple[str, ...]  # the mesh axes that tokens cross
    devices: int  # along them
    expert_axes: tuple[str, ...]  # those whose devices hold different experts, the first ones of `axes`
    sharing: int  # devices that hold the same experts, each some of their hidden features
    experts: int  # of a device
    all_experts: int  # of all devices
    strategy: str  # a key of STRATEGIES
    block: int  # tokens that a device sends to each other one at most
    pairs: int  # of a token and a choice that a device has rows for at most
    pieces: int = 1  # of the columns of what is collected
    direct: bool = False  # rows of experts are read from their devices' memory, instead of sums of a token's rows

    @property
    def received(self) -> int:
        """Tokens that a device has room for, its own among them."""
        return self.devices * self.block

    @property
    def rows(self) -> int:
        """Of the buffer of a device's experts."""
        return buffer_rows(self.pairs, self.experts)


class Sent(NamedTuple):
    """Which tokens came here, and from where."""

    experts: jax.Array  # i32[N, k]: this device's expert of each choice; -1 where it is another device's
    # Of blocks, each with a place for C tokens, else None; `places` also of memory that others read, with N places on
    # each device:
    slots: jax.Array | None  # i32[devices, C]: this device's token in each place, T where there is none
    places: jax.Array | None  # i32[T, devices]: the place of each token among all; -1 where there is none
    dropped: jax.Array  # i32[experts]: the pairs of each expert here that found no place
    # Of memory that others read: i32[T, k], the row of each choice among those of all devices; -1 where there is none
    positions: jax.Array | None = None


_Way = Callable[[jax.Array, Sent, Exchange], jax.Array]


def first_expert(exchange: Exchange) -> jax.Array:
    """i32[]: the number of this device's first expert."""
    return lax.axis_index(exchange.expert_axes) * exchange.experts


def plan(experts: jax.Array, exchange: Exchange) -> Sent:
    """The plan for this device's tokens. experts: i32[T, k] of all devices; other numbers are nobody's."""
    sent = _strategy(exchange).plan(experts, exchange)
    mine = sent.experts - first_expert(exchange)
    mine = jnp.where((mine >= 0) & (mine < exchange.experts), mine, -1)
    if exchange.pairs >= mine.size:
        return sent._replace(experts=mine)
    has_row = jnp.cumsum((mine >= 0).reshape(-1), dtype=jnp.int32).reshape(mine.shape) <= exchange.pairs
    lost = _count(jnp.where(has_row, -1, mine), exchange.experts)
    return sent._replace(experts=jnp.where(has_row, mine, -1), dropped=sent.dropped + lost)


def group_sent(sent: Sent, exchange: Exchange) -> tuple[Groups, Sent]:
    """The rows of the tokens that came here, in the order of this device's experts; and `sent`, which knows of those of
    other devices what this one will read."""
    groups = group(sent.experts, exchange.experts)
    groups = groups._replace(slots=groups.slots[: exchange.rows])  # no row lies behind
    return groups, _strategy(exchange).find(groups, sent, exchange)


def dispatch(a: jax.Array, sent: Sent, exchange: Exchange) -> jax.Array:
    """[T, ...] of this device's tokens -> [N, ...] of the tokens that came here; zeros in empty places."""
    if a.dtype.itemsize == 1:  # collectives of FP8 would be of another type on some platforms
        as_bytes = _dispatch_as_is(lax.bitcast_convert_type(a, jnp.uint8), sent, exchange)
        return lax.bitcast_convert_type(as_bytes, a.dtype)
    return _dispatch_as_is(a, sent, exchange)


def _dispatch_as_is(a, sent, exchange):
    return _strategy(exchange).dispatch(a, sent, exchange)


def collect(a: jax.Array, sent: Sent, exchange: Exchange) -> jax.Array:
    """[N, h] -> [T, h] of the same type; 0 where no device made anything of a token."""
    return _strategy(exchange).collect(a, sent, exchange)


def _with_transpose(
    function: Callable[..., jax.Array], transpose: Callable[..., jax.Array]
) -> Callable[..., jax.Array]:
    """`function` of (a, sent, exchange), differentiable in a."""
    run = custom_vjp(2)(function)

    def bwd(exchange, kept, dy):
        a, sent = kept
        return like(transpose(dy, sent, exchange), a), None

    run.defvjp(lambda a, sent, exchange: (function(a, sent, exchange), (a[:0], sent)), bwd)
    return run


dispatch_tokens: _Way = _with_transpose(dispatch, collect)  # `dispatch`, and `collect`, as jax differentiates them
collect_tokens: _Way = _with_transpose(collect, dispatch)


def _count(experts: jax.Array, num_experts: int) -> jax.Array:
    """i32[num_experts]: how often each is among `experts`, any integers."""
    return jnp.sum(experts.reshape(-1, 1) == jnp.arange(num_experts, dtype=experts.dtype), 0, dtype=jnp.int32)


# -- tokens that are here already ---------------------------------------------------------------------------------


def _plan_of_whole(experts, exchange):
    return Sent(experts, None, None, jnp.zeros_like(first_expert(exchange), shape=exchange.experts))


# -- all tokens to all devices --------------------------------------------------------------------------------


def _gather_tokens(a, sent, exchange):
    return lax.all_gather(a, exchange.axes, axis=0, tiled=True)


def _plan_of_all(experts, exchange):
    return _plan_of_whole(_gather_tokens(experts, None, exchange), exchange)


def _add_shares(a, sent, exchange):
    """Not a reduce-scatter, which adds up in the type of its operand."""
    shares = a.reshape(exchange.devices, a.shape[0] // exchange.devices, *a.shape[1:])
    got = lax.all_to_all(shares, exchange.axes, 0, 0, tiled=True).astype(jnp.float32)
    return reduce(jnp.add, [got[i] for i in range(exchange.devices)]).astype(a.dtype)


# -- blocks of tokens, one for each device --------------------------------------------------------------------


def _plan_of_blocks(experts, exchange):
    """A device gets a token once, however many of its experts the token chose."""
    tokens, topk = experts.shape
    owners = jnp.where(experts < 0, -1, experts // exchange.experts)  # behind the last device: nobody's
    each = jnp.arange(exchange.devices, dtype=experts.dtype) // exchange.sharing
    wants = jnp.any(owners[:, :, None] == each, 1)  # [T, devices]
    place = jnp.cumsum(wants, 0, dtype=jnp.int32) - 1
    has_place = wants & (place < exchange.block)
    at = jnp.where(has_place, place, exchange.block)
    number = jnp.broadcast_to(jnp.arange(tokens, dtype=jnp.int32)[:, None], at.shape)
    device = jnp.broadcast_to(jnp.arange(exchange.devices, dtype=jnp.int32), at.shape)
    empty = jnp.zeros_like(at, shape=(exchange.devices, exchange.block)) + tokens
    slots = empty.at[device, at].set(number, mode="drop")
    places = jnp.where(has_place, device * exchange.block + place, -1)
    lost = jnp.any((owners[:, :, None] == each) & (wants & ~has_place)[:, None, :], -1)
    lost = _count(jnp.where(lost, experts, -1), exchange.all_experts)
    lost = lax.psum_scatter(lost, exchange.expert_axes, scatter_dimension=0, tiled=True)
    others = exchange.axes[len(exchange.expert_axes) :]  # their devices have tokens of their own
    sent = Sent(experts, slots, places, lax.psum(lost, others) if others else lost)
    # A choice of an expert of another device than the block's is nobody's there, so only empty places need a value.
    return sent._replace(experts=_send_blocks(experts, sent, exchange, fill=-1))


def _send_blocks(a, sent, exchange, fill=0):
    blocks = jnp.take(a, sent.slots.reshape(-1), axis=0, mode="fill", fill_value=fill)
    return lax.all_to_all(blocks, exchange.axes, 0, 0, tiled=True)


def _add_blocks(a, sent, exchange):
    back = lax.all_to_all(a, exchange.axes, 0, 0, tiled=True)
    return combine_op(back, sent.places, None, None)[0]


# -- memory that other devices read ----------------------------------------------------------------------------

_READ_FROM = 512  # bytes of a row; fewer are sent as `all_gather` sends them


def _find_rows(groups, sent, exchange):
    """Each device knows the rows of its own tokens on all devices."""
    tokens = sent.experts.shape[0] // exchange.devices
    shares = groups.rows.reshape(exchange.devices, tokens, -1)
    rows = lax.all_to_all(shares, exchange.axes, 0, 0, tiled=True)
    device = jnp.arange(exchange.devices, dtype=jnp.int32)
    positions = jnp.max(jnp.where(rows >= 0, device[:, None, None] * exchange.rows + rows, -1), 0)
    mine = lax.axis_index(exchange.axes) * tokens + jnp.arange(tokens, dtype=jnp.int32)
    sums = device * exchange.received + mine[:, None]
    return sent._replace(positions=positions, places=jnp.where(jnp.any(rows >= 0, -1).T, sums, -1))


def _read_sums(a, sent, exchange):
    if a.shape[-1] * a.dtype.itemsize < _READ_FROM:
        return _add_shares(a, sent, exchange)
    return combine_of_peers(*tell_peers(a, exchange.axes), sent.places, None, exchange.axes)


class _Strategy(NamedTuple):
    plan: Callable[[jax.Array, Exchange], Sent]
    dispatch: Callable[[Any, Sent, Exchange], Any]
    collect: Callable[[Any, Sent, Exchange], Any]
    find: Callable[[Groups, Sent, Exchange], Sent] = lambda groups, sent, exchange: sent


PEER_ACCESS = "peer_access"
WHOLE = "whole"
STRATEGIES = {
    "all_gather": _Strategy(_plan_of_all, _gather_tokens, _add_shares),
    "all_to_all": _Strategy(_plan_of_blocks, _send_blocks, _add_blocks),
    PEER_ACCESS: _Strategy(_plan_of_all, _gather_tokens, _read_sums, _find_rows),
}


def _strategy(exchange: Exchange) -> _Strategy:
    same = lambda a, sent, exchange: a
    return _Strategy(_plan_of_whole, same, same) if exchange.strategy == WHOLE else STRATEGIES[exchange.strategy]
