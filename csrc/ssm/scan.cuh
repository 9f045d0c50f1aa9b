// The state of a head in registers: bands of 16 channels, the states of each channel spread over warps.
#pragma once

#include "ssm/tiles.cuh"

namespace te::ssm {

// f32 [kP, kN], of a CTA. A warp has 16 rows and kColumns columns.
template <int kN, int kP>
struct State {
  static constexpr int kBands = kP / 16, kColumns = kN / (kWarps / kBands);
  float of[kColumns / 8][4];

  __device__ __forceinline__ static int Row() { return WarpIndex() % kBands * 16; }
  __device__ __forceinline__ static int Column() { return WarpIndex() / kBands * kColumns; }

  // of [p, n] at `from`, the state's first row; zeros outside and without `from`.
  __device__ __forceinline__ void Load(const float* from, int p, int n) {
    Each([&](int i, int j, int row, int column) {
      const bool inside = from && row < p && column < n;
      const float2 two =
          inside ? *reinterpret_cast<const float2*>(from + int64_t(row) * n + column) : float2{};
      of[i][j] = two.x, of[i][j + 1] = two.y;
    });
  }
  template <typename T>
  __device__ __forceinline__ void Store(T* to, int p, int n) const {
    Each([&](int i, int j, int row, int column) {
      if (row < p && column < n)
        te::Store(to + int64_t(row) * n + column, Round<T, 2>({of[i][j], of[i][j + 1]}));
    });
  }
  // Rounded, as an operand.
  __device__ __forceinline__ void Put(Tile<kP, kN>& tile) const {
    Each([&](int i, int j, int row, int column) {
      *reinterpret_cast<uint32_t*>(tile.At(row, column)) = Pack(of[i][j], of[i][j + 1]);
    });
  }

  // What is left of it, `keeps` times, or, with kRuns, nothing; and x^T B of the tokens of a chunk, each
  // `weight(token)` times, with kRuns if `is_added(token)`: B of the others is cleared, for 0 times an inf
  // would stay. All threads of the CTA call it, behind a barrier.
  template <bool kRuns, typename Weight, typename IsAdded>
  __device__ __forceinline__ void Add(bool stays, float keeps, Tile<kChunk, kP>& x, Tile<kChunk, kN>& B,
                                      Weight&& weight, IsAdded&& is_added) {
    if constexpr (kRuns) {
      B.Keep(is_added);
      __syncthreads();
    }
#pragma unroll
    for (auto& four : of)
#pragma unroll
      for (float& each : four) each = !kRuns || stays ? each * keeps : 0.f;
#pragma unroll
    for (int k = 0; k < kChunk; k += 16) {
      uint32_t a[4];
      x.TransposedA(a, k, Row());
      WeighTokens<kRuns>(a, k, weight, is_added);
#pragma unroll
      for (int i = 0; i < kColumns / 16; ++i)
        Multiply2(of[2 * i], of[2 * i + 1], a, [&](auto& b) { B.B(b, k, Column() + 16 * i); });
    }
  }

 private:
  // Each two neighbours of the thread: where they are in `of`, their row and the first one's column.
  template <typename Fn>
  __device__ __forceinline__ static void Each(Fn&& fn) {
#pragma unroll
    for (int i = 0; i < kColumns / 8; ++i)
#pragma unroll
      for (int j = 0; j < 4; j += 2) fn(i, j, Row() + RowOf(j), Column() + 8 * i + ColumnOf(j));
  }
};

}  // namespace te::ssm
