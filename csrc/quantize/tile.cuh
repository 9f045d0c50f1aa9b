// One reading of the sources, FP8 in both layouts, amax and column sums: what te_quantize and te_activation_*
// share. A Source says what to read for 8 neighbours of a row and which f32 values it gives; the rest is
// here.
//
// A CTA has one tile of 256 rows x 64 columns: data_t is written in pieces of 256 bytes, x is read in lines
// of 128. Measured on an H200 in comparison, in [8192, 16384] of bf16: 128 x 128 is 4 % slower, default
// stores instead of streaming ones 7 %, CTAs that walk through many tiles and fetch the next ahead (into
// registers or by cp.async) 2 to 7 %.
#pragma once

#include "base/finish.h"
#include "base/fp8.cuh"
#include "base/groups.cuh"
#include "base/partials.h"
#include "base/ptx.cuh"
#include "base/reduce.cuh"
#include "quantize/transposed.cuh"

namespace te {

constexpr int kTileThreads = 256;
constexpr int kGroups = kTileColumns / 8;               // of columns; a thread has 8 of them ...
constexpr int kBandRows = kTileThreads / kGroups * 4;   // ... and 4 rows of each band
constexpr int kThreadRows = kTileRows / kBandRows * 4;  // of a thread
constexpr int kWarpSums = kTileThreads / 32 * kTileColumns;
using TransposedTile = Transposed<kTileRows, kTileColumns>;

// What a tile kernel writes. n: columns of a slot; the slots (the A of [m, A, f]) lie side by side.
template <typename T>
struct TileResults {
  const float* scale;     // [], nullptr where no FP8 is wanted; of groups [experts] or [1]
  T* unquantized;         // [m, slots, n] or nullptr: the f32 values in the type of x
  uint8_t* data;          // [m, slots, n] or nullptr
  uint8_t* data_t;        // [slots, n, m] or nullptr
  float* amax_partials;   // [chunks, strips] = [ceil(m / kTileRows), ceil(n / kTileColumns)] or nullptr
  float* dbias_partials;  // [chunks, slots, n] or nullptr; of groups both have bands for chunks
  int64_t m, n;
  unsigned chunks, strips;
  bool e5m2;              // data and data_t, else E4M3
  int64_t amax_step = 1;  // between neighbours of amax_partials
};

// f32 -> T, `columns` of the 8 values.
template <bool kVectors, typename T>
__device__ __forceinline__ void StoreUnquantized(T* p, const float (&f)[8], int columns) {
  const Vec<T, 8> v = Round<T>(f);
  if constexpr (kVectors) {
    struct alignas(16) {
      uint4 words[sizeof(v) / 16];
    } raw = __builtin_bit_cast(decltype(raw), v);
#pragma unroll
    for (size_t i = 0; i < sizeof(v) / 16; ++i) __stcs(reinterpret_cast<uint4*>(p) + i, raw.words[i]);
  } else {
#pragma unroll
    for (int j = 0; j < 8; ++j)
      if (j < columns) p[j] = static_cast<T>(f[j]);
  }
}

// tile -> data where rows of `stride` bytes are not aligned to 8: lanes write neighbouring bytes.
__device__ inline void StoreRowBytes(const TransposedTile& tile, uint8_t* data, int64_t stride, int rows,
                                     int columns) {
  for (int i = threadIdx.x; i < kTileRows * kTileColumns; i += kTileThreads) {
    const int r = i / kTileColumns, c = i % kTileColumns;
    if (r < rows && c < columns) data[r * stride + c] = tile.Byte(r, c);
  }
}

// Sums of a warp's rows: half of the values go to another lane in every step, so that a lane ends with 2 of
// its group's 8 columns. scratch: [warps, kTileColumns], to be read behind a barrier.
__device__ __forceinline__ void WarpColumnSums(float (&sums)[8], float* scratch) {
  static_assert(kGroups == 8);
  const bool upper = Lane() & 16, odd = Lane() & 8;
  float four[4], two[2];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const float away = upper ? sums[j] : sums[j + 4];
    four[j] = (upper ? sums[j + 4] : sums[j]) + __shfl_xor_sync(~0u, away, 16);
  }
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const float away = odd ? four[j] : four[j + 2];
    two[j] = (odd ? four[j + 2] : four[j]) + __shfl_xor_sync(~0u, away, 8);
  }
  const int c = Lane() % kGroups * 8 + upper * 4 + odd * 2;
  *reinterpret_cast<float2*>(scratch + WarpIndex() * kTileColumns + c) = make_float2(two[0], two[1]);
}

