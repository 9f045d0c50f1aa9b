"""What the families of checkpoints share: their kind, words of config.json, tables."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from te_jax.core.check import BOOL, NONE, RATE, Kind, number
from te_jax.hf import rules, words
from te_jax.hf.files import Stored
from te_jax.hf.rules import TensorRule
from te_jax.hf.words import ABSENT, LAYERS, LIST_OF_NAMES, SIZE, Check, Said, Word, stray, unused
from te_jax.models import ModelConfig
from te_jax.models.stack import Model

LAYER = "TransformerLayer_0"
ROPE_TABLES = (".rotary_emb.inv_freq",)


class Family(NamedTuple):
    """One kind of checkpoint.

    name, architecture: its `model_type` and the one of `architectures` in config.json, or ModelConfig -> that one.
    model:   the class of `te_jax.models`.
    base:    a model of the family, of any size: what no word says.
    words:   of config.json.
    checks:  what several words have to be to each other.
    rules:   ModelConfig -> the tensors.
    unread:  endings of tensors that hold nothing of the model: masks, frequencies.
    prefix:  of tensors' names, which some checkpoints leave out.
    tied:    copies that a checkpoint may have: {name: the tensor that it is a copy of}. In a model that is not tied
             some are tensors of their own.
    ties_by_files: whether the head is the embedding is not in config.json, but in the files: a head that is no copy.
    old_prefix: of tensors' names in older checkpoints.
    older:   what endings of tensors' names were called once: (once, now).
    spare:   config.json -> whether a tensor of that name belongs to another model of the same files.
    without_spare: what config.json says where they are left out.
    by_files: (config, the tensors by their names of today) -> the config that they say where config.json does not.
    """

    name: str
    architecture: str | Callable[[ModelConfig], str]
    model: type[Model]
    base: ModelConfig
    words: tuple[Word, ...]
    checks: tuple[Check, ...]
    rules: Callable[[ModelConfig], list[TensorRule]]
    unread: tuple[str, ...] = ()
    prefix: str = ""
    tied: Mapping[str, str] = {}
    ties_by_files: bool = False
    old_prefix: str = ""
    older: tuple[tuple[str, str], ...] = ()
    spare: Callable[[Mapping[str, Any]], Callable[[str], bool]] = lambda config: lambda name: False
    without_spare: Mapping[str, Any] = {}
    by_files: Callable[[ModelConfig, Mapping[str, Stored]], ModelConfig] = lambda config, held: config

    def said(self, found: Mapping[str, Any]) -> Said:
        """All words of a config.json. Raises TypeError or ValueError, naming the word, for what te_jax does not
        read."""
        return words.said_of(self.name, self.words, self.checks, found)

    def read(self, found: Mapping[str, Any]) -> ModelConfig:
        """config.json -> ModelConfig. Raises as `said`."""
        return words.config_of(self.base, self.words, self.said(found))

    def write(self, config: ModelConfig) -> dict[str, Any]:
        """ModelConfig -> config.json: the one that it was read from, but for what the config says otherwise."""
        try:
            if config.origin is not None and self.read(config.origin.found()) == config:
                return config.origin.found()
        except (TypeError, ValueError):  # it was read as another family
            pass
        return words.written_of(self.name, self.words, self.checks, config)


# -- words that several families have ---------------------------------------------------------------------------


def heads_of(said: Said) -> int:
    """num_attention_heads"""
    return said["num_attention_heads"]


def width(said: Said) -> int:
    """hidden_size // num_attention_heads"""
    return said["hidden_size"] // said["num_attention_heads"]


def width_of(config: ModelConfig) -> int:
    """The channels of a head."""
    return config.layer.get("kv_channels") or config.hidden_size // config.layer["num_attention_heads"]


def head_dim(
    name: str = "head_dim",
    hidden: str = "hidden_size",
    heads: str = "num_attention_heads",
    also: tuple[str, ...] = (),
    may_be: Kind = NONE | SIZE,
) -> Word:
    """The channels of a head. hidden, heads: the words of H and of the number of heads."""

    def ours(said: Said) -> tuple[Any]:
        return (None if said[name] * said[heads] == said[hidden] else said[name],)

    return Word(name, may_be, null=width, also=also, to=("layer/kv_channels",), ours=ours, theirs=width_of)


