// The steps of the walks of a slab, with either gate: forward those of `Walk`, or, kBack, from a slab's last
// tokens to the first. Back, `state` is the gradient to the state behind a chunk, [16, kD] of the warp, with
// channels of values as rows as it has them.
#pragma once

#include "delta/delta_walk.cuh"

namespace te::delta {

// What is left at the chunk's end of what tokens write, or of its gradient: 0 of tokens of other runs.
__device__ __forceinline__ void WeighLeft(Results& written, const Weights& of) {
#pragma unroll
  for (int j = 0; j < kChunk / 2; j += 2) {
    const float2 by = OfLeft(of, j / 4 * 8 + ssm::ColumnOf(0));
    written[j] = by.x < 0 ? 0.f : Weighed(by.x, written[j]);
    written[j + 1] = by.y < 0 ? 0.f : Weighed(by.y, written[j + 1]);
  }
}
template <int kD>
__device__ __forceinline__ void WeighLeft(Results& written, const ChannelWeights<kD>& of) {
#pragma unroll
  for (int j = 0; j < kChunk / 2; ++j)
    if (!IsOfLast(of, j / 4 * 8 + ssm::ColumnOf(j % 4))) written[j] = 0;
}

template <int kD, int kStages, typename Products, bool kBack, typename Gate, int kGroups>
struct GradSteps : Walk<kD, kStages, Products, kBack, Gate, kGroups> {
  using Base = Walk<kD, kStages, Products, kBack, Gate, kGroups>;
  using OfTokens = typename Base::OfTokens;
  using Base::s, Base::group, Base::state;

  // What dy and the state's gradient are to what tokens write, then to what they would write without each
  // other: dW = seen^T dy + left k' G, and inverse^T dW.
  template <typename Fetch, typename Write>
  __device__ __forceinline__ void StepBack(int stage, Fetch&& fetch, Write&& write) {
    auto& tiles = s.stages[stage];
    const OfTokens& weights = s.weights[stage];
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
    Products::template Along<kD>(written, of_state, tiles.Left());
    Products::Commit();
    Products::template Wait<0>(written);
    WeighLeft(written, weights);
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
  // and keys and queries then are 0, as with gates of channels they are. These do not reach the state behind
  // it.
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
    if constexpr (!Gate::kByChannel) {
      Base::Meet();  // none reads k any more
      tiles.k.template Keep<Base::kWalking>([&](int token) { return token < continues; });
      tiles.q.template Keep<Base::kWalking>([&](int token) { return token < continues; });
      Base::Meet();
    }
  }

  // The gradient to the state before the chunk: keeps G + q' (queries dy) - k' (keys betas inverse^T dW).
  template <typename Stage, typename Write>
  __device__ __forceinline__ void ToState(Stage& tiles, const OfTokens& weights, Left& of_dy,
                                          const Results& alone, Write&& write) {
    Left of_off;
#pragma unroll
    for (int k = 0; k < kChunk / 16; ++k) {
      AsLeft(of_off[k], alone, k, [&](int, int token, float2 two) {
        const float2 by = OfKeys(weights, token), beta = LoadTwo(weights.betas + token);
        return make_float2(-Weighed(by.x, beta.x * two.x), -Weighed(by.y, beta.y * two.y));
      });
      if constexpr (!Gate::kByChannel) {  // else queries are weighed
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float2 by = OfQueries(weights, 16 * k + i / 2 * 8 + ssm::ColumnOf(0));
          const float2 two = ssm::Unpack(of_dy[k][i]);
          of_dy[k][i] = ssm::Pack(Weighed(by.x, two.x), Weighed(by.y, two.y));
        }
      }
    }
    Fade(state, weights);
    Products::Begin(state);
    Products::template Across<kD>(state, of_dy, tiles.q);
    Products::template Across<kD>(state, of_off, tiles.k);
    Products::Commit();
    write();
    Products::template Wait<0>(state);
  }
};

}  // namespace te::delta
