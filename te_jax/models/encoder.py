"""EncoderLM: an encoder that predicts masked tokens, as BERT; EncoderDecoder: from one text to another, as T5."""

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import linen as nn

import te_jax.flax as te_flax
from te_jax.core.check import BOOL, INTEGERS, NONE, check
from te_jax.flax._common import parameter
from te_jax.models.stack import OF_IMAGES, Model, rows_at, warn_of_causal_layers
from te_jax.ops.attention import SequenceDescriptor
from te_jax.ops.quantize.activation import activation
from te_jax.sharding import W_FSDP_AXES, W_TP_AXES


class EncoderLM(Model):
    """An encoder with a head that predicts tokens (Devlin et al. 2018, https://arxiv.org/abs/1810.04805).

    Parameters as of `CausalLM`; `token_types` [token_types, H]; `embedding_norm`; with head_transform
    `head_dense/{kernel, bias}`, `head_norm` and `head_bias` [V].
    """

    if not TYPE_CHECKING:  # as `Module` says
        unread = ("num_decoder_layers", *OF_IMAGES)
        read_by_argument = ("head", "head_dense", "head_norm", "head_bias")

    @nn.compact
    def __call__(
        self,
        tokens: jax.Array,
        labels: jax.Array | None = None,
        *,
        token_types: jax.Array | None = None,
        lengths: jax.Array | SequenceDescriptor | None = None,
        deterministic: bool = True,
        hidden: bool = False,
        reduction: str = "mean",
    ) -> jax.Array:
        """tokens int[b, s] -> logits f32[b, s, V]; with labels int[b, s], -100 where nothing is predicted, their loss.

        token_types:   int[b, s]; None: all 0.
        lengths:       int[b], how many tokens of each row are no padding, or a `SequenceDescriptor`.
        deterministic: False: with dropout.
        hidden:        returns the last hidden states [b, s, H] instead.

        Raises ValueError for `hidden` together with labels, and for token_types of a config without.
        """
        c = self.config
        check("EncoderLM", "hidden", hidden, BOOL)
        warn_of_causal_layers(self)
        if token_types is not None and not c.token_types:
            raise ValueError("EncoderLM: token_types are given, but config.token_types is 0; leave them out.")
        if hidden and labels is not None:
            raise ValueError("EncoderLM: hidden is given together with labels; leave one of them out.")
        embedding = self._table("embedding", c.vocab_size, split_rows=True)
        x = self._embed(embedding, self._rows(tokens, lengths), None, token_types)
        x = self._layers(x, c.fields_of_layer, lengths=lengths, deterministic=deterministic)
        if not c.head_transform:
            return x if hidden else self._head(x, labels, embedding, reduction)
        if hidden and not self.is_initializing():
            return x
        axes = dict(kernel_axes=(W_FSDP_AXES, W_TP_AXES), bias_axes=(W_TP_AXES,))
        y = te_flax.DenseGeneral(c.hidden_size, **axes, **self.dtypes, name="head_dense")(x)
        activations = c.layer.get("mlp_activations", te_flax.TransformerLayer.mlp_activations)
        y = self._norm("head_norm", activation(y[..., None, :], activations[:1]))
        bias = parameter(self, "head_bias", nn.initializers.zeros, (W_TP_AXES,), (c.vocab_size,))
        return self._head(y, labels, embedding, reduction, bias)


class _Part(Model):
    """The encoder or the decoder of an `EncoderDecoder`."""

    decoder: bool = False

    @nn.compact
    def __call__(self, x: jax.Array, **call: Any) -> jax.Array:
        c = self.config
        own = dict(layer_type="decoder", self_attn_mask_type="causal") if self.decoder else {}
        count = (c.num_decoder_layers or c.num_layers) if self.decoder else c.num_layers
        return self._layers(x, lambda index: c.fields_of_layer(index) | own, count=count, **call)


class EncoderDecoder(Model):
    """An encoder and a decoder that reads what it gives (Raffel et al. 2019, https://arxiv.org/abs/1910.10683).

    Parameters: `embedding` [V, H], of both; `encoder` and `decoder`, each with `layers` as of `CausalLM`, `final_norm`
    and `relpos_bias` [h, 32], the table of relative positions of all of its layers; `head`, unless it is the
    embedding.
    """

    if not TYPE_CHECKING:  # as `Module` says
        unread = ("head_transform", "token_types", "max_positions", "embedding_norm", *OF_IMAGES)
        read_by_argument = ("encoder", "decoder", "head")

    @nn.compact
    def __call__(
        self,
        tokens: jax.Array | None = None,
        labels: jax.Array | None = None,
        *,
        inputs: jax.Array | None = None,
        input_lengths: jax.Array | None = None,
        encoded: jax.Array | None = None,
        lengths: jax.Array | None = None,
        positions: jax.Array | None = None,
        at: jax.Array | None = None,
        deterministic: bool = True,
        decode: bool = False,
        max_decode_length: int | None = None,
        reduction: str = "mean",
    ) -> jax.Array:
        """tokens int[b, s] -> logits f32[b, s, V], or with labels int[b, s] their loss; without tokens, inputs
        int[b, t] -> encoded [b, t, H].

        inputs:        the text to encode; or encoded, which an earlier call without tokens returned.
        input_lengths: int[b], how many of the inputs are no padding.
        positions:     not read: relative positions count by themselves.
        The others are as of `CausalLM`.

        Raises ValueError unless one of inputs and encoded is given, and for labels, lengths and at without tokens.
        """
        c = self.config
        for argument, value in dict(labels=labels, lengths=lengths, at=at).items():
            if tokens is None and value is not None:
                raise ValueError(
                    f"EncoderDecoder: {argument} is given without tokens, which the decoder reads; pass them too: "
                    "labels that are shifted right, behind the token that texts begin with."
                )
        for argument, value in dict(tokens=tokens, inputs=inputs).items():
            check("EncoderDecoder", argument, value, NONE | INTEGERS)
        if (inputs is None) == (encoded is None):
            raise ValueError("EncoderDecoder: inputs and encoded are both given, or neither; pass one of them.")
        embedding = self._table("embedding", c.vocab_size, split_rows=True)
        shared = dict(config=c, scan=self.scan, remat=self.remat, remat_policy=self.remat_policy, **self.dtypes)
        if encoded is None:
            warn_of_causal_layers(self)
            x, encoder = self._embed(embedding, self._rows(inputs, input_lengths)), _Part(**shared, name="encoder")
            encoded = encoder(x, lengths=input_lengths, deterministic=deterministic)
        if tokens is None:
            return encoded
        rows = jnp.full(tokens.shape[:1], tokens.shape[1], jnp.int32)
        seen = None if input_lengths is None else SequenceDescriptor.from_seqlens((rows, input_lengths))
        call = dict(deterministic=deterministic, decode=decode, max_decode_length=max_decode_length)
        decoder = _Part(**shared, decoder=True, name="decoder")
        x = self._embed(embedding, self._rows(tokens, lengths, decode))
        y = decoder(x, encoded=encoded, lengths=lengths, encoded_lengths=seen, **call)
        return self._head(y if at is None else rows_at(y, at), labels, embedding, reduction)
