// The gated RMSNorm (gated_norm.cuh) straight to FP8 with a scale for each block of 128, in both layouts
// (norm_tiles.cuh, block_tile.cuh), of y in x's type, which is not written. Blocks of data lie within a
// group. Bytes per element of bf16: 4 read from memory, 4 more from L2, 2 written.

#include "base/ops.h"
#include "norm/gated_norm.cuh"
#include "quantize/block_tile.cuh"

namespace te {
namespace {

constexpr int kCtas = 2;  // on one multiprocessor
using Tiles = NormTiles<kBlock, kBlockThreads, kCtas>;

// What block_tile.cuh asks of a source. A tile lies in one group. Beyond it there are zeros: x and gamma are
// 0 there, but rstd may be inf.
template <typename T, bool kVectors>
struct GatedBlockSource : GatedSource<T, kVectors> {
  using typename GatedSource<T, kVectors>::Raw;
  static constexpr int kInFlight = 4 / sizeof(T);
  unsigned group;     // of the tile
  int rows, columns;  // of the tile that are inside; from the thread's first column on

  __device__ __forceinline__ void Await(int64_t row0, int rows) const {
    AwaitRows<kBlock>(this->a, this->found, row0, rows, group, this->rstd);
  }

  __device__ __forceinline__ void Results(const Raw& raw, Vec<T, 8> (&y)[1]) const {
    const float of_row[1] = {this->rstd[raw.row]};
    const int inside = raw.row < rows ? columns : 0;
    float f[8], gate[8];
    Gated(raw.x, raw.z, this->a.before_gate, f, gate);
    NormalizeGated<true>(f, gate, of_row, this->gamma, this->a.before_gate);
#pragma unroll
    for (int j = 0; j < 8; ++j) f[j] = inside > (kVectors ? 0 : j) ? f[j] : 0.f;
    y[0] = Round<T>(f);
  }
};

template <typename T, bool kVectors>
__global__ void __launch_bounds__(kBlockThreads, sizeof(T) == 2 ? kCtas : 1)
    te_gated_norm_block_fwd(const __grid_constant__ GatedNormArgs a, const BlockArgs results,
                            const Tiles tiles) {
  __shared__ float rstd[kBlock];
  __shared__ BlockShared shared;
  const auto task = tiles.TaskOf(blockIdx.x);
  const Split band = results.by_ps.Of(task.chunk);
  const unsigned row = band.rest * kBlock, row0 = band.quotient * results.p + row;
  const int rows = min(results.p - row, kBlock);
  if (task.stats) {
    const int of_tile = task.which * Tiles::kStatsRows + WarpIndex();
    if (of_tile < rows) StoreRowRstd<kVectors, T>(a, tiles.found, row0 + of_tile);
    return;
  }
  const Split strip = results.by_qs.Of(task.which);
  const int column = strip.rest * kBlock + threadIdx.x % kBlockGroups * 8;  // of the group
  const int64_t of_group = int64_t{strip.quotient} * a.c;
  GatedBlockSource<T, kVectors> source{
      {a, tiles.found, rstd, row0, {}}, strip.quotient, rows, int(a.c) - column};
  GammaOf<kVectors>(a, of_group + column, of_group + a.c, source.gamma);
  WriteBlockTile<kVectors, false>(source, results, task.chunk, task.which, shared);
}

}  // namespace

Status LaunchGatedNormBlockFwd(cudaStream_t stream, Arg x, Arg z, Arg gamma, Ret data, Ret data_t,
                               Ret scale_inv, Ret scale_inv_t, Ret rstd, Ret workspace, double eps,
                               bool norm_before_gate, bool power_2, double epsilon) {
  const char* op = "te_gated_norm_block_fwd";
  const GatedNormArrays arrays{x, z, gamma, rstd};
  TE_TRY(ExpectGatedNorm(op, arrays, 3, kRequired));
  const Axes all(x), rows = all.Without(2);
  TE_TRY(Expect(op, {{"workspace", workspace, U8, {8 * all.Without(1).count()}}}));
  BlockArgs results;
  TE_TRY(GetBlockArgs(op, rows, {all[rows.rank()]}, all.last(), {data, data_t, scale_inv, scale_inv_t},
                      power_2, epsilon, &results));
  if (!Present(x)) return Fill(stream, 0xff, {rstd});  // of groups without columns, undefined
  GatedNormArgs args;
  TE_TRY(GatedNormArgsOf(op, arrays, eps, norm_before_gate, &args));
  const bool vectors = args.vectors() && Aligned(results.data);
  Tiles tiles;
  TE_TRY(Tiles::Of(op, stream, args.rows, args.h, false, int64_t{results.m} * results.ps,
                   int64_t{results.n} * results.qs, workspace, &tiles));
  return DispatchFloat(x.type, [&]<typename T>() -> Status {
    const auto kernel = vectors ? te_gated_norm_block_fwd<T, true> : te_gated_norm_block_fwd<T, false>;
    kernel<<<tiles.ctas(), kBlockThreads, 0, stream>>>(args, results, tiles);
    TE_LAUNCHED();
  });
}

}  // namespace te
