// te_gated_delta_bwd. For each slab of rows and tokens, the last tokens first, three kernels: what chunks
// need that does not depend on the state is made as forward; walks make again the states before chunks, and
// what tokens write, while others walk back with the loss's gradient to the state, which does not depend on
// states; and the third has all that the gradients of a chunk follow from: a CTA has a chunk of the heads
// that share a key, one after the other, and sums over them. Where only dinitial is wanted the walks back do.

#include "base/device.h"
#include "base/ops.h"
#include "delta/delta_bwd.cuh"
#include "delta/operands.cuh"

namespace te {
namespace delta {
namespace {

// Divides the workspace: the chunks of a slab, the gradient to the state between slabs, unless that is a
// result, states and gradients of its chunks, what its tokens write and the gradients to what they would
// write without each other.
Status Divide(const char* op, const Tensor& workspace, const Tensor& dinitial, const DeltaCall& call,
              GradArgs* a, void** chunks) {
  int64_t used = 0;
  const auto take = [&](int64_t bytes) {
    char* part = static_cast<char*>(workspace.data) + used;
    used += CeilDiv(bytes, 256) * 256;
    return part;
  };
  const int64_t of_chunks = int64_t(a->part.rows) * a->part.chunks * call.chunks.h;
  const int64_t states = of_chunks * call.chunks.d * call.e, written = of_chunks * kChunk * call.e;
  *chunks = take(of_chunks * call.chunk_bytes);
  float* carried = reinterpret_cast<float*>(take(Present(dinitial) ? 0 : call.state.count() * 4));
  a->before = Present(dinitial) ? Data<float>(dinitial) : carried;
  a->states = reinterpret_cast<Bf16*>(take(2 * states * 2)), a->gradients = a->states + states;
  a->written = reinterpret_cast<Bf16*>(take(2 * written * 2)), a->gradients_written = a->written + written;
  return Expect(op, {{"workspace", workspace, U8, {used}}});
}

Status ExpectSlab(const char* op, int64_t s, int64_t rows, int64_t tokens) {
  const bool fits = rows >= 1 && rows <= 256 && tokens >= kChunk && tokens <= 65535;
  TE_CHECK(fits && tokens % (tokens >= s ? kChunk : kKept) == 0, "%s: a slab has %ld rows of %ld tokens", op,
           long(rows), long(tokens));
  return {};
}

// What follows from a slab's walks.
Status RunGradients(cudaStream_t stream, const DeltaCall& call, const GradArgs& a) {
  if (call.by_channel) return RunChannelGradients(stream, a, call.on_hopper);
#ifdef TE_HAS_90A
  if (call.on_hopper) return RunGradChunksOnHopper(stream, a, call.rows);
#endif
  return RunGradChunks(stream, a);
}

Status RunSlab(cudaStream_t stream, const DeltaCall& call, const GradArgs& a, void* chunks, bool is_first) {
  TE_TRY(MakeChunks(stream, call, a.part, chunks, call.on_hopper && !is_first));
#ifdef TE_HAS_90A
  if (call.on_hopper) TE_TRY(RunGradWalksOnHopper(stream, a, call.rows));
#endif
  if (!call.on_hopper) TE_TRY(RunGradWalks(stream, a));
  return a.dq ? RunGradients(stream, call, a) : Status{};
}

Status RunSlabs(cudaStream_t stream, const DeltaCall& call, const float* dlast, void* chunks, GradArgs a) {
  const ChunkPart slab = a.part;
  const int64_t slabs = std::max<int64_t>(1, CeilDiv(a.of.s, int64_t(slab.chunks) * kChunk));
  for (int64_t row = 0; row < call.rows; row += slab.rows) {
    a.after = dlast;
    for (int64_t i = slabs; i-- > 0; a.after = a.before) {
      const int64_t there = std::min<int64_t>(slab.rows, call.rows - row);
      a.part = {int(row), int(there), int(i * slab.chunks), slab.chunks};
      a.again.part = a.back.part = a.part;
      const bool is_first = row == 0 && i == slabs - 1;
      TE_TRY(RunSlab(stream, call, a, chunks, is_first));
    }
  }
  return {};
}

}  // namespace
}  // namespace delta

Status LaunchGatedDeltaBwd(cudaStream_t stream, Arg dy, Arg dlast, Arg q, Arg k, Arg v, Arg beta, Arg gate,
                           Arg runs, Arg states, Ret dq, Ret dk, Ret dv, Ret dbeta, Ret dgate, Ret dinitial,
                           Ret workspace, double scale, bool normalize, int64_t shared, int64_t slab_rows,
                           int64_t slab_tokens) {
  constexpr const char* kOp = "te_gated_delta_bwd";
  delta::DeltaCall call;
  TE_TRY(delta::ExpectDelta({kOp, q, k, v, beta, gate, runs, scale, normalize, shared}, &call));
  TE_TRY(Expect(kOp, {{"dy", dy, BF16, call.values},
                      {"dfinal", dlast, F32, call.state, kOptional},
                      {"states", states, F32, call.kept},
                      {"dq", dq, BF16, call.keys, kOptional},
                      {"dk", dk, BF16, call.keys, kOptional},
                      {"dv", dv, BF16, call.values, kOptional},
                      {"dbeta", dbeta, F32, call.heads, kOptional},
                      {"dgate", dgate, F32, call.gates, kOptional},
                      {"dinitial", dinitial, F32, call.state, kOptional}}));
  const int there = Present(dq) + Present(dk) + Present(dv) + Present(dbeta) + Present(dgate);
  TE_CHECK(there == 0 || there == 5, "%s: pass all of dq, dk, dv, dbeta and dgate, or none", kOp);
  using ssm::Bf16;
  delta::GradArgs args{};
  const delta::ChunkArgs& of = args.of = call.chunks;
  TE_TRY(delta::ExpectSlab(kOp, of.s, slab_rows, slab_tokens));
  args.part = {0, int(slab_rows), 0, int(slab_tokens / delta::kChunk)};
  void* chunks = nullptr;
  TE_TRY(delta::Divide(kOp, workspace, dinitial, call, &args, &chunks));
  if (call.state.count() == 0) return {};
  TE_TRY(delta::ChooseKernels(kOp, &call));
  delta::WalkArgs& again = args.again;
  again.q = of.q, again.k = of.k, again.v = Data<const Bf16>(v);
  again.s = of.s, again.h = of.h, again.g = of.g, again.d = of.d, again.e = int(call.e);
  if (call.by_channel)
    again.of_channels = chunks;
  else
    again.chunks = args.chunks = static_cast<delta::Chunk*>(chunks);
  args.back = again, args.back.v = Data<const Bf16>(dy);
  args.kept = Data<const float>(states);
  args.dq = Data<Bf16>(dq), args.dk = Data<Bf16>(dk), args.dv = Data<Bf16>(dv);
  args.dbeta = Data<float>(dbeta), args.dgate = Data<float>(dgate);
  return delta::RunSlabs(stream, call, Data<const float>(dlast), chunks, args);
}

}  // namespace te
