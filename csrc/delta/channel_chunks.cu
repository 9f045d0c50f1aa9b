// What the gated delta rule with a gate for each channel needs of each chunk of tokens and knows before the
// state: keys and queries as the state before the chunk is read with, and keys as what they write is left at
// its end; how much queries see of keys, and the inverse. Where gates leave at least 2^-kMostOfHalf of 16
// channels in each half of the chunk, all products are split in its middle. Elsewhere they are where bands
// begin; and where the gates of 16 tokens leave less than 2^-kMostSplit of a channel, what is left between
// two of them is computed for each pair.

#include "base/check.h"
#include "delta/channel.cuh"
#include "delta/channel_sums.cuh"

namespace te::delta {
namespace {

template <int kD>
struct ChannelKeys {
  ssm::Tile<kChunk, kD> q, k;
};
struct ChannelSystem {
  alignas(16) float of[kChunk * kPitch];  // below its diagonal, then the inverse
  Tokens<kChunk> seen;
};

template <int kD, bool kRuns>
struct ChannelShared {
  union {
    ChannelKeys<kD> tokens;
    ChannelSystem system;  // when tokens are multiplied and written
  };
  ChannelSums<kD> sums;
  // Sums of bands: of those before one, and of it and those behind.
  alignas(16) float before[kBands][kD], behind[kBands][kD];
  int is_split[kD / 16];  // of each 16 channels, whether products are split in the chunk's middle
  float of_keys[kChunk], of_queries[kChunk];  // 1 over their lengths, or 1
  float betas[kChunk];
  ssm::Runs<kRuns> runs;
};

template <int kD, bool kRuns>
struct OfChannels {
  const ChunkArgs& a;
  ChannelShared<kD, kRuns>& s;
  ChannelChunk<kD>& out;
  const int64_t row;
  const int first, head;  // token

  using Scores = float[kChunk / 8][4];

  __device__ __forceinline__ static int Band() { return WarpIndex(); }
  __device__ __forceinline__ int Rows() const { return a.s - first; }
  __device__ __forceinline__ int64_t At(int token) const { return (row * a.s + first + token) * a.h + head; }

  __device__ __forceinline__ void Fetch() {
    const int group = head / (a.h / a.g);
    const int64_t at = ((row * a.s + first) * a.g + group) * a.d, stride = int64_t(a.g) * a.d;
    s.tokens.q.template Fetch<kThreads>(a.q + at, stride, Rows(), a.d);
    s.tokens.k.template Fetch<kThreads>(a.k + at, stride, Rows(), a.d);
    CommitPrefetch();
    s.runs.Set(a, row, first, threadIdx.x, kThreads);
    if (threadIdx.x < kChunk) s.sums.spoiled[threadIdx.x] = 0;
    __syncthreads();
    s.sums.template Set<kThreads>(a.gate + At(0) * a.d, int64_t(a.h) * a.d, Rows(), a.d);
    WaitForPrefetch<0>();
    __syncthreads();
  }

  // Each thread has a query or a key.
  __device__ __forceinline__ void Lengths() {
    const int token = threadIdx.x % kChunk;
    const bool of_key = threadIdx.x >= kChunk;
    auto& tile = of_key ? s.tokens.k : s.tokens.q;
    (of_key ? s.of_keys : s.of_queries)[token] = a.normalize ? InverseLength(tile, token) : 1.f;
    if (of_key) s.betas[token] = token >= Rows() ? 0.f : s.sums.spoiled[token] ? NAN : a.beta[At(token)];
  }

