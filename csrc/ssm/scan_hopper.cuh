// The kernel of te_ssd_fwd on Hopper. A CTA has the tokens of one head, in chunks of 64. One warp copies what
// a chunk has by tensor maps (TMA), some chunks ahead. One warpgroup has the state in registers: it hands the
// state before each chunk to the others, rounded, and adds what the chunk adds. Two warpgroups take turns to
// make the results of a chunk: what its tokens see of the state, and of each other. All products are those of
// warpgroups (wgmma), whose left factors, where weights go into them, are registers.
#pragma once

#include "ssm/hopper.cuh"

namespace te::ssm {

struct HopperArgs {
  CUtensorMap x, B, C, y;  // of [rows, s, h, p] and [rows, s, g, n], in boxes of 64 tokens, or of 16 of y
  StepArgs steps;
  const Steps* of_chunks;    // [rows, chunks, h]
  const float *D, *initial;  // D? [h, channels], initial? [rows, h, p, n]
  float *last, *states;      // last? [rows, h, p, n], states? [rows, s / kKept, h, p, n]
  int g, p, n, channels;
};

template <int kN, bool kRuns>
struct HopperShared {
  static constexpr int kStages = kRuns ? 3 : 4;
  struct Stage {
    uint8_t x[kBoxBytes], B[kWideBytes<kN>], C[kWideBytes<kN>];
  };
  alignas(1024) Stage stages[kStages];
  alignas(1024) uint8_t states[2][kWideBytes<kN>];  // before even and odd chunks
  alignas(1024) uint8_t pieces[8][kPieceBytes];     // of y
  alignas(1024) uint8_t added[kRuns ? kWideBytes<kN> : 16];
  Steps steps[kStages];
  Runs<kRuns> runs[kStages];
  alignas(8) float D[kHopperChannels];
  uint64_t full[kStages], empty[kStages], state_full[2], state_empty[2];
};

// What the roles of a CTA share: the chunks of one head, from channel `first` of it on.
template <int kN, bool kRuns>
struct HopperScan {
  using Shared = HopperShared<kN, kRuns>;
  static constexpr int kStages = Shared::kStages;
  const HopperArgs& a;
  Shared& s;
  const int row = blockIdx.z, head = blockIdx.x, first = blockIdx.y * kHopperChannels;

  __device__ __forceinline__ int Chunks() const { return (a.steps.s + kChunk - 1) / kChunk; }
  __device__ __forceinline__ int64_t StatesAt(int64_t index) const {
    return ((index * a.steps.h + head) * a.p + first) * a.n;
  }

  __device__ __forceinline__ void Begin() {
    if (threadIdx.x == 0) {
      InitRing(s.full, s.empty, kArrivals, 8 * kArrivals);
      InitRing(s.state_full, s.state_empty, 4 * kArrivals, 4 * kArrivals);
      FenceBarrierInit();
    }
    const int channel = first + int(threadIdx.x);
    if (threadIdx.x < kHopperChannels)
      s.D[threadIdx.x] = a.D && channel < a.p ? a.D[head * a.channels + (a.channels > 1 ? channel : 0)] : 0.f;
    AwaitPrevious();
    __syncthreads();
  }

  // One warp.
  __device__ __forceinline__ void Copy() const {
    const int group = head / (a.steps.h / a.g);
    for (int chunk = 0; chunk < Chunks(); ++chunk) {
      const int stage = chunk % kStages, token = chunk * kChunk;
      const uint32_t full = AddressOf(&s.full[stage]);
      WaitEmpty(s.empty, chunk);
      s.runs[stage].Set(a.steps, row, token, Lane(), 32);
      if (!Expect(full, sizeof(typename Shared::Stage) + sizeof(Steps))) continue;
      for (int box = 0; box < kN / 64; ++box) {
        CopyBox(AddressOf(s.stages[stage].C + box * kBoxBytes), &a.C, full, 64 * box, group, token, row);
        CopyBox(AddressOf(s.stages[stage].B + box * kBoxBytes), &a.B, full, 64 * box, group, token, row);
      }
      CopyBox(AddressOf(s.stages[stage].x), &a.x, full, first, head, token, row);
      CopyBytes(AddressOf(&s.steps[stage]),
                a.of_chunks + (int64_t(row) * Chunks() + chunk) * a.steps.h + head, sizeof(Steps), full);
    }
  }

