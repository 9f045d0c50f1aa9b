"""The architectures of published models as `ModelConfig`s."""

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax

from te_jax.core.check import NONE, check, did_you_mean, integer, number
from te_jax.models.config import ModelConfig
from te_jax.models.patterns import pattern_of, share_keys
from te_jax.models.sizes import SIZES as SIZES
from te_jax.models.sizes import FullAttention as FullAttention
from te_jax.models.sizes import Latents as Latents
from te_jax.models.sizes import Size as Size
from te_jax.models.sizes import StateSpace as StateSpace
from te_jax.ops.rope import LinearScaling, Llama3Scaling, PositionSections, ProportionalScaling, YarnScaling

# "gelu" is the tanh form, which GPT-2 and T5 1.1 have. BERT and Falcon have the exact one. No kernel quantizes a
# function of the user's as it computes: under FP8 it is plain JAX between the GEMMs.
exact_gelu: Callable[..., jax.Array] = functools.partial(jax.nn.gelu, approximate=False)


def gpt2(size: Size, positions: int = 1024) -> ModelConfig:
    """Radford et al. 2019, https://openai.com/index/better-language-models. Norms come first, biases everywhere."""
    layer = size.layer(
        layernorm_epsilon=1e-5,
        use_bias=True,
        mlp_activations=("gelu",),
        self_attn_mask_type="causal",
        hidden_dropout=0.1,
        attention_dropout=0.1,
    )
    return size.model(layer, family="gpt2", max_positions=positions)


def bert(size: Size, positions: int = 512) -> ModelConfig:
    """Devlin et al. 2018, https://arxiv.org/abs/1810.04805. Norms come last: y = norm(x + attention(x)), then
    norm(y + mlp(y))."""
    layer = size.layer(
        layernorm_epsilon=1e-12,
        use_bias=True,
        mlp_activations=(exact_gelu,),
        self_attn_mask_type="padding",
        # The norm of the MLP is the one behind attention, and what the residual connection takes up; attention's norm
        # moves to the end of the block.
        apply_residual_connection_post_layernorm=True,
        output_layernorm=True,
        hidden_dropout=0.1,
        attention_dropout=0.1,
    )
    others = dict(token_types=2, embedding_norm=True, final_norm=False, head_transform=True)
    return size.model(layer, family="bert", max_positions=positions, **others)


def modernbert(size: Size, around: int = 64) -> ModelConfig:
    """Warner et al. 2024, https://arxiv.org/abs/2412.13663. Norms come first, but that attention of the first layer has
    none, as the embeddings have one; RoPE; two of three layers see `around` tokens on either side."""
    layer = size.layer(
        layernorm_epsilon=1e-5,
        mlp_activations=(exact_gelu, "linear"),
        self_attn_mask_type="padding",
        enable_rotary_pos_emb=True,
        rotary_pos_emb_group_method="alternate",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        intermediate_dropout=0.0,
    )
    near = dict(window_size=(around, around), rotary_pos_emb_windows=(1, 10_000.0))
    far = dict(rotary_pos_emb_windows=(1, 160_000.0))
    others = dict(embedding_norm=True, head_transform=True, first=(far | dict(input_layernorm=False),))
    return size.model(layer, family="modernbert", pattern=(near, near, far), **others)


