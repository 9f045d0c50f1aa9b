"""Writes the fixtures next to this file, with transformers and torch, which the tests do not need.

    pip install torch transformers safetensors
    python tests/hf_fixtures/make.py

Each is a tiny checkpoint of random weights as transformers saves it, and `expected.npz`: what transformers computes of
it in f32 on a CPU, logits of texts (some of which are padded) and 32 greedy words behind prompts, or hidden states of
images [b, h, w, c].
"""

import json
import pathlib
import shutil
import sys

import numpy as np
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

HERE = pathlib.Path(__file__).parent
VOCAB, WORDS = 83, 32
_LLAMA = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=40,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    bos_token_id=None,
    eos_token_id=None,
)
_LLAMA3 = dict(
    rope_theta=500_000.0,
    rope_type="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=16,
)
_DEEPSEEK = dict(
    num_hidden_layers=3,
    num_key_value_heads=4,
    first_k_dense_replace=1,
    moe_intermediate_size=20,
    q_lora_rank=24,
    kv_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=4,
    v_head_dim=6,
    n_routed_experts=8,
    num_experts_per_tok=4,
    n_group=4,
    topk_group=2,
    n_shared_experts=2,
    routed_scaling_factor=2.5,
    norm_topk_prob=True,
    rope_parameters=dict(
        rope_theta=10_000.0,
        rope_type="yarn",
        factor=8.0,
        beta_fast=32.0,
        beta_slow=1.0,
        mscale=1.0,
        mscale_all_dim=1.0,
        original_max_position_embeddings=16,
    ),
)
_ROPES = dict(
    sliding_attention=dict(rope_type="default", rope_theta=100.0),
    full_attention=dict(rope_type="proportional", rope_theta=1000.0, partial_rotary_factor=0.5),
)
_MULTIPLIERS = dict(embedding_multiplier=1.5, residual_multiplier=0.6, attention_multiplier=0.3, logits_scaling=0.7)
_GRANITE = dict(
    num_hidden_layers=3,
    shared_intermediate_size=40,
    num_local_experts=0,
    layer_types=["linear_attention", "full_attention", "linear_attention"],
    **_MULTIPLIERS,
    mamba_n_heads=4,
    mamba_n_groups=2,
    mamba_d_head=16,
    mamba_d_state=12,
    mamba_chunk_size=4,
)
_NEMOTRON = dict(
    layers_block_type=["linear_attention", "mlp", "full_attention", "mlp", "linear_attention"],
    head_dim=12,
    mamba_num_heads=4,
    mamba_head_dim=16,
    ssm_state_size=12,
    n_groups=2,
    chunk_size=4,
)
_DELTA = dict(
    num_hidden_layers=3,
    layer_types=["linear_attention", "full_attention", "linear_attention"],
    head_dim=16,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=12,
    pad_token_id=None,
)
_FALCON = dict(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, bos_token_id=None)
_FALCON |= dict(eos_token_id=None, ffn_hidden_size=48)
_T5 = dict(vocab_size=VOCAB, d_model=32, d_kv=12, d_ff=40, num_layers=2, num_heads=4, eos_token_id=None, pad_token_id=0)
_T5 |= dict(decoder_start_token_id=0)
_BERT = dict(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=40)
_BERT |= dict(max_position_embeddings=64)

