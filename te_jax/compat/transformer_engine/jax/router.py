"""`transformer_engine.jax.router`: te_jax's router, with a column for each expert in its results."""

from enum import Enum
from typing import Any

import jax
import jax.numpy as jnp

from te_jax.compat._absent import GetAttr, absent
from te_jax.ops.experts.router import RouterOptions, route

__getattr__: GetAttr = absent("transformer_engine.jax.router")


class ScoreFunction(Enum):
    """`score_function` of `te_jax.ops.router.RouterOptions`."""

    SIGMOID = "sigmoid"
    SOFTMAX = "softmax"


class RoutingMapFormat(Enum):
    """How a routing map is stored. te_jax gives BYTEMAP, a bool for each token and expert."""

    BYTEMAP = "bytemap"
    BITMAP_U8 = "bitmap_u8"


def _member(name: str, cls: type[Enum], given: Enum | str) -> Any:
    """The member of `cls` that the argument `name` gives, or names by a string in any case."""
    try:
        return cls(given.lower() if isinstance(given, str) else given)
    except ValueError:
        known = ", ".join(member.name for member in cls)
        raise ValueError(
            f"fused_topk_with_score_function: {name} is {given!r}; pass {cls.__name__}, one of {known}."
        ) from None


def fused_topk_with_score_function(
    logits: jax.Array,
    topk: int,
    use_pre_softmax: bool = False,
    num_groups: int = -1,
    group_topk: int = -1,
    scaling_factor: float = 1.0,
    score_function: ScoreFunction | str = ScoreFunction.SOFTMAX,
    expert_bias: jax.Array | None = None,
    compute_aux_scores: bool = False,
    routing_map_format: RoutingMapFormat | str = RoutingMapFormat.BYTEMAP,
) -> tuple[jax.Array, jax.Array]:
    """`te_jax.ops.router.route` of logits [T, E]: the weights of the chosen experts and 0 elsewhere, [T, E] of the type
    of logits, and bool[T, E], True where an expert is chosen.

    num_groups, group_topk: 0 and less: no groups.

    Raises ValueError for compute_aux_scores and for other formats than BYTEMAP, and what `route` raises.
    """
    where = "fused_topk_with_score_function"
    if compute_aux_scores:
        raise ValueError(
            f"{where}: compute_aux_scores is True, which te_jax has not; give the logits to "
            "te_jax.ops.router.load_balancing_loss."
        )
    if _member("routing_map_format", RoutingMapFormat, routing_map_format) is not RoutingMapFormat.BYTEMAP:
        raise ValueError(f"{where}: routing_map_format is {routing_map_format!r}; te_jax has only BYTEMAP.")
    options = RouterOptions(
        topk=topk,
        score_function=_member("score_function", ScoreFunction, score_function).value,
        use_pre_softmax=use_pre_softmax,
        scaling_factor=scaling_factor,
        num_groups=max(1, num_groups),
        group_topk=group_topk if group_topk > 0 else None,
    )
    routing = route(logits, options, expert_bias=expert_bias)
    chosen = routing.experts[..., None] == jnp.arange(logits.shape[-1])  # [T, k, E]
    weights = jnp.sum(jnp.where(chosen, routing.weights[..., None], 0.0), -2)
    return weights.astype(logits.dtype), jnp.any(chosen, -2)
