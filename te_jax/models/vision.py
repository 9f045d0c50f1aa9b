"""VisionEncoder: an encoder of images, as SigLIP's."""

import jax
import jax.numpy as jnp
from flax import linen as nn

import te_jax.flax as te_flax
from te_jax.core.check import BOOL, check
from te_jax.flax._common import parameter
from te_jax.flax._fields import shared_fields
from te_jax.models.stack import Model, gather_whole
from te_jax.sharding import BATCH_AXES, HIDDEN_AXES, SEQLEN_AXES, W_FSDP_AXES, W_NO_SHARD_AXES
from te_jax.sharding import with_sharding_constraint_by_logical_axes as constrain


class VisionEncoder(Model):
    """An encoder of images (Dosovitskiy et al. 2020, https://arxiv.org/abs/2010.11929).

    An image is cut into patches of p x p pixels, row by row; each is a token, the product of its p * p * c numbers with
    one kernel. That product is in `dtype`, under FP8 too; layers and the pooling head are in FP8 as in any model.

    Parameters: `embedding` [p * p * c, H], whose rows are in the order of a patch [p, p, c], and `embedding_bias` [H];
    `positions` [patches, H]; `layers` and `final_norm` as of `CausalLM`; with pooling_head `pool_probe` [1, H],
    `pool_attention` as `te_jax.flax.MultiHeadAttention`, `pool_mlp` as `te_jax.flax.LayerNormMLP`.
    """

    @nn.compact
    def __call__(self, images: jax.Array, *, deterministic: bool = True, pooled: bool = False) -> jax.Array:
        """images [b, image_size, image_size, c], floating -> the hidden states behind the last norm
        [b, patches, H] of `dtype`, patches row by row; pixels behind the last whole patch are not read.

        deterministic: False: with dropout.
        pooled:        returns what the pooling head makes of them, [b, H], instead.

        Raises ValueError for a config without image_size, for images of another shape, and for pooled without a
        pooling head.
        """
        c, name = self.config, "VisionEncoder"
        check(name, "deterministic", deterministic, BOOL)
        check(name, "pooled", pooled, BOOL)
        if not c.patches:
            raise ValueError(f"{name}: config.image_size is None; pass a ModelConfig of images.")
        if images.shape[1:] != (c.image_size, c.image_size, c.image_channels):
            raise ValueError(
                f"{name}: images has shape {images.shape}; pass [b, {c.image_size}, {c.image_size}, "
                f"{c.image_channels}], channels last."
            )
        if pooled and not c.pooling_head:
            raise ValueError(f"{name}: pooled is True, but config.pooling_head is False; leave it out.")
        x = self._layers(self._embed_patches(images), c.fields_of_layer, deterministic=deterministic)
        if pooled or c.pooling_head and self.is_initializing():
            vectors = self._pool(x, deterministic)
            return vectors if pooled else x
        return x

    def _embed_patches(self, images: jax.Array) -> jax.Array:
        c, p = self.config, self.config.patch_size
        side, inputs = c.image_size // p, p * p * c.image_channels
        axes = (W_NO_SHARD_AXES, W_FSDP_AXES)
        kernel = parameter(self, "embedding", nn.initializers.lecun_normal(), axes, (inputs, c.hidden_size))
        bias = parameter(self, "embedding_bias", nn.initializers.zeros, (W_FSDP_AXES,), (c.hidden_size,))
        cut = images[:, : side * p, : side * p].reshape(-1, side, p, side, p, c.image_channels)
        patches = cut.transpose(0, 1, 3, 2, 4, 5).reshape(-1, side * side, inputs).astype(self.dtype)
        kernel, bias, positions = (
            gather_whole(a).astype(self.dtype) for a in (kernel, bias, self._table("positions", c.patches))
        )
        return constrain(patches @ kernel + bias + positions, (BATCH_AXES, SEQLEN_AXES, HIDDEN_AXES))

    def _pool(self, x: jax.Array, deterministic: bool) -> jax.Array:
        """x [b, s, H] -> [b, H]: attention of one learned token to all, and an MLP."""
        layer = te_flax.TransformerLayer(**self.config.fields_of_layer(0), **self.dtypes, parent=None)
        probe = gather_whole(self._table("pool_probe", 1)).astype(self.dtype)
        probe = constrain(jnp.broadcast_to(probe, (x.shape[0], *probe.shape)), (BATCH_AXES, SEQLEN_AXES, HIDDEN_AXES))
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
