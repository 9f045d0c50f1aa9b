// te_norm_fwd with data_t: 32 rows at a time, for the columns of data_t come in pieces of 32 bytes, a sector
// of L2. 32 rows of x do not fit into one multiprocessor (h = 8192: 512 KiB of bf16), nor those of all
// multiprocessors into L2, and read twice from memory x would cost half as much again. So a cluster of up to
// 8 CTAs has the 32 rows, each a slice of columns in shared memory, and they exchange the statistics of their
// slices. Bytes per element of bf16: 2 read, 2 written (data, data_t), and 2 more for y.

#include <cooperative_groups.h>

#include <algorithm>

#include "norm.cuh"
#include "reduce.cuh"

namespace te {
namespace {

namespace cg = cooperative_groups;

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kRows = 32;                    // of a CTA
constexpr int kRowsOfWarp = kRows / kWarps;  // whose moments a warp computes
constexpr int kWarpColumns = 64;             // of the 32 rows that a warp writes at once
// Columns of a slice at most: its 64 KiB let three CTAs share a multiprocessor, so that one loads, one
// computes and one writes.
template <typename T>
constexpr int kMostWidth = (64 << 10) / kRows / sizeof(T);
constexpr int kMostCtas = 8;  // of a portable cluster; kRows of them are the CTA's threads
static_assert(kRows * kMostCtas == kThreads && kRowsOfWarp == 4);

// Count, mean and sum of squares around the mean of some numbers; RMSNorm takes 0 for the mean.
struct Moments {
  float count, mean, squares;
};

// Chan, Golub, LeVeque 1979: the moments of two sets together, without cancellation.
__device__ __forceinline__ Moments Merge(const Moments& a, const Moments& b) {
  const float count = a.count + b.count, delta = b.mean - a.mean;
  if (count == 0.f) return a;
  const float part = b.count / count;
  return {count, a.mean + delta * part, a.squares + b.squares + delta * delta * a.count * part};
}

// Zeros outside of x; the warp's rows of x[row0.., column0..] -> tile [kRows, width]. On their way until
// WaitForPrefetch.
template <typename T, bool kVectors>
__device__ void LoadTile(const NormFwdArgs& a, int64_t row0, int64_t column0, int width, T* tile) {
  const int64_t first = row0 + WarpIndex() * kRowsOfWarp;
  const T* x = static_cast<const T*>(a.x) + first * a.h + column0;
  tile += WarpIndex() * kRowsOfWarp * width;
  const int columns = min(a.h - column0, int64_t{width});
  const uint32_t at = SharedAddress(tile);
#pragma unroll
  for (int r = 0; r < kRowsOfWarp; ++r)
    for (int c = Lane() * (kVectors ? 8 : 1); c < width; c += 32 * (kVectors ? 8 : 1)) {
      const bool inside = first + r < a.rows && c < columns;
      if constexpr (kVectors) {
        const uint32_t to = at + (r * width + c) * sizeof(T);
        Prefetch8(to, x + r * a.h + c, inside);
        if (!inside) Store(tile + r * width + c, Vec<T, 8>{});
      } else {
        tile[r * width + c] = inside ? x[r * a.h + c] : T(0.f);
      }
    }
  CommitPrefetch();
}

// gamma and beta of the slice, zeros beyond h.
template <bool kVectors>
__device__ void StageAffine(const NormFwdArgs& a, int64_t column0, int width, uint32_t staged) {
  for (int c = threadIdx.x * 8; c < width; c += kThreads * 8) {
    Affine<8> affine{};
    if (kVectors) {
      if (column0 + c < a.h) affine = LoadAffine<8>(a, column0 + c);
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (column0 + c + i >= a.h) continue;
        const Affine<1> one = LoadAffine<1>(a, column0 + c + i);
        affine.gamma[i] = one.gamma[0], affine.beta[i] = one.beta[0];
      }
    }
    Stage8(staged, width, c, affine.gamma), Stage8(staged + width * 4, width, c, affine.beta);
  }
}

// Sums of four values over a warp, value i in the lanes 8 i .. 8 i + 7.
__device__ __forceinline__ float WarpSum4(const float (&v)[4]) {
  const bool high = Lane() & 16, odd = Lane() & 8;
  const float a = (high ? v[2] : v[0]) + __shfl_xor_sync(~0u, high ? v[0] : v[2], 16);
  const float b = (high ? v[3] : v[1]) + __shfl_xor_sync(~0u, high ? v[1] : v[3], 16);
  float sum = (odd ? b : a) + __shfl_xor_sync(~0u, odd ? a : b, 8);
#pragma unroll
  for (int other = 4; other > 0; other /= 2) sum += __shfl_xor_sync(~0u, sum, other);
  return sum;
}

// The moments of the warp's four rows of the tile, of which `columns` are inside. Row i is in the lanes from
// 8 i on.
template <typename T, bool kVectors>
__device__ Moments RowMoments(const T* rows, int width, int columns, bool rms) {
  constexpr int kVecs = kMostWidth<T> / (32 * 8);
  if (columns <= 0) return {0.f, 0.f, 0.f};
  const float inverse = 1.f / columns;
  float mean = 0.f, squares[4];
#pragma unroll
  for (int row = 0; row < 4; ++row) {
    const uint32_t at = SharedAddress(rows + row * width) + Lane() * 8 * sizeof(T);
    float x[kVecs][8];
    float sum = 0.f;
#pragma unroll
    for (int k = 0; k < kVecs; ++k) {
      Vec<T, 8> packed{};
      if ((k * 32 + Lane()) * 8 < columns) packed = LoadShared<T, 8>(at + k * 32 * 8 * sizeof(T));
      float part = 0.f;
#pragma unroll
      for (int i = 0; i < 8; ++i) x[k][i] = packed[i], part += x[k][i];  // zeros outside
      sum += part;
    }
    const float mean_of_row = rms ? 0.f : WarpSum(sum) * inverse;
    if (Lane() / 8 == row) mean = mean_of_row;
    squares[row] = 0.f;
#pragma unroll
    for (int k = 0; k < kVecs; ++k) {
      const int c = (k * 32 + Lane()) * 8;
      float part = 0.f;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float centered = x[k][i] - mean_of_row;
        if (kVectors || c + i < columns) part += centered * centered;
      }
      squares[row] += c < columns ? part : 0.f;
    }
  }
  return {float(columns), mean, WarpSum4(squares)};
}

