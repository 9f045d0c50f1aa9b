"""gpt-oss: every other layer sees a window, softmax with a learned offset, experts with biases and clamped SwiGLU."""

from dataclasses import replace

from te_jax.core.check import BOOL, number
from te_jax.hf import rules
from te_jax.hf.decoders import OF_MIXTRAL_EXPERTS, WITH_EXPERTS, attention_of_llama, of_llama
from te_jax.hf.family import GROUPS, LAYER, at_most, head_dim
from te_jax.hf.layered import WINDOW_OF_SOME, by_window, layer_types, layers_are_known
from te_jax.hf.rotary import rotary
from te_jax.hf.rules import Recast, TensorRule
from te_jax.hf.words import SIZE, Word
from te_jax.models import ModelConfig, families

_OFFSET = f"{LAYER}/attention/DotProductAttention_0/_FusedDotProductAttention_0/softmax_offset"
_OF_HEADS = Recast(lambda a: (a[None, :, None, None],), lambda a: (a[0, :, 0, 0],))  # [h] as [1, h, 1, 1]


def _gpt_oss_rules(c: ModelConfig) -> list[TensorRule]:
    layer, ours, stack = "model.layers.{i}", f"{LAYER}/moe", "layers"
    paths = lambda names: tuple(f"{ours}/{name}" for name in names)
    of = lambda names, name, form: TensorRule(paths(names), (f"{layer}.{name}",), form, stack)
    return [
        *attention_of_llama(c, out_bias=None),
        TensorRule((_OFFSET,), (f"{layer}.self_attn.sinks",), _OF_HEADS, stack),
        *rules.norm_rules(ours, f"{layer}.post_attention_layernorm", False, stack),
        of(("gate_kernel",), "mlp.router.weight", rules.TURNED),
        of(("gate_bias",), "mlp.router.bias", rules.SAME),
        of(("wi_0", "wi_1"), "mlp.experts.gate_up_proj", rules.INTERLEAVED),
        of(("wi_0_bias", "wi_1_bias"), "mlp.experts.gate_up_proj_bias", rules.INTERLEAVED),
        of(("wo",), "mlp.experts.down_proj", rules.SAME),
        of(("wo_bias",), "mlp.experts.down_proj_bias", rules.SAME),
    ]


# Where config.json has no RoPE.
_STRETCHED = dict(
    rope_type="yarn", factor=32.0, beta_fast=32.0, beta_slow=1.0, truncate=False, original_max_position_embeddings=4096
)
GPT_OSS = of_llama(
    "gpt_oss",
    "GptOssForCausalLM",
    families.gpt_oss(replace(WITH_EXPERTS, head_dim=2)),
    *(head_dim(may_be=SIZE), replace(GROUPS, kind=SIZE), *OF_MIXTRAL_EXPERTS, WINDOW_OF_SOME),
    Word("attention_bias", BOOL, True, to=("layer/use_bias",)),
    Word("swiglu_alpha", number(above=0), 1.702, to=("layer/mlp_activation_params/alpha",)),
    Word("swiglu_limit", number(above=0), 7.0, to=("layer/mlp_activation_params/limit",)),
    replace(rotary("attn_logit_scale", types=("default", "linear", "yarn")), absent=_STRETCHED),
    layer_types(2, by_window),
    checks=(layers_are_known, at_most("num_experts_per_tok", "num_local_experts")),
    tensors=_gpt_oss_rules,
    vocab_size=201088,
    hidden_size=2880,
    intermediate_size=2880,
    num_hidden_layers=36,
    num_attention_heads=64,
    num_key_value_heads=8,
    head_dim=64,
    max_position_embeddings=131072,
    rms_norm_eps=1e-5,
    rope_parameters=150_000.0,
    num_local_experts=128,
    num_experts_per_tok=4,
    sliding_window=128,
)
