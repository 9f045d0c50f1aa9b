// The backward pass of the gated delta rule with a gate for each channel, as its kernels see it:
// channel_bwd.cu says what they do.
#pragma once

#include "delta/delta_walk.cuh"
#include "delta/operands.cuh"

namespace te::delta {

struct ChannelGradArgs {
  WalkArgs again, back;  // of the walk that makes states again, and of the one back, whose values are dy
  ChunkArgs of;
  ChannelPart part;    // what a slab has: kKept tokens or a multiple, or all
  const float* kept;   // [rows, ceil(s / kKept), h, d, e]
  const float* after;  // [rows, h, d, e], or nullptr: the gradient to the state behind the slab's tokens,
  float* before;       // and before them
  Bf16 *states, *gradients;  // [slab rows, chunks, h, e, d]: of the state before a chunk, and behind it
  Bf16 *written, *gradients_written;  // [slab rows, tokens, h, e]: what tokens write, W, and inverse^T dW
  Bf16 *dq, *dk, *dv;                 // as q, k, v
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

// The kernels of a slab: the walks, on Hopper and elsewhere, and then all chunks.
Status RunChannelWalks(cudaStream_t stream, const ChannelGradArgs& a);
Status RunChannelWalksOnHopper(cudaStream_t stream, const ChannelGradArgs& a);
Status RunChannelGradients(cudaStream_t stream, const ChannelGradArgs& a, bool early);

// The results of te_gated_delta_bwd where gates are of channels.
struct ChannelResults {
  Tensor dq, dk, dv, dbeta, dgate, dinitial, workspace;
};
Status RunChannelBwd(cudaStream_t stream, const DeltaCall& call, const Tensor& dy, const Tensor& dlast,
                     const Tensor& v, const Tensor& states, const ChannelResults& out, int64_t slab_rows,
                     int64_t slab_tokens);

}  // namespace te::delta
