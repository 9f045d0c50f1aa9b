// The walks of a slab: forward from the states that were kept, and back with the gradient to the state.
#pragma once

#include "delta/delta_bwd.cuh"

namespace te::delta {

// Forward over kKept tokens, or, kBack, over the slab's from the last to the first. Back, `state` is the
// gradient to the state behind a chunk, [16, kD] of the warp, with channels of values as rows as it has them.
template <int kD, int kStages, typename Products, bool kBack, int kGroups = 1>
struct GradWalk : Walk<kD, kStages, Products, kBack, OfHead, kGroups> {
  using Base = Walk<kD, kStages, Products, kBack, OfHead, kGroups>;
  using Base::a, Base::s, Base::row, Base::head, Base::first, Base::group, Base::state, Base::y;
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
      StepBack(i % kStages, fetch, write);
    else
      Base::Step(i % kStages, fetch, write);
  }
  __device__ __forceinline__ void End() {
    if (kBack) Base::Store(of.before, index);
  }

  // What dy and the state's gradient are to what tokens write, then to what they would write without each
  // other: dW = seen^T dy + left k' G, and inverse^T dW.
  template <typename Fetch, typename Write>
  __device__ __forceinline__ void StepBack(int stage, Fetch&& fetch, Write&& write) {
    auto& tiles = s.stages[stage];
    const Weights& weights = s.weights[stage];
    uint32_t of_state[kD / 16][4];
    Left of_dy, left;
    Results written = {}, alone = {};
    const auto as_it_is = [](int, int, float2 two) { return two; };
#pragma unroll
    for (int k = 0; k < kD / 16; ++k) AsLeft(of_state[k], state, k, as_it_is);
    fetch();
#pragma unroll
    for (int k = 0; k < kChunk / 16; ++k) tiles.v[group].TransposedA(of_dy[k], 16 * k, Base::Band());
    Products::Begin(written);
    Products::template Along<kD>(written, of_state, tiles.k);
    Products::Commit();
    Products::template Wait<0>(written);
#pragma unroll
    for (int j = 0; j < kChunk / 2; j += 2) {
      const float2 by = LoadTwo(weights.left + j / 4 * 8 + ssm::ColumnOf(0));
      written[j] = by.x < 0 ? 0.f : Weighed(by.x, written[j]);
      written[j + 1] = by.y < 0 ? 0.f : Weighed(by.y, written[j + 1]);
    }
    Multiply(written, of_dy, tiles.seen);
#pragma unroll
    for (int k = 0; k < kChunk / 16; ++k) AsLeft(left[k], written, k, as_it_is);
    Multiply(alone, left, tiles.inverse);
    Base::PackY(alone);
    if (weights.continues < kChunk) OnlyFirstRun(stage, weights.continues, of_dy, alone);
    ToState(tiles, weights, of_dy, alone, write);
  }
  __device__ __forceinline__ static void Multiply(Results& d, const Left& left, Tokens<kChunk>& tile) {
    Products::Begin(d);
    Products::Seeing(d, left, tile);
    Products::Commit();
    Products::template Wait<0>(d);
  }

  // As Walk::OnlyLastRun: of the tokens that see the state before the chunk, where there are others, whose dy
  // and keys and queries then are 0. These do not reach the state behind it.
  __device__ __forceinline__ void OnlyFirstRun(int stage, int continues, Left& of_dy, Results& alone) {
    Results written = {};
    Left left;
#pragma unroll
    for (int k = 0; k < kChunk / 16; ++k)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int token = 16 * k + i / 2 * 8 + ssm::ColumnOf(0);
        of_dy[k][i] &= (token < continues ? 0xffffu : 0u) | (token + 1 < continues ? 0xffff0000u : 0u);
      }
    auto& tiles = s.stages[stage];
    WarpProducts::Seeing(written, of_dy, tiles.seen);
#pragma unroll
    for (int k = 0; k < kChunk / 16; ++k)
      AsLeft(left[k], written, k, [&](int, int token, float2 two) {
        return make_float2(token < continues ? two.x : 0.f, token + 1 < continues ? two.y : 0.f);
      });
#pragma unroll
    for (float& each : alone) each = 0;
    WarpProducts::Seeing(alone, left, tiles.inverse);
    Base::Meet();  // none reads k any more
    tiles.k.template Keep<Base::kWalking>([&](int token) { return token < continues; });
    tiles.q.template Keep<Base::kWalking>([&](int token) { return token < continues; });
    Base::Meet();
  }

  // The gradient to the state before the chunk: keeps G + q' (queries dy) - k' (keys betas inverse^T dW).
  template <typename Stage, typename Write>
  __device__ __forceinline__ void ToState(Stage& tiles, const Weights& weights, Left& of_dy,
                                          const Results& alone, Write&& write) {
    Left of_off;
#pragma unroll
    for (int k = 0; k < kChunk / 16; ++k) {
      AsLeft(of_off[k], alone, k, [&](int, int token, float2 two) {
        const float2 by = LoadTwo(weights.keys + token), beta = LoadTwo(weights.betas + token);
        return make_float2(-Weighed(by.x, beta.x * two.x), -Weighed(by.y, beta.y * two.y));
      });
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 by = LoadTwo(weights.queries + 16 * k + i / 2 * 8 + ssm::ColumnOf(0));
        const float2 two = ssm::Unpack(of_dy[k][i]);
        of_dy[k][i] = ssm::Pack(Weighed(by.x, two.x), Weighed(by.y, two.y));
      }
    }
#pragma unroll
    for (float& each : state) each = Weighed(weights.keeps, each);
    Products::Begin(state);
    Products::template Across<kD>(state, of_dy, tiles.q);
    Products::template Across<kD>(state, of_off, tiles.k);
    Products::Commit();
    write();
    Products::template Wait<0>(state);
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
