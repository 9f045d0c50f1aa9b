"""The words of a config.json: what each may be, what it means where it is absent, and what of a model it says.

A `Word` is declared once for each family; reading, refusing, writing and docs/config_words.md follow from it.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from te_jax.core.check import BOOL, NONE, STRING, Kind, check, integer, number, show
from te_jax.flax._fields import shared_fields
from te_jax.flax.gated_delta import GatedDeltaNet
from te_jax.flax.mamba import Mamba2
from te_jax.flax.moe import MoEBlock, router_of
from te_jax.flax.transformer import TransformerLayer
from te_jax.models import ModelConfig
from te_jax.ops.attention.mask import mask_type

ABSENT: Any = type("Absent", (), {"__repr__": lambda self: "absent"})()  # no value at all, where null is one

# What arrays may have, so that no arithmetic with it overflows.
SIZE = replace(integer(1, 2**31 - 1), text="a positive int of 31 bits")
# No published model has 200; a config.json of a few bytes should not make lists of millions.
LAYERS = integer(1, 10_000)
LIST_OF_NAMES = Kind(
    "a list of strings",
    lambda value: isinstance(value, list),
    lambda value: all(isinstance(each, str) for each in value),
)
TABLE = Kind("a dict", lambda value: isinstance(value, Mapping))
_TOKEN_IDS = Kind(
    "an int or a list of ints",
    lambda value: integer().is_type(value) or isinstance(value, list),
    lambda value: all(map(integer().accepts, value if isinstance(value, list) else [value])),
)


class Said(dict[str, Any]):
    """What a config.json says, by the names of words: values of their kinds, defaults put in.

    found: config.json itself.
    """

    def __init__(self, found: Mapping[str, Any]) -> None:
        self.found = found


@dataclass(frozen=True)
class Word:
    """A word of config.json.

    name:    As the family's configuration class of transformers has it.
    kind:    What it may be.
    default: What it is where config.json lacks it, as in that class: a value, or a function of what was said before,
             whose docstring the documents show. ABSENT: nothing is to be known of it.
    null:    What a null stands for, as a function of what was said before; None: null is a value.
    also:    Other names of it. Where several are there the last of these is the one that transformers takes.
    to:      The fields of `ModelConfig` that it becomes, as paths: "num_layers", "layer/moe/num_experts".
    ours:    What these fields are, one value for each; None: its value. What is None is no field where the family's
             model has none.
    theirs:  config -> its value; ABSENT: it need not be said. None: the first of `to`, or nothing is known of it.
    """

    name: str
    kind: Kind
    default: Any = ABSENT
    null: Callable[[Said], Any] | None = None
    also: tuple[str, ...] = ()
    to: tuple[str, ...] = ()
    ours: Callable[[Said], tuple[Any, ...]] | None = None
    theirs: Callable[[ModelConfig], Any] | None = None

    @property
    def takes(self) -> str:
        """What it may be, and its other names where these are of another kind."""
        return self.kind.text

    def value(self, where: str, said: Said) -> Any:
        """Its value in `said.found`. Raises TypeError or ValueError, naming it, for one that is not of its kind."""
        value = self.default(said) if callable(self.default) else self.default
        for name in (self.name, *self.also):
            if name in said.found:
                value = said.found[name]
                check(where, name, value, self.kind)
        return self.null(said) if value is None and self.null else value

    def fields(self, said: Said) -> Iterable[tuple[str, Any]]:
        """(path, value) of each field that it becomes."""
        values = (said[self.name],) * len(self.to) if self.ours is None else self.ours(said)
        return zip(self.to, values, strict=True)

    def write(self, config: ModelConfig) -> dict[str, Any]:
        """What config.json says of `config` by this word; {}: nothing."""
        if self.theirs is None and not self.to:
            return {}
        value = _at(config, self.to[0]) if self.theirs is None else self.theirs(config)
        return {} if value is ABSENT else {self.name: value}


def only(*values: Any) -> Kind:
    """One of these values."""
    same = lambda value: any(isinstance(value, bool) == isinstance(each, bool) and value == each for each in values)
    return Kind(f"{' or '.join(map(repr, values))} (te_jax reads no other)", lambda value: True, same)


def fixed(name: str, *values: Any, default: Any = ABSENT) -> Word:
    """A word that te_jax reads only these values of, which mean the same: the first is the default, unless said, and
    what is written."""
    default = values[0] if default is ABSENT else default
    return Word(name, only(*values), default, null=lambda said: values[0], theirs=lambda c: values[0])


def stray(name: str, *values: Any) -> Word:
    """A word that the family's class does not know, though a model of it would be another one by it."""
    return Word(name, only(*values), values[0], theirs=lambda c: ABSENT)


def unused(name: str, kind: Kind, default: Any = ABSENT, also: tuple[str, ...] = ()) -> Word:
    """A word that says nothing of what te_jax computes: it is checked, and written again as it was read."""
    return Word(name, kind, default, also=also)


