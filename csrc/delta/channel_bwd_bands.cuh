// What the gradients of channels' gates need within a chunk of tokens: how the loss depends on queries and
// keys through what tokens see of each other, by bands of 16 tokens.
#pragma once

#include "delta/channel_sums.cuh"
#include "delta/delta_walk.cuh"

namespace te::delta {

constexpr int kGradThreads = ssm::kThreads, kSides = 2;  // warps that share a band of tokens
static_assert(kGradThreads == 32 * kBands * kSides);
constexpr int kPart = 64;                        // channels of keys
constexpr int kSide = kPart / kSides;            // that a warp has
constexpr int kQuarters = kGradThreads / kPart;  // threads of a channel

// Of 64 channels of a head's values.
struct OfValues {
  Tokens<kSlab> dy, written, gradients_written;  // gradients to what tokens would write without each other
};
struct OfStates {
  OfValues values;
  Tokens<kPart> state, gradient;  // [values, kPart]
};
// Keys and queries by bands: keys at their band's end, and as divided by what is left at a token; queries,
// and keys times -beta, as what is left since their band begins. Where products are split in the chunk's
// middle, all are since there, and `until` has no meaning.
struct OfBands {
  Tokens<kPart> until, back, queries, keys;
};
// Of a channel of a token: the gradient to the sum of the logarithms up to it, but for what it writes that is
// left at the chunk's end, which is where `sums` had it; and of 16 tokens, the sums of both.
struct OfGates {
  alignas(16) float ends[kChunk * ChannelSums<kPart>::kPitch];
  float parts[2][kQuarters][kPart];
};

template <bool kRuns>
struct ChannelGradShared {
  union {
    OfValues values;
    OfStates states;
    OfBands bands;
    OfGates gates;
  };
  Tokens<kPart> q, k;
  // The gradients to how much queries and keys see of keys, 0 unless these are of earlier tokens.
  Tokens<kChunk> of_queries, of_keys;
  ChannelSums<kPart> sums;
  // Whether products of each 16 channels are split in the chunk's middle. Sums from there up to where a band
  // begins, before it more than 0, with which `sums` begin there; else 0. What is left in the middle of what
  // is there before the chunk, and at the chunk's end of what is there in the middle.
  alignas(16) float middle[kBands][kPart];
  float halves[2][kPart];
  float totals[kBands][kPart];  // of bands: `sums` of their last tokens
  int is_split[kPart / 16];
  float own[kChunk];                                 // of queries, of the token's own key
  float key_lengths[kChunk], query_lengths[kChunk];  // 1 over them, or 1
  float betas[kChunk];
  float says[kSides]
            [kChunk];  // from each warp: to beta, what the state and other tokens say of the token's key
  float along[2][kSides][kChunk];            // what of the gradient of a query, of a key, lies along it
  float products[kGradThreads / 32][kPart];  // of the state and its gradient, from each warp
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

  // Where the lane's matrices lie in a tile of 64 columns, as Tile has them: of Tile::A, whose rows are the
  // warp's band, the i-th 16 columns at 16 * i ^ what this gives; of Tile::TransposedA, whose columns are its
  // band, and of Tile::B, with 16 columns from `column` on, the i-th 16 rows kOfBand * i further; and two
  // neighbours that the lane has of a result, in the j-th 8 of 16 columns, of Token(n).
  static constexpr int kOfBand = kBand * kPart;
  static_assert(kPart == 64 && kSlab == 64 && kChunk == 64);
  __device__ __forceinline__ static int CellOf(int row, int column) {
    return ssm::Boxes<kChunk, kPart>::At(row, column % kPart);
  }
  __device__ __forceinline__ static int CellOfA() {
    return CellOf(Band() * kBand + Lane() % 16, Lane() / 16 * 8);
  }
  __device__ __forceinline__ static int CellOfTransposedA() {
    return CellOf(Lane() % 8 + Lane() / 16 * 8, Band() * kBand + Lane() / 8 % 2 * 8);
  }
  __device__ __forceinline__ static int CellOfB(int column) {
    return CellOf(Lane() % 16, column + Lane() / 16 * 8);
  }
  __device__ __forceinline__ static int CellOfTwo(int column, int j, int n) {
    return (CellOf(Token(0), column + ssm::ColumnOf(0)) ^ 8 * j) + n / 2 * 8 * kPart;
  }
  __device__ __forceinline__ static float2 TwoAt(const Tokens<kPart>& tile, int cell) {
    return ssm::Unpack(*reinterpret_cast<const uint32_t*>(tile.cells + cell));
  }

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

