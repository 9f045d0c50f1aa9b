"""MultiHeadAttention: projections, rotary positions, attention, output projection."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from te_jax.flax import _refused
from te_jax.flax._by_position import by_chunks, temper
from te_jax.flax._common import Initializer, floating, in_compute_dtype
from te_jax.flax._context import Context
from te_jax.flax._field_rules import (
    adapters_are_on,
    groups_divide_heads,
    logits_have_one_scale,
    no_mlp_is_adapted,
    qk_norm_fields_fit,
    rotary_fields_fit,
    sequences_are_split,
    taken_keys_are_finished,
)
from te_jax.flax._fields import Module, check_call, groups_of, shared_fields, warn_unused
from te_jax.flax._keys import KeysValues
from te_jax.flax._projections import QKV, gate_output, project, project_output, projection_names
from te_jax.flax._qk_norm import normalize_heads, normalize_values
from te_jax.flax._rotary import rotate
from te_jax.flax._state import describe
from te_jax.flax.attention import DotProductAttention, mask_of_rows
from te_jax.flax.cache import CachedKeys, KVCache
from te_jax.ops.attention import SequenceDescriptor
from te_jax.ops.attention.reference import split_joined
from te_jax.ops.rope import PositionSections, Scaling
from te_jax.sharding.constraints import repeat_groups

_LAYOUTS = {1: "bs3hd", 2: "bshd_bs2hd", 3: "bshd_bshd_bshd"}  # by how many arrays hold q, k and v


class MultiHeadAttention(Module):
    """Multi-head attention (Vaswani et al. 2017, https://arxiv.org/abs/1706.03762), with norm, GQA and RoPE.

    Self-attention where `inputs_kv` is None, or is `inputs_q` itself, or where the parameters hold `qkv`
    (under `jax.jit` and `nn.remat` two arguments are never the same object: pass None).

    head_dim, num_attention_heads, num_gqa_groups: d, h, g (None: h).
    input_layernorm:       a norm on inputs_q, which keys and values read only in self-attention.
    return_layernorm_output: the second result is the norm's output.
    enable_rotary_pos_emb, rotary_pos_emb_windows, rotary_pos_emb_group_method: see `te_jax.ops.rope`.
    rotary_pos_emb_dim:    how many of a head's channels, the first ones, RoPE turns, an even int; None is all of them.
    rotary_pos_emb_scaling: `LinearScaling`, `NTKScaling`, `Llama3Scaling` or `YarnScaling` of `te_jax.ops.rope`, for
                           longer contexts; or its `ProportionalScaling`, by which some pairs turn.
    rotary_pos_emb_sections: `PositionSections` of `te_jax.ops.rope`: tokens may have several positions, as in
                           Qwen2-VL, whose text has one.
    low_rank_adaptation_scope: none, all, qkv_proj, output_proj, mlp, exclude_qkv_proj, exclude_output_proj,
                               exclude_mlp.
    fuse_qkv_params:       one parameter for q, k, v (self-attention, g == h), or for k, v (otherwise); False: three
                           parameters.
    enable_sequence_parallel: the sequence axis is constrained to nvte_seqlen_tp outside the GEMMs.
    scale_attn_logits:     divide logits by sqrt(d).
    attn_logit_scale:      multiply logits by this instead; None: as scale_attn_logits says.
    scaled_query_init:     draw the query kernel divided by sqrt(d). Weights that TransformerEngine trained
                           with its defaults need False for the first, True for the second.
    context_parallel_*:    as in `DotProductAttention`; RoPE turns each token by its place in the sequence. A call that
                           decodes is not cut.
    params_dtype:          the dtype of the parameters, if not None; then inputs are cast to `dtype`, and the output has
                           it.
    qk_norm_type:          a norm of queries and keys over the d channels of each head: "rmsnorm", "layernorm", or
                           "l2normalization", x / sqrt(sum x**2 + eps) without parameters; spelled in any case.
                           zero_centered_gamma counts for it too. The cache holds normed keys.
    qk_norm_eps:           added to the mean square, the variance or the sum of squares.
    qk_norm_before_rope:   False: the norm follows RoPE, as in Llama 4; Qwen 3 and Gemma 3 need True.
    qk_norm_across_heads:  the norm is over the channels of all heads together, h*d of queries and g*d of keys, as in
                           OLMo 2. Devices that share the heads gather them for it.
    attention_chunk_size:  c: in self-attention a query sees only keys of its own chunk of c positions, 0 .. c - 1, c ..
                           2 c - 1, ..., as in Llama 4; for attention the chunks are segments of the row.
    attn_temperature:      (n, a): queries at position p are multiplied by 1 + a log(1 + floor((p + 1) / n)), as in
                           layers of Llama 4 without RoPE (https://arxiv.org/abs/2501.19399).
    attn_output_gate:      attention's result is multiplied by the sigmoid of one more projection of inputs_q, for each
                           channel of each head, as in Qwen3-Next (https://arxiv.org/abs/2505.06708).
    v_norm_eps:            values are divided by the root of their mean square over the d channels of each head plus
                           this, as in Gemma 3n and 4; without parameters. None: no norm.
    keys_as_values:        one projection gives keys and values, before norms and RoPE, as in layers of Gemma 4.
    kv_sharing:            "give": a third result is the keys and values, behind norms and RoPE, for the argument
                           keys_values of a later self-attention with "take", which has only queries of its own, as in
                           the last layers of Gemma 3n and 4; when decoding it has no cache, and reads the other's.
    Other fields, attn_logit_softcap among them, are as in `DotProductAttention`. score_mod and score_mod_bprop are not
    in this version; num_heads, dropout_rate, output_layernorm, apply_residual_connection_post_layernorm and fuse_qkv
    are older names: the error says the newer name.

    Parameters, where H and Hk are the widths of inputs_q and inputs_kv:
    `qkv/{scale, ln_bias}` [H], `qkv/kernel` [H, 3, h*d]; or
    `query/{scale, ln_bias}` [H], `query/kernel` [H, h*d], `kv/kernel` [Hk, 2, g*d]; or
    `query/...`, `key/kernel`, `value/kernel` [Hk, g*d], the last not with keys_as_values; with kv_sharing="take" only
    `query/...`; and always `out/kernel` [h*d, H]. With attn_output_gate `gate/kernel` [H, h*d], which low-rank
    adaptation counts to the qkv projections.
    With use_bias each has a `bias` of the kernel's shape without its first axis.
    With qk_norm_type `q_norm/{scale, ln_bias}` and `k_norm/{scale, ln_bias}` [d], across heads [h*d] and [g*d].
    """

    head_dim: int = None  # required; the default lets the error for an old field name come first
    num_attention_heads: int = None  # required
    num_gqa_groups: int | None = None
    attention_dropout: float = 0.0
    dropout_rng_name: str = "dropout"
    input_layernorm: bool = True
    layernorm_type: str = "layernorm"
    layernorm_epsilon: float = 1e-6
    return_layernorm_output: bool = False
    zero_centered_gamma: bool = False
    kernel_init: Initializer | None = None
    use_bias: bool = False
    bias_init: Initializer = nn.initializers.zeros
    attn_mask_type: str = "causal"
    attn_bias_type: str | None = None
    enable_rotary_pos_emb: bool = False
    rotary_pos_emb_windows: tuple[float, float] = (1, 10000)
    rotary_pos_emb_group_method: str = "consecutive"
    low_rank_adaptation_scope: str = "none"
    low_rank_adaptation_dim: int = 32
    low_rank_adaptation_alpha: float | None = None
    dtype: jnp.dtype = jnp.float32
    fuse_qkv_params: bool = True
    transpose_batch_sequence: bool = False
    enable_sequence_parallel: bool = False
    scale_attn_logits: bool = True
    scaled_query_init: bool = False
    float32_logits: bool = False
    window_size: tuple[int, int] | None = None
    softmax_type: str = "vanilla"
    score_mod: Callable | None = None
    score_mod_bprop: Callable | None = None
    num_heads: int | None = None
    dropout_rate: float | None = None
    output_layernorm: bool | None = None
    apply_residual_connection_post_layernorm: bool | None = None
    fuse_qkv: bool | None = None
    rotary_pos_emb_dim: int | None = None
    rotary_pos_emb_scaling: Scaling | None = None
    context_parallel_causal_load_balanced: bool = False
    context_parallel_axis: str | None = ""
    context_parallel_strategy: str = "DEFAULT"
    params_dtype: jnp.dtype | None = None
    deterministic_gradients: bool = False
    qk_norm_type: str | None = None
    qk_norm_eps: float = 1e-6
    qk_norm_before_rope: bool = False
    attn_logit_softcap: float | None = None
    attn_logit_scale: float | None = None
    qk_norm_across_heads: bool = False
    attention_chunk_size: int | None = None
    attn_temperature: tuple[float, float] | None = None
    attn_output_gate: bool = False
    v_norm_eps: float | None = None
    keys_as_values: bool = False
    rotary_pos_emb_sections: PositionSections | None = None
    kv_sharing: str | None = None

    if not TYPE_CHECKING:  # as `Module` says
        own_kinds = _refused.OLDER
        rules = (
            groups_divide_heads,
            rotary_fields_fit,
            qk_norm_fields_fit,
            logits_have_one_scale,
            taken_keys_are_finished,
            adapters_are_on,
            no_mlp_is_adapted,
            sequences_are_split,
        )

    @nn.compact
    def __call__(
        self,
        inputs_q: jax.Array,
        inputs_kv: jax.Array | None = None,
        mask: jax.Array | SequenceDescriptor | None = None,
        bias: jax.Array | None = None,
        *,
        decode: bool = False,
        deterministic: bool = False,
        score_mod_tensors: Any = None,
        score_mod_bprop_tensors: Any = None,
        positions: jax.Array | None = None,
        residual: bool = False,
        norm_output: bool = True,
        max_decode_length: int | None = None,
        keys_values: KeysValues | None = None,
    ) -> tuple[jax.Array, jax.Array | None, *tuple[KeysValues, ...]]:
        """inputs_q [b, s, H], inputs_kv [b, t, Hk] -> ([b, s, H], norm output [b, s, H] or None), and with
        kv_sharing="give" the keys and values.

        With transpose_batch_sequence these arrays are [s, b, ...].

        mask: a `SequenceDescriptor`, or an array broadcastable to [b, h, s, t] or [b, g, h / g, s, t], True (or 1) =
            masked out. While the module is initializing, one of another batch size than the inputs' has no effect.
        bias: broadcastable to [b, h, s, t].
        positions: [b, s] or [s], the positions for RoPE in self-attention, in the order of the inputs; None is
            0 .. s-1, or the descriptor's positions, in the order that context_parallel_causal_load_balanced says.
            Inside a `jax.shard_map` over the context-parallel axis, the positions of the device's part. With
            rotary_pos_emb_sections also [n, b, s], n positions of each token.
        residual: inputs_q are added to the first result; under FP8 inside of the kernels, forward and backward.

        norm_output: False leaves out the norm's output, which self-attention with GQA or separate parameters would
            return too; with return_layernorm_output it is returned in any case.

        decode: self-attention continues the sequences of collection `cache`, which must be mutable: the inputs are the
            next s >= 1 tokens of each row. Keys come from the cache and the inputs, RoPE counts on, and mask types,
            windows and the columns of `mask` and `bias` (T of them) go by positions in the whole sequence.
            A query sees no later token than the call's last. See `te_jax.flax.cache.KVCache` for the variables.
            A call that finds no cache makes it: `init` an empty one of max_decode_length slots (None: s), any other
            call one of max_decode_length slots, and writes its tokens.
            Prompts of different lengths: pass them padded on the right, and as mask
            `SequenceDescriptor.from_seqlens(lengths)`, i32[b] (of two lengths, the queries' count); the padding takes
            no slots, and no later call needs to know of it. To take n tokens back, subtract n from `cache_index`.
            Tokens past the last slot get NaN; more than T tokens in one call are refused.
        max_decode_length: T, the slots of a cache that this call makes; without decode it has no use.
        keys_values: with kv_sharing="take": what a module with "give" returned, of the same tokens. `init` needs none.

        Raises ValueError for parameters or a cache of another configuration, naming both, and for decode=True without
        a cache or in cross-attention; TypeError for a cache of another dtype.
        """
        check_call(self, deterministic=deterministic, norm_output=norm_output, residual=residual, mask=mask, bias=bias)
        check_decode(self, decode, max_decode_length)
        check_call(self, score_mod_tensors=score_mod_tensors, score_mod_bprop_tensors=score_mod_bprop_tensors)
        self_attention = inputs_kv is None or inputs_kv is inputs_q
        inputs_kv = None if self_attention else input_of(self, "inputs_kv", inputs_kv)
        inputs_q = input_of(self, "inputs_q", inputs_q)
        mask = mask_of_rows(self, mask, inputs_q.shape[1 if self.transpose_batch_sequence else 0])
        taken = taken_keys(self, keys_values, inputs_q, inputs_kv, decode)
        names = projection_names(self, inputs_q, inputs_kv)
        inputs = inputs_q, None if names == QKV else inputs_kv
        if decode and inputs[1] is not None:
            raise ValueError(f"{describe(self)}: decode=True is for self-attention; leave inputs_kv or decode out.")
        cache: CachedKeys | None = None
        if taken is not None:
            cache = None if taken.slots is None else CachedKeys(self, taken.slots)
        elif decode:
            cache = KVCache(self, inputs_q, mask, max_decode_length)
        arrays, normed, through, gate = project(self, names, *inputs, norm_output, residual)
        arrays = normalize_values(self, arrays)
        arrays = normalize_heads(self, arrays) if self.qk_norm_before_rope else arrays
        by_position = self.attn_temperature is not None or self.attention_chunk_size is not None
        if by_position and inputs[1] is not None:
            raise ValueError(
                f"{describe(self)}: attn_temperature and attention_chunk_size are for self-attention; leave them, or "
                "inputs_kv, out."
            )
        if self.enable_rotary_pos_emb or self.attn_temperature is not None:
            positions = cache.positions if cache and positions is None else positions
        elif positions is not None:
            raise ValueError(f"{describe(self)}: positions are for RoPE; set enable_rotary_pos_emb, or leave them out.")
        arrays = by_place(self, arrays, positions, mask, *inputs, decode)
        if taken is not None:
            arrays = *arrays, taken.key, taken.value
        elif isinstance(cache, KVCache):
            arrays = cache.extend(arrays)
        scale = self.attn_logit_scale if self.scale_attn_logits else 1.0
        context = attend_heads(self, arrays, mask, bias, deterministic, cache, scale_factor=scale)
        context = context if gate is None else gate_output(context, gate)
        out = project_output(self, context, inputs_q, through), normed
        if self.kv_sharing != "give":
            return out
        return *out, KeysValues(*split_joined(*arrays)[1:], cache.slots if cache else None)


def by_place(module: nn.Module, arrays: tuple[jax.Array, ...], *where: Any) -> tuple[jax.Array, ...]:
    """`Projected.arrays` with RoPE, norms behind it, and the temperature of queries. where: as of `rotate`."""
    arrays = rotate(module, arrays, *where) if module.enable_rotary_pos_emb else arrays
    arrays = arrays if module.qk_norm_before_rope else normalize_heads(module, arrays)
    return temper(module, arrays, *where)


def check_keys_values(module: nn.Module, keys_values: KeysValues | None) -> None:
    """Raises TypeError for a `keys_values` that is none, ValueError for one that the module has no use for."""
    check_call(module, keys_values=keys_values)
    if keys_values is not None and module.kv_sharing != "take":
        raise ValueError(
            f"{describe(module)}: keys_values are given, but kv_sharing is {module.kv_sharing!r}; set it 'take', or "
            "leave them out."
        )


def taken_keys(
    module: nn.Module, keys_values: KeysValues | None, inputs_q: jax.Array, inputs_kv: jax.Array | None, decode: bool
) -> KeysValues | None:
    """`keys_values` of a module with kv_sharing="take", zeros in `init`; None for another module.

    Raises as `check_keys_values`; ValueError where there are none, and for another call's.
    """
    check_keys_values(module, keys_values)
    if module.kv_sharing is not None and inputs_kv is not None:
        raise ValueError(f"{describe(module)}: kv_sharing is for self-attention; leave inputs_kv or kv_sharing out.")
    if module.kv_sharing != "take":
        return None
    batch = 1 if module.transpose_batch_sequence else 0
    shape = [*inputs_q.shape[:2], groups_of(module), module.head_dim]
    if keys_values is None and module.is_initializing():
        zeros = jnp.zeros(shape, inputs_q.dtype)
        return KeysValues(zeros, zeros, None)
    if keys_values is None:
        raise ValueError(
            f"{describe(module)}: kv_sharing is 'take', but there are no keys_values; pass the last result of a layer "
            "with kv_sharing='give'."
        )
    found = keys_values.key.shape
    if decode and len(found) == len(shape):  # of a cache, which is longer
        shape[1 - batch] = found[1 - batch]
    if found != tuple(shape) or keys_values.value.shape != found:
        raise ValueError(
            f"{describe(module)}: keys_values have shapes {found} and {keys_values.value.shape}, but the fields and "
            f"inputs of this call need {tuple(shape)}; pass what a layer with as many heads of the same width gives."
        )
    if (keys_values.slots is not None) != decode:
        kind = "a call without decode" if decode else "a call with decode=True"
        raise ValueError(f"{describe(module)}: decode is {decode}, but keys_values are of {kind}; pass this one's.")
    return keys_values


def check_decode(module: nn.Module, decode: bool, max_decode_length: int | None) -> None:
    """Raises TypeError or ValueError for arguments that are not of their kind; warns of a length without a cache."""
    check_call(module, decode=decode, max_decode_length=max_decode_length)
    if max_decode_length is not None and not decode:
        warn_unused(module, f"max_decode_length is {max_decode_length}, but decode is False: no cache is made")


def attend_heads(
    module: nn.Module,
    arrays: Sequence[jax.Array],
    mask: Any,
    bias: jax.Array | None,
    deterministic: bool,
    cache: CachedKeys | None,
    **own: Any,
) -> jax.Array:
    """DotProductAttention of (q, k, v), (q, kv) or (qkv,), with the fields of `module` and `own` -> [b, s, h, e].

    cache: when decoding, the cache whose slots keys and values are.
    """
    fields, descriptor = shared_fields(module, DotProductAttention), None
    if isinstance(mask, SequenceDescriptor):
        mask, descriptor = None, mask
    chunk = getattr(module, "attention_chunk_size", None)
    if chunk is not None and not cache and Context.of(module) is not None:
        raise ValueError(
            f"{describe(module)}: attention_chunk_size is {chunk}, but the sequence is cut along a mesh axis; set "
            "context_parallel_axis=None."
        )
    if cache:
        descriptor = cache.descriptor()
        mask, bias = cache.columns("mask", mask), cache.columns("bias", bias)
        fields |= cache.fields()
    if chunk is not None and (not cache or cache.fresh):
        shape = arrays[0].shape[1::-1] if module.transpose_batch_sequence else arrays[0].shape[:2]
        descriptor = by_chunks(descriptor, *shape, chunk)
    arrays = repeat_groups(*arrays)
    fields |= dict(num_gqa_groups=arrays[-1].shape[-2], qkv_layout=_LAYOUTS[len(arrays)], **own)
    core = DotProductAttention(**fields, name="DotProductAttention_0")
    query, key, value = (*arrays, None, None)[:3]
    context = core(query, key, value, descriptor, bias, mask=mask, deterministic=deterministic)
    return cache.spoil_lost(context) if cache else context


def input_of(module: nn.Module, name: str, x: Any) -> jax.Array:
    """The input `name`, [batch, sequence, width], in the dtype of the computation."""
    x = floating(module, name, x)
    if x.ndim != 3:
        raise ValueError(f"{describe(module)}: {name} has shape {x.shape}; pass [batch, sequence, width].")
    return in_compute_dtype(module, x)
