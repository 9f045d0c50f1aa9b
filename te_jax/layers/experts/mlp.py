"""The MLPs of experts in FP8, over tokens whose experts are chosen, under one custom_vjp. Rows are gathered where they
are quantized; the activation and its gradient are quantized where they are computed.

x and the gradient of y have one scale each. The weights, the activation and its gradient have one for each expert,
where the recipe scales whole tensors: its FP8 state has an axis of experts then.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import custom_vjp_primal_tree_values as values_of

from te_jax.core.derivatives import custom_vjp
from te_jax.core.policies import with_names
from te_jax.core.types import like
from te_jax.layers.config import Config
from te_jax.layers.experts.exchange import Exchange, Sent, collect, dispatch
from te_jax.layers.experts.pieces import Pieces, combine_bwd_pieces, combine_pieces, dgrad_in_pieces, fprop_in_pieces
from te_jax.layers.experts.weights import Parts, amax_of_parts, any_gradient, quantize_part, slots_at
from te_jax.layers.experts.wire import Received, receive_gradient, receive_rows
from te_jax.layers.gemms import grouped_dgrad, grouped_fprop, grouped_wgrad
from te_jax.layers.produce import Role, produce
from te_jax.layers.tensor import Fp8Tensor, LayerUses, Uses, is_held_for_fprop
from te_jax.layers.vjp import (
    Saved,
    accumulator_cotangent,
    differentiate_metas,
    finish_first,
    instantiate,
    jit_layer,
    kept_for_dgrad,
    quantize_activation_grad,
    save_for_backward,
    tag_for_wgrad,
)
from te_jax.layers.weight import Projection
from te_jax.ops.experts.paired import is_pairable, paired_activation_grad_source
from te_jax.ops.experts.peers import combine_of_peers, tell_peers
from te_jax.ops.experts.permute import Groups, combine_op, permute_fp8_source, permute_source
from te_jax.ops.experts.rows import dbias_of_experts, grouped_activation_source
from te_jax.ops.formats import ROWS_128, format_of
from te_jax.ops.source import PerExpert, Source


class ExpertOperands(NamedTuple):
    """What is differentiated."""

    x: jax.Array  # [*B, H]
    weights: jax.Array  # f32[*B, k], of the choices
    wi: Projection  # of parts with slots [E, H, A, F], and a bias [E, A, F] or None
    wo: Projection  # of one part [E, F, O], and a bias [E, O] or None


class Routed(NamedTuple):
    """Where tokens go."""

    groups: Groups  # of the tokens that are here
    sent: Sent | None = None  # which tokens these are, where devices exchange them


class ExpertStatic(NamedTuple):
    """What is static."""

    wi: Config
    wo: Config
    slots: tuple[int, ...]  # how many of A each part of wi has
    act: tuple[Any, ...]  # (name, value) pairs of `activation.attributes`
    middle_name: str | None  # of the activation's input, for `jax.checkpoint` policies
    exchange: Exchange | None = None  # between devices

    @property
    def pieces(self) -> int:
        """Of what comes back from the devices of experts."""
        return 1 if self.exchange is None else self.exchange.pieces

    def spans(self) -> list[slice]:
        """The slots of each part of wi."""
        ends = [sum(self.slots[: i + 1]) for i in range(len(self.slots))]
        return [slice(end - count, end) for end, count in zip(ends, self.slots)]


def rows_source(x: jax.Array | Received, groups: Groups, weights: jax.Array | None = None) -> Source:
    """x [*B, H] in the buffer of groups, times the weights [*B, k] of its rows. A probe counts each token once, or with
    weights once for each of its experts, and neither the rows that pad groups nor the tail."""

    in_fp8 = isinstance(x, Received)

    def tokens():
        has_row, values = groups.rows >= 0, ROWS_128.read(x.data, x.scales, 1) if in_fp8 else x
        if weights is None:
            return jnp.where(jnp.any(has_row, -1, keepdims=True), values, 0)
        return jnp.where(has_row[..., None], values[..., None, :].astype(jnp.float32) * weights[..., None], 0)

    source = permute_fp8_source(x.data, groups, x.scales, weights) if in_fp8 else permute_source(x, groups, weights)
    if weights is None:
        return source._replace(elements=tokens)
    size = jnp.sum(groups.counts).astype(jnp.float32) * source.operands[0].shape[-1]
    return source._replace(elements=tokens, experts=PerExpert(lambda a: a, jnp.sum, size))


def rows_of_tokens(rows: jax.Array, groups: Groups) -> jax.Array:
    """[*B, ...]: the sum of a token's rows of [R, ...]; 0 where it has none."""
    return combine_op(rows, groups.rows, None, None)[0]


