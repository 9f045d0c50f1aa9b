// The steps of the walks of a slab, with either gate: forward those of `Walk`, or, kBack, from a slab's last
// tokens to the first. Back, `state` is the gradient to the state behind a chunk, [16, kD] of the warp, with
// channels of values as rows as it has them.
#pragma once

#include "delta/delta_walk.cuh"

namespace te::delta {

// What is left at the chunk's end of the gradient to what tokens write, when it is `ready`: 0 of tokens of
// other runs.
template <bool kEarly, typename Ready>
__device__ __forceinline__ void WeighLeft(Results& written, const Weights& of, Ready&& ready) {
  OfTokens by;
  if constexpr (!kEarly) ready();
  Each(by, [&](int token) { return LoadTwo(of.left + token); });
  if constexpr (kEarly) ready();
  WeighTokens(written, by);
}
template <bool kEarly, int kD, typename Ready>
__device__ __forceinline__ void WeighLeft(Results& written, const ChannelWeights<kD>& of, Ready&& ready) {
  ready();
#pragma unroll
  for (int j = 0; j < kChunk / 2; ++j)
    if (j / 4 * 8 + ssm::ColumnOf(j % 4) < of.last) written[j] = 0;
}

template <int kD, int kStages, typename Products, bool kBack, typename Gate, int kGroups, int kParts = 1,
          int kPart = 0>
struct GradSteps : Walk<kD, kStages, Products, kBack, Gate, kGroups, kParts, kPart> {
  using Base = Walk<kD, kStages, Products, kBack, Gate, kGroups, kParts, kPart>;
  using Weighing = typename Base::Weighing;
  using Base::s, Base::group, Base::state;

  // Whether products that do not depend on the state's gradient are queued behind the one that does. Two
  // groups have no registers for the sums, and the tensor cores have the other's products meanwhile.
  static constexpr bool kAhead = kGroups == 1;

  // What dy and the state's gradient are to what tokens write, then to what they would write without each
  // other: dW = seen^T dy + left k' G, and inverse^T dW. The gradient to the state before the chunk is
  // keeps G + q' (queries dy) - k' (keys betas inverse^T dW).
  template <typename Meanwhile, typename Write>
  __device__ __forceinline__ void StepBack(int stage, Meanwhile&& meanwhile, Write&& write) {
    auto& tiles = s.stages[stage];
    const Weighing& weights = s.weights[stage];
    const bool is_one_run = weights.continues == kChunk;
    if (!is_one_run) OnlyFirstQueries(tiles, weights.continues);
    uint32_t of_state[kD / 16][4];
    Left of_dy, read, left;
    Results written = {}, seen = {}, off = {};
    const auto as_it_is = [](int, int, float2 two) { return two; };
    if constexpr (!kAhead) meanwhile();
#pragma unroll
    for (int k = 0; k < kD / 16; ++k) AsLeft(of_state[k], state, k, as_it_is);
#pragma unroll
    for (int k = 0; k < kChunk / 16; ++k) tiles.v[group].TransposedA(of_dy[k], 16 * k, Base::Band());
    Products::Begin(written, seen);
    Products::template Along<kD>(written, of_state, tiles.Left());
    Products::Commit();
    if constexpr (kAhead) {
      Queue(seen, of_dy, tiles.seen);
      meanwhile();
    }
    WeighLeft<kAhead>(written, weights, [&] { Products::template Wait<kAhead>(written); });
    if constexpr (kAhead) {
      Products::template Wait<0>(seen);
#pragma unroll
      for (int j = 0; j < kChunk / 2; ++j) written[j] += seen[j];
    } else {
      Multiply(written, of_dy, tiles.seen);
    }
#pragma unroll
    for (int k = 0; k < kChunk / 16; ++k) AsLeft(left[k], written, k, as_it_is);
    Products::Begin(off);
    Queue(off, left, tiles.inverse);
    if constexpr (kAhead) Read(tiles, weights, of_dy, read);
    OfTokens says;
    if constexpr (kAhead) LoadSays(says, weights);
    Products::template Wait<kAhead>(off);
    if constexpr (!kAhead) LoadSays(says, weights);
    Base::PackY(off);
    if (!is_one_run) OnlyFirstRun(tiles, weights.continues, of_dy, off);
#pragma unroll
    for (int k = 0; k < kChunk / 16; ++k)
      AsLeft(left[k], off, k, [&](int i, int, float2 two) {
        const float2 by = says[2 * k + i / 2];
        return make_float2(-Weighed(by.x, two.x), -Weighed(by.y, two.y));
      });
    if constexpr (!kAhead) Read(tiles, weights, of_dy, read);
    Products::Begin(state);
    Products::template Across<kD>(state, left, tiles.k);
    Products::Commit();
    write();
    Products::template Wait<0>(state);
  }
  // d += left times what later tokens see of earlier ones: queued, or waited for.
  __device__ __forceinline__ static void Queue(Results& d, const Left& left, Tokens<kChunk>& tile) {
    Products::Seeing(d, left, tile);
    Products::Commit();
  }
  __device__ __forceinline__ static void Multiply(Results& d, const Left& left, Tokens<kChunk>& tile) {
    Products::Begin(d);
    Queue(d, left, tile);
    Products::template Wait<0>(d);
  }
  // What is left of the state's gradient, and what follows for it from what queries read; 0 where they do
  // not, of whatever dy is.
  template <typename Stage>
  __device__ __forceinline__ void Read(Stage& tiles, const Weighing& weights, const Left& of_dy, Left& read) {
    OfTokens queries;
    LoadQueries(queries, weights);
#pragma unroll
    for (int k = 0; k < kChunk / 16; ++k)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 by = queries[2 * k + i / 2], two = ssm::Unpack(of_dy[k][i]);
        read[k][i] = ssm::Pack(Weighed(by.x, two.x), Weighed(by.y, two.y));
      }
    Fade(state, weights);
    Products::Begin(state);
    Products::template Across<Base::kOwn>(state, read, Base::Own(tiles.q), Stays(weights));
    Products::Commit();
  }

  // Where a chunk has tokens that do not see the state before it: no queries of theirs, as 0 times an inf
  // would stay. With gates of channels they are 0.
  template <typename Stage>
  __device__ __forceinline__ void OnlyFirstQueries(Stage& tiles, int continues) {
    if constexpr (!Gate::kByChannel) {
      tiles.q.template Keep<Base::kWalking>([&](int token) { return token < continues; });
      Base::Meet();
    }
  }
  // As Walk::OnlyLastRun: of the tokens that see the state before the chunk, where there are others, whose dy
  // and keys then are 0, as with gates of channels they are. These do not reach the state behind it.
  template <typename Stage>
  __device__ __forceinline__ void OnlyFirstRun(Stage& tiles, int continues, Left& of_dy, Results& off) {
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
    for (float& each : off) each = 0;
    WarpProducts::Seeing(off, left, tiles.inverse);
    if constexpr (!Gate::kByChannel) {
      Base::Meet();  // none reads k any more
      tiles.k.template Keep<Base::kWalking>([&](int token) { return token < continues; });
      Base::Meet();
    }
  }
};

}  // namespace te::delta
