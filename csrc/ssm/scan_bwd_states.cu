// The states before the chunks of a slab, and the gradients to those behind them.

#include "base/check.h"
#include "ssm/scan_bwd.cuh"

namespace te::ssm {
namespace {

template <int kN, int kP, bool kRuns>
struct WalkShared {
  Tile<kChunk, kN> B[2];
  Tile<kChunk, kP> x[2];
  Steps steps[2];
  Runs<kRuns> runs[2];
};

// Forward over kKept tokens with x and B, or, kBack, backward over the slab's with dy and C.
template <int kN, int kP, bool kRuns, bool kBack>
struct Walk {
  const GradArgs& a;
  WalkShared<kN, kP, kRuns>& shared;
  const int row, head, first;     // row of the slab
  const int first_chunk, chunks;  // of the slab
  State<kN, kP> state;

  __device__ __forceinline__ int Chunk(int i) const { return first_chunk + (kBack ? chunks - 1 - i : i); }
  __device__ __forceinline__ int64_t Row() const { return a.slab.first_row + row; }

  __device__ __forceinline__ void Fetch(int i) {
    if (i < chunks) {
      const int token = a.slab.first_token + Chunk(i) * kChunk, rows = a.steps.s - token;
      const int64_t at = Row() * a.steps.s + token;
      const int64_t of_group = (at * a.g + a.Group(head)) * a.n;
      if (rows > 0) {
        shared.x[i % 2].Fetch((kBack ? a.dy : a.x) + a.Channels(at, head, first), int64_t(a.steps.h) * a.p,
                              rows, a.p - first);
        shared.B[i % 2].Fetch((kBack ? a.C : a.B) + of_group, int64_t(a.g) * a.n, rows, a.n);
        shared.steps[i % 2].Fetch(a.StepsOf(Row(), token, head));
        shared.runs[i % 2].Set(a.steps, Row(), token);
      }
    }
    CommitPrefetch();
  }
  __device__ __forceinline__ void Run(const float* from, Bf16* to) {
    Fetch(0);
    state.Load(from, a.p - first, a.n);
    for (int i = 0; i < chunks; ++i) {
      const int chunk = Chunk(i);
      const bool is_there = a.slab.first_token + chunk * kChunk < a.steps.s;
      WaitForPrefetch<0>();
      __syncthreads();
      Fetch(i + 1);
      if (!is_there) continue;
      state.Store(to + a.States(int64_t(row) * a.slab.Chunks() + chunk, head, first), a.p - first, a.n);
      const Steps& steps = shared.steps[i % 2];
      const Runs<kRuns>& runs = shared.runs[i % 2];
      constexpr int kLast = Steps::kLast;
      state.template Add<kRuns>(
          runs.Continues(kLast), steps.Since(kLast), shared.x[i % 2], shared.B[i % 2],
          [&](int token) { return kBack ? steps.Since(token) : steps.Weight(token, kLast); },
          [&](int token) { return kBack ? runs.Continues(token) : runs.AreOne(token, kLast); });
    }
  }
};

// blockIdx.z: the slab's rows, backward; behind them each kKept tokens of the rows, forward.
template <int kN, int kP, bool kRuns>
__global__ void __launch_bounds__(kThreads) te_ssd_bwd_states(const GradArgs a) {
  extern __shared__ uint4 memory[];
  auto& shared = *reinterpret_cast<WalkShared<kN, kP, kRuns>*>(memory);
  const int head = blockIdx.x, first = blockIdx.y * kP, rows = a.slab.rows;
  if (int(blockIdx.z) < rows) {
    const int row = blockIdx.z;
    const int64_t at = a.States(a.slab.first_row + row, head, first);
    Walk<kN, kP, kRuns, true> walk{a, shared, row, head, first, 0, a.slab.Chunks()};
    walk.Run(a.after ? a.after + at : nullptr, a.gradients);
    walk.state.Store(a.before + at, a.p - first, a.n);
    return;
  }
  constexpr int kChunks = kKept / kChunk;
  const int index = blockIdx.z - rows, row = index % rows, part = index / rows;
  const int64_t kept = (int64_t(a.slab.first_row) + row) * ((a.steps.s + kKept - 1) / kKept) +
                       a.slab.first_token / kKept + part;
  if (a.slab.first_token + part * kKept >= a.steps.s) return;
  const int chunks = min(kChunks, a.slab.Chunks() - part * kChunks);
  Walk<kN, kP, kRuns, false> walk{a, shared, row, head, first, part * kChunks, chunks};
  walk.Run(a.kept + a.States(kept, head, first), a.states);
}

template <int kN, int kP, bool kRuns>
Status Run(cudaStream_t stream, const GradArgs& a) {
  const auto states = te_ssd_bwd_states<kN, kP, kRuns>;
  constexpr size_t kBytes = sizeof(WalkShared<kN, kP, kRuns>);
  TE_TRY(AllowShared(states, kBytes));
  const unsigned walks = a.slab.rows * unsigned(1 + CeilDiv(a.slab.tokens, kKept));
  const dim3 grid(a.steps.h, unsigned(CeilDiv(a.p, kP)), walks);
  states<<<grid, kThreads, kBytes, stream>>>(a);
  TE_LAUNCHED();
}

}  // namespace

Status RunStates(cudaStream_t stream, const GradArgs& a) {
  return DispatchStates(a.n, a.steps.runs,
                        [&]<int kN, bool kRuns>() { return Run<kN, 64, kRuns>(stream, a); });
}

}  // namespace te::ssm
