"""Kimi Linear: Kimi Delta Attention, and in some layers latent attention without RoPE; experts as in DeepSeek-V3."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from itertools import takewhile
from typing import Any

from te_jax.core.check import NONE, Kind, check, integer, number
from te_jax.hf import rules
from te_jax.hf.deepseek import (
    dense_or_sparse_rules,
    equal_to,
    key_channels,
    latent_attention_rules,
    rope_channels,
    type_of_mlp,
)
from te_jax.hf.experts import CHOSEN_BY_SIGMOIDS, expert_word, groups_fit
from te_jax.hf.family import DECODER, DROPOUT_OR_NULL, LAYER, NO_WINDOW, Family, epsilon, head_of, heads_of, tables
from te_jax.hf.layered import Fields, first_of
from te_jax.hf.mamba import layers_of
from te_jax.hf.rules import Recast, TensorRule
from te_jax.hf.words import ABSENT, LAYERS, LIST_OF_NAMES, SIZE, Check, Said, Word, fixed, only, stray, unused, words_of
from te_jax.models import CausalLM, ModelConfig, families
from te_jax.models.families import Latents, Size
from te_jax.models.patterns import pattern_of
from te_jax.models.sizes import DeltaNet

# -- types of layers --------------------------------------------------------------------------------------------

_KDA, _MLA, _MLPS = "linear_attention", "full_attention", ("dense", "sparse")
_LATENTS = Latents(q_lora_rank=None)
_LINEAR = "linear_attn_config"
_LISTS = {"full_attn_layers": _MLA, "kda_layers": _KDA}  # of layers, counted from 1


def _are_layers(value: Any) -> bool:
    return isinstance(value, list) and LAYERS.accepts(len(value) + 1) and all(map(LAYERS.accepts, value))


_TABLE_OF_KIMI = Kind(
    f"a dict whose {' and '.join(_LISTS)} are lists of at most 9999 layers, counted from 1",
    lambda value: isinstance(value, Mapping),
    lambda value: all(_are_layers(value[name]) for name in _LISTS if name in value),
)


def _by_lists(said: Said) -> list[Any]:
    """as linear_attn_config says, else full_attention in each fourth layer behind the first"""
    table, count = said[_LINEAR], said["num_hidden_layers"]
    if not _LISTS.keys() <= table.keys():
        return [_MLA if i and i % 4 == 0 else _KDA for i in range(count)]
    found = {layer: kind for name, kind in _LISTS.items() for layer in table[name]}
    return [found.get(layer + 1) for layer in range(count)]


def _dense_first(said: Said) -> list[str]:
    """dense in the first first_k_dense_replace layers, sparse in the others"""
    return [_MLPS[i >= said["first_k_dense_replace"]] for i in range(said["num_hidden_layers"])]


def _type_of_mixer(of_layer: Mapping[str, Any]) -> str:
    return _KDA if of_layer.get("kv_lora_rank") is None else _MLA


def _mixers(c: ModelConfig) -> list[str]:
    return [_type_of_mixer(c.fields_of_layer(i)) for i in range(c.num_layers)]


def _kimi_fields(said: Said, name: tuple[str, str]) -> Fields:
    sizes = {field: said[field] for field in _LATENTS._fields}
    rule = dict(linear_num_value_heads=said["linear_num_heads"], conv_width=said["linear_conv_kernel_dim"])
    rule |= dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), said["linear_head_dim"])
    made = families.kimi_mixers(sizes, rule)[name[0] == _MLA]
    dense = dict(moe=None, mlp_hidden_size=said["intermediate_size"])
    return made | (dense if name[1] == "dense" else {})


def _first_and_pattern(said: Said) -> tuple[Any, Any]:
    """The first layers, which have an MLP, and the pattern of the others."""
    names = [*zip(said["layer_types"], said["mlp_layer_types"])]
    first = [*takewhile(lambda name: name[1] == "dense", names)]
    made = {name: _kimi_fields(said, name) for name in {*names}}
    rest = names[len(first) :]
    return tuple(made[name] for name in first), pattern_of(rest, made) if rest else ()


def _table_again(c: ModelConfig) -> Any:
    """Where the config.json that was read has it: transformers writes other words instead."""
    found = {} if c.origin is None else c.origin.found()
    if _LINEAR not in found:
        return ABSENT
    types = _mixers(c)
    lists = {name: [i + 1 for i, each in enumerate(types) if each == kind] for name, kind in _LISTS.items()}
    sizes = {word.inner: word.write(c)[word.name] for word in _OF_TABLE}
    return {**found[_LINEAR], **sizes, **lists}


# -- words ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _InTable(Word):
    """A word that also stands in the table, where it counts. inner: its name there."""

    inner: str = ""

    def value(self, where: str, said: Said) -> Any:
        if self.inner not in said[_LINEAR]:
            return super().value(where, said)
        value = said[_LINEAR][self.inner]
        check(f"{where}: {_LINEAR}", self.inner, value, self.kind)
        return value


@dataclass(frozen=True)
class _Published(Word):
    """A word that is written by the last of its other names, as it was published."""

    def write(self, config: ModelConfig) -> dict[str, Any]:
        made = super().write(config)
        return {self.also[-1]: made[self.name]} if made else {}


def _published(word: Word, name: str) -> Word:
    own = {field.name: getattr(word, field.name) for field in fields(Word)}
    return _Published(**own | dict(also=(*word.also, name)))


def _of_delta(field: str) -> Any:
    def theirs(c: ModelConfig) -> Any:
        rule = first_of(c, "delta")
        return ABSENT if rule is None else rule.get(field, 4 if field == "conv_width" else ABSENT)

    return theirs


_OF_TABLE = (
    _InTable("linear_head_dim", SIZE, 128, theirs=_of_delta("linear_value_head_dim"), inner="head_dim"),
    _InTable("linear_num_heads", SIZE, 32, theirs=_of_delta("linear_num_value_heads"), inner="num_heads"),
    _InTable(
        "linear_conv_kernel_dim",
        integer(2, 4),
        4,
        theirs=_of_delta("conv_width"),
        inner="short_conv_kernel_size",
    ),
)
_CHOSEN_BY = {word.name: word for word in CHOSEN_BY_SIGMOIDS}


def _width_of_dense(c: ModelConfig) -> Any:
    own = (c.fields_of_layer(i) for i in range(c.num_layers))
    return next((each["mlp_hidden_size"] for each in own if type_of_mlp(each) == "dense"), ABSENT)


def _latent_word(name: str, default: Any) -> Word:
    kind = NONE | SIZE if name == "q_lora_rank" else SIZE
    return Word(name, kind, default, theirs=lambda c: first_of(c, name, default))


_OF_KIMI = words_of(
    *DECODER,
    _published(unused("max_position_embeddings", SIZE), "model_max_length"),
    Word("tie_word_embeddings", only(False), False, to=("tie_embeddings",)),  # transformers ties none
    Word("num_key_value_heads", NONE | SIZE, 32, null=heads_of, theirs=lambda c: c.layer["num_attention_heads"]),
    *(_latent_word(name, default) for name, default in _LATENTS._asdict().items()),
    Word("head_dim", SIZE, rope_channels),  # which nothing reads
    Word("qk_head_dim", SIZE, key_channels),
    epsilon("rms_norm_eps"),
    DROPOUT_OR_NULL,
    NO_WINDOW,
    fixed("hidden_act", "silu"),
    fixed("attention_bias", False),
    Word("intermediate_size", SIZE, theirs=_width_of_dense),
    Word("moe_intermediate_size", SIZE, to=("layer/mlp_hidden_size",)),
    _published(expert_word("num_local_experts", "num_experts", 256), "num_experts"),
    _published(_CHOSEN_BY["num_experts_per_tok"], "num_experts_per_token"),
    _published(expert_word("n_shared_experts", "num_shared_experts", 1, kind=integer(1, 1000)), "num_shared_experts"),
    _published(_CHOSEN_BY["n_group"], "num_expert_group"),
    _published(_CHOSEN_BY["norm_topk_prob"], "moe_renormalize"),
    *(_CHOSEN_BY[name] for name in ("topk_group", "routed_scaling_factor")),
    Word(_LINEAR, _TABLE_OF_KIMI, {}, theirs=_table_again),
    *_OF_TABLE,
    Word("first_k_dense_replace", integer(0, 10_000), 1),
    Word(
        "mlp_layer_types",
        NONE | LIST_OF_NAMES,
        None,
        null=_dense_first,
        theirs=lambda c: [type_of_mlp(c.fields_of_layer(i)) for i in range(c.num_layers)],
    ),
    Word(
        "layer_types",
        NONE | LIST_OF_NAMES,
        None,
        null=_by_lists,
        to=("first", "pattern"),
        ours=_first_and_pattern,
        theirs=_mixers,
    ),
    # Words of the code that the model was published with.
    *(stray("mla_use_nope", True), stray("mla_use_output_gate", False), stray("moe_layer_freq", 1)),
    *(stray("moe_router_activation_func", "sigmoid"), stray("use_grouped_topk", True)),
    *(stray("num_nextn_predict_layers", 0), unused("rope_theta", number(above=0)), stray("rope_scaling", None)),
    vocab_size=163840,
    hidden_size=2304,
    intermediate_size=9216,
    moe_intermediate_size=1024,
    num_hidden_layers=27,
    num_attention_heads=32,
    max_position_embeddings=1048576,
    rms_norm_eps=1e-5,
    attention_dropout=0.0,
    n_group=1,
    topk_group=1,
    routed_scaling_factor=2.446,
)


def _all_types_are_known(said: Said) -> tuple[str, str] | None:
    count, names = said["num_hidden_layers"], {"layer_types": (_KDA, _MLA), "mlp_layer_types": _MLPS}
    for word, known in names.items():
        if len(said[word]) != count or not {*said[word]} <= {*known}:
            by_table = word == "layer_types" and said.found.get(word) is None and said[_LINEAR]
            return (_LINEAR if by_table else word), f"pass for each of num_hidden_layers={count} layers one of {known}"
    return None


_KIMI_CHECKS: tuple[Check, ...] = (
    _all_types_are_known,
    equal_to("num_key_value_heads", heads_of),
    *groups_fit("num_local_experts"),
)

# -- tensors ----------------------------------------------------------------------------------------------------

_TAPS = Recast(lambda a: (a[:, 0].T,), lambda a: (a.T[:, None],))
_BY_HEADS = Recast(lambda a: (a.reshape(-1),), lambda a: (a[None, None, :, None],))


def _kda_rules() -> list[TensorRule]:
    path, name, stack = f"{LAYER}/delta", "model.layers.{i}.self_attn", "layers"
    made = rules.norm_rules(f"{path}/q", "model.layers.{i}.input_layernorm", False, stack)
    for part in ("q", "k", "v", "b", "f_a", "f_b", "g_a", "g_b"):
        made += rules.dense_rules(f"{path}/{part}", f"{name}.{part}_proj", False, stack)
    one = lambda ours, theirs, form: TensorRule((f"{path}/{ours}",), (f"{name}.{theirs}",), form, stack)
    made += [one(f"{part}_conv_kernel", f"{part}_conv1d.weight", _TAPS) for part in "qkv"]
    made += [one("A_log", "A_log", _BY_HEADS), one("dt_bias", "dt_bias", rules.SAME)]
    made.append(one("norm_scale", "o_norm.weight", rules.SAME))
    return made + rules.dense_rules(f"{path}/out", f"{name}.o_proj", False, stack)


def _kimi_rules(c: ModelConfig) -> list[TensorRule]:
    mixers = {_KDA: _kda_rules(), _MLA: latent_attention_rules(first_of(c, "q_lora_rank"))}
    return [
        *tables(c, "model.embed_tokens.weight"),
        *rules.norm_rules("final_norm", "model.norm", False),
        *(rule._replace(layers=layers_of(c, name, _type_of_mixer)) for name, of in mixers.items() for rule in of),
        *dense_or_sparse_rules(c, "block_sparse_moe", ("w1", "w3", "w2")),
    ]


# Transformers writes the MLP of a layer without experts by the name that experts have in published files.
_TWO_NAMES = tuple((f".block_sparse_moe.{name}.weight", f".mlp.{name}.weight") for name in rules.SWIGLU)
KIMI_LINEAR = Family(
    "kimi_linear",
    "KimiLinearForCausalLM",
    CausalLM,
    families.kimi_linear(Size(1, 1, 1, 1, experts=1, topk=1, latents=_LATENTS, delta=DeltaNet(), tied=False)),
    _OF_KIMI,
    _KIMI_CHECKS,
    _kimi_rules,
    prefix="model.",
    tied=head_of("model.embed_tokens"),
    older=_TWO_NAMES,
)
