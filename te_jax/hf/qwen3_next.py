"""Qwen3-Next and Qwen3.5 (text): three of four layers are Gated DeltaNet, the others attention with an output gate."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax.numpy as jnp

from te_jax.core.check import NONE, Kind, integer
from te_jax.flax.gated_delta import GatedDeltaNet
from te_jax.hf import rules
from te_jax.hf.decoders import (
    ONE,
    QK_NORMS,
    QWEN_EXPERTS,
    WITH_EXPERTS,
    attention_of_llama,
    feed_forward_of_llama,
    of_llama,
)
from te_jax.hf.family import GROUPS, LAYER, NO_WINDOW, Family, divides, head_dim, width_of
from te_jax.hf.mamba import layers_of
from te_jax.hf.qwen2_moe import EXPERTS_OF_QWEN_FIT, SHARED_OF_QWEN, experts_of_qwen_rules
from te_jax.hf.rotary import pairs_turn, rotary
from te_jax.hf.rules import Recast, TensorRule
from te_jax.hf.words import LIST_OF_NAMES, SIZE, Check, Said, Word, stray
from te_jax.models import ModelConfig, families
from te_jax.models.patterns import pattern_of
from te_jax.models.sizes import DeltaNet

# -- words ------------------------------------------------------------------------------------------------------

_QWEN_TYPES = {"linear_attention": {}, "full_attention": {"delta": None}}  # and the fields that a layer has of its own


def _each_fourth_attends(said: Said) -> list[str]:
    """linear_attention, and full_attention in each full_attention_interval-th layer"""
    every = said["full_attention_interval"]
    return [[*_QWEN_TYPES][(i + 1) % every == 0] for i in range(said["num_hidden_layers"])]


def _type_of_qwen(fields: dict[str, Any]) -> str:
    return [*_QWEN_TYPES][fields.get("delta") is None]


def delta_of(c: ModelConfig) -> dict[str, Any]:
    """The fields of `GatedDeltaNet` in the model's layers, defaults put in."""
    own = {name: field.default for name, field in GatedDeltaNet.__dataclass_fields__.items()} | {**c.layer["delta"]}
    return own | dict(linear_num_key_heads=own["linear_num_key_heads"] or own["linear_num_value_heads"])


def _delta_word(name: str, default: int, field: str = "", kind: Kind = SIZE) -> Word:
    """A word that becomes a field of Gated DeltaNet, of the same name unless said."""
    field = field or name
    return Word(name, kind, default, to=(f"layer/delta/{field}",), theirs=lambda c: delta_of(c)[field])


_OF_HYBRIDS = (
    *(*QK_NORMS, NO_WINDOW, head_dim(may_be=SIZE), replace(GROUPS, kind=SIZE)),
    Word("full_attention_interval", SIZE, 4),
    Word(
        "layer_types",
        NONE | LIST_OF_NAMES,
        None,
        null=_each_fourth_attends,
        to=("pattern",),
        ours=lambda said: (pattern_of(said["layer_types"], _QWEN_TYPES),),
        theirs=lambda c: [_type_of_qwen(c.fields_of_layer(i)) for i in range(c.num_layers)],
    ),
    *(_delta_word(name, default) for name, default in DeltaNet()._asdict().items()),
    _delta_word("linear_conv_kernel_dim", 4, "conv_width", integer(2, 4)),
    stray("attn_output_gate", True),
    rotary("rotary_pos_emb_dim", part=0.25),
)
# Qwen3.5 reads images, too.
_OF_SEVERAL_POSITIONS = rotary("rotary_pos_emb_dim", part=0.25, sections=families.SECTIONS_OF_QWEN3_5)


def _types_fit(said: Said) -> tuple[str, str] | None:
    types, count = said["layer_types"], said["num_hidden_layers"]
    if len(types) == count and {*types} <= _QWEN_TYPES.keys():
        return None
    return "layer_types", f"pass num_hidden_layers={count} times one of {[*_QWEN_TYPES]}"


_HYBRIDS_FIT: tuple[Check, ...] = (_types_fit, divides("linear_num_key_heads", "linear_num_value_heads"), pairs_turn)

# -- tensors ----------------------------------------------------------------------------------------------------


def _with_gates(c: ModelConfig, rule: TensorRule) -> TensorRule:
    """`rule`, where it is of queries: a head's gate lies behind its query in the same Linear."""
    if not rule.theirs[0].endswith("q_proj.weight"):
        return rule
    halves, inner = rules.parted_in_groups(c.layer["num_attention_heads"], (width_of(c),) * 2), rule.form

    def ours(query, *others):
        query, gate = halves.ours(query)
        return *inner.ours(query.T, *others), gate

    def theirs(kernel, gate):
        query, *others = inner.theirs(kernel)
        return *halves.theirs(query.T, gate), *others

    return rule._replace(ours=(*rule.ours, f"{LAYER}/attention/gate/kernel"), form=Recast(ours, theirs))


def _in_projections(path: str, name: str, delta: Mapping[str, Any]) -> list[TensorRule]:
    """Qwen3-Next has the projections of a head of keys, and of the heads of values that it serves, in one."""
    groups, d = delta["linear_num_key_heads"], delta["linear_key_head_dim"]
    heads = delta["linear_num_value_heads"] // groups
    e = heads * delta["linear_value_head_dim"]
    parts = {"qkvz": (d, d, e, e), "ba": (heads, heads)}
    each = {name: rules.parted_in_groups(groups, sizes) for name, sizes in parts.items()}
    kernels = lambda names: tuple(f"{path}/{part}/kernel" for part in names)
    return [TensorRule(kernels(of), (f"{name}.in_proj_{of}.weight",), form, "layers") for of, form in each.items()]


