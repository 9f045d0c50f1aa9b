// te_norm_fwd with data_t: tiles of 256 rows x 64 columns (tile.cuh). Bytes per element of bf16: 2 read from
// memory, 2 more from L2 (none where the statistics are known), 2 written (data, data_t), and 2 more for y.

#include "norm/norm_tiles.cuh"
#include "quantize/tile.cuh"

namespace te {
namespace {

constexpr int kCtas = 3;  // on one multiprocessor
using Tiles = NormTiles<kTileRows, kTileThreads, kCtas>;

// What tile.cuh asks of a source.
template <typename T>
struct TileSource : NormSource<T, kTileRows> {
  using typename NormSource<T, kTileRows>::Raw;
  static constexpr int kWindow = sizeof(T) == 2 ? 8 : 4;
  static constexpr bool kSums = false;
  int64_t row0;  // of the tile

  template <bool kVectors>
  __device__ __forceinline__ Raw Load(int64_t row, int64_t column, int columns) const {
    return {LoadRow<kVectors>(this->x + row * this->a.h + column, columns), int(row - row0)};
  }
};

template <typename T, bool kVectors>
__global__ void __launch_bounds__(kTileThreads, kCtas)
    te_norm_fwd_tiles(const __grid_constant__ NormFwdArgs a, const TileResults<T> results,
                      const Tiles tiles) {
  LetNextStart();
  __shared__ float2 stats[kTileRows];
  const auto task = tiles.TaskOf(blockIdx.x);
  const int64_t row0 = int64_t{task.chunk} * kTileRows;
  if (task.stats) {
    const int64_t row = row0 + task.which * Tiles::kStatsRows + WarpIndex();
    if (row < a.rows) StoreStats<kVectors, T>(a, tiles.found, row);
    return;
  }
  const int64_t column = int64_t{task.which} * kTileColumns + threadIdx.x % kGroups * 8;
  const TileSource<T> source{
      {a, static_cast<const T*>(a.x), tiles.found, stats, AffineOf<kVectors>(a, column)}, row0};
  const unsigned count = tiles.chunks * tiles.strips, tile = task.chunk * tiles.strips + task.which;
  WriteTile<kVectors>(source, results, tile);
  if (results.amax_partials && threadIdx.x == 0)
    for (int64_t i = int64_t{tile} + count; i < AmaxPlaces(a.rows, a.h); i += count)
      results.amax_partials[i] = 0.f;
}

}  // namespace

Status LaunchNormFwdTransposed(cudaStream_t stream, const NormFwdArgs& args, Type x_type, bool e5m2,
                               const Tensor& workspace) {
  TE_CHECK(Aligned(args.data_t), "te_norm_fwd: data_t is not aligned to 16 bytes");
  const bool vectors = args.vectors();
  Tiles tiles;
  TE_TRY(Tiles::Of("te_norm_fwd", stream, args.rows, args.h, args.known_rstd, CeilDiv(args.rows, kTileRows),
                   CeilDiv(args.h, kTileColumns), workspace, &tiles));
  return DispatchFloat(x_type, [&]<typename T>() -> Status {
    const TileResults<T> results(args.scale, static_cast<T*>(args.y), args.data, args.data_t,
                                 args.amax_partials, nullptr, args.rows, args.h, tiles.chunks, tiles.strips,
                                 e5m2);
    const auto kernel = vectors ? te_norm_fwd_tiles<T, true> : te_norm_fwd_tiles<T, false>;
    kernel<<<tiles.ctas(), kTileThreads, 0, stream>>>(args, results, tiles);
    TE_LAUNCHED();
  });
}

}  // namespace te
