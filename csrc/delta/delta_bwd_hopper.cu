// te_gated_delta_bwd's walks on Hopper.
#include "base/launch.h"
#include "delta/delta_bwd_hopper.cuh"

namespace te::delta {
namespace {

template <int kD>
Status Run(cudaStream_t stream, const GradArgs& a) {
  const auto kernel = te_gated_delta_bwd_walk_hopper<kD>;
  constexpr size_t kBytes = sizeof(HopperShared<kD>);
  static_assert(kBytes <= 227 * 1024);
  TE_TRY(ssm::AllowShared(kernel, kBytes));
  return LaunchBehind(stream, true, kernel, GradWalkGrid(a), kThreads, kBytes, a);
}

}  // namespace

Status RunGradWalksOnHopper(cudaStream_t stream, const GradArgs& a) {
  return (a.again.d <= 64 ? Run<64> : Run<128>)(stream, a);
}

}  // namespace te::delta