  // A thread has a band's channel. All call it.
  __device__ __forceinline__ void SetMiddle() {
    const int channel = threadIdx.x % kPart, band = threadIdx.x / kPart;
    static_assert(kQuarters == kBands && kBands == 4);
    const auto of = [&](int i) { return *s.sums.At(i * kBand + kBand - 1, channel); };
    const float before = of(0) + of(1), behind = of(2) + of(3);
    const bool is_split = IsOfNone(-fminf(before, behind) > kMostOfHalf);
    if (threadIdx.x < kPart && Lane() % 16 == 0) s.is_split[channel / 16] = is_split;
    const float from_middle = band == 0 ? -before : band == 1 ? -of(1) : band == 2 ? 0.f : of(2);
    s.middle[band][channel] = is_split ? from_middle : 0.f;
    s.totals[band][channel] = of(band);
    if (band < 2) s.halves[band][channel] = Exp2(band == 0 ? before : behind);
  }
  // The sum over a band's tokens; and over these and all tokens behind them.
  __device__ __forceinline__ float2 Total(int band, int channel) const {
    return LoadTwo(&s.totals[band][channel]);
  }
  __device__ __forceinline__ float2 Since(int band, int channel) const {
    float2 sum = Total(kBands - 1, channel);
#pragma unroll 1
    for (int i = kBands - 1; i-- > band;) {
      const float2 of_band = Total(i, channel);
      sum.x += of_band.x, sum.y += of_band.y;
    }
    return sum;
  }
  __device__ __forceinline__ float2 FromMiddle(int token, int channel) const {
    const float2 own = s.sums.Two(token, channel), more = LoadTwo(&s.middle[token / kBand][channel]);
    return make_float2(own.x + more.x, own.y + more.y);
  }