# What transformers' classes know and te_jax computes nothing by. All families have these, unless one says otherwise.
KEPT = tuple(
    unused(name, kind)
    for kind, names in (
        (NONE | BOOL, "output_hidden_states output_attentions return_dict use_cache output_router_logits"),
        (NONE | BOOL, "reorder_and_upcast_attn summary_use_proj summary_proj_to_labels is_decoder is_encoder_decoder"),
        (NONE | integer(), "pad_token_id bos_token_id decoder_start_token_id chunk_size_feed_forward pretraining_tp"),
        (NONE | integer(), "max_position_embeddings max_window_layers"),
        (NONE | _TOKEN_IDS, "eos_token_id"),
        (number(), "initializer_range initializer_factor router_aux_loss_coef"),
        (NONE | number(), "classifier_dropout embd_pdrop summary_first_dropout"),
        (NONE | STRING, "problem_type summary_type summary_activation transformers_version dtype torch_dtype"),
        (NONE | LIST_OF_NAMES, "architectures"),
        (NONE | TABLE, "id2label label2id"),
    )
    for name in names.split()
)


def words_of(*declared: Word, **defaults: Any) -> tuple[Word, ...]:
    """The words of a family: these with these defaults, a later one of a name instead of an earlier one and in its own
    place, and what it has of `KEPT`."""
    named: dict[str, Word] = {}
    for word in declared:
        named.pop(word.name, None)
        named[word.name] = word
    named |= {name: replace(named[name], default=default) for name, default in defaults.items()}
    known = {name for word in named.values() for name in (word.name, *word.also)}
    return (*named.values(), *(word for word in KEPT if word.name not in known))


# Two words together: what is said -> None, or (the word, why te_jax has no model of it).
Check = Callable[[Said], tuple[str, str] | None]


def refuse(where: str, name: str, value: Any, way_out: str) -> NoReturn:
    """Raises ValueError for a value that is of its kind, and that te_jax has no model of."""
    raise ValueError(f"{where}: {name} is {show(value)}; {way_out}.")


def config_json(family: str) -> str:
    """How errors name the config.json of a family."""
    return f"te_jax.hf: config.json of a {family}"


def said_of(family: str, words: Iterable[Word], checks: Iterable[Check], found: Mapping[str, Any]) -> Said:
    """All words of a config.json. Raises TypeError or ValueError, naming one, for what no model of te_jax is."""
    where, said = config_json(family), Said(found)
    for word in words:
        said[word.name] = word.value(where, said)
    for each in checks:
        if refused := each(said):
            refuse(where, refused[0], said[refused[0]], refused[1])
    return said


def config_of(base: ModelConfig, words: Iterable[Word], said: Said) -> ModelConfig:
    """`base` with the fields that the words become."""
    tree = {name: _as_tree(getattr(base, name)) for name in base.__dataclass_fields__}
    for word in words:
        for path, value in word.fields(said):
            *above, last = path.split("/")
            node: Any = tree
            for name in above:
                node = node[int(name) if isinstance(node, list) else name]
            if value is not None or last in node:
                node[last] = value
    return ModelConfig(**tree)


def _as_tree(value: Any) -> Any:
    """Dicts, and lists of them, that may be changed."""
    if isinstance(value, Mapping):
        return {name: _as_tree(each) for name, each in value.items()}
    is_list = isinstance(value, tuple) and all(isinstance(each, Mapping) for each in value)
    return [*map(_as_tree, value)] if is_list else value


def written_of(family: str, words: tuple[Word, ...], checks: Iterable[Check], config: ModelConfig) -> dict[str, Any]:
    """What config.json says of `config`. A word of the one that it was read from stays as it was, unless it says
    something else. Raises ValueError for a config that is none of the family."""
    fresh: dict[str, Any] = {}
    for word in words:
        fresh |= word.write(config)
    try:
        due = said_of(family, words, checks, fresh)
    except (TypeError, ValueError) as error:
        raise ValueError(f"te_jax.hf.save: what is to be written of the model is none of its family. {error}") from None
    if config.origin is None:
        return fresh
    where, merged = config_json(family), config.origin.found()
    said = Said(merged)
    for word in words:
        of_word = word.write(config)
        try:
            said[word.name] = word.value(where, said)
        except (TypeError, ValueError):  # of another model, which this one was read as
            said[word.name] = ABSENT
        if (word.to or word.theirs) and said[word.name] != due[word.name]:
            for name in (word.name, *word.also):
                merged.pop(name, None)
            merged |= of_word
            said[word.name] = word.value(where, said)
    return merged


def _at(config: ModelConfig, path: str) -> Any:
    first, *rest = path.split("/")
    value: Any = getattr(config, first)
    for name in rest:
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


# -- what there is no word for ----------------------------------------------------------------------------------

