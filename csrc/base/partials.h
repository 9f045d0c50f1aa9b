// How many partials launchers write. te_jax/ops has it too; tests/build/test_c_api.py compares them.
#pragma once

#include "base/check.h"

namespace te {

constexpr int kTileRows = 256, kTileColumns = 64;  // of a tile of tile.cuh, which has a partial
constexpr int kBlock = 128;

// Axes of the partials of the amax of m rows and n columns. The sums of columns have the first one, too.
inline Axes TilePartials(int64_t m, int64_t n) { return {CeilDiv(m, kTileRows), CeilDiv(n, kTileColumns)}; }

// Partials of the sums of columns whose rows [m..., p] are in blocks along p.
inline int64_t BlockPartials(const Axes& rows) {
  return rows.Without(1).count() * CeilDiv(rows.last(), kBlock);
}

// Places of the partials of a norm's amax, which are of its tiles, or of CTAs with kAmaxRows rows or more:
// AmaxStrips for each kTileRows rows.
constexpr int kAmaxRows = 4;  // have a place at least
__host__ __device__ constexpr int64_t AmaxStrips(int64_t h) {
  const int64_t strips = (h + kTileColumns - 1) / kTileColumns, least = kTileRows / kAmaxRows;
  return strips > least ? strips : least;
}
__host__ __device__ constexpr int64_t AmaxPlaces(int64_t rows, int64_t h) {
  return (rows + kTileRows - 1) / kTileRows * AmaxStrips(h);
}

// Partials of the backward pass of a norm, which takes any number of them: one for each CTA, and a CTA for
// each multiprocessor of an H200.
inline int64_t NormBwdPartials(int64_t rows) { return std::clamp<int64_t>(CeilDiv(rows, 8), 1, 132); }

}  // namespace te
