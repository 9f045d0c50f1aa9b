"""Blocks of GPT-2, BERT, T5, Llama 3, Falcon, Mixtral, Qwen 3 and DeepSeek-V3: each is a
`te_jax.flax.TransformerLayer` by its arguments alone.

    python examples/models.py                           # one of each: its parameters, and a step at a tiny size
    python examples/models.py llama3-70b mixtral-8x7b --fp8

`tests/test_models.py` compares each block with the published architecture in plain Flax, and shows how published
weights are named here. Weights start as the layer draws them, which is not how the papers do.
"""

import argparse
import dataclasses
import functools
import math
import sys
from collections.abc import Callable
from typing import NamedTuple

import flax
import jax
import jax.numpy as jnp

import te_jax as te
import te_jax.flax as te_flax
from te_jax import recipe
from te_jax.ops.attention import SequenceDescriptor
from te_jax.ops.rope import YarnScaling

# "gelu" is the tanh form, which GPT-2 and T5 1.1 have. BERT and Falcon have the exact one. No kernel quantizes a
# function of the user's as it computes: under FP8 it is plain JAX between the GEMMs.
exact_gelu = functools.partial(jax.nn.gelu, approximate=False)


class Latents(NamedTuple):
    """Widths of multi-head latent attention, as the layer names them."""

    q_lora_rank: int = 1536
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128


@dataclasses.dataclass(frozen=True)
class Size:
    """What differs between the models of a family."""

    hidden: int
    ffn: int
    heads: int
    layers: int  # blocks; of T5, in the encoder and in the decoder each
    groups: int | None = None  # of keys and values; None: as many as heads
    head_dim: int | None = None  # None: hidden / heads
    gated: bool = False  # T5 1.1: gelu times linear, where 1.0 has relu
    one_norm: bool = False  # Falcon 7B: attention and MLP share theirs
    experts: int = 0  # of width ffn, in the place of the MLP; 0: none
    topk: int = 0  # of which a token meets so many
    latents: Latents | None = None

    def fields(self) -> dict:
        return dict(
            hidden_size=self.hidden,
            mlp_hidden_size=self.ffn,
            num_attention_heads=self.heads,
            num_gqa_groups=self.groups,
            kv_channels=self.head_dim,
            **(self.latents._asdict() if self.latents else {}),
        )

    def moe(self, **more) -> dict | None:
        """The layer's field of that name, with these fields of `MoEBlock`."""
        return dict(num_experts=self.experts, num_experts_per_tok=self.topk, **more) if self.experts else None


SIZES = {
    "gpt2": Size(768, 3072, 12, 12),
    "gpt2-medium": Size(1024, 4096, 16, 24),
    "gpt2-large": Size(1280, 5120, 20, 36),
    "gpt2-xl": Size(1600, 6400, 25, 48),
    "bert-base": Size(768, 3072, 12, 12),
    "bert-large": Size(1024, 4096, 16, 24),
    "t5-small": Size(512, 2048, 8, 6),
    "t5-base": Size(768, 3072, 12, 12),
    "t5-large": Size(1024, 4096, 16, 24),
    "t5-3b": Size(1024, 16384, 32, 24, head_dim=128),
    "t5-11b": Size(1024, 65536, 128, 24, head_dim=128),
    "t5-v1.1-small": Size(512, 1024, 6, 8, head_dim=64, gated=True),
    "t5-v1.1-base": Size(768, 2048, 12, 12, gated=True),
    "t5-v1.1-large": Size(1024, 2816, 16, 24, gated=True),
    "t5-v1.1-xl": Size(2048, 5120, 32, 24, gated=True),
    "t5-v1.1-xxl": Size(4096, 10240, 64, 24, gated=True),
    "llama3-8b": Size(4096, 14336, 32, 32, groups=8),
    "llama3-70b": Size(8192, 28672, 64, 80, groups=8),
    "falcon-7b": Size(4544, 18176, 71, 32, groups=1, one_norm=True),
    "falcon-40b": Size(8192, 32768, 128, 60, groups=8),
    "mixtral-8x7b": Size(4096, 14336, 32, 32, groups=8, experts=8, topk=2),
    "qwen3-30b-a3b": Size(2048, 768, 32, 48, groups=4, head_dim=128, experts=128, topk=8),
    "deepseek-v3": Size(7168, 2048, 128, 58, experts=256, topk=8, latents=Latents()),
    "deepseek-v3-dense": Size(7168, 18432, 128, 3, latents=Latents()),  # the first blocks
}


