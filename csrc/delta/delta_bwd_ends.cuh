// What a chunk's sums over pairs of tokens come to, of one head: the gradients to its gates.
#pragma once

#include "delta/delta_bwd.cuh"

namespace te::delta {

// Of a chunk's tokens and one head, from all that have some of what is summed. `reads`: the gradient to the
// logarithm of what is left, from what queries read; `says`, to beta, from what the state and other tokens
// say of the token's key, but for the sign; `leaves`: to the logarithm of what is left at the chunk's end;
// `from`: as `reads`, and through other tokens' keys, of what is read of the token; `products`: of the state
// before the chunk and its gradient behind it.
template <int kReads, int kLeaves, int kProducts>
struct GradSums {
  alignas(16) float reads[kReads][kChunk], says[kReads][kChunk], leaves[kLeaves][kChunk],
      from[kChunk / kBand][kChunk];
  float products[kProducts];

  __device__ __forceinline__ float Says(int token) const { return Of(says, token); }
  // Of the lane's two tokens. A gate is of all that goes past its token: from tokens before it, or the state,
  // to it and later ones, or the state behind the chunk. Of two tokens that is what is summed to the later
  // less what is summed from the earlier.
  __device__ __forceinline__ void OfGates(const float2& betas, float keeps, float (&past)[2]) const {
    float ends[2], left[2], sum = 0;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int t = 2 * Lane() + i;
      ends[i] = Of(reads, t) - (i ? betas.y : betas.x) * Says(t) - Of(from, t), left[i] = Of(leaves, t);
    }
#pragma unroll
    for (float product : products) sum += product;
    ssm::PastTokens(past, ends, left, Weighed(keeps, sum));
  }

 private:
  template <int kCount>
  __device__ __forceinline__ static float Of(const float (&of)[kCount][kChunk], int token) {
    float sum = of[0][token];
#pragma unroll
    for (int i = 1; i < kCount; ++i) sum += of[i][token];
    return sum;
  }
};

}  // namespace te::delta
