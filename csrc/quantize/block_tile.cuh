// To FP8 with a scale for each block of 128: one reading of the sources writes data [m, p, n, q] and data_t
// [n, q, m, p], each with the scales of its own blocks, and the column sums. What te_quantize_block,
// te_activation_block_* and te_norm_block_fwd share. Blocks are 1 x 128 along q in data and along p in
// data_t, or 128 x 128 in both; the last along an axis may be cut.
//
// A CTA has one tile of 128 x 128, so every block is in one CTA. A thread keeps its 4 rows of 8 columns in
// registers, in the type T of the source, until the amaxes are known: shuffles find the amaxes of rows, for a
// row lies in half a warp, and shared memory the amaxes of columns.
#pragma once

#include <algorithm>
#include <cmath>

#include "base/divisor.cuh"
#include "base/finish.h"
#include "base/fp8.cuh"
#include "base/groups.cuh"
#include "base/partials.h"
#include "base/ptx.cuh"
#include "base/reduce.cuh"
#include "quantize/transposed.cuh"

namespace te {

constexpr int kBlockThreads = 512, kBlockWarps = kBlockThreads / 32;
constexpr int kBlockGroups = kBlock / 8;  // of 8 columns; 16 threads share a row
constexpr int kBlockRows = 4;             // of a thread
static_assert(kBlockThreads / kBlockGroups * kBlockRows == kBlock);

struct BlockArgs {
  uint8_t* data;          // [m, p, n, q] or nullptr
  uint8_t* data_t;        // [n, q, m, p] or nullptr
  float* inv;             // of data: [n, qs, m, p], of squares [m, ps, n, qs]; nullptr without data
  float* inv_t;           // of data_t: [m, ps, n, q], of squares [n, qs, m, ps]; nullptr without data_t
  float* dbias_partials;  // [m, ps, n, q] or nullptr
  // ps, qs: blocks along p and q. All have 32 bits, and so have the rows m p and the columns n q: an address
  // is then one multiplication. With 64 bits, addresses and divisions were a third of all instructions.
  unsigned m, p, n, q, ps, qs;
  Divisor by_ps, by_qs;
  float fp8_max, epsilon;
  bool power_2, e5m2;

