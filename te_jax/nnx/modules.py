"""The NNX modules: each has the class of its Linen module, and the sizes that its parameters follow from."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import te_jax.flax as te_flax
from te_jax.flax._fields import as_tuple
from te_jax.nnx._layer import Layer, example
from te_jax.nnx._linear import fields_from_nnx, with_linear_arguments
from te_jax.sharding.constraints import place_output


@with_linear_arguments
class DenseGeneral(Layer):
    """`te_jax.flax.DenseGeneral` of inputs [..., in_features]: `DenseGeneral(256, 1024, rngs=nnx.Rngs(0))`.

    in_features: The width of the contracted axis, or a tuple of widths for several (`axis`).

    The constructor takes the arguments of `nnx.Linear` and `nnx.LinearGeneral` too:

    out_features:    Another name of `features`.
    param_dtype:     Of the parameters; `dtype` next to it is the type of the computation, to which inputs are cast, and
                     None computes in the type of the inputs. Without param_dtype, `dtype` is the parameters' type.
    kernel_metadata, bias_metadata: Metadata of the variables, such as dict(out_sharding=(None, "tp")).
    precision, promote_dtype, preferred_element_type, dot_general, dot_general_cls, batch_axis: Only their defaults;
                     others raise a ValueError that says what to do instead.
    """

    linen_type = te_flax.DenseGeneral

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        if "__init__" not in vars(cls):
            with_linear_arguments(cls)

    def __init__(
        self,
        *args,
        rngs: nnx.Rngs | None = None,
        kernel_metadata: Mapping[str, Any] = MappingProxyType({}),
        bias_metadata: Mapping[str, Any] = MappingProxyType({}),
        **kwargs,
    ):
        super().__init__(*args, rngs=rngs, **fields_from_nnx(type(self), kwargs))
        for name, metadata in (("kernel", kernel_metadata), ("bias", bias_metadata)):
            if metadata and name in vars(self):
                held = vars(self)[name]
                setattr(self, name, type(held)(held.get_value(), **{**held.get_metadata(), **metadata}))

    def __call__(self, inputs: jax.Array, out_sharding=None, **kwargs):
        """As `te_jax.flax.DenseGeneral`. out_sharding: of the output, a PartitionSpec or NamedSharding."""
        out = super().__call__(inputs, **kwargs)
        if out_sharding is None:
            return out
        y, *bias = out if isinstance(out, tuple) else (out,)
        y = place_output(y, out_sharding)
        return (y, *bias) if bias else y

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


class LayerNormMLP(Layer):
    """`te_jax.flax.LayerNormMLP` of inputs [..., in_features]."""

    linen_type = te_flax.LayerNormMLP


class MoEBlock(Layer):
    """`te_jax.flax.MoEBlock` of inputs [..., in_features].

    The losses of a call are attributes `balancing_loss` and `z_loss` (`Loss`), of it or of the submodule that has them;
    `nnx.pop(model, te_jax.nnx.Loss)` gives and removes the losses of a model:

        y = model(x)
        losses = jax.tree.leaves(nnx.pop(model, te_jax.nnx.Loss))
        loss = loss_of(y) + sum(map(jnp.sum, losses))

    `expert_bias` is an `ExpertBias`, which `te_jax.nnx.value_and_grad` moves.
    """

    linen_type = te_flax.MoEBlock


class LMHead(Layer):
    """`te_jax.flax.LMHead` of inputs [..., in_features]."""

    linen_type = te_flax.LMHead

    @staticmethod
    def inputs(linen, in_features: int):
        hidden = example(in_features)
        return hidden, jax.ShapeDtypeStruct(hidden.shape[:-1], jnp.int32)


class DotProductAttention(Layer):
    """`te_jax.flax.DotProductAttention` of q, k and v. It has no parameters, except with a learnable softmax."""

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


class MultiHeadLatentAttention(Layer):
    """`te_jax.flax.MultiHeadLatentAttention` of inputs [b, s, in_features]."""

    linen_type = te_flax.MultiHeadLatentAttention


class Mamba2(Layer):
    """`te_jax.flax.Mamba2` of inputs [b, s, in_features]."""

    linen_type = te_flax.Mamba2


class GatedDeltaNet(Layer):
    """`te_jax.flax.GatedDeltaNet` of inputs [b, s, in_features]."""

    linen_type = te_flax.GatedDeltaNet


class RelativePositionBiases(Layer):
    """`te_jax.flax.RelativePositionBiases` of two lengths."""

    linen_type = te_flax.RelativePositionBiases

    @staticmethod
    def inputs(linen):
        return 2, 2, linen.num_buckets % 2 == 0  # An odd number of buckets serves one direction.


class TransformerLayer(Layer):
    """`te_jax.flax.TransformerLayer` of inputs [b, s, hidden_size].

    encoded_features: The width of a decoder's argument `encoded`; None is hidden_size.
    """

    linen_type = te_flax.TransformerLayer

    @staticmethod
    def inputs(linen, *, encoded_features: int | None = None):
        decoder = linen.layer_type in (te_flax.TransformerLayerType.DECODER, "decoder")
        width = linen.hidden_size if encoded_features is None else encoded_features
        return example(linen.hidden_size), example(width) if decoder else None


class DiTBlock(Layer):
    """`te_jax.flax.DiTBlock` of x [b, s, hidden_size] and a condition [b, condition_features].

    condition_features: The width of the condition; None is hidden_size.
    """

    linen_type = te_flax.DiTBlock

    @staticmethod
    def inputs(linen, *, condition_features: int | None = None):
        width = linen.hidden_size if condition_features is None else condition_features
        x = example(linen.hidden_size)
        return x, jax.ShapeDtypeStruct((x.shape[0], width), x.dtype)