# What changes the function of a model and is in no name or shape of a parameter.
_OF_LAYERS = (
    *("layernorm_type", "layernorm_epsilon", "zero_centered_gamma", "mlp_activations", "mlp_activation_params"),
    *("self_attn_mask_type", "window_size", "cross_window_size", "scale_attn_logits", "softmax_type", "score_mod"),
    *("attn_logit_softcap", "post_norms", "apply_residual_connection_post_layernorm", "output_layernorm"),
    *("parallel_attention_mlp", "parallel_shared_layernorm", "enable_rotary_pos_emb", "qk_norm_type"),
    *("attn_logit_scale", "residual_multiplier", "sublayers", "input_layernorm", "mlp_layernorm"),
    *("attention_chunk_size", "attn_temperature", "v_norm_eps", "keys_as_values", "layer_scalar", "kv_sharing"),
    "mlp_next_to_experts",
)
_OF_ROTARY = ("windows", "group_method", "dim", "scaling", "sections")
_OF_LATENTS = (
    *("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "mscale"),
    "latent_rotary",
)
_OF_QK_NORMS = ("qk_norm_eps", "qk_norm_before_rope", "qk_norm_across_heads")
_OF_MOE = (
    *("num_experts", "capacity_factor", "use_expert_bias", "activations", "activation_params"),
    *("layernorm_type", "epsilon", "zero_centered_gamma", "router_bias", "weights_before_experts"),
    *("shared_expert_gate", "latent_size", "router_norm", "expert_scales"),
)
_OF_ROUTERS = ("topk", "score_function", "normalizes", "scores_first", "scaling_factor", "num_groups")
_OF_SSM = (
    *("ssm_num_groups", "norm_groups", "norm_before_gate", "time_step_limit"),
    *("layernorm_type", "layernorm_epsilon", "zero_centered_gamma"),
)
_OF_DELTA_NET = (
    *("linear_num_key_heads", "gate", "allow_neg_eigval"),
    *("layernorm_type", "layernorm_epsilon", "zero_centered_gamma"),
)
_OF_MODELS = ("embedding_scale", "output_scale", "logit_softcap", "embedding_norm", "final_norm", "head_transform")


def check_words(family: str, config: ModelConfig, again: ModelConfig) -> None:
    """Raises ValueError, naming what differs, where `again`, which is read from what is written of `config`, is the
    config of another function."""

    def compare(where: str, ours: dict[str, Any], theirs: dict[str, Any]):
        for name, value in ours.items():
            if not _same(value, theirs.get(name)):
                raise ValueError(
                    f"te_jax.hf.save: {where} has {name}={value!r}, which config.json of a {family} has no word for; "
                    f"it would say {theirs.get(name)!r}."
                )

    compare("the model", *({name: getattr(c, name) for name in _OF_MODELS} for c in (config, again)))
    for i in range(max(config.num_layers, config.num_decoder_layers or 0)):
        compare(f"layer {i}", *(_function_of(c.fields_of_layer(i)) for c in (config, again)))


def _function_of(fields: dict[str, Any]) -> dict[str, Any]:
    """What these fields of a layer say of its function; what nothing reads is left out."""
    layer = TransformerLayer(**fields, parent=None)
    names = [*_OF_LAYERS]
    latent = layer.kv_lora_rank is not None
    turns = layer.latent_rotary if latent else layer.enable_rotary_pos_emb
    names += [f"rotary_pos_emb_{name}" for name in _OF_ROTARY] if turns else []
    names += _OF_LATENTS if latent else []
    names += _OF_QK_NORMS if layer.qk_norm_type else []
    found = {name: getattr(layer, name) for name in names}
    if latent:
        found["latent_norm_epsilon"] = layer.latent_norm_epsilon or layer.layernorm_epsilon
    mask = mask_type(layer.self_attn_mask_type)
    # What a text is padded with on the right is not seen from it anyway.
    found["self_attn_mask_type"] = mask._replace(padding=False) if mask.causal else mask
    if layer.ssm is not None:
        mixer = Mamba2(**shared_fields(layer, Mamba2) | dict(layer.ssm), parent=None)
        found |= {f"ssm: {name}": getattr(mixer, name) for name in _OF_SSM}
    if layer.delta is not None:
        rule = GatedDeltaNet(**shared_fields(layer, GatedDeltaNet) | dict(layer.delta), parent=None)
        found |= {f"delta: {name}": getattr(rule, name) for name in _OF_DELTA_NET}
    if layer.moe is None:
        return found
    experts = MoEBlock(**layer.moe, parent=None)
    router = router_of(experts)
    found |= {f"moe: {name}": getattr(experts, name) for name in _OF_MOE}
    found |= {f"moe: {name}": getattr(router, name) for name in _OF_ROUTERS}
    return found | {"moe: group_topk": router.group_topk or router.num_groups}


def _same(a, b) -> bool:
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b)
    return tuple(a) == tuple(b) if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)) else a == b
