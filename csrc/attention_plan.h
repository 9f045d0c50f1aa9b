// cuDNN attention: what a plan depends on, and the calls that find and run it. attention_plan.cc.
#pragma once

#include <compare>
#include <cstdint>
#include <string>
#include <unordered_map>

#include "common.h"

namespace te {

struct AttentionKey {
  bool backward = false;
  bool bf16 = true;                           // else f16
  int64_t b = 0, s = 0, t = 0, h = 0, g = 0;  // batch, query and key length, query and key heads
  int64_t d = 0, e = 0;                       // head dim of q and k, of v
  bool packed = false;                        // q, k, v and their gradients are parts of one [b, s, 3, h, d]
  bool causal = false;                        // query i sees keys 0 .. i
  float scale = 1;                            // of the logits
  float dropout_rate = 0;                     // of the probabilities
  bool deterministic = false;                 // backward

  auto operator<=>(const AttentionKey&) const = default;
  bool empty() const { return b == 0 || s == 0 || t == 0 || h == 0 || d == 0 || e == 0; }
};

// The arrays of a graph, in memory [b, s, h, d] (q, k, v: or as a packed key says); kLse is f32 [b, h, s],
// kSeed and kOffset one i64 each.
enum AttentionTensor : int64_t { kQ = 1, kK, kV, kOut, kLse, kDOut, kDQ, kDK, kDV, kSeed, kOffset };
using AttentionPointers = std::unordered_map<int64_t, void*>;

// Bytes of workspace that `key` needs on the current device. The first call builds the plan, which loads
// modules and allocates: `stream` must not be capturing then.
ffi::Error FindAttention(cudaStream_t stream, const AttentionKey& key, int64_t* workspace);

// Enqueues the graph: no allocation, no synchronization.
ffi::Error RunAttention(cudaStream_t stream, const AttentionKey& key, AttentionPointers pointers,
                        void* workspace, int64_t workspace_bytes);

}  // namespace te
