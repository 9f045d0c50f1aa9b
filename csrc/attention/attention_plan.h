// cuDNN attention: what a graph depends on, and its recipe. attention_plan.cc.
#pragma once

#include <cstdint>

#include "attention/cudnn_graph.h"
#include "base/check.h"

namespace te {

struct AttentionKey {
  bool backward = false;
  bool bf16 = true;                           // else f16
  int64_t b = 0, s = 0, t = 0, h = 0, g = 0;  // batch, query and key length, query and key heads
  int64_t d = 0, e = 0;                       // head dim of q and k, of v
  int64_t joined = 1;             // 3: q, k, v are one array [b, s, 3, h, d]; 2: k, v one [b, t, 2, g, d];
                                  // gradients too
  bool interleaved = false;       // these lie as [b, s, h, 3, d], [b, t, g, 2, d]
  bool seq_major = false;         // q, k, v, out and their gradients lie as [s, b, heads, d]
  int64_t segments = 0;           // per row, their places and lengths come with the call; 0: rows are full
  int64_t left = -1, right = -1;  // a query sees keys from `left` before it to `right` after it; -1: open
  bool bottom_right = false;  // the last query of a segment is at its last key, else the first at the first
  int64_t bias_b = 0, bias_h = 0;  // bias [bias_b, bias_h, s, t]; 0: none
  bool bias_f32 = false;           // else of q's type
  bool dbias = false;              // backward; of q's type
  float scale = 1;                 // of the logits
  float dropout_rate = 0;          // of the probabilities
  bool deterministic = false;      // backward
  bool top = false;                // forward; the largest logit of each query is a result

  bool empty() const { return b == 0 || s == 0 || t == 0 || h == 0 || d == 0 || e == 0; }
  int64_t arrays_of_q() const { return joined == 3 ? 3 : 1; }
  int64_t arrays_of_k() const { return joined; }
  Axes out_axes() const { return {b, s, h, e}; }
  Axes lse_axes() const { return {b, h, s}; }
  Axes bias_axes() const { return {bias_b, bias_h, s, t}; }
  int64_t sequences() const { return segments ? b * segments : b; }
};

// The arrays of the graph. In memory as AttentionKey says; kLse is f32 [b, h, s], with segments [b, s, h]; so
// is kTop, and with it kLse is the sum of exp(logit - top): before 9.21 cuDNN has no graph of both maxima and
// logarithms. kSeed and kOffset one i64 each; kQLens and kKLens i32 [sequences]; kQAt and its like i64
// [sequences + 1]: where each sequence begins, in elements.
enum AttentionTensor : int64_t {
  kQ = 1,
  kK,
  kV,
  kOut,
  kLse,
  kDOut,
  kDQ,
  kDK,
  kDV,
  kBias,
  kDBias,
  kSeed,
  kOffset,
  kQLens,
  kKLens,
  kQAt,
  kKAt,
  kVAt,
  kOutAt,
  kLseAt,
  kTop,
};

GraphRecipe AttentionRecipe(const AttentionKey& key);

}  // namespace te
