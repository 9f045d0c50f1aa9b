// The backward pass of the state-space dual, as its kernels see it: scan_bwd.cu says what they do.
#pragma once

#include "ssm/scan.cuh"

namespace te::ssm {

struct Slab {
  int rows, tokens;  // of a slab, the tokens a multiple of kKept
  int first_row, first_token;
  int heads;  // of a CTA of the second kernel

  __device__ __forceinline__ int Chunks() const { return tokens / kChunk; }
};

struct GradArgs {
  StepArgs steps;
  Slab slab;
  const Bf16 *dy, *x, *B, *C;  // dy, x [rows, s, h, p], B, C [rows, s, g, n]
  const float *D, *kept;       // D? [h], kept [rows, s / kKept, h, p, n]
  const float* after;  // [rows, h, p, n], or nullptr: the gradient to the state behind the slab's tokens,
  float* before;       // and before them
  Bf16 *states, *gradients;    // [slab rows, chunks, h, p, n]: of the state before a chunk, and behind it
  float *dB_parts, *dC_parts;  // [slab rows, tokens, g, parts, n]
  Bf16 *dx, *dB, *dC;
  void* ddt;                               // of dt's type
  float *dA_parts, *bias_parts, *D_parts;  // [rows, chunks, h]; the last two may be nullptr
  int g, p, n, parts;

  __device__ __forceinline__ int Group(int head) const { return head / (steps.h / g); }
  // Of the state of a head: of index [.., h, p, n].
  __device__ __forceinline__ int64_t States(int64_t index, int head, int first) const {
    return ((index * steps.h + head) * p + first) * n;
  }
  __device__ __forceinline__ int64_t Channels(int64_t token, int head, int first) const {
    return (token * steps.h + head) * p + first;
  }
};

// The kernels of a slab.
Status RunStates(cudaStream_t stream, const GradArgs& a);
Status RunChunks(cudaStream_t stream, const GradArgs& a);
Status RunSums(cudaStream_t stream, const GradArgs& a);

}  // namespace te::ssm
