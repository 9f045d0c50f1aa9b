// Quantize to FP8 with a scale for each block of 128: one reading of x writes data [m, p, n, q] and data_t
// [n, q, m, p], each with the scales of its own blocks, and the column sums. Blocks are 1 x 128 along q in
// data and along p in data_t, or 128 x 128 in both; the last along an axis may be cut. Bytes per element: 2
// read (bf16) and 2 written.
//
// A CTA has one tile of 128 x 128, so every block is in one CTA. A thread keeps its 4 rows of 8 columns, as
// read, in registers, until the amaxes are known: those of rows by shuffles, for a row lies in half a warp,
// those of columns through shared memory.

#include <cmath>

#include "fp8.cuh"
#include "ptx.cuh"
#include "reduce.cuh"

namespace te {
namespace {

constexpr int kBlock = 128, kThreads = 512, kWarps = kThreads / 32;
constexpr int kGroups = kBlock / 8;          // of 8 columns; 16 threads share a row
constexpr int kRows = 4;                     // of a thread
constexpr int kWords = kBlock / 4 * kBlock;  // of 4 FP8, of a tile
static_assert(kThreads / kGroups * kRows == kBlock);

struct BlockArgs {
  const void* x;               // [m, p, n, q]
  uint8_t* data;               // [m, p, n, q] or nullptr
  uint8_t* data_t;             // [n, q, m, p] or nullptr
  float* inv;                  // of data: [n, qs, m, p], of squares [m, ps, n, qs]; nullptr without data
  float* inv_t;                // of data_t: [m, ps, n, q], of squares [n, qs, m, ps]; nullptr without data_t
  float* dbias;                // [m, ps, n, q] partial sums, or nullptr
  int64_t m, p, n, q, ps, qs;  // ps, qs: blocks along p and q
  float fp8_max, epsilon;
  bool power_2, e5m2;
};

// The law of te_jax/recipe/_base.py, scale_of_amax, with IEEE divisions: the bits of the CPU.
__device__ __forceinline__ float ScaleOf(float amax, const BlockArgs& a) {
  if (!(amax > 0.f && amax < INFINITY)) return 1.f;
  const float scale = fminf(fmaxf(a.fp8_max / fmaxf(amax, a.epsilon), 1.17549435e-38f), 3.40282347e38f);
  return a.power_2 ? __uint_as_float(__float_as_uint(scale) & 0x7f800000u) : scale;
}

// The transposed tile: columns of kBlock / 4 words of 4 rows. The xor spreads the groups of columns that a
// warp writes at once over the banks, by twos; it moves words by fours, so 16-byte reads stay in one piece.
__device__ __forceinline__ int TileWord(int column, int word) {
  return column * (kBlock / 4) + (word ^ (column / 8 * 4 % (kBlock / 4)));
}

// tile -> data_t, 128 bytes of a column by 8 threads; byte by byte where columns are not aligned to 16.
__device__ inline void StoreColumns(const uint32_t* tile, uint8_t* data_t, int64_t stride, int rows,
                                    int columns, bool vectors) {
  if (vectors) {
    for (int i = threadIdx.x; i < kWords / 4; i += kThreads) {
      const int c = i / (kBlock / 16), r = i % (kBlock / 16) * 16;
      if (r >= rows || c >= columns) continue;
      __stcs(reinterpret_cast<uint4*>(data_t + c * stride + r),
             *reinterpret_cast<const uint4*>(tile + TileWord(c, r / 4)));
    }
    return;
  }
  for (int i = threadIdx.x; i < kBlock * kBlock; i += kThreads) {
    const int c = i / kBlock, r = i % kBlock;
    if (r < rows && c < columns) data_t[c * stride + r] = tile[TileWord(c, r / 4)] >> r % 4 * 8;
  }
}

__device__ __forceinline__ uint2 Quantize8(const float (&f)[8], bool e5m2) {
  if (e5m2)
    return make_uint2(Saturate4<__nv_fp8_e5m2>(f[0], f[1], f[2], f[3]),
                      Saturate4<__nv_fp8_e5m2>(f[4], f[5], f[6], f[7]));
  return make_uint2(Saturate4<__nv_fp8_e4m3>(f[0], f[1], f[2], f[3]),
                    Saturate4<__nv_fp8_e4m3>(f[4], f[5], f[6], f[7]));
}

// 8 columns of a row of data, of which `columns` are inside.
template <bool kVectors>
__device__ __forceinline__ void StoreRow(uint8_t* p, uint2 q, int columns) {
  if constexpr (kVectors) {
    __stcs(reinterpret_cast<uint2*>(p), q);
  } else {
    for (int j = 0; j < 8 && j < columns; ++j) p[j] = uint8_t((j < 4 ? q.x : q.y) >> j % 4 * 8);
  }
}

// scratch[kWarps][kBlock], a value of each warp for each column -> the result over the tile, in the first
// kBlock threads. Both halves of a warp have values of the same columns.
template <typename Combine>
__device__ __forceinline__ float OfColumns(const float (&mine)[8], float (*scratch)[kBlock],
                                           Combine combine) {
  const int c = threadIdx.x % kGroups * 8;
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const float both = combine(mine[j], __shfl_xor_sync(~0u, mine[j], kGroups));
    if (Lane() < kGroups) scratch[WarpIndex()][c + j] = both;
  }
  __syncthreads();
  float all = 0.f;
  if (threadIdx.x < kBlock) {
    all = scratch[0][threadIdx.x];
    for (int w = 1; w < kWarps; ++w) all = combine(all, scratch[w][threadIdx.x]);
  }
  return all;
}

// kVectors: q % 8 == 0 and rows of x and data are aligned, so that a thread's 8 columns are inside or outside
// together. kSquare: one scale for the tile.
template <typename T, bool kVectors, bool kSquare>
__global__ void __launch_bounds__(kThreads, 2) QuantizeBlocks(const BlockArgs a) {
  alignas(16) __shared__ uint32_t tile[kWords];
  __shared__ float scratch[kWarps][kBlock], column_scales[kBlock];
  const int64_t strips = a.n * a.qs, band = blockIdx.x / strips, strip = blockIdx.x % strips;
  const int64_t batch = band / a.ps, row0 = band % a.ps * kBlock;  // of m, of p
  const int64_t slot = strip / a.qs, column0 = strip % a.qs * kBlock;
  const int rows = min(a.p - row0, int64_t{kBlock}), columns = min(a.q - column0, int64_t{kBlock});
  const int64_t stride = a.n * a.q, first = (batch * a.p + row0) * stride + slot * a.q + column0;
  const int c = threadIdx.x % kGroups * 8, r = threadIdx.x / kGroups * kRows;  // the thread's first

  Vec<T, 8> x[kRows];
#pragma unroll
  for (int k = 0; k < kRows; ++k) {
    const T* p = static_cast<const T*>(a.x) + first + (r + k) * stride + c;
    const int inside = r + k < rows ? columns - c : 0;
    if constexpr (kVectors) {
      x[k] = LoadOnce<8>(p, inside > 0);
    } else {
      x[k] = {};
      for (int j = 0; j < 8; ++j)
        if (j < inside) x[k].Set(j, p[j]);
    }
  }

  const auto of_row = [&](int k) {
    float amax = 0.f;
#pragma unroll
    for (int j = 0; j < 8; ++j) amax = MaxNan(amax, fabsf(x[k][j]));
    return amax;
  };
  if (a.dbias) {
    float sums[8] = {};
#pragma unroll
    for (int k = 0; k < kRows; ++k)
#pragma unroll
      for (int j = 0; j < 8; ++j) sums[j] += x[k][j];
    const float sum = OfColumns(sums, scratch, [](float u, float v) { return u + v; });
    if (threadIdx.x < columns) a.dbias[band * stride + slot * a.q + column0 + threadIdx.x] = sum;
    __syncthreads();  // scratch is free again
  }

  float column_scale[8];
  if constexpr (kSquare) {
    float peak = 0.f;
#pragma unroll
    for (int k = 0; k < kRows; ++k) peak = MaxNan(peak, of_row(k));
    const unsigned top = CtaMax(__float_as_uint(peak), reinterpret_cast<unsigned*>(scratch));
    if (threadIdx.x == 0) {
      const float scale = column_scales[0] = ScaleOf(__uint_as_float(top), a);
      if (a.inv) a.inv[band * strips + strip] = 1.f / scale;
      if (a.inv_t) a.inv_t[strip * a.m * a.ps + band] = 1.f / scale;
    }
    __syncthreads();
    column_scale[0] = column_scales[0];
  } else {
    float amax[8] = {};
#pragma unroll
    for (int k = 0; k < kRows; ++k)
#pragma unroll
      for (int j = 0; j < 8; ++j) amax[j] = MaxNan(amax[j], fabsf(x[k][j]));
    const float peak = OfColumns(amax, scratch, [](float u, float v) { return MaxNan(u, v); });
    if (threadIdx.x < kBlock) {
      const float scale = column_scales[threadIdx.x] = ScaleOf(peak, a);
      if (a.inv_t && threadIdx.x < columns)
        a.inv_t[band * stride + slot * a.q + column0 + threadIdx.x] = 1.f / scale;
    }
    __syncthreads();
#pragma unroll
    for (int j = 0; j < 8; ++j) column_scale[j] = column_scales[c + j];
  }

  const auto scale_of_row = [&](int k) {  // of the thread's k-th, which 16 threads share; one writes it
    if constexpr (kSquare) return column_scale[0];
    float amax = of_row(k);
#pragma unroll
    for (int other = kGroups / 2; other > 0; other /= 2)
      amax = MaxNan(amax, __shfl_xor_sync(~0u, amax, other));
    const float scale = ScaleOf(amax, a);
    if (a.inv && c == 0 && r + k < rows) a.inv[strip * a.m * a.p + batch * a.p + row0 + r + k] = 1.f / scale;
    return scale;
  };
  uint32_t low[kRows], high[kRows];  // columns 0..3 and 4..7 of a row, then 4 rows of a column
#pragma unroll
  for (int k = 0; k < kRows; ++k) {
    const float row_scale = scale_of_row(k);
    float f[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) f[j] = x[k][j] * row_scale;
    uint2 q = Quantize8(f, a.e5m2);
    if (a.data && r + k < rows && c < columns)
      StoreRow<kVectors>(a.data + first + (r + k) * stride + c, q, columns - c);
    if constexpr (!kSquare) {
#pragma unroll
      for (int j = 0; j < 8; ++j) f[j] = x[k][j] * column_scale[j];
      q = Quantize8(f, a.e5m2);
    }
    low[k] = q.x, high[k] = q.y;
  }
  if (!a.data_t) return;
  Transpose4x4(low[0], low[1], low[2], low[3]);
  Transpose4x4(high[0], high[1], high[2], high[3]);
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    tile[TileWord(c + j, r / 4)] = low[j];
    tile[TileWord(c + 4 + j, r / 4)] = high[j];
  }
  __syncthreads();
  const int64_t stride_t = a.m * a.p;
  StoreColumns(tile, a.data_t + (slot * a.q + column0) * stride_t + batch * a.p + row0, stride_t, rows,
               columns, a.p % 16 == 0);
}

