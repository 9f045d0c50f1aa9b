"""Tokens and gradients in FP8 between devices: quantized where they lie, and read where they arrive.

Tokens cross as fprop reads them, so its operands have the bits that one device would give them. Under one scale for a
tensor wgrad reads the same numbers. In blocks it reads columns, which are made of the rows that arrived: their second
rounding is off by up to 2**-4 of a number (E4M3 has 3 bits behind the leading one), or half of the smallest number of
a block.

Gradients cross in rows of 1 x 128 in E4M3, whose scales are powers of 2, under each recipe. What arrives is multiplied
by the choices' weights, and then quantized as on one device. This first rounding is off by up to 2**-4, too.
"""

from typing import Any

import jax
import jax.numpy as jnp

from te_jax.core import extension
from te_jax.layers.experts.exchange import Exchange, Sent, dispatch
from te_jax.layers.produce import Role, produce
from te_jax.layers.tensor import Fp8Tensor
from te_jax.ops.experts.permute import Groups, permute_source
from te_jax.ops.formats import ROWS_128, ScaleFormat, format_of
from te_jax.ops.quantize.array import array_source
from te_jax.recipe import Recipe
from te_jax.state import fp8

_E4M3, _POWERS_OF_2 = jnp.dtype(jnp.float8_e4m3fn), dict(power_2=True, epsilon=0.0)


def receive_rows(x: jax.Array, groups: Groups, sent: Sent, role: Role, config: Any, exchange: Exchange) -> Fp8Tensor:
    """x [T, H] of all devices, in the rows of this device's experts [R, H]."""
    form, dtype = format_of(config.recipe, role.name), fp8.type_of(role.name, config.recipe)
    sends = role._replace(uses=role.uses._replace(data=True, data_t=False, wide=False))
    q, _ = produce(array_source(x, 1), sends, config)
    data = dispatch(q.data, sent, exchange)
    if form.block:
        return _receive_blocks(data, q, x.dtype, groups, sent, role, config.recipe, exchange)
    source = permute_source(data.astype(jnp.bfloat16), groups)  # which holds the numbers exactly
    got = source.run(role.uses.layouts, dtype, form, jnp.ones((), jnp.float32))
    return Fp8Tensor(**got, scale_inv=q.scale_inv, amax=q.amax)


def _receive_blocks(data, q, own_type, groups, sent, role, recipe: Recipe, exchange: Exchange) -> Fp8Tensor:
    form, dtype = format_of(recipe, role.name), data.dtype
    scale_inv = _dispatch_scales(q.scale_inv, sent, exchange)
    got = {}
    if role.uses.data:
        token = jnp.where(groups.slots < 0, data.shape[0], groups.slots // groups.rows.shape[-1])
        take = lambda a, axis: jnp.take(a, token, axis=axis, mode="fill", fill_value=0)
        got |= dict(data=take(data, 0), scale_inv=take(scale_inv, 1))
    if role.uses.data_t:
        exact = _exact_type(own_type) if recipe.scale_law.get("power_2", True) else jnp.float32
        source = permute_source(form.read(data, scale_inv, 1).astype(exact), groups)
        columns = source.run(("data_t",), dtype, form, law=recipe.scale_law)
        got |= dict(data_t=columns["data_t"], scale_inv_t=columns["scale_inv_t"])
    return Fp8Tensor(**got)


def receive_gradient(dy: jax.Array, sent: Sent, exchange: Exchange) -> jax.Array:
    """dy [T, H] of all devices, [N, H] of its type, or f32 where that may not hold the numbers that crossed."""
    data, scale_inv = _quantize_rows(dy, ROWS_128)
    data, scale_inv = dispatch(data, sent, exchange), _dispatch_scales(scale_inv, sent, exchange)
    return ROWS_128.read(data, scale_inv, 1).astype(_exact_type(dy.dtype))


def _exact_type(dtype: Any) -> Any:
    """`dtype`, f32 instead of f16, whose range is less than of FP8 numbers times a scale."""
    return jnp.float32 if dtype == jnp.float16 else dtype


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
