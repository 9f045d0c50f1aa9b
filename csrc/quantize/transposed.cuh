// A tile of FP8 on its way from rows to columns, in shared memory.
#pragma once

#include "base/fp8.cuh"

namespace te {

// kColumns columns of kRows / 4 words of 4 rows. The xor spreads the groups of 8 columns that a warp writes
// at once over the banks. It moves words by fours, so 16-byte reads stay in one piece.
template <int kRows, int kColumns>
struct Transposed {
  static constexpr int kOfColumn = kRows / 4;
  alignas(16) uint32_t words[kOfColumn * kColumns];

  static __device__ __forceinline__ int Word(int column, int word) {
    const int moved = kColumns / 2 > kOfColumn ? column / 8 * 4 % kOfColumn : column / 8 * 4;
    return column * kOfColumn + (word ^ moved);
  }

  // 4 rows of 8 columns, of which each has a word for the columns 0..3 and one for 4..7.
  __device__ __forceinline__ void Store(uint32_t (&q)[2][4], int column, int word) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      Transpose4x4(q[half][0], q[half][1], q[half][2], q[half][3]);
#pragma unroll
      for (int j = 0; j < 4; ++j) words[Word(column + half * 4 + j, word)] = q[half][j];
    }
  }

  // 16 rows of a column, from a multiple of 16 on.
  __device__ __forceinline__ const uint4& Rows16(int column, int row) const {
    return *reinterpret_cast<const uint4*>(&words[Word(column, row / 4)]);
  }
  __device__ __forceinline__ uint8_t Byte(int row, int column) const {
    return words[Word(column, row / 4)] >> row % 4 * 8;
  }

  // To columns of `stride` bytes, by all kThreads threads, 16 of them or 8 for a column; byte by byte where
  // these are not aligned to 16 (vectors).
  template <int kThreads, typename Stride>
  __device__ __forceinline__ void StoreColumns(uint8_t* data_t, Stride stride, int rows, int columns,
                                               bool vectors) const {
    if (vectors) {
#pragma unroll
      for (int i = threadIdx.x; i < kOfColumn * kColumns / 4; i += kThreads) {
        const int c = i / (kRows / 16), r = i % (kRows / 16) * 16;
        if (r < rows && c < columns)
          __stcs(reinterpret_cast<uint4*>(data_t + uint64_t{unsigned(c)} * stride + r), Rows16(c, r));
      }
      return;
    }
    for (int i = threadIdx.x; i < kRows * kColumns; i += kThreads) {
      const int c = i / kRows, r = i % kRows;
      if (r < rows && c < columns) data_t[uint64_t{unsigned(c)} * stride + r] = Byte(r, c);
    }
  }
};

}  // namespace te