def _add_rows(rows: Pieces, routed: "Routed", weights, of_all, static: "ExpertStatic") -> tuple[jax.Array, Pieces]:
    """[*B, H]: the sum of the rows [R, H] of each token of this device, times weights [*B, k], or those of_all tokens
    that are here; and rows, to be read later."""
    exchange = static.exchange
    if exchange is None or not exchange.direct:
        return combine_pieces(rows, routed.groups, of_all, lambda sums: _back(sums, routed, static)), rows
    told = [tell_peers(each, exchange.axes) for each in rows]
    sums = [combine_of_peers(*each, routed.sent.positions, weights, exchange.axes) for each in told]
    return jnp.concatenate(sums, -1), tuple(each for each, _ in told)


def _forward(operands: ExpertOperands, routed: Routed, static: ExpertStatic, train: bool, need_wgrad):
    """y, and for the backward pass (x, wi in FP8), (the activation, wo in FP8), the activation's input, the rows of the
    experts' outputs, and the weights of the tokens that are here."""
    (x, weights, wi, wo), groups = operands, routed.groups
    uses = LayerUses.of(static.wi.recipe, train, need_wgrad[0])
    q0 = _rows_of_tokens_here(x, routed, Role("x", wi.metas.x, uses.x, static.wi.x), static)
    of_all = weights if routed.sent is None else dispatch(weights, routed.sent, static.exchange)
    parts = tuple(quantize_part(part, wi.metas.kernel, uses.weight, static.wi, True) for part in wi.kernel)
    bias = lambda span: None if wi.bias is None else wi.bias[:, span]
    each = [grouped_fprop(q0, w, bias(span), groups, static.wi) for w, span in zip(parts, static.spans())]
    z = with_names(each[0] if len(each) == 1 else jnp.concatenate(each, 1), static.middle_name)
    (second,) = wo.kernel
    if not static.wo.on_mesh:  # the second weights in FP8 come after z, when what only z is made of is free
        second = second._replace(wide=lax.optimization_barrier((z, second.wide))[1])
    uses = LayerUses.of(static.wo.recipe, train, need_wgrad[1])
    role = Role("x", wo.metas.x, uses.x, jax.typeof(z))
    q1, _ = produce(grouped_activation_source(z, groups, dict(static.act)), role, static.wo)
    w1 = quantize_part(second, wo.metas.kernel, uses.weight, static.wo, False)
    rows = fprop_in_pieces(q1, w1, wo.bias, groups, static.wo, static.pieces)
    y, rows = _add_rows(rows, routed, weights, of_all, static)
    return y, (q0, parts), (q1, (w1,)), z, rows, of_all


def _rows_of_tokens_here(x, routed: Routed, role: Role, static: ExpertStatic) -> Fp8Tensor:
    """The rows of x as GEMMs read them."""
    if routed.sent is None:
        return produce(rows_source(x, routed.groups), role, static.wi)[0]
    if role.uses.wide:  # a GEMM that the recipe takes out of FP8 reads it as it is
        source = rows_source(dispatch(x, routed.sent, static.exchange), routed.groups)
        return produce(source._replace(elements=lambda: x), role, static.wi)[0]  # a probe counts a token once
    return receive_rows(x, routed.groups, routed.sent, role, static.wi, static.exchange)


def _back(sums, routed: Routed, static: ExpertStatic):
    """What was added up for the tokens that are here, for the tokens of this device."""
    return sums if routed.sent is None else collect(sums, routed.sent, static.exchange)


@custom_vjp(2, in_fp8=lambda static: "te_jax.layers.moe")
def _experts(operands, routed, static):
    return _forward(operands, routed, static, train=False, need_wgrad=(False, False))[0]


def _experts_fwd(operands, routed, static):
    need_wgrad = any_gradient(operands.wi.kernel), any_gradient(operands.wo.kernel)
    of_weights = operands.weights.perturbed
    operands, routed = values_of((operands, routed))
    y, *pairs, z, rows, weights = _forward(operands, routed, static, train=True, need_wgrad=need_wgrad)
    each = zip(pairs, (operands.wi, operands.wo), (static.wi, static.wo), need_wgrad)
    saved = [_save(*pair, p, config, needs_wgrad) for pair, p, config, needs_wgrad in each]
    rows = rows if of_weights else tuple(each[:0] for each in rows)  # only the router's gradient reads them
    return y, (saved, z, rows, weights, routed)


def _save(q: Fp8Tensor, parts: Parts, given: Projection, config: Config, needs_wgrad: bool) -> Saved:
    """As `save_for_backward`, with the parts of a weight instead of the weight."""
    x = save_for_backward(tag_for_wgrad(q, config), Fp8Tensor(), given.metas, config, needs_wgrad)

    def kept(part, given):
        onto = part.onto and tuple(o._replace(grad=o.grad if needs_wgrad else jnp.zeros((0,))) for o in part.onto)
        return kept_for_dgrad(part, given, config)._replace(onto=onto)

    return x._replace(weight=tuple(map(kept, parts, given.kernel)))


def _part_for_dgrad(part: Fp8Tensor, config: Config, has_slots: bool) -> Fp8Tensor:
    """A part as dgrad reads it; one that is kept as fprop reads it is transposed."""
    if not is_held_for_fprop(part):
        return part
    return quantize_part(part, None, Uses(data=True, data_t=False, wide=False), config, has_slots)