def number_of_groups(config: ModelConfig) -> int:
    """The heads of keys and values."""
    return config.layer.get("num_gqa_groups") or config.layer["num_attention_heads"]


def dropout(name: str, *fields: str, may_be: Kind = RATE) -> Word:
    """A rate of dropout, which becomes these fields of layers."""
    return Word(name, may_be, null=lambda said: 0.0, to=tuple(f"layer/{field}" for field in fields))


def window(name: str = "sliding_window") -> Word:
    """The tokens that one sees, its own among them."""
    ours = lambda said: (None if said[name] is None else (said[name] - 1, 0),)
    theirs = lambda c: None if c.layer.get("window_size") is None else c.layer["window_size"][0] + 1
    return Word(name, NONE | SIZE, to=("layer/window_size",), ours=ours, theirs=theirs)


def epsilon(name: str, *more: str) -> Word:
    """The epsilon of norms; more: further fields of layers that it becomes."""
    return Word(name, number(above=0), to=tuple(f"layer/{field}" for field in ("layernorm_epsilon", *more)))


DROPOUT_OR_NULL = dropout("attention_dropout", "attention_dropout", may_be=NONE | RATE)
NO_WINDOW = stray("sliding_window", None)
VOCAB = Word("vocab_size", SIZE, to=("vocab_size",))
TIED = Word("tie_word_embeddings", BOOL, to=("tie_embeddings",))
POSITIONS = unused("max_position_embeddings", SIZE)
# Transformers takes another config.json by the first of these, layers of their own by the second, and what a causal
# model sees by the others.
ELSEWHERE = (stray("configuration_files", None), stray("per_layer_config", None))
STRAYS = (*ELSEWHERE, stray("is_causal", True), stray("attention_chunk_size", None))
LAYER_TYPES = Word("layer_types", NONE | LIST_OF_NAMES, None, theirs=lambda c: ABSENT)
DECODER = (
    VOCAB,
    Word("hidden_size", SIZE, to=("hidden_size",)),
    Word("intermediate_size", SIZE, to=("layer/mlp_hidden_size",)),
    Word("num_hidden_layers", LAYERS, to=("num_layers",)),
    Word("num_attention_heads", SIZE, to=("layer/num_attention_heads",)),
    POSITIONS,
    TIED,
    *STRAYS,
)
GROUPS = Word("num_key_value_heads", NONE | SIZE, null=heads_of, to=("layer/num_gqa_groups",), theirs=number_of_groups)


# -- what words have to be to each other ------------------------------------------------------------------------


def divides(small: str, large: str) -> Check:
    """`small` divides `large`."""
    why = lambda said: f"pass a divisor of {large}={said[large]}"
    return lambda said: (small, why(said)) if said[large] % said[small] else None


def at_most(small: str, large: str) -> Check:
    """`small` is at most `large`."""
    return lambda said: (small, f"pass at most {large}={said[large]}") if said[small] > said[large] else None


def even_width(said: Said) -> tuple[str, str] | None:
    """RoPE turns pairs of channels."""
    if said["head_dim"] % 2 or not said["head_dim"]:
        return "head_dim", "RoPE turns pairs of channels: pass a positive even number"
    return None


def types_of_layers(due: Callable[[Said, int], str]) -> Check:
    """`layer_types` says what the other words say. due: (said, layer) -> the type of that layer."""

    def check(said: Said) -> tuple[str, str] | None:
        types = said["layer_types"]
        if (
            types is None
            or len(types) == said["num_hidden_layers"]
            and all(name == due(said, i) for i, name in enumerate(types))
        ):
            return None
        return "layer_types", f"by its other words it is {due(said, 0)!r} and so on, for num_hidden_layers layers"

    return check


ALL_SEE_ALL = types_of_layers(lambda said, i: "full_attention")


def joins_qkv(c: ModelConfig) -> bool:
    """Whether queries, keys and values are one parameter."""
    return number_of_groups(c) == c.layer["num_attention_heads"]


def tables(c: ModelConfig, embedding: str, head: str = "lm_head.weight") -> list[TensorRule]:
    made = [TensorRule(("embedding",), (embedding,), rules.SAME)]
    return made if c.tie_embeddings else [*made, TensorRule(("head",), (head,), rules.SAME)]


def head_of(embedding: str) -> dict[str, str]:
    """`Family.tied` of a family whose head is a copy of this embedding."""
    return {"lm_head.weight": f"{embedding}.weight"}