// The warps' sums -> column sums of the tile, by its first threads.
__device__ inline void StoreColumnSums(const float* scratch, float* dbias, int columns) {
  const int c = threadIdx.x;
  if (c >= columns) return;
  float sum = 0.f;
#pragma unroll
  for (int w = 0; w < kTileThreads / 32; ++w) sum += scratch[w * kTileColumns + c];
  dbias[c] = sum;
}

// Where a tile lies in the results, and what of it is inside.
struct TilePlace {
  int64_t chunk, row0, column0;
  int rows, columns;
};

template <typename T>
__device__ __forceinline__ TilePlace PlaceOf(const TileResults<T>& a, unsigned index) {
  const int64_t chunk = index / a.strips, row0 = chunk * kTileRows,
                column0 = index % a.strips * int64_t{kTileColumns};
  return {chunk, row0, column0, int(min(a.m - row0, int64_t{kTileRows})),
          int(min(a.n - column0, int64_t{kTileColumns}))};
}

// Where rows are in groups, each band of the tile has its own expert, so its own scale and statistics.
template <typename Source>
constexpr int kBands = InGroups<Source> ? kTileBands : 1;
static_assert(kBandRows == kGroupRows);

struct NoBands : Bands {
  static constexpr bool unused = false;
};
template <typename Source>
__device__ __forceinline__ auto BandsAt(const Source& source, int64_t row0, const float* scale) {
  if constexpr (InGroups<Source>)
    return source.groups.At(row0, scale);
  else
    return NoBands{};
}

// The maxima of the bands, of all threads -> their places.
template <int kOfBands, typename T>
__device__ __forceinline__ void StoreAmax(const TileResults<T>& a, unsigned index,
                                          const float (&amax)[kOfBands],
                                          unsigned (&amax_of_warps)[kOfBands][kMostWarps]) {
#pragma unroll
  for (int b = 0; b < kOfBands; ++b) {
    const unsigned peak = CtaMax(__float_as_uint(amax[b]), amax_of_warps[b]);
    const int64_t band = index / a.strips * int64_t{kOfBands} + b;
    const bool inside = kOfBands == 1 || band * kGroupRows < a.m;
    if (a.amax_partials && inside && threadIdx.x == 0)
      a.amax_partials[(kOfBands == 1 ? index : band * a.strips + index % a.strips) * a.amax_step] =
          __uint_as_float(peak);
  }
}

// The tile and the warps' sums of slot `s` -> what WriteTile has not yet written, behind a barrier.
template <bool kVectors, typename Source>
__device__ __forceinline__ void StoreTile(const TransposedTile& tile, const float* sums, const TilePlace& at,
                                          int s, const TileResults<typename Source::Type>& a) {
  const int64_t stride = a.n * Source::kSlots;
  if (!kVectors && a.data)
    StoreRowBytes(tile, a.data + at.row0 * stride + s * a.n + at.column0, stride, at.rows, at.columns);
  if (a.data_t)
    tile.StoreColumns<kTileThreads>(a.data_t + (s * a.n + at.column0) * a.m + at.row0, a.m, at.rows,
                                    at.columns, a.m % 16 == 0);
#pragma unroll
  for (int b = 0; b < kBands<Source>; ++b) {
    const int64_t line = at.chunk * kBands<Source> + b;
    if (Source::kSums && a.dbias_partials && (b == 0 || b * kGroupRows < at.rows))
      StoreColumnSums(sums + b * kWarpSums, a.dbias_partials + (line * Source::kSlots + s) * a.n + at.column0,
                      at.columns);
  }
}

// Whether nobody reads the rows of the tile that begins with row0, by Source::Skips; its amax is then 0.
template <typename Source>
__device__ __forceinline__ bool LeavesOut(const Source& source, const TileResults<typename Source::Type>& a,
                                          int64_t row0, unsigned index) {
  if constexpr (requires { source.Skips(row0); }) {
    if (!source.Skips(row0)) return false;
    if (a.amax_partials && threadIdx.x == 0) a.amax_partials[index] = 0.f;
    return true;
  }
  return false;
}

// Reads the slots of a thread's rows, the first of which is r, where the source gathers.
template <typename Source>
__device__ __forceinline__ void ReadSlots(const Source& source, const TilePlace& at, int r,
                                          int (&slots)[kThreadRows]) {
  if constexpr (Gathers<Source>) {
#pragma unroll
    for (int k = 0; k < kThreadRows; k += 4) {
      const int row = k / 4 * kBandRows + r;
      source.ReadSlots(at.row0 + row, at.rows - row, slots + k);
    }
  }
}

