// The walks of delta_halves.cuh.
#include "base/check.h"
#include "base/launch.h"
#include "delta/delta_halves.cuh"

namespace te::delta {
namespace {

template <typename Args>
Status Run(cudaStream_t stream, void (*kernel)(Args), const dim3& grid, const Args& given) {
  TE_TRY(ssm::AllowShared(kernel, sizeof(HalvesShared)));
  return LaunchBehind(stream, true, kernel, grid, kHalvesThreads, sizeof(HalvesShared), given);
}

}  // namespace

Status RunHalves(cudaStream_t stream, const HopperWalkArgs& given, int64_t rows) {
  const dim3 grid(given.a.h, unsigned(CeilDiv(given.a.e, kSlab)), unsigned(rows));
  return Run(stream, te_gated_delta_fwd_halves, grid, given);
}

Status RunGradHalves(cudaStream_t stream, const HopperGradWalkArgs& given) {
  return Run(stream, te_gated_delta_bwd_walk_halves, GradWalkGrid(given.a, 1), given);
}

}  // namespace te::delta