// Eight rows of 8 columns, the first at `row`, `column`, x in the tile, to y, data and data_t. The lanes of a
// warp are 4 groups of rows x 8 groups of columns: together they read 128 bytes of a row of bf16, and write
// 64 of every row of data and 32 of every column. kFull: all are inside and aligned. Returns amax and theirs.
template <typename T, typename Q, bool kFull>
__device__ __forceinline__ float WriteUnit(const NormFwdArgs& a, const T* x, int width, const float2* stats,
                                           const Affine<8>& affine, float scale, int64_t row, int64_t column,
                                           float amax) {
  const int rows = kFull ? 8 : min(a.rows - row, int64_t{8}),
            columns = kFull ? 8 : min(a.h - column, int64_t{8});
  const int64_t start = row * a.h + column;
  uint32_t at = SharedAddress(x);
  uint32_t q[8][2];  // [row][group of four columns]
#pragma unroll
  for (int i = 0; i < 8; ++i, at += width * sizeof(T)) {
    const Vec<T, 8> v = LoadShared<T, 8>(at);
    float y[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) y[j] = v[j] - stats[i].x;
    const float peak = Normalize(y, stats[i].y, affine, amax);  // columns beyond h are zeros
    q[i][0] = Saturate4<Q>(y[0] * scale, y[1] * scale, y[2] * scale, y[3] * scale);
    q[i][1] = Saturate4<Q>(y[4] * scale, y[5] * scale, y[6] * scale, y[7] * scale);
    if (i >= rows) continue;
    amax = peak;
    if (kFull) {
      if (a.y) Store(static_cast<T*>(a.y) + start + i * a.h, Round<T>(y));
    } else {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        if (j >= columns) continue;
        if (a.data) a.data[start + i * a.h + j] = q[i][j / 4] >> j % 4 * 8;
        if (a.y) static_cast<T*>(a.y)[start + i * a.h + j] = static_cast<T>(y[j]);
      }
    }
  }
  if (kFull && a.data) {
    uint8_t* p = a.data + start;
#pragma unroll
    for (int i = 0; i < 8; ++i, p += a.h) *reinterpret_cast<uint2*>(p) = make_uint2(q[i][0], q[i][1]);
  }
  uint8_t* p = a.data_t + column * a.rows + row;
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    Transpose4x4(q[0][k], q[1][k], q[2][k], q[3][k]);
    Transpose4x4(q[4][k], q[5][k], q[6][k], q[7][k]);
