// te_ssd_bwd on Hopper, with its tensor maps.
#include "base/check.h"
#include "ssm/maps.h"
#include "ssm/scan_bwd_hopper_chunks.cuh"
#include "ssm/scan_bwd_hopper_states.cuh"

namespace te::ssm {
namespace {

template <int kN, bool kRuns>
Status Run(cudaStream_t stream, const HopperGradArgs& given) {
  const GradArgs& a = given.a;
  const auto states = te_ssd_bwd_states_hopper<kN, kRuns>;
  const auto chunks = te_ssd_bwd_chunks_hopper<kN, kRuns>;
  constexpr size_t kOfStates = sizeof(HopperWalkShared<kN, kRuns>);
  constexpr size_t kOfChunks = sizeof(HopperGradShared<kN, kRuns>);
  static_assert(kOfStates <= 113 * 1024 && kOfChunks <= 227 * 1024);
  TE_TRY(AllowShared(states, kOfStates));
  TE_TRY(AllowShared(chunks, kOfChunks));
  const unsigned walks = a.slab.rows * unsigned(1 + CeilDiv(a.slab.tokens, kKept));
  states<<<dim3(a.steps.h, walks), kWalkThreads, kOfStates, stream>>>(given);
  const dim3 grid(a.g * a.parts, a.slab.tokens / kChunk, a.slab.rows);
  chunks<<<grid, kHopperThreads, kOfChunks, stream>>>(given);
  TE_LAUNCHED();
}

}  // namespace

Status MakeMaps(const ScanCall& call, const GradArgs& a, HopperGradArgs* out) {
  constexpr const char* kOp = "te_ssd_bwd";
  out->a = a;
  TE_TRY(MapOfTokens(kOp, &out->x, a.x, ChannelsOf(call), kChunk));
  TE_TRY(MapOfTokens(kOp, &out->dy, a.dy, ChannelsOf(call), kChunk));
  TE_TRY(MapOfTokens(kOp, &out->dx, a.dx, ChannelsOf(call), kPieceRows));
  TE_TRY(MapOfTokens(kOp, &out->B, a.B, FactorsOf(call), kChunk));
  TE_TRY(MapOfTokens(kOp, &out->C, a.C, FactorsOf(call), kChunk));
  const int64_t chunks = int64_t(a.slab.rows) * (a.slab.tokens / kChunk);
  TE_TRY(MapOfStates(kOp, &out->states, a.states, StatesOf(call, chunks), kHopperChannels));
  TE_TRY(MapOfStates(kOp, &out->gradients, a.gradients, StatesOf(call, chunks), kHopperChannels));
  TE_TRY(MapOfStates(kOp, &out->states_out, a.states, StatesOf(call, chunks), kPieceRows));
  return MapOfStates(kOp, &out->gradients_out, a.gradients, StatesOf(call, chunks), kPieceRows);
}

Status RunOnHopper(cudaStream_t stream, const HopperGradArgs& given) {
  return DispatchStates(given.a.n, given.a.steps.runs,
                        [&]<int kN, bool kRuns>() { return Run<kN, kRuns>(stream, given); });
}

}  // namespace te::ssm
