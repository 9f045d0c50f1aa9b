// te_gated_delta_fwd's walk on Hopper.
#include "base/device.h"
#include "base/launch.h"
#include "delta/delta_hopper.cuh"
#include "delta/maps.h"

namespace te::delta {
namespace {

template <int kD, typename Gate, int kGroups>
Status Run(cudaStream_t stream, const HopperWalkArgs& given, const dim3& grid) {
  const auto kernel = te_gated_delta_fwd_hopper<kD, Gate, kGroups>;
  constexpr size_t kBytes = sizeof(HopperShared<kD, Gate, kGroups>);
  static_assert(kBytes <= 227 * 1024);
  TE_TRY(ssm::AllowShared(kernel, kBytes));
  const dim3 groups(grid.x, unsigned(CeilDiv(grid.y, kGroups)), grid.z);
  return LaunchBehind(stream, true, kernel, groups, kWalkThreads<kGroups>, kBytes, given);
}

template <typename Gate>
Status RunGate(cudaStream_t stream, const HopperWalkArgs& given, int64_t rows) {
  const WalkArgs& a = given.a;
  const dim3 grid(a.h, unsigned(CeilDiv(a.e, kSlab)), unsigned(rows));
  if (a.d <= 64) return Run<64, Gate, 1>(stream, given, grid);
  if constexpr (!Gate::kByChannel)
    if (a.d > kMostKeys) return RunHalves(stream, given, rows);
  bool wide = false;
  TE_TRY(IsWide(a, rows, 1, &wide));
  return (wide ? Run<128, Gate, 2> : Run<128, Gate, 1>)(stream, given, grid);
}

Status MakeMaps(const WalkArgs& a, int64_t rows, HopperWalkArgs* out) {
  constexpr const char* kOp = "te_gated_delta_fwd";
  out->a = a;
  TE_TRY(MapOfTokens(kOp, &out->q, a.q, KeysOf(a, rows), kChunk));
  TE_TRY(MapOfTokens(kOp, &out->k, a.k, KeysOf(a, rows), kChunk));
  TE_TRY(MapOfTokens(kOp, &out->v, a.v, ValuesOf(a, rows), kChunk));
  return MapOfTokens(kOp, &out->y, a.y, ValuesOf(a, rows), kChunk);
}

}  // namespace

Status IsWide(const WalkArgs& a, int64_t rows, int walks, bool* wide) {
  int multiprocessors = 0;
  TE_TRY(Multiprocessors(&multiprocessors));
  *wide = a.e > kSlab && walks * rows * a.h * CeilDiv(a.e, kSlab) > multiprocessors;
  return {};
}

Status RunHopper(cudaStream_t stream, const WalkArgs& a, int64_t rows) {
  HopperWalkArgs given{};
  TE_TRY(MakeMaps(a, rows, &given));
  return a.of_channels ? RunGate<OfChannel>(stream, given, rows) : RunGate<OfHead>(stream, given, rows);
}

}  // namespace te::delta
