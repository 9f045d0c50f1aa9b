"""SigLIP's encoder of images."""

from functools import cache

import jax.numpy as jnp

from te_jax.core.check import BOOL
from te_jax.hf import rules
from te_jax.hf.family import ELSEWHERE, LAYER, Family, at_most, divides, dropout, epsilon
from te_jax.hf.rules import Recast, TensorRule
from te_jax.hf.words import LAYERS, SIZE, Word, fixed, words_of
from te_jax.models import ModelConfig, VisionEncoder, families
from te_jax.models.families import Size

OF_IMAGES = (
    Word("hidden_size", SIZE, 768, to=("hidden_size",)),
    Word("intermediate_size", SIZE, 3072, to=("layer/mlp_hidden_size",)),
    Word("num_hidden_layers", LAYERS, 12, to=("num_layers",)),
    Word("num_attention_heads", SIZE, 12, to=("layer/num_attention_heads",)),
    Word("num_channels", SIZE, 3, to=("image_channels",)),
    Word("image_size", SIZE, 224, to=("image_size",)),
    Word("patch_size", SIZE, 16, to=("patch_size",)),
    epsilon("layer_norm_eps"),
    *ELSEWHERE,
)
CHECKS_OF_IMAGES = (divides("num_attention_heads", "hidden_size"), at_most("patch_size", "image_size"))
_SIGLIP = words_of(
    *OF_IMAGES,
    fixed("hidden_act", "gelu_pytorch_tanh"),
    dropout("attention_dropout", "attention_dropout"),
    Word("vision_use_head", BOOL, True, to=("pooling_head",)),
    layer_norm_eps=1e-6,
    attention_dropout=0.0,
)


def patch_rules(p: int, name: str) -> list[TensorRule]:
    """The convolution `name`, whose kernel [H, c, p, p] is the dense one [p * p * c, H] of patches [p, p, c]."""
    return [
        TensorRule(("embedding",), (f"{name}.weight",), _of_patches(p)),
        TensorRule(("embedding_bias",), (f"{name}.bias",), rules.SAME),
    ]


@cache
def _of_patches(p: int) -> Recast:
    return Recast(
        lambda a: (a.transpose(2, 3, 1, 0).reshape(-1, a.shape[0]),),
        lambda a: (a.reshape(p, p, -1, a.shape[-1]).transpose(3, 2, 0, 1),),
    )


# A tensor with an axis of 1 in front.
OF_BATCH = Recast(lambda a: (a[0],), lambda a: (a[None],))


@cache
def _query_and_kv_bias(queries: int) -> Recast:
    """The biases of queries, so many channels, keys and values in one tensor as [out] and [2, out]."""
    return Recast(
        lambda a: (a[:queries], a[queries:].reshape(2, -1)), lambda q, kv: (jnp.concatenate([q, kv.reshape(-1)]),)
    )


def _siglip_rules(c: ModelConfig) -> list[TensorRule]:
    stack, layer = "layers", "encoder.layers.{i}"
    pool, width = "head", c.hidden_size
    own = [f"{layer}.self_attn.{name}_proj" for name in ("q", "k", "v", "out")]
    made = [
        *patch_rules(c.patch_size, "embeddings.patch_embedding"),
        TensorRule(("positions",), ("embeddings.position_embedding.weight",), rules.SAME),
        *rules.norm_rules(f"{LAYER}/attention/qkv", f"{layer}.layer_norm1", True, stack),
        *rules.attention_rules(f"{LAYER}/attention", *own, fused=True, bias=True, stack=stack),
        *rules.norm_rules(f"{LAYER}/mlp", f"{layer}.layer_norm2", True, stack),
        *rules.mlp_rules(f"{LAYER}/mlp", (f"{layer}.mlp.fc1",), f"{layer}.mlp.fc2", True, stack),
        *rules.norm_rules("final_norm", "post_layernorm", True),
    ]
    if not c.pooling_head:
        return made
    both = lambda end: tuple(f"pool_attention/{name}/{end}" for name in ("query", "kv"))
    return [
        *made,
        TensorRule(("pool_probe",), (f"{pool}.probe",), OF_BATCH),
        TensorRule(both("kernel"), (f"{pool}.attention.in_proj_weight",), rules.query_and_kv(width)),
        TensorRule(both("bias"), (f"{pool}.attention.in_proj_bias",), _query_and_kv_bias(width)),
        *rules.dense_rules("pool_attention/out", f"{pool}.attention.out_proj", True),
        *rules.norm_rules("pool_mlp", f"{pool}.layernorm", True),
        *rules.mlp_rules("pool_mlp", (f"{pool}.mlp.fc1",), f"{pool}.mlp.fc2", True),
    ]


SIGLIP_VISION = Family(
    "siglip_vision_model",
    "SiglipVisionModel",
    VisionEncoder,
    families.siglip(Size(1, 1, 1, 1, vocab=0)),
    _SIGLIP,
    CHECKS_OF_IMAGES,
    _siglip_rules,
    ("embeddings.position_ids",),
    old_prefix="vision_model.",
)
