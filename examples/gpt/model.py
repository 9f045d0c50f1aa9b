"""A byte-level GPT. Parameters are f32, activations bf16; logits and loss are f32."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from te_jax.models import CausalLM, ModelConfig
from te_jax.sharding import reorder_causal_load_balancing

from .config import Experts, Model, Ssm

VOCAB = 256  # a token is a byte


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
    """The fields of a `MoEBlock` in addition to its layer's."""
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


def ssm_fields(config: Model) -> dict:
    """The fields of a layer that has another mixer instead of attention; {} for a model without."""
    mixer = config.ssm
    if mixer is None:
        return {}
    heads = config.ssm_heads
    if mixer.kind == "mamba2":
        return dict(ssm=dict(ssm_num_heads=heads, ssm_head_dim=mixer.head_dim, ssm_state_size=mixer.state))
    widths = dict(linear_key_head_dim=mixer.state, linear_value_head_dim=mixer.head_dim)
    return dict(delta=dict(linear_num_value_heads=heads, linear_num_key_heads=heads // 2, **widths))


def with_mixer(layer: dict, ssm: Ssm | None, fields: dict) -> dict:
    """The fields `layer` and `pattern` of a ModelConfig. fields: those of a layer with another mixer than attention."""
    if ssm is None:
        return dict(layer=layer)
    if ssm.attention_every is None:
        return dict(layer=layer | fields)
    return dict(layer=layer, pattern=tuple({} if place == 1 else fields for place in range(ssm.attention_every)))


def logits_of(x: jax.Array, head: jax.Array) -> jax.Array:
    """x bf16[b, s, hidden], head f32[256, hidden] -> f32[b, s, 256]."""
    return jnp.einsum("bsh,vh->bsv", x, head.astype(x.dtype), preferred_element_type=jnp.float32)


def architecture(config: Model, max_len: int, layer: dict) -> ModelConfig:
    """The model as `te_jax.models` says it. layer: fields of its layers with attention."""
    fields = {name: value for name, value in layer.items() if name != "hidden_size"}
    return ModelConfig(
        vocab_size=VOCAB,
        num_layers=config.layers,
        hidden_size=config.hidden,
        **with_mixer(fields, config.ssm, ssm_fields(config)),
        max_positions=None if config.rope else max_len,
        tie_embeddings=config.tie_embeddings,
    )


class GPT(nn.Module):
    """tokens int[b, s] -> logits f32[b, s, 256]: a `te_jax.models.CausalLM`, whose parameters are its own.

    fp8_params: kernels are parameters in FP8, where there is a recipe: see `steps.initial`.
    sequence_parallel: the sequence is divided over the tensor-parallel devices outside of the GEMMs.
    cp: devices of the MeshResource's cp_resource, which divide the sequence; with 2 or more, tokens and logits of a
        model that has only attention are in the order of `reorder_causal_load_balancing`. cp_strategy: how attention
        gets keys and values of all of it.
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

    @property
    def balanced(self) -> bool:
        return self.cp > 1 and self.config.ssm is None  # Other mixers have their tokens in order.

    def setup(self):
        layer = dict(
            enable_sequence_parallel=self.sequence_parallel,
            # The axis itself is the MeshResource's. RoPE turns by the places that the order says.
            context_parallel_causal_load_balanced=self.balanced,
            context_parallel_strategy=self.cp_strategy,
        )
        layer = layer_fields(self.config, self.dropout, self.deterministic_gradients) | layer
        # A look-up's gradient has no fixed order on a GPU, and a byte has only 256 values.
        options = dict(remat=self.remat, embed_by_product=True)
        self.lm = CausalLM(architecture(self.config, self.max_len, layer), **options)
        nn.share_scope(self, self.lm)

    def __call__(self, tokens, lengths=None, positions=None, *, train=False, **options) -> jax.Array:
        """lengths, positions and options as of `te_jax.models.CausalLM`.

        train: experts sow into the collections `losses` (terms that keep their loads even) and `intermediates` (loads).
        """
        if self.balanced and positions is None and not self.config.rope:
            in_order = reorder_causal_load_balancing(jnp.arange(tokens.shape[1]), self.cp, axis=0)
            positions = jnp.broadcast_to(in_order, tokens.shape)
        deterministic = self.dropout == 0 and not train
        return self.lm(tokens, lengths=lengths, positions=positions, deterministic=deterministic, **options)