  // One warpgroup: the state.
  __device__ __forceinline__ void WalkStates() const {
    GroupState<kN> state;
    state.Load(a.initial ? a.initial + StatesAt(row) : nullptr, a.p - first, a.n);
    for (int chunk = 0; chunk < Chunks(); ++chunk) {
      if (a.states && chunk * kChunk % kKept == 0) {
        const int64_t index = row * ((a.steps.s + kKept - 1) / kKept) + chunk * kChunk / kKept;
        state.Store(a.states + StatesAt(index), a.p - first, a.n);
      }
      WaitEmpty(s.state_empty, chunk);
      state.Put(s.states[chunk % 2]);
      Release(s.state_full[chunk % 2]);
      WaitFull(s.full, chunk);
      Advance(chunk % kStages, state);
      Release(s.empty[chunk % kStages]);
    }
    if (a.last) state.Store(a.last + StatesAt(row), a.p - first, a.n);
  }

  __device__ __forceinline__ void Advance(int stage, GroupState<kN>& state) const {
    constexpr int kLast = Steps::kLast;
    const Steps& steps = s.steps[stage];
    const Runs<kRuns>& runs = s.runs[stage];
    const auto is_added = [&](int token) { return runs.AreOne(token, kLast); };
    const uint8_t* B = Kept<kN, kRuns>(s.stages[stage].B, s.added, is_added(0), is_added);
    state.template Add<kRuns>(
        runs.Continues(kLast), steps.Since(kLast), s.stages[stage].x, B,
        [&](int token) { return steps.Weight(token, kLast); }, is_added);
  }

  // Two warpgroups: the results of even and odd chunks.
  __device__ __forceinline__ void Results(int which) const {
    for (int chunk = which; chunk < Chunks(); chunk += 2) {
      float scores[kChunk / 2], y[kHopperChannels / 2];
      Look(chunk, scores, y);
      Release(s.state_empty[which]);
      AddTokens(chunk % kStages, scores, y);
      if (a.D) AddInputs(chunk % kStages, y);
      Release(s.empty[chunk % kStages]);
      Write(chunk, y);
    }
    if (Lane() == 0) WaitForStores();
  }

  // C B^T, and what tokens see of the state. With three stages a warpgroup does not wait for each phase of
  // `full`: those before are over, for the state that its last chunk began with followed from them.
  __device__ __forceinline__ void Look(int chunk, float (&scores)[kChunk / 2],
                                       float (&y)[kHopperChannels / 2]) const {
    const auto& stage = s.stages[chunk % kStages];
    WaitFull(s.full, chunk);
    BeginProducts();
    MultiplyAlong<kN>(scores, stage.C, stage.B);
    CommitProducts();
    WaitFull(s.state_full, chunk);
    BeginProducts();
    MultiplyAlong<kN>(y, stage.C, s.states[chunk % 2]);
    CommitProducts();
    WaitForProducts<0>();
    Settle(scores);
    Settle(y);
  }

  // y, times what is left of the state, and what tokens see of each other.
  __device__ __forceinline__ void AddTokens(int stage, const float (&scores)[kChunk / 2],
                                            float (&y)[kHopperChannels / 2]) const {
    uint32_t seen[kChunk / 16][4];
    Weigh(stage, scores, seen);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int to = WarpOfGroup() * kBand + RowOf(2 * half);
      const float since = s.steps[stage].Since(to);
      const bool continues = s.runs[stage].Continues(to);
#pragma unroll
      for (int i = 2 * half; i < kHopperChannels / 2; i += 4)
#pragma unroll
        for (int j = i; j < i + 2; ++j) y[j] = continues ? y[j] * since : 0.f;
    }
    BeginProducts();
    MultiplyAcross(y, seen, s.stages[stage].x);
    CommitProducts();
    WaitForProducts<0>();
    Settle(y);
  }

