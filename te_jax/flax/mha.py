"""MultiHeadAttention: projections, rotary positions, attention, output projection."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

from te_jax._check import Kind
from te_jax._types import on_explicit_mesh
from te_jax.flax._common import (
    Initializer,
    activation_axes,
    floating,
    in_compute_dtype,
    kernel_initializer,
    lora_scope,
    residual_axes,
    stack_kernels,
)
from te_jax.flax._context import Context
from te_jax.flax._fields import (
    Module,
    check_call,
    groups_divide_heads,
    nothing_of_later,
    rotary_fields_fit,
    warn_unused,
)
from te_jax.flax._state import describe, recipe_of
from te_jax.flax.attention import DotProductAttention, groups_of
from te_jax.flax.cache import KVCache
from te_jax.flax.dense import DenseGeneral, LayerNormDenseGeneral
from te_jax.layers._specs import entries
from te_jax.ops.attention import SequenceDescriptor
from te_jax.ops.attention_reference import parts
from te_jax.ops.rope import Scaling, check_positions, rope
from te_jax.sharding import (
    BATCH_AXES,
    HEAD_AXES,
    HIDDEN_AXES,
    HIDDEN_TP_AXES,
    JOINED_AXES,
    SEQLEN_AXES,
    W_FSDP_AXES,
    W_JOINED_AXES,
    W_NO_SHARD_AXES,
    W_TP_AXES,
    gathered_axes,
    head_axes,
    place_axis,
)
from te_jax.sharding import with_sharding_constraint_by_logical_axes as constrain

_OLDER = {  # old field -> what to use instead
    "num_heads": "num_attention_heads",
    "dropout_rate": "attention_dropout",
    "output_layernorm": "input_layernorm",
    "apply_residual_connection_post_layernorm": "return_layernorm_output",
    "fuse_qkv": "fuse_qkv_params",
}
_QKV, _QUERY_KV, _QUERY_KEY_VALUE = ("qkv",), ("query", "kv"), ("query", "key", "value")


class MultiHeadAttention(Module):
    """Multi-head attention (Vaswani et al. 2017, https://arxiv.org/abs/1706.03762), with norm, GQA and RoPE.

    Self-attention where `inputs_kv` is None, or is `inputs_q` itself, or where the parameters hold `qkv`
    (under `jax.jit` and `nn.remat` two arguments are never the same object: pass None).

    head_dim, num_attention_heads, num_gqa_groups: d, h, g (None: h).
    input_layernorm:       a norm on inputs_q; keys and values see it in self-attention alone.
    return_layernorm_output: the second result is the norm's output.
    enable_rotary_pos_emb, rotary_pos_emb_windows, rotary_pos_emb_group_method: see `te_jax.ops.rope`.
    rotary_pos_emb_dim:    the first channels of a head that RoPE turns, an even int; None is all of them.
    rotary_pos_emb_scaling: `LinearScaling`, `NTKScaling` or `Llama3Scaling` of `te_jax.ops.rope`, for longer contexts.
    low_rank_adaptation_scope: none, all, qkv_proj, output_proj, mlp, exclude_qkv_proj, exclude_output_proj,
                               exclude_mlp.
    fuse_qkv_params:       one kernel for q, k, v (self-attention, g == h), or for k, v (else); False: three
                           kernels.
    enable_sequence_parallel: the sequence axis is constrained to nvte_seqlen_tp outside the GEMMs.
    scale_attn_logits:     divide logits by sqrt(d).
    scaled_query_init:     draw the query kernel divided by sqrt(d). Weights that TransformerEngine trained
                           with its defaults need False for the first, True for the second.
    context_parallel_*:    as in `DotProductAttention`; RoPE turns each token by its place in the sequence. Decoding is
                           not cut.
    params_dtype:          of the parameters, if not None; then inputs are cast to `dtype`, and the output has it.
    Others as in `DotProductAttention`. score_mod and score_mod_bprop are not in this version; num_heads,
    dropout_rate, output_layernorm, apply_residual_connection_post_layernorm and fuse_qkv are older names, and
    refused with the newer one.

    Parameters, H and Hk the widths of inputs_q and inputs_kv:
    `qkv/{scale, ln_bias}` [H], `qkv/kernel` [H, 3, h*d]; or
    `query/{scale, ln_bias}` [H], `query/kernel` [H, h*d], `kv/kernel` [Hk, 2, g*d]; or
    `query/...`, `key/kernel`, `value/kernel` [Hk, g*d]; and always `out/kernel` [h*d, H].
    With use_bias each has a `bias` of the kernel's shape without its first axis.
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

    own_kinds = {old: Kind(f"None: an older name of {new}", lambda value: True) for old, new in _OLDER.items()}
    rules = (groups_divide_heads, rotary_fields_fit, nothing_of_later)

    def __post_init__(self):
        for old, new in _OLDER.items():
            if getattr(self, old) is not None:
                raise ValueError(f"MultiHeadAttention: {old} is an older name; use {new}.")
        for name in ("head_dim", "num_attention_heads"):
            if getattr(self, name) is None:
                raise ValueError(f"MultiHeadAttention: {name} is None; it is required: pass a positive int.")
        super().__post_init__()

    @nn.compact
    def __call__(
        self,
        inputs_q: jax.Array,
        inputs_kv: jax.Array | None = None,
        mask=None,
        bias: jax.Array | None = None,
        *,
        decode: bool = False,
        deterministic: bool = False,
        score_mod_tensors=None,
        score_mod_bprop_tensors=None,
        positions: jax.Array | None = None,
        residual: bool = False,
        norm_output: bool = True,
        max_decode_length: int | None = None,
    ) -> tuple[jax.Array, jax.Array | None]:
        """inputs_q [b, s, H], inputs_kv [b, t, Hk] -> ([b, s, H], norm output [b, s, H] or None).

        With transpose_batch_sequence all of them are [s, b, ...].

        mask: a `SequenceDescriptor`, or an array broadcastable to [b, 1, s, t], True (or 1) = masked out.
        bias: broadcastable to [b, h, s, t].
        positions: [b, s] or [s] for RoPE in self-attention, of the tokens as the inputs have them; None is 0 .. s-1, or
            the descriptor's positions, in the order that context_parallel_causal_load_balanced says; inside a
            `jax.shard_map` over the context-parallel axis, those of the device's part.
        residual: inputs_q are added to the first result; under FP8 inside of the kernels, forward and backward.

        norm_output: False leaves out the norm's output, which is else also returned by self-attention with GQA or
            separate kernels; with return_layernorm_output it is there in any case.

        decode: self-attention continues the sequences of collection `cache`, which must be mutable: the inputs are the
            next s >= 1 tokens of each row. Keys are those of the cache and of the inputs, RoPE counts on, and mask
            types, windows and the columns of `mask` and `bias` (T of them) go by positions in the whole sequence.
            A query sees no later token than the call's last. See `te_jax.flax.cache.KVCache` for the variables.
            A call that finds no cache makes it: `init` an empty one of max_decode_length slots (None: s), any other
            call one of max_decode_length slots, and writes its tokens.
            Prompts of different lengths: pass them padded on the right, and as mask
            `SequenceDescriptor.from_seqlens(lengths)`, i32[b] (of two lengths those of the queries count); the padding
            takes no slots, and no later call needs to know of it. To take n tokens back, subtract n from `cache_index`.
            Tokens past the last slot get NaN; more than T in one call are refused.
        max_decode_length: T, the slots of a cache that this call makes; without decode it has no use.

        Raises ValueError for parameters or a cache of another configuration, naming both, and for decode=True without
        a cache or in cross-attention; TypeError for a cache of another dtype.
        """
        check_call(self, decode=decode, deterministic=deterministic, norm_output=norm_output)
        check_call(self, max_decode_length=max_decode_length, residual=residual, mask=mask, bias=bias)
        if max_decode_length is not None and not decode:
            warn_unused(self, f"max_decode_length is {max_decode_length}, but decode is False: no cache is made")
        self_attention = inputs_kv is None or inputs_kv is inputs_q
        inputs_kv = None if self_attention else self._checked("inputs_kv", inputs_kv)
        inputs_q = self._checked("inputs_q", inputs_q)
        names = self._projections(inputs_q, inputs_kv)
        inputs = inputs_q, None if names == _QKV else inputs_kv
        cache = self._cache(*inputs, mask, max_decode_length) if decode else None
        *projected, normed, through = self._project(*inputs, names, norm_output, residual)
        projected = self._turned(*projected, positions, mask, *inputs, cache)
        tensors = dict(score_mod_tensors=score_mod_tensors, score_mod_bprop_tensors=score_mod_bprop_tensors)
        context = self._attend(*projected, mask, bias, deterministic, tensors, cache)
        return self._output(context, inputs_q, through), normed

    def _checked(self, name: str, x):
        """An input in the type of the computation."""
        x = floating(self, name, x)
        if x.ndim != 3:
            raise ValueError(f"{describe(self)}: {name} has shape {x.shape}; pass [batch, sequence, width].")
        return in_compute_dtype(self, x)

    def _projections(self, inputs_q, inputs_kv) -> tuple[str, ...]:
        """The names of the projections, by the configuration, and by the parameters where there are some."""
        self_attention = inputs_kv is None
        fusable = self.fuse_qkv_params and groups_of(self) == self.num_attention_heads
        due = _QUERY_KEY_VALUE if not self.fuse_qkv_params else _QKV if self_attention and fusable else _QUERY_KV
        held = tuple(name for name in ("qkv", *_QUERY_KEY_VALUE, "kv") if self.has_variable("params", name))
        if self.is_initializing() or not held or set(held) == set(due):
            return due
        if held == _QKV and fusable and inputs_kv.shape == inputs_q.shape:
            return _QKV  # self-attention whose two arguments lost their identity on the way
        kind = "self-attention" if self_attention else "cross-attention"
        raise ValueError(
            f"{describe(self)}: the parameters hold {held}, but {kind} with "
            f"fuse_qkv_params={self.fuse_qkv_params}, num_attention_heads={self.num_attention_heads}, "
            f"num_gqa_groups={groups_of(self)} reads {due}. Pass inputs_kv=None for self-attention, or the "
            "fields that the parameters were made with."
        )

    def _dense_fields(self, adapt: bool) -> dict:
        return dict(
            use_bias=self.use_bias,
            bias_init=self.bias_init,
            enable_low_rank_adaptation=adapt,
            low_rank_adaptation_dim=self.low_rank_adaptation_dim,
            low_rank_adaptation_alpha=self.low_rank_adaptation_alpha,
            dtype=self.dtype,
            params_dtype=self.params_dtype,
            transpose_batch_sequence=self.transpose_batch_sequence,
        )

    def _norm_dense(self, name: str, want_norm: bool, **fields) -> LayerNormDenseGeneral:
        return LayerNormDenseGeneral(
            enable_layernorm=self.input_layernorm,
            layernorm_type=self.layernorm_type,
            epsilon=self.layernorm_epsilon,
            zero_centered_gamma=self.zero_centered_gamma,
            scale_axes=(W_NO_SHARD_AXES,),
            ln_bias_axes=(W_NO_SHARD_AXES,),
            return_layernorm_output=want_norm or self.return_layernorm_output,
            layernorm_input_axes=residual_axes(self),
            dot_input_axes=activation_axes(self, BATCH_AXES, SEQLEN_AXES, HIDDEN_AXES),
            name=name,
            **fields,
        )

    def _project(self, inputs_q, inputs_kv, names, norm_output: bool, residual: bool):
        """query [b, s, h, d], key and value [b, t, g, d], norm output, inputs_q for the residual connection or None;
        inputs_kv None is self-attention.

        What one projection makes attention reads side by side: query [b, s, 3, h, d], None and None, or query, key
        [b, t, 2, g, d] and None.
        """
        wide, narrow = self.num_attention_heads * self.head_dim, groups_of(self) * self.head_dim
        each = kernel_initializer(self.kernel_init, distribution="normal")
        fields = self._dense_fields(lora_scope(self)[0])
        draw_query = _divided(each, math.sqrt(self.head_dim)) if self.scaled_query_init else each
        joined = dict(kernel_axes=(W_FSDP_AXES, W_JOINED_AXES, W_TP_AXES), bias_axes=(W_JOINED_AXES, W_TP_AXES))
        single = dict(kernel_axes=(W_FSDP_AXES, W_TP_AXES), bias_axes=(W_TP_AXES,))
        if names == _QKV:
            fields |= dict(features=(3, wide), kernel_init=_stacked(draw_query, each, each), **joined)
            qkv, normed, *through = self._norm_dense("qkv", False, **fields)(inputs_q, return_input=residual)
            return self._joined(checkpoint_name(qkv, "combined_qkv_proj")), None, None, normed, *(through or (None,))
        query_fields = fields | dict(features=wide, kernel_init=draw_query, **single)
        if names == _QUERY_KV:
            others = {"kv": fields | dict(features=(2, narrow), kernel_init=_stacked(each, each), **joined)}
        else:
            others = dict.fromkeys(("key", "value"), fields | dict(features=narrow, kernel_init=each, **single))
        others = {name: DenseGeneral(name=name, **fields) for name, fields in others.items()}
        # Three projections of one norm: it is quantized once, and under FP8 not even written.
        alike = len({recipe_of(self, name) for name in ("query", *others)}) == 1
        share = inputs_kv is None and alike and not fields["enable_low_rank_adaptation"]
        also = [module(inputs_q, operands=True) for module in others.values()] if share else ()
        want_norm = inputs_kv is None and (norm_output or not share)
        project = self._norm_dense("query", want_norm, **query_fields)
        query, normed, *through = project(inputs_q, return_input=residual, also=also)
        through = through[0] if through else None
        query, *rest = query if share else (query,)
        if not share:
            rest = [module(normed if inputs_kv is None else inputs_kv) for module in others.values()]
        query = self._heads(checkpoint_name(query, "query_proj"))
        if names == _QUERY_KV:
            return query, self._joined(checkpoint_name(rest[0], "combined_kv_proj")), None, normed, through
        key, value = (self._heads(checkpoint_name(x, f"{name}_proj")) for x, name in zip(rest, others))
        return query, key, value, normed, through

    def _joined(self, joined):
        """[b, s, n, heads*d] -> [b, s, n, heads, d]."""
        joined = self._split(joined)
        axes = activation_axes(self, BATCH_AXES, SEQLEN_AXES, JOINED_AXES, HEAD_AXES, HIDDEN_AXES)
        return constrain(joined, axes) if self._fits(joined) else joined

    def _heads(self, x):
        x = self._split(x)
        axes = activation_axes(self, BATCH_AXES, SEQLEN_AXES, HEAD_AXES, HIDDEN_AXES)
        return constrain(x, axes) if self._fits(x) else x

    def _split(self, x):
        """[..., heads*d] -> [..., heads, d]."""
        return self._divisible(x).reshape(*x.shape[:-1], x.shape[-1] // self.head_dim, self.head_dim)

    def _divisible(self, x):
        """x [..., heads*d], whole on every device where the devices of tensor parallelism do not divide the heads: so
        those of keys and values. ValueError where they do not divide the heads of queries."""
        names, devices = _split_over(x, -1)
        heads = x.shape[-1] // self.head_dim
        if heads % devices == 0:
            return x
        if self.num_attention_heads % devices:
            raise ValueError(
                f"{describe(self)}: num_attention_heads is {self.num_attention_heads}, but tensor parallelism over the "
                f"mesh axes {names} has {devices} devices; use a multiple of {devices} heads, or fewer devices."
            )
        return place_axis(x, -1, ())

    def _fits(self, x) -> bool:
        """Whether the devices of tensor parallelism divide the heads of x [..., heads, d]."""
        return x.shape[-2] % _split_over(x, -2)[1] == 0

    def _turned(self, query, key, value, positions, mask, inputs_q, inputs_kv, cache: KVCache | None):
        """What `_project` gave, turned by RoPE where that is on."""
        if not self.enable_rotary_pos_emb:
            if positions is not None:
                raise ValueError(
                    f"{describe(self)}: positions are for RoPE; set enable_rotary_pos_emb, or leave them out."
                )
            return query, key, value
        positions = cache.positions if cache and positions is None else positions
        at_q, at_kv = self._positions(positions, mask, inputs_q, inputs_kv, decode=cache is not None)
        query = self._rotate(query, at_q, turned=2 if key is None else None)
        key = key if key is None else self._rotate(key, at_kv, turned=1 if value is None else None)
        return query, key, value

    def _positions(self, positions, mask, inputs_q, inputs_kv, decode: bool):
        """RoPE's positions of the queries and of the keys; None is 0, 1, 2, ..."""
        if positions is not None and inputs_kv is not None:
            raise ValueError(f"{describe(self)}: positions are for self-attention; pass a SequenceDescriptor as mask.")
        if positions is not None:
            rows = inputs_q.shape[1::-1] if self.transpose_batch_sequence else inputs_q.shape[:2]
            check_positions(describe(self), positions, rows)
            return positions, positions
        described = mask if isinstance(mask, SequenceDescriptor) else None
        sources = (inputs_q, inputs_q if inputs_kv is None else inputs_kv)
        lengths = tuple(x.shape[0 if self.transpose_batch_sequence else 1] for x in sources)
        if (context := None if decode else Context.of(self)) is not None:
            return tuple(context.positions(length, side, described) for side, length in enumerate(lengths))
        if described is None:
            return None, None
        (_, at_q), (_, at_kv) = mask.tokens(*lengths)
        return at_q, at_kv

    def _rotate(self, x, positions, turned: int | None = None):
        """RoPE of [b, s, h, d], or of the first `turned` slots of [b, s, n, h, d]."""
        turn = dict(
            windows=self.rotary_pos_emb_windows,
            group_method=self.rotary_pos_emb_group_method,
            turned=turned,
            rotary_dim=self.rotary_pos_emb_dim,
            scaling=self.rotary_pos_emb_scaling,
        )
        if not self.transpose_batch_sequence:
            return rope(x, positions, **turn)
        return jnp.swapaxes(rope(jnp.swapaxes(x, 0, 1), positions, **turn), 0, 1)

    def _cache(self, inputs_q, inputs_kv, mask, max_decode_length) -> KVCache:
        if inputs_kv is not None:
            raise ValueError(f"{describe(self)}: decode=True is for self-attention; leave inputs_kv or decode out.")
        if self.context_parallel_causal_load_balanced and Context.of(self) is not None:
            raise ValueError(
                f"{describe(self)}: context_parallel_causal_load_balanced is True, but decode=True; a cache holds "
                "tokens in the order of the sequence: decode with a module that has it False."
            )
        return KVCache(self, inputs_q, mask, max_decode_length)

    def _attend(self, query, key, value, mask, bias, deterministic, tensors, cache: KVCache | None):
        mask_type, described = self.attn_mask_type, None
        if isinstance(mask, SequenceDescriptor):
            mask, described = None, mask
        if cache:
            alone, *both = parts(*(x for x in (query, key, value) if x is not None))
            keys, values = cache.extend(*both)
            if not cache.fresh:
                query, key, value = alone, keys, values
            mask, bias = cache.columns("mask", mask), cache.columns("bias", bias)
            mask_type, described = cache.mask_type(mask_type), cache.descriptor()
        key, value = _on_all_devices(query, key, value)
        context = DotProductAttention(
            head_dim=self.head_dim,
            num_attention_heads=self.num_attention_heads,
            num_gqa_groups=groups_of(self) if key is None else key.shape[-2],
            attention_dropout=self.attention_dropout,
            attn_mask_type=mask_type,
            attn_bias_type=self.attn_bias_type,
            dropout_rng_name=self.dropout_rng_name,
            float32_logits=self.float32_logits,
            qkv_layout="bs3hd" if key is None else "bshd_bs2hd" if value is None else "bshd_bshd_bshd",
            scale_factor=None if self.scale_attn_logits else 1.0,
            transpose_batch_sequence=self.transpose_batch_sequence,
            window_size=self.window_size,
            softmax_type=self.softmax_type,
            score_mod=self.score_mod,
            score_mod_bprop=self.score_mod_bprop,
            context_parallel_causal_load_balanced=self.context_parallel_causal_load_balanced and not cache,
            context_parallel_axis=None if cache else self.context_parallel_axis,
            context_parallel_strategy=self.context_parallel_strategy,
            deterministic_gradients=self.deterministic_gradients,
            name="DotProductAttention_0",
        )(
            query,
            key,
            value,
            described,
            bias,
            mask=mask,
            deterministic=deterministic,
            **tensors,
        )
        return cache.poisoned(context) if cache else context

    def _output(self, context, inputs_q, residual):
        """The last projection: [b, s, h, d] -> [b, s, H], as inputs_q, with `residual` added if it is not None."""
        context = context.reshape(*context.shape[:2], math.prod(context.shape[2:]))
        context = constrain(context, activation_axes(self, BATCH_AXES, SEQLEN_AXES, HIDDEN_TP_AXES))
        outside, whole = residual_axes(self), activation_axes(self, BATCH_AXES, SEQLEN_AXES, HIDDEN_AXES)
        project = DenseGeneral(
            features=inputs_q.shape[-1],
            kernel_init=kernel_initializer(self.kernel_init, distribution="normal"),
            kernel_axes=(W_TP_AXES, W_FSDP_AXES),
            bias_axes=(W_NO_SHARD_AXES,),
            name="out",
            **self._dense_fields(adapt=lora_scope(self)[1]),
        )
        out = project(context, residual=residual, out=inputs_q, grad_axes=gathered_axes(outside, whole))
        return checkpoint_name(constrain(out, outside), "out_proj")


def _split_over(x, axis: int) -> tuple[tuple[str, ...], int]:
    """The mesh axes that split the heads, which lie on `axis` of x, and the number of their devices."""
    aval = jax.typeof(x)
    if on_explicit_mesh(aval):
        names, mesh = entries(aval)[axis], aval.sharding.mesh
    else:
        names, mesh = head_axes(), jax.sharding.get_abstract_mesh()
    return names, math.prod(mesh.shape[name] for name in names)


def _on_all_devices(query, key, value):
    """key and value [b, t, g, d], or both in key [b, t, 2, g, d]: each head repeated for the devices of tensor
    parallelism that share it where these do not divide g. A device then has the one head that its queries read, as in
    Megatron."""
    if key is None:
        return key, value
    names, devices = _split_over(query, -2)
    copies = math.lcm(key.shape[-2], devices) // key.shape[-2]
    if copies == 1:
        return key, value
    repeat = lambda x: jnp.broadcast_to(x[..., None, :], (*x.shape[:-1], copies, x.shape[-1]))
    each = lambda x: place_axis(repeat(x).reshape(*x.shape[:-2], x.shape[-2] * copies, x.shape[-1]), -2, names)
    return each(key), value if value is None else each(value)


def _stacked(*inits: Initializer) -> Initializer:
    """One init for kernels side by side, [in, n, out]: a key each, drawn as (in, out): fan-in is `in`."""

    def init(key, shape, dtype):
        keys = jax.random.split(key, len(inits))
        each = (shape[0], shape[-1])
        return stack_kernels([draw(k, each, dtype) for draw, k in zip(inits, keys)], -2, W_JOINED_AXES)

    return init


def _divided(init: Initializer, by: float) -> Initializer:
    return lambda key, shape, dtype: jax.tree.map(lambda x: x / by, init(key, shape, dtype))  # in a box or not
