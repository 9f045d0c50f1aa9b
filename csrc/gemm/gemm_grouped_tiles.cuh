// What a CTA of a grouped product has in shared memory, and the tiles that it computes.
#pragma once

#include "base/hopper_tiles.cuh"
#include "base/ops.h"
#include "gemm/gemm_grouped.h"
#include "gemm/gemm_grouped_scheduler.cuh"

namespace te::grouped {

// On an H200 copies for both CTAs of a cluster make 1 to 3 %, and bands of 4 to 16 columns are as fast.
template <int kClusterCtas = 2, int kBandColumns = 8>
struct Plan {
  static constexpr int kCluster = kClusterCtas;  // CTAs that share copies: 1 or 2
  static constexpr int kBand = kBandColumns;     // of tiles, see Items
};

constexpr int kWarps = 8, kConsumers = 32 * kWarps, kThreads = kConsumers + 128;
constexpr int kStages = 4;
constexpr unsigned kLeftBytes = kTileRows * kRowBytes, kRightBytes = kTileColumns * kRowBytes;
constexpr unsigned kStageBytes = kLeftBytes + kRightBytes;
constexpr unsigned kPieceBytes = kPieceRows * kRowBytes;  // that a warp writes at a time
// Of 128 of k between additions in f32: their half of a tile's columns is multiplied with these stages held,
// and the other two are filled meanwhile. Each doubling halves the additions, of 3 to 4 % of a product.
constexpr int kSplitSteps = 2;

struct Shared {
  alignas(1024) uint8_t stages[kStages][kStageBytes];
  alignas(1024) uint8_t pieces[kWarps][kPieceBytes];
  float scales[kStages][kTileColumns];  // of the right factor's blocks
  uint64_t full[kStages], empty[kStages];
  int items[kStages];  // that the cluster took by the counter, in a ring of its own
  uint64_t items_full[kStages], items_empty[kStages];
  int offsets[kMostExperts + 1], counts[kMostExperts];
  int first[kMostExperts + 1];   // items before each expert in `order`, and all
  uint16_t order[kMostExperts];  // the experts, those with the longest sums first in wgrad
};

__device__ __forceinline__ Group GroupOf(const Problem& p, const Shared& s, int expert) {
  return GroupOf(s.offsets[expert], s.offsets[expert + 1], s.counts[expert], p.wgrad ? p.k : p.rows);
}

template <typename P>
__device__ __forceinline__ Items ItemsOf(const Problem& p, const Group& group) {
  const bool nothing = p.wgrad && group.tokens == 0 && p.c == p.out;
  const int rows = nothing ? 0 : DivideUp(p.wgrad ? p.rows : group.rows, kTileRows);
  return {rows, DivideUp(p.column_blocks, kTileColumns / kBlock), P::kCluster, P::kBand};
}

// All threads of the CTA fill in the tables of `s`.
template <typename P>
__device__ __forceinline__ void MakeTables(const Problem& p, Shared& s) {
  for (int e = threadIdx.x; e <= p.experts; e += kThreads) {
    s.offsets[e] = p.offsets ? p.offsets[e] : e * p.rows;
    if (e < p.experts) s.counts[e] = p.counts ? p.counts[e] : p.rows;
  }
  __syncthreads();
  for (int e = threadIdx.x; e < p.experts; e += kThreads) {
    int before = p.wgrad ? 0 : e;
    const int mine = GroupOf(p, s, e).tokens;
    for (int other = 0; p.wgrad && other < p.experts; ++other) {
      const int theirs = GroupOf(p, s, other).tokens;
      before += theirs > mine || (theirs == mine && other < e);
    }
    s.order[before] = uint16_t(e);
  }
  __syncthreads();
  const int lane = threadIdx.x % 32;
  int sum = 0;
  for (int at = lane; threadIdx.x < 32 && at - lane < p.experts; at += 32) {
    int items = at < p.experts ? ItemsOf<P>(p, GroupOf(p, s, s.order[at])).Count() : 0;
    const int own = items;
    for (int distance = 1; distance < 32; distance *= 2) {
      const int before = __shfl_up_sync(~0u, items, distance);
      items += lane >= distance ? before : 0;
    }
    if (at < p.experts) s.first[at] = sum + items - own;
    sum += __shfl_sync(~0u, items, 31);
  }
  if (threadIdx.x == 0) s.first[p.experts] = sum;
}

// A CTA's tile, with its place in the factors: coordinates of tensor maps.
struct Tile {
  int expert;
  bool stacked;             // of the cluster's item
  int left_row, right_row;  // of the first element, had each slot of columns whole blocks
  int k, steps;             // where the sum begins, and over how many stages
};

// A half of a tile's columns. Each lies in one slot.
struct Half {
  int slot, row;    // where its first column is in the right factor
  int column, end;  // where it is in the result, and where its slot ends there
};
template <Sums kSums>
__device__ __forceinline__ Half HalfOf(const Problem& p, const Tile& tile, int half) {
  const int first = tile.right_row + half * kBlock;
  if constexpr (kSums != Sums::kSquares) return {0, first, first, p.columns};
  const int block = first / kBlock, blocks = DivideUp(p.slot_columns, kBlock), slot = block / blocks;
  const int row = (block - slot * blocks) * kBlock, column = slot * p.slot_columns;
  return {slot, row, column + row, min(column + p.slot_columns, p.columns)};
}

// Where a tile goes: its first row in the result, how many rows of it the result has, and how many of these
// are not zeros.
struct Place {
  int64_t row;
  int rows, tokens;
};
__device__ __forceinline__ Place PlaceOf(const Problem& p, const Shared& s, const Tile& tile) {
  if (p.wgrad) {
    const int rows = p.rows - tile.left_row;
    return {int64_t{tile.expert} * p.rows + tile.left_row, rows, rows};
  }
  const Group group = GroupOf(p, s, tile.expert);
  const int before = tile.left_row - group.first;
  return {tile.left_row, group.rows - before, group.tokens - before};
}

// The rank of a CTA in its cluster.
template <typename P>
__device__ __forceinline__ int RankOf() {
  return P::kCluster > 1 ? ClusterRank() : 0;
}

// The tiles of a CTA, one after the other, for a warp that multiplies, or for the thread that copies
// (kCopies).
template <typename P, int kStep, bool kCopies>
class Walk {
 public:
  __device__ __forceinline__ Walk(const Problem& p, const Shared& s) : p_(p), s_(s) {}