// 8 columns, from c on, of a thread's k-th row.
template <bool kVectors, typename Source, typename Bands>
__device__ __forceinline__ typename Source::Raw LoadRowOf(const Source& source, const TilePlace& at,
                                                          const Bands& bands, const int (&slots)[kThreadRows],
                                                          int k, int r, int c) {
  if constexpr (Gathers<Source>) {
    return source.template LoadSlot<kVectors>(slots[k], at.column0 + c, at.columns - c);
  } else {
    const int row = k / 4 * kBandRows + r + k % 4,
              end = InGroups<Source> ? min(bands.ends[k / 4], at.rows) : at.rows;
    return source.template Load<kVectors>(at.row0 + row, at.column0 + c, row < end ? at.columns - c : 0);
  }
}

// Source:
//   Type      of x and of the unquantized result
//   Raw       what is read for 8 neighbours of a row
//   kSlots    2 where a row of results is twice as long as one of a strip's sources, else 1
//   kSums     whether there may be column sums
//   kCtas     on one multiprocessor, for LaunchTiles
//   kWindow   rows that a thread has in flight, a divisor of kThreadRows
//   Values(Raw, float (&)[kSlots][8])
//   Load<kVectors, kAgain>(row, column, columns) -> Raw: 8 columns from `column` on, of which `columns` are
//             inside; kAgain as in LoadRow, where only the amax may be wanted
//   ReadSlots, LoadSlot<kVectors>(slot, column, columns) -> Raw instead of Load where it Gathers
//   Await(row0, rows) if there: called once by all threads, behind the first Loads and before any Values
//   Skips(row0) if there: whether nobody reads the tile's rows, of which row0 is the first; its amax is 0
//   groups if there, GroupRows: the rows are in groups; Values(Load of 0 columns) are then 0
//   order if there, as of TileOf
// index: the tile's number, strip by strip, chunk by chunk. kVectors: n % 8 == 0, and all rows are aligned.
template <bool kVectors, typename Source>
__device__ __forceinline__ void WriteTile(const Source& source, const TileResults<typename Source::Type>& a,
                                          unsigned index) {
  constexpr int kSlots = Source::kSlots, kWindow = Source::kWindow;
  __shared__ TransposedTile tiles[kSlots];
  constexpr int kOfBands = kBands<Source>;
  alignas(8) __shared__ float sums_of_warps[kSlots][Source::kSums ? kOfBands * kWarpSums : 1];
  __shared__ unsigned amax_of_warps[kOfBands][kMostWarps];
  const TilePlace at = PlaceOf(a, index);
  const int c = threadIdx.x % kGroups * 8, r = threadIdx.x / kGroups * 4;  // of the thread in the first band
  [[maybe_unused]] int slots[kThreadRows];
  ReadSlots(source, at, r, slots);
  if (LeavesOut(source, a, at.row0, index)) return;
  const auto bands = BandsAt(source, at.row0, a.scale);
  if (bands.unused) return;

  const auto load = [&](int k) { return LoadRowOf<kVectors>(source, at, bands, slots, k, r, c); };
  typename Source::Raw window[kWindow];
#pragma unroll
  for (int k = 0; k < kWindow; ++k) window[k] = load(k);
  if constexpr (requires { source.Await(at.row0, at.rows); }) source.Await(at.row0, at.rows);

  const float scale = a.scale && !InGroups<Source> ? *a.scale : 1.f;
  float amax[kOfBands] = {}, sums[kSlots][8] = {};
  uint32_t q[kSlots][2][4];  // columns 0..3 and 4..7: first a row in a word, after the transpose a column
#pragma unroll
  for (int k = 0; k < kThreadRows; ++k) {
    const int row = k / 4 * kBandRows + r + k % 4, i = k % 4;
    const bool inside = row < at.rows && c < at.columns;
    // Padding stays 0 if the scale is not finite.
    const float factor = !InGroups<Source> ? scale : row < bands.ends[k / 4] ? bands.scales[k / 4] : 0.f;
    float& peak = amax[k / 4 % kOfBands];
    float f[kSlots][8];
    source.Values(window[k % kWindow], f);
    if (k + kWindow < kThreadRows) window[k % kWindow] = load(k + kWindow);
#pragma unroll
    for (int s = 0; s < kSlots; ++s) {
      const int64_t offset = (at.row0 + row) * (a.n * kSlots) + s * a.n + at.column0 + c;
      if (a.unquantized && inside) StoreUnquantized<kVectors>(a.unquantized + offset, f[s], at.columns - c);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        if (kVectors ? inside : row < at.rows && c + j < at.columns) {
          peak = MaxNan(peak, fabsf(f[s][j]));
          if (Source::kSums) sums[s][j] += f[s][j];
        }
        f[s][j] *= factor;
      }
      Quantize8(f[s], a.e5m2, q[s][0][i], q[s][1][i]);
      if (kVectors && a.data && inside)
        __stcs(reinterpret_cast<uint2*>(a.data + offset), make_uint2(q[s][0][i], q[s][1][i]));
      if (i < 3) continue;
      tiles[s].Store(q[s], c, row / 4);
      if (!Source::kSums || !a.dbias_partials || (k + 1) % (kThreadRows / kOfBands)) continue;
      WarpColumnSums(sums[s], sums_of_warps[s] + k / 4 % kOfBands * kWarpSums);  // of the band, or of all
#pragma unroll
      for (int j = 0; j < 8; ++j) sums[s][j] = 0.f;
    }
  }
  StoreAmax(a, index, amax, amax_of_warps);  // its barrier completes all tiles and sums
