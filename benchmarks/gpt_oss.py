"""A checkpoint of gpt-oss-20b's shape as it is published, experts in MXFP4, with random weights."""

import json
import pathlib
from concurrent.futures import ThreadPoolExecutor

import jax.numpy as jnp
import numpy as np

EXPERTS, HEADS, GROUPS, HEAD_DIM = 32, 64, 8, 64
HIDDEN, LAYERS, VOCABULARY, BLOCK = 2880, 24, 201088, 32
_SCALE = 120  # 2**-7 times E2M1 of random bits: about 0.02, as other weights
_WRITERS = 8  # layers that are drawn at the same time, 0.4 GB each
_TINY = dict(hidden=64, layers=2, vocabulary=256, experts=4, heads=4, groups=2)


def config(hidden: int, layers: int, vocabulary: int, experts: int, heads: int, groups: int) -> dict:
    """config.json."""
    kinds = ["sliding_attention", "full_attention"]
    return dict(
        architectures=["GptOssForCausalLM"],
        model_type="gpt_oss",
        dtype="bfloat16",
        attention_bias=True,
        head_dim=HEAD_DIM,
        hidden_act="silu",
        hidden_size=hidden,
        intermediate_size=hidden,
        layer_types=[kinds[i % 2] for i in range(layers)],
        max_position_embeddings=131072,
        num_attention_heads=heads,
        num_experts_per_tok=4,
        num_hidden_layers=layers,
        num_key_value_heads=groups,
        num_local_experts=experts,
        rms_norm_eps=1e-5,
        rope_theta=150000.0,
        rope_scaling=dict(
            rope_type="yarn",
            factor=32.0,
            beta_fast=32.0,
            beta_slow=1.0,
            truncate=False,
            original_max_position_embeddings=4096,
        ),
        sliding_window=128,
        swiglu_limit=7.0,
        tie_word_embeddings=False,
        vocab_size=vocabulary,
        quantization_config=dict(
            quant_method="mxfp4",
            modules_to_not_convert=["model.layers.*.self_attn", "model.layers.*.mlp.router", "embed", "lm_head"],
        ),
    )


def write(folder: pathlib.Path, tiny: bool) -> None:
    """A file for each layer, and one for the rest."""
    from safetensors.numpy import save_file

    published = dict(hidden=HIDDEN, layers=LAYERS, vocabulary=VOCABULARY, experts=EXPERTS, heads=HEADS, groups=GROUPS)
    sizes = _TINY if tiny else published
    folder.mkdir(parents=True, exist_ok=True)
    last, places = sizes["layers"], {}

    def write_part(i):
        rng, name = np.random.default_rng(i), f"model-{i:05d}.safetensors"
        held = _rest(rng, **sizes) if i == last else _layer(rng, i, **sizes)
        save_file(held, folder / name, metadata={"format": "pt"})
        return dict.fromkeys(held, name)

    with ThreadPoolExecutor(_WRITERS) as pool:
        for names in pool.map(write_part, range(last + 1)):
            places |= names
    (folder / "model.safetensors.index.json").write_text(json.dumps(dict(metadata={}, weight_map=places)))
    (folder / "config.json").write_text(json.dumps(config(**sizes)))


def _normal(rng, *shape):
    return (0.02 * rng.standard_normal(shape, np.float32)).astype(jnp.bfloat16)


def _rest(rng, hidden, vocabulary, **_):
    return {
        "model.embed_tokens.weight": _normal(rng, vocabulary, hidden),
        "model.norm.weight": np.ones(hidden, jnp.bfloat16),
        "lm_head.weight": _normal(rng, vocabulary, hidden),
    }


def _layer(rng, i, hidden, experts, heads, groups, **_):
    path, held = f"model.layers.{i}", {}
    for name, out, width in (
        ("self_attn.q_proj", heads * HEAD_DIM, hidden),
        ("self_attn.k_proj", groups * HEAD_DIM, hidden),
        ("self_attn.v_proj", groups * HEAD_DIM, hidden),
        ("self_attn.o_proj", hidden, heads * HEAD_DIM),
        ("mlp.router", experts, hidden),
    ):
        held |= {f"{path}.{name}.weight": _normal(rng, out, width), f"{path}.{name}.bias": _normal(rng, out)}
    held[f"{path}.self_attn.sinks"] = _normal(rng, heads)
    for name in ("input_layernorm", "post_attention_layernorm"):
        held[f"{path}.{name}.weight"] = np.ones(hidden, jnp.bfloat16)
    for name, out in (("gate_up_proj", 2 * hidden), ("down_proj", hidden)):
        at, scales = f"{path}.mlp.experts.{name}", (experts, out, hidden // BLOCK)
        held[f"{at}_blocks"] = rng.integers(0, 256, (*scales, BLOCK // 2), np.uint8)
        held[f"{at}_scales"] = np.full(scales, _SCALE, np.uint8)
        held[f"{at}_bias"] = _normal(rng, experts, out)
    return held