  __host__ __device__ unsigned rows() const { return m * p; }
  __host__ __device__ unsigned columns() const { return n * q; }
};

// The law of te_jax/recipe/_base.py, scale_of_amax, with IEEE divisions: the bits of the CPU.
__device__ __forceinline__ float ScaleOfBlock(float amax, const BlockArgs& a) {
  if (!(amax > 0.f && amax < INFINITY)) return 1.f;
  const float scale = fminf(fmaxf(a.fp8_max / fmaxf(amax, a.epsilon), 1.17549435e-38f), 3.40282347e38f);
  return a.power_2 ? __uint_as_float(__float_as_uint(scale) & 0x7f800000u) : scale;
}

// 8 columns of a row of data, of which `columns` are inside.
template <bool kVectors>
__device__ __forceinline__ void StoreBlockRow(uint8_t* p, uint2 q, int columns) {
  if constexpr (kVectors) {
    __stcs(reinterpret_cast<uint2*>(p), q);
  } else {
    for (int j = 0; j < 8 && j < columns; ++j) p[j] = uint8_t((j < 4 ? q.x : q.y) >> j % 4 * 8);
  }
}

// Values of the 8 columns that a thread shares with those above and below it, in kN words -> word threadIdx.x
// / kSharing of the tile's, over all of its rows, in each of kSharing neighbours.
template <int kN>
constexpr int kSharing = kBlockThreads / (kBlockGroups * kN);

template <int kN, typename Combine>
__device__ __forceinline__ uint32_t OverColumns(const uint32_t (&mine)[kN], uint32_t* scratch,
                                                Combine combine) {
  constexpr int kLine = kBlockGroups * kN + 4;  // 4: the lines of neighbours lie in different banks
  const bool upper = Lane() >= kBlockGroups;  // half a warp has these columns of other rows: each keeps half
  uint32_t* line = scratch + WarpIndex() * kLine + Lane() % kBlockGroups * kN + upper * (kN / 2);
  struct alignas(kN / 2 * 4) {
    uint32_t words[kN / 2];
  } half;
#pragma unroll
  for (int j = 0; j < kN / 2; ++j) {
    const uint32_t away = upper ? mine[j] : mine[j + kN / 2];
    half.words[j] = combine(upper ? mine[j + kN / 2] : mine[j], __shfl_xor_sync(~0u, away, kBlockGroups));
  }
  *reinterpret_cast<decltype(half)*>(line) = half;
  __syncthreads();
  const int word = threadIdx.x / kSharing<kN>, first = threadIdx.x % kSharing<kN>;
  uint32_t all = scratch[first * kLine + word];
#pragma unroll
  for (int w = first + kSharing<kN>; w < first + kBlockWarps; w += kSharing<kN>)
    all = combine(all, scratch[w * kLine + word]);
  return OfLanes<kSharing<kN>>(all, combine);
}

// A CTA's tile, and the rows and columns of it that a thread has.
struct BlockPlace {
  unsigned band, strip;  // its row of tiles, of those in m and p; its column of tiles, of those in n and q
  unsigned row, column;  // the first: of m and p, of n and q
  int rows, columns;     // of the tile that are inside
  int r, c;              // the thread's first
};

struct BlockShared {
  Transposed<kBlock, kBlock> tile;
  alignas(16) uint32_t scratch[kBlockWarps * (kBlock + 4)];
  alignas(16) float column_scales[kBlock];
};

// The bits of |x|, of 16-bit types two in a word: unsigned maxima of them order numbers < inf < NaN, so an
// amax keeps a NaN.
template <typename T>
__device__ __forceinline__ uint32_t AbsWord(uint32_t word) {
  return word & (sizeof(T) == 2 ? 0x7fff7fffu : 0x7fffffffu);
}

template <typename T>
__device__ __forceinline__ uint32_t MaxWord(uint32_t a, uint32_t b) {
  if constexpr (sizeof(T) == 2) return __vmaxu2(a, b);
  return max(a, b);
}

// Value i of a word.
template <typename T>
__device__ __forceinline__ float ValueOf(uint32_t word, int i) {
  Vec<T, 4 / sizeof(T)> values;
  values.words[0] = word;
  return values[i];
}

// The bits of the largest value of a word, as f32.
template <typename T>
__device__ __forceinline__ unsigned TopOf(uint32_t word) {
  const unsigned top = __float_as_uint(ValueOf<T>(word, 0));
  return sizeof(T) == 2 ? max(top, __float_as_uint(ValueOf<T>(word, 1))) : top;
}

template <typename T>
__device__ __forceinline__ void StoreBlockSums(const Vec<T, 8> (&x)[kBlockRows], const BlockPlace& at,
                                               const BlockArgs& a, BlockShared& shared) {
  uint32_t sums[8];
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    float sum = x[0][j];
#pragma unroll
    for (int k = 1; k < kBlockRows; ++k) sum += x[k][j];
    sums[j] = __float_as_uint(sum);
  }
  const uint32_t sum = OverColumns(sums, shared.scratch, [](uint32_t u, uint32_t v) {
    return __float_as_uint(__uint_as_float(u) + __uint_as_float(v));
  });
  const int column = threadIdx.x / kSharing<8>;
  if (threadIdx.x % kSharing<8> == 0 && column < at.columns)
    a.dbias_partials[uint64_t{at.band} * a.columns() + at.column + column] = __uint_as_float(sum);
  __syncthreads();  // scratch is free again
}

// Finds the scales of the thread's columns, of blocks along the rows, or in [0] the scale of the square, and
// writes their inverses.
template <bool kSquare, typename T>
__device__ __forceinline__ void ColumnScales(const Vec<T, 8> (&x)[kBlockRows], const BlockPlace& at,
                                             const BlockArgs& a, BlockShared& shared, float (&scales)[8]) {
  constexpr int kPerWord = Vec<T, 8>::kPerWord, kN = 8 / kPerWord;
  uint32_t amax[kN] = {};
#pragma unroll
  for (int k = 0; k < kBlockRows; ++k)
#pragma unroll
    for (int w = 0; w < kN; ++w) amax[w] = MaxWord<T>(amax[w], AbsWord<T>(x[k].words[w]));
  if constexpr (kSquare) {
    uint32_t all = 0;
#pragma unroll
    for (int w = 0; w < kN; ++w) all = MaxWord<T>(all, amax[w]);
    const unsigned top = CtaMax(TopOf<T>(all), shared.scratch);
    if (threadIdx.x == 0) {
      const float scale = shared.column_scales[0] = ScaleOfBlock(__uint_as_float(top), a);
      if (a.inv) a.inv[uint64_t{at.band} * (a.n * a.qs) + at.strip] = 1.f / scale;
      if (a.inv_t) a.inv_t[uint64_t{at.strip} * (a.m * a.ps) + at.band] = 1.f / scale;
    }
    __syncthreads();
    scales[0] = shared.column_scales[0];
  } else {
    const uint32_t word = OverColumns(amax, shared.scratch, MaxWord<T>);
    const int i = threadIdx.x % kSharing<kN>, column = threadIdx.x / kSharing<kN> * kPerWord + i;
    if (i < kPerWord) {
      const float scale = shared.column_scales[column] = ScaleOfBlock(ValueOf<T>(word, i), a);
      if (a.inv_t && column < at.columns)
        a.inv_t[uint64_t{at.band} * a.columns() + at.column + column] = 1.f / scale;
    }
    __syncthreads();
    const Vec<float, 8> of_mine = Load<8>(shared.column_scales + at.c);
#pragma unroll
    for (int j = 0; j < 8; ++j) scales[j] = of_mine[j];
  }
}

