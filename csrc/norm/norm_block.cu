// LayerNorm and RMSNorm straight to FP8 with a scale for each block of 128, in both layouts (norm_tiles.cuh,
// block_tile.cuh), of y in x's type, which is not written. Bytes per element of bf16: 2 read from memory, 2
// more from L2, 2 written.

#include "base/ops.h"
#include "norm/norm_tiles.cuh"
#include "quantize/block_tile.cuh"

namespace te {
namespace {

constexpr int kCtas = 2;  // on one multiprocessor
using Tiles = NormTiles<kBlock, kBlockThreads, kCtas>;

// What block_tile.cuh asks of a source. Beyond x it makes zeros: gamma and beta are 0 there, but a large mean
// times a large rstd is none to multiply by 0.
template <typename T, bool kVectors>
struct BlockNormSource : NormSource<T, kBlock> {
  using typename NormSource<T, kBlock>::Raw;
  static constexpr int kInFlight = sizeof(T) == 2 ? kBlockRows : 2;
  unsigned row0;    // of the tile
  int rows;         // of it that are inside
  int64_t columns;  // from the thread's first on

  template <bool>
  __device__ __forceinline__ Raw Load(unsigned row, unsigned column, int inside) const {
    const T* p = this->x + (uint64_t{row} * unsigned(this->a.h) + column);
    return {LoadRow<kVectors>(p, inside), int(row - row0)};
  }

  __device__ __forceinline__ void Results(const Raw& raw, Vec<T, 8> (&y)[1]) const {
    const int64_t inside = raw.row < rows ? columns : 0;
    float f[1][8];
    this->Values(raw, f);
#pragma unroll
    for (int j = 0; j < 8; ++j) f[0][j] = inside > (kVectors ? 0 : j) ? f[0][j] : 0.f;
    y[0] = Round<T>(f[0]);
  }
};

template <typename T, bool kVectors>
__global__ void __launch_bounds__(kBlockThreads, kCtas)
    te_norm_block_fwd(const __grid_constant__ NormFwdArgs a, const BlockArgs results, const Tiles tiles) {
  __shared__ float2 stats[kBlock];
  __shared__ BlockShared shared;
  const auto task = tiles.TaskOf(blockIdx.x);
  const Split band = results.by_ps.Of(task.chunk);
  const unsigned row = band.rest * kBlock, row0 = band.quotient * results.p + row;
  const int rows = min(results.p - row, kBlock);
  if (task.stats) {
    const int of_tile = task.which * Tiles::kStatsRows + WarpIndex();
    if (of_tile < rows) StoreStats<kVectors, T>(a, tiles.found, row0 + of_tile);
    return;
  }
  const int64_t column = int64_t{task.which} * kBlock + threadIdx.x % kBlockGroups * 8;
  const BlockNormSource<T, kVectors> source{
      {a, static_cast<const T*>(a.x), tiles.found, stats, AffineOf<kVectors>(a, column)},
      row0,
      rows,
      a.h - column};
  WriteBlockTile<kVectors, false>(source, results, task.chunk, task.which, shared);
}

}  // namespace

Status LaunchNormBlockFwd(cudaStream_t stream, Arg x, Arg gamma, Arg beta, Ret data, Ret data_t,
                          Ret scale_inv, Ret scale_inv_t, Ret mean, Ret rstd, Ret workspace, double eps,
                          bool rms, bool zero_centered, bool power_2, double epsilon) {
  const char* op = "te_norm_block_fwd";
  const NormArrays arrays{x, gamma, beta, mean, rstd};
  TE_TRY(ExpectRank(op, "x", x, 2));
  TE_TRY(ExpectNorm(op, arrays, rms, kRequired));
  const Axes rows = Axes(x).Without(1);
  TE_TRY(Expect(op, {{"workspace", workspace, U8, {8 * rows.count()}}}));
  BlockArgs results;
  TE_TRY(GetBlockArgs(op, rows, {}, Axes(x).last(), {data, data_t, scale_inv, scale_inv_t}, power_2, epsilon,
                      &results));
  if (!Present(x)) return Fill(stream, 0xff, {mean, rstd});  // rows without columns have undefined statistics
  NormFwdArgs args = NormFwdArgsOf(arrays, eps, rms, zero_centered);
  args.data = results.data;
  Tiles tiles;
  TE_TRY(Tiles::Of(op, stream, args.rows, args.h, false, int64_t{results.m} * results.ps, results.qs,
                   workspace, &tiles));
  return DispatchFloat(x.type, [&]<typename T>() -> Status {
    const auto kernel = args.vectors() ? te_norm_block_fwd<T, true> : te_norm_block_fwd<T, false>;
    kernel<<<tiles.ctas(), kBlockThreads, 0, stream>>>(args, results, tiles);
    TE_LAUNCHED();
  });
}

}  // namespace te
