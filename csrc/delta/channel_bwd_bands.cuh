// What the gradients of channels' gates need within a chunk of tokens: how the loss depends on queries and
// keys through what tokens see of each other, by bands of 16 tokens.
#pragma once

#include "delta/channel_sums.cuh"

namespace te::delta {

constexpr int kGradThreads = ssm::kThreads, kSides = 2;  // warps that share a band of tokens
static_assert(kGradThreads == 32 * kBands * kSides);
constexpr int kPart = 64;                        // channels of keys
constexpr int kSide = kPart / kSides;            // that a warp has
constexpr int kQuarters = kGradThreads / kPart;  // threads of a channel

// Of 64 channels of a head's values.
struct OfValues {
  Tokens<kSlab> dy, written, alone;  // alone: the gradient to what tokens would write without each other
};
struct OfStates {
  OfValues values;
  Tokens<kPart> state, gradient;  // [values, kPart]
};
// Keys and queries by bands: keys at their band's end, and as divided by what is left at a token; queries,
// and keys times -beta, as what is left since their band begins.
struct OfBands {
  Tokens<kPart> until, back, queries, keys;
};
// Of a channel of a token: the gradient to the sum of the logarithms up to it, but for what it writes that is
// left at the chunk's end; and that.
struct OfSums {
  static constexpr int kPitch = kPart + 8;
  alignas(16) float ends[kChunk * kPitch], leaves[kChunk * kPitch];
};

template <bool kRuns>
struct ChannelGradShared {
  union {
    OfValues values;
    OfStates states;
    OfBands bands;
    OfSums ends;
  };
  Tokens<kPart> q, k;
  // The gradients to how much queries and keys see of keys, 0 unless these are of earlier tokens.
  Tokens<kChunk> of_queries, of_keys;
  ChannelSums<kPart> sums;
  float own[kChunk];                                 // of queries, of the token's own key
  float key_lengths[kChunk], query_lengths[kChunk];  // 1 over them, or 1
  float betas[kChunk];
  float says[kSides]
            [kChunk];  // from each warp: to beta, what the state and other tokens say of the token's key
  float along[2][kSides][kChunk];    // what of the gradient of a query, of a key, lies along it
  float products[kQuarters][kPart];  // of the state and its gradient
  float parts[2][kQuarters][kPart];  // sums of `ends`, `leaves`
  ssm::Runs<kRuns> runs;
};

// Tokens are the rows of all products. A band of them is two warps', each with half of the columns.
template <bool kRuns>
struct ChannelBands {
  using Block = float[2][4];  // [kBand, 16]
  ChannelGradShared<kRuns>& s;

  __device__ __forceinline__ static int Band() { return WarpIndex() % kBands; }
  __device__ __forceinline__ static int Side() { return WarpIndex() / kBands; }
  __device__ __forceinline__ static int Token(int n) { return Band() * kBand + ssm::RowOf(n); }
  __device__ __forceinline__ static int Column(int i) { return Side() * kSide + 16 * i; }

  // Two neighbours of a key, of a query, each over its length; and exp2 of two.
  __device__ __forceinline__ float2 Key(int token, int channel) const {
    return Times(s.key_lengths[token], TwoOf(s.k, token, channel));
  }
  __device__ __forceinline__ float2 Query(int token, int channel) const {
    return Times(s.query_lengths[token], TwoOf(s.q, token, channel));
  }
  __device__ __forceinline__ static float2 Times(float by, float2 of) {
    return make_float2(by * of.x, by * of.y);
  }
  __device__ __forceinline__ static float2 TwoOf(Tokens<kPart>& tile, int token, int channel) {
    return ssm::Unpack(*reinterpret_cast<const uint32_t*>(tile.At(token, channel)));
  }
  __device__ __forceinline__ static float2 ExpOf(float x, float y) { return make_float2(Exp2(x), Exp2(y)); }

  __device__ __forceinline__ void SetBands() {
    constexpr int kPieces = kPart / 8;
#pragma unroll 1
    for (int i = threadIdx.x; i < kChunk * kPieces; i += kGradThreads) {
      const int token = i / kPieces, channel = i % kPieces * 8, band = token / kBand;
      const auto key = Load<8>(s.k.At(token, channel)), query = Load<8>(s.q.At(token, channel));
      const float by_key = s.key_lengths[token], by_query = s.query_lengths[token], beta = s.betas[token];
      float until[8], back[8], queries[8], keys[8];
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float own = *s.sums.At(token, channel + j), since = Exp2(own);
        const float all = *s.sums.At(band * kBand + kBand - 1, channel + j), of_key = by_key * key[j];
        until[j] = of_key * Exp2(all - own), back[j] = of_key * Exp2(-own);
        queries[j] = by_query * query[j] * since, keys[j] = -beta * of_key * since;
      }
      Store(s.bands.until.At(token, channel), Round<Bf16, 8>(until));
      Store(s.bands.back.At(token, channel), Round<Bf16, 8>(back));
      Store(s.bands.queries.At(token, channel), Round<Bf16, 8>(queries));
      Store(s.bands.keys.At(token, channel), Round<Bf16, 8>(keys));
    }
  }

