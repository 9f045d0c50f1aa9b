// The inverse of what the tokens of a chunk say of each other, and what else both gates' chunks have in
// common.
#pragma once

#include "delta/delta.cuh"

namespace te::delta {

constexpr int kPitch = kChunk + 4;                      // of f32 [kChunk, kChunk] in shared memory
constexpr int kHalves = kChunk / 2 * (kChunk / 2 + 4);  // numbers that Merge needs meanwhile
constexpr float kLog2E = 1.44269504f;
// exp2 of it is 0; larger ones would push the small ones behind them out of the sum.
constexpr float kLeast = -160;

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
  constexpr float kEpsilon = 1e-6f;
  return rsqrtf(sum + kEpsilon);
}

// [kSize / 16, 4] of left right, matrices [kSize, kSize] of which the thread has some rows and columns.
template <int kSize>
__device__ __forceinline__ void MultiplySquares(float (&out)[kSize / 16][4], const float* left,
                                                int left_pitch, const float* right, int right_pitch, int row,
                                                int column) {
#pragma unroll 1
  for (int j = 0; j < kSize; j += 4) {
    float4 of_right[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      of_right[i] = *reinterpret_cast<const float4*>(right + (j + i) * right_pitch + column);
#pragma unroll
    for (int i = 0; i < kSize / 16; ++i) {
      const float4 four = *reinterpret_cast<const float4*>(left + (row + i) * left_pitch + j);
      const float of_left[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        out[i][0] += of_left[n] * of_right[n].x, out[i][1] += of_left[n] * of_right[n].y;
        out[i][2] += of_left[n] * of_right[n].z, out[i][3] += of_left[n] * of_right[n].w;
      }
    }
  }
}

// The inverse of 1 + system, of the warp's block [16, 16] on the diagonal: a lane has a column, and
// substitutes. It is 0 above the diagonal, as is the block right of it in a square of two.
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
      const auto less = [&](float factor, int k) { x[i] -= k < column ? 0.f : factor * x[k]; };
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
// is that of the system, and B and C are the inverses right and above.
template <int kSize>
__device__ __forceinline__ void Merge(float* system, float* halves) {
  constexpr int kPerSquare = 4 * kSize, kHalfPitch = kSize + 4, kCount = kSize / 16;
  const int square = threadIdx.x / kPerSquare, index = threadIdx.x % kPerSquare;
  const int column = index % (kSize / 4) * 4, at = index / (kSize / 4) * kCount;
  float* const above = system + square * 2 * kSize * (kPitch + 1);
  float* const below = above + kSize * kPitch;
  float* const half = halves + square * kSize * kHalfPitch;
  const auto store = [&](float* to, int pitch, const float (&of)[kCount][4], float sign) {
#pragma unroll
    for (int i = 0; i < kCount; ++i)
      *reinterpret_cast<float4*>(to + (at + i) * pitch + column) =
          make_float4(sign * of[i][0], sign * of[i][1], sign * of[i][2], sign * of[i][3]);
  };
  float first[kCount][4] = {}, second[kCount][4] = {};
  MultiplySquares<kSize>(first, below, kPitch, above, kPitch, at, column);
  store(half, kHalfPitch, first, 1.f);
  __syncthreads();
  MultiplySquares<kSize>(second, below + kSize, kPitch, half, kHalfPitch, at, column);
  store(below, kPitch, second, -1.f);
  __syncthreads();
}

}  // namespace te::delta
