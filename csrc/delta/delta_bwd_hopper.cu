// te_gated_delta_bwd's walks on Hopper.
#include "base/launch.h"
#include "delta/delta_bwd_hopper.cuh"
#include "delta/maps.h"

namespace te::delta {
namespace {

template <int kD, typename Gate, int kGroups>
Status Run(cudaStream_t stream, const HopperGradWalkArgs& given) {
  const auto kernel = te_gated_delta_bwd_walk_hopper<kD, Gate, kGroups>;
  constexpr size_t kBytes = sizeof(HopperShared<kD, Gate, kGroups, true>);
  static_assert(kBytes <= 227 * 1024);
  TE_TRY(ssm::AllowShared(kernel, kBytes));
  return LaunchBehind(stream, true, kernel, GradWalkGrid(given.a, kGroups), kWalkThreads<kGroups>, kBytes,
                      given);
}

template <typename Gate>
Status RunGate(cudaStream_t stream, const HopperGradWalkArgs& given) {
  const GradArgs& a = given.a;
  if (a.of.d <= 64) return Run<64, Gate, 1>(stream, given);
  if constexpr (!Gate::kByChannel)
    if (a.of.d > kMostKeys) return RunGradHalves(stream, given);
  bool wide = false;
  // The walks forward are shorter, together as long as the one back.
  TE_TRY(IsWide(a.again, a.part.rows, 2, &wide));
  return (wide ? Run<128, Gate, 2> : Run<128, Gate, 1>)(stream, given);
}

Status MakeMaps(const GradArgs& a, int64_t rows, HopperGradWalkArgs* out) {
  constexpr const char* kOp = "te_gated_delta_bwd";
  const WalkArgs& of = a.again;
  const TokenSizes values = ValuesOf(of, rows), of_slab = ValuesOfSlab(a);
  out->a = a;
  TE_TRY(MapOfTokens(kOp, &out->q, of.q, KeysOf(of, rows), kChunk));
  TE_TRY(MapOfTokens(kOp, &out->k, of.k, KeysOf(of, rows), kChunk));
  TE_TRY(MapOfTokens(kOp, &out->v, of.v, values, kChunk));
  TE_TRY(MapOfTokens(kOp, &out->dy, a.back.v, values, kChunk));
  TE_TRY(MapOfTokens(kOp, &out->written, a.written, of_slab, kChunk));
  TE_TRY(MapOfTokens(kOp, &out->gradients_written, a.gradients_written, of_slab, kChunk));
  TE_TRY(MapOfStates(kOp, &out->states, a.states, StatesOf(a), kSlab));
  return MapOfStates(kOp, &out->gradients, a.gradients, StatesOf(a), kSlab);
}

}  // namespace

Status RunGradWalksOnHopper(cudaStream_t stream, const GradArgs& a, int64_t rows) {
  HopperGradWalkArgs given{};
  TE_TRY(MakeMaps(a, rows, &given));
  return a.again.of_channels ? RunGate<OfChannel>(stream, given) : RunGate<OfHead>(stream, given);
}

}  // namespace te::delta
