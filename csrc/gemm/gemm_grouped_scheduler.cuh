// The tiles of a grouped product, and which CTA computes which.
//
// The result of each expert is cut in tiles of 128 x 256, one for a CTA. The CTAs of a cluster take an item,
// as many tiles side by side: one above the other, so that they share the right factor, and where an expert
// has no rows for that, next to each other, so that they share the left one. So no row is computed for
// nothing. Items go in bands of some columns, down the rows within a band: what clusters compute at a time is
// about square, and what they read stays in L2. All that is a pure function of the groups, the same in every
// CTA.
//
// A cluster begins with the item of its own index. Of a long call (IsCounted) it then takes the first item
// that none has taken, by a counter in memory: clusters that start late, since kernels of other streams hold
// their SMs, take fewer. Of a short one it takes the items of ItemOf, and nothing is counted. A tile is one
// CTA's from first to last in both, so the results have the same bits.
#pragma once

#ifdef __CUDACC__
#define TE_ANYWHERE __host__ __device__ __forceinline__
#else
#define TE_ANYWHERE inline
#endif

#include <cstdint>

namespace te::grouped {

constexpr int kTileRows = 128, kTileColumns = 256;

TE_ANYWHERE constexpr int Least(int a, int b) { return a < b ? a : b; }
TE_ANYWHERE constexpr int DivideUp(int n, int of) { return n / of + (n % of != 0); }

// The tile of CTA 0 of a cluster, and where the tiles of the others lie.
struct Item {
  int row, column;  // in tiles
  bool stacked;     // rank r's is r rows below it, else r columns to its right

  TE_ANYWHERE int RowOf(int rank) const { return row + (stacked ? rank : 0); }
  TE_ANYWHERE int ColumnOf(int rank) const { return column + (stacked ? 0 : rank); }
};

// The items of one expert. span: CTAs of a cluster. band: columns of tiles, a multiple of span.
struct Items {
  int rows, columns;  // tiles of the expert
  int span, band;

  TE_ANYWHERE int InBand(int width) const {
    return rows / span * width + rows % span * DivideUp(width, span);
  }
  TE_ANYWHERE int Count() const { return columns / band * InBand(band) + InBand(columns % band); }
  TE_ANYWHERE Item At(int i) const {
    const int full = InBand(band), which = i / full, first = which * band;
    const int width = Least(band, columns - first), stacked = rows / span * width;
    i -= which * full;
    if (i < stacked) return {i / width * span, first + i % width, true};
    i -= stacked;
    const int across = DivideUp(width, span);
    return {rows / span * span + i / across, first + i % across * span, false};
  }
};

// Whether clusters count items in a call of at most so many tiles and, in all of them, steps of 128 bytes of
// k. A step takes 0.8 us of an H200, and to set the counter to 0 takes two or three.
constexpr int kCountedSteps = 128;  // of a CTA
TE_ANYWHERE bool IsCounted(int64_t tiles, int64_t steps, int64_t ctas) {
  return tiles > ctas && steps >= kCountedSteps * ctas;
}

// The item of a worker, a cluster, behind its first one: `count` were taken so before.
TE_ANYWHERE int CountedItem(int count, int workers) { return workers + count; }

// The round-th item of a worker where none are counted: there and back, so that where items become smaller no
// worker has the larger one in every round.
TE_ANYWHERE int ItemOf(int round, int worker, int workers) {
  return round * workers + (round % 2 ? workers - 1 - worker : worker);
}

// Rows of a group as a kernel may trust them, whatever is in memory: within the buffer of `rows` rows, and
// its tokens within the group.
struct Group {
  int first, rows, tokens;
};
TE_ANYWHERE Group GroupOf(int offset, int next, int count, int rows) {
  const int first = Least(offset > 0 ? offset : 0, rows), end = Least(next, rows);
  const int size = end > first ? end - first : 0;
  return {first, size, Least(count > 0 ? count : 0, size)};
}

}  // namespace te::grouped
