// What weighs the results of a walk's products: of tokens, and of the state, with a gate for each head and
// for each channel of keys.
#pragma once

#include "delta/channel.cuh"

namespace te::delta {

// Results of products, [16, 8 i] of a warp: d[4 j] .. d[4 j + 3] are of columns 8 j to 8 j + 7, as
// MultiplyAdd has them. A left factor [16, 16 i] has four words for 16 columns.
using Results = float[kChunk / 2];
using Left = uint32_t[kChunk / 16][4];

// weight times x; 0, of any x, where the weight is.
__device__ __forceinline__ float Weighed(float weight, float x) { return weight == 0 ? 0.f : weight * x; }

// Weights of the tokens that a thread has as columns of products, two neighbours of each eight.
using OfTokens = float2[kChunk / 8];

template <typename Fn>
__device__ __forceinline__ void Each(OfTokens& of, Fn&& fn) {
#pragma unroll
  for (int i = 0; i < kChunk / 8; ++i) of[i] = fn(8 * i + ssm::ColumnOf(0));
}
template <typename Weights>
__device__ __forceinline__ void LoadBetas(OfTokens& to, const Weights& of) {
  Each(to, [&](int token) { return LoadTwo(of.betas + token); });
}
// How much of what keys and queries read of the state counts, of keys times beta.
__device__ __forceinline__ void LoadSays(OfTokens& to, const Weights& of) {
  Each(to, [&](int token) { return LoadTwo(of.says + token); });
}
__device__ __forceinline__ void LoadQueries(OfTokens& to, const Weights& of) {
  Each(to, [&](int token) { return LoadTwo(of.queries + token); });
}
// Where channels have gates, tiles have the rest.
template <int kD>
__device__ __forceinline__ void LoadSays(OfTokens& to, const ChannelWeights<kD>& of) {
  Each(to, [&](int token) {
    const float2 betas = LoadTwo(of.betas + token);
    return make_float2(token < of.continues ? betas.x : 0.f, token + 1 < of.continues ? betas.y : 0.f);
  });
}
template <int kD>
__device__ __forceinline__ void LoadQueries(OfTokens& to, const ChannelWeights<kD>& of) {
  Each(to, [&](int token) { return make_float2(token < of.continues, token + 1 < of.continues); });
}

// What is left at a chunk's end of a state, [16, kCount * 2] of a warp, where it stays. Else it is anything,
// which the product that follows does not add to.
template <int kCount>
__device__ __forceinline__ void Fade(float (&state)[kCount], const Weights& of) {
#pragma unroll
  for (float& each : state) each *= of.keeps;
}
__device__ __forceinline__ bool Stays(const Weights& of) { return of.keeps != 0; }
// Where channels have gates, each may leave 0.
template <int kCount, int kD>
__device__ __forceinline__ void Fade(float (&state)[kCount], const ChannelWeights<kD>& of) {
#pragma unroll
  for (int i = 0; i < kCount; i += 4) {
    const float2 keeps = LoadTwo(of.keeps + 2 * i + ssm::ColumnOf(0));
#pragma unroll
    for (int j = 0; j < 4; j += 2) {
      state[i + j] = Weighed(keeps.x, state[i + j]);
      state[i + j + 1] = Weighed(keeps.y, state[i + j + 1]);
    }
  }
}
template <int kD>
__device__ __forceinline__ bool Stays(const ChannelWeights<kD>&) {
  return true;
}

// Each token's results `by` times; 0 where that is 0, whatever they are.
__device__ __forceinline__ void WeighTokens(Results& of, const OfTokens& by) {
#pragma unroll
  for (int i = 0; i < kChunk / 2; i += 2)
    of[i] = Weighed(by[i / 4].x, of[i]), of[i + 1] = Weighed(by[i / 4].y, of[i + 1]);
}
// What is left at the chunk's end of what tokens write, which of tokens of other runs is finite; with gates
// of channels keys have it.
template <bool kByChannel>
struct Leaves {
  OfTokens by;

  __device__ __forceinline__ explicit Leaves(const Weights& of) {
    Each(by, [&](int token) { return LoadTwo(of.left + token); });
  }
  __device__ __forceinline__ float2 operator()(int i, float2 written) const {
    return make_float2(by[i].x * written.x, by[i].y * written.y);
  }
};
template <>
struct Leaves<true> {
  template <int kD>
  __device__ __forceinline__ explicit Leaves(const ChannelWeights<kD>&) {}
  __device__ __forceinline__ float2 operator()(int, float2 written) const { return written; }
};

}  // namespace te::delta