// The scales of the thread's rows, each of which half a warp shares. Four lanes each find one of them.
template <typename T>
__device__ __forceinline__ void RowScales(const Vec<T, 8> (&x)[kBlockRows], const BlockPlace& at,
                                          const BlockArgs& a, float (&scales)[kBlockRows]) {
  static_assert(kBlockRows == 4 && kBlockGroups == 16);
  unsigned tops[4];
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    uint32_t all = 0;
#pragma unroll
    for (uint32_t word : x[k].words) all = MaxWord<T>(all, AbsWord<T>(word));
    tops[k] = TopOf<T>(all);
  }
  const bool upper = Lane() & 8, odd = Lane() & 4;
  unsigned two[2];
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    const unsigned away = upper ? tops[k] : tops[k + 2];
    two[k] = max(upper ? tops[k + 2] : tops[k], __shfl_xor_sync(~0u, away, 8));
  }
  const unsigned away = odd ? two[0] : two[1];
  unsigned top = max(odd ? two[1] : two[0], __shfl_xor_sync(~0u, away, 4));
  top = max(top, __shfl_xor_sync(~0u, top, 2));
  top = max(top, __shfl_xor_sync(~0u, top, 1));
  const float scale = ScaleOfBlock(__uint_as_float(top), a);
  const int row = at.r + upper * 2 + odd;
  if (a.inv && Lane() % 4 == 0 && row < at.rows)
    a.inv[uint64_t{at.strip} * a.rows() + at.row + row] = 1.f / scale;
#pragma unroll
  for (int k = 0; k < 4; ++k) scales[k] = __shfl_sync(~0u, scale, Lane() / 16 * 16 + k * 4);
}

template <typename T>
__device__ __forceinline__ uint2 QuantizeRow(const Vec<T, 8>& x, const float* scales, int step, bool e5m2) {
  float f[8];
#pragma unroll
  for (int j = 0; j < 8; ++j) f[j] = x[j] * scales[j * step];
  uint2 q;  // two returns, not one of either type: so compiled, the kernels are those that were measured
  if (e5m2) return Quantize8<__nv_fp8_e5m2>(f, q.x, q.y), q;
  return Quantize8<__nv_fp8_e4m3>(f, q.x, q.y), q;
}

// Writes all results of one tile, whose elements its threads hold. Where there are several tiles in turn,
// barriers lie between the reads of `shared` of one and the writes of the next.
template <bool kVectors, bool kSquare, typename T>
__device__ __forceinline__ void WriteBlocks(const Vec<T, 8> (&x)[kBlockRows], const BlockPlace& at,
                                            const BlockArgs& a, BlockShared& shared) {
  const int r = at.r, c = at.c;
  if (a.dbias_partials) StoreBlockSums(x, at, a, shared);
  float column_scales[8];
  ColumnScales<kSquare>(x, at, a, shared, column_scales);
  float row_scales[kBlockRows];
  if constexpr (!kSquare) RowScales(x, at, a, row_scales);
  uint8_t* data = a.data + (uint64_t{at.row + r} * a.columns() + at.column + c);
  uint32_t words[2][kBlockRows];  // columns 0..3 and 4..7 of a row
#pragma unroll
  for (int k = 0; k < kBlockRows; ++k) {
    uint2 q = QuantizeRow(x[k], kSquare ? column_scales : row_scales + k, 0, a.e5m2);
    if (a.data && r + k < at.rows && c < at.columns)
      StoreBlockRow<kVectors>(data + uint64_t{unsigned(k)} * a.columns(), q, at.columns - c);
    if constexpr (!kSquare) q = QuantizeRow(x[k], column_scales, 1, a.e5m2);
    words[0][k] = q.x, words[1][k] = q.y;
  }
  if (!a.data_t) return;
  shared.tile.Store(words, c, r / 4);
  __syncthreads();
  uint8_t* data_t = a.data_t + (uint64_t{at.column} * a.rows() + at.row);
  shared.tile.StoreColumns<kBlockThreads>(data_t, a.rows(), at.rows, at.columns, a.p % 16 == 0);
}