def _layer(size: Size | str, own: dict, fields: dict) -> te_flax.TransformerLayer:
    """`fields` are the caller's and win."""
    size = SIZES[size] if isinstance(size, str) else size
    return te_flax.TransformerLayer(**size.fields() | own | fields)


def gpt2_block(size: Size | str = "gpt2", **fields) -> te_flax.TransformerLayer:
    """Radford et al. 2019, https://openai.com/index/better-language-models. Norms come first, biases everywhere."""
    own = dict(
        layernorm_epsilon=1e-5,
        use_bias=True,
        mlp_activations=("gelu",),
        self_attn_mask_type="causal",
        hidden_dropout=0.1,
        attention_dropout=0.1,
    )
    return _layer(size, own, fields)


def bert_block(size: Size | str = "bert-base", **fields) -> te_flax.TransformerLayer:
    """Devlin et al. 2018, https://arxiv.org/abs/1810.04805. Norms come last: y = norm(x + attention(x)), then
    norm(y + mlp(y)).

    Pass attention_mask, a `SequenceDescriptor` of lengths or an array that is True at padding.
    """
    own = dict(
        layernorm_epsilon=1e-12,
        use_bias=True,
        mlp_activations=(exact_gelu,),
        self_attn_mask_type="padding",
        # The norm of the MLP is the one behind attention, and what the residual connection takes up; that of attention
        # moves to the end of the block.
        apply_residual_connection_post_layernorm=True,
        output_layernorm=True,
        hidden_dropout=0.1,
        attention_dropout=0.1,
    )
    return _layer(size, own, fields)


def _t5_block(size: Size | str, own: dict, fields: dict) -> te_flax.TransformerLayer:
    size = SIZES[size] if isinstance(size, str) else size
    own |= dict(
        layernorm_type="rmsnorm",
        layernorm_epsilon=1e-6,
        mlp_activations=("gelu", "linear") if size.gated else ("relu",),
        enable_relative_embedding=True,
        scale_attn_logits=False,  # what divides them elsewhere is in the query's weights
        scaled_query_init=True,
        hidden_dropout=0.1,
        attention_dropout=0.1,
        intermediate_dropout=0.1,
    )
    return _layer(size, own, fields)


def t5_encoder_block(size: Size | str = "t5-base", **fields) -> te_flax.TransformerLayer:
    """Raffel et al. 2019, https://arxiv.org/abs/1910.10683. RMSNorm first, no biases, relative positions both ways.

    T5 has one table of relative biases for all blocks of a stack: pass them one `te_flax.RelativePositionBiases` as
    relative_embedding; else each has its own. attention_mask as of `bert_block`.
    """
    return _t5_block(size, dict(self_attn_mask_type="padding"), fields)


def t5_decoder_block(size: Size | str = "t5-base", **fields) -> te_flax.TransformerLayer:
    """As `t5_encoder_block`, with relative positions of the past alone; cross-attention to `encoded` has none."""
    return _t5_block(size, dict(layer_type="decoder", self_attn_mask_type="causal"), fields)