MODELS = {
    "llama2": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**_LLAMA | dict(num_key_value_heads=4, head_dim=12))),
    "llama3": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**_LLAMA, rope_parameters=_LLAMA3, tie_word_embeddings=True)),
    "mistral": lambda: hf.MistralForCausalLM(hf.MistralConfig(**_LLAMA, sliding_window=5, attn_implementation="eager")),
    "qwen2": lambda: hf.Qwen2ForCausalLM(
        hf.Qwen2Config(
            **_LLAMA,
            rope_parameters=dict(
                rope_type="yarn", factor=4.0, original_max_position_embeddings=16, rope_theta=10_000.0
            ),
        )
    ),
    "qwen3": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**_LLAMA, head_dim=12)),
    # Of these models of text and images what reads text: heads that turn by several positions.
    "qwen2-vl": lambda: hf.Qwen2VLForConditionalGeneration(
        hf.Qwen2VLConfig(
            text_config=_LLAMA | dict(rope_parameters=dict(rope_type="default", mrope_section=[2, 1, 1])),
            vision_config=dict(depth=1, embed_dim=16, hidden_size=32, num_heads=2),
        )
    ),
    "qwen3-vl": lambda: hf.Qwen3VLForConditionalGeneration(
        hf.Qwen3VLConfig(
            text_config=_LLAMA
            | dict(
                head_dim=12, rope_scaling=dict(rope_type="default", mrope_section=[2, 2, 2], mrope_interleaved=True)
            ),
            vision_config=dict(depth=1, hidden_size=16, num_heads=2, out_hidden_size=32, intermediate_size=16)
            | dict(deepstack_visual_indexes=[0]),
            tie_word_embeddings=True,
        )
    ),
    "mixtral": lambda: hf.MixtralForCausalLM(
        hf.MixtralConfig(**_LLAMA, num_local_experts=3, num_experts_per_tok=2, sliding_window=None)
    ),
    "qwen2-moe": lambda: hf.Qwen2MoeForCausalLM(
        hf.Qwen2MoeConfig(
            **_LLAMA,
            **dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=20, pad_token_id=None),
            shared_expert_intermediate_size=40,
        )
    ),
    "qwen3-moe": lambda: hf.Qwen3MoeForCausalLM(
        hf.Qwen3MoeConfig(
            **_LLAMA, head_dim=12, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=20, norm_topk_prob=True
        )
    ),
    # Attention divides by the root of another number than the width of a head, as in the largest one.
    "gemma2": lambda: hf.Gemma2ForCausalLM(
        hf.Gemma2Config(**_LLAMA, head_dim=12, query_pre_attn_scalar=15, sliding_window=5, attn_implementation="eager")
    ),
    "deepseek-v3": lambda: hf.DeepseekV3ForCausalLM(hf.DeepseekV3Config(**_LLAMA | _DEEPSEEK)),
    "granite4": lambda: hf.GraniteMoeHybridForCausalLM(hf.GraniteMoeHybridConfig(**_LLAMA | _GRANITE)),
    # Experts next to an MLP that all tokens meet, RoPE, and biases of the projections of Mamba-2.
    "granite4-moe": lambda: hf.GraniteMoeHybridForCausalLM(
        hf.GraniteMoeHybridConfig(
            **_LLAMA
            | _GRANITE
            | dict(intermediate_size=20, num_local_experts=4, position_embedding_type="rope", tie_word_embeddings=True)
            | dict(mamba_n_groups=1, mamba_proj_bias=True, mamba_conv_bias=False, mamba_d_conv=3)
        )
    ),
    "nemotron-h": lambda: hf.NemotronHForCausalLM(hf.NemotronHConfig(**_LLAMA | _NEMOTRON)),
    # With experts of a latent, in groups, as many keys as queries, and biases of the projections of Mamba-2.
    "nemotron-3": lambda: hf.NemotronHForCausalLM(
        hf.NemotronHConfig(
            **_LLAMA
            | _NEMOTRON
            | dict(layers_block_type=["linear_attention", "moe", "full_attention", "moe", "linear_attention"])
            | dict(num_key_value_heads=4, use_bias=True, use_conv_bias=False, conv_kernel=3, n_groups=1)
            | dict(n_routed_experts=8, num_experts_per_tok=4, n_group=4, topk_group=2, routed_scaling_factor=2.5)
            | dict(moe_intermediate_size=20, moe_shared_expert_intermediate_size=40, moe_latent_size=24)
            | dict(time_step_min=0.5)
        )
    ),
    "qwen3-next": lambda: hf.Qwen3NextForCausalLM(
        hf.Qwen3NextConfig(
            **_LLAMA
            | _DELTA
            | dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=32)
        )
    ),
    # As many keys as queries, an MLP, a convolution of three tokens.
    "qwen3.5": lambda: hf.Qwen3_5ForCausalLM(
        hf.Qwen3_5TextConfig(
            **_LLAMA
            | _DELTA
            | dict(num_key_value_heads=4, linear_conv_kernel_dim=3, tie_word_embeddings=True)
            | dict(rope_parameters=dict(rope_type="default", mrope_section=[1, 1, 0], mrope_interleaved=True))
        )
    ),
    "qwen3.5-moe": lambda: hf.Qwen3_5MoeForCausalLM(
        hf.Qwen3_5MoeTextConfig(
            **{name: value for name, value in _LLAMA.items() if name != "intermediate_size"}
            | _DELTA
            | dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=16)
        )
    ),
    # Norms of latents have another epsilon than the others, which shows.
    "kimi-linear": lambda: hf.KimiLinearForCausalLM(
        hf.KimiLinearConfig(
            **_LLAMA
            | dict(num_key_value_heads=4, num_hidden_layers=3, moe_intermediate_size=16, pad_token_id=None)
            | dict(kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6, rms_norm_eps=1e-2)
            | dict(num_local_experts=4, num_experts_per_tok=2, n_shared_experts=2, routed_scaling_factor=2.5)
            | dict(linear_head_dim=8, linear_num_heads=3, mlp_layer_types=["dense", "sparse", "sparse"])
            | dict(layer_types=["linear_attention", "full_attention", "linear_attention"])
        )
    ),
    # Layers without RoPE, which see a window.
    "smollm3": lambda: hf.SmolLM3ForCausalLM(
        hf.SmolLM3Config(
            **_LLAMA
            | dict(num_hidden_layers=5, no_rope_layer_interval=2, use_sliding_window=True, sliding_window=5)
            | dict(pad_token_id=None, attn_implementation="eager")
        )
    ),
    # A projection to queries, keys and values, and one of the MLP; half of a head's channels turn; a window.
    "phi4": lambda: hf.Phi3ForCausalLM(
        hf.Phi3Config(
            **_LLAMA | dict(pad_token_id=None, partial_rotary_factor=0.5, sliding_window=5, attn_implementation="eager")
        )
    ),
    "phi3": lambda: hf.Phi3ForCausalLM(
        hf.Phi3Config(**_LLAMA | dict(pad_token_id=None, num_key_value_heads=4, tie_word_embeddings=True))
    ),
    "glm4.5": lambda: hf.Glm4MoeForCausalLM(
        hf.Glm4MoeConfig(
            **_LLAMA
            | dict(num_hidden_layers=3, head_dim=12, attention_bias=True, use_qk_norm=True, first_k_dense_replace=1)
            | dict(moe_intermediate_size=20, n_routed_experts=4, num_experts_per_tok=2, routed_scaling_factor=1.5)
        )
    ),
    "gemma3": lambda: hf.Gemma3ForCausalLM(
        hf.Gemma3TextConfig(
            **_LLAMA
            | dict(num_hidden_layers=3, head_dim=12, query_pre_attn_scalar=10, sliding_window=5, pad_token_id=None)
            | dict(attn_implementation="eager", tie_word_embeddings=True)
            | dict(layer_types=["sliding_attention", "sliding_attention", "full_attention"])
            | dict(rope_scaling=dict(rope_type="linear", factor=2.0))
        )
    ),
    # Layers that see all tokens have wider heads, fewer of keys, which are values, too, and turn half of the pairs.
    "gemma4": lambda: hf.Gemma4ForCausalLM(
        hf.Gemma4TextConfig(
            **_LLAMA
            | dict(num_hidden_layers=4, head_dim=12, global_head_dim=16, num_global_key_value_heads=1)
            | dict(attention_k_eq_v=True, sliding_window=5, pad_token_id=None, hidden_size_per_layer_input=0)
            | dict(attn_implementation="eager", final_logit_softcapping=30.0, rope_parameters=_ROPES)
            | dict(layer_types=["sliding_attention", "full_attention"] * 2)
        )
    ),
    # Experts next to an MLP.
    "gemma4-a4b": lambda: hf.Gemma4ForCausalLM(
        hf.Gemma4TextConfig(
            **_LLAMA
            | dict(num_hidden_layers=4, head_dim=8, global_head_dim=8, sliding_window=5, intermediate_size=20)
            | dict(enable_moe_block=True, num_experts=4, top_k_experts=2, moe_intermediate_size=16)
            | dict(attn_implementation="eager", rope_parameters=_ROPES, hidden_size_per_layer_input=0)
            | dict(layer_types=["sliding_attention", "full_attention"] * 2, pad_token_id=None)
        )
    ),
    # Inputs of layers; the last layers have the keys and values of layers before them, and wider MLPs.
    "gemma4-e2b": lambda: hf.Gemma4ForCausalLM(
        hf.Gemma4TextConfig(
            **_LLAMA
            | dict(num_hidden_layers=4, head_dim=12, global_head_dim=16, num_kv_shared_layers=2, sliding_window=5)
            | dict(use_double_wide_mlp=True, pad_token_id=None)
            | dict(hidden_size_per_layer_input=8, vocab_size_per_layer_input=VOCAB)
            | dict(attn_implementation="eager", rope_parameters=_ROPES, intermediate_size=24)
            | dict(layer_types=["sliding_attention", "full_attention"] * 2)
        )
    ),
    # Of a vocabulary that two devices can share.
    "gpt-oss": lambda: hf.GptOssForCausalLM(
        hf.GptOssConfig(
            **_LLAMA
            | dict(intermediate_size=32, head_dim=8, num_local_experts=4, num_experts_per_tok=2, sliding_window=5)
            | dict(vocab_size=84, swiglu_limit=1.5, attn_implementation="eager")
            | dict(
                rope_parameters=dict(rope_type="yarn", factor=8.0, truncate=False, beta_fast=4.0)
                | dict(rope_theta=1000.0, original_max_position_embeddings=16)
            )
        )
    ),
    # Dense layers and experts in turn, chunks of 5 positions, a temperature that steps every 3.
    "llama4": lambda: hf.Llama4ForCausalLM(
        hf.Llama4TextConfig(
            **_LLAMA
            | dict(num_hidden_layers=4, head_dim=12, intermediate_size=20, intermediate_size_mlp=40)
            | dict(num_local_experts=3, interleave_moe_layer_step=2, no_rope_layers=[1, 0, 1, 0])
            | dict(attention_chunk_size=5, floor_scale=3, attn_scale=0.4, attn_implementation="eager")
            | dict(rope_parameters=_LLAMA3 | dict(high_freq_factor=1.0))
        )
    ),
    "olmo2": lambda: hf.Olmo2ForCausalLM(hf.Olmo2Config(**_LLAMA | dict(pad_token_id=None))),
    "olmo3": lambda: hf.Olmo3ForCausalLM(
        hf.Olmo3Config(
            **_LLAMA
            | dict(pad_token_id=None, num_key_value_heads=4, sliding_window=5, attn_implementation="eager")
            | dict(layer_types=["sliding_attention", "full_attention"], tie_word_embeddings=True)
            | dict(rope_scaling=dict(rope_type="yarn", factor=8.0, original_max_position_embeddings=16))
        )
    ),
    "granite3": lambda: hf.GraniteForCausalLM(hf.GraniteConfig(**_LLAMA | _MULTIPLIERS | dict(head_dim=12))),
    "gpt2": lambda: hf.GPT2LMHeadModel(
        hf.GPT2Config(
            vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=None, eos_token_id=None
        )
    ),
    # With the other gelu.
    "gpt2-gelu": lambda: hf.GPT2LMHeadModel(
        hf.GPT2Config(
            **dict(vocab_size=VOCAB, n_embd=32, n_layer=1, n_head=4, n_positions=64, bos_token_id=None),
            **dict(eos_token_id=None, activation_function="gelu"),
        )
    ),
    "falcon-7b": lambda: hf.FalconForCausalLM(hf.FalconConfig(**_FALCON)),
    "falcon-40b": lambda: hf.FalconForCausalLM(
        hf.FalconConfig(**_FALCON, num_kv_heads=2, new_decoder_architecture=True)
    ),
    "bert": lambda: hf.BertForMaskedLM(hf.BertConfig(**_BERT)),
    # The head has a kernel and a bias of its own, and one more bias that no logits have.
    "bert-untied": lambda: hf.BertForMaskedLM(
        hf.BertConfig(**_BERT | dict(num_hidden_layers=1, tie_word_embeddings=False))
    ),
    "modernbert": lambda: hf.ModernBertForMaskedLM(
        hf.ModernBertConfig(
            **_BERT
            | dict(num_hidden_layers=3, local_attention=4, pad_token_id=None, bos_token_id=None)
            | dict(eos_token_id=None, cls_token_id=None, sep_token_id=None, attn_implementation="eager")
        )
    ),
    # Patches of 4 x 4 do not fill an image of 13 x 13.
    "siglip": lambda: hf.SiglipVisionModel(
        hf.SiglipVisionConfig(
            **dict(hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4),
            **dict(image_size=13, patch_size=4),
        )
    ),
    "siglip-headless": lambda: hf.SiglipVisionModel(
        hf.SiglipVisionConfig(
            **dict(hidden_size=32, intermediate_size=40, num_hidden_layers=1, num_attention_heads=2),
            **dict(image_size=8, patch_size=4, num_channels=1, vision_use_head=False),
        )
    ),
    "vit": lambda: hf.ViTModel(
        hf.ViTConfig(
            **dict(hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4),
            **dict(image_size=13, patch_size=4),
        )
    ),
    "vit-classifier": lambda: hf.ViTForImageClassification(
        hf.ViTConfig(
            **dict(hidden_size=32, intermediate_size=40, num_hidden_layers=1, num_attention_heads=2),
            **dict(image_size=8, patch_size=4, num_channels=1, num_labels=5),
        )
    ),
    "t5": lambda: hf.T5ForConditionalGeneration(hf.T5Config(**_T5, feed_forward_proj="relu")),
    "t5-v1.1": lambda: hf.T5ForConditionalGeneration(
        hf.T5Config(**_T5, feed_forward_proj="gated-gelu", tie_word_embeddings=False, num_decoder_layers=1)
    ),
}
IN_SEVERAL_FILES = ("llama2",)


