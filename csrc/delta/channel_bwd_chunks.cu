// The gradients of the chunks of a slab where channels have gates, of the states before them and the
// gradients to those behind: a CTA has a chunk of the heads of values that share a key, one after the other,
// and of each first all values, for how much tokens see of each other, and then 64 channels of keys after the
// other.

#include "base/check.h"
#include "base/launch.h"
#include "delta/channel_bwd_bands.cuh"
#include "delta/delta_bwd.cuh"

namespace te::delta {
namespace {

template <int kD, bool kRuns>
struct ChannelGradients : ChannelBands<kRuns> {
  using Base = ChannelBands<kRuns>;
  using Base::Band, Base::Column, Base::Key, Base::Query, Base::s, Base::Side, Base::Token;
  using typename Base::Block;
  static constexpr int kParts = kD / kPart;
  using Columns = float[kSide / 8][4];  // [kBand, kSide]
  using Scores = float[4][4];           // [kBand, 2 * 16]
  const GradArgs& a;
  const int64_t row;
  const int chunk, group;
  Columns dq, dk;  // of a part's channels, of all heads; but for lengths
  int part = 0, head = 0;

  // The blocks of scores that a warp has: the later ones are seen by fewer.
  __device__ __forceinline__ static int From(int i) { return 2 * i + Side(); }
  __device__ __forceinline__ int Values() const { return a.again.e; }
  __device__ __forceinline__ int First() const { return chunk * kChunk; }
  __device__ __forceinline__ int Rows() const { return a.of.s - First(); }
  __device__ __forceinline__ int64_t OfHead() const { return (row * a.of.s + First()) * a.of.h + head; }
  __device__ __forceinline__ int64_t OfKey() const {
    return ((row * a.of.s + First()) * a.of.g + group) * a.of.d;
  }
  __device__ __forceinline__ const ChannelWeights<kD>& Weights() const {
    return static_cast<const ChannelChunk<kD>*>(a.again.of_channels)[a.part.At(row, chunk, head, a.of.h)]
        .weights;
  }

  // 1 over the lengths: two threads have a query, or a key.
  __device__ __forceinline__ void Lengths() {
    const int token = threadIdx.x / 4, half = threadIdx.x % 2;
    const bool of_key = threadIdx.x / 2 % 2;
    const Bf16* const from = (of_key ? a.of.k : a.of.q) + OfKey() + int64_t(token) * a.of.g * a.of.d;
    float sum = 0;
    if (token < Rows())
      for (int i = 8 * half; i < a.of.d; i += 16) {
        const auto eight = Load<8>(from + i);
#pragma unroll
        for (int j = 0; j < 8; ++j) sum += eight[j] * eight[j];
      }
    sum = WarpSum<2>(sum);
    if (half == 0)
      (of_key ? s.key_lengths : s.query_lengths)[token] = a.of.normalize ? rsqrtf(sum + kLengthEpsilon) : 1.f;
  }

  __device__ __forceinline__ void FetchValues(OfValues& to, int first) {
    const int64_t at = OfHead() * Values() + first, written = a.Written(row, chunk, head, first);
    const int64_t stride = int64_t(a.of.h) * Values();
    const int values = Values() - first;
    to.dy.Fetch(a.back.v + at, stride, Rows(), values);
    to.written.Fetch(a.written + written, stride, Rows(), values);
    to.alone.Fetch(a.gradients_written + written, stride, Rows(), values);
  }
  __device__ __forceinline__ static void Arrive() {
    CommitPrefetch();
    WaitForPrefetch<0>();
    __syncthreads();
  }

