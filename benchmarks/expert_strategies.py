"""Ways for tokens to reach their experts that are measured next to those of te_jax.

ring    tokens are handed on from each device to the next, by `jax.lax.ppermute`, until all have all. Sums go straight
        to their tokens' devices, a `ppermute` for each distance, and are added as after all_gather: the same bits
ragged  a device sends each other one the tokens that have an expert there, and no more, by
        `jax.lax.ragged_all_to_all`. There is room for all tokens, so that none is dropped
"""

from functools import reduce

import jax.numpy as jnp
from jax import lax

from te_jax.layers.experts.exchange import STRATEGIES, Exchange
from te_jax.ops.experts.permute import combine_op


def register():
    """`ExpertExchange(strategy=...)` takes them from here on."""
    STRATEGIES.update(WAYS)


def _from(a, distance: int, exchange: Exchange):
    """What the device `distance` in front of this one has."""
    count = exchange.devices
    return lax.ppermute(a, exchange.axes, [(i, (i + distance) % count) for i in range(count)])


def _hand_on(a, sent, exchange):
    me, each = lax.axis_index(exchange.axes), [a]
    for _ in range(exchange.devices - 1):
        each.append(_from(each[-1], 1, exchange))
    # each[i] is of device me - i
    order = (me - jnp.arange(exchange.devices)) % exchange.devices
    return jnp.take(jnp.stack(each), order, axis=0).reshape(-1, *a.shape[1:])


def _return_shares(a, sent, exchange):
    me, count = lax.axis_index(exchange.axes), exchange.devices
    shares = a.reshape(count, a.shape[0] // count, *a.shape[1:])
    share = lambda device: lax.dynamic_index_in_dim(shares, device % count, 0, keepdims=False)
    each = [share(me), *(_from(share(me + i), i, exchange) for i in range(1, count))]
    # each[i] was made by device me - i
    got = jnp.take(jnp.stack(each), (me - jnp.arange(count)) % count, axis=0).astype(jnp.float32)
    return reduce(jnp.add, [got[i] for i in range(count)]).astype(a.dtype)


def _sizes(sent, exchange):
    """i32[devices]: how many tokens this device sends to each, and gets of each."""
    sends = jnp.sum(sent.slots < sent.places.shape[0], 1, dtype=jnp.int32)
    return sends, lax.all_to_all(sends, exchange.axes, 0, 0, tiled=True)


def _ragged(a, sends, gets, exchange):
    """Blocks begin where they begin in all_to_all, and are sent as far as they are filled."""
    first = jnp.arange(exchange.devices, dtype=jnp.int32) * exchange.block
    at = jnp.zeros_like(first) + lax.axis_index(exchange.axes).astype(jnp.int32) * exchange.block
    return lax.ragged_all_to_all(a, jnp.zeros_like(a), first, sends, at, gets, axis_name=exchange.axes)


def _send_ragged(a, sent, exchange):
    blocks = jnp.take(a, sent.slots.reshape(-1), axis=0, mode="fill", fill_value=0)
    return _ragged(blocks, *_sizes(sent, exchange), exchange)


def _add_ragged(a, sent, exchange):
    sends, gets = _sizes(sent, exchange)
    return combine_op(_ragged(a, gets, sends, exchange), sent.places, None, None)[0]


WAYS = {
    "ring": STRATEGIES["all_gather"]._replace(dispatch=_hand_on, collect=_return_shares),
    "ragged": STRATEGIES["all_to_all"]._replace(dispatch=_send_ragged, collect=_add_ragged),
}
