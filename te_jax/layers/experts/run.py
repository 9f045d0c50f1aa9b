"""The experts of a mixture over tokens that are routed: on one device, or each device's part of them."""

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import ShapedArray
from jax.sharding import AxisType, PartitionSpec

from te_jax.core.policies import STATISTICS, with_names
from te_jax.core.types import align, on_explicit_mesh, varying_axes
from te_jax.layers.config import Config
from te_jax.layers.experts.devices import ExpertPlacement, find_exchange
from te_jax.layers.experts.exchange import Exchange, collect_tokens, dispatch_tokens, group_sent, plan
from te_jax.layers.experts.mlp import ExpertOperands, ExpertStatic, Routed, run_experts
from te_jax.layers.experts.nested import run_inside_shard_map
from te_jax.layers.experts.pieces import OutOperands, out_in_pieces
from te_jax.layers.experts.weights import Parts, arrays_of, from_zero, quantize_part
from te_jax.layers.tensor import Fp8Tensor, LayerUses
from te_jax.layers.weight import Projection
from te_jax.ops.experts.permute import combine, group, permute
from te_jax.ops.formats import format_of
from te_jax.ops.gemm.grouped import gemm_grouped
from te_jax.ops.quantize import activation as act_op
from te_jax.recipe import Recipe
from te_jax.sharding.constraints import entries, spec_of
from te_jax.sharding.resource import current_mesh_resource, stage_axes
from te_jax.state import fp8


class ExpertRun(NamedTuple):
    """What is static."""

    options: Any  # MoEOptions
    recipe: Recipe | None
    checkpoint: str | None
    middle_name: str | None
    placement: ExpertPlacement | None


class ExpertInputs(NamedTuple):
    """The arrays of a call, or each device's part of them."""

    h: jax.Array  # [*B, H]
    weights: jax.Array  # f32[*B, k], of the choices
    experts: jax.Array  # i32[*B, k]
    wi: Parts
    wi_bias: tuple[jax.Array, ...] | None
    wo: Parts
    wo_bias: jax.Array | None
    metas: tuple[fp8.DenseMetas, fp8.DenseMetas] | None


def run_on_devices(run: ExpertRun, inputs: ExpertInputs) -> tuple[jax.Array, jax.Array | None]:
    """y [*B, H], and i32[E] of the pairs that found no place; None where devices exchange nothing."""
    placement = run.placement
    if placement is None:
        return _run_experts_on(run, inputs, None, None), None
    if not placement.shards:
        y, lost = _run_part(_with_shared_scales(run, inputs), inputs)
        return y, _of_all_experts(lost, placement)
    inputs = inputs._replace(wi=_from_zeros(inputs.wi), wo=_from_zeros(inputs.wo))
    if run.recipe is not None:
        metas = inputs.metas or (fp8.STATELESS, fp8.STATELESS)
        wi = _quantize_before_gather(inputs.wi, metas[0].kernel, True, run)
        wo = _quantize_before_gather(inputs.wo, metas[1].kernel, False, run)
        inputs = inputs._replace(wi=wi, wo=wo)
    specs = _specs(inputs, placement)
    if on_explicit_mesh(jax.typeof(inputs.h)):
        inputs = jax.tree.map(jax.sharding.reshard, inputs, specs)
    results = specs.h, spec_of([placement.experts])
    part = partial(_run_part, _with_shared_amaxes(run))  # outside of a `shard_map` of the user's arrays are whole
    if any(kind == AxisType.Manual for kind in jax.sharding.get_abstract_mesh().axis_types):
        return run_inside_shard_map(part, inputs, specs, results, placement.shards)
    return jax.shard_map(part, in_specs=(specs,), out_specs=results, axis_names=placement.shards)(inputs)


def _quantize_before_gather(parts: Parts, meta: fp8.TensorMeta | None, has_slots: bool, run: ExpertRun) -> Parts:
    """`parts` in FP8 where further mesh axes divide the kernels, as fsdp does: each device quantizes what it holds, and
    one layout crosses; the other is transposed of it. Blocks of other shapes cannot be, and scales are their own."""
    uses, form = LayerUses.of(run.recipe, train=True, wgrad=False).weight, format_of(run.recipe, "kernel")
    transposable = uses.data and not uses.wide and (form.square or not form.block)
    if not transposable or parts[0].data_t is not None or not _is_divided_further(arrays_of(parts)[0], run.placement):
        return parts
    config = Config(run.recipe, 1, None, jax.typeof(arrays_of(parts)[0]))

    def quantized(part: Fp8Tensor) -> Fp8Tensor:
        arrays = lax.stop_gradient(Fp8Tensor(wide=part.wide))
        one = uses._replace(data_t=False)
        made = quantize_part(arrays, lax.stop_gradient(meta), one, config, has_slots, crosses=True)
        return made._replace(wide=part.wide, onto=part.onto)

    return tuple(map(quantized, parts))