# What the family of Llama shares: RMSNorm, RoPE of channels i and i + d/2, SwiGLU, no biases.
_LLAMA = dict(
    layernorm_type="rmsnorm",
    layernorm_epsilon=1e-5,
    mlp_activations=("silu", "linear"),
    self_attn_mask_type="causal",
    enable_rotary_pos_emb=True,
    rotary_pos_emb_group_method="alternate",
    hidden_dropout=0.0,
    attention_dropout=0.0,
)


def llama3_block(size: Size | str = "llama3-8b", **fields) -> te_flax.TransformerLayer:
    """Meta 2024, https://arxiv.org/abs/2407.21783. RMSNorm, RoPE, grouped keys and values, SwiGLU, no biases.

    Channel i of a head turns with channel i + d/2, as in Hugging Face's checkpoints; Meta's own turn neighbours: with
    those, rotary_pos_emb_group_method="consecutive".
    """
    return _layer(size, _LLAMA | dict(rotary_pos_emb_windows=(1, 500_000)), fields)


def mixtral_block(size: Size | str = "mixtral-8x7b", **fields) -> te_flax.TransformerLayer:
    """Jiang et al. 2024, https://arxiv.org/abs/2401.04088. As Llama, with experts: a token meets two, weighed by the
    softmax of their logits. To train it, add a loss that keeps their loads even: moe=dict(..., aux_loss_coeff=0.02).
    """
    size = SIZES[size] if isinstance(size, str) else size
    return _layer(size, _LLAMA | dict(rotary_pos_emb_windows=(1, 1_000_000), moe=size.moe()), fields)


def qwen3_block(size: Size | str = "qwen3-30b-a3b", **fields) -> te_flax.TransformerLayer:
    """Qwen 2025, https://arxiv.org/abs/2505.09388. As Mixtral, with a norm of each head's queries and keys."""
    own = dict(layernorm_epsilon=1e-6, qk_norm_type="rmsnorm", qk_norm_before_rope=True)
    return mixtral_block(size, **own | fields)


def deepseek_v3_block(size: Size | str = "deepseek-v3", **fields) -> te_flax.TransformerLayer:
    """DeepSeek-AI 2024, https://arxiv.org/abs/2412.19437: multi-head latent attention, and experts that are chosen by
    sigmoids with a bias, in 4 of 8 groups, beside one that all tokens meet; the first three blocks have an MLP.

    RoPE turns neighbouring channels, and is stretched from 4096 positions to 163840. The bias is in the collection
    `expert_bias` (`te_jax.flax.update_expert_bias`).
    """
    size = SIZES[size] if isinstance(size, str) else size
    grouped = dict(num_groups=8, group_topk=4, scaling_factor=2.5, num_shared_experts=1)
    own = dict(
        layernorm_epsilon=1e-6,
        enable_rotary_pos_emb=False,  # which is that of other attentions
        rotary_pos_emb_group_method="consecutive",
        rotary_pos_emb_scaling=YarnScaling(),
        mscale=YarnScaling().mscale,
        moe=size.moe(score_function="sigmoid", use_expert_bias=True, **grouped),
    )
    return _layer(size, _LLAMA | own, fields)


