// te_norm_fwd with data_t. A column of data_t needs many rows at a time and a row's statistics need all of
// its columns, more than a multiprocessor holds. So one kernel does two things: CTAs of the first kind
// compute statistics of rows, those of the second normalize tiles of 256 rows x 64 columns (tile.cuh) that
// the first have read shortly before and that are still in L2. Bytes per element of bf16: 2 read from memory,
// 2 more from L2, 2 written (data, data_t), and 2 more for y.

#include <algorithm>

#include "norm.cuh"
#include "tensor_sums.cuh"
#include "tile.cuh"

namespace te {
namespace {

constexpr int kStatsRows = kTileThreads / 32;          // of a CTA: a warp has a row
constexpr int kStatsOfChunk = kTileRows / kStatsRows;  // CTAs for the statistics of the rows of a tile
constexpr int kCtas = 3;                               // on one multiprocessor
constexpr int kVecs = 8;                               // of a lane, on their way at once

// Statistics that nobody has computed yet: a NaN as no instruction makes it.
constexpr uint64_t kUnknown = ~uint64_t{0};

// What a CTA does. `ahead` chunks of statistics come first, then with the tiles of each chunk the statistics
// of the chunk that is so far ahead of it. Whoever waits for statistics waits for CTAs of lower index, which
// wait for nobody and have started: CTAs start in the order of their indices (as cub::DeviceScan needs it,
// too).
struct Task {
  bool stats;
  unsigned chunk, part;  // part: of the statistics, or the strip
};

__device__ __forceinline__ Task TaskOf(unsigned index, unsigned chunks, unsigned strips, unsigned ahead) {
  const unsigned head = ahead * kStatsOfChunk, both = kStatsOfChunk + strips;
  if (index < head) return {true, index / kStatsOfChunk, index % kStatsOfChunk};
  index -= head;
  if (index >= (chunks - ahead) * both) {
    index -= (chunks - ahead) * both;
    return {false, chunks - ahead + index / strips, index % strips};
  }
  const unsigned chunk = index / both, part = index % both;
  if (part < kStatsOfChunk) return {true, chunk + ahead, part};
  return {false, chunk, part - kStatsOfChunk};
}

// 8 neighbours of a row, zeros beyond `columns`; they stay in L2.
template <bool kVectors, typename T>
__device__ __forceinline__ Vec<T, 8> LoadKept(const T* p, int columns) {
  Vec<T, 8> out{};
  if constexpr (kVectors) {
    if (columns > 0) out = Load<8>(p);
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if (i < columns) out.Set(i, p[i]);
  }
  return out;
}

// f(vectors of 8, columns inside) for the lane's parts of a row of h, kVecs vectors at a time.
template <bool kVectors, typename T, typename F>
__device__ __forceinline__ void ForRow(const T* row, int h, F&& f) {
  for (int c = Lane() * 8; c - Lane() * 8 < h; c += kVecs * 32 * 8) {  // whole warps
    Vec<T, 8> x[kVecs];
#pragma unroll
    for (int k = 0; k < kVecs; ++k) x[k] = LoadKept<kVectors>(row + c + k * 32 * 8, h - c - k * 32 * 8);
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
    ForRow<kVectors>(row, h, [&](const Vec<T, 8>(&x)[kVecs], int) {
      TensorSums<T> part;  // short sums: tensor cores round towards zero
#pragma unroll
      for (int k = 0; k < kVecs; ++k) part.Add(x[k], rms);
      sum += part.Sum(), squares += part.Squares();
    });
    float2 stats;
    if (StatsOfSums(WarpSum(sum), WarpSum(squares), inv_h, eps, rms, &stats)) return stats;
  }
  float mean = 0.f;
  if (!rms) {
    sum = 0.f;
    ForRow<kVectors>(row, h, [&](const Vec<T, 8>(&x)[kVecs], int) {
#pragma unroll
      for (int k = 0; k < kVecs; ++k) {
        float part = 0.f;
#pragma unroll
        for (int i = 0; i < 8; ++i) part += x[k][i];
        sum += part;
      }
    });
    mean = WarpSum(sum) * inv_h;
  }
  squares = 0.f;
  ForRow<kVectors>(row, h, [&](const Vec<T, 8>(&x)[kVecs], int columns) {
#pragma unroll
    for (int k = 0; k < kVecs; ++k) {
      float part = 0.f;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float centered = x[k][i] - mean;
        if (k * 32 * 8 + i < columns) part += centered * centered;
      }
      squares += part;
    }
  });
  return make_float2(mean, rsqrtf(WarpSum(squares) * inv_h + eps));
}

// What tile.cuh asks of a source, of one thread: its 8 columns do not change.
template <typename T>
struct NormSource {
  using Type = T;
  struct Raw {
    Vec<T, 8> x;
    int row;  // of the tile
  };
  static constexpr int kSlots = 1, kWindow = sizeof(T) == 2 ? 8 : 4;
  static constexpr bool kSums = false;
  const T* x;  // [rows, h]
  int64_t h, row0, rows;
  const uint64_t* known;  // [rows]: mean and rstd, kUnknown until they are
  float2* stats;          // [kTileRows], shared: of the rows from row0 on
  Affine<8> affine;

