// te_norm_fwd with data_t: 32 rows at a time, for the columns of data_t come in pieces of 32 bytes, a sector
// of L2. 32 rows of x do not fit into one multiprocessor (h = 8192: 512 KiB of bf16), nor those of all
// multiprocessors into L2, and read twice from memory x would cost half as much again. So a cluster of up to
// 8 CTAs has the 32 rows, each a slice of columns in shared memory, and they exchange the statistics of their
// slices. Bytes per element of bf16: 2 read, 2 written (data, data_t), and 2 more for y.

#include <cooperative_groups.h>
#include <cuda_pipeline_primitives.h>

#include <algorithm>

#include "norm.cuh"
#include "reduce.cuh"

namespace te {
namespace {

namespace cg = cooperative_groups;

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kRows = 32;              // of a CTA
constexpr int kWarpColumns = 64;       // of the 32 rows that a warp writes at once
constexpr int kSliceBytes = 64 << 10;  // three CTAs of a multiprocessor: one loads, one computes, one writes
constexpr int kMostCtas = 8;           // of a portable cluster

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

// x[row0.., column0..] -> tile [kRows, width], zeros outside of x.
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
  if constexpr (kVectors) {
    __pipeline_commit();
    __pipeline_wait_prior(0);
  }
  __syncthreads();
}

// The moments of a row of the tile, of which `columns` are inside. One warp.
template <typename T>
__device__ Moments RowMoments(const T* row, int columns, bool rms) {
  if (columns <= 0) return {0.f, 0.f, 0.f};
  float mean = 0.f, squares = 0.f;
  if (!rms) {
    for (int c = Lane() * 8; c < columns; c += 32 * 8) {
      const Vec<T, 8> v = Load<8>(row + c);
#pragma unroll
      for (int i = 0; i < 8; ++i) mean += v[i];  // zeros outside
    }
    mean = WarpSum(mean) / columns;
  }
  for (int c = Lane() * 8; c < columns; c += 32 * 8) {
    const Vec<T, 8> v = Load<8>(row + c);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float centered = v[i] - mean;
      if (c + i < columns) squares += centered * centered;
    }
  }
  return {float(columns), mean, WarpSum(squares)};
}

// gamma and beta of 8 columns, zeros beyond h.
template <bool kVectors>
__device__ __forceinline__ Affine<8> LoadAffineOf(const NormFwdArgs& a, int64_t column) {
  if constexpr (kVectors) {
    return column < a.h ? LoadAffine<8>(a, column) : Affine<8>{};
  } else {
    Affine<8> out{};
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      if (column + j >= a.h) continue;
      const Affine<1> one = LoadAffine<1>(a, column + j);
      out.gamma[j] = one.gamma[0], out.beta[j] = one.beta[0];
    }
    return out;
  }
}

// A row's 16 columns of FP8. `columns`: how many are inside of data.
template <bool kVectors>
__device__ __forceinline__ void StoreRow16(uint8_t* p, const uint32_t (&q)[4], int64_t columns,
                                           bool aligned16) {
  if (kVectors && aligned16 && columns > 0) {
    *reinterpret_cast<uint4*>(p) = make_uint4(q[0], q[1], q[2], q[3]);
  } else if (kVectors) {
    if (columns > 0) *reinterpret_cast<uint2*>(p) = make_uint2(q[0], q[1]);
    if (columns > 8) *reinterpret_cast<uint2*>(p + 8) = make_uint2(q[2], q[3]);
  } else {
#pragma unroll
    for (int j = 0; j < 16; ++j)
      if (j < columns) p[j] = q[j / 4] >> j % 4 * 8;
  }
}

// Four bytes of a column. `rows`: how many are inside of data_t.
__device__ __forceinline__ void StoreColumn4(uint8_t* p, uint32_t q, int rows, bool aligned4) {
  if (aligned4) {
    *reinterpret_cast<uint32_t*>(p) = q;
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i)
    if (i < rows) p[i] = q >> i * 8;
}

