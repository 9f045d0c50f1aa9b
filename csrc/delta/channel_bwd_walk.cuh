// The walks of a slab where channels have gates: forward from the states that were kept, and back with the
// gradient to the state.
#pragma once

#include "delta/channel_bwd.cuh"

namespace te::delta {

// Forward over kKept tokens, or, kBack, over the slab's from the last to the first. Back, `state` is the
// gradient to the state behind a chunk, [16, kD] of the warp, with channels of values as rows as it has them.
template <int kD, int kStages, typename Products, bool kBack>
struct ChannelWalk : Walk<kD, kStages, Products, kBack, OfChannel> {
  using Base = Walk<kD, kStages, Products, kBack, OfChannel>;
  using Weights = typename Base::OfTokens;
  using Base::a, Base::s, Base::row, Base::head, Base::first, Base::state, Base::y;
  const ChannelGradArgs& of;
  const int first_chunk, chunks;

  __device__ __forceinline__ int Chunk(int i) const { return first_chunk + (kBack ? chunks - 1 - i : i); }
  __device__ __forceinline__ void FetchNext(int i) {
    if (i < chunks)
      Base::Fetch(Chunk(i));
    else
      CommitPrefetch();
  }
  __device__ __forceinline__ void WriteTokens(int i) {
    Bf16* const to = kBack ? of.gradients_written : of.written;
    Base::Write(to + of.Written(row, Chunk(i), head, first), a.s - Chunk(i) * kChunk);
  }
  // The state, rounded, as rows of values.
  __device__ __forceinline__ void Keep(int chunk) const {
    Bf16* const to = (kBack ? of.gradients : of.states) + of.State(row, chunk, head);
#pragma unroll
    for (int i = 0; i < kD / 2; i += 2) {
      const int value = first + Base::Band() + ssm::RowOf(i % 4), key = i / 4 * 8 + ssm::ColumnOf(0);
      if (value < a.e && key < a.d)
        *reinterpret_cast<uint32_t*>(to + int64_t(value) * a.d + key) = ssm::Pack(state[i], state[i + 1]);
    }
  }

  // What dy and the state's gradient are to what tokens write, then to what they would write without each
  // other: dW = seen^T dy + left G, and inverse^T dW.
  __device__ __forceinline__ void StepBack(int i) {
    const int stage = Chunk(i) % kStages;
    auto& tiles = s.stages[stage];
    const Weights& weights = s.weights[stage];
    uint32_t of_state[kD / 16][4];
    Left of_dy, left;
    Results written = {}, alone = {};
    const auto as_it_is = [](int, int, float2 two) { return two; };
#pragma unroll
    for (int k = 0; k < kD / 16; ++k) AsLeft(of_state[k], state, k, as_it_is);
    if (kStages > 1) FetchNext(i + Base::kAhead);
#pragma unroll
    for (int k = 0; k < kChunk / 16; ++k) tiles.v.TransposedA(of_dy[k], 16 * k, Base::Band());
    Products::Begin(written);
    Products::template Along<kD>(written, of_state, tiles.left);
    Products::Commit();
    if (i > 0) WriteTokens(i - 1);
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
    ToState(tiles, weights, of_dy, alone);
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
    Multiply(written, of_dy, tiles.seen);
#pragma unroll
    for (int k = 0; k < kChunk / 16; ++k)
      AsLeft(left[k], written, k, [&](int, int token, float2 two) {
        return make_float2(token < continues ? two.x : 0.f, token + 1 < continues ? two.y : 0.f);
      });
#pragma unroll
    for (float& each : alone) each = 0;
    Multiply(alone, left, tiles.inverse);
  }

  // The gradient to the state before the chunk: keeps G + q^T dy - k^T (betas inverse^T dW).
  template <typename Stage>
  __device__ __forceinline__ void ToState(Stage& tiles, const Weights& weights, const Left& of_dy,
                                          const Results& alone) {
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
    Products::template Wait<0>(state);
  }

  // from: [.., h, d, e], or nullptr: zeros. The state that it begins with is there at `index`.
  __device__ __forceinline__ void Run(const float* from, int64_t index) {
#pragma unroll
    for (int i = 0; i < Base::kAhead; ++i) FetchNext(i);
#pragma unroll
    for (float& each : state) each = 0;
    if (from) Base::EachOfState(index, [&](float& each, int64_t at) { each = from[at]; });
    for (int i = 0; i < chunks; ++i) {
      WaitForPrefetch<Base::kAhead - 1>();
      Base::Meet();  // what was fetched is there for all
      Keep(Chunk(i));
      if constexpr (kBack)
        StepBack(i);
      else
        Base::Step(
            Chunk(i) % kStages, [&] { FetchNext(i + Base::kAhead); },
            [&] {
              if (i > 0) WriteTokens(i - 1);
            });
      if (kStages == 1) {
        __syncthreads();  // none reads the tokens any more
        FetchNext(i + 1);
      }
    }
    if (chunks > 0) WriteTokens(chunks - 1);
  }
};

// blockIdx.z: the slab's rows, back; behind them each kKept tokens of the rows, forward.
template <int kD, int kStages, typename Products>
__device__ __forceinline__ void RunChannelWalk(const ChannelGradArgs& a,
                                               WalkShared<kD, kStages, OfChannel>& shared) {
  const ChannelPart& part = a.part;
  const int head = blockIdx.x, first = int(blockIdx.y) * kSlab;
  const int there = min(part.chunks, (a.of.s + kChunk - 1) / kChunk - part.first_chunk);
  if (int(blockIdx.z) < part.rows) {
    const int row = part.first_row + blockIdx.z;
    ChannelWalk<kD, kStages, Products, true> walk{
        {a.back, shared, row, head, first, {}, {}}, a, part.first_chunk, there};
    walk.Run(a.after, row);
    walk.Store(a.before, row);
    return;
  }
  constexpr int kChunks = kKept / kChunk;
  const int index = blockIdx.z - part.rows, row = part.first_row + index % part.rows;
  const int begins = index / part.rows * kChunks, chunk = part.first_chunk + begins;
  if (begins >= there) return;
  ChannelWalk<kD, kStages, Products, false> walk{
      {a.again, shared, row, head, first, {}, {}}, a, chunk, min(kChunks, there - begins)};
  walk.Run(a.kept, int64_t(row) * ((a.of.s + kKept - 1) / kKept) + chunk / kChunks);
}

inline dim3 ChannelWalkGrid(const ChannelGradArgs& a) {
  constexpr int kChunks = kKept / kChunk;
  const unsigned walks = unsigned(a.part.rows) * unsigned(1 + (a.part.chunks + kChunks - 1) / kChunks);
  return {unsigned(a.of.h), unsigned((a.again.e + kSlab - 1) / kSlab), walks};
}

}  // namespace te::delta
