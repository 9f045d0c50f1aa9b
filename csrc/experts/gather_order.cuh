// In which order rows are gathered from all over x.
#pragma once

#include <algorithm>

#include "base/divisor.cuh"

namespace te {

// The order in which CTAs take the tiles of a buffer, which is cut into chunks of rows and strips of columns:
// piece by piece, of as many strips as the rows of x have in L2 at once. For x is read topk times, by rows
// that lie far apart.
class GatherOrder {
 public:
  // piece: bytes of a row of x in a strip. Mixtral's x at 8192 tokens is 67 MB, L2 has 50, half of it near
  // an SM. More tiles than an unsigned counts are refused later.
  GatherOrder(int64_t tokens, int64_t piece, int64_t chunks, int64_t strips, int64_t topk)
      : strips_(unsigned(std::min(strips, kMost))) {
    constexpr int64_t kInL2 = 8 << 20, kLeast = 512;  // bytes; 4 MB took Mixtral 25 % longer, 12 Qwen3 5 %
    const int64_t fit = std::max(kInL2 / std::max(tokens * piece, int64_t{1}), (kLeast + piece - 1) / piece);
    width_ = topk == 1 ? strips_ : unsigned(std::min(int64_t{strips_}, fit));
    by_piece_ = Divisor(unsigned(std::min(chunks * width_, kMost)));
    by_width_ = Divisor(width_);
    by_last_ = Divisor(strips_ % width_ ? strips_ % width_ : width_);
  }

  // The number of a CTA's tile, strip by strip, chunk by chunk.
  __device__ __forceinline__ unsigned TileOf(unsigned cta) const {
    const Split piece = by_piece_.Of(cta);
    const unsigned before = piece.quotient * width_;
    const Split tile = before + width_ > strips_ ? by_last_.Of(piece.rest) : by_width_.Of(piece.rest);
    return tile.quotient * strips_ + before + tile.rest;
  }

 private:
  static constexpr int64_t kMost = int64_t{1} << 31;  // of a Divisor
  unsigned strips_, width_;
  Divisor by_piece_, by_width_, by_last_;
};

}  // namespace te
