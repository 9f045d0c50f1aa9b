// The segments of rows, as cuDNN wants them. attention_segments.cu.
#pragma once

#include <initializer_list>

#include "attention/attention_plan.h"

namespace te {

// Bytes of scratch that PutSegments needs: 0 where rows are full. A multiple of 256.
int64_t SegmentBytes(const AttentionKey& key);

// Writes to `scratch` the lengths and offsets of all sequences, and points to them. segments: i32
// [b, segments, 4], the first query of each, its queries, its first key, its keys; a segment that begins
// below 0 is unused. A sequence loses what its row cannot hold, and the queries that see no key: nobody
// computes these.
Status PutSegments(cudaStream_t stream, const AttentionKey& key, const int32_t* segments, void* scratch,
                   GraphPointers* pointers);

// What one array has for each token of the queries or of the keys: `count` times `words` of 4 bytes, `stride`
// words apart; from one token to the next are `token` words.
struct TokenRows {
  void* data;
  int64_t token, words;
  bool keys;
  int64_t count = 1, stride = 0;
  uint32_t fill = 0;
};
constexpr uint32_t kMinusInfinity = 0xff800000u;  // f32

// Fills the rows of the tokens that PutSegments leaves out: nobody else writes them. At most 3 arrays.
Status FillOutside(cudaStream_t stream, const AttentionKey& key, const int32_t* segments,
                   std::initializer_list<TokenRows> arrays);

}  // namespace te