ffi::Error GetArgs(const Arg& x, Ret& data, Ret& data_t, Ret& scale_inv, Ret& scale_inv_t, Ret& block_inv,
                   Ret& block_inv_t, Ret& dbias, int64_t lead, bool square, BlockArgs* out) {
  const auto dims = x.dimensions();
  const int64_t axes = dims.size();
  TE_CHECK(lead >= 0 && lead + 2 <= axes, "te_quantize_block: lead is %ld, x is %s", long(lead),
           Shape(x).c_str());
  BlockArgs a{};
  a.m = a.n = 1, a.p = dims[lead], a.q = dims[axes - 1];
  for (int64_t i = 0; i < axes - 1; ++i)
    if (i != lead) (i < lead ? a.m : a.n) *= dims[i];
  a.ps = (a.p + kBlock - 1) / kBlock, a.qs = (a.q + kBlock - 1) / kBlock;
  const auto sized = [](Ret& r, int64_t count) {
    return !Present(r) || int64_t(r->element_count()) == count;
  };
  Ret &inv = square ? block_inv : scale_inv, &inv_t = square ? block_inv_t : scale_inv_t;
  const int64_t all = a.m * a.p * a.n * a.q, tiles = a.m * a.ps * a.n * a.qs;
  TE_CHECK(sized(data, all) && sized(data_t, all) && sized(dbias, a.m * a.ps * a.n * a.q) &&
               sized(inv, square ? tiles : a.n * a.qs * a.m * a.p) &&
               sized(inv_t, square ? tiles : a.m * a.ps * a.n * a.q),
           "te_quantize_block: the results do not go with x %s, lead %ld", Shape(x).c_str(), long(lead));
  TE_CHECK(!Present(data) || !Present(data_t) || data->element_type() == data_t->element_type(),
           "te_quantize_block: data and data_t differ in type");
  const auto type = Present(data)     ? data->element_type()
                    : Present(data_t) ? data_t->element_type()
                                      : ffi::F8E4M3FN;
  TE_CHECK(type == ffi::F8E4M3FN || type == ffi::F8E5M2, "te_quantize_block: data has dtype %d, not FP8",
           int(type));
  a.x = x.untyped_data();
  a.data = Data<uint8_t>(data), a.data_t = Data<uint8_t>(data_t);
  a.inv = Data<float>(inv), a.inv_t = Data<float>(inv_t), a.dbias = Data<float>(dbias);
  a.e5m2 = type == ffi::F8E5M2, a.fp8_max = a.e5m2 ? 57344.f : 448.f;
  TE_CHECK(Aligned(a.data_t), "te_quantize_block: data_t is not aligned to 16 bytes");
  *out = a;
  return ffi::Error::Success();
}

