"""CausalLM: a decoder that predicts the next token of one text."""

from typing import TYPE_CHECKING

import jax
from flax import linen as nn

from te_jax.models.layer_inputs import layer_inputs
from te_jax.models.stack import OF_IMAGES, Model, rows_at
from te_jax.ops.attention import SequenceDescriptor


class CausalLM(Model):
    """A causal language model: embeddings, layers, a norm and the head.

    Parameters: `embedding` [V, H]; `positions` [max_positions, H] where they are learned; `layers/TransformerLayer_0`
    with a leading axis of layers, or `layer_0/TransformerLayer_0`, ... (`Model.scan`); `final_norm`; `head` [V, H],
    unless it is the embedding; what `layer_inputs` has, where layers have the field layer_input_size. The FP8 state of
    the loss belongs to `lm_head`, the path that a recipe's `exclude` keeps out of FP8; `init` makes it where it gets
    labels.

    What layers with experts (the field `moe`) sow has a leading axis of layers too. Their losses are no part of what
    the model returns (`te_jax.flax.MoEBlock`):

        loss, sown = model.apply(
            variables, tokens, labels, deterministic=False, mutable=["losses"]
        )
        loss = loss + sum(map(jnp.sum, jax.tree.leaves(sown)))
    """

    if not TYPE_CHECKING:  # as `Module` says
        unread = ("num_decoder_layers", "head_transform", *OF_IMAGES)

    @nn.compact
    def __call__(
        self,
        tokens: jax.Array,
        labels: jax.Array | None = None,
        *,
        lengths: jax.Array | SequenceDescriptor | None = None,
        positions: jax.Array | None = None,
        at: jax.Array | None = None,
        deterministic: bool = True,
        decode: bool = False,
        max_decode_length: int | None = None,
        reduction: str = "mean",
    ) -> jax.Array:
        """tokens int[b, s] -> logits f32[b, s, V]; with labels int[b, s], the tokens that follow, their loss f32[] (or
        f32[b, s] with the reduction "none"), for which whole logits are never in memory.

        lengths:       int[b], how many tokens of each row are no padding, or a `SequenceDescriptor`, as of packed rows.
        positions:     int[b, s]; learned positions need them when decoding, where RoPE counts by itself; int[n, b, s]
                       where layers have rotary_pos_emb_sections, also when decoding.
        at:            int[b]: the logits of only these tokens of each row, f32[b, V].
        deterministic: False: with dropout, from the random stream "dropout", and experts sow losses into `losses`.
        decode:        tokens continue the texts in the collection `cache`, which must be mutable.
        max_decode_length: the slots of the cache, for the call that finds none.

        Raises ValueError for decode=True with learned positions and no `positions`, and for `at` together with labels.
        """
        c = self.config
        if decode and positions is None and c.max_positions is not None:
            raise ValueError("CausalLM: the positions are learned and decode is True; pass positions int[b, s].")
        if labels is not None and at is not None:
            raise ValueError("CausalLM: at is given together with labels; leave one of them out.")
        embedding = self._table("embedding", c.vocab_size, split_rows=True)
        rows = self._rows(tokens, lengths, decode)
        x = self._embed(embedding, rows, positions)
        own = layer_inputs(self, rows.tokens, x)
        call = dict(deterministic=deterministic, decode=decode, max_decode_length=max_decode_length)
        x = self._layers(x, c.fields_of_layer, lengths=lengths, positions=positions, layer_inputs=own, **call)
        return self._head(x if at is None else rows_at(x, at), labels, embedding, reduction)