def falcon_block(size: Size | str = "falcon-7b", **fields) -> te_flax.TransformerLayer:
    """TII 2023, https://arxiv.org/abs/2311.16867. Attention and MLP read the same input: x + attention(norm(x)) +
    mlp(norm(x)), with one norm in 7B and two in 40B; RoPE, few keys and values, no biases but those of the norms."""
    size = SIZES[size] if isinstance(size, str) else size
    own = dict(
        layernorm_epsilon=1e-5,
        mlp_activations=(exact_gelu,),
        self_attn_mask_type="causal",
        parallel_attention_mlp=True,
        parallel_shared_layernorm=size.one_norm,
        enable_rotary_pos_emb=True,
        rotary_pos_emb_windows=(1, 10_000),
        rotary_pos_emb_group_method="alternate",
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    return _layer(size, own, fields)


SHOWN = ("gpt2", "bert-base", "t5-base", "t5-v1.1-base", "llama3-8b", "falcon-7b", "falcon-40b", "mixtral-8x7b")
SHOWN += ("qwen3-30b-a3b", "deepseek-v3")

FAMILIES: dict[str, tuple[Callable, ...]] = {  # the beginning of a size's name -> the blocks of the model
    "gpt2": (gpt2_block,),
    "bert": (bert_block,),
    "t5": (t5_encoder_block, t5_decoder_block),
    "llama3": (llama3_block,),
    "falcon": (falcon_block,),
    "mixtral": (mixtral_block,),
    "qwen3": (qwen3_block,),
    "deepseek-v3": (deepseek_v3_block,),
}


def tiny(size: Size) -> Size:
    """The same shape of model, 64 wide."""
    groups = size.groups and max(1, 4 * size.groups // size.heads)
    latents = size.latents and Latents(32, 32, 16, 16, 16)
    more = dict(groups=groups, head_dim=size.head_dim and 32, experts=min(size.experts, 16), latents=latents)
    return dataclasses.replace(size, hidden=64, ffn=128, heads=4, **more)


def arguments(block: te_flax.TransformerLayer, batch: int, length: int) -> dict:
    """Random input of the block; rows of encoders without a causal mask are padded on the right."""
    draw = lambda key, length: jax.random.normal(jax.random.key(key), (batch, length, block.hidden_size), jnp.bfloat16)
    args = {"inputs": draw(0, length)}
    if block.layer_type == "decoder":
        args["encoded"] = draw(1, length // 2)
    if block.self_attn_mask_type == "padding":
        args["attention_mask"] = SequenceDescriptor.from_seqlens(length - jnp.arange(batch))
    return args


def parameter_count(block: te_flax.TransformerLayer) -> int:
    """Of one block, by shapes alone."""
    args = arguments(block, 1, 2) | {"deterministic": True}
    shapes = jax.eval_shape(lambda: block.init(jax.random.key(0), **args))["params"]
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))


def forward_and_backward(block: te_flax.TransformerLayer) -> tuple[float, float]:
    """(mean square of the output, norm of its gradient by the parameters), in bf16 with f32 parameters."""
    args = arguments(block, 2, 16) | {"deterministic": True}
    state, params = flax.core.pop(jax.jit(lambda key: block.init(key, **args))(jax.random.key(1)), "params")

    def loss(params, state):
        y = block.apply({"params": params, **state}, **args)
        return jnp.mean(y.astype(jnp.float32) ** 2)

    # The gradient of `state` is the next FP8 state (see quickstart.py); one step does not need it.
    value, (grads, _) = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(params, state)
    return float(value), math.sqrt(sum(float(jnp.sum(leaf**2)) for leaf in jax.tree.leaves(grads)))


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(description="Blocks of published models, made of te_jax.flax.TransformerLayer.")
    p.add_argument("models", nargs="*", metavar="MODEL", help=f"some of {', '.join(SIZES)} [default: one of each]")
    p.add_argument("--fp8", action="store_true", help="run the tiny blocks in FP8 with delayed scaling")
    args = p.parse_args(argv)
    for name in args.models:
        if name not in SIZES:
            p.error(f"there is no model {name}: give some of {', '.join(SIZES)}")
    for name in args.models or SHOWN:
        size = SIZES[name]
        for block in next(blocks for family, blocks in FAMILIES.items() if name.startswith(family)):
            count = parameter_count(block(size))
            with te.fp8_autocast(enabled=args.fp8, fp8_recipe=recipe.DelayedScaling(amax_history_len=16)):
                value, slope = forward_and_backward(block(tiny(size)))
            print(
                f"{name:17} {block.__name__:16} {size.layers:2} blocks of {count:14,} parameters; tiny, "
                f"{'fp8' if args.fp8 else 'bf16'}: loss {value:.4f}, gradient {slope:.4f}"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