  // Of all values: how the loss depends on what tokens see of each other, on values, and on betas through
  // these.
  __device__ __forceinline__ float OfAllValues() {
    Scores queries = {}, keys = {};
    float along = 0;  // of the token that four threads share: v times the gradient to what it writes
#pragma unroll 1
    for (int first = 0; first < Values(); first += kSlab) {
      FetchValues(s.values, first);
      Arrive();
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (From(i) > Band()) continue;
#pragma unroll 2
        for (int k = 0; k < kSlab; k += 16) {
          uint32_t dy[4], alone[4], b[4];
          s.values.dy.A(dy, Band() * kBand, k), s.values.alone.A(alone, Band() * kBand, k);
          s.values.written.TransposedB(b, From(i) * kBand, k);
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            MultiplyAdd<false>(queries[2 * i + j], dy, b[2 * j], b[2 * j + 1]);
            MultiplyAdd<false>(keys[2 * i + j], alone, b[2 * j], b[2 * j + 1]);
          }
        }
      }
      WriteValues(first, along);
      __syncthreads();  // none reads them any more
    }
    PutScores(queries, keys);
    return WarpSum<4>(along);
  }
  // dv, beta times the gradient to what a token would write, and that times v. Four threads share a token.
  __device__ __forceinline__ void WriteValues(int first, float& along) {
    const int token = threadIdx.x / 4;
    if (token >= Rows()) return;
#pragma unroll
    for (int j = 0; j < kSlab / 32; ++j) {
      const int column = threadIdx.x % 4 * 8 + 32 * j;
      if (first + column >= Values()) continue;
      const int64_t at = (OfHead() + int64_t(token) * a.of.h) * Values() + first + column;
      const auto v = Load<8>(a.again.v + at), of = Load<8>(s.values.alone.At(token, column));
      float dv[8];
#pragma unroll
      for (int n = 0; n < 8; ++n) along += of[n] * v[n], dv[n] = s.betas[token] * of[n];
      if (part == 0) Store(a.dv + at, Round<Bf16, 8>(dv));
    }
  }
  __device__ __forceinline__ void PutScores(const Scores& queries, const Scores& keys) {
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int tile = 0; tile < 2; ++tile)
#pragma unroll
        for (int n = 0; n < 4; n += 2) {
          const int to = Token(n), from = From(i) * kBand + 8 * tile + ssm::ColumnOf(0);
          float query[2] = {}, key[2] = {};
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            const float each = a.of.scale * queries[2 * i + tile][n + j];
            // What a token sees of itself does not depend on gates.
            if (from + j == to) s.own[to] = each;
            if (from + j >= to || !s.runs.AreOne(from + j, to)) continue;
            query[j] = each, key[j] = keys[2 * i + tile][n + j];
          }
          *reinterpret_cast<uint32_t*>(s.of_queries.At(to, from)) = ssm::Pack(query[0], query[1]);
          *reinterpret_cast<uint32_t*>(s.of_keys.At(to, from)) = ssm::Pack(key[0], key[1]);
        }
  }

  // What queries read of the state, keys, and what is left of what tokens write, [kBand, kSide] each; and the
  // product of the state before the chunk and its gradient behind it.
  __device__ __forceinline__ void OfState(Columns& reads, Columns& says, Columns& leaves) {
    float product = 0;
    const int channel = threadIdx.x % kPart, quarter = threadIdx.x / kPart;
#pragma unroll 1
    for (int first = 0; first < Values(); first += kSlab) {
      const int64_t state = a.State(row, chunk, head) + int64_t(first) * a.of.d + part * kPart;
      FetchValues(s.states.values, first);
      s.states.state.Fetch(a.states + state, a.of.d, Values() - first, a.of.d - part * kPart);
      s.states.gradient.Fetch(a.gradients + state, a.of.d, Values() - first, a.of.d - part * kPart);
      Arrive();
      const OfValues& values = s.states.values;
#pragma unroll 1
      for (int k = 0; k < kSlab; k += 16) {
        uint32_t dy[4], alone[4], written[4], b[4];
        auto& of = const_cast<OfValues&>(values);
        of.dy.A(dy, Band() * kBand, k), of.alone.A(alone, Band() * kBand, k);
        of.written.A(written, Band() * kBand, k);
#pragma unroll
        for (int i = 0; i < kSide / 16; ++i) {
          s.states.state.B(b, k, Column(i));
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            MultiplyAdd<false>(reads[2 * i + j], dy, b[2 * j], b[2 * j + 1]);
            MultiplyAdd<false>(says[2 * i + j], alone, b[2 * j], b[2 * j + 1]);
          }
          s.states.gradient.B(b, k, Column(i));
#pragma unroll
          for (int j = 0; j < 2; ++j) MultiplyAdd<false>(leaves[2 * i + j], written, b[2 * j], b[2 * j + 1]);
        }
      }
#pragma unroll 4
      for (int i = quarter; i < kSlab; i += kQuarters)
        product += __bfloat162float(*s.states.state.At(i, channel)) *
                   __bfloat162float(*s.states.gradient.At(i, channel));
      __syncthreads();  // none reads them any more
    }
    s.products[quarter][channel] = product;
  }

  // All that the gradients of 64 channels follow from. `ends` and `leaves` then are where OfSums has them.
  __device__ __forceinline__ void OfChannels() {
    Columns ends = {}, says = {}, leaves = {};
    float says_of[2] = {};
    OfState(ends, says, leaves);
    Through(ends, says, leaves, says_of);
    Base::SetBands();
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kSide / 16; ++i) {
      Block queries = {}, down = {}, up = {};
      const int column = Column(i);
      const bool splits = s.sums.Splits(Band(), column);
      Base::Down(column, splits, queries, down), Base::Up(column, splits, up);
      Base::EachTwo(column, [&](int token, int channel, int j, int n) {
        const float2 key = Key(token, channel), query = Query(token, channel);
        const float beta = s.betas[token], own = s.own[token];
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          const float of_key = m ? key.y : key.x, of_query = m ? query.y : query.x;
          const float to_query = queries[j][n + m], said = down[j][n + m], later = up[j][n + m];
          says_of[n / 2] += of_key * said;
          ends[2 * i + j][n + m] += of_query * to_query - of_key * (beta * said + later);
          dq[2 * i + j][n + m] += to_query + own * of_key;
          dk[2 * i + j][n + m] += later - beta * said + own * of_query;
        }
      });
    }
    PutRows(s.says[Side()], says_of);
    __syncthreads();  // none reads keys and queries by bands any more
