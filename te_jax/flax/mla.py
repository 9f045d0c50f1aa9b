"""MultiHeadLatentAttention: keys and values of all heads from one narrow latent per token, which is what the cache
holds."""

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from flax import linen as nn

from te_jax.flax._common import Initializer, activation_axes, kernel_initializer, lora_scope, residual_axes
from te_jax.flax._field_rules import adapters_are_on, latent_widths_fit, no_mlp_is_adapted, sequences_are_split
from te_jax.flax._fields import Module, check_call, shared_fields
from te_jax.flax._projections import by_heads, project_normed, project_output, spread_over_heads
from te_jax.flax._rotary import rotate
from te_jax.flax._state import describe
from te_jax.flax.attention import mask_of_rows
from te_jax.flax.cache import KVCache
from te_jax.flax.dense import DenseGeneral, LayerNormDenseGeneral
from te_jax.flax.mha import attend_heads, check_decode, input_of
from te_jax.layers import QuantizedKernel, layernorm
from te_jax.ops.attention import SequenceDescriptor
from te_jax.ops.attention.reference import scores
from te_jax.ops.rope import Scaling
from te_jax.sharding import (
    BATCH_AXES,
    HEAD_AXES,
    HIDDEN_AXES,
    SEQLEN_AXES,
    W_FSDP_AXES,
    W_NO_SHARD_AXES,
    W_TP_AXES,
)
from te_jax.sharding import with_sharding_constraint_by_logical_axes as constrain

CACHED = ("cached_rotary_key", "cached_latent")


