// cuDNN attention on FP8 operands: what a graph depends on, and its recipe. attention_fp8_plan.cc.
#pragma once

#include <cstdint>

#include "attention/cudnn_graph.h"
#include "base/check.h"

namespace te {

struct Fp8Attention {
  bool backward = false;
  bool e5m2 = false;                          // the gradients; else E4M3, as all else is
  int64_t b = 0, s = 0, t = 0, h = 0, g = 0;  // batch, query and key length, query and key heads
  int64_t d = 0;                              // head dim
  bool causal = false;                        // query i sees keys 0 .. i
  float scale = 1;                            // of the logits
  int64_t line_h = h, line_g = g;             // heads side by side in memory, which a part has some of

  bool empty() const { return b == 0 || s == 0 || t == 0 || h == 0 || d == 0; }
  Axes query_axes() const { return {b, s, h, d}; }
  Axes key_axes() const { return {b, t, g, d}; }
  Axes lse_axes() const { return {b, h, s}; }
  const char* op() const { return backward ? "te_attention_fp8_bwd" : "te_attention_fp8_fwd"; }
};

namespace fp8 {

// The arrays by uid.
enum Array : int64_t { kQ = 1, kK, kV, kOut, kLse, kDOut, kDQ, kDK, kDV };
enum Statistic : int64_t { kAmaxS = 16, kAmaxOut, kAmaxDQ, kAmaxDK, kAmaxDV, kAmaxDP };
constexpr int64_t kScales = 32;  // + i: element i of the operand `scales`

// The elements of `scales`, as te_jax/ops/attention/fp8.py packs them: what a value is multiplied with to be
// stored in FP8, and with Inv what a stored one is multiplied with. S are the probabilities, DP the gradient
// of q k^T.
enum OfBoth { kQInv, kKInv, kVInv, kS, kSInv };
enum OfForward { kOutScale = kSInv + 1, kForwardScales };
enum OfBackward { kOutInv = kSInv + 1, kDOutInv, kDP, kDPInv, kDQScale, kDKScale, kDVScale, kBackwardScales };

}  // namespace fp8

GraphRecipe Fp8AttentionRecipe(const Fp8Attention& attention);

}  // namespace te
