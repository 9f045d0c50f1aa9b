// On Hopper: the states before the chunks of a slab, and the gradients behind them, of heads of up to 64
// channels. One warp copies by tensor maps (TMA), one warpgroup has the state.
#pragma once

#include "ssm/hopper.cuh"
#include "ssm/scan_bwd.cuh"

namespace te::ssm {

template <int kN, bool kRuns>
struct HopperWalkShared {
  static constexpr int kStages = 3;
  struct Stage {
    uint8_t x[kBoxBytes], B[kWideBytes<kN>];
  };
  alignas(1024) Stage stages[kStages];
  alignas(1024) uint8_t state[kWideBytes<kN>];  // of which each warp writes its rows
  alignas(1024) uint8_t added[kRuns ? kWideBytes<kN> : 16];
  Steps steps[kStages];
  Runs<kRuns> runs[kStages];
  uint64_t full[kStages], empty[kStages];
};
constexpr int kWalkThreads = kGroup + 32;

// As Walk of scan_bwd_states.cu.
template <int kN, bool kRuns, bool kBack>
struct HopperWalk {
  using Shared = HopperWalkShared<kN, kRuns>;
  static constexpr int kStages = Shared::kStages;
  const HopperGradArgs& given;
  Shared& s;
  const int row, head, first_chunk, chunks;  // row of the slab, chunks of it
  const GradArgs& a = given.a;

  __device__ __forceinline__ int Row() const { return a.slab.first_row + row; }
  // The i-th chunk of those that have tokens.
  __device__ __forceinline__ int Count() const {
    const int tokens = a.steps.s - a.slab.first_token - first_chunk * kChunk;
    return min(chunks, max(0, (tokens + kChunk - 1) / kChunk));
  }
  __device__ __forceinline__ int Chunk(int i) const { return first_chunk + (kBack ? Count() - 1 - i : i); }
  __device__ __forceinline__ int Token(int i) const { return a.slab.first_token + Chunk(i) * kChunk; }

  // One warp.
  __device__ __forceinline__ void Copy() const {
    const CUtensorMap &of_x = kBack ? given.dy : given.x, &of_B = kBack ? given.C : given.B;
    for (int i = 0; i < Count(); ++i) {
      const int stage = i % kStages;
      const uint32_t full = AddressOf(&s.full[stage]);
      WaitEmpty(s.empty, i);
      s.runs[stage].Set(a.steps, Row(), Token(i), Lane(), 32);
      if (!Expect(full, sizeof(typename Shared::Stage) + sizeof(Steps))) continue;
      CopyBox(AddressOf(s.stages[stage].x), &of_x, full, 0, head, Token(i), Row());
      for (int box = 0; box < kN / 64; ++box)
        CopyBox(AddressOf(s.stages[stage].B + box * kBoxBytes), &of_B, full, 64 * box, a.Group(head),
                Token(i), Row());
      CopyBytes(AddressOf(&s.steps[stage]), a.StepsOf(Row(), Token(i), head), sizeof(Steps), full);
    }
  }

  // One warpgroup.
  __device__ __forceinline__ void Run(GroupState<kN>& state) const {
    constexpr int kLast = Steps::kLast;
    for (int i = 0; i < Count(); ++i) {
      Write(Chunk(i), state);
      WaitFull(s.full, i);
      const int stage = i % kStages;
      const Steps& steps = s.steps[stage];
      const Runs<kRuns>& runs = s.runs[stage];
      const auto is_added = [&](int token) {
        return kBack ? runs.Continues(token) : runs.AreOne(token, kLast);
      };
      const uint8_t* B = Kept<kN, kRuns>(s.stages[stage].B, s.added, is_added(kBack ? kLast : 0), is_added);
      state.template Add<kRuns>(
          runs.Continues(kLast), steps.Since(kLast), s.stages[stage].x, B,
          [&](int token) { return kBack ? steps.Since(token) : steps.Weight(token, kLast); }, is_added);
      Release(s.empty[stage]);
    }
    if (Lane() == 0) WaitForStores();
  }

  __device__ __forceinline__ void Write(int chunk, const GroupState<kN>& state) const {
    if (Lane() == 0) WaitForReads();
    __syncwarp();
    state.Put(s.state);
    __syncwarp();
    if (Lane() > 0) return;
    const CUtensorMap* to = kBack ? &given.gradients_out : &given.states_out;
    for (int box = 0; box < kN / 64; ++box)
      StoreBox(to, AddressOf(s.state + box * kBoxBytes) + WarpOfGroup() * kPieceBytes, 64 * box,
               WarpOfGroup() * kPieceRows, head, row * a.slab.Chunks() + chunk);
    CommitStores();
  }
};

// blockIdx.y: the slab's rows, backward; behind them each kKept tokens of the rows, forward.
template <int kN, bool kRuns>
__global__ void __launch_bounds__(kWalkThreads, 2)
    te_ssd_bwd_states_hopper(const __grid_constant__ HopperGradArgs given) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) uint8_t shared[];
  auto& s = *reinterpret_cast<HopperWalkShared<kN, kRuns>*>(shared);
  const GradArgs& a = given.a;
  const int head = blockIdx.x, which = blockIdx.y, rows = a.slab.rows, group = GroupIndex();
  if (threadIdx.x == 0) {
    InitRing(s.full, s.empty, kArrivals, 4 * kArrivals);
    FenceBarrierInit();
  }
  __syncthreads();
  if (which < rows) {
    const HopperWalk<kN, kRuns, true> walk{given, s, which, head, 0, a.slab.Chunks()};
    if (group > 0) return walk.Copy();
    const int64_t at = a.States(a.slab.first_row + which, head, 0);
    GroupState<kN> state;
    state.Load(a.after ? a.after + at : nullptr, a.p, a.n);
    walk.Run(state);
    state.Store(a.before + at, a.p, a.n);
    return;
  }
  constexpr int kChunks = kKept / kChunk;
  const int row = (which - rows) % rows, part = (which - rows) / rows;
  const HopperWalk<kN, kRuns, false> walk{
      given, s, row, head, part * kChunks, min(kChunks, a.slab.Chunks() - part * kChunks)};
  if (walk.Count() == 0) return;
  if (group > 0) return walk.Copy();
  const int64_t kept = (a.slab.first_row + int64_t(row)) * ((a.steps.s + kKept - 1) / kKept) +
                       a.slab.first_token / kKept + part;
  GroupState<kN> state;
  state.Load(a.kept + a.States(kept, head, 0), a.p, a.n);
  walk.Run(state);
#else
  __trap();  // compiled only for Hopper
#endif
}

}  // namespace te::ssm
