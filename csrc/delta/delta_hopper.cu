// te_gated_delta_fwd's walk on Hopper.
#include "base/launch.h"
#include "delta/delta_hopper.cuh"

namespace te::delta {
namespace {

template <int kD, typename Gate>
Status Run(cudaStream_t stream, const WalkArgs& a, int64_t rows) {
  const auto kernel = te_gated_delta_fwd_hopper<kD, Gate>;
  constexpr size_t kBytes = sizeof(HopperShared<kD, Gate>);
  static_assert(kBytes <= 227 * 1024);
  TE_TRY(ssm::AllowShared(kernel, kBytes));
  const dim3 grid(a.h, unsigned(CeilDiv(a.e, kSlab)), unsigned(rows));
  return LaunchBehind(stream, true, kernel, grid, kThreads, kBytes, a);
}

}  // namespace

Status RunHopper(cudaStream_t stream, const WalkArgs& a, int64_t rows) {
  if (a.of_channels) return (a.d <= 64 ? Run<64, OfChannel> : Run<128, OfChannel>)(stream, a, rows);
  return (a.d <= 64 ? Run<64, OfHead> : Run<128, OfHead>)(stream, a, rows);
}

}  // namespace te::delta