#pragma unroll
    for (int j = 0; j < 4; ++j, p += a.rows) {
      if (kFull) {
        *reinterpret_cast<uint2*>(p) = make_uint2(q[j][k], q[4 + j][k]);
      } else if (k * 4 + j < columns) {
#pragma unroll
        for (int i = 0; i < 8; ++i)
          if (i < rows) p[i] = q[i / 4 * 4 + j][k] >> i % 4 * 8;
      }
    }
  }
  return amax;
}

// all[cta][row] of every CTA of the cluster: this CTA's moments, of which a lane has those of the row Lane()
// / 8 of its warp. The cluster's CTAs have all started.
__device__ void ShareMoments(float2 (*all)[kRows], const Moments& own, int cta, int ctas) {
  float2* place = &all[cta][WarpIndex() * kRowsOfWarp + Lane() / 8];
  const float2 moments = make_float2(own.mean, own.squares);
#if __CUDA_ARCH__ >= 900
  const cg::cluster_group cluster = cg::this_cluster();
  if (Lane() % 8 < ctas) *cluster.map_shared_rank(place, Lane() % 8) = moments;
  cluster.sync();
#else
  if (Lane() % 8 == 0) *place = moments;
  __syncthreads();
#endif
}

// The statistics of the 32 rows from the moments of all CTAs of the cluster: thread t has those of CTA t % 8
// of row t / 8.
__device__ void RowStats(const NormFwdArgs& a, const float2 (*all)[kRows], float2* stats, int64_t row0,
                         int width, int slices, int cta, int ctas) {
  const int row = threadIdx.x / kMostCtas, other = threadIdx.x % kMostCtas;
  Moments m{};
  for (int slice = other; slice < slices && other < ctas; slice += ctas)
    m.count += min(a.h - int64_t{slice} * width, int64_t{width});
  if (other < ctas) m.mean = all[other][row].x, m.squares = all[other][row].y;
#pragma unroll
  for (int lanes = 1; lanes < kMostCtas; lanes *= 2)
    m = Merge(m, {__shfl_xor_sync(~0u, m.count, lanes), __shfl_xor_sync(~0u, m.mean, lanes),
                  __shfl_xor_sync(~0u, m.squares, lanes)});
  const float rstd = rsqrtf(m.squares / a.h + a.eps);
  if (other == 0) {
    stats[row] = make_float2(m.mean, rstd);
    if (cta == 0 && row0 + row < a.rows) {
      if (a.mean) a.mean[row0 + row] = m.mean;
      a.rstd[row0 + row] = rstd;
    }
  }
  __syncthreads();
}

// `ctas` CTAs, a cluster, have 32 rows. Slice i of the columns, `width` of them, belongs to CTA i % ctas.
// Where each has one slice it stays in shared memory; where there are more (h too large, or no clusters
// before sm_90) they are loaded again to be written. kVectors: h is a multiple of 8, all is aligned.
template <typename T, typename Q, bool kVectors>
__global__ void __launch_bounds__(kThreads, 3)
    NormFwdTiles(const NormFwdArgs a, int width, int slices, int ctas) {
  extern __shared__ uint4 dynamic[];
  T* tile = reinterpret_cast<T*>(dynamic);                      // [kRows, width]
  const uint32_t affine = SharedAddress(tile + kRows * width);  // f32 gamma, beta [width] each
  __shared__ float2 all[kMostCtas][kRows];                      // mean, squares
  __shared__ float2 stats[kRows];                               // mean, rstd
  __shared__ unsigned amax_of_warps[kMostWarps];
  const int cta = blockIdx.x % ctas;
  const int64_t row0 = int64_t{blockIdx.x / ctas} * kRows;
#if __CUDA_ARCH__ >= 900
  cg::this_cluster().barrier_arrive();  // has started
#endif

  Moments moments{};
  for (int slice = cta; slice < slices; slice += ctas) {
    const int64_t column0 = int64_t{slice} * width;
    LoadTile<T, kVectors>(a, row0, column0, width, tile);
    if (slices <= ctas) StageAffine<kVectors>(a, column0, width, affine);
    WaitForPrefetch(0);
    __syncwarp();  // a warp reads the rows that it has loaded
    const T* rows = tile + WarpIndex() * kRowsOfWarp * width;
    moments = Merge(moments, RowMoments<T, kVectors>(rows, width, min(a.h - column0, int64_t{width}), a.rms));
    __syncwarp();
  }
#if __CUDA_ARCH__ >= 900
  cg::this_cluster().barrier_wait();  // the others have started
#endif
  ShareMoments(all, moments, cta, ctas);
  RowStats(a, all, stats, row0, width, slices, cta, ctas);

  const float scale = a.scale ? *a.scale : 1.f;
  const int r = Lane() / 8 * 8;
  const bool full_rows = kVectors && a.rows % 8 == 0 && row0 + kRows <= a.rows;
  float amax = 0.f;
  for (int slice = cta; slice < slices; slice += ctas) {
    const int64_t column0 = int64_t{slice} * width;
    if (slices > ctas) {
      __syncthreads();  // the tile is free
      LoadTile<T, kVectors>(a, row0, column0, width, tile);
      StageAffine<kVectors>(a, column0, width, affine);
      WaitForPrefetch(0);
      __syncthreads();
    }
    for (int first = WarpIndex() * kWarpColumns; first < width; first += kWarps * kWarpColumns) {
      const int c = first + Lane() % 8 * 8;
      const Affine<8> w = StagedAffine(affine, width, c);
      const T* x = tile + r * width + c;
      const int64_t row = row0 + r, column = column0 + c;
      if (full_rows && column0 + first + kWarpColumns <= a.h)
        amax = WriteUnit<T, Q, true>(a, x, width, stats + r, w, scale, row, column, amax);
      else if (row < a.rows && column < a.h)
        amax = WriteUnit<T, Q, false>(a, x, width, stats + r, w, scale, row, column, amax);
    }
  }
  const unsigned bits = CtaMax(__float_as_uint(amax), amax_of_warps);
  const int place = threadIdx.x;  // the first CTA fills the places that no CTA has
  if (a.amax && place < kAmaxesPerBlock && (place == 0 || (cta == 0 && place >= ctas)))
    a.amax[row0 / kRows * kAmaxesPerBlock + (place == 0 ? cta : place)] =
        place == 0 ? __uint_as_float(bits) : 0.f;
}

