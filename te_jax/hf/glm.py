"""GLM-4.5: experts as DeepSeek-V3's behind attention as Llama's, in which half of a head's channels turn."""

from dataclasses import replace

from te_jax.core.check import BOOL
from te_jax.hf.decoders import ONE, attention_of_llama, of_llama
from te_jax.hf.deepseek import DENSE_FIRST, NONE_BEHIND, dense_or_sparse_rules, layers_behind
from te_jax.hf.experts import GROUPS_FIT
from te_jax.hf.family import ALL_SEE_ALL, GROUPS, NO_WINDOW
from te_jax.hf.rotary import pairs_turn, rotary
from te_jax.hf.words import SIZE, Said, Word
from te_jax.models import families

_GLM_LAYERS = 46


def _qk_norms(said: Said) -> tuple[str, bool, float] | tuple[None, None, None]:
    return ("rmsnorm", True, said["rms_norm_eps"]) if said["use_qk_norm"] else (None, None, None)


GLM4_MOE = of_llama(
    "glm4_moe",
    "Glm4MoeForCausalLM",
    families.glm4_moe(replace(ONE, head_dim=2, experts=1, topk=1)),
    *(*DENSE_FIRST, NO_WINDOW, replace(GROUPS, kind=SIZE), rotary("rotary_pos_emb_dim", part=0.5)),
    Word("attention_bias", BOOL, False, to=("layer/use_bias",)),
    Word(
        "use_qk_norm",
        BOOL,
        False,
        to=tuple(f"layer/{name}" for name in ("qk_norm_type", "qk_norm_before_rope", "qk_norm_eps")),
        ours=_qk_norms,
        theirs=lambda c: c.layer.get("qk_norm_type") is not None,
    ),
    checks=(ALL_SEE_ALL, pairs_turn, *GROUPS_FIT),
    tensors=lambda c: attention_of_llama(c) + dense_or_sparse_rules(c),
    vocab_size=151552,
    intermediate_size=10944,
    num_hidden_layers=_GLM_LAYERS,
    num_attention_heads=96,
    num_key_value_heads=8,
    max_position_embeddings=131072,
    rms_norm_eps=1e-5,
    moe_intermediate_size=1408,
    n_routed_experts=128,
    routed_scaling_factor=1.0,
    n_group=1,
    topk_group=1,
    first_k_dense_replace=1,
)._replace(spare=layers_behind(_GLM_LAYERS), without_spare=NONE_BEHIND)
