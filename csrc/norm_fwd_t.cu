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
constexpr int kSliceBytes = 64 << 10;  // three CTAs of a multiprocessor: one loads, one computes, one writes
constexpr int kMostCtas = 8;           // of a portable cluster; kRows of them are the CTA's threads
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

// x[row0.., column0..] -> tile [kRows, width], zeros outside of x. On its way until FinishTile.
template <typename T, bool kVectors>
__device__ void LoadTile(const NormFwdArgs& a, int64_t row0, int64_t column0, int width, T* tile) {
  constexpr int N = kVectors ? 16 / sizeof(T) : 1;
  const T* x = static_cast<const T*>(a.x) + row0 * a.h + column0;
  const int rows = min(a.rows - row0, int64_t{kRows});
  const int columns = max(min(a.h - column0, int64_t{width}), int64_t{0});
  for (int r = WarpIndex(); r < kRows; r += kWarps)
    for (int c = Lane() * N; c < width; c += 32 * N) {
      const bool inside = r < rows && c < columns;
      if constexpr (kVectors)
        __pipeline_memcpy_async(tile + r * width + c, x + (inside ? r * a.h + c : 0), 16, inside ? 0 : 16);
      else
        tile[r * width + c] = inside ? x[r * a.h + c] : T(0.f);
    }
  if constexpr (kVectors) __pipeline_commit();
}

// All threads of the CTA see what LoadTile and StageAffine have loaded.
template <bool kVectors>
__device__ void FinishTile() {
  if constexpr (kVectors) __pipeline_wait_prior(0);
  __syncthreads();
}

// gamma and beta of the slice, f32, zeros beyond h.
template <bool kVectors>
__device__ void StageAffine(const NormFwdArgs& a, int64_t column0, int width, float* gamma, float* beta) {
  constexpr int N = kVectors ? 8 : 1;
  for (int c = threadIdx.x * N; c < width; c += kThreads * N) {
    const Affine<N> affine = column0 + c < a.h ? LoadAffine<N>(a, column0 + c) : Affine<N>{};
    Store(gamma + c, Round<float>(affine.gamma)), Store(beta + c, Round<float>(affine.beta));
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

// The moments of the warp's four rows of the tile, of which `columns` are inside: row i in the lanes 8 i .. 8
// i
// + 7.
template <typename T, bool kVectors>
__device__ Moments RowMoments(const T* rows, int width, int columns, bool rms) {
  if (columns <= 0) return {0.f, 0.f, 0.f};
  float sums[4] = {}, means[4] = {}, squares[4] = {};
  if (!rms) {
    for (int c = Lane() * 8; c < columns; c += 32 * 8)
#pragma unroll
      for (int row = 0; row < 4; ++row) {
        const Vec<T, 8> v = Load<8>(rows + row * width + c);
        float part = 0.f;
#pragma unroll
        for (int i = 0; i < 8; ++i) part += v[i];  // zeros outside
        sums[row] += part;
      }
  }
  const float mean = WarpSum4(sums) / columns;
#pragma unroll
  for (int row = 0; row < 4; ++row) means[row] = __shfl_sync(~0u, mean, row * 8);
  for (int c = Lane() * 8; c < columns; c += 32 * 8)
#pragma unroll
    for (int row = 0; row < 4; ++row) {
      const Vec<T, 8> v = Load<8>(rows + row * width + c);
      float part = 0.f;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float centered = v[i] - means[row];
        if (kVectors || c + i < columns) part += centered * centered;
      }
      squares[row] += part;
    }
  return {float(columns), mean, WarpSum4(squares)};
}

// Eight bytes of a column. `rows`: how many are inside of data_t, whose columns are of `height` bytes.
__device__ __forceinline__ void StoreColumn8(uint8_t* p, uint32_t low, uint32_t high, int rows,
                                             int64_t height) {
  if (height % 8 == 0) {
    if (rows > 0) *reinterpret_cast<uint2*>(p) = make_uint2(low, high);
  } else if (height % 4 == 0) {
    if (rows > 0) *reinterpret_cast<uint32_t*>(p) = low;
    if (rows > 4) *reinterpret_cast<uint32_t*>(p + 4) = high;
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if (i < rows) p[i] = (i < 4 ? low : high) >> i % 4 * 8;
  }
}

// Eight rows of 8 columns, the first at `row`, `column`, x in the tile, to y, data and data_t. The lanes of a
// warp are 4 groups of rows x 8 groups of columns: together they read 128 bytes of a row of bf16, and write
// 64 of every row of data and 32 of every column. Returns amax and theirs.
template <typename T, typename Q, bool kVectors>
__device__ float WriteUnit(const NormFwdArgs& a, const T* x, int width, const float2* stats,
                           const Affine<8>& affine, float scale, int64_t row, int64_t column, float amax) {
  const int rows = min(a.rows - row, int64_t{8}), columns = min(a.h - column, int64_t{8});
  if (columns <= 0) return amax;
  uint32_t q[8][2];  // [row][group of four columns]
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const Vec<T, 8> v = Load<8>(x + i * width);
    float y[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) y[j] = v[j] - stats[i].x;
    const float peak = Normalize(y, stats[i].y, affine, amax);  // columns beyond h are zeros
    q[i][0] = Saturate4<Q>(y[0] * scale, y[1] * scale, y[2] * scale, y[3] * scale);
    q[i][1] = Saturate4<Q>(y[4] * scale, y[5] * scale, y[6] * scale, y[7] * scale);
    if (i >= rows) continue;
    amax = peak;
    const int64_t offset = (row + i) * a.h + column;
    if (kVectors) {
      if (a.data) *reinterpret_cast<uint2*>(a.data + offset) = make_uint2(q[i][0], q[i][1]);
      if (a.y) Store(static_cast<T*>(a.y) + offset, Round<T>(y));
    } else {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        if (j >= columns) continue;
        if (a.data) a.data[offset + j] = q[i][j / 4] >> j % 4 * 8;
        if (a.y) static_cast<T*>(a.y)[offset + j] = static_cast<T>(y[j]);
      }
    }
  }
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    Transpose4x4(q[0][k], q[1][k], q[2][k], q[3][k]);
    Transpose4x4(q[4][k], q[5][k], q[6][k], q[7][k]);