// How the columns are cut.
struct Slices {
  int ctas;   // of a cluster
  int width;  // columns of a slice, a multiple of kWarpColumns
  int count;
};

// most_width: of a slice.
Slices ChooseSlices(int64_t h, int most_width, bool clusters) {
  const auto pieces = [](int64_t n, int64_t size) { return int((n + size - 1) / size); };
  Slices out;
  out.ctas = clusters ? std::min(kMostCtas, pieces(h, most_width)) : 1;
  out.width = std::min(pieces(pieces(h, out.ctas), kWarpColumns) * kWarpColumns, most_width);
  out.count = pieces(h, out.width);
  return out;
}

template <auto kKernel, typename T>
ffi::Error LaunchTiles(cudaStream_t stream, const NormFwdArgs& args) {
  Gpu gpu;
  int arch;
  TE_TRY(CurrentGpu(&gpu));
  TE_TRY(Prepare<kKernel>(gpu, &arch));
  const Slices slices = ChooseSlices(args.h, kMostWidth<T>, arch >= 90);
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim.x = slices.ctas, cluster.val.clusterDim.y = 1, cluster.val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(unsigned((args.rows + kRows - 1) / kRows * slices.ctas));
  config.blockDim = dim3(kThreads), config.stream = stream;
  config.dynamicSmemBytes = size_t(slices.width) * (kRows * sizeof(T) + 8);  // the tile, gamma and beta
  config.attrs = &cluster, config.numAttrs = slices.ctas > 1 ? 1 : 0;
  TE_CUDA(cudaLaunchKernelEx(&config, kKernel, args, slices.width, slices.count, slices.ctas));
  TE_LAUNCHED();
}

}  // namespace

ffi::Error LaunchNormFwdTransposed(cudaStream_t stream, const NormFwdArgs& args, ffi::DataType x_type,
                                   ffi::DataType type) {
  const bool vectors = args.h % 8 == 0 && Aligned(args.x) && Aligned(args.y) && Aligned(args.data) &&
                       Aligned(args.gamma.data) && Aligned(args.beta.data);
  TE_CHECK(Aligned(args.data_t), "te_norm_fwd: data_t is not aligned to 16 bytes");
  return DispatchFloat(x_type, [&]<typename T>() -> ffi::Error {
    return DispatchFp8(type, [&]<typename Q>() -> ffi::Error {
      return vectors ? LaunchTiles<NormFwdTiles<T, Q, true>, T>(stream, args)
                     : LaunchTiles<NormFwdTiles<T, Q, false>, T>(stream, args);
    });
  });
}

}  // namespace te
