// What the files of te_gemm_grouped* share: the call as kernels take it.
#pragma once

#include <cuda.h>

#include <algorithm>

#include "base/check.h"

namespace te::grouped {

// How products are added: all in the tensor cores' accumulators; in f32 registers every 256 of k; so every
// 128, times the scales of blocks, of 1 x 128 by 128 x 128 or of 1 x 128 by 1 x 128.
enum class Sums { kFast, kSplit, kSquares, kRows };

// What lies next to each other in a factor: k in both; columns in the right factor; rows in the left one,
// too. Only numbers of 16 bits lie across k.
enum class Layout { kAlong, kRightAcross, kBothAcross };

constexpr int kBlock = 128;                        // of scales
constexpr int64_t kMost = (int64_t{1} << 31) - 1;  // what the kernel counts in ints

// The axes of scales: as `axes`, the last one in blocks.
inline Axes InBlocks(const Axes& axes) { return axes.Without(1) + Axes{CeilDiv(axes.last(), kBlock)}; }

// How many slots such axes have: what is along the last one, side by side.
inline int64_t SlotsOf(const Axes& axes) { return std::max<int64_t>(axes.Without(1).count(), 1); }

// A product of matrices for each expert. out: [R, columns], of which an expert has the rows of its group; or
// with `wgrad` [E, rows, columns], where the group's rows are what is summed over.
struct Problem {
  bool wgrad;
  int experts, columns;
  int rows;  // of the result, R or of an expert's product
  int k;     // what is contracted: of each row, or with `wgrad` R
  // With scales of squares columns and k may be slots side by side, in each of which blocks begin anew.
  int column_slots = 1, k_slots = 1;
  int slot_columns, slot_k;     // of a slot; these are of Cut
  int column_blocks, k_blocks;  // of 128, in all slots; a slot's last one may be cut
  Type lhs, rhs, result;
  Sums sums;
  Layout layout;
  const void *left, *right;  // [R, k] and [E, columns, k] or [E, k, columns]; or with `wgrad` [rows, R] and
                             // [columns, R], or [R, rows] and [R, columns]
  int64_t line;  // bytes from a line of squares to the next where FP8 lies in both layouts in one array (see
                 // activation_grouped_paired.cu), from `left` on or with `wgrad` from `right` on; 0: nowhere
  const int *offsets, *counts;        // nullptr: all rows are one group, of one expert
  const float *left_inv, *right_inv;  // of one scale or one for each expert; nullptr: none
  bool left_each, right_each;         // one for each expert
  const float *left_blocks,
      *right_blocks;  // of blocks: [k/128, rows]; [E, columns/128, k/128] or [k/128, columns]
  const void* bias;   // [E, columns] of the result's type, or nullptr
  const void* c;      // as out, or nullptr
  void* out;
  int* counter;  // of items that clusters take, of a launch of its own; nullptr: none are counted

  void Cut() {
    slot_columns = columns / column_slots, slot_k = k / k_slots;
    column_blocks = int(CeilDiv(slot_columns, kBlock)) * column_slots;
    k_blocks = int(CeilDiv(slot_k, kBlock)) * k_slots;
  }
};

// Enqueues the kernel, for the op of this name. What it asks of sizes is checked by the launchers in
// gemm_grouped.cc.
Status Run(cudaStream_t stream, const char* op, const Problem& problem);

constexpr int kPieceRows = 16;  // that a warp writes

struct KernelArgs {
  Problem p;
  CUtensorMap left, right, out;  // out: of a result of 16 bits, in boxes of 64 columns of kPieceRows rows
};

// Run, by what is compiled in files of its own: sums in the tensor cores, of factors across k too, in
// registers, with scales of blocks.
Status RunFast(cudaStream_t stream, const KernelArgs& args);
Status RunWide(cudaStream_t stream, const KernelArgs& args);
Status RunSplit(cudaStream_t stream, const KernelArgs& args);
Status RunBlocks(cudaStream_t stream, const KernelArgs& args);

}  // namespace te::grouped