  // Scores times what is left of what tokens add, rounded; 0 of later tokens.
  __device__ __forceinline__ void Weigh(int stage, const float (&scores)[kChunk / 2],
                                        uint32_t (&seen)[kChunk / 16][4]) const {
    const Steps& steps = s.steps[stage];
    const Runs<kRuns>& runs = s.runs[stage];
    const int band = WarpOfGroup() * kBand;
    const float sums_to[2] = {steps.sums[band + RowOf(0)], steps.sums[band + RowOf(2)]};
#pragma unroll
    for (int j = 0; j < kChunk / 8; ++j) {
      const int from = 8 * j + ColumnOf(0);
      uint32_t (&words)[4] = seen[j / 2];
      words[j % 2 * 2] = words[j % 2 * 2 + 1] = 0;
      if (8 * j >= band + kBand) continue;
      const float2 sums = *reinterpret_cast<const float2*>(steps.sums + from);
      const float2 sizes = *reinterpret_cast<const float2*>(steps.sizes + from);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int to = band + RowOf(2 * half);
        float low = scores[4 * j + 2 * half] * Exp2(sums_to[half] - sums.x) * sizes.x;
        float high = scores[4 * j + 2 * half + 1] * Exp2(sums_to[half] - sums.y) * sizes.y;
        if (8 * j >= band) low = from <= to ? low : 0.f, high = from < to ? high : 0.f;
        if (kRuns) low = runs.AreOne(from, to) ? low : 0.f, high = runs.AreOne(from + 1, to) ? high : 0.f;
        words[j % 2 * 2 + half] = Pack(low, high);
      }
    }
  }

  // y + D x
  __device__ __forceinline__ void AddInputs(int stage, float (&y)[kHopperChannels / 2]) const {
    uint32_t x[4][4];
    LoadRows(x, s.stages[stage].x);
#pragma unroll
    for (int j = 0; j < kHopperChannels / 8; ++j) {
      const float2 D = *reinterpret_cast<const float2*>(s.D + 8 * j + ColumnOf(0));
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float2 two = Unpack(x[j / 2][j % 2 * 2 + half]);
        y[4 * j + 2 * half] += D.x * two.x, y[4 * j + 2 * half + 1] += D.y * two.y;
      }
    }
  }

  __device__ __forceinline__ void Write(int chunk, const float (&y)[kHopperChannels / 2]) const {
    const uint32_t piece = AddressOf(s.pieces[WarpIndex() - 4]);
    if (Lane() == 0) WaitForReads();  // of the piece before
    __syncwarp();
    PutRows(piece, y);
    FenceAsync();
    __syncwarp();
    if (Lane() > 0) return;
    StoreBox(&a.y, piece, first, head, chunk * kChunk + WarpOfGroup() * kBand, row);
    CommitStores();
  }
};

template <int kN, bool kRuns>
__global__ void __launch_bounds__(kHopperThreads, 1) te_ssd_fwd_hopper(const __grid_constant__ HopperArgs a) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) uint8_t shared[];
  HopperScan<kN, kRuns> scan{a, *reinterpret_cast<HopperShared<kN, kRuns>*>(shared)};
  scan.Begin();
  const int group = GroupIndex();
  if (group == 3) {
    GiveRegisters<40>();
    if (threadIdx.x < 3 * kGroup + 32) scan.Copy();
    return;
  }
  TakeRegisters<152>();
  if (group == 0)
    scan.WalkStates();
  else
    scan.Results(group - 1);
#else
  __trap();  // compiled only for Hopper
#endif
}

}  // namespace te::ssm
