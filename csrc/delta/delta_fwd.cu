// te_gated_delta_fwd: the gated delta rule (https://arxiv.org/abs/2412.06464), a gate for each head or
// channel of keys. One kernel has all chunks of tokens at the same time, and makes what they need that does
// not depend on the state (delta_chunks.cu, channel_chunks.cu). In the other one a CTA walks over the chunks
// of a head with the state of some channels of values in registers.

#include "base/device.h"
#include "base/ops.h"
#include "delta/delta_walk.cuh"
#include "delta/operands.cuh"

namespace te {
namespace delta {
namespace {

template <int kD, int kStages, typename Gate>
Status Run(cudaStream_t stream, const WalkArgs& a, int64_t rows) {
  const auto kernel = te_gated_delta_fwd<kD, kStages, Gate>;
  constexpr size_t kBytes = sizeof(WalkShared<kD, kStages, Gate>);
  TE_TRY(ssm::AllowShared(kernel, kBytes));
  const dim3 grid(a.h, unsigned(CeilDiv(a.e, kSlab)), unsigned(rows));
  kernel<<<grid, kThreads, kBytes, stream>>>(a);
  TE_LAUNCHED();
}

template <int kD, typename Gate>
Status RunWithin(cudaStream_t stream, const WalkArgs& a, int64_t rows) {
  static_assert(sizeof(WalkShared<kD, 1, Gate>) <= 99 * 1024);
  int64_t bytes = 0;
  TE_TRY(ssm::SharedBytes(&bytes));
  const bool two = int64_t(sizeof(WalkShared<kD, 2, Gate>)) <= bytes;
  return (two ? Run<kD, 2, Gate> : Run<kD, 1, Gate>)(stream, a, rows);
}

template <int kD>
Status RunGate(cudaStream_t stream, const WalkArgs& a, int64_t rows) {
  return (a.of_channels ? RunWithin<kD, OfChannel> : RunWithin<kD, OfHead>)(stream, a, rows);
}

}  // namespace
}  // namespace delta

Status LaunchGatedDeltaFwd(cudaStream_t stream, Arg q, Arg k, Arg v, Arg beta, Arg gate, Arg runs,
                           Arg initial, Ret y, Ret last, Ret states, Ret workspace, double scale,
                           bool normalize, int64_t shared) {
  constexpr const char* kOp = "te_gated_delta_fwd";
  delta::DeltaCall call;
  TE_TRY(delta::ExpectDelta({kOp, q, k, v, beta, gate, runs, scale, normalize, shared}, &call));
  const delta::ChunkArgs& of = call.chunks;
  const int64_t chunks = CeilDiv(of.s, delta::kChunk);
  TE_TRY(Expect(kOp, {{"initial", initial, F32, call.state, kOptional},
                      {"y", y, BF16, call.values},
                      {"final", last, F32, call.state, kOptional},
                      {"states", states, F32, call.kept, kOptional},
                      {"workspace", workspace, U8, {call.rows * chunks * of.h * call.chunk_bytes}}}));
  if (call.state.count() == 0) return {};
  using ssm::Bf16;
  TE_TRY(delta::ChooseKernels(kOp, &call));
  const delta::ChunkPart all{0, int(call.rows), 0, int(chunks)};
  TE_TRY(delta::MakeChunks(stream, call, all, workspace.data));
  const delta::WalkArgs walk{of.q,
                             of.k,
                             Data<const Bf16>(v),
                             static_cast<const delta::Chunk*>(workspace.data),
                             Data<const float>(initial),
                             Data<Bf16>(y),
                             Data<float>(last),
                             Data<float>(states),
                             of.s,
                             of.h,
                             of.g,
                             of.d,
                             int(call.e),
                             call.by_channel ? workspace.data : nullptr,
                             all};
#ifdef TE_HAS_90A
  if (call.on_hopper) return delta::RunHopper(stream, walk, call.rows);
#endif
  return (of.d <= 64 ? delta::RunGate<64> : delta::RunGate<128>)(stream, walk, call.rows);
}

}  // namespace te
