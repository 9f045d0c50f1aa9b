// The FFI handlers: each te_* target by its launcher.
#include "handler.h"
#include "ops.h"

namespace te {

TE_HANDLER(te_quantize, LaunchQuantize, "split");
TE_HANDLER(te_quantize_block, LaunchQuantizeBlock, "lead", "square", "power_2", "epsilon");
TE_HANDLER(te_activation_fwd, LaunchActivationFwd, "kind", "limit", "alpha", "glu_linear_offset");
TE_HANDLER(te_activation_bwd, LaunchActivationBwd, "kind", "limit", "alpha", "glu_linear_offset");
TE_HANDLER(te_activation_block_fwd, LaunchActivationBlockFwd, "kind", "limit", "alpha", "glu_linear_offset",
           "power_2", "epsilon");
TE_HANDLER(te_activation_block_bwd, LaunchActivationBlockBwd, "kind", "limit", "alpha", "glu_linear_offset",
           "power_2", "epsilon");
TE_HANDLER(te_norm_fwd, LaunchNormFwd, "eps", "rms", "zero_centered");
TE_HANDLER(te_norm_block_fwd, LaunchNormBlockFwd, "eps", "rms", "zero_centered", "power_2", "epsilon");
TE_HANDLER(te_norm_bwd, LaunchNormBwd, "rms", "zero_centered");
TE_HANDLER(te_rope, LaunchRope, "consecutive", "inverse", "turned");
TE_HANDLER(te_scale_update, LaunchScaleUpdate, "fp8_max", "interval", "margin", "newest");
TE_HANDLER_INIT(te_gemm, LaunchGemm, "contract", "fast_accum", "tune");
TE_HANDLER_INIT(te_gemm_block, LaunchGemmBlock, "outer", "tune");

}  // namespace te
