// te_gated_delta_bwd's walks on Hopper.
#include "base/device.h"
#include "base/launch.h"
#include "delta/delta_bwd_hopper.cuh"

namespace te::delta {
namespace {

template <int kD, int kGroups>
Status Run(cudaStream_t stream, const GradArgs& a) {
  const auto kernel = te_gated_delta_bwd_walk_hopper<kD, kGroups>;
  constexpr size_t kBytes = sizeof(HopperShared<kD, OfHead, kGroups>);
  static_assert(kBytes <= 227 * 1024);
  TE_TRY(ssm::AllowShared(kernel, kBytes));
  return LaunchBehind(stream, true, kernel, GradWalkGrid(a, kGroups), kWalkThreads<kGroups>, kBytes, a);
}

// How many groups of a CTA walk. The walks forward are shorter, together as long as the one back.
Status GroupsOf(const GradArgs& a, int* groups) {
  bool wide = false;
  if (a.again.d > 64) TE_TRY(IsWide(a.again, a.slab.rows, 2, &wide));
  *groups = wide ? 2 : 1;
  return {};
}

}  // namespace

Status GradWalksLeaveRoom(const GradArgs& a, bool* room) {
  int groups = 0, multiprocessors = 0;
  TE_TRY(GroupsOf(a, &groups));
  TE_TRY(Multiprocessors(&multiprocessors));
  const dim3 grid = GradWalkGrid(a, groups);
  *room = int64_t(grid.x) * grid.y * grid.z <= multiprocessors - multiprocessors / 8;
  return {};
}

Status RunGradWalksOnHopper(cudaStream_t stream, const GradArgs& a) {
  if (a.again.d <= 64) return Run<64, 1>(stream, a);
  int groups = 0;
  TE_TRY(GroupsOf(a, &groups));
  return (groups > 1 ? Run<128, 2> : Run<128, 1>)(stream, a);
}

}  // namespace te::delta
