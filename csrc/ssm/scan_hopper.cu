// te_ssd_fwd on Hopper, with its tensor maps.
#include "base/launch.h"
#include "ssm/maps.h"
#include "ssm/scan_hopper.cuh"

namespace te::ssm {
namespace {

template <int kN, bool kRuns>
Status Run(cudaStream_t stream, const HopperArgs& a, int64_t rows) {
  const auto kernel = te_ssd_fwd_hopper<kN, kRuns>;
  constexpr size_t kBytes = sizeof(HopperShared<kN, kRuns>);
  static_assert(kBytes <= 227 * 1024);
  TE_TRY(AllowShared(kernel, kBytes));
  const dim3 grid(a.steps.h, unsigned(CeilDiv(a.p, kHopperChannels)), unsigned(rows));
  return LaunchBehind(stream, true, kernel, grid, kHopperThreads, kBytes, a);
}

}  // namespace

Status RunHopper(cudaStream_t stream, const ScanCall& call, const ScanArrays& of, const Steps* steps) {
  constexpr const char* kOp = "te_ssd_fwd";
  HopperArgs a{};
  TE_TRY(MapOfTokens(kOp, &a.x, of.x, ChannelsOf(call), kChunk));
  TE_TRY(MapOfTokens(kOp, &a.y, of.y, ChannelsOf(call), kPieceRows));
  TE_TRY(MapOfTokens(kOp, &a.B, of.B, FactorsOf(call), kChunk));
  TE_TRY(MapOfTokens(kOp, &a.C, of.C, FactorsOf(call), kChunk));
  a.steps = call.steps, a.of_chunks = steps;
  a.D = of.D, a.initial = of.initial, a.last = of.last, a.states = of.states;
  a.g = int(call.g), a.p = int(call.p), a.n = int(call.n), a.channels = of.channels;
  return DispatchStates(call.n, call.steps.runs,
                        [&]<int kN, bool kRuns>() { return Run<kN, kRuns>(stream, a, call.rows); });
}

}  // namespace te::ssm