#pragma unroll
    for (int j = 0; j < 4; ++j)
      if (kVectors || k * 4 + j < columns)
        StoreColumn8(a.data_t + (column + k * 4 + j) * a.rows + row, q[j][k], q[4 + j][k], rows, a.rows);
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
// before sm_90) they are loaded again to be written.
template <typename T, typename Q, bool kVectors>
__global__ void __launch_bounds__(kThreads, kVectors ? 3 : 1)
    NormFwdTiles(const NormFwdArgs a, int width, int slices, int ctas) {
  extern __shared__ uint4 dynamic[];
  T* tile = reinterpret_cast<T*>(dynamic);  // [kRows, width]
  float* gamma = reinterpret_cast<float*>(tile + kRows * width);
  float* beta = gamma + width;
  __shared__ float2 all[kMostCtas][kRows];  // mean, squares
  __shared__ float2 stats[kRows];           // mean, rstd
  __shared__ unsigned amax_of_warps[kMostWarps];
  const int cta = blockIdx.x % ctas;
  const int64_t row0 = int64_t{blockIdx.x / ctas} * kRows;
#if __CUDA_ARCH__ >= 900
  cg::this_cluster().barrier_arrive();  // has started
#endif

  Moments moments{};
  for (int slice = cta; slice < slices; slice += ctas) {
    const int64_t column0 = int64_t{slice} * width;
    if (slice != cta) __syncthreads();  // the tile is free
    LoadTile<T, kVectors>(a, row0, column0, width, tile);
    StageAffine<kVectors>(a, column0, width, gamma, beta);
    FinishTile<kVectors>();
    const T* rows = tile + WarpIndex() * kRowsOfWarp * width;
    moments = Merge(moments, RowMoments<T, kVectors>(rows, width, min(a.h - column0, int64_t{width}), a.rms));
  }
#if __CUDA_ARCH__ >= 900
  cg::this_cluster().barrier_wait();  // the others have started
#endif
  ShareMoments(all, moments, cta, ctas);
  RowStats(a, all, stats, row0, width, slices, cta, ctas);

  const float scale = a.scale ? *a.scale : 1.f;
  const int r = Lane() / 8 * 8, lane_column = Lane() % 8 * 8;
  float amax = 0.f;
  for (int slice = cta; slice < slices; slice += ctas) {
    const int64_t column0 = int64_t{slice} * width;
    if (slices > ctas) {
      __syncthreads();
      LoadTile<T, kVectors>(a, row0, column0, width, tile);
      StageAffine<kVectors>(a, column0, width, gamma, beta);
      FinishTile<kVectors>();
    }
    for (int c = WarpIndex() * kWarpColumns + lane_column; c < width; c += kWarps * kWarpColumns)
      amax = WriteUnit<T, Q, kVectors>(a, tile + r * width + c, width, stats + r,
                                       StagedAffine(gamma + c, beta + c), scale, row0 + r, column0 + c, amax);
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

// bytes: of an element.
Slices ChooseSlices(int64_t h, int bytes, const Gpu& gpu, bool clusters) {
  const auto pieces = [](int64_t n, int64_t size) { return int((n + size - 1) / size); };
  const int wanted = kSliceBytes / kRows / bytes;
  const int most = (gpu.shared_bytes - kStaticBytes) / (kRows * bytes + 8) / kWarpColumns * kWarpColumns;
  Slices out;
  out.ctas = clusters ? std::min(kMostCtas, pieces(h, wanted)) : 1;
  out.width = pieces(pieces(h, out.ctas), kWarpColumns) * kWarpColumns;
  if (out.width > most) out.width = wanted;
  out.count = pieces(h, out.width);
  return out;
}

template <auto kKernel>
ffi::Error LaunchTiles(cudaStream_t stream, const NormFwdArgs& args, int bytes) {
  Gpu gpu;
  int arch;
  TE_TRY(CurrentGpu(&gpu));
  TE_TRY(Prepare<kKernel>(gpu, &arch));
  const Slices slices = ChooseSlices(args.h, bytes, gpu, arch >= 90);
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim.x = slices.ctas, cluster.val.clusterDim.y = 1, cluster.val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(unsigned((args.rows + kRows - 1) / kRows * slices.ctas));
  config.blockDim = dim3(kThreads), config.stream = stream;
  config.dynamicSmemBytes = size_t(slices.width) * (kRows * bytes + 8);  // the tile, gamma and beta
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
      return vectors ? LaunchTiles<NormFwdTiles<T, Q, true>>(stream, args, sizeof(T))
                     : LaunchTiles<NormFwdTiles<T, Q, false>>(stream, args, sizeof(T));
    });
  });
}

}  // namespace te
