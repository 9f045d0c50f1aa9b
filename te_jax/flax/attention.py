"""DotProductAttention: layouts, the softmax offset's parameter, dropout keys, one call."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from te_jax.core.check import FLOATING, NONE, plain
from te_jax.flax._common import dropout_key, floating
from te_jax.flax._context import Context
from te_jax.flax._field_rules import groups_divide_heads
from te_jax.flax._fields import Module, check_call, groups_of
from te_jax.flax._state import attention_metas, describe, recipe_of
from te_jax.layers.fp8_attention import attend_by_recipe
from te_jax.ops.attention import SequenceDescriptor, dot_product_attention
from te_jax.ops.attention.op import operand_types
from te_jax.ops.attention.options import check_options, sort_masks, warn_of_padding
from te_jax.sharding import HEAD_AXES

# Where checkpoints hold the learnable softmax's offset; new ones get the first.
_OFFSET_SCOPES = ("_FusedDotProductAttention_0", "_UnfusedDotProductAttention_0")


class _SoftmaxOffset(nn.Module):
    num_attention_heads: int

    @nn.compact
    def __call__(self) -> jax.Array:  # f32[1, h, 1, 1]
        init = nn.with_logical_partitioning(nn.initializers.zeros, (None, HEAD_AXES, None, None))
        return self.param("softmax_offset", init, (1, self.num_attention_heads, 1, 1), jnp.float32)


def mask_of_rows(module: nn.Module, mask: Any, rows: int) -> Any:
    """`mask`, an array or a SequenceDescriptor, unless `module` is initializing and the mask is one of another number
    of rows than the inputs: then None, for only shapes count, and inputs of one row may stand for a batch."""
    if not module.is_initializing() or mask is None:
        return mask
    if isinstance(mask, SequenceDescriptor):
        fits = all(x.shape[:1] == (rows,) for x in jax.tree.leaves(mask))
    else:
        fits = np.ndim(mask) < 3 or mask.shape[0] in (1, rows)
    return mask if fits else None


class DotProductAttention(Module):
    """softmax(scale * q k^T + bias, masked) v per head, with logits in float32.

    head_dim, num_attention_heads, num_gqa_groups: d, h, g (None: h).
    attention_dropout:    the rate of dropout on the probabilities, unless `deterministic`.
    attn_mask_type:       no_mask, padding, causal, causal_bottom_right, padding_causal,
                          padding_causal_bottom_right, in all spellings of `te_jax.ops.attention` and in any case. A
                          padding type without a mask or descriptor hides nothing more, and warns.
    attn_bias_type:       None ("post_scale_bias" where a bias is given), "no_bias", "pre_scale_bias",
                          "post_scale_bias", in any case.
    dtype:                deprecated; None, or the dtype of the query.
    float32_logits:       accepted; logits are float32 always.
    qkv_layout:           bshd_bshd_bshd; bs3hd (`query` [b, s, 3, h, d] has q, k and v, and cuDNN reads them there);
                          bshd_bs2hd (`key` [b, t, 2, g, d] has k and v); t3hd, thd_t2hd, thd_thd_thd have these
                          shapes too, with several segments per row.
    scale_factor:         None is 1 / sqrt(head_dim).
    transpose_batch_sequence: arrays are [s, b, ...].
    window_size:          (l, r): query i sees keys i - l .. i + r; negative is open; None is all.
    max_segments_per_seq: 1 limits nothing. A larger number promises that segment ids go up to it, that each id is one
                          run of tokens, and that positions are consecutive in a run; cuDNN then takes the segments as
                          lengths, without an s x t mask.
    context_parallel_axis: the mesh axis that cuts the sequence (`te_jax.ops.attention_context`); "" is the cp_resource
                          of the MeshResource in force, None is no axis. Arrays are whole; inside a `jax.shard_map` over
                          the axis, they are a device's part of the sequence.
    context_parallel_strategy: "ALL_GATHER" (also "DEFAULT", "ALLGATHER") or "RING", in any case.
    context_parallel_causal_load_balanced: tokens are in the order of
                          `te_jax.sharding.reorder_causal_load_balancing`; a sequence_descriptor is not.
    context_checkpoint_name: the name of the output for `jax.checkpoint` policies.
    softmax_type:         "vanilla", "off_by_one" (1 joins the denominator), "learnable" (exp of a parameter
                          per head joins it).
    score_mod, score_mod_bprop: not in this version.
    return_max_logit:     also return the largest logit of each head, f32[h].
    deterministic_gradients: the gradients are the same bits in every run, which cuDNN does not promise otherwise.
    attn_logit_softcap:   c: scaled logits x become c * tanh(x / c), as in Gemma 2; only in plain JAX, which has the
                          s x t logits in memory.

    Under a recipe with fp8_dpa=True, a full or causal call in bf16 or f16 that has none of the other options, with a
    head dim of 16, 32, .. 128, is `te_jax.layers.attention_fp8`. Another call warns, once, and computes in the dtype
    of the arrays (`te_jax.explain_attention` says why). Both have the state `{q,k,v,o,do,dq,dk,dv,dp}_scale` and
    `..._amax_history` in `fp8_metas`.

    The learnable softmax has a parameter, `_FusedDotProductAttention_0/softmax_offset` f32[1, h, 1, 1]; parameters that
    hold it under `_UnfusedDotProductAttention_0` are read there.
    """

    head_dim: int
    num_attention_heads: int
    num_gqa_groups: int | None = None
    attention_dropout: float = 0.0
    attn_mask_type: str = "causal"
    attn_bias_type: str | None = None
    dtype: jnp.dtype | None = None
    dropout_rng_name: str = "dropout"
    float32_logits: bool = False
    qkv_layout: str = "bshd_bshd_bshd"
    scale_factor: float | None = None
    transpose_batch_sequence: bool = False
    window_size: tuple[int, int] | None = None
    max_segments_per_seq: int = 1
    context_parallel_causal_load_balanced: bool = False
    context_parallel_axis: str | None = ""
    context_parallel_strategy: str = "DEFAULT"
    context_checkpoint_name: str = "context"
    softmax_type: str = "vanilla"
    score_mod: Callable | None = None
    score_mod_bprop: Callable | None = None
    return_max_logit: bool = False
    deterministic_gradients: bool = False
    attn_logit_softcap: float | None = None

    if not TYPE_CHECKING:  # as `Module` says
        own_kinds = {"dtype": NONE | FLOATING}
        rules = (groups_divide_heads,)

    @nn.compact
    def __call__(
        self,
        query: jax.Array,
        key: jax.Array | None = None,
        value: jax.Array | None = None,
        sequence_descriptor: jax.Array | SequenceDescriptor | None = None,
        bias: jax.Array | None = None,
        *,
        deterministic: bool = False,
        mask: jax.Array | None = None,
        score_mod_tensors: Any = None,
        score_mod_bprop_tensors: Any = None,
    ) -> jax.Array | Any:  # a pair only with return_max_logit
        """query [b, s, h, d], key [b, t, g, d], value [b, t, g, dv] (see `qkv_layout`) -> [b, s, h, dv].

        sequence_descriptor: lengths or segments of the rows; or what `mask` may be.
        bias: broadcastable to [b, h, s, t].
        mask: broadcastable to [b, h, s, t] or [b, g, h / g, s, t], True (or 1) where a key is masked out, whatever the
            mask type; or a `SequenceDescriptor`. While the module is initializing, a mask or descriptor of another
            batch size than the inputs' has no effect.

        Returns the output, or (output, max_logit f32[h]) with `return_max_logit`.
        Raises ValueError (TypeError for dtypes) for shapes that contradict the fields and for unknown field
        values.
        """
        check_call(self, deterministic=deterministic)
        check_call(self, score_mod_tensors=score_mod_tensors, score_mod_bprop_tensors=score_mod_bprop_tensors)
        arrays = self._unpack(query, key, value)
        types = operand_types(*arrays)
        mask, sequence_descriptor = sort_masks(describe(self), mask, sequence_descriptor)
        self._check(*types, sequence_descriptor)
        rows = types[0].shape[0]
        mask, sequence_descriptor = (mask_of_rows(self, each, rows) for each in (mask, sequence_descriptor))
        if sequence_descriptor is not None and self.max_segments_per_seq > 1:
            sequence_descriptor = sequence_descriptor.of_runs(self.max_segments_per_seq)
        if not self.is_initializing():  # then only shapes count
            warn_of_padding(describe(self), self.attn_mask_type, mask, sequence_descriptor)
        metas, context = attention_metas(self), Context.of(self)
        cut = None if context is None else context.cut(self, *types[:2])
        keywords = self._keywords(sequence_descriptor, bias, mask, deterministic)
        options = check_options(dot_product_attention, *types, keywords, cut=cut)
        result = attend_by_recipe(arrays, options, recipe_of(self), metas)
        out, max_logit = result if self.return_max_logit else (result, None)
        if self.transpose_batch_sequence:
            out = jnp.swapaxes(out, 0, 1)
        return (out, max_logit) if self.return_max_logit else out

    def _keywords(self, sequence_descriptor, bias, mask, deterministic: bool) -> dict:
        """The keywords of `dot_product_attention`."""
        drops = self.attention_dropout > 0 and not deterministic
        return dict(
            bias=bias,
            mask=mask,
            attn_mask_type=self.attn_mask_type,
            attn_bias_type=self.attn_bias_type,
            softmax_type=self.softmax_type,
            softmax_offset=self._softmax_offset(),
            scale=self.scale_factor,
            logit_softcap=self.attn_logit_softcap,
            window_size=self.window_size,
            dropout_rate=self.attention_dropout if drops else 0.0,
            dropout_rng=dropout_key(self, self.dropout_rng_name) if drops else None,
            sequence_descriptor=sequence_descriptor,
            return_max_logit=self.return_max_logit,
            deterministic=self.deterministic_gradients,
            seq_major=bool(self.transpose_batch_sequence),
            context_checkpoint_name=self.context_checkpoint_name,
            name=describe(self),
        )

    def _softmax_offset(self) -> jax.Array | None:
        if plain(self.softmax_type) != "learnable":
            return None
        new, other = _OFFSET_SCOPES
        held = other if self.has_variable("params", other) and not self.has_variable("params", new) else new
        return _SoftmaxOffset(self.num_attention_heads, name=held)()

    def _unpack(self, query, key, value):
        """(qkv,), (query, kv) or (query, key, value), as `qkv_layout` says, batch first."""
        layout = self.qkv_layout.lower()
        separate = layout.count("_") + 1  # how many arrays the layout has
        arrays = (("query", query, 1), ("key", key, 2), ("value", value, 3))
        for name, x, _ in arrays[separate:]:
            if x is not None:
                raise ValueError(f"{describe(self)}: {name} must be None with qkv_layout {layout!r}.")
        given = tuple(floating(self, name, x) for name, x, _ in arrays[:separate])
        for x, (name, _, at) in zip(given, arrays):
            count = 4 - separate if at == separate else 1  # the last array has what is left of q, k and v
            shape = "[b, s, heads, d]" if count == 1 else f"[b, s, {count}, heads, d]"
            if x.ndim != (4 if count == 1 else 5) or (count > 1 and x.shape[2] != count):
                raise ValueError(f"{describe(self)}: {name} has shape {x.shape}; qkv_layout {layout!r} takes {shape}.")
        return tuple(jnp.swapaxes(x, 0, 1) for x in given) if self.transpose_batch_sequence else given

    def _check(self, query, key, value, sequence_descriptor):
        groups = groups_of(self)
        for name, x, heads, width in (
            ("query", query, self.num_attention_heads, self.head_dim),
            ("key", key, groups, self.head_dim),
            ("value", value, groups, value.shape[-1]),
        ):
            if x.shape[-2:] != (heads, width):
                raise ValueError(
                    f"{describe(self)}: {name} has shape {x.shape}, but the fields say {heads} heads of "
                    f"width {width} in its last two axes: num_attention_heads, num_gqa_groups, head_dim."
                )
        for name, x in (("key", key), ("value", value)):
            if x.dtype != query.dtype:
                raise TypeError(f"{describe(self)}: {name} is {x.dtype}, but query is {query.dtype}; cast one of them.")
            if x.shape[:-2] != key.shape[:-2] or x.shape[0] != query.shape[0]:
                raise ValueError(
                    f"{describe(self)}: query has shape {query.shape}, key {key.shape}, value {value.shape}; pass one "
                    "batch size, and one length of keys and values."
                )
        if self.dtype is not None and jnp.dtype(self.dtype) != query.dtype:
            raise ValueError(
                f"{describe(self)}: dtype is {jnp.dtype(self.dtype)}, query is {query.dtype}; leave it None."
            )
        if self.qkv_layout.lower().startswith("t") and sequence_descriptor is None:
            raise ValueError(
                f"{describe(self)}: qkv_layout {self.qkv_layout!r} has several segments per row; pass a "
                "sequence_descriptor that tells where they are."
            )
