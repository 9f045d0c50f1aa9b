// The walks of a slab: forward from the states that were kept, and back with the gradient to the state.
#pragma once

#include "delta/delta_bwd.cuh"
#include "delta/grad_steps.cuh"

namespace te::delta {

// Forward over kKept tokens, or, kBack, over the slab's from the last to the first.
template <typename Base, bool kBack>
struct GradWalk : Base {
  using Base::a, Base::row, Base::head, Base::first;
  const GradArgs& of;
  const int first_chunk, chunks;
  const float* from;  // [.., h, d, e], or nullptr: zeros. The state that it begins with is there at `index`.
  const int64_t index;

  static constexpr bool kLeavesStates = true;

  __device__ __forceinline__ int Count() const { return chunks; }
  __device__ __forceinline__ int ChunkOf(int i) const { return first_chunk + (kBack ? chunks - 1 - i : i); }
  __device__ __forceinline__ ChunkPart Part() const { return of.part; }
  __device__ __forceinline__ void FetchNext(int i) { Base::Fetch(ChunkOf(i), i % Base::kRing); }
  __device__ __forceinline__ Bf16* To(int i) const {
    return (kBack ? of.gradients_written : of.written) + of.Written(row, ChunkOf(i), head, first);
  }
  __device__ __forceinline__ int Rows(int i) const { return a.s - ChunkOf(i) * kChunk; }
  __device__ __forceinline__ void Begin() { Base::Load(from, index); }
  template <typename Meanwhile, typename Write>
  __device__ __forceinline__ void Next(int i, Meanwhile&& meanwhile, Write&& write) {
    const auto keep = [&] {
      meanwhile();
      if constexpr (Base::kOfWarps)
        Base::Keep((kBack ? of.gradients : of.states) + of.State(row, ChunkOf(i), head));
    };
    if constexpr (kBack)
      Base::StepBack(i % Base::kRing, keep, write);
    else
      Base::Step(i % Base::kRing, keep, write);
  }
  __device__ __forceinline__ void End() {
    if (kBack) Base::Store(of.before, index);
  }
};

// blockIdx.z: the slab's rows, back; behind them each kKept tokens of the rows, forward. `Back`, `Forward`:
// their steps. first: channel of values of the group. run: gets the walk.
template <typename Back, typename Forward, typename Shared, typename Run>
__device__ __forceinline__ void RunGradWalk(const GradArgs& a, Shared& shared, int group, int first,
                                            Run&& run) {
  const ChunkPart& part = a.part;
  const int head = blockIdx.x;
  const int there = part.There(a.of.s);
  if (int(blockIdx.z) < part.rows) {
    const int row = part.first_row + blockIdx.z;
    run(GradWalk<Back, true>{
        {a.back, shared, row, head, first, group, {}, {}}, a, part.first_chunk, there, a.after, row});
    return;
  }
  constexpr int kChunks = kKept / kChunk;
  const int index = blockIdx.z - part.rows, row = part.first_row + index % part.rows;
  const int begins = index / part.rows * kChunks, chunk = part.first_chunk + begins;
  if (begins >= there) return;
  const int64_t at = int64_t(row) * ((a.of.s + kKept - 1) / kKept) + chunk / kChunks;
  const int chunks = min(kChunks, there - begins);
  run(GradWalk<Forward, false>{
      {a.again, shared, row, head, first, group, {}, {}}, a, chunk, chunks, a.kept, at});
}

inline dim3 GradWalkGrid(const GradArgs& a, int groups) {
  constexpr int kChunks = kKept / kChunk;
  const unsigned forward = a.dq ? (a.part.chunks + kChunks - 1) / kChunks : 0;
  const unsigned walks = unsigned(a.part.rows) * (1 + forward);
  const int channels = groups * kSlab;
  return {unsigned(a.of.h), unsigned((a.again.e + channels - 1) / channels), walks};
}

}  // namespace te::delta
