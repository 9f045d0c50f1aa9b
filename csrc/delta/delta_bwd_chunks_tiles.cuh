// What the last kernel of a slab takes on Hopper, and products of a chunk's tokens with states.
#pragma once

#include <cuda.h>

#include "delta/delta_bwd_ends.cuh"
#include "ssm/hopper.cuh"

namespace te::delta {

struct HopperGradArgs {
  GradArgs a;
  int parts, heads;  // the heads that share a key, by CTAs of a cluster; and how many each has
  // Of [rows, s, h, e] and [rows, s, g, d], or of a slab's tokens, in boxes of 64 tokens, or of 16 of dq and
  // dk; of [slab rows chunks, h, e, d] in boxes of 64 channels of values.
  CUtensorMap q, k, dy, written, gradients_written, states, gradients, dq, dk;
};

template <int kD, bool kRuns>
struct HopperGradShared {
  static constexpr int kStages = 3;
  struct Stage {  // of 64 channels of a head's values
    uint8_t dy[kBoxBytes], written[kBoxBytes], gradients_written[kBoxBytes];
    uint8_t state[ssm::kWideBytes<kD>], gradient[ssm::kWideBytes<kD>];
  };
  struct Known {
    Weights weights;
    Pairs pairs;
  };
  alignas(1024) Stage stages[kStages];
  alignas(1024) uint8_t q[ssm::kWideBytes<kD>], k[ssm::kWideBytes<kD>];
  Known known[kStages];
  struct Sums : GradSums<2, 1, 2> {
    float along[kChunk];  // v times the gradient to what a token writes
  } sums[2];              // of heads
  // Tokens times the gradients to them, of queries and keys, where another CTA has the other half of these.
  alignas(16) float along[2][kChunk];
  ssm::Runs<kRuns> runs;
  uint64_t full[kStages], empty[kStages], sums_full[2], sums_empty[2], group_full[1], scores_full[1];
};

// The first of the thread's two rows, or the one 8 below.
__device__ __forceinline__ int RowOfHalf(int half) {
  return ssm::WarpOfGroup() * kBand + ssm::RowOf(2 * half);
}
// The sums over channels of the thread's two rows of a tile of tokens [64, 64] times what a product has of
// each, `by` times; 0 where that is 0.
__device__ __forceinline__ void AddDots(float (&sums)[2], const uint8_t* tile, const float (&product)[32],
                                        const float (&by)[2]) {
  float dots[2] = {};
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    uint32_t words[4];
    LoadMatrices<false>(words, tile + InBox(ssm::WarpOfGroup() * 16 + Lane() % 16, 2 * k + Lane() / 16));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 two = ssm::Unpack(words[i]);
      const float* of = product + 8 * k + i / 2 * 4 + i % 2 * 2;
      dots[i % 2] += two.x * of[0] + two.y * of[1];
    }
  }
  sums[0] += Weighed(by[0], dots[0]), sums[1] += Weighed(by[1], dots[1]);
}
// The warp's rows of tokens as a left factor, the thread's two each `by` times; 0 where that is 0.
__device__ __forceinline__ void LoadWeighed(uint32_t (&rows)[4][4], const uint8_t* tile,
                                            const float (&by)[2]) {
  ssm::LoadRows(rows, tile);
#pragma unroll
  for (auto& four : rows)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 two = ssm::Unpack(four[i]);
      four[i] = by[i % 2] == 0 ? 0 : ssm::Pack(two.x * by[i % 2], two.y * by[i % 2]);
    }
}
// A value of each of the thread's two rows, summed over the four threads that share them.
__device__ __forceinline__ void PutSums(float (&to)[kChunk], const float (&of)[2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float sum = WarpSum<4>(of[half]);
    if (Lane() % 4 == 0) to[RowOfHalf(half)] = sum;
  }
}
// product = tokens state^T, both along keys; to be waited for.
template <int kD>
__device__ __forceinline__ void MultiplyState(float (&product)[32], const uint8_t* tokens,
                                              const uint8_t* state) {
  BeginProducts();
  ssm::MultiplyAlong<kD>(product, tokens, state);
  CommitProducts();
}
// sums += tokens state, to be waited for.
template <int kD>
__device__ __forceinline__ void AddState(float (&sums)[kD / 2], const uint32_t (&tokens)[4][4],
                                         const uint8_t* state) {
  BeginProducts();
  ssm::MultiplyAcross(sums, tokens, state);
  CommitProducts();
}

}  // namespace te::delta