  // The products of keys, and of queries and keys, [16, 64]: of a band with itself and those before it.
  __device__ __forceinline__ void Multiply(Scores& keys, Scores& queries) {
    const int band = Band();
#pragma unroll 1
    for (int d = 0; d < kD; d += 16) {
      if (s.is_split[d / 16]) {
        MultiplyInMiddle(keys, queries, d);
        continue;
      }
      uint32_t of_key[4], of_query[4], b[4];
      const auto since = [&](int token, int channel) { return s.sums.Two(token, channel); };
      s.tokens.k.A(of_key, band * kBand, d), s.tokens.q.A(of_query, band * kBand, d);
      WeighChannels<true>(of_key, band * kBand, d, since),
          WeighChannels<true>(of_query, band * kBand, d, since);
      const bool splits = s.sums.Splits(band, d);
      const int column = d + ssm::ColumnOf(0);
      float2 between[2] = {};  // sums of the bands between
#pragma unroll
      for (int i = kBands - 1; i >= 0; --i) {
        if (i > band) continue;
        if (i == band && !splits) {
          MultiplyPairs(keys, queries, i, d);
          continue;
        }
        if (i < band)
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            const float2 own = s.sums.Band(i, column + 8 * j);
            between[j].x += own.x, between[j].y += own.y;
          }
        s.tokens.k.TransposedB(b, i * kBand, d);
        WeighChannels<false>(b, i * kBand, d, [&](int token, int channel) {
          const float2 own = s.sums.Two(token, channel), end = between[(channel - column) / 8];
          return make_float2(end.x - own.x, end.y - own.y);
        });
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          MultiplyAdd<false>(keys[2 * i + j], of_key, b[2 * j], b[2 * j + 1]);
          MultiplyAdd<false>(queries[2 * i + j], of_query, b[2 * j], b[2 * j + 1]);
        }
      }
    }
  }
  // The products of 16 channels, with tokens as WriteInMiddle has them.
  __device__ __forceinline__ void MultiplyInMiddle(Scores& keys, Scores& queries, int d) {
    const int band = Band();
    uint32_t of_key[4], of_query[4];
    s.tokens.k.A(of_key, band * kBand, d), s.tokens.q.A(of_query, band * kBand, d);
    const Bf16* const first = Back(Lane() % 8 + Lane() / 16 * 8, d + Lane() / 8 % 2 * 8);
#pragma unroll
    for (int i = 0; i < kBands; ++i) {
      if (i > band) break;
      uint32_t b[4];
      LoadMatrices<false>(b, first + i * kBand * kBackPitch);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        MultiplyAdd<false>(keys[2 * i + j], of_key, b[2 * j], b[2 * j + 1]);
        MultiplyAdd<false>(queries[2 * i + j], of_query, b[2 * j], b[2 * j + 1]);
      }
    }
  }
  // Keys, each divided by what is left since the chunk's middle, where their sums were: of the two pieces of
  // 16 bytes that 8 sums have, so that eight rows of a matrix lie in different banks.
  static constexpr int kBackPitch = 2 * ChannelSums<kD>::kPitch;
  __device__ __forceinline__ Bf16* Back(int token, int channel) const {
    return reinterpret_cast<Bf16*>(s.sums.of) + token * kBackPitch + 2 * channel + token / 4 % 2 * 8;
  }
  // Of a band with itself, 16 channels.
  __device__ __forceinline__ void MultiplyPairs(Scores& keys, Scores& queries, int i, int d) {
#pragma unroll 1
    for (int channel = d; channel < d + 16; ++channel)
#pragma unroll
      for (int j = 0; j < 2; ++j)
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          const int to = i * kBand + ssm::RowOf(n), from = i * kBand + 8 * j + ssm::ColumnOf(n);
          if (from > to) continue;
          const float left = Exp2(*s.sums.At(to, channel) - *s.sums.At(from, channel));
          const float key = __bfloat162float(*s.tokens.k.At(from, channel)) * left;
          keys[2 * i + j][n] += __bfloat162float(*s.tokens.k.At(to, channel)) * key;
          queries[2 * i + j][n] += __bfloat162float(*s.tokens.q.At(to, channel)) * key;
        }
  }

  // Sums of bands; a thread has channels.
  __device__ __forceinline__ void SumBands() {
    for (int channel = threadIdx.x; channel < kD; channel += kThreads) {
      float sum = 0;
#pragma unroll
      for (int i = 0; i < kBands; ++i) {
        s.before[i][channel] = sum;
        sum += *s.sums.At(i * kBand + kBand - 1, channel);
      }
      sum = 0;
#pragma unroll
      for (int i = kBands - 1; i >= 0; --i)
        s.behind[i][channel] = sum += *s.sums.At(i * kBand + kBand - 1, channel);
      const float least = fminf(s.before[kMiddle][channel], s.behind[kMiddle][channel]);
      const bool is_split = IsOfNone(-least > kMostOfHalf);
      if (Lane() % 16 == 0) s.is_split[channel / 16] = is_split;
    }
  }
  __device__ __forceinline__ static float2 Two(const float* of, int channel) {
    return *reinterpret_cast<const float2*>(of + channel);
  }

  // Keys and queries, times what is left of the state before the chunk, and keys, times what is left at its
  // end. A thread has 8 channels.
  __device__ __forceinline__ void WriteTokens() {
    const int channel = threadIdx.x % kPieces * 8;
    if (s.is_split[channel / 16])
      WriteInMiddle(channel);
    else
      WriteByBands(channel);
  }
  static constexpr int kPieces = kD / 8, kMiddle = kBands / 2;
  __device__ __forceinline__ void WriteInMiddle(int channel) {
    constexpr int kNext = kThreads / kPieces;
    static_assert(kBand % kNext == 0);
    float middle[8], before[8], behind[8];  // of the sum up to the middle; what is left there, and from there
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      middle[j] = s.before[kMiddle][channel + j], before[j] = Exp2(middle[j]);
      behind[j] = Exp2(s.behind[kMiddle][channel + j]);
    }
