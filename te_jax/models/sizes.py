"""The sizes of published models."""

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

from te_jax.models.config import ModelConfig


class Latents(NamedTuple):
    """Widths of multi-head latent attention, as the layer names them."""

    q_lora_rank: int | None = 1536
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128


class StateSpace(NamedTuple):
    """Sizes of Mamba-2, as the field `ssm` of a layer names them."""

    ssm_num_heads: int = 128
    ssm_head_dim: int = 64
    ssm_state_size: int = 128
    ssm_num_groups: int = 8


class DeltaNet(NamedTuple):
    """Sizes of Gated DeltaNet, as the field `delta` of a layer names them."""

    linear_num_value_heads: int = 32
    linear_num_key_heads: int | None = 16
    linear_key_head_dim: int = 128
    linear_value_head_dim: int = 128


class FullAttention(NamedTuple):
    """What layers of Gemma 4 that see all tokens have of their own, as a layer names it."""

    kv_channels: int = 512
    num_gqa_groups: int | None = None
    keys_as_values: bool = False


@dataclass(frozen=True)
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
    experts: int = 0  # of width ffn, instead of the MLP; 0: none
    topk: int = 0  # of which a token meets so many
    dense: int = 0  # DeepSeek-V3: the first layers, which have an MLP of width dense_ffn instead
    dense_ffn: int | None = None
    latents: Latents | None = None
    ssm: StateSpace | None = None
    delta: DeltaNet | None = None
    shared: int = 0  # Granite 4, Nemotron-H, Qwen 2 and 3: so many experts are one MLP, which all tokens meet
    pattern: str = ""  # Nemotron-H: a letter of `NEMOTRON_LAYERS` for each layer
    full: FullAttention | None = None
    every: int = 6  # Gemma 4: each so many-th layer sees all tokens, the others `window`
    window: int = 512
    expert_ffn: int | None = None  # Gemma 4: of experts, next to an MLP of width ffn
    sharing: int = 0  # Gemma 4: so many layers, the last ones, have the keys and values of others
    wide: bool = False  # Gemma 4: these have MLPs of twice the width
    inputs: int | None = None  # Gemma 4: the width of what each layer reads of a token for itself
    vocab: int = 32000
    tied: bool = True

    def layer(self, **fields: Any) -> dict[str, Any]:
        """Fields of a `TransformerLayer` of this size."""
        return dict(
            mlp_hidden_size=self.ffn,
            num_attention_heads=self.heads,
            num_gqa_groups=self.groups,
            kv_channels=self.head_dim,
            **(self.latents._asdict() if self.latents else {}),
            **(dict(ssm=self.ssm._asdict()) if self.ssm else {}),
            **(dict(delta=self.delta._asdict()) if self.delta else {}),
            **fields,
        )

    def moe(self, **more: Any) -> dict[str, Any]:
        """The layer's field of that name, with these fields of `MoEBlock`; {} without experts."""
        sizes = dict(num_experts=self.experts, num_experts_per_tok=self.topk)
        return dict(moe=sizes | more) if self.experts else {}

    def model(self, layer: dict[str, Any], **fields: Any) -> ModelConfig:
        """A model of such layers."""
        sizes = dict(vocab_size=self.vocab, num_layers=self.layers, hidden_size=self.hidden)
        return ModelConfig(**sizes | dict(tie_embeddings=self.tied) | fields, layer=layer)


_gpt2, _bert = functools.partial(Size, vocab=50257), functools.partial(Size, vocab=30522)
_t5, _llama3 = functools.partial(Size, vocab=32128), functools.partial(Size, vocab=128256, groups=8, tied=False)
_qwen3 = functools.partial(Size, head_dim=128, vocab=151936, tied=False)
_qwen3_5 = functools.partial(Size, head_dim=256, delta=DeltaNet(), vocab=248320, tied=False)
_deepseek = functools.partial(Size, latents=Latents(), vocab=129280, tied=False)
_t5_11 = functools.partial(_t5, gated=True, tied=False)
_nemotron = functools.partial(Size, head_dim=128, vocab=131072, tied=False)
_gpt_oss = functools.partial(Size, groups=8, head_dim=64, topk=4, vocab=201088, tied=False)
_gemma4 = functools.partial(Size, head_dim=256, inputs=256, vocab=262144)

