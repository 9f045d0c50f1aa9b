"""Products of experts in pieces of their columns, so that the sums of one travel between devices while the next is
multiplied. Rows, wgrad and what is quantized are whole, and each number of a result has the bits that it has in one
product.

Nothing is copied for it: weights [E, N, *K] are the weights [E P, N / P, *K] of E P groups. In piece p the rows of an
expert are those of its p-th group, and its other groups are empty.
"""

from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from te_jax.core.derivatives import custom_vjp
from te_jax.core.types import like
from te_jax.layers.config import Config
from te_jax.layers.experts.exchange import Exchange, Sent, collect, dispatch
from te_jax.layers.experts.wire import Received
from te_jax.layers.gemms import grouped_dgrad, grouped_fprop
from te_jax.layers.tensor import Fp8Tensor
from te_jax.ops.experts.permute import Groups, combine_bwd_op, combine_op, permute_source
from te_jax.ops.formats import format_of
from te_jax.ops.gemm.grouped import gemm_grouped

Pieces = tuple[jax.Array, ...]  # of the columns of an array, in their order


def fprop_in_pieces(
    x: Fp8Tensor, w: Fp8Tensor, bias: jax.Array | None, groups: Groups, config: Config, pieces: int
) -> Pieces:
    """`grouped_fprop` for w [E, K, N], N a multiple of 128 `pieces`."""
    if pieces == 1:
        return (grouped_fprop(x, w, bias, groups, config),)
    data, scale_inv = w.columns
    w = Fp8Tensor(data_t=data, scale_inv_t=scale_inv, wide=_cut_columns(w.wide, 2, pieces))
    w = _cut_layout(w, "data_t", "scale_inv_t", config, pieces)
    x, bias = _of_each_group(x, pieces), _cut_columns(bias, 1, pieces)
    return tuple(grouped_fprop(x, w, bias, of_piece, config) for of_piece in _groups_of_pieces(groups, pieces))


def dgrad_in_pieces(
    terms: Sequence[tuple[Fp8Tensor, Fp8Tensor, int]], groups: Groups, config: Config, pieces: int
) -> Pieces:
    """The sum of `grouped_dgrad` over terms (dy, w [E, K, *N], slot), K a multiple of 128 `pieces`."""
    all_groups = _groups_of_pieces(groups, pieces) if pieces > 1 else [groups]
    if pieces > 1:
        terms = [(_of_each_group(dy, pieces), _cut_rows(w, config, pieces), slot) for dy, w, slot in terms]
    products = lambda of_piece: [grouped_dgrad(dy, w, of_piece, config, slot) for dy, w, slot in terms]
    return tuple(reduce(jnp.add, products(of_piece)) for of_piece in all_groups)


def _cut_rows(w: Fp8Tensor, config: Config, pieces: int) -> Fp8Tensor:
    data, scale_inv = w.rows
    w = Fp8Tensor(data=data, scale_inv=scale_inv, wide=_cut_columns(w.wide, 1, pieces))
    return _cut_layout(w, "data", "scale_inv", config, pieces)


def _cut_layout(w: Fp8Tensor, data: str, scale_inv: str, config: Config, pieces: int) -> Fp8Tensor:
    """The layout of these names, [E, N, *K], and its inverse scales, for the groups of pieces."""
    form, inverse = format_of(config.recipe, "kernel"), getattr(w, scale_inv)
    if form.block and inverse is not None:
        # Scales of blocks that are not square have the contracted axis in front: [E, *K / block, N].
        inverse = _cut_columns(inverse, 1 if form.square else inverse.ndim - 1, pieces)
    elif inverse is not None and inverse.ndim:
        inverse = jnp.repeat(inverse, pieces)
    return w._replace(**{data: _cut_columns(getattr(w, data), 1, pieces), scale_inv: inverse})


def _of_each_group(rows: Fp8Tensor, pieces: int) -> Fp8Tensor:
    """Rows whose inverse scales of experts are there for the groups of pieces."""
    inverse = rows.scale_inv
    return rows._replace(scale_inv=jnp.repeat(inverse, pieces)) if inverse is not None and inverse.ndim == 1 else rows


