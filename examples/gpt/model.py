"""A byte-level GPT of te_flax modules. Parameters are f32, activations bf16; logits and loss are f32."""

import flax.linen as nn
import jax
import jax.numpy as jnp

import te_jax.flax as te_flax
from te_jax.ops.attention import SequenceDescriptor
from te_jax.sharding import W_FSDP_AXES, W_NO_SHARD_AXES, reorder_causal_load_balancing

from .config import Experts, Model

VOCAB = 256  # a token is a byte
# Of each layer its own; the last three are of experts: the bias of the choice, terms of the loss, the loads.
COLLECTIONS = ("params", "fp8_metas", "fp8_kernels", "cache", "expert_bias", "losses", "intermediates")


def layer_fields(config: Model, dropout: float, deterministic_gradients: bool = False) -> dict:
    """The fields of a `TransformerLayer`."""
    return dict(
        hidden_size=config.hidden,
        mlp_hidden_size=config.ffn,
        num_attention_heads=config.heads,
        num_gqa_groups=config.gqa_groups,
        layernorm_type=config.norm,
        mlp_activations=config.activations,
        use_bias=config.use_bias,
        self_attn_mask_type="causal",
        enable_rotary_pos_emb=config.rope,
        rotary_pos_emb_group_method="alternate",
        fuse_qkv_params=True,
        hidden_dropout=dropout,
        attention_dropout=0.0,
        deterministic_gradients=deterministic_gradients,
        **({"moe": expert_fields(config.experts)} if config.experts else {}),
    )


def expert_fields(experts: Experts) -> dict:
    """The fields of a `MoEBlock` beside those of its layer."""
    sizes = dict(num_experts=experts.count, num_experts_per_tok=experts.top_k)
    if experts.balance == "bias":  # as in DeepSeek-V3, https://arxiv.org/abs/2412.19437
        return sizes | dict(use_expert_bias=True, score_function="sigmoid")
    # As in the Switch Transformer, https://arxiv.org/abs/2101.03961, and ST-MoE, https://arxiv.org/abs/2202.08906.
    return sizes | dict(aux_loss_coeff=0.01, z_loss_coeff=0.001)


def embedded(tokens: jax.Array, table: jax.Array) -> jax.Array:
    """tokens int[b, s], table f32[256, hidden] -> f32[b, s, hidden]."""
    # A product, not a look-up: the gradient of a look-up is a scatter, whose sums have no fixed order on a GPU.
    # In f32 at the highest precision it is exact: one row times 1, plus zeros.
    return jnp.matmul(jax.nn.one_hot(tokens, VOCAB), table, precision=jax.lax.Precision.HIGHEST)


def logits_of(x: jax.Array, head: jax.Array) -> jax.Array:
    """x bf16[b, s, hidden], head f32[256, hidden] -> f32[b, s, 256]."""
    return jnp.einsum("bsh,vh->bsv", x, head.astype(x.dtype), preferred_element_type=jnp.float32)


class Block(nn.Module):
    """One transformer layer, in the shape that `nn.scan` wants: (carry, x) -> (carry, y)."""

    config: Model
    dropout: float
    decode: bool = False
    max_decode_length: int | None = None
    sequence_parallel: bool = False
    cp: int = 1
    cp_strategy: str = "DEFAULT"
    deterministic_gradients: bool = False
    train: bool = False

    @nn.compact
    def __call__(self, x, lengths):
        c = self.config
        layer = te_flax.TransformerLayer(
            **layer_fields(c, self.dropout, self.deterministic_gradients),
            enable_sequence_parallel=self.sequence_parallel,
            # The axis itself is the MeshResource's. RoPE turns by the places that the order says.
            context_parallel_causal_load_balanced=self.cp > 1,
            context_parallel_strategy=self.cp_strategy,
        )
        return layer(
            x,
            attention_mask=None if lengths is None else SequenceDescriptor.from_seqlens(lengths),
            deterministic=self.dropout == 0 and not self.train,
            decode=self.decode,
            max_decode_length=self.max_decode_length,
        ), None


class GPT(nn.Module):
    """tokens int[b, s] -> logits f32[b, s, 256].

    decode:    the tokens follow those in the collection `cache`; lengths int[b] of them are not padding, None: all.
    positions: int[b, s], which learned positions need to know when decoding; RoPE counts by itself.
    max_decode_length: slots of the cache, for the call that finds none.
    train:     experts sow into the collections `losses` (terms that keep their loads even) and `intermediates` (loads).
    sequence_parallel: the sequence is divided over the tensor-parallel devices outside of the GEMMs.
    fp8_params: kernels are parameters in FP8, where there is a recipe: see `steps.initial`.
    cp: devices of the MeshResource's cp_resource, which divide the sequence; with 2 or more, tokens and logits are in
        the order of `reorder_causal_load_balancing`. cp_strategy: how attention gets keys and values of all of it.
    deterministic_gradients: of attention: the same bits in every run.
    """

    config: Model
    max_len: int  # learned positions
    dropout: float = 0.0
    remat: bool = False
    sequence_parallel: bool = False
    cp: int = 1
    cp_strategy: str = "DEFAULT"
    fp8_params: bool = False
    deterministic_gradients: bool = False

    @nn.compact
    def __call__(
        self, tokens, lengths=None, positions=None, *, decode=False, max_decode_length=None, train=False
    ) -> jax.Array:
        c = self.config
        # Their rows are few: a byte has 256 values. The hidden axis is divided as those of the layers' kernels are.
        table = nn.with_logical_partitioning(nn.initializers.normal(0.02), (W_NO_SHARD_AXES, W_FSDP_AXES))
        embedding = self.param("embedding", table, (VOCAB, c.hidden), jnp.float32)
        x = embedded(tokens, embedding)
        if not c.rope:
            learned = self.param("positions", table, (self.max_len, c.hidden), jnp.float32)
            if decode and positions is None:
                raise ValueError("GPT: learned positions and decode=True; pass positions int[b, s].")
            if positions is not None:
                x = x + learned[positions]
            else:
                in_order = learned[: tokens.shape[1]]
                x = x + (reorder_causal_load_balancing(in_order, self.cp, axis=0) if self.cp > 1 else in_order)
        x = x.astype(jnp.bfloat16)

        # One layer is traced and compiled, whatever their number. The FP8 state gets a leading layer axis, as
        # the parameters and the cache do. With `remat` a layer keeps its input alone, and runs again in the backward
        # pass.
        layers = nn.scan(
            nn.remat(Block, prevent_cse=False) if self.remat else Block,
            variable_axes=dict.fromkeys(COLLECTIONS, 0),
            split_rngs={"params": True, "dropout": True},
            in_axes=nn.broadcast,
            length=c.layers,
            metadata_params={nn.PARTITION_NAME: None},
        )
        fields = (self.dropout, decode, max_decode_length, self.sequence_parallel, self.cp, self.cp_strategy)
        x, _ = layers(c, *fields, self.deterministic_gradients, train, name="layers")(x, lengths)
        x = te_flax.LayerNorm(layernorm_type=c.norm, name="final_norm")(x)

        head = embedding
        if not c.tie_embeddings:
            head = self.param("head", table, (VOCAB, c.hidden), jnp.float32)
        return logits_of(x, head)
