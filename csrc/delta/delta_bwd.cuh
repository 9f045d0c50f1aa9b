// The backward pass of the gated delta rule, as its kernels see it: delta_bwd.cu says what they do.
#pragma once

#include "delta/delta_walk.cuh"

namespace te::delta {

struct Slab {
  int rows, tokens;  // of a slab, the tokens a multiple of kKept, or of kChunk and all
  int first_row, first_token;

  __device__ __forceinline__ int Chunks() const { return tokens / kChunk; }
};

struct GradArgs {
  // Of the walk that makes states again, and of the one back, whose values are dy.
  WalkArgs again, back;
  Slab slab;
  const float* kept;   // [rows, ceil(s / kKept), h, d, e]
  const float* after;  // [rows, h, d, e], or nullptr: the gradient to the state behind the slab's tokens,
  float* before;       // and before them
  Bf16 *states, *gradients;  // [slab rows, chunks, h, e, d]: of the state before a chunk, and behind it
  Bf16 *written, *gradients_written;  // [slab rows, tokens, h, e]: what tokens write, W, and inverse^T dW
  const int* runs;                    // [rows, s], or nullptr
  float scale;
  Bf16 *dq, *dk, *dv;    // as q, k, v
  float *dbeta, *dgate;  // [rows, s, h]
  bool normalize;

  __device__ __forceinline__ int64_t State(int row, int chunk, int head) const {
    return ((int64_t(row) * slab.Chunks() + chunk) * again.h + head) * again.e * again.d;
  }
  // Of `written`; the token is of the slab.
  __device__ __forceinline__ int64_t Written(int row, int token, int head, int first) const {
    return ((int64_t(row) * slab.tokens + token) * again.h + head) * again.e + first;
  }
};

// The kernels of a slab: the walks and then all chunks.
Status RunGradWalks(cudaStream_t stream, const GradArgs& a);
Status RunGradChunks(cudaStream_t stream, const GradArgs& a);

// The same on Hopper, where they start before the kernel ahead is over. `overlaps`: of the slab before that
// whose walks are the kernel ahead, all of which have begun: who begins awaits the end of what came before
// it, so the slab's own walks are over. In turn the chunks end when the walks ahead have ended.
struct HopperGradCall {
  int64_t rows;  // of all slabs
  bool overlaps;
};
Status RunGradWalksOnHopper(cudaStream_t stream, const GradArgs& a);
// Whether an eighth of the SMs or more have none of the walks of a slab.
Status GradWalksLeaveRoom(const GradArgs& a, bool* room);
Status RunGradChunksOnHopper(cudaStream_t stream, const GradArgs& a, const HopperGradCall& call);

}  // namespace te::delta
