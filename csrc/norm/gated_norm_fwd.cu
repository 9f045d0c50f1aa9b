// te_gated_norm_fwd (gated_norm.cuh). Bytes per element of bf16: 4 read from memory, and 2 written (y, or
// data and data_t) or 1; with data_t 4 more are read from L2, unless rstd is known.

#include <algorithm>

#include "base/finish.h"
#include "base/ops.h"
#include "base/reduce.cuh"
#include "norm/gated_norm.cuh"
#include "quantize/tile.cuh"

namespace te {
namespace {

constexpr int kRowThreads = 512;  // of a CTA, and of the norm of a group at most
constexpr int kCtasOfRows = 2;    // on one multiprocessor
constexpr int kCtas = 3;          // of tiles on one multiprocessor
using Tiles = NormTiles<kTileRows, kTileThreads, kCtas>;

// -- without data_t: groups of rows, one after the other ---------------------------------------------------

template <typename T>
struct RowResults {
  T* y;                  // [rows, h] or nullptr
  uint8_t* data;         // [rows, h] or nullptr
  const float* scale;    // []
  float* amax_partials;  // [AmaxPlaces] or nullptr
  bool e5m2;

  __device__ __forceinline__ void Write(const float (&f)[8], float scale, int64_t offset) const {
    if (y) StoreUnquantized<true>(y + offset, f, 8);
    if (!data) return;
    float scaled[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) scaled[i] = f[i] * scale;
    uint2 q;
    Quantize8(scaled, e5m2, q.x, q.y);
    __stcs(reinterpret_cast<uint2*>(data + offset), q);
  }
};

// blockDim.x threads have a norm, 8 * kVecs columns each, which stay in registers; blockDim.y norms are in
// work at once and wait for nobody.
template <typename T, int kVecs>
__global__ void __launch_bounds__(kRowThreads, kVecs > 2 ? 1 : kCtasOfRows)
    te_gated_norm_fwd_rows(const GatedNormArgs a, const RowResults<T> results) {
  LetNextStart();
  __shared__ float2 scratch[2][kMostWarps];
  const unsigned norms = unsigned(a.rows) * a.g, step = gridDim.x * blockDim.y;
  const int first = threadIdx.x * 8, stride = blockDim.x * 8, columns = a.c;
  const float scale = results.scale ? *results.scale : 1.f, inv_c = 1.f / a.c;
  float amax = 0.f;
  int turn = 0;
  for (unsigned norm = blockIdx.x * blockDim.y + threadIdx.y; norm < norms; norm += step) {
    const int64_t at = int64_t{norm} * columns + first;
    Vec<T, 8> x[kVecs], z[kVecs];
#pragma unroll
    for (int k = 0; k < kVecs; ++k) {
      const int inside = columns - first - k * stride;
      x[k] = LoadRow<true>(static_cast<const T*>(a.x) + at + k * stride, inside);
      z[k] = LoadRow<true>(static_cast<const T*>(a.z) + at + k * stride, inside);
    }
    float u[kVecs][8], gate[kVecs][8];
#pragma unroll
    for (int k = 0; k < kVecs; ++k) Gated(x[k], z[k], a.before_gate, u[k], gate[k]);
    const auto mean_square = [&](float factor) {
      float sum = 0.f;
#pragma unroll
      for (int k = 0; k < kVecs; ++k) {
        float some = 0.f;  // a chain of additions for every vector
#pragma unroll
        for (int i = 0; i < 8; ++i) some = fmaf(u[k][i] * factor, u[k][i] * factor, some);
        sum += some;
      }
      return RowSum(sum, scratch[turn ^= 1]) * inv_c;
    };
    const float rstd[1] = {a.known_rstd ? a.known_rstd[norm] : Rstd(a.eps, mean_square)};
    if (a.rstd && threadIdx.x == 0) a.rstd[norm] = rstd[0];
    const int64_t of_group = int64_t{a.by_g.Of(norm).rest} * columns;
#pragma unroll
    for (int k = 0; k < kVecs; ++k) {
      const int column = first + k * stride;
      if (column >= columns) continue;
      float gamma[8];
      LoadWeights(a.gamma, of_group + column, gamma);
      NormalizeGated<true>(u[k], gate[k], rstd, gamma, a.before_gate);
#pragma unroll
      for (float each : u[k]) amax = MaxNan(amax, fabsf(each));
      results.Write(u[k], scale, at + k * stride);
    }
  }
  if (results.amax_partials) StoreCtaAmax(results.amax_partials, a.rows, a.h, amax);
}

// Whether these kernels take the call.
bool InRows(const GatedNormArgs& a) { return a.c <= kRowThreads * 4 * 8 && a.rows * a.g <= INT32_MAX; }

template <typename T>
Status LaunchRows(cudaStream_t stream, const GatedNormArgs& a, const RowResults<T>& results) {
  Gpu gpu;
  TE_TRY(CurrentGpu(&gpu));
  const int64_t vecs = CeilDiv(a.c, 8), of_thread = vecs <= 32 ? 1 : vecs <= kRowThreads * 2 ? 2 : 4;
  const int64_t x = CeilDiv(vecs, of_thread * 32) * 32;  // threads of a norm
  const int64_t y = kRowThreads / x;
  int64_t ctas = std::min(CeilDiv(a.rows * a.g, y), int64_t{gpu.sms} * kCtasOfRows * 4);
  if (results.amax_partials) ctas = std::min(ctas, AmaxPlaces(a.rows, a.h));
  const auto kernel = of_thread == 1   ? te_gated_norm_fwd_rows<T, 1>
                      : of_thread == 2 ? te_gated_norm_fwd_rows<T, 2>
                                       : te_gated_norm_fwd_rows<T, 4>;
  kernel<<<unsigned(ctas), dim3(x, y), 0, stream>>>(a, results);
  TE_LAUNCHED();
}

// -- tiles -------------------------------------------------------------------------------------------------

// What tile.cuh asks of a source. kWhole: a tile lies in one group. Else each thread looks rstd up for its
// own columns, which are of one group where there are vectors.
template <typename T, bool kVectors, bool kWhole>
struct GatedTileSource : GatedSource<T, kVectors> {
  using typename GatedSource<T, kVectors>::Raw;
  static constexpr int kWindow = 8 / sizeof(T);
  static constexpr bool kSums = false;
  unsigned column;  // the thread's first