  __device__ __forceinline__ bool Next(Tile* tile) {
    const int item = NextItem();
    if (item >= s_.first[p_.experts]) return false;
    while (item >= s_.first[at_ + 1]) ++at_;
    const int expert = s_.order[at_];
    const Group group = GroupOf(p_, s_, expert);
    const Item found = ItemsOf<P>(p_, group).At(item - s_.first[at_]);
    const int rank = RankOf<P>(), row = found.RowOf(rank) * kTileRows;
    tile->expert = expert, tile->stacked = found.stacked;
    tile->right_row = found.ColumnOf(rank) * kTileColumns;
    if (p_.wgrad) {
      tile->left_row = row;
      tile->k = group.first, tile->steps = DivideUp(group.tokens, kStep);
    } else {
      tile->left_row = group.first + row;
      // All CTAs have as many steps, for they copy for each other.
      const int steps = kStep == kBlock ? p_.k_blocks : DivideUp(p_.k, kStep);
      tile->k = 0, tile->steps = found.row * kTileRows < group.tokens ? steps : 0;
    }
    return true;
  }

 private:
  __device__ __forceinline__ int NextItem() {
    const int round = round_++, worker = blockIdx.x / P::kCluster, workers = gridDim.x / P::kCluster;
    if (!p_.counter) return ItemOf(round, worker, workers);
    if (round == 0) return worker;
    const int place = (round - 1) % kStages;
    const unsigned parity = (round - 1) / kStages % 2;
    const uint32_t full = AddressOf(&s_.items_full[place]), empty = AddressOf(&s_.items_empty[place]);
    if constexpr (kCopies) {
      ArriveExpecting(full, sizeof(int));
      if (RankOf<P>() == 0) {
        const int taken = CountedItem(atomicAdd(p_.counter, 1), workers);
        WaitBarrier(empty, parity ^ 1);
        for (int rank = 0; rank < P::kCluster; ++rank)
          StoreAt(AddressOf(&s_.items[place]), taken, full, rank);
      }
    }
    WaitBarrier(full, parity);
    int item = s_.items[place];
    if constexpr (!kCopies) item = __shfl_sync(~0u, item, 0);  // alike in all lanes, as the compiler can see
    if (kCopies || threadIdx.x % 32 == 0) ArriveAt(empty, 0);
    return item;
  }

  const Problem& p_;
  const Shared& s_;
  int round_ = 0, at_ = 0;
};

// A stage of the ring, and how often the ring was passed.
struct Ring {
  int stage = 0;
  unsigned parity = 0;
  __device__ __forceinline__ void Advance() {
    stage = stage + 1 == kStages ? 0 : stage + 1;
    parity ^= stage == 0;
  }
};

}  // namespace te::grouped
