// The FFI handlers: each te_* target by its launcher.
#include "base/ops.h"
#include "interface/handler.h"

namespace te {

TE_HANDLER(te_quantize, LaunchQuantize, "split");
TE_HANDLER(te_quantize_stacked, LaunchQuantizeStacked, "stack", "slots", "split");
TE_HANDLER(te_quantize_block, LaunchQuantizeBlock, "lead", "square", "power_2", "epsilon");
TE_HANDLER(te_quantize_stacked_block, LaunchQuantizeStackedBlock, "stack", "slots", "lead", "power_2",
           "epsilon");
TE_HANDLER(te_activation_fwd, LaunchActivationFwd, "kind", "limit", "alpha", "glu_linear_offset");
TE_HANDLER(te_activation_bwd, LaunchActivationBwd, "kind", "limit", "alpha", "glu_linear_offset");
TE_HANDLER(te_activation_block_fwd, LaunchActivationBlockFwd, "kind", "limit", "alpha", "glu_linear_offset",
           "power_2", "epsilon");
TE_HANDLER(te_activation_block_bwd, LaunchActivationBlockBwd, "kind", "limit", "alpha", "glu_linear_offset",
           "power_2", "epsilon");
TE_HANDLER(te_activation_grouped_fwd, LaunchActivationGroupedFwd, "kind", "limit", "alpha",
           "glu_linear_offset");
TE_HANDLER(te_activation_grouped_bwd, LaunchActivationGroupedBwd, "kind", "limit", "alpha",
           "glu_linear_offset");
TE_HANDLER(te_activation_grouped_block_fwd, LaunchActivationGroupedBlockFwd, "kind", "limit", "alpha",
           "glu_linear_offset", "power_2", "epsilon");
TE_HANDLER(te_activation_grouped_block_bwd, LaunchActivationGroupedBlockBwd, "kind", "limit", "alpha",
           "glu_linear_offset", "power_2", "epsilon");
TE_HANDLER(te_activation_grouped_paired_bwd, LaunchActivationGroupedPairedBwd, "kind", "limit", "alpha",
           "glu_linear_offset", "e5m2");
TE_HANDLER(te_norm_fwd, LaunchNormFwd, "eps", "rms", "zero_centered");
TE_HANDLER(te_norm_block_fwd, LaunchNormBlockFwd, "eps", "rms", "zero_centered", "power_2", "epsilon");
TE_HANDLER(te_norm_bwd, LaunchNormBwd, "rms", "zero_centered");
TE_HANDLER(te_gated_norm_fwd, LaunchGatedNormFwd, "eps", "norm_before_gate");
TE_HANDLER(te_gated_norm_block_fwd, LaunchGatedNormBlockFwd, "eps", "norm_before_gate", "power_2", "epsilon");
TE_HANDLER(te_gated_norm_bwd, LaunchGatedNormBwd, "norm_before_gate");
TE_HANDLER(te_rope, LaunchRope, "consecutive", "inverse", "turned");
TE_HANDLER(te_causal_conv1d_fwd, LaunchConvFwd, "silu", "width");
TE_HANDLER(te_causal_conv1d_bwd, LaunchConvBwd, "silu", "width");
TE_HANDLER(te_ssd_fwd, LaunchSsdFwd, "softplus", "least", "most", "shared");
TE_HANDLER(te_ssd_bwd, LaunchSsdBwd, "softplus", "least", "most", "shared", "slab_rows", "slab_tokens",
           "slab_heads");
TE_HANDLER(te_gated_delta_fwd, LaunchGatedDeltaFwd, "scale", "normalize", "shared");
TE_HANDLER(te_gated_delta_bwd, LaunchGatedDeltaBwd, "scale", "normalize", "shared", "slab_rows",
           "slab_tokens");
TE_HANDLER(te_router_fwd, LaunchRouterFwd, "topk", "sigmoid", "scores_first", "normalizes", "scaling_factor",
           "num_groups", "group_topk");
TE_HANDLER(te_router_bwd, LaunchRouterBwd, "topk", "sigmoid", "scores_first", "normalizes", "scaling_factor",
           "num_groups", "group_topk");
TE_HANDLER(te_group, LaunchGroup, "num_experts", "buffer");
TE_HANDLER(te_permute, LaunchPermute, "topk");
TE_HANDLER(te_permute_block, LaunchPermuteBlock, "topk", "power_2", "epsilon");
TE_HANDLER(te_permute_fp8, LaunchPermuteFp8, "topk");
TE_HANDLER(te_permute_fp8_block, LaunchPermuteFp8Block, "topk", "power_2", "epsilon");
TE_HANDLER(te_combine, LaunchCombine);
TE_HANDLER(te_combine_bwd, LaunchCombineBwd);
TE_HANDLER(te_address, LaunchAddress);
TE_HANDLER(te_keep, LaunchKeep);
TE_HANDLER(te_gemm_grouped, LaunchGemmGrouped, "outer", "fast_accum");
TE_HANDLER(te_gemm_grouped_wgrad, LaunchGemmGroupedWgrad, "fast_accum", "slots", "slot");
TE_HANDLER(te_gemm_grouped_paired, LaunchGemmGroupedPaired, "e5m2", "fast_accum", "slot");
TE_HANDLER(te_gemm_grouped_paired_wgrad, LaunchGemmGroupedPairedWgrad, "e5m2", "fast_accum", "slot");
TE_HANDLER(te_gemm_grouped_wide, LaunchGemmGroupedWide);
TE_HANDLER(te_gemm_grouped_wide_wgrad, LaunchGemmGroupedWideWgrad);
TE_HANDLER(te_scale_update, LaunchScaleUpdate, "interval", "margin", "newest");
TE_HANDLER_INIT(te_gemm, LaunchGemm, "contract", "fast_accum", "tune", "entry");
TE_HANDLER_INIT(te_gemm_block, LaunchGemmBlock, "outer", "tune");
TE_HANDLER_INIT(te_attention_fwd, LaunchAttentionFwd, "left", "right", "bottom_right", "seq_major",
                "interleaved", "scale", "dropout_rate");
TE_HANDLER_INIT(te_attention_bwd, LaunchAttentionBwd, "left", "right", "bottom_right", "seq_major",
                "interleaved", "scale", "dropout_rate", "deterministic");
TE_HANDLER_INIT(te_attention_fp8_fwd, LaunchAttentionFp8Fwd, "causal", "scale");
TE_HANDLER_INIT(te_attention_fp8_bwd, LaunchAttentionFp8Bwd, "causal", "scale");

}  // namespace te