  __device__ __forceinline__ void Await(int64_t row0, int rows) const {
    const unsigned group = this->a.by_c.Of(column).quotient;
    if (kWhole) AwaitRows<kTileRows>(this->a, this->found, row0, rows, group, this->rstd);
  }

  __device__ __forceinline__ void Values(const Raw& raw, float (&f)[1][8]) const {
    constexpr bool kOne = kWhole || kVectors;
    const GatedNormArgs& a = this->a;
    float of_row[kOne ? 1 : 8] = {}, gate[8];
    const unsigned row = this->row0 + raw.row;
    if constexpr (kWhole) {
      of_row[0] = this->rstd[raw.row];
    } else {
#pragma unroll
      for (int i = 0; i < (kOne ? 1 : 8); ++i)
        if (row < a.rows && column + i < a.h)
          of_row[i] = AwaitRstd(a, this->found, int64_t{row} * a.g + a.by_c.Of(column + i).quotient);
    }
    Gated(raw.x, raw.z, a.before_gate, f[0], gate);
    NormalizeGated<kOne>(f[0], gate, of_row, this->gamma, a.before_gate);
  }
};

template <typename T, bool kVectors, bool kWhole>
__global__ void __launch_bounds__(kTileThreads, kCtas)
    te_gated_norm_fwd_tiles(const __grid_constant__ GatedNormArgs a, const TileResults<T> results,
                            const Tiles tiles) {
  LetNextStart();
  __shared__ float rstd[kWhole ? kTileRows : 1];
  const auto task = tiles.TaskOf(blockIdx.x);
  const unsigned row0 = task.chunk * kTileRows;
  if (task.stats) {
    const int64_t row = row0 + task.which * Tiles::kStatsRows + WarpIndex();
    if (row < a.rows) StoreRowRstd<kVectors, T>(a, tiles.found, row);
    return;
  }
  const unsigned column = task.which * kTileColumns + threadIdx.x % kGroups * 8;
  GatedTileSource<T, kVectors, kWhole> source{{a, tiles.found, rstd, row0, {}}, column};
  GammaOf<kVectors>(a, column, a.h, source.gamma);
  const unsigned count = tiles.chunks * tiles.strips, tile = task.chunk * tiles.strips + task.which;
  WriteTile<kVectors>(source, results, tile);
  if (results.amax_partials && threadIdx.x == 0)
    for (int64_t i = int64_t{tile} + count; i < AmaxPlaces(a.rows, a.h); i += count)
      results.amax_partials[i] = 0.f;
}

template <typename T>
Status LaunchTiles(cudaStream_t stream, const GatedNormArgs& a, const RowResults<T>& rows, uint8_t* data_t,
                   const Tensor& workspace) {
  TE_CHECK(Aligned(data_t), "te_gated_norm_fwd: data_t is not aligned to 16 bytes");
  Tiles tiles;
  TE_TRY(Tiles::Of("te_gated_norm_fwd", stream, a.rows, a.h, a.known_rstd, CeilDiv(a.rows, kTileRows),
                   CeilDiv(a.h, kTileColumns), workspace, &tiles));
  const TileResults<T> results(rows.scale, rows.y, rows.data, data_t, rows.amax_partials, nullptr, a.rows,
                               a.h, tiles.chunks, tiles.strips, rows.e5m2);
  const bool vectors = a.vectors() && Aligned(rows.y) && Aligned(rows.data);
  const auto kernel = !vectors                  ? te_gated_norm_fwd_tiles<T, false, false>
                      : a.c % kTileColumns == 0 ? te_gated_norm_fwd_tiles<T, true, true>
                                                : te_gated_norm_fwd_tiles<T, true, false>;
  kernel<<<tiles.ctas(), kTileThreads, 0, stream>>>(a, results, tiles);
  TE_LAUNCHED();
}

}  // namespace

Status LaunchGatedNormFwd(cudaStream_t stream, Arg x, Arg z, Arg gamma, Arg known_rstd, Arg scale, Ret y,
                          Ret data, Ret data_t, Ret rstd, Ret amax, Ret scale_inv, Ret workspace,
                          Ret amax_partials, double eps, bool norm_before_gate) {
  const char* op = "te_gated_norm_fwd";
  const GatedNormArrays arrays{x, z, gamma, rstd, known_rstd};
  Totals totals{scale, amax, kNone, scale_inv, amax_partials};
  TE_TRY(ExpectGatedNorm(op, arrays, 2, kOptional));
  const Axes all(x), rows = all.Without(2), columns = all.From(rows.rank());
  const Axes places{CeilDiv(rows.count(), kTileRows), AmaxStrips(columns.count())};
  TE_TRY(Expect(op, {{"scale", scale, F32, {}, RequiredIf(Present(data) || Present(data_t))},
                     {"y", y, x.type, all, kOptional},
                     {"data", data, kFp8, all, kOptional},
                     {"data_t", data_t, Fp8Like(data), columns + rows, kOptional},
                     {"workspace",
                      workspace,
                      U8,
                      {8 * all.Without(1).count()},
                      RequiredIf(!Present(known_rstd) && Present(x))}}));
  TE_TRY(ExpectTotals(op, totals, {}, places));
  if (!Present(x)) {
    totals.amax_partials = kNone;  // which may be there nevertheless, and has nothing in it
    TE_TRY(Finish(stream, totals));
    return Fill(stream, 0xff, {rstd});  // of groups without columns, undefined
  }
  GatedNormArgs args;
  TE_TRY(GatedNormArgsOf(op, arrays, eps, norm_before_gate, &args));
  TE_TRY(DispatchFloat(x.type, [&]<typename T>() -> Status {
    const RowResults<T> results{Data<T>(y), Data<uint8_t>(data), Data<float>(scale),
                                Data<float>(amax_partials), IsE5M2(data, data_t)};
    const bool vectors = args.vectors() && Aligned(results.y) && Aligned(results.data);
    return !Present(data_t) && vectors && InRows(args)
               ? LaunchRows<T>(stream, args, results)
               : LaunchTiles<T>(stream, args, results, Data<uint8_t>(data_t), workspace);
  }));
  return Finish(stream, totals);
}

}  // namespace te
