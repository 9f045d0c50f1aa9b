// te_gated_delta_fwd's walk on Hopper.
#include "base/device.h"
#include "base/launch.h"
#include "delta/delta_hopper.cuh"

namespace te::delta {
namespace {

template <int kD, typename Gate, int kGroups>
Status Run(cudaStream_t stream, const WalkArgs& a, const dim3& grid) {
  const auto kernel = te_gated_delta_fwd_hopper<kD, Gate, kGroups>;
  constexpr size_t kBytes = sizeof(HopperShared<kD, Gate, kGroups>);
  static_assert(kBytes <= 227 * 1024);
  TE_TRY(ssm::AllowShared(kernel, kBytes));
  const dim3 groups(grid.x, unsigned(CeilDiv(grid.y, kGroups)), grid.z);
  return LaunchBehind(stream, true, kernel, groups, kWalkThreads<kGroups>, kBytes, a);
}

template <typename Gate>
Status RunGate(cudaStream_t stream, const WalkArgs& a, int64_t rows) {
  const dim3 grid(a.h, unsigned(CeilDiv(a.e, kSlab)), unsigned(rows));
  if (a.d <= 64) return Run<64, Gate, 1>(stream, a, grid);
  bool wide = false;
  TE_TRY(IsWide(a, rows, 1, &wide));
  return (wide ? Run<128, Gate, 2> : Run<128, Gate, 1>)(stream, a, grid);
}

}  // namespace

Status IsWide(const WalkArgs& a, int64_t rows, int walks, bool* wide) {
  int multiprocessors = 0;
  TE_TRY(Multiprocessors(&multiprocessors));
  *wide = a.e > kSlab && walks * rows * a.h * CeilDiv(a.e, kSlab) > multiprocessors;
  return {};
}

Status RunHopper(cudaStream_t stream, const WalkArgs& a, int64_t rows) {
  return a.of_channels ? RunGate<OfChannel>(stream, a, rows) : RunGate<OfHead>(stream, a, rows);
}

}  // namespace te::delta
