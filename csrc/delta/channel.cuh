// The gated delta rule with a gate for each channel of keys (https://arxiv.org/abs/2510.26692): what is known
// of a chunk of tokens before the state is.
#pragma once

#include "delta/delta.cuh"

namespace te::delta {

// As Weights say, but what is left of the state differs by channels: it is in keys and queries, here rows of
// tiles. With S the state before the chunk, its tokens write W = inverse (betas (v - k S)) and read y = q S +
// seen W, and behind them the state is keeps S + left^T W. Of tokens of later runs k and q are 0, and of
// earlier ones than the last `left`.
template <int kD>
struct ChannelTiles {
  Tokens<kD> k, left;
  Tokens<kChunk> inverse;  // 0 of later tokens and of other runs, as `seen`
  Tokens<kD> q;            // behind what a walk without y needs
  Tokens<kChunk> seen;
};

template <int kD>
struct ChannelWeights {
  alignas(16) float keeps[kD];  // 0 where the state is not read, of whatever it is
  float betas[kChunk];          // 0 behind the last token
  int several;                  // whether not all tokens are of the last one's run
  int continues;                // how many are of the run of the token before the chunk
  int last;                     // the first of the last one's run
  int unused;
};

template <int kD>
struct alignas(128) ChannelChunk {  // as lines of caches are
  ChannelTiles<kD> tiles;
  ChannelWeights<kD> weights;
};
static_assert(sizeof(ChannelChunk<64>) == 41600 && sizeof(ChannelChunk<128>) == 66432);
constexpr int64_t ChannelBytes(int64_t d) {
  return d <= 64 ? sizeof(ChannelChunk<64>) : sizeof(ChannelChunk<128>);
}

// a.gate [rows, s, h, d]; chunks, of ChannelBytes(a.d): those behind the last token stay as they are.
Status LaunchChannelChunks(cudaStream_t stream, const ChunkArgs& a, const ChunkPart& part, void* chunks);

}  // namespace te::delta
