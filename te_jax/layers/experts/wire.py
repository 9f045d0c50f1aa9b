"""Tokens and gradients in FP8 between devices: quantized where they lie, and read where they arrive.

Tokens cross as fprop reads them, so its operands have the bits that one device would give them. Under one scale for a
tensor wgrad reads the same numbers. In blocks it reads columns, which are made of the rows that arrived: their second
rounding is off by up to 2**-4 of a number (E4M3 has 3 bits behind the leading one), or half of the smallest number of
a block.

Gradients cross in rows of 1 x 128 in E4M3, whose scales are powers of 2, under each recipe. What arrives is multiplied
by the choices' weights, and then quantized as on one device. This first rounding is off by up to 2**-4, too.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from te_jax.core import extension
from te_jax.layers.experts.exchange import Exchange, Sent, dispatch
from te_jax.layers.produce import Role, produce
from te_jax.layers.tensor import Fp8Tensor
from te_jax.ops.experts.peers import permute_of_peers
from te_jax.ops.experts.permute import Groups, permute_fp8_source, permute_source
from te_jax.ops.formats import ROWS_128, ScaleFormat, format_of
from te_jax.ops.quantize.array import array_source
from te_jax.recipe import Recipe
from te_jax.state import fp8

_E4M3, _POWERS_OF_2 = jnp.dtype(jnp.float8_e4m3fn), dict(power_2=True, epsilon=0.0)


class Received(NamedTuple):
    """A gradient [N, H] in E4M3, times f32[H / 128, N]."""

    data: jax.Array
    scales: jax.Array


def reads_tokens(exchange: Exchange, recipe: Recipe) -> bool:
    """Whether rows of tokens are read where they lie, instead of being sent."""
    return exchange.direct and not format_of(recipe, "x").block and fp8.type_of("x", recipe) == _E4M3


def receive_rows(x: jax.Array, groups: Groups, sent: Sent, role: Role, config: Any, exchange: Exchange) -> Fp8Tensor:
    """x [T, H] of all devices, in the rows of this device's experts [R, H]."""
    form, dtype = format_of(config.recipe, role.name), fp8.type_of(role.name, config.recipe)
    sends = role._replace(uses=role.uses._replace(data=True, data_t=False, wide=False))
    q, _ = produce(array_source(x, 1), sends, config)
    if form.block:
        return _receive_blocks(q, groups, sent, role, config.recipe, exchange)
    if reads_tokens(exchange, config.recipe):
        got = permute_of_peers(q.data, groups, role.uses.layouts, exchange.axes)
    else:
        source = _rows_of_data(dispatch(q.data, sent, exchange), groups)
        got = source.run(role.uses.layouts, dtype, form, jnp.ones((), jnp.float32))
    return Fp8Tensor(**got, scale_inv=q.scale_inv, amax=q.amax)


def _rows_of_data(data, groups):
    """The numbers of FP8 data in the rows of groups."""
    if data.dtype == _E4M3:
        return permute_fp8_source(data, groups)
    return permute_source(data.astype(jnp.bfloat16), groups)  # which holds E5M2 exactly


def _receive_blocks(q, groups, sent, role, recipe: Recipe, exchange: Exchange) -> Fp8Tensor:
    form, data = format_of(recipe, role.name), dispatch(q.data, sent, exchange)
    dtype, scale_inv = data.dtype, _dispatch_scales(q.scale_inv, sent, exchange)
    got = {}
    if role.uses.data:
        token = jnp.where(groups.slots < 0, data.shape[0], groups.slots // groups.rows.shape[-1])
        take = lambda a, axis: jnp.take(a, token, axis=axis, mode="fill", fill_value=0)
        got |= dict(data=take(data, 0), scale_inv=take(scale_inv, 1))
    if role.uses.data_t:
        # Powers of 2 leave the numbers as they are in bf16.
        if recipe.scale_law.get("power_2", True) and form.block == ROWS_128.block and dtype == _E4M3:
            source = permute_fp8_source(data, groups, scale_inv)
        else:
            source = permute_source(form.read(data, scale_inv, 1), groups)
        columns = source.run(("data_t",), dtype, form, law=recipe.scale_law)
        got |= dict(data_t=columns["data_t"], scale_inv_t=columns["scale_inv_t"])
    return Fp8Tensor(**got)


def receive_gradient(dy: jax.Array, sent: Sent, exchange: Exchange) -> jax.Array | Received:
    """dy [T, H] of all devices: in bf16 as it crossed, else [N, H] in f32, which holds the numbers that crossed."""
    data, scale_inv = _quantize_rows(dy, ROWS_128)
    data, scale_inv = dispatch(data, sent, exchange), _dispatch_scales(scale_inv, sent, exchange)
    if dy.dtype == jnp.bfloat16:
        return Received(data, scale_inv)
    return ROWS_128.read(data, scale_inv, 1)


def _quantize_rows(dy, form: ScaleFormat):
    capability = extension.compute_capability()
    if capability is not None and form.refuses(str(capability)):  # its op is for GPUs that multiply the format
        got = form.write(dy.astype(jnp.float32), 1, _E4M3, **_POWERS_OF_2)
    else:
        got = array_source(dy, 1).run(("data",), _E4M3, form, law=_POWERS_OF_2)
    return got["data"], got["scale_inv"]


def _dispatch_scales(scale_inv, sent, exchange):
    """Inverse scales [blocks, T] of rows."""
    return dispatch(scale_inv.T, sent, exchange).T
