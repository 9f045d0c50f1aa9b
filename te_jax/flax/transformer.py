"""TransformerLayer: encoder or decoder block of the modules of this package."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from te_jax.flax._common import Dropout, Initializer, floating, in_compute_dtype, parameter, residual_axes
from te_jax.flax._field_rules import (
    activations_take_their_params,
    adapters_are_on,
    cross_fields_need_a_decoder,
    experts_have_an_mlp_next_to_them,
    experts_take_the_place_of_the_mlp,
    groups_divide_heads,
    head_width_is_known,
    latent_attention_stands_alone,
    logits_have_one_scale,
    norms_in_front_are_there,
    parallel_layers_are_encoders,
    qk_norm_fields_fit,
    relative_embedding_is_a_bias,
    rotary_fields_fit,
    sequences_are_split,
    taken_keys_are_finished,
)
from te_jax.flax._fields import (
    Module,
    TransformerLayerType,
    check_call,
    has_relative_embedding,
    head_width,
    is_decoder,
    shared_fields,
)
from te_jax.flax._keys import KeysValues
from te_jax.flax._layer_input import add_layer_input, check_layer_input
from te_jax.flax._mixers import mixers_stand_alone
from te_jax.flax._state import describe
from te_jax.flax.cache import extent
from te_jax.flax.gated_delta import GatedDeltaNet
from te_jax.flax.mamba import Mamba2
from te_jax.flax.mha import MultiHeadAttention, check_keys_values
from te_jax.flax.mla import MultiHeadLatentAttention
from te_jax.flax.mlp import LayerNormMLP, mlp_of_layer
from te_jax.flax.moe import MoEBlock
from te_jax.flax.norm import LayerNorm, whole_norm
from te_jax.flax.relpos import RelativePositionBiases
from te_jax.ops.attention import SequenceDescriptor
from te_jax.ops.rope import PositionSections, Scaling
from te_jax.sharding import W_FSDP_AXES, W_NO_SHARD_AXES, W_TP_AXES
from te_jax.sharding import with_sharding_constraint_by_logical_axes as constrain


class TransformerLayer(Module):
    """One transformer layer: self-attention, in a decoder cross-attention, MLP; each with norm and residual.

    With parallel_attention_mlp: x + attention(norm(x)) + mlp(norm(x)) (https://arxiv.org/abs/2204.02311, section 2).

    hidden_size, mlp_hidden_size, num_attention_heads, num_gqa_groups: H, F, h, g (None: h).
    hidden_dropout, hidden_dropout_dims: the rate of dropout after each sub-block, and the axes that share one mask.
    attention_dropout: the rate of dropout on the probabilities.
    intermediate_dropout, intermediate_dropout_dims: the rate of dropout after the activation, and the axes that share
                        one mask.
    dropout_rng_name:   the random stream of all dropout in the layer.
    mha_kernel_init, mlp_kernel_init: None scales by fan-in; attention's is normal, the MLP's truncated normal.
    mlp_activations, mlp_activation_params: as `activations` and `activation_params` in `LayerNormMLP`.
    apply_residual_connection_post_layernorm: residual connections start after the norms.
    output_layernorm:   a norm at the end instead of the norm before self-attention.
    layer_type:         `TransformerLayerType` or its string.
    self_attn_mask_type, self_attn_bias_type: the types of self-attention; cross-attention masks by "padding", without a
                        bias.
    enable_relative_embedding: T5's relative position biases (32 buckets, distance 128). False here.
    relative_embedding: None or False, or a module that gives such biases, which switches them on; it is called as
                        `RelativePositionBiases` is, with q_offset only when decoding.
    drop_path:          the rate at which a sample skips a sub-block (https://arxiv.org/abs/1603.09382).
    cross_drop_path:    this rate for cross-attention; None is drop_path. TransformerEngine's decoders have 0.
    window_size, enable_rotary_pos_emb: only for self-attention; cross_window_size and cross_rotary_pos_emb are for
                        cross-attention. A decoder whose weights were trained with both must ask for both.
    scale_attn_logits, attn_logit_scale, scaled_query_init: as in `MultiHeadAttention`.
    kv_channels:        the width of a head; None is hidden_size / num_attention_heads.
    parallel_attention_mlp: attention and MLP read the same input, and one residual connection takes their sum, after
                        one dropout and one drop path. Each has its own norm, as in Falcon 40B. Encoders only.
    parallel_shared_layernorm: the MLP reads the norm of attention and has none, as in Falcon 7B and GPT-J; needs
                        parallel_attention_mlp.
    context_parallel_*: as in `MultiHeadAttention`, for both attentions: with context_parallel_causal_load_balanced
                        `encoded` is in the balanced order too.
    moe:                fields of `MoEBlock` in a dict, such as dict(num_experts=8): experts of width mlp_hidden_size
                        replace the MLP. `nn.scan` wants variable_axes for `losses` and `expert_bias` then.
    ssm:                fields of `Mamba2` in a dict, such as dict(ssm_num_heads=8): it replaces self-attention.
    delta:              fields of `GatedDeltaNet` in a dict, such as dict(linear_num_value_heads=8): the same.
    sublayers:          "mixer": the layer has only attention or another mixer; "mlp": only the MLP or the experts. In
                        hybrid models a layer may be one of them.
    params_dtype:       the dtype of the parameters, if not None; then inputs are cast to `dtype`, and the output has
                        it.
    qk_norm_*, attn_output_gate: as in `MultiHeadAttention`, for both attentions.
    attn_logit_softcap: as in `DotProductAttention`, for both attentions.
    layer_input_size:   P: behind the MLP the layer adds norm(out(act(gate(x)) * layer_input)) to x, where the argument
                        layer_input has P channels and act is the first activation of the MLP: per-layer embeddings, as
                        in Gemma 3n and 4. The projections have no biases; low_rank_adaptation_scope takes them as
                        parts of the MLP.
    mlp_next_to_experts: the MLP stays next to moe; each has a norm of what it gives, too, as in Gemma 4.
    kv_sharing:         "give": the result is (x, keys and values), "take": the layer attends to the argument
                        keys_values, as in `MultiHeadAttention`. Encoders only.
    attention_chunk_size, attn_temperature: as in `MultiHeadAttention`, for self-attention.
    post_norms:         a norm of what each sub-block gives, before dropout and residual, in addition to the norm before
                        it, as in Gemma 2 (https://arxiv.org/abs/2408.00118).
    input_layernorm, mlp_layernorm: the norms in front of attention or Mamba2, and in front of the MLP or experts. In
                        OLMo 2 (https://arxiv.org/abs/2501.00656) both are False, and post_norms are True.
    residual_multiplier: multiplies what each sub-block gives, before dropout and residual, as in Granite.
    layer_scalar:       the last that the layer does is to multiply by a parameter, as in Gemma 4.
    kv_lora_rank, q_lora_rank, qk_nope_head_dim, qk_rope_head_dim, v_head_dim, mscale, latent_*: with kv_lora_rank
                        self-attention is `MultiHeadLatentAttention`, which has RoPE as latent_rotary says, whatever
                        enable_rotary_pos_emb does. Encoders only.
    score_mod, score_mod_bprop: not in this version.
    Other fields mean what they do in `MultiHeadAttention` and `LayerNormMLP`; docs/fields.md says it of all 89.

    Parameters: `attention`, `mamba` or `delta` (encoder), or `self_attention` and `encoder_decoder_attention`
    (decoder), as `MultiHeadAttention`, `MultiHeadLatentAttention`, `Mamba2` or `GatedDeltaNet`; `mlp` as
    `LayerNormMLP`, or `moe` as `MoEBlock`; `relpos_bias/rel_embedding` or `relative_embedding/...`; `output_layernorm`;
    with post_norms `post_attention_norm` (or `post_self_attention_norm` and `post_encoder_decoder_attention_norm`) and
    `post_mlp_norm`; with layer_scalar `scalar` [1]; with layer_input_size `layer_input_gate/kernel` [H, P],
    `layer_input_out/kernel` [P, H] and `post_layer_input_norm`; with mlp_next_to_experts `post_dense_norm` and
    `post_experts_norm`. All parameters are in boxes with logical axes, so `nn.scan` and `nn.vmap` over layers want
    metadata_params={nn.PARTITION_NAME: None}, or a name for the axis of layers.
    """

    hidden_size: int = 512
    mlp_hidden_size: int = 2048
    num_attention_heads: int = 8
    num_gqa_groups: int | None = None
    layernorm_type: str = "layernorm"
    layernorm_epsilon: float = 1e-6
    zero_centered_gamma: bool = False
    hidden_dropout: float = 0.1
    hidden_dropout_dims: Sequence[int] = ()
    attention_dropout: float = 0.1
    intermediate_dropout: float = 0.0
    intermediate_dropout_dims: Sequence[int] = ()
    dropout_rng_name: str = "dropout"
    mha_kernel_init: Initializer | None = None
    mlp_kernel_init: Initializer | None = None
    mlp_activations: Sequence[str | Callable[..., Any]] = ("gelu",)
    mlp_activation_params: Mapping[str, Any] | None = None
    use_bias: bool = False
    bias_init: Initializer = nn.initializers.zeros
    apply_residual_connection_post_layernorm: bool = False
    output_layernorm: bool = False
    float32_attention_logits: bool = False
    layer_type: TransformerLayerType | str = TransformerLayerType.ENCODER
    self_attn_mask_type: str = "causal"
    self_attn_bias_type: str | None = None
    enable_relative_embedding: bool = False
    relative_embedding: nn.Module | None = None
    enable_rotary_pos_emb: bool = False
    rotary_pos_emb_windows: tuple[float, float] = (1, 10000)
    rotary_pos_emb_group_method: str = "consecutive"
    low_rank_adaptation_scope: str = "none"
    low_rank_adaptation_dim: int = 32
    low_rank_adaptation_alpha: float | None = None
    dtype: jnp.dtype = jnp.float32
    drop_path: float = 0.0
    fuse_qkv_params: bool = True
    transpose_batch_sequence: bool = False
    enable_sequence_parallel: bool = False
    scale_attn_logits: bool = True
    scaled_query_init: bool = False
    window_size: tuple[int, int] | None = None
    softmax_type: str = "vanilla"
    score_mod: Callable | None = None
    score_mod_bprop: Callable | None = None
    kv_channels: int | None = None
    cross_window_size: tuple[int, int] | None = None
    cross_rotary_pos_emb: bool = False
    rotary_pos_emb_dim: int | None = None
    rotary_pos_emb_scaling: Scaling | None = None
    parallel_attention_mlp: bool = False
    parallel_shared_layernorm: bool = False
    context_parallel_causal_load_balanced: bool = False
    context_parallel_axis: str | None = ""
    context_parallel_strategy: str = "DEFAULT"
    params_dtype: jnp.dtype | None = None
    deterministic_gradients: bool = False
    cross_drop_path: float | None = None
    qk_norm_type: str | None = None
    qk_norm_eps: float = 1e-6
    qk_norm_before_rope: bool = False
    attn_logit_softcap: float | None = None
    post_norms: bool = False
    kv_lora_rank: int | None = None
    q_lora_rank: int | None = None
    qk_nope_head_dim: int | None = None
    qk_rope_head_dim: int | None = None
    v_head_dim: int | None = None
    mscale: float = 1.0
    moe: Mapping[str, Any] | None = None
    ssm: Mapping[str, Any] | None = None
    sublayers: str = "both"
    attn_logit_scale: float | None = None
    residual_multiplier: float = 1.0
    delta: Mapping[str, Any] | None = None
    qk_norm_across_heads: bool = False
    input_layernorm: bool = True
    mlp_layernorm: bool = True
    attention_chunk_size: int | None = None
    attn_temperature: tuple[float, float] | None = None
    attn_output_gate: bool = False
    latent_rotary: bool = True
    latent_norm_epsilon: float | None = None
    v_norm_eps: float | None = None
    keys_as_values: bool = False
    rotary_pos_emb_sections: PositionSections | None = None
    layer_scalar: bool = False
    kv_sharing: str | None = None
    layer_input_size: int | None = None
    mlp_next_to_experts: bool = False

    any_width = False  # a subclass may set it: inputs of any width, and hidden_size gives only the width of a head
    if not TYPE_CHECKING:  # as `Module` says
        rules = (
            head_width_is_known,
            groups_divide_heads,
            rotary_fields_fit,
            qk_norm_fields_fit,
            logits_have_one_scale,
            latent_attention_stands_alone,
            mixers_stand_alone,
            cross_fields_need_a_decoder,
            activations_take_their_params,
            experts_take_the_place_of_the_mlp,
            experts_have_an_mlp_next_to_them,
            relative_embedding_is_a_bias,
            parallel_layers_are_encoders,
            norms_in_front_are_there,
            taken_keys_are_finished,
            adapters_are_on,
            sequences_are_split,
        )

    @nn.compact
    def __call__(
        self,
        inputs: jax.Array,
        encoded: jax.Array | None = None,
        attention_mask: jax.Array | SequenceDescriptor | None = None,
        encoder_decoder_mask: jax.Array | SequenceDescriptor | None = None,
        deterministic: bool = False,
        decode: bool = False,
        max_decode_length: int | None = None,
        score_mod_tensors: Any = None,
        score_mod_bprop_tensors: Any = None,
        *,
        positions: jax.Array | None = None,
        keys_values: KeysValues | None = None,
        layer_input: jax.Array | None = None,
    ) -> jax.Array | Any:  # a pair only with kv_sharing="give"; a union with it would be in everyone's way
        """inputs [b, s, H] ([s, b, H] if transpose_batch_sequence) -> the same shape and dtype; with kv_sharing="give"
        (it, keys and values).

        encoded: the encoder's output [b, t, He], for a decoder.
        attention_mask, encoder_decoder_mask: a `SequenceDescriptor`, or an array broadcastable to
            [b, 1, s, t], True (or 1) = masked out. None masks nothing beyond what the mask type does.
        decode: self-attention continues the sequences of collection `cache`, in its scope: inputs are the next s >= 1
            tokens of each row. `MultiHeadAttention` explains prompts of different lengths, masks (their columns are the
            T slots of the cache), and what a call without a cache does. Cross-attention reads `encoded` anew.
        max_decode_length: T, the slots of a cache that this call makes; without decode it has no use.
        positions: [b, s] or [s] for RoPE in self-attention, or [n, b, s] with rotary_pos_emb_sections; other mixers
            have no use for them.
        keys_values: with kv_sharing="take": the second result of a layer with "give", in the same call of the model.
        layer_input: [b, s, P], with layer_input_size.

        Raises what `MultiHeadAttention` raises; ValueError for arguments that the layer type has no use for, for fields
        that contradict parallel_attention_mlp, and for parameters that the fields leave without use: `relpos_bias`
        without enable_relative_embedding, `mlp/scale` with parallel_shared_layernorm.
        """
        decoder = is_decoder(self)
        check_call(self, deterministic=deterministic, decode=decode, max_decode_length=max_decode_length)
        check_call(self, score_mod_tensors=score_mod_tensors, score_mod_bprop_tensors=score_mod_bprop_tensors)
        check_keys_values(self, keys_values)
        inputs = floating(self, "inputs", inputs)
        self._check(inputs, encoded, encoder_decoder_mask, decoder)
        check_call(self, attention_mask=attention_mask, encoder_decoder_mask=encoder_decoder_mask)
        name = "self_attention" if decoder else "attention"
        inputs = self._residual_layout(in_compute_dtype(self, inputs))
        layer_input = check_layer_input(self, layer_input, inputs)
        dropped = max(self.hidden_dropout, self.drop_path, self._cross_drop_path) > 0 and not deterministic
        apart = self.apply_residual_connection_post_layernorm or self.post_norms or self.residual_multiplier != 1.0
        in_kernels = not (dropped or apart)
        call = dict(decode=decode, residual=in_kernels, norm_output=False, max_decode_length=max_decode_length)
        given: list[KeysValues] = []
        if self.sublayers == "mlp":
            return self._close(inputs, deterministic, in_kernels, layer_input)
        if (mixer := self._mixer()) is not None:
            name = mixer.name
            x, normed = mixer(inputs, attention_mask, **call)
        else:
            bias = self._relative_bias(inputs, not decoder, name if decode else None, max_decode_length)
            call |= dict(deterministic=deterministic, positions=positions)
            call |= {} if keys_values is None else dict(keys_values=keys_values)
            x, normed, *given = self._attention(name, cross=False)(inputs, None, attention_mask, bias, **call)
        if self.parallel_attention_mlp:  # the MLP's second GEMM adds what attention gave
            source = normed if self.parallel_shared_layernorm else inputs
            x, _ = self._feed_forward(source, deterministic, x)
            x = self._end(self._add(x, inputs, None, deterministic, in_kernels), layer_input)
            return (x, *given) if given else x
        x = self._add(self._post_norm(name, x), inputs, normed, deterministic, in_kernels)
        if decoder:
            name = "encoder_decoder_attention"
            cross = self._attention(name, cross=True, padded=encoder_decoder_mask is not None)
            y, normed = cross(x, encoded, encoder_decoder_mask, deterministic=deterministic, residual=in_kernels)
            x = self._add(self._post_norm(name, y), x, normed, deterministic, in_kernels, self._cross_drop_path)
        x = self._close(x, deterministic, in_kernels, layer_input)
        return (x, *given) if given else x

    def _close(self, x, deterministic: bool, in_kernels: bool, layer_input):
        """The MLP or the experts, where the layer has them, and what comes behind all."""
        if self.sublayers != "mixer":
            z, normed = self._feed_forward(x, deterministic, in_kernels)
            x = self._add(self._post_norm("mlp", z), x, normed, deterministic, in_kernels)
        return self._end(x, layer_input)

    def _end(self, x, layer_input):
        """What the layer does behind attention and the MLP. layer_input: [b, s, P] or None."""
        x = x if layer_input is None else self._residual_layout(add_layer_input(self, x, layer_input))
        x = self._norm("output_layernorm")(x) if self.output_layernorm else x
        if not self.layer_scalar:
            return x
        scalar = parameter(self, "scalar", nn.initializers.ones, (W_NO_SHARD_AXES,), (1,))
        wide = jnp.promote_types(x.dtype, jnp.float32)  # The scalar's gradient is a sum over all elements.
        return (x.astype(wide) * scalar.astype(wide)).astype(x.dtype)

    def _check(self, inputs, encoded, encoder_decoder_mask, decoder: bool):
        if inputs.ndim != 3 or not (self.any_width or inputs.shape[-1] == self.hidden_size):
            widths = f", or hidden_size={inputs.shape[-1]} and kv_channels={head_width(self)}: the same heads"
            raise ValueError(
                f"{describe(self)}: inputs has shape {inputs.shape}, but hidden_size is {self.hidden_size}; "
                f"pass [batch, sequence, {self.hidden_size}]{widths if inputs.ndim == 3 else ''}."
            )
        if decoder and encoded is None:
            raise ValueError(f"{describe(self)}: a decoder layer needs `encoded`, the encoder's output [b, t, H].")
        if not decoder:
            for name, value in (("encoded", encoded), ("encoder_decoder_mask", encoder_decoder_mask)):
                if value is not None:
                    raise ValueError(
                        f'{describe(self)}: {name} is given, but layer_type is "encoder"; use "decoder", or pass a '
                        "mask of self-attention by its name: attention_mask=..."
                    )
        held = self.get_variable("params", "mlp") if self.has_variable("params", "mlp") else {}
        if self.parallel_shared_layernorm and "scale" in held:
            raise ValueError(
                f"{describe(self)}: the parameters hold `mlp/scale`, but parallel_shared_layernorm is True; set it "
                "False, or drop the parameters of the MLP's norm."
            )

    @property
    def _cross_drop_path(self) -> float:
        own = self.drop_path if self.cross_drop_path is None else self.cross_drop_path
        return own if is_decoder(self) else 0.0

    def _residual_layout(self, x):
        return constrain(x, residual_axes(self))

    def _relative_bias(self, inputs, bidirectional: bool, cached: str | None, max_decode_length):
        """[1, h, s, s]; [1 or b, h, s, T] on the cache of the self-attention of name `cached`; None where relative
        embedding is off."""
        if not has_relative_embedding(self):
            if self.has_variable("params", "relpos_bias"):
                raise ValueError(
                    f"{describe(self)}: the parameters hold `relpos_bias`, but enable_relative_embedding is "
                    "False; set it True, or drop the parameter."
                )
            return None
        module = self.relative_embedding or RelativePositionBiases(
            num_buckets=32,
            max_distance=128,
            num_attention_heads=self.num_attention_heads,
            embedding_init=nn.initializers.variance_scaling(1.0, "fan_avg", "uniform"),
            dtype=self.dtype,
            params_dtype=self.params_dtype,
            name="relpos_bias",
        )
        length = inputs.shape[0 if self.transpose_batch_sequence else 1]
        if cached is None:
            return module(length, length, bidirectional)
        slots, first = extent(self, cached, length, max_decode_length)
        return module(length, slots, bidirectional, q_offset=first)

    def _attention(self, name: str, cross: bool, padded: bool = True) -> MultiHeadAttention | MultiHeadLatentAttention:
        own = dict(
            input_layernorm=self.input_layernorm and (cross or not self.output_layernorm),
            return_layernorm_output=self.apply_residual_connection_post_layernorm or self.parallel_shared_layernorm,
            kernel_init=self.mha_kernel_init,
            attn_mask_type=("padding" if padded else "no_mask") if cross else self.self_attn_mask_type,
            window_size=self.cross_window_size if cross else self.window_size,
        )
        if self.kv_lora_rank is not None:
            return MultiHeadLatentAttention(**shared_fields(self, MultiHeadLatentAttention) | own, name=name)
        rotary = self.cross_rotary_pos_emb if cross else self.enable_rotary_pos_emb
        own |= dict.fromkeys(("attention_chunk_size", "attn_temperature")) if cross else {}
        own |= dict(
            head_dim=head_width(self),
            attn_bias_type="no_bias" if cross else self.self_attn_bias_type,
            enable_rotary_pos_emb=rotary,
            rotary_pos_emb_dim=self.rotary_pos_emb_dim if rotary else None,
            rotary_pos_emb_scaling=self.rotary_pos_emb_scaling if rotary else None,
            rotary_pos_emb_sections=self.rotary_pos_emb_sections if rotary else None,
            float32_logits=self.float32_attention_logits,
        )
        return MultiHeadAttention(**shared_fields(self, MultiHeadAttention) | own, name=name)

    def _mixer(self) -> Mamba2 | GatedDeltaNet | None:
        """The module that the layer has instead of self-attention."""
        if self.ssm is None and self.delta is None:
            return None
        own = dict(
            input_layernorm=self.input_layernorm and not self.output_layernorm,
            return_layernorm_output=self.apply_residual_connection_post_layernorm,
            kernel_init=self.mha_kernel_init,
        )
        if self.ssm is not None:
            return Mamba2(**shared_fields(self, Mamba2) | own | dict(self.ssm), name="mamba")
        return GatedDeltaNet(**shared_fields(self, GatedDeltaNet) | own | dict(self.delta), name="delta")

    def _fields_of_mlp(self) -> dict[str, Any]:
        """The fields that the MLP and experts have under other names than the layer."""
        shared = self.parallel_shared_layernorm
        return dict(
            intermediate_dim=self.mlp_hidden_size,
            enable_layernorm=self.mlp_layernorm and not shared,
            epsilon=self.layernorm_epsilon,
            scale_axes=(W_NO_SHARD_AXES,),
            ln_bias_axes=(W_NO_SHARD_AXES,),
            kernel_init=self.mlp_kernel_init,
            activations=self.mlp_activations,
            activation_params=self.mlp_activation_params,
            # A shared norm comes from attention, where its whole sequence was gathered for the first GEMM.
            layernorm_input_axes=None if shared else residual_axes(self),
        )

    def _mlp(self) -> LayerNormMLP:
        return mlp_of_layer(
            self,
            **self._fields_of_mlp(),
            return_layernorm_output=self.apply_residual_connection_post_layernorm,
            intermediate_dropout_rng_name=self.dropout_rng_name,
            intermediate_dropout_rate=self.intermediate_dropout,
            intermediate_hidden_dropout_dims=self.intermediate_dropout_dims,
        )

    def _moe(self) -> MoEBlock:
        whole = W_NO_SHARD_AXES
        own = self._fields_of_mlp() | dict(
            gate_axes=(whole, None),
            kernel_axes_1=("expert", W_FSDP_AXES, W_TP_AXES),
            kernel_axes_2=("expert", W_TP_AXES, W_FSDP_AXES),
            bias_axes_1=("expert", W_TP_AXES),
            bias_axes_2=("expert", None),
        )
        return MoEBlock(**shared_fields(self, MoEBlock) | own | dict(self.moe), name="moe")

    def _feed_forward(self, x, deterministic: bool, residual):
        """(MLP or experts of x, with the residual; the norm's output or None)."""
        if self.moe is None:
            return self._mlp()(x, deterministic=deterministic, residual=residual)
        if not self.mlp_next_to_experts:
            return self._moe()(x, deterministic, residual=residual), None
        mlp, experts = self._mlp()(x, deterministic=deterministic)[0], self._moe()(x, deterministic)
        return self._norm("post_dense_norm")(mlp) + self._norm("post_experts_norm")(experts), None

    def _post_norm(self, name: str, x):
        """x, the result of sub-block `name`, behind the norm that post_norms asks for."""
        return self._norm(f"post_{name}_norm")(x) if self.post_norms else x

    def _norm(self, name: str) -> LayerNorm:
        return whole_norm(self, name, self.layernorm_type, self.layernorm_epsilon)

    def _add(self, x, residual, normed, deterministic: bool, added: bool, drop_path: float | None = None):
        """The end of a sub-block: dropout, drop path, residual.

        added: the kernels have added the residual already. drop_path: None is the field.
        """
        if added:
            return self._residual_layout(x)
        x = x if self.residual_multiplier == 1.0 else x * jnp.asarray(self.residual_multiplier, x.dtype)
        stream = self.dropout_rng_name
        if self.hidden_dropout > 0:
            x = Dropout(self.hidden_dropout, tuple(self.hidden_dropout_dims), rng_collection=stream)(x, deterministic)
        drop_path = self.drop_path if drop_path is None else drop_path
        if drop_path > 0:
            batch = 1 if self.transpose_batch_sequence else 0
            shared = tuple(axis for axis in range(x.ndim) if axis != batch)
            x = Dropout(drop_path, shared, rng_collection=stream)(x, deterministic)
        if self.apply_residual_connection_post_layernorm:
            residual = normed
        return self._residual_layout(x + residual)
