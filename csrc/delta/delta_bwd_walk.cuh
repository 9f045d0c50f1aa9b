// The walks of a slab: forward from the states that were kept, and back with the gradient to the state.
#pragma once

#include "delta/delta_bwd.cuh"
#include "delta/grad_steps.cuh"

namespace te::delta {

// Forward over kKept tokens, or, kBack, over the slab's from the last to the first.
template <int kD, int kStages, typename Products, bool kBack, int kGroups = 1>
struct GradWalk : GradSteps<kD, kStages, Products, kBack, OfHead, kGroups> {
  using Base = GradSteps<kD, kStages, Products, kBack, OfHead, kGroups>;
  using Base::a, Base::row, Base::head, Base::first;
  const GradArgs& of;
  const int row_of_slab, first_chunk, chunks;  // of the slab
  const float* from;  // [.., h, d, e], or nullptr: zeros. The state that it begins with is there at `index`.
  const int64_t index;

  __device__ __forceinline__ int Chunk(int i) const { return first_chunk + (kBack ? chunks - 1 - i : i); }
  __device__ __forceinline__ int OfRow(int i) const { return of.slab.first_token / kChunk + Chunk(i); }

  __device__ __forceinline__ int Count() const { return chunks; }
  __device__ __forceinline__ void FetchNext(int i) { Base::Fetch(OfRow(i), i % kStages); }
  __device__ __forceinline__ Bf16* To(int i) const {
    Bf16* const to = kBack ? of.gradients_written : of.written;
    return to + of.Written(row_of_slab, Chunk(i) * kChunk, head, first);
  }
  __device__ __forceinline__ int Rows(int i) const { return a.s - of.slab.first_token - Chunk(i) * kChunk; }
  __device__ __forceinline__ void Begin() { Base::Load(from, index); }
  template <typename Fetch, typename Write>
  __device__ __forceinline__ void Next(int i, Fetch&& fetch, Write&& write) {
    Base::Keep((kBack ? of.gradients : of.states) + of.State(row_of_slab, Chunk(i), head));
    if constexpr (kBack)
      Base::StepBack(i % kStages, fetch, write);
    else
      Base::Step(i % kStages, fetch, write);
  }
  __device__ __forceinline__ void End() {
    if (kBack) Base::Store(of.before, index);
  }
};

// blockIdx.z: the slab's rows, back; behind them each kKept tokens of the rows, forward. run: gets the walk.
template <int kD, int kStages, typename Products, int kGroups, typename Run>
__device__ __forceinline__ void RunGradWalk(const GradArgs& a,
                                            WalkShared<kD, kStages, OfHead, kGroups>& shared, int group,
                                            Run&& run) {
  const Slab& slab = a.slab;
  const int head = blockIdx.x, first = (int(blockIdx.y) * kGroups + group) * kSlab, rows = slab.rows;
  const int of_row = min(slab.tokens, a.again.s - slab.first_token);
  const int there = (of_row + kChunk - 1) / kChunk;  // chunks
  if (int(blockIdx.z) < rows) {
    const int row = blockIdx.z, of_all = slab.first_row + row;
    run(GradWalk<kD, kStages, Products, true, kGroups>{
        {a.back, shared, of_all, head, first, group, {}, {}}, a, row, 0, there, a.after, of_all});
    return;
  }
  constexpr int kChunks = kKept / kChunk;
  const int index = blockIdx.z - rows, row = index % rows, part = index / rows;
  const int64_t of_all = slab.first_row + row, kept = (a.again.s + kKept - 1) / kKept;
  if (part * kChunks >= there) return;
  const int chunks = min(kChunks, there - part * kChunks);
  const int64_t at = of_all * kept + slab.first_token / kKept + part;
  run(GradWalk<kD, kStages, Products, false, kGroups>{
      {a.again, shared, of_all, head, first, group, {}, {}}, a, row, part * kChunks, chunks, a.kept, at});
}

inline dim3 GradWalkGrid(const GradArgs& a, int groups) {
  const unsigned walks = unsigned(a.slab.rows) * unsigned(1 + (a.slab.tokens + kKept - 1) / kKept);
  const int channels = groups * kSlab;
  return {unsigned(a.again.h), unsigned((a.again.e + channels - 1) / channels), walks};
}

}  // namespace te::delta
