// The backward pass of the gated delta rule, as its kernels see it: delta_bwd.cu says what they do.
#pragma once

#include "delta/delta_walk.cuh"

namespace te::delta {

// A slab of rows and chunks; its arrays have no others.
struct GradArgs {
  // Of the walk that makes states again, and of the one back, whose values are dy.
  WalkArgs again, back;
  Chunk* chunks;  // as both walks have them; the last kernel writes into them
  ChunkArgs of;
  ChunkPart part;      // what the slab has: kKept tokens or a multiple, or all
  const float* kept;   // [rows, ceil(s / kKept), h, d, e]
  const float* after;  // [rows, h, d, e], or nullptr: the gradient to the state behind the slab's tokens,
  float* before;       // and before them
  Bf16 *states, *gradients;  // [slab rows, chunks, h, e, d]: of the state before a chunk, and behind it
  Bf16 *written, *gradients_written;  // [slab rows, tokens, h, e]: what tokens write, W, and inverse^T dW
  Bf16 *dq, *dk, *dv;                 // as q, k, v; nullptr: only the gradient to the state is wanted
  float *dbeta, *dgate;               // as beta and gate

  __device__ __forceinline__ int64_t State(int64_t row, int chunk, int head) const {
    return part.At(row, chunk, head, of.h) * again.e * of.d;
  }
  // Of `written`: a chunk's first token.
  __device__ __forceinline__ int64_t Written(int64_t row, int chunk, int head, int first) const {
    const int64_t token = ((row - part.first_row) * part.chunks + chunk - part.first_chunk) * kChunk;
    return (token * of.h + head) * again.e + first;
  }
};

// The walks of a slab, with a gate for each head or channel; on Hopper, with the `rows` of all slabs, they
// start before the kernel ahead is over.
Status RunGradWalks(cudaStream_t stream, const GradArgs& a);
Status RunGradWalksOnHopper(cudaStream_t stream, const GradArgs& a, int64_t rows);

// All chunks of a slab behind its walks; on Hopper with the `rows` of all slabs. Where channels have gates:
// `early` if it starts before the walks are over.
Status RunGradChunks(cudaStream_t stream, const GradArgs& a);
Status RunGradChunksOnHopper(cudaStream_t stream, const GradArgs& a, int64_t rows);
Status RunChannelGradients(cudaStream_t stream, const GradArgs& a, bool early);

}  // namespace te::delta
