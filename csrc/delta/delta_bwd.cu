// te_gated_delta_bwd. What a chunk of tokens needs that does not depend on the state is made as forward, of
// all chunks. Then, in two kernels for each slab of rows and tokens, the last tokens first: walks make again
// the states before chunks, and what tokens write, while others walk back with the loss's gradient to the
// state, which does not depend on states. The second kernel has all that the gradients of a chunk follow
// from: a CTA has a chunk of the heads that share a key, one after the other, and sums over them.

#include "base/device.h"
#include "base/ops.h"
#include "delta/channel_bwd.cuh"
#include "delta/delta_bwd.cuh"
#include "delta/operands.cuh"

namespace te {
namespace delta {
namespace {

// What the kernels of a slab exchange. Where a call has more than one slab there are two, in turns.
struct Exchange {
  Bf16 *states, *gradients, *written, *gradients_written;

  void Use(GradArgs* a) const {
    a->states = states, a->gradients = gradients, a->written = written;
    a->gradients_written = gradients_written;
  }
};

int64_t Slabs(int64_t s, const Slab& slab) { return std::max<int64_t>(1, CeilDiv(s, slab.tokens)); }

// Divides the workspace: chunks, the gradient to the state between slabs, unless that is a result, states and
// gradients of a slab's chunks, what its tokens write and the gradients to what they would write alone.
Status Divide(const char* op, const Tensor& workspace, const Tensor& dinitial, const DeltaCall& call,
              GradArgs* a, Exchange (*exchanges)[2]) {
  int64_t used = 0;
  const auto take = [&](int64_t bytes) {
    char* part = static_cast<char*>(workspace.data) + used;
    used += CeilDiv(bytes, 256) * 256;
    return part;
  };
  const int64_t tokens = int64_t(a->slab.rows) * a->slab.tokens, of_heads = tokens * call.chunks.h;
  const int64_t states = of_heads / kChunk * call.chunks.d * call.e, written = of_heads * call.e;
  a->again.chunks = reinterpret_cast<const Chunk*>(take(call.chunk_bytes));
  float* carried = reinterpret_cast<float*>(take(Present(dinitial) ? 0 : call.state.count() * 4));
  a->before = Present(dinitial) ? Data<float>(dinitial) : carried;
  const bool is_one = a->slab.rows >= call.rows && Slabs(call.chunks.s, a->slab) == 1;
  for (int i = 0; i < (is_one ? 1 : 2); ++i) {
    Exchange& of = (*exchanges)[i];
    of.states = reinterpret_cast<Bf16*>(take(2 * states * 2)), of.gradients = of.states + states;
    of.written = reinterpret_cast<Bf16*>(take(2 * written * 2)), of.gradients_written = of.written + written;
  }
  return Expect(op, {{"workspace", workspace, U8, {used}}});
}

Status ExpectSlab(const char* op, int64_t s, int64_t rows, int64_t tokens) {
  const bool fits = rows >= 1 && rows <= 256 && tokens >= kChunk && tokens <= 65535;
  TE_CHECK(fits && tokens % (tokens >= s ? kChunk : kKept) == 0, "%s: a slab has %ld rows of %ld tokens", op,
           long(rows), long(tokens));
  return {};
}

// Calls `run(arguments of a slab)`.
template <typename Fn>
Status EachSlab(int64_t rows, const float* dlast, GradArgs a, const Exchange (&exchanges)[2], Fn&& run) {
  const Slab slab = a.slab;
  int count = 0;
  for (int64_t row = 0; row < rows; row += slab.rows) {
    a.after = dlast;
    for (int64_t i = Slabs(a.again.s, slab); i-- > 0; a.after = a.before) {
      a.slab.rows = int(std::min<int64_t>(slab.rows, rows - row));
      a.slab.first_row = int(row), a.slab.first_token = int(i * slab.tokens);
      exchanges[count++ % 2].Use(&a);
      TE_TRY(run(a));
    }
  }
  return {};
}

#ifdef TE_HAS_90A
// Where walks leave SMs idle, those of a slab are launched ahead of the last kernel of the slab before. Else
// that kernel follows at once, while L2 has of what it reads.
Status RunSlabsOnHopper(cudaStream_t stream, int64_t rows, const float* dlast, const GradArgs& all,
                        const Exchange (&exchanges)[2]) {
  bool overlaps = false;
  TE_TRY(GradWalksLeaveRoom(all, &overlaps));
  GradArgs last{};
  TE_TRY(EachSlab(rows, dlast, all, exchanges, [&](const GradArgs& a) -> Status {
    TE_TRY(RunGradWalksOnHopper(stream, a));
    if (!overlaps) return RunGradChunksOnHopper(stream, a, {rows, false});
    if (last.states) TE_TRY(RunGradChunksOnHopper(stream, last, {rows, true}));
    last = a;
    return {};
  }));
  return overlaps ? RunGradChunksOnHopper(stream, last, {rows, false}) : Status{};
}
#endif

Status RunSlabs(cudaStream_t stream, int64_t rows, const float* dlast, const GradArgs& all,
                const Exchange (&exchanges)[2]) {
#ifdef TE_HAS_90A
  bool is_hopper = false;
  TE_TRY(IsHopper(&is_hopper));
  if (is_hopper) return RunSlabsOnHopper(stream, rows, dlast, all, exchanges);
#endif
  return EachSlab(rows, dlast, all, exchanges, [&](const GradArgs& a) -> Status {
    TE_TRY(RunGradWalks(stream, a));
    return RunGradChunks(stream, a);
  });
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
                      {"dq", dq, BF16, call.keys},
                      {"dk", dk, BF16, call.keys},
                      {"dv", dv, BF16, call.values},
                      {"dbeta", dbeta, F32, call.heads},
                      {"dgate", dgate, F32, call.gates},
                      {"dinitial", dinitial, F32, call.state, kOptional}}));
  const delta::ChunkArgs& of = call.chunks;
  TE_TRY(delta::ExpectSlab(kOp, of.s, slab_rows, slab_tokens));
  if (call.by_channel)
    return delta::RunChannelBwd(stream, call, dy, dlast, v, states,
                                {dq, dk, dv, dbeta, dgate, dinitial, workspace}, slab_rows, slab_tokens);
  using ssm::Bf16;
  delta::GradArgs args{};
  args.slab = {int(slab_rows), int(slab_tokens), 0, 0};
  delta::Exchange exchanges[2]{};
  TE_TRY(delta::Divide(kOp, workspace, dinitial, call, &args, &exchanges));
  if (call.state.count() == 0) return {};
  delta::WalkArgs& again = args.again;
  again.q = of.q, again.k = of.k, again.v = Data<const Bf16>(v);
  again.s = of.s, again.h = of.h, again.g = of.g, again.d = of.d, again.e = int(call.e);
  args.back = again, args.back.v = Data<const Bf16>(dy);
  args.kept = Data<const float>(states), args.runs = of.runs, args.scale = of.scale;
  args.normalize = of.normalize;
  args.dq = Data<Bf16>(dq), args.dk = Data<Bf16>(dk), args.dv = Data<Bf16>(dv);
  args.dbeta = Data<float>(dbeta), args.dgate = Data<float>(dgate);
  delta::Chunk* const of_chunks = static_cast<delta::Chunk*>(workspace.data);
  if (of.s > 0) TE_TRY(delta::LaunchChunks(stream, of, call.rows, of_chunks));
  return delta::RunSlabs(stream, call.rows, Data<const float>(dlast), args, exchanges);
}

}  // namespace te