// Source:
//   Type      of the values, before they are quantized
//   Raw       what is read for 8 neighbours of a row
//   kSlots    results for each of these: 1, or n, side by side
//   kCtas     on one multiprocessor, for TE_BLOCK_KERNELS
//   kInFlight rows that a thread has on their way
//   Load<kVectors>(row, column, columns) -> Raw: 8 columns from `column` on, of which `columns` are inside;
//             row: of m and p; column: of n and q, or of q with kSlots of n; zeros outside give values of
//             zero
//   ReadSlots, LoadSlot<kVectors>(slot, column, columns) -> Raw instead of Load where it Gathers
//   Results(Raw, Vec<Type, 8> (&)[kSlots])
//   Await(row0, rows) if there: called once by all threads, behind the first Loads and before any Results
//   Skips(row0) if there: whether nobody reads the tile's rows, of which row0 is the first
//   groups if there, GroupRows: the rows are in groups, m is 1, and p a multiple of 128
//   order if there, as of TileOf
// band: a row of tiles. strip: a column of tiles, with kSlots results in each tile. kVectors: q % 8 == 0, and
// rows of the sources and of data are aligned.
template <bool kVectors, bool kSquare, typename Source>
__device__ __forceinline__ void WriteBlockTile(const Source& source, const BlockArgs& a, unsigned band,
                                               unsigned strip, BlockShared& shared) {
  constexpr int kSlots = Source::kSlots, kInFlight = Source::kInFlight;
  const Split of_band = InGroups<Source> ? Split{0, band} : a.by_ps.Of(band), of_strip = a.by_qs.Of(strip);
  const unsigned slot = of_strip.quotient * kSlots, row = of_band.rest * kBlock,
                 column = of_strip.rest * kBlock;
  BlockPlace at;
  at.band = band, at.strip = slot * a.qs + of_strip.rest;
  at.row = of_band.quotient * a.p + row, at.column = slot * a.q + column;
  at.rows = InGroups<Source> ? kBlock : min(a.p - row, kBlock), at.columns = min(a.q - column, kBlock);
  at.r = threadIdx.x / kBlockGroups * kBlockRows, at.c = threadIdx.x % kBlockGroups * 8;
  [[maybe_unused]] int slots[kBlockRows];
  if constexpr (Gathers<Source>) source.ReadSlots(at.row + at.r, at.rows - at.r, slots);
  if constexpr (requires { source.Skips(at.row); }) {
    if (source.Skips(at.row)) return;
  }
  int end = at.rows;  // of the rows that are read
  if constexpr (InGroups<Source>) {
    const Bands bands = source.groups.At(at.row, nullptr);
    if (bands.unused) return;
    end = bands.ends[0];
  }

  const auto load = [&](int k) {
    const int inside = at.r + k < end ? at.columns - at.c : 0;
    if constexpr (Gathers<Source>)
      return source.template LoadSlot<kVectors>(slots[k], at.column + at.c, inside);
    else
      return source.template Load<kVectors>(at.row + at.r + k, at.column + at.c, inside);
  };
  typename Source::Raw raw[kInFlight];
#pragma unroll
  for (int k = 0; k < kInFlight; ++k) raw[k] = load(k);
  if constexpr (requires { source.Await(at.row, at.rows); }) source.Await(at.row, at.rows);
  Vec<typename Source::Type, 8> x[kSlots][kBlockRows];
#pragma unroll
  for (int k = 0; k < kBlockRows; ++k) {
    Vec<typename Source::Type, 8> of_row[kSlots];
    source.Results(raw[k % kInFlight], of_row);
    if (k + kInFlight < kBlockRows) raw[k % kInFlight] = load(k + kInFlight);
#pragma unroll
    for (int s = 0; s < kSlots; ++s) x[s][k] = of_row[s];
  }
#pragma unroll
  for (int s = 0; s < kSlots; ++s, at.column += a.q, at.strip += a.qs)
    WriteBlocks<kVectors, kSquare>(x[s], at, a, shared);
}

