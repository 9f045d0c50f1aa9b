// Sums of a row on the tensor cores: what the forward kernels of norms count in.
#pragma once

#include <cfloat>

#include "base/fp8.cuh"
#include "base/reduce.cuh"

namespace te {

// Sum, and sum of squares, of numbers of 16 bits, on the tensor cores: products are exact, sums f32. The 8
// numbers of each lane are taken as its share of a matrix A [16, 16]; which of them stands where is of no
// account, for both sums run over all of A. A times ones has the sums of its rows. The upper 8 rows of A are
// the words 0 and 2 of each lane, and the same words are, as B [16, 8], their transpose: A times B has their
// squares on its diagonal. So with the lower 8 rows, words 1 and 3.
template <typename T>
class TensorSums {
 public:
  __device__ __forceinline__ void Add(const Vec<T, 8>& v, bool squares_alone) {
    constexpr bool kHalf = std::is_same_v<T, __half>;
    constexpr uint32_t kOnes = kHalf ? 0x3c003c00 : 0x3f803f80;
    if (!squares_alone) MultiplyAdd<kHalf>(rows_, v.words, kOnes, kOnes);
    MultiplyAdd<kHalf>(upper_, v.words, v.words[0], v.words[2]);
    MultiplyAdd<kHalf>(lower_, v.words, v.words[1], v.words[3]);
  }
  // The lane's share: to be summed over the warp.
  __device__ __forceinline__ float Sum() const { return Lane() % 4 == 0 ? rows_[0] + rows_[2] : 0.f; }
  __device__ __forceinline__ float Squares() const {
    const int row = Lane() / 4, column = Lane() % 4 * 2;
    return row == column ? upper_[0] + lower_[2] : row == column + 1 ? upper_[1] + lower_[3] : 0.f;
  }

 private:
  float rows_[4] = {}, upper_[4] = {}, lower_[4] = {};  // D of each
};

// mean (0 for RMSNorm) and rstd from the two sums of a row. False where the mean is as large as what varies
// around it, so that their difference cancels, and where there is an inf, a NaN, or no square in f32.
__device__ __forceinline__ bool StatsOfSums(float sum, float squares, float inv_h, float eps, bool rms,
                                            float2* stats) {
  const float mean = rms ? 0.f : sum * inv_h;
  *stats = make_float2(mean, rsqrtf((squares - mean * sum) * inv_h + eps));
  return squares <= FLT_MAX && (rms || mean * sum < 0.5f * squares);
}

}  // namespace te
