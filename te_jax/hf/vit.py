"""ViT: an encoder of images with a token of its own for the image, and a classifier or a pooler of that token."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from te_jax.core.check import NONE, Kind, check, integer
from te_jax.hf import rules
from te_jax.hf.family import LAYER, Family, dropout
from te_jax.hf.rules import TensorRule
from te_jax.hf.siglip import CHECKS_OF_IMAGES, OF_BATCH, OF_IMAGES, patch_rules
from te_jax.hf.words import SIZE, Said, Word, fixed, only, unused, words_of
from te_jax.models import ModelConfig, VisionEncoder, families
from te_jax.models.families import Size

_CLASSIFIER = "ViTForImageClassification"
_LABEL_NAMES = Kind(
    "a dict of strings",
    lambda value: isinstance(value, Mapping),
    lambda value: all(isinstance(each, str) for each in value.values()),
)

_COUNT = replace(integer(0, 2**31 - 1), text="an int of at least 0, of 31 bits")


@dataclass(frozen=True)
class _Labels(Word):
    """`id2label`, of which the number of labels counts, unless `num_labels` says another one: of a classifier, 2 where
    both are absent; of others 0."""

    @property
    def takes(self) -> str:
        return f"{self.kind.text}; `num_labels`: {_COUNT.text}"

    def value(self, where: str, said: Said) -> int:
        found = said.found.get(self.name)
        check(where, self.name, found, self.kind)
        labels = said.found.get("num_labels", 2 if found is None else len(found))
        check(where, "num_labels", labels, _COUNT)
        return labels if said["architectures"] == [_CLASSIFIER] else 0

    def write(self, config: ModelConfig) -> dict[str, Any]:
        names = [f"LABEL_{i}" for i in range(config.num_labels)]
        by_number = {str(i): name for i, name in enumerate(names)}
        return dict(id2label=by_number, label2id={name: i for i, name in enumerate(names)}) if names else {}


def _class_of_vit(c: ModelConfig) -> str:
    return _CLASSIFIER if c.num_labels else "ViTModel"


def _has_labels(said: Said) -> tuple[str, str] | None:
    if said["architectures"] == [_CLASSIFIER] and not said["id2label"]:
        return "architectures", "a classifier has labels: pass id2label or num_labels"
    return None


def _pools_all(said: Said) -> tuple[str, str] | None:
    if said["pooler_output_size"] != said["hidden_size"]:
        return "pooler_output_size", f"te_jax reads hidden_size, {said['hidden_size']}, and no other"
    return None


def _width_of_images(said: Said) -> int:
    """hidden_size"""
    return said["hidden_size"]


_VIT = words_of(
    *OF_IMAGES,
    fixed("hidden_act", "gelu"),
    fixed("qkv_bias", True),
    fixed("pooler_act", "tanh"),
    dropout("hidden_dropout_prob", "hidden_dropout"),
    dropout("attention_probs_dropout_prob", "attention_dropout"),
    Word("pooler_output_size", NONE | SIZE, None, null=_width_of_images, theirs=lambda c: c.hidden_size),
    Word(
        "architectures",
        only(None, [], ["ViTModel"], [_CLASSIFIER]),
        None,
        to=("pooling_head",),
        ours=lambda said: (said["architectures"] != [_CLASSIFIER],),
        theirs=lambda c: [_class_of_vit(c)],
    ),
    _Labels("id2label", NONE | _LABEL_NAMES, None, also=("num_labels",), to=("num_labels",)),
    unused("encoder_stride", integer()),
    layer_norm_eps=1e-12,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
)


def _vit_rules(c: ModelConfig) -> list[TensorRule]:
    base = "vit." if c.num_labels else ""
    stack, layer, of_image = "layers", f"{base}encoder.layer.{{i}}", f"{base}embeddings"
    own = [f"{layer}.attention.attention.{name}" for name in ("query", "key", "value")]
    made = [
        *patch_rules(c.patch_size, f"{of_image}.patch_embeddings.projection"),
        TensorRule(("class_token",), (f"{of_image}.cls_token",), OF_BATCH),
        TensorRule(("positions",), (f"{of_image}.position_embeddings",), OF_BATCH),
        *rules.norm_rules(f"{LAYER}/attention/qkv", f"{layer}.layernorm_before", True, stack),
        *rules.attention_rules(
            f"{LAYER}/attention", *own, f"{layer}.attention.output.dense", fused=True, bias=True, stack=stack
        ),
        *rules.norm_rules(f"{LAYER}/mlp", f"{layer}.layernorm_after", True, stack),
        *rules.mlp_rules(f"{LAYER}/mlp", (f"{layer}.intermediate.dense",), f"{layer}.output.dense", True, stack),
        *rules.norm_rules("final_norm", f"{base}layernorm", True),
    ]
    made += rules.dense_rules("pool_dense", "pooler.dense", True) if c.pooling_head else []
    of_labels = {"head": "classifier.weight", "head_bias": "classifier.bias"} if c.num_labels else {}
    return [*made, *(TensorRule((ours,), (theirs,), rules.SAME) for ours, theirs in of_labels.items())]


VIT = Family(
    "vit",
    _class_of_vit,
    VisionEncoder,
    families.vit(Size(1, 1, 1, 1, vocab=0)),
    _VIT,
    (*CHECKS_OF_IMAGES, _pools_all, _has_labels),
    _vit_rules,
    # A model without a classifier has a pooler or none.
    by_files=lambda config, held: replace(config, pooling_head="pooler.dense.weight" in held),
)