def _projections_apart(path: str, name: str, delta: Mapping[str, Any]) -> list[TensorRule]:
    """Qwen3.5 has one of queries, keys and values behind each other, and one each of the others."""
    kernels = tuple(f"{path}/{part}/kernel" for part in "qkv")
    form = rules.parted((*_widths_of_convs(delta).values(),), jnp.transpose, jnp.transpose)
    made = [TensorRule(kernels, (f"{name}.in_proj_qkv.weight",), form, "layers")]
    return made + [
        r for part in "zba" for r in rules.dense_rules(f"{path}/{part}", f"{name}.in_proj_{part}", False, "layers")
    ]


def _widths_of_convs(delta: Mapping[str, Any]) -> dict[str, int]:
    keys = delta["linear_num_key_heads"] * delta["linear_key_head_dim"]
    return dict(q=keys, k=keys, v=delta["linear_num_value_heads"] * delta["linear_value_head_dim"])


def _mixers_of_qwen(c: ModelConfig, projections: Callable[..., list[TensorRule]]) -> list[TensorRule]:
    """Embedding, head, last norm, and the mixers of all layers with the norms in front of them."""
    path, name, delta, stack = f"{LAYER}/delta", "model.layers.{i}.linear_attn", delta_of(c), "layers"
    widths = _widths_of_convs(delta)
    taps = rules.parted_taps((*widths.values(),))
    made = rules.norm_rules(f"{path}/q", "model.layers.{i}.input_layernorm", False, stack)
    made += projections(path, name, delta)
    made.append(
        TensorRule(tuple(f"{path}/{part}_conv_kernel" for part in widths), (f"{name}.conv1d.weight",), taps, stack)
    )
    for ours, theirs in (("A_log", "A_log"), ("dt_bias", "dt_bias"), ("norm_scale", "norm.weight")):
        made.append(TensorRule((f"{path}/{ours}",), (f"{name}.{theirs}",), rules.SAME, stack))
    made += rules.dense_rules(f"{path}/out", f"{name}.out_proj", False, stack)
    attends = [_with_gates(c, rule) for rule in attention_of_llama(c)]
    types = {name: layers_of(c, name, _type_of_qwen) for name in _QWEN_TYPES}
    return [
        *(rule._replace(layers=types["linear_attention"]) for rule in made),
        *(rule._replace(layers=types["full_attention"]) if rule.stack else rule for rule in attends),
    ]


# -- families ---------------------------------------------------------------------------------------------------


def _of_hybrid(
    name: str,
    architecture: str,
    base: ModelConfig,
    *words: Word,
    checks: tuple[Check, ...] = (),
    projections: Callable[..., list[TensorRule]] = _projections_apart,
    feed_forward: Callable[[ModelConfig], list[TensorRule]] = experts_of_qwen_rules,
    **defaults: Any,
) -> Family:
    """A family of such hybrids; projections, feed_forward: the tensors in which they differ."""
    family = of_llama(
        name,
        architecture,
        base,
        *_OF_HYBRIDS,
        *words,
        checks=(*_HYBRIDS_FIT, *checks),
        tensors=lambda c: _mixers_of_qwen(c, projections) + feed_forward(c),
        **dict(num_attention_heads=16, head_dim=256, max_position_embeddings=32768) | defaults,
    )
    # Layers that predict further tokens have a prefix of their own, and no word.
    return family._replace(spare=lambda found: lambda tensor: tensor.startswith("mtp."))


_ONE_NEXT, _EXPERTS_NEXT = (replace(size, head_dim=8, delta=DeltaNet()) for size in (ONE, WITH_EXPERTS))
_EXPERTS_OF_BOTH = dict(
    hidden_size=2048, num_key_value_heads=2, moe_intermediate_size=512, shared_expert_intermediate_size=512
)
QWEN3_NEXT = _of_hybrid(
    "qwen3_next",
    "Qwen3NextForCausalLM",
    families.qwen3_next(_EXPERTS_NEXT),
    *(*QWEN_EXPERTS, SHARED_OF_QWEN),
    checks=EXPERTS_OF_QWEN_FIT,
    projections=_in_projections,
    vocab_size=151936,
    intermediate_size=5632,
    num_hidden_layers=48,
    num_experts=512,
    num_experts_per_tok=10,
    norm_topk_prob=True,
    **_EXPERTS_OF_BOTH,
)
QWEN3_5_TEXT = _of_hybrid(
    "qwen3_5_text",
    "Qwen3_5ForCausalLM",
    families.qwen3_5(_ONE_NEXT),
    _OF_SEVERAL_POSITIONS,
    feed_forward=feed_forward_of_llama,
    vocab_size=248320,
    hidden_size=4096,
    intermediate_size=12288,
    num_hidden_layers=32,
    num_key_value_heads=4,
)
QWEN3_5_MOE_TEXT = _of_hybrid(
    "qwen3_5_moe_text",
    "Qwen3_5MoeForCausalLM",
    families.qwen3_5(_EXPERTS_NEXT),
    _OF_SEVERAL_POSITIONS,
    *(*QWEN_EXPERTS, SHARED_OF_QWEN, stray("norm_topk_prob", True), stray("decoder_sparse_step", 1)),
    stray("mlp_only_layers", [], None),
    checks=EXPERTS_OF_QWEN_FIT,
    vocab_size=248320,
    num_hidden_layers=40,
    num_experts=256,
    num_experts_per_tok=8,
    **_EXPERTS_OF_BOTH,
)
