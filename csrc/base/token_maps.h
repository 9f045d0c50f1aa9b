// The tensor maps of tokens and of states of heads, of 16 bits each, in boxes of 64 numbers.
#pragma once

#include "base/tensor_map.h"

namespace te {

// Tokens of some rows, [rows, a row's tokens, heads, inner], of which the first are there.
struct TokenSizes {
  int64_t rows, row_tokens, tokens, heads, inner;
};
// In boxes of so many tokens.
inline Status MapOfTokens(const char* op, CUtensorMap* map, const void* data, const TokenSizes& of, int box) {
  const cuuint64_t head = of.inner * 2, token = of.heads * head;
  return MakeTensorMap<4>(
      op, map, BF16, data,
      {cuuint64_t(of.inner), cuuint64_t(of.heads), cuuint64_t(of.tokens), cuuint64_t(of.rows)},
      {head, token, of.row_tokens * token}, {1, cuuint32_t(box), 1});
}

// [count, heads, channels, inner]
struct StateSizes {
  int64_t count, heads, channels, inner;
};
// In boxes of so many channels.
inline Status MapOfStates(const char* op, CUtensorMap* map, const void* data, const StateSizes& of, int box) {
  const cuuint64_t channel = of.inner * 2, head = of.channels * channel;
  return MakeTensorMap<4>(
      op, map, BF16, data,
      {cuuint64_t(of.inner), cuuint64_t(of.channels), cuuint64_t(of.heads), cuuint64_t(of.count)},
      {channel, head, of.heads * head}, {cuuint32_t(box), 1, 1});
}

}  // namespace te
