"""What a model is made of, as one frozen value."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from flax.core import FrozenDict

from te_jax.core.check import BOOL, NONE, STRING, Kind, KnownFields, check, integer, number, tuple_of

_LAYER_FIELDS = Kind("a dict of fields of te_jax.flax.TransformerLayer", lambda value: isinstance(value, Mapping))
_NOT_OF_LAYERS = {
    "hidden_size": "which is a field of its own",
    **dict.fromkeys(("dtype", "params_dtype"), "which is a field of the model"),
    "transpose_batch_sequence": "but models take tokens [b, s]",
}
_KINDS_OF_CONFIG = {
    "vocab_size": integer(0),
    "num_layers": integer(1),
    "hidden_size": integer(1),
    "layer": _LAYER_FIELDS,
    "pattern": tuple_of(_LAYER_FIELDS),
    "first": tuple_of(_LAYER_FIELDS),
    "family": STRING,
    "num_decoder_layers": NONE | integer(1),
    "max_positions": NONE | integer(1),
    "token_types": integer(0),
    "embedding_norm": BOOL,
    "embedding_scale": number(above=0),
    "final_norm": BOOL,
    "head_transform": BOOL,
    "tie_embeddings": BOOL,
    "output_scale": number(above=0),
    "logit_softcap": NONE | number(above=0),
    "image_size": NONE | integer(1),
    "patch_size": NONE | integer(1),
    "image_channels": integer(1),
    "pooling_head": BOOL,
    "class_token": BOOL,
    "num_labels": integer(0),
    "origin": NONE | Kind("what te_jax.hf.load made", lambda value: isinstance(value, Origin)),
}
_EMPTY: FrozenDict = FrozenDict()


@dataclass(frozen=True)
class Origin:
    """The checkpoint that a model was read from: `te_jax.hf.save` writes again what te_jax does not use of it.

    folder: Its absolute path.
    words:  The text of its config.json.
    """

    folder: str
    words: str

    def found(self) -> dict[str, Any]:
        """Its config.json, anew."""
        return json.loads(self.words)

    def with_words(self, **words: Any) -> "Origin":
        """This one with other words."""
        return Origin(self.folder, json.dumps(self.found() | words))


@dataclass(frozen=True)
class ModelConfig(KnownFields):
    """The architecture of a model: sizes, and the fields of its `te_jax.flax.TransformerLayer`s.

    vocab_size, num_layers, hidden_size: V, 0 of a model of images; the layers, in an encoder-decoder the encoder's; H.
    layer:           fields of each layer but hidden_size, such as dict(num_attention_heads=8, mlp_hidden_size=512).
    pattern:         what differs between layers, on top of `layer`, again and again: a window in every other one, say.
    first:           what differs in the first layers, one entry for each; the pattern begins after them.
    family:          whose checkpoints `te_jax.hf` reads and writes: "llama", "gpt2", ...; "" is none.
    num_decoder_layers: of an encoder-decoder; None: as many as the encoder's.
    max_positions:   the number of learned positions; None: there are none.
    token_types:     the number of learned token types; 0: there are none.
    embedding_norm:  a norm after the embeddings.
    embedding_scale: the factor of embeddings.
    final_norm:      a norm after the last layer.
    head_transform:  a dense layer, an activation and a norm before the head, and a bias of the logits, as in BERT.
    tie_embeddings:  the embedding is the kernel of the head too.
    output_scale:    the factor of hidden states before the head.
    logit_softcap:   c: logits z become c tanh(z / c).
    image_size, patch_size, image_channels: of a `VisionEncoder`, whose images are [b, image_size, image_size,
                     image_channels], cut into squares of patch_size pixels; None: the model reads tokens.
    pooling_head:    attention of one learned token makes one vector of the patches; with class_token a dense layer
                     and tanh make it of that token.
    class_token:     a learned token stands in front of the patches, and is the vector of an image.
    num_labels:      the labels of a classifier of that vector; 0: there is none.
    origin:          the checkpoint that the model was read from, as `te_jax.hf.load` sets it. It is not compared.

    Hashable. Raises TypeError and ValueError for fields that are not of their kind.
    """

    vocab_size: int
    num_layers: int
    hidden_size: int
    layer: Mapping[str, Any] = _EMPTY
    pattern: tuple[Mapping[str, Any], ...] = ()
    family: str = field(default="", compare=False)
    num_decoder_layers: int | None = None
    max_positions: int | None = None
    token_types: int = 0
    embedding_norm: bool = False
    embedding_scale: float = 1.0
    final_norm: bool = True
    head_transform: bool = False
    tie_embeddings: bool = True
    output_scale: float = 1.0
    logit_softcap: float | None = None
    first: tuple[Mapping[str, Any], ...] = ()
    image_size: int | None = None
    patch_size: int | None = None
    image_channels: int = 3
    pooling_head: bool = False
    class_token: bool = False
    num_labels: int = 0
    origin: Origin | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        for name, kind in _KINDS_OF_CONFIG.items():
            check("ModelConfig", name, getattr(self, name), kind)
        if (self.image_size is None) != (self.patch_size is None) or (self.vocab_size == 0) != self._reads_images:
            raise ValueError(
                f"ModelConfig: vocab_size is {self.vocab_size}, image_size {self.image_size}, patch_size "
                f"{self.patch_size}; pass a vocab_size above 0, or 0 and both sizes of images."
            )
        if self._reads_images and self.patch_size > self.image_size:
            raise ValueError(
                f"ModelConfig: patch_size is {self.patch_size}, but image_size {self.image_size}: no patch is whole; "
                "pass a smaller patch_size."
            )
        for fields in (self.layer, *self.pattern, *self.first):
            for name in _NOT_OF_LAYERS.keys() & fields.keys():
                if fields[name] not in (None, False):
                    raise ValueError(f"ModelConfig: layer has {name}, {_NOT_OF_LAYERS[name]}; leave it out there.")
        for name in ("num_layers", "num_decoder_layers"):
            if (count := getattr(self, name)) is not None and len(self.first) > count:
                raise ValueError(
                    f"ModelConfig: first has {len(self.first)} entries, but {name} is {count}; pass one for each of "
                    "the first layers, and no more than there are layers."
                )
        object.__setattr__(self, "layer", FrozenDict(self.layer))
        for name in ("pattern", "first"):
            object.__setattr__(self, name, tuple(map(FrozenDict, getattr(self, name))))

    @property
    def _reads_images(self) -> bool:
        return self.patch_size is not None

    @property
    def patches(self) -> int:
        """The patches of an image; 0: the model reads tokens."""
        return (self.image_size // self.patch_size) ** 2 if self._reads_images else 0

    def with_layer(self, **fields: Any) -> "ModelConfig":
        """This config with other fields of its layers."""
        return replace(self, layer={**self.layer, **fields})

    def fields_of_layer(self, index: int) -> dict[str, Any]:
        """All fields of layer `index`; negative ones count from the end of num_layers."""
        behind = index % self.num_layers - len(self.first) if index < 0 else index - len(self.first)
        if behind < 0:
            own = self.first[behind]
        else:
            own = self.pattern[behind % len(self.pattern)] if self.pattern else {}
        return {"hidden_size": self.hidden_size, **self.layer, **own}

    def norm_fields(self) -> dict[str, Any]:
        """The fields of a `te_jax.flax.LayerNorm` of the model's kind."""
        names = dict(
            layernorm_type="layernorm_type", layernorm_epsilon="epsilon", zero_centered_gamma="zero_centered_gamma"
        )
        return {to: self.layer[name] for name, to in names.items() if name in self.layer}
