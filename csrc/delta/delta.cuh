// What the kernels of the gated delta rule share: what is known of a chunk of tokens before the state is.
#pragma once

#include "ssm/tiles.cuh"

namespace te::delta {

using ssm::Bf16;
using ssm::kBand;
using ssm::kChunk;
constexpr int kKept = 1024;  // tokens: how often the forward pass keeps the state
constexpr int kLast = kChunk - 1;
constexpr int kWarps = 4,
              kThreads = 32 * kWarps;  // a warp has a band of a chunk's tokens, or of a slab's values
constexpr int kSlab = kWarps * kBand;  // channels of values that a CTA has
constexpr int kMostKeys = 128;         // channels of keys that a group of warps has the state of
constexpr int kManyKeys = 2 * kMostKeys;

// As products of warpgroups want them.
template <int kColumns>
using Tokens = ssm::Tile<kChunk, kColumns, ssm::Boxes<kChunk, kColumns>>;

__device__ __forceinline__ float2 LoadTwo(const float* p) { return *reinterpret_cast<const float2*>(p); }

// The weights of a chunk's tokens, of one head of values. With S the state before the chunk, the tokens write
// W = inverse (betas (v - keys k S)) and read y = queries q S + seen W, and behind them the state is keeps S
// + k' (left W). Where keys, queries or keeps are 0, the state is not read, of whatever it is.
struct Weights {
  alignas(16) float keys[kChunk];  // what is left of the state; and q and k are divided by their length
  float queries[kChunk];           // and scale
  float says[kChunk];              // keys betas
  float left[kChunk];              // at the chunk's end of what a token writes; 0 of one of another run
  float betas[kChunk];             // 0 behind the last token
  float keeps;
  int several;    // whether not all tokens are of the last one's run
  int continues;  // how many are of the run of the token before the chunk
  int last;       // the first of the last one's run
};
// What weighs pairs of tokens.
struct Pairs {
  alignas(16) float sums[kChunk];             // of the logarithms to base 2 of what is left, up to a token
  float of_keys[kChunk], of_queries[kChunk];  // 1 over their lengths, or 1
};
struct Chunk {
  Tokens<kChunk> inverse, seen;  // 0 of later tokens and of other runs
  Weights weights;
  Pairs pairs;
};
static_assert(sizeof(Chunk) == 4 * kChunk * kChunk + 32 * kChunk + 16);

struct ChunkArgs {
  const Bf16 *q, *k;         // [rows, s, g, d]
  const float *beta, *gate;  // [rows, s, h]
  const int* runs;           // [rows, s], or nullptr
  int s, h, g, d;
  float scale;
  bool normalize;
};
// The rows and chunks of a call that an array of chunks [rows, chunks, h] has.
struct ChunkPart {
  int first_row, rows, first_chunk, chunks;

  __device__ __forceinline__ int64_t At(int64_t row, int chunk, int head, int heads) const {
    return ((row - first_row) * chunks + chunk - first_chunk) * heads + head;
  }
  // How many of the chunks have one of a row's s tokens.
  __host__ __device__ __forceinline__ int There(int s) const {
    const int behind = (s + kChunk - 1) / kChunk - first_chunk;
    return behind < chunks ? behind : chunks;
  }
};
// chunks: those behind the last token stay as they are. early: on Hopper, where the kernel ahead makes
// nothing that `a` has, it starts before that one is over.
Status LaunchChunks(cudaStream_t stream, const ChunkArgs& a, const ChunkPart& part, Chunk* chunks,
                    bool early);

// Calls `run<channels of a tile of keys, whether there are runs>()`.
template <typename Fn>
Status DispatchKeys(int64_t d, bool runs, Fn&& run) {
  if (d <= kMostKeys) return ssm::DispatchStates(d, runs, run);
  return runs ? run.template operator()<kManyKeys, true>() : run.template operator()<kManyKeys, false>();
}

}  // namespace te::delta