def as_published(folder: pathlib.Path):
    """An MLP of a layer without experts, which transformers writes by the name that experts have, and reads by both."""
    held = load_file(folder / "model.safetensors")
    ends = tuple(f"block_sparse_moe.{name}_proj.weight" for name in ("gate", "up", "down"))
    names = {name: name.replace("block_sparse_moe", "mlp") if name.endswith(ends) else name for name in held}
    save_file({names[name]: a for name, a in held.items()}, folder / "model.safetensors", dict(format="pt"))


def text_of(folder: pathlib.Path):
    """What transformers saves of the part that reads text, and the head."""
    held, said = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    names = {name: name.replace("model.language_model.", "model.") for name in held if "visual." not in name}
    save_file({names[name]: held[name] for name in names}, folder / "model.safetensors", dict(format="pt"))
    kept = {word: said[word] for word in ("dtype", "tie_word_embeddings", "transformers_version")}
    named = said["architectures"][0].replace("ForConditionalGeneration", "TextModel")
    text = said["text_config"] | kept | dict(architectures=[named])
    (folder / "config.json").write_text(json.dumps(text, indent=2, sort_keys=True) + "\n")


def randomize(model):
    """Weights that keep the size of what they multiply, norms near 1, biases that show."""
    drawn = torch.Generator().manual_seed(0)
    for name, p in model.named_parameters():
        spread = 0.3 if p.ndim == 1 else p.shape[-1] ** -0.5
        is_norm = p.ndim == 1 and name.endswith("weight")
        table = "relative_attention_bias" in name or "embed" in name or name.endswith(("shared.weight", "wte.weight"))
        p.data = torch.randn(p.shape, generator=drawn) * (1.0 if table else spread) + float(is_norm)
    for name, p in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            p.data = torch.randn(p.shape, generator=drawn) * 0.1
        if name.endswith("layer_scalar"):
            p.data = 1 + torch.randn(p.shape, generator=drawn) * 0.3