// Four rows of 16 columns, the first at `row`, `column`, x in the tile, to y, data and data_t. The lanes of a
// warp are 8 groups of rows x 4 groups of columns: together they write 64 bytes of every row of data and 32
// of every column.
template <typename T, typename Q, bool kVectors>
__device__ unsigned WriteUnit(const NormFwdArgs& a, const T* x, int width, const float2* stats, float scale,
                              int64_t row, int64_t column) {
  const int rows = max(min(a.rows - row, int64_t{4}), int64_t{0});
  unsigned amax = 0;
  uint32_t q[4][4];  // [row][group of four columns]
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int64_t c = column + half * 8;
    const Affine<8> affine = LoadAffineOf<kVectors>(a, c);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float y[8];
      const unsigned peak = Normalize(Load<8>(x + i * width + half * 8), stats[i].x, stats[i].y, affine, y);
      q[i][half * 2] = Saturate4<Q>(y[0] * scale, y[1] * scale, y[2] * scale, y[3] * scale);
      q[i][half * 2 + 1] = Saturate4<Q>(y[4] * scale, y[5] * scale, y[6] * scale, y[7] * scale);
      if (i >= rows || c >= a.h) continue;
      amax = max(amax, peak);
      if (!a.y) continue;
      T* p = static_cast<T*>(a.y) + (row + i) * a.h + c;
      if constexpr (kVectors) {
        Store(p, Round<T>(y));
      } else {
#pragma unroll
        for (int j = 0; j < 8; ++j)
          if (c + j < a.h) p[j] = static_cast<T>(y[j]);
      }
    }
  }
  if (a.data) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (i < rows)
        StoreRow16<kVectors>(a.data + (row + i) * a.h + column, q[i], a.h - column, a.h % 16 == 0);
  }
  uint8_t* columns = a.data_t + column * a.rows + row;
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    Transpose4x4(q[0][k], q[1][k], q[2][k], q[3][k]);
#pragma unroll
    for (int j = 0; j < 4; ++j)
      if (rows > 0 && column + k * 4 + j < a.h)
        StoreColumn4(columns + (k * 4 + j) * a.rows, q[j][k], rows, a.rows % 4 == 0);
  }
  return amax;
}