  __device__ __forceinline__ void SetBands() {
    constexpr int kPieces = kPart / 8;
    const int channel = threadIdx.x % kPieces * 8;
#pragma unroll 1
    for (int token = threadIdx.x / kPieces; token < kChunk; token += kGradThreads / kPieces) {
      const int cell = CellOf(token, channel);
      const auto key = Load<8>(s.k.cells + cell), query = Load<8>(s.q.cells + cell);
      const float by_key = s.key_lengths[token], by_query = s.query_lengths[token], beta = -s.betas[token];
      float back[8], queries[8], keys[8];
#pragma unroll
      for (int j = 0; j < 8; j += 4) {
        const auto own = Load<4>(s.sums.At(token, channel + j));
        const auto more = Load<4>(&s.middle[token / kBand][channel + j]);
#pragma unroll
        for (int m = 0; m < 4; ++m) {
          const float sum = own[m] + more[m], since = Exp2(sum), of_key = by_key * key[j + m];
          back[j + m] = of_key * Exp2(-sum), keys[j + m] = of_key * (beta * since);
          queries[j + m] = query[j + m] * (by_query * since);
        }
      }
      Store(s.bands.back.cells + cell, Round<Bf16, 8>(back));
      Store(s.bands.queries.cells + cell, Round<Bf16, 8>(queries));
      Store(s.bands.keys.cells + cell, Round<Bf16, 8>(keys));
      if (s.is_split[channel / 16]) continue;
      float until[8];
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float all = s.totals[token / kBand][channel + j];
        until[j] = by_key * key[j] * Exp2(all - *s.sums.At(token, channel + j));
      }
      Store(s.bands.until.cells + cell, Round<Bf16, 8>(until));
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
      const float2 log = Total(band, column + 8 * j + ssm::ColumnOf(0));
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
  // sees and the state before the chunk, which is what they have.
  __device__ __forceinline__ void Down(int column, bool splits, Block& queries, Block& keys) {
    const int to = Band() * kBand;
    uint32_t left[4];
#pragma unroll 1
    for (int from = 0; from < Band() + splits; ++from) {
      Tokens<kPart>& right = from < Band() ? s.bands.until : s.bands.back;
      if (from < Band()) Fade(queries, column, from), Fade(keys, column, from);
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
      const float2 all = splits ? make_float2(0, 0) : Total(Band(), channel);
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

  // Of 16 channels, `reads`, `says` and `leaves` have what queries and keys read of the state before the
  // chunk, and what the gradient behind it says of what tokens write. They become how the loss depends on a
  // query, on a key but for -beta, and on a key through what is left of it behind the chunk; `later`: through
  // what later tokens see of it.
  struct Blocks {
    Block &reads, &says, &leaves, &later;
  };
  __device__ __forceinline__ void SeeInBands(int column, float scale, const Blocks& of) {
    const bool splits = s.sums.Splits(Band(), column);
    EachTwo(column, [&](int token, int channel, int j, int n) {
      const float2 behind = Since(Band(), channel), own = s.sums.Two(token, channel);
      Weigh(of, token, j, n, scale, make_float2(1, 1), ExpOf(behind.x - own.x, behind.y - own.y));
    });
    Down(column, splits, of.reads, of.says), Up(column, splits, of.later);
  }
  // Of two neighbours. Tokens of other runs take nothing of states, whatever these are.
  __device__ __forceinline__ void Weigh(const Blocks& of, int token, int j, int n, float scale, float2 before,
                                        float2 behind) const {
    const bool goes_on = s.runs.Continues(token), stays = s.runs.AreOne(token, kLast);
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      float &read = of.reads[j][n + m], &say = of.says[j][n + m], &leave = of.leaves[j][n + m];
      const float since = m ? before.y : before.x, until = m ? behind.y : behind.x;
      read = goes_on ? scale * since * read : 0.f, say = goes_on ? since * say : 0.f;
      leave = stays ? until * leave : 0.f;
    }
  }
  // As SeeInBands, where products are split in the chunk's middle: one factor of a token and channel weighs
  // them all.
  __device__ __forceinline__ void SeeInMiddle(int column, float scale, const Blocks& of) {
    EachTwo(column, [&](int token, int channel, int j, int n) {
      Weigh(of, token, j, n, scale, LoadTwo(&s.halves[0][channel]), LoadTwo(&s.halves[1][channel]));
    });
    const int rows = CellOfA(), columns = CellOfTransposedA(), right = CellOfB(column);
    const auto multiply = [](Block& to, const uint32_t (&left)[4], const uint32_t (&b)[4]) {
      MultiplyAdd<false>(to[0], left, b[0], b[1]), MultiplyAdd<false>(to[1], left, b[2], b[3]);
    };
#pragma unroll
    for (int i = 0; i < kBands; ++i) {
      uint32_t query[4], key[4], b[4], more[4];
      if (i <= Band()) {
        LoadMatrices<true>(b, s.bands.back.cells + right + i * kOfBand);
        LoadMatrices<false>(query, s.of_queries.cells + (rows ^ 16 * i));
        LoadMatrices<false>(key, s.of_keys.cells + (rows ^ 16 * i));
        multiply(of.reads, query, b), multiply(of.says, key, b);
      }
      if (i >= Band()) {
        LoadMatrices<true>(query, s.of_queries.cells + columns + i * kOfBand);
        LoadMatrices<true>(b, s.bands.queries.cells + right + i * kOfBand);
        LoadMatrices<true>(key, s.of_keys.cells + columns + i * kOfBand);
        LoadMatrices<true>(more, s.bands.keys.cells + right + i * kOfBand);
        multiply(of.later, query, b), multiply(of.later, key, more);
      }
    }
    EachTwo(column, [&](int token, int channel, int j, int n) {
      const float2 own = FromMiddle(token, channel);
      const float sums[2] = {own.x, own.y};
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        const float since = Exp2(sums[m]), until = Exp2(-sums[m]);
        of.reads[j][n + m] *= since, of.says[j][n + m] *= since;
        of.later[j][n + m] *= until, of.leaves[j][n + m] *= until;
      }
    });
  }
};

}  // namespace te::delta