class MultiHeadLatentAttention(Module):
    """Multi-head latent self-attention (DeepSeek-AI 2024, https://arxiv.org/abs/2412.19437, section 2.1.1).

    A token's keys and values come from a latent of kv_lora_rank channels, and its queries, with q_lora_rank, from one
    of their own; RMSNorm lies between a latent and the projection up. A head's keys are nope channels from the latent
    and rope channels, turned by RoPE, that all heads share. d = nope + rope.

    num_attention_heads:   h.
    kv_lora_rank, q_lora_rank: r and rq, the widths of the latents; q_lora_rank None: queries without a latent.
    qk_nope_head_dim, qk_rope_head_dim, v_head_dim: nope, rope (even) and e, the channels of a head.
    mscale:                logits are scaled by mscale**2 / sqrt(d); with a `YarnScaling`, its `mscale`.
    latent_rotary:         False: nothing is turned, though heads still share the rope channels of keys, as in Kimi
                           Linear (https://arxiv.org/abs/2510.26692).
    use_bias:              of the projections down and of the last one.
    layernorm_type:        of the norm of the inputs; latents have RMSNorm in any case. zero_centered_gamma is of all
                           norms, and so is layernorm_epsilon, unless latents have an epsilon of their own,
                           latent_norm_epsilon.
    low_rank_adaptation_scope: "qkv_proj" adapts all projections down and up.
    Other fields are as in `MultiHeadAttention`. cuDNN serves nope + rope = 192 and e = 128 in bf16 and f16 on Hopper,
    in training and in calls that make a cache; `te_jax.explain_attention` says so for other shapes.

    Parameters, where H is the width of the inputs:
    `q_down/{scale, ln_bias}` [H], `q_down/kernel` [H, rq], `q_up/scale` [rq], `q_up/kernel` [rq, h*d]; or, without
    q_lora_rank, `query/{scale, ln_bias}` [H], `query/kernel` [H, h*d]; and always `kv_down/kernel` [H, r + rope],
    `kv_up/scale` [r], `kv_up/kernel` [r, h*(nope + e)], `out/kernel` [h*e, H].
    A head's channels lie side by side: nope, then rope; and in `kv_up` nope, then e.
    """

    num_attention_heads: int = None  # required, as are all widths but q_lora_rank
    kv_lora_rank: int | None = None
    qk_nope_head_dim: int | None = None
    qk_rope_head_dim: int | None = None
    v_head_dim: int | None = None
    q_lora_rank: int | None = None
    mscale: float = 1.0
    attention_dropout: float = 0.0
    dropout_rng_name: str = "dropout"
    input_layernorm: bool = True
    layernorm_type: str = "rmsnorm"
    layernorm_epsilon: float = 1e-6
    return_layernorm_output: bool = False
    zero_centered_gamma: bool = False
    kernel_init: Initializer | None = None
    use_bias: bool = False
    bias_init: Initializer = nn.initializers.zeros
    attn_mask_type: str = "causal"
    rotary_pos_emb_windows: tuple[float, float] = (1, 10000)
    rotary_pos_emb_group_method: str = "consecutive"
    rotary_pos_emb_scaling: Scaling | None = None
    low_rank_adaptation_scope: str = "none"
    low_rank_adaptation_dim: int = 32
    low_rank_adaptation_alpha: float | None = None
    dtype: jnp.dtype = jnp.float32
    transpose_batch_sequence: bool = False
    enable_sequence_parallel: bool = False
    window_size: tuple[int, int] | None = None
    softmax_type: str = "vanilla"
    context_parallel_causal_load_balanced: bool = False
    context_parallel_axis: str | None = ""
    context_parallel_strategy: str = "DEFAULT"
    params_dtype: jnp.dtype | None = None
    deterministic_gradients: bool = False
    latent_rotary: bool = True
    latent_norm_epsilon: float | None = None

    rotary_pos_emb_dim = None  # no field: all rope channels are turned
    rotary_pos_emb_sections = None  # no field: a token has one position
    if not TYPE_CHECKING:  # as `Module` says
        rules = (latent_widths_fit, adapters_are_on, no_mlp_is_adapted, sequences_are_split)
        read_by_argument = ("kv_up", "kv_up/scale")  # see `_attend_cached`

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
        positions: jax.Array | None = None,
        residual: bool = False,
        norm_output: bool = True,
        max_decode_length: int | None = None,
    ) -> tuple[jax.Array, jax.Array | None]:
        """inputs_q [b, s, H] -> ([b, s, H], norm output [b, s, H] or None); [s, b, ...] with transpose_batch_sequence.

        The arguments are as in `MultiHeadAttention`; inputs_kv is None or inputs_q, and bias is added to the scaled
        logits.

        decode: as there; the collection `cache` holds the normed latents `cached_latent` [b, T, 1, r] and
            `cached_rotary_key` [b, T, 1, rope] instead of keys and values. A call of few tokens on a cache does not
            make keys and values of it: queries and outputs go through kv_up's kernel instead, in the inputs' dtype,
            whatever the recipe.

        Raises what `MultiHeadAttention` raises, and ValueError for other inputs_kv.
        """
        check_call(self, deterministic=deterministic, norm_output=norm_output, residual=residual, mask=mask, bias=bias)
        check_decode(self, decode, max_decode_length)
        if inputs_kv is not None and inputs_kv is not inputs_q:
            raise ValueError(
                f"{describe(self)}: inputs_kv is given, but latent attention is self-attention; pass None."
            )
        inputs = input_of(self, "inputs_q", inputs_q)
        mask = mask_of_rows(self, mask, inputs.shape[1 if self.transpose_batch_sequence else 0])
        cache = KVCache(self, inputs, mask, max_decode_length, CACHED) if decode else None
        query, latent, rotary, normed, through = self._project(inputs, norm_output, residual)
        query, q_rope = query[..., : self.qk_nope_head_dim], query[..., self.qk_nope_head_dim :]
        if self.latent_rotary:
            positions = cache.positions if cache and positions is None else positions
            q_rope, rotary, _ = rotate(self, (q_rope, rotary, None), positions, mask, inputs, None, decode)
        elif positions is not None:
            raise ValueError(f"{describe(self)}: positions are for RoPE; set latent_rotary, or leave them out.")
        query = query, q_rope
        if cache and not cache.fresh:
            context = self._attend_cached(query, latent, rotary, mask, bias, deterministic, cache)
        else:
            up, latent = self._kv_up(latent, norm_output=decode)
            if cache:
                cache.extend((q_rope, rotary, latent[..., None, :]))
            context = self._attend(query, up, rotary, mask, bias, deterministic, cache)
        return project_output(self, context, inputs, through), normed

    # -- projections ----------------------------------------------------------------------------------------------

    def _project(self, inputs, norm_output: bool, residual: bool):
        """-> queries [b, s, h, d], the latents [b, s, r] before their norm, the rope channels of keys [b, s, 1, rope],
        and `normed` and `through` of `Projected`."""
        h, d = self.num_attention_heads, self.qk_nope_head_dim + self.qk_rope_head_dim
        axes = dict(kernel_axes=(W_FSDP_AXES, W_NO_SHARD_AXES), bias_axes=(W_NO_SHARD_AXES,))
        shared = self._fields_of(DenseGeneral) | axes
        # What is narrow crosses devices: the latents, not the inputs.
        whole = dict(dot_input_axes=activation_axes(self, BATCH_AXES, SEQLEN_AXES, HIDDEN_AXES))
        sharded = dict(dot_input_axes=residual_axes(self))
        if self.q_lora_rank is None:
            name, first = "query", dict(features=h * d, kernel_axes=(W_FSDP_AXES, W_TP_AXES), use_bias=False) | whole
        else:
            name, first = "q_down", dict(features=self.q_lora_rank) | sharded
        fields = {name: shared | first, "kv_down": shared | dict(features=self.kv_lora_rank + self.qk_rope_head_dim)}
        (query, down), normed, through = project_normed(self, fields, inputs, None, norm_output, residual)
        if self.q_lora_rank is not None:
            name, (query, _) = "q_up", self._up("q_up", h * d)(query)
        latent, rotary = down[..., : self.kv_lora_rank], down[..., None, self.kv_lora_rank :]
        rotary = constrain(rotary, activation_axes(self, BATCH_AXES, SEQLEN_AXES, HEAD_AXES, HIDDEN_AXES))
        return by_heads(self, name, query, d), latent, rotary, normed, through

    def _fields_of(self, cls) -> dict:
        """What all projections share."""
        init = kernel_initializer(self.kernel_init, distribution="normal")
        return shared_fields(self, cls) | dict(kernel_init=init, enable_low_rank_adaptation=lora_scope(self)[0])

    @property
    def _latent_epsilon(self) -> float:
        return self.layernorm_epsilon if self.latent_norm_epsilon is None else self.latent_norm_epsilon

    def _up(self, name: str, features: int, **fields) -> LayerNormDenseGeneral:
        """The projection of a latent to heads, with the latent's norm."""
        own = dict(
            features=features,
            layernorm_type="rmsnorm",
            epsilon=self._latent_epsilon,
            scale_axes=(W_NO_SHARD_AXES,),
            kernel_axes=(W_FSDP_AXES, W_TP_AXES),
            use_bias=False,
            return_layernorm_output=False,
            layernorm_input_axes=residual_axes(self),
            dot_input_axes=activation_axes(self, BATCH_AXES, SEQLEN_AXES, HIDDEN_AXES),
        )
        return LayerNormDenseGeneral(**self._fields_of(LayerNormDenseGeneral) | own | fields, name=name)

    def _kv_up(self, latent, *, norm: bool = True, norm_output: bool = False):
        """-> nope channels of keys and values, [..., h, nope + e], of latents [..., r], and the norm's output."""
        width = self.qk_nope_head_dim + self.v_head_dim
        own = dict(enable_layernorm=norm, return_layernorm_output=norm_output)
        up, normed = self._up("kv_up", self.num_attention_heads * width, **own)(latent)
        return by_heads(self, "kv_up", up, width), normed

    # -- attention ------------------------------------------------------------------------------------------------

    @property
    def _scale(self) -> float:
        return self.mscale**2 / (self.qk_nope_head_dim + self.qk_rope_head_dim) ** 0.5

    def _attend(self, query, up, rotary, mask, bias, deterministic, cache):
        """Attention of query [b, s, h, nope] and [b, s, h, rope] to up [b, t, h, nope + e], rotary [b, t, 1, rope]."""
        nope, value = up[..., : self.qk_nope_head_dim], up[..., self.qk_nope_head_dim :]
        key = jnp.concatenate([nope, spread_over_heads(rotary, nope)], -1)
        query = jnp.concatenate(query, -1)
        own = dict(head_dim=query.shape[-1], scale_factor=self._scale)
        return attend_heads(self, (query, key, value), mask, bias, deterministic, cache, **own)

    def _attend_cached(self, query, latent, rotary, mask, bias, deterministic, cache: KVCache):
        """The same on the slots of the cache, with the call's latents [b, s, r] before their norm."""
        weights = self.get_variable("params", "kv_up") if self.has_variable("params", "kv_up") else None
        if weights is None:
            raise ValueError(
                f"{describe(self)}: decode=True reads the parameters of kv_up, which are not there; leave this "
                "submodule the one that te_jax made."
            )
        weights = nn.meta.unbox(weights)
        options = dict(norm="rmsnorm", zero_centered_gamma=self.zero_centered_gamma, epsilon=self._latent_epsilon)
        latent = layernorm(latent, weights["scale"], **options, name=describe(self))
        _, rotary, latent = cache.extend((query[0], rotary, latent[..., None, :]))
        sequence = 0 if self.transpose_batch_sequence else 1
        if not self._absorbs(query[0].shape[sequence], rotary.shape[sequence]):
            up, _ = self._kv_up(latent[..., 0, :], norm=False)
            return self._attend(query, up, rotary, mask, bias, deterministic, cache)
        to_key, to_value = self._absorbed_kernels(weights, latent.dtype)
        # The rope channels come as a bias: keys that held both would be one more copy of the cache.
        logits = self._scale * scores(*(jnp.swapaxes(x, 0, 1 - sequence) for x in (query[1], rotary)))
        bias = logits if bias is None else logits + cache.columns("bias", bias)
        of_latents = jnp.einsum("...hn,rhn->...hr", query[0], to_key)
        own = dict(head_dim=self.kv_lora_rank, scale_factor=self._scale)
        context = attend_heads(self, (of_latents, latent, latent), mask, bias, deterministic, cache, **own)
        return jnp.einsum("...hr,rhe->...he", context, to_value)

    def _absorbs(self, s: int, t: int) -> bool:
        """Whether s queries attend to t latents as they are, as one head of keys, and not to keys and values of them.

        What decides is the numbers that a head writes and reads back, in 16 bits. Keys and values are d + e for each of
        t tokens. Without them queries and outputs are large, r + rope and r for each of s tokens; and since cuDNN takes
        no head of r channels, logits are in memory, s * t in f32. With DeepSeek-V3's widths and t = 8192 that is up to
        s = 150, about where the large products, too, become more than the projection that they spare.
        """
        r, rope = self.kv_lora_rank, self.qk_rope_head_dim
        return s * (2 * r + rope + 2 * t) <= t * (self.qk_nope_head_dim + rope + self.v_head_dim)

    def _absorbed_kernels(self, weights, dtype):
        """kv_up's kernel as [r, h, nope] and [r, h, e], low-rank adaptation included."""
        kernel = weights["kernel"]
        kernel = (kernel.dequantize() if isinstance(kernel, QuantizedKernel) else kernel).astype(dtype)
        if lora_scope(self)[0]:
            a, b = weights["lora_a_kernel"], weights["lora_b_kernel"]
            alpha = self.low_rank_adaptation_alpha
            kernel = kernel + (a @ b * (1.0 if alpha is None else alpha / a.shape[-1])).astype(dtype)
        kernel = kernel.reshape(self.kv_lora_rank, self.num_attention_heads, -1)
        return kernel[..., : self.qk_nope_head_dim], kernel[..., self.qk_nope_head_dim :]