ffi::Error LaunchQuantizeBlock(cudaStream_t stream, Arg x, Ret data, Ret data_t, Ret scale_inv,
                               Ret scale_inv_t, Ret block_inv, Ret block_inv_t, Ret dbias, int64_t lead,
                               bool square, bool power_2, double epsilon) {
  BlockArgs a;
  TE_TRY(GetArgs(x, data, data_t, scale_inv, scale_inv_t, block_inv, block_inv_t, dbias, lead, square, &a));
  a.power_2 = power_2, a.epsilon = float(epsilon);
  if (x.element_count() == 0) return Zero(stream, {&*dbias});
  const unsigned ctas = unsigned(a.m * a.ps * a.n * a.qs);
  const bool vectors = Aligned(a.x) && Aligned(a.data) && a.q % 8 == 0;
  return DispatchFloat(x.element_type(), [&]<typename T>() -> ffi::Error {
    const auto kernel = square ? (vectors ? QuantizeBlocks<T, true, true> : QuantizeBlocks<T, false, true>)
                               : (vectors ? QuantizeBlocks<T, true, false> : QuantizeBlocks<T, false, false>);
    kernel<<<ctas, kThreads, 0, stream>>>(a);
    TE_LAUNCHED();
  });
}

}  // namespace

TE_HANDLER(te_quantize_block, LaunchQuantizeBlock,
           Bind()
               .Ctx<Stream>()
               .Arg<Arg>()  // x: m... m n... n
               .Ret<Arg>()  // data?: m... m n... n
               .Ret<Arg>()  // data_t?: n... n m... m
               .Ret<Arg>()  // scale_inv?: f32 n... n/128 m... m
               .Ret<Arg>()  // scale_inv_t?: f32 m... m/128 n... n
               .Ret<Arg>()  // block_inv?: f32 m... m/128 n... n/128
               .Ret<Arg>()  // block_inv_t?: f32 n... n/128 m... m/128
               .Ret<Arg>()  // dbias?: partial [*m * m/128, n... n]
               .Attr<int64_t>("lead")
               .Attr<bool>("square")
               .Attr<bool>("power_2")
               .Attr<double>("epsilon"));

}  // namespace te
