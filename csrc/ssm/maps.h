// The tensor maps of the state-space dual's kernels on Hopper: boxes of 64 numbers of 16 bits.
#pragma once

#include "base/tensor_map.h"
#include "ssm/operands.cuh"

namespace te::ssm {

// Of [rows, s, heads, inner], in boxes of some tokens.
inline Status MapOfTokens(const char* op, CUtensorMap* map, const void* data, const ScanCall& call,
                          int64_t heads, int64_t inner, int tokens) {
  const cuuint64_t head = inner * 2, token = heads * head;
  return MakeTensorMap<4>(op, map, BF16, data,
                          {cuuint64_t(inner), cuuint64_t(heads), cuuint64_t(call.s), cuuint64_t(call.rows)},
                          {head, token, cuuint64_t(call.s) * token}, {1, cuuint32_t(tokens), 1});
}

// Of [count, h, p, n], in boxes of some channels.
inline Status MapOfStates(const char* op, CUtensorMap* map, const void* data, const ScanCall& call,
                          int64_t count, int channels) {
  const cuuint64_t channel = call.n * 2, head = call.p * channel;
  return MakeTensorMap<4>(op, map, BF16, data,
                          {cuuint64_t(call.n), cuuint64_t(call.p), cuuint64_t(call.h), cuuint64_t(count)},
                          {channel, head, cuuint64_t(call.h) * head}, {cuuint32_t(channels), 1, 1});
}

}  // namespace te::ssm
