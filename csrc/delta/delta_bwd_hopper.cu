// te_gated_delta_bwd's walks on Hopper.
#include "base/launch.h"
#include "delta/delta_bwd_hopper.cuh"

namespace te::delta {
namespace {

template <int kD, typename Gate, int kGroups>
Status Run(cudaStream_t stream, const GradArgs& a) {
  const auto kernel = te_gated_delta_bwd_walk_hopper<kD, Gate, kGroups>;
  constexpr size_t kBytes = sizeof(HopperShared<kD, Gate, kGroups>);
  static_assert(kBytes <= 227 * 1024);
  TE_TRY(ssm::AllowShared(kernel, kBytes));
  return LaunchBehind(stream, true, kernel, GradWalkGrid(a, kGroups), kWalkThreads<kGroups>, kBytes, a);
}

template <typename Gate>
Status RunGate(cudaStream_t stream, const GradArgs& a) {
  if (a.of.d <= 64) return Run<64, Gate, 1>(stream, a);
  bool wide = false;
  // The walks forward are shorter, together as long as the one back.
  TE_TRY(IsWide(a.again, a.part.rows, 2, &wide));
  return (wide ? Run<128, Gate, 2> : Run<128, Gate, 1>)(stream, a);
}

}  // namespace

Status RunGradWalksOnHopper(cudaStream_t stream, const GradArgs& a) {
  return a.again.of_channels ? RunGate<OfChannel>(stream, a) : RunGate<OfHead>(stream, a);
}

}  // namespace te::delta