def _cut_columns(a: jax.Array | None, axis: int, pieces: int) -> Any:
    """[E, ..., N, ...] with N along `axis` -> [E P, ..., N / P, ...]: the same memory where the axis is 1."""
    if a is None:
        return None
    a = a.reshape(*a.shape[:axis], pieces, a.shape[axis] // pieces, *a.shape[axis + 1 :])
    a = jnp.moveaxis(a, axis, 1) if axis > 1 else a
    return a.reshape(-1, *a.shape[2:])


def _groups_of_pieces(groups: Groups, pieces: int) -> list[Groups]:
    """For each piece the groups [E P] of which only its own have rows."""
    first, last, number = groups.offsets[:-1, None], groups.offsets[1:, None], jnp.arange(pieces, dtype=jnp.int32)

    def of(piece):
        ends = jnp.where(number < piece, first, last).reshape(-1)
        counts = jnp.where(number == piece, groups.counts[:, None], 0).reshape(-1)
        return groups._replace(offsets=jnp.concatenate([groups.offsets[:1], ends]), counts=counts)

    return [of(piece) for piece in range(pieces)]


# -- tokens and their rows --------------------------------------------------------------------------------------------


def combine_pieces(
    rows: Pieces, groups: Groups, weights: jax.Array | None, back: Callable[..., jax.Array]
) -> jax.Array:
    """[*B, N]: for each token `back` of the sum of its rows times their weights."""
    sums = [back(combine_op(each, groups.rows, weights, None)[0]) for each in rows]
    return sums[0] if len(sums) == 1 else jnp.concatenate(sums, -1)


def combine_bwd_pieces(dy: jax.Array | Received, rows: Pieces, groups: Groups) -> jax.Array:
    """The gradient of the weights of `combine_pieces`, from dy [*B, N]. In pieces it is read where it lies: piece p of
    token t is token t P + p of as many columns as a piece has."""
    dy, scales = dy if isinstance(dy, Received) else (dy, None)
    dtype = dy.dtype if scales is None else jnp.bfloat16
    if len(rows) == 1:
        return combine_bwd_op(dy, rows[0].astype(dtype), groups.rows, scales)[0]
    (tokens, topk), count = groups.rows.shape, len(rows)
    dy, number = dy.reshape(tokens * count, -1), jnp.arange(count, dtype=jnp.int32)[:, None]
    if scales is not None:
        scales = jnp.moveaxis(scales.reshape(count, -1, tokens), 0, -1).reshape(-1, tokens * count)

    def of(piece, each):
        positions = jnp.where(number == piece, groups.rows[:, None], -1).reshape(-1, topk)
        dweights = combine_bwd_op(dy, each.astype(dtype), positions, scales)[0]
        return dweights.reshape(tokens, count, topk)[:, piece]

    return reduce(jnp.add, [of(piece, each) for piece, each in enumerate(rows)])


# -- without a recipe -------------------------------------------------------------------------------------------------


class OutOperands(NamedTuple):
    """What is differentiated."""

    a: jax.Array  # [R, F], of the activation
    weights: jax.Array  # f32[N, k], of the choices of the tokens that are here
    wo: jax.Array  # [E, F, O]
    bias: jax.Array | None  # [E, O]


def _last_product(groups: Groups, a, wo, bias):
    return gemm_grouped(a, wo.astype(a.dtype), groups.offsets, groups.counts, bias=bias, k_first=True)


def _out(operands: OutOperands, routed: tuple[Groups, Sent], exchange: Exchange):
    return _out_fwd(operands, routed, exchange)[0]


def _out_fwd(operands: OutOperands, routed: tuple[Groups, Sent], exchange: Exchange):
    (a, weights, wo, bias), (groups, sent) = operands, routed
    wo, bias = _cut_columns(wo, 2, exchange.pieces), _cut_columns(bias, 1, exchange.pieces)
    rows = tuple(_last_product(of_piece, a, wo, bias) for of_piece in _groups_of_pieces(groups, exchange.pieces))
    y = combine_pieces(rows, groups, weights, lambda sums: collect(sums, sent, exchange))
    return y, (operands, routed, rows)


def _out_bwd(exchange: Exchange, residuals, dy):
    (a, weights, wo, bias), (groups, sent), rows = residuals
    dy = dispatch(dy, sent, exchange)
    dweights = like(combine_bwd_pieces(dy, rows, groups), weights)
    drows = permute_source(dy, groups, weights).run(("rows",), jnp.float8_e4m3fn)["rows"]
    _, transpose = jax.vjp(partial(_last_product, groups), a, wo, bias)
    da, dwo, dbias = transpose(drows)
    return OutOperands(da, dweights, dwo, dbias), None


out_in_pieces: Callable[..., Any] = custom_vjp(2)(_out)
"""y [T, O] of this device's tokens: the products of the activation's rows with wo in pieces, combined and collected."""
out_in_pieces.defvjp(_out_fwd, _out_bwd)
