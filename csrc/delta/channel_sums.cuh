// Gates of channels within a chunk of tokens. Where they leave enough, what is left between two tokens is
// split in the chunk's middle. Else no sum of logarithms is the difference of two others but within a band of
// 16 tokens, and between bands what is left is split where a band begins, so that both factors are at most 1.
#pragma once

#include "delta/inverse.cuh"

namespace te::delta {

constexpr int kBands = kChunk / kBand;

// Of a band's tokens: the most that a channel's gates may be, but for the sign, for products that are split
// where the band begins. Their one factor is up to 2^kMostSplit then, so that neither is beyond f32.
constexpr float kMostSplit = 96;
// Of each half of a chunk's tokens: the same for products that are split in the chunk's middle. A gradient
// may be small, and one factor is down to 2^-kMostOfHalf.
constexpr float kMostOfHalf = 72;

// Whether it is so of none of the 16 lanes in the lane's half of the warp.
__device__ __forceinline__ bool IsOfNone(bool is_so) {
  const unsigned shift = Lane() / 16 * 16;
  return (WarpSumOfInts(unsigned(is_so) << shift) >> shift & 0xffff) == 0;
}

template <int kD>
struct ChannelSums {
  static constexpr int kPitch = kD + 8;  // rows of an operand lie in different banks
  // Of the logarithms to base 2 of what is left, from where a token's band begins up to the token.
  alignas(16) float of[kChunk * kPitch];
  int spoiled[kChunk];  // whether a gate of the token is no number below inf

  __device__ __forceinline__ const float* At(int token, int channel) const {
    return of + token * kPitch + channel;
  }
  __device__ __forceinline__ float2 Two(int token, int channel) const {
    return *reinterpret_cast<const float2*>(At(token, channel));
  }
  // The sum over a band's tokens.
  __device__ __forceinline__ float2 Band(int band, int channel) const {
    return Two(band * kBand + kBand - 1, channel);
  }
  // Of 16 channels of a band, whether products may be split. All lanes of a warp call it.
  __device__ __forceinline__ bool Splits(int band, int channel) const {
    const float sum = *At(band * kBand + kBand - 1, channel + Lane() % 16);
    return WarpMax(unsigned(-sum > kMostSplit)) == 0;
  }

  // gates: of the chunk's first token, of which `rows` are there, `stride` apart, each of `channels`. All kBy
  // threads of the CTA call it, and meet at barriers before, where `spoiled` is 0, and behind.
  template <int kBy>
  __device__ __forceinline__ void Set(const float* gates, int64_t stride, int rows, int channels) {
    constexpr int kParts = kBy / kD;  // threads of a channel
    static_assert(kBy % kD == 0 && kBands % kParts == 0);
    constexpr int kOwn = kBands / kParts;  // bands
    const int channel = threadIdx.x % kD, first = threadIdx.x / kD * kOwn * kBand;
    float gate[kOwn * kBand];  // all on their way at the same time
    const bool inside = channel < channels;
    const float* from = gates + int64_t(first) * stride + channel;
#pragma unroll
    for (int i = 0; i < kOwn * kBand; ++i, from += stride) gate[i] = inside && first + i < rows ? *from : 0.f;
    bool are_numbers = true;
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kOwn * kBand; ++i) {
      are_numbers = are_numbers && gate[i] < INFINITY;
      sum = (i % kBand ? sum : 0.f) + fmaxf(gate[i] * kLog2E, kLeast);
      of[(first + i) * kPitch + channel] = sum;
    }
    if (are_numbers) return;
    // A NaN goes to beta, for in the sums it would be of later runs, too.
#pragma unroll
    for (int i = 0; i < kOwn * kBand; ++i) {
      const bool is_number = gate[i] < INFINITY;
      if (!is_number) spoiled[first + i] = 1;
      sum = (i % kBand ? sum : 0.f) + (is_number ? fmaxf(gate[i] * kLog2E, kLeast) : kLeast);
      of[(first + i) * kPitch + channel] = sum;
    }
  }
};

// x, words of an operand's two neighbours in 16 tokens from `token` on and 16 channels from `channel` on:
// each number times exp2 of `log(token, channel)`, of two channels. As kLeft has them Tile::A, else
// Tile::TransposedB.
template <bool kLeft, typename Log>
__device__ __forceinline__ void WeighChannels(uint32_t (&x)[4], int token, int channel, Log&& log) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int down = kLeft ? i % 2 : i / 2, right = kLeft ? i / 2 : i % 2;
    const float2 by = log(token + Lane() / 4 + 8 * down, channel + ssm::ColumnOf(0) + 8 * right);
    const float2 two = ssm::Unpack(x[i]);
    x[i] = ssm::Pack(two.x * Exp2(by.x), two.y * Exp2(by.y));
  }
}

}  // namespace te::delta