SIZES = {
    "gpt2": _gpt2(768, 3072, 12, 12),
    "gpt2-medium": _gpt2(1024, 4096, 16, 24),
    "gpt2-large": _gpt2(1280, 5120, 20, 36),
    "gpt2-xl": _gpt2(1600, 6400, 25, 48),
    "bert-base": _bert(768, 3072, 12, 12),
    "bert-large": _bert(1024, 4096, 16, 24),
    "modernbert-base": Size(768, 1152, 12, 22, vocab=50368),
    "modernbert-large": Size(1024, 2624, 16, 28, vocab=50368),
    "siglip-base": Size(768, 3072, 12, 12, vocab=0),
    "siglip-large": Size(1024, 4096, 16, 24, vocab=0),
    "vit-base": Size(768, 3072, 12, 12, vocab=0),
    "vit-large": Size(1024, 4096, 16, 24, vocab=0),
    "t5-small": _t5(512, 2048, 8, 6),
    "t5-base": _t5(768, 3072, 12, 12),
    "t5-large": _t5(1024, 4096, 16, 24),
    "t5-3b": _t5(1024, 16384, 32, 24, head_dim=128),
    "t5-11b": _t5(1024, 65536, 128, 24, head_dim=128),
    "t5-v1.1-small": _t5_11(512, 1024, 6, 8, head_dim=64),
    "t5-v1.1-base": _t5_11(768, 2048, 12, 12),
    "t5-v1.1-large": _t5_11(1024, 2816, 16, 24),
    "t5-v1.1-xl": _t5_11(2048, 5120, 32, 24),
    "t5-v1.1-xxl": _t5_11(4096, 10240, 64, 24),
    "llama2-7b": Size(4096, 11008, 32, 32, tied=False),
    "llama2-70b": Size(8192, 28672, 64, 80, groups=8, tied=False),
    "llama3-8b": _llama3(4096, 14336, 32, 32),
    "llama3-70b": _llama3(8192, 28672, 64, 80),
    "mistral-7b": Size(4096, 14336, 32, 32, groups=8, tied=False),
    "qwen2-7b": Size(3584, 18944, 28, 28, groups=4, vocab=152064, tied=False),
    "falcon-7b": Size(4544, 18176, 71, 32, groups=1, one_norm=True, vocab=65024),
    "falcon-40b": Size(8192, 32768, 128, 60, groups=8, vocab=65024),
    "mixtral-8x7b": Size(4096, 14336, 32, 32, groups=8, experts=8, topk=2, tied=False),
    "qwen3-8b": _qwen3(4096, 12288, 32, 36, groups=8),
    "qwen3-30b-a3b": _qwen3(2048, 768, 32, 48, groups=4, experts=128, topk=8),
    "qwen3-next-80b-a3b": _qwen3(
        *(2048, 512, 16, 48), groups=2, head_dim=256, experts=512, topk=10, shared=1, delta=DeltaNet()
    ),
    "qwen3.5-9b": _qwen3_5(4096, 12288, 16, 32, groups=4),
    "qwen3.5-35b-a3b": _qwen3_5(2048, 512, 16, 40, groups=2, experts=256, topk=8, shared=1),
    "gemma2-9b": Size(3584, 14336, 16, 42, groups=8, head_dim=256, vocab=256000),
    "deepseek-v3": _deepseek(7168, 2048, 128, 61, experts=256, topk=8, dense=3, dense_ffn=18432),
    "granite4-h-tiny": Size(
        *(1536, 512, 12, 40),
        groups=4,
        experts=64,
        topk=6,
        shared=2,
        ssm=StateSpace(48, ssm_num_groups=1),
        vocab=100352,
    ),
    "granite3-2b": Size(2048, 8192, 32, 40, groups=8, vocab=49159),
    "smollm3-3b": Size(2048, 11008, 16, 36, groups=4, vocab=128256),
    "qwen2-moe-57b-a14b": Size(*(3584, 2560, 28, 28), groups=4, experts=64, topk=8, shared=8, vocab=151936, tied=False),
    "llama4-scout": Size(*(5120, 8192, 40, 48), groups=8, head_dim=128, experts=16, topk=1, vocab=202048, tied=False),
    "gpt-oss-20b": _gpt_oss(2880, 2880, 64, 24, experts=32),
    "gpt-oss-120b": _gpt_oss(2880, 2880, 64, 36, experts=128),
    "olmo2-7b": Size(4096, 11008, 32, 32, vocab=100352, tied=False),
    "olmo3-7b": Size(4096, 11008, 32, 32, vocab=100278, tied=False),
    "phi4": Size(5120, 17920, 40, 40, groups=10, vocab=100352, tied=False),
    "glm4.5-air": Size(
        *(4096, 1408, 96, 46),
        groups=8,
        head_dim=128,
        experts=128,
        topk=8,
        dense=1,
        dense_ffn=10944,
        vocab=151552,
        tied=False,
    ),
    "kimi-linear-48b-a3b": Size(
        *(2304, 1024, 32, 27),
        experts=256,
        topk=8,
        dense=1,
        dense_ffn=9216,
        latents=Latents(q_lora_rank=None),
        delta=DeltaNet(linear_num_key_heads=None),
        vocab=163840,
        tied=False,
    ),
    "gemma3-1b": Size(1152, 6912, 4, 26, groups=1, head_dim=256, vocab=262144),
    "gemma4-31b": Size(
        *(5376, 21504, 32, 60), groups=16, head_dim=256, full=FullAttention(512, 4, True), window=1024, vocab=262144
    ),
    "gemma4-e2b": _gemma4(1536, 6144, 8, 35, groups=1, full=FullAttention(512, 1), every=5, sharing=20, wide=True),
    "gemma4-e4b": _gemma4(2560, 10240, 8, 42, groups=2, full=FullAttention(512, 2), sharing=18),
    "gemma4-26b-a4b": Size(
        *(2816, 2112, 16, 30),
        groups=8,
        head_dim=256,
        full=FullAttention(512, 2, True),
        window=1024,
        experts=128,
        topk=8,
        expert_ffn=704,
        vocab=262144,
    ),
    "nemotron-h-8b": _nemotron(
        *(4096, 21504, 32, 52),
        groups=8,
        ssm=StateSpace(),
        pattern="M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
    ),
    "nemotron-nano-9b-v2": _nemotron(
        *(4480, 15680, 40, 56),
        groups=8,
        ssm=StateSpace(128, 80),
        pattern="M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-",
    ),
    "nemotron-3-nano-30b-a3b": _nemotron(
        *(2688, 1856, 32, 52),
        groups=2,
        experts=128,
        topk=6,
        shared=2,
        ssm=StateSpace(64),
        pattern="MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    ),
}