#pragma unroll
  for (int s = 0; s < kSlots; ++s) StoreTile<kVectors, Source>(tiles[s], sums_of_warps[s], at, s, a);
}

// Writes only the amax of a tile. There is no data to keep, so there is room for twice as many CTAs. The
// kernel that then writes FP8 reads the sources again, from the first tile on; here the first tile is the
// last, for what was read last is still in L2.
template <bool kVectors, typename Source>
__device__ __forceinline__ void WriteAmax(const Source& source, const TileResults<typename Source::Type>& a,
                                          unsigned index) {
  constexpr int kRowsAtOnce = kTileThreads / kGroups;
  constexpr int kWindow = Source::kWindow < 2 ? Source::kWindow : 2;
  __shared__ unsigned amax_of_warps[kBands<Source>][kMostWarps];
  const int64_t row0 = index / a.strips * int64_t{kTileRows};
  const int64_t column = index % a.strips * int64_t{kTileColumns} + threadIdx.x % kGroups * 8;
  const int rows = min(a.m - row0, int64_t{kTileRows}), columns = min(a.n - column, int64_t{8});
  const auto row_of = [](int k) { return int(threadIdx.x) / kGroups + k * kRowsAtOnce; };  // of the tile
  [[maybe_unused]] int slots[kTileRows / kRowsAtOnce];
  if constexpr (Gathers<Source>)
#pragma unroll
    for (int k = 0; k < kTileRows / kRowsAtOnce; ++k)
      slots[k] = row_of(k) < rows ? source.slots[row0 + row_of(k)] : -1;
  if (LeavesOut(source, a, row0, index)) return;
  const auto bands = BandsAt(source, row0, nullptr);
  if (bands.unused) return;

  const auto load = [&](int k) {
    if constexpr (Gathers<Source>) {
      return source.template LoadSlot<kVectors>(slots[k], column, columns);
    } else {
      const int row = row_of(k),
                end = InGroups<Source> ? min(bands.ends[k * kRowsAtOnce / kGroupRows], rows) : rows;
      return source.template Load<kVectors, true>(row0 + row, column, row < end ? columns : 0);
    }
  };
  typename Source::Raw window[kWindow];
#pragma unroll
  for (int k = 0; k < kWindow; ++k) window[k] = load(k);
  float amax[kBands<Source>] = {};
#pragma unroll
  for (int k = 0; k < kTileRows / kRowsAtOnce; ++k) {
    float& peak = amax[k * kRowsAtOnce / kGroupRows % kBands<Source>];
    float f[Source::kSlots][8];
    source.Values(window[k % kWindow], f);
    if (k + kWindow < kTileRows / kRowsAtOnce) window[k % kWindow] = load(k + kWindow);
    if (row_of(k) >= rows || columns <= 0) continue;
#pragma unroll
    for (int s = 0; s < Source::kSlots; ++s)
#pragma unroll
      for (int j = 0; j < 8; ++j)
        if (kVectors || j < columns) peak = MaxNan(peak, fabsf(f[s][j]));
  }
  StoreAmax(a, index, amax, amax_of_warps);
}