#pragma unroll
    for (int j = 0; j < kSide / 8; ++j)
#pragma unroll
      for (int n = 0; n < 4; n += 2) {
        const int at = Token(n) * OfSums::kPitch + Side() * kSide + 8 * j + ssm::ColumnOf(0);
        *reinterpret_cast<float2*>(s.ends.ends + at) = make_float2(ends[j][n], ends[j][n + 1]);
        *reinterpret_cast<float2*>(s.ends.leaves + at) = make_float2(leaves[j][n], leaves[j][n + 1]);
      }
  }
  // The gradients by way of states: from what queries and keys read of the one before the chunk, which `ends`
  // and `says` have of it, and what is left of what tokens write, `leaves`. These become what OfSums says.
  __device__ __forceinline__ void Through(Columns& ends, const Columns& says, Columns& leaves,
                                          float (&says_of)[2]) {
#pragma unroll
    for (int j = 0; j < kSide / 8; ++j) {
      const int first = Side() * kSide + 8 * j + ssm::ColumnOf(0);
      const float2 before = s.sums.Bands(0, Band(), first), behind = s.sums.Bands(Band(), kBands, first);
#pragma unroll
      for (int n = 0; n < 4; n += 2) {
        const int token = Token(n);
        const float2 key = Key(token, first), query = Query(token, first), own = s.sums.Two(token, first);
        const float2 since = Base::ExpOf(before.x + own.x, before.y + own.y);
        const float2 until = Base::ExpOf(behind.x - own.x, behind.y - own.y);
        const bool goes_on = s.runs.Continues(token), stays = s.runs.AreOne(token, kLast);
        const float beta = s.betas[token];
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          float &end = ends[j][n + m], &leaf = leaves[j][n + m];
          const float of_key = m ? key.y : key.x, left = m ? since.y : since.x;
          const float to_query = goes_on ? a.of.scale * left * end : 0.f;
          const float said = goes_on ? left * says[j][n + m] : 0.f;
          const float of_left = stays ? (m ? until.y : until.x) * leaf : 0.f;
          says_of[n / 2] += of_key * said;
          end = (m ? query.y : query.x) * to_query - of_key * beta * said, leaf = of_key * of_left;
          dq[j][n + m] += to_query, dk[j][n + m] += of_left - beta * said;
        }
      }
    }
  }
  // A value of each of the thread's two rows, summed over the four threads that share them.
  __device__ __forceinline__ static void PutRows(float (&place)[kChunk], const float (&of)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = WarpSum<4>(of[half]);
      if (Lane() % 4 == 0) place[Token(2 * half)] = sum;
    }
  }

  // A gate is of all that goes past its token: from tokens before it, or the state, to it and later ones, or
  // the state behind the chunk. Of two tokens that is what is summed to the later less what is summed from
  // the earlier. Later runs are left out: their sums are 0 but for roundings. A thread has 16 tokens of a
  // channel.
  __device__ __forceinline__ void WriteGates() {
    const int channel = threadIdx.x % kPart, quarter = threadIdx.x / kPart, first = quarter * kBand;
    float behind = 0, before = 0;
#pragma unroll
    for (int i = 0; i < kBand; ++i) {
      const int at = (first + i) * OfSums::kPitch + channel;
      if (s.runs.AreOne(first, first + i)) behind += s.ends.ends[at];
      before += s.ends.leaves[at];
    }
    s.parts[0][quarter][channel] = behind, s.parts[1][quarter][channel] = before;
    __syncthreads();
    const int of_all = part * kPart + channel;
    if (of_all < a.of.d) {
      float product = 0, sums[kBand];
      behind = before = 0;
#pragma unroll
      for (int i = 0; i < kQuarters; ++i) {
        product += s.products[i][channel];
        if (i > quarter && s.runs.AreOne(first + kBand - 1, i * kBand)) behind += s.parts[0][i][channel];
        if (i < quarter) before += s.parts[1][i][channel];
      }
      const float through = Weighed(Weights().keeps[of_all], product);
#pragma unroll
      for (int i = kBand; i-- > 0;) {
        if (i + 1 < kBand && !s.runs.AreOne(first + i, first + i + 1)) behind = 0;
        sums[i] = behind += s.ends.ends[(first + i) * OfSums::kPitch + channel];
      }
#pragma unroll
      for (int i = 0; i < kBand; ++i) {
        const int64_t at = (OfHead() + int64_t(first + i) * a.of.h) * a.of.d + of_all;
        if (first + i < Rows()) a.dgate[at] = sums[i] + before + through;
        before += s.ends.leaves[(first + i) * OfSums::kPitch + channel];
      }
    }
    __syncthreads();  // none reads them any more
  }

  __device__ __forceinline__ void SetPart() {
    const int64_t at = OfKey() + part * kPart, stride = int64_t(a.of.g) * a.of.d;
    const int channels = a.of.d - part * kPart;
    s.q.Fetch(a.of.q + at, stride, Rows(), channels), s.k.Fetch(a.of.k + at, stride, Rows(), channels);
    CommitPrefetch();
    s.sums.template Set<kGradThreads>(a.of.gate + OfHead() * a.of.d + part * kPart, int64_t(a.of.h) * a.of.d,
                                      Rows(), channels);
  }

  // Of 64 channels of keys. A head's scores are still there, where it is the only one.
  __device__ __forceinline__ void RunHead(bool has_scores) {
    if (threadIdx.x < kChunk) s.betas[threadIdx.x] = Weights().betas[threadIdx.x];
    __syncthreads();
    const float of_v = has_scores ? 0.f : OfAllValues();
    SetPart();
    OfChannels();
    __syncthreads();
    WriteGates();
    const int token = threadIdx.x / 4;
    if (threadIdx.x % 4 > 0 || token >= Rows()) return;
    float& to = a.dbeta[OfHead() + int64_t(token) * a.of.h];
    to = (part == 0 ? of_v : to) - s.says[0][token] - s.says[1][token];
  }

  __device__ __forceinline__ void Run() {
    const int heads = a.of.h / a.of.g;
    float along_queries[2] = {}, along_keys[2] = {};
    s.runs.Set(a.of, row, First());
    Lengths();
#pragma unroll 1
    for (part = 0; part < kParts; ++part) {
#pragma unroll
      for (int j = 0; j < kSide / 8; ++j)
#pragma unroll
        for (int n = 0; n < 4; ++n) dq[j][n] = dk[j][n] = 0;
#pragma unroll 1
      for (int i = 0; i < heads; ++i) {
        head = group * heads + i;
        RunHead(part > 0 && heads == 1);
      }
      PutKeys(a.dq, s.q, dq, s.query_lengths, along_queries),
          PutKeys(a.dk, s.k, dk, s.key_lengths, along_keys);
    }
    if (!a.of.normalize) return;
    PutRows(s.along[0][Side()], along_queries), PutRows(s.along[1][Side()], along_keys);
    __syncthreads();
    TakeAlong(a.dq, a.of.q, s.along[0], s.query_lengths), TakeAlong(a.dk, a.of.k, s.along[1], s.key_lengths);
  }
  // A part's channels, times 1 over lengths; and what of them lies along the tokens.
  __device__ __forceinline__ void PutKeys(Bf16* to, Tokens<kPart>& tokens, const Columns& of,
                                          const float* lengths, float (&along)[2]) const {
#pragma unroll
    for (int n = 0; n < 4; n += 2) {
      const int token = Token(n);
      const float length = lengths[token];
#pragma unroll
      for (int j = 0; j < kSide / 8; ++j) {
        const int column = Side() * kSide + 8 * j + ssm::ColumnOf(0), channel = part * kPart + column;
        const float two[2] = {length * of[j][n], length * of[j][n + 1]};
        const float2 own = ssm::Unpack(*reinterpret_cast<const uint32_t*>(tokens.At(token, column)));
        along[n / 2] += two[0] * own.x + two[1] * own.y;
        if (token < Rows() && channel < a.of.d)
          *reinterpret_cast<uint32_t*>(to + OfKey() + int64_t(token) * a.of.g * a.of.d + channel) =
              ssm::Pack(two[0], two[1]);
      }
    }
  }
  // What a token's length takes away of the gradient, where it is divided by it: what lies along the token.
  __device__ __forceinline__ void TakeAlong(Bf16* of, const Bf16* tokens,
                                            const float (&along)[kSides][kChunk],
                                            const float* lengths) const {
    const int pieces = a.of.d / 8;
    for (int i = threadIdx.x; i < min(Rows(), kChunk) * pieces; i += kGradThreads) {
      const int token = i / pieces;
      const int64_t at = OfKey() + int64_t(token) * a.of.g * a.of.d + i % pieces * 8;
      const float less = lengths[token] * lengths[token] * (along[0][token] + along[1][token]);
      const auto given = Load<8>(of + at), own = Load<8>(tokens + at);
      float out[8];
#pragma unroll
      for (int j = 0; j < 8; ++j) out[j] = given[j] - less * own[j];
      Store(of + at, Round<Bf16, 8>(out));
    }
  }
};

