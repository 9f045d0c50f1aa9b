// te_norm_fwd with data_t: 32 rows at a time, for the columns of data_t come in pieces of 32 bytes, a sector
// of L2. 32 rows of x do not fit into one multiprocessor (h = 8192: 512 KiB of bf16), nor those of all
// multiprocessors into L2, and read twice from memory x would cost half as much again. So a cluster of up to
// 8 CTAs has the 32 rows, each a slice of the columns in shared memory, and they exchange the moments of
// their slices. Clusters stay and walk over the blocks of 32 rows: while one block is written the next one's
// moments are on their way between the CTAs and the block after it on its way from memory. Bytes per element
// of bf16: 2 read, 2 written (data, data_t), and 2 more for y.

#include <algorithm>

#include "norm.cuh"

namespace te {
namespace {

constexpr int kRows = 32;     // of a block
constexpr int kColumns = 64;  // of a strip, which a warp has: each lane a unit of 8 rows x 8 columns
constexpr int kStages = 3;    // blocks of which a CTA has its slice in shared memory
constexpr int kMostCtas = 8;  // of a portable cluster
// Warps of a CTA at most: three stages of 64 KiB fill a multiprocessor.
template <typename T>
constexpr int kWarps = (64 << 10) / (kRows * kColumns * sizeof(T));
static_assert(kRows == 32 && kColumns == 64 && kWarps<__nv_bfloat16> == 16);

// Eight rows of 8 columns. The lanes of a warp are 4 groups of rows x 8 groups of columns: together they read
// 128 bytes of a row of bf16, and write 64 of every row of data and 32 of every column.
template <typename T>
using Unit = Vec<T, 8>[8];

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

// The sum over kLanes neighbours.
template <int kLanes>
__device__ __forceinline__ float GroupSum(float v) {
#pragma unroll
  for (int other = kLanes / 2; other > 0; other /= 2) v += __shfl_xor_sync(~0u, v, other);
  return v;
}

// The moments of kLanes neighbours together: mean and squares of each, `count` its own, inverse 1 / that of
// all. Around a mean that is shifted by one of them: exact where all means are equal.
template <int kLanes>
__device__ __forceinline__ float2 Combine(float2 own, float count, float inverse) {
  const float shift = __shfl_sync(~0u, own.x, Lane() / kLanes * kLanes);
  const float mean = shift + GroupSum<kLanes>(count * (own.x - shift)) * inverse;
  const float away = own.x - mean;
  return make_float2(mean, GroupSum<kLanes>(own.y + count * (away * away)));
}

// Sums of eight values over 8 neighbouring lanes, value i in lane i of them.
__device__ __forceinline__ float UnitSum(const float (&v)[8]) {
  float four[4], two[2];
#pragma unroll
  for (int i = 0; i < 4; ++i)
    four[i] = (Lane() & 4 ? v[i + 4] : v[i]) + __shfl_xor_sync(~0u, Lane() & 4 ? v[i] : v[i + 4], 4);
#pragma unroll
  for (int i = 0; i < 2; ++i)
    two[i] =
        (Lane() & 2 ? four[i + 2] : four[i]) + __shfl_xor_sync(~0u, Lane() & 2 ? four[i] : four[i + 2], 2);
  return (Lane() & 1 ? two[1] : two[0]) + __shfl_xor_sync(~0u, Lane() & 1 ? two[0] : two[1], 1);
}

// The moments of the strip's rows, row i in lane i. columns: of the unit that are inside, the others are
// zeros; count: of the strip. kVectors: columns is 8 or 0.
template <typename T, bool kVectors>
__device__ __forceinline__ Moments StripMoments(const Unit<T>& unit, int columns, int count, bool rms) {
  float sums[8];
  float mean = 0.f;
  if (!rms) {
#pragma unroll
    for (int r = 0; r < 8; ++r) {
      sums[r] = 0.f;
#pragma unroll
      for (int i = 0; i < 8; ++i) sums[r] += unit[r][i];
    }
    mean = UnitSum(sums) * (1.f / max(count, 1));
  }
#pragma unroll
  for (int r = 0; r < 8; ++r) {
    const float mean_of_row = __shfl_sync(~0u, mean, Lane() / 8 * 8 + r);
    sums[r] = 0.f;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float centered = unit[r][i] - mean_of_row;
      if (kVectors || i < columns) sums[r] += centered * centered;
    }
    if (kVectors && columns == 0) sums[r] = 0.f;
  }
  return {float(count), mean, UnitSum(sums)};
}

// y, where it is wanted, and q of a unit at `row`, `column`. stats: the address of mean and rstd of its rows.
// kFull: all is inside and aligned. Returns amax and |y|'s maximum.
template <typename T, typename Q, bool kFull>
__device__ __forceinline__ float NormalizeUnit(const NormFwdArgs& a, const Unit<T>& unit, uint32_t stats,
                                               const Affine<8>& affine, float scale, int64_t row,
                                               int64_t column, float amax, uint32_t (&q)[8][2]) {
  const int rows = kFull ? 8 : min(a.rows - row, int64_t{8}),
            columns = kFull ? 8 : min(a.h - column, int64_t{8});
  T* out = static_cast<T*>(a.y) + row * a.h + column;
#pragma unroll
  for (int i = 0; i < 8; ++i, out += a.h) {
    const Vec<float, 4> of_two = LoadShared<float, 4>(stats + i / 2 * 16);
    float y[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) y[j] = unit[i][j] - of_two[i % 2 * 2];
    const float peak = Normalize(y, of_two[i % 2 * 2 + 1], affine, amax);  // columns beyond h are zeros
    q[i][0] = Saturate4<Q>(y[0] * scale, y[1] * scale, y[2] * scale, y[3] * scale);
    q[i][1] = Saturate4<Q>(y[4] * scale, y[5] * scale, y[6] * scale, y[7] * scale);
    if (i >= rows) continue;
    amax = peak;
    if (!a.y) continue;
    if (kFull) {
      Store(out, Round<T>(y));
    } else {
#pragma unroll
      for (int j = 0; j < 8; ++j)
        if (j < columns) out[j] = static_cast<T>(y[j]);
    }
  }
  return amax;
}

// q, of [row][group of four columns], to data and data_t.
template <bool kFull>
__device__ __forceinline__ void StoreUnit(const NormFwdArgs& a, uint32_t (&q)[8][2], int64_t row,
                                          int64_t column) {
  const int rows = kFull ? 8 : min(a.rows - row, int64_t{8}),
            columns = kFull ? 8 : min(a.h - column, int64_t{8});
  if (a.data) {
    uint8_t* p = a.data + row * a.h + column;
#pragma unroll
    for (int i = 0; i < 8; ++i, p += a.h) {
      if (kFull) {
        *reinterpret_cast<uint2*>(p) = make_uint2(q[i][0], q[i][1]);
      } else if (i < rows) {
#pragma unroll
        for (int j = 0; j < 8; ++j)
          if (j < columns) p[j] = q[i][j / 4] >> j % 4 * 8;
      }
    }
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
}

constexpr int kPitch = kRows + 1;  // lanes that read a row of several warps or CTAs meet no bank twice

// In shared memory, twice: the moments of a block come in while those of the last are in use.
struct alignas(16) Exchange {
  float2 stats[2][kRows];                // mean, rstd
  float2 of_ctas[2][kMostCtas][kPitch];  // mean, squares
  uint64_t arrived[2];                   // of_ctas, see ptx.cuh
  unsigned amaxes[kMostWarps];
};

constexpr size_t kExchangeBytesOfWarp = sizeof(float2) * 2 * kPitch;  // behind it, for Team::of_warps

// What the warps of a cluster share about a block's rows. Warp w of the cluster, in CTA w / warps of it, has
// the strips w, w + ctas * warps, ... (more than one only in NormFwdLongTiles).
struct Team {
  int cta, ctas, warps;
  Exchange* exchange;
  float2* of_warps;                    // [2][warps][kPitch]: mean, squares
  float count_of_warp, count_of_cta;   // columns of warp Lane() % 16, of CTA Lane() % 8
  float inverse_of_cta, inverse_of_h;  // 1 / columns of this CTA, of all

  // memory: shared, an Exchange and kExchangeBytesOfWarp for each warp. ClusterWait is to follow, before
  // Share.
  __device__ __forceinline__ Team(const NormFwdArgs& a, void* memory, int ctas)
      : cta(blockIdx.x % ctas), ctas(ctas), warps(blockDim.x / 32), exchange(static_cast<Exchange*>(memory)) {
    if (threadIdx.x == 0) InitMessages(Arrived(0)), InitMessages(Arrived(1));
    __syncwarp();
    ClusterArrive();
    of_warps = reinterpret_cast<float2*>(exchange + 1);
    count_of_warp = Lane() % 16 < warps ? Columns(a.h, cta * warps + Lane() % 16) : 0;
    int mine = 0, others = 0;
    for (int w = 0; w < warps; ++w) {
      mine += Columns(a.h, cta * warps + w);
      if (Lane() % 8 < ctas) others += Columns(a.h, Lane() % 8 * warps + w);
    }
    count_of_cta = others, inverse_of_cta = 1.f / max(mine, 1), inverse_of_h = 1.f / a.h;
  }

  __device__ __forceinline__ uint32_t Arrived(int i) const {
    return SharedAddress(&exchange->arrived[i % 2]);
  }

  __device__ __forceinline__ int WarpOfCluster() const { return cta * warps + WarpIndex(); }

  // Of all strips of a warp of the cluster.
  __device__ __forceinline__ int Columns(int64_t h, int warp) const {
    const int strips = (h + kColumns - 1) / kColumns, all = ctas * warps;
    const int missing = (strips - 1) % all == warp ? strips * kColumns - h : 0;
    return (strips - warp + all - 1) / all * kColumns - missing;
  }

  // The moments of the warp's columns of the i-th block, row Lane().
  __device__ __forceinline__ void Put(int i, const Moments& m) const {
    of_warps[(i % 2 * warps + WarpIndex()) * kPitch + Lane()] = make_float2(m.mean, m.squares);
  }

  // The moments of this CTA's columns to all CTAs. Behind a barrier after Put.
  __device__ __forceinline__ void Share(int i) const {
    if (threadIdx.x == 0) ExpectMessages(Arrived(i), ctas * kRows * sizeof(float2));
    const int part = Lane() % 16;
    for (int row = threadIdx.x / 16; row < kRows; row += blockDim.x / 16) {
      float2 own{};
      if (part < warps) own = of_warps[(i % 2 * warps + part) * kPitch + row];
      own = Combine<16>(own, count_of_warp, inverse_of_cta);
      if (part < ctas) SendMessage(SharedAddress(&exchange->of_ctas[i % 2][cta][row]), Arrived(i), part, own);
    }
  }

  // The statistics of its rows, from row0 on, once all CTAs have shared their moments. A barrier is to
  // follow.
  __device__ __forceinline__ void Finish(const NormFwdArgs& a, int i, int64_t row0) const {
    WaitForMessages(Arrived(i), i / 2);
    const int part = Lane() % kMostCtas;
    for (int row = threadIdx.x / kMostCtas; row < kRows; row += blockDim.x / kMostCtas) {
      float2 own{};
      if (part < ctas) own = exchange->of_ctas[i % 2][part][row];
      own = Combine<kMostCtas>(own, count_of_cta, inverse_of_h);
      const float rstd = rsqrtf(own.y * inverse_of_h + a.eps);
      if (part > 0) continue;
      exchange->stats[i % 2][row] = make_float2(own.x, rstd);
      if (cta == 0 && row0 + row < a.rows) {
        if (a.mean) a.mean[row0 + row] = own.x;
        a.rstd[row0 + row] = rstd;
      }
    }
  }

  // Of the lane's unit, after Finish.
  __device__ __forceinline__ uint32_t Stats(int i) const {
    return SharedAddress(&exchange->stats[i % 2][Lane() / 8 * 8]);
  }
};

// h and rows are multiples of 8, all is aligned, and the cluster has a warp for every strip. A lane fetches
// its units itself, to places in a ring that nobody else reads, and keeps its columns' gamma and beta: only
// for the statistics do warps wait for each other. In turn i the moments of the cluster's i-th block go out;
// then the block before it, whose moments have come in meanwhile, is written. One barrier for each block is
// enough, because all that the warps share is there twice: who sends the moments of block i + 1 has, with
// those of block i, heard that the receiver is done with block i - 1.
template <typename T, typename Q>
__global__ void __launch_bounds__(kWarps<T> * 32, 1) NormFwdTiles(const NormFwdArgs a, int ctas) {
  extern __shared__ uint4 dynamic[];  // what Team has; ring Vec<T, 8> [kStages, 8, threads]
  const Team team(a, dynamic, ctas);
  const uint32_t pitch = blockDim.x * sizeof(Vec<T, 8>), slot_bytes = 8 * pitch;
  const uint32_t ring =
      SharedAddress(team.of_warps + 2 * team.warps * kPitch) + threadIdx.x * sizeof(Vec<T, 8>);
  const int column = team.WarpOfCluster() * kColumns + Lane() % 8 * 8;
  const bool inside = column < a.h;
  const int columns_of_strip = team.Columns(a.h, team.WarpOfCluster());
  const int rows = a.rows, step = gridDim.x / ctas * kRows;  // from a block of the cluster to the next

  const auto slot = [&](int i) { return ring + i % kStages * slot_bytes; };  // of the i-th block
  const auto prefetch = [&](int row, uint32_t at) {                          // of the unit
    const T* p = static_cast<const T*>(a.x) + row * a.h + column;
    if (inside && row < rows) {
#pragma unroll
      for (int i = 0; i < 8; ++i, p += a.h) Prefetch8(at + i * pitch, p, true);
    }
    CommitPrefetch();
  };
  const auto load = [&](uint32_t at, Unit<T>& unit) {
#pragma unroll
    for (int i = 0; i < 8; ++i) unit[i] = LoadShared<T, 8>(at + i * pitch);
  };

  int row0 = blockIdx.x / ctas * kRows;
  const int row_of_unit = Lane() / 8 * 8;
  for (int s = 0; s < kStages; ++s) {
    for (int i = 0; i < 8 && !inside; ++i)
      for (int j = 0; j < int(sizeof(T) / 2); ++j)
        StoreShared(slot(s) + i * pitch + j * 16, 0.f, 0.f, 0.f, 0.f);
    if (s + 1 < kStages) prefetch(row0 + s * step + row_of_unit, slot(s));
  }
  const Affine<8> affine = inside ? LoadAffine<8>(a, column) : Affine<8>{};
  const float scale = a.scale ? *a.scale : 1.f;
  ClusterWait();
  float amax = 0.f;
  for (int i = 0;; ++i, row0 += step) {
    const bool more = row0 < rows;
    const int row = row0 - step + row_of_unit;  // of the unit to be written
    const bool write = i > 0 && inside && row < rows;
    Unit<T> unit;
    if (more) {
      WaitForPrefetch(kStages - 2);
      load(slot(i), unit);
      team.Put(i, StripMoments<T, true>(unit, inside ? 8 : 0, columns_of_strip, a.rms));
    }
    if (i > 0) team.Finish(a, i - 1, row0 - step);
    __syncthreads();
    if (more) team.Share(i);
    uint32_t q[8][2];
    if (write) {
      load(slot(i - 1), unit);
      amax = NormalizeUnit<T, Q, true>(a, unit, team.Stats(i - 1), affine, scale, row, column, amax, q);
    }
    if (more) prefetch(row + kStages * step, slot(i + kStages - 1));
    if (write) StoreUnit<true>(a, q, row, column);
    if (!more) break;
  }
  StoreAmax(a, amax, team.exchange->amaxes);
}

// Zeros outside of x.
template <typename T, bool kVectors>
__device__ __forceinline__ void LoadUnit(const NormFwdArgs& a, int64_t row, int64_t column, Unit<T>& unit) {
  const T* p = static_cast<const T*>(a.x) + row * a.h + column;
#pragma unroll
  for (int i = 0; i < 8; ++i, p += a.h) {
    unit[i] = {};
    if (row + i >= a.rows) continue;
    if constexpr (kVectors) {
      if (column < a.h) unit[i] = Load<8>(p);
    } else {
#pragma unroll
      for (int j = 0; j < 8; ++j)
        if (column + j < a.h) unit[i].Set(j, p[j]);
    }
  }
}

// Any h: a cluster for each block, whose warps read their strips twice. kVectors: h and rows are multiples of
// 8, all is aligned.
template <typename T, typename Q, bool kVectors>
__global__ void __launch_bounds__(kWarps<T> * 32, 1) NormFwdLongTiles(const NormFwdArgs a, int ctas) {
  extern __shared__ uint4 dynamic[];  // what Team has
  const Team team(a, dynamic, ctas);
  const int64_t row0 = int64_t{blockIdx.x / ctas} * kRows, row = row0 + Lane() / 8 * 8;
  const int64_t first = int64_t{team.WarpOfCluster()} * kColumns,
                step = int64_t{ctas} * team.warps * kColumns;
  Unit<T> unit;
  Moments moments{};
  for (int64_t strip = first; strip < a.h; strip += step) {
    const int64_t column = strip + Lane() % 8 * 8;
    LoadUnit<T, kVectors>(a, row, column, unit);
    const int columns = max(min(a.h - column, int64_t{8}), int64_t{0});
    moments =
        Merge(moments, StripMoments<T, kVectors>(unit, columns, min(a.h - strip, int64_t{kColumns}), a.rms));
  }
  team.Put(0, moments);
  __syncthreads();
  ClusterWait();  // the others have started
  team.Share(0);
  team.Finish(a, 0, row0);
  __syncthreads();

  const float scale = a.scale ? *a.scale : 1.f;
  float amax = 0.f;
  for (int64_t column = first + Lane() % 8 * 8; column < a.h && row < a.rows; column += step) {
    LoadUnit<T, kVectors>(a, row, column, unit);
    Affine<8> affine{};
    if constexpr (kVectors) {
      affine = LoadAffine<8>(a, column);
    } else {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        if (column + j >= a.h) continue;
        const Affine<1> one = LoadAffine<1>(a, column + j);
        affine.gamma[j] = one.gamma[0], affine.beta[j] = one.beta[0];
      }
    }
    uint32_t q[8][2];
    amax = NormalizeUnit<T, Q, kVectors>(a, unit, team.Stats(0), affine, scale, row, column, amax, q);
    StoreUnit<kVectors>(a, q, row, column);
  }
  StoreAmax(a, amax, team.exchange->amaxes);
}

// The clusters of kKernel that can be on the device at once. Asks CUDA once for a kernel, device and shape.
template <auto kKernel>
ffi::Error ActiveClusters(const Gpu& gpu, const cudaLaunchConfig_t& config, int ctas, int* out) {
  static std::atomic<int> known[64][kMostCtas * 16];
  const int place = (ctas - 1) * 16 + config.blockDim.x / 32 - 1;
  const bool keep = gpu.index < 64;
  *out = keep ? known[gpu.index][place].load(std::memory_order_relaxed) : 0;
  if (*out > 0) return ffi::Error::Success();
  if (ctas > 1) {
    TE_CUDA(cudaOccupancyMaxActiveClusters(out, kKernel, &config));
  } else {
    TE_CUDA(cudaOccupancyMaxActiveBlocksPerMultiprocessor(out, kKernel, config.blockDim.x,
                                                          config.dynamicSmemBytes));
    *out *= gpu.sms;
  }
  TE_CHECK(*out > 0, "te_norm_fwd: a cluster of %d CTAs does not fit on device %d", ctas, gpu.index);
  if (keep) known[gpu.index][place].store(*out, std::memory_order_relaxed);
  return ffi::Error::Success();
}

// kTiles if a cluster has a warp for every strip and room for the ring, else kLong. vectors: what kTiles asks
// of sizes and alignment.
template <typename T, auto kTiles, auto kLong>
ffi::Error LaunchTiles(cudaStream_t stream, const NormFwdArgs& args, bool vectors) {
  Gpu gpu;
  int arch;
  TE_TRY(CurrentGpu(&gpu));
  TE_TRY(Prepare<kTiles>(gpu, &arch));
  const auto pieces = [](int64_t n, int64_t size) { return (n + size - 1) / size; };
  const int64_t strips = pieces(args.h, kColumns), blocks = pieces(args.rows, kRows);
  const int ctas = arch >= 90 ? std::min(pieces(strips, kWarps<T>), int64_t{kMostCtas}) : 1;
  const int warps = std::min(pieces(strips, ctas), int64_t{kWarps<T>});
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim.x = ctas, cluster.val.clusterDim.y = 1, cluster.val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(unsigned(blocks * ctas)), config.blockDim = dim3(warps * 32), config.stream = stream;
  config.dynamicSmemBytes = sizeof(Exchange) + warps * kExchangeBytesOfWarp;
  config.attrs = &cluster, config.numAttrs = ctas > 1 ? 1 : 0;
  const size_t ring_bytes = size_t{kStages} * warps * kRows * kColumns * sizeof(T);
  if (vectors && strips <= ctas * warps &&
      config.dynamicSmemBytes + ring_bytes + kStaticBytes <= size_t(gpu.shared_bytes)) {
    config.dynamicSmemBytes += ring_bytes;
    int clusters;
    TE_TRY(ActiveClusters<kTiles>(gpu, config, ctas, &clusters));
    config.gridDim = dim3(unsigned(std::min(blocks, int64_t{clusters}) * ctas));
    TE_CUDA(cudaLaunchKernelEx(&config, kTiles, args, ctas));
  } else {
    TE_CUDA(cudaLaunchKernelEx(&config, kLong, args, ctas));
  }
  TE_LAUNCHED();
}

}  // namespace

ffi::Error LaunchNormFwdTransposed(cudaStream_t stream, const NormFwdArgs& args, ffi::DataType x_type,
                                   ffi::DataType type) {
  const bool vectors = args.h % 8 == 0 && args.rows % 8 == 0 && Aligned(args.x) && Aligned(args.y) &&
                       Aligned(args.data) && Aligned(args.gamma.data) && Aligned(args.beta.data);
  TE_CHECK(Aligned(args.data_t), "te_norm_fwd: data_t is not aligned to 16 bytes");
  return DispatchFloat(x_type, [&]<typename T>() -> ffi::Error {
    return DispatchFp8(type, [&]<typename Q>() -> ffi::Error {
      constexpr auto kTiles = NormFwdTiles<T, Q>;
      return vectors ? LaunchTiles<T, kTiles, NormFwdLongTiles<T, Q, true>>(stream, args, true)
                     : LaunchTiles<T, kTiles, NormFwdLongTiles<T, Q, false>>(stream, args, false);
    });
  });
}

}  // namespace te