// The statistics of the 32 rows from the moments that each CTA of the cluster has of its slices. Thread t has
// row t.
__device__ void ShareMoments(const NormFwdArgs& a, Moments* own, float2* stats, int64_t row0, int ctas) {
#if __CUDA_ARCH__ >= 900
  const cg::cluster_group cluster = cg::this_cluster();
  cluster.sync();
#else
  __syncthreads();
#endif
  if (threadIdx.x < kRows) {
    Moments all{};
    for (int cta = 0; cta < ctas; ++cta) {
#if __CUDA_ARCH__ >= 900
      all = Merge(all, cluster.map_shared_rank(own, cta)[threadIdx.x]);
#else
      all = Merge(all, own[threadIdx.x]);
#endif
    }
    const float rstd = rsqrtf(all.squares / a.h + a.eps);
    stats[threadIdx.x] = make_float2(all.mean, rstd);
    if (blockIdx.x % ctas == 0 && row0 + threadIdx.x < a.rows) {
      if (a.mean) a.mean[row0 + threadIdx.x] = all.mean;
      a.rstd[row0 + threadIdx.x] = rstd;
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
  __shared__ Moments own[kRows];
  __shared__ float2 stats[kRows];  // mean, rstd
  __shared__ unsigned amax_of_warps[kMostWarps];
  const int cta = blockIdx.x % ctas;
  const int64_t row0 = int64_t{blockIdx.x / ctas} * kRows;

  Moments moments[kRows / kWarps] = {};
  for (int slice = cta; slice < slices; slice += ctas) {
    const int64_t column0 = int64_t{slice} * width;
    if (slice != cta) __syncthreads();  // the tile is free
    LoadTile<T, kVectors>(a, row0, column0, width, tile);
    const int columns = min(a.h - column0, int64_t{width});
#pragma unroll
    for (int i = 0; i < kRows / kWarps; ++i)
      moments[i] = Merge(moments[i], RowMoments(tile + (WarpIndex() + i * kWarps) * width, columns, a.rms));
  }
  if (Lane() == 0) {
#pragma unroll
    for (int i = 0; i < kRows / kWarps; ++i) own[WarpIndex() + i * kWarps] = moments[i];
  }
  ShareMoments(a, own, stats, row0, ctas);
#if __CUDA_ARCH__ >= 900
  cg::this_cluster().barrier_arrive();  // has read the others' moments
#endif

  const float scale = a.scale ? *a.scale : 1.f;
  const int r = Lane() / 4 * 4, lane_column = Lane() % 4 * 16;
  unsigned amax = 0;
  for (int slice = cta; slice < slices; slice += ctas) {
    const int64_t column0 = int64_t{slice} * width;
    if (slices > ctas) {
      __syncthreads();
      LoadTile<T, kVectors>(a, row0, column0, width, tile);
    }
    for (int c = WarpIndex() * kWarpColumns + lane_column; c < width; c += kWarps * kWarpColumns)
      amax = max(amax, WriteUnit<T, Q, kVectors>(a, tile + r * width + c, width, stats + r, scale, row0 + r,
                                                 column0 + c));
  }
  amax = CtaMax(amax, amax_of_warps);
  const int place = threadIdx.x;  // the first CTA fills the places that no CTA has
  if (a.amax && place < kAmaxesPerBlock && (place == 0 || (cta == 0 && place >= ctas)))
    a.amax[row0 / kRows * kAmaxesPerBlock + (place == 0 ? cta : place)] =
        place == 0 ? __uint_as_float(amax) : 0.f;
#if __CUDA_ARCH__ >= 900
  cg::this_cluster().barrier_wait();  // the others have read this CTA's moments
#endif
}

// How the columns are cut.
struct Slices {
  int ctas;   // of a cluster
  int width;  // columns of a slice, a multiple of kWarpColumns
  int count;
};

ffi::Error ChooseSlices(int64_t h, int bytes, Slices* out) {
  int device, clusters, most_bytes;
  TE_CUDA(cudaGetDevice(&device));
  TE_CUDA(cudaDeviceGetAttribute(&clusters, cudaDevAttrClusterLaunch, device));
  TE_CUDA(cudaDeviceGetAttribute(&most_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
  const auto pieces = [](int64_t n, int64_t size) { return int((n + size - 1) / size); };
  const int wanted = kSliceBytes / kRows / bytes;
  const int most =
      (most_bytes - 2048) / kRows / bytes / kWarpColumns * kWarpColumns;  // less the static arrays
  out->ctas = clusters ? std::min(kMostCtas, pieces(h, wanted)) : 1;
  out->width = pieces(pieces(h, out->ctas), kWarpColumns) * kWarpColumns;
  if (out->width > most) out->width = wanted;
  out->count = pieces(h, out->width);
  return ffi::Error::Success();
}

}  // namespace

ffi::Error LaunchNormFwdTransposed(cudaStream_t stream, const NormFwdArgs& args, ffi::DataType x_type,
                                   ffi::DataType type) {
  const bool vectors = args.h % 8 == 0 && Aligned(args.x) && Aligned(args.y) && Aligned(args.data) &&
                       Aligned(args.gamma.data) && Aligned(args.beta.data);
  TE_CHECK(Aligned(args.data_t), "te_norm_fwd: data_t is not aligned to 16 bytes");
  return DispatchFloat(x_type, [&]<typename T>() -> ffi::Error {
    return DispatchFp8(type, [&]<typename Q>() -> ffi::Error {
      const auto kernel = vectors ? NormFwdTiles<T, Q, true> : NormFwdTiles<T, Q, false>;
      Slices slices;
      TE_TRY(ChooseSlices(args.h, sizeof(T), &slices));
      const size_t bytes = size_t{kRows} * slices.width * sizeof(T);
      TE_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(bytes)));
      cudaLaunchAttribute cluster{};
      cluster.id = cudaLaunchAttributeClusterDimension;
      cluster.val.clusterDim.x = slices.ctas, cluster.val.clusterDim.y = 1, cluster.val.clusterDim.z = 1;
      cudaLaunchConfig_t config{};
      config.gridDim = dim3(unsigned((args.rows + kRows - 1) / kRows * slices.ctas));
      config.blockDim = dim3(kThreads), config.dynamicSmemBytes = bytes, config.stream = stream;
      config.attrs = &cluster, config.numAttrs = slices.ctas > 1 ? 1 : 0;
      TE_CUDA(cudaLaunchKernelEx(&config, kernel, args, slices.width, slices.count, slices.ctas));
      TE_LAUNCHED();
    });
  });
}

}  // namespace te
