// te_gated_delta_fwd's walk on Hopper.
#include "base/launch.h"
#include "delta/delta_hopper.cuh"

namespace te::delta {
namespace {

template <int kD>
Status Run(cudaStream_t stream, const WalkArgs& a, int64_t rows) {
  const auto kernel = te_gated_delta_fwd_hopper<kD>;
  constexpr size_t kBytes = sizeof(HopperShared<kD>);
  static_assert(kBytes <= 227 * 1024);
  TE_TRY(ssm::AllowShared(kernel, kBytes));
  const dim3 grid(a.h, unsigned(CeilDiv(a.e, kSlab)), unsigned(rows));
  return LaunchBehind(stream, true, kernel, grid, kThreads, kBytes, a);
}

}  // namespace

Status RunHopper(cudaStream_t stream, const WalkArgs& a, int64_t rows) {
  return (a.d <= 64 ? Run<64> : Run<128>)(stream, a, rows);
}

}  // namespace te::delta
