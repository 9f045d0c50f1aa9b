// te_gated_delta_bwd where channels have gates. For each slab of rows and tokens, the last tokens first,
// three kernels: what chunks need that does not depend on the state is made as forward; walks make again the
// states before chunks, and what tokens write, while others walk back with the loss's gradient to the state,
// which does not depend on states; and the third has all that the gradients of a chunk follow from.

#include "base/device.h"
#include "delta/channel_bwd.cuh"

namespace te::delta {
namespace {

// Divides the workspace: the chunks of a slab, the gradient to the state between slabs, unless that is a
// result, states and gradients of its chunks, what its tokens write and the gradients to what they would
// write without each other.
Status Divide(const char* op, const ChannelResults& out, const DeltaCall& call, ChannelGradArgs* a,
              void** chunks) {
  int64_t used = 0;
  const auto take = [&](int64_t bytes) {
    char* part = static_cast<char*>(out.workspace.data) + used;
    used += CeilDiv(bytes, 256) * 256;
    return part;
  };
  const int64_t of_chunks = int64_t(a->part.rows) * a->part.chunks * call.chunks.h;
  const int64_t states = of_chunks * call.chunks.d * call.e, written = of_chunks * kChunk * call.e;
  *chunks = take(of_chunks * ChannelBytes(call.chunks.d));
  float* carried = reinterpret_cast<float*>(take(Present(out.dinitial) ? 0 : call.state.count() * 4));
  a->before = Present(out.dinitial) ? Data<float>(out.dinitial) : carried;
  a->states = reinterpret_cast<Bf16*>(take(2 * states * 2)), a->gradients = a->states + states;
  a->written = reinterpret_cast<Bf16*>(take(2 * written * 2)), a->gradients_written = a->written + written;
  return Expect(op, {{"workspace", out.workspace, U8, {used}}});
}

Status RunSlab(cudaStream_t stream, const ChannelGradArgs& a, void* chunks) {
  TE_TRY(LaunchChannelChunks(stream, a.of, a.part, chunks));
#ifdef TE_HAS_90A
  bool is_hopper = false;
  TE_TRY(IsHopper(&is_hopper));
  if (is_hopper) {
    TE_TRY(RunChannelWalksOnHopper(stream, a));
    return RunChannelGradients(stream, a, true);
  }
#endif
  TE_TRY(RunChannelWalks(stream, a));
  return RunChannelGradients(stream, a, false);
}

Status RunSlabs(cudaStream_t stream, int64_t rows, const float* dlast, void* chunks, ChannelGradArgs a) {
  const ChannelPart slab = a.part;
  const int64_t slabs = std::max<int64_t>(1, CeilDiv(a.of.s, int64_t(slab.chunks) * kChunk));
  for (int64_t row = 0; row < rows; row += slab.rows) {
    a.after = dlast;
    for (int64_t i = slabs; i-- > 0; a.after = a.before) {
      const int64_t there = std::min<int64_t>(slab.rows, rows - row);
      a.part = {int(row), int(there), int(i * slab.chunks), slab.chunks};
      a.again.part = a.back.part = a.part;
      TE_TRY(RunSlab(stream, a, chunks));
    }
  }
  return {};
}

}  // namespace

Status RunChannelBwd(cudaStream_t stream, const DeltaCall& call, const Tensor& dy, const Tensor& dlast,
                     const Tensor& v, const Tensor& states, const ChannelResults& out, int64_t slab_rows,
                     int64_t slab_tokens) {
  ChannelGradArgs a{};
  a.of = call.chunks;
  a.part = {0, int(slab_rows), 0, int(slab_tokens / kChunk)};
  void* chunks = nullptr;
  TE_TRY(Divide("te_gated_delta_bwd", out, call, &a, &chunks));
  if (call.state.count() == 0) return {};
  WalkArgs& again = a.again;
  again.v = Data<const Bf16>(v), again.of_channels = chunks;
  again.s = a.of.s, again.h = a.of.h, again.g = a.of.g, again.d = a.of.d, again.e = int(call.e);
  a.back = again, a.back.v = Data<const Bf16>(dy);
  a.kept = Data<const float>(states);
  a.dq = Data<Bf16>(out.dq), a.dk = Data<Bf16>(out.dk), a.dv = Data<Bf16>(out.dv);
  a.dbeta = Data<float>(out.dbeta), a.dgate = Data<float>(out.dgate);
  return RunSlabs(stream, call.rows, Data<const float>(dlast), chunks, a);
}

}  // namespace te::delta
