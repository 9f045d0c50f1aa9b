"""What the families of checkpoints share: their kind, checks of config.json, RoPE, tables."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, NoReturn

from te_jax.hf import rules
from te_jax.hf.rules import TensorRule
from te_jax.models import ModelConfig
from te_jax.models.families import Size
from te_jax.models.stack import Model
from te_jax.ops.rope import LinearScaling, Llama3Scaling

LAYER = "TransformerLayer_0"


class Family(NamedTuple):
    """One kind of checkpoint.

    name, architecture: its `model_type` and the one of `architectures` in config.json.
    model:   the class of `te_jax.models`.
    read:    config.json -> ModelConfig.
    write:   ModelConfig -> config.json.
    rules:   ModelConfig -> the tensors.
    unread:  endings of tensors that hold nothing of the model: masks, frequencies.
    prefix:  of tensors' names, which some checkpoints leave out.
    tied:    names of copies of the embedding, which a checkpoint may have.
    older:   what endings of tensors' names were called once: (once, now).
    spare:   config.json -> beginnings of the names of tensors that belong to another model of the same files.
    """

    name: str
    architecture: str
    model: type[Model]
    read: Callable[[Mapping[str, Any]], ModelConfig]
    write: Callable[[ModelConfig], dict[str, Any]]
    rules: Callable[[ModelConfig], list[TensorRule]]
    unread: tuple[str, ...] = ()
    prefix: str = ""
    tied: tuple[str, ...] = ("lm_head.weight",)
    older: tuple[tuple[str, str], ...] = ()
    spare: Callable[[Mapping[str, Any]], tuple[str, ...]] = lambda config: ()


def refuse(family: str, key: str, value: Any, way_out: str) -> NoReturn:
    """Raises ValueError for a value of config.json that te_jax has no model of."""
    raise ValueError(f"te_jax.hf: config.json of a {family} has {key}={value!r}; {way_out}.")


def need(family: str, config: Mapping[str, Any], **values: Any) -> None:
    """Raises ValueError for values of config.json, where they are there, other than these."""
    for key, value in values.items():
        if config.get(key, value) != value:
            refuse(family, key, config[key], f"te_jax reads {value!r} alone")


def size_of(config: Mapping[str, Any], **more: Any) -> Size:
    heads = config["num_attention_heads"]
    groups, width = config.get("num_key_value_heads") or heads, config.get("head_dim")
    width = None if width is None or width * heads == config["hidden_size"] else width
    return Size(
        config["hidden_size"],
        config["intermediate_size"],
        heads,
        config["num_hidden_layers"],
        groups=groups,
        head_dim=width,
        vocab=config["vocab_size"],
        tied=bool(config.get("tie_word_embeddings", False)),
        **more,
    )


# -- RoPE -------------------------------------------------------------------------------------------------------


def read_rotary(family: str, config: Mapping[str, Any], base: float) -> dict[str, Any]:
    """Fields of RoPE from either form of config.json: one dict, or a base beside `rope_scaling`."""
    found = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    kind = found.get("rope_type", found.get("type", "default"))
    fields = dict(rotary_pos_emb_windows=(1, float(found.get("rope_theta", config.get("rope_theta", base)))))
    if kind == "linear":
        fields["rotary_pos_emb_scaling"] = LinearScaling(float(found["factor"]))
    elif kind == "llama3":
        names = ("factor", "low_freq_factor", "high_freq_factor")
        length = found["original_max_position_embeddings"]
        fields["rotary_pos_emb_scaling"] = Llama3Scaling(*(float(found[name]) for name in names), length)
    elif kind != "default":
        refuse(family, "rope_type", kind, "te_jax reads default, linear and llama3")
    if config.get("partial_rotary_factor", found.get("partial_rotary_factor", 1.0)) != 1.0:
        refuse(family, "partial_rotary_factor", config.get("partial_rotary_factor"), "te_jax reads 1.0 alone")
    return fields


def write_rotary(layer: Mapping[str, Any]) -> dict[str, Any]:
    base, scaling = layer["rotary_pos_emb_windows"][1], layer.get("rotary_pos_emb_scaling")
    parameters = dict(rope_theta=base, rope_type="default")
    if isinstance(scaling, LinearScaling):
        parameters |= dict(rope_type="linear", factor=scaling.factor)
    elif isinstance(scaling, Llama3Scaling):
        parameters |= dict(
            rope_type="llama3",
            factor=scaling.factor,
            low_freq_factor=scaling.low_freq_factor,
            high_freq_factor=scaling.high_freq_factor,
            original_max_position_embeddings=scaling.original_max_position,
        )
    elif scaling is not None:
        raise ValueError(f"te_jax.hf: rotary_pos_emb_scaling is {scaling}, which config.json has no word for.")
    old = {key: value for key, value in parameters.items() if key != "rope_theta"}
    return dict(rope_parameters=parameters, rope_theta=base, rope_scaling=None if scaling is None else old)


def joins_qkv(c: ModelConfig) -> bool:
    """Whether queries, keys and values are one parameter."""
    return (c.layer.get("num_gqa_groups") or c.layer["num_attention_heads"]) == c.layer["num_attention_heads"]


def tables(c: ModelConfig, embedding: str, head: str = "lm_head.weight") -> list[TensorRule]:
    made = [TensorRule(("embedding",), (embedding,), rules.SAME)]
    return made if c.tie_embeddings else [*made, TensorRule(("head",), (head,), rules.SAME)]