def _is_divided_further(kernel: jax.Array, placement: ExpertPlacement) -> bool:
    """Whether a kernel [E, K, N] lies on mesh axes that divide neither experts nor hidden features: what its type
    shows, or fsdp_resource on Auto axes."""
    if on_explicit_mesh(jax.typeof(kernel)):
        axes = {axis for names in entries(jax.typeof(kernel)) for axis in names}
    else:
        resource = current_mesh_resource()
        axes = {None if resource is None else resource.fsdp_resource} & placement.shards
    return any(dict(placement.sizes)[axis] > 1 for axis in axes - {*placement.experts, *placement.hidden})


def _with_shared_amaxes(run: ExpertRun) -> ExpertRun:
    if run.recipe is None or run.recipe.reduce_amax:
        return run
    return run._replace(recipe=replace(run.recipe, reduce_amax=True))


def _with_shared_scales(run: ExpertRun, inputs: ExpertInputs) -> ExpertRun:
    """What arrives is read by this device's scales, so they must be those of all. Raises ValueError where not."""
    if run.recipe is None or not run.placement.crossed:
        return run
    x = None if inputs.metas is None else inputs.metas[0].x
    if x is not None and varying_axes(x.scale) & {*run.placement.crossed}:
        raise ValueError(
            f"moe: the scale of x in metas differs along mesh axes {run.placement.crossed}, which tokens cross; pass "
            "the same state to all devices (in_specs of `jax.shard_map` without these axes)."
        )
    return _with_shared_amaxes(run)


def _of_all_experts(lost: jax.Array, placement: ExpertPlacement) -> jax.Array:
    """i32[E] of all devices' experts, the same on all of them, from the counts of each device's own."""
    devices = jnp.arange(placement.devices(placement.experts), dtype=jnp.int32)
    here = devices[:, None] == lax.axis_index(placement.experts)
    return lax.psum(jnp.where(here, lost[None], 0).reshape(-1), placement.experts)


def _specs(inputs: ExpertInputs, placement: ExpertPlacement) -> ExpertInputs:
    """How devices share the inputs: a PartitionSpec for each array."""
    experts, hidden = placement.experts, placement.hidden
    tokens = lambda a: spec_of([*placement.tokens, ()])
    by_expert = lambda a: spec_of([experts] if a.ndim else [])

    def parts(each: Parts, at: int, at_t: int) -> Parts:
        """at, at_t: the axis of hidden features in weights and their scales, as they are and transposed."""
        axes = dict(data=at, wide=at, scale_inv=at, onto=at, data_t=at_t, scale_inv_t=at_t)

        def one(field: str, a: jax.Array) -> PartitionSpec:
            if a.ndim < 2 or field == "amax":  # of a probe f32[E, 4]
                return by_expert(a)
            return spec_of([experts, *[hidden if i == axes[field] % a.ndim else () for i in range(1, a.ndim)]])

        return tuple(Fp8Tensor(**{f: jax.tree.map(partial(one, f), v) for f, v in p._asdict().items()}) for p in each)

    def state(meta: fp8.TensorMeta) -> fp8.TensorMeta:
        return fp8.TensorMeta(*[by_expert(meta.scale)] * 2)

    is_meta = lambda a: isinstance(a, fp8.TensorMeta)
    return ExpertInputs(
        *map(tokens, inputs[:3]),
        parts(inputs.wi, -1, -2),
        jax.tree.map(lambda a: spec_of([experts, hidden]), inputs.wi_bias),
        parts(inputs.wo, 1, -1),
        jax.tree.map(by_expert, inputs.wo_bias),
        jax.tree.map(state, inputs.metas, is_leaf=is_meta),
    )


def _from_zeros(parts: Parts) -> Parts:
    return tuple(part._replace(onto=part.onto and tuple(map(from_zero, part.onto))) for part in parts)


def _run_part(run: ExpertRun, inputs: ExpertInputs) -> tuple[jax.Array, jax.Array | None]:
    """y of the device's tokens, and i32[E] of its experts' pairs that found no place; None where it has all experts."""
    placement, (*lead, width) = run.placement, inputs.h.shape
    flat = lambda a: a.reshape(-1, a.shape[-1])
    h, weights, experts = map(flat, inputs[:3])
    exchange = sent = lost = None
    if placement.experts:
        held = arrays_of(inputs.wi)[0].shape[0]
        exchange = find_exchange(placement, run.options.exchange, *h.shape, experts.shape[-1], held)
        sent = plan(experts, exchange)
        others = tuple(a for a in placement.token_axes if a not in exchange.axes)
        lost = lax.psum(sent.dropped, others) if others else sent.dropped
    if inputs.wo_bias is not None and placement.hidden:  # once, not with each part of F
        is_first = lax.axis_index(placement.hidden) == 0
        inputs = inputs._replace(wo_bias=jnp.where(is_first, inputs.wo_bias, 0))
    y = _run_experts_on(run, inputs._replace(h=h, weights=weights, experts=experts), exchange, sent)
    if placement.summed:
        y = lax.psum(y.astype(jnp.float32), placement.summed).astype(y.dtype)
    return y.reshape(*lead, width), lost


