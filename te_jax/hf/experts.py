"""Words of experts that sigmoids and a bias choose, in groups, as DeepSeek-V3 and Nemotron-H have them."""

from collections.abc import Callable
from typing import Any

from te_jax.core.check import BOOL, NONE, Kind, number
from te_jax.hf import rules
from te_jax.hf.family import at_most, divides
from te_jax.hf.rules import TensorRule
from te_jax.hf.words import ABSENT, SIZE, Check, Said, Word
from te_jax.models import ModelConfig


def expert_word(
    name: str,
    field: str,
    default: Any,
    unset: Callable[[ModelConfig], Any] = lambda c: None,
    kind: Kind = SIZE,
    **more: Any,
) -> Word:
    """A word that becomes a field of experts. unset: its value where a model with experts does not have the field."""

    def theirs(c: ModelConfig) -> Any:
        moe = c.layer.get("moe")
        if not moe:
            return ABSENT
        return unset(c) if moe.get(field) is None else moe[field]

    return Word(name, kind, default, to=(f"layer/moe/{field}",), **dict(theirs=theirs) | more)


def _normalizes(said: Said) -> tuple[bool | None]:
    """None where it is what the field's None means."""
    normalizes = bool(said["norm_topk_prob"])
    return (None if normalizes == (said["num_experts_per_tok"] > 1) else normalizes,)


CHOSEN_BY_SIGMOIDS = (
    expert_word("n_routed_experts", "num_experts", 256, also=("num_local_experts",)),
    expert_word("num_experts_per_tok", "num_experts_per_tok", 8),
    expert_word("n_group", "num_groups", 8, lambda c: 1),
    expert_word("topk_group", "group_topk", 4, lambda c: c.layer["moe"].get("num_groups", 1)),
    expert_word("routed_scaling_factor", "scaling_factor", 2.5, lambda c: 1.0, number(above=0)),
    expert_word(
        "norm_topk_prob",
        "normalize_weights",
        True,
        lambda c: c.layer["moe"]["num_experts_per_tok"] > 1,
        NONE | BOOL,
        null=lambda said: False,
        ours=_normalizes,
    ),
)


def groups_fit(experts: str) -> tuple[Check, ...]:
    """A group is chosen by its two best experts. experts: the word of their number."""

    def check(said: Said) -> tuple[str, str] | None:
        topk, groups, chosen = said["num_experts_per_tok"], said["n_group"], said["topk_group"]
        if groups != chosen and topk // chosen != 2:
            return (
                "num_experts_per_tok",
                f"a group is chosen by its 2 best experts, so te_jax reads 2 x topk_group={chosen}",
            )
        if topk > chosen * (said[experts] // groups):
            return "num_experts_per_tok", f"topk_group={chosen} groups do not have so many experts"
        return None

    return divides("n_group", experts), at_most("topk_group", "n_group"), check


GROUPS_FIT = groups_fit("n_routed_experts")


def bias_rule(path: str, name: str, stack: str) -> TensorRule:
    """The bias of the choice: of the experts `path`, by the router `name`."""
    bias = (f"{path}/expert_bias",), (f"{name}.e_score_correction_bias",)
    return TensorRule(*bias, rules.SAME, stack, collection="expert_bias")
