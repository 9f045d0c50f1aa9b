"""A mixture of experts, in FP8 where a recipe is given: a router sends each token to k of E MLPs, and their results
are added up."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import max_dim
from jax.sharding import PartitionSpec

from te_jax.core.arrays import as_jax, as_rank
from te_jax.core.check import BOOL, FLOATS_ARRAY, NONE, STRING, Kind, KnownFields, check, number
from te_jax.core.derivatives import custom_vjp
from te_jax.core.policies import GEMM, STATISTICS, with_names
from te_jax.core.products import product
from te_jax.core.types import align, like, varying_axes
from te_jax.layers._specs import dense_spec
from te_jax.layers.experts.devices import (
    EXCHANGE,
    ExpertExchange,
    ceil_times,
    devices_inside_shard_map,
    find_placement,
)
from te_jax.layers.experts.run import ExpertInputs, ExpertRun, run_on_devices
from te_jax.layers.experts.weights import ExpertKernel, Parts, arrays_of, hidden_block, resolve_experts
from te_jax.layers.linear import check_recipe_and_metas, check_residual, warn_of_bf16_products
from te_jax.layers.norm_mlp import check_metas_of_two, split_residual
from te_jax.ops.experts.permute import group
from te_jax.ops.experts.router import ROUTER_OPTIONS, RouterOptions, Routing, load_balancing_loss, route, z_loss
from te_jax.ops.gemm.dense import dot
from te_jax.ops.quantize import activation as act_op
from te_jax.ops.quantize import norm as norm_op
from te_jax.ops.quantize.array import FLOAT
from te_jax.recipe import Recipe
from te_jax.sharding.constraints import check_spec
from te_jax.sharding.resource import current_mesh_resource, stage_axes
from te_jax.state import fp8


@dataclass(frozen=True)
class MoEOptions(KnownFields):
    """How a mixture of experts works.

    router:            how experts are chosen and weighed.
    activations, activation_params: as of `layernorm_mlp`: each expert computes act(x . wi) . wo.
    capacity_factor:   None: no token is dropped. Else an expert takes the first ceil(capacity_factor T k / E) pairs of
                       a token and a choice, in their order, of T tokens in the call; the others get no row, and add
                       nothing to y.
    per_sequence_loss: the balancing loss is the mean of each sequence's own, x being [..., S, H]; else all tokens of
                       the call are one batch.
    exchange:          how tokens reach the devices of their experts, where a mesh axis divides the experts.

    Raises ValueError (TypeError for a wrong type) that names the field, its value and what is allowed.
    """

    router: RouterOptions
    activations: Sequence[str] = ("silu", "linear")
    activation_params: Mapping[str, Any] | None = field(default=None, hash=False)
    capacity_factor: float | None = None
    per_sequence_loss: bool = False
    exchange: ExpertExchange = ExpertExchange()
    weights_first: bool = False

    def __post_init__(self) -> None:
        name = type(self).__name__
        for what, kind in (
            ("router", ROUTER_OPTIONS),
            ("activations", act_op.ACTIVATIONS),
            ("capacity_factor", NONE | number(above=0)),
            ("per_sequence_loss", BOOL),
            ("exchange", EXCHANGE),
            ("weights_first", BOOL),
        ):
            check(name, what, getattr(self, what), kind)
        if self.weights_first and self.router.topk != 1:
            raise ValueError(
                f"{name}: weights_first is True, but a token has topk={self.router.topk} experts; pass 1, or False."
            )
        object.__setattr__(self, "activations", tuple(self.activations))
        act_op.check_params(name, "activation_params", self.activations, self.activation_params)

    @property
    def drops_nothing(self) -> bool:
        """Whether each pair of a token and an expert has a row."""
        bounds = self.capacity_factor, self.exchange.block_factor, self.exchange.rows_factor
        return all(bound is None for bound in bounds)


OPTIONS = Kind("a MoEOptions", lambda value: isinstance(value, MoEOptions))


class MoEAux(NamedTuple):
    """What a mixture of experts returns with y. The losses are as of `te_jax.ops.router`, without coefficients."""

    balancing_loss: jax.Array  # f32[]; under an expert_bias, of the choice that is made without it
    z_loss: jax.Array  # f32[]
    counts: jax.Array  # i32[E], the pairs of a token and a choice of each expert, dropped ones too
    dropped: jax.Array  # i32[E], the pairs beyond the expert's capacity, and those that found no place in an exchange


def moe(
    x: jax.Array,
    gate_kernel: jax.Array,
    wi: ExpertKernel,
    wo: ExpertKernel,
    wi_bias: jax.Array | tuple[jax.Array, ...] | None = None,
    wo_bias: jax.Array | None = None,
    *,
    options: MoEOptions,
    gate_bias: jax.Array | None = None,
    router_input: jax.Array | None = None,
    expert_bias: jax.Array | None = None,
    expert_scale: jax.Array | None = None,
    gamma: jax.Array | None = None,
    beta: jax.Array | None = None,
    norm: str = "layernorm",
    zero_centered_gamma: bool = False,
    epsilon: float = 1e-6,
    residual: bool | jax.Array = False,
    recipe: Recipe | None = None,
    metas: tuple[fp8.DenseMetas, fp8.DenseMetas] | None = None,
    checkpoint: str | None = None,
    middle_name: str | None = None,
    token_spec: PartitionSpec | None = None,
    name: str = "te_jax.layers.moe",
) -> tuple[jax.Array, MoEAux]:
    """y[*B, H] = sum over the k experts e of a token of weight_e (act(h . wi_e + wi_bias_e) . wo_e + wo_bias_e), where
    h = norm(x), or x without gamma; and a MoEAux.

    x:           f32, bf16 or f16 [*B, H]; its T tokens are one batch for the capacity and the losses.
    gate_kernel: [H, E], cast to x's type; the logits h . gate_kernel + gate_bias are f32. gate_bias: [E], of any
                 floating type; None is 0.
    router_input: f32, bf16 or f16 [*B, G], what the router reads instead of h; gate_kernel is [G, E] then.
    wi:          a tuple of A arrays [E, H, F], one for each of `options.activations` in the order of
                 `te_jax.ops.activation.slots`, as (wi_0, wi_1) of gated ones; an array where A is 1. Quantized from
                 their own type; without a recipe cast to x's. Or what `quantize_experts` makes of them. Or
                 QuantizedKernels [E, H, F] that have scales of their own: each is multiplied by itself.
    wo:          [E, F, H]; likewise.
    wi_bias:     a tuple of arrays [E, F], or an array, as wi. wo_bias: [E, H].
    expert_bias: f32[E], added to the scores only for the choice (`route`). It has no gradient: its cotangent is
                 the counts of tokens, which autodiff adds up over microbatches and devices, for `updated_expert_bias`.
    expert_scale: [E], of any floating type: what expert e gives is multiplied by its element e, too; None is 1.
    gamma, beta, norm, zero_centered_gamma, epsilon: as of `layernorm`; [H].
    residual:    True: x is added to y. Or an array of y's shape and type.
    recipe:      None for products in x's type, else a recipe. Where it scales whole tensors, h and the gradient of y
                 have one scale each; the weights (the A arrays of an expert together), the activation and the gradient
                 of its input one for each expert. The router is never in FP8. MXFP8 operands are multiplied as bf16,
                 which holds them exactly: a warning says so once.
    metas:       of wi and wo under a recipe with state: `fp8.DenseMetas` whose x (wi), grad (wo) are f32[] and whose
                 kernel, grad (wi), x, kernel (wo) are f32[E]. An expert without tokens has amax 0 of its
                 activation and of the gradient, by which the law of the recipe changes no state.
    checkpoint, name: as of `dense`. middle_name: of the activation's input, for `jax.checkpoint` policies.

    Differentiable by all floating operands. The norm and the router stand before the custom_vjp of the experts, and
    jax differentiates them: the router reads h in x's type, so h is written and kept in any case. Routing is named
    STATISTICS, so that a policy does not run it again.

    On several devices experts are divided by the mesh axes that split E of wi on an Explicit mesh, or by the
    `ep_resource` of the MeshResource in force (`te_jax.sharding`) on others. Each device then runs its tokens and its
    experts inside `jax.shard_map`, F split over the axes of tensor parallelism, and tokens go to the devices of their
    experts as `options.exchange` says, in FP8 under a recipe; y, counts and losses are as on one device. So it is
    inside the user's own `jax.shard_map` over other axes, as of pp_resource; there policies of `jax.checkpoint` keep
    nothing of the experts, which run again. Inside the user's own `jax.shard_map` over ep_resource, wi, wo and biases
    hold the device's experts. Inside any of the user's own, MoEAux is of the tokens of all devices along the mesh axes
    over which x varies, but pp_resource, and the same on them; the capacity is of the device's own tokens. With
    check_vma=False, which hides those axes, MoEAux is of the device's own tokens, too. Where nothing divides experts,
    but Auto axes of the MeshResource split tokens, each device has all experts and a buffer of its own tokens' rows. On
    Explicit meshes without divided experts the buffer of rows is whole on every device but for F and H.

    token_spec:  on Auto mesh axes, how x is split; None: by dp_resource, fsdp_resource and ep_resource along its first
                 axis.

    Raises ValueError for sizes, and under a recipe for activations that `is_fused` does not know; TypeError for types
    that do not match.
    """
    x, gate_kernel, gate_bias, gamma, beta = as_jax(x, gate_kernel, gate_bias, gamma, beta)
    expert_bias, residual, router_input, expert_scale = as_jax(expert_bias, residual, router_input, expert_scale)
    wi, wo = resolve_experts(name, "wi", wi, recipe), resolve_experts(name, "wo", wo, recipe)
    wi_bias = as_jax(*wi_bias) if isinstance(wi_bias, tuple | list) else None if wi_bias is None else as_jax(wi_bias)
    (wo_bias,) = as_jax(wo_bias)
    check_mixture(name, x, (gate_kernel, gate_bias, router_input), wi, wo, wi_bias, wo_bias, options)
    _check_recipe(name, recipe, metas, options)
    experts, block = gate_kernel.shape[-1], hidden_block((*wi, *wo), recipe)
    check_spec(name, "token_spec", token_spec, x.ndim, free=False)
    placement = find_placement(name, x, arrays_of(wi)[0], experts, token_spec, block)
    for what, text in (("checkpoint", checkpoint), ("middle_name", middle_name)):
        check(name, what, text, NONE | STRING)
    check(name, "expert_bias", expert_bias, NONE | FLOATS_ARRAY)
    norm_op.check_norm_options(name, norm, epsilon, zero_centered_gamma)
    through, added = split_residual(residual)
    check_residual(name, x if through else added, x.shape, x.dtype)
    of_norm = dict(kind=norm, zero_centered=zero_centered_gamma, eps=epsilon, name=name)
    h, x = _norm_first(x, gamma, beta, through, of_norm)
    batch = _axes_of_batch(h)
    read = h if router_input is None else router_input
    routing, aux = _routing(read, gate_kernel, gate_bias, expert_bias, options, batch)
    weights = routing.weights
    if options.weights_first:  # a token has one expert, whose weight multiplies its inputs
        h, weights = (h.astype(jnp.float32) * weights).astype(h.dtype), jnp.ones_like(weights)
    weights = _scaled_weights(name, weights, routing.experts, expert_scale, experts)
    run = ExpertRun(options, recipe, checkpoint, middle_name, placement)
    y, lost = run_on_devices(run, ExpertInputs(h, weights, routing.experts, wi, wi_bias, wo, wo_bias, metas))
    if lost is not None:  # of all devices along the axes of experts
        aux = aux._replace(dropped=aux.dropped + _shared_over(lax.psum, lost, batch - {*placement.experts}))
    y = like(y, h)  # tokens keep their place: rows are split as wo is
    y = y if expert_bias is None else _with_counts(*align(y, expert_bias, routing.counts))
    added = x if through else added
    return y if added is None else y + added, aux


def _scaled_weights(
    name: str, weights: jax.Array, chosen: jax.Array, scale: jax.Array | None, experts: int
) -> jax.Array:
    """f32[*B, k], the weights of the chosen, times `scale` [E]. Raises ValueError or TypeError for another one."""
    if scale is None:
        return weights
    check(name, "expert_scale", scale, FLOAT)
    if scale.shape != (experts,):
        raise ValueError(f"{name}: expert_scale has the shape {scale.shape}; pass {(experts,)}.")
    weights, chosen, scale = align(weights, chosen, scale)
    of_expert = lambda a: as_rank(a, chosen.ndim + 1)
    is_expert = chosen[..., None] == of_expert(jnp.arange(experts, dtype=chosen.dtype))
    # Not a gather, which Explicit axes refuse.
    return weights * jnp.sum(jnp.where(is_expert, of_expert(scale.astype(jnp.float32)), 0), -1)


def _norm_first(x, gamma, beta, through: bool, of_norm: dict[str, Any]):
    """(norm(x), x), without gamma (x, x). through: x's gradient joins the norm's, in its kernel."""
    if gamma is None and beta is not None:
        raise ValueError(f"{of_norm['name']}: beta is given without gamma; pass both, or neither.")
    if gamma is None:
        return x, x
    return (
        norm_op.norm_and_input(x, gamma, beta, **of_norm) if through else (norm_op.norm(x, gamma, beta, **of_norm), x)
    )


def check_mixture(
    name: str, x: Any, gate: tuple[Any, Any, Any], wi: Parts, wo: Parts, wi_bias: Any, wo_bias: Any, options: Any
) -> None:
    """Raises ValueError or TypeError, naming the layer, for operands that make no mixture of experts. gate: the kernel
    and the bias of the router, and what it reads; None: x."""
    gate_kernel, gate_bias, router_input = gate
    check(name, "options", options, OPTIONS)
    first, (second, *more) = arrays_of(wi), arrays_of(wo)
    check(name, "x", x, FLOAT)
    check(name, "gate_kernel", gate_kernel, FLOAT)
    count = len(options.activations)
    if len(first) != count or more:
        what, have, need = ("wo", 1 + len(more), 1) if more else ("wi", len(first), count)
        raise ValueError(
            f"{name}: {what} is {have} arrays, but options.activations is {options.activations}; pass {need}, one for "
            "each slot that reads it."
        )
    experts, width, hidden = first[0].shape
    routed = experts * devices_inside_shard_map()  # gate_kernel has the experts of all devices
    if wi_bias is not None and len(wi_bias) != count:
        raise ValueError(f"{name}: wi_bias is {len(wi_bias)} arrays; pass {count}, one for each of wi.")
    of_router = width if router_input is None else _router_width(name, router_input, x)
    shapes = [("gate_kernel", gate_kernel, (of_router, routed)), ("wo", second, (experts, hidden, width))]
    shapes += [("wi_bias", bias, (experts, hidden)) for bias in wi_bias or ()]
    shapes += [] if gate_bias is None else [("gate_bias", gate_bias, (routed,))]
    shapes += [] if wo_bias is None else [("wo_bias", wo_bias, (experts, width))]
    for what, a, shape in shapes:
        check(name, what, a, FLOAT)
        if a.shape != shape:
            raise ValueError(f"{name}: {what} has the shape {a.shape}, but wi {first[0].shape}; pass {shape}.")
    if x.ndim < 2 or x.shape[-1] != width:
        raise ValueError(f"{name}: x has the shape {x.shape}, but wi {first[0].shape}; pass [..., T, {width}].")
    options.router.check_experts(routed)


def _router_width(name, router_input, x) -> int:
    """G. Raises ValueError or TypeError unless the router reads a token for each of x."""
    check(name, "router_input", router_input, FLOAT)
    if router_input.shape[:-1] != x.shape[:-1]:
        raise ValueError(
            f"{name}: router_input has the shape {router_input.shape}, but x {x.shape}; pass {(*x.shape[:-1], 'G')}."
        )
    return router_input.shape[-1]


def _check_recipe(name, recipe, metas, options):
    """Raises ValueError or TypeError, naming the layer, unless recipe and metas serve the layer."""
    check_metas_of_two(name, recipe, metas)
    for at, each in enumerate(metas or (None, None)):
        check_recipe_and_metas(name, recipe, each, f"metas[{at}]")
    if recipe is None:
        return
    if not act_op.is_fused(options.activations):
        raise ValueError(
            f"{name}: options.activations is {options.activations}, whose gradient has no op that quantizes it; pass "
            "activations that te_jax.ops.activation.is_fused knows, or recipe=None."
        )
    warn_of_bf16_products(name, recipe)


# ---- the router ------------------------------------------------------------------------------------------------------


def _axes_of_batch(h) -> frozenset[str]:
    """The manual mesh axes along which devices have other tokens of one batch: not stages, which have other layers."""
    return varying_axes(h) - stage_axes()


def _shared_over(collective, a, axes: frozenset[str]):
    return collective(a, tuple(sorted(axes))) if axes else a


def _routing(
    h, gate_kernel, gate_bias, expert_bias, options: MoEOptions, batch: frozenset[str]
) -> tuple[Routing, MoEAux]:
    """The routing of the tokens here, in which pairs beyond the capacity have the expert E; and the MoEAux of the
    tokens of all devices along the mesh axes `batch`."""
    precision = lax.Precision.HIGHEST if h.dtype == jnp.float32 else None  # not TF32, since the logits decide
    h, gate_kernel, gate_bias, expert_bias = align(h, gate_kernel, gate_bias, expert_bias)
    axes = (h.ndim - 1,), gate_kernel, (0,)
    spec = dense_spec(jax.typeof(h), jax.typeof(gate_kernel), 1)
    logits = with_names(product("router")(dot)(h, *axes, jnp.float32, precision, spec), GEMM)
    logits = logits if gate_bias is None else logits + as_rank(gate_bias.astype(jnp.float32), logits.ndim)
    routing = with_names(route(logits, options.router, expert_bias=expert_bias), STATISTICS)
    unbiased = routing if expert_bias is None else route(logits, options.router)
    one_mean = batch
    if options.per_sequence_loss:
        resource = current_mesh_resource()
        one_mean = batch & (set() if resource is None else {resource.cp_resource, resource.tpsp_resource})
    of_loss = dict(per_sequence=options.per_sequence_loss, across=tuple(sorted(one_mean)))
    balancing = load_balancing_loss(logits, unbiased.experts, options.router, **of_loss)
    losses = _shared_over(lax.pmean, balancing, batch - one_mean), _shared_over(lax.pmean, z_loss(logits), batch)
    experts, dropped = routing.experts, jnp.zeros_like(routing.counts)
    if options.capacity_factor is not None:
        num_experts = logits.shape[-1]
        capacity = max_dim(1, ceil_times(options.capacity_factor, experts.size, num_experts))
        groups = group(experts, num_experts)
        of_expert = lambda a: as_rank(a, experts.ndim + 1)
        is_expert = experts[..., None] == of_expert(jnp.arange(num_experts, dtype=experts.dtype))
        # Not a gather, which Explicit axes refuse.
        place = groups.rows - jnp.sum(jnp.where(is_expert, of_expert(groups.offsets[:-1]), 0), -1)
        experts = jnp.where(place < capacity, experts, num_experts)
        dropped = jnp.maximum(routing.counts - capacity, 0)
    counts, dropped = (_shared_over(lax.psum, a, batch) for a in (routing.counts, dropped))
    return routing._replace(experts=experts), MoEAux(*losses, counts, dropped)


@custom_vjp()
def _with_counts(y, expert_bias, counts):
    """y, whose backward pass has the counts of the experts for the cotangent of their bias."""
    return y


_with_counts.defvjp(
    lambda y, expert_bias, counts: (y, (expert_bias, counts)),
    lambda kept, dy: (dy, like(kept[1].astype(jnp.float32), kept[0]), None),
)