template <typename Source>
using TileKernel = void (*)(const Source, const TileResults<typename Source::Type>);

// Defines the kernels of an op, whose CTAs have one tile each. They have the op's name, for profiles: `name`
// writes everything, name_amax only the amax. name_kernels: both, without vectors and with.
#define TE_TILE_KERNELS(name)                                                                                \
  template <typename Source, bool kVectors>                                                                  \
  __global__ void __launch_bounds__(kTileThreads, Source::kCtas)                                             \
      name(const Source source, const TileResults<typename Source::Type> a) {                                \
    LetNextStart();                                                                                          \
    WriteTile<kVectors>(source, a, TileOf(source, blockIdx.x));                                              \
  }                                                                                                          \
  template <typename Source, bool kVectors>                                                                  \
  __global__ void __launch_bounds__(kTileThreads, 4)                                                         \
      name##_amax(const Source source, const TileResults<typename Source::Type> a) {                         \
    LetNextStart();                                                                                          \
    WriteAmax<kVectors>(source, a, TileOf(source, gridDim.x - 1 - blockIdx.x));                              \
  }                                                                                                          \
  struct name##_kernels {                                                                                    \
    template <typename Source>                                                                               \
    static constexpr TileKernel<Source> of[2][2] = {                                                         \
        {name<Source, false>, name<Source, true>}, {name##_amax<Source, false>, name##_amax<Source, true>}}; \
  }

// The arrays of a call next to its sources. kNone where the op has none.
struct TileArrays {
  Totals totals;
  Tensor data, data_t;
  const char* name = nullptr;  // of `unquantized`
  Tensor unquantized = kNone;

  bool fp8() const { return Present(data) || Present(data_t); }
};

// An error unless the tensors have rows of axes m and columns of axes n for each of the axes e; `unquantized`
// is of x's type.
inline Status ExpectTensors(const char* op, const Tensor& x, const Axes& m, const Axes& n,
                            const TileArrays& b, const Axes& e = {}) {
  return Expect(op, {{b.name, b.unquantized, x.type, e + m + n, kOptional},
                     {"data", b.data, kFp8, e + m + n, kOptional},
                     {"data_t", b.data_t, Fp8Like(b.data), e + n + m, kOptional}});
}

// Checks all arrays; n has the axis of the slots.
inline Status ExpectTiles(const char* op, const Tensor& x, const Axes& m, const Axes& n, int64_t slots,
                          const TileArrays& b, const Axes& e = {}) {
  const Axes tiles = TilePartials(m.count(), n.count() / slots);
  TE_TRY(Expect(op, {{"scale", b.totals.scale, F32, e, RequiredIf(b.fp8())}}));
  TE_TRY(ExpectTensors(op, x, m, n, b, e));
  return ExpectTotals(op, b.totals, e, tiles + e, n, tiles.First(1) + e + n);
}

// Runs the op's kernels on m rows and, in each slot, n columns of each expert. aligned: whether the sources
// are aligned; the results are looked at here.
template <typename Kernels, typename Source>
Status LaunchTiles(const char* op, cudaStream_t stream, const Source& source, bool aligned, int64_t m,
                   int64_t n, const TileArrays& b, int64_t experts = 1) {
  using T = typename Source::Type;
  const Totals& totals = b.totals;
  const TileResults<T> a(b.fp8() ? Data<float>(totals.scale) : nullptr, Data<T>(b.unquantized),
                         Data<uint8_t>(b.data), Data<uint8_t>(b.data_t), Data<float>(totals.amax_partials),
                         Data<float>(totals.dbias_partials), m, n, unsigned(CeilDiv(m, kTileRows)),
                         unsigned(CeilDiv(n, kTileColumns)), IsE5M2(b.data, b.data_t), experts);
  TE_CHECK(int64_t{a.chunks} * a.strips * experts <= INT32_MAX, "%s: x has too many elements", op);
  TE_CHECK(Aligned(a.data_t), "%s: data_t is not aligned to 16 bytes", op);
  const bool vectors = aligned && n % 8 == 0 && Aligned(a.unquantized) && Aligned(a.data);
  const bool amax_only = a.amax_partials && !a.unquantized && !b.fp8() && !a.dbias_partials;
  const auto kernel = Kernels::template of<Source>[amax_only][vectors];
  kernel<<<unsigned(a.chunks * a.strips * experts), kTileThreads, 0, stream>>>(source, a);
  TE_LAUNCHED();
}

}  // namespace te