template <int kD, bool kRuns>
__global__ void __launch_bounds__(kGradThreads, 2) te_gated_delta_channel_bwd_chunks(const GradArgs a) {
  extern __shared__ uint4 memory[];
  auto& shared = *reinterpret_cast<ChannelGradShared<kRuns>*>(memory);
  LetNextStart();
  AwaitPrevious();
  const int chunk = a.part.first_chunk + int(blockIdx.y);
  const int64_t row = a.part.first_row + int(blockIdx.z);
  ChannelGradients<kD, kRuns>{{shared}, a, row, chunk, int(blockIdx.x)}.Run();
}

template <int kD, bool kRuns>
Status Run(cudaStream_t stream, const GradArgs& a, bool early) {
  const auto kernel = te_gated_delta_channel_bwd_chunks<kD, kRuns>;
  constexpr size_t kBytes = sizeof(ChannelGradShared<kRuns>);
  static_assert(kBytes <= 99 * 1024);
  TE_TRY(ssm::AllowShared(kernel, kBytes));
  const dim3 grid(a.of.g, a.part.There(a.of.s), a.part.rows);
  return LaunchBehind(stream, early, kernel, grid, kGradThreads, kBytes, a);
}

}  // namespace

Status RunChannelGradients(cudaStream_t stream, const GradArgs& a, bool early) {
  return ssm::DispatchStates(a.of.d, a.of.runs,
                             [&]<int kD, bool kRuns>() { return Run<kD, kRuns>(stream, a, early); });
}

}  // namespace te::delta
