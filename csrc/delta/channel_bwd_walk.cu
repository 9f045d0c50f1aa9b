// te_gated_delta_bwd's walks by mma.sync, where channels have gates.
#include "delta/channel_bwd_walk.cuh"

namespace te::delta {
namespace {

template <int kD, int kStages>
__global__ void __launch_bounds__(kThreads, kStages > 1 ? 1 : 2)
    te_gated_delta_channel_bwd_walk(const ChannelGradArgs a) {
  extern __shared__ uint4 memory[];
  auto& shared = *reinterpret_cast<WalkShared<kD, kStages, OfChannel>*>(memory);
  RunChannelWalk<kD, kStages, WarpProducts, 1>(a, shared, 0, [](auto&& walk) { WalkAlong(walk); });
}

template <int kD, int kStages>
Status Run(cudaStream_t stream, const ChannelGradArgs& a) {
  const auto kernel = te_gated_delta_channel_bwd_walk<kD, kStages>;
  constexpr size_t kBytes = sizeof(WalkShared<kD, kStages, OfChannel>);
  TE_TRY(ssm::AllowShared(kernel, kBytes));
  kernel<<<ChannelWalkGrid(a, 1), kThreads, kBytes, stream>>>(a);
  TE_LAUNCHED();
}

template <int kD>
Status RunWithin(cudaStream_t stream, const ChannelGradArgs& a) {
  int64_t bytes = 0;
  TE_TRY(ssm::SharedBytes(&bytes));
  const bool two = int64_t(sizeof(WalkShared<kD, 2, OfChannel>)) <= bytes;
  return (two ? Run<kD, 2> : Run<kD, 1>)(stream, a);
}

}  // namespace

Status RunChannelWalks(cudaStream_t stream, const ChannelGradArgs& a) {
  return (a.of.d <= 64 ? RunWithin<64> : RunWithin<128>)(stream, a);
}

}  // namespace te::delta