  __device__ __forceinline__ void Await() const {
    static_assert(kTileThreads == kTileRows);
    const int64_t row = row0 + threadIdx.x;
    uint64_t found = 0;
    if (row < rows)
      while ((found = static_cast<const volatile uint64_t*>(known)[row]) == kUnknown) __nanosleep(20);
    stats[threadIdx.x] = __builtin_bit_cast(float2, found);
    __syncthreads();
  }

  template <bool kVectors>
  __device__ __forceinline__ Raw Load(int64_t row, int64_t column, int columns) const {
    return {LoadRow<kVectors>(x + row * h + column, columns), int(row - row0)};
  }

  __device__ __forceinline__ void Values(const Raw& raw, float (&f)[1][8]) const {
    const float2 of_row = stats[raw.row];
#pragma unroll
    for (int j = 0; j < 8; ++j) f[0][j] = (raw.x[j] - of_row.x) * of_row.y * affine.gamma[j] + affine.beta[j];
  }
};

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

template <typename T, bool kVectors>
__global__ void __launch_bounds__(kTileThreads, kCtas)
    NormFwdTiles(const NormFwdArgs a, const TileResults<T> results, uint64_t* known, unsigned ahead) {
  __shared__ float2 stats[kTileRows];
  const Task task = TaskOf(blockIdx.x, results.chunks, results.strips, ahead);
  const int64_t row0 = int64_t{task.chunk} * kTileRows;
  const T* x = static_cast<const T*>(a.x);
  if (task.stats) {
    const int64_t row = row0 + task.part * kStatsRows + WarpIndex();
    if (row < a.rows) {
      const float2 found = WarpStats<kVectors>(x + row * a.h, a.h, a.eps, a.rms);
      if (Lane() > 0) return;
      __stcg(known + row, __builtin_bit_cast(uint64_t, found));  // at once: there is nothing to wait for
      a.rstd[row] = found.y;
      if (a.mean) a.mean[row] = found.x;
    }
    return;
  }
  const int64_t column = int64_t{task.part} * kTileColumns + threadIdx.x % kGroups * 8;
  const NormSource<T> source{x, a.h, row0, a.rows, known, stats, AffineOf<kVectors>(a, column)};
  const unsigned tiles = results.chunks * results.strips, tile = task.chunk * results.strips + task.part;
  WriteTile<kVectors>(source, results, tile);
  if (results.amax && threadIdx.x == 0)
    for (int64_t i = int64_t{tile} + tiles; i < AmaxPlaces(a.rows, a.h); i += tiles) results.amax[i] = 0.f;
}

}  // namespace

ffi::Error LaunchNormFwdTransposed(cudaStream_t stream, const NormFwdArgs& args, ffi::DataType x_type,
                                   ffi::DataType type, const Arg& workspace) {
  const bool vectors = args.h % 8 == 0 && Aligned(args.x) && Aligned(args.y) && Aligned(args.data) &&
                       Aligned(args.gamma.data) && Aligned(args.beta.data);
  TE_CHECK(Aligned(args.data_t), "te_norm_fwd: data_t is not aligned to 16 bytes");
  const int64_t chunks = (args.rows + kTileRows - 1) / kTileRows,
                strips = (args.h + kTileColumns - 1) / kTileColumns,
                tasks = chunks * (kStatsOfChunk + strips);
  TE_CHECK(int64_t(workspace.size_bytes()) == 8 * args.rows,
           "te_norm_fwd: workspace is %s, expected %ld bytes", Shape(workspace).c_str(), long(8 * args.rows));
  TE_CHECK(tasks <= INT32_MAX && args.h <= INT32_MAX, "te_norm_fwd: x [%ld, %ld] is too large",
           long(args.rows), long(args.h));
  Gpu gpu;
  TE_TRY(CurrentGpu(&gpu));
  const int64_t ahead =
      std::min(chunks, (kCtas * gpu.sms + kStatsOfChunk + strips - 1) / (kStatsOfChunk + strips));
  auto* known = Data<uint64_t>(workspace);
  TE_CUDA(cudaMemsetAsync(known, 0xff, workspace.size_bytes(), stream));
  return DispatchFloat(x_type, [&]<typename T>() -> ffi::Error {
    const TileResults<T> results{args.scale,         static_cast<T*>(args.y),
                                 args.data,          args.data_t,
                                 args.amax,          nullptr,
                                 args.rows,          args.h,
                                 unsigned(chunks),   unsigned(strips),
                                 type == ffi::F8E5M2};
    const auto kernel = vectors ? NormFwdTiles<T, true> : NormFwdTiles<T, false>;
    kernel<<<tasks, kTileThreads, 0, stream>>>(args, results, known, ahead);
    TE_LAUNCHED();
  });
}

}  // namespace te