def _experts_bwd(static: ExpertStatic, residuals, dy):
    (first, second), z, rows, weights, routed = residuals
    dy, groups = instantiate(dy), routed.groups
    dy = dy if routed.sent is None else receive_gradient(dy, routed.sent, static.exchange)
    if not static.wo.on_mesh:  # no gradient during the forward pass, where dy is known before y
        dy, z, rows = lax.optimization_barrier((dy, z, rows))
    dweights = None
    if rows[0].size:
        dweights = like(_back(combine_bwd_pieces(dy, rows, groups), routed, static), weights)
    grad, dbias = quantize_rows_grad(dy, weights, second, groups, static.wo)
    w1 = _part_for_dgrad(second.weight[0], static.wo, False)
    da = grouped_dgrad(grad, w1, groups, static.wo)
    dwo = _differentiate(second, grad, dbias, groups, static.wo, [[None]])
    da, dwo = finish_first(dwo, da, static.wo)
    source = paired_activation_grad_source(da, z, groups, dict(static.act))
    in_one_array = _fit_in_one_array(z, first, groups, static.wi)
    grad, dbias = quantize_activation_grad(source, z, first, static.wi, in_one_array=in_one_array)
    spans = static.spans()
    parts = [_part_for_dgrad(part, static.wi, True) for part in first.weight]
    terms = [(slots_at(grad, s), w, s.start) for w, s in zip(parts, spans)]
    pieces = 1 if first.needs_wgrad else static.pieces  # wgrad runs while sums of dx travel
    dx = dgrad_in_pieces(terms, groups, static.wi, pieces)
    dx = like(_add_rows(dx, routed, None, None, static)[0], static.wi.x)
    of_parts = [range(span.start, span.stop) for span in spans]
    dwi = _differentiate(first, grad, dbias, groups, static.wi, of_parts)
    return ExpertOperands(dx, dweights, dwi, dwo), None


def quantize_rows_grad(
    dy: jax.Array | Received, weights: jax.Array | None, saved: Saved, groups: Groups, config: Config
) -> tuple[Fp8Tensor, jax.Array | None]:
    """The gradient of the rows [R, O], from dy [*B, O] and the weights of `rows_source`, as the GEMMs read it, and the
    gradient of the bias, if there is one."""
    uses, has_bias = LayerUses.of(config.recipe, train=True, wgrad=saved.needs_wgrad).grad, config.bias is not None
    aval = jax.typeof(dy.data if isinstance(dy, Received) else dy)
    role = Role("grad", saved.metas.grad, uses, aval)
    grad, got = produce(rows_source(dy, groups, weights), role, config, ("rows",) if has_bias else ())
    if not has_bias:
        return grad, None
    dbias = dbias_of_experts(got["rows"].astype(jnp.float32), groups.offsets, groups.counts)
    return grad, like(dbias, config.bias)


def _fit_in_one_array(z, saved: Saved, groups, config: Config) -> bool:
    """Whether one array holds both layouts of the gradient of z [R, A, F]. It replaces z, which is as many bytes: no
    larger tensor is alive at a time."""
    uses = LayerUses.of(config.recipe, train=True, wgrad=saved.needs_wgrad).grad
    in_both = uses.data and uses.data_t and not uses.wide and not format_of(config.recipe, "grad").block
    return in_both and config.bias is None and not config.on_mesh and is_pairable(z, groups.counts)


def _differentiate(saved: Saved, grad: Fp8Tensor, dbias, groups, config: Config, of_parts) -> Projection:
    """The cotangents of the parts of a weight, of its bias and of its FP8 state. of_parts: for each part its slots of
    grad; [None] without an axis of slots."""
    whole = Fp8Tensor(amax=amax_of_parts(saved.weight))
    dmetas = differentiate_metas(saved._replace(weight=whole), grad, config)
    each = zip(saved.weight, of_parts)
    kernel = tuple(_differentiate_part(saved, part, grad, slots, groups, config) for part, slots in each)
    return Projection(kernel, dbias, dmetas)


def _differentiate_part(saved: Saved, part: Fp8Tensor, grad, slots, groups, config: Config) -> Fp8Tensor | None:
    if not saved.needs_wgrad:
        return None
    wgrad = lambda slot, onto=None: grouped_wgrad(saved.x, grad, groups, config, onto, slot)
    if part.onto is None:
        return Fp8Tensor(wide=tuple(like(wgrad(slot), config.weight) for slot in slots))
    sums = (wgrad(slot, onto.grad) for slot, onto in zip(slots, part.onto))
    return Fp8Tensor(onto=tuple(map(accumulator_cotangent, sums, part.onto)))


_experts.defvjp(_experts_fwd, _experts_bwd, symbolic_zeros=True)
run_experts: Callable[..., Any] = jit_layer(_experts, 2)