#pragma unroll 1
    for (int band = 0; band < kBands; ++band) {
      float from_middle[8];
#pragma unroll
      for (int j = 0; j < 8; ++j) from_middle[j] = s.before[band][channel + j] - middle[j];
#pragma unroll
      for (int i = 0; i < kBand; i += kNext)
        WriteToken(band * kBand + i + threadIdx.x / kPieces, channel, from_middle, before, behind);
    }
  }
  __device__ __forceinline__ void WriteToken(int token, int channel, const float (&from_middle)[8],
                                             const float (&before)[8], const float (&behind)[8]) {
    Bf16 *const of_key = s.tokens.k.At(token, channel), *const of_query = s.tokens.q.At(token, channel);
    const auto key = Load<8>(of_key), query = Load<8>(of_query);
    const float by_key = s.of_keys[token], by_query = s.of_queries[token] * a.scale;
    const bool goes_on = s.runs.Continues(token), stays = s.runs.AreOne(token, kLast);
    float keys[8], queries[8], back[8], k[8], q[8], left[8];
#pragma unroll
    for (int j = 0; j < 8; j += 4) {
      const auto own = Load<4>(s.sums.At(token, channel + j));
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const int at = j + n;
        const float sum = own[n] + from_middle[at], since = Exp2(sum);
        keys[at] = key[at] * since, queries[at] = query[at] * since, back[at] = key[at] * Exp2(-sum);
        k[at] = goes_on ? keys[at] * (by_key * before[at]) : 0.f;
        q[at] = goes_on ? queries[at] * (by_query * before[at]) : 0.f;
        left[at] = stays ? back[at] * (by_key * behind[at]) : 0.f;
      }
    }
    Store(of_key, Round<Bf16, 8>(keys)), Store(of_query, Round<Bf16, 8>(queries));
    Store(Back(token, channel), Round<Bf16, 8>(back));
    Store(out.tiles.k.At(token, channel), Round<Bf16, 8>(k));
    Store(out.tiles.q.At(token, channel), Round<Bf16, 8>(q));
    Store(out.tiles.left.At(token, channel), Round<Bf16, 8>(left));
  }
  __device__ __forceinline__ void WriteByBands(int channel) {
#pragma unroll 1
    for (int token = threadIdx.x / kPieces; token < kChunk; token += kThreads / kPieces) {
      const int band = token / kBand;
      const uint4 of_key = *reinterpret_cast<const uint4*>(s.tokens.k.At(token, channel));
      const uint4 of_query = *reinterpret_cast<const uint4*>(s.tokens.q.At(token, channel));
      const uint32_t keys[4] = {of_key.x, of_key.y, of_key.z, of_key.w};
      const uint32_t queries[4] = {of_query.x, of_query.y, of_query.z, of_query.w};
      const float by_key = s.of_keys[token], by_query = s.of_queries[token] * a.scale;
      const bool goes_on = s.runs.Continues(token), stays = s.runs.AreOne(token, kLast);
      uint32_t k[4], q[4], left[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int at = channel + 2 * j;
        const float2 key = ssm::Unpack(keys[j]), query = ssm::Unpack(queries[j]), own = s.sums.Two(token, at);
        const float2 before = Two(s.before[band], at), end = Two(s.behind[band], at);
        const float since[2] = {Exp2(before.x + own.x), Exp2(before.y + own.y)};
        const float until[2] = {by_key * Exp2(end.x - own.x), by_key * Exp2(end.y - own.y)};
        k[j] = goes_on ? ssm::Pack(by_key * since[0] * key.x, by_key * since[1] * key.y) : 0;
        q[j] = goes_on ? ssm::Pack(by_query * since[0] * query.x, by_query * since[1] * query.y) : 0;
        left[j] = stays ? ssm::Pack(until[0] * key.x, until[1] * key.y) : 0;
      }
      const auto store = [&](Tokens<kD>& to, const uint32_t (&of)[4]) {
        *reinterpret_cast<uint4*>(to.At(token, channel)) = make_uint4(of[0], of[1], of[2], of[3]);
      };
      store(out.tiles.k, k), store(out.tiles.q, q), store(out.tiles.left, left);
    }
  }

  __device__ __forceinline__ void WriteWeights() {
    ChannelWeights<kD>& weights = out.weights;
    if (threadIdx.x < kD / 2) {
      const float2 all = Two(s.behind[0], 2 * threadIdx.x);
      const bool goes_on = s.runs.Continues(kLast);
      *reinterpret_cast<float2*>(weights.keeps + 2 * threadIdx.x) =
          goes_on ? make_float2(Exp2(all.x), Exp2(all.y)) : make_float2(0, 0);
    }
    if (threadIdx.x >= kChunk) return;
    const int token = threadIdx.x;
    const bool goes_on = s.runs.Continues(token);
    weights.betas[token] = s.betas[token];
    if (token == kLast) weights.several = !s.runs.AreOne(0, kLast);
    if (!goes_on && (token == 0 || s.runs.Continues(token - 1))) weights.continues = token;
    if (goes_on && token == kLast) weights.continues = kChunk;
    if (s.runs.AreOne(token, kLast) && (token == 0 || !s.runs.AreOne(token - 1, kLast))) weights.last = token;
  }

  // The system below its diagonal, and how much is seen, of the warp's band.
  __device__ __forceinline__ void Put(const Scores& keys, const Scores& queries) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int to = Band() * kBand + ssm::RowOf(2 * half);
      const float of_key = s.betas[to] * s.of_keys[to], of_query = a.scale * s.of_queries[to];