def _run_experts_on(run: ExpertRun, inputs: ExpertInputs, exchange: Exchange | None, sent) -> jax.Array:
    """y of tokens [*B, H]; with an exchange [T, H], of the experts of this device among others."""
    if exchange is None:
        groups = group(inputs.experts, arrays_of(inputs.wi)[0].shape[0])
    else:
        groups, sent = group_sent(sent, exchange)
        sent = with_names(sent, STATISTICS)
    routed = Routed(with_names(groups, STATISTICS), sent)
    experts = _in_type_of_x if run.recipe is None else _in_fp8
    return experts(run, inputs, routed, exchange)


def _in_type_of_x(run: ExpertRun, inputs: ExpertInputs, routed: Routed, exchange) -> jax.Array:
    """The MLPs in h's type: jax differentiates grouped products. Behind the last group nothing is added up."""
    (groups, sent), options, h, weights = routed, run.options, inputs.h, inputs.weights
    # Over the axes that split kernels, gradients are then added up of tokens, not of rows.
    h, weights, sent, _ = align(h, weights, sent, arrays_of(inputs.wi))
    if exchange is not None:
        h, weights = (dispatch_tokens(a, sent, exchange) for a in (h, weights))

    def product(rows, kernel, bias):
        kernel = kernel.astype(h.dtype)
        return gemm_grouped(rows, kernel, groups.offsets, groups.counts, bias=bias, k_first=True)

    kernels, rows = arrays_of(inputs.wi), permute(h, groups)
    # One product for each slot: to stack the kernels would copy them in each pass.
    slots = [product(rows, *each) for each in zip(kernels, inputs.wi_bias or (None,) * len(kernels))]
    slots = [with_names(z, run.middle_name) for z in slots]
    a = act_op.activation_of_slots(slots, options.activations, options.activation_params)
    (wo,) = arrays_of(inputs.wo)
    if exchange is not None and exchange.pieces > 1:
        *operands, groups, sent = align(a, weights, wo, inputs.wo_bias, groups, sent)
        return out_in_pieces(OutOperands(*operands), (groups, sent), exchange)
    y = combine(product(a, wo, inputs.wo_bias), groups, weights)
    return y if exchange is None else collect_tokens(*align(y, sent), exchange)


def _in_fp8(run: ExpertRun, inputs: ExpertInputs, routed: Routed, exchange) -> jax.Array:
    h, weights, _, wi, wi_bias, wo, wo_bias, metas = inputs
    wi_bias = None if wi_bias is None else jnp.stack(wi_bias, 1)
    typeof, rows = partial(jax.tree.map, jax.typeof), routed.groups.slots.shape[0]
    middle = ShapedArray((rows, wi[0].wide[0].shape[-1]), h.dtype)
    expert_axes = frozenset(exchange.expert_axes if exchange else ())
    config = partial(Config, run.recipe, 1, checkpoint=run.checkpoint, stage_axes=stage_axes(), expert_axes=expert_axes)
    on_mesh = jax.sharding.get_abstract_mesh().size > 1
    first = config(jax.typeof(h), typeof(wi[0].wide[0]), typeof(wi_bias), on_mesh=on_mesh)
    second = config(middle, typeof(wo[0].wide[0]), typeof(wo_bias), on_mesh=on_mesh)
    act = tuple(act_op.attributes(run.options.activations, run.options.activation_params).items())
    slots = tuple(len(part.wide) for part in wi)
    static = ExpertStatic(first, second, slots, act, run.middle_name, exchange)
    if exchange is not None and not run.options.drops_nothing:
        h = jnp.where(_has_row(inputs.experts, routed.sent, exchange)[:, None], h, 0)  # others enter no amax
    h, weights, routed, wi, wo, wi_bias, wo_bias = align(h, weights, routed, wi, wo, wi_bias, wo_bias)
    both = map(Projection, (wi, wo), (wi_bias, wo_bias), (m or fp8.STATELESS for m in metas or (None, None)))
    return run_experts(ExpertOperands(h, weights, *both), routed, static)


def _has_row(experts, sent, exchange: Exchange) -> jax.Array:
    """bool[T]: whether a token may have a row on any device."""
    if sent.places is not None:
        return jnp.any(sent.places >= 0, -1)
    return jnp.any((experts >= 0) & (experts < exchange.all_experts), -1)