template <typename Source>
using BlockKernel = void (*)(const Source, const BlockArgs, const Divisor);

// Defines the kernel of an op, whose CTAs have one tile each, under the op's name, for profiles.
// name_kernels: without vectors and with.
#define TE_BLOCK_KERNELS(name)                                                  \
  template <typename Source, bool kSquare, bool kVectors>                       \
  __global__ void __launch_bounds__(kBlockThreads, Source::kCtas)               \
      name(const Source source, const BlockArgs a, const Divisor by_strips) {   \
    __shared__ BlockShared shared;                                              \
    const Split at = by_strips.Of(TileOf(source, blockIdx.x));                  \
    WriteBlockTile<kVectors, kSquare>(source, a, at.quotient, at.rest, shared); \
  }                                                                             \
  struct name##_kernels {                                                       \
    template <typename Source, bool kSquare>                                    \
    static constexpr BlockKernel<Source> of[2] = {name<Source, kSquare, false>, \
                                                  name<Source, kSquare, true>}; \
  }

// The results of a call, with scales of rows or of squares. kNone where the op has none.
struct BlockArrays {
  Tensor data, data_t, inv, inv_t;
  Totals totals = {};
  const char *inv_name = "scale_inv", *inv_t_name = "scale_inv_t";
};

// The arguments for values of rows [m..., p] (`rows`) and columns [n..., q], once the results are as
// expected; the experts [e...] lie one after the other.
inline Status GetBlockArgs(const char* op, const Axes& rows, const Axes& n_axes, int64_t q,
                           const BlockArrays& b, bool power_2, double epsilon, BlockArgs* out,
                           bool square = false, const Axes& e = {}) {
  const Axes m_axes = rows.Without(1), columns = n_axes + Axes{q};
  const int64_t m = m_axes.count(), p = rows.last(), ps = CeilDiv(p, kBlock), n = n_axes.count(),
                qs = CeilDiv(q, kBlock);
  TE_CHECK(m * p <= UINT32_MAX && n * q <= UINT32_MAX && e.count() * m * ps * n * qs <= INT32_MAX,
           "%s: [%ld, %ld, %ld, %ld] is too large", op, long(e.count() * m), long(p), long(n), long(q));
  const Axes row_blocks = m_axes + Axes{ps}, column_blocks = n_axes + Axes{qs};
  const Axes inv = square ? row_blocks + column_blocks : column_blocks + rows;
  const Axes inv_t = square ? column_blocks + row_blocks : row_blocks + columns;
  TE_TRY(Expect(op, {{"data", b.data, kFp8, e + rows + columns, kOptional},
                     {"data_t", b.data_t, Fp8Like(b.data), e + columns + rows, kOptional},
                     {b.inv_name, b.inv, F32, e + inv, kOptional},
                     {b.inv_t_name, b.inv_t, F32, e + inv_t, kOptional}}));
  TE_TRY(ExpectTotals(op, b.totals, {}, {}, columns, Axes{BlockPartials(rows)} + columns));
  BlockArgs a{};
  a.m = m, a.p = p, a.n = n, a.q = q, a.ps = ps, a.qs = qs;
  a.by_ps = Divisor(std::max(a.ps, 1u)), a.by_qs = Divisor(std::max(a.qs, 1u));
  a.data = Data<uint8_t>(b.data), a.data_t = Data<uint8_t>(b.data_t);
  a.inv = Data<float>(b.inv), a.inv_t = Data<float>(b.inv_t);
  a.dbias_partials = Data<float>(b.totals.dbias_partials);
  a.e5m2 = IsE5M2(b.data, b.data_t);
  a.fp8_max = a.e5m2 ? 57344.f : 448.f, a.power_2 = power_2, a.epsilon = float(epsilon);
  TE_CHECK(Aligned(a.data_t), "%s: data_t is not aligned to 16 bytes", op);
  *out = a;
  return {};
}

// aligned: whether the rows of the sources are aligned; the results are looked at here.
template <typename Kernels, bool kSquare = false, typename Source>
Status LaunchBlocks(cudaStream_t stream, const Source& source, const BlockArgs& a, bool aligned,
                    unsigned experts = 1) {
  const unsigned strips = a.n / Source::kSlots * a.qs;
  const auto kernel = Kernels::template of<Source, kSquare>[aligned && Aligned(a.data) && a.q % 8 == 0];
  kernel<<<experts * a.m * a.ps * strips, kBlockThreads, 0, stream>>>(source, a, Divisor(strips));
  TE_LAUNCHED();
}

}  // namespace te
