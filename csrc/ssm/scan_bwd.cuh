// The backward pass of the state-space dual, as its kernels see it: scan_bwd.cu says what they do.
#pragma once

#include <cuda.h>

#include "ssm/scan.cuh"

namespace te::ssm {

struct Slab {
  int rows, tokens;  // of a slab, the tokens a multiple of kKept, or of kChunk and all
  int first_row, first_token;
  int heads;  // of a CTA of the second kernel

  __device__ __forceinline__ int Chunks() const { return tokens / kChunk; }
};

// What the gradients to steps follow from, of the tokens of a chunk and one head.
struct Ends {
  // Scores times dy x^T, summed over the tokens that see, or the tokens that are seen but for the token
  // itself.
  alignas(16) float to[kChunk], from[kChunk];
  float of_state[kChunk], to_state[kChunk];  // C state dy, and x dB B: without what is left
  float own[kChunk], dots[kChunk];           // of a token with itself: score times dy x, and dy x
  alignas(16) float through[4];              // their sum: the state before times its gradient behind
};

struct GradArgs {
  StepArgs steps;
  const Steps* of_chunks;  // [rows, chunks, h]
  Ends* ends;              // [slab rows, chunks, h]
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

  __device__ __forceinline__ const Steps* StepsOf(int64_t row, int token, int head) const {
    return of_chunks + (row * ((steps.s + kChunk - 1) / kChunk) + token / kChunk) * steps.h + head;
  }
  __device__ __forceinline__ int Group(int head) const { return head / (steps.h / g); }
  // Of the state of a head: of index [.., h, p, n].
  __device__ __forceinline__ int64_t States(int64_t index, int head, int first) const {
    return ((index * steps.h + head) * p + first) * n;
  }
  __device__ __forceinline__ int64_t Channels(int64_t token, int head, int first) const {
    return (token * steps.h + head) * p + first;
  }
};

struct HopperGradArgs {
  GradArgs a;
  // Of [rows, s, h, p] and [rows, s, g, n] in boxes of 64 tokens, or of 16 of dx; of [slab rows chunks, h, p,
  // n] in boxes of 64 channels, or of 16 to be written.
  CUtensorMap x, dy, B, C, dx, states, gradients, states_out, gradients_out;
};

// The kernels of a slab.
Status RunStates(cudaStream_t stream, const GradArgs& a);
Status RunChunks(cudaStream_t stream, const GradArgs& a);
Status RunEnds(cudaStream_t stream, const GradArgs& a);

// The first two on Hopper, for heads of up to 64 channels; with maps for all slabs, each of `a.slab.rows`
// rows at most.
struct ScanCall;
Status MakeMaps(const ScanCall& call, const GradArgs& a, HopperGradArgs* out);
Status RunOnHopper(cudaStream_t stream, const HopperGradArgs& given);

}  // namespace te::ssm
