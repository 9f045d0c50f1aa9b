"""VisionEncoder: an encoder of images, as SigLIP's and ViT."""

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from flax import linen as nn

import te_jax.flax as te_flax
from te_jax.core.check import BOOL, FLOATS_ARRAY, check
from te_jax.flax._common import parameter
from te_jax.flax._fields import shared_fields
from te_jax.models.stack import Model, gather_whole, warn_of_causal_layers
from te_jax.sharding import BATCH_AXES, HIDDEN_AXES, SEQLEN_AXES, W_FSDP_AXES, W_NO_SHARD_AXES, W_TP_AXES
from te_jax.sharding import with_sharding_constraint_by_logical_axes as constrain


class VisionEncoder(Model):
    """An encoder of images (Dosovitskiy et al. 2020, https://arxiv.org/abs/2010.11929).

    An image is cut into patches of p x p pixels, row by row; each is a token, the product of its p * p * c numbers with
    one kernel. That product and the classifier's are in `dtype`, under FP8 too; layers and the pooling head are in FP8
    as in any model.

    Parameters: `embedding` [p * p * c, H], whose rows are in the order of a patch [p, p, c], and `embedding_bias` [H];
    with class_token `class_token` [1, H]; `positions` [tokens, H]; `layers` and `final_norm` as of `CausalLM`; with
    pooling_head `pool_probe` [1, H], `pool_attention` as `te_jax.flax.MultiHeadAttention` and `pool_mlp` as
    `te_jax.flax.LayerNormMLP`, or, with class_token, `pool_dense` as `te_jax.flax.DenseGeneral`; with num_labels
    `head` [num_labels, H] and `head_bias` [num_labels].
    """

    if not TYPE_CHECKING:  # as `Module` says
        read_by_argument = ("pool_probe", "pool_attention", "pool_mlp", "pool_dense", "head", "head_bias")

    @nn.compact
    def __call__(
        self, images: jax.Array, *, deterministic: bool = True, pooled: bool = False, logits: bool = False
    ) -> jax.Array:
        """images [b, image_size, image_size, c], floating -> the hidden states behind the last norm
        [b, tokens, H] of `dtype`, the class token, if there is one, and the patches row by row; pixels behind the last
        whole patch are not read.

        deterministic: False: with dropout.
        pooled:        returns what the pooling head makes of them, [b, H], instead; without one the class token.
        logits:        returns what the classifier makes of that, f32[b, num_labels], instead.

        Raises TypeError for images that are not floating, ValueError for a config without image_size, for images of
        another shape, for pooled without a pooling head or a class token, for logits without labels or next to pooled,
        and for labels without a token to read.
        """
        c, name = self.config, "VisionEncoder"
        for argument, value in (("deterministic", deterministic), ("pooled", pooled), ("logits", logits)):
            check(name, argument, value, BOOL)
        check(name, "images", images, FLOATS_ARRAY)
        warn_of_causal_layers(self)
        if not c.patches:
            raise ValueError(f"{name}: config.image_size is None; pass a ModelConfig of images.")
        if images.shape[1:] != (c.image_size, c.image_size, c.image_channels):
            raise ValueError(
                f"{name}: images has shape {images.shape}; pass [b, {c.image_size}, {c.image_size}, "
                f"{c.image_channels}], channels last."
            )
        can_pool = c.pooling_head or c.class_token
        if pooled and not can_pool:
            raise ValueError(f"{name}: pooled is True, but config.pooling_head is False; leave it out.")
        if logits and not c.num_labels:
            raise ValueError(f"{name}: logits is True, but config.num_labels is 0; leave it out.")
        if c.num_labels and not can_pool:
            raise ValueError(
                f"{name}: config.num_labels is {c.num_labels}, but there is neither config.class_token nor "
                "config.pooling_head, of which the classifier reads; set one, or leave num_labels out."
            )
        if logits and pooled:
            raise ValueError(f"{name}: logits is given together with pooled; leave one of them out.")
        x = self._layers(self._embed_patches(images), c.fields_of_layer, deterministic=deterministic)
        if not can_pool or not (pooled or logits or self.is_initializing()):
            return x
        vectors = self._pool_token(x[:, 0]) if c.class_token else self._pool(x, deterministic)
        scores = self._classify(vectors) if c.num_labels else None
        return scores if logits else vectors if pooled else x

    def _embed_patches(self, images: jax.Array) -> jax.Array:
        c, p = self.config, self.config.patch_size
        side, inputs = c.image_size // p, p * p * c.image_channels
        axes = (W_NO_SHARD_AXES, W_FSDP_AXES)
        kernel = parameter(self, "embedding", nn.initializers.lecun_normal(), axes, (inputs, c.hidden_size))
        bias = parameter(self, "embedding_bias", nn.initializers.zeros, (W_FSDP_AXES,), (c.hidden_size,))
        # On Explicit axes jax reshapes one axis, or neighbours, at a time.
        rows = images[:, : side * p, : side * p].reshape(images.shape[0], side, p, side * p, c.image_channels)
        cut = rows.reshape(images.shape[0], side, p, side, p, c.image_channels).transpose(0, 1, 3, 2, 4, 5)
        patches = cut.reshape(images.shape[0], side, side, inputs).reshape(images.shape[0], side * side, inputs)
        patches = patches.astype(self.dtype)
        kernel, bias = (gather_whole(a).astype(self.dtype) for a in (kernel, bias))
        x, places = patches @ kernel + bias, (BATCH_AXES, SEQLEN_AXES, HIDDEN_AXES)
        if c.class_token:
            x = jnp.concatenate([self._of_each_image("class_token", x), x], 1)
        positions = self._table("positions", c.patches + c.class_token)
        return constrain(x + gather_whole(positions).astype(self.dtype), places)

    def _of_each_image(self, name: str, x: jax.Array) -> jax.Array:
        """A learned token for each image of x [b, s, H], [b, 1, H]."""
        token = gather_whole(self._table(name, 1)).astype(self.dtype)
        each = jnp.zeros_like(x[:, :1]) + token  # which lies on Explicit axes as x does
        return constrain(each, (BATCH_AXES, SEQLEN_AXES, HIDDEN_AXES))

    def _pool_token(self, x: jax.Array) -> jax.Array:
        """x [b, H], the class token's -> [b, H]."""
        if not self.config.pooling_head:
            return x
        axes = dict(kernel_axes=(W_FSDP_AXES, W_TP_AXES), bias_axes=(W_TP_AXES,))
        return jnp.tanh(te_flax.DenseGeneral(x.shape[-1], **axes, **self.dtypes, name="pool_dense")(x))

    def _classify(self, x: jax.Array) -> jax.Array:
        """x [b, H] -> logits f32[b, num_labels]."""
        labels = self.config.num_labels
        bias = parameter(self, "head_bias", nn.initializers.zeros, (W_NO_SHARD_AXES,), (labels,))
        kernel = gather_whole(self._table("head", labels)).astype(self.dtype)
        return jnp.einsum("bh,nh->bn", x, kernel, preferred_element_type=jnp.float32) + gather_whole(bias)

    def _pool(self, x: jax.Array, deterministic: bool) -> jax.Array:
        """x [b, s, H] -> [b, H]: attention of one learned token to all, and an MLP."""
        layer = te_flax.TransformerLayer(**self.config.fields_of_layer(0), **self.dtypes, parent=None)
        probe = self._of_each_image("pool_probe", x)
        attention = te_flax.MultiHeadAttention(
            **shared_fields(layer, te_flax.MultiHeadAttention)
            | dict(head_dim=layer.hidden_size // layer.num_attention_heads, input_layernorm=False),
            attn_mask_type="no_mask",
            name="pool_attention",
        )
        mlp = te_flax.LayerNormMLP(
            intermediate_dim=layer.mlp_hidden_size,
            activations=layer.mlp_activations,
            epsilon=layer.layernorm_epsilon,
            use_bias=layer.use_bias,
            **self.dtypes,
            name="pool_mlp",
        )
        y, _ = attention(probe, x, deterministic=deterministic)
        return mlp(y, deterministic, residual=True)[0][:, 0]
