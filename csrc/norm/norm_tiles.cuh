// The two kinds of CTAs of norms whose results have columns: te_norm_fwd with data_t, te_norm_block_fwd, and
// the same of te_gated_norm. A
// column needs many rows at a time and a row's statistics need all of its columns, more than a multiprocessor
// holds. So one kernel does two things: CTAs of the first kind compute statistics of rows; CTAs of the second
// kind normalize tiles that the first have read shortly before and that are still in L2. Where the caller has
// the statistics there are none of the first kind.
#pragma once

#include <algorithm>

#include "base/divisor.cuh"
#include "base/tensor_sums.cuh"
#include "norm/norm.cuh"

namespace te {

// Statistics that nobody has computed yet: a NaN as no instruction makes it.
constexpr uint64_t kUnknown = ~uint64_t{0};

// The statistics of a norm, once they are there; and how they get there, by one thread.
__device__ __forceinline__ float2 AwaitStats(const uint64_t* found, int64_t norm) {
  uint64_t bits;
  while ((bits = static_cast<const volatile uint64_t*>(found)[norm]) == kUnknown) __nanosleep(20);
  return __builtin_bit_cast(float2, bits);
}
__device__ __forceinline__ void HandOver(uint64_t* found, int64_t norm, float2 stats) {
  __stcg(found + norm, __builtin_bit_cast(uint64_t, stats));  // at once: there is nothing to wait for
}

constexpr int kStatsVecs = 8;  // of a lane, on their way at once

// The tiles of [rows, h]: chunks of kRows rows, each in strips of columns. kCtas: on one multiprocessor.
template <int kRows, int kThreads, int kCtas>
struct NormTiles {
  static constexpr int kStatsRows = kThreads / 32;          // of a CTA: a warp has a row
  static constexpr int kStatsOfChunk = kRows / kStatsRows;  // CTAs for the statistics of the rows of a tile
  unsigned chunks, strips;
  unsigned ahead;              // chunks of statistics that come first
  Divisor by_strips, by_both;  // both: the CTAs of a chunk
  uint64_t* found;  // mean and rstd of each norm, kUnknown until then; nullptr where the caller has them

  unsigned ctas() const { return chunks * ((found ? kStatsOfChunk : 0) + strips); }

  // What a CTA does. First comes what is `ahead`, then with the tiles of each chunk the statistics of the
  // chunk that is so far ahead of it. Whoever waits for statistics waits for CTAs of lower index, which wait
  // for nobody and have started: CTAs start in the order of their indices (as cub::DeviceScan needs it, too).
  struct Task {
    bool stats;
    unsigned chunk, which;  // of the CTAs for statistics, or the strip
  };

  __device__ __forceinline__ Task TaskOf(unsigned index) const {
    if (!found) {
      const auto [chunk, which] = by_strips.Of(index);
      return {false, chunk, which};
    }
    const unsigned head = ahead * kStatsOfChunk, both = kStatsOfChunk + strips;
    if (index < head) return {true, index / kStatsOfChunk, index % kStatsOfChunk};
    index -= head;
    if (index >= (chunks - ahead) * both) {
      const Split last = by_strips.Of(index - (chunks - ahead) * both);
      return {false, chunks - ahead + last.quotient, last.rest};
    }
    const auto [chunk, which] = by_both.Of(index);
    if (which < kStatsOfChunk) return {true, chunk + ahead, which};
    return {false, chunk, which - kStatsOfChunk};
  }

