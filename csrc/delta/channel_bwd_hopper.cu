// te_gated_delta_bwd's walks on Hopper, where channels have gates.
#include "base/launch.h"
#include "delta/channel_bwd_hopper.cuh"

namespace te::delta {
namespace {

template <int kD>
Status Run(cudaStream_t stream, const ChannelGradArgs& a) {
  const auto kernel = te_gated_delta_channel_bwd_walk_hopper<kD>;
  constexpr size_t kBytes = sizeof(HopperShared<kD, OfChannel>);
  static_assert(kBytes <= 227 * 1024);
  TE_TRY(ssm::AllowShared(kernel, kBytes));
  return LaunchBehind(stream, true, kernel, ChannelWalkGrid(a), kThreads, kBytes, a);
}

}  // namespace

Status RunChannelWalksOnHopper(cudaStream_t stream, const ChannelGradArgs& a) {
  return (a.of.d <= 64 ? Run<64> : Run<128>)(stream, a);
}

}  // namespace te::delta
