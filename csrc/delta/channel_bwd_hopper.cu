// te_gated_delta_bwd's walks on Hopper, where channels have gates.
#include "base/launch.h"
#include "delta/channel_bwd_hopper.cuh"

namespace te::delta {
namespace {

template <int kD, int kGroups>
Status Run(cudaStream_t stream, const ChannelGradArgs& a) {
  const auto kernel = te_gated_delta_channel_bwd_walk_hopper<kD, kGroups>;
  constexpr size_t kBytes = sizeof(HopperShared<kD, OfChannel, kGroups>);
  static_assert(kBytes <= 227 * 1024);
  TE_TRY(ssm::AllowShared(kernel, kBytes));
  return LaunchBehind(stream, true, kernel, ChannelWalkGrid(a, kGroups), kWalkThreads<kGroups>, kBytes, a);
}

}  // namespace

Status RunChannelWalksOnHopper(cudaStream_t stream, const ChannelGradArgs& a) {
  if (a.of.d <= 64) return Run<64, 1>(stream, a);
  bool wide = false;
  TE_TRY(IsWide(a.again, a.part.rows, 2, &wide));  // as walks without gates of channels
  return (wide ? Run<128, 2> : Run<128, 1>)(stream, a);
}

}  // namespace te::delta