  // Calls fn(token, channel, j, n) for each two neighbours of a block, whose columns begin at `column`: the
  // first one is element [j][n].
  template <typename Fn>
  __device__ __forceinline__ static void EachTwo(int column, Fn&& fn) {
#pragma unroll
    for (int j = 0; j < 2; ++j)
#pragma unroll
      for (int n = 0; n < 4; n += 2) fn(Token(n), column + 8 * j + ssm::ColumnOf(0), j, n);
  }
  __device__ __forceinline__ void Fade(Block& block, int column, int band) const {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const float2 log = s.sums.Band(band, column + 8 * j + ssm::ColumnOf(0));
      const float left[2] = {Exp2(log.x), Exp2(log.y)};
#pragma unroll
      for (int n = 0; n < 4; ++n) block[j][n] *= left[n % 2];
    }
  }
  __device__ __forceinline__ static void Multiply(Block& to, const uint32_t (&left)[4], Tokens<kPart>& right,
                                                  int band, int column) {
    ssm::Multiply2(to[0], to[1], left, [&](auto& b) { right.B(b, band * kBand, column); });
  }

  // Of 16 channels: how the loss depends on a token's query, and on its key but for -beta, through what it
  // sees.
  __device__ __forceinline__ void Down(int column, bool splits, Block& queries, Block& keys) {
    const int to = Band() * kBand;
    uint32_t left[4];
#pragma unroll 1
    for (int from = 0; from < Band() + splits; ++from) {
      Tokens<kPart>& right = from < Band() ? s.bands.until : s.bands.back;
      if (from > 0 && from < Band()) Fade(queries, column, from), Fade(keys, column, from);
      s.of_queries.A(left, to, from * kBand);
      Multiply(queries, left, right, from, column);
      s.of_keys.A(left, to, from * kBand);
      Multiply(keys, left, right, from, column);
    }
    EachTwo(column, [&](int token, int channel, int j, int n) {
      const float2 own = s.sums.Two(token, channel), since = ExpOf(own.x, own.y);
      queries[j][n] *= since.x, queries[j][n + 1] *= since.y;
      keys[j][n] *= since.x, keys[j][n + 1] *= since.y;
    });
    if (splits) return;
#pragma unroll 1
    for (int from = to; from < to + kBand; ++from)
      EachTwo(column, [&](int token, int channel, int j, int n) {
        if (from >= token) return;
        const float2 left = Left(from, token, channel), key = Key(from, channel);
        const float query = __bfloat162float(*s.of_queries.At(token, from)),
                    says = __bfloat162float(*s.of_keys.At(token, from));
        queries[j][n] += query * left.x * key.x, queries[j][n + 1] += query * left.y * key.y;
        keys[j][n] += says * left.x * key.x, keys[j][n + 1] += says * left.y * key.y;
      });
  }
  // Of two channels, at a token of what there is at one of the same band before it.
  __device__ __forceinline__ float2 Left(int from, int to, int channel) const {
    const float2 before = s.sums.Two(from, channel), all = s.sums.Two(to, channel);
    return ExpOf(all.x - before.x, all.y - before.y);
  }

  // Of 16 channels: how the loss depends on a token's key through what later tokens see of it.
  __device__ __forceinline__ void Up(int column, bool splits, Block& keys) {
    const int from = Band() * kBand;
    uint32_t left[4];
#pragma unroll 1
    for (int to = kBands - 1; to > Band() - splits; --to) {
      if (to < kBands - 1) Fade(keys, column, to);
      s.of_queries.TransposedA(left, to * kBand, from);
      Multiply(keys, left, s.bands.queries, to, column);
      s.of_keys.TransposedA(left, to * kBand, from);
      Multiply(keys, left, s.bands.keys, to, column);
    }
    EachTwo(column, [&](int token, int channel, int j, int n) {
      const float2 own = s.sums.Two(token, channel);
      const float2 all = splits ? make_float2(0, 0) : s.sums.Band(Band(), channel);
      const float2 left = ExpOf(all.x - own.x, all.y - own.y);
      keys[j][n] *= left.x, keys[j][n + 1] *= left.y;
    });
    if (splits) return;
#pragma unroll 1
    for (int to = from; to < from + kBand; ++to)
      EachTwo(column, [&](int token, int channel, int j, int n) {
        if (to <= token) return;
        const float2 left = Left(token, to, channel), query = Query(to, channel), key = Key(to, channel);
        const float by_query = __bfloat162float(*s.of_queries.At(to, token));
        const float by_key = -s.betas[to] * __bfloat162float(*s.of_keys.At(to, token));
        keys[j][n] += left.x * (by_query * query.x + by_key * key.x);
        keys[j][n + 1] += left.y * (by_query * query.y + by_key * key.y);
      });
  }
};

}  // namespace te::delta