def siglip(size: Size, image: int = 224, patch: int = 16) -> ModelConfig:
    """Zhai et al. 2023, https://arxiv.org/abs/2303.15343, the encoder of images: norms come first, biases everywhere,
    and attention of one learned token behind them. image, patch: pixels of a side."""
    layer = size.layer(
        layernorm_epsilon=1e-6,
        use_bias=True,
        mlp_activations=("gelu",),
        self_attn_mask_type="no_mask",
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    others = dict(image_size=image, patch_size=patch, pooling_head=True)
    return size.model(layer, family="siglip_vision_model", **others)


def vit(size: Size, image: int = 224, patch: int = 16) -> ModelConfig:
    """Dosovitskiy et al. 2020, https://arxiv.org/abs/2010.11929: as `siglip`, but with a token of the image in front of
    the patches, which a dense layer and tanh read."""
    config = siglip(size, image, patch).with_layer(layernorm_epsilon=1e-12, mlp_activations=(exact_gelu,))
    return replace(config, family="vit", class_token=True)


def t5(size: Size) -> ModelConfig:
    """Raffel et al. 2019, https://arxiv.org/abs/1910.10683. RMSNorm first, no biases, relative positions: in the
    encoder both ways, in the decoder only of the past; one table of them for each stack."""
    layer = size.layer(
        layernorm_type="rmsnorm",
        layernorm_epsilon=1e-6,
        mlp_activations=("gelu", "linear") if size.gated else ("relu",),
        self_attn_mask_type="padding",
        enable_relative_embedding=True,
        scale_attn_logits=False,  # what divides them elsewhere is in the query's weights
        scaled_query_init=True,
        hidden_dropout=0.1,
        attention_dropout=0.1,
        intermediate_dropout=0.1,
    )
    return size.model(layer, family="t5", output_scale=1 / math.sqrt(size.hidden) if size.tied else 1.0)


def llama(size: Size, base: float = 10_000, scaling: Llama3Scaling | None = None, epsilon: float = 1e-5) -> ModelConfig:
    """Touvron et al. 2023, https://arxiv.org/abs/2307.09288. RMSNorm, RoPE, SwiGLU, no biases; large ones have fewer
    keys and values.

    Channel i of a head turns with channel i + d/2, as in Hugging Face's checkpoints. Meta's own checkpoints turn
    neighbours, and need rotary_pos_emb_group_method="consecutive".
    """
    layer = size.layer(
        layernorm_type="rmsnorm",
        layernorm_epsilon=epsilon,
        mlp_activations=("silu", "linear"),
        self_attn_mask_type="causal",
        enable_rotary_pos_emb=True,
        rotary_pos_emb_windows=(1, base),
        rotary_pos_emb_group_method="alternate",
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    layer |= {} if scaling is None else dict(rotary_pos_emb_scaling=scaling)
    return size.model(layer, family="llama")


def llama3(size: Size) -> ModelConfig:
    """Meta 2024, https://arxiv.org/abs/2407.21783. `llama` with another base of RoPE."""
    return llama(size, base=500_000)


def mistral(size: Size, base: float = 10_000, window: int | None = 4096) -> ModelConfig:
    """Jiang et al. 2023, https://arxiv.org/abs/2310.06825. `llama`, whose tokens see the last `window` tokens, their
    own among them."""
    config = llama(size, base)
    config = config if window is None else config.with_layer(window_size=(window - 1, 0))
    return replace(config, family="mistral")


def qwen2(size: Size, base: float = 1_000_000) -> ModelConfig:
    """Qwen team 2024, https://arxiv.org/abs/2407.10671. `llama` with biases; the published models have only the
    queries', keys' and values', and the others are 0."""
    return replace(llama(size, base, epsilon=1e-6).with_layer(use_bias=True), family="qwen2")


def qwen2_moe(size: Size, base: float = 1_000_000) -> ModelConfig:
    """Qwen team 2024, https://arxiv.org/abs/2407.10671. `qwen2` with experts, weighed by the softmax of all logits,
    next to some that all tokens meet behind a gate."""
    weighed = dict(use_pre_softmax=True, normalize_weights=False, use_bias=False)
    shared = dict(num_shared_experts=size.shared or 1, shared_expert_gate=True)
    return replace(qwen2(size, base).with_layer(**size.moe(**weighed, **shared)), family="qwen2_moe")


def mixtral(size: Size, base: float = 1_000_000) -> ModelConfig:
    """Jiang et al. 2024, https://arxiv.org/abs/2401.04088. As Llama, with experts: a token meets two, weighed by the
    softmax of their logits. To train it, add a loss that keeps their loads even: with_layer(moe=dict(...,
    aux_loss_coeff=0.02)), which `CausalLM` sows.
    """
    return replace(llama(size, base).with_layer(**size.moe()), family="mixtral")


def qwen3(size: Size, base: float = 1_000_000) -> ModelConfig:
    """Qwen 2025, https://arxiv.org/abs/2505.09388. As Llama or, with experts, Mixtral, with a norm of each head's
    queries and keys."""
    norms = dict(layernorm_epsilon=1e-6, qk_norm_type="rmsnorm", qk_norm_before_rope=True)
    family = "qwen3_moe" if size.experts else "qwen3"
    return replace(mixtral(size, base).with_layer(**norms), family=family)


def qwen3_next(size: Size, base: float = 10_000_000) -> ModelConfig:
    """Qwen 2025, https://qwen.ai/blog?id=qwen3-next. Three of four layers are Gated DeltaNet, the fourth is attention
    with an output gate, normed queries and keys, and RoPE of a quarter of a head's channels; each has experts, next to
    some that all tokens meet behind a gate. The scale of norms is 1 more than their parameter."""
    shared = dict(num_shared_experts=size.shared or 1, shared_expert_gate=True)
    width = size.head_dim or size.hidden // size.heads
    gated = dict(attn_output_gate=True, rotary_pos_emb_dim=width // 4, zero_centered_gamma=True)
    config = qwen3(size, base).with_layer(**gated, **size.moe(**shared))
    return replace(config, family="qwen3_next", pattern=({}, {}, {}, dict(delta=None)))


SECTIONS_OF_QWEN3_5 = PositionSections((11, 11, 10), interleaved=True)


def qwen3_5(size: Size, base: float = 10_000_000) -> ModelConfig:
    """Qwen 2026, https://qwen.ai/blog?id=qwen3.5 (text). `qwen3_next`, with experts or an MLP; patches of images have
    several positions."""
    family = "qwen3_5_moe_text" if size.experts else "qwen3_5_text"
    return replace(qwen3_next(size, base).with_layer(rotary_pos_emb_sections=SECTIONS_OF_QWEN3_5), family=family)


NO_ROPE = dict(enable_rotary_pos_emb=False, rotary_pos_emb_scaling=None)


def smollm3(size: Size, base: float = 5_000_000) -> ModelConfig:
    """Hugging Face 2025, https://huggingface.co/HuggingFaceTB/SmolLM3-3B. `llama`, with RoPE in 3 of 4 layers."""
    return replace(llama(size, base, epsilon=1e-6), family="smollm3", pattern=({}, {}, {}, NO_ROPE))


def phi3(size: Size, base: float = 250_000) -> ModelConfig:
    """Microsoft 2024, https://arxiv.org/abs/2412.08905. `llama`; in some models a part of a head's channels turns."""
    return replace(llama(size, base), family="phi3")


def olmo2(size: Size, base: float = 500_000) -> ModelConfig:
    """Ai2 2024, https://arxiv.org/abs/2501.00656. `llama` with norms only behind sub-blocks, and one norm each of all
    heads' queries and of all heads' keys."""
    norms = dict(input_layernorm=False, mlp_layernorm=False, post_norms=True)
    of_heads = dict(qk_norm_type="rmsnorm", qk_norm_before_rope=True, qk_norm_across_heads=True)
    config = llama(size, base, epsilon=1e-6).with_layer(qk_norm_eps=1e-6, **norms, **of_heads)
    return replace(config, family="olmo2")


def olmo3(size: Size, window: int = 4096) -> ModelConfig:
    """Ai2 2025, https://allenai.org/olmo3. `olmo2`, three of four layers of which see the last `window` tokens; in the
    others RoPE is stretched from 8192 positions to 65536."""
    far = YarnScaling(8.0, original_max_position=8192)
    width = size.head_dim or size.hidden // size.heads
    stretched = dict(rotary_pos_emb_scaling=far, attn_logit_scale=far.mscale**2 / math.sqrt(width))
    return replace(olmo2(size), family="olmo3", pattern=(dict(window_size=(window - 1, 0)),) * 3 + (stretched,))


def gpt_oss(size: Size, window: int = 128) -> ModelConfig:
    """OpenAI 2025, https://arxiv.org/abs/2508.10925. Experts and projections have biases, and so have the router's
    logits; SwiGLU is clamped; softmax has a learned offset, one for each head; every other layer, the first among them,
    sees the last `window` tokens. RoPE is stretched from 4096 positions to 131072."""
    far = YarnScaling(32.0, truncate=False)
    width = size.head_dim or size.hidden // size.heads
    config = llama(size, 150_000, epsilon=1e-5).with_layer(
        use_bias=True,
        softmax_type="learnable",
        mlp_activations=("clamped_silu", "clamped_linear"),
        mlp_activation_params=dict(limit=7.0, alpha=1.702, glu_linear_offset=1.0),
        rotary_pos_emb_scaling=far,
        attn_logit_scale=far.mscale**2 / math.sqrt(width),
        **size.moe(router_bias=True, use_bias=True),
    )
    return replace(config, family="gpt_oss", pattern=(dict(window_size=(window - 1, 0)), {}))


def llama4(size: Size, base: float = 500_000, scaling: Llama3Scaling | None = None) -> ModelConfig:
    """Meta 2025, https://ai.meta.com/blog/llama-4-multimodal-intelligence (text). Three of four layers have RoPE, of
    neighbours, then L2 norms of queries and keys, and chunks of 8192 tokens; the fourth has neither, and a temperature
    by position. A token has one expert, which its sigmoid weighs beforehand, next to one that all tokens meet."""
    chosen = dict(score_function="sigmoid", num_shared_experts=1, weights_before_experts=True)
    width = size.head_dim or size.hidden // size.heads
    norms = dict(qk_norm_type="l2normalization", qk_norm_eps=width * 1e-5, attn_logit_scale=width**0.5)
    near, far = dict(attention_chunk_size=8192, **norms), dict(attn_temperature=(8192.0, 0.1), **NO_ROPE)
    config = llama(size, base, scaling).with_layer(rotary_pos_emb_group_method="consecutive", **size.moe(**chosen))
    return replace(config, family="llama4_text", pattern=(near, near, near, far))


def glm4_moe(size: Size, base: float = 1_000_000) -> ModelConfig:
    """Zhipu AI 2025, https://arxiv.org/abs/2508.06471. Half of a head's channels turn, queries, keys and values have
    biases, larger ones norms of queries and keys; experts are chosen as in `deepseek_v3`, of one group, next to one
    that all tokens meet, and the first layers have an MLP."""
    width = size.head_dim or size.hidden // size.heads
    chosen = dict(score_function="sigmoid", use_expert_bias=True, num_shared_experts=1, use_bias=False)
    first = dict(moe=None, mlp_hidden_size=size.dense_ffn)
    return replace(llama(size, base), family="glm4_moe", first=(first,) * size.dense).with_layer(
        use_bias=True, rotary_pos_emb_dim=width // 2, **size.moe(**chosen)
    )


def granite(size: Size, base: float = 10_000_000) -> ModelConfig:
    """IBM 2024, https://huggingface.co/ibm-granite/granite-3.3-2b-instruct. `llama` with multipliers of embeddings, of
    what attention scores, of what sub-blocks give, and of logits."""
    config = llama(size, base).with_layer(attn_logit_scale=1 / 64, residual_multiplier=0.22)
    return replace(config, family="granite", embedding_scale=12.0, output_scale=1 / 8)


def gemma2(size: Size, window: int = 4096, query_scalar: float | None = None) -> ModelConfig:
    """Gemma team 2024, https://arxiv.org/abs/2408.00118. Norms before and behind sub-blocks, whose scale is 1 more than
    its parameter; soft caps of attention's and the model's logits; every other layer, the first among them, sees the
    last `window` tokens.

    query_scalar: attention divides by its root; None: by the root of the width of a head.
    """
    check("gemma2", "query_scalar", query_scalar, NONE | number(above=0))
    norms = dict(zero_centered_gamma=True, post_norms=True)
    norms |= {} if query_scalar is None else dict(attn_logit_scale=query_scalar**-0.5)
    config = llama(size, epsilon=1e-6).with_layer(attn_logit_softcap=50.0, mlp_activations=("gelu", "linear"), **norms)
    pattern = (dict(window_size=(window - 1, 0)), {})
    others = dict(embedding_scale=math.sqrt(size.hidden), logit_softcap=30.0)
    return replace(config, family="gemma2", pattern=pattern, **others)


def gemma3(size: Size, window: int = 512, scaling: LinearScaling | None = None) -> ModelConfig:
    """Gemma team 2025, https://arxiv.org/abs/2503.19786. As `gemma2`, without soft caps, with norms of each head's
    queries and keys; five of six layers see the last `window` tokens, with a base of RoPE of their own.

    scaling: of RoPE in the others.
    """
    norms = dict(zero_centered_gamma=True, post_norms=True, qk_norm_type="rmsnorm", qk_norm_before_rope=True)
    config = llama(size, epsilon=1e-6).with_layer(mlp_activations=("gelu", "linear"), **norms)
    near = dict(window_size=(window - 1, 0), rotary_pos_emb_windows=(1, 10_000.0), rotary_pos_emb_scaling=None)
    far = dict(rotary_pos_emb_windows=(1, 1_000_000.0), rotary_pos_emb_scaling=scaling)
    return replace(config, family="gemma3_text", pattern=(near,) * 5 + (far,), embedding_scale=math.sqrt(size.hidden))


def gemma4(size: Size) -> ModelConfig:
    """Google 2026, https://ai.google.dev/gemma/docs/core/model_card_4. Norms before and behind sub-blocks, of queries,
    keys and values; no scale of logits; layers end with a scalar. Each `size.every`-th layer sees all tokens, by wider
    heads, of whose pairs a quarter turns, and maybe with values that are keys; others see the last `size.window`. Small
    models have inputs of layers, and last layers that share keys and values of layers before them."""
    norms = dict(post_norms=True, qk_norm_type="rmsnorm", qk_norm_before_rope=True, v_norm_eps=1e-6)
    config = llama(size, epsilon=1e-6).with_layer(
        mlp_activations=("gelu", "linear"), scale_attn_logits=False, layer_scalar=True, **norms
    )
    config = config.with_layer(layer_input_size=size.inputs) if size.inputs else config
    of_experts = size.moe(intermediate_dim=size.expert_ffn, router_norm=True, expert_scales=True)
    config = config.with_layer(mlp_next_to_experts=True, **of_experts) if size.experts else config
    near = dict(window_size=(size.window - 1, 0), rotary_pos_emb_windows=(1, 10_000.0))
    far = dict(rotary_pos_emb_windows=(1, 1_000_000.0), rotary_pos_emb_scaling=ProportionalScaling())
    far |= size.full._asdict() if size.full else {}
    wide = dict(mlp_hidden_size=2 * size.ffn) if size.wide else {}
    sees_all = [(i + 1) % size.every == 0 for i in range(size.layers if size.sharing else size.every)]
    first, pattern = share_keys(sees_all, size.sharing, {False: near, True: far}, wide)
    others = dict(embedding_scale=math.sqrt(size.hidden), logit_softcap=30.0)
    return replace(config, family="gemma4_text", first=first, pattern=pattern, **others)


def deepseek_v3(size: Size) -> ModelConfig:
    """DeepSeek-AI 2024, https://arxiv.org/abs/2412.19437: multi-head latent attention, and experts that are chosen by
    sigmoids with a bias, in 4 of 8 groups, next to one that all tokens meet; the first layers have an MLP.

    RoPE turns neighbouring channels, and is stretched from 4096 positions to 163840. The bias is in the collection
    `expert_bias` (`te_jax.flax.update_expert_bias`).
    """
    grouped = dict(num_groups=8, group_topk=4, scaling_factor=2.5, num_shared_experts=1)
    first = dict(moe=None, mlp_hidden_size=size.dense_ffn)
    return replace(llama(size), family="deepseek_v3", first=(first,) * size.dense).with_layer(
        layernorm_epsilon=1e-6,
        latent_norm_epsilon=1e-6,
        enable_rotary_pos_emb=False,  # which is for other attentions
        rotary_pos_emb_group_method="consecutive",
        rotary_pos_emb_scaling=YarnScaling(),
        mscale=YarnScaling().mscale,
        **size.moe(score_function="sigmoid", use_expert_bias=True, **grouped),
    )


def kimi_mixers(latents: Mapping[str, Any], rule: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The fields of layers of `kimi_linear` with Kimi Delta Attention, and of those with latent attention. rule: fields
    of `GatedDeltaNet`."""
    unturned = dict(latent_rotary=False, latent_norm_epsilon=1e-6)
    return dict(delta={**rule, "gate": "channel"}), {**latents, **unturned}


def kimi_linear(size: Size) -> ModelConfig:
    """Moonshot AI 2025, https://arxiv.org/abs/2510.26692. Three of four layers, but for the last three, are Kimi Delta
    Attention; the others have latent attention without positions. Experts are chosen as in `deepseek_v3`, of one group,
    next to one that all tokens meet; the first layer has an MLP."""
    linear, full = kimi_mixers(
        size.latents._asdict() if size.latents else {}, size.delta._asdict() if size.delta else {}
    )
    layers = [full if (i + 1) % 4 == 0 or i + 1 == size.layers else linear for i in range(size.layers)]
    chosen = dict(score_function="sigmoid", use_expert_bias=True, scaling_factor=2.446, num_shared_experts=1)
    config = llama(replace(size, latents=None, delta=None)).with_layer(
        enable_rotary_pos_emb=False, **size.moe(**chosen)
    )
    dense = dict(moe=None, mlp_hidden_size=size.dense_ffn)
    first, rest = [each | dense for each in layers[: size.dense]], layers[size.dense :]
    turns = [each is full for each in rest]
    return replace(
        config, family="kimi_linear", first=tuple(first), pattern=pattern_of(turns, {False: linear, True: full})
    )


def falcon(size: Size) -> ModelConfig:
    """TII 2023, https://arxiv.org/abs/2311.16867. Attention and MLP read the same input: x + attention(norm(x)) +
    mlp(norm(x)), with one norm in 7B and two in 40B; RoPE, few keys and values, no biases but in the norms."""
    layer = size.layer(
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
    return size.model(layer, family="falcon")


def granite4(size: Size) -> ModelConfig:
    """IBM 2025, https://huggingface.co/ibm-granite/granite-4.0-h-tiny: Mamba-2, and attention without positions in the
    sixth of ten layers; each has an MLP or, next to one, experts; multipliers of embeddings, of what attention scores,
    of what sub-blocks give, and of logits."""
    config = llama(size).with_layer(
        enable_rotary_pos_emb=False,
        attn_logit_scale=1 / 128,
        residual_multiplier=0.22,
        **size.moe(num_shared_experts=size.shared),
    )
    others = dict(pattern=({},) * 5 + (dict(ssm=None),) + ({},) * 4, embedding_scale=12.0, output_scale=1 / 6)
    return replace(config, family="granitemoehybrid", **others)


NEMOTRON_LAYERS: dict[str, dict[str, Any]] = {  # Mamba-2, experts, attention, MLP: a layer is one of them
    "M": dict(sublayers="mixer", moe=None),
    "E": dict(sublayers="mlp", ssm=None),
    "*": dict(sublayers="mixer", ssm=None, moe=None),
    "-": dict(sublayers="mlp", ssm=None, moe=None),
}


def nemotron_h(size: Size) -> ModelConfig:
    """NVIDIA 2025, https://arxiv.org/abs/2504.03624: a layer is Mamba-2, attention without positions, an MLP of squared
    ReLUs or, as in Nemotron 3, experts; they are chosen as in `deepseek_v3`, of one group."""
    layer = size.layer(
        layernorm_type="rmsnorm",
        layernorm_epsilon=1e-5,
        mlp_activations=("squared_relu",),
        self_attn_mask_type="causal",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        **size.moe(score_function="sigmoid", use_expert_bias=True, scaling_factor=2.5, num_shared_experts=size.shared),
    )
    layer["ssm"] = {**layer["ssm"], "time_step_limit": (0.001, math.inf)}
    return size.model(layer, family="nemotron_h", pattern=pattern_of(size.pattern, NEMOTRON_LAYERS))


PUBLISHED: dict[str, Callable[..., ModelConfig]] = {  # the beginning of a size's name -> its family
    "gpt2": gpt2,
    "bert": bert,
    "modernbert": modernbert,
    "siglip": siglip,
    "vit": vit,
    "t5": t5,
    "llama3": llama3,
    "llama2": llama,
    "mistral": mistral,
    "qwen2-moe": qwen2_moe,
    "qwen2": qwen2,
    "falcon": falcon,
    "mixtral": mixtral,
    "qwen3-next": qwen3_next,
    "qwen3.5": qwen3_5,
    "qwen3": qwen3,
    "gemma2": gemma2,
    "deepseek-v3": deepseek_v3,
    "granite4": granite4,
    "gemma3": gemma3,
    "gemma4": gemma4,
    "glm4.5": glm4_moe,
    "phi4": phi3,
    "llama4": llama4,
    "gpt-oss": gpt_oss,
    "olmo2": olmo2,
    "olmo3": olmo3,
    "granite3": granite,
    "smollm3": smollm3,
    "nemotron": nemotron_h,
    "kimi-linear": kimi_linear,
}


def published(name: str, **changes: Any) -> ModelConfig:
    """The config of a published model, one of `SIZES`: published("llama3-8b", num_layers=2).

    changes: fields of `ModelConfig`; with fewer num_layers than `first` has entries it is cut, too.

    Raises ValueError for an unknown name.
    """
    if name not in SIZES:
        hint = did_you_mean(name, SIZES)
        raise ValueError(f"te_jax.models.published: there is no model {name!r}; {hint or 'give one of'} {[*SIZES]}.")
    family = next(family for prefix, family in PUBLISHED.items() if name.startswith(prefix))
    config = family(SIZES[name])
    count = changes.get("num_layers", config.num_layers)
    check("te_jax.models.published", "num_layers", count, integer(1))
    return replace(config, **dict(first=config.first[:count]) | changes)
