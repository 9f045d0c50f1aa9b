// te_gated_delta_bwd's walks by mma.sync.
#include "delta/delta_bwd_walk.cuh"

namespace te::delta {
namespace {

template <int kD, int kStages, typename Gate>
__global__ void __launch_bounds__(kThreads, kStages > 1 ? 1 : 2) te_gated_delta_bwd_walk(const GradArgs a) {
  extern __shared__ uint4 memory[];
  auto& shared = *reinterpret_cast<WalkShared<kD, kStages, Gate>*>(memory);
  RunGradWalk<GradSteps<kD, kStages, WarpProducts, true, Gate, 1>,
              GradSteps<kD, kStages, WarpProducts, false, Gate, 1>>(a, shared, 0, int(blockIdx.y) * kSlab,
                                                                    [](auto&& walk) { WalkAlong(walk); });
}

template <int kD, int kStages, typename Gate>
Status Run(cudaStream_t stream, const GradArgs& a) {
  const auto kernel = te_gated_delta_bwd_walk<kD, kStages, Gate>;
  constexpr size_t kBytes = sizeof(WalkShared<kD, kStages, Gate>);
  TE_TRY(ssm::AllowShared(kernel, kBytes));
  kernel<<<GradWalkGrid(a, 1), kThreads, kBytes, stream>>>(a);
  TE_LAUNCHED();
}

template <int kD, typename Gate>
Status RunWithin(cudaStream_t stream, const GradArgs& a) {
  int64_t bytes = 0;
  TE_TRY(ssm::SharedBytes(&bytes));
  const bool two = int64_t(sizeof(WalkShared<kD, 2, Gate>)) <= bytes;
  return (two ? Run<kD, 2, Gate> : Run<kD, 1, Gate>)(stream, a);
}

template <typename Gate>
Status RunGate(cudaStream_t stream, const GradArgs& a) {
  return (a.of.d <= 64 ? RunWithin<64, Gate> : RunWithin<128, Gate>)(stream, a);
}

}  // namespace

Status RunGradWalks(cudaStream_t stream, const GradArgs& a) {
  return a.again.of_channels ? RunGate<OfChannel>(stream, a) : RunGate<OfHead>(stream, a);
}

}  // namespace te::delta
