"""The NNX modules: each has the class of its Linen module, and the sizes that its parameters follow from."""

import te_jax.flax as te_flax
from te_jax.flax._fields import as_tuple
from te_jax.nnx._layer import Layer, example


class DenseGeneral(Layer):
    """`te_jax.flax.DenseGeneral` of inputs [..., in_features]: `DenseGeneral(256, 1024, rngs=nnx.Rngs(0))`.

    in_features: The width of the contracted axis, or a tuple of widths for several (`axis`).
    """

    linen_type = te_flax.DenseGeneral

    @staticmethod
    def inputs(linen, in_features: int | tuple[int, ...]):
        return (example(*as_tuple(in_features)),)


Linear = DenseGeneral


class LayerNorm(Layer):
    """`te_jax.flax.LayerNorm` of inputs [..., num_features]."""

    linen_type = te_flax.LayerNorm

    @staticmethod
    def inputs(linen, num_features: int):
        return (example(num_features),)


class RMSNorm(LayerNorm):
    """`LayerNorm` with layernorm_type="rmsnorm"."""

    defaults = {"layernorm_type": "rmsnorm"}


class LayerNormDenseGeneral(Layer):
    """`te_jax.flax.LayerNormDenseGeneral` of inputs [..., in_features]."""

    linen_type = te_flax.LayerNormDenseGeneral

    @staticmethod
    def inputs(linen, in_features: int):
        return (example(in_features),)


class LayerNormMLP(Layer):
    """`te_jax.flax.LayerNormMLP` of inputs [..., in_features]."""

    linen_type = te_flax.LayerNormMLP

    @staticmethod
    def inputs(linen, in_features: int):
        return (example(in_features),)


class DotProductAttention(Layer):
    """`te_jax.flax.DotProductAttention`."""

    linen_type = te_flax.DotProductAttention
    init_fields = {"qkv_layout": "bshd_bshd_bshd", "dtype": None}  # The parameters follow from neither.

    @staticmethod
    def inputs(linen):
        heads, width = linen.num_attention_heads, linen.head_dim
        keys = example(linen.num_gqa_groups or heads, width)
        return example(heads, width), keys, keys


class MultiHeadAttention(Layer):
    """`te_jax.flax.MultiHeadAttention` of inputs_q [b, s, in_features].

    kv_features: The width of inputs_kv, for cross-attention; None is self-attention.
    """

    linen_type = te_flax.MultiHeadAttention

    @staticmethod
    def inputs(linen, in_features: int, *, kv_features: int | None = None):
        return example(in_features), None if kv_features is None else example(kv_features)


class RelativePositionBiases(Layer):
    """`te_jax.flax.RelativePositionBiases`."""

    linen_type = te_flax.RelativePositionBiases

    @staticmethod
    def inputs(linen):
        return 2, 2, linen.num_buckets % 2 == 0  # An odd number of buckets serves one direction.


class TransformerLayer(Layer):
    """`te_jax.flax.TransformerLayer`.

    encoded_features: The width of a decoder's argument `encoded`; None is hidden_size.
    """

    linen_type = te_flax.TransformerLayer

    @staticmethod
    def inputs(linen, *, encoded_features: int | None = None):
        decoder = linen.layer_type in (te_flax.TransformerLayerType.DECODER, "decoder")
        width = linen.hidden_size if encoded_features is None else encoded_features
        return example(linen.hidden_size), example(width) if decoder else None
