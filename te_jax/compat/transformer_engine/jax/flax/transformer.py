"""`transformer_engine.jax.flax.transformer`: te_jax's modules with the defaults of TransformerEngine."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import linen as nn

import te_jax.flax as te_flax
from te_jax.compat._absent import GetAttr, absent
from te_jax.flax import RelativePositionBiases as RelativePositionBiases
from te_jax.flax import TransformerLayerType as TransformerLayerType
from te_jax.flax import extend_logical_axis_rules as extend_logical_axis_rules
from te_jax.flax._context import Context
from te_jax.flax._fields import LORA_SCOPES, is_decoder
from te_jax.ops.rope import rope

__getattr__: GetAttr = absent("transformer_engine.jax.flax.transformer")


def balanced_rows_have_one_segment(module: nn.Module) -> str | None:
    """A balanced sequence of several segments per row is in stripes in TransformerEngine, which te_jax has not."""
    if not module.qkv_layout.lower().startswith("t") or not module.context_parallel_causal_load_balanced:
        return None
    if Context.of(module) is not None:
        return (
            f"qkv_layout is {module.qkv_layout!r} and context_parallel_causal_load_balanced is True, which means "
            "ReorderStrategy.Striped in TransformerEngine; te_jax balances only by DualChunkSwap: reorder by that, "
            "and use te_jax.flax.DotProductAttention, whose sequence_descriptor is in the order of the sequence"
        )


class DotProductAttention(te_flax.DotProductAttention):
    """`te_jax.flax.DotProductAttention`, which refuses a sequence in stripes."""

    rules: ClassVar[tuple[Any, ...]] = (*te_flax.DotProductAttention.rules, balanced_rows_have_one_segment)


class MultiHeadAttention(te_flax.MultiHeadAttention):
    """`te_jax.flax.MultiHeadAttention` with T5's logits: the query kernel starts divided by sqrt(d), they are not."""

    scale_attn_logits: bool = False
    scaled_query_init: bool = True


class TransformerLayer(te_flax.TransformerLayer):
    """`te_jax.flax.TransformerLayer` as TransformerEngine has it.

    Relative embedding is on, unless relative_embedding is False; logits are as in `MultiHeadAttention`. hidden_size
    makes only the width of a head, and the inputs may have another width. In a decoder, cross-attention has the window
    and the rotary positions of self-attention, and no drop path behind it.
    """

    enable_relative_embedding: bool = True
    scale_attn_logits: bool = False
    scaled_query_init: bool = True
    cross_drop_path: float | None = 0.0

    any_width = True

    def __post_init__(self) -> None:
        if self.relative_embedding is False:
            self.enable_relative_embedding = False
        if is_decoder(self):
            self.cross_window_size: tuple[int, int] | None = self.cross_window_size or self.window_size
            self.cross_rotary_pos_emb: bool = self.cross_rotary_pos_emb or self.enable_rotary_pos_emb
        super().__post_init__()


def rotary_pos_emb(
    x: jax.Array, windows: tuple[float, float], transpose_batch_sequence: bool, group_method: str = "consecutive"
) -> jax.Array:
    """`te_jax.ops.rope.rope` of x [b, s, ..., h, d], or [s, b, ..., h, d] where `transpose_batch_sequence` is True."""
    sequence = 0 if transpose_batch_sequence else 1
    positions = jax.lax.broadcasted_iota(jnp.int32, x.shape[:2], sequence)
    rows = x.reshape(*x.shape[:2], math.prod(x.shape[2:-1]), x.shape[-1])
    return rope(rows, positions, windows=windows, group_method=group_method).reshape(x.shape)


@dataclass
class LoRAScope:
    """Which projections of a layer are adapted."""

    qkv_proj: bool = False
    output_proj: bool = False
    mlp: bool = False


def _canonicalize_lora_scope(scope: str | None) -> LoRAScope:
    scope = "none" if scope is None else scope.lower()
    if scope not in LORA_SCOPES:
        raise ValueError(f"low_rank_adaptation_scope is {scope!r}; pass one of {', '.join(LORA_SCOPES)}.")
    return LoRAScope(*LORA_SCOPES[scope])