  // All rows' statistics are unknown then, unless the caller has them (known). workspace: `found`.
  static Status Of(const char* op, cudaStream_t stream, int64_t rows, int64_t h, bool known, int64_t chunks,
                   int64_t strips, const Tensor& workspace, NormTiles* out) {
    TE_CHECK(chunks * (kStatsOfChunk + strips) <= INT32_MAX && h <= INT32_MAX,
             "%s: x [%ld, %ld] is too large", op, long(rows), long(h));
    Gpu gpu;
    TE_TRY(CurrentGpu(&gpu));
    const int64_t both = kStatsOfChunk + strips,
                  ahead = std::min(chunks, (kCtas * gpu.sms + both - 1) / both);
    *out = {unsigned(chunks),          unsigned(strips),        unsigned(ahead),
            Divisor(unsigned(strips)), Divisor(unsigned(both)), nullptr};
    if (known) return {};
    out->found = Data<uint64_t>(workspace);
    return Fill(stream, 0xff, {workspace});
  }
};

// f(vectors of 8, columns inside) for what a lane has of a row of h, kStatsVecs vectors at a time.
template <bool kVectors, typename T, typename F>
__device__ __forceinline__ void ForRow(const T* row, int h, F&& f) {
  for (int c = Lane() * 8; c - Lane() * 8 < h; c += kStatsVecs * 32 * 8) {  // whole warps
    Vec<T, 8> x[kStatsVecs];
#pragma unroll
    for (int k = 0; k < kStatsVecs; ++k)
      x[k] = LoadRow<kVectors, true>(row + c + k * 32 * 8, h - c - k * 32 * 8);
    f(x, h - c);
  }
}

// mean (0 for RMSNorm) and rstd, by a warp. Numbers of 16 bits the tensor cores add up, with their squares,
// in one reading. Where that is not good enough, and in f32, squares around the mean are summed in a second.
template <bool kVectors, typename T>
__device__ float2 WarpStats(const T* row, int h, float eps, bool rms) {
  const float inv_h = 1.f / h;
  float sum = 0.f, squares = 0.f;
  if constexpr (sizeof(T) == 2) {
    ForRow<kVectors>(row, h, [&](const Vec<T, 8>(&x)[kStatsVecs], int) {
      TensorSums<T> some;  // short sums: tensor cores round towards zero
#pragma unroll
      for (int k = 0; k < kStatsVecs; ++k) some.Add(x[k], rms);
      sum += some.Sum(), squares += some.Squares();
    });
    float2 stats;
    if (StatsOfSums(WarpSum(sum), WarpSum(squares), inv_h, eps, rms, &stats)) return stats;
  }
  float mean = 0.f;
  if (!rms) {
    sum = 0.f;
    ForRow<kVectors>(row, h, [&](const Vec<T, 8>(&x)[kStatsVecs], int) {
#pragma unroll
      for (int k = 0; k < kStatsVecs; ++k) {
        float some = 0.f;
#pragma unroll
        for (int i = 0; i < 8; ++i) some += x[k][i];
        sum += some;
      }
    });
    mean = WarpSum(sum) * inv_h;
  }
  const auto mean_square = [&](float factor) {
    float squares = 0.f;
    ForRow<kVectors>(row, h, [&](const Vec<T, 8>(&x)[kStatsVecs], int columns) {
#pragma unroll
      for (int k = 0; k < kStatsVecs; ++k) {
        float some = 0.f;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const float centered = fmaf(x[k][i], factor, -mean * factor);
          if (k * 32 * 8 + i < columns) some += centered * centered;
        }
        squares += some;
      }
    });
    return WarpSum(squares) * inv_h;
  };
  return make_float2(mean, Rstd(eps, mean_square));
}

// A row's statistics to where they are wanted, by a warp.
template <bool kVectors, typename T>
__device__ __forceinline__ void StoreStats(const NormFwdArgs& a, uint64_t* found, int64_t row) {
  const float2 stats = WarpStats<kVectors>(static_cast<const T*>(a.x) + row * a.h, a.h, a.eps, a.rms);
  if (Lane() > 0) return;
  HandOver(found, row, stats);
  WriteStats(a, row, stats.x, stats.y);
}

// gamma and beta of 8 columns, zeros beyond h.
template <bool kVectors>
__device__ __forceinline__ Affine<8> AffineOf(const NormFwdArgs& a, int64_t column) {
  Affine<8> out{};
  if constexpr (kVectors) {
    if (column < a.h) out = LoadAffine<8>(a, column);
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (column + i >= a.h) continue;
      const Affine<1> one = LoadAffine<1>(a, column + i);
      out.gamma[i] = one.gamma[0], out.beta[i] = one.beta[0];
    }
  }
  return out;
}

// What both kernels' sources have in common, of one thread: its 8 columns do not change. kRows: of a tile.
template <typename T, int kRows>
struct NormSource {
  using Type = T;
  struct Raw {
    Vec<T, 8> x;
    int row;  // of the tile
  };
  static constexpr int kSlots = 1;
  const NormFwdArgs& a;
  const T* x;             // a.x
  const uint64_t* found;  // of NormTiles
  float2* stats;          // [kRows], shared: of the rows of the tile, zeros beyond x
  Affine<8> affine;

  __device__ __forceinline__ float2 StatsOf(int64_t row) const {
    return found ? AwaitStats(found, row) : KnownStats(a, row);
  }

  // By all threads, behind their first loads: the statistics of the tile's `rows` rows from row0 on.
  __device__ __forceinline__ void Await(int64_t row0, int rows) const {
    for (int row = threadIdx.x; row < kRows; row += blockDim.x)
      stats[row] = row < rows ? StatsOf(row0 + row) : float2{};
    __syncthreads();
  }

  __device__ __forceinline__ void Values(const Raw& raw, float (&f)[1][8]) const {
    const float2 of_row = stats[raw.row];
#pragma unroll
    for (int j = 0; j < 8; ++j) f[0][j] = (raw.x[j] - of_row.x) * of_row.y * affine.gamma[j] + affine.beta[j];
  }
};

}  // namespace te
