// The segments of rows, as cuDNN wants them. attention_segments.cu.
#pragma once

#include "attention_plan.h"

namespace te {

// Bytes of scratch that PutSegments needs: 0 where rows are full. A multiple of 256.
int64_t SegmentBytes(const AttentionKey& key);

// Writes to `scratch` the lengths and offsets of all sequences, and points to them. segments: i32
// [b, segments, 4], the first query of each, its queries, its first key, its keys; a segment that begins
// below 0 is unused. A sequence loses what its row cannot hold, and the queries that see no key: nobody
// computes these.
ffi::Error PutSegments(cudaStream_t stream, const AttentionKey& key, const int32_t* segments, void* scratch,
                       GraphPointers* pointers);

// Sets n floats to -infinity: the lse of queries that see no key.
ffi::Error FillMinusInfinity(cudaStream_t stream, float* x, int64_t n);

}  // namespace te
