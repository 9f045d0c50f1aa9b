// The tensor maps of the gated delta rule's kernels on Hopper.
#pragma once

#include "base/token_maps.h"
#include "delta/delta_bwd.cuh"

namespace te::delta {

inline TokenSizes KeysOf(const WalkArgs& a, int64_t rows) { return {rows, a.s, a.s, a.g, a.d}; }
inline TokenSizes ValuesOf(const WalkArgs& a, int64_t rows) { return {rows, a.s, a.s, a.h, a.e}; }
// Tokens of the slab that lie behind the last one are not there.
inline TokenSizes ValuesOfSlab(const GradArgs& a) {
  const int64_t tokens = int64_t(a.part.chunks) * kChunk;
  const int64_t there = std::min(tokens, a.again.s - int64_t(a.part.first_chunk) * kChunk);
  return {a.part.rows, tokens, there, a.again.h, a.again.e};
}

// The states of a slab, [slab rows, chunks, h, e, d].
inline StateSizes StatesOf(const GradArgs& a) {
  return {int64_t(a.part.rows) * a.part.chunks, a.again.h, a.again.e, a.again.d};
}

}  // namespace te::delta
