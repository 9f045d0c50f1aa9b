// The walks of a slab where channels have gates: forward from the states that were kept, and back with the
// gradient to the state.
#pragma once

#include "delta/channel_bwd.cuh"

namespace te::delta {

// Forward over kKept tokens, or, kBack, over the slab's from the last to the first. Back, `state` is the
// gradient to the state behind a chunk, [16, kD] of the warp, with channels of values as rows as it has them.
template <int kD, int kStages, typename Products, bool kBack, int kGroups = 1>
struct ChannelWalk : Walk<kD, kStages, Products, kBack, OfChannel, kGroups> {
  using Base = Walk<kD, kStages, Products, kBack, OfChannel, kGroups>;
  using Weights = typename Base::OfTokens;
  using Base::a, Base::s, Base::row, Base::head, Base::first, Base::group, Base::state, Base::y;
  const ChannelGradArgs& of;
  const int first_chunk, chunks;
  const float* from;  // [.., h, d, e], or nullptr: zeros. The state that it begins with is there at `index`.
  const int64_t index;

  __device__ __forceinline__ int Chunk(int i) const { return first_chunk + (kBack ? chunks - 1 - i : i); }

  __device__ __forceinline__ int Count() const { return chunks; }
  __device__ __forceinline__ void FetchNext(int i) { Base::Fetch(Chunk(i), i % kStages); }
  __device__ __forceinline__ Bf16* To(int i) const {
    return (kBack ? of.gradients_written : of.written) + of.Written(row, Chunk(i), head, first);
  }
  __device__ __forceinline__ int Rows(int i) const { return a.s - Chunk(i) * kChunk; }
  __device__ __forceinline__ void Begin() { Base::Load(from, index); }
  template <typename Fetch, typename Write>
  __device__ __forceinline__ void Next(int i, Fetch&& fetch, Write&& write) {
    Base::Keep((kBack ? of.gradients : of.states) + of.State(row, Chunk(i), head));
    if constexpr (kBack)
      StepBack(i % kStages, fetch, write);
    else
      Base::Step(i % kStages, fetch, write);
  }
  __device__ __forceinline__ void End() {
    if (kBack) Base::Store(of.before, index);
  }

  // What dy and the state's gradient are to what tokens write, then to what they would write without each
  // other: dW = seen^T dy + left G, and inverse^T dW.
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
    Products::template Along<kD>(written, of_state, tiles.left);
    Products::Commit();
    Products::template Wait<0>(written);
#pragma unroll
    for (int j = 0; j < kChunk / 2; ++j)
      if (!IsOfLast(weights, j / 4 * 8 + ssm::ColumnOf(j % 4))) written[j] = 0;
    Multiply(written, of_dy, tiles.seen);
#pragma unroll
    for (int k = 0; k < kChunk / 16; ++k) AsLeft(left[k], written, k, as_it_is);
    Multiply(alone, left, tiles.inverse);
    Base::PackY(alone);
    if (weights.continues < kChunk) OnlyFirstRun(tiles, weights.continues, of_dy, alone);
    ToState(tiles, weights, of_dy, alone, write);
  }
  __device__ __forceinline__ static void Multiply(Results& d, const Left& left, Tokens<kChunk>& tile) {
    Products::Begin(d);
    Products::Seeing(d, left, tile);
    Products::Commit();
    Products::template Wait<0>(d);
  }

  // As Walk::OnlyLastRun: of the tokens that see the state before the chunk, where there are others, whose dy
  // then is 0, as their keys and queries are.
  template <typename Stage>
  __device__ __forceinline__ void OnlyFirstRun(Stage& tiles, int continues, Left& of_dy, Results& alone) {
    Results written = {};
    Left left;
#pragma unroll
    for (int k = 0; k < kChunk / 16; ++k)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int token = 16 * k + i / 2 * 8 + ssm::ColumnOf(0);
        of_dy[k][i] &= (token < continues ? 0xffffu : 0u) | (token + 1 < continues ? 0xffff0000u : 0u);
      }
    WarpProducts::Seeing(written, of_dy, tiles.seen);
#pragma unroll
    for (int k = 0; k < kChunk / 16; ++k)
      AsLeft(left[k], written, k, [&](int, int token, float2 two) {
        return make_float2(token < continues ? two.x : 0.f, token + 1 < continues ? two.y : 0.f);
      });
#pragma unroll
    for (float& each : alone) each = 0;
    WarpProducts::Seeing(alone, left, tiles.inverse);
  }

  // The gradient to the state before the chunk: keeps G + q^T dy - k^T (betas inverse^T dW).
  template <typename Stage, typename Write>
  __device__ __forceinline__ void ToState(Stage& tiles, const Weights& weights, const Left& of_dy,
                                          const Results& alone, Write&& write) {
    Left of_off;
#pragma unroll
    for (int k = 0; k < kChunk / 16; ++k)
      AsLeft(of_off[k], alone, k, [&](int, int token, float2 two) {
        const float2 beta = LoadTwo(weights.betas + token), reads = OfKeys(weights, token);
        return make_float2(-Weighed(reads.x, beta.x * two.x), -Weighed(reads.y, beta.y * two.y));
      });
    Fade(state, weights);
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
__device__ __forceinline__ void RunChannelWalk(const ChannelGradArgs& a,
                                               WalkShared<kD, kStages, OfChannel, kGroups>& shared, int group,
                                               Run&& run) {
  const ChannelPart& part = a.part;
  const int head = blockIdx.x, first = (int(blockIdx.y) * kGroups + group) * kSlab;
  const int there = min(part.chunks, (a.of.s + kChunk - 1) / kChunk - part.first_chunk);
  if (int(blockIdx.z) < part.rows) {
    const int row = part.first_row + blockIdx.z;
    run(ChannelWalk<kD, kStages, Products, true, kGroups>{
        {a.back, shared, row, head, first, group, {}, {}}, a, part.first_chunk, there, a.after, row});
    return;
  }
  constexpr int kChunks = kKept / kChunk;
  const int index = blockIdx.z - part.rows, row = part.first_row + index % part.rows;
  const int begins = index / part.rows * kChunks, chunk = part.first_chunk + begins;
  if (begins >= there) return;
  const int64_t at = int64_t(row) * ((a.of.s + kKept - 1) / kKept) + chunk / kChunks;
  run(ChannelWalk<kD, kStages, Products, false, kGroups>{{a.again, shared, row, head, first, group, {}, {}},
                                                         a,
                                                         chunk,
                                                         min(kChunks, there - begins),
                                                         a.kept,
                                                         at});
}

inline dim3 ChannelWalkGrid(const ChannelGradArgs& a, int groups) {
  constexpr int kChunks = kKept / kChunk;
  const unsigned walks = unsigned(a.part.rows) * unsigned(1 + (a.part.chunks + kChunks - 1) / kChunks);
  const int channels = groups * kSlab;
  return {unsigned(a.of.h), unsigned((a.again.e + channels - 1) / channels), walks};
}

}  // namespace te::delta
