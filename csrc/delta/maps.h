// The tensor maps of the gated delta rule's kernels on Hopper: boxes of 64 numbers of 16 bits.
#pragma once

#include "base/tensor_map.h"
#include "delta/delta_bwd.cuh"

namespace te::delta {

// Tokens of some rows, [rows, a row's tokens, heads, inner], of which the first are there.
struct TokenSizes {
  int64_t rows, row_tokens, tokens, heads, inner;
};
inline TokenSizes KeysOf(const WalkArgs& a, int64_t rows) { return {rows, a.s, a.s, a.g, a.d}; }
inline TokenSizes ValuesOf(const WalkArgs& a, int64_t rows) { return {rows, a.s, a.s, a.h, a.e}; }
// Tokens of the slab that lie behind the last one are not there.
inline TokenSizes ValuesOfSlab(const GradArgs& a) {
  const int64_t tokens = int64_t(a.part.chunks) * kChunk;
  const int64_t there = std::min(tokens, a.again.s - int64_t(a.part.first_chunk) * kChunk);
  return {a.part.rows, tokens, there, a.again.h, a.again.e};
}

inline Status MapOfTokens(const char* op, CUtensorMap* map, const Bf16* data, const TokenSizes& of,
                          int box = kChunk) {
  const cuuint64_t head = of.inner * 2, token = of.heads * head;
  return MakeTensorMap<4>(
      op, map, BF16, data,
      {cuuint64_t(of.inner), cuuint64_t(of.heads), cuuint64_t(of.tokens), cuuint64_t(of.rows)},
      {head, token, of.row_tokens * token}, {1, cuuint32_t(box), 1});
}
// The states of a slab, [slab rows, chunks, h, e, d], in boxes of kSlab channels of values.
inline Status MapOfStates(const char* op, CUtensorMap* map, const Bf16* data, const GradArgs& a) {
  const WalkArgs& of = a.again;
  const cuuint64_t value = of.d * 2, head = of.e * value;
  const int64_t count = int64_t(a.part.rows) * a.part.chunks;
  return MakeTensorMap<4>(op, map, BF16, data,
                          {cuuint64_t(of.d), cuuint64_t(of.e), cuuint64_t(of.h), cuuint64_t(count)},
                          {value, head, of.h * head}, {kSlab, 1, 1});
}

}  // namespace te::delta
