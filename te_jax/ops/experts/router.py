"""Routers of mixtures of experts: the experts that a token goes to, their weights, and what keeps their loads even."""

from dataclasses import dataclass
from functools import partial
from math import exp, log, prod
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import max_dim, min_dim

from te_jax.core.arrays import as_jax, as_rank
from te_jax.core.check import (
    ARRAY,
    BOOL,
    FLOATS_ARRAY,
    INTEGERS,
    NONE,
    Kind,
    KnownFields,
    check,
    integer,
    number,
    one_of,
)
from te_jax.core.derivatives import custom_vjp
from te_jax.core.op import Op
from te_jax.core.types import align, like

_ROUTER = "te_jax.ops.router"
SCORE_FUNCTIONS = ("softmax", "sigmoid", "sqrt_softplus")
_SCORE_FUNCTION = one_of(*SCORE_FUNCTIONS)
_STEP_OF_BIAS = number(least=0) | Kind("a scalar array", ARRAY.is_type, lambda value: jnp.shape(value) == ())


@dataclass(frozen=True)
class RouterOptions(KnownFields):
    """How a router chooses experts and weighs them.

    topk:            k, the experts of a token.
    score_function:  "softmax": a token's scores are the softmax of its logits; "sigmoid": each logit's sigmoid;
                     "sqrt_softplus": sqrt(log(1 + e^logit)), as in DeepSeek-V4. On GPUs the last is plain JAX too; the
                     others have a kernel.
    use_pre_softmax: with "softmax": True takes it over all experts, before the choice; False over the k chosen ones,
                     whose weights then add up to 1. The others make no use of it.
    normalize:       divides the weights of a token by their sum, or by 1e-20 where that is less. None: where k > 1,
                     but not with "softmax" (Liu et al. 2024, https://arxiv.org/abs/2412.19437, section 2.1.2).
    scaling_factor:  multiplies the weights at the end.
    num_groups:      G, neighbouring experts form G groups of equal size (the experts of one node, say).
    group_topk:      a token's experts are of the `group_topk` groups with the largest sums of their
                     max(1, k // group_topk) largest scores (the same section); None: of all groups.

    Raises ValueError (TypeError for a wrong type) that names the field, its value and what is allowed.
    """

    topk: int
    score_function: str = "softmax"
    use_pre_softmax: bool = False
    normalize: bool | None = None
    scaling_factor: float = 1.0
    num_groups: int = 1
    group_topk: int | None = None

    def __post_init__(self) -> None:
        name = type(self).__name__
        for field, kind in (
            ("topk", integer(1)),
            ("score_function", _SCORE_FUNCTION),
            ("use_pre_softmax", BOOL),
            ("normalize", NONE | BOOL),
            ("scaling_factor", number()),
            ("num_groups", integer(1)),
            ("group_topk", NONE | integer(1, self.num_groups if integer(1).accepts(self.num_groups) else None)),
        ):
            check(name, field, getattr(self, field), kind)

    @property
    def normalizes(self) -> bool:
        """Whether the weights of a token are divided by their sum."""
        return self.score_function != "softmax" and self.topk > 1 if self.normalize is None else self.normalize

    @property
    def scores_first(self) -> bool:
        """Whether the choice is made by scores; else it is made by logits, and the chosen ones' softmax follows."""
        return self.score_function != "softmax" or self.use_pre_softmax

    def check_experts(self, num_experts: int) -> None:
        """Raises ValueError unless a choice among `num_experts` experts is possible."""
        if (text := self.why_not(num_experts)) is not None:
            raise ValueError(f"{type(self).__name__}: {text}.")

    def why_not(self, num_experts: int, topk: str = "topk") -> str | None:
        """Why no choice among `num_experts` experts is possible; None: it is. topk: what the user calls that field."""
        if num_experts % self.num_groups:
            return f"num_groups is {self.num_groups}, which does not divide {num_experts} experts; pass a divisor"
        if self.topk > (most := num_experts // self.num_groups * (self.group_topk or self.num_groups)):
            among = f"a token chooses among {most} of {num_experts} experts"
            return f"{topk} is {self.topk}, but {among}; pass at most {most}"
        return None


class Routing(NamedTuple):
    """What a router says of T tokens and E experts."""

    weights: jax.Array  # f32[..., T, k], the largest choice first
    experts: jax.Array  # i32[..., T, k]
    counts: jax.Array  # i32[E], the pairs (token, choice) of each expert


ROUTER_OPTIONS = Kind("a RouterOptions", lambda value: isinstance(value, RouterOptions))


def route(logits: jax.Array, options: RouterOptions, *, expert_bias: jax.Array | None = None) -> Routing:
    """The k experts of every token, in the order of their scores, and their weights; differentiable in the logits.

    logits:      floating [..., T, E], computed with in f32.
    expert_bias: floating [E], added to the scores where experts are chosen, and not where they are weighed
                 (Wang et al. 2024, https://arxiv.org/abs/2408.15664). It has no gradient: see `updated_expert_bias`.

    Of equal scores the expert with the lower index is chosen. A token with a NaN among its logits, or whose softmax has
    none for the infinities among them, still gets k experts, and its weights are NaN.
    Raises ValueError or TypeError for arguments that do not fit.
    """
    logits = _check_logits(logits)
    check(_ROUTER, "options", options, ROUTER_OPTIONS)
    options.check_experts(num_experts := logits.shape[-1])
    if expert_bias is not None:
        (expert_bias,) = as_jax(expert_bias)
        check(_ROUTER, "expert_bias", expert_bias, FLOATS_ARRAY)
        if expert_bias.shape != (num_experts,):
            raise ValueError(
                f"{_ROUTER}: expert_bias has shape {expert_bias.shape}, logits {logits.shape}; pass [{num_experts}]."
            )
        expert_bias = lax.stop_gradient(expert_bias.astype(jnp.float32))
    return Routing(*_route(*align(logits, expert_bias), options))


def _check_logits(logits, least: int = 1):
    """logits [..., E] of at least `least` axes, in f32."""
    (logits,) = as_jax(logits)
    check(_ROUTER, "logits", logits, FLOATS_ARRAY)
    if logits.ndim < least:
        raise ValueError(f"{_ROUTER}: logits has shape {logits.shape}; pass [..., T, E].")
    return logits.astype(jnp.float32)


# ---- the meaning, in plain JAX ---------------------------------------------------------------------


_SMALL_LOGIT = -18.0  # below it log(1 + e^x) is e^x, and its root e^(x/2), in f32


def _sqrt_softplus(logits):
    """Its derivative would be 0 / 0 where e^x has no f32, so that small logits go another way."""
    is_small = logits < _SMALL_LOGIT
    root = jnp.sqrt(jax.nn.softplus(jnp.where(is_small, 0.0, logits)))
    return jnp.where(is_small, jnp.exp(jnp.where(is_small, logits, 0.0) / 2), root)


# Of each function: scores [..., E] of logits, and the logarithms of small scores; a sigmoid below 1e-10 is e^logit.
_FUNCTIONS = {
    "softmax": (partial(jax.nn.softmax, axis=-1), partial(jax.nn.log_softmax, axis=-1)),
    "sigmoid": (jax.nn.sigmoid, lambda logits: logits),
    "sqrt_softplus": (_sqrt_softplus, lambda logits: logits / 2),
}


def _scores(logits, options: RouterOptions):
    return _FUNCTIONS[options.score_function][0](logits) if options.scores_first else logits


_LEAST_SUM, _SMALL_SUM, _LARGER = 1e-20, 1e-10, 46.0  # csrc/experts/router.cu


def _over_sum(scores, logs):
    """scores [..., n] over their sum, or over 1e-20 where that is less. logs: the logarithms of small scores.

    A derivative divides by the sum's square, which for a sum of 1e-20 is 0 in f32. So scores with a small sum are taken
    times e**46, and 1e-20 with them. They come from their logarithms: e**-100 has no f32, and over 1e-20 it has one.
    """
    is_small = jnp.sum(scores, -1, keepdims=True) < _SMALL_SUM
    larger = jnp.exp(jnp.minimum(logs, log(_SMALL_SUM)) + _LARGER)  # finite where it is not read, too
    scores = jnp.where(is_small, larger, scores)
    least = jnp.where(is_small, _LEAST_SUM * exp(_LARGER), _LEAST_SUM)
    return scores / jnp.maximum(jnp.sum(scores, -1, keepdims=True), least)


def _weigh(logits, experts, options: RouterOptions):
    """f32[m..., k]: the weights of the chosen experts, differentiable in the logits f32[m..., e]."""
    picked = lambda each: jnp.take_along_axis(each, experts, -1)
    weights = picked(_scores(logits, options))
    if not options.scores_first:
        weights = jax.nn.softmax(weights, -1)  # which add up to 1
    elif options.normalizes:
        weights = _over_sum(weights, picked(_FUNCTIONS[options.score_function][1](logits)))
    return options.scaling_factor * weights


def _among_groups(choice, options: RouterOptions):
    """`choice` f32[m..., e], -inf outside of the best groups."""
    if options.group_topk in (None, options.num_groups):
        return choice
    *lead, experts = choice.shape
    groups = choice.reshape(*lead, options.num_groups, experts // options.num_groups)
    best, _ = lax.top_k(groups, min(max(1, options.topk // options.group_topk), groups.shape[-1]))
    _, chosen = lax.top_k(jnp.sum(best, -1), options.group_topk)
    is_chosen = jnp.any(jax.nn.one_hot(chosen, options.num_groups, dtype=bool), -2)
    return jnp.where(is_chosen[..., None], groups, -jnp.inf).reshape(choice.shape)


def _choose(logits, expert_bias, options: RouterOptions):
    """i32[m..., k]: the experts with the largest scores."""
    choice = _scores(logits, options)
    choice = choice if expert_bias is None else choice + as_rank(expert_bias, choice.ndim)
    # A NaN is as low as -inf, and both are above what `_among_groups` hides. top_k puts -0 below 0.
    is_lowest = jnp.isnan(choice) | (choice == -jnp.inf)
    choice = jnp.where(is_lowest, jnp.finfo(choice.dtype).min, jnp.where(choice == 0, 0, choice))
    return lax.top_k(_among_groups(choice, options), options.topk)[1]


def _forward_reference(logits, expert_bias, **options):
    options = RouterOptions(**options)
    experts, num_experts = _choose(logits, expert_bias, options), logits.shape[-1]
    weights = _weigh(logits, experts, options)
    weights = jnp.where(jnp.any(jnp.isnan(logits), -1, keepdims=True), jnp.nan, weights)
    counts = jnp.zeros(num_experts, jnp.int32).at[experts.reshape(-1)].add(1)
    return weights, experts, counts


def _backward_reference(dweights, logits, experts, **options):
    _, transpose = jax.vjp(lambda logits: _weigh(logits, experts, RouterOptions(**options)), logits)
    return transpose(dweights)


# ---- the ops -------------------------------------------------------------------------------------

MOST_EXPERTS = 1024  # of the kernels of routers and of te_group: csrc/base/ops.h


def _cuda(reference, call, *operands, **options):
    kernel = RouterOptions(**options)
    experts = operands[1 if reference is _backward_reference else 0].shape[-1]
    if experts > MOST_EXPERTS or kernel.score_function == "sqrt_softplus":
        return reference(*operands, **options)
    return call(
        *operands,
        topk=kernel.topk,
        sigmoid=kernel.score_function == "sigmoid",
        scores_first=kernel.scores_first,
        normalizes=kernel.normalizes,
        scaling_factor=float(kernel.scaling_factor),
        num_groups=kernel.num_groups,
        group_topk=kernel.group_topk or kernel.num_groups,
    )


def _partial_counts(logits, *_, **attrs):
    """How many partial counts there are."""
    return (min_dim(max_dim(1, -(-prod(logits[:-1]) // 16)), 1024),)


router_fwd: Op = Op(
    "te_router_fwd",
    "logits: m... e, expert_bias?: e -> weights: m... k, experts: m... k, counts: e",
    replicated="e k",
    combine={"counts": "sum"},
    fenced="weights experts counts",
    sizes={"k": lambda topk, **_: topk},
    dtypes=lambda *_, **options: (jnp.float32, jnp.int32, jnp.int32),
    partials={"counts": _partial_counts},
    reference=_forward_reference,
    cuda=partial(_cuda, _forward_reference),
)
"""`route` of f32 logits; the attributes are the fields of `RouterOptions`."""

router_bwd: Op = Op(
    "te_router_bwd",
    "dweights: m... k, logits: m... e, experts: m... k -> dlogits: m... e",
    replicated="e k",
    dtypes=lambda *_, **options: (jnp.float32,),
    reference=_backward_reference,
    cuda=partial(_cuda, _backward_reference),
)
"""The gradient of the logits of `router_fwd` from the gradient of the weights."""


@custom_vjp(2)
def _route(logits, expert_bias, options: RouterOptions):
    return _route_fwd(logits, expert_bias, options)[0]


def _route_fwd(logits, expert_bias, options):
    weights, experts, counts = router_fwd(logits, expert_bias, **vars(options))
    return (weights, experts, counts), (logits, expert_bias, experts)


def _route_bwd(options, saved, cotangents):
    logits, expert_bias, experts = saved
    (dlogits,) = router_bwd(cotangents[0], logits, experts, **vars(options))
    return like(dlogits, logits), None if expert_bias is None else jnp.zeros_like(expert_bias)


_route.defvjp(_route_fwd, _route_bwd)


# ---- even loads ------------------------------------------------------------------------------------


def load_balancing_loss(
    logits: jax.Array,
    experts: jax.Array,
    options: RouterOptions,
    *,
    per_sequence: bool = False,
    across: tuple[str, ...] = (),
) -> jax.Array:
    """f32[]: E / (T k) * sum over experts of (pairs of a token and a choice) * (mean score), 1 for even loads.

    The loss of Fedus et al. 2021 (https://arxiv.org/abs/2101.03961, section 2.2) for k choices. The scores are the
    softmax of the logits, or the scores of other functions over their sum (Liu et al. 2024,
    https://arxiv.org/abs/2412.19437, section 2.1.2); the counts have no gradient.

    logits:       floating [..., T, E].
    experts:      integers [..., T, k], of `route`. Liu et al. count the choice that is made without a bias:
                  `route(logits, options).experts`.
    per_sequence: the mean of each sequence's own loss, T being the tokens of one; else all tokens are one batch.
    across:       inside `jax.shard_map`, mesh axes whose devices have other tokens of the batch, or of these sequences:
                  pairs and scores are means over their devices before they are multiplied.

    Without tokens it is 0; a NaN among the logits makes it NaN. Raises ValueError or TypeError for arguments
    that do not fit.
    """
    check(_ROUTER, "per_sequence", per_sequence, BOOL)
    logits = _check_logits(logits, 2 if per_sequence else 1)
    (experts,) = as_jax(experts)
    check(_ROUTER, "experts", experts, INTEGERS)
    if experts.shape != (*logits.shape[:-1], options.topk):
        raise ValueError(
            f"{_ROUTER}: experts has shape {experts.shape}, logits {logits.shape}; pass the experts of `route`, "
            f"{(*logits.shape[:-1], options.topk)}."
        )
    num_experts = logits.shape[-1]
    scores, logs = (of(logits) for of in _FUNCTIONS[options.score_function])
    if options.score_function != "softmax":
        scores = _over_sum(scores, logs)
    tokens = (logits.ndim - 2,) if per_sequence else tuple(range(logits.ndim - 1))
    chosen = jnp.sum(jax.nn.one_hot(experts, num_experts, dtype=jnp.float32), -2)
    means = (_mean(a, tokens) for a in (chosen, scores))
    pairs, score = (lax.pmean(mean, across) if across else mean for mean in means)
    each = jnp.sum(pairs * score, -1)
    return num_experts / options.topk * _mean(each, tuple(range(each.ndim)))


def _mean(x, axes):
    """The mean over `axes`, 0 of no elements."""
    return jnp.sum(x, axes) / max_dim(1, prod(x.shape[axis] for axis in axes))


def z_loss(logits: jax.Array) -> jax.Array:
    """f32[]: the mean over tokens of logsumexp(logits)**2, which keeps logits [..., T, E] small (Zoph et al. 2022,
    https://arxiv.org/abs/2202.08906, section 3.2). Without tokens it is 0; a NaN among the logits makes it NaN."""
    each = jax.nn.logsumexp(_check_logits(logits), -1) ** 2
    return _mean(each, tuple(range(each.ndim)))


def updated_expert_bias(expert_bias: jax.Array, counts: jax.Array, rate: float | jax.Array) -> jax.Array:
    """expert_bias [E] for the next step: `rate` more for each expert below the mean load, `rate` less for each above.

    counts: [E], of `Routing`, added up over all devices and microbatches of a step. Source: Wang et al. 2024
    (https://arxiv.org/abs/2408.15664), algorithm 1. rate: a number of at least 0 or f32[]. Raises ValueError where the
    shapes differ and for another rate, TypeError for what is no number or array.
    """
    check(_ROUTER, "rate", rate, _STEP_OF_BIAS)
    expert_bias, counts = as_jax(expert_bias, counts)
    for name, value in dict(expert_bias=expert_bias, counts=counts).items():
        check(_ROUTER, name, value, ARRAY)
    if jnp.shape(expert_bias) != jnp.shape(counts):
        raise ValueError(
            f"{_ROUTER}: counts has shape {jnp.shape(counts)}, expert_bias {jnp.shape(expert_bias)}; pass a count for "
            "each expert."
        )
    counts = jnp.asarray(counts, jnp.float32)
    return expert_bias + jnp.asarray(rate * jnp.sign(jnp.mean(counts) - counts), expert_bias.dtype)