def texts(rows: int, length: int, seed: int):
    return torch.randint(3, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


def expected(name: str, model) -> dict:
    if hasattr(model.config, "image_size"):
        sizes = (2, model.config.num_channels, model.config.image_size, model.config.image_size)
        images = torch.randn(sizes, generator=torch.Generator().manual_seed(1))
        out = model.base_model(images)
        made = dict(images=images.permute(0, 2, 3, 1).contiguous(), hidden=out.last_hidden_state)
        made |= dict(logits=model(images).logits) if hasattr(model, "classifier") else {}
        return made if out.pooler_output is None else made | dict(pooled=out.pooler_output)
    tokens, lengths = texts(2, 11, 1), torch.tensor([11, 6])
    mask = (torch.arange(11) < lengths[:, None]).long()
    out = dict(tokens=tokens, lengths=lengths)
    if name.startswith("bert"):
        types = (torch.arange(11) > 4).long().expand(2, 11)
        logits = model(tokens, attention_mask=mask, token_type_ids=types).logits
        return out | dict(types=types, logits=logits)
    if name.startswith("modernbert"):
        return out | dict(logits=model(tokens, attention_mask=mask).logits)
    # Steps of Mamba-2 from its cache have no least in transformers, other than the same steps of a text.
    greedy = dict(max_new_tokens=WORDS, do_sample=False, use_cache=name != "nemotron-3")
    if name.startswith("t5"):
        encoded = dict(input_ids=tokens, attention_mask=mask)
        said = texts(2, 7, 2)
        words = model.generate(**encoded, **greedy)[:, 1:]
        return out | dict(said=said, logits=model(**encoded, decoder_input_ids=said).logits, words=words)
    if name.endswith("-vl"):  # as patches of images have them
        places = torch.randint(0, 40, (3, *tokens.shape), generator=torch.Generator().manual_seed(3))
        out |= dict(places=places, placed=model(tokens, position_ids=places).logits)
    return out | dict(logits=model(tokens).logits, words=model.generate(tokens, **greedy, pad_token_id=0)[:, 11:])


@torch.no_grad()
def main(*names):
    for name, make in MODELS.items():
        if names and name not in names:
            continue
        folder = HERE / name
        shutil.rmtree(folder, ignore_errors=True)
        model = make().eval()
        randomize(model)
        model.tie_weights()
        if hasattr(model, "generation_config"):
            model.generation_config.eos_token_id = None
        small = dict(max_shard_size="40KB") if name in IN_SEVERAL_FILES else {}
        model.save_pretrained(folder, **small)
        (folder / "generation_config.json").unlink(missing_ok=True)
        if name.startswith("kimi"):
            as_published(folder)
        if name.endswith("-vl"):
            text_of(folder)
        arrays = {key: a.numpy() for key, a in expected(name, model).items()}
        np.savez_compressed(
            folder / "expected.npz", **{k: a.astype(np.int32) if a.dtype == np.int64 else a for k, a in arrays.items()}
        )
        largest = np.abs(arrays["logits" if "logits" in arrays else "hidden"]).max()
        print(name, sum(f.stat().st_size for f in folder.iterdir()), "logits or hidden states up to", largest)


if __name__ == "__main__":
    main(*sys.argv[1:])
