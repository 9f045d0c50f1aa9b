// The inverse of what the tokens of a chunk say of each other, and what else both gates' chunks have in
// common.
#pragma once

#include "delta/delta.cuh"

namespace te::delta {

constexpr int kPitch = kChunk + 4;  // of f32 [kChunk, kChunk] in shared memory
constexpr float kLog2E = 1.44269504f;
// exp2 of it is 0; larger ones would push the small ones behind them out of the sum.
constexpr float kLeast = -160;

constexpr float kLengthEpsilon = 1e-6f;  // added to a length's square

// 1 over a length, by its square.
__device__ __forceinline__ float InverseLength(float square) { return rsqrtf(square + kLengthEpsilon); }
// 1 over the length of a token, a row of the tile.
template <int kD, typename Layout>
__device__ __forceinline__ float InverseLength(ssm::Tile<kChunk, kD, Layout>& tile, int token) {
  float sum = 0;
#pragma unroll 4
  for (int i = 0; i < kD; i += 8) {
    const uint4 eight = *reinterpret_cast<const uint4*>(tile.At(token, i));
    for (uint32_t word : {eight.x, eight.y, eight.z, eight.w}) {
      const float2 two = ssm::Unpack(word);
      sum += two.x * two.x + two.y * two.y;
    }
  }
  return InverseLength(sum);
}

// Two neighbours, each as the sum of two numbers of bf16, which has 16 bits of it.
struct Halves {
  uint32_t high, low;

  __device__ __forceinline__ Halves(float x, float y) : high(ssm::Pack(x, y)) {
    const float2 of = ssm::Unpack(high);
    low = ssm::Pack(x - of.x, y - of.y);
  }
};
// A left factor [16, 16], and two neighbours of a right one's 16 rows, [16, 8].
struct LeftHalves {
  uint32_t high[4], low[4];

  __device__ __forceinline__ void Set(int word, const Halves& of) {
    high[word] = of.high, low[word] = of.low;
  }
};
// d += left right, but for the product of both lows.
__device__ __forceinline__ void MultiplyHalves(float (&d)[4], const LeftHalves& left, const Halves& upper,
                                               const Halves& lower) {
  MultiplyAdd<false>(d, left.low, upper.high, lower.high);
  MultiplyAdd<false>(d, left.high, upper.low, lower.low);
  MultiplyAdd<false>(d, left.high, upper.high, lower.high);
}

// The inverse of 1 + system, of the warp's block [16, 16] on the diagonal: a lane has a column, and
// substitutes. It is 0 above the diagonal, as is the block right of it in a square of two. What the system
// has on its diagonal and above is not read.
template <bool kRuns>
__device__ __forceinline__ void InvertBlock(float* system) {
  const int band = kBand * WarpIndex();
  float* const block = system + band * kPitch + band;
  const int column = Lane() % 16;
  float x[16];
#pragma unroll
  for (int i = 0; i < 16; ++i) x[i] = i == column ? 1.f : 0.f;
#pragma unroll
  for (int j = 0; j < 16; j += 4)
#pragma unroll
    for (int i = j + 1; i < 16; ++i) {
      const float4 four = *reinterpret_cast<const float4*>(block + i * kPitch + j);
      // Left of the column x is 0, but what is not finite there, of a run before, would not be after.
      const auto less = [&](float factor, int k) {
        x[i] = fmaf(kRuns && k < column ? 0.f : -factor, x[k], x[i]);
      };
      less(four.x, j);
      if (j + 1 < i) less(four.y, j + 1);
      if (j + 2 < i) less(four.z, j + 2);
      if (j + 3 < i) less(four.w, j + 3);
    }
  __syncwarp();
  if (Lane() >= 16 && WarpIndex() % 2 > 0) return;
#pragma unroll
  for (int i = 0; i < 16; ++i) block[i * kPitch + Lane()] = Lane() < 16 ? x[i] : 0.f;
}

// Of squares of 2 kSize on the diagonal, whose halves there are inverted, the half below: -B (A C), where A
// is that of the system, and B and C are the inverses right and above. The transposes are multiplied, so that
// (A C)^T is a left factor as it lies in registers. A warp has 16 columns and half of the rows.
template <int kSize>
__device__ __forceinline__ void Merge(float* system) {
  constexpr int kPerSquare = kSize / 8, kHalf = kSize / 2;
  const int warp = WarpIndex() % kPerSquare, band = warp / 2, first = warp % 2 * kHalf;
  float* const above = system + WarpIndex() / kPerSquare * 2 * kSize * (kPitch + 1);
  float* const below = above + kSize * kPitch;
  const int line = Lane() / 4, two = Lane() % 4 * 2, column = 16 * band + line;
  float both[kSize / 8][4] = {}, out[kHalf / 8][4] = {};
  const auto right = [&](const float* row) {
    const float2 of = *reinterpret_cast<const float2*>(row);
    return Halves(of.x, of.y);
  };
#pragma unroll
  for (int j = 0; j < kSize; j += 16) {
    if (j < 16 * band) continue;  // C is 0 there
    LeftHalves left;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* const of = above + (j + two + i / 2 * 8) * kPitch + column + i % 2 * 8;
      left.Set(i, Halves(of[0], of[kPitch]));
    }
#pragma unroll
    for (int t = 0; t < kSize / 8; ++t) {
      const float* const row = below + (8 * t + line) * kPitch + j + two;
      MultiplyHalves(both[t], left, right(row), right(row + 8));
    }
  }
#pragma unroll
  for (int k = 0; k < kSize; k += 16) {
    if (k >= first + (kHalf + 15) / 16 * 16) continue;  // B is 0 there
    LeftHalves left;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* const of = both[k / 8 + i / 2] + i % 2 * 2;
      left.Set(i, Halves(of[0], of[1]));
    }
#pragma unroll
    for (int t = 0; t < kHalf / 8; ++t) {
      const float* const row = below + kSize + (first + 8 * t + line) * kPitch + k + two;
      MultiplyHalves(out[t], left, right(row), right(row + 8));
    }
  }
  __syncthreads();  // none reads A any more
#pragma unroll
  for (int t = 0; t < kHalf / 8; ++t)
#pragma unroll
    for (int i = 0; i < 4; ++i)
      below[(first + 8 * t + two + i % 2) * kPitch + column + i / 2 * 8] = -out[t][i];
  __syncthreads();
}

// Eight neighbours of a row of the inverse, rounded: 0 of tokens of other runs and, where the system is
// finite, right of the diagonal.
template <typename Runs>
__device__ __forceinline__ uint4 LoadInverse(const float* inverse, const Runs& runs, int row, int column) {
  if (column > row) return {};
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 8; i += 4) {
    const float4 four = *reinterpret_cast<const float4*>(inverse + row * kPitch + column + i);
    const auto of = [&](int j, float x) { return runs.AreOne(column + i + j, row) ? x : 0.f; };
    words[i / 2] = ssm::Pack(of(0, four.x), of(1, four.y));
    words[i / 2 + 1] = ssm::Pack(of(2, four.z), of(3, four.w));
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

}  // namespace te::delta