#pragma unroll
      for (int i = 0; i < kChunk / 8; ++i) {
        const int from = 8 * i + ssm::ColumnOf(0);
        float below[2] = {}, seen[2] = {};
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const bool is_seen = from + j <= to && s.runs.AreOne(from + j, to);
          const float by = s.of_keys[from + j];
          if (is_seen && from + j < to) below[j] = keys[i][2 * half + j] * by * of_key;
          if (is_seen) seen[j] = queries[i][2 * half + j] * by * of_query;
        }
        *reinterpret_cast<float2*>(s.system.of + to * kPitch + from) = make_float2(below[0], below[1]);
        *reinterpret_cast<uint32_t*>(s.system.seen.At(to, from)) = ssm::Pack(seen[0], seen[1]);
      }
    }
  }

  __device__ __forceinline__ void WritePairs() {
    for (int i = threadIdx.x; i < kChunk * kChunk / 8; i += kThreads) {
      const int to = i / (kChunk / 8), from = i % (kChunk / 8) * 8;
      *reinterpret_cast<uint4*>(out.tiles.inverse.At(to, from)) = LoadInverse(s.system.of, s.runs, to, from);
      *reinterpret_cast<uint4*>(out.tiles.seen.At(to, from)) =
          *reinterpret_cast<const uint4*>(s.system.seen.At(to, from));
    }
  }

  __device__ __forceinline__ void Run() {
    Fetch();
    Lengths();
    SumBands();
    __syncthreads();
    WriteTokens();
    WriteWeights();
    __syncthreads();
    Scores keys = {}, queries = {};
    Multiply(keys, queries);
    __syncthreads();  // none reads the tokens any more
    Put(keys, queries);
    __syncwarp();
    InvertBlock<kRuns>(s.system.of);
    __syncthreads();
    Merge<16>(s.system.of);
    Merge<32>(s.system.of);
    WritePairs();
  }
};

template <int kD, bool kRuns>
__global__ void __launch_bounds__(kThreads, 3)
    te_gated_delta_channel_chunks(const ChunkArgs a, const ChunkPart part, ChannelChunk<kD>* chunks) {
  LetNextStart();
  extern __shared__ uint4 memory[];
  auto& shared = *reinterpret_cast<ChannelShared<kD, kRuns>*>(memory);
  const int head = blockIdx.x % a.h, chunk = part.first_chunk + blockIdx.x / a.h;
  const int64_t row = part.first_row + blockIdx.y;
  ChannelChunk<kD>& out = chunks[part.At(row, chunk, head, a.h)];
  OfChannels<kD, kRuns>{a, shared, out, row, chunk * kChunk, head}.Run();
}

template <int kD, bool kRuns>
Status Run(cudaStream_t stream, const ChunkArgs& a, const ChunkPart& part, void* chunks) {
  const auto kernel = te_gated_delta_channel_chunks<kD, kRuns>;
  constexpr size_t kBytes = sizeof(ChannelShared<kD, kRuns>);
  static_assert(3 * (kBytes + 1024) <= 228 * 1024);
  TE_TRY(ssm::AllowShared(kernel, kBytes));
  const auto of_channels = static_cast<ChannelChunk<kD>*>(chunks);
  const dim3 grid(unsigned(part.There(a.s) * a.h), unsigned(part.rows));
  kernel<<<grid, kThreads, kBytes, stream>>>(a, part, of_channels);
  TE_LAUNCHED();
}

}  // namespace

Status LaunchChannelChunks(cudaStream_t stream, const ChunkArgs& a, const ChunkPart& part, void* chunks) {
  return ssm::DispatchStates(a.d, a.runs,
                             [&]<int kD, bool kRuns>() { return Run<kD, kRuns>(stream, a, part, chunks); });
}

}  // namespace te::delta
